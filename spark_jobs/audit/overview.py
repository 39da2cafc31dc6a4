"""What the splits of a log say, put together; no Spark in here.

Each split knows only itself. Which ranges cannot be read, what is late, whether queues go on over
the borders of splits, and how long decisions took, shows here.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ..log.arrays import Bools, Ints
from ..log.lookup import LogLookup
from ..log.segments import LogExtent
from ..log.store_files import StoreFiles
from ..source.columns import transaction_parts
from .digest import HalfRange, Summary
from .events import SLOT_BITS, Records, key_of_place, read_events
from .histograms import Histogram
from .judge import CHECKS_MAX, Kind, LogBounds, Part, Terms
from .queue_borders import Log, across_splits, restarts, unknown_queues
from .queues import QueueFiles
from .timeline import Scale, scale

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
RANGES_MAX: Final = 100  # unreadable ranges handled apart; more are taken for one wide range
_PARKED_WITHIN: Final = 600_000  # ms from the last check to the parking; RocketMQ needs a round

# Offsets in the half queue that an unreadable stretch of the log may have held.
_PLACE_MIN: Final = -1
_PLACE_MAX: Final = (1 << SLOT_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What an audit looks at, and from when on it complains."""

    crc: bool = True  # read every body
    queues: bool = True  # compare the consume queues with the log
    pending_age: timedelta | None = None  # undecided for longer is an anomaly; None: never
    as_of_ms: int | None = None  # when ages are counted; None: when the last record was stored
    checks_max: int = CHECKS_MAX  # transactionCheckMax of the RocketMQ broker that wrote the log


DEFAULT_CHECKS: Final = Checks()


class Fault(NamedTuple):
    """One thing that is wrong with the log, whatever transaction it concerns."""

    kind: Kind
    offsets: list[int]  # physical
    detail: str
    told: int | None = None  # physical offset of a record that says whose it is


class Delays(NamedTuple):
    """How long decisions took in one topic for one producer group, and how often it was asked."""

    producer_group: str
    topic: str
    decided: int
    took_ms: dict[str, int]  # by the names of PERCENTILES
    prepared: int
    checks: dict[str, int]


class LostPlaces(NamedTuple):
    """Offsets strictly between ``after`` and ``before`` of a half queue cannot be read."""

    queue: int
    after: int
    before: int


