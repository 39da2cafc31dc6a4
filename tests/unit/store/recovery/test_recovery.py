"""Recovery at a start: the end of the log, and queues that match it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.store.errors import UnusableFileError
from halfmq.store.files.checkpoint import DurableMark, load_checkpoint
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry
from halfmq.store.message_store import MessageStore, RecoveryReport
from tests.support.stopped_stores import (
    FILE_SIZE,
    NEVER,
    QUEUE_FILE_SIZE,
    filled,
    forget_digests,
    forget_mark,
    log_patch,
    log_path,
    mark_aborted,
    open_store,
    patch,
    served,
)
from tests.support.store_child import SteppingClock
from tests.support.stores import (
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    maintain,
    pulled,
    small_config,
)


def forget_queued(root: Path) -> None:
    """Erase the offset of the queues in the checkpoint."""
    patch(root / "checkpoint", 88, bytes(20))


def move_mark(root: Path, offset: int) -> None:
    """Set the durable mark."""
    mark = DurableMark(root / "checkpoint")
    mark.start(offset)
    mark.close()


def test_a_start_after_a_clean_stop_scans_nothing(root: Path) -> None:
    """It checks only the end of each queue."""
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
    """With the files that RocketMQ expects; it can be closed without a record."""
    for _ in range(2):
        store, report = open_store(root)
        assert (report.clean, report.end_offset) == (True, 0)
        store.close()
    names = {path.name for path in root.iterdir()}
    assert {"commitlog", "consumequeue", "index", "lock"} <= names


def test_a_start_after_a_kill_scans_from_the_checkpoint(root: Path, tmp_path: Path) -> None:
    """And not the whole file of the log: digests confirm the records before."""
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
def test_a_start_after_a_kill_scans_whole_files_if_in_doubt(
    root: Path, doubt: Callable[[Path], None]
) -> None:
    """The offset in the checkpoint counts only if everything before it is confirmed."""
    filled(root)
    mark_aborted(root)
    doubt(root)

    store, report = open_store(root)

    assert report.records >= 194
    assert len(served(store)) >= 194
    store.close()


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
def test_garbage_at_the_end_of_a_queue_is_removed(
    root: Path, tmp_path: Path, *, garbage: QueueEntry, kept: int, then_valid: bool
) -> None:
    """A power cut may leave it in place of entries that were not on disk yet.

    If a part of it looks valid, the binary search finds the end of the queue after the garbage.
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


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("left", [bytes(512), bytes(range(256)) * 2], ids=["zeros", "garbage"])
def test_a_record_without_all_of_its_properties_is_cut(
    root: Path, left: bytes, *, is_known: bool
) -> None:
    """A power cut lost one sector of them; the CRC covers only the body."""
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


def test_a_record_whose_properties_contain_zeros_is_kept(root: Path) -> None:
    """The checkpoint shows that it was on disk, so no sector can be missing."""
    store, _ = open_store(root)
    zeros = {"UNIQ_KEY": "u", "ZEROS": "\0" * 2_000}
    done = [*store.append([draft(properties=zeros)]), *store.append([draft(body=b"later")])]
    store.close()
    mark_aborted(root)

    store, _ = open_store(root)

    assert served(store) == [one.physical_offset for one in done]
    store.close()


def test_everything_after_the_end_is_zeroed(root: Path) -> None:
    """Otherwise cut records and entries could reappear after a later crash."""
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


def test_files_after_the_end_are_deleted(root: Path) -> None:
    """As in RocketMQ, the log ends in its last file."""
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


def test_records_without_a_queue_entry_are_dispatched_after_a_clean_stop(root: Path) -> None:
    """Also the first one, which begins where the record of the newest entry ends."""
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
    """Decisions about transactions are in no queue; the log ends after them."""
    filled(root)
    store, _ = open_store(root)
    rollback = draft("RMQ_SYS_TRANS_HALF_TOPIC", sys_flag=TransactionType.ROLLBACK)
    (done,) = append_durably(store, rollback)
    store.close()

    store, report = open_store(root)

    assert (report.records, store.write_offset) == (1, done.end)
    assert store.reader.record_at(done.physical_offset) is not None
    store.close()


def test_a_log_that_ends_with_a_blank_continues_in_the_next_file(
    root: Path, tmp_path: Path
) -> None:
    """The broker was killed before it wrote the first record of the next file."""
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


