"""Bytes that connections share: the largest holder ends first."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmq.broker.limits.budget import Budget
from halfmq.broker.limits.kept import Limit

LIMIT = Limit("test", "bytes", 100, "the largest ends")


@dataclass(eq=False)
class Holder:
    """A connection, as a budget sees it."""

    address: str
    size: int = 0
    name: str = field(default="peer")
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True


def test_the_address_that_has_most_loses_its_largest_connection_first() -> None:
    """Many small holders of one address do not push out a larger one of another."""
    budget = Budget(LIMIT)
    alone, *crowd = Holder("a", 30), *(Holder("b", 20 + number) for number in range(5))
    for holder in (alone, *crowd):
        budget.hold(holder, holder.size)

    assert [holder.size for holder in (alone, *crowd) if holder.aborted] == [22, 23]
    assert budget.used == 30 + 20 + 21 + 24


def test_who_has_read_meanwhile_is_measured_before_anyone_ends() -> None:
    """A size that was reported long ago is no reason to end a connection."""
    budget = Budget(LIMIT, lambda holder: holder.size)  # type: ignore[attr-defined]
    slow, fast = Holder("a", 60), Holder("b", 60)
    budget.hold(slow, slow.size)
    slow.size = 0
    budget.hold(fast, fast.size)
    assert (slow.aborted, fast.aborted, budget.used) == (False, False, 60)
    fast.size = 0
    assert budget.recount() == 0
    budget.hold(fast, 101)

    assert budget.used == 0  # it was measured again, and is not above the limit
