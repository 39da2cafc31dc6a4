"""What an append writes, and that a failed one leaves nothing."""

import errno
import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.config import DELAY_LEVELS_MS, StoreConfig
from halfmq.store.errors import (
    DiskFullError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreClosedError,
    WriteFailedError,
)
from halfmq.store.files import disk
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry
from halfmq.store.format.record import (
    MAGIC_V2,
    blank,
    crc_tail_matches,
    decode_record,
    encode_record,
    new_record,
)
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore
from halfmq.store.queue.consume_queue import ConsumeQueue
from tests.support.stores import (
    BORN,
    HOST,
    HOST_V6,
    Clock,
    append_durably,
    bounds,
    draft,
    everything,
    flush,
    queue_files,
    small_config,
    stop_maintenance,
)

FILE_SIZE = 16_384


def log_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))


def queue_bytes(root: Path, topic: str = "T", queue_id: int = 0) -> bytes:
    directory = root / "consumequeue" / topic / str(queue_id)
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


def test_a_record_is_byte_for_byte_what_rocketmq_writes(
    tmp_path: Path, store: MessageStore
) -> None:
    """The appender's fast path and the encoder of the format agree."""
    store.append([draft("other")])
    sent = draft(
        "orders",
        3,
        b"hello",
        properties={"TAGS": "created", "KEYS": "o-1"},
        flag=7,
        reconsume_times=2,
        prepared_transaction_offset=99,
        sys_flag=TransactionType.COMMIT,
    )

    (done,) = store.append([sent])

    expected = new_record(
        topic="orders",
        queue_id=3,
        body=b"hello",
        properties=sent.properties,
        born_timestamp=BORN,
        born_host=HOST,
        store_timestamp=done.store_timestamp,
        store_host=HOST,
        queue_offset=0,
        physical_offset=done.physical_offset,
        flag=7,
        sys_flag=TransactionType.COMMIT,
        reconsume_times=2,
        prepared_transaction_offset=99,
    )
    assert log_bytes(tmp_path)[done.physical_offset : done.end] == encode_record(expected)
    entry = QueueEntry(done.physical_offset, done.size, sent.tags_code)
    assert queue_bytes(tmp_path, "orders", 3)[:20] == entry.pack()


def test_a_group_is_stored_in_order_with_one_time(store: MessageStore) -> None:
    """Records follow each other, queue offsets count per queue, and all have one store time."""
    keys = [("A", 0), ("B", 0), ("A", 0), ("A", 1), ("A", 0)]

    done = store.append([draft(*key) for key in keys])

    assert [appended.queue_offset for appended in done] == [0, 0, 1, 0, 2]
    assert [appended.end for appended in done[:-1]] == [
        appended.physical_offset for appended in done[1:]
    ]
    assert len({appended.store_timestamp for appended in done}) == 1
    assert store.write_offset == done[-1].end


def test_store_times_never_decrease(store: MessageStore, clock: Clock) -> None:
    """Searches by time are binary, so a clock that is set back must not reorder the log."""
    (first,) = store.append([draft()])
    clock.now = 1000

    (second,) = store.append([draft()])

    assert second.store_timestamp == first.store_timestamp


