"""The report of an audit as one HTML file, for whoever has to look at a log.

The file stands alone: no request leaves it, and a policy in its head forbids any, as well as every
script and style but those that are written into it, known by their hashes. It can be read without a
script. All numbers were counted by Spark; anomalies are shown up to ``ROWS_MAX``, so the file stays
small however bad the log is (about 3 kB for each row), and says what it left out and where that is.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..audit.judge import State
from ..audit.overview import PERCENTILES, Delays
from ..audit.timeline import OPEN, SHOWN, OpenAges, Timeline
from .anomalies import OPEN_MAX, ShownKind, kind_section, shown_kinds
from .charts import (
    LABELS,
    Mark,
    MarkedKind,
    age_names,
    ages_chart,
    delays_chart,
    kinds_chart,
    legend,
    places_chart,
    states_chart,
    undecided_chart,
)
from .style import SCRIPT, STYLE
from .text import (
    duration,
    escaped,
    full_moment,
    isolated,
    many,
    moment,
    number,
    size,
)

if TYPE_CHECKING:
    from ..audit.auditor import Audit

ROWS_MAX: Final = 200  # anomalies with their bytes; more are no reading matter
DELAYS_DRAWN: Final = 12  # lines of the chart, which must fit a printed page
DELAYS_LISTED: Final = 60  # and of the table beside it
_NOT_WRITTEN: Final = "are in the Parquet files that <code>--output DIR</code> writes"


def page(
    audit: "Audit", *, written_ms: int, details: Path | None = None, rows_max: int = ROWS_MAX
) -> str:
    """Return the report as HTML.

    ``written_ms`` is the time to put into it, ``details`` the folder with the Parquet files.
    """
    kinds = shown_kinds(audit.anomalies, dict(audit.anomaly_kinds), rows_max)
    title = f"Audit of {escaped(audit.directory)}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">',
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>",
        *_header(audit),
        "<main>",
        *_transactions(audit),
        *_delays(audit.delays),
        *_undecided(audit.open_ages),
        *_anomalies(audit, kinds, details),
        "</main>",
        *_footer(written_ms),
        f"<script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def write_page(audit: "Audit", file: Path, *, written_ms: int, details: Path | None = None) -> None:
    """Write the report to a file, replacing an earlier one; see ``page``."""
    text = page(audit, written_ms=written_ms, details=details)
    file.write_text(text, "utf-8", newline="\n")


def _policy() -> str:
    return (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(audit: "Audit") -> Iterator[str]:
    log = audit.log
    yield f"<header><h1>Audit of a commit log</h1><p>{isolated(audit.directory)}</p>"
    if audit.is_clean:
        yield '<p class="verdict good">Clean: no anomaly was found.</p>'
    else:
        found = "1 anomaly" if audit.anomaly_count == 1 else f"{audit.anomaly_count:,} anomalies"
        yield f'<p class="verdict bad">{found} found.</p>'
    facts = {
        "Log": f"{many(log.records, 'record')} in {many(log.segments, 'segment')},"
        f" {size(log.bytes)}",
        "Offsets": f"{log.first_offset} to {log.end_offset}",
    }
    if log.tail:
        facts["Behind that"] = escaped(log.tail)
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    yield f'<dl class="facts">{rows}</dl>'
    places = {
        "transactions": "Transactions",
        "delays": "Decision latency",
        "undecided": "Undecided",
        "anomalies": "Anomalies",
    }
    links = "".join(f'<li><a href="#{where}">{name}</a></li>' for where, name in places.items())
    yield f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'


def _transactions(audit: "Audit") -> Iterator[str]:
    counts = {state: audit.states[state] for state in SHOWN}
    yield '<section id="transactions"><h2>Transactions</h2>'
    tiles = {"in all": number(sum(counts.values()))}
    tiles |= {LABELS[state]: number(count) for state, count in counts.items()}
    shown = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
    yield f'<dl class="tiles">{"".join(shown)}</dl>'
    if audit.states[State.EXPIRED]:
        expired = many(audit.states[State.EXPIRED], "decision")
        yield f'<p class="note">And {expired} on half messages that the log no longer holds.</p>'
    timeline = audit.timeline
    placed = sum(map(sum, timeline.prepared.values()))
    if placed < sum(counts.values()):
        missing = many(sum(counts.values()) - placed, "transaction")
        yield f'<p class="note">{missing} without a half message in the log: not in the charts.</p>'
    if placed:
        yield from _over_time(timeline)
    yield "</section>"


def _over_time(timeline: Timeline) -> Iterator[str]:
    end = timeline.start_ms + len(timeline.decided) * timeline.width_ms
    span = f"{full_moment(timeline.start_ms)} to {full_moment(end)}"
    yield "<figure><h3>States over time</h3>"
    yield (
        f"<figcaption>Transactions by when they were prepared, and what became of them."
        f" {span}, one bar for {duration(timeline.width_ms)}.</figcaption>"
    )
    yield legend(LABELS) + states_chart(timeline) + "</figure>"
    yield "<figure><h3>Undecided over time</h3>"
    yield "<figcaption>How many nobody had decided at the end of each interval.</figcaption>"
    yield undecided_chart(timeline) + "</figure>"
    names = ["from (UTC)", *LABELS.values(), "decided then", "undecided"]
    columns = [*timeline.prepared.values(), timeline.decided, timeline.undecided]
    rows = [
        [moment(timeline.start_ms + place * timeline.width_ms, timeline.width_ms), *cells]
        for place, cells in enumerate(zip(*(map(number, c) for c in columns), strict=True))
    ]
    yield _table("Transactions over time", names, rows, first=1)


def _delays(delays: Sequence[Delays]) -> Iterator[str]:
    yield '<section id="delays"><h2>Decision latency</h2>'
    busiest = sorted(delays, key=lambda one: -one.prepared)
    decided = [one for one in busiest if one.took_ms]
    if decided:
        drawn = decided[:DELAYS_DRAWN]
        yield "<figure><h3>By producer group and topic</h3>"
        yield (
            "<figcaption>Time from preparation to decision, on a logarithmic scale; p50 and p99"
            " in numbers. Dot: p50; bars: p90 and p99; ring: the slowest.</figcaption>"
        )
        yield delays_chart(drawn) + "</figure>"
        yield _left_out(len(decided) - len(drawn), "more in the table", "more are in the table")
    else:
        yield "<p>No decision can be timed.</p>"
    listed = busiest[:DELAYS_LISTED]
    if listed:
        names = ["producer group", "topic", "prepared", "decided", *PERCENTILES, "checks, at most"]
        yield _table("Decision latency", names, [_delay_cells(one) for one in listed], first=2)
        where = "more groups and topics: see the JSON summary"
        yield _left_out(len(busiest) - len(listed), where, where)
    yield "</section>"


def _left_out(count: int, one: str, several: str) -> str:
    if count <= 0:
        return ""
    return f'<p class="left-out">{number(count)} {one if count == 1 else several}.</p>'


def _delay_cells(one: Delays) -> list[str]:
    took = [duration(one.took_ms[name]) if one.took_ms else "-" for name in PERCENTILES]
    asked = number(one.checks["max"]) if one.checks else "-"
    counts = number(one.prepared), number(one.decided)
    return [isolated(one.producer_group), isolated(one.topic), *counts, *took, asked]


def _undecided(ages: OpenAges) -> Iterator[str]:
    yield '<section id="undecided"><h2>Undecided by age</h2>'
    if any(map(any, ages.counts.values())):
        states = [str(state) for state in OPEN]
        yield "<figure><h3>How long they have been waiting</h3>"
        yield "<figcaption>Parked: the broker has given up asking; can still be decided."
        yield "</figcaption>"
        yield legend({state: LABELS[state] for state in states}) + ages_chart(ages) + "</figure>"
        columns = zip(age_names(ages), *(map(number, ages.counts[s]) for s in states), strict=True)
        names = ["age", *(LABELS[state] for state in states)]
        yield _table("Undecided by age", names, [list(row) for row in columns], first=1)
    else:
        yield "<p>Everything in the log is decided.</p>"
    yield "</section>"


def _anomalies(audit: "Audit", kinds: Sequence[ShownKind], details: Path | None) -> Iterator[str]:
    yield '<section id="anomalies"><h2>Anomalies</h2>'
    shown = sum(len(kind.rows) for kind in kinds)
    if not kinds:
        yield "<p>None.</p></section>"
        return
    marked = [_marked(kind, audit) for kind in kinds]
    yield "<figure><h3>By kind</h3><figcaption>Each bar leads to its rows.</figcaption>"
    yield kinds_chart(marked) + "</figure>"
    yield "<figure><h3>Where in the log</h3><figcaption>Each mark leads to its row;"
    yield f" offset {audit.log.first_offset} on the left, {audit.log.end_offset} on the right."
    yield f"</figcaption>{places_chart(marked)}</figure>"
    rows = [[kind.title, number(kind.found), number(len(kind.rows))] for kind in kinds]
    yield _table("Anomalies by kind", ["kind", "found", "shown here"], rows, first=1)
    yield (
        '<p class="note">Of each record the first bytes are shown, which may be those of a'
        " message. <code>xxd -s POSITION -l SIZE FILE</code> prints all of it.</p>"
    )
    if shown < audit.anomaly_count:
        where = f"are in {isolated(str(details / 'anomalies'))}" if details else _NOT_WRITTEN
        yield (
            f'<p class="left-out">{number(shown)} of {number(audit.anomaly_count)} are shown here.'
            f" All {where}.</p>"
        )
    yield '<div id="filter"></div>'
    for kind in kinds:
        yield from kind_section(kind, is_open=shown <= OPEN_MAX)
    yield "</section>"


def _marked(kind: ShownKind, audit: "Audit") -> MarkedKind:
    start, end = audit.log.first_offset, audit.log.end_offset
    marks = [
        Mark(
            place,
            min(max((one.offsets[0] - start) / max(end - start, 1), 0), 1) if one.offsets else 0,
            one.transaction_id or one.detail,
        )
        for place, one in kind.rows
    ]
    return MarkedKind(kind.kind, kind.title, kind.found, marks)


def _footer(written_ms: int) -> Iterator[str]:
    yield '<footer class="note"><p>'
    yield f"Written {full_moment(written_ms)} by <code>python -m halfmq.spark_jobs audit</code>,"
    yield " which read the files of the log and asked no broker. Times are those of the broker's"
    yield " clock. A rollback that only an op message tells of looks up to 3 s later than it was."
    yield "</p></footer>"


def _table(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], *, first: int) -> str:
    """Make a table that opens on request; the first columns are names, the others numbers."""

    def cells(tag: str, row: Sequence[str], head: Callable[[int], str]) -> str:
        return "".join(
            f"<{tag}{head(place)}{' class=name' if place < first else ''}>{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    top = cells("th", names, lambda _: " scope=col")
    body = "".join(f"<tr>{cells('td', row, lambda _: '')}</tr>" for row in rows)
    return (
        f'<details><summary>{caption}: the numbers</summary><div class="scroll" tabindex="0"'
        f' role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )
