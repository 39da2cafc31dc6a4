"""An audit in this process, without Spark: the same steps over the same functions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfmq.spark_jobs.audit.audit import judged_row, linked_by_hand, linked_rows
from halfmq.spark_jobs.audit.digest import SCHEMA, Plan, Summary, Watch, What, digest
from halfmq.spark_jobs.audit.families import STATES, TRANSACTION
from halfmq.spark_jobs.audit.judge import Kind, State
from halfmq.spark_jobs.audit.overview import DEFAULT_CHECKS, Checks, Delays, Overview
from halfmq.spark_jobs.audit.timeline import OpenAges, Timeline, merged
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segments import LogExtent, SegmentReader, survey
from halfmq.spark_jobs.log.store_files import StoreFiles

Row = dict[str, Any]


@dataclass
class Outcome:
    """What an audit in this process found."""

    states: Counter[State]
    transactions: dict[int, State]  # by the half's offset
    found: list[tuple[Kind, tuple[int, ...]]]
    details: list[str]
    delays: list[Delays]
    timeline: Timeline
    open_ages: OpenAges


def audit_here(
    directory: Path, *, step: int = 1 << 20, buckets: int = 3, checks: Checks = DEFAULT_CHECKS
) -> Outcome:
    """Audit a store in splits of ``step`` bytes."""
    extent, store = survey(directory), StoreFiles(directory)
    queues = store.consume_queues if checks.queues else None
    plan = Plan(buckets, checks.crc, str(queues) if queues else None)
    rows = list(_digests(extent, plan, step))
    summaries = [Summary.unpack(row["packed"]) for row in rows if row["what"] == What.SUMMARY]
    log = Overview(extent, store, summaries, checks)
    places = {row["bucket"] for row in rows if row["what"] == What.OPS}
    for bucket in places:
        halves, ops = (_packed(rows, what, bucket) for what in (What.HALVES, What.OPS))
        rows += _named(linked_rows(halves, ops, log.lost_places, buckets))
    rows += _named(linked_by_hand(_packed(rows, What.LINKED, 0), log, buckets))
    told = [
        judged_row(_packed(rows, What.EVENTS, bucket), log.bounds, log.terms, log.scale)
        for bucket in {row["bucket"] for row in rows if row["what"] == What.EVENTS}
    ]
    restarts = log.restarts()
    faults = [
        (row["kind"], row["offsets"], row["detail"])
        for row in rows
        if row["what"] == What.FAULT
        and not (
            row["kind"] == Kind.WRONG_QUEUE_ENTRY
            and row["offsets"][0] < restarts.get(row["queue"], 0)
        )
    ]
    faults += [(kind, offsets, detail) for kind, offsets, detail, _ in log.faults()]
    faults += [finding[:3] for _, findings, *_ in told for finding in findings]  # type: ignore[attr-defined]
    transactions = np.concatenate(
        [np.zeros(0, TRANSACTION), *(np.frombuffer(t, TRANSACTION) for _, _, t, *_ in told)]  # type: ignore[call-overload]
    )
    states: Counter[State] = Counter()
    for counts, *_ in told:
        states.update({s: n for s, n in zip(STATES, counts, strict=True) if n})  # type: ignore[call-overload]
    return Outcome(
        states,
        {int(t["at"]): STATES[t["state"]] for t in transactions},
        sorted((Kind(kind), tuple(offsets)) for kind, offsets, _ in faults),
        [detail for _, _, detail in faults],
        log.delays([row[3] for row in told], [row[4] for row in told]),  # type: ignore[misc]
        *merged([row[5] for row in told], log.scale),  # type: ignore[misc]
    )


def _digests(extent: LogExtent, plan: Plan, step: int) -> Iterator[Row]:
    for segment in extent.segments:
        limit = extent.limit(segment)
        reader = SegmentReader(segment, limit)
        for start in range(0, limit, step):
            watch = Watch(segment, verify_crc=plan.verify_crc, with_tags=plan.queues is not None)
            for item in reader.scan(start, start + step):
                if isinstance(item, Rows):
                    watch.take(item)
                else:
                    watch.take_hole(item)
            for batch in digest(watch.seen(), plan):
                yield from batch.to_pylist()


def _packed(rows: list[Row], what: What, bucket: int) -> list[bytes]:
    return [row["packed"] for row in rows if row["what"] == what and row["bucket"] == bucket]


def _named(rows: list[tuple[object, ...]]) -> list[Row]:
    return [dict(zip(SCHEMA.names, row, strict=True)) for row in rows]
