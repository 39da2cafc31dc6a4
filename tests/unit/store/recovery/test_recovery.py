"""What a start makes of what the last stop left."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.store.errors import DirectoryInUseError, UnusableFileError
from halfmq.store.files.checkpoint import load_checkpoint
from halfmq.store.files.durable_mark import DurableMark
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry
from halfmq.store.index import index_builder
from halfmq.store.integrity.expected_entries import QueueScan
from halfmq.store.message_store import MessageStore, RecoveryReport
from halfmq.store.queue.consume_queue import ConsumeQueue
from halfmq.store.recovery import recovery
from tests.support.store_child import SteppingClock
from tests.support.stores import (
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    everything,
    log_of,
    maintain,
    small_config,
)

FILE_SIZE = 16_384
QUEUE_FILE_SIZE = 1000
NEVER = 3_600_000  # ms


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_store(root: Path, **changes: object) -> tuple[MessageStore, RecoveryReport]:
    settings = {"flush_interval_consume_queue_ms": NEVER} | changes
    store = MessageStore(small_config(root, **settings), now_ms=Clock())
    return store, store.open()


def filled(root: Path, count: int = 195) -> list[int]:
    """Leave a cleanly closed store with messages in three queues; return where they lie."""
    store, _ = open_store(root)
    done = []
    for number in range(count):
        key = ("T", 0) if number % 2 else ("U", number % 3)
        properties = {"UNIQ_KEY": f"u{number}", "TAGS": "A"}
        done += store.append([draft(*key, body=b"%05d" % number * 100, properties=properties)])
    store.close()
    return [appended.physical_offset for appended in done]


def log_path(root: Path, base: int) -> Path:
    return root / "commitlog" / f"{base:020d}"


def patch(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def log_patch(root: Path, offset: int, content: bytes) -> None:
    patch(log_path(root, offset - offset % FILE_SIZE), offset % FILE_SIZE, content)


def mark_aborted(root: Path) -> None:
    (root / "abort").write_text("1")


def forget_mark(root: Path) -> None:
    """Take away what says how far the log was on disk, as a power cut may."""
    patch(root / "checkpoint", 512, bytes(16))


def forget_digests(root: Path) -> None:
    """Have a start after a kill scan a whole file of the log, and not only the end of it."""
    shutil.rmtree(root / "digests")


def forget_queued(root: Path) -> None:
    """Leave a checkpoint that a version wrote which notes no offset of the queues."""
    patch(root / "checkpoint", 88, bytes(20))


def move_mark(root: Path, offset: int) -> None:
    """Say that the log was on disk up to here."""
    mark = DurableMark(root / "checkpoint")
    mark.start(offset)
    mark.close()


def served(store: MessageStore) -> list[int]:
    return [record.physical_offset for record in everything(store)]


def test_a_clean_stop_leaves_nothing_to_do(root: Path) -> None:
    """The next start trusts the queues once each has proven its end, and reads no log."""
    offsets = filled(root)
    assert not (root / "abort").exists()
    content = (root / "lock").read_bytes()
    assert content == b"lock"

    store, report = open_store(root)

    assert report == RecoveryReport(
        clean=True,
        start_offset=store.write_offset,
        end_offset=store.write_offset,
        records=0,
        truncated_bytes=0,
        queues_rebuilt=False,
        duration_ms=report.duration_ms,
    )
    assert served(store) == offsets
    assert (root / "abort").read_text() == str(os.getpid())
    store.close()


def test_an_empty_directory_becomes_a_store(root: Path) -> None:
    """With the files that RocketMQ expects, and closes again without a record."""
    for _ in range(2):
        store, report = open_store(root)
        assert (report.clean, report.end_offset) == (True, 0)
        store.close()
    names = {path.name for path in root.iterdir()}
    assert {"commitlog", "consumequeue", "index", "lock"} <= names


def test_the_reserve_of_an_earlier_version_is_removed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It held space back, which a start may need; beside a log on another disk as well."""
    caplog.set_level("INFO", "halfmq")
    reserves = [root / "halfmqReserve", root / "commitlog" / "halfmq" / "halfmqReserve"]
    for reserve in reserves:
        reserve.parent.mkdir(parents=True, exist_ok=True)
        reserve.write_bytes(bytes(4096))

    store, _ = open_store(root)
    store.close()

    assert not any(reserve.exists() for reserve in reserves)
    for reserve in reserves:
        assert f"event=leftover_removed path={reserve} bytes=4096" in caplog.text


