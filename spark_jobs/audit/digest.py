"""What an audit keeps of one split of the log: transactions as numbers, queues, and faults.

A split is read once, by one worker, and becomes a few rows. What is about transactions is packed
(``events.EVENT``) and divided into *buckets* by the hash of the family's key, so that a family
meets in one bucket wherever its records lie. Records that name a half without saying its key find
it here, if it is in the same split: op messages by the half's place in its queue, resume records by
its offset. What does not find its half here goes, with the halves, into buckets by place.
"""

import json
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ..log.arrays import Bools, Ints, one
from ..log.checksums import sound_records
from ..log.rows import Rows, store_times
from ..log.segments import UNWRITTEN, Hole, Segment
from ..source.columns import transaction_parts
from .events import (
    EVENT,
    NO_CHECKS,
    OP_ENTRY,
    SLOT,
    SLOT_BITS,
    Records,
    Told,
    by_bucket,
    read_events,
)
from .judge import Kind, Part
from .queues import Edge, Queued, QueueFault, QueueFiles, QueueWatch

_LAST_RECORDS: Final = 101  # that say what time it was at the end: any one may be damaged
PLACE_BITS: Final = 16  # places in a half queue that share a bucket: about a split's halves

SCHEMA: Final = pa.schema(
    [
        pa.field("what", pa.int32()),
        pa.field("bucket", pa.int64()),
        pa.field("packed", pa.binary()),
        # Of a fault:
        pa.field("kind", pa.string()),
        pa.field("offsets", pa.list_(pa.field("element", pa.int64()))),
        pa.field("detail", pa.string()),
        pa.field("told", pa.int64()),  # physical offset of a record that says whose it is
        pa.field("queue", pa.string()),  # ``topic/number``, of a fault of a consume queue
    ]
)
DDL: Final = (
    "what int, bucket bigint, packed binary, kind string, offsets array<bigint>, detail string,"
    " told bigint, queue string"
)


class What(IntEnum):
    """What a row holds."""

    SUMMARY = 0  # JSON, see ``Summary``
    EVENTS = 1  # EVENT records of a bucket of families
    HALVES = 2  # SLOT records of a bucket of places
    OPS = 3  # OP_ENTRY records of a bucket of places: ops whose half is not in the split
    LINKED = 4  # EVENT records whose family only their half knows, which is not in the split
    FAULT = 5


class Plan(NamedTuple):
    """How to digest a log."""

    buckets: int  # of families
    verify_crc: bool = True
    queues: str | None = None  # the folder of the consume queues; None: not to be checked
    cache: str | None = None  # the folder where full segments are kept as ``Seen``: audit_cache.py


class HalfRange(NamedTuple):
    """Where in the log, and where in their queue, the first and the last half of a split are."""

    queue: int
    first_at: int
    first_slot: int
    last_at: int
    last_slot: int


