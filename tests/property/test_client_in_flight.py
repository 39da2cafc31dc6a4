"""The offset to commit, compared with a model that keeps every pulled message."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from halfmq.client.consuming.in_flight import InFlightWindow
from halfmq.client.message import MessageQueue

QUEUE = MessageQueue("orders", "broker-a", 0)


@given(
    start=st.integers(0, 5),
    steps=st.lists(st.tuples(st.sampled_from(["add", "skip", "acknowledge"]), st.integers(0, 30))),
)
def test_nothing_unfinished_lies_below_the_commit_offset(
    start: int, steps: list[tuple[str, int]]
) -> None:
    """Messages below the committed offset are not delivered again, so all must be finished."""
    window, unfinished, added = InFlightWindow(QUEUE, start, None), set[int](), set[int]()

    for action, number in steps:
        if action == "add" and window.add(number, size=number + 1):
            unfinished.add(number)
            added.add(number)
        elif action == "skip":
            window.skip_to(number)
        elif action == "acknowledge":
            assert (window.acknowledge(number) is not None) == (number in unfinished)
            unfinished.discard(number)

        assert window.commit_offset == min(unfinished, default=window.next_offset)
        assert len(window) == len(unfinished)
        assert window.bytes == sum(offset + 1 for offset in unfinished)
        assert window.span == sum(offset >= window.commit_offset for offset in added)


@given(st.permutations(range(8)))
def test_the_offset_moves_only_over_a_run_without_a_gap(order: list[int]) -> None:
    """Acks may come in any order; the offset stays at the first gap."""
    window = InFlightWindow(QUEUE, 0, None)
    for offset in range(8):
        window.add(offset, size=1)

    for count, offset in enumerate(order, start=1):
        window.acknowledge(offset)
        done = set(order[:count])
        assert window.commit_offset == next((n for n in range(8) if n not in done), 8)


def test_a_lost_queue_keeps_its_commit_offset_and_ignores_acks() -> None:
    """The next owner starts there; a late ack must not skip messages that are not consumed."""
    window = InFlightWindow(QUEUE, 0, None)
    for offset in range(3):
        window.add(offset, size=10)
    window.acknowledge(0)

    assert window.drop() == 20
    assert window.acknowledge(1) is None
    assert window.commit_offset == 1
