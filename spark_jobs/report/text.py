"""Format texts and numbers of a report.

Clients choose the names of topics, groups and keys. So every text that a template prints goes
through ``visible`` and is escaped: no markup, nothing invisible, no change of text direction, no
endless line.
"""

import unicodedata
from typing import Final

from markupsafe import Markup

TEXT_MAX: Final = 200  # characters of one text; RocketMQ allows names of 255, nobody checks ours
_HEAD: Final = 130  # of a longer text this much is shown,
_TAIL: Final = 50  # and this much of its end, where names differ
_MARKS_MAX: Final = 3  # accents on one letter; more of them cover the lines above

_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def isolated(text: str, most: int = TEXT_MAX) -> Markup:
    """Return a name for HTML that does not change the text direction around it."""
    return Markup("<bdi>{}</bdi>").format(visible(text, most))


def visible(text: str, most: int = TEXT_MAX) -> str:
    """Return a text in which everything shows: control characters as escapes, the middle cut."""
    if len(text) <= most:
        return _printable(text)
    head, tail = most * _HEAD // TEXT_MAX, most * _TAIL // TEXT_MAX
    cut = f"{_printable(text[:head])}…{_printable(text[-tail:])}"
    return f"{cut} ({len(text):,} characters)" if most >= TEXT_MAX else cut


def _printable(text: str) -> str:
    shown: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in {"Mn", "Me"} else 0
        harmless = character.isprintable() and marks <= _MARKS_MAX
        shown.append(character if harmless else character.encode("unicode_escape").decode())
    return "".join(shown)


def number(value: int) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,}"


def many(value: int, noun: str) -> str:
    """Return a number of things whose plural ends in s."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def size(count: int) -> str:
    """Return a number of bytes in the unit that a person would use."""
    for bytes_, unit in _SIZES:
        if count >= bytes_:
            return f"{count / bytes_:,.1f} {unit}"
    return many(count, "byte")