def test_store_times_do_not_decrease_after_a_restart(tmp_path: Path) -> None:
    """No record is stored before the last one of the previous run."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    (first,) = store.append([draft()])
    store.close()
    reopened = MessageStore(small_config(tmp_path), now_ms=Clock(1000))
    reopened.open()

    (second,) = reopened.append([draft()])

    assert second.store_timestamp == first.store_timestamp
    reopened.close()


def test_a_full_file_ends_in_a_blank(tmp_path: Path, store: MessageStore) -> None:
    """A record that does not fit begins the next file, and a blank ends the old one."""
    group = [draft(body=bytes(4000)) for _ in range(9)]

    done = store.append(group)
    flush(store)

    content = log_bytes(tmp_path)
    for before, after in itertools.pairwise(done):
        if before.end != after.physical_offset:
            assert after.physical_offset % FILE_SIZE == 0
            size_left = after.physical_offset - before.end
            assert content[before.end : before.end + 8] == blank(size_left)
    assert len({appended.physical_offset // FILE_SIZE for appended in done}) == 3
    assert [record.physical_offset for record in everything(store)] == [
        appended.physical_offset for appended in done
    ]


@pytest.mark.parametrize("left", [8, 9, 100])
def test_eight_bytes_stay_free_at_the_end_of_a_file(store: MessageStore, left: int) -> None:
    """A record may fill a file except for the smallest blank."""
    store.append([draft(body=bytes(6000)), draft(body=bytes(6000))])
    overhead = store.append([draft(body=b"")])[0].size
    gap = FILE_SIZE - store.write_offset

    (fits,) = store.append([draft(body=bytes(gap - overhead - left))])
    (rolled,) = store.append([draft(body=bytes(left))])

    assert fits.end == FILE_SIZE - left
    assert rolled.physical_offset == FILE_SIZE


def test_one_byte_too_many_rolls(store: MessageStore) -> None:
    """Seven free bytes would not hold a blank."""
    store.append([draft(body=bytes(6000)), draft(body=bytes(6000))])
    overhead = store.append([draft(body=b"")])[0].size
    gap = FILE_SIZE - store.write_offset

    (rolled,) = store.append([draft(body=bytes(gap - overhead - 7))])

    assert rolled.physical_offset == FILE_SIZE


def test_a_contiguous_group_stays_in_one_file(store: MessageStore) -> None:
    """The end of a file must not split what is read as one batch."""
    store.append([draft(body=bytes(7000)), draft(body=bytes(7000))])

    done = store.append([draft(body=bytes(1000)) for _ in range(5)], contiguous=True)

    assert done[0].physical_offset == FILE_SIZE
    assert done[-1].end < 2 * FILE_SIZE


def test_a_contiguous_group_larger_than_a_file_is_refused(store: MessageStore) -> None:
    """It fits into no file, and nothing of it is stored."""
    with pytest.raises(RecordTooLargeError, match="a batch"):
        store.append([draft(body=bytes(8000)) for _ in range(3)], contiguous=True)

    assert store.write_offset == 0


def test_on_append_is_called_for_each_successful_append(tmp_path: Path, clock: Clock) -> None:
    """The broker wakes waiting pulls with it, for every stored record and no refused one."""
    seen: list[list[AppendRequest]] = []
    store = MessageStore(
        small_config(tmp_path), now_ms=clock, on_append=lambda group: seen.append([*group])
    )
    store.open()
    group = [draft(), draft()]

    store.append(group)
    with pytest.raises(RecordTooLargeError):
        store.append([draft(body=bytes(FILE_SIZE))])
    store.close()

    assert seen == [group]


def test_a_prepared_or_rollback_record_takes_no_queue_offset(store: MessageStore) -> None:
    """Otherwise consumers would see a gap."""
    kinds = (TransactionType.NONE, TransactionType.PREPARED, TransactionType.ROLLBACK)

    done = append_durably(store, *(draft(sys_flag=kind) for kind in kinds), draft())

    assert [appended.queue_offset for appended in done] == [0, 0, 0, 1]
    assert store.queues.bounds("T", 0) == (0, 2)
    rollback = store.reader.record_at(done[2].physical_offset)
    assert rollback is not None
    assert rollback.sys_flag == TransactionType.ROLLBACK


@pytest.mark.parametrize(
    ("born_host", "store_host"), [(HOST_V6, HOST), (HOST, HOST_V6), (HOST_V6, HOST_V6)]
)
def test_ipv6_hosts_widen_the_record(
    store: MessageStore, born_host: bytes, store_host: bytes
) -> None:
    """The store sets the bits for IPv6 hosts itself, for any flags of the caller."""
    done = append_durably(store, draft(born_host=born_host, store_host=store_host, sys_flag=0x31))

    record = store.reader.record_at(done[0].physical_offset)

    assert record is not None
    assert (record.born_host, record.store_host) == (born_host, store_host)
    assert record.sys_flag & 1
    assert store.queues.store_time_at("T", 0, 0) == done[0].store_timestamp


def test_host_bits_without_ipv6_hosts_are_cleared(store: MessageStore) -> None:
    """A reader would misread all fields after the hosts."""
    done = append_durably(store, draft(sys_flag=0x30))

    record = store.reader.record_at(done[0].physical_offset)

    assert record is not None
    assert record.sys_flag == 0


def test_a_long_topic_is_stored_as_version_2(store: MessageStore) -> None:
    """The retry topic of a long group does not fit the length byte of version 1."""
    topic = "%RETRY%" + "g" * 200

    done = append_durably(store, draft(topic))

    encoded = store.reader.record_bytes(done[0].physical_offset)
    assert encoded is not None
    record = decode_record(encoded)
    assert (record.magic, record.topic) == (MAGIC_V2, topic)


def test_a_delayed_record_is_due_counted_from_its_store_time(store: MessageStore) -> None:
    """Its queue entry holds the due time, as recovery computes it."""
    properties = {"DELAY": "3", "TAGS": "A"}

    done = append_durably(store, draft("SCHEDULE_TOPIC_XXXX", 2, properties=properties))

    entry = queue_files(store)["SCHEDULE_TOPIC_XXXX", 2].entry(0)
    assert entry.tags_code == done[0].store_timestamp + DELAY_LEVELS_MS[2]


def test_property_crc_covers_the_whole_record(tmp_path: Path) -> None:
    """With the setting, each record ends with a CRC that covers offsets and times too."""
    store = MessageStore(small_config(tmp_path, append_property_crc=True), now_ms=Clock())
    store.open()

    done = append_durably(
        store, *(draft(body=bytes(3000), properties={"A": "b"}) for _ in range(9))
    )

    for appended in done:
        encoded = store.reader.record_bytes(appended.physical_offset)
        assert encoded is not None
        assert crc_tail_matches(encoded)
    store.close()


TOO_LARGE = [
    (draft(body=bytes(16_384 - 8 - 91)), RecordTooLargeError),
    (draft(properties=bytes(32_768)), PropertiesTooLongError),
    (draft(body=bytes(8192), properties=bytes(9000)), RecordTooLargeError),
    (draft(body=bytes(8192), properties=bytes(9000), sys_flag=4), RecordTooLargeError),
    (draft(properties=bytes(32_768), born_host=HOST_V6), PropertiesTooLongError),
]


@pytest.mark.parametrize(("invalid", "error"), TOO_LARGE)
def test_nothing_of_a_group_with_one_invalid_request_is_stored(
    tmp_path: Path, store: MessageStore, invalid: AppendRequest, error: type[Exception]
) -> None:
    """Also if the group had already reached other files of log and queue."""
    append_durably(store, draft(), draft("U"))
    before = log_bytes(tmp_path)[:FILE_SIZE], queue_bytes(tmp_path), bounds(store)
    many = [draft(body=bytes(300)) for _ in range(120)]

    with pytest.raises(error):
        store.append([*many, draft("new"), invalid])

    after = log_bytes(tmp_path)[:FILE_SIZE], queue_bytes(tmp_path)[: len(before[1])], bounds(store)
    assert after == before
    (done,) = append_durably(store, draft(body=b"next"))
    assert done.queue_offset == 1
    assert [record.body for record in everything(store)] == [b"body", b"body", b"next"]


@pytest.mark.parametrize(
    "fields", [{"flag": 1 << 40}, {"tags_code": 1 << 70}, {"born_host": bytes(4), "queue_id": 1}]
)
def test_nothing_of_a_group_that_cannot_be_encoded_is_stored(
    store: MessageStore, fields: dict[str, Any]
) -> None:
    """A mistake of the caller must not leave a queue entry without a record."""
    append_durably(store, draft(), draft(queue_id=1))

    with pytest.raises((struct.error, ValueError)):
        store.append([draft(), draft(queue_id=1), draft(**fields)])

    assert set(bounds(store).values()) == {(0, 1)}
    append_durably(store, draft(), draft(queue_id=1))
    assert len(everything(store)) == 4


@contextmanager
def space_for(calls: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let only the first ``calls`` reservations of space succeed."""
    real, left = os.posix_fallocate, iter(range(calls))

    def limited(fd: int, offset: int, length: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "posix_fallocate", limited)
        yield


