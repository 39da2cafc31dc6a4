"""What a second broker under one command brings: one, two, and Apache RocketMQ, in one run.

In each round, in turn: halfmq with one broker, with ``brokers=2``, and RocketMQ 5.3.3, all under
SYNC_FLUSH, with usual messages and empty stores. Two generators, each with half of the connections,
send to the two brokers, or both to the only one. Per load: messages per second of both, and
processor time of all brokers per message, which depends least on what else runs here.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from .build import cache_directory
from .generator import Generator, LoadResult, Target, Timing, build_generator
from .one_table import print_measured
from .peers import scratch
from .processes import free_ports, halfmq_broker
from .rocketmq_peer import RocketMQPeer
from .scenarios import FlushDiskType, LoadKind, MessageShape, Scenario

GENERATORS: Final = 2
LOADS: Final = tuple(
    Scenario(
        kind=kind,
        connections=connections // GENERATORS,
        window=1,
        mode=FlushDiskType.SYNC,
        message=MessageShape.USUAL,
    )
    for kind, connections in {
        LoadKind.SEND: 64,
        LoadKind.BATCH: 8,
        LoadKind.TRANSACTION: 64,
        LoadKind.PULL: 8,
    }.items()
)
_PORTS: Final = 40  # from the VIP port of the first broker to the name server's, above the last
_START_S: Final = 60.0
_DISPATCH_S: Final = 1.0  # until filled queues can be read
_HEAD: Final = ("server", "load", "messages/s", "CPU us/message")


@contextmanager
def halfmq(directory: Path, brokers: int) -> Iterator[list[Target]]:
    """Run so many brokers; yield a target for each generator."""
    first = free_ports(_PORTS) + 2
    with scratch(directory, "brokers") as home:
        settings = {
            "brokers": brokers,
            "listenPort": first,
            "namesrvListenPort": first + _PORTS - 3,
            "httpListenPort": -1,
            "storePathRootDir": home / "store",
        }
        log = home / "log"
        with halfmq_broker(settings, log, timeout=_START_S) as (process, _):
            found = re.findall(r"event=child_started child=\S+ pid=(\d+)", log.read_text())
            pids = [int(pid) for pid in found] or [process.pid]
            ports = [first + 10 * number for number in range(brokers)]
            targets = [
                Target(port=port, namesrv_port=port, pid=pid)
                for port, pid in zip(ports, pids, strict=True)
            ]
            yield (targets * GENERATORS)[:GENERATORS]


@contextmanager
def rocketmq(directory: Path) -> Iterator[list[Target]]:
    """Run RocketMQ; yield the same target for each generator."""
    peer = RocketMQPeer(cores=None, warm_up=lambda _: None)
    with peer.session(FlushDiskType.SYNC, directory) as session, session.target() as target:
        yield [target] * GENERATORS


def measure(
    generator: Generator, load: Scenario, targets: Sequence[Target], timing: Timing
) -> tuple[float, float]:
    """Return messages per second, and microseconds of processor time per message."""
    topics = [f"{load.kind}-{number}" for number in range(GENERATORS)]
    pairs = list(zip(targets, topics, strict=True))
    if load.kind is LoadKind.PULL:
        for target, topic in pairs:
            generator.fill(load, target, topic)
        time.sleep(_DISPATCH_S)

    def run(pair: tuple[Target, str]) -> LoadResult:
        return generator.run(load, *pair, timing)

    with ThreadPoolExecutor(GENERATORS) as threads:
        results = list(threads.map(run, pairs))
    for result in results:
        if result.flaws:
            print("; ".join(result.flaws), file=sys.stderr)
    cpu = {one.pid: result.server_cpu_seconds for one, result in zip(targets, results, strict=True)}
    messages = sum(result.measured.messages for result in results)
    rate = sum(result.rate for result in results)
    return rate, sum(cpu.values()) / max(messages, 1) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    directory = options.directory or cache_directory()
    return print_measured(_HEAD, directory, partial(_measure_servers, options, directory))


def _measure_servers(options: argparse.Namespace, directory: Path) -> list[tuple[str, ...]]:
    timing = Timing(seconds=options.seconds, warmup=max(options.seconds / 3, 1.0))
    servers = {
        "halfmq": partial(halfmq, directory, 1),
        "halfmq, brokers=2": partial(halfmq, directory, 2),
        **({} if options.no_peer else {"RocketMQ": partial(rocketmq, directory)}),
    }
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    generator = build_generator()
    for _round in range(options.rounds):
        for name, server in servers.items():
            with ExitStack() as stack:
                targets = stack.enter_context(server())
                for load in LOADS:
                    figures = measure(generator, load, targets, timing)
                    shape = replace(load, connections=load.connections * GENERATORS).shape
                    found.setdefault((name, shape), []).append(figures)
                    print(name, shape, *map(round, figures), file=sys.stderr, flush=True)
    rows: list[tuple[str, ...]] = []
    for key, results in found.items():
        rate, cpu_us = map(statistics.median, zip(*results, strict=True))
        rows.append((*key, f"{rate:,.0f}", f"{cpu_us:.0f}"))
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brokers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load, default 5")
    parser.add_argument("--no-peer", action="store_true", help="without RocketMQ")
    parser.add_argument("--directory", type=Path, help="where stores are; default: the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
