"""Compare a segment with its digest: what no checksum of a record covers, as its properties.

halfmq keeps a CRC-32 of each 64 KiB of its log in ``digests/`` below the store, a second or two
behind the log. It tells even which bit was flipped, if just one was.
"""

from typing import NamedTuple

from halfmq.store.format.crc import crc32
from halfmq.store.format.digest import BLOCK, DIRECTORY, find_flipped_bit, unpack_digest

from .checksums import sound_records
from .files import child, exists, parent, read_bytes
from .log_end import RECORD_SIZE_MAX
from .rows import Rows
from .segment_reader import SegmentReader
from .segments import Segment


class Change(NamedTuple):
    """Some bytes of the log are not as they were when they were written."""

    offsets: list[int]  # physical: of the record, or where the changed block begins and ends
    detail: str
    is_record: bool


def digest_of(segment: Segment) -> str | None:
    """Name the digest of a segment of a store; None when there is none."""
    folder = parent(segment.path)
    path = child(child(child(parent(folder), DIRECTORY), "commitlog"), f"{segment.base:020}")
    return path if exists(path) else None


def changes(segment: Segment, limit: int) -> list[Change]:
    """Find what differs from the digest of a segment, of which ``limit`` bytes are in the log.

    A record that fails its CRC is left out, because its CRC tells.

    Raises:
        LogDirectoryError: The segment cannot be read.
    """
    path = digest_of(segment)
    unpacked = unpack_digest(read_bytes(path)) if path else None
    if unpacked is None:
        return []
    end, crcs = unpacked
    reader = SegmentReader(segment, segment.size)  # a broker may have taken in more since
    found = []
    for number, crc in enumerate(crcs):
        start = number * BLOCK
        content = bytes(reader.content(start, min(start + BLOCK, end)))
        if start < limit and crc32(content) != crc:
            change = _change(reader, start, content, crc)
            found += [change] if change else []
    return found


def _change(reader: SegmentReader, start: int, content: bytes, crc: int) -> Change | None:
    flipped = find_flipped_bit(content, crc)
    base = reader.segment.base
    if flipped is None:
        end = start + len(content)
        detail = f"some of the {len(content)} bytes from here on are not as they were written"
        return Change([base + start, base + end], detail, is_record=False)
    position, bit = start + flipped[0], flipped[1]
    detail = f"bit {bit} of the byte at {base + position} is flipped"
    for item in reader.scan(max(0, position - RECORD_SIZE_MAX), position + 1):
        if not isinstance(item, Rows):
            continue
        (place,) = ((item.starts <= position) & (position < item.ends)).nonzero()
        if len(place):
            row = item.at(place)
            is_told = not sound_records(row)[0]
            return None if is_told else Change([base + int(row.starts[0])], detail, is_record=True)
    return None  # in a blank, behind the end, or in a range that is no record and told as such
