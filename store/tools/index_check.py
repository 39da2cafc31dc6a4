"""Comparing the key index with the log.

Index items are in log order, as are the keys of the records that are read. So the two are walked
side by side, and a sound index costs one comparison of two lists per chunk of the log. Where they
differ, ``_align`` finds out whether an item is wrong, or there is one too many or too few.

Beside that the chains are followed: each item says which one came before it in its slot, each slot
which one is its newest. Both follow from the items alone.

RocketMQ indexes the last record again after a crash, and loses the keys of a whole file; the former
is a note, the latter is damage.
"""

import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from .. import disk
from ..format.index import (
    FIRST_ITEM,
    HEADER_SIZE,
    ITEM,
    ITEM_SIZE,
    SLOT_SIZE,
    HashedKeys,
    IndexHeader,
    IndexItem,
    KeyHasher,
    is_index_file_name,
    item_position,
    seconds_after,
    seconds_column,
    slot_position,
    unpack_header,
)
from ..log_scan import store_timestamp
from .findings import Findings
from .index_layout import IndexLayout, find_layout, layout_of_slots
from .log_walk import SETTLE_PAUSE, SETTLE_TIME, Chunk, Hole
from .state import State

_LOOK_AHEAD: Final = 256  # items or keys looked at to find where the two go on alike

Key = tuple[int, int]  # hash, physical offset


class _Columns(NamedTuple):
    """Items that follow each other in one file."""

    hashes: tuple[int, ...]
    offsets: tuple[int, ...]
    seconds: tuple[int, ...]
    previous: tuple[int, ...]


class _Item(NamedTuple):
    """One item, with where it stands."""

    file: "_File"
    number: int
    key_hash: int
    physical_offset: int
    seconds: int

    @property
    def key(self) -> Key:
        return self.key_hash, self.physical_offset


class _File:
    """One index file, read from its first item to its last while its chains are followed."""

    def __init__(
        self, path: Path, header: IndexHeader, layout: IndexLayout, begin_before: int | None
    ) -> None:
        """``begin_before`` is the time its first item counts from; None if nothing tells."""
        self.path = path
        self.header = header
        self.layout = layout
        self.begin_before = begin_before
        self.next_item = FIRST_ITEM  # the first that was not passed
        self.slots = array("i", bytes(SLOT_SIZE * layout.slots))  # newest item of each, so far
        self.slots_taken = 0
        self.first_offset = self.last_offset = self.last_seconds = 0
        self.end_timestamp = -1  # ms, store time of the very last item's record; -1: not known

    @property
    def items_left(self) -> int:
        """How many items were not passed yet."""
        return self.header.next_item - self.next_item

    def peek(self, count: int) -> _Columns:
        """Read the next items, at most those that are left."""
        count = min(count, self.items_left)
        size = count * ITEM_SIZE
        with disk.opened(self.path) as fd:
            content = disk.pread(fd, size, self.position(self.next_item))
        fields = struct.unpack(">" + "iqii" * count, content.ljust(size, b"\0"))
        return _Columns(fields[0::4], fields[1::4], fields[2::4], fields[3::4])

    def pass_over(self, items: _Columns, findings: Findings) -> None:
        """Go on behind items, and tell of those that do not continue their slot."""
        slots, count = self.slots, self.layout.slots
        before: list[int] = []
        for number, key_hash in enumerate(items.hashes, self.next_item):
            slot = key_hash % count
            before.append(slots[slot])
            slots[slot] = number
        self.slots_taken += before.count(0)
        if tuple(before) != items.previous:
            for index, (wanted, there) in enumerate(zip(before, items.previous, strict=True)):
                if there != wanted:
                    self._tell_chain(self.next_item + index, wanted, there, findings)
        if self.next_item == FIRST_ITEM:
            self.first_offset = items.offsets[0]
        self.last_offset, self.last_seconds = items.offsets[-1], items.seconds[-1]
        self.next_item += len(items.hashes)

    def _tell_chain(self, number: int, wanted: int, there: int, findings: Findings) -> None:
        findings.add(
            "index_chain_wrong",
            self.path,
            f"item {number} continues item {there} instead of {wanted}",
            position=self.position(number),
        )

    def position(self, number: int) -> int:
        """Return where an item stands in the file."""
        return item_position(number, self.layout.slots)


