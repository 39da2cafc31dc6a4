"""The witness sees when cores stand still, and what it saw is cut to a pause as it should."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

import benchmarks.build
from benchmarks.build import SOURCE_DIRECTORY, build
from benchmarks.stills import Still, Stillness, Stills, Stretch, joined, overlap, witness
from tests.support.benchmarks import compiling
from tests.support.patience import PATIENCE_S

STOPPED_S: Final = 0.012
# Often, since a still that begins between two of a thread's sleeps counts like any other.
STOPS: Final = 100
# Gives up what real-time priority needs, whoever runs the tests, and becomes its argument.
UNPRIVILEGED: Final = """
import ctypes, os, resource, sys
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The witness, compiled for the tests."""
    with compiling(tmp_path_factory):
        yield build("stills")


def started(*command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"ready cores={len(os.sched_getaffinity(0))}\n"
    return process


def ended(process: subprocess.Popen[str]) -> Stills:
    told, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    return msgspec.json.decode(told, type=Stills)


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stretches", "covered"),
    [
        ([], []),
        ([(3.0, 4.0), (1.0, 2.0)], [(1.0, 2.0), (3.0, 4.0)]),
        ([(1.0, 3.0), (2.0, 4.0)], [(1.0, 4.0)]),
        ([(1.0, 5.0), (2.0, 3.0), (4.0, 4.5)], [(1.0, 5.0)]),
        ([(1.0, 2.0), (2.0, 3.0)], [(1.0, 3.0)]),
        ([(1.0, 2.0), (1.0, 2.0)], [(1.0, 2.0)]),
    ],
)
def test_stretches_of_all_cores_are_joined(
    stretches: list[Stretch], covered: list[Stretch]
) -> None:
    """Two cores that stand still at once take no more time than one."""
    assert joined(stretches) == covered


@pytest.mark.parametrize(
    ("start", "end", "seconds"),
    [
        (0.0, 1.0, 0.0),  # before all
        (0.0, 1.5, 0.5),  # into the first
        (1.25, 1.75, 0.5),  # within it
        (1.5, 4.5, 1.0),  # from within one to within the next
        (2.0, 4.0, 0.0),  # between two, and touching both
        (0.0, 9.0, 3.0),  # all
        (5.0, 9.0, 1.0),
        (7.0, 9.0, 0.0),  # behind all
    ],
)
def test_only_what_lies_within_a_pause_is_taken(start: float, end: float, seconds: float) -> None:
    """A still that goes on behind a pause was none of the pause's."""
    covered = [(1.0, 2.0), (4.0, 5.0), (6.0, 7.0)]

    assert overlap(start, end, covered) == pytest.approx(seconds)


def test_short_gaps_between_stretches_are_covered_if_asked_for() -> None:
    """Nobody looked in them."""
    stretches = [(1.0, 2.0), (2.5, 3.0), (4.0, 5.0)]

    assert joined(stretches, gap=0.5) == [(1.0, 3.0), (4.0, 5.0)]


def test_slow_memory_is_slow_for_every_core() -> None:
    """What stood still meanwhile is no more than that."""
    seen = Stills(refused="", stills=[Still(0, 1.0, 2.0)], slow=[(1.5, 3.0), (3.004, 4.0)])
    stillness = Stillness(seen)

    assert stillness.of_any(0.0, 9.0) == pytest.approx(3.0)
    assert stillness.of([0], 0.0, 9.0) == pytest.approx(3.0)
    assert stillness.of([1], 0.0, 9.0) == pytest.approx(2.5)
    assert stillness.of([], 0.0, 9.0) == 0.0
    assert stillness.crept(0.0, 2.0) == pytest.approx(0.5)


def test_stills_are_told_of_any_core_and_of_some() -> None:
    """Those of no core, when nobody knows where the loop was, are none."""
    stillness = Stillness(
        Stills(refused="", stills=[Still(0, 1.0, 2.0), Still(1, 1.5, 3.0), Still(0, 5.0, 6.0)])
    )

    assert stillness.of_any(0.0, 5.5) == pytest.approx(2.5)
    assert stillness.of([0], 0.0, 5.5) == pytest.approx(1.5)
    assert stillness.of([1], 0.0, 5.5) == pytest.approx(1.5)
    assert stillness.of([1, 0], 0.0, 5.5) == pytest.approx(2.5)
    assert stillness.of([], 0.0, 5.5) == 0.0


