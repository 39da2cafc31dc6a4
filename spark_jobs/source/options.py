"""The options of the sources: each is a field of a dataclass, which names its parser.

Spark passes options as text under lower-case names. An unknown name is an error that suggests the
nearest one: a misspelt ``verifyCrc`` that does nothing would pass for a clean log.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Self
from urllib.parse import unquote, urlsplit

from ..errors import OptionError
from ..log.segment_reader import BATCH_ROWS

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
PARTITION_BYTES: Final = 128 << 20  # less costs a task's overhead more often, more balances badly
_FROM_LATEST: Final = -1  # as starting offset: begin with what is written from now on

_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MODES: Final = ("PERMISSIVE", "FAILFAST")
_SIZE: Final = re.compile(r"(\d+)\s*([bkmg]?)b?")

_OF_TABLES: Final = {"owner", "provider"}  # what Spark adds to the options of a new table
_NO_TABLES: Final = (
    "Spark does not give the options of a table to a source in Python, so the table could not be"
    " read: create a temporary view instead of a table"
)

Parser = Callable[[str], object]  # raises ValueError with what it expects


def _choice(*choices: str) -> Parser:
    def parse(text: str) -> str:
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ValueError(" or ".join(choices))

    return parse


def _flag(*choices: str) -> Parser:
    return lambda text: _choice(*choices)(text) == "true"


def _names(text: str) -> frozenset[str] | None:
    return frozenset(part.strip() for part in text.split(",") if part.strip()) or None


def _number(expected: str, words: Mapping[str, int | None]) -> Parser:
    def parse(text: str) -> int | None:
        if text.lower() in words:
            return words[text.lower()]
        if not text.isascii() or not text.isdigit():
            raise ValueError(expected)
        return int(text)

    return parse


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.lower())
    if match is None or not int(match[1]):
        raise ValueError("a positive number, as in 65536 or 64m")
    return int(match[1]) * _UNITS[match[2]]


def path_of(text: str) -> str:
    """Return the path in a URL of a local file; anything else is returned as it is."""
    url = urlsplit(text)
    return unquote(url.path) if url.scheme == "file" else text


def _paths(text: str) -> tuple[str, ...]:
    return tuple(map(path_of, json.loads(text)))


def parse_levels(text: str) -> tuple[int, ...]:
    """Read delay levels, as in a broker's ``messageDelayLevel``, in ms.

    Raises:
        ValueError: There is none, or one is no number with a unit.
    """
    found = [_LEVEL.fullmatch(level) for level in text.split()]
    known = [match for match in found if match is not None]
    if not known or len(known) < len(found):
        raise ValueError("delay levels, as in '1s 5s 10m 2h'")
    return tuple(int(match[1]) * _LEVEL_UNITS_MS[match[2]] for match in known)


_LEVEL: Final = re.compile(r"(\d{1,12})(ms|[smhd])")
_LEVEL_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DELAY_LEVELS_MS: Final = parse_levels(DELAY_LEVELS)  # both brokers' defaults

_TIME: Final = _number("milliseconds since 1970", {"": None})
_START_EXPECTED: Final = f"{EARLIEST} or a physical offset in bytes"
_START: Final = _number(_START_EXPECTED, {EARLIEST: None, LATEST: _FROM_LATEST})
_END: Final = _number(f"{LATEST} or a physical offset in bytes", {LATEST: None})
_QUEUE_START: Final = _number(f"{EARLIEST} or a queue offset", {EARLIEST: None})
_QUEUE_END: Final = _number(f"{LATEST} or a queue offset", {LATEST: None})


def _option(parse: Parser, default: Any) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every source."""

    path_holds: ClassVar[str]

    path: str = _option(path_of, "")
    paths: tuple[str, ...] = _option(_paths, ())  # Spark's name for the list that load() was given
    max_partition_bytes: int = _option(_size, PARTITION_BYTES)
    min_partitions: int = _option(_size, 1)

    def partition_size(self, total: int) -> int:
        """Return how many bytes one task reads, of so many in all."""
        return min(self.max_partition_bytes, max(1, -(-total // self.min_partitions)))

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Check options under their case-insensitive names: those of the fields, in camel case.

        Raises:
            OptionError: A name is unknown, a value is wrong, or there is no path.
        """
        if set(map(str.lower, options)) >= _OF_TABLES:
            raise OptionError(_NO_TABLES)
        known = {_camel_case(one.name): one for one in fields(cls)}
        by_lower = {name.lower(): name for name in known}
        values: dict[str, Any] = {}
        for given, text in options.items():
            name = by_lower.get(given.lower())
            if name is None:
                raise OptionError(unknown("option", given.lower(), list(known)))
            try:
                values[known[name].name] = known[name].metadata["parse"](text.strip())
            except ValueError as error:
                raise OptionError(f"{name}={text.strip()}: expected {error}") from error
        if not values.get("path") and not values.get("paths"):
            raise OptionError(f"no path: name one in load(path): {cls.path_holds}")
        return cls(**values)

    @property
    def places(self) -> tuple[str, ...]:
        """All paths that are read."""
        return self.paths or (self.path,)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions(Options):
    """The options of one read of consume queues."""

    path_holds = "a store root or a folder of consume queues"

    subscribe: frozenset[str] | None = _option(_names, None)  # topics; None: all
    # Queue offsets, the same for every queue:
    starting_offsets: int | None = _option(_QUEUE_START, None)
    ending_offsets: int | None = _option(_QUEUE_END, None)  # exclusive
    mode: str = _option(_choice(*_MODES), _MODES[0])

    @property
    def fail_fast(self) -> bool:
        """Whether a corrupt entry ends the read instead of being a row."""
        return self.mode == _MODES[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions(Options):
    """The options of every read of the log."""

    path_holds = "a store root or a folder of segments"

    starting_offsets: int | None = _option(_START, None)  # physical offset; None: from the first
    ending_offsets: int | None = _option(_END, None)  # physical, exclusive; None: to the last
    verify_crc: bool = _option(_flag("false", "true"), default=False)
    memory_map: bool = _option(_flag("true", "false"), default=True)  # local files
    delay_levels: tuple[int, ...] = _option(parse_levels, DELAY_LEVELS_MS)  # ms
    # Of streams only:
    max_bytes_per_trigger: int | None = _option(_size, None)  # None: all that there is
    fail_on_data_loss: bool = _option(_flag("true", "false"), default=True)

    @property
    def from_latest(self) -> bool:
        """Whether a stream begins with what is written from now on."""
        return self.starting_offsets == _FROM_LATEST

    @classmethod
    def parse_batch(cls, options: Mapping[str, str]) -> Self:
        """Check the options of one read.

        Raises:
            OptionError: See ``parse``; or the option makes no sense for a batch.
        """
        parsed = cls.parse(options)
        if parsed.from_latest:
            raise OptionError(f"startingOffsets={LATEST}: expected {_START_EXPECTED}")
        return parsed

    @classmethod
    def parse_stream(cls, options: Mapping[str, str]) -> Self:
        """Check the options of a stream, which begins at the end by default.

        Raises:
            OptionError: See ``parse``.
        """
        parsed = cls.parse(options)
        if parsed.paths:
            raise OptionError("a stream follows one log: name a single path")
        if "startingoffsets" in map(str.lower, options):
            return parsed
        return replace(parsed, starting_offsets=_FROM_LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(LogOptions):
    """The options of a read or a stream of the log."""

    starting_timestamp: int | None = _option(_TIME, None)  # ms, when the broker stored it
    ending_timestamp: int | None = _option(_TIME, None)  # ms, exclusive
    subscribe: frozenset[str] | None = _option(_names, None)  # topics; None: all
    include_value: bool = _option(_flag("false", "true"), default=False)
    value_topics: frozenset[str] | None = _option(_names, None)  # bodies of these topics only
    include_headers: bool = _option(_flag("false", "true"), default=False)
    decompress: bool = _option(_flag("false", "true"), default=False)
    batch_rows: int = _option(_size, BATCH_ROWS)
    mode: str = _option(_choice(*_MODES), _MODES[0])

    @property
    def bodies_of(self) -> frozenset[str] | None:
        """The topics whose bodies are read; None: all."""
        return None if self.include_value else self.value_topics

    @property
    def has_times(self) -> bool:
        """Whether the read is limited to a time."""
        return self.starting_timestamp is not None or self.ending_timestamp is not None

    @property
    def has_value(self) -> bool:
        """Whether the read has a column ``value`` unless a schema says otherwise."""
        return self.include_value or self.value_topics is not None

    @property
    def fail_fast(self) -> bool:
        """Whether corrupt bytes end the read instead of being a row."""
        return self.mode == _MODES[1]

    @classmethod
    def parse_stream(cls, options: Mapping[str, str]) -> Self:
        """Check the options of a stream.

        Raises:
            OptionError: See ``parse``; or the option makes no sense for a stream.
        """
        parsed = super(ReadOptions, cls).parse_stream(options)  # slots: the class was made anew
        if parsed.ending_timestamp is not None:
            raise OptionError("endingTimestamp: a stream ends at an offset: endingOffsets")
        return parsed


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def unknown(what: str, name: str, known: list[str]) -> str:
    """Say that there is no such name, and which one may have been meant."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what} {name}: {hint}"
