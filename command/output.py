"""Output of the command ``halfmq``: lines, tables and errors, and its exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2


def print_line(text: str) -> None:
    """Print a line on standard output."""
    sys.stdout.write(text + "\n")


def print_error(text: str) -> None:
    """Print an error message on standard error, after what standard output has buffered."""
    sys.stdout.flush()
    sys.stderr.write(f"halfmq: {text}\n")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under column titles."""
    lines = [titles, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def print_pairs(pairs: dict[str, str]) -> None:
    """Print names and values, one pair a line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print_line(f"{name.ljust(width)}  {printable(value)}".rstrip())


def report_done(options: argparse.Namespace, fields: dict[str, Any], text: str) -> int:
    """Print the result of a change, as JSON or as text, and return the exit code."""
    print_line(json.dumps(fields) if options.json else text)
    return DONE


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


def printable(text: str) -> str:
    """Replace control characters, so that foreign text such as keys cannot control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
