"""Create the handlers of all requests."""

import os
import secrets
from collections.abc import Callable, Mapping

from attrs import define

from halfmq.store.config import FlushMode
from halfmq.store.format.ids import UniqueKeyFactory
from halfmq.store.format.topics import reply_topic
from halfmq.store.message_store import MessageStore

from ..access.build import AccessSetup
from ..config import BrokerConfig
from ..delay.delivery import DelayService
from ..delay.levels import DelayLevels
from ..delay.timer_records import TimerRule
from ..disk.send_refusal import SendRefusal
from ..filters.filters_in_use import FiltersInUse
from ..live_settings import LiveSettings
from ..loop.fetches import Fetch
from ..net.group_append import GroupAppend
from ..net.long_polling import LongPolling
from ..pop.engine import PopEngine
from ..pop.request_modes import RequestModes
from ..ports import Handlers
from ..replication.replication import Replication
from ..tables.all_tables import Tables
from ..tables.message_statistics import Statistics
from ..transaction.transaction_service import TransactionService
from .admin.access import PlainAclHandlers, UserHandlers
from .admin.broker_config import CleaningHandlers, KvConfigHandlers, SettingsHandlers
from .admin.change_queue import ChangeQueue
from .admin.consumer_relays import RelayHandlers
from .admin.consumption import ConsumptionHandlers
from .admin.group_offsets import GroupOffsetHandlers
from .admin.groups import GroupHandlers
from .admin.statistics import StatisticsHandlers
from .admin.tables import RequestModeHandlers, TableHandlers
from .admin.topics import ConsumeQueueHandlers, TopicHandlers
from .admin.transactions import TransactionAdminHandlers
from .clients.assignments import AssignmentHandlers
from .clients.brokers import BrokerHandlers
from .clients.clients import ClientHandlers, LockHandlers
from .clients.queue_offsets import OffsetHandlers
from .clients.routes import RouteHandlers
from .messages.pop import PopHandler
from .messages.pull import PullHandler
from .messages.pull_admission import PullAdmission
from .messages.queries import QueryHandlers
from .messages.recall import DelayHandlers
from .messages.reply import ReplyHandler
from .messages.send import SendHandler
from .messages.send_back import SendBackHandler
from .transactions.end import TransactionHandler
from .transactions.end_batch import EndBatches
from .transactions.prepare import PrepareHandler


