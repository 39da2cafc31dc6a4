"""Output of the command ``halfmq``: lines, tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

KEYS_SHOWN: Final = 24
"""Characters of the keys in a table."""

ROWS_AT_ONCE: Final = 500
"""Rows of a long table that are printed together, with columns of one width."""


def print_line(text: str) -> None:
    """Print a line on standard output."""
    sys.stdout.write(text + "\n")


def print_error(text: str) -> None:
    """Print an error message on standard error, after what standard output has buffered."""
    sys.stdout.flush()
    sys.stderr.write(f"halfmq: {text}\n")


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON; data classes as objects, times in ISO 8601."""
    print_line(json.dumps(value, indent=indent, default=_plain))


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Enum | Path):
        return str(value)
    return list(value)  # type: ignore[call-overload]


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under column titles; no titles: without them."""
    from rich.cells import cell_len  # noqa: PLC0415 -- not needed for JSON

    cells = [
        [printable(str(cell)) for cell in row] for row in ([titles] if titles else []) + [*rows]
    ]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        # Lines are as long as they need to be: terminals wrap them, and programs cut them.
        padded = (
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        )
        print_line("  ".join(padded).rstrip())


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Print names and values, one pair a line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print_line(f"{name.ljust(width)}  {printable(str(value))}".rstrip())


def format_duration(seconds: float) -> str:
    """Format a duration as ``42 s``, ``12 min``, ``5 h 12 min`` or ``3 d 4 h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def format_time(time: datetime | None) -> str:
    """Format a time in UTC, to the second; ``-`` if there is none."""
    return "-" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def cut(text: str, length: int = KEYS_SHOWN) -> str:
    """Return a text with its end replaced by ``…`` if it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def printable(text: str) -> str:
    """Replace control characters, so that foreign text such as keys cannot control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
