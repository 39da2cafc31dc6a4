"""The outcome of an audit as JSON for programs and as a table for people."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from ..audit.rules.model import AuditedState
from ..audit.statistics import PERCENTILES
from .tables import ROWS_MAX, fact, listing

if TYPE_CHECKING:
    from ..audit.auditor import Anomaly, Audit

_COUNTED: Final = (
    AuditedState.COMMITTED,
    AuditedState.ROLLED_BACK,
    AuditedState.PENDING,
    AuditedState.PARKED,
    AuditedState.UNDETERMINED,
)


def summary(audit: "Audit") -> dict[str, object]:
    """Return the promised JSON of an audit; keys are only ever added to it."""
    counts = {str(state): audit.states[state] for state in _COUNTED}
    return {
        "directory": audit.directory,
        "log": asdict(audit.log) | {"scanned_bytes": audit.log.end_offset - audit.log.first_offset},
        "transactions": {
            "total": sum(counts.values()),
            **counts,
            # Decided here, while the half lies below the first offset: not in the total.
            "expired": audit.states[AuditedState.EXPIRED],
        },
        "delays": [delays._asdict() for delays in audit.delays],
        "over_time": audit.timeline._asdict(),
        "undecided_by_age": audit.open_ages._asdict(),
        "checks": [check._asdict() for check in audit.checks],
        "remarks": [remark._asdict() for remark in audit.remarks],
        "anomaly_count": audit.anomaly_count,
        "anomaly_kinds": dict(sorted(audit.anomaly_kinds.items())),
        "anomalies": [_anomaly(anomaly) for anomaly in audit.anomalies],
    }


def _anomaly(anomaly: "Anomaly") -> dict[str, object]:
    row = anomaly._asdict()
    row["bytes"] = [place._asdict() for place in row.pop("places")]
    return row


def table(audit: "Audit") -> Iterator[str]:
    """Yield the lines that a person wants to see first."""
    log = audit.log
    yield fact("commit log", audit.directory)
    yield fact("segments", log.segments)
    yield fact("records", f"{log.records:,} in {log.bytes:,} bytes")
    yield fact("offsets", f"{log.first_offset} to {log.end_offset}")
    if log.tail:
        yield fact("after that", log.tail)
    for check in audit.checks:
        if not check.checked:
            yield fact("not checked", f"{check.what}: {check.why}")
    for remark in audit.remarks:
        at = f"at {', '.join(map(str, remark.offsets))}: " if remark.offsets else ""
        yield fact("remark", f"{at}{remark.detail}")
    yield ""
    yield fact("transactions", sum(audit.states[state] for state in _COUNTED))
    for state in _COUNTED:
        if state is not AuditedState.UNDETERMINED or audit.states[state]:
            yield fact(f"  {state.replace('_', ' ')}", audit.states[state])
    if expired := audit.states[AuditedState.EXPIRED]:
        yield f"  (and {expired:,} decisions on halves no longer in the log)"
    yield from _delay_lines(audit)
    yield ""
    yield fact("anomalies", audit.anomaly_count)
    anomalies = [anomaly._asdict() for anomaly in audit.anomalies[:ROWS_MAX]]
    names = ("kind", "transaction_id", "offsets", "detail")
    yield from listing(anomalies, *names, total=audit.anomaly_count)


def _delay_lines(audit: "Audit") -> Iterator[str]:
    """Show how long decisions took, for the groups and topics with the most transactions."""
    delays = [
        {
            **{name: one.took_ms[name] if one.decided else None for name in PERCENTILES},
            "checks, at most": one.checks["max"],
            "producer group": one.producer_group,
            "topic": one.topic,
        }
        for one in sorted(audit.delays, key=lambda one: -one.prepared)
    ]
    title = "time to decision in ms (checks: copies that RocketMQ writes; halfmq logs none)"
    yield from listing(delays, *(delays[0] if delays else ()), title=title)
