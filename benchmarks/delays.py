"""What waiting messages cost, and how late they are delivered.

*Waiting*: a million messages with a time of delivery are sent to an empty broker. What its memory
has grown by, for each of them, is read while they wait, and after a start in order and one after
SIGKILL. *Lateness*: ten thousand messages become due, a thousand a second, while others send at
half the rate that the broker reaches. How late is each one stored for delivery, and how late does a
consumer have it?
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, cast

from halfmq.client import Consumer, ReceivedMessage
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import SendMessageRequestHeaderV2
from halfmq.remoting.replies import encode_request

from .build import cache_directory
from .generator import Generator, Target, Timing, build_generator
from .one_table import print_measured
from .peers import HalfmqPeer, scratch
from .pending_steps import anonymous_bytes, processor_seconds
from .processes import ServerError, halfmq_broker, on_cores
from .scenarios import FlushDiskType, LoadKind, Scenario

BYTES_MAX: Final = 100
"""Of memory for each waiting message."""
START_S_MAX: Final = 3.0
"""From process start to ready, with a million waiting."""
LATE_MS_MAX: Final = 100.0
"""From the asked time to the consumer, 99 of 100."""

_WINDOW: Final = 512  # sends without answer
_LATE_COUNT: Final = 10_000
_LATE_PER_S: Final = 1_000
_LATE_FROM_S: Final = 8.0  # until the first is due: all are sent by then
_START_S: Final = 300.0  # until a start has failed
_LOAD: Final = Scenario(kind=LoadKind.SEND, connections=16, window=1, mode=FlushDiskType.SYNC)
_TOPIC: Final = "delays"
_DAY_MS: Final = 86_400_000
_HEAD: Final = ("what", "of", "measured", "limit")

Row = tuple[str, str, str, str]


class Sender(asyncio.Protocol):
    """Sends messages with a time of delivery."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder(responses_first=True)
        self._transport: asyncio.Transport | None = None
        self._sent = self._answered = 0
        self._refused: RemotingCommand | None = None
        self._progress = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for reply in self._decoder.receive_data(data):
            self._answered += 1
            if reply.code != ResponseCode.SUCCESS:
                self._refused = reply
        self._progress.set()

    async def send(self, deliver_ms: int) -> None:
        """Send one; wait if too many are without answer."""
        self._sent += 1
        header = SendMessageRequestHeaderV2(
            producer_group="delays",
            topic=_TOPIC,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=self._sent % 4,
            sys_flag=0,
            born_timestamp=_now_ms(),
            flag=0,
            properties=f"TIMER_DELIVER_MS\1{deliver_ms}\2UNIQ_KEY\1{self._sent:032X}\2",
        )
        frame = encode_request(
            RequestCode.SEND_MESSAGE_V2,
            opaque=self._sent,
            header=header,
            body=str(deliver_ms).encode(),
            header_type=HeaderType.MSGPACK,
        )
        assert self._transport is not None
        self._transport.write(frame)
        if self._sent % (_WINDOW // 2) == 0:
            await self.answers(_WINDOW // 2)

    async def answers(self, missing: int) -> None:
        """Wait until no more than so many are without answer.

        Raises:
            ServerError: One was refused.
        """
        while self._sent - self._answered > missing:
            self._progress.clear()
            await self._progress.wait()
        if self._refused is not None:
            raise ServerError(f"the broker refuses: {self._refused.code} {self._refused.remark}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _send_all(port: int, times_ms: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    transport, sender = await loop.create_connection(Sender, "127.0.0.1", port)
    for deliver_ms in times_ms:
        await sender.send(deliver_ms)
    await sender.answers(0)
    transport.close()


# --- waiting


@contextmanager
def _broker(home: Path, cores: Sequence[int] | None) -> Iterator[tuple[int, int, float]]:
    """Yield port, process id, and seconds to the ready line; SIGKILL ends it."""
    settings = {
        "listenPort": 0,
        "namesrvListenPort": 0,
        "httpListenPort": -1,
        "flushDiskType": "ASYNC_FLUSH",
        "storePathRootDir": home / "store",
    }
    began = time.monotonic()
    with halfmq_broker(settings, home / "log", timeout=_START_S, cores=cores) as (process, fields):
        yield int(fields["listen"].rpartition(":")[2]), process.pid, time.monotonic() - began
        if (home / "kill").exists():
            process.kill()


def measure_waiting(directory: Path, count: int, cores: Sequence[int] | None) -> list[Row]:
    """Return what memory and starts cost."""
    rows = []
    with scratch(directory, "delays") as home:
        first_ms = _now_ms() + _DAY_MS
        with _broker(home, cores) as (port, pid, _):
            asyncio.run(_send_all(port, [first_ms]))
            empty = anonymous_bytes(pid)
            asyncio.run(_send_all(port, range(first_ms, first_ms + count - 1)))
            time.sleep(2)  # until the index has them
            rows.append(_memory("waiting, as sent", pid, empty, count))
        for how in ("in order", "after SIGKILL"):
            with _broker(home, cores) as (port, pid, seconds):
                cpu = processor_seconds(pid)
                rows.append(_memory(f"waiting, started {how}", pid, empty, count))
                rows.append(
                    (
                        f"start {how}",
                        f"{count:,}",
                        f"{seconds:.2f} s, processor {cpu:.2f} s",
                        f"{START_S_MAX:.0f} s",
                    )
                )
                (home / "kill").touch()
    return rows


def _memory(what: str, pid: int, empty: int, count: int) -> Row:
    each = (anonymous_bytes(pid) - empty) / count
    return what, f"{count:,}", f"{each:.0f} bytes each", f"{BYTES_MAX} bytes"


# --- lateness


async def _receive(target: Target, late_ms: list[float], stored_late_ms: list[float]) -> None:
    done = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        deliver_ms = int(message.body)
        late_ms.append(time.time() * 1_000 - deliver_ms)
        stored_late_ms.append(message.store_timestamp.timestamp() * 1_000 - deliver_ms)
        if len(late_ms) == _LATE_COUNT:
            done.set()

    async with Consumer("delays", {_TOPIC: "*"}, namesrv=f"127.0.0.1:{target.port}") as consumer:
        task = asyncio.create_task(consumer.run(handle))
        await asyncio.sleep(1)  # it has its queues
        first_ms = _now_ms() + int(_LATE_FROM_S * 1_000)
        step = 1_000 // _LATE_PER_S
        await _send_all(target.port, range(first_ms, first_ms + _LATE_COUNT * step, step))
        assert _now_ms() < first_ms
        await done.wait()
        await consumer.stop()
        await task


async def measure_lateness(target: Target, generator: Generator) -> list[Row]:
    """Return how late messages are delivered beside a load."""
    rate = generator.run(_LOAD, target, "full", Timing(seconds=3, warmup=1)).request_rate / 2
    seconds = _LATE_FROM_S + _LATE_COUNT / _LATE_PER_S + 3
    timing = Timing(seconds=seconds, warmup=1)
    late_ms: list[float] = []
    stored_late_ms: list[float] = []
    load = asyncio.to_thread(generator.run, _LOAD, target, "half", timing, rate=rate)
    loaded, _ = await asyncio.gather(load, _receive(target, late_ms, stored_late_ms))
    of = f"{_LATE_COUNT:,} beside {loaded.request_rate:,.0f} sends/s"
    if min(late_ms) < 0:
        raise ServerError(f"one was delivered {-min(late_ms):.0f} ms early")
    return [
        ("late for delivery", of, _shares(stored_late_ms), ""),
        ("late at the consumer", of, _shares(late_ms), f"{LATE_MS_MAX:.0f} ms of 99 in 100"),
        ("sends", of, f"p99 {loaded.latency_us.p99 / 1_000:.1f} ms", ""),
    ]


def _shares(late_ms: Sequence[float]) -> str:
    ordered = sorted(late_ms)
    median, high = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    return f"median {median:.0f}, p99 {high:.0f}, longest {ordered[-1]:.0f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    directory = options.directory or cache_directory()
    return print_measured(_HEAD, directory, partial(_measure, options.count, directory))


def _measure(count: int, directory: Path) -> list[Row]:
    several = (os.cpu_count() or 1) > 1
    broker_cores, own_cores = ([0], [1]) if several else (None, None)
    peer = HalfmqPeer(cores=broker_cores)
    rows: list[Row] = []
    with on_cores(own_cores):
        if count:
            rows += measure_waiting(directory, count, broker_cores)
        generator = build_generator(cpu=1 if several else None)
        with peer.session(FlushDiskType.SYNC, directory) as session, session.target() as target:
            rows += asyncio.run(measure_lateness(target, generator))
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delays", description=__doc__)
    count = "messages that wait, default a million; 0 leaves that out"
    parser.add_argument("--count", type=int, default=1_000_000, help=count)
    parser.add_argument("--directory", type=Path, help="where stores are; default: the cache")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
