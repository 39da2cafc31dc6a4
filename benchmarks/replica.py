"""What a second copy of the log costs: without a slave, with one, and beside RocketMQ's.

In each round, in turn: halfmq alone; with an Apache RocketMQ slave that has to confirm
(``minInSyncReplicas=2``); RocketMQ alone; and RocketMQ as ``SYNC_MASTER`` with
``inSyncReplicas=2`` and a slave. All under SYNC_FLUSH, each with an empty store. Per load: requests
per second, median and 99th percentile of the latency, and processor time of the master per request.
Of the figures the processor time depends least on what else runs here.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from .build import cache_directory
from .generator import Generator, LoadResult, Target, Timing, build_generator
from .one_table import print_measured
from .peers import HalfmqPeer
from .processes import ServerError, on_cores
from .rocketmq_peer import RocketMQPeer, rocketmq_slave
from .scenarios import FlushDiskType, LoadKind, Scenario

LOADS: Final = tuple(
    Scenario(kind=kind, connections=count, window=1, mode=FlushDiskType.SYNC)
    for kind, counts in {LoadKind.SEND: (1, 16, 64), LoadKind.TRANSACTION: (16,)}.items()
    for count in counts
)
_FIRST: Final = Scenario(kind=LoadKind.SEND, connections=1, window=1, mode=FlushDiskType.SYNC)
_CONNECT_S: Final = 60.0  # until a slave has found its master: it asks every ten seconds
_HEAD: Final = ("server", "load", "requests/s", "p50 ms", "p99 ms", "CPU us/request")

Server = Callable[[], Iterator[Target]]


def servers(
    directory: Path, cores: Sequence[int] | None, generator: Generator
) -> dict[str, Server]:
    """Return the servers by name, each as a generator of one target."""

    def halfmq(slaves: bool) -> Iterator[Target]:
        needed = ["slaveAddresses=127.0.0.1", "minInSyncReplicas=2", "haListenPort=0"]
        yield from _served(HalfmqPeer(cores=cores, overrides=needed if slaves else []), slaves)

    def rocketmq(slaves: bool) -> Iterator[Target]:
        more = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": "2"} if slaves else {}
        yield from _served(RocketMQPeer(cores=cores, warm_up=lambda _: None, more=more), slaves)

    def _served(peer: HalfmqPeer | RocketMQPeer, slaves: bool) -> Iterator[Target]:
        with peer.session(FlushDiskType.SYNC, directory) as session, session.target() as target:
            if not slaves:
                yield target
                return
            assert target.namesrv_port is not None
            with rocketmq_slave(directory, target.namesrv_port, cores):
                _wait_for_slave(generator, target)
                yield target

    return {
        "halfmq": lambda: halfmq(slaves=False),
        "halfmq, minInSyncReplicas=2": lambda: halfmq(slaves=True),
        "RocketMQ": lambda: rocketmq(slaves=False),
        "RocketMQ SYNC_MASTER": lambda: rocketmq(slaves=True),
    }


def _wait_for_slave(generator: Generator, target: Target) -> None:
    """Return when messages are acknowledged."""
    end = time.monotonic() + _CONNECT_S
    while True:
        result = generator.run(_FIRST, target, "first", Timing(seconds=1.0, warmup=0), requests=8)
        if result.total.ok and not result.total.failed:
            return
        if time.monotonic() > end:
            raise ServerError(f"no slave: {result.first_refusal}")
        time.sleep(1.0)


@contextmanager
def _running(server: Server) -> Iterator[Target]:
    yield from server()


def _row(name: str, load: str, results: Sequence[LoadResult]) -> tuple[str, ...]:
    def median(figure: Callable[[LoadResult], float]) -> float:
        return statistics.median(map(figure, results))

    return (
        *(name, load),
        f"{median(lambda one: one.measured.ok / one.seconds):,.0f}",
        f"{median(lambda one: one.latency_us.p50) / 1_000:.2f}",
        f"{median(lambda one: one.latency_us.p99) / 1_000:.2f}",
        f"{median(lambda one: one.server_cpu_seconds / max(one.measured.ok, 1)) * 1e6:.0f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    directory = options.directory or cache_directory()
    return print_measured(_HEAD, directory, partial(_measure, options, directory))


def _measure(options: argparse.Namespace, directory: Path) -> list[tuple[str, ...]]:
    several = (os.cpu_count() or 1) > 1
    timing = Timing(seconds=options.seconds, warmup=max(options.seconds / 3, 1.0))
    warm_up = Timing(seconds=options.warm_up / len(LOADS), warmup=0)
    found: dict[tuple[str, str], list[LoadResult]] = {}
    generator = build_generator()
    for number in range(options.rounds):
        for name, server in servers(directory, None, generator).items():
            with _running(server) as target, on_cores([1] if several else None):
                for load in LOADS:  # each JVM compiles what it needs, slaves too
                    generator.run(load, target, "warm-up", warm_up)
                for load in LOADS:
                    topic = f"{load.kind}-{load.connections}"
                    result = generator.run(load, target, topic, timing)
                    found.setdefault((name, load.shape), []).append(result)
                    row = _row(name, load.shape, [result])
                    print(number + 1, *row, sep="  ", file=sys.stderr, flush=True)
    return [_row(*key, results) for key, results in found.items()]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replica", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load, default 5")
    parser.add_argument(
        "--warm-up", type=float, default=20.0, help="seconds of all loads together, default 20"
    )
    parser.add_argument("--directory", type=Path, help="where stores are; default: the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