class Overview:
    """A log as its splits describe it."""

    def __init__(
        self,
        extent: LogExtent,
        store: StoreFiles,
        summaries: Iterable[Summary],
        checks: Checks = DEFAULT_CHECKS,
    ) -> None:
        self._extent = extent
        self._store = store
        self._checks = checks
        self.summaries = sorted(summaries, key=lambda summary: summary.last_at)

    @cached_property
    def bounds(self) -> LogBounds:
        """Which part of the log can be read."""
        damage = [hole for summary in self.summaries for hole in summary.holes]
        damage += [
            (segment.end, following.base)
            for segment, following in pairwise(self._extent.segments)
            if segment.end < following.base
        ]
        last = max((summary.last_at for summary in self.summaries), default=-1)
        return LogBounds(self._extent.first_offset, tuple(sorted(damage)), last)

    @property
    def terms(self) -> Terms:
        """From when on being undecided is held against a transaction."""
        newest = self._newest
        now = newest if self._checks.as_of_ms is None else self._checks.as_of_ms
        age = self._checks.pending_age
        return Terms(
            overdue_before_ms=None if age is None else now - age // timedelta(milliseconds=1),
            passed_slot=self._store.passed_slot,
            checks_max=self._checks.checks_max,
            given_up_before_ms=newest - _PARKED_WITHIN,
        )

    @property
    def scale(self) -> Scale:
        """How the time of the log is divided for counting."""
        spans = [summary.span for summary in self.summaries if summary.span[0] >= 0]
        begin = min((first for first, _ in spans), default=self._newest)
        end = max((last for _, last in spans), default=self._newest)
        now = max(self._newest, end) if self._checks.as_of_ms is None else self._checks.as_of_ms
        return scale(begin, end, now)

    @property
    def _newest(self) -> int:
        return self.summaries[-1].last_time if self.summaries else 0

    @property
    def lost_places(self) -> list[LostPlaces] | None:
        """Which offsets of the half queues lie in what cannot be read; None if all can be."""
        ranges = [(0, self.bounds.first_offset)] if self.bounds.first_offset else []
        ranges += self.bounds.damage
        if not ranges:
            return None
        if len(ranges) > RANGES_MAX:
            ranges = [(ranges[0][0], ranges[-1][1])]
        by_queue: dict[int, list[HalfRange]] = defaultdict(list)
        for summary in self.summaries:
            for half in summary.halves:
                by_queue[half.queue].append(half)
        return [
            LostPlaces(
                queue,
                max((_place(h.last_slot) for h in known if h.last_at < start), default=_PLACE_MIN),
                min((_place(h.first_slot) for h in known if h.first_at >= end), default=_PLACE_MAX),
            )
            for queue, known in by_queue.items()
            for start, end in ranges
        ]

    def faults(self) -> Iterator[Fault]:
        """Find what only the log as a whole shows."""
        yield from _borders_of_segments(self._extent)
        edges = [edge for summary in self.summaries for edge in summary.edges]
        folder = self._store.consume_queues if self._checks.queues else None
        files = QueueFiles(folder) if folder else None
        log = Log(self.bounds, self._extent.end_offset, self._store.was_closed)
        found = list(across_splits(edges, log, files))
        if self._store.queue_counts is not None:
            found += unknown_queues(edges, self._store.queue_counts)
        for fault in found:
            yield Fault(fault.kind, fault.offsets, fault.detail, fault.offsets[0])

    def restarts(self) -> dict[str, int]:
        """Say of queues that began again at 0 where in the log: the topic was created anew.

        Its consume queues have only what came after that. The names are ``topic/number``.
        """
        edges = (edge for summary in self.summaries for edge in summary.edges)
        return {f"{topic}/{queue}": at for (topic, queue), at in restarts(edges).items()}

    def with_families(self, events: Records) -> Records:
        """Give events the family of the half that each names, by a look at that half.

        For the few that have no key and lie in another split than their half.
        """
        lookup = LogLookup(self._extent.segments)
        linked = events.copy()
        # Without its half, a record is a family of its own.
        linked["key"] = key_of_place(events["reference"])
        for place, offset in enumerate(events["reference"].tolist()):
            record = lookup.record(offset)
            if record is not None:
                told = read_events(record, transaction_parts(record)).events
                if len(told) and told["part"][0] == Part.HALF:
                    linked["key"][place] = told["key"][0]
        return linked

    def delays(self, latencies: Iterable[bytes], checks: Iterable[bytes]) -> list[Delays]:
        """Tell of each producer group and topic how decisions went, from packed histograms."""
        names = {label: (group, topic) for s in self.summaries for label, group, topic in s.labels}
        took, asked = _merged(latencies), _merged(checks)
        found = [
            Delays(
                *names[label],
                took.count(label),
                _percentiles(took, label),
                asked.count(label),
                _percentiles(asked, label),
            )
            for label in asked.labels()
        ]
        return sorted(found, key=lambda delays: delays[:2])


def is_lost(slots: Ints, lost: Sequence[LostPlaces] | None) -> Bools:
    """Tell which slots of half queues may have been those of a half that cannot be read."""
    excused = np.zeros(len(slots), dtype=np.bool_)
    if lost is None:
        return excused
    queue, place = slots >> SLOT_BITS, slots & _PLACE_MAX
    # A queue without any half that can be read may have held all of them.
    excused |= ~np.isin(queue, [entry.queue for entry in lost])
    for entry in lost:
        excused |= (queue == entry.queue) & (place > entry.after) & (place < entry.before)
    return excused


def _place(slot: int) -> int:
    return slot & _PLACE_MAX


def _borders_of_segments(extent: LogExtent) -> Iterator[Fault]:
    """Compare where each segment ends with where the next begins."""
    for segment, following in pairwise(extent.segments):
        if segment.end < following.base:
            missing = following.base - segment.end
            detail = f"{missing} bytes between two segments are in neither"
            yield Fault(Kind.GAP, [segment.end, following.base], detail)
        elif segment.end > following.base:
            shared = segment.end - following.base
            detail = f"two segments both hold {shared} bytes"
            yield Fault(Kind.OVERLAP, [following.base, segment.end], detail)


def _merged(packed: Iterable[bytes]) -> Histogram:
    merged = Histogram()
    for one in packed:
        merged.merge(one)
    return merged


def _percentiles(histogram: Histogram, label: int) -> dict[str, int]:
    if not histogram.count(label):
        return {}
    told = histogram.percentiles(label, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, told, strict=True))
