"""A bit that puts a record into another's place costs the other one nothing."""

import shutil
from pathlib import Path

import pytest

from halfmq.store import disk, old_entries, queue_rebuild
from halfmq.store.checkpoint import load_checkpoint
from halfmq.store.format.queue_entry import ENTRY_SIZE
from halfmq.store.format.record import Record
from halfmq.store.message_store import MessageStore
from tests.support.damage import flip
from tests.support.stores import Clock, draft, everything, small_config

NEVER = 3_600_000  # ms
QUEUE_ID_BIT = 15  # position in a record of the byte with the lowest bit of the queue id
QUEUE_OFFSET_BIT = 27
TOPIC = "orders"
FILE_SIZE = 8_192  # of a log of two files


def open_store(root: Path, file_size: int = 16_384) -> MessageStore:
    changes = {"commit_log_file_size": file_size, "flush_interval_consume_queue_ms": NEVER}
    store = MessageStore(small_config(root, **changes), now_ms=Clock())
    store.open()
    return store


def filled(root: Path, queue_ids: str) -> list[Record]:
    """Leave a store as a kill does, with one message for each digit; return them in log order."""
    store = open_store(root)
    for number, queue_id in enumerate(queue_ids):
        store.append([draft(TOPIC, int(queue_id), b"%d" % number, properties={"TAGS": "x"})])
    records = list(store.scan(0))
    store.close()
    (root / "abort").write_text("1")
    return records


def flip_in(root: Path, record: Record, position: int, bit: int = 0) -> None:
    flip(root / "commitlog" / f"{0:020}", record.physical_offset + position, bit)


def queue_file(root: Path, queue_id: int) -> Path:
    return root / "consumequeue" / TOPIC / str(queue_id) / f"{0:020}"


def write_entry(root: Path, queue_id: int, entry: bytes) -> None:
    """Put an entry at queue offset 3."""
    with queue_file(root, queue_id).open("r+b") as file:
        file.seek(3 * ENTRY_SIZE)
        file.write(entry)


def remove_queues(root: Path) -> None:
    for queue_id in (0, 1):
        queue_file(root, queue_id).unlink()


def served(root: Path, file_size: int = 16_384) -> list[Record]:
    """Return what the store serves, opened a second time as well."""
    found = []
    for _ in range(2):
        store = open_store(root, file_size)
        found.append(everything(store))
        store.close()
        (root / "abort").write_text("1")
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("damaged", range(8))
@pytest.mark.parametrize("position", [QUEUE_ID_BIT, QUEUE_OFFSET_BIT])
def test_entries_from_before_the_stop_tell_who_lies(
    position: int, damaged: int, tmp_path: Path
) -> None:
    """Even where two queues grow in step and either record could belong to either."""
    records = filled(tmp_path, "01010101")
    flip_in(tmp_path, records[damaged], position)

    assert served(tmp_path) == records


def test_the_place_in_the_log_tells_where_no_entry_is_left(tmp_path: Path) -> None:
    """The record of queue 1 lies behind what follows the lacking one in queue 0."""
    records = filled(tmp_path, "01000101")
    flip_in(tmp_path, records[2], QUEUE_ID_BIT)
    remove_queues(tmp_path)

    assert served(tmp_path) == records


@pytest.mark.parametrize(("queue_ids", "damaged"), [("010111001", 6), ("010001101", 3)])
def test_a_queue_stays_in_the_order_of_the_log(
    queue_ids: str, damaged: int, tmp_path: Path
) -> None:
    """The damaged record lies behind, or before, what its new queue has beside its place."""
    records = filled(tmp_path, queue_ids)
    flip_in(tmp_path, records[damaged], QUEUE_ID_BIT)
    remove_queues(tmp_path)

    assert served(tmp_path) == records


def test_where_nothing_tells_both_are_served(tmp_path: Path) -> None:
    """They may have changed places: each is at one where the other could have been."""
    records = filled(tmp_path, "01010101")
    flip_in(tmp_path, records[2], QUEUE_ID_BIT)
    remove_queues(tmp_path)
    found = served(tmp_path)

    assert sorted(one.body for one in found) == sorted(one.body for one in records)
    assert {one.body for one in found if one not in records} <= {b"2", b"3"}


def test_a_queue_that_ends_with_another_ones_message_gives_it_back(tmp_path: Path) -> None:
    """Nothing contradicts the record but the entry that it had; queue offsets are not reused."""
    records = filled(tmp_path, "0101010")
    flip_in(tmp_path, records[6], QUEUE_ID_BIT)

    assert served(tmp_path) == records


