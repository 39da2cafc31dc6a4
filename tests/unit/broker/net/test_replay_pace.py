"""Consumers far behind wait for their turn while messages are being stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from halfmq.broker.limits.kept import REPLAYED_PULL_BYTES
from halfmq.broker.net.replay_pace import (
    LAG_LARGE,
    LOOP_SHARE,
    QUIET_S,
    SLICE_S,
    SLICE_S_MAX,
    ReplayPace,
)
from tests.support.broker_doubles import as_store

WAITING_MAX = 10_000
SIZE = REPLAYED_PULL_BYTES.most // WAITING_MAX
CHEAP_S = SLICE_S / 100  # an answer that takes a hundredth of a slice


class Log:
    """A log that grows when the test says so."""

    readable_offset = durable_offset = write_offset = 1 << 40

    def request_flush(self) -> None:
        """Nothing."""


class Slices:
    """A loop that ends a slice when the test says so."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def call_later(self, delay: float, call: Callable[[], None]) -> Mock:
        assert delay == SLICE_S
        assert self.call is None, "one slice at a time"
        self.call = call
        return Mock()

    def end(self) -> None:
        call, self.call = self.call, None
        assert call is not None
        call()


class Replays:
    """Pulls from the beginning of the log, and which of them were answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.slices = Log(), Slices()
        self.now = 0.0
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.slices)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.pace = ReplayPace(as_store(self.log))
        self.answer_s = CHEAP_S
        self.answered: list[int] = []
        self.asked = 0

    def ask(self, count: int = 1, *, behind: int = LAG_LARGE) -> None:
        for number in range(self.asked, self.asked + count):
            serve = self._serve(number)
            is_replay = self.pace.is_replay(self.log.write_offset - behind)
            if not is_replay or self.pace.admits(serve, size=SIZE):
                serve()
        self.asked += count

    def _serve(self, number: int) -> Callable[[], None]:
        def serve() -> None:
            self.now += self.answer_s
            self.answered.append(number)

        return serve

    def end_slice(self, *, stored: bool) -> None:
        self.log.write_offset += stored
        self.now += SLICE_S
        self.slices.end()

    def be_quiet(self) -> None:
        """Let enough time pass without replays and messages to end the pacing."""
        self.end_slice(stored=False)
        self.now += QUIET_S
        self.end_slice(stored=False)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


@pytest.fixture
def busy(replays: Replays) -> Replays:
    """Replays while messages are stored; the first was answered before anybody knew."""
    replays.ask()
    replays.end_slice(stored=True)
    return replays


@pytest.mark.parametrize("answer_s", [CHEAP_S, SLICE_S / 20, 3 * SLICE_S])
def test_replays_get_a_share_of_the_loop_while_messages_are_stored(
    busy: Replays, answer_s: float
) -> None:
    """However long an answer takes: it may exceed the share, and later ones wait for that."""
    busy.answer_s = answer_s
    busy.ask(WAITING_MAX)
    start = busy.now

    for _ in range(500):
        busy.end_slice(stored=True)

    spent = answer_s * (len(busy.answered) - 1)
    total = busy.now - start
    assert LOOP_SHARE * total - answer_s <= spent <= LOOP_SHARE * total + answer_s
    assert busy.answered == list(range(len(busy.answered)))


def test_a_new_pull_waits_after_earlier_ones(busy: Replays) -> None:
    """Otherwise frequent pulls would overtake waiting ones."""
    busy.ask(20)
    busy.end_slice(stored=True)
    before = len(busy.answered)
    busy.ask(5)
    assert len(busy.answered) == before < 21

    for _ in range(2):
        busy.end_slice(stored=True)

    assert busy.answered == list(range(26))


def test_the_time_of_answers_from_disk_counts(busy: Replays) -> None:
    """A cold pull occupies the loop twice: before and after the read."""

    def send() -> None:
        busy.now += SLICE_S

    busy.pace.spend(send)
    busy.ask(100)
    for _ in range(6):
        busy.end_slice(stored=True)
    assert busy.answered == [0]

    for _ in range(4):
        busy.end_slice(stored=True)
    assert len(busy.answered) > 1


def test_a_suspended_machine_has_little_effect(busy: Replays) -> None:
    """The next turn is short, and replays do not wait long."""

    def stand_still() -> None:
        busy.now += 60.0

    busy.ask(WAITING_MAX)
    stand_still()  # in the middle of a slice
    busy.end_slice(stored=True)
    turn = len(busy.answered) - 1
    assert turn * busy.answer_s <= SLICE_S_MAX * LOOP_SHARE + busy.answer_s

    busy.pace.spend(stand_still)  # in the middle of an answer
    for _ in range(round(SLICE_S_MAX / LOOP_SHARE / SLICE_S) + 1):
        busy.end_slice(stored=True)
    assert len(busy.answered) > 1 + turn


def test_an_unused_share_is_not_carried_over(busy: Replays) -> None:
    """Every turn must be short, because messages wait after it."""
    for _ in range(100):
        busy.ask()
        busy.end_slice(stored=True)
    before = len(busy.answered)
    busy.ask(1_000)

    busy.end_slice(stored=True)

    assert busy.answer_s * (len(busy.answered) - before) <= LOOP_SHARE * SLICE_S * 2


def test_pulls_do_not_wait_while_nothing_is_stored(replays: Replays) -> None:
    """Waiting pulls are answered as well."""
    replays.ask(1_000)
    assert len(replays.answered) == 1_000
    replays.end_slice(stored=True)
    replays.ask(1_000)
    assert len(replays.answered) < replays.asked
    replays.be_quiet()

    replays.ask(1_000)

    assert replays.answered == list(range(3_000))


def test_producers_that_wait_for_the_disk_count_as_sending(replays: Replays) -> None:
    """Between two of their groups nothing is stored for some slices."""
    replays.ask()
    replays.end_slice(stored=True)
    for _ in range(5):
        replays.end_slice(stored=False)
    before = len(replays.answered)
    replays.ask(1_000)
    replays.end_slice(stored=False)

    assert replays.answer_s * (len(replays.answered) - before) <= LOOP_SHARE * SLICE_S * 2


def test_consumers_that_keep_up_never_wait(replays: Replays) -> None:
    """They are not counted either."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(1_000, behind=LAG_LARGE - 1)

    assert len(replays.answered) == 1_001


def test_pulls_that_wait_are_bounded(replays: Replays) -> None:
    """Peers may send any number of them."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(WAITING_MAX)
    before = len(replays.answered)
    replays.ask(5)

    assert len(replays.answered) == before + 5


def test_no_timer_runs_when_nobody_replays(replays: Replays) -> None:
    """An idle broker stays idle."""
    replays.ask()
    replays.be_quiet()

    assert replays.slices.call is None
