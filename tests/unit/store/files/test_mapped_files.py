"""Files: space before use, zeros before records, and what a full disk does."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.errors import DiskFullError, UnusableFileError
from halfmq.store.files import disk, mapped_file
from halfmq.store.files.checkpoint import load_checkpoint
from halfmq.store.files.mapped_file import (
    AHEAD_PIECE,
    LogFile,
    create_file,
    make_directory,
    reserve,
    write_fully,
    write_zeros,
    zero_tail,
)
from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry
from halfmq.store.log.resync import find_valid
from halfmq.store.message_store import MessageStore
from halfmq.store.queue.consume_queue import ConsumeQueue, MapPool
from tests.support.patience import PATIENCE_S
from tests.support.stepped_worker import SteppedWorker
from tests.support.stores import (
    Clock,
    append_durably,
    draft,
    everything,
    log_of,
    maintain,
    small_config,
    wait_until,
)

SIZE = 1 << 20


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def opened(path: Path, *, size: int = SIZE, written_end: int = 0, is_new: bool = False) -> LogFile:
    if not path.exists():
        create_file(path, size)
    return LogFile(path, 0, size, written_end=written_end, is_new=is_new)


def test_preparing_ahead_never_touches_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper's zeros and the appender's records race for the same file, and never meet."""
    monkeypatch.setattr(mapped_file, "READY_PIECE", 4096)
    monkeypatch.setattr(mapped_file, "AHEAD_PIECE", 4096)
    for number in range(5):
        file = opened(tmp_path / f"{number}")
        helper = Thread(target=file.make_ready_ahead, args=(SIZE,), kwargs={"zeros": True})
        helper.start()
        record = bytes(range(1, 252))
        for position in range(0, SIZE - len(record), len(record)):
            file.make_ready(position + len(record), zeros=True)
            file.write(position, record)
        helper.join()
        file.close()

        used = SIZE // len(record) * len(record)
        content = (tmp_path / f"{number}").read_bytes()
        assert content == record * (used // len(record)) + bytes(SIZE - used)


def test_a_record_waits_for_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes one write at a time, so the pages that the helper zeroes are there before."""
    load_pages, write_zeros = disk.load_pages, disk.write_zeros
    brought: list[tuple[int, int]] = []
    zeroed: list[tuple[int, int]] = []

    def brings(fd: int, start: int, end: int) -> bool:
        brought.append((start, end))
        return load_pages(fd, start, end)

    def zeroes(fd: int, start: int, end: int) -> None:
        zeroed.append((start, end))
        assert brought == zeroed
        write_zeros(fd, start, end)

    monkeypatch.setattr(disk, "load_pages", brings)
    monkeypatch.setattr(disk, "write_zeros", zeroes)
    file = opened(tmp_path / "f", size=4 * SIZE, written_end=5000)

    file.make_ready_ahead(3 * SIZE + 1, zeros=True)

    file.close()
    assert zeroed == [
        (5000, AHEAD_PIECE), *((at, at + AHEAD_PIECE) for at in range(SIZE, 4 * SIZE, AHEAD_PIECE))
    ]  # fmt: skip


def test_the_helper_reads_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has to see that, or it brings in small pages, of which each costs time later."""
    guesses: list[int] = []
    monkeypatch.setattr(disk, "disable_readahead", guesses.append)
    load_pages = disk.load_pages
    read: list[tuple[int, int]] = []

    def brings(fd: int, start: int, end: int) -> bool:
        read.append((fd, start))
        return load_pages(fd, start, end)

    monkeypatch.setattr(disk, "load_pages", brings)
    file = opened(tmp_path / "f", size=4 * AHEAD_PIECE)

    file.make_ready_ahead(2 * AHEAD_PIECE, zeros=True)
    file.make_ready_ahead(3 * AHEAD_PIECE, zeros=True)

    assert [start for _, start in read] == [0, AHEAD_PIECE, 2 * AHEAD_PIECE]
    assert len({fd for fd, _ in read}) == 1
    assert guesses == []
    file.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(read[0][0])


def test_a_file_may_be_closed_while_the_helper_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays until then: another file may get its number."""
    file = opened(tmp_path / "f", size=4 * AHEAD_PIECE)
    descriptors: list[int] = []

    def brings(fd: int, _start: int, _end: int) -> bool:
        file.close()
        os.fstat(fd)
        descriptors.append(fd)
        return True

    monkeypatch.setattr(disk, "load_pages", brings)

    file.make_ready_ahead(2 * AHEAD_PIECE, zeros=True)

    assert file.ready_end == 0
    assert len(descriptors) == 1
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptors[0])


@pytest.mark.parametrize("how", [LogFile.make_ready, LogFile.make_ready_ahead])
def test_zeros_are_written_where_nothing_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None]
) -> None:
    """A bad sector behind the end of the log takes no space from it."""

    def load_pages(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "load_pages", load_pages)
    file = opened(tmp_path / "f")

    how(file, SIZE, zeros=True)

    assert file.ready_end == SIZE
    file.close()


@pytest.mark.parametrize("how", [LogFile.make_ready, LogFile.make_ready_ahead])
@pytest.mark.parametrize("lacking", ["nothing", "a new file", "blocks", "memory"])
def test_zeros_that_nobody_waits_for_are_written_only_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None], lacking: str
) -> None:
    """A new file has them, and the space for records; the helper's pages must be in memory, too."""
    if lacking == "blocks":
        monkeypatch.setattr(mapped_file, "ROOM_LEFT", 1 << 62)
    if lacking == "memory":
        monkeypatch.setattr(disk, "sendfile", None)
    file = opened(tmp_path / "f", is_new=lacking != "a new file")
    written: list[int] = []
    monkeypatch.setattr(mapped_file, "write_zeros", lambda *_: written.append(1))
    monkeypatch.setattr(mapped_file, "fill_with_zeros", lambda *_: written.append(1))

    how(file, SIZE, zeros=False)

    needed = lacking in ("a new file", "blocks")
    if how is LogFile.make_ready_ahead and disk.sendfile is None:
        needed = True
    assert bool(written) is needed
    assert file.ready_end == SIZE
    file.close()


def test_a_disk_that_is_full_ahead_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not zeroed does not count as ready."""
    monkeypatch.setattr(disk, "write_zeros", no_space)
    file = opened(tmp_path / "f")

    with pytest.raises(DiskFullError):
        file.make_ready_ahead(SIZE, zeros=True)

    assert file.ready_end == 0
    file.close()


def test_preparing_ahead_stops_when_the_file_is_closed(tmp_path: Path) -> None:
    """The appender goes on to the next file whenever it likes."""
    file = opened(tmp_path / "f")
    file.close()

    file.make_ready_ahead(SIZE, zeros=True)
    (tmp_path / "f").unlink()
    file.make_ready_ahead(SIZE, zeros=True)

    assert file.ready_end == 0


def test_preparing_ahead_does_not_mind_a_file_that_was_deleted(tmp_path: Path) -> None:
    """Who appends to it still can, as the system sees it."""
    file = opened(tmp_path / "f")
    (tmp_path / "f").unlink()

    file.make_ready_ahead(SIZE, zeros=True)
    assert file.ready_end == 0
    file.make_ready(SIZE, zeros=True)
    assert file.ready_end == SIZE
    file.close()


def test_what_an_earlier_life_left_is_zeroed_before_use(tmp_path: Path) -> None:
    """From the end of what is valid on; nothing before it changes."""
    path = tmp_path / "f"
    path.write_bytes(b"\xff" * SIZE)
    file = opened(path, written_end=5000)

    file.make_ready(SIZE, zeros=True)

    file.close()
    assert path.read_bytes() == b"\xff" * 5000 + bytes(SIZE - 5000)


@pytest.mark.parametrize("seek", [True, False])
def test_a_tail_is_zeroed_wherever_it_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seek: bool
) -> None:
    """Also behind holes, and on systems that cannot tell where holes are."""
    if not seek:
        monkeypatch.setattr(disk, "SEEK_DATA", None)
    path = tmp_path / "f"
    create_file(path, SIZE)
    with path.open("r+b") as file:
        file.write(b"a" * 300)
        file.seek(SIZE // 2)
        file.write(b"b" * 10)

    assert zero_tail(path, 100) == SIZE // 2 + 10 - 100
    assert path.read_bytes() == b"a" * 100 + bytes(SIZE - 100)
    assert zero_tail(path, 100) == 0
    assert zero_tail(path, SIZE) == 0


def test_zeros_are_written_again_only_where_they_may_be_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start after a kill would else write a gigabyte of them."""
    path = tmp_path / "f"
    path.write_bytes(bytes(8 << 20))
    written: list[range] = []
    write_all = disk.write_all

    def noted(fd: int, content: bytes, position: int) -> None:
        written.append(range(position, position + len(content)))
        write_all(fd, content, position)

    monkeypatch.setattr(disk, "write_all", noted)

    assert zero_tail(path, 100, anew=2 << 20) == 0
    assert (written[0].start, written[-1].stop) == (100, 100 + (2 << 20))
    assert sum(map(len, written)) == 2 << 20


def read_of_a_reserved_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[MappedFileQueue], object]
) -> int:
    """Return how many bytes are read of a file of 64 MiB, of which 4 were written and are cold."""
    files = MappedFileQueue(directory, 64 << 20)
    files.bases = [0]
    path = files.path(0)
    create_file(path, files.file_size)
    with disk.opened(path, disk.WRITE) as fd:
        reserve(fd, 0, files.file_size, path)
        disk.write_all(fd, bytes(4 << 20), 0)
        disk.sync_data(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    sizes: list[int] = []
    real = disk.pread

    def pread(fd: int, size: int, position: int) -> bytes:
        sizes.append(size)
        return real(fd, size, position)

    monkeypatch.setattr(disk, "pread", pread)
    read(files)
    return sum(sizes)


def test_space_that_was_never_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would read the whole gigabyte: what the kernel reads ahead looks like data."""
    read = read_of_a_reserved_file(
        tmp_path, monkeypatch, lambda files: zero_tail(files.path(0), 100)
    )
    assert read == (4 << 20) - 100


def test_space_that_was_never_written_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a record behind the place where the log ends."""
    read = read_of_a_reserved_file(
        tmp_path, monkeypatch, lambda files: find_valid(files, 100, None, lambda *_: False)
    )
    assert 4 << 20 <= read < 5 << 20


def remove_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "posix_fallocate", None)