# ---- the program ---------------------------------------------------------------------------------


def test_every_core_that_stood_still_is_seen(program: Path) -> None:
    """Halted and let go, its threads are as late as on a core that was taken away."""
    process = started(str(program))
    stops: list[Stretch] = []
    for _ in range(STOPS):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped = time.monotonic()
        time.sleep(STOPPED_S)
        stops.append((stopped, time.monotonic()))
        process.send_signal(signal.SIGCONT)
    seen = ended(process)

    if seen.refused:
        pytest.skip(f"the witness does not watch here: {seen.refused}")
    stillness = Stillness(seen)
    for core in os.sched_getaffinity(0):
        # Half of it: a busy machine may have had the threads queue before they were halted. And not
        # of all: a host that takes the core away just then has them queue for longer than they are
        # halted, and the witness tells the still that much too early.
        seconds = [stillness.of([core], *stop) for stop in stops]
        assert sum(one > STOPPED_S / 2 for one in seconds) > STOPS * 3 / 4
    assert seen.seconds >= STOPS * STOPPED_S
    assert seen.dropped == 0


@pytest.mark.usefixtures("program")
def test_steps_through_memory_that_are_slow_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled so that every step is one; a pass is thirty-two of them, each in its place."""
    shutil.copytree(SOURCE_DIRECTORY, tmp_path / "sources")
    source = tmp_path / "sources" / "stills.c"
    content, thresholds = re.subn(
        r"\b(STEP_SLOW_NS|TOUCH_SLOW_NS|SLOW_PASS_NS) = [\d *]+",
        r"\1 = 1",
        source.read_text(encoding="utf-8"),
    )
    source.write_text(content, encoding="utf-8")
    monkeypatch.setattr(benchmarks.build, "SOURCE_DIRECTORY", source.parent)
    monkeypatch.setenv("HALFMQ_BENCHMARKS_DIR", str(tmp_path))
    assert thresholds == 3

    began = time.monotonic()
    with witness(tmp_path / "log") as seen:
        time.sleep(0.05)
        stills = seen()

    if stills.refused:
        pytest.skip(f"the witness does not watch here: {stills.refused}")
    assert stills.slow
    assert len(stills.slow) % 32 == 0
    assert all(began <= start <= end <= time.monotonic() for start, end in stills.slow)
    assert stills.slow == sorted(stills.slow)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_list(program: Path, number: signal.Signals) -> None:
    """Whoever ends a run from outside does not lose what was seen."""
    process = started(str(program))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 0

    assert ended(process).seconds >= 0


def test_it_ends_when_its_standard_input_is_closed(program: Path) -> None:
    """A parent that was killed leaves no thread of the highest priority behind."""
    process = started(str(program))
    assert process.stdin is not None
    process.stdin.write("what comes in is not looked at\n")
    process.stdin.flush()
    time.sleep(0.02)
    assert process.poll() is None

    process.stdin.close()

    assert process.wait(PATIENCE_S) == 0
    process.stdin = None  # closed already
    assert ended(process).seconds > 0


def test_without_real_time_priority_nothing_is_watched(program: Path) -> None:
    """It would be late whenever a core is busy, and a guess must not look like a witness."""
    seen = ended(started(sys.executable, "-c", UNPRIVILEGED, str(program)))

    assert seen.refused.startswith("no real-time priority: ")
    assert seen.stills == []


@pytest.mark.usefixtures("program")
def test_a_witness_is_there_until_it_is_asked(tmp_path: Path) -> None:
    """What it returns says for how long it watched."""
    with witness(tmp_path / "log") as seen:
        time.sleep(0.02)
        stills = seen()

    assert stills.seconds >= 0.02


@pytest.mark.usefixtures("program")
def test_a_witness_that_nobody_asks_is_ended(tmp_path: Path) -> None:
    """The measurement beside it has failed, and that error is the one to be told."""
    with pytest.raises(KeyError), witness(tmp_path / "log"):
        raise KeyError
