"""What it costs sends that a broker is watched, with fifty thousand undecided transactions.

Rounds in turn: sends at half the rate that the broker reaches; the same while metrics are scraped
each second and a console is open. The console is a process of lower priority that asks what the
pages Transactions and Now ask: the whole list, before the round begins, then metrics and findings
every five seconds. The figure is the 99th percentile of the latency, the median of all rounds.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final

from halfmq.client import Admin

from .build import cache_directory
from .checks import CheckedProducer
from .generator import Generator, Target, Timing, build_generator
from .one_table import print_measured
from .peers import HalfmqPeer
from .processes import ServerError, free_ports, on_cores, stop
from .scenarios import FlushDiskType, LoadKind, Scenario

UNDECIDED: Final = 50_000
RATIO_MAX: Final = 1.25
"""That the 99th percentile may become larger."""

_LOAD: Final = Scenario(kind=LoadKind.SEND, connections=16, window=1, mode=FlushDiskType.SYNC)
_WINDOW: Final = 128  # prepares without answer
_SCRAPE_S: Final = 1.0
_PAGE_S: Final = 5.0  # between two refreshes of the page Now
_NICE: Final = 10  # as the broker starts the console
_HEAD: Final = ("round", "alone: p50, p99, max ms", "watched: p50, p99, max ms", "ratio of p99")


async def _leave_undecided(target: Target) -> None:
    """Prepare transactions whose group has left, so that none is checked."""
    _, member = await asyncio.get_running_loop().create_connection(
        lambda: CheckedProducer("watched"), "127.0.0.1", target.port
    )
    for number in range(UNDECIDED):
        member.prepare(number, "CHECK_IMMUNITY_TIME_IN_SECONDS\13600\2")
        if number % _WINDOW == 0:
            await member.answers(_WINDOW)
    await member.answers(0)
    await member.close()


async def look(namesrv: str) -> None:
    """Ask as an open console does, until the process is ended."""
    async with Admin(namesrv=namesrv) as admin:
        count = len([one async for one in admin.transactions()])
        assert count == UNDECIDED, count
        print("listed", flush=True)
        while True:
            await admin.metrics()
            _ = [one async for one in admin.diagnose()]
            await asyncio.sleep(_PAGE_S)


@contextmanager
def _watched(target: Target, http_port: int) -> Iterator[None]:
    """Scrape and look for the length of the block."""
    ended = Event()

    def scrape() -> None:
        due = time.monotonic()
        while not ended.wait(max(due - time.monotonic(), 0)):
            due += _SCRAPE_S
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=60).read()

    scraper = Thread(target=scrape)
    command = [sys.executable, "-m", "benchmarks.watched", "--look", f"127.0.0.1:{target.port}"]
    console = subprocess.Popen(
        ["nice", "-n", str(_NICE), *command], stdout=subprocess.PIPE, text=True
    )
    scraper.start()
    try:
        assert console.stdout is not None
        console.stdout.readline()
        yield
        if console.poll() is not None:
            raise ServerError(f"the console ended with {console.returncode}")
    finally:
        ended.set()
        scraper.join()
        stop(console)


def measure(
    target: Target, http_port: int, generator: Generator, *, rounds: int, timing: Timing
) -> list[tuple[str, ...]]:
    """Return a row for each round, and one for the medians."""
    full = generator.run(_LOAD, target, "full", timing)
    rate = full.request_rate / 2
    rows, alone, watched = [], [], []
    for number in range(1, rounds + 1):
        before = generator.run(_LOAD, target, f"alone-{number}", timing, rate=rate).latency_us
        with _watched(target, http_port):
            beside = generator.run(_LOAD, target, f"beside-{number}", timing, rate=rate).latency_us
        alone.append(before.p99)
        watched.append(beside.p99)
        cells = [
            f"{one.p50 / 1_000:.2f}, {one.p99 / 1_000:.2f}, {one.max / 1_000:.2f}"
            for one in (before, beside)
        ]
        rows.append((str(number), *cells, f"{beside.p99 / before.p99:.2f}"))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    medians = statistics.median(alone), statistics.median(watched)
    ratio = medians[1] / medians[0]
    rows.append(
        (
            f"medians at {rate:,.0f}/s",
            *(f"p99 {one / 1_000:.2f} ms" for one in medians),
            f"{ratio:.2f} (limit {RATIO_MAX})",
        )
    )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    if options.look:
        asyncio.run(look(options.look))
    directory = options.directory or cache_directory()
    return print_measured(_HEAD, directory, partial(_measure, options, directory))


def _measure(options: argparse.Namespace, directory: Path) -> list[tuple[str, ...]]:
    several = (os.cpu_count() or 1) > 1
    http_port = free_ports(1)
    timing = Timing(seconds=options.seconds, warmup=1.0)
    peer = HalfmqPeer(cores=[0] if several else None, overrides=[f"httpListenPort={http_port}"])
    generator = build_generator(cpu=1 if several else None)
    with (
        peer.session(FlushDiskType.SYNC, directory) as session,
        session.target() as target,
        on_cores([1] if several else None),
    ):
        asyncio.run(_leave_undecided(target))
        return measure(target, http_port, generator, rounds=options.rounds, timing=timing)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, default 5")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load, default 10")
    parser.add_argument("--directory", type=Path, help="where stores are; default: the cache")
    parser.add_argument("--look", metavar="HOST:PORT", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
