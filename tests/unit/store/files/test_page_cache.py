"""Reads of cached data, and fetching what is not cached."""

import os
from pathlib import Path

import pytest

from halfmq.store.files import disk, page_cache
from halfmq.store.message_store import MessageStore
from tests.support.stores import append_durably, draft, log_of


@pytest.mark.parametrize("size", [0, 10, 100])
def test_reads_that_may_wait_and_reads_that_may_not_agree(tmp_path: Path, size: int) -> None:
    """Both return less at the end of a file."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(size)))
    with path.open("rb") as file:
        for position in (0, 5, 200):
            with page_cache.allowed_to_wait(False):
                found = page_cache.read(path, file.fileno(), 20, position)
            with page_cache.allowed_to_wait(True):
                waited = page_cache.read(path, file.fileno(), 20, position)
            assert found == waited
            assert found == bytes(range(size))[position : position + 20]


def test_a_fetch_reads_what_it_can(store: MessageStore, tmp_path: Path) -> None:
    """Whole records of any size, even if another file is missing, which is raised at the end."""
    (done,) = append_durably(store, draft(body=bytes(5_000)))
    path = log_of(store).files.path(0)
    reads: list[tuple[int, int]] = []

    def pread(fd: int, size: int, position: int) -> bytes:
        reads.append((position, size))
        return os.pread(fd, size, position)

    gone = page_cache.Missing(tmp_path / "gone", 0, 10)
    short = page_cache.Missing(path, 4, 10)
    where = store.reader.lacking([done.physical_offset, -1, store.write_offset]).missing
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "pread", pread)
        with pytest.raises(FileNotFoundError):
            page_cache.NotInMemoryError([gone, *where, short]).fetch()

    assert [one[:2] for one in where] == [(path, done.physical_offset)]
    assert (done.physical_offset, done.size) in reads
    assert reads[-1] == (4, 10)