def refuse_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(disk, "posix_fallocate", refused)


@pytest.mark.parametrize("patch", [remove_fallocate, refuse_fallocate])
def test_space_is_reserved_without_the_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """By writing back what is there: macOS and some file systems leave no other way."""
    path = tmp_path / "f"
    create_file(path, SIZE)
    with path.open("r+b") as file:
        file.write(b"content")
        patch(monkeypatch)
        reserve(file.fileno(), 0, SIZE, path)
        monkeypatch.undo()

    assert path.read_bytes() == b"content".ljust(SIZE, b"\0")
    assert path.stat().st_blocks * 512 >= SIZE


@pytest.mark.parametrize("mode", FlushMode)
@pytest.mark.parametrize("patch", [remove_fallocate, refuse_fallocate])
def test_a_store_works_without_the_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patch: Callable[[pytest.MonkeyPatch], None],
    mode: FlushMode,
) -> None:
    """Space that is written before it is used needs no other reservation."""
    patch(monkeypatch)
    for turn in range(1, 3):
        store = MessageStore(small_config(tmp_path, flush_mode=mode), now_ms=Clock())
        store.open()
        append_durably(store, *(draft(body=bytes(1000)) for _ in range(100)))
        assert len(everything(store)) == 100 * turn
        store.close()


