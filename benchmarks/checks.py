"""What check-back costs others, and how late it is: with a hundred thousand undecided transactions.

Three measurements. *Slices*: in this process, a checker over a real store asks about all of them
at once; each of its turns keeps the event loop, so the longest counts. *Storm*: all are due while
their group is away; it comes back in the middle of a load of sends, whose latency is compared with
that before. *Steady*: more transactions become due, so many a second, while the others stay
undecided; how late is each check when the producer has it?
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
from pathlib import Path
from random import Random
from typing import Final, cast

from halfmq.broker.config import TransactionConfig
from halfmq.broker.ports import Connection, OnAnswer
from halfmq.broker.transaction.half import half_request
from halfmq.broker.transaction.transaction_service import TransactionService
from halfmq.remoting.bodies import HeartbeatData, ProducerData, encode_heartbeat
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import HeartbeatRequestHeader, SendMessageRequestHeaderV2
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import decode_record
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from .build import CompilerMissingError, cache_directory
from .generator import Generator, LoadResult, Target, Timing, build_generator
from .machine import describe_machine
from .peers import HalfmqPeer, scratch
from .pending_steps import AsPrepared, fetch_at_once
from .processes import ServerError, end_in_order, on_cores
from .report import table
from .scenarios import BODY_SIZE, LoadKind, Scenario
from .scenarios import FlushDiskType as Mode

COUNT: Final = 100_000
RATE: Final = 2_000
SLICE_MS_MAX: Final = 2.0
"""That one turn of the checker may keep the loop."""
LATE_MS_MAX: Final = 1_000.0
"""From due to the producer, 99 of 100."""

_TIMEOUT_MS: Final = 1_000  # age of the first check
_WINDOW: Final = 256  # prepares without answer
_PREPARES_PER_S: Final = 2_500  # expected of a slow machine
_WARMUP_S: Final = 0.5
_GIVE_UP_S: Final = 10.0  # without a check in a storm
_POLL_S: Final = 0.05
_LOAD: Final = Scenario(kind=LoadKind.SEND, connections=16, window=1, mode=Mode.SYNC)
_HEAD: Final = ("what", "of", "measured", "limit")
_HOST: Final = pack_host("127.0.0.1", 10911)

PhaseRow = tuple[str, str, str, str]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _share(values: Sequence[float], share: float) -> float:
    """Return the value that so many of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")


# --- slices, in this process


class _Willing:
    """A producer that takes every check at once, and the directory that knows only it."""

    name = "willing"
    closed = False
    writable = True
    acknowledges = True

    def __init__(self) -> None:
        self.waiting: list[OnAnswer] = []

    def producers_of(self, _group: str) -> Sequence[Connection]:
        return (cast("Connection", self),)

    def has_left(self, _group: str, _connection: object) -> bool:
        return False

    def ask(self, _code: int, _header: object, _body: bytes, on_answer: OnAnswer) -> bool:
        if len(self.waiting) >= _WINDOW:
            return False
        self.waiting.append(on_answer)
        return True

    def take(self) -> int:
        """Acknowledge what was asked; return how many that were."""
        waiting, self.waiting = self.waiting, []
        for on_answer in waiting:
            on_answer(RemotingCommand(code=ResponseCode.SUCCESS))
        return len(waiting)


def _half(number: int) -> tuple[AppendRequest, str]:
    key = f"7F000001{number:024X}"
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": "slices", "UNIQ_KEY": key})
    message = AppendRequest(
        topic="orders",
        queue_id=0,
        body=bytes(BODY_SIZE),
        properties=properties,
        born_timestamp=_now_ms(),
        born_host=_HOST,
        store_host=_HOST,
    )
    return message, key