def test_a_start_after_a_kill_scans_what_came_since_the_checkpoint(
    root: Path, tmp_path: Path
) -> None:
    """Not the whole file of the log: what lies before is compared with its digest."""
    store, _ = open_store(root, commit_log_file_size=1 << 20)
    done = append_durably(store, *(draft(queue_id=number % 3) for number in range(100)))
    maintain(store)
    done += append_durably(store, *(draft(queue_id=number % 4) for number in range(5)))

    killed, report = open_store(crash(root, tmp_path / "killed"), commit_log_file_size=1 << 20)

    assert (report.start_offset, report.records) == (done[99].physical_offset, 6)
    assert served(killed) == [one.physical_offset for one in done]
    assert bounds(killed) == bounds(store)
    killed.close()
    store.close()


def damage_middle_of_log(root: Path) -> None:
    log_patch(root, 7 * FILE_SIZE + 3000, b"damaged")


def damage_last_record(root: Path) -> None:
    offset = load_checkpoint(root / "checkpoint").queues_offset
    (root / "digests" / "commitlog" / log_path(root, 7 * FILE_SIZE).name).unlink()
    log_patch(root, offset + 100, b"damaged")


@pytest.mark.parametrize(
    "doubt",
    [forget_digests, forget_queued, forget_mark, damage_middle_of_log, damage_last_record],
)
def test_a_start_after_a_kill_scans_the_file_where_anything_is_in_doubt(
    root: Path, doubt: Callable[[Path], None]
) -> None:
    """What the checkpoint says of the queues counts only where the log is as it was then."""
    filled(root)
    mark_aborted(root)
    doubt(root)

    store, report = open_store(root)

    assert report.records >= 194
    assert len(served(store)) >= 194
    store.close()


def test_a_kill_loses_nothing(root: Path, tmp_path: Path) -> None:
    """All that was appended is there, with the same queue offsets."""
    offsets = filled(root)
    store, _ = open_store(root)
    offsets += [appended.physical_offset for appended in append_durably(store, draft(), draft("N"))]
    expected = bounds(store)
    copy = crash(root, tmp_path / "copy")
    store.close()

    reopened, report = open_store(copy)

    assert not report.clean
    assert served(reopened) == offsets
    assert bounds(reopened) == expected
    reopened.close()


@pytest.mark.parametrize("kept", [0, 5])
@pytest.mark.parametrize("then_valid", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [
        QueueEntry(-1 << 60, 300, 7),
        QueueEntry(-300, -300, 0),
        QueueEntry(1 << 60, 300, 7),
        QueueEntry(0, 0, 0),
        PRE_BLANK,
    ],
    ids=["negative", "negative size", "far ahead", "zeros", "blank"],
)
def test_garbage_at_the_end_of_a_queue_counts_for_nothing(
    root: Path, tmp_path: Path, *, garbage: QueueEntry, kept: int, then_valid: bool
) -> None:
    """A power cut may leave it in place of entries that were not on disk yet.

    Where some of it looks valid, a search by halves finds the queue's end behind the other.
    """
    store = MessageStore(small_config(root), now_ms=SteppingClock())
    store.open()
    offsets = []
    for number in range(200):
        key = ("T", 0) if number % 2 else ("U", number % 3)
        offsets.append(append_durably(store, draft(*key, body=bytes(500)))[0].physical_offset)
    expected = bounds(store)
    store.close()
    mark_aborted(root)
    shutil.rmtree(root / "digests", ignore_errors=True)
    _, report = open_store(crash(root, tmp_path / "copy"))
    assert report.start_offset > 0
    lost = sum(offset < report.start_offset for offset in offsets[1::2]) + kept
    for place in range(lost, 100):
        entry = QueueEntry(1 << 60, 300, 7) if then_valid and place >= 75 else garbage
        directory = root / "consumequeue" / "T" / "0"
        path = directory / f"{place * ENTRY_SIZE // QUEUE_FILE_SIZE * QUEUE_FILE_SIZE:020d}"
        if path.exists():
            patch(path, place * ENTRY_SIZE % QUEUE_FILE_SIZE, entry.pack())

    reopened, _ = open_store(root)

    assert served(reopened) == offsets
    assert bounds(reopened) == expected
    reopened.close()


