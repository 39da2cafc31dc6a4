"""Measure the broker beside the limits of the machine and, on request, beside Apache RocketMQ.

For each flush mode: start what a peer needs once; then in every round, load by load, measure the
disk limit and each server right after the other. So a ratio compares figures seconds apart.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from .build import CompilerMissingError, cache_directory
from .generator import Generator, GeneratorError, LoadResult, Target, Timing, build_generator
from .limits import Limits, measure_limits
from .machine import describe_machine
from .peers import ECHO, ROCKETMQ, EchoPeer, HalfmqPeer, Peer, ServerRun, scratch
from .processes import ServerError, end_in_order
from .report import Measurement, Report, as_text, make_rows, write_json
from .rocketmq_peer import PeerMissingError, RocketMQPeer
from .scenarios import (
    FlushDiskType,
    LoadKind,
    MessageShape,
    Scenario,
    all_scenarios,
    shape_scenarios,
)

_DISPATCH: Final = 1.0  # seconds until filled queues can be read: a peer indexes after its answer
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})
_LIMIT_SECONDS: Final = 0.5  # per limit and round
_HEADERS: Final = ("json", "rocketmq", "msgpack")
_MESSAGE_HELP: Final = "what messages carry; repeatable, default lean and usual"
_SHAPES_HELP: Final = (
    "our broker alone, one round: usual messages, and beside them wide ones, other bodies, the "
    "ROCKETMQ header, and requests on schedule at half load"
)
_CORES_HELP: Final = "pin every server to these cores, the generator to another; default: nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one call measures, and how long."""

    scenarios: Sequence[Scenario]
    peers: Sequence[Peer]
    rounds: int
    timing: Timing
    generator: Generator
    directory: Path
    filled: set[tuple[int, str]] = field(default_factory=set)  # by process id and topic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0: all measured, 1: something failed, 2: it cannot be measured here."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        plan = _plan(options)
        limits = measure_limits(plan.directory, seconds=_LIMIT_SECONDS)
        measurements = list(_measure(plan))
    except (CompilerMissingError, PeerMissingError) as error:
        print(error, file=sys.stderr)
        return 2
    report = Report(
        machine=describe_machine(plan.directory),
        settings=_settings(options, plan),
        limits=limits,
        measurements=measurements,
        rows=make_rows(measurements, limits),
    )
    print(as_text(report))
    write_json(report, options.output)
    print(f"\nwritten to {options.output}")
    return 1 if any(m.error for m in measurements) else 0


# ---- measuring -----------------------------------------------------------------------------------


def _measure(plan: Plan) -> Iterator[Measurement]:
    for mode in FlushDiskType:
        scenarios = [scenario for scenario in plan.scenarios if scenario.mode is mode]
        if not scenarios:
            continue
        with scratch(plan.directory, "run") as directory, ExitStack() as stack:
            sessions = {
                peer.name: stack.enter_context(peer.session(mode, directory)) for peer in plan.peers
            }
            for round_number in range(1, plan.rounds + 1):
                for scenario in scenarios:
                    # Right before each load: a shared disk can be five times slower a minute later.
                    disk = measure_limits(directory, seconds=_LIMIT_SECONDS, single_only=True)
                    yield from _compare(plan, scenario, sessions, round_number, disk)


def _compare(
    plan: Plan,
    scenario: Scenario,
    sessions: dict[str, ServerRun],
    round_number: int,
    disk: Limits,
) -> Iterator[Measurement]:
    """All servers under one load, one right after the other."""
    for server, session in sessions.items():
        result, error = None, None
        topic = _topic(scenario, round_number)
        try:
            with session.target() as target:
                result = _run_once(plan, scenario, server, target, topic)
        except (GeneratorError, ServerError) as failure:
            error = str(failure)
        _tell_progress(scenario, server, round_number, result, error)
        yield Measurement(
            scenario=scenario,
            server=server,
            round=round_number,
            disk=disk,
            result=result,
            error=error,
        )


def _topic(scenario: Scenario, round_number: int) -> str:
    """Sends share topics, lest a peer that stays collects thousands; what is pulled is fresh."""
    pulled = f"-pulled-{round_number}" if scenario.kind is LoadKind.PULL else ""
    return f"{scenario.message}-{scenario.body_size}{pulled}"


def _run_once(
    plan: Plan, scenario: Scenario, server: str, target: Target, topic: str
) -> LoadResult:
    # RocketMQ knows no MSGPACK header, and answers its binary one in JSON; its clients send JSON.
    generator = replace(plan.generator, header="json") if server == ROCKETMQ else plan.generator
    place = (target.pid, topic)
    if scenario.kind is LoadKind.PULL and server != ECHO and place not in plan.filled:
        generator.fill(scenario, target, topic)
        plan.filled.add(place)
        time.sleep(_DISPATCH)
    if not scenario.half_load:
        return generator.run(scenario, target, topic, plan.timing)
    most = generator.run(scenario, target, topic, plan.timing).request_rate
    return generator.run(scenario, target, topic, plan.timing, rate=most / 2)


def _tell_progress(
    scenario: Scenario, server: str, round_number: int, result: LoadResult | None, error: str | None
) -> None:
    outcome = f"{result.rate:,.0f}/s, {result.cpu_us:.2f} us" if result else error
    print(f"[{round_number}] {scenario.name}, {server}: {outcome}", file=sys.stderr, flush=True)


