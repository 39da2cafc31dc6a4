"""Consumers far behind wait for their turn while messages are being stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from halfmq.broker.replay_pace import (
    ANSWERS_PER_SLICE,
    FAR_BEHIND,
    SLICE_S,
    WAITING_MAX,
    ReplayPace,
)


class Log:
    """A log that grows when the test says so."""

    write_offset = 1 << 40


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
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.slices)
        self.pace = ReplayPace(self.log)
        self.answered: list[int] = []
        self.asked = 0

    def ask(self, count: int = 1, *, behind: int = FAR_BEHIND) -> None:
        for number in range(self.asked, self.asked + count):
            serve = self._serve(number)
            if self.pace.admits(self.log.write_offset - behind, serve):
                serve()
        self.asked += count

    def _serve(self, number: int) -> Callable[[], None]:
        return lambda: self.answered.append(number)

    def end_slice(self, *, stored: bool) -> None:
        self.log.write_offset += stored
        self.slices.end()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


def test_replays_take_turns_while_messages_are_stored(replays: Replays) -> None:
    """So many are answered in each slice, in the order in which they asked, and all of them."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(10)
    assert replays.asked - len(replays.answered) == 10 - ANSWERS_PER_SLICE

    for _ in range(10 // ANSWERS_PER_SLICE):
        before = len(replays.answered)
        replays.end_slice(stored=True)
        assert len(replays.answered) - before <= ANSWERS_PER_SLICE

    assert replays.answered == list(range(11))


def test_who_asks_while_others_wait_waits_behind_them(replays: Replays) -> None:
    """Otherwise who asks often would pass who waits."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(ANSWERS_PER_SLICE + 1)
    replays.end_slice(stored=True)
    replays.ask(ANSWERS_PER_SLICE + 5)

    assert replays.answered == list(range(len(replays.answered)))
    assert len(replays.answered) == 1 + 2 * ANSWERS_PER_SLICE


def test_nobody_waits_while_nothing_is_stored(replays: Replays) -> None:
    """A replay at night has the broker to itself; those that wait are let go."""
    replays.ask(1_000)
    assert len(replays.answered) == 1_000
    replays.end_slice(stored=True)
    replays.ask(1_000)
    assert len(replays.answered) < replays.asked
    replays.end_slice(stored=False)

    replays.ask(1_000)

    assert replays.answered == list(range(3_000))


def test_consumers_that_keep_up_never_wait(replays: Replays) -> None:
    """They are not counted either."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(1_000, behind=FAR_BEHIND - 1)

    assert len(replays.answered) == 1_001


def test_pulls_that_wait_are_bounded(replays: Replays) -> None:
    """Peers may send any number of them."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.ask(ANSWERS_PER_SLICE + WAITING_MAX)
    before = len(replays.answered)
    replays.ask(5)

    assert len(replays.answered) == before + 5


def test_no_timer_runs_when_nobody_replays(replays: Replays) -> None:
    """An idle broker stays idle."""
    replays.ask()
    replays.end_slice(stored=True)
    replays.end_slice(stored=True)

    assert replays.slices.call is None