def test_a_full_disk_leaves_no_half_made_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be of a wrong size, and stop the next start."""
    monkeypatch.setattr(disk, "ftruncate", no_space)

    with pytest.raises(DiskFullError, match=r"no space for .*name: No space left"):
        create_file(tmp_path / "name", SIZE)

    assert list(tmp_path.iterdir()) == []


def test_other_troubles_are_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk needs another answer than a full one."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "ftruncate", broken)

    with pytest.raises(OSError, match="Input/output"):
        create_file(tmp_path / "name", SIZE)


def test_a_file_where_a_directory_should_be_is_named(tmp_path: Path) -> None:
    """The operator gets the path, not a traceback."""
    (tmp_path / "log").touch()

    with pytest.raises(UnusableFileError, match="log"):
        make_directory(tmp_path / "log" / "deeper")


def test_offsets_find_their_files(tmp_path: Path) -> None:
    """By arithmetic on names of twenty digits, whatever the first file is."""
    files = MappedFileQueue(tmp_path, 100)
    for base in (300, 100, 200):
        files.create(base)
    loaded = MappedFileQueue(tmp_path, 100)
    loaded.load()

    assert loaded.bases == files.bases == [100, 200, 300]
    assert loaded.base_of(299) == 200
    assert loaded.path(200).name == "00000000000000000200"
    assert loaded.missing() is None
    assert loaded.remove_from(200) == [200, 300]
    assert [path.name for path in tmp_path.iterdir()] == [loaded.path(100).name]


def new_queue(directory: Path, pool: MapPool) -> ConsumeQueue:
    return ConsumeQueue("T", 0, directory=directory, file_size=200, pool=pool)


def entries(numbers: range) -> bytes:
    return b"".join(QueueEntry(number * 100, 100, number).pack() for number in numbers)


@pytest.mark.parametrize("end", [0, 1, 9, 10, 11, 20, 35])
def test_a_queue_ends_where_it_was_cut(tmp_path: Path, end: int) -> None:
    """At any entry, at a file's end or within it; what was behind is zero or gone."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(35)), 3500)

    queue.cut(end)

    assert (queue.next_offset, queue.last_end) == (end, end * 100)
    queue.close()
    reloaded = new_queue(tmp_path, MapPool(4))
    reloaded.load()
    assert (reloaded.next_offset, reloaded.last_end) == (end, end * 100)
    reloaded.extend(entries(range(end, 50)), 5000)
    assert reloaded.entries(0, 50) == entries(range(50))
    reloaded.close()
    content = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert content.rstrip(b"\0") == entries(range(50)).rstrip(b"\0")


