"""The report of an audit as one HTML file, made from ``templates/report.html``.

The file is self-contained: it makes no request and has no script, and a policy in its head forbids
both, and any style but the one in the file, by its hash. Spark counted all numbers. At most
``ROWS_MAX`` anomalies of each kind are shown (about 3 kB each), so the file stays small for any
log; it says how many are left out and where they are.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import times
from ..audit.rules.model import AuditedState
from ..audit.statistics import PERCENTILES, Delays, OpenAges, Timeline
from . import charts, text
from .anomalies import dump, shown_kinds

if TYPE_CHECKING:
    from ..audit.auditor import Audit

ROWS_MAX: Final = 15  # anomalies of each kind, with their bytes; nobody reads more
CHECKS: Final = {
    "crc": "CRC of records",
    "queues": "Consume queues",
    "digests": "Digests of files",
    "tail": "End of the log",
}
DELAYS_LISTED: Final = 60  # producer groups and topics in the table
_LIMITS: Final = {
    "rows_open": 10,  # of so few the bytes are shown at once
    "offsets": 12,  # of one row; more are counted
    "places": 4,  # of one row whose bytes are shown
    "detail": 600,  # characters
}


class _Table(NamedTuple):
    names: list[str]
    rows: list[list[str]]


def page(audit: "Audit", *, written_ms: int, details: Path | None = None) -> str:
    """Return the report as HTML.

    ``written_ms`` is the time to put into it, ``details`` the folder with the Parquet files.
    """
    style = _part("report.css")
    timeline = audit.timeline
    labels = {str(state): str(state).replace("_", " ") for state in timeline.prepared}
    placed = sum(map(sum, timeline.prepared.values()))
    kinds = shown_kinds(audit.anomalies, audit.anomaly_kinds, ROWS_MAX)
    delays = sorted(audit.delays, key=lambda one: -one.prepared)
    return (
        _environment()
        .from_string(_part("report.html"))
        .render(
            audit=audit,
            style=style,
            policy=f"default-src 'none'; style-src {_hash(style)}; img-src data:;"
            " base-uri 'none'; form-action 'none'",
            labels=labels,
            check_names=CHECKS,
            total=sum(audit.states[state] for state in (*labels, AuditedState.UNDETERMINED)),
            undetermined=audit.states[AuditedState.UNDETERMINED],
            expired=audit.states[AuditedState.EXPIRED],
            placed=placed,
            states_chart=charts.states_chart(timeline, labels) if placed else "",
            undecided_chart=charts.undecided_chart(timeline) if placed else "",
            over_time=_over_time(timeline, labels),
            ages=_ages(audit.open_ages, labels),
            delays=_latencies(delays[:DELAYS_LISTED]),
            delays_left_out=len(delays[DELAYS_LISTED:]),
            kinds=kinds,
            shown=sum(len(kind.rows) for kind in kinds),
            details=details,
            written_ms=written_ms,
            limits=_LIMITS,
        )
    )


def write_page(audit: "Audit", file: Path, *, written_ms: int, details: Path | None = None) -> None:
    """Write the report to a file, replacing an earlier one; see ``page``."""
    content = page(audit, written_ms=written_ms, details=details)
    file.write_text(content, "utf-8", newline="\n")


def _part(name: str) -> Markup:
    content = resources.files(__package__).joinpath("templates", name).read_text("utf-8")
    return Markup(content)  # noqa: S704  our own file


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _environment() -> Environment:
    """Make an environment in which every text is made harmless, whether a filter says so or not."""
    environment = Environment(
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for filter_ in (
        *(text.number, text.many, times.duration, text.size, times.moment, times.full_moment),
        *(text.isolated, dump),
    ):
        environment.filters[filter_.__name__] = filter_
    return environment


def _finalize(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Markup):
        return text.visible(value)
    return value


def _over_time(timeline: Timeline, labels: dict[str, str]) -> _Table:
    columns = [*timeline.prepared.values(), timeline.decided, timeline.undecided]
    rows = [
        [
            times.moment(timeline.start_ms + place * timeline.width_ms, timeline.width_ms),
            *map(text.number, counts),
        ]
        for place, counts in enumerate(zip(*columns, strict=True))
    ]
    return _Table(["from (UTC)", *labels.values(), "decided then", "undecided"], rows)


def _latencies(delays: Sequence[Delays]) -> _Table:
    names = ["producer group", "topic", "prepared", "decided", *PERCENTILES, "checks, at most"]
    return _Table(names, [_latency(one) for one in delays])


def _latency(one: Delays) -> list[str]:
    took = [times.duration(one.took_ms[name]) if one.decided else "-" for name in PERCENTILES]
    asked = text.number(one.checks["max"]) if one.checks else "-"
    counts = text.number(one.prepared), text.number(one.decided)
    return [text.isolated(one.producer_group), text.isolated(one.topic), *counts, *took, asked]


def _ages(ages: OpenAges, labels: dict[str, str]) -> _Table:
    bounds = [times.duration(bound) for bound in ages.bounds_ms]
    between = [f"{low} to {high}" for low, high in pairwise(bounds)]
    names = [f"under {bounds[0]}", *between, f"{bounds[-1]} and more"]
    counts = list(zip(*ages.counts.values(), strict=True))
    rows = [[name, *map(text.number, row)] for name, row in zip(names, counts, strict=True)]
    return _Table(
        ["age", *(labels[state] for state in ages.counts)], rows if any(map(any, counts)) else []
    )