def test_what_rocketmq_leaves_behind_a_queue_is_no_evidence(tmp_path: Path) -> None:
    """It cuts records off the log and leaves their entries; another record may lie there now."""
    records = filled(tmp_path, "0101011")
    entry = queue_file(tmp_path, 1).read_bytes()[3 * ENTRY_SIZE :][:ENTRY_SIZE]
    write_entry(tmp_path, 0, entry)
    write_entry(tmp_path, 1, bytes(ENTRY_SIZE))
    flip(tmp_path / "checkpoint", 0)  # so that its checksum, which is ours alone, is wrong
    assert not load_checkpoint(tmp_path / "checkpoint").is_ours

    assert served(tmp_path) == records


def test_a_record_stays_where_an_entry_had_it(tmp_path: Path) -> None:
    """Whatever else names it."""
    records = filled(tmp_path, "0101011")
    entry = queue_file(tmp_path, 1).read_bytes()[3 * ENTRY_SIZE :][:ENTRY_SIZE]
    write_entry(tmp_path, 0, entry)

    assert served(tmp_path) == records


def test_entries_that_a_start_removes_are_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start believes what queues say, so none may come back with a power cut."""
    records = filled(tmp_path, "0101")
    with (tmp_path / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(records[-1].physical_offset)
        file.write(bytes(records[-1].total_size))
    synced: list[bytes] = []
    sync_data = disk.sync_data

    def noted(fd: int) -> None:
        sync_data(fd)
        synced.append(disk.pread(fd, 2 * ENTRY_SIZE, 0))

    monkeypatch.setattr(disk, "sync_data", noted)
    store = open_store(tmp_path)
    content = queue_file(tmp_path, 1).read_bytes()[: 2 * ENTRY_SIZE]

    assert content.endswith(bytes(ENTRY_SIZE))
    assert content in synced
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize(("queue_count", "kept"), [(1, 10), (5, 2), (100, 1)])
def test_old_entries_take_bounded_memory(
    queue_count: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of each queue, an equal share, and of each one at least."""
    monkeypatch.setattr(old_entries, "OLD_ENTRIES_MAX", 10)
    monkeypatch.setattr(old_entries, "_SHARE_MIN", 1)
    filled(tmp_path, "0" * 40)
    (tmp_path / "abort").unlink()
    store = open_store(tmp_path)
    (queue,) = store._queues.values()
    old = old_entries.OldQueues(queue_count).keep(queue, 0)

    assert (old.first, old.end) == (40 - kept, 40)
    store.close()


def begins_later(root: Path, queue_ids: str) -> list[Record]:
    """Leave a log whose first file is deleted, and no queues; the last two records are left."""
    store = open_store(root, FILE_SIZE)
    size = FILE_SIZE // (len(queue_ids) - 2) - 150
    for queue_id in queue_ids:
        store.append([draft(TOPIC, int(queue_id), bytes(size))])
    records = [one for one in store.scan(0) if one.physical_offset >= FILE_SIZE]
    store.close()
    assert len(records) == 2
    (root / "commitlog" / f"{0:020}").unlink()
    shutil.rmtree(root / "consumequeue")
    (root / "abort").write_text("1")
    return records


@pytest.mark.parametrize(
    "queue_ids",
    [
        pytest.param("0000102", id="an offset that one bit makes the first"),
        pytest.param("0101010", id="two queues in turn"),
        pytest.param("0111110", id="a longer queue beside a shorter one"),
    ],
)
def test_a_queue_of_one_message_is_found_where_the_log_does_not_begin(
    queue_ids: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was before it is deleted by age, and nothing is damaged."""
    monkeypatch.setattr(queue_rebuild, "_UNCONFIRMED_MAX", 1)
    records = begins_later(tmp_path, queue_ids)

    assert served(tmp_path, FILE_SIZE) == records


@pytest.mark.parametrize(("byte", "bit"), [(0, 7), (0, 6), (2, 0)])
def test_a_queue_offset_for_which_there_was_no_room_is_not_believed(
    byte: int, bit: int, tmp_path: Path
) -> None:
    """It is that of the queue's only message: what comes next would have impossible places."""
    records = begins_later(tmp_path, "0101010")
    at = records[1].physical_offset - FILE_SIZE + QUEUE_OFFSET_BIT - 7 + byte
    flip(tmp_path / "commitlog" / f"{FILE_SIZE:020}", at, bit)

    assert served(tmp_path, FILE_SIZE) == records[:1]