def test_a_start_after_a_kill_deletes_no_queue_file(root: Path) -> None:
    """With one of them per queue, hundreds of them would cost seconds; they are used again."""
    store, _ = open_store(root, commit_log_file_size=1 << 20, consume_queue_file_size=10_000)
    append_durably(store, *(draft(f"T{number}") for number in range(20)))
    store.close()
    mark_aborted(root)
    forget_digests(root)
    queues = root / "consumequeue"
    files = {path: path.stat().st_ino for path in queues.rglob("*") if path.is_file()}

    reopened, report = open_store(
        root, commit_log_file_size=1 << 20, consume_queue_file_size=10_000
    )

    assert report.queues_rebuilt
    assert len(served(reopened)) == len(files) == 20
    assert files == {path: path.stat().st_ino for path in queues.rglob("*") if path.is_file()}
    reopened.close()


@pytest.mark.parametrize("count", [49, 50, 51, 100])
def test_a_queue_goes_on_where_a_file_of_it_was_emptied(root: Path, count: int) -> None:
    """Its last file may hold nothing but records that the log has lost."""
    store, _ = open_store(root, commit_log_file_size=1 << 20)  # 50 entries are a queue file
    done = [append_durably(store, draft())[0] for _ in range(120)]
    store.close()
    at = done[count].physical_offset
    patch(log_path(root, 0), at, bytes((1 << 20) - at))
    mark_aborted(root)

    reopened, _ = open_store(root, commit_log_file_size=1 << 20)
    assert reopened.queues.bounds("T", 0) == (0, count)
    more = [append_durably(reopened, draft())[0] for _ in range(70)]
    assert [one.queue_offset for one in more] == list(range(count, count + 70))
    kept = [one.physical_offset for one in (*done[:count], *more)]
    assert served(reopened) == kept
    reopened.close()

    again, _ = open_store(root, commit_log_file_size=1 << 20)
    assert served(again) == kept
    again.close()


def test_a_torn_record_is_cut(root: Path) -> None:
    """The last record is half there: it goes, and the next one takes its place everywhere."""
    offsets = filled(root)
    store, _ = open_store(root)
    last = store.reader.record_at(offsets[-1])
    store.close()
    assert last is not None
    mark_aborted(root)
    log_patch(root, last.end - 200, bytes(200))

    store, report = open_store(root)

    assert report.end_offset == offsets[-1]
    assert 0 < report.truncated_bytes <= last.total_size
    assert served(store) == offsets[:-1]
    (done,) = append_durably(store, draft(last.topic, last.queue_id))
    assert (done.physical_offset, done.queue_offset) == (offsets[-1], last.queue_offset)
    store.close()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("left", [bytes(512), bytes(range(256)) * 2], ids=["zeros", "garbage"])
def test_a_record_without_all_of_its_properties_is_cut(
    root: Path, left: bytes, *, is_known: bool
) -> None:
    """A power cut kept one sector of them from the disk; the CRC covers only the body."""
    offsets = filled(root, 3)
    store, _ = open_store(root)
    long = {"UNIQ_KEY": "u", "LONG": "x" * 2_000}
    (last,) = store.append([draft(body=b"last", properties=long)])
    store.close()
    mark_aborted(root)
    for cut in range(512, last.size, 512):
        sector = last.physical_offset + cut
        sector -= sector % 512
        whole = log_path(root, 0).read_bytes()
        log_patch(root, sector, left[: last.end - sector])
        if is_known:
            move_mark(root, last.physical_offset)
        else:
            forget_mark(root)

        store, report = open_store(root)

        assert report.end_offset == last.physical_offset
        assert served(store) == offsets
        store.close()
        mark_aborted(root)
        log_patch(root, 0, whole)


def test_zeros_that_a_sender_put_into_properties_cut_nothing(root: Path) -> None:
    """The checkpoint says that the record was on disk, so nothing of it can be missing."""
    store, _ = open_store(root)
    zeros = {"UNIQ_KEY": "u", "ZEROS": "\0" * 2_000}
    done = [*store.append([draft(properties=zeros)]), *store.append([draft(body=b"later")])]
    store.close()
    mark_aborted(root)

    store, _ = open_store(root)

    assert served(store) == [one.physical_offset for one in done]
    store.close()


