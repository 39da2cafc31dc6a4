"""Deleting old files: which, in which order, and what a crash in between leaves."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.files import deferred_delete, disk
from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.files.worker import Round
from halfmq.store.format.queue_entry import QueueEntry
from halfmq.store.message_store import GetStatus, MessageStore
from halfmq.store.queue.consume_queue import ConsumeQueue, MapPool
from tests.support.golden_store import unpack
from tests.support.stepped_worker import SteppedWorker
from tests.support.stores import (
    BORN,
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    everything,
    flush,
    golden_config,
    maintain,
    pulled,
    small_config,
    wait_until,
)

LOG_FILE = 16_384
QUEUE_FILE = 200  # bytes: ten entries
FILES = 5
STEPS_MAX = 1000  # of a helper, until a test gives up


class Aged:
    """A store with some full log files, whose threads run step by step."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.workers: dict[str, SteppedWorker] = {}
        self.open()

    def open(self) -> None:
        def worker(name: str, work: Round, _pause: float) -> SteppedWorker:
            return self.workers.setdefault(name, SteppedWorker(work))

        self.workers.clear()
        config = small_config(self.root, consume_queue_file_size=QUEUE_FILE)
        self.store = MessageStore(config, now_ms=self.clock, worker=worker)
        self.store.open()

    @property
    def helper(self) -> SteppedWorker:
        return self.workers["store-deletion"]

    def flush(self) -> None:
        self.workers["store-flush"].step()
        maintain(self.store)

    def fill(self, files: int = FILES) -> None:
        """Append until the log has so many files; a second passes between two groups."""
        number = 0
        while len(self.log_files()) < files:
            group = [
                draft("T", number % 3, bytes(1000), properties={"KEYS": f"k{number}"}),
                draft("U", 0, b"small", properties={"UNIQ_KEY": f"u{number}"}),
            ]
            self.store.append(group)
            self.clock.now += 1000
            number += 1
        self.store.tick(1000)
        self.flush()

    def log_files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "commitlog").iterdir())

    def settle(self) -> None:
        for _ in range(STEPS_MAX):
            self.store.tick(1000)
            if not self.helper.step():
                self.store.tick(1000)
                if not self.helper.step():
                    return
        raise AssertionError("the helper does not finish")

    def find_expired(self, stored_before_ms: int) -> int:
        self.store.deletion.find_expired(stored_before_ms)
        self.settle()
        return self.store.deletion.expired_end


@pytest.fixture
def aged(tmp_path: Path) -> Iterator[Aged]:
    aged = Aged(tmp_path / "store")
    aged.fill()
    yield aged
    aged.store.close()


def first_time(store: MessageStore, offset: int) -> int:
    record = store.reader.record_at(offset)
    assert record is not None
    return record.store_timestamp


def test_a_file_is_old_when_all_its_records_are(aged: Aged) -> None:
    """The first record of the next file is no older than the newest of a file."""
    second, third = (first_time(aged.store, base) for base in (LOG_FILE, 2 * LOG_FILE))

    assert aged.find_expired(BORN) == 0
    assert aged.find_expired(second - 1) == 0
    assert aged.find_expired(second) == LOG_FILE
    assert aged.find_expired(third - 1) == LOG_FILE
    assert aged.find_expired(third) == 2 * LOG_FILE
    assert aged.find_expired(1 << 60) == (FILES - 1) * LOG_FILE  # the last one is never old


