"""How settings are declared: a dataclass field `setting(KEY, default, KIND, ...)` in `config`.

The kind parses the text of `broker.conf` and describes what it expects, for the error about a wrong
value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")


class BadValueError(ValueError):
    """A text is not a valid value of its kind."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A type of setting: how its text is parsed and shown, and what it expects."""

    expected: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    is_secret: bool = False
    """Whether listings and errors hide the value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of `broker.conf`."""

    key: str
    attribute: str
    kind: ValueKind
    default: Any
    note: str
    """Its effect, in the words of `broker.conf`."""
    is_live: bool
    """Whether it can be changed while the broker runs."""
    live_min: int
    """A lower value than this, and than the present one, takes effect at a start only."""


_METADATA_KEY: Final = "halfmq.setting"


def setting(
    key: str, default: T, kind: ValueKind, note: str, *, live: bool = False, live_min: int = 0
) -> T:
    """Declare a field that `broker.conf` sets by `key`; `note` is its comment there.

    A `live` setting can be changed while the broker runs; the part that uses it has `configure`.
    With `live_min`, a request cannot set it so low that messages are deleted or refused at once.
    """
    made: T = field(
        default=default,
        repr=not kind.is_secret,
        metadata={_METADATA_KEY: (key, kind, note, live, live_min)},
    )
    return made


def settings_of(section: type) -> list[Setting]:
    """Return the settings declared in one section, in the order of declaration."""
    fields = section.__dataclass_fields__  # type: ignore[attr-defined]
    return [
        Setting(made[0], name, made[1], item.default, *made[2:])
        for name, item in fields.items()
        if (made := item.metadata.get(_METADATA_KEY)) is not None
    ]


def integer(low: int, high: int, unit: str = "") -> ValueKind:
    """Accept a whole number from `low` to `high`."""
    expected = f"a whole number from {low} to {high}" + (f" ({unit})" if unit else "")

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,19}", text) or not low <= int(text) <= high:
            raise BadValueError(text)
        return int(text)

    return ValueKind(expected, parse)


_DURATION_UNITS_MS: Final = {
    "": 1,
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def duration(low_ms: int, high_ms: int) -> ValueKind:
    """Accept a time in milliseconds, as RocketMQ does, or with a unit: `6000`, `6s`, `2m`."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d{1,15})(|ms|s|m|h|d)", text)
        if match is None:
            raise BadValueError(text)
        value = int(match[1]) * _DURATION_UNITS_MS[match[2]]
        if not low_ms <= value <= high_ms:
            raise BadValueError(text)
        return value

    expected = (
        f"milliseconds from {low_ms} to {high_ms}, or a number with a unit (ms, s, m, h, d) like 6s"
    )
    return ValueKind(expected, parse)


def _parse_switch(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise BadValueError(text)
    return lowered == "true"


SWITCH: Final = ValueKind(
    "true or false", _parse_switch, lambda value: "true" if value else "false"
)


def pattern(regex: str, expected: str) -> ValueKind:
    """Accept a text that `regex` matches as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(regex, text):
            raise BadValueError(text)
        return text

    return ValueKind(expected, parse)


def names(name: str, expected: str) -> ValueKind:
    """Accept any number of names, separated by semicolons, that each match the regex `name`."""

    def parse(text: str) -> frozenset[str]:
        parts = frozenset(part.strip() for part in text.split(";")) - {""}
        if not all(re.fullmatch(name, part) for part in parts):
            raise BadValueError(text)
        return parts

    return ValueKind(expected, parse, lambda value: ";".join(sorted(value)))


def checked(check: Callable[[str], object], expected: str) -> ValueKind:
    """Accept a text for which `check` does not raise ValueError."""

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise BadValueError(text) from error
        return text

    return ValueKind(expected, parse)


def choice(options: type[T]) -> ValueKind:
    """Accept a member of a string enumeration, in upper or lower case."""
    names: list[str] = [member.value for member in options]  # type: ignore[attr-defined]

    def parse(text: str) -> T:
        if text.upper() not in names:
            raise BadValueError(text)
        return options(text.upper())  # type: ignore[call-arg]

    return ValueKind(" or ".join(names), parse)


def secret(parse: Callable[[str], Any], expected: str) -> ValueKind:
    """Accept a text for which `parse` does not raise ValueError; it is never shown."""

    def parse_quietly(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise BadValueError(HIDDEN) from None  # the cause would show the text

    return ValueKind(expected, parse_quietly, lambda value: HIDDEN if value else "", is_secret=True)


HIDDEN: Final = "***"
"""Stands for the value of a secret setting."""


def _parse_directory(text: str) -> Path:
    if not text or "\0" in text or "," in text:
        raise BadValueError(text)
    return Path(text).expanduser()


DIRECTORY: Final = ValueKind(
    "the path of one directory (~ is the home directory)",
    _parse_directory,
    lambda value: "" if value is None else str(value),
)


def _parse_file(text: str) -> Path:
    if not text or "\0" in text:
        raise BadValueError(text)
    return Path(text).expanduser()


FILE: Final = ValueKind(
    "the path of a file (~ is the home directory)",
    _parse_file,
    lambda value: "" if value is None else str(value),
)
