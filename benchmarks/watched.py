"""A broker that is watched from inside while it is under load, and what its pauses came to.

What is judged is how long one pass of background work computes on the event loop: its thread's
processor time, which a busy machine lengthens little. How late the loop's timer came is told beside
it, by the wall, with what the loop computed meanwhile and what went on: it is also what the machine
and traffic made of it.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from .generator import Target
from .observed import BACKGROUND, BEAT_S, Observed, Pause, Span
from .processes import ready_fields, running
from .questions import Questions

LIMIT_MS: Final = 2.0
"""For one pass of background work on the event loop, in processor time of its thread."""
RECORD_SIZE: Final = 1_213
"""Bytes of a stored message of 1 KiB, as the generator sends it."""

_START_TIMEOUT: Final = 60.0  # seconds
_WORST: Final = 3  # pauses, and passes, of a phase that are told
_SPANS_TOLD: Final = 3  # each of those in the loop and of those beside it


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time under one kind of load."""

    name: str
    of: str  # what kind of files, or of load
    start: float  # time.monotonic, as below
    end: float
    rate: float  # messages per second, all generators
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What one phase came to."""

    phase: Phase
    beats: int
    over_5_ms: int
    over_20_ms: int
    share_999_ms: float
    longest_ms: float  # by which a beat was late
    background_ms: float  # processor time of the longest pass of background work
    passes: list[str] = field(default_factory=list)  # the longest, told
    pauses: list[str] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.phase.name,
            self.phase.of,
            f"{self.phase.rate:,.0f}",
            f"{self.beats:,}",
            str(self.over_5_ms),
            str(self.over_20_ms),
            f"{self.share_999_ms:.1f}",
            f"{self.longest_ms:.1f}",
            f"{self.background_ms:.1f}",
            f"{LIMIT_MS:.0f}",
        )

    @property
    def missed(self) -> bool:
        return self.background_ms > LIMIT_MS


def row_of(phase: Phase, observed: Observed) -> Row:
    """Sum up the pauses and passes that ended within a phase."""
    pauses = [pause for pause in observed.pauses if phase.start <= pause.end <= phase.end]
    pauses.sort(key=lambda pause: -pause.seconds)
    passes = [
        span
        for span in observed.spans
        if span.in_loop
        and span.name.startswith(BACKGROUND)
        and phase.start <= span.end <= phase.end
    ]
    passes.sort(key=lambda span: -span.processor)
    beats = max(int((phase.end - phase.start - sum(p.seconds for p in pauses)) / BEAT_S), 1)
    rank = beats // 1_000
    return Row(
        phase=phase,
        beats=beats,
        over_5_ms=sum(1 for pause in pauses if pause.seconds > 0.005),
        over_20_ms=sum(1 for pause in pauses if pause.seconds > 0.020),
        share_999_ms=pauses[rank].seconds * 1_000 if rank < len(pauses) else 0.0,
        longest_ms=pauses[0].seconds * 1_000 if pauses else 0.0,
        background_ms=passes[0].processor * 1_000 if passes else 0.0,
        passes=[_told_pass(span, observed.spans) for span in passes[:_WORST]],
        pauses=[_told_pause(pause, observed.spans) for pause in pauses[:_WORST]],
    )


def _told_pass(span: Span, spans: Sequence[Span]) -> str:
    parts = [one for one in spans if span.start <= one.start and one.end <= span.end]
    inside = sorted((one for one in parts if one is not span), key=lambda one: -one.processor)
    named = [f"{one.name} {one.processor * 1_000:.1f}" for one in inside if one.in_loop]
    within = f" ({', '.join(named[:_SPANS_TOLD])})" if named else ""
    return f"{span.name}: {span.processor * 1_000:.1f} ms computing{within}"


def _told_pause(pause: Pause, spans: Sequence[Span]) -> str:
    start = pause.end - pause.seconds - BEAT_S
    beside = [span for span in spans if span.start < pause.end and span.end > start]
    beside.sort(key=lambda span: span.start - span.end)
    told = [
        f"{span.name} {(span.end - span.start) * 1_000:.1f} ms{where}"
        for in_loop, where in ((True, ""), (False, " beside it"))
        for span in [span for span in beside if span.in_loop is in_loop][:_SPANS_TOLD]
    ]
    return (
        f"a beat {pause.seconds * 1_000:.1f} ms late, the loop computing "
        f"{pause.processor * 1_000:.1f}: {', '.join(told) or 'nothing traced'}"
    )


class Watched:
    """A running broker, and the phases it went through."""

    def __init__(self, target: Target, questions: Questions) -> None:
        self.target, self.questions = target, questions
        self.phases: list[Phase] = []


@contextmanager
def watched(home: Path, settings: Sequence[str], rows: list[Row]) -> Iterator[Watched]:
    """A broker in a process of its own; ``rows`` are there when it has stopped.

    Raises:
        ServerError: It did not start.
    """
    log, report = home / "log", home / "report.json"
    fixed = ("listenPort=0", "namesrvListenPort=0", f"storePathRootDir={home / 'store'}")
    command = [sys.executable, "-m", "benchmarks.observed", str(report)]
    command += ["--", *(part for one in (*fixed, *settings) for part in ("--set", one))]
    with running(command, log=log) as process:
        fields = ready_fields(process, log, timeout=_START_TIMEOUT)
        port = int(fields["listen"].rpartition(":")[2])
        with Questions(port) as questions:
            broker = Watched(Target(port=port, namesrv_port=port, pid=process.pid), questions)
            yield broker
    observed = msgspec.json.decode(report.read_bytes(), type=Observed)
    if observed.missing:
        print(f"not traced any more: {', '.join(observed.missing)}", file=sys.stderr)
    rows += [row_of(phase, observed) for phase in broker.phases]
