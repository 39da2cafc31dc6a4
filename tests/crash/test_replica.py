"""A master and its Apache RocketMQ slave under load, killed and frozen; a broker takes over.

The history of each round is judged by `tests.support.replica_rounds.History`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import replica_rounds
from tests.support.replica_rounds import FAULTS, Fault, Pair, name_of, repair, run_round, shown
from tests.support.seeds import campaign_seconds, printed_seed


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    made.slave.start()
    yield made
    made.close()


def _play(pair: Pair, faults: list[Fault], chance: random.Random) -> None:
    for fault in faults:
        history = asyncio.run(run_round(pair, fault, chance))
        print(name_of(fault), shown(history))
        assert history.acknowledged
        assert not history.faults()
        asyncio.run(repair(pair, fault))


@pytest.mark.campaign
def test_a_takeover_loses_nothing_and_reverses_nothing(pair: Pair) -> None:
    """Whoever died first: the master, the slave, or both at once."""
    faults: list[Fault] = [
        replica_rounds.both,
        replica_rounds.master_then_slave,
        replica_rounds.slave_then_master,
    ]

    _play(pair, faults, random.Random(printed_seed()))


def test_a_replaced_master_acknowledges_nothing(pair: Pair) -> None:
    """It stood still while the slave took over, as behind a broken network (apache/rocketmq#7017).

    What it acknowledges after that, the successor has.
    """
    _play(pair, [replica_rounds.replaced_master], random.Random(printed_seed()))


@pytest.mark.campaign
def test_a_slave_that_comes_back_has_all_before_it_counts(pair: Pair) -> None:
    """As when a member joins (apache/rocketmq#5663), and after both were killed (#7689).

    What the successor stores gets queue offsets of its own: nothing hides behind another message.
    """
    faults: list[Fault] = [replica_rounds.wiped_slave, replica_rounds.restarted_master]

    _play(pair, faults, random.Random(printed_seed()))


@pytest.mark.campaign
def test_the_rounds_find_what_a_master_loses_that_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would prove nothing: the same without `minInSyncReplicas=2` loses messages."""
    pair = Pair(tmp_path, minInSyncReplicas=1)
    try:
        pair.slave.start()
        asyncio.run(pair.in_sync())
        monkeypatch.setattr(replica_rounds, "PATIENCE_S", 20.0)  # what is lost never comes
        chance = random.Random(printed_seed())
        history = asyncio.run(run_round(pair, replica_rounds.slave_then_master, chance))
    finally:
        pair.close()

    assert {"lost", "taken back"} & history.faults().keys()


@pytest.mark.campaign
def test_many_rounds(tmp_path: Path) -> None:
    """All faults in a random order, until the campaign ends."""
    chance = random.Random(printed_seed())
    end = time.monotonic() + campaign_seconds()
    number = 0
    while time.monotonic() < end:
        number += 1
        pair = Pair(tmp_path / str(number))
        try:
            pair.slave.start()
            _play(pair, chance.sample(FAULTS, len(FAULTS)), chance)
        finally:
            pair.close()