@define(eq=False, repr=False, slots=False, kw_only=True)
class AllHandlers:
    """All handlers of one broker, made from the parts that they serve."""

    _config: BrokerConfig
    _settings: LiveSettings
    _store: MessageStore
    _tables: Tables
    _statistics: Statistics
    _access: AccessSetup
    _refusal: SendRefusal
    _group: GroupAppend
    _transactions: TransactionService
    _levels: DelayLevels
    _timer_rule: TimerRule
    _delays: DelayService
    _pops: PopEngine
    _modes: RequestModes
    _filters: FiltersInUse
    _polling: LongPolling
    _pop_polling: LongPolling
    _queue_offsets: OffsetHandlers
    _runtime_info: Callable[[], Mapping[str, str]]
    _delete_expired: Callable[[], None]  # starts the deletion of old files of the log
    _drain: Callable[[float], None]  # begins to end the broker, after seconds for producers
    _replication: Replication
    _wake_members: Callable[[], None]  # called when there is work for the tick of ``clients``
    _fetch: Fetch
    _host: bytes  # that of records which the broker makes
    _now_ms: Callable[[], int]
    _monotonic_ms: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        tables, self._identity = self._tables, self._config.topics
        self._sync_flush = self._config.store.flush_mode is FlushMode.SYNC_FLUSH
        self.changes = ChangeQueue()
        self.clients = ClientHandlers(
            tables.registry, tables.topics, tables.groups, self._filters, wake=self._wake_members
        )
        self._admission = PullAdmission(
            tables.topics,
            tables.groups,
            tables.registry,
            self._filters,
            may_pull=self._access.admit,
        )
        self.pull = PullHandler(
            self._store,
            self._admission,
            tables.offsets,
            self._polling,
            self._statistics,
            self._pops.popped,
            self._pops.on_pull,
        )
        self.group_offsets = GroupOffsetHandlers(
            tables.topics,
            tables.groups,
            tables.offsets,
            tables.registry,
            self._store,
            self.changes,
            self._identity,
            search_again=self._polling.search_again,
            now_ms=self._now_ms,
        )
        self.group_offsets.in_broker = self._config.consumers.server_side_reset
        self.relays = RelayHandlers(
            tables.registry, tables.topics, tables.groups, self._store.named_record, self._identity
        )
        self.families = [
            self.clients,
            self.pull,
            self.group_offsets,
            self.relays,
            self._queue_offsets,
            *self._of_messages(),
            *self._of_transactions(),
            *self._of_name_server(),
            *self._of_operators(),
            *self._of_access(),
        ]

    def _of_messages(self) -> list[Handlers]:
        store, tables, names = self._store, self._tables, self._identity
        send_back = SendBackHandler(
            store,
            tables.topics,
            tables.groups,
            self._levels,
            self._timer_rule,
            tables.locks,
            self._refusal,
            require_room=self._delays.require_room,
            sync_flush=self._sync_flush,
            now_ms=self._now_ms,
            count=self._statistics.sent_back,
        )
        self._sends = SendHandler(
            store,
            self._group,
            tables.topics,
            self._transactions.prepares,
            self._refusal,
            delayed=self._levels.delayed,
            retried=send_back.retried,
            timer_rule=self._timer_rule,
            require_room=self._delays.require_room,
            broker_name=names.broker_name,
            cluster_name=names.cluster_name,
            max_message_size=self._config.store.max_message_size,
            sync_flush=self._sync_flush,
            unique_keys=UniqueKeyFactory(
                self._host[:-4],
                process_id=os.getpid(),
                token=secrets.token_bytes(4),
                now_ms=self._now_ms,
            ),
        )
        replies = ReplyHandler(
            store,
            tables.registry,
            self._sends.validated_reply,
            append_staged=self._group.append_staged,
            refuse_sends=self._sends.refuse,
            topic=reply_topic(names.cluster_name),
            stores=names.store_replies,
            sync_flush=self._sync_flush,
            now_ms=self._now_ms,
        )
        pop = PopHandler(
            store,
            self._pops,
            self._admission,
            tables.topics,
            self._pop_polling,
            self._statistics,
            broker_name=names.broker_name,
            sync_flush=self._sync_flush,
            now_ms=self._now_ms,
            fetch=self._fetch,
        )
        return [
            self._sends,
            send_back,
            replies,
            pop,
            QueryHandlers(store),
            DelayHandlers(self._delays, tables.topics.get, broker_name=names.broker_name),
            LockHandlers(tables.locks),
        ]

    def _of_transactions(self) -> list[Handlers]:
        parts, store = self._transactions, self._store
        return [
            PrepareHandler(
                parts.prepares,
                self._sends.validated,
                append_staged=self._group.append_staged,
                refuse_sends=self._sends.refuse,
                log_file_size=self._config.store.commit_log_file_size,
            ),
            TransactionHandler(parts.decisions, self._group),
            EndBatches(parts.decisions, self._group, store.reader.lacking),
            TransactionAdminHandlers(parts.view, parts.operator, store.named_record, self._group),
        ]

    def _of_name_server(self) -> list[Handlers]:
        tables, names = self._tables, self._identity
        addresses = self._config.network.registration_addresses
        return [
            RouteHandlers(tables.topics, tables.brokers, names, self._drain),
            BrokerHandlers(
                tables.brokers, tables.kv_config, names, addresses, self._replication.address_for
            ),
            KvConfigHandlers(tables.kv_config, self.changes),
            AssignmentHandlers(
                tables.topics, tables.brokers, tables.registry, names.broker_name, self._modes
            ),
        ]

    def _of_operators(self) -> list[Handlers]:
        store, tables, changes = self._store, self._tables, self.changes
        return [
            SettingsHandlers(self._settings, changes),
            StatisticsHandlers(self._statistics, self._runtime_info),
            CleaningHandlers(self._delete_expired, store.deletion.clean_queues),
            TableHandlers(tables.offsets, self._delays.positions, self._replication.told_to_slaves),
            RequestModeHandlers(self._modes, tables.topics, tables.groups, changes),
            TopicHandlers(
                tables.topics,
                tables.offsets,
                tables.brokers,
                store,
                changes,
                self._identity,
                stored_per_second=self._statistics.stored_per_second,
                search_again=self._polling.search_again,
            ),
            GroupHandlers(
                tables.groups,
                tables.topics,
                tables.offsets,
                tables.registry,
                changes,
                now_ms=self._now_ms,
                monotonic_ms=self._monotonic_ms,
            ),
            ConsumeQueueHandlers(tables.registry, store),
            ConsumptionHandlers(
                tables.topics,
                tables.groups,
                tables.offsets,
                tables.registry,
                store,
                self._statistics,
                self._identity,
            ),
        ]

    def _of_access(self) -> list[Handlers]:
        names, access = self._identity, self._access
        if access.accounts is not None:
            return [PlainAclHandlers(access.accounts, names.broker_name, names.cluster_name)]
        return [] if access.users is None else [UserHandlers(access.users, self.changes)]
