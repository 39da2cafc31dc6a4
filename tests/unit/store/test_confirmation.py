"""What a slave has not confirmed is on disk, and neither durable nor visible."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.store.message_store import GetStatus, MessageStore
from tests.support.stores import BORN, Clock, crash, draft, flush, maintain, small_config


def opened(root: Path) -> MessageStore:
    """Open a store whose messages wait for a slave from now on."""
    store = MessageStore(small_config(root), Clock(BORN))
    store.open()
    store.begin_confirmation()
    return store


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[MessageStore]:
    store = opened(tmp_path / "store")
    yield store
    store.close()


def on_disk(store: MessageStore, count: int) -> list[int]:
    """Append messages one by one; return where each ends, when all are on disk."""
    ends = [store.append([draft()])[0].end for _ in range(count)]
    flush(store)
    return ends


def test_queues_end_where_the_slave_has_confirmed(replicated: MessageStore) -> None:
    """Replies and checks go by the durable offset, consumers by the readable one."""
    ends = on_disk(replicated, 3)
    assert replicated.flushed_offset == ends[-1]
    assert replicated.durable_offset == replicated.readable_offset == 0
    assert replicated.queues.bounds("T", 0) == (0, 0)

    replicated.confirm(ends[1])
    replicated.confirm(ends[0])  # what is released stays so

    assert replicated.durable_offset == replicated.readable_offset == ends[1]
    assert replicated.queues.get("T", 0, 0).count == 2
    assert replicated.queues.get("T", 0, 2).status is GetStatus.OFFSET_OVERFLOW_ONE


def test_decisions_find_records_that_are_not_confirmed(replicated: MessageStore) -> None:
    """By physical offset: a decision may follow its half before the slave has confirmed it."""
    on_disk(replicated, 1)

    assert replicated.named_record(0) is not None


def test_after_a_kill_consumers_wait_where_the_slave_had_confirmed(tmp_path: Path) -> None:
    """As of the last checkpoint; a consumer that had got further waits instead of starting over."""
    store = opened(tmp_path / "store")
    ends = on_disk(store, 4)
    store.confirm(ends[1])
    maintain(store)
    store.confirm(ends[2])
    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()

    again = opened(copy)

    assert again.durable_offset == ends[1]
    result = again.queues.get("T", 0, 3)
    assert (result.status, result.next_offset) == (GetStatus.OFFSET_OVERFLOW_ONE, 3)
    assert again.queues.get("T", 0, 5).status is GetStatus.OFFSET_OVERFLOW_BADLY
    again.confirm(ends[3])
    assert again.queues.get("T", 0, 3).count == 1
    again.close()


def test_what_was_stored_before_a_slave_was_set_up_counts_as_confirmed(tmp_path: Path) -> None:
    """Its senders were told so, and consumers have it."""
    store = MessageStore(small_config(tmp_path), Clock(BORN))
    store.open()
    (end,) = on_disk(store, 1)
    store.close()

    again = opened(tmp_path)

    assert again.durable_offset == end
    (following,) = on_disk(again, 1)
    assert again.durable_offset == end < following
    again.close()