def test_the_cut_tail_is_zero(root: Path) -> None:
    """What is left behind the end would come back with a later crash: in log and queues."""
    offsets = filled(root)
    mark_aborted(root)
    cut = offsets[-20]
    for offset in offsets[-20:]:
        log_patch(root, offset, b"\xff" * 4)

    store, report = open_store(root)

    assert report.end_offset == cut
    base = cut - cut % FILE_SIZE
    assert not any(log_path(root, base).read_bytes()[cut - base :])
    assert not any(
        path.name > log_path(root, base).name and any(path.read_bytes())
        for path in (root / "commitlog").iterdir()
    )
    assert report.truncated_bytes > 0
    for topic, queue_id in store.queues.names():
        end = store.queues.bounds(topic, queue_id)[1] * ENTRY_SIZE
        for path in (root / "consumequeue" / topic / str(queue_id)).iterdir():
            position = max(end - int(path.name), 0)
            assert not any(path.read_bytes()[position:])
    assert served(store) == offsets[:-20]
    store.close()


def test_files_behind_the_end_are_deleted(root: Path) -> None:
    """As RocketMQ does: the log ends in its last file."""
    offsets = filled(root)
    mark_aborted(root)
    cut = next(offset for offset in offsets if offset > FILE_SIZE)
    for offset in offsets[offsets.index(cut) :]:
        log_patch(root, offset, bytes(8))

    store, report = open_store(root, index_enabled=False)
    store.close()

    assert report.end_offset == cut
    names = sorted(path.name for path in (root / "commitlog").iterdir())
    assert names == [log_path(root, 0).name, log_path(root, FILE_SIZE).name]


