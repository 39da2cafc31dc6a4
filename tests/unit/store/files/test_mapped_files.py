"""Data files: space and zeros are prepared before use, and a full disk is reported."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.errors import DiskFullError, UnusableFileError
from halfmq.store.files import disk, mapped_file
from halfmq.store.files.mapped_file import (
    AHEAD_PIECE,
    ROOM_LEFT,
    LogFile,
    create_file,
    make_directory,
    reserve,
    write_fully,
    write_zeros,
    zero_tail,
)
from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.log.resync import find_valid
from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, append_durably, draft, everything, small_config

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
    """The helper writes zeros and the appender records to the same file, at the same time."""
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


def test_pages_are_loaded_before_the_helper_zeroes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros hold the lock of the file, so an append must not wait for memory meanwhile."""
    load_pages, write_zeros = disk.load_pages, disk.write_zeros
    loaded: list[tuple[int, int]] = []
    zeroed: list[tuple[int, int]] = []

    def load(fd: int, start: int, end: int) -> bool:
        loaded.append((start, end))
        return load_pages(fd, start, end)

    def zero(fd: int, start: int, end: int) -> None:
        zeroed.append((start, end))
        assert loaded == zeroed
        write_zeros(fd, start, end)

    monkeypatch.setattr(disk, "load_pages", load)
    monkeypatch.setattr(disk, "write_zeros", zero)
    file = opened(tmp_path / "f", size=4 * SIZE, written_end=5000)

    file.make_ready_ahead(3 * SIZE + 1, zeros=True)

    file.close()
    assert zeroed == [
        (5000, AHEAD_PIECE), *((at, at + AHEAD_PIECE) for at in range(SIZE, 4 * SIZE, AHEAD_PIECE))
    ]  # fmt: skip


def test_the_helper_reads_sequentially_with_one_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the system reads ahead in large pages, which are faster to write later."""
    disabled: list[int] = []
    monkeypatch.setattr(disk, "disable_readahead", disabled.append)
    load_pages = disk.load_pages
    read: list[tuple[int, int]] = []

    def load(fd: int, start: int, end: int) -> bool:
        read.append((fd, start))
        return load_pages(fd, start, end)

    monkeypatch.setattr(disk, "load_pages", load)
    file = opened(tmp_path / "f", size=4 * AHEAD_PIECE)

    file.make_ready_ahead(2 * AHEAD_PIECE, zeros=True)
    file.make_ready_ahead(3 * AHEAD_PIECE, zeros=True)

    assert [start for _, start in read] == [0, AHEAD_PIECE, 2 * AHEAD_PIECE]
    assert len({fd for fd, _ in read}) == 1
    assert disabled == []
    file.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(read[0][0])


def test_a_file_may_be_closed_while_the_helper_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays open until then, because another file could get its number."""
    file = opened(tmp_path / "f", size=4 * AHEAD_PIECE)
    descriptors: list[int] = []

    def load(fd: int, _start: int, _end: int) -> bool:
        file.close()
        os.fstat(fd)
        descriptors.append(fd)
        return True

    monkeypatch.setattr(disk, "load_pages", load)

    file.make_ready_ahead(2 * AHEAD_PIECE, zeros=True)

    assert file.ready_end == 0
    assert len(descriptors) == 1
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptors[0])


@pytest.mark.parametrize("how", [LogFile.make_ready, LogFile.make_ready_ahead])
def test_space_that_cannot_be_read_is_prepared_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None]
) -> None:
    """A bad sector after the end of the log may still be writable."""

    def load_pages(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "load_pages", load_pages)
    file = opened(tmp_path / "f")

    how(file, SIZE, zeros=True)

    assert file.ready_end == SIZE
    file.close()


@pytest.mark.parametrize("how", [LogFile.make_ready, LogFile.make_ready_ahead])
@pytest.mark.parametrize("lacking", ["nothing", "a new file", "blocks", "memory"])
def test_without_waiting_senders_zeros_are_written_only_if_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None], lacking: str
) -> None:
    """A new file reads as zeros; the helper writes them if it cannot load the pages instead."""
    if lacking == "blocks":
        monkeypatch.setattr(mapped_file, "ROOM_LEFT", 1 << 62)
    if lacking == "memory":
        monkeypatch.setattr(disk, "sendfile", None)
    file = opened(tmp_path / "f", is_new=lacking != "a new file")
    monkeypatch.setattr(mapped_file, "ROOM_LEFT", 0)  # now there is room
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


