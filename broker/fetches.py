"""Threads that bring into memory what the event loop lacks, so that it never waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from halfmq.store.page_cache import NotInMemoryError

logger = logging.getLogger(__name__)

FETCH_THREADS: Final = 4
"""Fetches at once, as many reads as a disk serves side by side without losing speed. One more
waits its turn; a connection or a delay level has one at most, and checks have sixteen."""

Fetch = Callable[[NotInMemoryError, Callable[[bool], None]], None]
"""``Fetches.begin``."""


class Fetches:
    """Fetches, each for one connection, transaction or delay level that waits for it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")

    async def start(self) -> None:
        """Nothing to do: threads start with the first fetch."""

    def begin(self, missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
        """Have it fetched; then ``on_fetched`` is called on the event loop.

        With True if all of it could be read. Nothing is called for a fetch that a stop cuts off.
        """

        def done(fetched: asyncio.Future[None]) -> None:
            if fetched.cancelled():
                return
            error = fetched.exception()
            if error is not None:
                logger.warning("event=fetch_failed error=%r", error)
            on_fetched(error is None)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._threads, missing.fetch).add_done_callback(done)

    async def stop(self) -> None:
        """Wait for fetches that are under way, and begin no more."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
