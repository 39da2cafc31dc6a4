"""Audits to make reports of, without Spark: of a store, and of a log that somebody else chose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from halfmq.spark_jobs.audit.auditor import Anomaly, Audit, LogSummary
from halfmq.spark_jobs.audit.checks import Check, Remark
from halfmq.spark_jobs.audit.rules.model import Kind
from halfmq.spark_jobs.audit.statistics import AGES_MS, OPEN, SHOWN, Delays, OpenAges, Timeline
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.lookup import LogLookup
from tests.support.auditing import audit_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_START: Final = 1_700_000_000_000  # ms
LONG: Final = "n" * 9_980 + "-the-end-of-the-name"
HOSTILE: Final = (
    "<script>window.taken = 1</script>",
    "\"><img src=x onerror='window.taken = 2'>",
    "</title></style></svg></script><script>window.taken = 3</script>",
    "javascript:alert(1)&amp;&lt;b&gt;",
    "\u202etxet eht snrut\u2066 \u200b invisible",
    "\x00\x07\x1b[31m red \r\n\u2028 new line \x7f",
    "\u05e9\u05dc\u05d5\u05dd-\u0645\u0631\u062d\u0628\u0627",
    "o\u0301\u0302\u0303\u0304\u0305\u0306\u0307\u0308\u0309" * 9,
    "\u4ea4\u6613\u4e3b\u9898" * 9,
    LONG,
)
"""Names of topics, groups and keys that somebody may choose who can send to a broker."""


def audit_of(directory: Path) -> Audit:
    """Audit a store in this process; when transactions were prepared and decided is made up."""
    told = audit_here(directory)
    counts = {str(state): told.states[state] for state in SHOWN}
    is_open = {str(state) for state in OPEN}
    over_time = {state: [count // 2, count - count // 2] for state, count in counts.items()}
    decided = sum(count for state, count in counts.items() if state not in is_open)
    took = {"p50": 3, "p90": 80, "p99": 2_500, "max": 2_600}
    extent = survey(directory)
    lookup = LogLookup(extent.segments)
    anomalies = [
        Anomaly(
            str(kind),
            lookup.names(offsets[0]).unique_key,
            list(offsets),
            "as the audit in this process found it",
            [place for place in map(lookup.place, offsets) if place],
        )
        for kind, offsets in told.found
    ]
    size = sum(segment.size for segment in extent.segments)
    return Audit(
        directory=str(directory),
        log=LogSummary(
            len(extent.segments), 1, size, extent.first_offset, extent.end_offset, extent.tail
        ),
        states=Counter({str(state): count for state, count in told.states.items()}),
        delays=[Delays("pg_tx", "tx_orders", decided, took, sum(counts.values()), {"max": 2})],
        anomalies=anomalies,
        anomaly_kinds=Counter(anomaly.kind for anomaly in anomalies),
        timeline=Timeline(_START, 60_000, over_time, [decided, 0]),
        open_ages=OpenAges(
            AGES_MS, {state: [counts[state], *[0] * len(AGES_MS)] for state in sorted(is_open)}
        ),
        describe=lambda: cast("DataFrame", None),  # reports do not look at them
        anomaly_rows=cast("DataFrame", None),
        checks=[
            Check("crc", checked=True),
            Check("digests", checked=False, why="the store has none"),
        ],
    )


def chosen_by_others(audit: Audit, *, rows: int = 0) -> Audit:
    """Put hostile names wherever a report shows what a log says, and ``rows`` anomalies more."""
    percentiles = {"p50": 3, "p90": 80, "p99": 2_500, "max": 7_200_000}
    delays = [
        Delays(group, topic, 1, percentiles, 9, {"max": 2})
        for group, topic in zip(HOSTILE, reversed(HOSTILE), strict=True)
    ]
    like = audit.anomalies[0]
    kinds = list(Kind)
    more = [
        Anomaly(
            str(kinds[place % len(kinds)]),
            name,
            [like.offsets[0]] * 20,
            name * 9,
            like.places,
            name,
            name,
        )
        for place, name in enumerate(HOSTILE * (1 + rows // len(HOSTILE)))
    ]
    anomalies = [*audit.anomalies, *more]
    return replace(
        audit,
        directory=f"/tmp/{HOSTILE[0]}",
        log=replace(audit.log, tail=HOSTILE[1]),
        delays=[*audit.delays, *delays],
        anomalies=anomalies,
        anomaly_kinds=Counter(anomaly.kind for anomaly in anomalies),
        checks=[Check("digests", checked=False, why=name) for name in HOSTILE],
        remarks=[Remark("clock_step", [0], name) for name in HOSTILE],
    )
