"""Which request does an answer belong to?"""

from __future__ import annotations

from math import inf

import pytest

from halfmq.remoting.codes import INT32_MAX
from halfmq.remoting.correlation import Correlation
from halfmq.remoting.errors import TooManyRequestsError


def test_answers_match_in_any_order_and_once() -> None:
    """The opaque alone ties them; a second answer under it finds nothing."""
    waiting: Correlation[str] = Correlation()
    first, second = waiting.register("first", 10), waiting.register("second", 10)

    assert first != second
    assert waiting.match(second) == "second"
    assert waiting.match(first) == "first"
    assert waiting.match(first) is None
    assert len(waiting) == 0


def test_only_what_is_late_expires() -> None:
    """Each request has its own deadline; an answer that comes later is dropped."""
    waiting: Correlation[str] = Correlation()
    late = waiting.register("late", 5)
    waiting.register("patient", 50)
    waiting.register("also late", 4)

    assert waiting.expire(3.9) == []
    assert waiting.expire(5) == ["late", "also late"]
    assert waiting.match(late) is None
    assert waiting.next_deadline == 50
    assert waiting.expire(50) == ["patient"]
    assert waiting.next_deadline == inf


def test_a_lost_connection_fails_all_that_waits() -> None:
    """Nobody is left waiting for an answer that cannot come."""
    waiting: Correlation[str] = Correlation()
    opaques = [waiting.register(name, 5) for name in ("a", "b")]

    assert waiting.fail_all() == ["a", "b"]
    assert [waiting.match(opaque) for opaque in opaques] == [None, None]
    assert waiting.expire(100) == []


def test_opaques_start_again_and_skip_those_in_use() -> None:
    """After 2^31 requests a number may still be waited for."""
    waiting: Correlation[str] = Correlation(first_opaque=INT32_MAX - 1)
    opaques = [waiting.register(str(n), 5) for n in range(3)]
    assert opaques == [INT32_MAX - 1, INT32_MAX, 0]

    again: Correlation[str] = Correlation(first_opaque=0)
    assert again.register("old", 5) == 0
    again._next = 0  # as after 2^31 requests
    assert again.register("new", 5) == 1


def test_there_is_a_limit_to_what_may_wait() -> None:
    """Our caller sends faster than the peer answers: it is told, nothing is dropped."""
    waiting: Correlation[int] = Correlation(in_flight_max=2)
    first = waiting.register(1, 5)
    waiting.register(2, 5)

    with pytest.raises(TooManyRequestsError) as caught:
        waiting.register(3, 5)
    assert caught.value.limit == 2
    assert waiting.match(first) == 1
    waiting.register(3, 5)
