"""What a consumer that replays the log from its beginning costs those who send meanwhile.

A topic is filled, then a consumer reads it from the first message on, all queues at once and as
fast as it is answered. Before each replay the files are dropped from the page cache, so that the
disk has to be asked. Rounds alternate: producers alone, then the same producers beside a replay.
What counts is the producers' p99 in units of that of the same round without one. The broker is
traced, because nothing that is cold may stop its loop.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from .build import CompilerMissingError, cache_directory
from .generator import Generator, GeneratorError, LoadResult, Timing, build_generator
from .machine import describe_machine
from .peers import scratch
from .processes import ServerError, end_in_order
from .report import table
from .scenarios import FlushDiskType, LoadKind, Scenario
from .trace_phases import RECORD_SIZE, Phase, PhaseRow, TracedRun, traced

RATIO_MAX: Final = 2.0
"""Of the producers' p99 beside a replay to that without."""

_TOPIC: Final = "history"
_GIB: Final = 1 << 30
_MB: Final = 1_000_000
_WARMUP: Final = 0.5
_QUEUES: Final = 8  # that the generator creates a topic with
_FILL_WITHIN: Final = 600.0  # seconds
# Single sends of many producers, so that messages of all queues lie in turn.
_FILL: Final = Scenario(kind=LoadKind.SEND, connections=4, window=64, mode=FlushDiskType.SYNC)
_REPLAY: Final = Scenario(
    kind=LoadKind.PULL, connections=1, window=_QUEUES, mode=FlushDiskType.SYNC
)
_LOADS: Final = (
    Scenario(kind=LoadKind.SEND, connections=16, window=1, mode=FlushDiskType.SYNC),
    Scenario(kind=LoadKind.SEND, connections=64, window=1, mode=FlushDiskType.SYNC),
)
_HEAD: Final = (
    *("load", "round", "p99 alone ms", "p99 beside ms", "ratio", "rate beside/alone"),
    *("replayed MB/s", "from disk MB/s", "longest pause ms", "beside a replay ms"),
)


@dataclass(frozen=True, slots=True)
class Round:
    """Producers alone, and right after that beside a replay."""

    load: str
    number: int
    alone: LoadResult
    beside: LoadResult
    replayed_mb_s: float
    disk_mb_s: float  # what the broker's process had the disk read

    @property
    def ratio(self) -> float:
        return self.beside.latency_us.p99 / self.alone.latency_us.p99

    def cells(self, pauses: Sequence[PhaseRow]) -> tuple[str, ...]:
        return (
            self.load,
            str(self.number),
            f"{self.alone.latency_us.p99 / 1_000:.2f}",
            f"{self.beside.latency_us.p99 / 1_000:.2f}",
            f"{self.ratio:.2f}",
            f"{self.beside.rate / self.alone.rate:.2f}",
            f"{self.replayed_mb_s:,.0f}",
            f"{self.disk_mb_s:,.0f}",
            *(f"{row.longest_ms:.1f}" for row in pauses),
        )


class Replays:
    """Rounds on one broker."""

    def __init__(
        self, broker: TracedRun, generator: Generator, store: Path, seconds: float
    ) -> None:
        self._broker, self._generator, self._store = broker, generator, store
        self._timing = Timing(seconds=seconds, warmup=_WARMUP)

    def fill(self, size: float) -> None:
        """Send so many bytes of messages.

        Raises:
            GeneratorError: They were not all taken.
        """
        timing = Timing(seconds=_FILL_WITHIN, warmup=0.0)
        count = max(int(size / RECORD_SIZE), _QUEUES)
        result = self._generator.run(_FILL, self._broker.target, _TOPIC, timing, requests=count)
        if result.flaws:
            raise GeneratorError(f"the topic could not be filled: {', '.join(result.flaws)}")

    def run(self, load: Scenario, number: int) -> Round:
        """Measure one round.

        Raises:
            GeneratorError: Producers or consumer were not served.
        """
        alone = self._produce(load, f"{load.shape} alone", number)
        forget(self._store)
        before, began = read_bytes(self._broker.target.pid), time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            replay = replace(self._generator, from_start=True)
            consumer = pool.submit(replay.run, _REPLAY, self._broker.target, _TOPIC, self._timing)
            beside = self._produce(load, f"{load.shape} beside a replay", number)
            replayed = consumer.result()
        read = read_bytes(self._broker.target.pid) - before
        if replayed.flaws:
            raise GeneratorError(f"replay: {', '.join(replayed.flaws)}")
        return Round(
            load=load.shape,
            number=number,
            alone=alone,
            beside=beside,
            replayed_mb_s=replayed.measured.bytes / replayed.seconds / _MB,
            disk_mb_s=read / (time.monotonic() - began) / _MB,
        )

    def _produce(self, load: Scenario, name: str, number: int) -> LoadResult:
        print(f"[{number}] {name}", file=sys.stderr, flush=True)
        topic = f"c{load.connections}-{number}"
        start = time.monotonic()
        result = self._generator.run(load, self._broker.target, topic, self._timing)
        if result.flaws:
            raise GeneratorError(f"{name}: {', '.join(result.flaws)}")
        phase = Phase(name, f"round {number}", start, time.monotonic(), result.rate)
        self._broker.phases.append(phase)
        return result


