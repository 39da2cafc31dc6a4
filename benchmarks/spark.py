"""How fast the audit reads and judges a log: ``python -m benchmarks.spark``.

Every measurement is a process of its own with a Spark session of its own, on generated logs
(``spark_log.py``). Processor time is that of the JVM and of all Python workers; on a machine that
does other things too it is the figure to compare. Goals stand beside the figures.

To start a session is never part of a figure. A log is read twice in its session: the JVM compiles
most of its code the first time, and some of it for every query, which takes one or two seconds of
processor time however long the log is. Both are told; the goals are about the second, and reached
where the log is long enough for that not to count. Audits are measured as they are run, once per
session.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from .build import cache_directory
from .machine import describe_machine
from .peers import scratch
from .pending_steps import anonymous_bytes
from .report import table
from .scenarios import BODY_SIZE
from .spark_log import GeneratedLog, write_log

LARGE: Final = 10_000_000  # records; 4 GB
BODIES: Final = 1_000_000  # records with bodies of the size that other benchmarks have; 1 GB
MEDIUM: Final = 3_000_000  # of which reads are long enough to be measured: 1 GB
SMALL: Final = 1_000_000
QUICK: Final = 10  # so many times less with --quick
RECORDS_PER_CPU_SECOND_MIN: Final = 0.7  # millions, of the columns that an audit needs
BODIES_PER_CORE_MIN: Final = 200.0  # MB per CPU second
LINEAR_MAX: Final = 1.2  # processor time per record of the large log in units of the small one's

_AUDIT_COLUMNS: Final = (
    "physicalOffset",
    "size",
    "partition",
    "offset",
    "preparedTransactionOffset",
    "uniqKey",
    "checkTimes",
    "transactionType",
    "recordType",
    "error",
)
_BODY_COLUMNS: Final = ("physicalOffset", "topic", "properties", "value")
_WARM_UP: Final = 32 << 20  # bytes of log
_SAMPLE_SECONDS: Final = 0.2
_STEP_SECONDS: Final = 900.0
_MB: Final = 1e6
_STEPS: Final = 10_000_000  # of Python: tell how fast the machine is at this moment
_HEAD: Final = ("what", "on", "measured", "goal")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one step took."""

    seconds: float
    cpu_seconds: float
    memory: int  # bytes, the most that all processes had of their own at once
    shuffled: int = 0  # bytes written for shuffles
    first_cpu_seconds: float = 0.0  # of the same thing, the first time in the session


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(asdict(_take_step(json.loads(options.step)))))
        return 0
    share = QUICK if options.quick else 1
    with scratch(cache_directory(), "spark") as folder:
        machine = describe_machine(folder)
        print(f"{machine.processor}, {machine.cores} cores, load {machine.load_average[0]:.1f}")
        print(f"{_STEPS:,} steps of a loop in Python take {_loop_seconds():.2f} CPU seconds")
        rows = list(_measure(folder, share))
        print(table(_HEAD, rows))
        report = {"machine": msgspec.to_builtins(machine), "rows": rows}
        path = cache_directory() / "spark.json"
        path.write_text(json.dumps(report, indent=1), "utf-8")
        print(f"\nalso in {path}")
    return 0


