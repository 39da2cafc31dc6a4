"""Measure our broker beside the limits of the machine and, on request, beside Apache RocketMQ.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .build import CompilerMissingError, cache_directory
from .generator import Generator, GeneratorError, Result, Target, Timing, build_generator
from .limits import Limits, measure_limits
from .machine import describe_machine
from .peers import ECHO, ROCKETMQ, EchoPeer, HalfmqPeer, Peer, Session, scratch
from .processes import ServerError, end_in_order
from .report import Measurement, Report, as_text, make_rows, write_json
from .rocketmq_peer import PeerMissingError, RocketMQPeer
from .scenarios import FlushMode, Kind, Scenario, all_scenarios

_DISPATCH: Final = (
    1.0  # seconds until what was filled can be read: a peer indexes behind the answer
)
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})
_LIMIT_SECONDS: Final = 0.5  # per limit and round


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one call measures, and how long."""

    scenarios: Sequence[Scenario]
    peers: Sequence[Peer]
    rounds: int
    timing: Timing
    generator: Generator
    directory: Path


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
    write_json(report, options.json)
    print(f"\nwritten to {options.json}")
    return 1 if any(m.error for m in measurements) else 0


# ---- measuring -----------------------------------------------------------------------------------


def _measure(plan: Plan) -> Iterator[Measurement]:
    for mode in FlushMode:
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
    sessions: dict[str, Session],
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
    return f"{scenario.kind}-c{scenario.connections}-w{scenario.window}-{round_number}"


def _run_once(plan: Plan, scenario: Scenario, server: str, target: Target, topic: str) -> Result:
    # RocketMQ knows no MSGPACK header; its clients send JSON.
    generator = replace(plan.generator, header="json") if server == ROCKETMQ else plan.generator
    if scenario.kind is Kind.PULL and server != ECHO:
        generator.fill(target, topic)
        time.sleep(_DISPATCH)
    return generator.run(scenario, target, topic, plan.timing)


def _tell_progress(
    scenario: Scenario, server: str, round_number: int, result: Result | None, error: str | None
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
    add("--scenario", action="append", help="only loads whose name contains this; repeatable")
    add("--list", action="store_true", help="print the names of the loads and end")
    add("--peer", action="append", choices=[ROCKETMQ], default=[], help="measure it as well")
    add("--no-halfmq", action="store_true", help="measure the limits and the peers alone")
    add("--peer-warmup", type=float, help="seconds of load for a JVM before round 1, default 25")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to our broker")
    add("--python", default=sys.executable, help="the Python that runs our broker")
    add("--header", choices=["json", "msgpack"], default="json", help="of requests to our broker")
    add("--opt-out", action="store_true", help="no wait for the disk in our transactions")
    add("--end", choices=["two-way", "one-way"], default="two-way", help="of END_TRANSACTION")
    add("--generator-cpu", type=int, default=1, help="core of the generator, -1: any; default 1")
    add("--broker-cpus", default="0", help="cores of our broker and of echo: 0,1 or all; default 0")
    add("--peer-cpus", default="all", help="cores of a peer, default all")
    add("--directory", type=Path, help="where stores are written; default: the cache directory")
    add("--json", type=Path, help="the result file; default: in the cache directory")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(scenario.name for scenario in all_scenarios()))
        parser.exit()
    _fill_defaults(options)
    if not _chosen(options.scenario):
        parser.error("no load has such a name; --list tells them")
    return options


def _fill_defaults(options: argparse.Namespace) -> None:
    quick = options.quick
    options.rounds = options.rounds or (1 if quick else 3)
    options.seconds = options.seconds or (1.0 if quick else 5.0)
    if options.warmup is None:
        options.warmup = 0.5 if quick else 1.0
    if options.peer_warmup is None:
        options.peer_warmup = 5.0 if quick else 25.0
    if (os.cpu_count() or 1) < 2:
        options.generator_cpu, options.broker_cpus = -1, "all"  # nothing to choose from
    options.directory = options.directory or cache_directory()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    options.json = options.json or cache_directory() / "results" / f"{stamp}.json"


def _chosen(names: Sequence[str] | None) -> list[Scenario]:
    scenarios = all_scenarios()
    if not names:
        return scenarios
    return [scenario for scenario in scenarios if any(name in scenario.name for name in names)]


def _cores(text: str) -> list[int] | None:
    return None if text == "all" else [int(core) for core in text.split(",")]


def _plan(options: argparse.Namespace) -> Plan:
    cpu = None if options.generator_cpu < 0 else options.generator_cpu
    generator = build_generator(cpu=cpu, header=options.header, end=options.end)
    cores = _cores(options.broker_cpus)
    peers: list[Peer] = [EchoPeer(cores=cores)]
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
        scenarios=_chosen(options.scenario),
        peers=peers,
        rounds=options.rounds,
        timing=Timing(seconds=options.seconds, warmup=options.warmup),
        generator=generator,
        directory=options.directory,
    )


def _opt_out(options: argparse.Namespace) -> list[str]:
    """Return the setting with which our broker answers transactions before they are on disk."""
    loads = [load for load in _chosen(options.scenario) if load.kind is Kind.TRANSACTION]
    rounds = range(1, options.rounds + 1)
    topics = {_topic(load, number) for load in loads for number in rounds}
    return [f"transactionAsyncFlushTopics={';'.join(sorted(topics))}"]


def _rocketmq(options: argparse.Namespace, generator: Generator) -> RocketMQPeer:
    """The peer and its warm-up: the loads that are measured, in turn, on a topic of their own."""
    scenarios = [s for s in _chosen(options.scenario) if s.kind is not Kind.PULL]
    loads = list({s.shape: s for s in scenarios}.values()) or all_scenarios()[:1]
    timing = Timing(seconds=options.peer_warmup / len(loads), warmup=0)

    def warm_up(target: Target) -> None:
        for load in loads:
            replace(generator, header="json").run(load, target, "warm-up", timing)

    return RocketMQPeer(cores=_cores(options.peer_cpus), warm_up=warm_up)


def _settings(options: argparse.Namespace, plan: Plan) -> dict[str, dict[str, str]]:
    run = {
        "rounds": str(plan.rounds),
        "seconds": str(plan.timing.seconds),
        "warmup": str(plan.timing.warmup),
        "peer_warmup": str(options.peer_warmup),
        "header": options.header,
        "end": options.end,
        "generator_cpu": str(options.generator_cpu),
    }
    return {"run": run, **{peer.name: peer.settings for peer in plan.peers}}
