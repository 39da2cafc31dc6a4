"""Listing undecided transactions in short pages that are complete together."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from halfmq.broker.transaction.decision_lookup import DecisionLookup
from halfmq.broker.transaction.half import StoredHalf
from halfmq.broker.transaction.pending_view import PAGE_MS, SKIPPED_PER_CLOCK_READ, PendingView
from halfmq.broker.transaction.state.pending import PendingTable
from halfmq.broker.transaction.state.state_machine import State
from tests.support.broker_doubles import START_MS, Clock
from tests.support.transactions import HOST, PEER

PROPERTIES = b"REAL_TOPIC\x01orders\x02UNIQ_KEY\x01key\x02"


class Table:
    """A table of pending transactions and its view for operators."""

    def __init__(self, *offsets: int, slow_ms: int = 0) -> None:
        self.clock = Clock()
        self.pending = PendingTable()
        self.reads = 0
        self._slow_ms = slow_ms
        self.read: Callable[[int], StoredHalf] = self.read_slowly
        self.monotonic_ms: Callable[[], int] = self.clock.monotonic
        for offset in offsets:
            self.add(offset)
        self.view = PendingView(
            self.pending,
            cast("DecisionLookup", None),
            lambda _entry: None,
            producers_of=lambda _group: (),
            read_half=lambda offset: self.read(offset),  # noqa: PLW0108 -- a test sets another
            now_ms=self.clock,
            monotonic_ms=lambda: self.monotonic_ms(),  # noqa: PLW0108 -- a test sets another
        )

    def add(self, offset: int, group: str = "pg") -> None:
        self.pending.add(offset, offset, START_MS, group, "orders")

    def drop(self, offset: int) -> None:
        entry = self.pending.get(offset)
        assert entry is not None
        self.pending.decide(entry, State.COMMITTED, offset)

    def read_slowly(self, offset: int) -> StoredHalf:
        self.reads += 1
        self.clock.now += self._slow_ms
        return StoredHalf(
            *(offset, offset, 0, 0, START_MS, PEER, START_MS, HOST, 0), b"", PROPERTIES, 0
        )

    def walk(
        self,
        max_count: int,
        group: str | None = None,
        state: str | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Return the offsets of each page, to the end of the listing."""
        pages: list[list[int]] = []
        after: int | None = -1
        while after is not None:
            infos, after = self.view.page(after, max_count, group, state)
            pages.append([info.offset for info in infos])
            between()
        return pages


def test_all_pages_together_are_complete_and_in_log_order() -> None:
    """For every page size, also if the last page is full."""
    table = Table(*range(10, 100, 10))

    for size in (1, 3, 4, 9, 100):
        pages = table.walk(size)
        assert [offset for page in pages for offset in page] == list(range(10, 100, 10))
        assert max(map(len, pages)) == min(size, 9)


def test_a_page_ends_when_its_time_is_over() -> None:
    """Halves may be on a slow disk, and sends wait meanwhile."""
    table = Table(*range(10, 100, 10), slow_ms=PAGE_MS - 1)

    pages = table.walk(1000)

    assert [len(page) for page in pages] == [2, 2, 2, 2, 1]
    assert [offset for page in pages for offset in page] == list(range(10, 100, 10))


def test_a_page_ends_in_time_if_the_wall_clock_is_set_back() -> None:
    """Otherwise a page of a million would take seconds."""
    table = Table(*range(10, 100, 10), slow_ms=PAGE_MS)
    steps = iter([-3_600_000])

    def step_and_read(offset: int) -> StoredHalf:
        table.clock.step(next(steps, 0))
        return table.read_slowly(offset)

    table.read = step_and_read

    infos, _ = table.view.page(-1, 1000)

    assert len(infos) == 1


def test_a_page_without_results_ends_in_time() -> None:
    """The search for a rare group among a million is split as well."""
    table = Table(*range(3 * SKIPPED_PER_CLOCK_READ))
    table.add(1_000_000, "rare")
    readings = iter(range(START_MS, START_MS + 1_000_000, PAGE_MS))
    table.monotonic_ms = lambda: next(readings)

    pages = table.walk(10, "rare")

    assert [page for page in pages if page] == [[1_000_000]]
    assert len(pages) >= 3
    assert table.reads == 1


def test_the_table_is_not_searched_if_nothing_is_parked() -> None:
    """This is the usual answer to the usual request."""
    table = Table(*range(10))
    table.pending.after = table.pending.__iter__ = None  # type: ignore[assignment, method-assign]

    assert table.view.page(-1, 10, state="parked") == ([], None)
    assert table.view.page(5, 10, state="parked") == ([], None)


def test_a_listing_continues_correctly_while_transactions_come_and_go() -> None:
    """It continues after the last offset listed, and reaches new transactions."""
    table = Table(*range(10, 70, 10))
    changes = [(table.drop, 40), (table.add, 70), (table.drop, 10)]

    def change() -> None:
        if changes:
            work, offset = changes.pop(0)
            work(offset)

    pages = table.walk(2, between=change)

    assert pages[:3] == [[10, 20], [30, 50], [60, 70]]
