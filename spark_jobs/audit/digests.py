"""Compare segments with their digests: what no checksum of a record covers, as its properties.

halfmq keeps a CRC-32 of each 64 KiB of its log in ``digests/`` below the store, a second or two
after the log. If just one bit was flipped, the digest tells which.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.crc import crc32
from halfmq.store.format.digest import BLOCK, DIRECTORY, find_flipped_bit, unpack_digest

from ..log.checksums import sound_records
from ..log.files import child, exists, parent, read_bytes
from ..log.log_end import RECORD_SIZE_MAX
from ..log.rows import Rows
from ..log.segment_reader import SegmentReader
from ..log.segments import LogExtent, Segment
from .rules.model import FINDING_DDL, Found, Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def digest_of(segment: Segment) -> str | None:
    """Return the path of the digest of a segment of a store; None when there is none."""
    folder = parent(segment.path)
    path = child(child(child(parent(folder), DIRECTORY), "commitlog"), f"{segment.base:020}")
    return path if exists(path) else None


def changed_bytes(spark: "SparkSession", extent: LogExtent) -> "DataFrame":
    """Compare every segment that has a digest with it; return findings."""
    segments = [
        (*segment, extent.limit(segment))
        for segment in extent.segments
        if digest_of(segment) is not None
    ]
    frame = spark.createDataFrame(segments, "base bigint, path string, size bigint, stop bigint")

    def find(base: int, path: str, size: int, limit: int) -> list[Found]:
        return list(changes(Segment(base, path, size), limit))

    found = F.udf(find, f"array<struct<{FINDING_DDL}>>", useArrow=False)
    spread = frame.repartition(max(1, len(segments)), "base")
    return spread.select(F.inline(found("base", "path", "size", "stop")))


def changes(segment: Segment, limit: int) -> Iterator[Found]:
    """Find what differs from the digest of a segment, of which ``limit`` bytes are in the log.

    A record that fails its CRC is left out, because its CRC tells.

    Raises:
        LogDirectoryError: The segment cannot be read.
    """
    path = digest_of(segment)
    unpacked = unpack_digest(read_bytes(path)) if path else None
    if unpacked is None:
        return
    end, crcs = unpacked
    reader = SegmentReader(segment, segment.size)  # a broker may have taken in more since
    for start, crc in zip(range(0, limit, BLOCK), crcs, strict=False):
        content = bytes(reader.content(start, min(start + BLOCK, end)))
        if crc32(content) != crc:
            yield from _change(reader, start, content, crc)


def _change(reader: SegmentReader, start: int, content: bytes, crc: int) -> Iterator[Found]:
    flipped = find_flipped_bit(content, crc)
    base = reader.segment.base
    if flipped is None:
        offsets = [base + start, base + start + len(content)]
        detail = f"at least one of these {len(content)} bytes is not as it was written"
        yield str(Kind.CORRUPT_RECORD), offsets, detail, None
        return
    position, bit = start + flipped[0], flipped[1]
    # Nothing is found in a blank, after the end, or in a range that is reported as no record.
    for item in reader.scan(max(0, position - RECORD_SIZE_MAX), position + 1):
        if isinstance(item, Rows):
            row = item.select((item.starts <= position) & (position < item.ends))
            if len(row) and sound_records(row)[0]:
                at = int(row.physical_offsets[0])
                detail = f"bit {bit} of the byte at {base + position} is flipped"
                yield str(Kind.CRC), [at], detail, at