def measure_slices(root: Path, count: int) -> list[PhaseRow]:
    """Have all asked about that a store holds, and time each turn of the checker."""
    store_config = StoreConfig(root=root, flush_mode=FlushMode.ASYNC_FLUSH)
    store = MessageStore(store_config, now_ms=_now_ms)
    store.open()
    for start in range(0, count, 200):
        store.append([half_request(*_half(number)) for number in range(start, start + 200)])
        store.tick()
    willing = _Willing()
    service = TransactionService(
        store,
        willing,
        AsPrepared(),
        TransactionConfig(timeout_ms=1, check_interval_ms=600_000),
        broker_name="broker-a",
        store_host=_HOST,
        now_ms=_now_ms,
        monotonic_ms=lambda: time.monotonic_ns() // 1_000_000,
        snapshot_path=root / "config" / "halfmqTransactions",
        record_size_max=store_config.record_size_max,
        fetch=fetch_at_once,
        snapshot_log_bytes=1 << 60,
        jitter=Random(1),
    )
    service.rebuild()
    gc.collect()
    gc.freeze()  # as the broker does
    time.sleep(0.6)  # the checker waits a moment after a start
    slices: list[float] = []
    walls: list[float] = []
    taken = 0
    began = time.perf_counter()
    while taken < count:
        # What else runs on the machine stops this thread as well; its own time is the figure.
        before, before_cpu = time.perf_counter(), time.thread_time()
        service.tick()
        slices.append((time.thread_time() - before_cpu) * 1_000)
        walls.append((time.perf_counter() - before) * 1_000)
        taken += willing.take()
    seconds = time.perf_counter() - began
    store.close()
    return [
        ("longest slice", f"{count:,}", f"{max(slices):.2f} ms", f"{SLICE_MS_MAX:.0f} ms"),
        ("  with what disturbed it", "", f"{max(walls):.2f} ms", ""),
        ("  999 of 1000", "", f"{_share(slices, 0.999):.2f} ms", ""),
        ("  median", f"{len(slices):,} slices", f"{_share(slices, 0.5):.2f} ms", ""),
        ("  all asked, in one process", f"{count:,}", f"{count / seconds:,.0f}/s", ""),
    ]


# --- storm and steady, with a broker


