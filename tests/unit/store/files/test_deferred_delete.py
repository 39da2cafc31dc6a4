"""The space of large deleted files is freed slowly, but always freed."""

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.store.files import deferred_delete, disk
from halfmq.store.files.deferred_delete import DeferredDeletes
from halfmq.store.files.zero_copy import FilePart, PageResidency

PIECE = deferred_delete.WARM_SIZE
SIZE = 8 * PIECE
assert SIZE == deferred_delete.COLD_SIZE


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of a few mebibytes count as large."""
    monkeypatch.setattr(deferred_delete, "KEPT_BYTES_MIN", SIZE)
    monkeypatch.setattr(deferred_delete, "KEPT_BYTES_MAX", 2 * SIZE)


@pytest.fixture
def kept() -> Iterator[DeferredDeletes]:
    files = DeferredDeletes()
    yield files
    files.close()


def written(path: Path, size: int) -> Path:
    """Write a file durably."""
    path.write_bytes(b"x" * size)
    with disk.opened(path, disk.WRITE) as fd:
        os.fsync(fd)
    return path


def deleted(kept: DeferredDeletes, path: Path, size: int = SIZE) -> int:
    """Write a file, keep it open and remove its name; return its inode."""
    kept.keep(written(path, size))
    inode = path.stat().st_ino
    path.unlink()
    return inode


def size_of(inode: int) -> int | None:
    """Return the size of a file that this process has open; None if it is not open."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing
            status = os.fstat(int(path.name))
            if status.st_ino == inode:
                return status.st_size
    return None


def test_cached_data_is_freed_piece_by_piece(kept: DeferredDeletes, tmp_path: Path) -> None:
    """With a pause after each piece; then the file is closed."""
    inode = deleted(kept, tmp_path / "f")
    left = [kept.bytes]
    while kept.work() == deferred_delete.WARM_PAUSE and kept.bytes:
        assert size_of(inode) == kept.bytes
        left.append(kept.bytes)

    assert left == list(range(SIZE, 0, -PIECE))
    assert size_of(inode) is None
    assert kept.work() is None


def test_data_that_is_not_cached_is_freed_in_larger_pieces(
    kept: DeferredDeletes, tmp_path: Path
) -> None:
    """Most deleted files are old and not in memory."""
    (tmp_path / "other name").hardlink_to(written(tmp_path / "f", 2 * SIZE))
    kept.keep(tmp_path / "f")
    (tmp_path / "f").unlink()
    with disk.opened(tmp_path / "other name") as fd:
        os.posix_fadvise(fd, 0, 2 * SIZE, os.POSIX_FADV_DONTNEED)
        if PageResidency().cached(fd, 0, SIZE) is None:
            pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")

    assert kept.work() == deferred_delete.COLD_PAUSE
    assert kept.bytes == SIZE
    kept.work()
    assert kept.work() is None


def test_a_reader_can_read_a_deleted_file_to_its_end(kept: DeferredDeletes, tmp_path: Path) -> None:
    """It is freed when the reader has closed it, or all at once after a minute."""
    path = tmp_path / "f"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as reader:
        inode = deleted(kept, path)
        assert kept.work() == deferred_delete.OTHERS_PAUSE
        assert len(reader.read()) == SIZE
    assert kept.work() == deferred_delete.WARM_PAUSE
    kept.close()

    path.write_bytes(bytes(SIZE))
    with path.open("rb") as reader:
        inode = deleted(kept, path)
        for _ in range(deferred_delete.OTHERS_TRIES):
            assert kept.work() == deferred_delete.OTHERS_PAUSE
        assert kept.work() is None
        assert len(reader.read()) == SIZE
    assert size_of(inode) is None


@pytest.mark.skipif(disk.sendfile is None, reason="the system cannot send from files")
@pytest.mark.parametrize("odd", [0, 1, 4096, PIECE // 2 + 100])
def test_data_that_a_peer_has_not_received_is_not_overwritten(
    kept: DeferredDeletes, tmp_path: Path, odd: int
) -> None:
    """The kernel writes zeros after the new end of a file, in the page that is being sent."""
    content = random.Random(odd).randbytes(SIZE + odd)
    (tmp_path / "f").write_bytes(content)
    kept.keep(tmp_path / "f")
    places = [at + odd for at in range(0, SIZE, PIECE // 2)]
    with contextlib.ExitStack() as opened:
        peers = []
        with disk.opened(tmp_path / "f") as fd:
            for place in places:
                ours, theirs = connected(opened)
                sent = FilePart(fd, place, PIECE // 2).send(ours.fileno())
                ours.shutdown(socket.SHUT_WR)
                peers.append((content[place : place + sent], theirs.makefile("rb")))
        (tmp_path / "f").unlink()

        while kept.work() is not None:
            pass

        for expected, peer in peers:
            with peer:
                assert len(expected) > PIECE // 16
                assert peer.read() == expected


def connected(opened: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return two ends of a connection, the first with a large send buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = opened.enter_context(socket.create_connection(listener.getsockname()))
        theirs = opened.enter_context(listener.accept()[0])
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    ours.setblocking(False)
    return ours, theirs


def test_a_small_file_is_not_kept(kept: DeferredDeletes, tmp_path: Path) -> None:
    """Its space is freed at once; a missing file is ignored."""
    deleted(kept, tmp_path / "f", SIZE - 1)
    kept.keep(tmp_path / "g")

    assert kept.bytes == 0
    assert kept.work() is None


def test_the_bytes_kept_are_limited(kept: DeferredDeletes, tmp_path: Path) -> None:
    """Otherwise a log that is deleted as fast as it is written would fill the disk."""
    inodes = [deleted(kept, tmp_path / f"{number}") for number in range(3)]

    assert kept.bytes == 2 * SIZE
    assert [size_of(inode) for inode in inodes] == [None, SIZE, SIZE]


def test_if_space_is_needed_urgently_it_is_freed_at_once(
    kept: DeferredDeletes, tmp_path: Path
) -> None:
    """The space of files that are kept, and of those deleted later."""
    deleted(kept, tmp_path / "f")
    kept.is_urgent = True

    assert kept.work() is None
    assert kept.bytes == 0
    deleted(kept, tmp_path / "g")
    assert kept.bytes == 0


def test_a_disk_that_refuses_to_truncate_stops_nothing(
    kept: DeferredDeletes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread continues; closing the file frees its space."""

    def refuse(_fd: int, _size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    inode = deleted(kept, tmp_path / "f")
    monkeypatch.setattr(disk, "ftruncate", refuse)
    assert kept.work() == deferred_delete.WARM_PAUSE

    assert (kept.bytes, size_of(inode)) == (0, None)
    assert kept.work() is None
