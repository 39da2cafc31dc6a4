"""Read half messages from the log. Only the log replay reads them in another way."""

import logging
from collections.abc import Callable, Iterator
from typing import Final

from halfmq.store.format.record import PREFIX
from halfmq.store.format.topics import HALF_TOPIC
from halfmq.store.message_store import MessageStore

from .errors import HalfMismatchError, HalfNotFoundError
from .half import StoredHalf, parse_half

logger = logging.getLogger(__name__)

NEWEST_STEP: Final = 256
"""Halves that ``newest`` reads at once, if that many fit."""


ReadHalf = Callable[[int], StoredHalf | None]
"""`HalfReader.read`."""


class HalfReader:
    """Reads halves, also those that are not on disk yet."""

    def __init__(self, log: MessageStore) -> None:
        self._log = log

    def read(self, offset: int) -> StoredHalf | None:
        """Return the half at a physical offset; None if there is no valid one.

        Raises:
            NotInMemoryError: It must be read from the disk first.
        """
        record = self._log.reader.unchecked_bytes(offset)
        return None if record is None else parse_half(record, offset)

    def named(self, offset: int) -> StoredHalf | None:
        """Return the half at the physical offset that a request names; None if none was appended.

        Raises:
            NotInMemoryError: It must be read from the disk first.
        """
        half = self.read(offset)
        if half is None or not self._log.queues.has_record(
            HALF_TOPIC, 0, half.queue_offset, offset, half.size
        ):
            return None
        return half

    def existing(self, offset: int) -> StoredHalf:
        """Return the half at the physical offset that a request names.

        Raises:
            HalfNotFoundError: No valid record begins there.
            HalfMismatchError: The record there is not a half.
            NotInMemoryError: It must be read from the disk first.
        """
        half = self.named(offset)
        if half is not None:
            return half
        if self._log.named_record(offset) is None:
            raise HalfNotFoundError(offset)
        raise HalfMismatchError(
            offset,
            f"The record is not a half message: that at commitLogOffset {offset} belongs to "
            "something else; expected is the offset in the msgId that answered the prepare",
        )

    def newest(self, count_max: int, bytes_max: int) -> Iterator[StoredHalf]:
        """Yield the newest halves of the log, the newest first; block on the disk.

        Stop after ``count_max`` halves or ``bytes_max`` bytes of them, or if the disk fails. The
        newest half is yielded regardless of its size.
        """
        log = self._log
        first, end = log.queues.bounds(HALF_TOPIC, 0)
        newest, first = end, max(first, end - count_max)
        step = NEWEST_STEP
        while end > first:
            start = max(first, end - step)
            found = log.queues.get(HALF_TOPIC, 0, start, max_count=end - start, max_bytes=1 << 62)
            if found.size > bytes_max and end - start > 1:
                step = (end - start) // 2  # only the newer ones may fit
                continue
            if found.size > bytes_max and end < newest:
                return
            halves: list[StoredHalf] = []
            try:
                for one in found.ranges:  # after damage in one range, read the next
                    halves += _halves_in(log.reader.read_cold([one]), one[0])
            except OSError:
                logger.exception("event=halves_unreadable queue_offset=%d", start)
                return
            yield from reversed(halves)
            bytes_max -= found.size
            end = start


def _halves_in(data: bytes, start: int) -> list[StoredHalf]:
    """Return the halves in ``data``, from the physical offset ``start`` up to the first damage."""
    halves: list[StoredHalf] = []
    at = 0
    while at < len(data):
        size = PREFIX.unpack_from(data, at)[0] if len(data) - at >= PREFIX.size else 0
        half = parse_half(data[at : at + max(size, 0)], start + at)
        if half is None:
            logger.warning("event=half_unreadable half_offset=%d", start + at)
            break
        halves.append(half)
        at += half.size
    return halves
