"""What a send costs the process that sends: our Python client against the echo server.

The echo server answers at once, so what is measured is the client alone: its processor time per
``await producer.send(Message(...))`` with 1, 64 and 256 sends outstanding on one connection, with
either header and on either event loop. Beside it stands the C load generator under the same load
(one connection, as many requests in flight): its processor time is the limit C.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from halfmq.client.config import ClientConfig
from halfmq.client.message import Message
from halfmq.client.producer import Producer

from .build import CompilerMissingError, cache_directory
from .generator import Target, Timing, build_generator
from .machine import describe_machine
from .peers import EchoPeer
from .processes import end_in_order, on_cores
from .report import table
from .scenarios import BODY_SIZE, FlushDiskType, LoadKind, Scenario

Header = Literal["json", "msgpack"]

_OUTSTANDING: Final = (1, 64, 256)
_HEADERS: Final[tuple[Header, ...]] = ("json", "msgpack")
_WARMUP: Final = 0.3  # seconds: connecting, the route, the interpreter's caches
_GIVE_UP: Final = 30.0  # seconds beside a run's own, for a client that never gets through
_HEAD: Final = ("client", "header", "outstanding", "sends/s", "CPU us", "C us", "xC")

NewLoop = Callable[[], asyncio.AbstractEventLoop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How the client is used in one run."""

    header: Header
    outstanding: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run of the client took."""

    sends: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.sends / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_seconds / self.sends * 1e6


async def measure(port: int, load: Load) -> Cost:
    """Keep ``load.outstanding`` sends running; a send that fails ends the measurement."""
    config = ClientConfig(namesrv=f"127.0.0.1:{port}", header_type=load.header)
    async with (
        asyncio.timeout(load.seconds + _WARMUP + _GIVE_UP),
        Producer("benchmark", config=config) as producer,
    ):
        sent = 0
        ends_at = time.perf_counter() + _WARMUP

        async def send_on() -> None:
            nonlocal sent
            body = b"x" * BODY_SIZE
            while time.perf_counter() < ends_at:
                await producer.send(Message("echo", body, tags="TagA"))
                sent += 1

        async def send_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(load.outstanding):
                    tasks.create_task(send_on())

        await send_all()
        sent = 0
        gc.collect()
        began, cpu_began = time.perf_counter(), time.process_time()
        ends_at = began + load.seconds
        await send_all()
        return Cost(sent, time.perf_counter() - began, time.process_time() - cpu_began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2: it cannot be measured here."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = cache_directory()
    several = (os.cpu_count() or 1) > 1
    echo = EchoPeer(cores=[0] if several else None)
    try:
        with (
            echo.session(FlushDiskType.ASYNC, directory) as session,
            session.target() as target,
            on_cores([1] if several else None),
        ):
            rows = _measure_all(target, options.seconds, _loops(options.loop))
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    machine = describe_machine(directory)
    print(f"{machine.processor}, {machine.cores} cores, {machine.kernel}, {machine.python}\n")
    print(table(_HEAD, rows))
    return 0


def _measure_all(
    target: Target, seconds: float, loops: dict[str, NewLoop]
) -> list[tuple[str, ...]]:
    rows = []
    for header in _HEADERS:
        for outstanding in _OUTSTANDING:
            limit = _limit_us(target, header, outstanding, seconds)
            load = Load(header=header, outstanding=outstanding, seconds=seconds)
            for loop, new_loop in loops.items():
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    cost = runner.run(measure(target.port, load))
                rows.append(_row(loop, load, cost, limit))
    return rows


def _loops(only: str | None) -> dict[str, NewLoop]:
    """The event loops of this machine by name."""
    loops: dict[str, NewLoop] = {"asyncio": asyncio.new_event_loop}
    if only == "asyncio":
        return loops
    try:
        import uvloop  # noqa: PLC0415 - absent on some platforms
    except ImportError:
        return loops
    loops["uvloop"] = uvloop.new_event_loop
    return {only: loops[only]} if only else loops


def _limit_us(target: Target, header: str, outstanding: int, seconds: float) -> float:
    """What the C generator spends per message: the limit C."""
    generator = build_generator(header=header)
    load = Scenario(kind=LoadKind.SEND, connections=1, window=outstanding, mode=FlushDiskType.ASYNC)
    timing = Timing(seconds=seconds, warmup=_WARMUP)
    return generator.run(load, target, "echo", timing).generator_cpu_us


def _row(loop: str, load: Load, cost: Cost, limit_us: float) -> tuple[str, ...]:
    return (
        loop,
        load.header,
        str(load.outstanding),
        f"{cost.rate:,.0f}",
        f"{cost.cpu_us:.2f}",
        f"{limit_us:.2f}",
        f"{cost.cpu_us / limit_us:.1f}",
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run, default 2")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], help="default: both")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
