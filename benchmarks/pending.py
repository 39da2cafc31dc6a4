"""What a million undecided transactions cost: memory, snapshots, and the start after a kill.

Halves are written to a log and left undecided. Then, each in a process of its own: the Python heap
per transaction, a snapshot taken as the broker takes it, and two starts of the real broker after
SIGKILL, one from snapshot and log and one from the log alone. Limits stand beside the figures. A
start's is wall time, which means little on a busy machine, so its processor time is told too.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .build import cache_directory
from .machine import describe_machine
from .peers import scratch
from .pending_steps import SNAPSHOT_FILE, anonymous_bytes, processor_seconds
from .processes import ServerError, end_in_order, halfmq_broker, log_tail
from .report import table
from .scenarios import BODY_SIZE

COUNT: Final = 1_000_000
BYTES_EACH_MAX: Final = 255
"""Of heap per undecided transaction, beside the names of group and topic."""
ANONYMOUS_MIB_MAX: Final = 300
"""For a million, over what a broker with an empty store takes."""
REBUILD_SECONDS_MAX: Final = 15
"""For a million, from the start of the process until it is ready."""

_HEAP_COUNT: Final = 100_000  # tracing makes each allocation several times slower
_BEHIND_SHARE: Final = 10  # one in so many is written behind the snapshot, half of it decided
_STEP_SECONDS: Final = 900.0
_MIB: Final = 1 << 20
_HEAD: Final = ("what", "of", "measured", "limit", "measured/limit")


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table; without a limit it only explains the others."""

    what: str
    of: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        shown = f"{self.value:,.1f} {self.unit}" if self.value < 1_000 else f"{self.value:,.0f}"
        if self.limit is None:
            return (self.what, self.of, shown, "", "")
        return (
            self.what,
            self.of,
            shown,
            f"{self.limit:,.0f} {self.unit}",
            f"{self.value / self.limit:.2f}",
        )

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.value > self.limit


@dataclass(frozen=True, slots=True)
class PendingStart:
    """A start of the broker."""

    seconds: float  # process start to ready line
    processor_seconds: float  # in that time
    rebuild_seconds: float  # of it, filling the table
    pending: int
    anonymous: int  # bytes


class PendingMeasurement:
    """One run of everything in one scratch directory."""

    def __init__(self, directory: Path, count: int, body_size: int) -> None:
        self._directory, self._count, self._body_size = directory, count, body_size
        self._store = directory / "store"

    def run(self) -> list[Figure]:
        """Measure everything.

        Raises:
            ServerError: A step or a start failed.
        """
        of = f"{self._count:,}"
        heap_count = min(_HEAP_COUNT, self._count)
        heap_each = self._heap_each(heap_count)
        empty = self._start(self._directory / "empty")
        filled = self._step("fill", self._store, self._count)
        snapshot = self._step("snapshot", self._store, self._count // _BEHIND_SHARE)
        with_snapshot = self._start(self._store)
        (self._store / SNAPSHOT_FILE).unlink(missing_ok=True)
        alone = self._start(self._store)
        scale = with_snapshot.pending / COUNT
        started = f"{with_snapshot.pending:,}"
        if with_snapshot.pending != alone.pending:
            raise ServerError(f"{with_snapshot.pending} undecided, or {alone.pending}?")
        return [
            Figure("heap each", f"{heap_count:,}", heap_each, "B", BYTES_EACH_MAX),
            *_start_figures("snapshot and log", started, with_snapshot, empty, scale),
            *_start_figures("log alone", started, alone, empty, scale),
            Figure("snapshot, while serving", of, snapshot["seconds"], "s"),
            Figure("  longest slice", of, snapshot["longest_slice_ms"], "ms"),
            Figure("  mean slice", of, snapshot["mean_slice_ms"], "ms"),
            Figure("  its file", of, snapshot["file_bytes"] / _MIB, "MiB"),
            Figure("log", of, filled["log_bytes"] / _MIB, "MiB"),
            Figure("start of an empty store", "0", empty.seconds, "s"),
        ]

    def _heap_each(self, count: int) -> float:
        """Bytes of heap that one transaction more takes; memories of fixed size drop out."""
        one = self._step("heap", self._directory / "heap-1", count)
        two = self._step("heap", self._directory / "heap-2", 2 * count)
        return (two["bytes"] - one["bytes"]) / (two["pending"] - one["pending"])

    def _step(self, name: str, root: Path, count: int) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.pending_steps", name, str(root)]
        _tell(f"{name} of {count:,}")
        done = subprocess.run(
            [*command, str(count), str(self._body_size)],
            capture_output=True,
            text=True,
            timeout=_STEP_SECONDS,
            check=False,
        )
        if done.returncode != -signal.SIGKILL:
            raise ServerError(f"{name} ended with status {done.returncode}\n{done.stderr}")
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def _start(self, root: Path) -> PendingStart:
        """Start the broker on a store and kill it."""
        _tell(f"start on {root.name}")
        log = self._directory / f"{root.name}.log"
        settings = {
            "listenPort": 0,
            "namesrvListenPort": 0,
            "storePathRootDir": root,
            "transactionTimeOut": "1h",
            "transactionCheckInterval": "1h",
        }
        began = time.perf_counter()
        with halfmq_broker(settings, log, timeout=_STEP_SECONDS) as (process, _):
            seconds = time.perf_counter() - began
            processor, anonymous = processor_seconds(process.pid), anonymous_bytes(process.pid)
            process.kill()
        rebuilt = re.search(
            r"event=transactions_rebuilt pending=(\d+) .*elapsed_ms=(\d+)",
            log.read_text(encoding="utf-8"),
        )
        if rebuilt is None:
            raise ServerError(f"no word of the table\n{log_tail(log)}")
        return PendingStart(seconds, processor, int(rebuilt[2]) / 1_000, int(rebuilt[1]), anonymous)


def _start_figures(
    source: str, of: str, start: PendingStart, empty: PendingStart, scale: float
) -> tuple[Figure, ...]:
    memory = (start.anonymous - empty.anonymous) / _MIB
    return (
        Figure(f"start from {source}", of, start.seconds, "s", REBUILD_SECONDS_MAX * scale),
        Figure("  its processor time", of, start.processor_seconds, "s"),
        Figure("  of it the table", of, start.rebuild_seconds, "s"),
        Figure("  memory afterwards", of, memory, "MiB", ANONYMOUS_MIB_MAX * scale),
    )


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1: a limit is missed or a step failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pending", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="undecided, default a million")
    parser.add_argument("--body", type=int, default=BODY_SIZE, help="bytes of a body, default 1024")
    parser.add_argument("--directory", type=Path, help="where the store is; default: the cache")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = options.directory or cache_directory()
    machine = describe_machine(directory)
    try:
        with scratch(directory, "pending") as path:
            figures = PendingMeasurement(path, options.count, options.body).run()
    except (ServerError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}\n")
    print(table(_HEAD, [figure.cells for figure in figures]))
    return 1 if any(figure.missed for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
