"""The options of the source ``rocketmq-commitlog``, checked once and typed.

Spark hands options over as text under lower-case names. A name that no option has is refused
with the nearest one: a misspelt ``verifyCrc`` that does nothing would pass for a clean log.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from .columns import Wanted
from .errors import OptionError
from .segments import BATCH_ROWS

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
    subscribe: frozenset[str] | None = None  # topics; None: all
    include_value: bool = False
    value_topics: frozenset[str] | None = None  # bodies of these topics only
    include_headers: bool = False
    verify_crc: bool = False
    max_partition_bytes: int = PARTITION_BYTES
    min_partitions: int = 1
    batch_rows: int = BATCH_ROWS
    fail_fast: bool = False  # mode=FAILFAST: corrupt bytes end the read instead of being a row

    @property
    def wanted(self) -> Wanted:
        return Wanted(
            value_topics=None if self.include_value else self.value_topics,
            verify_crc=self.verify_crc,
        )

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
        given = {name.lower(): value for name, value in options.items()}
        for name in given:
            if name not in _NAMES:
                raise OptionError(unknown("option", name, list(_NAMES.values())))
        if "path" not in given:
            raise OptionError("no path: name a store root or a folder of segments in load(path)")
        read = _Reader(given)
        return cls(
            path=_local_path(given["path"]),
            starting_offsets=read.offset("startingOffsets", EARLIEST),
            ending_offsets=read.offset("endingOffsets", LATEST),
            subscribe=read.names("subscribe"),
            include_value=read.flag("includeValue"),
            value_topics=read.names("valueTopics"),
            include_headers=read.flag("includeHeaders"),
            verify_crc=read.flag("verifyCrc"),
            max_partition_bytes=read.size("maxPartitionBytes", PARTITION_BYTES),
            min_partitions=read.size("minPartitions", 1),
            batch_rows=read.size("batchRows", BATCH_ROWS),
            fail_fast=read.choice("mode", "PERMISSIVE", "FAILFAST") == "FAILFAST",
        )


_NAMES: Final = {
    name.lower(): name
    for name in (
        "path",
        "startingOffsets",
        "endingOffsets",
        "subscribe",
        "includeValue",
        "valueTopics",
        "includeHeaders",
        "verifyCrc",
        "maxPartitionBytes",
        "minPartitions",
        "batchRows",
        "mode",
    )
}


def unknown(what: str, name: str, known: list[str]) -> str:
    """Say that there is no such name, and which one may have been meant."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what} {name}: {hint}"


class _Reader:
    """Reads values under their case-insensitive names; every complaint names the option."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def _text(self, name: str, default: str) -> str:
        return self._given.get(name.lower(), default).strip()

    def flag(self, name: str) -> bool:
        return self.choice(name, "false", "true") == "true"

    def choice(self, name: str, *choices: str) -> str:
        text = self._text(name, choices[0])
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise OptionError(f"{name}={text}: expected {' or '.join(choices)}")

    def names(self, name: str) -> frozenset[str] | None:
        text = self._text(name, "")
        return frozenset(part.strip() for part in text.split(",") if part.strip()) or None

    def offset(self, name: str, default: str) -> int | None:
        text = self._text(name, default)
        if text.lower() == default:
            return None
        if not text.isascii() or not text.isdigit():
            raise OptionError(f"{name}={text}: expected {default} or a physical offset in bytes")
        return int(text)

    def size(self, name: str, default: int) -> int:
        text = self._text(name, str(default)).lower()
        match = _SIZE.fullmatch(text)
        if match is None or not int(match[1]):
            raise OptionError(f"{name}={text}: expected a positive number, as in 65536 or 64m")
        return int(match[1]) * _UNITS[match[2]]


def _local_path(path: str) -> str:
    """Take a plain path or a file: URL; other file systems cannot be read yet.

    Raises:
        OptionError: The path names another file system, or several paths.
    """
    url = urlsplit(path)
    if url.scheme == "file":
        return unquote(url.path)
    if len(url.scheme) > 1:  # one letter is a Windows drive
        raise OptionError(f"path={path}: only local paths can be read, not {url.scheme}:")
    return path
