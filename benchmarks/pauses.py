"""How long passes of background work hold the broker's event loop, and how late the loop comes.

A real broker is traced (``traced_broker``) while C generators load it. *Small files* make
everything roll all the time: log, queues, index. *Large files* are those of a default store: a
gigabyte of log, of which the next is prepared, and old ones are deleted, beside the traffic. In the
*flush storm* 256 producers wait for the disk, each for itself, and another process writes to it and
flushes as fast as it can. *Tables* has fifty thousand consumer offsets saved while they move. In
*index* usual messages arrive faster than their keys are indexed, and *catching up* follows it: the
index is behind, and nobody sends more than now and then.

The limit is for the processor time of one background pass. How late a timer of the loop comes has
none: on a busy machine, or one whose host takes processors away, it is mostly that. For the longest
of both it is told what went on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import msgspec

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import UpdateConsumerOffsetRequestHeader
from halfmq.remoting.replies import encode_request

from .build import CompilerMissingError, cache_directory
from .generator import Generator, GeneratorError, Timing, build_generator
from .machine import describe_machine
from .peers import scratch
from .processes import ServerError, end_in_order, running
from .report import table
from .scenarios import BATCH_UNITS, FlushDiskType, LoadKind, MessageShape, Scenario
from .trace_phases import RECORD_SIZE, Phase, PhaseRow, TracedRun, traced

_GIB: Final = 1 << 30
_DELETE_EVERY_S: Final = 0.5
_LEAVING_S: Final = 40.0  # seconds in which more than a deleted gigabyte leaves memory
_OFFSET_QUEUES: Final = 250  # of each of the groups whose offsets are saved
_BATCHES: Final = Scenario(kind=LoadKind.BATCH, connections=4, window=1, mode=FlushDiskType.SYNC)
_SENDS: Final = Scenario(kind=LoadKind.SEND, connections=16, window=1, mode=FlushDiskType.SYNC)
_ALONE: Final = Scenario(kind=LoadKind.SEND, connections=1, window=1, mode=FlushDiskType.SYNC)
_TRANSACTIONS: Final = Scenario(
    kind=LoadKind.TRANSACTION, connections=64, window=1, mode=FlushDiskType.SYNC
)
_INDEX: Final = replace(_BATCHES, message=MessageShape.USUAL)
_STORM: Final = Scenario(kind=LoadKind.SEND, connections=256, window=1, mode=FlushDiskType.SYNC)
_SMALL_FILES: Final = (
    *("mappedFileSizeCommitLog=16777216", "mappedFileSizeConsumeQueue=60000"),
    *("maxHashSlotNum=20000", "maxIndexNum=100000"),
)
# Writes and flushes until it is killed; a file of at most 256 MiB.
_HOG: Final = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
piece = os.urandom(4 << 20)
print("ready", flush=True)
while True:
    for position in range(0, 256 << 20, len(piece)):
        os.pwrite(fd, piece, position)
        os.fdatasync(fd)
"""
_HEAD: Final = (
    *("phase", "files", "msgs/s", "probes", "over 5 ms", "over 20 ms", "999 of 1000 ms"),
    *("longest ms", "background ms", "limit ms"),
)


class Course:
    """The phases of the load on a traced broker."""

    def __init__(self, broker: TracedRun, generator: Generator) -> None:
        self._broker, self._generator = broker, generator

    def phase(
        self,
        name: str,
        files: str,
        load: Scenario,
        *,
        seconds: float,
        requests: int | None = None,
        beside: Callable[[threading.Event], str] | None = None,
    ) -> None:
        """Load the broker, and do something ``beside`` that until the event is set.

        Raises:
            GeneratorError: The load was not served.
            ServerError: What was done beside it failed.
        """
        print(f"{name}, {files}", file=sys.stderr, flush=True)
        topic = f"{name}-{files}".replace(" ", "-")
        timing = Timing(seconds=seconds, warmup=0.2)
        over = threading.Event()
        self._generator.run(
            load, self._broker.target, topic, timing, requests=1
        )  # opens the queues
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(beside, over) if beside is not None else None
            start = time.monotonic()
            try:
                result = self._generator.run(
                    load, self._broker.target, topic, timing, requests=requests
                )
            finally:
                over.set()
            note = other.result() if other is not None else ""
        if result.flaws:
            raise GeneratorError(f"{name}: {', '.join(result.flaws)}")
        self._broker.phases.append(Phase(name, files, start, time.monotonic(), result.rate, note))

    def delete_old(self, over: threading.Event) -> str:
        """Have everything deleted that may go, again and again."""
        before = self._deleted()
        while not over.wait(_DELETE_EVERY_S):
            self._broker.questions.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)
        deleted = self._deleted() - before
        left = self._retention("bytes_leaving") >> 20
        return f"{deleted} files of the log deleted, {left} MiB of deleted files not free yet"

    def _deleted(self) -> int:
        return self._retention("log_files_deleted")

    def _retention(self, name: str) -> int:
        return int(self._broker.questions.metrics()[f"halfmq.retention.{name}"])

    def move_offsets(self, over: threading.Event) -> str:
        """Commit an offset now and then, so that the table of all is saved."""
        header = UpdateConsumerOffsetRequestHeader(
            consumer_group="TOOLS_CONSUMER", topic="rolls-16-MiB", queue_id=0, commit_offset=1
        )
        frame = encode_request(
            RequestCode.UPDATE_CONSUMER_OFFSET, opaque=1, header=header, one_way=True
        )
        while not over.wait(_DELETE_EVERY_S):
            self._broker.questions.send(frame)
        return ""


