"""A traced broker under load, and the figures of each phase of the load.

The limit is for how long one pass of background work computes on the event loop, in processor time
of its thread, which other load on the machine changes little. The lag of the event loop, in wall
time, is printed beside it without a limit, with the spans around it: it also depends on the machine
and on the traffic.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from .generator import Target
from .processes import ready_fields, running
from .questions import Questions
from .traced_broker import BACKGROUND, PROBE_INTERVAL_S, Pause, Span, Trace

LIMIT_MS: Final = 2.0
"""For one pass of background work on the event loop, in processor time of its thread."""
RECORD_SIZE: Final = 1_213
"""Bytes of a stored message of 1 KiB, as the generator sends it."""

_START_TIMEOUT: Final = 60.0  # seconds
_WORST: Final = 3  # pauses and passes described per phase
_SPANS_TOLD: Final = 3  # each on the loop's thread and on others


@dataclass(frozen=True, slots=True)
class Phase:
    """A period under one kind of load."""

    name: str
    of: str  # kind of files or of load
    start: float  # time.monotonic, as below
    end: float
    rate: float  # messages per second, all generators
    note: str = ""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The figures of one phase."""

    phase: Phase
    probes: int
    over_5_ms: int
    over_20_ms: int
    share_999_ms: float
    longest_ms: float  # longest lag
    background_ms: float  # processor time of the longest pass of background work
    passes: list[str] = field(default_factory=list)  # descriptions of the longest
    pauses: list[str] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.phase.name,
            self.phase.of,
            f"{self.phase.rate:,.0f}",
            f"{self.probes:,}",
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


def row_of(phase: Phase, trace: Trace) -> PhaseRow:
    """Return the figures of the pauses and passes that ended within a phase."""
    pauses = [pause for pause in trace.pauses if phase.start <= pause.end <= phase.end]
    pauses.sort(key=lambda pause: -pause.seconds)
    passes = [
        span
        for span in trace.spans
        if span.in_loop
        and span.name.startswith(BACKGROUND)
        and phase.start <= span.end <= phase.end
    ]
    passes.sort(key=lambda span: -span.processor)
    probes = max(
        int((phase.end - phase.start - sum(p.seconds for p in pauses)) / PROBE_INTERVAL_S), 1
    )
    rank = probes // 1_000
    return PhaseRow(
        phase=phase,
        probes=probes,
        over_5_ms=sum(1 for pause in pauses if pause.seconds > 0.005),
        over_20_ms=sum(1 for pause in pauses if pause.seconds > 0.020),
        share_999_ms=pauses[rank].seconds * 1_000 if rank < len(pauses) else 0.0,
        longest_ms=pauses[0].seconds * 1_000 if pauses else 0.0,
        background_ms=passes[0].processor * 1_000 if passes else 0.0,
        passes=[_describe_pass(span, trace.spans) for span in passes[:_WORST]],
        pauses=[_describe_pause(pause, trace.spans) for pause in pauses[:_WORST]],
    )


def _describe_pass(span: Span, spans: Sequence[Span]) -> str:
    parts = [one for one in spans if span.start <= one.start and one.end <= span.end]
    inside = sorted((one for one in parts if one is not span), key=lambda one: -one.processor)
    named = [f"{one.name} {one.processor * 1_000:.1f}" for one in inside if one.in_loop]
    within = f" ({', '.join(named[:_SPANS_TOLD])})" if named else ""
    return f"{span.name}: {span.processor * 1_000:.1f} ms computing{within}"


def _describe_pause(pause: Pause, spans: Sequence[Span]) -> str:
    start = pause.end - pause.seconds - PROBE_INTERVAL_S
    beside = [span for span in spans if span.start < pause.end and span.end > start]
    beside.sort(key=lambda span: span.start - span.end)
    told = [
        f"{span.name} {(span.end - span.start) * 1_000:.1f} ms{where}"
        for in_loop, where in ((True, ""), (False, " beside it"))
        for span in [span for span in beside if span.in_loop is in_loop][:_SPANS_TOLD]
    ]
    return (
        f"{pause.seconds * 1_000:.1f} ms lag, the loop computing "
        f"{pause.processor * 1_000:.1f}: {', '.join(told) or 'nothing traced'}"
    )


class TracedRun:
    """A running broker and the phases of its load."""

    def __init__(self, target: Target, questions: Questions) -> None:
        self.target, self.questions = target, questions
        self.phases: list[Phase] = []


@contextmanager
def traced(home: Path, settings: Sequence[str], rows: list[PhaseRow]) -> Iterator[TracedRun]:
    """Run a broker in a process of its own; ``rows`` are filled when it has stopped.

    Raises:
        ServerError: It did not start.
    """
    log, report = home / "log", home / "report.json"
    fixed = ("listenPort=0", "namesrvListenPort=0", f"storePathRootDir={home / 'store'}")
    command = [sys.executable, "-m", "benchmarks.traced_broker", str(report)]
    command += ["--", *(part for one in (*fixed, *settings) for part in ("--set", one))]
    with running(command, log=log) as process:
        fields = ready_fields(process, log, timeout=_START_TIMEOUT)
        port = int(fields["listen"].rpartition(":")[2])
        with Questions(port) as questions:
            broker = TracedRun(Target(port=port, namesrv_port=port, pid=process.pid), questions)
            yield broker
    trace = msgspec.json.decode(report.read_bytes(), type=Trace)
    if trace.missing:
        print(
            f"not traced, these names no longer exist: {', '.join(trace.missing)}", file=sys.stderr
        )
    rows += [row_of(phase, trace) for phase in broker.phases]