def test_a_log_file_of_another_size_stops_the_start_and_names_the_remedy(root: Path) -> None:
    """Nothing is changed; with the size that the error names, only what was cut off is lost."""
    offsets = filled(root)
    path = log_path(root, FILE_SIZE)
    os.truncate(path, FILE_SIZE // 2)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    with pytest.raises(UnusableFileError, match=f"truncate -s {FILE_SIZE} {path}") as caught:
        open_store(root)

    assert caught.value.path == path
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    os.truncate(path, FILE_SIZE)
    mark_aborted(root)
    store, _ = open_store(root)
    kept = [one for one in offsets if not FILE_SIZE * 1.5 - 700 < one < FILE_SIZE * 2]
    assert {*kept} <= {*served(store)} < {*offsets}
    store.close()


def test_queue_files_that_all_have_another_size_stop_the_start_unless_asked_for(
    root: Path,
) -> None:
    """The settings may have changed; the error says how to have the queues rebuilt."""
    offsets = filled(root)

    with pytest.raises(UnusableFileError, match=f"1000.*{root}/consumequeue.rebuild"):
        open_store(root, consume_queue_file_size=500)

    (root / "consumequeue.rebuild").touch()
    store, report = open_store(root, consume_queue_file_size=500)
    assert (report.queues_rebuilt, served(store)) == (True, offsets)
    store.close()


@pytest.mark.parametrize("name", ["notes.txt", "123", f"{FILE_SIZE - 1:020d}"])
def test_an_unknown_file_in_the_log_directory_stops_the_start(root: Path, name: str) -> None:
    """RocketMQ would not start either."""
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
    """The store must not serve a log that lacks a gigabyte of messages."""
    filled(root)
    log_path(root, FILE_SIZE).unlink()

    with pytest.raises(UnusableFileError, match="missing from the log") as caught:
        open_store(root)

    assert caught.value.path == log_path(root, FILE_SIZE)
    assert not (root / "abort").exists()


def test_a_failed_start_can_be_repeated(root: Path) -> None:
    """It releases the lock and closes all files."""
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


def test_subdirectories_are_ignored(root: Path) -> None:
    """As in RocketMQ, in log and queues."""
    offsets = filled(root)
    (root / "commitlog" / "backup").mkdir()
    (root / "consumequeue" / "T" / "not-a-queue").mkdir()
    (root / "consumequeue" / "file").touch()

    store, _ = open_store(root)

    assert served(store) == offsets
    store.close()


def test_the_log_may_be_in_another_directory(tmp_path: Path) -> None:
    """storePathCommitLog: it may be on another disk than the queues."""
    elsewhere = tmp_path / "fast" / "log"
    store, _ = open_store(tmp_path / "store", commit_log_path=elsewhere)
    (done,) = append_durably(store, draft())
    store.close()

    assert (elsewhere / ("0" * 20)).exists()
    store, report = open_store(tmp_path / "store", commit_log_path=elsewhere)
    assert report.end_offset == done.end
    store.close()


def quiet_then_busy(root: Path) -> int:
    """Create a closed store with 120 messages in three files of a queue, and then other messages.

    The quiet queue lies far before the part of the log that a start after a kill scans.
    """
    clock = Clock()
    config = small_config(root, flush_interval_consume_queue_ms=NEVER)
    store = MessageStore(config, now_ms=clock)
    store.open()
    store.append([draft("quiet", properties={"UNIQ_KEY": f"q{one}"}) for one in range(120)])
    for number in range(100):
        clock.now += 1_000
        store.append([draft("busy", body=bytes(2_000)), draft("busy", number % 3)])
        maintain(store)
    store.close()
    return 120


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, 410)


def cut_in_an_entry(path: Path) -> None:
    os.truncate(path, 15)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 7)


@pytest.mark.parametrize("stop", [mark_aborted, Path.is_dir], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("damage", "numbers"),
    [
        (Path.unlink, [0]),
        (Path.unlink, [2]),
        (Path.unlink, [0, 1, 2]),
        (zero, [0]),
        (zero, [1]),
        (zero, [0, 1, 2]),
        (cut, [1]),
        (cut_in_an_entry, [0]),
        (extend, [2]),
    ],
)
def test_a_queue_without_recent_messages_is_rebuilt(
    root: Path,
    damage: Callable[[Path], None],
    numbers: list[int],
    stop: Callable[[Path], object],
) -> None:
    """Whichever of its files are missing, zeroed or of a wrong size, its messages are there."""
    count = quiet_then_busy(root)
    forget_digests(root)
    stop(root)
    files = sorted((root / "consumequeue" / "quiet" / "0").iterdir())
    assert len(files) == 3
    for number in numbers:
        damage(files[number])

    store, _ = open_store(root)

    assert bounds(store)["quiet", 0] == (0, count)
    assert [one.queue_offset for one in pulled(store, "quiet", 0)] == [*range(count)]
    assert append_durably(store, draft("quiet"))[0].queue_offset == count
    store.close()
    assert open_store(root)[1].queues_rebuilt is False


@pytest.mark.parametrize("stop", [mark_aborted, Path.is_dir], ids=["killed", "stopped"])
@pytest.mark.parametrize("damage", [Path.unlink, zero, cut])
def test_without_checkpoint_a_lost_queue_is_rebuilt_all_the_same(
    root: Path, damage: Callable[[Path], None], stop: Callable[[Path], object]
) -> None:
    """The whole log is scanned."""
    count = quiet_then_busy(root)
    stop(root)
    damage(root / "checkpoint")
    shutil.rmtree(root / "consumequeue" / "quiet")

    store, report = open_store(root)

    assert report.queues_rebuilt
    assert bounds(store)["quiet", 0] == (0, count)
    store.close()


def test_messages_are_not_for_everyone_on_the_machine(root: Path) -> None:
    """Files are 0640 and directories 0750, or less by the umask."""
    filled(root)

    for path in [root, *root.rglob("*")]:
        beyond = 0o027 if path.is_dir() else 0o137
        assert path.stat().st_mode & beyond == 0, path


def rebuilt_and_killed(root: Path) -> None:
    """Kill a store that has put all keys again and not flushed them; the checkpoint is of then."""
    shutil.rmtree(root / "index")
    forget_digests(root)
    store, _ = open_store(root)
    maintain(store)
    killed = crash(root, root.with_name("killed"))
    store.close()
    shutil.rmtree(root)
    killed.rename(root)


@pytest.mark.parametrize("stop", [mark_aborted, Path.is_dir, rebuilt_and_killed])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("damage", [Path.unlink, zero, cut])
def test_a_lost_index_file_is_rebuilt(
    root: Path, damage: Callable[[Path], None], number: int, stop: Callable[[Path], object]
) -> None:
    """Also one that others follow."""
    offsets = filled(root, 1_000)
    stop(root)
    forget_digests(root)
    files = sorted((root / "index").iterdir())
    assert len(files) == 3
    damage(files[number])

    store, _ = open_store(root)

    for one, offset in enumerate(offsets):
        topic = "T" if one % 2 else "U"
        assert offset in store.index.query(topic, f"u{one}", 64, 0, 1 << 60)
    store.close()
