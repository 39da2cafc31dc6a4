"""Create the handlers of administrative requests about topics, groups, statistics and settings."""

from collections.abc import Callable, Iterable

from halfmq.store.message_store import MessageStore

from ..config import TopicDefaults
from ..live_settings import LiveSettings
from ..ports import Handlers
from ..tables.all_tables import Tables
from ..tables.message_statistics import Statistics
from .admin.broker_config import KvConfigHandlers, SettingsHandlers
from .admin.change_queue import ChangeQueue
from .admin.consumer_relays import RelayHandlers
from .admin.consumption import ConsumptionHandlers
from .admin.groups import GroupHandlers
from .admin.topics import ConsumeQueueHandlers, TopicHandlers


def admin_handlers(
    tables: Tables,
    store: MessageStore,
    statistics: Statistics,
    settings: LiveSettings,
    changes: ChangeQueue,
    identity: TopicDefaults,
    *,
    search_again: Callable[[Iterable[tuple[str, int]]], None],
    now_ms: Callable[[], int],
    monotonic_ms: Callable[[], int],
) -> list[Handlers]:
    """Return the handlers; ``identity`` has the names of this broker."""
    return [
        TopicHandlers(
            tables.topics,
            tables.offsets,
            tables.brokers,
            store,
            changes,
            identity,
            stored_per_second=statistics.stored_per_second,
            search_again=search_again,
        ),
        GroupHandlers(
            tables.groups,
            tables.topics,
            tables.offsets,
            tables.registry,
            changes,
            now_ms=now_ms,
            monotonic_ms=monotonic_ms,
        ),
        KvConfigHandlers(tables.kv_config, changes),
        ConsumeQueueHandlers(tables.registry, store),
        RelayHandlers(tables.registry, tables.topics, tables.groups, store.named_record, identity),
        ConsumptionHandlers(
            tables.topics,
            tables.groups,
            tables.offsets,
            tables.registry,
            store,
            statistics,
            identity,
        ),
        SettingsHandlers(settings, changes),
    ]
