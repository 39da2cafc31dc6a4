"""A broker that is watched from inside while it is under load, and what its pauses came to."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from .generator import Target
from .observed import BEAT_S, Observed, Pause, Span
from .processes import ready_fields, running
from .questions import Questions

LIMIT_MS: Final = 20.0
"""For the longest pause, on a machine that does nothing else."""
RECORD_SIZE: Final = 1_213
"""Bytes of a stored message of 1 KiB, as the generator sends it."""

_START_TIMEOUT: Final = 60.0  # seconds
_WORST: Final = 3  # pauses of a phase of which the surroundings are told
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
    is_limited: bool = True  # whether the limit holds for it


@dataclass(frozen=True, slots=True)
class Moment:
    """One long pause, and what went on."""

    ms: float
    processor_ms: float
    queued_ms: float
    others_queued_ms: float
    meanwhile: list[str]

    def __str__(self) -> str:
        what = ", ".join(self.meanwhile) or "nothing traced"
        return (
            f"{self.ms:.1f} ms, of them computing {self.processor_ms:.1f}, waiting for a processor "
            f"{self.queued_ms:.1f}, another thread doing so {self.others_queued_ms:.1f}; {what}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What one phase came to."""

    phase: Phase
    beats: int
    over_5_ms: int
    over_20_ms: int
    share_999_ms: float
    longest_ms: float
    longest_without_queue_ms: float
    worst: list[Moment] = field(default_factory=list)

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
            f"{self.longest_without_queue_ms:.1f}",
            f"{LIMIT_MS:.0f}" if self.phase.is_limited else "",
        )

    @property
    def missed(self) -> bool:
        return self.phase.is_limited and self.longest_without_queue_ms > LIMIT_MS


def row_of(phase: Phase, observed: Observed) -> Row:
    """Sum up the pauses that ended within a phase."""
    pauses = [pause for pause in observed.pauses if phase.start <= pause.end <= phase.end]
    lost = sum(pause.seconds for pause in pauses)
    beats = max(int((phase.end - phase.start - lost) / BEAT_S), 1)
    ordered = sorted((pause.seconds for pause in pauses), reverse=True)
    rank = beats // 1_000
    worst = sorted(pauses, key=_without_queue, reverse=True)[:_WORST]
    return Row(
        phase=phase,
        beats=beats,
        over_5_ms=sum(1 for seconds in ordered if seconds > 0.005),
        over_20_ms=sum(1 for seconds in ordered if seconds > 0.020),
        share_999_ms=ordered[rank] * 1_000 if rank < len(ordered) else 0.0,
        longest_ms=ordered[0] * 1_000 if ordered else 0.0,
        longest_without_queue_ms=_without_queue(worst[0]) * 1_000 if worst else 0.0,
        worst=[_moment(pause, observed.spans) for pause in worst],
    )


def _without_queue(pause: Pause) -> float:
    """What is left of a pause on a machine that does nothing else."""
    return max(pause.seconds - pause.queued - pause.others_queued, 0.0)


def _moment(pause: Pause, spans: Sequence[Span]) -> Moment:
    start = pause.end - pause.seconds - BEAT_S
    beside = [span for span in spans if span.start < pause.end and span.end > start]
    beside.sort(key=lambda span: span.start - span.end)
    in_loop = [span for span in beside if span.in_loop][:_SPANS_TOLD]
    on_threads = [span for span in beside if not span.in_loop][:_SPANS_TOLD]
    told = [
        f"{span.name} {(span.end - span.start) * 1_000:.1f} ms"
        + ("" if span.in_loop else " beside it")
        for span in (*in_loop, *on_threads)
    ]
    return Moment(
        pause.seconds * 1_000,
        pause.processor * 1_000,
        pause.queued * 1_000,
        pause.others_queued * 1_000,
        told,
    )


class Watched:
    """A running broker, and the phases it went through."""

    def __init__(self, target: Target, questions: Questions) -> None:
        self.target, self.questions = target, questions
        self.phases: list[Phase] = []


@contextmanager
def watched(
    home: Path, settings: Sequence[str], rows: list[Row], *, stacks: bool = False
) -> Iterator[Watched]:
    """A broker in a process of its own; ``rows`` are there when it has stopped.

    Raises:
        ServerError: It did not start.
    """
    log, report = home / "log", home / "report.json"
    fixed = ("listenPort=0", "namesrvListenPort=0", f"storePathRootDir={home / 'store'}")
    command = [sys.executable, "-m", "benchmarks.observed", str(report)]
    command += ["--stacks"] if stacks else []
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
    if stacks:
        print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    rows += [row_of(phase, observed) for phase in broker.phases]
