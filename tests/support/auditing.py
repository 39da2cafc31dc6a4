"""An audit in this process, without Spark: the same reader and rules, and no query.

Each key group goes to ``judge``; what queries say of usual groups, of op messages without a half
and of queues is tested with Spark.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from halfmq.spark_jobs.audit.checks import DEFAULT_CHECKS, Checks
from halfmq.spark_jobs.audit.key_groups import COLUMNS, event_of
from halfmq.spark_jobs.audit.rules.deliveries import judge_delays
from halfmq.spark_jobs.audit.rules.judge import judge
from halfmq.spark_jobs.audit.rules.model import AuditedState, Kind, LogBounds
from halfmq.spark_jobs.audit.scan_summary import ScanSummary
from halfmq.spark_jobs.log.hashes import hash_of
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.store_files import StoreFiles
from halfmq.spark_jobs.log.transaction_parts import Part
from halfmq.spark_jobs.source.event_source import EVENT_COLUMNS, NOTES, EventReader
from halfmq.spark_jobs.source.options import LogOptions
from halfmq.spark_jobs.source.scan import NOTES_TYPE, QUEUE

_TYPES: dict[str, DataType] = {
    "bigint": LongType(),
    "int": IntegerType(),
    "tinyint": ByteType(),
    "boolean": BooleanType(),
    "string": StringType(),
}
Row = dict[str, Any]
Found = tuple[Kind, tuple[int, ...]]


@dataclass
class Outcome:
    """What an audit in this process found: all but what is wrong with queues."""

    states: Counter[AuditedState]
    transactions: dict[int, AuditedState]  # by the half's offset, else that of the first record
    found: list[Found]
    details: list[str]


def audit_here(directory: Path, *, step: int = 1 << 20, checks: Checks = DEFAULT_CHECKS) -> Outcome:
    """Audit a store in splits of about ``step`` bytes."""
    extent, store = survey(directory), StoreFiles(directory)
    options = LogOptions(path=str(directory), verify_crc=checks.crc, max_partition_bytes=step)
    reader = EventReader(_schema(), options)
    events: list[Row] = []
    notes: list[Row] = []
    ranges: list[Row] = []
    for partition in reader.partitions():
        for batch in reader.read(partition):
            for row in batch.to_pylist():
                notes += [note for note in row["notes"] or () if note["what"] != QUEUE]
                ranges += [note for note in row["notes"] or () if note["what"] == QUEUE]
                events += [row] if row["part"] is not None else []
    log = ScanSummary(notes, extent, store, checks)
    bounds, limits = log.bounds, log.limits
    if store.queue_counts is None:
        last: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for note in ranges:
            place = note["partition"], note["lastPhysicalOffset"]
            last[hash_of(note["topic"])].append(place)
        bounds = bounds._replace(last_in_queues=last)
    assert log.keyless == sum(row["key"] is None for row in events)
    faults = [(kind, offsets, detail) for kind, offsets, detail, _ in log.findings()]
    faults += _linked(events, bounds)
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in events:
        if row["key"] is not None:
            groups[row["key"]].append(row)
    outcome = Outcome(Counter(), {}, [], [])
    for rows in groups.values():
        records = [event_of(*(row[n] for n in COLUMNS[1:-1])) for row in rows]
        if rows[0]["part"] >= Part.DELAYED:
            faults += judge_delays(records, bounds, limits)
            continue
        verdict = judge(records, bounds, limits)
        faults += verdict.findings
        for one in verdict.transactions:
            outcome.states[one.state] += 1
            if one.state not in {AuditedState.EXPIRED, AuditedState.UNFOUNDED}:
                first = min(row["physicalOffset"] for row in rows)
                outcome.transactions[first if one.half is None else one.half] = one.state
    outcome.found = sorted((Kind(kind), tuple(offsets)) for kind, offsets, _ in faults)
    outcome.details = [detail for _, _, detail in faults]
    return outcome


def _schema() -> StructType:
    """Make by hand what Spark makes of a text, which needs a session."""
    fields = [StructField(name, _TYPES[EVENT_COLUMNS[name].spark_type]) for name in COLUMNS]
    notes = [field.partition(":") for field in NOTES_TYPE[len("array<struct<") : -2].split(",")]
    note = StructType([StructField(name, _TYPES[kind]) for name, _, kind in notes])
    return StructType([*fields, StructField(NOTES, ArrayType(note))])


def _linked(events: list[Row], bounds: LogBounds) -> Iterator[tuple[str, list[int], str]]:
    """Give events the key of the half that they name; tell of ops whose half never was."""
    halves = [row for row in events if row["part"] == Part.HALF]
    by_slot = {row["halfQueueOffset"]: row for row in reversed(halves)}
    by_offset = {row["physicalOffset"]: row for row in halves}
    orphans: dict[int, list[int]] = defaultdict(list)
    for row in events:
        if row["key"] is not None:
            continue
        if row["part"] != Part.OP:
            half = by_offset.get(row["halfOffset"])
            row["key"] = half["key"] if half else -1 - row["halfOffset"]
        elif half := by_slot.get(row["halfQueueOffset"]):
            row["key"], row["halfOffset"] = half["key"], half["physicalOffset"]
        else:
            orphans[row["halfQueueOffset"]].append(row["physicalOffset"])
    for slot, offsets in orphans.items():
        below = [row["physicalOffset"] for row in halves if row["halfQueueOffset"] < slot]
        above = [row["physicalOffset"] for row in halves if row["halfQueueOffset"] > slot]
        start, end = max(below, default=0), min(above, default=None)
        if not bounds.hides(start, end):
            yield Kind.OP_WITHOUT_HALF, sorted({min(offsets), max(offsets)}), f"place {slot}"