def test_a_full_disk_is_reported_by_the_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space that was not zeroed does not count as ready."""
    monkeypatch.setattr(disk, "write_zeros", no_space)
    file = opened(tmp_path / "f")

    with pytest.raises(DiskFullError):
        file.make_ready_ahead(SIZE, zeros=True)

    assert file.ready_end == 0
    file.close()


def test_preparing_ahead_stops_when_the_file_is_closed(tmp_path: Path) -> None:
    """The appender may continue with the next file at any time."""
    file = opened(tmp_path / "f")
    file.close()

    file.make_ready_ahead(SIZE, zeros=True)
    (tmp_path / "f").unlink()
    file.make_ready_ahead(SIZE, zeros=True)

    assert file.ready_end == 0


def test_preparing_ahead_ignores_a_deleted_file(tmp_path: Path) -> None:
    """The appender has it open and can still write to it."""
    file = opened(tmp_path / "f")
    (tmp_path / "f").unlink()

    file.make_ready_ahead(SIZE, zeros=True)
    assert file.ready_end == 0
    file.make_ready(SIZE, zeros=True)
    assert file.ready_end == SIZE
    file.close()


def test_data_of_a_previous_run_is_zeroed_before_use(tmp_path: Path) -> None:
    """From the end of the valid data on; nothing before it changes."""
    path = tmp_path / "f"
    path.write_bytes(b"\xff" * SIZE)
    file = opened(path, written_end=5000)

    file.make_ready(SIZE, zeros=True)

    file.close()
    assert path.read_bytes() == b"\xff" * 5000 + bytes(SIZE - 5000)


@pytest.mark.parametrize("seek", [True, False])
def test_a_tail_is_zeroed_wherever_it_holds_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seek: bool
) -> None:
    """Also after holes, and on systems that do not report holes."""
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


def test_zeros_are_rewritten_only_in_the_given_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a start after a kill would write a gigabyte of zeros."""
    path = tmp_path / "f"
    path.write_bytes(bytes(8 << 20))
    written: list[range] = []
    write_all = disk.write_all

    def record(fd: int, content: bytes, position: int) -> None:
        written.append(range(position, position + len(content)))
        write_all(fd, content, position)

    monkeypatch.setattr(disk, "write_all", record)

    assert zero_tail(path, 100, rewritten=2 << 20) == 0
    assert (written[0].start, written[-1].stop) == (100, 100 + (2 << 20))
    assert sum(map(len, written)) == 2 << 20


def read_of_a_reserved_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[MappedFileQueue], object]
) -> int:
    """Return how many bytes are read of a 64 MiB file of which 4 MiB are written and not cached."""
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
    """Data that the kernel reads ahead looks written, and a start would read a gigabyte."""
    read = read_of_a_reserved_file(
        tmp_path, monkeypatch, lambda files: zero_tail(files.path(0), 100)
    )
    assert read == (4 << 20) - 100


def test_space_that_was_never_written_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for a record after the end of the log skips it."""
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
    """By rewriting the content: macOS and some file systems have no such call."""
    path = tmp_path / "f"
    create_file(path, SIZE)
    with path.open("r+b") as file:
        file.write(b"content")
        patch(monkeypatch)
        reserve(file.fileno(), 0, SIZE, path)
        monkeypatch.undo()

    assert path.read_bytes() == b"content".ljust(SIZE, b"\0")
    assert path.stat().st_blocks * 512 >= SIZE


def test_a_full_disk_leaves_no_half_made_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the wrong size would stop the next start."""
    monkeypatch.setattr(disk, "ftruncate", no_space)

    with pytest.raises(DiskFullError, match=r"no space for .*name: No space left"):
        create_file(tmp_path / "name", SIZE)

    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk needs other measures than a full one."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "ftruncate", broken)

    with pytest.raises(OSError, match="Input/output"):
        create_file(tmp_path / "name", SIZE)


def test_a_file_where_a_directory_should_be_is_named(tmp_path: Path) -> None:
    """The operator sees the path and not a traceback."""
    (tmp_path / "log").touch()

    with pytest.raises(UnusableFileError, match="log"):
        make_directory(tmp_path / "log" / "deeper")


def test_offsets_find_their_files(tmp_path: Path) -> None:
    """By arithmetic on names of twenty digits, from any first file on."""
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


def test_a_partial_write_to_a_full_disk_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk writes a part, and reports only at the next call that it is full."""
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


def test_a_log_file_is_not_ready_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise records would be written into holes without space."""
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


def test_a_log_file_is_reserved_as_a_whole_only_if_enough_space_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a nearly full disk blocks are allocated as the file is used, to the last megabyte."""
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
        assert opened(tmp_path / "whole").reserved_end == SIZE  # it needs no further blocks
    sparse.close()
    whole.close()


def test_an_interrupted_removal_leaves_no_file_missing_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log with a missing file does not open, so the newest file is removed first."""
    files = MappedFileQueue(tmp_path, 100)
    for base in (0, 100, 200, 300):
        files.create(base)
    real, calls = disk.unlink, iter(range(1000))

    def unlink(path: Path) -> None:
        if next(calls):
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(disk, "unlink", unlink)
    with pytest.raises(OSError, match="Input/output"):
        files.remove_from(100)

    again = MappedFileQueue(tmp_path, 100)
    again.load()
    assert again.bases == [0, 100, 200]
    assert again.missing() is None


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


def test_nothing_is_prepared_ahead_on_a_disk_that_is_almost_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last room is for decisions and the queue files that they need."""
    size = 4 << 20
    path = tmp_path / f"{0:020d}"
    create_file(path, size)
    space = SimpleNamespace(f_frsize=1, f_bavail=ROOM_LEFT)
    monkeypatch.setattr(disk, "fstatvfs", lambda _fd: space)
    with closing(LogFile(path, 0, size, written_end=0, is_new=True)) as file:
        file.make_ready_ahead(size, zeros=True)
        assert file.ready_end == 0

        space.f_bavail += size
        file.make_ready_ahead(size, zeros=True)
        assert file.ready_end == size
