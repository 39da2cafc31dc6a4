"""The options of the sources, checked once and typed.

Spark hands options over as text under lower-case names. A name that no option has is refused
with the nearest one: a misspelt ``verifyCrc`` that does nothing would pass for a clean log.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote, urlsplit

from ..errors import OptionError
from ..log.segments import BATCH_ROWS
from .columns import Wanted

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
PARTITION_BYTES: Final = 128 << 20  # less costs a task's overhead more often, more balances badly

_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(\d+)\s*([bkmg]?)b?")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What one read asks for. The attribute names are the options' names in snake case."""

    path: str  # a store root or a folder of segments
    starting_offsets: int | None = None  # physical offset; None: from the first
    ending_offsets: int | None = None  # physical offset, exclusive; None: to the last
    starting_timestamp: int | None = None  # ms, when the broker stored it
    ending_timestamp: int | None = None  # ms, exclusive
    subscribe: frozenset[str] | None = None  # topics; None: all
    include_value: bool = False
    value_topics: frozenset[str] | None = None  # bodies of these topics only
    include_headers: bool = False
    verify_crc: bool = False
    max_partition_bytes: int = PARTITION_BYTES
    min_partitions: int = 1
    batch_rows: int = BATCH_ROWS
    fail_fast: bool = False  # mode=FAILFAST: corrupt bytes end the read instead of being a row
    decompress: bool = False  # give bodies as they were before they were compressed
    memory_map: bool = True  # local files
    # Of streams only:
    from_latest: bool = False  # begin with what is written from now on
    max_bytes_per_trigger: int | None = None  # None: all that there is
    fail_on_data_loss: bool = True

    @property
    def wanted(self) -> Wanted:
        return Wanted(
            value_topics=None if self.include_value else self.value_topics,
            verify_crc=self.verify_crc,
            decompress=self.decompress,
        )

    @property
    def has_times(self) -> bool:
        """Whether the read is limited to a time."""
        return self.starting_timestamp is not None or self.ending_timestamp is not None

    @property
    def has_value(self) -> bool:
        """Whether the read has a column ``value`` unless a schema says otherwise."""
        return self.include_value or self.value_topics is not None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Check the options of one read.

        Raises:
            OptionError: A name is unknown, a value is wrong, or there is no path.
        """
        read = _Reader(options, _READ_NAMES)
        if read.is_given("startingOffsets", LATEST):
            raise OptionError(f"startingOffsets={LATEST}: expected {EARLIEST} or {_A_NUMBER}")
        return cls._parsed(read)

    @classmethod
    def parse_stream(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Check the options of a stream, which begins at the end unless it is told otherwise.

        Raises:
            OptionError: See ``parse``; or the option makes no sense for a stream.
        """
        read = _Reader(options, _READ_NAMES)
        if read.is_given("endingTimestamp"):
            raise OptionError("endingTimestamp: a stream ends at an offset: endingOffsets")
        parsed = cls._parsed(read)
        is_latest = not read.is_given("startingOffsets") or parsed.from_latest
        return replace(parsed, from_latest=is_latest)

    @classmethod
    def parse_any(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Check the options as far as they mean the same to a read and to a stream.

        Raises:
            OptionError: See ``parse``.
        """
        return cls._parsed(_Reader(options, _READ_NAMES))

    @classmethod
    def parse_events(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Check the options of one read of transactions.

        Raises:
            OptionError: A name is unknown, a value is wrong, or there is no path.
        """
        return cls._parsed(_Reader(options, _EVENT_NAMES))

    @classmethod
    def _parsed(cls, read: "_Reader") -> "ReadOptions":
        from_latest = read.is_given("startingOffsets", LATEST)
        return cls(
            path=read.path("load(path): a store root or a folder of segments"),
            starting_offsets=None if from_latest else read.offset("startingOffsets", EARLIEST),
            ending_offsets=read.offset("endingOffsets", LATEST),
            starting_timestamp=read.time("startingTimestamp"),
            ending_timestamp=read.time("endingTimestamp"),
            subscribe=read.names("subscribe"),
            include_value=read.flag("includeValue"),
            value_topics=read.names("valueTopics"),
            include_headers=read.flag("includeHeaders"),
            verify_crc=read.flag("verifyCrc"),
            max_partition_bytes=read.size("maxPartitionBytes", PARTITION_BYTES),
            min_partitions=read.size("minPartitions", 1),
            batch_rows=read.size("batchRows", BATCH_ROWS),
            fail_fast=read.choice("mode", "PERMISSIVE", "FAILFAST") == "FAILFAST",
            decompress=read.flag("decompress"),
            memory_map=read.flag("memoryMap", default=True),
            from_latest=from_latest,
            max_bytes_per_trigger=(
                read.size("maxBytesPerTrigger", 1) if read.is_given("maxBytesPerTrigger") else None
            ),
            fail_on_data_loss=read.flag("failOnDataLoss", default=True),
        )


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What one read of consume queues asks for."""

    path: str  # a store root or a folder of consume queues
    subscribe: frozenset[str] | None = None  # topics; None: all
    starting_offsets: int | None = None  # queue offset, in every queue; None: from the first
    ending_offsets: int | None = None  # queue offset, exclusive; None: to the last
    max_partition_bytes: int = PARTITION_BYTES
    min_partitions: int = 1
    fail_fast: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "QueueOptions":
        """Check the options of one read.

        Raises:
            OptionError: A name is unknown, a value is wrong, or there is no path.
        """
        read = _Reader(options, _QUEUE_NAMES)
        return cls(
            path=read.path("load(path): a store root or a folder of consume queues"),
            subscribe=read.names("subscribe"),
            starting_offsets=read.offset("startingOffsets", EARLIEST, _A_QUEUE_OFFSET),
            ending_offsets=read.offset("endingOffsets", LATEST, _A_QUEUE_OFFSET),
            max_partition_bytes=read.size("maxPartitionBytes", PARTITION_BYTES),
            min_partitions=read.size("minPartitions", 1),
            fail_fast=read.choice("mode", "PERMISSIVE", "FAILFAST") == "FAILFAST",
        )


_A_NUMBER: Final = "a physical offset in bytes"
_A_QUEUE_OFFSET: Final = "a queue offset"
_QUEUE_NAMES: Final = (
    "path",
    "subscribe",
    "startingOffsets",
    "endingOffsets",
    "maxPartitionBytes",
    "minPartitions",
    "mode",
)
_EVENT_NAMES: Final = (
    "path",
    "startingOffsets",
    "endingOffsets",
    "verifyCrc",
    "maxPartitionBytes",
    "minPartitions",
    "memoryMap",
)
_READ_NAMES: Final = (
    "path",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "subscribe",
    "includeValue",
    "valueTopics",
    "includeHeaders",
    "verifyCrc",
    "decompress",
    "maxPartitionBytes",
    "minPartitions",
    "batchRows",
    "memoryMap",
    "mode",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)


def unknown(what: str, name: str, known: list[str]) -> str:
    """Say that there is no such name, and which one may have been meant."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what} {name}: {hint}"


class _Reader:
    """Reads values under their case-insensitive names; every complaint names the option."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        self._given = {name.lower(): value for name, value in options.items()}
        known = {name.lower() for name in names}
        for name in self._given:
            if name not in known:
                raise OptionError(unknown("option", name, list(names)))

    def is_given(self, name: str, value: str | None = None) -> bool:
        given = self._given.get(name.lower())
        return given is not None and (value is None or given.strip().lower() == value)

    def path(self, expected: str) -> str:
        """Return a plain path, or the URI of another file system."""
        path = self._given.get("path")
        if not path:
            raise OptionError(f"no path: name one in {expected}")
        url = urlsplit(path)
        return unquote(url.path) if url.scheme == "file" else path

    def _text(self, name: str, default: str) -> str:
        return self._given.get(name.lower(), default).strip()

    def flag(self, name: str, *, default: bool = False) -> bool:
        choices = ("true", "false") if default else ("false", "true")
        return self.choice(name, *choices) == "true"

    def choice(self, name: str, *choices: str) -> str:
        text = self._text(name, choices[0])
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise OptionError(f"{name}={text}: expected {' or '.join(choices)}")

    def names(self, name: str) -> frozenset[str] | None:
        text = self._text(name, "")
        return frozenset(part.strip() for part in text.split(",") if part.strip()) or None

    def offset(self, name: str, default: str, expected: str = _A_NUMBER) -> int | None:
        text = self._text(name, default)
        if text.lower() == default:
            return None
        if not text.isascii() or not text.isdigit():
            raise OptionError(f"{name}={text}: expected {default} or {expected}")
        return int(text)

    def time(self, name: str) -> int | None:
        text = self._text(name, "")
        if not text:
            return None
        if not text.isascii() or not text.isdigit():
            raise OptionError(f"{name}={text}: expected milliseconds since 1970")
        return int(text)

    def size(self, name: str, default: int) -> int:
        text = self._text(name, str(default)).lower()
        match = _SIZE.fullmatch(text)
        if match is None or not int(match[1]):
            raise OptionError(f"{name}={text}: expected a positive number, as in 65536 or 64m")
        return int(match[1]) * _UNITS[match[2]]
