"""Halves that are not in memory: read by threads, so that the event loop never waits for the disk.

A transaction that nobody decided for hours lies where the page cache has long let go of it, and
after a restart all of them do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from .half import StoredHalf, parse_half

COLD_READ_THREADS: Final = 2
"""Threads that wait for the disk; the checker bounds how many reads there are."""

FIRST_READ: Final = 2_048
"""Bytes read of a half at first; larger ones are read once more, at their size."""

_SIZE_BYTES: Final = 4  # a record begins with its size

OnRead = Callable[[StoredHalf | None], None]
"""Takes a half that was read, or None: there is none that is sound."""

ReadRanges = Callable[[Iterable[tuple[int, int]]], bytes]
"""The store's ``read_cold``: waits for the disk, and may be called by any thread."""


class ColdHalves:
    """Reads halves in threads of its own."""

    def __init__(self, read_cold: ReadRanges) -> None:
        self._read_cold = read_cold
        self._threads = ThreadPoolExecutor(COLD_READ_THREADS, thread_name_prefix="cold-half")

    async def start(self) -> None:
        """Nothing to do: threads start with the first read."""

    async def stop(self) -> None:
        """Wait for reads that are under way; nobody is told of what they find."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def read(self, offset: int, on_read: OnRead) -> None:
        """Have ``on_read`` called on the event loop's thread with the half at an offset.

        It gets None when there is none that is sound, or when the disk refuses it.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, read_half, self._read_cold, offset)
        future.add_done_callback(lambda done: _hand_over(done, on_read))


def read_half(read_cold: ReadRanges, offset: int) -> StoredHalf | None:
    """Read the half at an offset, wherever it is; None when there is none that is sound.

    Raises:
        OSError: The disk refuses it, or its file has been deleted.
    """
    record = read_cold(((offset, FIRST_READ),))
    size = int.from_bytes(record[:_SIZE_BYTES], "big")
    if len(record) == FIRST_READ < size:
        record = read_cold(((offset, size),))
    return parse_half(record, offset)


def _hand_over(done: asyncio.Future[StoredHalf | None], on_read: OnRead) -> None:
    if not done.cancelled():
        on_read(None if done.exception() is not None else done.result())
