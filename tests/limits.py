"""The table "Memory that clients can take" of docs/operations.md, from `broker.limits.kept`.

``python -m tests.limits`` writes it; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from halfmq.broker.limits.kept import LIMITS, Limit

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "operations.md"
TITLE: Final = "## Memory that clients can take\n"
HEAD: Final = (
    "| What is kept | At most | Of one connection | Beyond it | Code | `halfmq.limits.` |\n"
    "|---|---|---|---|---|---|\n"
)
UNITS: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def table() -> str:
    """Return the rows of all limits."""
    return HEAD + "".join(map(_row, LIMITS.values()))


def written(document: str) -> str:
    """Return the document with the table of the code."""
    before, title, rest = document.partition(TITLE)
    return before + title + re.sub(r"(?m)(?:^\|.*\n)+", lambda _: table(), rest, count=1)


def _row(limit: Limit) -> str:
    setting = f" (`{limit.setting}`)" if limit.setting else ""
    cells = (
        limit.what,
        _amount(limit, limit.most) + setting,
        _amount(limit, limit.of_connection) if limit.of_connection else "-",
        limit.beyond,
        f"{limit.code.name} ({limit.code.value})" if limit.code else "-",
        f"`{limit.name}`",
    )
    return f"| {' | '.join(cells)} |\n"


def _amount(limit: Limit, number: int) -> str:
    for size, unit in UNITS if limit.in_bytes else ():
        if number % size == 0:
            return f"{number // size:,} {unit}"
    return f"{number:,}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
