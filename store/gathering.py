"""Portions of records that have nothing in common, so that each is looked at by itself.

Scouts (``scouts``) gather them. Then the recovery, which one process alone can do, has next to
nothing left to do for a record, and need not read it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from .commit_log import NO_QUEUE_ENTRY
from .format.filler import FILLER_BIT
from .format.flags import INNER_BATCH
from .format.properties import TagsCodes
from .format.queue_entry import ENTRY_SIZE, LAYOUT
from .format.topics import SCHEDULE_TOPIC, is_text
from .log_scan import Found, store_timestamp
from .portion import Portion, Share

LENGTH_MIN: Final = 16  # records; fewer are found in the time that it takes to tell of them
LENGTH_MAX: Final = 4096  # records: a fifth of a megabyte of queue entries
BYTES_MAX: Final = 4 << 20  # of log: read in milliseconds where a queue wants to know more
_UNUSUAL: Final = NO_QUEUE_ENTRY | INNER_BATCH | FILLER_BIT
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()  # its queue entries say when, not which tags


class _Growing:
    """A share that more records may come to."""

    __slots__ = ("entries", "first", "next_offset")

    def __init__(self, first: int) -> None:
        self.first = self.next_offset = first
        self.entries: list[bytes] = []


class Gathering:
    """Makes portions of records that were found one by one; leaves out what is unusual.

    The last record of those at hand is held back until another one follows it.
    """

    def __init__(self, send: Callable[[Portion], None]) -> None:
        self._send = send
        self._tags_codes = TagsCodes()
        self._held: tuple[int, bytes, Sequence[Found]] = 0, b"", ()
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        self._shares: dict[tuple[bytes, int], _Growing] = {}
        self._start = self._end = self._last = offset
        self._length = self._sys_flags = self._timestamp = 0

    def add(self, chunk_offset: int, chunk: bytes, found: Sequence[Found]) -> None:
        """Take in records of the chunk that begins at a physical offset."""
        self._take_held()
        self._take(chunk_offset, chunk, found[:-1])
        self._held = chunk_offset, chunk, found[-1:]
        if self._length >= LENGTH_MAX or self._end - self._start >= BYTES_MAX:
            self._finish()

    def add_portion(self, portion: Portion) -> None:
        """Take in what is a portion already."""
        self._take_held()
        self._finish()
        self._send(portion)

    def end(self) -> None:
        """Send what is left: no record begins behind those that came, or not in this file."""
        self._held = 0, b"", ()
        self._finish()

    def _take_held(self) -> None:
        self._take(*self._held)
        self._held = 0, b"", ()

    def _take(self, chunk_offset: int, chunk: bytes, found: Sequence[Found]) -> None:
        if found and chunk_offset + found[0][0] != self._end:
            self._finish()
            self._start_at(chunk_offset + found[0][0])
        shares, pack, tags_code_at = self._shares, LAYOUT.pack, self._tags_codes.code_at
        last: Found | None = None
        length = 0
        for record in found:
            position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at = record
            end = position + size
            unusual = sys_flag & _UNUSUAL
            may_be_torn = chunk.find(0, properties_at, end) >= 0
            share = None
            if not unusual and not may_be_torn:
                key = (chunk[topic_at : properties_at - 2], queue_id)
                share = shares.get(key)
                if share is None and key[0] != _SCHEDULE_TOPIC:
                    share = shares[key] = _Growing(queue_offset)
            if share is not None and share.next_offset == queue_offset:
                code = tags_code_at(chunk, properties_at, end)
                share.entries.append(pack(chunk_offset + position, size, code))
                share.next_offset = queue_offset + 1
            elif (
                may_be_torn
                or queue_offset
                or unusual != NO_QUEUE_ENTRY
                or not is_text(chunk[topic_at : properties_at - 2])
            ):
                self._note(chunk_offset, chunk, last, length)
                self._finish()
                self._start_at(chunk_offset + end)
                shares, last, length = self._shares, None, 0
                continue
            self._sys_flags |= sys_flag
            length += 1
            last = record
        self._note(chunk_offset, chunk, last, length)

    def _note(self, chunk_offset: int, chunk: bytes, last: Found | None, length: int) -> None:
        """Note how far the portion at hand goes now: so many records further."""
        if last is not None:
            position, size, sys_flag, *_ = last
            self._length += length
            self._last = chunk_offset + position
            self._end = self._last + size
            self._timestamp = store_timestamp(chunk, position, sys_flag)

    def _finish(self) -> None:
        """Send the portion at hand, and begin another one behind it."""
        if self._length >= LENGTH_MIN:
            self._send(
                Portion(
                    self._start,
                    self._end,
                    self._last,
                    self._length,
                    self._sys_flags,
                    self._timestamp,
                    [_share(key, growing) for key, growing in self._shares.items()],
                )
            )
        self._start_at(self._end)


def _share(key: tuple[bytes, int], growing: _Growing) -> Share:
    entries = b"".join(growing.entries)
    offset, size, _ = LAYOUT.unpack_from(entries, len(entries) - ENTRY_SIZE)
    return key, growing.first, entries, offset + size
