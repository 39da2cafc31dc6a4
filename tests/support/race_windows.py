"""A whole broker and its peers on one event loop, whose time the test moves.

The broker is the one that `broker` starts, with its real store, sockets and timers. Only time is
the test's: the broker's clock and the loop's timers stand still until `Rig.wait`. Nothing is
faked inside, so what a peer sees is what a client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from halfmq.broker.access.config import AccessConfig
from halfmq.broker.config import (
    BrokerConfig,
    NetworkConfig,
    StoreSettings,
    TopicDefaults,
    TransactionConfig,
)
from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.net.connection import ClientConnection
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.service import Broker
from halfmq.broker.tables.all_tables import Tables
from halfmq.broker.transaction.transaction_service import TransactionService
from halfmq.client import ClientConfig
from halfmq.remoting.codes import HeaderType
from halfmq.store.config import FlushMode
from halfmq.store.errors import DiskFullError
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import Record
from halfmq.store.format.topics import OP_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import START_MS
from tests.support.broker_parts import connections_of, delays_of, release_of, store_of, tables_of
from tests.support.patience import PATIENCE_S
from tests.support.peers import Half, Peer, until
from tests.support.stores import crash, log_of, pulled

LOG_FILE_SIZE: Final = 1 << 18
TIMEOUT_MS: Final = 6_000  # transactionTimeOut
INTERVAL_MS: Final = 30_000  # transactionCheckInterval
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
EXCHANGE_TURNS: Final = 16
"""Turns of the loop, of which a request and its answer over the loopback device take four."""
HEARTBEAT_MS: Final = 90_000
"""Longest step of time: a client without a sign of life for 120 s is taken for dead."""

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = START_MS

    def time(self) -> float:
        return (self.now_ms - START_MS) / 1_000

    @property
    def has_due(self) -> bool:
        """Whether a timer would fire at the next pass."""
        scheduled = self._scheduled  # type: ignore[attr-defined]  # the heap of BaseEventLoop
        return bool(scheduled) and scheduled[0].when() <= self.time()


class Disk:
    """Stands before fdatasync: can hold it up, as a busy disk does."""

    def __init__(self) -> None:
        self.held = False
        self.calls = 0

    def sync(self, fd: int) -> None:
        while self.held:
            time.sleep(0.0005)
        self.calls += 1
        os.fdatasync(fd)


class Rig:
    """One broker at a time, on a directory that outlives it."""

    def __init__(self, directory: Path, loop: VirtualLoop, **settings: Any) -> None:
        self._directory = directory
        self.loop = loop
        self._lives = itertools.count(1)
        self._names = itertools.count(1)
        self.peers: list[Peer] = []
        self._store: dict[str, Any] = {
            "commit_log_file_size": LOG_FILE_SIZE,
            "consume_queue_file_size": 20_000,
            "max_message_size": 100_000,
            "max_hash_slots": 100,
            "max_index_items": 2_000,
            "flush_mode": FlushMode.SYNC_FLUSH,
        }
        self._transaction: dict[str, Any] = {
            "timeout_ms": TIMEOUT_MS,
            "check_interval_ms": INTERVAL_MS,
        }
        self._configure(settings)
        self.access = AccessConfig()
        """Who may use the broker, from its next start on."""
        self.root = directory / "store"
        self.disk = Disk()
        self.clock_ahead_ms = 0
        """How far the broker's wall clock is ahead of the loop's: what its steps add up to."""
        self.broker: Broker

    def _configure(self, settings: dict[str, Any]) -> None:
        names = {field.name for field in fields(StoreSettings)}
        self._store |= {name: value for name, value in settings.items() if name in names}
        self._transaction |= {name: settings[name] for name in settings if name not in names}

    # --- the broker's life

    async def start(self) -> None:
        """Start a broker on the directory."""
        config = BrokerConfig(
            network=NetworkConfig(listen_port=0, namesrv_listen_port=0),
            topics=TopicDefaults(default_queue_nums=4),
            store=StoreSettings(root=self.root, **self._store),
            transaction=TransactionConfig(**self._transaction),
            access=self.access,
        )
        self.broker = Broker(
            config,
            now_ms=lambda: self.loop.now_ms + self.clock_ahead_ms,
            monotonic_ms=lambda: self.loop.now_ms,
        )
        self.disk = Disk()
        # A disk that can be held up; the store asks the system, not a port.
        self.store._flusher._fdatasync = self.disk.sync
        await self.broker.start()
        await self.settle()

    async def stop(self) -> None:
        """Stop in order."""
        self.disk.held = False
        await self.patiently(self.broker.stop())
        for peer in self.peers:
            peer.close()
        self.peers.clear()

    async def restart(self, **settings: Any) -> None:
        """Stop in order and start again, with other settings if given."""
        await self.stop()
        self._configure(settings)
        await self.start()

    async def kill(
        self, *, power_cut: bool = False, tamper: Callable[[Path], None] = lambda _root: None
    ) -> None:
        """Go on with the files as `kill -9` leaves them; start again.

        Args:
            power_cut: Of the log only what was on disk is left, as when the machine lost power.
            tamper: Changes the files of the dead broker before the next one starts.
        """
        durable = self.store.durable_offset
        after = self.copy_as_killed()
        await self.stop()
        self.root = after
        if power_cut:
            self.cut_log(durable)
        tamper(self.root)
        await self.start()

    def copy_as_killed(self) -> Path:
        """Copy the files as `kill -9` leaves them."""
        return crash(self.root, self._directory / f"life-{next(self._lives)}")

    def cut_log(self, end: int) -> None:
        """Blank what lies behind an offset of the log, in the files of a broker that is down."""
        for path in sorted((self.root / "commitlog").iterdir()):
            data = bytearray(path.read_bytes())
            keep = min(max(end - int(path.name), 0), len(data))
            path.write_bytes(data[:keep] + bytes(len(data) - keep))

    @property
    def address(self) -> str:
        return self.broker.address

    @property
    def store(self) -> MessageStore:
        return store_of(self.broker)

    @property
    def tables(self) -> Tables:
        return tables_of(self.broker)

    @property
    def delays(self) -> DelayService:
        return delays_of(self.broker)

    @property
    def release(self) -> ReplyRelease:
        return release_of(self.broker)

    @property
    def service(self) -> TransactionService:
        return self.broker.transactions

    @property
    def metrics(self) -> dict[str, int]:
        return self.service.metrics()

    @contextlib.contextmanager
    def refusing(self, *topics: str) -> Iterator[None]:
        """Have the store refuse records of some topics, as a full disk refuses all."""
        log = log_of(self.store)
        append = log.append

        def refuse(
            group: Sequence[AppendRequest], *, contiguous: bool = False
        ) -> list[AppendResult]:
            if any(draft.topic in topics for draft in group):
                raise DiskFullError(self.root, "the test says no")
            return append(group, contiguous=contiguous)

        log.append = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            log.append = append  # type: ignore[method-assign]

    # --- peers and time

    async def peer(
        self, group: str = "pg", *, ours: bool = False, member: bool = True, name: str = ""
    ) -> Peer:
        """Connect a client: an official one, or one of ours that acknowledges checks."""
        name = name or f"client-{next(self._names)}"
        header_type = HeaderType.MSGPACK if ours else HeaderType.JSON
        peer = Peer(group, header_type, name)
        await self.connect(peer)
        if member:
            await peer.heartbeat()
        return peer

    async def connect(self, peer: Peer) -> None:
        """Connect a client that the test has made."""
        host, _, port = self.address.rpartition(":")
        await self.loop.create_connection(lambda: peer, host, int(port))
        self.peers.append(peer)

    async def lose(self, peer: Peer) -> None:
        """Have a client vanish, as a killed process does, and the broker notice it."""
        peer.close()
        await until(lambda: all(one.name != peer.name for one in self.connections))

    @property
    def connections(self) -> list[ClientConnection]:
        """The broker's ends of all connections."""
        return connections_of(self.broker)

    def client(self, **settings: Any) -> ClientConfig:
        """Settings for a client of ours."""
        return ClientConfig(namesrv=self.address, **settings)

    @property
    def elapsed_ms(self) -> int:
        """How much time has passed; waiting for threads and processes moves it on as well."""
        return self.loop.now_ms - START_MS

    async def wait(self, milliseconds: int, step_ms: int = 0) -> None:
        """Let time pass, in steps, and everything happen that is due meanwhile.

        Members of producer groups stay members: they send their heartbeats.
        """
        end = self.loop.now_ms + milliseconds
        step = step_ms or min(max(500, milliseconds // 40), HEARTBEAT_MS)
        while self.loop.now_ms < end:
            self.loop.now_ms = min(self.loop.now_ms + step, end)
            await self.settle()
            for peer in self.peers:
                if peer.member and not peer.closed:
                    await peer.heartbeat()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Let time pass, second by second, until it is so; an hour at most."""
        for _ in range(HOUR_MS // 1_000):
            if condition():
                return
            await self.wait(1_000)
        raise AssertionError("an hour passed, and nothing happened")

    async def settle(self) -> None:
        """Return when everything due is done, on disk, and seen by the peers."""
        while self.loop.has_due:  # noqa: ASYNC110  # what is due makes more that is due
            await asyncio.sleep(0)
        await self.exchange()
        if not self.disk.held:
            self.store.request_flush()
            await until(lambda: self.store.durable_offset >= self.store.write_offset)
            await self.exchange()
        for _ in range(2):  # an answer of a peer may have led to a further question
            for peer in self.peers:
                await peer.sync()

    async def exchange(self) -> None:
        """Give clients of ours, on this very loop, the turns for some questions and answers."""
        for _ in range(EXCHANGE_TURNS):
            await asyncio.sleep(0)

    async def patiently(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something that takes time, moving it on where nothing else happens."""
        task = asyncio.ensure_future(work)
        deadline = time.monotonic() + PATIENCE_S
        quiet = 0
        while not task.done():
            assert time.monotonic() < deadline, "nothing happened"
            await asyncio.sleep(0)
            time.sleep(0.0001)  # noqa: ASYNC251
            quiet += 1
            if quiet % 50 == 0:
                self.loop.now_ms += 20
        return await task

    # --- what is in the store

    def consumed(self, topic: str = "orders") -> list[Record]:
        """What consumers of a topic get, queue by queue."""
        return [
            record
            for name, queue_id in sorted(self.store.queues.names())
            if name == topic
            for record in pulled(self.store, name, queue_id)
        ]

    def bodies(self, topic: str = "orders") -> list[bytes]:
        """The bodies of what consumers of a topic get."""
        return [record.body for record in self.consumed(topic)]

    def records(self) -> Iterator[Record]:
        """The whole log."""
        return self.store.reader.scan(self.store.min_offset)

    def records_of(self, topic: str) -> list[Record]:
        """The records of a topic, in a consume queue or not."""
        return [record for record in self.records() if record.topic == topic]

    def op_offsets(self) -> set[int]:
        """Half queue offsets that op messages call decided."""
        bodies = [record.body.decode() for record in self.records_of(OP_TOPIC)]
        return {int(number) for body in bodies for number in body.split(",") if number}

    def finals_of(self, half: Half) -> list[Record]:
        """The final messages of a transaction: never more than one."""
        return [
            record
            for record in self.records()
            if record.sys_flag & TRANSACTION_MASK == TransactionType.COMMIT
            and record.prepared_transaction_offset == half.offset
        ]

    def final_id(self, half: Half) -> str:
        """Offset id of the one final message."""
        (final,) = self.finals_of(half)
        return offset_message_id(final.store_host, final.physical_offset)


def windowed(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test on a loop of virtual time, with a started broker as its first argument."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def lived(directory: Path, arguments: dict[str, Any]) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            rig = Rig(directory, loop, **settings)
            await rig.start()
            try:
                await test(rig, **arguments)
            finally:
                await rig.stop()

        def run(tmp_path: Path, **arguments: Any) -> None:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                runner.run(lived(tmp_path, arguments))

        # pytest reads the fixtures off the signature: the directory in place of the rig.
        functools.update_wrapper(run, test, updated=())
        vars(run).pop("__wrapped__", None)
        own = inspect.signature(test)
        path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(run)["__signature__"] = own.replace(
            parameters=[path, *list(own.parameters.values())[1:]]
        )
        return run

    return decorate
