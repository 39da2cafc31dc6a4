"""Seeded runs of the whole system: whatever fails, nothing is lost, decided twice or undone.

By default some dozen fixed seeds; as a campaign, fresh ones for ``HALFMQ_CAMPAIGN_SECONDS`` (60). A
failing seed is replayed by the command that is printed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.python import python

from .mutations import MUTATIONS, first_violation, mistakes_in, mutated, violations_of
from .world import World, run

ROOT = Path(__file__).parents[2]
SEEDS = (*range(28), 38, 51)
"""Of the default selection: together they see every fault and both flush modes. What a seed comes
across changes with the broker; the last two are there for their i/o error."""


def _check(seed: int) -> World:
    world = run(seed)
    if world.records.violations:
        found = "\n".join(world.records.violations[:10])
        pytest.fail(f"python -m tests.simulation --seeds {seed} --trace\n{found}")
    return world


def test_no_seed_loses_doubles_or_undoes_a_transaction() -> None:
    """Broker, clients, network and disk fail in many ways; the promises hold."""
    print(f"seeds={SEEDS}")
    worlds = [_check(seed) for seed in SEEDS]

    events = Counter[str]()
    for world in worlds:
        events += world.records.events
    print(f"steps={sum(world.loop.steps for world in worlds)} events={dict(events)}")
    assert {
        "power cut",
        "killed",
        "restart",
        "cut",
        "check",
        "local failure",
        "recall",
    } <= events.keys()
    assert {"clock step", "cancelled", "failed after commit", "cold read"} <= events.keys()
    assert {"sync failed", "i/o error", "no space", "batch", "log file deleted"} <= events.keys()
    assert {"recall", "pop acknowledged", "old handle"} <= events.keys()
    assert sum(sum(world.records.delivered.values()) for world in worlds) > 200


def test_a_thread_of_another_test_may_sleep() -> None:
    """Spark leaves one in the process of its tests; only the event loop must not sleep."""
    over, slept = threading.Event(), Counter[bool]()

    def wait() -> None:
        while not over.is_set():
            time.sleep(0.0001)
            slept[time.sleep is not sleep] += 1

    sleep = time.sleep
    other = threading.Thread(target=wait)
    other.start()
    try:
        _check(1)
        assert other.is_alive()
    finally:
        over.set()
        other.join()
    assert slept[True]


def test_a_seed_replays_exactly() -> None:
    """Two processes with the same seed have the same events, byte for byte."""

    def traced(seed: int) -> str:
        done = python("-m", "tests.simulation", "--seeds", seed, "--trace", cwd=ROOT)
        assert "digest" in done.stdout, done.stderr
        return done.stdout

    seed = random.randrange(1 << 32)
    print(f"seed={seed}")

    first, again = traced(seed), traced(seed)

    assert len(first.splitlines()) > 300
    assert first == again


QUICK = {
    *("sync", "tail", "undecided", "exception", "repeated", "forged", "checkpoint", "flush"),
    *("pop-acks", "pop-handle"),
}
"""Mutations that are noticed by one of the first seeds."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.campaign) for name in MUTATIONS],
)
def test_a_missing_protection_is_found(name: str) -> None:
    """Passing seeds prove something: they fail if one of these is removed."""
    found = first_violation(name)

    print(found)
    assert found.violation is not None


def test_every_mutation_fits_the_code() -> None:
    """Otherwise its seeds would fail, or pass, for a reason that proves nothing."""
    for name, mutation in MUTATIONS.items():
        with mutated(name):
            mistakes_in(name, violations_of(mutation.first_seed))


@pytest.mark.campaign
def test_fresh_seeds() -> None:
    first = int(os.environ.get("HALFMQ_SEED") or random.randrange(1 << 32))
    end = time.monotonic() + float(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "60"))
    seed = first
    events = Counter[str]()
    while time.monotonic() < end:
        events += _check(seed).records.events
        seed += 1
    print(f"seeds={first}..{seed - 1} violations=0 events={dict(events)}")
