"""A broker that is watched from inside while it is under load, and what its pauses came to.

Two things are taken off a pause: what was waited for a processor, and for how long the machine
stood still (``stills``). They may be the same milliseconds, and nobody knows which of a wait was
where; so the longer of the two is taken off and not their sum. The loop may have been on any core,
or waiting for a thread on another, so a still of any core is taken off; but never what the loop has
computed while its own core ran, or work of ours would vanish because another one stood still.
Where the memory of the machine was slow, all cores count as standing still: computing of that time
is waiting for the host.
"""

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
from .stills import UNWATCHED, Stillness, Stills, witness

LIMIT_MS: Final = 20.0
"""For the longest pause, on a machine that does nothing else, and that always runs."""
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
    still_ms: float | None  # that any core stood still; None, as below: nobody watched that
    own_still_ms: float | None  # that the loop's did
    crept_ms: float | None  # of both, that memory was slow
    left_ms: float  # what counts
    meanwhile: list[str]

    def __str__(self) -> str:
        what = ", ".join(self.meanwhile) or "nothing traced"
        still = (
            f", a core standing still {self.still_ms:.1f}, the loop's own {self.own_still_ms:.1f},"
            f" all creeping {self.crept_ms:.1f}"
            if self.still_ms is not None
            else ""
        )
        return (
            f"{self.ms:.1f} ms, of them computing {self.processor_ms:.1f}, waiting for a processor "
            f"{self.queued_ms:.1f}, another thread doing so {self.others_queued_ms:.1f}{still}; "
            f"{self.left_ms:.1f} count; {what}"
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
    still_ms: float | None  # that any core stood still in the longest pause; None as in ``Moment``
    longest_without_machine_ms: float | None
    unwatched: str = ""  # why nobody watched the machine; empty when somebody did
    worst: list[Moment] = field(default_factory=list)

    @property
    def counted_ms(self) -> float:
        """What the limit is about: the longest pause without what was the machine's."""
        if self.longest_without_machine_ms is None:
            return self.longest_without_queue_ms
        return self.longest_without_machine_ms

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
            *(
                "-" if ms is None else f"{ms:.1f}"
                for ms in (self.still_ms, self.longest_without_machine_ms)
            ),
            f"{LIMIT_MS:.0f}" if self.phase.is_limited else "",
        )

    @property
    def missed(self) -> bool:
        return self.phase.is_limited and self.counted_ms > LIMIT_MS


def row_of(phase: Phase, observed: Observed, stills: Stills = UNWATCHED) -> Row:
    """Sum up the pauses that ended within a phase."""
    pauses = [pause for pause in observed.pauses if phase.start <= pause.end <= phase.end]
    lost = sum(pause.seconds for pause in pauses)
    beats = max(int((phase.end - phase.start - lost) / BEAT_S), 1)
    ordered = sorted((pause.seconds for pause in pauses), reverse=True)
    rank = beats // 1_000
    stillness = None if stills.refused else Stillness(stills)
    longest = max(pauses, key=lambda pause: pause.seconds, default=None)
    worst = sorted(pauses, key=lambda pause: left_s(pause, stillness), reverse=True)[:_WORST]
    left_ms = left_s(worst[0], stillness) * 1_000 if worst else 0.0
    if longest is not None and longest not in worst:
        worst.append(longest)  # told all the same, so that one sees what was taken off
    told = [_moment(pause, stillness, observed.spans) for pause in worst]
    still_ms = max(told, key=lambda moment: moment.ms).still_ms if told else 0.0
    return Row(
        phase=phase,
        beats=beats,
        over_5_ms=sum(1 for seconds in ordered if seconds > 0.005),
        over_20_ms=sum(1 for seconds in ordered if seconds > 0.020),
        share_999_ms=ordered[rank] * 1_000 if rank < len(ordered) else 0.0,
        longest_ms=ordered[0] * 1_000 if ordered else 0.0,
        longest_without_queue_ms=max((left_s(pause, None) for pause in pauses), default=0.0)
        * 1_000,
        still_ms=None if stillness is None else still_ms,
        longest_without_machine_ms=None if stillness is None else left_ms,
        unwatched=stills.refused,
        worst=told,
    )