@pytest.mark.parametrize("allowed", range(6))
def test_a_full_disk_is_reported_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Wherever space runs out, the group is undone, and a later append may succeed."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, draft())
    stop_maintenance(store)
    group = [draft(queue_id=number % 3, body=bytes(2000)) for number in range(40)]
    with space_for(allowed, monkeypatch), pytest.raises(DiskFullError, match="No space left"):
        store.append(group)

    assert store.write_offset == store.durable_offset
    assert {key: end for key, end in bounds(store).items() if end != (0, 0)} == {("T", 0): (0, 1)}
    append_durably(store, *group)
    assert len(everything(store)) == 41
    store.close()
    reopened = MessageStore(small_config(tmp_path), now_ms=Clock())
    assert reopened.open().clean
    assert len(everything(reopened)) == 41
    reopened.close()


@pytest.mark.parametrize("allowed", range(3))
def test_on_a_full_disk_nothing_of_a_batch_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Neither if the log finds no space, nor if the queue does not."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, draft())
    stop_maintenance(store)
    batch = [draft(queue_id=1, body=bytes(2000)) for _ in range(6)]
    ends = [store.write_offset]
    with space_for(allowed, monkeypatch), pytest.raises(DiskFullError, match="No space left"):
        ends += (store.append(batch, contiguous=True)[-1].end for _ in range(9))

    flush(store)
    assert store.write_offset == ends[-1]
    count = len(everything(store)) - 1
    assert count == 6 * (len(ends) - 1)
    assert bounds(store).get(("T", 1), (0, 0)) == (0, count)
    store.append(batch, contiguous=True)
    flush(store)
    assert len(everything(store)) == 1 + count + 6
    store.close()