class IndexCheck:
    """All index files of a store; ``take`` every chunk of the log in order, then ``finish``."""

    def __init__(
        self,
        directory: Path,
        findings: Findings,
        state: State,
        holes: list[Hole],
        *,
        slots: int | None = None,
        unsettled_from: int | None = None,
    ) -> None:
        """Headers are read now: what is put from here on is left alone.

        ``holes`` are those met so far, and grow while the log is read. ``slots`` is
        ``maxHashSlotNum``; without it, the files tell.
        """
        self._findings = findings
        self._state = state
        self._holes = holes
        self._unsettled_from = unsettled_from
        self._hasher = KeyHasher()
        self.files: list[_File] = []
        self.items = 0
        self._read_files(directory, slots)
        self._current = 0  # number of the file that is being read
        self._ahead: deque[_Item] = deque()  # passed in their files, and not accounted for
        self._topics: dict[bytes, str] = {}
        self._previous: _Item | None = None  # the last item that was accounted for
        self._exists = disk.is_directory(directory) and bool(self.files)
        # Keys of the newest record may be about to go into a file that was not there yet.
        newest = self.files[-1].header.end_physical_offset if self.files else -1
        self._indexed_end = newest if state is State.OPEN else sys.maxsize

    def _read_files(self, directory: Path, slots: int | None) -> None:
        if not disk.is_directory(directory):
            return
        paths = [path for path in disk.files(directory) if is_index_file_name(path.name)]
        headers = {path: self._header(path) for path in paths}
        layout = self._layout(paths, slots)
        before: int | None = 0
        for position, path in enumerate(paths):
            header = headers[path]
            if header is None or layout is None or disk.size_of(path) != layout.size:
                self._findings.add(
                    "index_file_unusable", path, "first and last item are not where they should be"
                )
                before = None
                continue
            if not FIRST_ITEM <= header.next_item <= layout.items:
                self._findings.add(
                    "index_header_wrong", path, f"{header.next_item - 1} items", position=36
                )
                before = None
                continue
            if position == 0 and header.begin_physical_offset:
                before = None  # it may have followed one that was deleted by age
            self.files.append(_File(path, header, layout, before))
            before = header.end_timestamp

    def _header(self, path: Path) -> IndexHeader | None:
        """Read a header, not while a broker is in the middle of writing it."""
        with disk.opened(path) as fd:
            before, content = b"", disk.pread(fd, HEADER_SIZE, 0)
            while content != before and self._state is State.OPEN:
                before, content = content, disk.pread(fd, HEADER_SIZE, 0)
        return unpack_header(content) if len(content) == HEADER_SIZE else None

    def _layout(self, paths: list[Path], slots: int | None) -> IndexLayout | None:
        for path in paths:
            if slots is None:
                layout = find_layout(path)
            else:
                layout = layout_of_slots(disk.size_of(path), slots)
            if layout is not None:
                return layout
        return None

    # Side by side with the log ----------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Compare the keys of a chunk's records with the items that come next."""
        if not self._exists:
            return
        offset, content, found = chunk
        keys = self._hasher.hash_records(
            [
                (
                    self._topic(content[topic_at : properties_at - 2]),
                    content[properties_at : position + size],
                    offset + position,
                    store_timestamp(content, position, sys_flag),
                    sys_flag,
                )
                for position, size, sys_flag, _, _, topic_at, properties_at in found
                if offset + position < self._indexed_end
            ],
            after=-1,
        )
        done = 0
        while done < len(keys.hashes):
            count = 0 if self._ahead else self._take_alike(keys, done)
            done += count or self._align(keys.part(done, len(keys.hashes)))

    def _topic(self, name: bytes) -> str:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = name.decode(errors="replace")
        return topic

    def _take_alike(self, keys: HashedKeys, start: int) -> int:
        """Pass over the next items of one file if all are the keys from ``start`` on.

        Return how many that were; none where something differs, and nothing was passed.
        """
        file = self._file()
        if file is None:
            return 0
        count = min(file.items_left, len(keys.hashes) - start)
        items = file.peek(count)
        part = keys.part(start, start + count)
        hashes, offsets, timestamps, *_ = part
        if items.hashes != tuple(hashes) or items.offsets != tuple(offsets):
            return 0
        first = file.next_item
        file.pass_over(items, self._findings)
        seconds = tuple(seconds_column(file.header.begin_timestamp, part))
        if first == FIRST_ITEM or items.seconds != seconds:
            for index, item in enumerate(_items(file, first, items)):
                self._check_time(item, timestamps[index])
        if not file.items_left:
            file.end_timestamp = timestamps[-1]
        self._previous = _Item(file, first + count - 1, hashes[-1], offsets[-1], items.seconds[-1])
        self.items += count
        return count

    def _file(self) -> _File | None:
        """Return the file that the next item is in; None when there is none."""
        while self._current < len(self.files) and not self.files[self._current].items_left:
            self._current += 1
        return self.files[self._current] if self._current < len(self.files) else None

    def _fill(self, count: int) -> list[_Item]:
        """Have so many items at hand, if there are; return them."""
        while len(self._ahead) < count and (file := self._file()) is not None:
            first, items = file.next_item, file.peek(_LOOK_AHEAD)
            file.pass_over(items, self._findings)
            self._ahead.extend(_items(file, first, items))
        return list(islice(self._ahead, count))

    def _align(self, keys: HashedKeys) -> int:
        """Walk keys and items one by one, as long as they differ; tell where one has no partner.

        Return how many of the keys were accounted for, at least one.
        """
        pairs = zip(keys.hashes, keys.physical_offsets, strict=True)
        expected = deque(zip(pairs, keys.store_timestamps, strict=True))
        total = len(expected)
        alike = False
        while expected and (self._ahead or not alike):
            wanted, timestamp = expected[0]
            found = next(iter(self._fill(1)), None)
            alike = found is not None and found.key == wanted
            if found is not None and alike:
                self._check_time(found, timestamp)
                self._pass_item()
                expected.popleft()
            elif found is None:
                self._miss(expected, len(expected))
            else:
                self._step_over(found, expected)
        return total - len(expected)

    def _step_over(self, found: _Item, expected: deque[tuple[Key, int]]) -> None:
        """Find out which of an item and a key that differ has no partner, and pass it over."""
        wanted = expected[0][0]
        ahead = [item.key for item in self._fill(_LOOK_AHEAD)]
        later = [key for key, _ in islice(expected, _LOOK_AHEAD)]
        extra = ahead.index(wanted) if wanted in ahead else None
        lacking = later.index(found.key) if found.key in later else None
        if ahead[1:2] == later[1:2] != []:
            self._replace(found, expected)
        elif extra is not None and (lacking is None or extra <= lacking):
            for _ in range(extra):
                self._tell_extra(self._ahead[0])
                self._pass_item()
        elif lacking is not None:
            self._miss(expected, lacking)
        elif found.physical_offset > expected[-1][0][1]:
            self._miss(expected, len(expected))
        elif found.physical_offset < wanted[1]:
            self._tell_extra(found)
            self._pass_item()
        else:
            self._replace(found, expected)

    def _replace(self, found: _Item, expected: deque[tuple[Key, int]]) -> None:
        self._tell_wrong(found, expected.popleft()[0])
        self._pass_item()

    def _miss(self, expected: deque[tuple[Key, int]], count: int) -> None:
        self._tell_missing([expected.popleft()[0] for _ in range(count)])

    def _pass_item(self) -> None:
        self._previous = self._ahead.popleft()
        self.items += 1

    # What is told -----------------------------------------------------------------------------

    def _check_time(self, found: _Item, timestamp: int) -> None:
        """Check the seconds an item gives its record; ``timestamp`` is when that was stored."""
        file, number = found.file, found.number
        begin: int | None = file.header.begin_timestamp
        if number == FIRST_ITEM:
            begin = file.begin_before
            if file.header.begin_timestamp != timestamp:
                self._findings.add(
                    "index_header_wrong",
                    file.path,
                    f"begins at {file.header.begin_timestamp}, its first record at {timestamp}",
                    position=0,
                )
        if number == file.header.next_item - 1:
            file.end_timestamp = timestamp
        if begin is None:
            return
        seconds = seconds_after(begin, timestamp)
        # Its predecessor's end may be known to the second only, after a repair.
        slack = 1 if number == FIRST_ITEM and begin else 0
        if not seconds - slack <= found.seconds <= seconds + slack:
            self._tell_item(found, "index_item_wrong", f"{found.seconds} s instead of {seconds} s")

    def _tell_item(self, found: _Item, kind: str, detail: str, *, harmless: bool = False) -> None:
        self._findings.add(
            kind,
            found.file.path,
            f"item {found.number}: {detail}",
            position=found.file.position(found.number),
            offset=found.physical_offset,
            harmless=harmless,
        )

    def _tell_wrong(self, found: _Item, wanted: Key) -> None:
        harmless = self._is_unsettled(wanted[1])
        self._tell_item(
            found, "index_item_wrong", f"{found.key} instead of {wanted}", harmless=harmless
        )

    def _tell_extra(self, found: _Item) -> None:
        """Tell of an item that no record asks for."""
        previous, offset = self._previous, found.physical_offset
        if any(hole.start <= offset < hole.end for hole in self._holes):
            kind = "index_item_of_damaged_record"
            self._tell_item(found, kind, f"{found.key}", harmless=True)
        elif previous is not None and previous.physical_offset == offset:
            # RocketMQ's way of going on after a crash. It is found twice.
            self._tell_item(found, "index_item_repeated", f"{found.key}", harmless=True)
        else:
            self._tell_item(
                found,
                "index_item_without_key",
                f"{found.key}",
                harmless=self._is_unsettled(offset),
            )

    def _tell_missing(self, keys: list[Key]) -> None:
        file = self.files[-1] if self._previous is None else self._previous.file
        first, last = keys[0][1], keys[-1][1]
        self._findings.add(
            "key_missing",
            file.path,
            f"{len(keys)} keys of records at {first} to {last} are not in the index",
            count=len(keys),
            offset=first,
            harmless=self._is_unsettled(first),
        )

    def _is_unsettled(self, offset: int) -> bool:
        return self._unsettled_from is not None and offset >= self._unsettled_from

    # The end ----------------------------------------------------------------------------------

    def begin(self, log_start: int) -> None:
        """Pass over the items of records that were deleted by age."""
        while (ahead := self._fill(1)) and ahead[0].physical_offset < log_start:
            if self._fill(2)[-1].physical_offset < ahead[0].physical_offset:
                break  # it is the one out of order; ``take`` will tell
            self._pass_item()

    def finish(self, log_end: int) -> None:
        """Judge the items that are left, then headers and slots."""
        while ahead := self._fill(1):
            found = ahead[0]
            offset = found.physical_offset
            if offset >= log_end:
                harmless = self._state is not State.CLOSED
                self._tell_item(found, "index_item_behind_log", f"{found.key}", harmless=harmless)
            elif offset < self._indexed_end:
                self._tell_extra(found)
            self._pass_item()
        for file in self.files:
            self._check_header(file)
            self._check_slots(file)

    def _check_header(self, file: _File) -> None:
        header = file.header
        if header.next_item == FIRST_ITEM:
            return
        wrong: list[tuple[int, str]] = []
        if header.begin_physical_offset != file.first_offset:
            wrong.append((16, f"begins with the record at {header.begin_physical_offset}"))
        if header.end_physical_offset != file.last_offset:
            wrong.append((24, f"ends with the record at {header.end_physical_offset}"))
        if header.slot_count != file.slots_taken:
            wrong.append((32, f"{header.slot_count} slots in use, not {file.slots_taken}"))
        # After a repair the time of the last item is known to the second only.
        repaired = header.begin_timestamp + file.last_seconds * 1000 + 999
        if file.end_timestamp >= 0 and header.end_timestamp not in {file.end_timestamp, repaired}:
            wrong.append((8, f"ends at {header.end_timestamp}, not {file.end_timestamp}"))
        for position, detail in wrong:
            self._findings.add(
                "index_header_wrong",
                file.path,
                detail,
                position=position,
                harmless=self._unsettled_from is not None,
            )

    def _check_slots(self, file: _File) -> None:
        deadline = time.monotonic() + SETTLE_TIME
        wanted = _swapped(file.slots)
        while True:
            found = _read_slots(file.path, file.layout.slots)
            if found == wanted.tobytes():
                return
            wrong = self._wrong_slots(file, found)
            if not wrong or self._state is not State.OPEN or time.monotonic() > deadline:
                break
            time.sleep(SETTLE_PAUSE)
        for slot, number in wrong:
            self._findings.add(
                "index_slot_wrong",
                file.path,
                f"slot {slot} names item {number} instead of {file.slots[slot]}",
                position=slot_position(slot),
                harmless=self._unsettled_from is not None,
            )

    def _wrong_slots(self, file: _File, content: bytes) -> list[tuple[int, int]]:
        """Return the slots that do not lead to their newest item, and what they name."""
        found = array("i", content)
        found = _swapped(found)
        if self._state is not State.OPEN:
            pairs = enumerate(zip(found, file.slots, strict=True))
            return [(slot, there) for slot, (there, wanted) in pairs if there != wanted]
        # Items put since the header was read come first in their slots.
        return [
            (slot, there)
            for slot, (there, wanted) in enumerate(zip(found, file.slots, strict=True))
            if there != wanted and self._older(file, there) != wanted
        ]

    @staticmethod
    def _older(file: _File, number: int) -> int:
        """Follow a chain from an item put lately to the first that was there at the beginning."""
        with disk.opened(file.path) as fd:
            while file.header.next_item <= number < file.layout.items:
                piece = disk.pread(fd, ITEM_SIZE, file.position(number))
                previous = IndexItem._make(ITEM.unpack(piece)).previous
                if previous >= number:
                    break
                number = previous
        return number


def _items(file: _File, first: int, items: _Columns) -> Iterator[_Item]:
    for number, (key_hash, offset, seconds) in enumerate(
        zip(items.hashes, items.offsets, items.seconds, strict=True), first
    ):
        yield _Item(file, number, key_hash, offset, seconds)


def _swapped(values: "array[int]") -> "array[int]":
    """Return native numbers as the big-endian ones of the file, or the other way round."""
    swapped = values[:]
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped


def _read_slots(path: Path, count: int) -> bytes:
    size = SLOT_SIZE * count
    with disk.opened(path) as fd:
        return disk.pread(fd, size, HEADER_SIZE).ljust(size, b"\0")