def test_a_queue_finds_entries_by_physical_offset(tmp_path: Path) -> None:
    """The first one at or behind it; the end when there is none."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(25)), 2500)

    found = [queue.find_physical(offset) for offset in (0, 1, 100, 2400, 2401, 9999)]

    assert found == [0, 1, 1, 24, 25, 25]
    queue.close()


@pytest.mark.parametrize("gap", [1, 5, 10, 11, 100])
def test_a_queue_skips_what_the_log_lacks(tmp_path: Path, gap: int) -> None:
    """Later entries keep their queue offsets, over gaps within a file and over many files."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(3)), 300)

    queue.skip_to(3 + gap)
    queue.extend(entries(range(3 + gap, 6 + gap)), (6 + gap) * 100)

    queue.close()
    reloaded = new_queue(tmp_path, MapPool(4))
    reloaded.load()
    assert reloaded.next_offset == 6 + gap
    assert reloaded.entries(3 + gap, 3) == entries(range(3 + gap, 6 + gap))
    reloaded.close()


def test_closing_the_maps_of_a_queue_costs_nothing_but_time(tmp_path: Path) -> None:
    """Between any two appends, and any append and read."""
    pool = MapPool(1)
    first, second = new_queue(tmp_path / "1", pool), new_queue(tmp_path / "2", pool)
    for number in range(45):
        for queue in (first, second):
            queue.extend(entries(range(number, number + 1)), number * 100 + 100)
            assert queue.entry(number // 2).physical_offset == number // 2 * 100

    assert first.entries(0, 45) == second.entries(0, 45) == entries(range(45))
    # Maps that stay show in no answer.
    assert len(pool._queues) == 1
    for queue in (first, second):
        queue.close()


def test_queue_entries_reach_the_disk_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last flushed entry on, and only once."""
    queue = new_queue(tmp_path, MapPool(4))
    flushed: list[str] = []
    monkeypatch.setattr(
        "halfmq.store.files.disk.sync_data",
        lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name[-3:]),
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name descriptors")
    queue.extend(entries(range(25)), 2500)

    assert queue.sync()
    assert not queue.sync()
    queue.extend(entries(range(25, 30)), 3000)
    assert queue.sync()

    assert flushed == ["000", "200", "400", "400"]
    assert 25 * ENTRY_SIZE == 500
    queue.close()


def test_the_next_file_is_ready_before_it_is_needed(tmp_path: Path) -> None:
    """A roll takes it as it is; a stop deletes it unless something was written to it."""
    store = MessageStore(small_config(tmp_path, flush_interval_ms=3_600_000), now_ms=Clock())
    store.open()
    log = log_of(store)
    # Which file the appender takes shows only here: another one would have the same name.
    wait_until(lambda: log._spare is not None and log._spare.ready_end == 16_384)
    spare = log._spare

    append_durably(store, *(draft(body=bytes(8000)) for _ in range(3)))

    assert log._active is spare  # see above
    wait_until(lambda: len(list((tmp_path / "commitlog").iterdir())) == 3)
    store.close()
    assert {int(path.name) for path in (tmp_path / "commitlog").iterdir()} == {0, 16_384}


@pytest.mark.skipif(disk.sendfile is None, reason="space is made ready with zeros alone here")
@pytest.mark.parametrize("mode", FlushMode)
def test_zeros_are_written_ahead_while_senders_wait_for_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FlushMode
) -> None:
    """As all do under SYNC_FLUSH, and transactions under ASYNC_FLUSH."""
    zeroed: list[int] = []

    def fill(_fd: int, start: int, _end: int, path: Path) -> None:
        zeroed.append(int(path.name) + start)

    monkeypatch.setattr(mapped_file, "fill_with_zeros", fill)
    workers: dict[str, SteppedWorker] = {}
    store = MessageStore(
        small_config(tmp_path, flush_mode=mode),
        now_ms=Clock(),
        worker=lambda name, work, _pause: workers.setdefault(name, SteppedWorker(work)),
    )
    store.open()

    def make_a_file_ready() -> bool:
        zeroed.clear()
        store.append([draft(body=bytes(8000)) for _ in range(2)])
        workers["store-maintenance"].step()
        return bool(zeroed)

    assert make_a_file_ready() is (mode is FlushMode.SYNC_FLUSH)
    store.request_flush()
    assert make_a_file_ready()
    assert make_a_file_ready() is (mode is FlushMode.SYNC_FLUSH)
    store.close()


def test_upkeep_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, and tried again; what needs the space fails by itself."""
    failed, allowed = Event(), Event()
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        if offset == 0 and length == 16_384 and not allowed.is_set():
            failed.set()
            no_space()
        real(fd, offset, length)

    monkeypatch.setattr(disk, "posix_fallocate", fallocate)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    assert failed.wait(PATIENCE_S)

    with pytest.raises(DiskFullError):
        store.append([draft()])
    allowed.set()
    append_durably(store, draft())

    assert store.queues.bounds("T", 0) == (0, 1)
    assert "no space" in caplog.text.lower().replace("_", " ")
    store.close()


def test_a_broken_queue_disk_freezes_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel forgets what it could not write, so no later time may be promised; it is said."""
    config = small_config(tmp_path, flush_interval_consume_queue_ms=3_600_000)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    append_durably(store, draft())
    promised = load_checkpoint(tmp_path / "checkpoint")

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.store.files.disk.sync_data", broken)
        maintain(store)
    maintain(store)

    (told,) = [one for one in caplog.records if one.levelname == "CRITICAL"]
    assert "upkeep_stopped" in told.getMessage()
    assert "Input/output" in told.getMessage()

    assert load_checkpoint(tmp_path / "checkpoint") == promised
    store.close()
    assert (tmp_path / "abort").exists(), "nor may the stop be called clean"


def test_a_write_that_a_full_disk_cuts_short_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk takes a part, and says only at the next call that it is full."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    fd = os.open(path, os.O_RDWR)
    real, left = disk.pwrite, 1_000

    def pwrite(to: int, content: bytes, position: int) -> int:
        nonlocal left
        if not left:
            no_space()
        size = min(len(content), left, 300)
        left -= size
        return real(to, content[:size], position)

    monkeypatch.setattr(disk, "pwrite", pwrite)
    write_fully(fd, b"x" * 900, 0, path)
    assert path.read_bytes() == b"x" * 900
    with pytest.raises(DiskFullError):
        write_zeros(fd, 900, 1_100, path)
    left = 1_000
    write_zeros(fd, 900, 1_100, path)
    assert path.read_bytes() == b"x" * 900 + bytes(200)
    os.close(fd)


def test_a_log_file_is_not_ready_where_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or records would be written into holes for which there is no space."""
    file = opened(tmp_path / "file")
    taken = iter([4096])

    def pwrite(*_: object) -> int:
        for size in taken:
            return size
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "pwrite", pwrite)
    with pytest.raises(DiskFullError):
        file.make_ready(SIZE, zeros=True)
    assert file.ready_end == 0
    monkeypatch.undo()
    file.make_ready(SIZE, zeros=True)
    assert file.ready_end == SIZE
    file.close()


