"""A disk of which nothing is in memory before it was read by somebody who may wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import pytest

from halfmq.store.files import disk, page_cache
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.log import log_reader
from tests.support.patience import PATIENCE_S

PAGE: Final = 4096


class Ice:
    """What was read, and by whom."""

    def __init__(self) -> None:
        self.fetched_by: list[int] = []  # threads, one for each file opened to fetch from it
        self.fetches = 0
        self.waited = 0  # reads on the event loop's thread of what was not in memory
        self.failure: OSError | None = None
        """What a fetch fails with."""
        self.melts = True
        """Whether what was read stays in memory."""
        self.may_read = threading.Event()
        """Fetches wait for it."""
        self.may_read.set()
        self._thawed: set[tuple[int, int]] = set()  # inode, number of the page
        self._loop_thread = threading.get_ident()

    def open_to_fetch(self, opened: Callable[..., object], *arguments: object) -> object:
        self.fetched_by.append(threading.get_ident())
        assert self.may_read.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return opened(*arguments)

    def pread(self, fd: int, size: int, position: int) -> bytes:
        return self._read(disk.pread, fd, size, position)

    def read_fully(self, fd: int, size: int, position: int) -> bytes:
        return self._read(disk.read_fully, fd, size, position)

    def _read(self, read: Callable[[int, int, int], bytes], *arguments: int) -> bytes:
        found = read(*arguments)
        fd, _, position = arguments
        pages = _pages(fd, position, len(found))
        if threading.get_ident() == self._loop_thread:
            self.waited += not self._thawed.issuperset(pages)
        if self.melts:
            self._thawed |= pages
        return found

    def preadv(
        self, fd: int, targets: Sequence[memoryview | bytearray], position: int, flags: int = 0
    ) -> int:
        size = min(sum(map(len, targets)), max(os.fstat(fd).st_size - position, 0))
        if not self._thawed.issuperset(_pages(fd, position, size)):
            raise BlockingIOError
        return disk.preadv(fd, targets, position, flags)


def _pages(fd: int, position: int, size: int) -> set[tuple[int, int]]:
    file = os.fstat(fd).st_ino
    return {(file, page) for page in range(position // PAGE, (position + size - 1) // PAGE + 1)}


@contextmanager
def frozen() -> Iterator[Ice]:
    """Have every read that may not wait find nothing at first, until the end of the block."""
    ice = Ice()
    stand_in = SimpleNamespace(
        NO_WAIT=disk.NO_WAIT,
        opened=lambda *arguments: ice.open_to_fetch(disk.opened, *arguments),
        pread=ice.pread,
        preadv=ice.preadv,
    )
    fetch = NotInMemoryError.fetch

    def counted(missing: NotInMemoryError) -> None:
        ice.fetches += 1
        fetch(missing)

    reading = SimpleNamespace(**vars(disk) | {"read_fully": ice.read_fully})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page_cache, "disk", stand_in)
        patched.setattr(log_reader, "disk", reading)
        patched.setattr(NotInMemoryError, "fetch", counted)
        try:
            yield ice
        finally:
            ice.may_read.set()
