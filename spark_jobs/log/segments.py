"""Find the segments of a commit log; no Spark in here.

A segment is one file of the log, named by the offset of its first byte in 20 digits. Records follow
each other without a gap up to a blank that ends the file.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import LogDirectoryError
from .files import (
    entries,
    exists,
    expanded,
    folder_in,
    is_folder,
    name_of,
    open_file,
    parent,
    readable,
)

FILE_NAME: Final = re.compile(r"\d{20}")  # where the file begins, in bytes
OFFSET_END: Final = 1 << 62  # physical offsets have 64 bits, and are added to


class Segment(NamedTuple):
    """One file of the log."""

    base: int  # physical offset of its first byte
    path: str
    size: int  # bytes

    @property
    def end(self) -> int:
        """The physical offset after its last byte."""
        return self.base + self.size


class LogExtent(NamedTuple):
    """The segments of the log, and the offset after its last complete record."""

    segments: tuple[Segment, ...]  # without a pre-allocated next one
    end_offset: int  # physical offset after the last whole record
    tail: str | None  # what follows there, unless it is unwritten

    @property
    def first_offset(self) -> int:
        """The lowest offset that the log still holds."""
        return self.segments[0].base if self.segments else self.end_offset

    @property
    def size(self) -> int:
        """The bytes between the log's ends, with what may be missing between them."""
        return self.end_offset - self.first_offset

    def limit(self, segment: Segment) -> int:
        """Return how many bytes of a segment belong to the log; an overlap counts for the next."""
        following = bisect_right(self.segments, segment.base, key=lambda one: one.base)
        end = segment.end if following < len(self.segments) else self.end_offset
        if following < len(self.segments):
            end = min(end, self.segments[following].base)
        return end - segment.base

    def segment_at(self, offset: int) -> Segment:
        """Return the segment that holds an offset, or the last one that begins before it."""
        return next(one for one in reversed(self.segments) if one.base <= offset)

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """List the ranges of [start, end) that no segment holds, up to the last segment."""
        between = [(one.end, following.base) for one, following in pairwise(self.segments)]
        for first, following in [(start, self.first_offset), *between]:
            if max(first, start) < min(following, end):
                yield max(first, start), min(following, end)

    def part(self, start: int, end: int) -> "LogExtent":
        """Return the segments that hold [start, end), as if the log ended there."""
        segments = tuple(one for one in self.segments if one.base < end and one.end > start)
        return LogExtent(segments, end, None)


def find_logs(paths: Iterable[str]) -> list[list[Segment]]:
    """List the segments of several logs: of directories, and of single files by their folders.

    Paths may be patterns.

    Raises:
        LogDirectoryError: Nothing is there, or it is no log.
    """
    logs: list[list[Segment]] = []
    files: dict[str, list[Segment]] = {}
    for pattern in paths:
        places = expanded(pattern)
        if not places:
            raise LogDirectoryError(pattern, "nothing has such a name")
        for place in places:
            segment = None if is_folder(place) else _segment_at(place)
            if segment is None:
                logs.append(find_segments(place))
            else:
                files.setdefault(parent(place), []).append(segment)
    return [*logs, *map(sorted, files.values())]


def _segment_at(place: str) -> Segment | None:
    """Describe a file that is named like a segment; None for anything else."""
    if not FILE_NAME.fullmatch(name_of(place)) or not exists(place):
        return None
    with readable(place), open_file(place) as file:
        return Segment(int(name_of(place)), place, file.size())


def find_segments(directory: str | Path) -> list[Segment]:
    """List the segments of a store root or of a folder of segments, in log order.

    Raises:
        LogDirectoryError: The directory cannot be read, or there is no segment in it.
    """
    root = str(directory)
    with readable(root):
        folder = folder_in(root, "commitlog")
        segments = [
            Segment(int(entry.name), entry.path, entry.size)
            for entry in entries(folder, FILE_NAME)
            if not entry.is_folder and int(entry.name) < OFFSET_END
        ]
    if not segments:
        reason = f"no commit-log segment (a file named by 20 digits) in {folder}"
        raise LogDirectoryError(root, reason)
    return sorted(segment for segment in segments if segment.size)
