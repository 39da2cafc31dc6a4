"""Queues and index are rebuilt from the log, whatever is missing or wrong in them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.store.format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry
from halfmq.store.index import index_builder
from halfmq.store.integrity.expected_entries import QueueScan
from halfmq.store.message_store import MessageStore
from halfmq.store.queue.consume_queue import ConsumeQueue
from halfmq.store.recovery import recovery
from tests.support.stopped_stores import (
    FILE_SIZE,
    QUEUE_FILE_SIZE,
    filled,
    forget_digests,
    log_path,
    mark_aborted,
    open_store,
    patch,
    remove_everything_derived,
    remove_one_queue,
    remove_queues,
    served,
)
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


def test_a_start_after_a_kill_deletes_no_queue_file(root: Path) -> None:
    """They are reused, because deleting and creating hundreds of files takes seconds."""
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
def test_a_queue_continues_after_its_last_file_was_emptied(root: Path, count: int) -> None:
    """The log may have lost all records of the last queue file."""
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
    """For each kind of damage, after a clean stop and after a kill."""
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
    """From the whole log if the scanned part alone would leave a gap."""
    offsets = filled(root)
    damage(root)
    mark_aborted(root)

    store, report = open_store(root)

    assert report.queues_rebuilt
    assert served(store) == offsets
    store.close()


def test_queues_are_rebuilt_again_if_the_rebuilding_start_was_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that it had cut must not be taken for an empty one by the next start."""
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
    assert open_store(root)[1].start_offset > 0, "queues are rebuilt only once"


def test_a_missing_index_is_rebuilt(root: Path) -> None:
    """Unlike in RocketMQ, whose look-ups would find nothing."""
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
    """A start after a kill does not wait for it, and new records are indexed as well."""
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


def test_files_may_be_deleted_while_the_index_is_filled_from_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index continues with the files that are left."""
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


def test_a_queue_may_begin_at_a_higher_offset(root: Path) -> None:
    """After retention has deleted its first records, the others keep their queue offsets."""
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


def test_a_queue_whose_messages_have_all_expired_keeps_its_end(root: Path) -> None:
    """If it began at zero again, consumers would miss new messages."""
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


def test_without_a_log_queues_begin_at_zero(root: Path) -> None:
    """Their entries refer to records that do not exist."""
    filled(root)
    shutil.rmtree(root / "commitlog")

    store, report = open_store(root)

    assert report.end_offset == 0
    assert store.queues.names() == []
    (done,) = append_durably(store, draft())
    assert (done.physical_offset, done.queue_offset) == (0, 0)
    store.close()


COUNT = 40  # entries, of the 50 in a file


@pytest.mark.parametrize("ending", ["kill", "stop"])
@pytest.mark.parametrize("start", range(0, COUNT * 20 - 40, 95))
def test_zeros_among_the_entries_lead_to_a_rebuild(tmp_path: Path, start: int, ending: str) -> None:
    """Wherever they lie, though the queue's end is where the checkpoint says."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    append_durably(store, *(draft("quiet", 0, f"{number}".encode()) for number in range(COUNT)))
    for _ in range(200):  # the part of the log that a start scans holds none of them
        append_durably(store, draft("busy", 0, bytes(1_000)))
    maintain(store)
    maintain(store)
    root = tmp_path / "store"
    if ending == "kill":
        root = crash(root, tmp_path / "killed")
        store.close(clean=False)
    else:
        store.close()
    queue = root / "consumequeue" / "quiet" / "0" / f"{0:020}"
    with queue.open("r+b") as file:
        file.seek(start)
        file.write(bytes(40))

    store = MessageStore(small_config(root), now_ms=Clock())
    store.open()
    found = [record.body for record in everything(store) if record.topic == "quiet"]
    store.close()
    assert found == [f"{number}".encode() for number in range(COUNT)]
