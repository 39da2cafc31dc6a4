"""Broker: builds every part and wires it. The only place that knows them all.

Order of the start: the store recovers, the tables are read, transactions are rebuilt from the log,
housekeeping begins, and the sockets open last. The stop runs the other way: no new requests, the
replies that wait for the disk go out, then everything is flushed and marked clean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.draft import Appended, Draft
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import UniqueKeyFactory, pack_host
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.message_store import MessageStore
from halfmq.store.recovery import RecoveryReport

from .config import BrokerConfig
from .delay import DelayLevels, DelayService, parse_delay_levels
from .groups import GroupTable
from .handlers.clients import ClientHandlers
from .handlers.locks import LockHandlers
from .handlers.offsets import OffsetHandlers
from .handlers.pull import PullHandler
from .handlers.queries import QueryHandlers
from .handlers.routes import RouteHandlers
from .handlers.send import SendHandler
from .handlers.send_back import SendBackHandler
from .handlers.transaction import TransactionHandler
from .lifecycle import Service, ServiceStack
from .locks import QueueLocks
from .long_polling import LongPolling
from .offsets import ConsumerOffsetTable
from .registration import NameServerRegistration
from .registry import SCAN_S, ClientRegistry
from .release import ReplyRelease
from .router import Router
from .server import Server
from .ticker import Ticker
from .topics import TopicTable
from .transaction.service import TransactionService

logger = logging.getLogger(__name__)

INDEX_TICK_S: Final = 0.02
"""Seconds between two slices of index building when nothing is left over."""

TABLES_TICK_S: Final = 1.0
"""Seconds between two looks for tables that are due to be written."""


class ObservedStore(MessageStore):
    """The store, whose every append is told: what comes in wakes who waits for it."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        now_ms: Callable[[], int],
        on_durable: Callable[[int], None],
        on_failure: Callable[[Exception], None],
        on_append: Callable[[Sequence[Draft]], None],
    ) -> None:
        super().__init__(config, now_ms=now_ms, on_durable=on_durable, on_failure=on_failure)
        self._on_append = on_append

    def append(self, group: Sequence[Draft], *, contiguous: bool = False) -> list[Appended]:
        """Append records; see `MessageStore.append`."""
        appended = super().append(group, contiguous=contiguous)
        self._on_append(group)
        return appended


class StoreService:
    """Opens the store, reads the tables, and closes both in the opposite order."""

    def __init__(
        self,
        store: MessageStore,
        *,
        load: Sequence[Callable[[], None]],
        before_close: Sequence[Callable[[], None]],
        after_close: Sequence[Callable[[], None]],
    ) -> None:
        self._store = store
        self._load = load
        self._before_close, self._after_close = before_close, after_close
        self.report: RecoveryReport | None = None

    async def start(self) -> None:
        """Recover; nothing is served yet, so the loop may wait."""
        self.report = self._store.open()
        try:
            for load in self._load:
                load()
        except BaseException:
            self._store.close()
            raise

    async def stop(self) -> None:
        """Write what is in memory, flush, and mark the store clean."""
        for work in (*self._before_close, self._store.close, *self._after_close):
            try:
                work()
            except (OSError, StoreError):
                # A full disk must not keep the rest from being saved.
                logger.exception("event=stop_step_failed step=%s", work.__qualname__)