class CheckedProducer(asyncio.Protocol):
    """One producer of a group on its own connection, which takes every check."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.late_ms: list[float] = []  # of each check, when it came
        self.last_check = 0.0
        self._decoder = FrameDecoder(responses_first=True)
        self._transport: asyncio.Transport | None = None
        self._opaque = 0
        self._unanswered = 0
        self._refused: RemotingCommand | None = None
        self._answered = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now_ms = time.time() * 1_000
        acks = []
        for command in self._decoder.receive_data(data):
            if command.is_response:
                self._unanswered -= 1
                if command.code != ResponseCode.SUCCESS:
                    self._refused = command
            elif command.code == RequestCode.CHECK_TRANSACTION_STATE:
                acks.append(encode_reply(command))
                stored_ms = decode_record(command.body).store_timestamp
                self.late_ms.append(now_ms - stored_ms - _TIMEOUT_MS)
                self.last_check = time.perf_counter()
        self._write(b"".join(acks))
        self._answered.set()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if data:
            self._transport.write(data)

    async def register(self) -> None:
        """Become a member of the group."""
        heartbeat = HeartbeatData(
            client_id=f"{self.group}@{id(self)}",
            producer_data_set=(ProducerData(group_name=self.group),),
        )
        self._request(RequestCode.HEART_BEAT, HeartbeatRequestHeader(), encode_heartbeat(heartbeat))
        await self.answers(0)

    async def answers(self, missing: int) -> None:
        """Wait until no more than so many requests are without an answer.

        Raises:
            ServerError: One was refused.
        """
        while self._unanswered > missing:
            self._answered.clear()
            await self._answered.wait()
        if self._refused is not None:
            raise ServerError(f"the broker refuses: {self._refused.code} {self._refused.remark}")

    def prepare(self, number: int, more_properties: str = "") -> None:
        """Send one half message."""
        properties = f"TRAN_MSG\1true\2PGROUP\1{self.group}\2UNIQ_KEY\1{self.group}{number:026X}\2"
        header = SendMessageRequestHeaderV2(
            producer_group=self.group,
            topic="checks",
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=0,
            sys_flag=4,
            born_timestamp=_now_ms(),
            flag=0,
            properties=properties + more_properties,
        )
        self._request(RequestCode.SEND_MESSAGE_V2, header, bytes(BODY_SIZE))

    def _request(
        self, code: int, header: SendMessageRequestHeaderV2 | HeartbeatRequestHeader, body: bytes
    ) -> None:
        self._opaque += 1
        self._unanswered += 1
        self._write(
            encode_request(
                code,
                opaque=self._opaque,
                header=header,
                body=body,
                header_type=HeaderType.MSGPACK,
            )
        )

    def expects_more(self, count: int) -> bool:
        """Whether fewer checks than these have come, and the last one not long ago."""
        return len(self.late_ms) < count and time.perf_counter() - self.last_check < _GIVE_UP_S

    async def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
        await asyncio.sleep(0.1)  # until the broker has seen it, else nothing depends on it


async def _join(target: Target, group: str) -> CheckedProducer:
    loop = asyncio.get_running_loop()
    _, member = await loop.create_connection(
        lambda: CheckedProducer(group), "127.0.0.1", target.port
    )
    await member.register()
    return member


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLoad:
    """How much is measured."""

    count: int
    rate: int
    seconds: float
    generator: Generator


async def measure_broker(target: Target, plan: CheckLoad) -> list[PhaseRow]:
    """Measure storm and steady stream on a broker with an empty store."""
    maker = await _join(target, "storm")
    immunity_s = 5 + plan.count // _PREPARES_PER_S  # or the maker itself would be asked
    for number in range(plan.count):
        maker.prepare(number, f"CHECK_IMMUNITY_TIME_IN_SECONDS\1{immunity_s}\2")
        if number % (_WINDOW // 2) == 0:
            await maker.answers(_WINDOW // 2)
    await maker.answers(0)
    await maker.close()
    await asyncio.sleep(immunity_s + 1)
    rows = await _measure_storm(target, plan)
    rows += await _measure_steady(target, plan)
    return rows


async def _measure_storm(target: Target, plan: CheckLoad) -> list[PhaseRow]:
    before = await _sends(plan, target, "before")
    load = asyncio.create_task(_sends(plan, target, "storm"))
    await asyncio.sleep(_WARMUP_S + 0.1)
    began = time.perf_counter()
    back = await _join(target, "storm")
    storm = await load
    while back.expects_more(plan.count):  # noqa: ASYNC110 - the end is that nothing comes any more
        await asyncio.sleep(_POLL_S)
    seconds = back.last_check - began
    await back.close()
    return [
        _send_row("sends before", before),
        _send_row("sends in the storm", storm),
        (
            "the storm",
            f"{plan.count:,}",
            f"{len(back.late_ms):,} checks in {seconds:.1f} s",
            f"{plan.count:,}",
        ),
    ]


async def _sends(plan: CheckLoad, target: Target, topic: str) -> LoadResult:
    timing = Timing(seconds=plan.seconds, warmup=_WARMUP_S)
    return await asyncio.to_thread(plan.generator.run, _LOAD, target, topic, timing)


def _send_row(what: str, result: LoadResult) -> PhaseRow:
    latency = result.latency_us
    return (
        what,
        f"{result.rate:,.0f}/s",
        f"p50 {latency.p50 / 1_000:.2f}, p99 {latency.p99 / 1_000:.2f} ms",
        "",
    )


async def _measure_steady(target: Target, plan: CheckLoad) -> list[PhaseRow]:
    member = await _join(target, "steady")
    member.late_ms.clear()
    began = time.perf_counter()
    sent, total = 0, int(plan.rate * plan.seconds)
    while sent < total:
        wanted = min(int((time.perf_counter() - began) * plan.rate) + 1, total)
        for number in range(sent, wanted):
            member.prepare(number)
        sent = wanted
        await asyncio.sleep(0.005)
    await member.answers(0)
    await asyncio.sleep(_TIMEOUT_MS / 1_000 + 2)
    late = list(member.late_ms)
    await member.close()
    of = f"{len(late):,} at {plan.rate:,}/s"
    return [
        ("late by, 99 of 100", of, f"{_share(late, 0.99):,.0f} ms", f"{LATE_MS_MAX:,.0f} ms"),
        ("  median, longest", "", f"{_share(late, 0.5):,.0f}, {max(late):,.0f} ms", ""),
        ("  earliest", "", f"{min(late):,.0f} ms", "0 ms"),
        ("  checks missing", "", f"{total - len(late):,}", "0"),
    ]


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1: something failed, 2: it cannot be measured here."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, end_in_order)
    directory = options.directory or cache_directory()
    several = (os.cpu_count() or 1) > 1
    try:
        rows = _in_scratch(directory, lambda path: measure_slices(path, options.count))
        plan = CheckLoad(
            count=options.count,
            rate=options.rate,
            seconds=options.seconds,
            generator=build_generator(cpu=1 if several else None),
        )
        peer = HalfmqPeer(
            cores=[0] if several else None,
            overrides=[f"transactionTimeOut={_TIMEOUT_MS}", "transactionCheckInterval=1h"],
        )
        with (
            peer.session(Mode.SYNC, directory) as session,
            session.target() as target,
            on_cores([1] if several else None),
        ):
            rows += asyncio.run(measure_broker(target, plan))
    except CompilerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    machine = describe_machine(directory)
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}\n")
    print(table(_HEAD, rows))
    return 0


def _in_scratch(directory: Path, work: Callable[[Path], list[PhaseRow]]) -> list[PhaseRow]:
    with scratch(directory, "checks") as path:
        return work(path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="undecided, default 100000")
    parser.add_argument("--rate", type=int, default=RATE, help="due per second, default 2000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load, default 10")
    parser.add_argument("--directory", type=Path, help="where stores are; default: the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