def forget(store: Path) -> None:
    """Drop log and queues from the page cache; what is not on disk yet gets there first."""
    for path in sorted([*store.glob("commitlog/*"), *store.glob("consumequeue/*/*/*")]):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_bytes(pid: int) -> int:
    """Return how much a process has had read from disk so far."""
    for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def measure(
    options: argparse.Namespace, directory: Path, generator: Generator
) -> tuple[list[Round], list[PhaseRow]]:
    """Fill a topic and go through all rounds; the rows of pauses follow the rounds, two for each.

    Raises:
        GeneratorError: A load was not served.
        ServerError: The broker did not start.
    """
    rounds: list[Round] = []
    pauses: list[PhaseRow] = []
    with scratch(directory, "cold") as home:
        settings = [f"flushDiskType={FlushDiskType.SYNC}", *options.set]
        with traced(home, settings, pauses) as broker:
            replays = Replays(broker, generator, home / "store", options.seconds)
            print(f"filling {options.gib:g} GiB", file=sys.stderr, flush=True)
            replays.fill(options.gib * _GIB)
            for number in range(1, options.rounds + 1):
                rounds += [replays.run(load, number) for load in _LOADS]
    return rounds, pauses


def ratios(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the median over the rounds of each load."""
    return {
        load: median(one.ratio for one in rounds if one.load == load)
        for load in dict.fromkeys(one.load for one in rounds)
    }


def as_text(rounds: Sequence[Round], pauses: Sequence[PhaseRow]) -> str:
    """The table, the figures that count, and what went on in the longest pauses."""
    pairs = [pauses[at : at + 2] for at in range(0, len(pauses), 2)]
    lines = [
        table(_HEAD, [one.cells(pair) for one, pair in zip(rounds, pairs, strict=True)]),
        "",
        *(
            f"{load}: p99 beside a replay is {ratio:.2f} times that without, limit {RATIO_MAX:.1f}"
            for load, ratio in ratios(rounds).items()
        ),
        "",
        "longest pauses beside a replay:",
    ]
    beside = sorted(pauses[1::2], key=lambda row: -row.longest_ms)
    lines += [
        f"  {row.phase.name}, {row.phase.of}: {row.pauses[0]}" for row in beside if row.pauses
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1: the limit is missed or a step failed, 2: it cannot be measured."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = options.directory or cache_directory()
    machine = describe_machine(directory)
    try:
        generator = build_generator()
        rounds, pauses = measure(options, directory, generator)
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    except (GeneratorError, ServerError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}\n")
    print(as_text(rounds, pauses))
    result = {
        "machine": msgspec.to_builtins(machine),
        "ratios": ratios(rounds),
        "rounds": [msgspec.to_builtins(one) for one in rounds],
        "pauses": [asdict(row) for row in pauses],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"\nwritten to {options.json}")
    return 1 if any(ratio > RATIO_MAX for ratio in ratios(rounds).values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description=__doc__)
    add = parser.add_argument
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = cache_directory() / "results" / f"cold-{stamp}.json"
    add("--gib", type=float, default=4.0, help="of messages that are replayed, default 4")
    add("--rounds", type=int, default=4, help="of each load, default 4")
    add("--seconds", type=float, default=4.0, help="of each run, default 4")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to the broker")
    add("--directory", type=Path, help="where the store is; default: the cache directory")
    add("--json", type=Path, default=default, help="the result file; default: in the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
