"""One script for the official broker and for halfmq, and what an operator's tool prints at each.

What the tool prints, or the fields of what a method of the Java interface returns, is compared line
by line, after addresses, times, ids and other values of the day are replaced by words; the order of
lines is the tool's. Lines that differ on purpose are listed
with the reason (`Difference`); a listed difference that no longer occurs fails as well.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfmq.client.testing import broker_process
from halfmq.remoting.fastjson import parse
from tests.support.java_clients import JavaClient, Kind, class_path, java_client
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import official_jars, rocketmq_broker

_ASK_AGAIN_S: Final = 0.3
_WORDS: Final = (
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}:\d+\b"), "ADDRESS"),
    (re.compile(r"\b[0-9A-F]{32}([0-9A-F]{24})?\b"), "ID"),  # longer with an IPv6 address
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T#]\d\d:\d\d:\d\d([.,:]\d+)?"), "TIME"),
    (re.compile(r"\b20\d{12,15}\b"), "TIME"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "MS"),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}@[\w#-]+"), "CLIENT"),
)
"""Values of the day, and the words that stand for them."""
_STACK: Final = re.compile(r"at [\w.$/]+\(|\.\.\. \d+ more")
"""A line of a stack trace; the lines that name the exceptions are compared."""


class Place(NamedTuple):
    """Where a broker and its name server are reached; halfmq is both at one address."""

    address: str
    namesrv: str


class Told(NamedTuple):
    """A command as the script has it, and what was printed."""

    command: str
    lines: list[str]


class Difference(NamedTuple):
    """Lines that only one of the two prints; `theirs` and `ours` are patterns of whole lines."""

    commands: str  # how they begin, with commas between them; empty: all
    theirs: str
    ours: str
    why: str


class Measured(NamedTuple):
    """A part of the lines of commands that no two runs share, and the word for it."""

    commands: str
    pattern: str
    word: str = "N"


class Operator:
    """Has commands of mqadmin run at one broker, beside scenarios of a Java client."""

    def __init__(self, place: Place, client: JavaClient, home: Path) -> None:
        self.place, self.client, self.home = place, client, home
        self.told: list[Told] = []
        self.called: set[str] = set()  # as in `methods`

    def ask(self, command: str, until: str = "", **values: str) -> list[str]:
        """Have a command run, again and again until it prints a pattern; return its lines.

        Names in braces are replaced: ``address``, ``home``, and ``values``.
        """
        filled = {"address": self.place.address, "home": str(self.home), **values}
        arguments = [word.format(**filled) for word in command.split()]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            (said,) = self.client.run("mqadmin", *arguments, "-n", self.place.namesrv)
            text = f"{said['text']}\n{said['failure']}".replace("]MessageTrack", "]\nMessageTrack")
            lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
            if re.search(until, "\n".join(lines)):
                told = [self._without_values(line) for line in lines if not _STACK.match(line)]
                self.told.append(Told(command, told))
                return lines
            assert time.monotonic() < deadline, f"{command}: no {until} in {lines}"
            time.sleep(_ASK_AGAIN_S)

    @cached_property
    def methods(self) -> set[str]:
        """Methods of the Java interface, each as NAME/ARGUMENTS."""
        (line,) = self.client.run("methods")
        return set(line["names"].split())

    def call(self, method: str, *arguments: object, until: str = "") -> Any:
        """Call a method of the Java interface until its result has a pattern; return the result.

        The lines that are compared are the fields of the result, or how the call fails. A method
        that this version does not have is left out.
        """
        name = f"{method}/{len(arguments)}"
        if name not in self.methods:
            return None
        self.called.add(name)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            words = [json.dumps(argument) for argument in arguments]
            (said,) = self.client.run("call", method, *words)
            if said["event"] == "returned":
                result = parse(said["json"].encode())
                lines = list(fields(result))
            else:
                result = None
                lines = f"{said['error']} {said['code']}: {said['text']}".splitlines()
            if re.search(until, "\n".join(lines)):
                command = f"{method}({', '.join(words)})"
                told = [self._without_values(line) for line in lines]
                self.told.append(Told(self._without_values(command), told))
                return result
            assert time.monotonic() < deadline, f"{method}: no {until} in {lines}"
            time.sleep(_ASK_AGAIN_S)

    def _without_values(self, line: str) -> str:
        line = line.replace(str(self.home), "HOME")
        for pattern, word in _WORDS:
            line = pattern.sub(word, line)
        return line


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Give the fields of a value of JSON, each with its path; places in lists are left out."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from fields(one, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for one in value:
            yield from fields(one, f"{path}[]")
    else:
        yield f"{path or 'result'} = {json.dumps(value)}"


def at_both(
    script: Callable[[Operator], None], version: str, home: Path, **settings: object
) -> tuple[list[Told], list[Told]]:
    """Run a script at the official broker 5.3.3 and at halfmq; return what each printed.

    Both run at the same time: most of the time they wait.
    """
    class_path(version)
    official_jars()

    def run(kind: Callable[..., AbstractContextManager[Place]]) -> list[Told]:
        folder = home / kind.__name__
        with kind(folder, **settings) as place, operator(place, version, folder) as one:
            script(one)
        return one.told

    with ThreadPoolExecutor(2) as both:
        theirs, ours = both.map(run, (official, halfmq))
    return theirs, ours


@contextmanager
def official(home: Path, **settings: object) -> Iterator[Place]:
    """The official broker, registered with its name server."""
    # Topics can be deleted only with the timer wheel.
    with rocketmq_broker(
        home / "store", home / "broker", timerWheelEnable="true", **settings
    ) as broker:
        broker.wait_for_route("TBW102")
        yield Place(broker.address, broker.namesrv)


@contextmanager
def halfmq(home: Path, **settings: object) -> Iterator[Place]:
    """A halfmq broker with a file of settings."""
    home.mkdir(parents=True, exist_ok=True)
    conf = home / "broker.conf"
    conf.touch()
    with broker_process(home / "broker", conf=conf, **settings) as broker:
        yield Place(broker.address, broker.address)


@contextmanager
def operator(place: Place, version: str, home: Path) -> Iterator[Operator]:
    """The tool and a client of a version, in one JVM."""
    (home / "conf").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "logback_tools.xml").write_text("<configuration/>")
    kind = Kind(version, (f"-Drocketmq.home.dir={home}",))
    with java_client(kind, place.namesrv, home / "client") as client:
        yield Operator(place, client, home)


def compare(
    theirs: list[Told],
    ours: list[Told],
    allowed: Sequence[Difference],
    measured: Sequence[Measured],
) -> None:
    """Assert that both were told the same, but for the lines that may differ, which do."""
    assert [one.command for one in theirs] == [one.command for one in ours]
    occurred: set[tuple[Difference, str]] = set()
    unexplained: list[str] = []
    for pair in zip(theirs, ours, strict=True):
        command = pair[0].command
        rows = [row for row in allowed if is_about(row, command)]
        left: dict[str, list[str]] = {}
        for side, told in zip(("theirs", "ours"), pair, strict=True):
            left[side] = []
            for line in _comparable(command, told.lines, measured):
                row = next((row for row in rows if _matches(getattr(row, side), line)), None)
                if row is None:
                    left[side].append(line)
                else:
                    occurred.add((row, side))
        if left["theirs"] != left["ours"]:
            only = {
                "theirs": Counter(left["theirs"]) - Counter(left["ours"]),
                "ours": Counter(left["ours"]) - Counter(left["theirs"]),
            }
            shown = "\n".join(f"  {side}: {line}" for side in only for line in only[side])
            unexplained.append(f"{command}\n{shown}")
    assert not unexplained, "\n".join(unexplained)
    for row in allowed:
        for side in ("theirs", "ours"):
            assert not getattr(row, side) or (row, side) in occurred, f"{side} has no line of {row}"


def _comparable(command: str, lines: list[str], measured: Sequence[Measured]) -> list[str]:
    for row in measured:
        if is_about(row, command):
            lines = [re.sub(row.pattern, row.word, line) for line in lines]
    return sorted(line for line in lines if line)


def is_about(row: Difference | Measured, command: str) -> bool:
    """Return whether a row is about this command."""
    return command.startswith(tuple(row.commands.split(", ")))


def _matches(pattern: str, line: str) -> bool:
    return bool(pattern) and re.fullmatch(pattern, line) is not None
