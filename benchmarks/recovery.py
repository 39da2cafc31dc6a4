"""How long a broker takes to serve again when it was killed and its log has to be read anew.

For each kind of record a log is written whose checkpoint stays at the beginning, and its writer is
killed: then all of it is scanned, and queues, index and the table of transactions are made anew.
That is the worst case; a checkpoint is a second old, so *killed broker* shows what is usual: a real
one under load, ended by SIGKILL. Each store is started as after a kill, with the log in the page
cache, and as after a power cut, without. Where the time goes is traced (``traced_broker``);
beside it stand the limits of the machine: reading the same files, and CRC-32 of a kilobyte.

Wall times mean little on a busy machine, so processor times stand beside them.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from halfmq.store.format.digest import DIRECTORY as DIGESTS

from .build import CompilerMissingError, cache_directory
from .generator import GeneratorError, Target, Timing, build_generator
from .machine import describe_machine
from .peers import scratch
from .pending_steps import processor_seconds
from .processes import ServerError, end_in_order, log_tail, ready_fields, running
from .recovery_steps import KINDS, forget
from .report import table
from .scenarios import BATCH_UNITS, FlushDiskType, LoadKind, Scenario
from .trace_phases import RECORD_SIZE
from .traced_broker import Trace

GB_PER_S_MIN: Final = 0.8
"""Of the scan, in 10⁹ bytes; or else"""
TEN_GIB_S_MAX: Final = 15.0
"""seconds until ten GiB serve again, reckoned from those that were measured."""

KILLED: Final = "killed broker"
_GIB: Final = 1 << 30
_STEP_SECONDS: Final = 600.0
_CHECKPOINT: Final = "checkpoint"
# Everything but the log and the checkpoint that a start leaves behind and a later one would use.
_DERIVED: Final = ("config/halfmqTransactions", "index", DIGESTS)
_LOAD: Final = Scenario(kind=LoadKind.BATCH, connections=4, window=1, mode=FlushDiskType.SYNC)
_PARTS: Final = {
    "scan": ("Recovery._scan_from",),
    "cut": ("Recovery._cut_log",),
    "compare": ("Integrity.before_index",),
    "index": ("IndexBuilder.recover",),
    "transactions": ("TransactionService.rebuild",),
}
"""Parts of a start by the spans that they are made of."""
_HEAD: Final = (
    *("log", "page cache", "GiB", "records", "serves after s", "processor s"),
    *(f"{name} s" for name in _PARTS),
    *("rest s", "scan GB/s", "per processor s", "ten GiB in s", "processor s for them"),
)


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """One start after a kill."""

    kind: str
    cached: bool
    log_bytes: int
    scanned_bytes: int
    records: int
    seconds: float  # process start to ready line
    processor_seconds: float  # in that time, of all threads
    parts: dict[str, float]  # seconds by name of ``_PARTS``
    scan_processor_seconds: float

    @property
    def scan_gb_s(self) -> float:
        return self.scanned_bytes / max(self.parts["scan"], 1e-9) / 1e9

    @property
    def scan_gb_processor_s(self) -> float:
        return self.scanned_bytes / max(self.scan_processor_seconds, 1e-9) / 1e9

    @property
    def ten_gib_s(self) -> float:
        return self.seconds * 10 * _GIB / self.log_bytes

    @property
    def missed(self) -> bool:
        is_whole = self.scanned_bytes >= self.log_bytes // 2
        return is_whole and self.scan_gb_s < GB_PER_S_MIN and self.ten_gib_s > TEN_GIB_S_MAX

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.kind,
            "warm" if self.cached else "cold",
            f"{self.log_bytes / _GIB:.1f}",
            f"{self.records:,}",
            f"{self.seconds:.1f}",
            f"{self.processor_seconds:.1f}",
            *(f"{seconds:.1f}" for seconds in self.parts.values()),
            f"{self.seconds - sum(self.parts.values()):.1f}",
            f"{self.scan_gb_s:.2f}",
            f"{self.scan_gb_processor_s:.2f}",
            f"{self.ten_gib_s:.1f}",
            f"{self.processor_seconds * 10 * _GIB / self.log_bytes:.1f}",
        )


class Starts:
    """One store, started again and again from the state in which it was killed."""

    def __init__(self, home: Path, kind: str) -> None:
        self._home, self._kind = home, kind
        self._store = home / "store"
        self._checkpoint = b""

    def write(self, size: int) -> None:
        """Write the log and kill who does it.

        Raises:
            ServerError: That did not work.
        """
        if self._kind == KILLED:
            self._load_and_kill(size)
        else:
            step("fill", str(self._store), self._kind, str(size))
        self._checkpoint = (self._store / _CHECKPOINT).read_bytes()

    def _load_and_kill(self, size: int) -> None:
        generator = build_generator()
        timing = Timing(seconds=_STEP_SECONDS, warmup=0)
        requests = max(size // (RECORD_SIZE * BATCH_UNITS), 1)
        with running(self._command("halfmq.broker"), log=self._log) as process:
            port = int(self._ready(process)["listen"].rpartition(":")[2])
            target = Target(port=port, namesrv_port=port, pid=process.pid)
            generator.run(_LOAD, target, "killed", timing, requests=requests)
            process.kill()

    def start(self, *, cached: bool) -> MeasuredStart:
        """Start the broker on the store, kill it as soon as it serves, and tidy up behind it.

        Raises:
            ServerError: It did not start.
        """
        logs = sorted((self._store / "commitlog").iterdir())
        if cached:
            step("warm", str(self._store))
        else:
            forget([*logs, *self._store.glob("consumequeue/*/*/*")])
        report = self._home / "report.json"
        began = time.perf_counter()
        with running(
            self._command("benchmarks.traced_broker", str(report), "--"), log=self._log
        ) as it:
            self._ready(it)
            seconds, processor = time.perf_counter() - began, processor_seconds(it.pid)
            it.kill()
        self._tidy()
        trace = msgspec.json.decode(report.read_bytes(), type=Trace)
        length = dict.fromkeys(_PARTS, 0.0)
        for name, spans in _PARTS.items():
            length[name] = sum(s.end - s.start for s in trace.spans if s.name in spans)
        found = self._recovered()
        return MeasuredStart(
            kind=self._kind,
            cached=cached,
            log_bytes=found["end"],
            scanned_bytes=found["end"] - found["start"],
            records=found["records"],
            seconds=seconds,
            processor_seconds=processor,
            parts=length,
            scan_processor_seconds=sum(
                span.processor for span in trace.spans if span.name in _PARTS["scan"]
            ),
        )

    def _recovered(self) -> dict[str, int]:
        """Return the figures of the line that tells of the recovery."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        told = [line for line in lines if "event=recovered " in line]
        if not told:
            raise ServerError(f"no word of the recovery\n{log_tail(self._log)}")
        pairs = (word.split("=", 1) for word in told[-1].split() if "=" in word)
        return {name: int(value) for name, value in pairs if value.isdigit()}

    def _tidy(self) -> None:
        """Leave log, queues and checkpoint as a kill has left them, and nothing else."""
        if self._kind != KILLED:
            for name in _DERIVED:
                path = self._store / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        (self._store / _CHECKPOINT).write_bytes(self._checkpoint)

    @property
    def _log(self) -> Path:
        return self._home / "log"

    def _command(self, module: str, *arguments: str) -> list[str]:
        settings = ("listenPort=0", "namesrvListenPort=0", f"storePathRootDir={self._store}")
        given = [part for one in settings for part in ("--set", one)]
        return [sys.executable, "-m", module, *arguments, *given]

    def _ready(self, process: subprocess.Popen[str]) -> dict[str, str]:
        return ready_fields(process, self._log, timeout=_STEP_SECONDS)


