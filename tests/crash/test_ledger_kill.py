"""`kill -9` of broker and producers over an SQLite ledger: a row is there iff its message is.

Real processes, real sockets, real files. By default a few rounds; as a campaign as many as fit into
`HALFMQ_CAMPAIGN_SECONDS` (60). The seed of each run is printed and can be set by `HALFMQ_SEED`; it
determines which processes are killed and what the local transactions do, not the exact moments.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import Consumer, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support import ledger_producer
from tests.support.ledger_database import LedgerDatabase
from tests.support.ledger_log import LogTruth, read_log
from tests.support.ledger_producer import GROUP, TOPICS, client_config
from tests.support.patience import PATIENCE_S
from tests.support.seeds import campaign_seconds, printed_seed

ROOT: Final = Path(__file__).parents[2]
PRODUCERS: Final = 3
ROUND_SECONDS: Final = (0.1, 1.0)
"""Time between two rounds of kills: from before a producer has started until after many checks."""
CAMPAIGN_ROUNDS: Final = 20
"""Rounds on one store, so that a campaign needs little disk."""
SETTINGS: Final = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxMessageSize": 65_536,
    "transactionTimeOut": 400,
    "transactionCheckInterval": 400,
    "transactionCheckMax": 1_000_000,  # killed producers answer few checks
}

BROKER: Final = "broker"
VICTIMS: Final = (
    (BROKER,),
    ("0",),
    ("1",),
    (BROKER, "0"),
    (BROKER, "1", "2"),
    ("0", "1", "2"),
    (BROKER, "0", "1", "2"),
)


@dataclass
class Campaign:
    """Counts of one run, and the messages that the consumer got."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    deaths: int = 0  # producers that ended themselves
    consumed: Counter[str] = field(default_factory=Counter)
    inbox: set[tuple[str, str | None]] = field(default_factory=set)  # body and id of its half
    committed: int = 0
    fenced: int = 0
    halves: int = 0

    def __str__(self) -> str:
        return (
            f"rounds={self.rounds} broker_kills={self.kills[BROKER]} "
            f"producer_kills={self.kills.total() - self.kills[BROKER]} suicides={self.deaths} "
            f"halves={self.halves} committed={self.committed} fenced={self.fenced} "
            f"deliveries={self.consumed.total()}"
        )


class Producers:
    """The producer processes; each is killed and started again."""

    def __init__(self, broker: BrokerProcess, ledger: Path, chance: random.Random) -> None:
        self._broker, self._ledger, self._chance = broker, ledger, chance
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        self._log = (broker.directory / "producers.log").open("ab")

    def start(self) -> int:
        """Start those that are not running; return how many had ended by themselves."""
        ended = [key for key, process in self._processes.items() if process.poll() is not None]
        for key in ended:
            process = self._processes.pop(key)
            assert process.returncode == -9, (self._broker.directory / "producers.log").read_text()
        for number in range(PRODUCERS):
            if str(number) not in self._processes:
                self._processes[str(number)] = self._new(number)
        return len(ended)

    def _new(self, number: int) -> subprocess.Popen[bytes]:
        self._started += 1
        name = f"p{number}-{self._started}"
        seed = self._chance.randrange(1 << 32)
        arguments = [self._broker.address, str(self._ledger), name, str(seed)]
        command = [sys.executable, "-m", ledger_producer.__name__, *arguments]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stderr=self._log, cwd=ROOT
        )

    def kill(self, key: str) -> None:
        process = self._processes.pop(key)
        process.kill()
        assert process.wait() == -9, (self._broker.directory / "producers.log").read_text()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._log.close()


async def _consume(campaign: Campaign, broker: BrokerProcess) -> None:
    """Record every delivery, over all restarts of the broker, until cancelled."""
    config = client_config(broker.address)
    async with Consumer(
        "ledger-readers", dict.fromkeys(TOPICS, "*"), start_from="first", config=config
    ) as everything:
        async for message in everything:
            campaign.consumed[message.body.decode()] += 1
            campaign.inbox.add((message.body.decode(), message.half_message_id))
            await message.ack()


