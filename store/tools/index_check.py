"""Comparing the key index with the log.

Index items are in log order, as are the keys of the records that are read. So the two are walked
side by side, and a sound index costs one comparison of two lists per chunk of the log. Where they
differ, ``_align`` finds out whether an item is wrong, or there is one too many or too few.

Beside that the chains are followed: each item says which one came before it in its slot, each slot
which one is its newest. Both follow from the items alone.

RocketMQ indexes the last record again after a crash, and loses the keys of a whole file; the former
is a note, the latter is damage.
"""

import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ..format.index import (
    FIRST_ITEM,
    HEADER_SIZE,
    ITEM,
    ITEM_SIZE,
    SLOT_SIZE,
    IndexHeader,
    IndexItem,
    KeyHasher,
    is_index_file_name,
    item_position,
    seconds_after,
    slot_position,
    unpack_header,
)
from ..log_scan import store_timestamp
from .findings import Findings
from .index_layout import IndexLayout, find_layout, layout_of_slots
from .log_walk import SETTLE_PAUSE, SETTLE_TIME, Chunk, Hole
from .state import State

_ITEMS_READ: Final = 1 << 14  # items read at once
_LOOK_AHEAD: Final = 256  # items or keys looked at to find where the two go on alike

Key = tuple[int, int]  # hash, physical offset


class _Item(NamedTuple):
    """One item, with where it stands."""

    file: "_File"
    number: int
    item: IndexItem

    @property
    def key(self) -> Key:
        return self.item.key_hash, self.item.physical_offset


