"""Search a queue for messages that match an SQL92 filter.

The tags of a message are in its queue entry, but its properties are only in the log. So messages
are read, and those that match are copied into the answer. A search takes about a millisecond; if it
ends without a match, the consumer continues from there with its next pull.
"""

import logging
import time
from typing import Final

from attrs import define, field

from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.record import properties_at
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...filters.compiled_filter import CompiledFilter

logger = logging.getLogger(__name__)

SEARCH_S: Final = 0.001
"""Seconds of one search; evaluating the largest filter for the last message may double them."""

READ_COUNT: Final = 64
"""Messages read in one step; a client wants up to 32 that match."""


@define(eq=False, repr=False, slots=False)
class SqlSearch:
    """A search of one queue for one pull: the matches so far, and where it continues."""

    _store: MessageStore
    _topic: str
    _queue_id: int
    next_offset: int = field(alias="offset")  # the queue offset to continue at
    _wanted: CompiledFilter
    _max_count: int
    _max_bytes: int
    _wait: bool = False
    _archived: bool = False  # whether the caller reads what is in the archive

    def __attrs_post_init__(self) -> None:
        self.records: list[bytes] = []  # whole records that match
        self.size = 0  # bytes of `records`
        self.is_cold = False  # the messages at next_offset must be read from disk
        self.result = self._get(READ_COUNT)  # the latest read of the queue: why the search ended

    def search(self) -> None:
        """Search until enough messages match, the time is over, or the queue ends."""
        end = time.perf_counter() + SEARCH_S
        while self.result.status is GetStatus.FOUND:
            chunk = self._store.reader.read(self.result.ranges)
            if chunk is None:
                self.is_cold = True
                return
            if not self._take(chunk, end):
                return
            self.result = self._get(READ_COUNT)

    def take(self, chunk: bytes) -> None:
        """Add the matches in ``chunk``, the bytes of ``result``, which were not in memory."""
        self._take(chunk, time.perf_counter() + SEARCH_S)

    def _take(self, chunk: bytes, deadline: float) -> bool:
        """Add the matches in ``chunk``; return whether to go on."""
        start, end = self.next_offset, self.result.next_offset
        position = 0
        while position < len(chunk):
            try:
                size, queue_offset, properties = properties_at(chunk, position)
            except CorruptRecordError:
                queue_offset = -1
            if not start <= queue_offset < end:
                if position == 0:
                    self._take_damaged(chunk)
                return False
            if self._wanted.matches(properties):
                if self.records and self.size + size > self._max_bytes:
                    return False
                self.records.append(chunk[position : position + size])
                self.size += size
            position += size
            self.next_offset = queue_offset + 1
            if len(self.records) >= self._max_count or time.perf_counter() >= deadline:
                return False
        self.next_offset = end
        return True

    def _take_damaged(self, chunk: bytes) -> None:
        """Add the damaged first message of a chunk, as a pull without filter would.

        The consumer reports that it cannot read it.
        """
        if self.records:
            return  # the next pull begins with it
        one = self._get(1, wait=True)
        logger.error(
            "event=damaged_record_not_filtered queue=%s:%d offset=%d log_offset=%d",
            self._topic,
            self._queue_id,
            self.next_offset,
            one.ranges[0][0],
        )
        self.records.append(chunk[: one.size])
        self.size = one.size
        self.next_offset = one.next_offset

    def _get(self, max_count: int, *, wait: bool = False) -> GetResult:
        return self._store.queues.get(
            self._topic,
            self._queue_id,
            self.next_offset,
            max_count=max_count,
            max_bytes=self._max_bytes,
            wait=wait or self._wait,
            archived=self._archived,
        )
