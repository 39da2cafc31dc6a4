"""Deleted files that were in memory leave it slowly, and do not keep their space for ever."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.store import disk, leaving
from halfmq.store.leaving import Leaving
from halfmq.store.residence import Residence

PIECE = leaving.PIECE_SIZE
SIZE = 8 * PIECE


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files of a few mebibytes count as large."""
    monkeypatch.setattr(leaving, "KEPT_BYTES_MIN", SIZE)
    monkeypatch.setattr(leaving, "KEPT_BYTES_MAX", 2 * SIZE)


@pytest.fixture
def kept() -> Iterator[Leaving]:
    files = Leaving()
    yield files
    files.close()


def deleted(kept: Leaving, path: Path, size: int = SIZE) -> int:
    """Write a file, have it kept and remove its name; return a descriptor of it."""
    path.write_bytes(b"x" * size)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    kept.keep(path)
    path.unlink()
    return fd


def cached(fd: int) -> int:
    size = Residence().cached(fd, 0, SIZE)
    if size is None:
        pytest.skip("the kernel does not tell what is cached: cachestat needs Linux 6.5")
    return size


def is_open_here(inode: int) -> bool:
    """Whether this process still has a file open."""
    descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    for fd in descriptors:
        try:
            if os.fstat(fd).st_ino == inode:
                return True
        except OSError:
            continue  # the one of the listing
    return False


def test_memory_goes_piece_by_piece(kept: Leaving, tmp_path: Path) -> None:
    """With a pause behind each; then the file is closed, and its space is free."""
    fd = deleted(kept, tmp_path / "f")
    inode = os.fstat(fd).st_ino
    left = [cached(fd)]
    assert left == [SIZE]
    while kept.work() == leaving.PIECE_PAUSE:
        left.append(cached(fd))
    os.close(fd)

    assert left == list(range(SIZE, -1, -PIECE))
    assert kept.bytes == 0
    assert not is_open_here(inode)
    assert kept.work() is None


def test_what_is_not_in_memory_takes_no_time(kept: Leaving, tmp_path: Path) -> None:
    """An old file, as most are that are deleted."""
    fd = deleted(kept, tmp_path / "f")
    disk.need_no_more(fd, 0, SIZE)
    assert cached(fd) == 0
    os.close(fd)

    assert kept.work() == leaving._LOOK_PAUSE
    assert kept.bytes == 0


def test_a_small_file_is_not_kept(kept: Leaving, tmp_path: Path) -> None:
    """Its memory may go at once; nor is one that is missing."""
    os.close(deleted(kept, tmp_path / "f", SIZE - 1))
    kept.keep(tmp_path / "g")

    assert kept.bytes == 0
    assert kept.work() is None


def test_so_much_is_kept_and_no_more(kept: Leaving, tmp_path: Path) -> None:
    """Or a log that is deleted as fast as it is written would fill the disk."""
    inodes: list[int] = []
    for number in range(3):
        fd = deleted(kept, tmp_path / f"{number}")
        inodes.append(os.fstat(fd).st_ino)
        os.close(fd)

    assert kept.bytes == 2 * SIZE
    assert [is_open_here(inode) for inode in inodes] == [False, True, True]


def test_who_needs_the_space_gets_it(kept: Leaving, tmp_path: Path) -> None:
    """At once, for what is kept and for what would be."""
    os.close(deleted(kept, tmp_path / "f"))
    kept.is_hurried = True

    assert kept.work() is None
    assert kept.bytes == 0
    os.close(deleted(kept, tmp_path / "g"))
    assert kept.bytes == 0