def test_an_error_of_the_disk_for_a_queue_refuses_a_batch(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored, and the error names the reason."""

    def fail(queue: ConsumeQueue, size: int = ENTRY_SIZE) -> None:
        raise OSError(errno.EIO, "Input/output error")

    batch = [draft(), draft()]
    with monkeypatch.context() as patched:
        patched.setattr(ConsumeQueue, "grow", fail)
        with pytest.raises(WriteFailedError, match="Input/output error"):
            store.append(batch, contiguous=True)

    assert store.write_offset == 0
    store.append(batch, contiguous=True)
    flush(store)
    assert len(everything(store)) == 2


class FailingWrites:
    """Lets call ``first`` of ``pwrite`` fail; if ``lasting``, also all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first: int, lasting: bool) -> None:
        self.calls = 0
        self.first = first
        self._lasting = lasting
        self._real = disk.pwrite
        monkeypatch.setattr(disk, "pwrite", self._write)

    def _write(self, fd: int, content: bytes, position: int) -> int:
        self.calls += 1
        if self.calls == self.first or (self._lasting and 0 < self.first < self.calls):
            raise OSError(errno.EIO, "Input/output error")
        return self._real(fd, content, position)


@pytest.mark.parametrize("failing_call", range(1, 6))
def test_nothing_of_a_group_is_stored_after_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """For an error of any write, the caller gets an error, and the next append succeeds."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, draft())
    stop_maintenance(store)
    writes = FailingWrites(monkeypatch, first=failing_call, lasting=False)
    group = [draft(queue_id=number % 3, body=bytes(2000)) for number in range(40)]
    with pytest.raises(WriteFailedError, match="Input/output error"):
        store.append(group)

    assert writes.calls >= failing_call
    assert store.write_offset == store.durable_offset
    assert {key: end for key, end in bounds(store).items() if end != (0, 0)} == {("T", 0): (0, 1)}
    append_durably(store, *group)
    assert len(everything(store)) == 41
    store.close()


def test_after_a_group_that_could_not_be_undone_appends_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its records may follow the end of the log; the next start examines them."""
    failures: list[Exception] = []
    store = MessageStore(small_config(tmp_path), now_ms=Clock(), on_failure=failures.append)
    store.open()
    append_durably(store, draft())
    stop_maintenance(store)
    writes = FailingWrites(monkeypatch, first=4, lasting=True)
    group = [draft(queue_id=number % 3, body=bytes(2000)) for number in range(40)]
    with pytest.raises(WriteFailedError, match="nor could that be undone"):
        store.append(group)
    writes.first = 0

    with pytest.raises(WriteFailedError):
        store.append([draft()])
    assert len(failures) == 1
    assert len(everything(store)) == 1
    store.close()
    assert (tmp_path / "abort").exists()
    reopened = MessageStore(small_config(tmp_path), now_ms=Clock())
    reopened.open()
    append_durably(reopened, draft(queue_id=3))
    found = sorted(record.physical_offset for record in everything(reopened))
    assert bounds(reopened)["T", 3] == (0, 1)
    assert len(found) <= 1 + len(group)
    reopened.close()


def test_a_closed_store_refuses_appends(tmp_path: Path) -> None:
    """Before it is opened and after it is closed; closing twice is harmless."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    with pytest.raises(StoreClosedError):
        store.append([draft()])
    store.open()
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.append([draft()])


def test_an_empty_group_stores_nothing(store: MessageStore) -> None:
    assert store.append([]) == []
    assert store.write_offset == 0


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "a\0b"])
def test_a_topic_cannot_lead_out_of_the_store(store: MessageStore, topic: str) -> None:
    """Topics name directories, so the store checks them as well as the broker."""
    with pytest.raises(ValueError, match="cannot name a directory"):
        store.append([draft(topic)])


@pytest.mark.parametrize(
    "changes",
    [
        {"commit_log_file_size": 100},
        {"commit_log_file_size": 1 << 31},
        {"consume_queue_file_size": 0},
        {"flush_interval_ms": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    """The error names the setting, and nothing is created."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        small_config(tmp_path, **changes)


def test_queue_files_hold_whole_entries(tmp_path: Path) -> None:
    """The size is rounded up, as in RocketMQ."""
    assert StoreConfig(root=tmp_path, consume_queue_file_size=1001).consume_queue_file_size == 1020