def remove_queues(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")


def remove_one_queue(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "T" / "0")


def remove_last_queue_file(root: Path) -> None:
    max((root / "consumequeue" / "T" / "0").iterdir()).unlink()


def remove_first_queue_file(root: Path) -> None:
    min((root / "consumequeue" / "T" / "0").iterdir()).unlink()


def zero_middle_of_queue(root: Path) -> None:
    patch(min((root / "consumequeue" / "T" / "0").iterdir()), 100, bytes(QUEUE_FILE_SIZE - 100))


def falsify_last_entries(root: Path) -> None:
    path = max((root / "consumequeue" / "T" / "0").iterdir())
    content = path.read_bytes()
    used = len(content.rstrip(b"\0")) // ENTRY_SIZE * ENTRY_SIZE
    stale = QueueEntry(7, 100, 0).pack()
    patch(path, min(used + ENTRY_SIZE, QUEUE_FILE_SIZE - ENTRY_SIZE), stale)
    patch(path, used, stale)


def remove_everything_derived(root: Path) -> None:
    remove_queues(root)
    shutil.rmtree(root / "index")
    (root / "checkpoint").unlink(missing_ok=True)


DAMAGES = [
    remove_queues,
    remove_last_queue_file,
    falsify_last_entries,
    remove_everything_derived,
]


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_queues_are_rebuilt_from_the_log(
    root: Path, damage: Callable[[Path], None], *, aborted: bool
) -> None:
    """Whatever was lost or wrong in what is derived, after either kind of stop."""
    offsets = filled(root)
    damage(root)
    if aborted:
        mark_aborted(root)

    store, _ = open_store(root)

    assert served(store) == offsets
    assert sorted(end for _, end in bounds(store).values()) == [32, 33, 33, 97]
    assert store.index.query("T", "u193", 9, 0, 1 << 60) == [offsets[193]]
    store.close()


LOSSES = [remove_one_queue, remove_first_queue_file, zero_middle_of_queue]


@pytest.mark.parametrize("damage", LOSSES)
def test_a_lost_queue_is_rebuilt_after_a_kill(root: Path, damage: Callable[[Path], None]) -> None:
    """Also where records of the scanned part alone would leave it with a hole."""
    offsets = filled(root)
    damage(root)
    mark_aborted(root)

    store, report = open_store(root)

    assert report.queues_rebuilt
    assert served(store) == offsets
    store.close()


def test_a_start_that_was_killed_while_it_rebuilt_queues_is_made_good(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that it had cut, and that got no message lately, is no empty queue to the next."""
    store, _ = open_store(root)
    done = store.append([draft(), draft("OLD")])
    for _ in range(195):
        done += store.append([draft(body=bytes(500))])
    store.close()
    remove_one_queue(root)
    mark_aborted(root)
    write = QueueScan.write

    def killed_at_old(scan: QueueScan[ConsumeQueue]) -> None:
        if scan.queue.topic == "OLD":
            raise KeyboardInterrupt
        write(scan)

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "CHECKPOINT_MARGIN_MS", 0)
        patched.setattr(QueueScan, "write", killed_at_old)
        with pytest.raises(KeyboardInterrupt):
            open_store(root)
    monkeypatch.setattr(recovery, "CHECKPOINT_MARGIN_MS", 0)

    store, report = open_store(root)

    assert report.queues_rebuilt
    assert served(store) == [one.physical_offset for one in done]
    store.close()
    assert open_store(root)[1].start_offset > 0, "it is made good once"


def test_a_missing_index_is_rebuilt(root: Path) -> None:
    """RocketMQ's look-ups stay empty."""
    offsets = filled(root)
    shutil.rmtree(root / "index")

    store, _ = open_store(root)

    for number, offset in enumerate(offsets):
        topic = "T" if number % 2 else "U"
        assert store.index.query(topic, f"u{number}", 9, 0, 1 << 60) == [offset]
    store.close()


def test_an_index_that_lacks_much_is_filled_while_messages_are_served(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups by key can wait, and a start after a kill must not: what comes meanwhile follows."""
    offsets = filled(root)
    shutil.rmtree(root / "index")
    mark_aborted(root)
    monkeypatch.setattr(index_builder, "START_BYTES_MAX", 1_000)
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 10)

    def found(number: int) -> list[int]:
        return store.index.query("T" if number % 2 else "U", f"u{number}", 9, 0, 1 << 60)

    monkeypatch.setattr(index_builder, "SLICE_MS", 0.0)
    store, _ = open_store(root)
    assert found(len(offsets) - 1) == []
    slices = 1
    while store.tick(0.0):
        slices += 1
        if slices == 3:
            properties = {"UNIQ_KEY": f"u{len(offsets)}"}
            topic = "T" if len(offsets) % 2 else "U"
            (done,) = append_durably(store, draft(topic, properties=properties))
            offsets.append(done.physical_offset)

    assert slices > 3
    assert not store.index.lags
    assert [found(number) for number in range(len(offsets))] == [[offset] for offset in offsets]
    store.close()


def test_an_index_may_lag_behind_a_log_that_loses_its_beginning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are deleted while the index is filled from them are passed over."""
    offsets = filled(root)
    shutil.rmtree(root / "index")
    monkeypatch.setattr(index_builder, "START_BYTES_MAX", 1_000)
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 10)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    store, _ = open_store(root)
    files = log_of(store).files
    assert len(files.bases) > 2
    for base in files.forget_before(files.bases[2]):
        files.path(base).unlink()

    while store.index.lags:
        store.tick(0.0)

    start = store.min_offset
    for number, offset in enumerate(offsets):
        topic = "T" if number % 2 else "U"
        hits = store.index.query(topic, f"u{number}", 9, 0, 1 << 60)
        assert hits == ([offset] if offset >= start else [])
    store.close()


def test_records_that_no_queue_knows_are_dispatched_after_a_clean_stop(root: Path) -> None:
    """The first of them begins where the newest queue entry's record ends, and is not skipped."""
    offsets = filled(root)
    store, _ = open_store(root)
    last = store.reader.record_at(offsets[-1])
    assert last is not None
    store.close()
    directory = root / "consumequeue" / last.topic / str(last.queue_id)
    position = last.queue_offset * ENTRY_SIZE
    path = directory / f"{position - position % QUEUE_FILE_SIZE:020d}"
    patch(path, position % QUEUE_FILE_SIZE, bytes(ENTRY_SIZE))

    store, report = open_store(root)

    assert (report.clean, report.records) == (True, 1)
    assert served(store) == offsets
    store.close()


def test_a_log_may_end_in_records_of_no_queue(root: Path) -> None:
    """Decisions of transactions stand in the log alone; the end lies behind them."""
    filled(root)
    store, _ = open_store(root)
    rollback = draft("RMQ_SYS_TRANS_HALF_TOPIC", sys_flag=TransactionType.ROLLBACK)
    (done,) = append_durably(store, rollback)
    store.close()

    store, report = open_store(root)

    assert (report.records, store.write_offset) == (1, done.end)
    assert store.reader.record_at(done.physical_offset) is not None
    store.close()


def test_a_log_that_ends_with_a_blank_goes_on_in_the_next_file(root: Path, tmp_path: Path) -> None:
    """The kill came between the end of one file and the first record of the next."""
    store, _ = open_store(root)
    (first,) = append_durably(store, draft(body=bytes(8000)))
    append_durably(store, draft(body=bytes(8000)), draft(body=bytes(8000)))
    copy = crash(root, tmp_path / "copy")
    store.close()
    patch(log_path(copy, FILE_SIZE), 0, bytes(FILE_SIZE))

    reopened, report = open_store(copy)

    assert report.end_offset == FILE_SIZE
    (third,) = append_durably(reopened, draft())
    assert (third.physical_offset, third.queue_offset) == (FILE_SIZE, 2)
    reopened.close()
    assert first.size < FILE_SIZE


def test_a_queue_may_start_late(root: Path) -> None:
    """Retention took the queue's first records: what is left keeps its queue offsets."""
    store, _ = open_store(root)
    done = append_durably(store, *(draft(body=bytes(1000)) for _ in range(70)))
    store.close()
    log_path(root, 0).unlink()
    log_path(root, FILE_SIZE).unlink()
    remove_everything_derived(root)
    left = [appended for appended in done if appended.physical_offset >= 2 * FILE_SIZE]
    first = left[0].queue_offset

    for _ in range(3):
        store, _ = open_store(root)
        assert store.queues.bounds("T", 0) == (first, 70)
        assert served(store) == [appended.physical_offset for appended in left]
        assert store.min_offset == 2 * FILE_SIZE
        store.close()
    path = root / "consumequeue" / "T" / "0" / f"{first * ENTRY_SIZE // 1000 * 1000:020d}"
    assert path.read_bytes()[:ENTRY_SIZE] == PRE_BLANK.pack()


def test_a_queue_whose_messages_have_all_expired_keeps_its_place(root: Path) -> None:
    """Consumers keep offsets; a queue that began again at zero would hide new messages."""
    store, _ = open_store(root)
    append_durably(store, *(draft("old", body=bytes(1000)) for _ in range(20)))
    append_durably(store, *(draft(body=bytes(1000)) for _ in range(20)))
    store.close()
    log_path(root, 0).unlink()

    for aborted in (False, True):
        if aborted:
            mark_aborted(root)
        store, _ = open_store(root)
        low, high = store.queues.bounds("old", 0)
        assert high == 20
        assert all(record.physical_offset >= FILE_SIZE for record in everything(store))
        store.close()
    store, _ = open_store(root)
    (done,) = append_durably(store, draft("old"))
    assert done.queue_offset == 20
    assert low <= 20
    store.close()


def test_without_a_log_queues_begin_anew(root: Path) -> None:
    """Their entries would name records that do not exist."""
    filled(root)
    shutil.rmtree(root / "commitlog")

    store, report = open_store(root)

    assert report.end_offset == 0
    assert store.queues.names() == []
    (done,) = append_durably(store, draft())
    assert (done.physical_offset, done.queue_offset) == (0, 0)
    store.close()


@pytest.mark.parametrize("where", ["commitlog", "consumequeue/T/0"])
def test_a_file_of_another_size_stops_the_start(root: Path, where: str) -> None:
    """The settings do not fit the directory; the error names the file, and nothing is changed."""
    filled(root)
    path = min((root / where).iterdir())
    with path.open("ab") as file:
        file.write(b"x")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    store = MessageStore(small_config(root), now_ms=Clock())
    with pytest.raises(UnusableFileError) as caught:
        store.open()

    assert caught.value.path == path
    assert str(path.stat().st_size) in str(caught.value)
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["notes.txt", "123", f"{FILE_SIZE - 1:020d}"])
def test_a_stray_file_in_the_log_stops_the_start(root: Path, name: str) -> None:
    """RocketMQ would not start either; nothing is guessed."""
    filled(root)
    (root / "commitlog" / name).write_bytes(bytes(FILE_SIZE))

    with pytest.raises(UnusableFileError, match=name):
        open_store(root)


def test_an_empty_last_file_is_removed(root: Path) -> None:
    """It was being created when the machine stopped."""
    offsets = filled(root)
    last = max((root / "commitlog").iterdir())
    empty = log_path(root, int(last.name) + FILE_SIZE)
    empty.touch()

    store, _ = open_store(root)

    assert served(store) == offsets
    store.close()
    assert not empty.exists() or empty.stat().st_size == FILE_SIZE


def test_a_missing_file_of_the_log_stops_the_start(root: Path) -> None:
    """Nobody is told that messages are fine while a gigabyte of them is gone."""
    filled(root)
    log_path(root, FILE_SIZE).unlink()

    with pytest.raises(UnusableFileError, match="missing from the log") as caught:
        open_store(root)

    assert caught.value.path == log_path(root, FILE_SIZE)
    assert not (root / "abort").exists()


def test_a_failed_start_can_be_repeated(root: Path) -> None:
    """It lets go of the lock and of all files."""
    filled(root)
    stray = root / "commitlog" / "stray"
    stray.touch()
    (root / "commitlog" / "zzz").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(UnusableFileError):
            open_store(root)
    stray.unlink()
    (root / "commitlog" / "zzz").unlink()

    store, report = open_store(root)

    assert report.clean
    store.close()


def test_sub_directories_are_no_business_of_ours(root: Path) -> None:
    """RocketMQ skips them, in log and queues."""
    offsets = filled(root)
    (root / "commitlog" / "backup").mkdir()
    (root / "consumequeue" / "T" / "not-a-queue").mkdir()
    (root / "consumequeue" / "file").touch()

    store, _ = open_store(root)

    assert served(store) == offsets
    store.close()


def test_a_second_store_of_this_process_is_refused(root: Path) -> None:
    """And the refusal does not cost the first one its lock."""
    store, _ = open_store(root)

    for _ in range(2):
        with pytest.raises(DirectoryInUseError, match=str(os.getpid())):
            open_store(root)

    assert other_process_opens(root).returncode == 3
    store.close()
    store, _ = open_store(root)
    store.close()


def other_process_opens(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from halfmq.store.errors import DirectoryInUseError\n"
        "from halfmq.store.files.directory_lock import DirectoryLock\n"
        "try:\n"
        "    DirectoryLock(Path(sys.argv[1])).acquire(0)\n"
        "except DirectoryInUseError as error:\n"
        "    print(error)\n"
        "    sys.exit(3)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False
    )


def test_another_process_is_refused_and_told_by_whom(root: Path) -> None:
    """The error names process and start time; nothing in the directory is touched."""
    store, _ = open_store(root)
    append_durably(store, draft())

    refused = other_process_opens(root)

    assert refused.returncode == 3
    assert f"pid {os.getpid()}, started 2023-11-14T22:13:20+00:00" in refused.stdout
    store.close()
    assert other_process_opens(root).returncode == 0


def test_the_lock_is_rocketmqs(root: Path) -> None:
    """The file begins with the four letters it writes, which is all that it ever looks at."""
    store, _ = open_store(root)

    assert (root / "lock").read_bytes().startswith(b"lock")
    store.close()


def test_a_checkpoint_is_five_numbers_in_a_page(root: Path) -> None:
    """Laid out as RocketMQ maps it; after an ordered stop all times are the last record's."""
    offsets = filled(root)
    store, _ = open_store(root)
    last = store.reader.record_at(offsets[-1])
    assert last is not None
    store.close()

    checkpoint = load_checkpoint(root / "checkpoint")

    assert (root / "checkpoint").stat().st_size == 4096
    assert checkpoint.log_timestamp == checkpoint.queues_timestamp == last.store_timestamp
    assert checkpoint.confirm_offset == offsets[-1]


def test_a_cut_checkpoint_is_no_checkpoint(root: Path) -> None:
    """Then nothing is trusted, and everything scanned."""
    offsets = filled(root)
    (root / "checkpoint").write_bytes(b"\xff" * 39)
    mark_aborted(root)

    store, report = open_store(root)

    assert (report.start_offset, served(store)) == (0, offsets)
    store.close()


def test_the_log_may_lie_elsewhere(tmp_path: Path) -> None:
    """storePathCommitLog: on another disk than the queues."""
    elsewhere = tmp_path / "fast" / "log"
    store, _ = open_store(tmp_path / "store", commit_log_path=elsewhere)
    (done,) = append_durably(store, draft())
    store.close()

    assert (elsewhere / ("0" * 20)).exists()
    store, report = open_store(tmp_path / "store", commit_log_path=elsewhere)
    assert report.end_offset == done.end
    store.close()


@pytest.mark.parametrize("sys_flag", [0, 0x80, 0xC], ids=["plain", "inner batch", "rolled back"])
def test_a_topic_that_is_no_text_costs_its_record(sys_flag: int, root: Path) -> None:
    """Neither the queue nor a reader of the log stops there; it is told like other damage."""
    store, _ = open_store(root)
    drafts = [draft(body=b"1"), draft(body=b"2", sys_flag=sys_flag), draft(body=b"3")]
    offsets = [appended.physical_offset for one in drafts for appended in store.append([one])]
    store.close()
    with log_path(root, 0).open("rb") as file:
        file.seek(offsets[1])
        content = file.read(offsets[2] - offsets[1])
    log_patch(root, offsets[1] + content.index(b"\x01T") + 1, b"\xff")
    mark_aborted(root)

    store, report = open_store(root)

    assert [damage.offset for damage in report.damages] == [offsets[1]]
    assert served(store) == [offsets[0], offsets[2]]
    scanned = [record.physical_offset for record in store.reader.scan(0)]
    assert scanned == offsets, "a filler stands where it was"
    store.close()


def test_what_is_kept_of_damaged_records_is_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk must not fill another one; the repair is made all the same."""
    offsets = filled(root)
    for offset in (offsets[3], offsets[30], offsets[60]):
        log_patch(root, offset + 100, b"\xff" * 8)
    mark_aborted(root)
    monkeypatch.setattr("halfmq.store.recovery.repair.ASIDE_SIZE_MAX", 1500)

    store, report = open_store(root)

    assert len(report.damages) == 3
    kept = list((root / "damaged").iterdir())
    assert len(kept) == 2
    assert sum(path.stat().st_size for path in kept) <= 1500
    assert len(served(store)) == len(offsets) - 3
    store.close()


def test_fillers_stay_hidden_after_a_life_under_rocketmq(root: Path) -> None:
    """Its queue entries say nothing of fillers; the first start of ours looks at the log."""
    offsets = filled(root)
    log_patch(root, offsets[30] + 100, b"\xff" * 8)
    mark_aborted(root)
    store, _ = open_store(root)
    lost = store.reader.record_at(offsets[30])
    assert lost is not None
    expected = served(store)
    store.close()
    path = min((root / "consumequeue" / lost.topic / str(lost.queue_id)).iterdir())
    entry = QueueEntry(lost.physical_offset, lost.total_size, 0).pack()
    patch(path, lost.queue_offset * ENTRY_SIZE, entry)
    patch(root / "checkpoint", 0, b"\0\1")

    for _ in range(2):
        store, _ = open_store(root)
        assert served(store) == expected
        store.close()


def test_a_clean_start_has_no_damage_to_tell(root: Path) -> None:
    """And how far a start is, is there for whoever asks meanwhile."""
    filled(root)
    mark_aborted(root)
    forget_digests(root)

    store, report = open_store(root)

    assert report.damages == ()
    assert store.recovery.records == report.records == 195
    assert store.recovery.done == report.end_offset <= store.recovery.total
    assert not (root / "damaged").exists()
    store.close()


@pytest.mark.parametrize("number", [0, 1, 100, 193, 194])
@pytest.mark.parametrize("bit", [0, 1, 5, 9, 20, 45, 63])
def test_a_queue_offset_that_lies_hides_no_other_message(root: Path, number: int, bit: int) -> None:
    """Where no digest tells: a record may seem to be far ahead in its queue, or long past."""
    offsets = filled(root)
    shutil.rmtree(root / "digests")
    record = offsets[number]
    store, _ = open_store(root)
    said = store.reader.record_bytes(record)
    messages = everything(store)
    store.close()
    assert said is not None
    lie = int.from_bytes(said[20:28], "big") ^ 1 << bit
    shutil.rmtree(root / "digests")
    log_patch(root, record + 20, lie.to_bytes(8, "big"))
    mark_aborted(root)

    for _ in range(2):
        store, _ = open_store(root)
        served = everything(store)
        others = [one for one in messages if one.physical_offset != record]
        assert sum(one not in served for one in others) <= 1, "the one whose place it takes"
        store.close()
        mark_aborted(root)
