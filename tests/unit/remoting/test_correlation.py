"""Matching answers to requests in flight."""

from __future__ import annotations

import pytest

from halfmq.remoting import correlation
from halfmq.remoting.correlation import Correlation
from halfmq.remoting.errors import TooManyRequestsError


def test_answers_match_in_any_order_and_once() -> None:
    """Only the opaque counts; a second answer with the same opaque matches nothing."""
    waiting: Correlation[str] = Correlation()
    first, second = waiting.register("first", 10), waiting.register("second", 10)

    assert first != second
    assert waiting.match(second) == "second"
    assert waiting.match(first) == "first"
    assert waiting.match(first) is None
    assert len(waiting) == 0


def test_requests_expire_at_their_deadline() -> None:
    """Each request has its own; an answer that comes later matches nothing."""
    waiting: Correlation[str] = Correlation()
    late = waiting.register("late", 5)
    waiting.register("patient", 50)
    waiting.register("also late", 4)

    assert waiting.expire(3.9) == []
    assert waiting.expire(5) == ["late", "also late"]
    assert waiting.match(late) is None
    assert waiting.expire(50) == ["patient"]
    assert waiting.expire(100) == []


def test_a_lost_connection_fails_all_requests_in_flight() -> None:
    """Their answers can no longer arrive."""
    waiting: Correlation[str] = Correlation()
    opaques = [waiting.register(name, 5) for name in ("a", "b")]

    assert waiting.fail_all() == ["a", "b"]
    assert [waiting.match(opaque) for opaque in opaques] == [None, None]
    assert waiting.expire(100) == []


def test_opaques_start_again_and_skip_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old request may still be in flight when the numbers start again."""
    monkeypatch.setattr(correlation, "INT32_MAX", 3)  # instead of 2^31 requests
    waiting: Correlation[str] = Correlation(first_opaque=2)
    assert [waiting.register(str(n), 5) for n in range(4)] == [2, 3, 0, 1]

    waiting.match(3)

    assert waiting.register("4", 5) == 3


def test_there_is_a_limit_to_what_may_wait() -> None:
    """A caller that sends faster than the peer answers gets an error; no request is dropped."""
    waiting: Correlation[int] = Correlation(in_flight_max=2)
    first = waiting.register(1, 5)
    waiting.register(2, 5)

    with pytest.raises(TooManyRequestsError) as caught:
        waiting.register(3, 5)
    assert caught.value.limit == 2
    assert waiting.match(first) == 1
    waiting.register(3, 5)
