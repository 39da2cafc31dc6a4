"""Tables that jobs print for people: facts with a label each, and lists of rows."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from .text import visible

VALUE_MAX: Final = 1_000  # characters; texts of clients may be longer

Rows = list[dict[str, Any]]

ROWS_MAX: Final = 50  # of one list; a terminal holds no more, and files have all


def fact(label: str, value: object) -> str:
    """Return a line with a label and a value."""
    return f"{label:13} {_text(value)}"


def listing(
    rows: Rows, *names: str, title: str | None = None, total: int | None = None
) -> Iterator[str]:
    """Yield an empty line, column names and the first ``ROWS_MAX`` rows; nothing without rows.

    Columns of numbers are aligned to the right, all others to the left. ``total`` is how many rows
    there are, if not all are given.
    """
    shown = rows[:ROWS_MAX]
    if not shown:
        return
    columns = []
    for name in names:
        values = [row[name] for row in shown]
        cells = [name, *map(_text, values)]
        side = ">" if any(isinstance(value, int | float) for value in values) else "<"
        columns.append([f"{cell:{side}{max(map(len, cells))}}" for cell in cells])
    yield ""
    if title:
        yield title
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()
    left = (len(rows) if total is None else total) - len(shown)
    if left:
        yield f"and {left:,} more: see --json or --output"


def _text(value: object) -> str:
    match value:
        case None | []:
            return "-"
        case datetime():
            return value.isoformat(" ", "seconds")
        case float():
            return f"{value:,.2f}"
        case int():
            return f"{value:,}"
        case [*places]:
            return visible(", ".join(map(str, places)), VALUE_MAX)
    return visible(str(value), VALUE_MAX)
