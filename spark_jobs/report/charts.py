"""The charts of a report: inline SVG made by pygal, coloured by the style sheet of the page."""

import sys
from typing import Final
from xml.etree import ElementTree as ET

import pygal
from markupsafe import Markup

from ..audit.statistics import Timeline
from ..times import moment
from .text import number

# pygal leaves an import hook of the kind that Python 3.12 dropped; 3.11 warns of it at each import.
sys.meta_path[:] = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]

# Units of the drawing. A phone shows letters at 85 % of their size, a desk two charts side by side.
_WIDTH: Final = 420
_HEIGHT: Final = 220
_LABEL_MAX: Final = 20  # characters; times have fewer
_TIMES: Final = 3  # labels below a chart: as many as a phone can hold
# What pygal adds for its own script and style; the page has its own, and a policy against others.
_UNWANTED: Final = ("defs", "desc", "title")


def states_chart(timeline: Timeline, labels: dict[str, str]) -> Markup:
    """Draw how many transactions were prepared in each interval, by state."""
    chart = pygal.StackedBar(_config(timeline, "states"), spacing=2)
    for state, counts in timeline.prepared.items():
        chart.add(labels[state], counts)
    said = ", ".join(
        f"{number(sum(counts))} {labels[state]}" for state, counts in timeline.prepared.items()
    )
    title = "Transactions by time of preparation and by state"
    return _svg(chart, "states-chart", title, f"In all: {said}.")


def undecided_chart(timeline: Timeline) -> Markup:
    """Draw how many transactions were undecided at the end of each interval."""
    waiting = [max(count, 0) for count in timeline.undecided]
    chart = pygal.Line(_config(timeline, "undecided"), fill=True, show_dots=False)
    chart.add("undecided", waiting)
    said = f"At most {number(max(waiting))}, in the end {number(waiting[-1])}."
    return _svg(chart, "undecided-chart", "Undecided transactions over time", said)


def _config(timeline: Timeline, name: str) -> pygal.Config:
    return pygal.Config(
        width=_WIDTH,
        height=_HEIGHT,
        classes=("chart", name),
        show_legend=False,  # the page has one, whose letters wrap
        x_labels=[
            moment(timeline.start_ms + place * timeline.width_ms, timeline.width_ms)
            for place in range(len(timeline.decided))
        ],
        x_labels_major_count=min(_TIMES, len(timeline.decided)),
        show_minor_x_labels=False,
        value_formatter=lambda count: number(int(count)),
        min_scale=1,
        max_scale=4,
        include_x_axis=True,
        truncate_label=_LABEL_MAX,
        margin=4,
        margin_right=28,  # half of the last label
    )


def _svg(chart: "pygal.Graph", identity: str, title: str, said: str) -> Markup:
    root = chart.render_tree()
    for element in [*root.iter()]:
        for child in [child for child in element if _is_unwanted(child)]:
            element.remove(child)
        for attribute in ("style", "id"):
            element.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{identity}-title")
    root.set("aria-describedby", f"{identity}-said")
    for place, (tag, name, text) in enumerate((("title", "title", title), ("desc", "said", said))):
        about = ET.Element(tag, {"id": f"{identity}-{name}"})
        about.text = text
        root.insert(place, about)
    text = ET.tostring(root, "unicode", short_empty_elements=True)
    return Markup(text)  # noqa: S704  made by a serializer, from numbers


def _is_unwanted(element: ET.Element) -> bool:
    tag, kind = str(element.tag), element.get("class", "")  # of a comment the tag is a function
    return (
        element.tag != tag
        or tag.rpartition("}")[2] in _UNWANTED
        or "overlay" in kind
        or kind == "titles"
    )