@contextmanager
def _disk_hog(directory: Path) -> Iterator[None]:
    command = [sys.executable, "-c", _HOG, str(directory / "hog")]
    with running(command, log=directory / "hog.log") as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


def _write_offsets(store: Path, count: int) -> None:
    """Leave a table of consumer offsets for the broker to load."""
    queues = {str(queue_id): 1 for queue_id in range(_OFFSET_QUEUES)}
    groups = range(max(count // _OFFSET_QUEUES, 1))
    content = {"offsetTable": {f"offsets@group-{group}": queues for group in groups}}
    (store / "config").mkdir(parents=True)
    (store / "config" / "consumerOffset.json").write_text(json.dumps(content), encoding="utf-8")


def measure(options: argparse.Namespace, directory: Path, generator: Generator) -> list[PhaseRow]:
    """Go through all phases.

    Raises:
        GeneratorError: A load was not served.
        ServerError: A broker did not start, or died.
    """
    rows: list[PhaseRow] = []
    seconds = options.seconds
    with scratch(directory, "pauses") as home:
        _write_offsets(home / "store", options.offsets)
        settings = [*_SMALL_FILES, "fileReservedTime=0"]
        with traced(home, settings, rows) as broker:
            small = Course(broker, generator)
            small.phase("rolls", "16 MiB", _BATCHES, seconds=seconds)
            small.phase("retention", "16 MiB", _SENDS, seconds=seconds, beside=small.delete_old)
            small.phase("transactions", "16 MiB", _TRANSACTIONS, seconds=seconds)
            small.phase("tables", "16 MiB", _SENDS, seconds=seconds, beside=small.move_offsets)
    with scratch(directory, "pauses") as home:
        requests = int(options.gib * _GIB / (RECORD_SIZE * BATCH_UNITS))
        settings = ["fileReservedTime=0"]
        with traced(home, settings, rows) as broker:
            large = Course(broker, generator)
            large.phase("rolls", "1 GiB", _BATCHES, seconds=60, requests=requests)
            large.phase("index", "1 GiB", _INDEX, seconds=seconds)
            large.phase("catching up", "1 GiB", _ALONE, seconds=seconds)
            with _disk_hog(home):
                large.phase("flush storm", "1 GiB", _STORM, seconds=seconds)
            seconds = max(seconds, _LEAVING_S)
            large.phase("retention", "1 GiB", _SENDS, seconds=seconds, beside=large.delete_old)
    return rows


def as_text(rows: Sequence[PhaseRow]) -> str:
    """The table, and what went on in the longest pauses."""
    lines = [table(_HEAD, [row.cells for row in rows]), ""]
    for row in rows:
        note = f" ({row.phase.note})" if row.phase.note else ""
        lines.append(f"{row.phase.name}, {row.phase.of}{note}: the longest passes and pauses")
        lines += [f"  {told}" for told in (*row.passes, *row.pauses)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1: a limit is missed or a step failed, 2: it cannot be measured."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = options.directory or cache_directory()
    machine = describe_machine(directory)
    try:
        generator = build_generator()
        rows = measure(options, directory, generator)
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    except (GeneratorError, ServerError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}\n")
    print(as_text(rows))
    result = {
        "machine": msgspec.to_builtins(machine),
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"\nwritten to {options.json}")
    return 1 if any(row.missed for row in rows) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pauses", description=__doc__)
    add = parser.add_argument
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = cache_directory() / "results" / f"pauses-{stamp}.json"
    add("--seconds", type=float, default=10.0, help="of each phase, default 10")
    add("--gib", type=float, default=4.0, help="of log in files of 1 GiB, default 4")
    add("--offsets", type=int, default=50_000, help="consumer offsets in the table, default 50000")
    add("--directory", type=Path, help="where stores are; default: the cache directory")
    add("--json", type=Path, default=default, help="the result file; default: in the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