def step(*arguments: str) -> dict[str, float]:
    """Run a step in a process of its own and return what it printed.

    Raises:
        ServerError: It failed.
    """
    command = [sys.executable, "-m", "benchmarks.recovery_steps", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_STEP_SECONDS, check=False
    )
    if done.returncode != -signal.SIGKILL:
        raise ServerError(f"{arguments[0]} ended with status {done.returncode}\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure(
    options: argparse.Namespace, directory: Path
) -> tuple[dict[str, float], list[MeasuredStart]]:
    """Write and start every store; the first figures are the limits of the machine.

    Raises:
        ServerError: A step or a start failed.
        GeneratorError: The load of the broker that is to be killed was not served.
    """
    starts: list[MeasuredStart] = []
    limits: dict[str, float] = {}
    for kind in options.kind or [*KINDS, KILLED]:
        with scratch(directory, "recovery") as home:
            store = Starts(home, kind)
            _tell(f"writing {options.gib:g} GiB, {kind}")
            store.write(int(options.gib * _GIB))
            if not limits:
                limits = step("limits", str(home / "store"))
            for cached in (True, False):
                _tell(f"start, {'warm' if cached else 'cold'}")
                starts.append(store.start(cached=cached))
    return limits, starts


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1: a limit is missed or a step failed, 2: it cannot be measured."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = options.directory or cache_directory()
    machine = describe_machine(directory)
    try:
        limits, starts = measure(options, directory)
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    except (GeneratorError, ServerError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}")
    print(
        f"limits, GB/s: reading the log from disk {limits['cold_gb_s']:.2f}, from the page cache "
        f"{limits['warm_gb_s']:.2f}, CRC-32 of 1 KiB {limits['crc_gb_s']:.2f}\n"
    )
    print(table(_HEAD, [start.cells for start in starts]))
    print(f"\nwanted: a scan of {GB_PER_S_MIN} GB/s, or ten GiB in {TEN_GIB_S_MAX:.0f} s")
    result = {
        "machine": msgspec.to_builtins(machine),
        "limits": limits,
        "starts": [
            {**asdict(start), "scan_gb_s": start.scan_gb_s, "ten_gib_s": start.ten_gib_s}
            for start in starts
        ],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"written to {options.json}")
    return 1 if any(start.missed for start in starts) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    add = parser.add_argument
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = cache_directory() / "results" / f"recovery-{stamp}.json"
    add("--gib", type=float, default=2.0, help="of each log, default 2")
    add(
        "--kind",
        action="append",
        choices=[*KINDS, KILLED],
        help="only these records; repeatable",
    )
    add("--directory", type=Path, help="where stores are; default: the cache directory")
    add("--json", type=Path, default=default, help="the result file; default: in the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
