"""Finding out how an index file is laid out, without the settings it was made with.

An index file does not say how many slots it has; ``maxHashSlotNum`` and ``maxIndexNum`` do. But its
header names the records of its first and last item, and items are at known distances from the
slots: where these two items are found at a distance that fits, the slots end.
"""

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from .. import disk
from ..format.index import (
    FIRST_ITEM,
    HEADER_SIZE,
    ITEM_SIZE,
    SLOT,
    SLOT_SIZE,
    IndexHeader,
    index_file_size,
    item_position,
    slot_position,
    unpack_header,
    unpack_item,
)

_DEFAULT_SLOTS: Final = 5_000_000
_DEFAULT_ITEMS: Final = 20_000_000
_OFFSET: Final = Struct(">q")
_OFFSET_AT: Final = 4  # in an item
CANDIDATES_MAX: Final = 100_000  # places tried; a small offset may be found in many


class IndexLayout(NamedTuple):
    """How many slots and item numbers the index files of a store have."""

    slots: int
    items: int

    @property
    def size(self) -> int:
        """Bytes of such a file."""
        return index_file_size(self.slots, self.items)


def layout_of_slots(size: int, slots: int) -> IndexLayout | None:
    """Return the layout of a file of ``size`` bytes with so many slots; None if none fits."""
    items, rest = divmod(size - HEADER_SIZE - SLOT_SIZE * slots, ITEM_SIZE)
    return IndexLayout(slots, items) if slots > 0 and items > FIRST_ITEM and not rest else None


def find_layout(path: Path) -> IndexLayout | None:
    """Return the layout of an index file; None where nothing in it tells.

    Raises:
        OSError: It cannot be read.
    """
    with disk.opened(path) as fd:
        size = disk.fstat(fd).st_size
        if size < HEADER_SIZE:
            return None
        with disk.Map(fd, 0, access=disk.MAP_READ) as content:
            header = unpack_header(content[:HEADER_SIZE])
            default = IndexLayout(_DEFAULT_SLOTS, _DEFAULT_ITEMS)
            empty = header.next_item <= FIRST_ITEM
            if size == default.size and (empty or _fits(content, header, default)):
                return default
            return None if empty else next(_found(content, header), None)


def _found(content: disk.Map, header: IndexHeader) -> Iterator[IndexLayout]:
    """Give the layouts under which first and last item are where the header says."""
    ends = (
        (header.end_physical_offset, header.next_item - 1),
        (header.begin_physical_offset, FIRST_ITEM),
    )
    for offset, number in ends:
        wanted = _OFFSET.pack(offset)
        at = content.rfind(wanted, HEADER_SIZE)
        for _ in range(CANDIDATES_MAX):
            if at < 0:
                break
            slots, rest = divmod(at - _OFFSET_AT - item_position(number, 0), SLOT_SIZE)
            layout = None if rest else layout_of_slots(len(content), slots)
            if layout is not None and _fits(content, header, layout):
                yield layout
            at = content.rfind(wanted, HEADER_SIZE, at + _OFFSET.size - 1)


def _fits(content: disk.Map, header: IndexHeader, layout: IndexLayout) -> bool:
    """Tell whether first and last item name the records that the header names."""
    if not FIRST_ITEM < header.next_item <= layout.items:
        return False
    first = item_position(FIRST_ITEM, layout.slots)
    last = item_position(header.next_item - 1, layout.slots)
    unused = item_position(0, layout.slots)
    newest = unpack_item(content[last : last + ITEM_SIZE])
    if newest.key_hash < 0:
        return False
    (slot,) = SLOT.unpack_from(content, slot_position(newest.key_hash % layout.slots))
    return (
        not any(content[unused:first])
        and newest.physical_offset == header.end_physical_offset
        and unpack_item(content[first : first + ITEM_SIZE]).physical_offset
        == header.begin_physical_offset
        and slot >= header.next_item - 1  # a broker may have put more meanwhile
    )