# ---- options -------------------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of one second: figures only indicate")
    add("--rounds", type=int, help="default 3")
    add("--seconds", type=float, help="measured window of one run, default 5")
    add("--warmup", type=float, help="seconds before the window, default 1")
    add("--message", action="append", choices=list(map(str, MessageShape)), help=_MESSAGE_HELP)
    add("--shapes", action="store_true", help=_SHAPES_HELP)
    add("--scenario", action="append", help="only loads whose name contains this; repeatable")
    add("--list", action="store_true", help="print the names of the loads and end")
    add("--peer", action="append", choices=[ROCKETMQ], default=[], help="measure it as well")
    add("--no-halfmq", action="store_true", help="measure the limits and the peers alone")
    add("--no-echo", action="store_true", help="measure no floor F: a third less time")
    add("--peer-warmup", type=float, help="seconds of load for a JVM before round 1, default 25")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to our broker")
    add("--python", default=sys.executable, help="the Python that runs our broker")
    add("--header", choices=_HEADERS, default="json", help="of requests to our broker")
    add("--opt-out", action="store_true", help="no wait for the disk in our transactions")
    add("--cores", type=_cores, metavar="0,1", help=_CORES_HELP)
    add("--directory", type=Path, help="where stores are written; default: the cache directory")
    add("--output", type=Path, help="the result file; default: in the cache directory")
    options = parser.parse_args(arguments)
    if options.shapes and options.peer:
        parser.error("--shapes measures our broker alone, without --peer")
    _fill_defaults(options)
    if options.list:
        print("\n".join(scenario.name for scenario in _chosen(options)))
        parser.exit()
    if not _chosen(options):
        parser.error("no load has such a name; --list tells them")
    return options


def _fill_defaults(options: argparse.Namespace) -> None:
    quick = options.quick
    options.message = [MessageShape(name) for name in options.message or ("lean", "usual")]
    options.rounds = options.rounds or (1 if quick or options.shapes else 3)
    options.seconds = options.seconds or (1.0 if quick else 5.0)
    if options.warmup is None:
        options.warmup = 0.5 if quick else 1.0
    if options.peer_warmup is None:
        options.peer_warmup = 5.0 if quick else 25.0
    options.directory = options.directory or cache_directory()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    options.output = options.output or cache_directory() / "results" / f"{stamp}.json"


def _chosen(options: argparse.Namespace) -> list[Scenario]:
    scenarios = shape_scenarios() if options.shapes else all_scenarios(options.message)
    names = options.scenario or [""]
    return [scenario for scenario in scenarios if any(name in scenario.name for name in names)]


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]


def _generator_cpu(cores: Sequence[int] | None) -> int | None:
    """A core that no server has; None when nothing is pinned, or all cores are the servers'."""
    free = os.sched_getaffinity(0) - set(cores or ())
    return min(free) if cores and free else None


def _plan(options: argparse.Namespace) -> Plan:
    cores = options.cores
    generator = build_generator(cpu=_generator_cpu(cores), header=options.header)
    peers: list[Peer] = [] if options.no_echo or options.shapes else [EchoPeer(cores=cores)]
    if not options.no_halfmq:
        peers.append(
            HalfmqPeer(
                cores=cores,
                overrides=options.set,
                async_overrides=_opt_out(options) if options.opt_out else (),
                python=options.python,
            )
        )
    if ROCKETMQ in options.peer:
        peers.append(_rocketmq(options, generator))
    machine = describe_machine(options.directory)
    if machine.file_system in _MEMORY_FILE_SYSTEMS:
        print(f"{options.directory} is a memory disk: durable figures mean nothing there")
    return Plan(
        scenarios=_chosen(options),
        peers=peers,
        rounds=options.rounds,
        timing=Timing(seconds=options.seconds, warmup=options.warmup),
        generator=generator,
        directory=options.directory,
    )


def _opt_out(options: argparse.Namespace) -> list[str]:
    """Return the setting with which our broker answers transactions before they are on disk."""
    topics = {
        f"{topic}-{number:02}" if load.message.topics > 1 else topic
        for load in _chosen(options)
        if load.kind is LoadKind.TRANSACTION
        for topic in [_topic(load, 0)]
        for number in range(load.message.topics)
    }
    return [f"transactionAsyncFlushTopics={';'.join(sorted(topics))}"]


def _rocketmq(options: argparse.Namespace, generator: Generator) -> RocketMQPeer:
    """The peer and its warm-up: the loads that are measured, in turn, on a topic of their own."""
    scenarios = [s for s in _chosen(options) if s.kind is not LoadKind.PULL] or all_scenarios(
        options.message
    )
    loads = list({(s.shape, s.message): s for s in scenarios}.values())
    timing = Timing(seconds=options.peer_warmup / len(loads), warmup=0)

    def warm_up(target: Target) -> None:
        for load in loads:
            topic = f"warm-up-{load.message}"
            replace(generator, header="json").run(load, target, topic, timing)

    return RocketMQPeer(cores=options.cores, warm_up=warm_up)


def _settings(options: argparse.Namespace, plan: Plan) -> dict[str, dict[str, str]]:
    run = {
        "rounds": str(plan.rounds),
        "seconds": str(plan.timing.seconds),
        "warmup": str(plan.timing.warmup),
        "peer_warmup": str(options.peer_warmup),
        "header": options.header,
        "generator_cpu": str(plan.generator.cpu if plan.generator.cpu is not None else "any"),
    }
    return {"run": run, **{peer.name: peer.settings for peer in plan.peers}}