def test_the_space_of_large_files_is_freed_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of log and index; if the space is needed urgently, it is freed at once."""
    monkeypatch.setattr(deferred_delete, "KEPT_BYTES_MIN", 0)
    aged = Aged(tmp_path)
    group = [draft("T", 0, bytes(10), properties={"KEYS": " ".join("abcdefghij")})] * 20
    with closing(aged.store) as store:
        while len(aged.log_files()) < 4:
            store.append(group)
        store.tick(1000)
        aged.flush()
        index_file = next((tmp_path / "index").iterdir()).stat().st_size
        store.deletion.delete_before(3 * LOG_FILE)
        store.tick(1000)
        while (deleted := store.deletion.deleted).log_files < 3 or not deleted.index_files:
            assert aged.helper.step()
        waiting = store.deletion.bytes_to_free
        store.deletion.set_urgent(is_urgent=True)
        aged.settle()

        assert waiting == 3 * LOG_FILE + index_file
        assert store.deletion.bytes_to_free == 0


def test_a_damaged_record_does_not_make_a_file_older(aged: Aged) -> None:
    """If the first records of a file are damaged, the next valid one counts."""
    third = first_time(aged.store, 2 * LOG_FILE)
    path = aged.root / "commitlog" / f"{2 * LOG_FILE:020d}"
    content = bytearray(path.read_bytes())
    second = int.from_bytes(content[:4], "big")
    for start in (0, second):  # they were stored together
        content[start + 4 : start + 8] = bytes(4)
    path.write_bytes(content)

    assert aged.find_expired(third) == LOG_FILE


def test_queue_and_index_files_are_deleted_with_the_log(aged: Aged) -> None:
    """The rest is served as before; a consumer below the minimum gets the first offset."""
    store, start = aged.store, 3 * LOG_FILE
    before = everything(store)
    ends = {key: end for key, (_, end) in bounds(store).items()}

    store.deletion.delete_before(start + 1)
    aged.settle()

    kept = [record for record in before if record.physical_offset >= start]
    assert store.min_offset == start
    assert aged.log_files() == [f"{base:020d}" for base in (start, 4 * LOG_FILE)]
    assert everything(store) == kept
    assert {key: end for key, (_, end) in bounds(store).items()} == ends
    for key, (first, _) in bounds(store).items():
        assert first == min(r.queue_offset for r in kept if (r.topic, r.queue_id) == key)
        below = store.queues.get(*key, first - 1)
        assert (below.status, below.next_offset) == (GetStatus.OFFSET_TOO_SMALL, first)
        files = sorted((aged.root / "consumequeue" / key[0] / str(key[1])).iterdir())
        assert int(files[0].name) == first * 20 - first * 20 % QUEUE_FILE
    assert store.index.query("U", "u0", 10, 0, 1 << 60) == []
    assert store.deletion.deleted.log_files == 3
    assert store.deletion.deleted.queue_files > 0
    assert store.deletion.deleted.index_files == 0  # the only one holds hundreds of keys

    minimums = bounds(store)
    store.close()
    aged.open()
    assert bounds(aged.store) == minimums
    assert everything(aged.store) == kept


def test_clean_queues_deletes_what_an_interrupted_deletion_left(aged: Aged) -> None:
    """The log does not have to be deleted from once more."""
    directory = aged.root / "consumequeue" / "U" / "0"
    files = {path: path.read_bytes() for path in directory.iterdir()}
    aged.store.deletion.delete_before(3 * LOG_FILE + 1)
    aged.settle()
    left = set(directory.iterdir())
    aged.store.close()
    for path, content in files.items():
        if path not in left:
            path.write_bytes(content)
    aged.open()
    served = everything(aged.store)
    assert set(directory.iterdir()) == files.keys()

    aged.store.deletion.clean_queues()
    aged.settle()

    assert set(directory.iterdir()) == left
    assert everything(aged.store) == served


def test_old_index_files_are_deleted(tmp_path: Path) -> None:
    """All index files whose records are deleted, except for the newest file."""
    aged = Aged(tmp_path)
    group = [draft("T", 0, bytes(10), properties={"KEYS": " ".join("abcdefghij")})] * 20
    while len(aged.log_files()) < 4:
        aged.store.append(group)
        aged.clock.now += 1000
    aged.store.tick(1000)
    aged.flush()
    files = sorted((tmp_path / "index").iterdir())

    aged.store.deletion.delete_before(3 * LOG_FILE)
    aged.settle()

    left = sorted((tmp_path / "index").iterdir())
    assert 1 <= len(left) < len(files)
    assert left == files[-len(left) :]
    assert aged.store.deletion.deleted.index_files == len(files) - len(left)
    hits = aged.store.index.query("T", "a", 64, 0, 1 << 60)
    assert hits
    assert min(hits) >= 3 * LOG_FILE
    aged.store.close()


def test_the_last_file_always_stays(aged: Aged) -> None:
    """Otherwise the next start would begin at offset 0 again."""
    aged.store.deletion.delete_before(1 << 60)
    aged.settle()

    assert aged.log_files() == [f"{4 * LOG_FILE:020d}"]
    end = aged.store.write_offset
    ends = {key: end for key, (_, end) in bounds(aged.store).items()}
    aged.store.close()
    aged.open()
    assert aged.store.write_offset == end
    assert {key: end for key, (_, end) in bounds(aged.store).items()} == ends


def test_nothing_is_deleted_before_its_reason_is_durable(aged: Aged) -> None:
    """If a power cut removes a decision, its half message must still exist."""
    aged.store.append([draft("T", 0, b"the decision")])
    aged.store.deletion.delete_before(2 * LOG_FILE)
    aged.settle()
    assert aged.store.min_offset == 0
    assert len(aged.log_files()) == FILES

    aged.workers["store-flush"].step()
    aged.settle()
    assert aged.store.min_offset == 0, "its queue entry is not on disk yet"
    aged.flush()
    aged.settle()
    assert aged.store.min_offset == 2 * LOG_FILE
    assert len(aged.log_files()) == FILES - 2


def test_frequent_requests_do_not_postpone_a_deletion(aged: Aged) -> None:
    """Even if something appended is never on disk when the next request comes."""
    for _ in range(5):
        aged.store.append([draft("T", 0, b"more")])
        aged.store.deletion.delete_before(LOG_FILE)
        aged.flush()
        aged.store.append([draft("T", 0, b"more")])
        aged.store.deletion.delete_before(2 * LOG_FILE)
        aged.settle()
    assert aged.store.min_offset >= LOG_FILE
    aged.flush()
    aged.settle()
    assert aged.store.min_offset == 2 * LOG_FILE


def test_a_crash_between_any_two_steps_leaves_a_store_that_opens(
    aged: Aged, tmp_path: Path
) -> None:
    """No file is missing in between, and the next deletion deletes the rest."""
    before = everything(aged.store)
    ends = {key: end for key, (_, end) in bounds(aged.store).items()}
    aged.store.deletion.delete_before(3 * LOG_FILE)
    copies: list[Path] = []
    for number in range(8):  # three log files, the index, the queues, their files
        aged.store.tick(1000)
        aged.helper.step()
        copies.append(crash(aged.root, tmp_path / f"copy{number}"))
    assert aged.store.deletion.deleted.queue_files > 0

    starts = set()
    for copy in copies:
        opened = Aged(copy)
        start = opened.store.min_offset
        starts.add(start)
        kept = [record for record in before if record.physical_offset >= start]
        assert everything(opened.store) == kept
        assert {key: end for key, (_, end) in bounds(opened.store).items()} == ends
        opened.store.deletion.delete_before(3 * LOG_FILE)
        opened.flush()
        opened.settle()
        assert opened.log_files() == aged.log_files()
        assert everything(opened.store) == everything(aged.store)
        opened.store.close()
    assert starts == {LOG_FILE, 2 * LOG_FILE, 3 * LOG_FILE}


def test_file_names_are_removed_durably_and_in_order(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a power cut restores a file, all later ones are there too."""
    calls: list[str] = []
    real_unlink, real_fsync = disk.unlink, disk.fsync

    def unlink(path: str) -> None:
        calls.append(Path(path).name)
        real_unlink(path)

    def fsync(fd: int) -> None:
        calls.append("sync")
        real_fsync(fd)

    aged.store.deletion.delete_before(3 * LOG_FILE)
    aged.store.tick()
    monkeypatch.setattr(disk, "unlink", unlink)
    monkeypatch.setattr(disk, "fsync", fsync)
    for _ in range(3):
        aged.helper.step()

    assert calls == [
        f"{0:020d}",
        "sync",
        f"{LOG_FILE:020d}",
        "sync",
        f"{2 * LOG_FILE:020d}",
        "sync",
    ]