def test_a_log_file_is_reserved_whole_only_if_that_leaves_others_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is nearly full it gets its blocks as it is used, to the last megabyte."""
    with monkeypatch.context() as patch:
        patch.setattr(mapped_file, "ROOM_LEFT", 1 << 62)
        sparse = opened(tmp_path / "sparse")
        assert (tmp_path / "sparse").stat().st_blocks == 0
        assert sparse.reserved_end == 0
        sparse.make_ready(100, zeros=True)
        sparse.write(0, b"x" * 100)
    whole = opened(tmp_path / "whole")
    assert whole.reserved_end == SIZE
    assert (tmp_path / "whole").stat().st_blocks * 512 >= SIZE
    with monkeypatch.context() as patch:
        patch.setattr(mapped_file, "ROOM_LEFT", 1 << 62)
        assert opened(tmp_path / "whole").reserved_end == SIZE  # it takes no more than it has
    sparse.close()
    whole.close()


def test_a_removal_that_is_interrupted_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log with a hole does not open, so what is cut off goes from its end on."""
    row = MappedFileQueue(tmp_path, 100)
    for base in (0, 100, 200, 300):
        row.create(base)
    real, calls = disk.unlink, iter(range(1000))

    def unlink(path: Path) -> None:
        if next(calls):
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(disk, "unlink", unlink)
    with pytest.raises(OSError, match="Input/output"):
        row.remove_from(100)

    again = MappedFileQueue(tmp_path, 100)
    again.load()
    assert again.bases == [0, 100, 200]
    assert again.missing() is None
