"""Search a queue for messages that match an SQL92 filter.

The tags of a message are in its queue entry, but its properties are only in the log. So messages
are read, and those that match are copied into the answer. A search takes about a millisecond; if it
ends without a match, the consumer continues from there with its next pull.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.record import properties_at
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...filters.compiled_filter import CompiledFilter

logger = logging.getLogger(__name__)

SEARCH_S: Final = 0.001
"""Seconds of one search; evaluating the largest filter for the last message may double them."""

READ_COUNT: Final = 64
"""Messages read in one step; a client wants up to 32 that match."""


class Search(msgspec.Struct):
    """The state of a search: the matches so far, and where it continues."""

    next_offset: int  # the queue offset to continue at
    result: GetResult  # of the latest read of the queue: why the search ended
    records: list[bytes]  # whole records that match
    size: int = 0  # bytes of `records`
    is_cold: bool = False  # the messages at next_offset must be read from disk


class Searcher:
    """Searches one queue for one pull."""

    def __init__(
        self,
        store: MessageStore,
        header: PullMessageRequestHeader,
        wanted: CompiledFilter,
        *,
        max_count: int,
        max_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._topic, self._queue_id = header.topic, header.queue_id
        self._wanted = wanted
        self._max_count, self._max_bytes = max_count, max_bytes
        self._clock = clock
        self._end = clock() + SEARCH_S

    def begin(self, offset: int, *, wait: bool = False) -> Search:
        """Return a search that begins at a queue offset; without ``wait`` do not read the disk."""
        return Search(offset, self._get(offset, READ_COUNT, wait=wait), [])

    def search(self, found: Search, *, wait: bool = False) -> None:
        """Search until enough messages match, the time is over, or the queue ends."""
        while found.result.status is GetStatus.FOUND:
            chunk = self._store.reader.read(found.result.ranges)
            if chunk is None:
                found.is_cold = True
                return
            if not self.take(found, chunk):
                return
            found.result = self._get(found.next_offset, READ_COUNT, wait=wait)

    def take(self, found: Search, chunk: bytes) -> bool:
        """Add the matches in ``chunk``, the bytes of ``found.result``; return whether to go on."""
        start, end = found.next_offset, found.result.next_offset
        position = 0
        while position < len(chunk):
            try:
                size, queue_offset, properties = properties_at(chunk, position)
            except CorruptRecordError:
                queue_offset = -1
            if not start <= queue_offset < end:
                if position == 0:
                    self._take_damaged(found, chunk)
                return False
            if self._wanted.matches(properties):
                if found.records and found.size + size > self._max_bytes:
                    return False
                found.records.append(chunk[position : position + size])
                found.size += size
            position += size
            found.next_offset = queue_offset + 1
            if len(found.records) >= self._max_count or self._clock() >= self._end:
                return False
        found.next_offset = end
        return True

    def _take_damaged(self, found: Search, chunk: bytes) -> None:
        """Add the damaged first message of a chunk, as a pull without filter would.

        The consumer reports that it cannot read it.
        """
        if found.records:
            return  # the next pull begins with it
        one = self._get(found.next_offset, 1, wait=True)
        logger.error(
            "event=damaged_record_not_filtered queue=%s:%d offset=%d log_offset=%d",
            self._topic,
            self._queue_id,
            found.next_offset,
            one.ranges[0][0],
        )
        found.records.append(chunk[: one.size])
        found.size = one.size
        found.next_offset = one.next_offset

    def _get(self, offset: int, max_count: int, *, wait: bool) -> GetResult:
        return self._store.queues.get(
            self._topic,
            self._queue_id,
            offset,
            max_count=max_count,
            max_bytes=self._max_bytes,
            wait=wait,
        )