def _measure(folder: Path, share: int) -> Iterator[tuple[str, ...]]:
    small = write_log(folder / "small", SMALL // share)
    single = _step("audit", small, master="local[1]")
    double = _step("audit", small, master="local[2]")
    yield from _audit_rows(small, double)
    faster = f"{single.seconds / double.seconds:.2f} x faster"
    yield "  local[1] : local[2]", _named(small), faster, ""
    medium = write_log(folder / "medium", MEDIUM // share)
    yield from _read_rows(medium, "audit columns", _AUDIT_COLUMNS)
    yield from _read_rows(medium, "with bodies", _BODY_COLUMNS)
    shutil.rmtree(medium.root)
    bodies = write_log(folder / "bodies", BODIES // share, BODY_SIZE)
    yield from _read_rows(bodies, "with bodies", _BODY_COLUMNS)
    shutil.rmtree(bodies.root)
    large = write_log(folder / "large", LARGE // share)
    whole = _step("audit", large, master="local[2]")
    yield from _audit_rows(large, whole)
    yield from _read_rows(large, "audit columns", _AUDIT_COLUMNS)
    growth = whole.cpu_seconds / large.records / (double.cpu_seconds / small.records)
    goal = f"<= {LINEAR_MAX}"
    yield "audit, CPU per record : small log's", _named(large), f"{growth:.2f}", goal


def _read_rows(log: GeneratedLog, name: str, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    one = _step("read", log, master="local[1]", columns=columns)
    two = _step("read", log, master="local[2]", columns=columns)
    on = _named(log)
    needs_bodies = "value" in columns
    rate, first = (log.records / took / 1e6 for took in (one.cpu_seconds, one.first_cpu_seconds))
    goal = "" if needs_bodies else f">= {RECORDS_PER_CPU_SECOND_MIN}"
    yield f"read, {name}", on, f"{rate:.2f} M records/CPU second", goal
    yield "  the first time", on, f"{first:.2f} M records/CPU second", ""
    goal = f">= {BODIES_PER_CORE_MIN:.0f}" if needs_bodies else ""
    yield "  per core", on, f"{log.size / one.cpu_seconds / _MB:.0f} MB/CPU second", goal
    yield "  local[1]", on, f"{log.size / one.seconds / _MB:.0f} MB/s", ""
    yield "  local[2]", on, f"{log.size / two.seconds / _MB:.0f} MB/s", ""
    yield "  local[1] : local[2]", on, f"{one.seconds / two.seconds:.2f} x faster", ""


def _audit_rows(log: GeneratedLog, took: Measured) -> Iterator[tuple[str, ...]]:
    on = _named(log)
    yield "audit, local[2]", on, f"{took.seconds:.1f} s", ""
    yield "  per CPU second", on, f"{log.records / took.cpu_seconds / 1e6:.2f} M records", ""
    yield "  per second", on, f"{log.size / took.seconds / _MB:.0f} MB", ""
    shuffled = took.shuffled / log.transactions
    yield "  shuffled", on, f"{shuffled:.1f} MB/M transactions", ""
    yield "  memory, all processes", on, f"{took.memory / 2**20:,.0f} MiB", ""


def _named(log: GeneratedLog) -> str:
    return f"{log.records / 1e6:.1f} M records, {log.size / 1e9:.2f} GB"


def _step(what: str, log: GeneratedLog, **more: object) -> Measured:
    """Run a step in a process of its own."""
    sys.stderr.write(f"{what} {_named(log)}, {more['master']}\n")
    step = {"what": what, "directory": str(log.root), "size": log.size, **more}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.spark", "--step", json.dumps(step)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_STEP_SECONDS,
    )
    return Measured(**json.loads(ran.stdout.splitlines()[-1]))


# --- one step, in its own process


def _take_step(step: dict[str, Any]) -> Measured:
    from halfmq.spark_jobs.jobs.session import start_session  # noqa: PLC0415  not where steps are planned

    with tempfile.TemporaryDirectory(prefix="halfmq-events-") as events:
        settings = {
            "spark.master": step["master"],
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": Path(events).as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }
        spark = start_session(log_bytes=step["size"], settings=settings)
        try:
            run = {"read": _read, "audit": _audit}[step["what"]]
            run(spark, step, warm_up=True)
            first = _cpu_seconds()
            if step["what"] == "read":
                run(spark, step)
            first = _cpu_seconds() - first
            with _peak_memory() as memory:
                cpu, began = _cpu_seconds(), time.perf_counter()
                run(spark, step)
                seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
        finally:
            spark.stop()
        return Measured(seconds, cpu, max(memory), _shuffled(Path(events)), first)


def _loop_seconds() -> float:
    began = time.process_time()
    step = 0
    while step < _STEPS:
        step += 1
    return time.process_time() - began


def _read(spark: Any, step: dict[str, Any], *, warm_up: bool = False) -> None:
    from halfmq.spark_jobs.datasource import FORMAT, register  # noqa: PLC0415
    from halfmq.spark_jobs.source.schema import ddl  # noqa: PLC0415

    register(spark)
    columns = step["columns"]
    reader = spark.read.format(FORMAT).schema(ddl(*columns))
    reader = reader.option("includeValue", str("value" in columns).lower())
    if warm_up:
        reader = reader.option("endingOffsets", str(_WARM_UP))
    reader.load(step["directory"]).write.format("noop").mode("overwrite").save()


def _audit(spark: Any, step: dict[str, Any], *, warm_up: bool = False) -> None:
    from halfmq.spark_jobs.audit.auditor import audited  # noqa: PLC0415

    if warm_up:  # starts the workers; an audit is mostly run once, so that is all it gets
        _read(spark, {**step, "columns": _AUDIT_COLUMNS}, warm_up=True)
        return
    with audited(spark, step["directory"]) as audit:
        if not audit.is_clean:
            raise SystemExit(f"the generated log has anomalies: {audit.anomalies[:3]}")


def _shuffled(folder: Path) -> int:
    """Sum up what tasks wrote for shuffles, from Spark's own log of events."""
    total = 0
    for path in folder.iterdir():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if '"SparkListenerTaskEnd"' in line:
                    metrics = json.loads(line).get("Task Metrics") or {}
                    written = metrics.get("Shuffle Write Metrics") or {}
                    total += written.get("Shuffle Bytes Written", 0)
    return total


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Sample the memory of all processes while the context lasts."""
    samples = [0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            samples.append(sum(map(_anonymous, _family())))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _anonymous(pid: int) -> int:
    try:
        return anonymous_bytes(pid)
    except (OSError, StopIteration):  # it has ended
        return 0


def _cpu_seconds() -> float:
    """Processor time of all processes of this run so far, of those that have ended too."""
    ticks = 0
    for pid in _family():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
        except OSError:
            continue
        user, system, children_user, children_system = map(int, fields.split()[11:15])
        ticks += user + system + children_user + children_system
    return ticks / os.sysconf("SC_CLK_TCK")


def _family() -> list[int]:
    """This process and all that descend from it."""
    family = [os.getpid()]
    for pid in family:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                family += map(int, children.read_text(encoding="ascii").split())
            except OSError:
                continue
    return family


if __name__ == "__main__":
    sys.exit(main())
