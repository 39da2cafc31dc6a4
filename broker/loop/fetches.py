"""Threads that read file ranges into memory, so that the event loop never waits for the disk."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from halfmq.store.files.page_cache import NotInMemoryError

from .services import Service

logger = logging.getLogger(__name__)

FETCH_THREADS: Final = 4
"""Concurrent fetches: as many reads as a disk serves in parallel at full speed. Others are queued:
at most one for each connection and delay level, and sixteen for checks."""

Fetch = Callable[[NotInMemoryError, Callable[[bool], None]], None]
"""``Fetches.begin``."""


class Fetches(Service):
    """Runs fetches, each for one connection, transaction or delay level."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")

    def begin(self, missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
        """Start a fetch; call ``on_fetched`` on the event loop when it has ended.

        Its argument is whether all bytes could be read. It is not called for a fetch cancelled by a
        stop.
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
        """Wait for running fetches, and start no more."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
