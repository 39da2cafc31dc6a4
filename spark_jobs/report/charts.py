"""The charts of a report, as inline SVG.

What lies along a chart has places in percent, texts and heights are in pixels: so a chart fills a
phone and a page alike, and its letters are as large in both. Nothing in it needs a script. Every
chart has a title and says in words what it shows; the numbers stand in a table beside it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from ..audit.overview import Delays
from ..audit.timeline import OPEN, SHOWN, OpenAges, Timeline
from .text import duration, escaped, moment, number, visible

LABELS: Final = {str(state): str(state).replace("_", " ") for state in SHOWN}
_PLOT: Final = 180  # px, height of a chart over time
_ROW: Final = 44  # px, height of a line of text with a bar below
_BAR: Final = 14  # px, height of that bar
_WIDE_MAX: Final = 6.0  # % of the chart; a wider bar says nothing more
_THIN: Final = 1.5  # px, so that one among thousands can be seen
_NAME_MAX: Final = 16  # characters of a group or a topic in a chart; the table has more
# Where an axis of times may have a label or end: steps of about ten, in units that people use.
_TICKS_MS: Final = (
    *(1, 10, 100, 1_000, 10_000),
    *(60_000, 600_000, 3_600_000, 36_000_000),
    *(86_400_000 * days for days in (1, 10, 100)),
)
_LABELS_MAX: Final = 5  # on an axis, for a phone
_NAME_SHARE: Final = "52%"  # of a line, which wide letters may fill as well


class Mark(NamedTuple):
    """A row of the report, and where along the log it belongs."""

    number: int  # of its row
    place: float  # from 0 to 1
    text: str


class MarkedKind(NamedTuple):
    """A kind of anomaly, with those of its rows that are shown."""

    kind: str
    title: str
    found: int
    marks: Sequence[Mark]


def states_chart(timeline: Timeline) -> str:
    """Draw how many transactions were prepared when, divided by what became of them."""
    totals = [sum(column) for column in zip(*timeline.prepared.values(), strict=True)]
    top = _round_up(max(totals))
    body = [*_grid(top), *_time_axis(timeline), *_stacks(timeline, top)]
    said = ", ".join(f"{number(sum(row))} {LABELS[state]}" for state, row in _rows(timeline))
    title = "Transactions by the time of their preparation, and what became of them"
    return _chart("states-chart", title, f"In all: {said}.", _PLOT + 30, body, "axes")


def _rows(timeline: Timeline) -> Iterable[tuple[str, list[int]]]:
    return timeline.prepared.items()


def _stacks(timeline: Timeline, top: int) -> Iterator[str]:
    bins = len(timeline.decided)
    share = 100 / bins
    wide = min(share * 0.88, _WIDE_MAX)
    for place in range(bins):
        counts = {state: row[place] for state, row in _rows(timeline) if row[place]}
        if not counts:
            continue
        start = timeline.start_ms + place * timeline.width_ms
        said = ", ".join(f"{number(count)} {LABELS[state]}" for state, count in counts.items())
        yield f"<g><title>{_interval(start, timeline.width_ms)}: {said}</title>"
        left, y = place * share + (share - wide) / 2, float(_PLOT)
        for state, count in counts.items():
            high = max(count / top * (_PLOT - 10), _THIN)
            y -= high
            yield (
                f'<rect class="{_class(state)}" x="{left:.3f}%" y="{y:.2f}"'
                f' width="{wide:.3f}%" height="{high:.2f}"/>'
            )
        yield "</g>"


def _interval(start_ms: int, width_ms: int) -> str:
    end = moment(start_ms + width_ms, width_ms)
    return f"{moment(start_ms, width_ms)} to {end}" if width_ms > 1 else moment(start_ms, width_ms)


def undecided_chart(timeline: Timeline) -> str:
    """Draw how many transactions were undecided at the end of each interval."""
    waiting = [max(count, 0) for count in timeline.undecided]
    top = _round_up(max(waiting))
    bins = len(waiting)
    heights = [100 - count / top * 100 * (_PLOT - 10) / _PLOT for count in waiting]
    steps = "".join(f"V{high:.2f}H{place + 1}" for place, high in enumerate(heights))
    body = [
        *_grid(top),
        *_time_axis(timeline),
        f'<svg width="100%" height="{_PLOT}" viewBox="0 0 {bins} 100" preserveAspectRatio="none">',
        f'<path class="area" d="M0 100{steps}V100Z"/>',
        f'<path class="step" d="M0 {heights[0]:.2f}{steps}"/></svg>',
    ]
    said = f"At most {number(max(waiting))}, in the end {number(waiting[-1])}."
    title = "Transactions that nobody had decided, over time"
    return _chart("undecided-chart", title, said, _PLOT + 30, body, "axes")


def _grid(top: int) -> Iterator[str]:
    for share in (0, 0.5, 1) if top % 2 == 0 else (0, 1):
        y = _PLOT - share * (_PLOT - 10)
        yield f'<line class="grid" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>'
        count = _short(int(top * share))
        yield f'<text class="axis" x="-6" y="{y + 4:g}" text-anchor="end">{count}</text>'


def _time_axis(timeline: Timeline) -> Iterator[str]:
    bins = len(timeline.decided)
    quarters = sorted({round(bins * quarter / 4) for quarter in range(5)})
    for place in quarters:
        at = timeline.start_ms + place * timeline.width_ms
        anchor = {0: "start", bins: "end"}.get(place, "middle")
        narrow = "" if place in {0, bins} or place * 2 == bins else " wide"
        yield (
            f'<text class="axis{narrow}" x="{place / bins * 100:.2f}%" y="{_PLOT + 20}"'
            f' text-anchor="{anchor}">{moment(at, timeline.width_ms)}</text>'
        )


def ages_chart(ages: OpenAges) -> str:
    """Draw how long undecided transactions have been waiting."""
    totals = [sum(column) for column in zip(*ages.counts.values(), strict=True)]
    names = age_names(ages)
    body: list[str] = []
    for place, (name, total) in enumerate(zip(names, totals, strict=True)):
        y = place * _ROW
        body += _line(y, name, number(total))
        left = 0.0
        for state in map(str, OPEN):
            wide = ages.counts[state][place] / max(totals) * 100 if total else 0
            if wide:
                body.append(_bar(y, left, wide, state))
            left += wide
    parts = (f"{name}: {number(n)}" for name, n in zip(names, totals, strict=True) if n)
    title = "Undecided transactions by age"
    return _chart("ages-chart", title, "; ".join(parts) + ".", len(names) * _ROW, body)


def age_names(ages: OpenAges) -> list[str]:
    """Name the classes of age."""
    bounds = [duration(bound) for bound in ages.bounds_ms]
    between = [f"{low} to {high}" for low, high in pairwise(bounds)]
    return [f"under {bounds[0]}", *between, f"{bounds[-1]} and more"]


def delays_chart(delays: Sequence[Delays]) -> str:
    """Draw how long decisions took, a line for each producer group and topic."""
    slowest = max(one.took_ms["max"] for one in delays)
    top = next((tick for tick in _TICKS_MS[3:] if tick >= slowest), slowest)
    high = len(delays) * _ROW
    body = list(_duration_axis(top, high))
    for place, one in enumerate(delays):
        body += _delay_line(place * _ROW, one, lambda ms: _log_share(ms, top))
    said = f"{len(delays)} lines; the slowest decision took {duration(slowest)}."
    title = "Time from preparation to decision, by producer group and topic"
    return _chart("delays-chart", title, said, high + 24, body)


def _log_share(ms: int, top: int) -> float:
    """Place a time on an axis whose lengths are factors, in percent of its length."""
    return math.log10(max(ms, 1)) / math.log10(top) * 100


def _duration_axis(top: int, y: int) -> Iterator[str]:
    ticks = [tick for tick in _TICKS_MS if tick <= top]
    for tick in ticks[:: -(-len(ticks) // _LABELS_MAX)]:
        at = _log_share(tick, top)
        anchor = {1: "start", top: "end"}.get(tick, "middle")
        yield f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{y}"/>'
        text = duration(tick)
        yield f'<text class="axis" x="{at:.2f}%" y="{y + 16}" text-anchor="{anchor}">{text}</text>'


def _delay_line(y: int, one: Delays, share: Callable[[int], float]) -> Iterator[str]:
    took = {name: duration(ms) for name, ms in one.took_ms.items()}
    at = {name: f"{share(ms):.2f}%" for name, ms in one.took_ms.items()}
    said = ", ".join(f"{name} {text}" for name, text in took.items())
    yield f"<g><title>{escaped(one.producer_group)}, {escaped(one.topic)}: {said}</title>"
    names = (visible(name, _NAME_MAX) for name in (one.producer_group, one.topic))
    yield from _line(y, " · ".join(names), f"{took['p50']} · {took['p99']}")
    middle = y + 29
    for kind, start, end in (("tail", "p50", "max"), ("span", "p50", "p90")):
        yield (
            f'<line class="{kind}" x1="{at[start]}" x2="{at[end]}" y1="{middle}" y2="{middle}"/>'
        )
    yield f'<circle class="committed" cx="{at["p50"]}" cy="{middle}" r="5"/>'
    for name, wide in (("p90", 3), ("p99", 1.5)):
        yield (
            f'<rect class="committed" x="{at[name]}" y="{middle - 7}" width="{wide}" height="14"'
            f' transform="translate({-wide / 2} 0)"/>'
        )
    yield f'<circle class="hollow" cx="{at["max"]}" cy="{middle}" r="4"/></g>'


def kinds_chart(kinds: Sequence[MarkedKind]) -> str:
    """Draw how many anomalies of each kind there are; each bar leads to its rows."""
    most = max(kind.found for kind in kinds)
    body: list[str] = []
    for place, kind in enumerate(kinds):
        y = place * _ROW
        count = number(kind.found)
        body.append(f'<a href="#kind-{kind.kind}" aria-label="{kind.title}: {count}">')
        body += _line(y, kind.title, count)
        body.append(_bar(y, 0, max(kind.found / most * 100, 0.5), "anomaly-mark") + "</a>")
    said = "; ".join(f"{kind.title}: {number(kind.found)}" for kind in kinds)
    title = "Anomalies by kind"
    return _chart("kinds-chart", title, f"{said}.", len(kinds) * _ROW, body, role="group")


def places_chart(kinds: Sequence[MarkedKind]) -> str:
    """Draw where along the log the rows that are shown belong; each mark leads to its row."""
    body: list[str] = []
    for place, kind in enumerate(kinds):
        y = place * _ROW
        body += _line(y, kind.title, "")
        body.append(f'<rect class="track" x="0" y="{y + 28}" width="100%" height="2"/>')
        for mark in kind.marks:
            text = f"{mark.number}: {escaped(mark.text)}"
            body.append(
                f'<a href="#anomaly-{mark.number}" aria-label="{text}"><title>{text}</title>'
                f'<rect class="anomaly-mark" x="{mark.place * 100:.3f}%" y="{y + 22}" width="7"'
                f' height="{_BAR}" rx="2" transform="translate(-3.5 0)"/></a>'
            )
    said = "From the first byte of the log on the left to its end on the right."
    title = "Where in the log they are"
    return _chart("places-chart", title, said, len(kinds) * _ROW, body, role="group")


def _line(y: int, name: str, value: str) -> Iterator[str]:
    """Write a name on the left, and a value on the right."""
    text = escaped(name)
    share = _NAME_SHARE if value else "100%"
    yield f'<svg x="0" y="{y}" width="{share}" height="20"><text x="0" y="14">{text}</text></svg>'
    if value:
        yield f'<text x="100%" y="{y + 14}" text-anchor="end">{value}</text>'


def _bar(y: int, left: float, wide: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{left:.3f}%" y="{y + 20}" width="{wide:.3f}%" height="{_BAR}"/>'
    )


def _chart(
    identity: str,
    title: str,
    said: str,
    high: int,
    body: Iterable[str],
    kind: str = "",
    role: str = "img",
) -> str:
    spoken = f'aria-labelledby="{identity}-title" aria-describedby="{identity}-desc"'
    return (
        f'<svg class="{f"chart {kind}".strip()}" role="{role}" height="{high}"'
        f' {spoken}><title id="{identity}-title">{title}</title>'
        f'<desc id="{identity}-desc">{said}</desc>{"".join(body)}</svg>'
    )


def _class(state: str) -> str:
    return state.replace("_", "-")


def _round_up(value: int) -> int:
    """Return the next number that an axis may end with."""
    digits: int = 10 ** (len(str(value)) - 1)
    return next(step * digits for step in (1, 2, 4, 6, 8, 10) if step * digits >= max(value, 1))


def _short(value: int) -> str:
    """Write a number of an axis in at most five letters."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if value >= size:
            return f"{value / (size if unit != 'k' else 1_000):g}{unit}"
    return number(value)


def legend(classes: Mapping[str, str]) -> str:
    """Say what colours mean."""
    items = (f'<li><i class="{_class(state)}"></i>{label}</li>' for state, label in classes.items())
    return f'<ul class="legend">{"".join(items)}</ul>'