def test_a_file_that_cannot_be_deleted_is_tried_again(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later file is deleted before it, and no reader is referred to it."""
    real = disk.unlink

    def refuse(path: str) -> None:
        if Path(path).name == f"{LOG_FILE:020d}":
            raise PermissionError(path)
        real(path)

    monkeypatch.setattr(disk, "unlink", refuse)
    aged.store.deletion.delete_before(3 * LOG_FILE)
    aged.settle()
    assert aged.store.min_offset == 3 * LOG_FILE
    assert aged.log_files() == [
        f"{base:020d}" for base in range(LOG_FILE, FILES * LOG_FILE, LOG_FILE)
    ]

    monkeypatch.setattr(disk, "unlink", real)
    aged.find_expired(0)
    assert aged.log_files() == [f"{base:020d}" for base in (3 * LOG_FILE, 4 * LOG_FILE)]


def test_an_idle_queue_keeps_its_end(aged: Aged) -> None:
    """All its messages are deleted, and the next one has the next queue offset."""
    aged.store.append([draft("idle", 0, b"old")] * 7)
    aged.flush()
    aged.fill(len(aged.log_files()) + 2)
    aged.store.deletion.delete_before(aged.store.write_offset)
    aged.settle()
    assert aged.store.queues.bounds("idle", 0) == (7, 7)
    assert aged.store.queues.get("idle", 0, 3).status is GetStatus.OFFSET_TOO_SMALL
    aged.store.close()

    aged.open()
    assert aged.store.queues.bounds("idle", 0) == (7, 7)
    (appended,) = aged.store.append([draft("idle", 0, b"new")])
    assert appended.queue_offset == 7


def test_a_reader_can_finish_reading_a_deleted_file(aged: Aged) -> None:
    """Files are not truncated while another program has them open."""
    path = aged.root / "commitlog" / f"{0:020d}"
    content = path.read_bytes()
    with path.open("rb") as file:
        half = file.read(LOG_FILE // 2)
        aged.store.deletion.delete_before(LOG_FILE)
        aged.settle()
        assert not path.exists()
        assert half + file.read() == content


def test_appends_and_pulls_continue_during_a_deletion(tmp_path: Path) -> None:
    """With real threads, in both flush modes."""
    for mode in FlushMode:
        root = tmp_path / mode
        store = MessageStore(small_config(root, flush_mode=mode), now_ms=Clock())
        store.open()
        for number in range(400):
            store.append([draft("T", number % 2, bytes(500))])
            if number % 40 == 39:
                flush(store)
                store.deletion.delete_before(store.write_offset - 2 * LOG_FILE)
                maintain(store)
                wait_until(ticking(store, store.write_offset - 4 * LOG_FILE))
            for queue_id in (0, 1):
                visible = store.queues.bounds("T", queue_id)[1]
                got = [record.queue_offset for record in pulled(store, "T", queue_id)]
                assert [*range(visible)][-1:] <= got[-1:]
                assert got == [*range(visible + 400)][got[0] : got[-1] + 1] if got else not visible
        assert store.min_offset > 0
        append_durably(store, draft("T", 0, b"last"))
        served = everything(store)
        store.close()
        reopened = MessageStore(small_config(root, flush_mode=mode), now_ms=Clock())
        reopened.open()
        # Files whose deletion the stop has prevented exist until the next deletion.
        assert everything(reopened)[-len(served) :] == served
        reopened.close()


def ticking(store: MessageStore, start: int) -> Callable[[], bool]:
    def done() -> bool:
        store.tick()
        return store.min_offset >= start

    return done


def test_a_store_that_rocketmq_has_deleted_from_can_be_continued(tmp_path: Path) -> None:
    """Its minimum offsets are found, and more can be deleted."""
    golden = unpack("retention", tmp_path)
    config = golden_config(golden)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    assert store.min_offset == int(golden.truth["runtime"]["commitLogMinOffset"])
    kept = everything(store)
    end = store.min_offset + 2 * config.commit_log_file_size

    store.deletion.delete_before(end)
    wait_until(ticking(store, end))
    assert everything(store) == [record for record in kept if record.physical_offset >= end]
    store.close()


def test_blank_entries_do_not_hide_entries_before_them(tmp_path: Path) -> None:
    """If the log lacks records in the middle of a queue, those around them are found."""
    queue = ConsumeQueue("T", 0, MappedFileQueue(tmp_path, 2000), MapPool(1))
    queue.extend(b"".join(QueueEntry(at, 10, 0).pack() for at in range(0, 200, 10)), 200)
    queue.skip_to(80)
    queue.extend(b"".join(QueueEntry(at, 10, 0).pack() for at in range(800, 1000, 10)), 1000)

    assert [queue.first_at_or_after(at) for at in (0, 1, 100, 190, 191, 800, 990, 991)] == [
        *(0, 1, 10, 19, 20, 20, 99, 100)
    ]
    queue.close()