def left_s(pause: Pause, stillness: Stillness | None) -> float:
    """What is left of a pause on a machine that does nothing else, and that always runs.

    Without anybody who watched the machine, only what was waited for a processor is taken off.
    """
    waited = pause.queued + pause.others_queued
    if stillness is None:
        return max(pause.seconds - waited, 0.0)
    late = pause.end - pause.seconds
    still = stillness.of_any(late, pause.end)
    # A thread whose core stands still may seem to compute on: not all of that is known as stolen.
    ran = pause.seconds + BEAT_S - stillness.of(pause.cores, late - BEAT_S, pause.end)
    computed = min(pause.processor, ran) - BEAT_S
    return max(pause.seconds - max(waited, still), computed, 0.0)


def _moment(pause: Pause, stillness: Stillness | None, spans: Sequence[Span]) -> Moment:
    late = pause.end - pause.seconds
    start = late - BEAT_S
    beside = [span for span in spans if span.start < pause.end and span.end > start]
    beside.sort(key=lambda span: span.start - span.end)
    in_loop = [span for span in beside if span.in_loop][:_SPANS_TOLD]
    on_threads = [span for span in beside if not span.in_loop][:_SPANS_TOLD]
    told = [
        f"{span.name} {(span.end - span.start) * 1_000:.1f} ms"
        + ("" if span.in_loop else " beside it")
        for span in (*in_loop, *on_threads)
    ]
    still = own_still = crept = None
    if stillness is not None:
        still = stillness.of_any(late, pause.end) * 1_000
        own_still = stillness.of(pause.cores, late, pause.end) * 1_000
        crept = stillness.crept(late, pause.end) * 1_000
    return Moment(
        ms=pause.seconds * 1_000,
        processor_ms=pause.processor * 1_000,
        queued_ms=pause.queued * 1_000,
        others_queued_ms=pause.others_queued * 1_000,
        still_ms=still,
        own_still_ms=own_still,
        crept_ms=crept,
        left_ms=left_s(pause, stillness) * 1_000,
        meanwhile=told,
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
        CompilerMissingError: The witness of stills cannot be built.
        ServerError: It, or the broker, did not start.
    """
    log, report = home / "log", home / "report.json"
    fixed = ("listenPort=0", "namesrvListenPort=0", f"storePathRootDir={home / 'store'}")
    command = [sys.executable, "-m", "benchmarks.observed", str(report)]
    command += ["--stacks"] if stacks else []
    command += ["--", *(part for one in (*fixed, *settings) for part in ("--set", one))]
    with witness(home / "stills.log") as seen:
        with running(command, log=log) as process:
            fields = ready_fields(process, log, timeout=_START_TIMEOUT)
            port = int(fields["listen"].rpartition(":")[2])
            with Questions(port) as questions:
                broker = Watched(Target(port=port, namesrv_port=port, pid=process.pid), questions)
                yield broker
        stills = seen()
    _tell(stills)
    observed = msgspec.json.decode(report.read_bytes(), type=Observed)
    if observed.missing:
        print(f"not traced any more: {', '.join(observed.missing)}", file=sys.stderr)
    if stacks:
        print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    rows += [row_of(phase, observed, stills) for phase in broker.phases]


def _tell(stills: Stills) -> None:
    """Say what the witness was good for, and what it cost."""
    if stills.refused:
        print(f"nobody watches the machine: {stills.refused}", file=sys.stderr)
        return
    still = sum(one.end - one.start for one in stills.stills)
    crept = sum(end - start for start, end in stills.slow)
    share = stills.cpu_seconds / stills.seconds
    print(
        f"cores of this machine stood still {len(stills.stills):,} times in {stills.seconds:.0f} s,"
        f" {still:.1f} s in all (the host tells {stills.stolen_seconds:.1f}); its memory was slow"
        f" for {crept:.2f} s; a busy kernel held a core {stills.held:,} times, which counts; the"
        f" witness took {share:.1%} of a processor",
        file=sys.stderr,
    )
    if stills.dropped:
        print(f"{stills.dropped:,} later stills were too many to be kept", file=sys.stderr)
