"""Access to the operating system: what ``disk`` adds to its calls."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.store.files import disk
from halfmq.store.files.zero_copy import PageResidency


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write only a part; the caller gets all of it written."""
    real = disk.pwrite
    monkeypatch.setattr(
        disk, "pwrite", lambda fd, content, position: real(fd, content[:3], position)
    )
    with disk.opened(tmp_path / "file", disk.CREATE) as fd:
        disk.write_all(fd, b"0123456789", 2)

    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


def refuse_files(*_: object) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("sendfile", [disk.sendfile, refuse_files, None])
def test_zeros_are_written_to_the_given_range_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sendfile: Callable[..., int] | None
) -> None:
    """Any number of them, also if the system does not send from file to file."""
    monkeypatch.setattr(disk, "sendfile", sendfile)
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 3_000_000)
    with disk.opened(path, disk.WRITE) as fd:
        disk.write_zeros(fd, 5, 2_500_000)
        disk.write_zeros(fd, 2_600_000, 2_600_000)

    assert path.read_bytes() == b"\xff" * 5 + bytes(2_499_995) + b"\xff" * 500_000


def _lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)


def _forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)


@pytest.mark.parametrize("without", [_lacks, _forbids])
def test_zeros_are_written_without_files_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """As with a Python built for an old C library, or in a sandbox."""
    without(monkeypatch)
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 200_000)
    # The file of zeros is cached for the process, so other tests would share it with this one.
    disk._zeros.cache_clear()
    try:
        with disk.opened(path, disk.WRITE) as fd:
            disk.write_zeros(fd, 5, 199_990)
    finally:
        disk._zeros.cache_clear()

    assert path.read_bytes() == b"\xff" * 5 + bytes(199_985) + b"\xff" * 10


def test_a_full_disk_is_reported_when_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not mistaken for a system that cannot send from file to file."""

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "sendfile", no_space)
    with (
        disk.opened(tmp_path / "file", disk.CREATE) as fd,
        pytest.raises(OSError, match="No space left"),
    ):
        disk.write_zeros(fd, 0, 1)


def test_loaded_pages_are_in_memory(tmp_path: Path) -> None:
    """Only the requested range; a range after the end of the file loads nothing."""
    with disk.opened(tmp_path / "file", disk.CREATE) as fd:
        disk.ftruncate(fd, 3 << 20)
        disk.disable_readahead(fd)
        assert disk.load_pages(fd, 1 << 20, 2 << 20) is (disk.sendfile is not None)
        assert not disk.load_pages(fd, 3 << 20, 4 << 20)
        pages = PageResidency()
        if not pages.is_known:
            pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")
        assert not pages.lacks(fd, 1 << 20, 1 << 20)
        assert pages.lacks(fd, 2 << 20, 4096)


def test_a_new_file_holds_all_pieces_written_to_it(tmp_path: Path) -> None:
    """Large and small ones, and nothing of its previous content."""
    path = tmp_path / "file"
    path.write_bytes(b"old" * 1_000_000)
    pieces = [b"a", b"b" * (1 << 20), b"", b"c" * 100]
    with disk.NewFile(path) as file:
        for piece in pieces:
            file.write(piece)

    assert path.read_bytes() == b"".join(pieces)
    file.close()  # twice is harmless
    disk.write_file(path, b"x", sync=True)
    assert path.read_bytes() == b"x"


def test_a_new_file_is_written_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is written on the event loop: 64 KiB take 0.1 ms, 1 MiB takes 3 ms."""
    written: list[int] = []
    write_all = disk.write_all

    def recorded(fd: int, content: bytes, position: int) -> None:
        written.append(len(content))
        write_all(fd, content, position)

    monkeypatch.setattr(disk, "write_all", recorded)
    with disk.NewFile(tmp_path / "file") as file:
        for _ in range(300):
            file.write(bytes(1_000))
        file.flush()

    assert sum(written) == 300_000
    assert max(written) < (64 << 10) + 1_000


def test_an_error_while_a_new_file_is_written_leaves_it_incomplete(tmp_path: Path) -> None:
    """The file is closed, and buffered bytes are not written."""

    def write() -> None:
        with disk.NewFile(tmp_path / "file") as file:
            file.write(b"half of it")
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write()

    assert (tmp_path / "file").read_bytes() == b""


def test_directories_are_made_with_their_parents(tmp_path: Path) -> None:
    """They may exist; a file in their place is an error."""
    disk.make_directories(tmp_path / "a" / "b" / "c")
    disk.make_directories(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "file").write_bytes(b"")

    assert [path.name for path in disk.directories(tmp_path / "a")] == ["b"]
    assert [path.name for path in disk.files(tmp_path / "a")] == ["file"]
    assert disk.directories(tmp_path / "nothing") == []
    for path in (tmp_path / "a" / "file", tmp_path / "a" / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            disk.make_directories(path)


def test_removing_a_missing_file_does_nothing(tmp_path: Path) -> None:
    """A directory is not removed, and is an error."""
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        disk.remove(tmp_path / "file")

    assert disk.entries(tmp_path) == []
    with pytest.raises(OSError, match="directory"):
        disk.remove(tmp_path)
