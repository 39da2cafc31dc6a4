"""All tables of a broker: its state besides messages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from halfmq.store.message_store import MessageStore

from ..config import BrokerConfig
from .client_registry import ClientRegistry
from .consumer_offsets import ConsumerOffsetTable
from .group_table import GroupTable
from .kv_table import KvConfig
from .queue_locks import QueueLocks
from .registered_brokers import BrokerTable
from .topic_table import TopicTable


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables; `topics`, `groups`, `offsets` and `kv_config` have a file each."""

    topics: TopicTable
    groups: GroupTable
    offsets: ConsumerOffsetTable
    registry: ClientRegistry
    locks: QueueLocks
    kv_config: KvConfig
    brokers: BrokerTable

    def load(self) -> None:
        self.topics.load()
        self.groups.load()
        self.offsets.load()
        self.kv_config.load()

    def fit(self, store: MessageStore, *, after_kill: bool) -> None:
        """Settle deletions, and restore topics and groups that messages or tables still name."""
        for name in self.topics.settle_deleted(store.min_offset, store.write_offset):
            deque(self.offsets.forget(topic=name), maxlen=0)  # a kill may have left them
        self.topics.complete(store.queues.names())
        groups = {*self.topics.groups(), *self.offsets.groups()}
        self.groups.complete(groups, after_kill=after_kill)

    def configure(self, config: BrokerConfig) -> None:
        """Use changed settings from now on."""
        self.topics.configure(config.topics)
        self.groups.auto_create = config.topics.auto_create_groups
        self.registry.refuse_unequal = config.consumers.refuse_unequal


def make_tables(
    config: BrokerConfig,
    *,
    delay_levels: int,
    now_ms: Callable[[], int],
    monotonic_ms: Callable[[], int],
) -> Tables:
    """Return the tables of a broker, before their files are read."""
    directory = config.store.root / "config"
    registry = ClientRegistry(now_ms=monotonic_ms, refuse_unequal=config.consumers.refuse_unequal)
    groups = GroupTable(
        directory / "subscriptionGroup.json",
        auto_create=config.topics.auto_create_groups,
        now_ms=now_ms,
    )
    return Tables(
        topics=TopicTable(
            directory / "topics.json",
            config.topics,
            now_ms=now_ms,
            delay_levels=delay_levels,
            saves_on_thread=True,
            is_group=groups.__contains__,
        ),
        groups=groups,
        offsets=ConsumerOffsetTable(directory / "consumerOffset.json", now_ms=now_ms),
        registry=registry,
        locks=QueueLocks(now_ms=monotonic_ms, is_connected=registry.is_consumer),
        kv_config=KvConfig(directory / "kvConfig.json", now_ms),
        brokers=BrokerTable(monotonic_ms),
    )
