"""Broker: creates every part and wires it; the only module that imports them all.

Order of a start: the store recovers, the tables are read, transactions are rebuilt from the log,
housekeeping begins, and the sockets open last. A stop runs in reverse: no new requests are read,
replies that wait for the disk are sent, then everything is flushed and marked clean.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.registration_bodies import RegisteredTopic
from halfmq.store.config import FlushMode
from halfmq.store.files.disk import sync_data
from halfmq.store.files.worker import ThreadWorker, WorkerFactory
from halfmq.store.format.ids import pack_host
from halfmq.store.format.topics import DELAYED_TOPICS, revive_topic
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore
from halfmq.store.recovery.recovery import RecoveryReport

from .access.build import AccessSetup, reloading
from .access.tls import registration_context, tls_context
from .config import BrokerConfig
from .config_file import LoadedConfig
from .delay.delivery import DelayService
from .delay.levels import DelayLevels, parse_delay_levels
from .delay.timer_records import TimerRule
from .disk.disk_limits import DiskLimits, Space, space_of
from .disk.retention_policy import RetentionPolicy
from .disk.send_refusal import SendRefusal
from .draining import Draining
from .filters.filters_in_use import FiltersInUse
from .handlers.access_checks import may_see
from .handlers.all_handlers import AllHandlers
from .handlers.clients.queue_offsets import OffsetHandlers
from .handlers.messages.send_back import retry_copy
from .http.console_process import console_process
from .http.endpoint import OFF, HttpEndpoint
from .http.histogram import LONG_BOUNDS_S, Histogram
from .limits.kept import HELD_POP_BYTES, Keeps, usage
from .live_settings import LiveSettings
from .logs import set_level
from .loop.fetches import Fetches
from .loop.services import Periodic, Service, ServiceStack
from .loop.slices import PAUSE_S, PeriodicWork
from .loop.ticker import Ticker
from .net.group_append import GroupAppend
from .net.long_polling import LongPolling
from .net.registration import NameServerRegistration, parse_addresses
from .net.reply_release import LARGE_GROUP, ReplyRelease
from .net.router import Router
from .net.server import Server
from .net.shared_port import SharedPort
from .pop.engine import PopEngine
from .pop.records import PopRecords, is_from_timer
from .pop.request_modes import RequestModes
from .pop.retries import Retries
from .pop.revive_log import ReviveLog
from .ports import Connection
from .replication.replication import Replication
from .runtime_info import RuntimeInfo
from .store_service import TABLES_TICK_S, StoreService, make_tables_directory
from .tables.all_tables import make_tables
from .tables.client_registry import SCAN_S
from .tables.message_statistics import Statistics
from .transaction.destination import CurrentQueues, Destinations
from .transaction.transaction_service import TransactionService
from .unused_names import UnusedNames

if TYPE_CHECKING:
    from .http.app import Answers

logger = logging.getLogger(__name__)


class Broker:
    """One broker in this process."""

    def __init__(
        self,
        config: BrokerConfig | LoadedConfig,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic_ms: Callable[[], int] = lambda: int(time.monotonic() * 1_000),
        worker: WorkerFactory = ThreadWorker,
        disk_space: Callable[[Path], Space] = space_of,
        end: Callable[[], None] = lambda: None,
        default_http_port: int = OFF,
        shared_port: tuple[socket.socket, list[str]] | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            config: Of a `LoadedConfig`, live settings can be changed, in the file that it is from.
            now_ms: The wall clock: store timestamps, delivery at a time, the age of files.
            monotonic_ms: The clock of checks, delays, locks and heartbeats.
            worker: Creates the store's helper threads.
            disk_space: Returns the space of the disk that holds a path.
            end: Called, more than once, if the store's directory is gone or the broker is drained:
                stop it.
            default_http_port: For HTTP if no port is set; nothing fails if it is taken.
            shared_port: The socket for name-server requests that it shares with other brokers on
                this machine, and their names.
        """
        loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, {}, [])
        self.config = config = loaded.config
        self._settings = LiveSettings(
            loaded, self.configure, now_ms=now_ms, disk_used=lambda: self._disk_limits.used_percent
        )
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._shared_port = shared_port
        self._flush_time, self._loop_delay = Histogram(), Histogram()
        self._decision_time = Histogram(LONG_BOUNDS_S)
        self._end, self._default_http_port = end, default_http_port
        self._sync_flush = config.store.flush_mode is FlushMode.SYNC_FLUSH
        self._levels = DelayLevels(parse_delay_levels(config.delay.levels))
        self._timer_rule = TimerRule(config.delay.timer_delay_s_max * 1_000, now_ms=now_ms)
        self._store_config = config.store.store_config(self._levels.levels_ms)
        self._store = MessageStore(
            self._store_config,
            now_ms=now_ms,
            on_durable=lambda _offset: self._release.durable_from_thread(),
            on_failure=self._store_failed,
            on_append=self._appended,
            fdatasync=self._flush_time.timed(sync_data),
            worker=worker,
        )
        self._polling = LongPolling()
        self._pop_polling = LongPolling(HELD_POP_BYTES)
        self._refusal, self._fetches = SendRefusal(), Fetches()
        self._release = ReplyRelease(self._store, self._refusal, on_released=self._wake_readers)
        self._group = GroupAppend(self._store, call_soon=self._release.before_replies)
        self._directory = config.store.root / "config"
        self._host = pack_host(config.network.bind_address, config.network.listen_port)
        self._tables = make_tables(
            config,
            delay_levels=len(self._levels.levels_ms),
            now_ms=now_ms,
            monotonic_ms=monotonic_ms,
        )
        self._make_work(disk_space)
        self._make_front()
        self._stack = ServiceStack(self._services())

    def _make_work(self, disk_space: Callable[[Path], Space]) -> None:
        """Create what works between requests: transactions, delays, pops, the age of messages."""
        tables, now_ms = self._tables, self._now_ms
        self._delay_ticker, self._pop_ticker = Ticker("delays"), Ticker("pop")
        self._retention_ticker = Ticker("retention")
        self._members_ticker = Ticker("members", pause=PAUSE_S)
        self._transaction_ticker = self._paced_ticker("transactions", self._transactions_tick)
        self._statistics = Statistics(
            self._store.queues.take_appended,
            cluster_name=self.config.topics.cluster_name,
            is_system=tables.topics.is_system,
            now_ms=now_ms,
            monotonic_ms=self._monotonic_ms,
        )
        self._replication = Replication(
            self._store,
            self.config.replication,
            self._refusal,
            self._fetches.begin,
            release=self._release.release,
            now_s=time.monotonic,
            host=self.config.network.bind_address,
            file_size=self.config.store.commit_log_file_size,
            epoch=lambda: self._tables.topics.data_version["stateVersion"],
        )
        self.transactions = self._make_transactions()
        tables.registry.on_producer(self.transactions.on_producer)
        self._delays = self._make_delays()
        self._delay_ticker.work = self._delays.tick
        self._queue_offsets = OffsetHandlers(
            self._store, tables.offsets, tables.topics, tables.groups
        )
        self._pops = self._make_pops()
        self._pop_ticker.work = self._pops.tick
        self._modes = RequestModes((self._directory / "messageRequestMode.json"), now_ms)
        self._retention = self._make_retention()
        self._retention_ticker.work = self._retention.tick
        self._access = AccessSetup(
            self.config.access,
            users_file=(self._directory / "halfmqAccess.json"),
            cluster_name=self.config.topics.cluster_name,
            belongs_to_other=tables.registry.belongs_to_other,
        )
        self._disk_limits = DiskLimits(
            self.config.disk,
            self._refusal,
            path=self._store_config.commit_log_directory,
            reserved_ahead=lambda: self._store.reserved_ahead,
            space_of=disk_space,
        )
        self._store_service = self._make_store_service()
        self._unused = UnusedNames(tables, self._store.queues.bounds, now_ms)

    def _make_front(self) -> None:
        network = self.config.network
        self._registration = NameServerRegistration(
            parse_addresses(network.namesrv_addr),
            self._tables.topics,
            self.config.topics,
            advertised_host=network.advertised_host,
            port=lambda: self._server.port,
            ha_port=lambda: self._replication.port,
            guard=self._replication.guard(self.config.topics, self._end),
            now_ms=self._now_ms,
            credentials=self.config.access.inner_credentials,
            tls=registration_context(self.config.tls),
        )
        self._draining = Draining(
            self._refusal,
            withdraw=self._registration.withdraw,
            has_producers=lambda: bool(self._tables.registry.producer_groups),
            stop=self._end,
        )
        self._filters = FiltersInUse(enabled=self.config.consumers.property_filter)
        self._handlers = self._make_handlers()
        self._members_ticker.work = self._handlers.clients.tick
        tables = [self._access.guarded(one.handlers()) for one in self._handlers.families]
        self._router = Router(*tables, admit=self._access.admit)
        self._tls = tls_context(self.config.tls)
        self._server = Server(
            self._router,
            self._release,
            self._fetches.begin,
            self._connection_lost,
            host=network.bind_address,
            advertised_host=network.advertised_host,
            listen_port=network.listen_port,
            namesrv_port=network.namesrv_listen_port,
            tls=self._tls,
            connections_per_address=network.connections_per_address,
        )
        self._http = self._make_http()
        self._console = None
        if network.console_enabled:
            self._console = console_process(
                network.bind_address,
                network.console_listen_port,
                namesrv=lambda: self.namesrv_address,
                trusted=None if self._tls is None else self.config.tls.cert_path,
            )
        self.keepers = self._make_keepers()

    def _make_transactions(self) -> TransactionService:
        return TransactionService(
            self._store,
            self._tables.registry,
            Destinations(self._tables.topics, self._timer_rule.after_commit),
            self.config.transaction,
            broker_name=self.config.topics.broker_name,
            store_host=self._host,
            now_ms=self._now_ms,
            monotonic_ms=self._monotonic_ms,
            snapshot_path=(self._directory / "halfmqTransactions"),
            record_size_max=self._store_config.record_size_max,
            fetch=self._fetches.begin,
            wake=self._transaction_ticker.wake,
            observe_age=self._decision_time.observe,
            may_see=may_see,
        )

    def _make_delays(self) -> DelayService:
        return DelayService(
            self._store,
            self._levels,
            self._directory,
            scan=self._store.reader.scan,
            now_ms=self._now_ms,
            monotonic_ms=self._monotonic_ms,
            fetch=self._fetches.begin,
            queue_of=CurrentQueues(self._tables.topics).find,
            wake=self._delay_ticker.wake,
        )

    def _make_pops(self) -> PopEngine:
        topics, tables = self.config.topics, self._tables
        self._revive_topic = revive_topic(topics.cluster_name)
        self._watched_topics = DELAYED_TOPICS | {self._revive_topic}  # see `_appended`
        self._pop_retries = Retries(
            tables.topics,
            tables.groups,
            retry_copy,
            version_2=self.config.consumers.retry_topic_v2,
        )
        log = ReviveLog(
            self._store,
            tables.topics,
            tables.offsets,
            PopRecords(self._revive_topic, topics.broker_name, self._host),
            now_ms=self._now_ms,
            monotonic_ms=self._monotonic_ms,
            wake=self._pop_ticker.wake,
        )
        return PopEngine(
            self._store,
            tables.offsets,
            log,
            self._pop_retries,
            is_young=self._queue_offsets.is_young,
            now_ms=self._now_ms,
            monotonic_ms=self._monotonic_ms,
            fetch=self._fetches.begin,
            wake=self._pop_ticker.wake,
            visible=lambda topic: self._pop_polling.search_again([(topic, -1)]),
        )

    def _make_retention(self) -> RetentionPolicy:
        return RetentionPolicy(
            self._store,
            self.config.store,
            oldest_pending=lambda: self.transactions.oldest_pending_offset,
            oldest_delayed=self._delays.oldest_waiting_offset,
            copy_forward=self._delays.copy_forward,
            on_blocked=self.transactions.on_retention_blocked,
            is_scarce=lambda: self._disk_limits.is_scarce,
            now_ms=self._now_ms,
            fetch=self._fetches.begin,
            wake=self._retention_ticker.wake,
        )

    def _make_keepers(self) -> list[Keeps]:
        """Return the parts that keep something for peers; a test compares them with the limits."""
        parts = [
            *(self._server, self._release, self._polling, self._pop_polling, self._filters),
            *(self._modes, self._delays, self._pops, self.transactions, self._http),
            self._replication,
            *(getattr(self._tables, one.name) for one in fields(self._tables)),
            *(self._handlers.changes, *self._handlers.families),
        ]
        return [one for one in parts if isinstance(one, Keeps)]

    def _services(self) -> list[Service]:
        """Return the services in the order in which they start; the sockets open last."""
        return [
            self._store_service,
            self._disk_limits,
            self._filters,
            self._handlers.pull,
            self._fetches,
            self._polling,
            self._pop_polling,
            self._replication,
            *self._make_housekeeping(),
            *self._access.services,
            *([] if self._tls is None else [reloading(self._tls.reload)]),
            self._server,
            self._registration,
            *self._make_shared_port(),
            *([] if self._http is None else [self._http]),
            *([] if self._console is None else [self._console]),
        ]

    def _fit_tables(self) -> None:
        self._tables.fit(self._store, after_kill=not self._store_service.report.clean)

    def _make_store_service(self) -> StoreService:
        return StoreService(
            self._store,
            root=self.config.store.root,
            load=[
                partial(make_tables_directory, self._directory),
                self._tables.load,
                self._fit_tables,
                self._delays.load,
                self._modes.load,
                self._pops.load,
                self.transactions.rebuild,
            ],
            before_close=[
                self.transactions.drain,
                self._tables.topics.save,
                self._tables.groups.save,
                self._tables.offsets.persist,
            ],
            after_close=[self._delays.persist],
        )

    def _make_handlers(self) -> AllHandlers:
        return AllHandlers(
            config=self.config,
            settings=self._settings,
            store=self._store,
            tables=self._tables,
            statistics=self._statistics,
            access=self._access,
            refusal=self._refusal,
            group=self._group,
            transactions=self.transactions,
            levels=self._levels,
            timer_rule=self._timer_rule,
            delays=self._delays,
            pops=self._pops,
            modes=self._modes,
            filters=self._filters,
            polling=self._polling,
            pop_polling=self._pop_polling,
            queue_offsets=self._queue_offsets,
            runtime_info=RuntimeInfo(
                self._store,
                self._statistics,
                self._metrics,
                root=self.config.store.root,
                now_ms=self._now_ms,
            ),
            delete_expired=self._retention.request_deletion,
            drain=self._draining.begin,
            replication=self._replication,
            wake_members=self._members_ticker.wake,
            fetch=self._fetches.begin,
            host=self._host,
            now_ms=self._now_ms,
            monotonic_ms=self._monotonic_ms,
        )

    def _metrics(self) -> dict[str, object]:
        """Return the numbers of all parts by name, for metrics and the runtime info."""
        return {
            "connections": self._server.open_connections,
            "transactions": self.transactions.metrics(),
            "consumers": self._tables.registry.subscription_metrics(),
            "disk": self._disk_limits.metrics(),
            "retention": self._retention.metrics(),
            "recovery": self._store_service.recovery_metrics(),
            "replication": self._replication.metrics(),
            "access": self._access.metrics(),
            "delays": self._delays.metrics(),
            "archive": self._handlers.pull.archived.metrics(),
            "limits": usage(self.keepers),
            "refuses_messages": self._unready(),
        }

    def _unready(self) -> str:
        """Return why messages are refused; empty if they are accepted."""
        return self._draining.reason or self._refusal.reason

    def _make_shared_port(self) -> list[Service]:
        if self._shared_port is None:
            return []
        listening, others = self._shared_port

        def created(broker: str, name: str, topic: RegisteredTopic) -> None:
            if broker in others:
                self._tables.topics.adopt(name, topic, broker)

        self._tables.brokers.on_created = created
        return [SharedPort(listening, self._server.accept, self._tables.brokers, others)]

    def _make_http(self) -> HttpEndpoint | None:
        network = self.config.network
        port = network.http_listen_port
        if (self._default_http_port if port is None else port) == OFF:
            return None
        return HttpEndpoint(
            network.bind_address,
            self._default_http_port if port is None else port,
            self._make_answers,
            is_optional=port is None,
            tls=self._tls,
            loop_delay=self._loop_delay,
        )

    def _make_answers(self) -> Answers:
        from .http.app import Answers  # noqa: PLC0415 -- see http/endpoint.py
        from .http.collector import Collector  # noqa: PLC0415
        from .http.families import DECISION_TIME, FLUSH_TIME, LOOP_DELAY  # noqa: PLC0415

        collector = Collector(
            self._store,
            self._tables,
            self._statistics,
            self.transactions.table,
            metrics=self._metrics,
            refuses=lambda: self._refusal.refusing,
            bytes_left=lambda: self._disk_limits.bytes_left,
            histograms={
                DECISION_TIME: self._decision_time,
                FLUSH_TIME: self._flush_time,
                LOOP_DELAY: self._loop_delay,
            },
            fetch=self._fetches.begin,
            now_ms=self._now_ms,
        )
        topics = self.config.topics
        return Answers(
            collector,
            {"cluster": topics.cluster_name, "node_type": "broker", "node_id": topics.broker_name},
            unready=self._unready,
            may_read=self._access.may_read_metrics,
        )

    def _make_housekeeping(self) -> list[Service]:
        tables = self._tables
        expiring = self._handlers.clients.expire, tables.locks.expire, tables.brokers.expire
        return [
            Ticker("index", self._store_service.index_tick),
            Ticker("statistics", self._statistics.tick, pause=PAUSE_S),
            self._transaction_ticker,
            self._delay_ticker,
            self._pop_ticker,
            self._retention_ticker,
            Ticker("disk", self._disk_tick),
            self._members_ticker,
            self._paced_ticker("clients", PeriodicWork(SCAN_S, *expiring).tick),
            self._paced_ticker("unused names", self._unused.tick),
            Periodic(
                TABLES_TICK_S,
                [
                    tables.topics.persist_job,
                    tables.groups.persist_job,
                    tables.offsets.persist_job,
                    self._delays.persist_job,
                ],
            ),
        ]

    def _paced_ticker(self, name: str, tick: Callable[[], float]) -> Ticker:
        """Return a ticker that lets requests pass between two slices of its work."""
        return Ticker(name, tick, pause=PAUSE_S, traffic=lambda: self._server.reads)

    def configure(self, config: BrokerConfig) -> None:
        if config.logs.level is not self.config.logs.level:  # it is the level of the whole process
            set_level(config.logs.level)
        self.config = config
        self._tables.configure(config)
        self._handlers.group_offsets.in_broker = config.consumers.server_side_reset
        self._retention.configure(config.store)
        self._disk_limits.configure(config.disk)
        self.transactions.configure(config.transaction)

    async def start(self) -> RecoveryReport:
        """Return when requests are answered.

        Raises:
            DirectoryInUseError: Another broker holds the directory.
            StoreError: The store cannot be opened.
            AddressTakenError: An address cannot be bound.
        """
        await self._stack.start()
        return self._store_service.report

    async def stop(self) -> None:
        """Send the replies that wait for the disk, flush, and mark the store clean."""
        await self._stack.stop()

    @property
    def address(self) -> str:
        """Address of the client listener, ``host:port``."""
        return self._server.address

    @property
    def http_address(self) -> str:
        """Address of metrics and probes, ``host:port``; empty if there is none."""
        return "" if self._http is None else self._http.address

    @property
    def namesrv_address(self) -> str:
        """Address of the name-server listener, ``host:port``."""
        return self._server.namesrv_address

    def _appended(self, group: Sequence[AppendRequest]) -> None:
        if self._store.write_offset >= self._disk_limits.test_due:
            self._disk_limits.written_to(self._store.write_offset)
        for request in group:
            if request.topic in self._watched_topics:
                if request.topic != self._revive_topic:
                    self._delays.on_stored(request)
                elif is_from_timer(request.properties):
                    self._pops.arrived(request)
        if self._polling.waiting:
            self._polling.mark_arrivals([(one.topic, one.queue_id) for one in group])
        if self._pop_polling.waiting:
            self._pop_polling.mark_arrivals(
                [(self._pop_retries.topic_of(one.topic), -1) for one in group]
            )
        if self._sync_flush:
            if len(group) >= LARGE_GROUP:
                self._store.request_flush()
            self._release.request_flush()
        else:
            self._polling.wake_soon()
            self._pop_polling.wake_soon()

    def _connection_lost(self, connection: Connection) -> None:
        self._handlers.clients.connection_lost(connection)
        self._tables.brokers.connection_lost(connection)

    def _transactions_tick(self) -> float:
        self._group.append_staged()  # so that no check is sent for a transaction decided just now
        return self.transactions.tick()

    def _wake_readers(self) -> None:
        self._replication.send()
        self._polling.wake()
        if self._pop_polling.waiting:
            self._pop_polling.wake()

    def _disk_tick(self) -> float:
        self._store.check_directory()
        if self._store.directory_lost:
            self._end()
        return self._disk_limits.tick()

    @property
    def failure(self) -> Exception | None:
        """Why the store has refused to write; None if it has not."""
        return self._store.failure

    def _store_failed(self, error: Exception) -> None:
        """Log why the store refuses appends, and refuse those that wait; any thread."""
        self._refusal.begin("disk_failed", ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
        self._release.fail_from_thread(str(error))
        logger.critical(
            "event=store_failed error=%r note='Nothing more is acknowledged: restart the broker "
            "when the disk is sound again'",
            str(error),
        )