class Summary(NamedTuple):
    """What the driver needs to know of a split."""

    records: int
    size: int  # bytes of the records
    last_at: int  # physical offset of the last record; -1: there is none
    last_time: int  # ms, when its last records were stored
    ops_elsewhere: int  # how many op entries did not find their half
    linked_elsewhere: int  # how many other records without a key did not
    faults: int  # rows that tell of one
    halves: list[HalfRange]  # by half queue, divided by the holes
    holes: list[tuple[int, int]]  # ranges of the log that could not be read
    edges: list[Edge]
    labels: list[tuple[int, str, str]]  # hash, producer group, topic
    scanned: int = 0  # bytes of the log that were read for it; the others came from the cache
    names: str | None = None  # the Parquet file that has the names of its halves
    span: tuple[int, int] = (-1, -1)  # ms, when transactions were at work; -1: none were

    def pack(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(self).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> "Summary":
        """Read what ``pack`` returned."""
        summary = cls(*json.loads(packed))
        return summary._replace(
            halves=[HalfRange(*half) for half in summary.halves],
            holes=[(start, end) for start, end in summary.holes],
            edges=[Edge(*edge) for edge in summary.edges],
            span=(summary.span[0], summary.span[1]),
        )


class Seen(NamedTuple):
    """All that an audit keeps of a split, whatever the rest of the log and the store are like."""

    told: Told
    queued: Queued
    holes: list[tuple[int, int, str]]  # ranges of the log that hold no record, and what they hold
    unsound: Ints  # physical offsets of records that do not match their CRC
    records: int
    size: int  # bytes of the records
    last_at: int  # as in ``Summary``
    last_time: int


class Watch:
    """Takes the records and holes of a split, in order."""

    def __init__(self, segment: Segment, *, verify_crc: bool, with_tags: bool) -> None:
        self._segment = segment
        self._verify_crc = verify_crc
        self._queues = QueueWatch(with_tags=with_tags)
        self._told: list[Told] = []
        self._holes: list[tuple[int, int, str]] = []
        self._unsound: list[Ints] = []
        self._records = self._bytes = 0
        self._last_at = self._last_time = -1

    def take(self, rows: Rows) -> None:
        """Take some records."""
        self._told.append(read_events(rows, transaction_parts(rows)))
        self._queues.take(rows)
        self._records += len(rows)
        self._bytes += int(rows.sizes.sum())
        self._last_at = int(rows.physical_offsets[-1])
        self._last_time = int(np.median(store_times(rows)[-_LAST_RECORDS:]))
        if self._verify_crc:
            self._unsound.append(rows.physical_offsets[~sound_records(rows)])

    def take_hole(self, hole: Hole) -> None:
        """Take a range that holds no record; a blank is none of interest."""
        if hole.reason is not None:
            start = self._segment.base + hole.position
            self._holes.append((start, start + hole.size, hole.reason))

    def seen(self) -> Seen:
        """Return what was taken, when everything has been."""
        told = self._told
        return Seen(
            Told(
                np.concatenate([np.zeros(0, EVENT), *(one.events for one in told)]),
                np.concatenate([np.zeros(0, np.bool_), *(one.bare for one in told)]),
                np.concatenate([np.zeros(0, OP_ENTRY), *(one.op_entries for one in told)]),
                np.concatenate([np.zeros(0, np.int64), *(one.unread_ops for one in told)]),
                {label: names for one in told for label, names in one.labels.items()},
            ),
            self._queues.taken(),
            self._holes,
            np.concatenate([np.zeros(0, np.int64), *self._unsound]),
            self._records,
            self._bytes,
            self._last_at,
            self._last_time,
        )


def digest(
    seen: Seen, plan: Plan, *, scanned: int = 0, names: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Give the rows of a split; ``scanned`` and ``names`` as in ``Summary``."""
    events, bare = seen.told.events, seen.told.bare
    halves = _places_of_halves(events)
    linked, found = link_by_offset(events[bare], halves)
    mirrors, elsewhere = link_ops(seen.told.op_entries, halves)
    known = np.concatenate([events[~bare], linked[found], mirrors])
    yield from rows_of(What.EVENTS, by_bucket(known, buckets_of(known, plan.buckets)))
    yield from rows_of(What.HALVES, by_bucket(halves, halves["slot"] >> PLACE_BITS))
    yield from rows_of(What.OPS, by_bucket(elsewhere, elsewhere["slot"] >> PLACE_BITS))
    if not found.all():
        yield from rows_of(What.LINKED, [(0, linked[~found].tobytes())])
    files = QueueFiles(Path(plan.queues)) if plan.queues else None
    edges, queue_faults = seen.queued.compared(files)
    faults = [*_faults(seen, plan), *map(queue_fault_row, queue_faults)]
    yield from faults
    holes = [(start, end) for start, end, _ in seen.holes]
    summary = Summary(
        records=seen.records,
        size=seen.size,
        last_at=seen.last_at,
        last_time=seen.last_time,
        ops_elsewhere=len(elsewhere),
        linked_elsewhere=int((~found).sum()),
        faults=len(faults),
        halves=list(_half_ranges(halves, holes)),
        holes=holes,
        edges=edges,
        labels=[(label, *told) for label, told in seen.told.labels.items()],
        scanned=scanned,
        names=names,
        span=_span(events["time"]),
    )
    yield from rows_of(What.SUMMARY, [(0, summary.pack())])


def _faults(seen: Seen, plan: Plan) -> Iterator[pa.RecordBatch]:
    for start, end, reason in seen.holes:
        kind = Kind.GAP if reason == UNWRITTEN else Kind.CORRUPT_RECORD
        yield fault_row(kind, [start, end], f"{end - start} bytes: {reason}")
    for at in seen.unsound.tolist() if plan.verify_crc else ():
        yield fault_row(Kind.CRC, [at], "the record does not match its CRC", told=at)
    for at in seen.told.unread_ops.tolist():
        yield _unread_op(at)


def _span(times: Ints) -> tuple[int, int]:
    """Say from when to when records were stored; a single one with a wrong time is not believed."""
    if len(times) > 2:
        one, two, three = times[:-2], times[1:-1], times[2:]
        times = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
    return (int(times.min()), int(times.max())) if len(times) else (-1, -1)


def _places_of_halves(events: Records) -> Records:
    chosen = events[events["part"] == Part.HALF]
    halves = np.zeros(len(chosen), dtype=SLOT)
    halves["slot"], halves["at"], halves["key"] = chosen["reference"], chosen["at"], chosen["key"]
    return halves


def _half_ranges(halves: Records, holes: Iterable[tuple[int, int]]) -> Iterator[HalfRange]:
    queues = halves["slot"] >> SLOT_BITS
    cuts = np.array([start for start, _ in holes], dtype=np.int64)
    for queue in np.unique(queues):
        own = halves[queues == queue]
        for part in np.split(own, np.unique(np.searchsorted(own["at"], cuts))):
            if len(part):
                first, last = part[0], part[-1]
                yield HalfRange(
                    int(queue),
                    int(first["at"]),
                    int(part["slot"].min()),
                    int(last["at"]),
                    int(part["slot"].max()),
                )


def link_by_offset(events: Records, halves: Records) -> tuple[Records, Bools]:
    """Give events the family of the half that each names; tell which of them found theirs."""
    linked = events.copy()
    place, found = _find(halves["at"], events["reference"])
    linked["key"][found] = halves["key"][place[found]]
    return linked, found


def link_ops(ops: Records, halves: Records) -> tuple[Records, Records]:
    """Make events of the op entries whose half is there; return the other entries as they are."""
    order = np.argsort(halves["slot"], kind="stable")
    place, found = _find(halves["slot"][order], ops["slot"])
    named = halves[order[place[found]]]
    events = np.zeros(len(named), dtype=EVENT)
    events["part"] = Part.OP
    events["key"], events["reference"] = named["key"], named["at"]
    events["at"], events["time"] = ops["at"][found], ops["time"][found]
    events["checks"] = NO_CHECKS
    events["total"] = 1
    return events, ops[~found]


def _find(rising: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """Find values among rising ones: the place of each, and whether it is there."""
    place = np.searchsorted(rising, wanted)
    found = place < len(rising)
    found[found] = rising[place[found]] == wanted[found]
    return place, found


def buckets_of(events: Records, buckets: int) -> Ints:
    """Say in which bucket of families each event belongs."""
    return (events["key"] % np.uint64(buckets)).astype(np.int64)


# --- rows


def rows_of(what: What, packed: Iterable[tuple[int, bytes]]) -> Iterator[pa.RecordBatch]:
    """Make rows of packed records, one per bucket."""
    for bucket, content in packed:
        yield _row(what, bucket, content)


def fault_row(
    kind: Kind,
    offsets: list[int],
    detail: str,
    *,
    told: int | None = None,
    queue: str | None = None,
) -> pa.RecordBatch:
    """Make the row of a fault."""
    return _row(What.FAULT, 0, None, str(kind), offsets, detail, told, queue)


def queue_fault_row(fault: QueueFault) -> pa.RecordBatch:
    """Make the row of a fault in a queue."""
    queue = f"{fault.topic}/{fault.queue}"
    told = fault.offsets[0]
    return fault_row(fault.kind, fault.offsets, fault.detail, told=told, queue=queue)


def _unread_op(at: int) -> pa.RecordBatch:
    detail = "an op message holds something that is no offset of the half queue"
    return fault_row(Kind.OP_WITHOUT_HALF, [at], detail)


def _row(*values: object) -> pa.RecordBatch:
    arrays = [one(value, field.type) for value, field in zip_longest(values, SCHEMA)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