class Broker:
    """One broker in this process."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.config = config
        root = config.store.root
        self._sync_flush = sync_flush = config.store.flush_mode is FlushMode.SYNC_FLUSH

        levels = DelayLevels(parse_delay_levels(config.delay.levels), now_ms=now_ms)
        self._store = ObservedStore(
            config.store.store_config(levels.levels_ms),
            now_ms=now_ms,
            on_durable=self._durable,
            on_failure=self._store_failed,
            on_append=self._appended,
        )
        host = pack_host(config.network.bind_address, config.network.listen_port)
        self._polling = LongPolling()
        self._release = ReplyRelease(self._store, on_released=self._polling.wake)

        tables = root / "config"
        self._topics = TopicTable(
            tables / "topics.json",
            config.topics,
            now_ms=now_ms,
            delay_levels=len(levels.levels_ms),
        )
        groups = GroupTable(
            tables / "subscriptionGroup.json",
            auto_create=config.topics.auto_create_groups,
            now_ms=now_ms,
        )
        offsets = ConsumerOffsetTable(tables / "consumerOffset.json", now_ms=now_ms)
        registry = ClientRegistry(now_ms=now_ms)
        locks = QueueLocks(now_ms=now_ms)
        delay = DelayService(
            self._store,
            self._store,
            levels,
            tables / "delayOffset.json",
            now_ms=now_ms,
            warm=self._warm,
        )
        self.transactions = TransactionService(
            self._store,
            registry,
            config.transaction,
            broker_name=config.topics.broker_name,
            store_host=host,
            now_ms=now_ms,
            snapshot_path=tables / "halfmqTransactions",
            before_parking=lambda: self._topics.ensure(TRANS_CHECK_MAX_TIME_TOPIC),
        )
        asking = Ticker("transactions", self.transactions.tick)
        registry.on_producer(self.transactions.on_producer)
        registry.on_producer(lambda _group, _connection: asking.hurry())

        clients = ClientHandlers(registry, self._topics, groups)
        send_back = SendBackHandler(
            self._store, self._store, self._topics, groups, levels, locks, sync_flush=sync_flush
        )
        pull = PullHandler(self._store, self._topics, groups, registry, offsets, self._polling)
        send = SendHandler(
            self._store,
            self._topics,
            self.transactions,
            delayed=levels.delayed,
            retried=send_back.retried,
            cluster_name=config.topics.cluster_name,
            max_message_size=config.store.max_message_size,
            sync_flush=sync_flush,
            unique_keys=UniqueKeyFactory(
                host[:-4], process_id=os.getpid(), token=secrets.token_bytes(4), now_ms=now_ms
            ),
        )
        parts = (
            send,
            pull,
            send_back,
            clients,
            TransactionHandler(self.transactions, self._store, self._release.ask_flush),
            OffsetHandlers(self._store, offsets, self._topics, groups),
            QueryHandlers(self._store),
            LockHandlers(locks),
            RouteHandlers(self._topics, config.topics),
        )
        self._server = Server(
            Router(*(part.handlers() for part in parts)),
            self._release,
            clients.connection_lost,
            host=config.network.bind_address,
            listen_port=config.network.listen_port,
            namesrv_port=config.network.namesrv_listen_port,
        )
        self._store_service = StoreService(
            self._store,
            load=[
                self._topics.load,
                groups.load,
                offsets.load,
                delay.load,
                self.transactions.rebuild,
            ],
            before_close=[
                self.transactions.drain,
                self._topics.save,
                groups.save,
                offsets.persist,
            ],
            after_close=[delay.persist],  # saves positions only as far as the copies are durable
        )
        registration = NameServerRegistration(
            _addresses(config.network.namesrv_addr),
            self._topics,
            broker_name=config.topics.broker_name,
            cluster_name=config.topics.cluster_name,
            port=lambda: self._server.port,
            now_ms=now_ms,
        )
        housekeeping: list[Service] = [
            Ticker("index", self._index_tick),
            asking,
            Ticker("delay", delay.tick),
            Ticker("clients", _every(SCAN_S, clients.expire, locks.expire)),
            PersistTicker([offsets.persist_job, delay.persist_job]),
        ]
        self._stack = ServiceStack(
            [
                self._store_service,
                pull,
                self._polling,
                *housekeeping,
                self._server,
                registration,
            ]
        )

    async def start(self) -> RecoveryReport:
        """Return when requests are answered.

        Raises:
            DirectoryInUseError: Another broker holds the directory.
            StoreError: The store cannot be opened.
            AddressTakenError: An address cannot be bound.
        """
        await self._stack.start()
        report = self._store_service.report
        assert report is not None
        return report

    async def stop(self) -> None:
        """Answer what waits for the disk, flush, and mark the store clean."""
        await self._stack.stop()

    @property
    def address(self) -> str:
        """Where requests of clients are served, `host:port`."""
        return self._server.address

    @property
    def namesrv_address(self) -> str:
        """Where name-server requests are served, `host:port`."""
        return self._server.namesrv_address

    def _appended(self, group: Sequence[Draft]) -> None:
        if self._polling.waiting:
            self._polling.note_arrivals([(draft.topic, draft.queue_id) for draft in group])
        if self._sync_flush:
            self._release.ask_flush()
        else:
            self._polling.wake_soon()

    def _durable(self, offset: int) -> None:
        self._release.durable_from_thread(offset)  # the store must exist before the release does

    def _index_tick(self) -> float:
        return 0 if self._store.tick() else INDEX_TICK_S

    def _warm(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have ranges of the log brought into memory by a thread."""
        asyncio.get_running_loop().run_in_executor(None, self._store.read_cold, list(ranges))

    def _store_failed(self, error: Exception) -> None:
        """Say why the store takes no more; called on one of its threads."""
        logger.critical(
            "event=store_failed error=%r Nothing more is acknowledged: restart the broker when the "
            "disk is sound again",
            str(error),
        )


class PersistTicker:
    """Has tables written by a thread when they are due, one at a time."""

    def __init__(self, jobs: Sequence[Callable[[], Callable[[], None] | None]]) -> None:
        self._jobs = jobs
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Begin to look for due tables."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Finish the write under way: the one at the end must not meet it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TABLES_TICK_S)
            for due in self._jobs:
                job = due()
                if job is not None:
                    self._writing = asyncio.ensure_future(asyncio.to_thread(job))
                    await asyncio.shield(self._writing)


def _every(seconds: float, *work: Callable[[], object]) -> Callable[[], float]:
    def tick() -> float:
        for one in work:
            one()
        return seconds

    return tick


def _addresses(text: str) -> list[tuple[str, int]]:
    parts = text.replace(",", ";").split(";") if text else []
    return [(host, int(port)) for host, _, port in (part.rpartition(":") for part in parts)]
