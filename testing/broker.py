"""`InMemoryBroker`: the real broker, in the event loop of a test."""

from __future__ import annotations

import asyncio
import contextvars
import shutil
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.disk.disk_limits import Space
from halfmq.broker.service import Broker
from halfmq.client.admin import Admin
from halfmq.client.message import ReceivedMessage

from .loop import OURS, LoopWorker, VirtualLoop, virtual_loop
from .network import Fault, Kind

PORT: Final = 10_911
NAMESRV_PORT: Final = 9_876
MEMORY_FILES: Final = Path("/dev/shm")  # noqa: S108 -- a directory of its own is made there
"""Where Linux keeps files in memory; elsewhere they lie in the directory for temporary files."""

FILE_SIZE: Final = 8 << 20
"""Bytes of a log file: some messages of the maximum size, and made in two milliseconds."""

INDEX_SLOTS: Final = 10_000
"""Hash slots of an index file, and a quarter of its entries."""

DISK: Final = Space(free=1 << 40, size=1 << 41)
FULL_DISK: Final = Space(free=0, size=1 << 41)

T = TypeVar("T")


class InMemoryBroker:
    """A broker for tests; see ``halfmq.testing``.

    It starts when a client first connects, or a method needs it, in the loop that runs then. All
    methods are called in that loop.
    """

    def __init__(self) -> None:
        self._broker: Broker | None = None
        self._loop: VirtualLoop | None = None
        self._host = ""
        self._context: contextvars.Context | None = None
        self._directory: Path | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopped = False
        self._space = DISK

    # --- life

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        self._discard()

    @property
    def address(self) -> str:
        """``host:port`` for a client's ``namesrv``; clients of the same loop reach it."""
        self._world()
        return f"{self._host}:{NAMESRV_PORT}"

    async def stop(self) -> None:
        """Stop in order, as SIGTERM does; clients lose their connections."""
        if self._broker is not None:
            broker, self._broker = self._broker, None
            await self._run(broker.stop())
        self._starting, self._stopped = None, True

    async def start(self) -> None:
        """Start it again, with the messages that it has."""
        self._stopped = False
        await self._started()

    async def kill(self) -> None:
        """End it as ``kill -9`` does: nothing is flushed, answered or marked; `start` recovers."""
        await self._started()
        assert self._directory is not None
        left, self._directory = self._directory, self._new_directory()
        shutil.copytree(left, self._directory, dirs_exist_ok=True)  # all that a kill would leave
        self._world().network.disconnect(self._host)
        await self.stop()
        shutil.rmtree(left, ignore_errors=True)

    def discard(self) -> None:
        """End a broker that may have been used by a loop which no longer runs."""
        loop = None if self._starting is None else self._starting.get_loop()
        broker, self._broker = self._broker, None
        if broker is not None and loop is not None and not loop.is_closed():
            context = self._context
            loop.call_soon(lambda: loop.create_task(broker.stop(), context=context))
        self._discard()

    def _discard(self) -> None:
        if self._loop is not None:
            self._loop.network.starts.pop(self._host, None)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- time, faults, messages

    async def advance(self, seconds: float) -> None:
        """Let time pass for the broker and for everything else in this loop.

        What is due meanwhile happens in its order: checks, delays, retries, time-outs, and also
        time-outs of other libraries that wait for something real.
        """
        await self._started()
        await self._world().advance(seconds)

    async def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return all messages that consumers of a topic can see, in the order of their queues."""
        await self._started()
        async with Admin(namesrv=self.address) as admin:
            if topic not in {one.name for one in await admin.topics()}:
                return []
            return [one async for one in admin.browse(topic)]

    def fill_disk(self) -> None:
        """Refuse messages, as on a full disk; decisions still pass."""
        self._space = FULL_DISK

    def free_disk(self) -> None:
        """Take messages again."""
        self._space = DISK

    def delay_network(self, seconds: float) -> None:
        """Let every request and answer take so long from now on, also of other brokers here."""
        self._world().network.delay_s = seconds

    def disconnect(self) -> None:
        """Break all connections; clients connect again."""
        self._world().network.disconnect(self._host)

    def drop_requests(self, kind: Kind = "any", count: int = 1) -> None:
        """Lose the next requests of a kind with their connections; the broker never sees them."""
        self._world().network.faults.append(Fault("request", kind, count))

    def drop_answers(self, kind: Kind = "any", count: int = 1) -> None:
        """Lose the answers to the next requests of a kind, after the broker has served them."""
        self._world().network.faults.append(Fault("answer", kind, count))

    def duplicate_requests(self, kind: Kind = "any", count: int = 1) -> None:
        """Let the next requests of a kind arrive twice."""
        self._world().network.faults.append(Fault("twice", kind, count))

    def repair_network(self) -> None:
        """End the delay, and the faults that have not happened yet."""
        network = self._world().network
        network.delay_s, network.faults = 0.0, []

    # --- parts

    def _world(self) -> VirtualLoop:
        loop = virtual_loop()
        if self._loop is not loop:
            if self._broker is not None:
                raise RuntimeError(
                    "this broker was started in another event loop: use one per test, or give "
                    "fixtures and tests the same loop (loop_scope of pytest-asyncio)"
                )
            self._loop, self._host = loop, loop.network.free_address()
            loop.network.starts[self._host] = self._started
        return loop

    async def _started(self) -> None:
        self._world()
        if self._stopped:
            raise ConnectionRefusedError("the broker was stopped: await broker.start()")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._context = contextvars.copy_context()
        self._context.run(OURS.set, True)
        if self._directory is None:
            self._directory = self._new_directory()
        self._broker = self._context.run(self._make, self._directory)
        await self._run(self._broker.start())

    def _make(self, directory: Path) -> Broker:
        loop = asyncio.get_running_loop()
        began_ms = time.time_ns() // 1_000_000 - int(loop.time() * 1_000)
        return Broker(
            BrokerConfig(
                network=NetworkConfig(
                    bind_address=self._host, listen_port=PORT, namesrv_listen_port=NAMESRV_PORT
                ),
                store=StoreSettings(
                    root=directory,
                    commit_log_file_size=FILE_SIZE,
                    consume_queue_file_size=20 * INDEX_SLOTS,
                    max_hash_slots=INDEX_SLOTS,
                    max_index_items=4 * INDEX_SLOTS,
                ),
            ),
            now_ms=lambda: began_ms + int(loop.time() * 1_000),
            monotonic_ms=lambda: int(loop.time() * 1_000),
            worker=LoopWorker,
            disk_space=lambda _path: self._space,
        )

    @staticmethod
    def _new_directory() -> Path:
        memory = MEMORY_FILES if MEMORY_FILES.is_dir() else None
        return Path(tempfile.mkdtemp(prefix="halfmq-testing-", dir=memory))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.get_running_loop().create_task(work, context=self._context)
