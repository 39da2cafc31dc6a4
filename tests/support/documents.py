"""Examples in Markdown pages: what they print is beside them, and running them prints that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"`([\w./]+\.py)`")
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


class Example(NamedTuple):
    """A block of code, and the block of output that follows it."""

    language: str
    code: str
    output: str | None
    file: str | None = None
    """The file whose content it is, if the line before it names one: "`shop.py`:"."""


def examples(page: str) -> list[Example]:
    """Read the examples of a page, by its path from the root of the repository."""
    return examples_of((ROOT / page).read_text(encoding="utf-8"))


def examples_of(text: str) -> list[Example]:
    """Read the examples of a part of a page."""
    found: list[Example] = []
    last_end = 0
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        if language != "text":
            before = text[last_end : block.start()].rstrip().rpartition("\n")[2]
            files = _FILE.findall(before) if before.endswith(":") else []
            found.append(Example(language, content, None, files[0] if files else None))
        elif found and not text[last_end : block.start()].strip():
            found[-1] = found[-1]._replace(output=content)
        last_end = block.end()
    return found


def comparable(output: str) -> str:
    """Replace ids, numbers, times and widths of columns, which differ from run to run."""
    without_ids = re.sub(r"\b[0-9A-F]{24,}\b", "ID", output)
    without_numbers = re.sub(r"\d[\d,.]*", "N", without_ids)
    # A check is shown as due "now" in its last second, which a busy machine reaches.
    without_times = without_numbers.replace("in N s", "now")
    return re.sub(r"^ +", "", re.sub(r" +", " ", without_times), flags=re.MULTILINE).strip()