async def _kill_in_rounds(
    campaign: Campaign,
    broker: BrokerProcess,
    producers: Producers,
    rounds: int,
    chance: random.Random,
) -> None:
    for _ in range(rounds):
        campaign.deaths += producers.start()
        await asyncio.sleep(chance.uniform(*ROUND_SECONDS))
        for victim in chance.choice(VICTIMS):
            campaign.kills[victim] += 1
            if victim == BROKER:
                await asyncio.to_thread(broker.kill)
            else:
                campaign.deaths += producers.start()
                producers.kill(victim)
        campaign.rounds += 1
        if not broker.running:
            await asyncio.to_thread(broker.start)


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def _run(
    campaign: Campaign, broker: BrokerProcess, path: Path, rounds: int, chance: random.Random
) -> None:
    """Kill in rounds; then let one more producer answer all checks, and the consumer finish."""
    ledger = LedgerDatabase(path)
    producers = Producers(broker, path, chance)
    consuming = asyncio.create_task(_consume(campaign, broker))
    try:
        await _kill_in_rounds(campaign, broker, producers, rounds, chance)
        producers.close()
        last = TransactionProducer(
            GROUP, checker=ledger.checker(), config=client_config(broker.address)
        )
        async with last:
            store = broker.directory / "store"
            await _until(lambda: not read_log(store).undecided, "a transaction is not decided")
        wanted = _bodies(ledger)
        await _until(lambda: wanted <= campaign.consumed.keys(), "a message is missing")
    finally:
        producers.close()
        consuming.cancel()
        await asyncio.wait([consuming])
        ledger.close()


def _bodies(ledger: LedgerDatabase) -> set[str]:
    return {
        f"{name}/{index}"
        for name, messages in ledger.committed.items()
        for index in range(messages)
    }


def _check(tmp_path: Path, rounds: int, chance: random.Random) -> Campaign:
    campaign = Campaign()
    path = tmp_path / "ledger.db"
    tmp_path.mkdir(exist_ok=True)
    with broker_process(tmp_path / "broker", **SETTINGS) as broker:
        asyncio.run(_run(campaign, broker, path, rounds, chance))
        assert broker.stop() == 0
    truth = read_log(tmp_path / "broker" / "store")
    ledger = LedgerDatabase(path)
    _compare(campaign, ledger, truth)
    ledger.close()
    return campaign


def _compare(campaign: Campaign, ledger: LedgerDatabase, truth: LogTruth) -> None:
    """Check that exactly the messages of committed rows were consumed, and each half decided once.

    A prepare that is sent again with the same key must not be a second transaction, and a message
    that is delivered again must have the same id.
    """
    campaign.committed, campaign.fenced = len(ledger.committed), ledger.fenced
    campaign.halves = len(truth.halves)
    print(campaign)
    assert ledger.violations == []
    assert campaign.consumed.keys() == _bodies(ledger)
    assert truth.unlinked == []
    assert truth.undecided == []
    assert truth.decided_twice == []
    assert truth.keys_twice == []
    assert campaign.inbox == {
        (truth.halves[half].body.decode(), truth.halves[half].msg_id) for half in truth.finals
    }


def test_a_row_is_in_the_ledger_iff_its_message_is_consumed(tmp_path: Path) -> None:
    """Also if broker and producers are killed at random moments; and it is decided once."""
    campaign = _check(tmp_path / "0", 5, random.Random(printed_seed()))

    assert campaign.halves > campaign.committed > 0


@pytest.mark.campaign
def test_many_kills_leave_ledger_and_messages_equal(tmp_path: Path) -> None:
    """The same until the campaign ends, with a new store after every few rounds."""
    chance = random.Random(printed_seed())
    end = time.monotonic() + campaign_seconds()
    rounds = 0
    while time.monotonic() < end:
        directory = tmp_path / str(rounds)
        rounds += _check(directory, CAMPAIGN_ROUNDS, chance).rounds
        shutil.rmtree(directory)  # log files are reserved on disk at full size
    print(f"rounds={rounds} unequal=0")
