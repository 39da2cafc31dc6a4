"""Building the key index some time after records are appended."""

from pathlib import Path

import pytest

from halfmq.store.errors import DiskFullError
from halfmq.store.files.mapped_file import reserve
from halfmq.store.index import index_builder, index_file
from halfmq.store.index.index_builder import PROPERTIES_PER_PUT, RECORDS_PER_PUT, IndexBuilder
from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, append_durably, draft, flush, small_config


def test_messages_are_found_by_key(store: MessageStore) -> None:
    """Also those not indexed yet, and never those of another topic."""
    done = append_durably(
        store,
        draft(properties={"KEYS": "a b", "UNIQ_KEY": "u1"}),
        draft("U", properties={"KEYS": "a"}),
        draft(properties={"KEYS": "b", "UNIQ_KEY": "u2"}),
    )
    first, _, third = (appended.physical_offset for appended in done)

    assert store.index.query("T", "a", 9, 0, 1 << 60) == [first]
    assert store.index.query("T", "b", 9, 0, 1 << 60) == [first, third]
    assert store.index.query("T", "u2", 9, 0, 1 << 60) == [third]
    assert store.index.query("T", "none", 9, 0, 1 << 60) == []
    assert store.index.last_update == (done[2].store_timestamp, third)
    assert not store.tick()


@pytest.mark.parametrize("in_batch", [False, True])
def test_the_index_catches_up_in_slices(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, *, in_batch: bool
) -> None:
    """A slice has a limited number of records, and ``tick`` returns whether more are pending."""
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 16)
    keys = [f"{number:032X}" for number in range(5 * 16)]
    drafts = [draft(properties={"UNIQ_KEY": key}) for key in keys]
    if in_batch:
        appended = store.append(drafts, contiguous=True)
    else:
        appended = [store.append([one])[0] for one in drafts]

    assert _ticks(store) == 5
    flush(store)
    for key, one in zip(keys, appended, strict=True):
        assert store.index.query("T", key, 9, 0, 1 << 60) == [one.physical_offset]


def test_a_slice_of_the_index_is_at_most_128_records(store: MessageStore) -> None:
    """A key may touch a page for the first time, which takes the kernel 4 us."""
    for number in range(1_000):
        store.append([draft(properties={"UNIQ_KEY": f"u{number}", "KEYS": f"k{number}"})])

    assert _ticks(store) >= 1_000 // 128


def test_a_slice_is_limited_by_the_size_of_its_properties(store: MessageStore) -> None:
    """Few records may have many keys."""
    keys = " ".join(f"key-{number}" for number in range(200))
    count = 2 * PROPERTIES_PER_PUT // len(keys)
    for _ in range(count):
        store.append([draft(properties={"KEYS": keys})])

    assert count < RECORDS_PER_PUT
    assert _ticks(store) == 2


def test_a_look_up_can_pause_while_it_indexes(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records with thousands of keys each may be pending."""
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 1)
    monkeypatch.setattr(index_builder, "SLICE_MS", 0.0)
    done = append_durably(store, *[draft(properties={"KEYS": "a"}) for _ in range(4)])

    newest_first = [one.physical_offset for one in reversed(done)]
    assert list(store.index.search("T", "a", 0, 1 << 60)) == [None] * 3 + newest_first


def test_what_is_read_from_the_log_is_indexed_in_slices_of_limited_size(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that lags behind because of messages with thousands of keys takes no more time."""
    keys = " ".join(f"key-{number}" for number in range(200))
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 0)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    count = 2 * PROPERTIES_PER_PUT // len(keys)
    for _ in range(count):
        store.append([draft(properties={"KEYS": keys})])

    assert count < RECORDS_PER_PUT
    assert store.index.lags
    assert _ticks(store) >= 2


def test_large_bodies_are_no_keys_that_wait(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of a few large messages does not make the index read them from the log again."""
    monkeypatch.setattr(index_builder, "PROPERTIES_SIZE_MAX", 100)
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 3_000)
    store.append([draft(body=bytes(3_000)) for _ in range(4)], contiguous=True)

    assert not store.index.lags


def test_an_append_indexes_at_most_one_slice(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if too many keys are pending, because other clients wait for their answers."""
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 16)
    for number in range(3 * 16):
        store.append([draft(properties={"UNIQ_KEY": f"u{number}"})])
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", store.write_offset - 1)
    monkeypatch.setattr(index_builder, "SLICE_MS", 0.0)
    store.append([draft(properties={"UNIQ_KEY": "last"})])

    assert _ticks(store) == 3


def test_an_index_that_cannot_keep_up_is_filled_from_the_log(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded under any load, and in the end no key is missing."""
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 5_000)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    drafts = [draft(body=bytes(500), properties={"UNIQ_KEY": f"u{number}"}) for number in range(20)]
    done = store.append(drafts, contiguous=True)
    was_behind = store.index.lags
    (last,) = append_durably(store, draft(properties={"UNIQ_KEY": "last"}))
    while store.tick(0.0):
        pass

    assert (was_behind, store.index.lags) == (True, False)
    for number, one in enumerate(done):
        assert store.index.query("T", f"u{number}", 9, 0, 1 << 60) == [one.physical_offset]
    assert store.index.query("T", "last", 9, 0, 1 << 60) == [last.physical_offset]


def _ticks(store: MessageStore) -> int:
    ticks = 1
    while store.tick(budget_ms=0.0):
        ticks += 1
    return ticks


def test_a_store_without_an_index_finds_nothing_by_key(tmp_path: Path) -> None:
    """messageIndexEnable=false: no files, no work."""
    store = MessageStore(small_config(tmp_path, index_enabled=False), now_ms=Clock())
    store.open()
    append_durably(store, draft(properties={"KEYS": "a"}))

    assert store.index.query("T", "a", 9, 0, 1 << 60) == []
    assert store.index.last_update == (0, 0)
    assert not (tmp_path / "index").exists()
    store.close()


def test_after_a_full_disk_the_index_catches_up_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile messages are stored and no keys kept in memory; in the end no key is missing."""
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 5_000)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    full = False

    def limited(fd: int, start: int, end: int, path: Path) -> None:
        if full:
            raise DiskFullError(path, "no space")
        reserve(fd, start, end, path)

    monkeypatch.setattr("halfmq.store.index.index_file.reserve", limited)
    # Otherwise space reserved before would be used first.
    monkeypatch.setattr(index_file, "RESERVED_AHEAD", 0)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()

    def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            properties = {"UNIQ_KEY": f"u{number}", "KEYS": f"k{number}"}
            append_durably(store, draft(body=bytes(900), properties=properties))

    def missing(first: int, count: int) -> list[int]:
        return [
            number
            for number in range(first, first + count)
            if not store.index.query("T", f"k{number}", 10, 0, 1 << 60)
        ]

    def is_behind() -> bool:
        assert isinstance(store.index, IndexBuilder)
        # No public result shows that keys are kept in memory.
        assert not store.index._pending
        return store.index.lags

    send(0, 10)
    assert missing(0, 10) == []
    full = True
    send(10, 40)
    assert is_behind()
    assert not store.tick(), "nothing can be done on a full disk"
    assert missing(0, 50) == list(range(10, 50))
    full = False
    while store.tick(0.0):
        pass
    send(50, 5)
    assert missing(0, 55) == []
    assert not is_behind()

    full = True
    send(55, 20)
    store.close()
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()  # the disk is still full
    send(75, 3)
    full = False
    store.tick()
    assert missing(0, 78) == []
    store.close()
