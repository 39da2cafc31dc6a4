"""The door to the operating system: what it adds to the calls that it passes on."""

from pathlib import Path

import pytest

from halfmq.store import disk


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take a part; who asked for all of it gets all of it."""
    real = disk.pwrite
    monkeypatch.setattr(
        disk, "pwrite", lambda fd, content, position: real(fd, content[:3], position)
    )
    with disk.opened(tmp_path / "file", disk.CREATE) as fd:
        disk.write_all(fd, b"0123456789", 2)

    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


def test_a_new_file_holds_what_was_written_in_pieces(tmp_path: Path) -> None:
    """Of pieces large and small, and nothing of what was there before."""
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


def test_a_new_file_whose_making_fails_is_left_unfinished(tmp_path: Path) -> None:
    """It is closed, and what was only gathered is not written as if it were all."""

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


def test_a_name_that_is_gone_may_be_removed(tmp_path: Path) -> None:
    """Only that: a directory stays, and is an error."""
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        disk.remove(tmp_path / "file")

    assert disk.entries(tmp_path) == []
    with pytest.raises(OSError, match="directory"):
        disk.remove(tmp_path)
