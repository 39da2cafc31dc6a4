"""The outcome of an audit for people, for programs and for further queries."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..audit.judge import State
from ..audit.statistics import PERCENTILES

if TYPE_CHECKING:
    from ..audit.auditor import Anomaly, Audit

ROWS_SHOWN: Final = 50  # anomalies in the table; a terminal holds no more, and files have all
DELAYS_SHOWN: Final = 10  # producer groups and topics in the table
_COUNTED: Final = (
    State.COMMITTED,
    State.ROLLED_BACK,
    State.PENDING,
    State.PARKED,
    State.UNDETERMINED,
)


def summary(audit: "Audit") -> dict[str, object]:
    """Return the promised JSON of an audit; keys are only ever added to it."""
    counts = {str(state): audit.states[state] for state in _COUNTED}
    return {
        "directory": audit.directory,
        "log": {
            "segments": audit.log.segments,
            "records": audit.log.records,
            "bytes": audit.log.bytes,
            "first_offset": audit.log.first_offset,
            "end_offset": audit.log.end_offset,
            "tail": audit.log.tail,
            "scanned_bytes": audit.log.end_offset - audit.log.first_offset,
        },
        "transactions": {
            "total": sum(counts.values()),
            **counts,
            # Decided here, while the half lies below the first offset: not in the total.
            "expired": audit.states[State.EXPIRED],
        },
        "delays": [delays._asdict() for delays in audit.delays],
        "over_time": audit.timeline._asdict(),
        "undecided_by_age": audit.open_ages._asdict(),
        "checks": [check._asdict() for check in audit.checks],
        "remarks": [remark._asdict() for remark in audit.remarks],
        "anomaly_count": audit.anomaly_count,
        "anomaly_kinds": dict(sorted(audit.anomaly_kinds.items())),
        "anomalies": [
            {
                "kind": anomaly.kind,
                "transaction_id": anomaly.transaction_id,
                "topic": anomaly.topic,
                "group": anomaly.group,
                "offsets": anomaly.offsets,
                "detail": anomaly.detail,
                "bytes": [place._asdict() for place in anomaly.places],
            }
            for anomaly in audit.anomalies
        ],
    }


def table(audit: "Audit") -> str:
    """Return what a person wants to see first."""
    parts = (_log_lines(audit), _state_lines(audit), _delay_lines(audit), _anomaly_lines(audit))
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _log_lines(audit: "Audit") -> Iterator[str]:
    log = audit.log
    yield f"commit log    {audit.directory}"
    yield f"segments      {log.segments}"
    yield f"records       {log.records:,} in {log.bytes:,} bytes"
    yield f"offsets       {log.first_offset} to {log.end_offset}"
    if log.tail:
        yield f"behind that   {log.tail}"
    for check in audit.checks:
        if not check.checked:
            yield f"not checked   {check.what}: {check.why}"
    for remark in audit.remarks:
        yield f"remark        at {', '.join(map(str, remark.offsets))}: {remark.detail}"


def _state_lines(audit: "Audit") -> Iterator[str]:
    yield f"transactions  {sum(audit.states[state] for state in _COUNTED):,}"
    for state in _COUNTED:
        if state is not State.UNDETERMINED or audit.states[state]:
            yield f"  {state.replace('_', ' '):12}{audit.states[state]:,}"
    if audit.states[State.EXPIRED]:
        yield f"  (and {audit.states[State.EXPIRED]:,} decisions on halves no longer in the log)"


def _delay_lines(audit: "Audit") -> Iterator[str]:
    """Tell how long decisions took, for the groups and topics with the most transactions."""
    delays = sorted(audit.delays, key=lambda delays: -delays.prepared)
    if delays:
        yield (
            "decided after " + "".join(f"{name:>10}" for name in PERCENTILES) + "   checks, at most"
        )
    for one in delays[:DELAYS_SHOWN]:
        took = "".join(f"{one.took_ms.get(name, '-'):>10}" for name in PERCENTILES)
        yield f"  milliseconds{took}{one.checks['max']:>10}   {one.producer_group} / {one.topic}"
    if delays:
        yield "  (checks: the copies that RocketMQ writes when it asks; halfmq logs none)"
    if len(delays) > DELAYS_SHOWN:
        yield f"  and {len(delays) - DELAYS_SHOWN:,} more producer groups and topics"


def _anomaly_lines(audit: "Audit") -> Iterator[str]:
    yield f"anomalies     {audit.anomaly_count:,}"
    shown = audit.anomalies[:ROWS_SHOWN]
    for anomaly in shown:
        yield _anomaly_line(anomaly)
    if audit.anomaly_count > len(shown):
        yield f"  and {audit.anomaly_count - len(shown):,} more: see --json or --output"


def _anomaly_line(anomaly: "Anomaly") -> str:
    places = ", ".join(map(str, anomaly.offsets))
    who = f"{anomaly.transaction_id} " if anomaly.transaction_id else ""
    return f"  {anomaly.kind:22} {who}at {places}: {anomaly.detail}"
