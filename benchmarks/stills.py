"""When the cores of this machine stood still or crept, as ``stills.c`` saw it beside a measurement.

The host of a virtual machine lets others have its processors, for some milliseconds or for two
hundred. Some hosts tell their guests how much of that they know of (*steal* in ``/proc/stat``), but
none tells when. And none tells when it took page tables away and every program waited at the first
touch of each of its pages; where this was written, for 20 to 100 ms, mostly while files were made
and deleted.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Final

import msgspec

from .build import build
from .processes import ServerError, log_tail, ready_fields

_START_TIMEOUT: Final = 10.0  # seconds
_END_TIMEOUT: Final = 30.0  # seconds; its threads end within one of their periods
# Seconds between two slow steps that belong together: the witness takes as long to go once through
# its memory, a quarter at a time, and each quarter is slow when it is touched first.
_SLOW_GAP_S: Final = 0.020

Stretch = tuple[float, float]
"""Start and end, seconds of ``time.monotonic``."""


class Still(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A core did not run; times are those of ``time.monotonic``."""

    core: int
    start: float
    end: float


class Stills(msgspec.Struct, frozen=True):
    """What the witness has seen."""

    refused: str  # why it saw nothing; empty when it watched
    seconds: float = 0.0  # that it was there
    cpu_seconds: float = 0.0  # that it took itself
    stolen_seconds: float = 0.0  # that all cores were away, in hundredths, as the host tells; or 0
    stills: list[Still] = msgspec.field(default_factory=list)
    slow: list[Stretch] = msgspec.field(default_factory=list)  # that memory was slow, on any core
    moved: int = 0  # times that the guest's own kernel brought that memory; not in ``slow``
    held: int = 0  # times that the kernel was busy on a core and let nobody have it; no stills
    dropped: int = 0  # stills above the number that it keeps


UNWATCHED: Final = Stills(refused="nobody watched")


def joined(stretches: Iterable[Stretch], gap: float = 0.0) -> list[Stretch]:
    """Return what any of them covers, in order, nothing twice; with gaps of so many seconds."""
    covered: list[Stretch] = []
    for start, end in sorted(stretches):
        if covered and start <= covered[-1][1] + gap:
            covered[-1] = covered[-1][0], max(end, covered[-1][1])
        else:
            covered.append((start, end))
    return covered


def overlap(start: float, end: float, covered: Sequence[Stretch]) -> float:
    """Return how many seconds between ``start`` and ``end`` are covered by what is ``joined``."""
    seconds = 0.0
    for at in range(bisect_right(covered, start, key=lambda stretch: stretch[1]), len(covered)):
        if covered[at][0] >= end:
            break
        seconds += min(end, covered[at][1]) - max(start, covered[at][0])
    return seconds


class Stillness:
    """Answers how long cores stood still, or crept, between two points in time."""

    def __init__(self, seen: Stills) -> None:
        self._stills = seen.stills
        self._slow = joined(seen.slow, _SLOW_GAP_S)
        self._any = joined([*((still.start, still.end) for still in seen.stills), *self._slow])
        self._of: dict[frozenset[int], list[Stretch]] = {}

    def of_any(self, start: float, end: float) -> float:
        """Return the seconds in which at least one core stood still, or all crept."""
        return overlap(start, end, self._any)

    def of(self, cores: Iterable[int], start: float, end: float) -> float:
        """Return the seconds in which one of these did; of none where there are none."""
        chosen = frozenset(cores)
        if chosen not in self._of:
            here = [(still.start, still.end) for still in self._stills if still.core in chosen]
            self._of[chosen] = joined([*here, *self._slow] if chosen else here)
        return overlap(start, end, self._of[chosen])

    def crept(self, start: float, end: float) -> float:
        """Return the seconds in which memory was slow."""
        return overlap(start, end, self._slow)


@contextmanager
def witness(log: Path) -> Iterator[Callable[[], Stills]]:
    """Have all cores watched from here on; what is yielded ends that and returns what was seen.

    Raises:
        CompilerMissingError: The program cannot be built.
        ServerError: It did not start; when called, it did not end as it should.
    """
    with log.open("w", encoding="utf-8") as errors:
        process = Popen([build("stills")], stdin=PIPE, stdout=PIPE, stderr=errors, text=True)

    def seen() -> Stills:
        try:
            told, _ = process.communicate(timeout=_END_TIMEOUT)  # closes its standard input
            return msgspec.json.decode(told, type=Stills)
        except (TimeoutExpired, msgspec.DecodeError) as error:
            raise ServerError(f"stills: {error}\n{log_tail(log)}") from error

    try:
        ready_fields(process, log, timeout=_START_TIMEOUT)
        yield seen
    finally:
        process.kill()  # has ended, unless something failed
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
