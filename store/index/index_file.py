"""One file of the key index.

Items are appended by one thread, in groups and in log order; look-ups and flushes may run in other
threads at the same time. A group is published in this order: items, header, slots. So a reader that
sees a slot also sees the item it names, and a reader that is too early sees the old index. A file
is mapped only while it is appended to; all reads are preads, so that a cold page stops the calling
thread and not the event loop.

Source: RocketMQ ``IndexFile.java``.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UnusableFileError
from ..files import disk
from ..files.mapped_file import reserve
from ..files.page_cache import read
from ..format.index import (
    FIRST_ITEM,
    HEADER_SIZE,
    ITEM_SIZE,
    ITEMS,
    SECONDS_MAX,
    SLOT,
    SLOT_SIZE,
    SLOTS,
    HashedKeys,
    IndexHeader,
    IndexItem,
    index_file_size,
    item_position,
    seconds_after,
    slot_position,
    unpack_header,
    unpack_item,
)

RESERVED_AHEAD: Final = 4 << 20  # bytes of items reserved at once, 210 000 items
_READ_PIECE: Final = ITEM_SIZE * 65_536  # bytes read at once when all items are checked
_PAGE: Final = 4096  # bytes of slots compared at once
NEVER_FLUSHED: Final = 0x7FFF_FFFF_FFFF_FFFF  # end timestamp of a file that is being repaired


class _Chained(NamedTuple):
    """New items linked into the chains of their slots."""

    previous: NDArray[np.int32]  # of each item, the previous one in its slot; 0 for none
    slots: NDArray[np.int32]  # the slots of the items, each once
    newest: NDArray[np.int32]  # of each slot, the number of its newest item


def _chained(slots: NDArray[np.int32], newest: NDArray[np.int32], first: int) -> _Chained:
    """Link new items, numbered from ``first`` on, to the newest items of all slots.

    A slot with an invalid number counts as empty; a crash or another writer may leave one.
    """
    order = slots.argsort(kind="stable")  # groups the items of a slot
    sorted_slots = slots[order]
    numbers = (order + first).astype(np.int32)
    begins = np.ones(len(order), bool)
    np.not_equal(sorted_slots[1:], sorted_slots[:-1], out=begins[1:])
    ends = np.ones(len(order), bool)
    ends[:-1] = begins[1:]
    taken = sorted_slots[begins]
    before = np.zeros_like(numbers)
    before[1:] = numbers[:-1]
    found = newest[taken]
    before[begins] = np.where((found > 0) & (found < first), found, 0)
    previous = np.empty_like(before)
    previous[order] = before
    return _Chained(previous, taken, numbers[ends])


class IndexFile:
    """One index file: open for reading, and mapped when it is first appended to."""

    def __init__(self, path: Path, slots: int, items: int) -> None:
        """Open an existing file.

        Raises:
            UnusableFileError: The layout differs from these settings, or the header is invalid.
        """
        self.path = path
        self.slots = slots
        self.items_max = items  # item numbers, of which 0 is never used
        self._size = index_file_size(slots, items)
        self._fd = disk.open_file(path, disk.WRITE)
        # A look-up in another thread may still read a file that retention drops: the last user
        # closes it.
        self._closer = weakref.finalize(self, disk.close, self._fd)
        self._map: disk.Map | None = None
        self._slots = np.empty(0, SLOTS)  # views of the map
        self._items = np.empty(0, ITEMS)
        self._reserved_end = 0
        self._unflushed = False
        try:
            self.header = self._checked_header()
            self.needs_check = self._needs_check()  # before any of its items is trusted
        except BaseException:
            self._closer()
            raise

    def _checked_header(self) -> IndexHeader:
        size = disk.fstat(self._fd).st_size
        if size != self._size:
            raise UnusableFileError(self.path, f"{size} bytes instead of {self._size}")
        header = unpack_header(disk.pread(self._fd, HEADER_SIZE, 0))
        if header.next_item > self.items_max or min(header) < 0:
            raise UnusableFileError(self.path, f"header {header}")
        return header

    def _needs_check(self) -> bool:
        """Return whether header and items are inconsistent, or a repair was not finished."""
        header = self.header
        if self.is_empty:
            return False
        first, last = self._item(FIRST_ITEM), self._item(header.next_item - 1)
        return (
            header.end_timestamp == NEVER_FLUSHED
            or first.physical_offset != header.begin_physical_offset
            or last.physical_offset != header.end_physical_offset
        )

    @property
    def is_empty(self) -> bool:
        return self.header.next_item <= FIRST_ITEM

    @property
    def room(self) -> int:
        """How many more items fit into the file."""
        return self.items_max - self.header.next_item

    def begin_after(self, full: IndexHeader) -> None:
        """Start an empty file at the end of a full one, as RocketMQ does.

        The time of its first item is therefore relative to the end of the full file.
        """
        self.header = IndexHeader(
            begin_timestamp=full.end_timestamp,
            end_timestamp=full.end_timestamp,
            begin_physical_offset=full.end_physical_offset,
            end_physical_offset=full.end_physical_offset,
        )

    def prepare(self, count: int) -> None:
        """Map the file and reserve space, so that appending ``count`` items cannot fail.

        Raises:
            DiskFullError: There is no space for them; nothing was changed.
        """
        if self._map is None:
            items_start = item_position(0, self.slots)
            reserve(self._fd, 0, items_start, self.path)
            self._reserved_end = items_start
        end = item_position(self.header.next_item + count, self.slots)
        if end > self._reserved_end:
            reserved_end = min(end + RESERVED_AHEAD, self._size)
            reserve(self._fd, self._reserved_end, reserved_end, self.path)
            self._reserved_end = reserved_end
        if self._map is None:
            self._map = disk.map_scattered(self._fd, self._size)
            self._slots = np.frombuffer(self._map, SLOTS, self.slots, HEADER_SIZE)
            self._items = np.frombuffer(self._map, ITEMS, self.items_max, slot_position(self.slots))

    def append(self, keys: HashedKeys) -> None:
        """Add items; ``prepare`` has made room for them."""
        target = self._map
        hashes, offsets, timestamps = keys
        count = len(hashes)
        assert target is not None
        assert 0 < count <= self.room
        before = self.header
        first = before.next_item
        begin_offset, begin_timestamp = before.begin_physical_offset, before.begin_timestamp
        if first == FIRST_ITEM:
            begin_offset, begin_timestamp = int(offsets[0]), int(timestamps[0])
        chained = _chained(hashes % self.slots, self._slots, first)
        items = self._items[first : first + count]
        items["key_hash"] = hashes
        items["physical_offset"] = offsets
        items["seconds"] = seconds_after(begin_timestamp, timestamps)
        items["previous"] = chained.previous
        if first == FIRST_ITEM:
            items["seconds"][:1] = seconds_after(before.begin_timestamp, timestamps[:1])
        # Marked before and after: a flush in between sees the header, but not yet the slots.
        self._unflushed = True
        self.header = IndexHeader(
            begin_timestamp,
            int(timestamps[-1]),
            begin_offset,
            int(offsets[-1]),
            before.slot_count + count - int(np.count_nonzero(chained.previous)),
            first + count,
        )
        # In one step, for other programs that read the file.
        target[:HEADER_SIZE] = self.header.pack()
        # Only the newest item of a slot: the others were never the end of a group.
        self._slots[chained.slots] = chained.newest
        self._unflushed = True

    def offsets(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield the physical offsets of records whose key has this hash, newest first.

        None stands for an item of another key or time: there may be millions, so callers pause.
        """
        number = self._slot(key_hash % self.slots)
        header = self.header  # read after the slot, so that it counts the slot's item
        while 0 < number < header.next_item:
            item = self._item(number)
            timestamp = header.begin_timestamp + item.seconds * 1000
            if item.seconds < 0:
                break
            is_hit = item.key_hash == key_hash and begin_ms <= timestamp <= end_ms
            yield item.physical_offset if is_hit else None
            # An item only points to older ones; a damaged file must not cause an endless loop.
            if item.previous >= number or timestamp < begin_ms:
                break
            number = item.previous

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        """Return whether the file can hold items of this time."""
        return self.header.begin_timestamp <= end_ms and begin_ms <= self.header.end_timestamp

    def rebuild(self, *, log_end: int, durable_ms: int) -> bool:
        """Keep the leading items that are certain, and rewrite header and slots.

        An item is certain if its time is not after ``durable_ms``, its offset is not lower than
        that of the previous item nor beyond the log, it continues the chain of its slot, and the
        first item is the one that the header names.

        Returns:
            Whether all items were kept.
        """
        before = self.header
        # Items store whole seconds, so the whole second must be durable.
        seconds_max = min((durable_ms + 1 - before.begin_timestamp) // 1000 - 1, SECONDS_MAX)
        slots = np.zeros(self.slots, np.int32)
        last_offset = last_seconds = slot_count = 0
        number = FIRST_ITEM
        for items in self._pieces():
            offsets, seconds = items["physical_offset"], items["seconds"]
            offsets_before = np.roll(offsets, 1)
            offsets_before[0] = last_offset
            in_slots = items["key_hash"] % self.slots
            previous = _chained(in_slots, slots, number).previous
            certain = (
                (items["key_hash"] >= 0)
                & (offsets >= offsets_before)
                & (offsets < log_end)
                & (seconds >= 0)
                & (seconds <= seconds_max)
                & (items["previous"] == previous)
            )
            if number == FIRST_ITEM:
                certain[0] &= offsets[0] == before.begin_physical_offset
            count = len(items) if certain.all() else int(certain.argmin())
            if not count:
                break
            chained = _chained(in_slots[:count], slots, number)
            slots[chained.slots] = chained.newest
            slot_count += count - int(np.count_nonzero(chained.previous))
            number += count
            last_offset, last_seconds = int(offsets[count - 1]), int(seconds[count - 1])
            if count < len(items):
                break
        if number == FIRST_ITEM:
            self.header = before._replace(next_item=number)  # empty: the service deletes it
            return number == before.next_item
        self._write_header(before._replace(end_timestamp=NEVER_FLUSHED))
        self._cut(number)
        self._write_slots(slots)
        self._finish(before, number, slot_count, last_offset, last_seconds)
        return number == before.next_item

    def drop_from(self, physical_offset: int) -> None:
        """Remove the items of records at or after an offset."""
        before = self.header
        number = before.next_item
        if number <= FIRST_ITEM or self._item(number - 1).physical_offset < physical_offset:
            return
        self._write_header(before._replace(end_timestamp=NEVER_FLUSHED))
        slot_count = before.slot_count
        item = IndexItem(0, 0, 0, 0)
        while number > FIRST_ITEM:
            item = self._item(number - 1)
            if item.physical_offset < physical_offset:
                break
            number -= 1
            position = slot_position(item.key_hash % self.slots)
            disk.pwrite(self._fd, SLOT.pack(item.previous), position)
            slot_count -= item.previous == 0
        self._cut(number)
        self._finish(before, number, slot_count, item.physical_offset, item.seconds)

    def _finish(
        self, before: IndexHeader, number: int, slot_count: int, end_offset: int, seconds: int
    ) -> None:
        """Write the header of a file that lost items; until then the file counts as damaged."""
        # The exact time of the last item is not stored. A slightly later one is safe: more look-ups
        # read this file, and it counts as flushed a little later.
        end_timestamp = before.begin_timestamp + seconds * 1000 + 999
        self._sync()
        self._write_header(
            before._replace(
                end_timestamp=min(end_timestamp, before.end_timestamp),
                end_physical_offset=end_offset,
                slot_count=max(slot_count, 0),
                next_item=number,
            )
        )
        self._sync()
        self.needs_check = False

    def _cut(self, number: int) -> None:
        """Zero the file from an item on, so that no old data is taken for an item."""
        disk.ftruncate(self._fd, item_position(number, self.slots))
        disk.ftruncate(self._fd, self._size)

    def _write_header(self, header: IndexHeader) -> None:
        disk.pwrite(self._fd, header.pack(), 0)
        self.header = header

    def _write_slots(self, slots: NDArray[np.int32]) -> None:
        """Write only the slots that differ, because flushing all of them takes long."""
        content = slots.astype(SLOTS).tobytes()
        found = self._read(len(content), HEADER_SIZE)
        for start in range(0, len(content), _PAGE):
            page = content[start : start + _PAGE]
            if page != found[start : start + _PAGE]:
                disk.pwrite(self._fd, page, HEADER_SIZE + start)

    def _pieces(self) -> Iterator[NDArray[np.void]]:
        """Yield all items in arrays, oldest first."""
        position = item_position(FIRST_ITEM, self.slots)
        end = item_position(self.header.next_item, self.slots)
        while position < end:
            size = min(_READ_PIECE, end - position)
            yield np.frombuffer(self._read(size, position), ITEMS)
            position += _READ_PIECE

    def _slot(self, slot: int) -> int:
        return int(SLOT.unpack(self._read(SLOT_SIZE, slot_position(slot)))[0])

    def _item(self, number: int) -> IndexItem:
        return unpack_item(self._read(ITEM_SIZE, item_position(number, self.slots)))

    def _read(self, size: int, position: int) -> bytes:
        """Read bytes; zeros, which end a search, if another program has cut the file."""
        return read(self.path, self._fd, size, position).ljust(size, b"\0")

    def flush(self) -> None:
        """Flush what was appended so far; for a helper thread."""
        if self._unflushed:
            self._unflushed = False  # before the call: items added during it need another flush
            try:
                self._sync()
            except OSError:
                self._unflushed = True
                raise

    @property
    def is_flushed(self) -> bool:
        return not self._unflushed

    def _sync(self) -> None:
        disk.sync_data(self._fd)

    def unmap(self) -> None:
        """Unmap the file after the last append; it can still be read."""
        if self._map is not None:
            # The map cannot be closed while views of it exist.
            self._slots, self._items = np.empty(0, SLOTS), np.empty(0, ITEMS)
            self._map.close()
            self._map = None

    def close(self) -> None:
        """Close the file; unflushed data stays in the page cache."""
        self.unmap()
        self._closer()