class _File:
    """One index file, read item by item while its chains are followed."""

    def __init__(
        self, path: Path, header: IndexHeader, layout: IndexLayout, begin_before: int | None
    ) -> None:
        """``begin_before`` is the time its first item counts from; None if nothing tells."""
        self.path = path
        self.header = header
        self.layout = layout
        self.begin_before = begin_before
        self.slots = array("i", bytes(SLOT_SIZE * layout.slots))  # newest item of each, so far
        self.slots_taken = 0
        self.first = self.last = IndexItem(0, 0, 0, 0)
        self.last_timestamp = -1  # ms, store time of the last item's record; -1 while not known

    def items(self, findings: Findings) -> Iterator[_Item]:
        """Give all items, oldest first, and tell of those that do not continue their slot."""
        position = item_position(FIRST_ITEM, self.layout.slots)
        end = item_position(min(self.header.next_item, self.layout.items), self.layout.slots)
        number = FIRST_ITEM
        with self.path.open("rb", buffering=0) as file:
            while position < end:
                wanted = min(_ITEMS_READ * ITEM_SIZE, end - position)
                piece = os.pread(file.fileno(), wanted, position).ljust(wanted, b"\0")
                for item in map(IndexItem._make, ITEM.iter_unpack(piece)):
                    self._follow(number, item, findings)
                    yield _Item(self, number, item)
                    number += 1
                position += wanted

    def _follow(self, number: int, item: IndexItem, findings: Findings) -> None:
        slot = item.key_hash % self.layout.slots
        before = self.slots[slot]
        if item.previous != before:
            findings.add(
                "index_chain_wrong",
                self.path,
                f"item {number} continues item {item.previous} instead of {before}",
                position=self.position(number),
            )
        self.slots[slot] = number
        self.slots_taken += before == 0
        self.first = item if number == FIRST_ITEM else self.first
        self.last, self.last_timestamp = item, -1

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
        self._source = (item for file in self.files for item in file.items(findings))
        self._ahead: deque[_Item] = deque()
        self._previous: _Item | None = None  # the last item that was accounted for
        self._exists = directory.is_dir() and bool(self.files)
        # Keys of the newest record may be about to go into a file that was not there yet.
        newest = self.files[-1].header.end_physical_offset if self.files else -1
        self._indexed_end = newest if state is State.OPEN else sys.maxsize

    def _read_files(self, directory: Path, slots: int | None) -> None:
        if not directory.is_dir():
            return
        paths = sorted(p for p in directory.iterdir() if p.is_file() and is_index_file_name(p.name))
        headers = {path: _header(path) for path in paths}
        layout = self._layout(paths, slots)
        before: int | None = 0
        for position, path in enumerate(paths):
            header = headers[path]
            if header is None or layout is None or path.stat().st_size != layout.size:
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

    def _layout(self, paths: list[Path], slots: int | None) -> IndexLayout | None:
        for path in paths:
            if slots is None:
                layout = find_layout(path)
            else:
                layout = layout_of_slots(path.stat().st_size, slots)
            if layout is not None:
                return layout
        return None

    # Side by side with the log ----------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Compare the keys of a chunk's records with the items that come next."""
        if not self._exists:
            return
        content, offset = chunk.content, chunk.offset
        keys = self._hasher.hash_records(
            [
                (
                    content[topic_at : properties_at - 2].decode(errors="replace"),
                    content[properties_at : position + size],
                    offset + position,
                    store_timestamp(content, position, sys_flag),
                    sys_flag,
                )
                for position, size, sys_flag, _, _, topic_at, properties_at in chunk.found
                if offset + position < self._indexed_end
            ],
            after=-1,
        )
        expected = list(zip(keys.hashes, keys.physical_offsets, strict=True))
        if expected:
            self._compare(expected, keys.store_timestamps)

    def _compare(self, expected: list[Key], timestamps: list[int]) -> None:
        ahead = self._fill(len(expected))
        if [item.key for item in ahead] == expected:
            for item, timestamp in zip(ahead, timestamps, strict=True):
                self._check_time(item, timestamp)
            self._previous = ahead[-1]
            self.items += len(ahead)
            for _ in ahead:
                self._ahead.popleft()
        else:
            self._align(deque(zip(expected, timestamps, strict=True)))

    def _fill(self, count: int) -> list[_Item]:
        """Have so many items at hand, if there are; return them."""
        while len(self._ahead) < count:
            item = next(self._source, None)
            if item is None:
                break
            self._ahead.append(item)
        return [self._ahead[index] for index in range(min(count, len(self._ahead)))]

    def _align(self, expected: deque[tuple[Key, int]]) -> None:
        """Walk keys and items until the keys are used up; tell where one has no partner."""
        while expected:
            wanted, timestamp = expected[0]
            ahead = self._fill(_LOOK_AHEAD)
            if not ahead:
                self._tell_missing([key for key, _ in expected])
                return
            found = ahead[0]
            if found.key == wanted:
                self._check_time(found, timestamp)
                self._pass_item()
                expected.popleft()
                continue
            extra = self._index_of(wanted, [item.key for item in ahead])
            later = [key for key, _ in _first(expected, _LOOK_AHEAD)]
            lacking = self._index_of(found.key, later)
            if len(ahead) > 1 and len(later) > 1 and ahead[1].key == later[1]:
                self._tell_wrong(found, wanted)
                self._pass_item()
                expected.popleft()
            elif extra is not None and (lacking is None or extra <= lacking):
                for _ in range(extra):
                    self._tell_extra(self._ahead[0])
                    self._pass_item()
            elif lacking is not None:
                self._tell_missing([expected.popleft()[0] for _ in range(lacking)])
            elif found.item.physical_offset > expected[-1][0][1]:
                self._tell_missing([key for key, _ in expected])
                return
            elif found.item.physical_offset < wanted[1]:
                self._tell_extra(found)
                self._pass_item()
            else:
                self._tell_wrong(found, wanted)
                self._pass_item()
                expected.popleft()

    @staticmethod
    def _index_of(key: Key, keys: list[Key]) -> int | None:
        return keys.index(key) if key in keys else None

    def _pass_item(self) -> None:
        self._previous = self._ahead.popleft()
        self.items += 1

    # What is told -----------------------------------------------------------------------------

    def _check_time(self, found: _Item, timestamp: int) -> None:
        """Check the seconds an item gives its record; ``timestamp`` is when that was stored."""
        file, number, item = found
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
        file.last_timestamp = timestamp
        if begin is None:
            return
        seconds = seconds_after(begin, timestamp)
        # Its predecessor's end may be known to the second only, after a repair.
        slack = 1 if number == FIRST_ITEM and begin else 0
        if not seconds - slack <= item.seconds <= seconds + slack:
            self._tell_item(found, "index_item_wrong", f"{item.seconds} s instead of {seconds} s")

    def _tell_item(self, found: _Item, kind: str, detail: str, *, harmless: bool = False) -> None:
        self._findings.add(
            kind,
            found.file.path,
            f"item {found.number}: {detail}",
            position=found.file.position(found.number),
            offset=found.item.physical_offset,
            harmless=harmless,
        )

    def _tell_wrong(self, found: _Item, wanted: Key) -> None:
        harmless = self._is_unsettled(wanted[1])
        self._tell_item(
            found, "index_item_wrong", f"{found.key} instead of {wanted}", harmless=harmless
        )

    def _tell_extra(self, found: _Item) -> None:
        """Tell of an item that no record asks for."""
        previous, offset = self._previous, found.item.physical_offset
        if any(hole.start <= offset < hole.end for hole in self._holes):
            kind = "index_item_of_damaged_record"
            self._tell_item(found, kind, f"{found.key}", harmless=True)
        elif previous is not None and previous.item.physical_offset == offset:
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
        while (ahead := self._fill(1)) and ahead[0].item.physical_offset < log_start:
            if self._fill(2)[-1].item.physical_offset < ahead[0].item.physical_offset:
                break  # it is the one out of order; ``take`` will tell
            self._pass_item()

    def finish(self, log_end: int) -> None:
        """Judge the items that are left, then headers and slots."""
        while ahead := self._fill(1):
            found = ahead[0]
            offset = found.item.physical_offset
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
        header, last = file.header, file.last
        if header.next_item == FIRST_ITEM:
            return
        wrong: list[tuple[int, str]] = []
        if header.begin_physical_offset != file.first.physical_offset:
            wrong.append((16, f"begins with the record at {header.begin_physical_offset}"))
        if header.end_physical_offset != last.physical_offset:
            wrong.append((24, f"ends with the record at {header.end_physical_offset}"))
        if header.slot_count != file.slots_taken:
            wrong.append((32, f"{header.slot_count} slots in use, not {file.slots_taken}"))
        # After a repair the time of the last item is known to the second only.
        repaired = header.begin_timestamp + last.seconds * 1000 + 999
        if file.last_timestamp >= 0 and header.end_timestamp not in {file.last_timestamp, repaired}:
            wrong.append((8, f"ends at {header.end_timestamp}, not {file.last_timestamp}"))
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
        with file.path.open("rb", buffering=0) as opened:
            while file.header.next_item <= number < file.layout.items:
                piece = os.pread(opened.fileno(), ITEM_SIZE, file.position(number))
                previous = IndexItem._make(ITEM.unpack(piece)).previous
                if previous >= number:
                    break
                number = previous
        return number


def _first(items: deque[tuple[Key, int]], count: int) -> list[tuple[Key, int]]:
    return [items[index] for index in range(min(count, len(items)))]


def _header(path: Path) -> IndexHeader | None:
    with path.open("rb") as file:
        content = file.read(HEADER_SIZE)
    return unpack_header(content) if len(content) == HEADER_SIZE else None


def _swapped(values: "array[int]") -> "array[int]":
    """Return native numbers as the big-endian ones of the file, or the other way round."""
    swapped = values[:]
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped


def _read_slots(path: Path, count: int) -> bytes:
    size = SLOT_SIZE * count
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, HEADER_SIZE).ljust(size, b"\0")
