"""The results of a scan that concern the log as a whole; no Spark in here.

From the notes of the source (``source/scan.Note``) comes what the rules need: which part of
the log can be read, which broker wrote which, what time it was. What is wrong with bytes as such is
told here too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

from ..log.hashes import hash_of
from ..log.segment_reader import UNWRITTEN
from ..log.segments import LogExtent
from ..log.store_files import StoreFiles
from ..source import scan as source
from ..times import duration, full_moment
from .checks import Checks, Remark
from .dialects import Mark, recorded_rollbacks
from .rules.model import Found, Kind, LogBounds, TimeLimits
from .statistics import Scale, scale

_QUIET_MAX: Final = 86_400_000  # ms; a longer pause beside one record is taken for a wrong time


def smoothed(ranges: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Correct the times of single records, by the ranges before and after them in the log."""
    found: list[Mapping[str, Any]] = []
    for place, one in enumerate(ranges):
        beside = [before["lastTime"] for before in ranges[max(0, place - 1) : place]]
        beside += [after["time"] for after in ranges[place + 1 : place + 2]]
        time = one["time"]
        if len(beside) == 2:
            time = sorted((*beside, time))[1]
        elif beside and abs(beside[0] - time) > _QUIET_MAX:
            time = beside[0]
        found.append({**one, "time": time, "lastTime": time} if one["records"] == 1 else one)
    return found


class ScanSummary:
    """The notes of a scan, without the ranges of queues."""

    def __init__(
        self,
        notes: Iterable[Mapping[str, Any]],
        extent: LogExtent,
        store: StoreFiles,
        checks: Checks,
    ) -> None:
        self._extent = extent
        self._store = store
        self._checks = checks
        self._by_kind: dict[str, list[Mapping[str, Any]]] = {}
        for note in sorted(notes, key=lambda note: int(note["physicalOffset"])):
            self._by_kind.setdefault(note["what"], []).append(note)
        self._ranges = smoothed(self._of(source.RECORDS))

    def _of(self, what: str) -> list[Mapping[str, Any]]:
        return self._by_kind.get(what, [])

    @property
    def records(self) -> int:
        return sum(note["records"] for note in self._ranges)

    @property
    def size(self) -> int:
        """The bytes of all records."""
        return sum(note["sum"] for note in self._ranges)

    @property
    def keyless(self) -> int:
        """How many events lie in another part of the log than the half that they name."""
        return sum(note["records"] for note in self._of(source.KEYLESS))

    @property
    def bounds(self) -> LogBounds:
        """Return which parts of the log can be read, and which broker wrote which."""
        damage = [
            (one["physicalOffset"], one["lastPhysicalOffset"]) for one in self._of(source.HOLE)
        ]
        damage += [
            (segment.end, following.base)
            for segment, following in pairwise(self._extent.segments)
            if segment.end < following.base
        ]
        marks = [
            Mark(note["physicalOffset"], bool(note["records"]), bool(note["sum"]))
            for note in self._of(source.MARK)
        ]
        counts = self._store.queue_counts
        return LogBounds(
            self._extent.first_offset,
            tuple(sorted(damage)),
            self._ranges[-1]["lastPhysicalOffset"] if self._ranges else None,
            recorded_rollbacks(marks),
            None if counts is None else {hash_of(topic): count for topic, count in counts.items()},
        )

    @property
    def limits(self) -> TimeLimits:
        """Return the times and limits for the rules."""
        age = self._checks.pending_age
        return TimeLimits(
            overdue_before_ms=None if age is None else self._now - age // timedelta(milliseconds=1),
            passed_slot=self._store.passed_slot,
            checks_max=self._checks.checks_max,
            newest_ms=self._newest,
            pauses=self._pauses,
            clock_steps=tuple(after["physicalOffset"] for _, after in self._steps()),
        )

    @property
    def _pauses(self) -> tuple[tuple[int, int], ...]:
        """The times in which nothing was written; those that overlap are one."""
        found = [(note["time"], note["lastTime"]) for note in self._of(source.PAUSE)]
        between = pairwise(self._ranges)
        found += [(before["lastTime"], after["time"]) for before, after in between]
        pauses: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if end - start < source.PAUSE_MIN:
                continue
            if pauses and start < pauses[-1][1]:
                pauses[-1] = (pauses[-1][0], max(end, pauses[-1][1]))
            else:
                pauses.append((start, end))
        return tuple(pauses)

    @property
    def delays(self) -> int:
        """How many events are about plain delays."""
        return sum(note["records"] for note in self._of(source.DELAYS))

    @property
    def scale(self) -> Scale:
        """Divide the time in which the log was written."""
        begin = min((note["time"] for note in self._ranges), default=0)
        end = max((note["lastTime"] for note in self._ranges), default=0)
        return scale(
            begin, end, max(self._now, end) if self._checks.as_of_ms is None else self._now
        )

    @property
    def _newest(self) -> int:
        """When the last record was stored, ms."""
        return int(self._ranges[-1]["lastTime"]) if self._ranges else 0

    @property
    def _now(self) -> int:
        return self._newest if self._checks.as_of_ms is None else self._checks.as_of_ms

    def clock_steps(self) -> Iterator[Remark]:
        """Say where in the log the broker's clock was set back."""
        for before, after in self._steps():
            step = before["lastTime"] - after["time"]
            detail = (
                f"the broker's clock was set back by {duration(step)}, from"
                f" {full_moment(before['lastTime'])} to {full_moment(after['time'])}"
            )
            yield Remark("clock_step", [after["physicalOffset"]], detail)

    def _steps(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        for before, after in pairwise(self._ranges):
            if before["lastTime"] - after["time"] >= source.CLOCK_STEP_MIN:
                yield before, after

    def deleted_topics(self, found: Iterable[str]) -> Iterator[Remark]:
        """Name the topics that were deleted while the log may still have messages of them."""
        for topic in sorted({*self._store.deleted_topics, *found}):
            detail = f"the topic {topic} was deleted; the log may still have messages of it"
            yield Remark("deleted_topic", [], detail)

    def findings(self) -> Iterator[Found]:
        """Find bytes that are not as they should be."""
        for note in self._of(source.HOLE):
            start, end, reason = note["physicalOffset"], note["lastPhysicalOffset"], note["text"]
            kind = Kind.GAP if reason == UNWRITTEN else Kind.CORRUPT_RECORD
            yield str(kind), [start, end], f"{end - start} bytes: {reason}", None
        for note in self._of(source.UNSOUND):
            at = note["physicalOffset"]
            yield str(Kind.CRC), [at], "the record does not match its CRC", at
        for note in self._of(source.INVISIBLE):
            at = note["physicalOffset"]
            detail = "its flags say prepared or rolled back: it is in no queue, nobody gets it"
            yield str(Kind.INVISIBLE_MESSAGE), [at], detail, at
        for note in self._of(source.UNREAD_OP):
            detail = "the op message holds something that is not an offset of the half queue"
            yield str(Kind.OP_WITHOUT_HALF), [note["physicalOffset"]], detail, None
        yield from self._borders_of_segments()

    def _borders_of_segments(self) -> Iterator[Found]:
        for segment, following in pairwise(self._extent.segments):
            if segment.end < following.base:
                missing = following.base - segment.end
                detail = f"{missing} bytes between two segments are in neither"
                yield str(Kind.GAP), [segment.end, following.base], detail, None
            elif segment.end > following.base:
                shared = segment.end - following.base
                detail = f"two segments both hold {shared} bytes"
                yield str(Kind.OVERLAP), [following.base, segment.end], detail, None
