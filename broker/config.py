"""All settings of the broker: key, default, range and effect of each.

Keys and units are RocketMQ's where RocketMQ has the key. `config_file` reads the values.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from halfmq.store.config import FlushMode, StoreConfig

from .access.addresses import EXPECTED, parse_address_pattern
from .access.config import AccessConfig, TlsConfig
from .delay.levels import DEFAULT_LEVELS, parse_delay_levels
from .logs import LogFormat, LogLevel
from .settings import DIRECTORY, SWITCH, checked, choice, duration, integer, names, pattern, setting

_PORT: Final = integer(0, 65_535, "0 picks a free port")
_NAME_PATTERN: Final = r"[%|A-Za-z0-9_-]{1,127}"
_BROKER_NAME: Final = pattern(
    r"[%|A-Za-z0-9_-][%|A-Za-z0-9_.@-]{0,126}",
    "a name of 1 to 127 letters, digits and the characters % | _ - . @, not with . or @ in front",
)
"""A host's name, as RocketMQ has it by default, or a machine room's before an @, which
`AllocateMessageQueueByMachineRoom` of Java consumers goes by."""
_TOPICS: Final = names(
    _NAME_PATTERN,
    "topics separated by ; each of 1 to 127 letters, digits and the characters % | _ -",
)
PORT_STEP: Final = 10
"""Ports from one of several brokers to the next: each has some next to its listenPort."""
_DAY_MS: Final = 86_400_000
_PERCENT: Final = integer(10, 100, "percent in use; 100: never")
_ADDRESS_LIST: Final = r"(|[^:;,\s]+:\d{1,5}([;,][^:;,\s]+:\d{1,5})*)"
_HOURS: Final = r"([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*"
_STORE: Final = StoreConfig(root=Path())  # for the defaults, which the store states


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Addresses of the broker, and the name servers with which it registers."""

    bind_address: str = setting(
        "bindAddress",
        "127.0.0.1",
        checked(ipaddress.ip_address, "an IP address of this machine, or 0.0.0.0 for all"),
        "Address to which every listener binds.",
    )
    listen_port: int = setting(
        "listenPort",
        10_911,
        _PORT,
        "Port for requests of clients; listenPort - 2 serves the VIP channel of old clients, "
        "unless it is 0.",
    )
    namesrv_listen_port: int = setting(
        "namesrvListenPort",
        9_876,
        integer(0, 65_535, "0 serves name-server requests on listenPort only"),
        "Port for name-server requests.",
    )
    http_listen_port: int | None = setting(
        "httpListenPort",
        None,
        integer(-1, 65_535, "0 picks a free port, -1 serves none"),
        "Port for metrics and probes over HTTP (9877; if that is taken, a warning and none).",
    )
    console_enabled: bool = setting(
        "consoleEnable",
        False,
        SWITCH,
        "Run the console (halfmq console) as a child process; it needs pip install "
        "'halfmq[console]'.",
    )
    console_listen_port: int = setting(
        "consoleListenPort",
        9_878,
        integer(1, 65_535),
        "Port of the console on bindAddress; consoleEnable serves it.",
    )
    connections_per_address: int = setting(
        "connectionsPerAddressMax",
        0,
        integer(0, 20_000, "connections; 0: no limit"),
        "Maximum number of connections from one address; further ones are closed at once.",
    )
    advertised_host: str = setting(
        "brokerIP1",
        "",
        checked(lambda text: text and ipaddress.ip_address(text), "an IP address, or empty"),
        "Address of this broker in routes, in message ids and for name servers; empty: the "
        "address by which each client came.",
    )
    namesrv_addr: str = setting(
        "namesrvAddr",
        "",
        pattern(_ADDRESS_LIST, "host:port, several separated by ;"),
        "Name servers with which the broker also registers: RocketMQ's, or other halfmq brokers.",
    )
    registration_addresses: str = setting(
        "registrationAddresses",
        "",
        checked(lambda text: text and parse_address_pattern(text), f"{EXPECTED}, or empty"),
        "Addresses from which other brokers may register with this one, so that its routes name "
        "them too; empty: none.",
    )
    brokers: int = setting(
        "brokers",
        1,
        integer(1, 32, "broker processes"),
        "Number of brokers that the command starts. With several, each is a process with its own "
        "brokerName-I, storePathRootDir/brokerName-I, and ports 10 above those of the one before; "
        "namesrvListenPort is one for all.",
    )

    def contradiction(self) -> tuple[str, str] | None:
        """Return a key that contradicts the other settings, and what it should be; or None."""
        port = self.namesrv_listen_port
        if port and port in (self.listen_port, self.listen_port - 2):
            use = "listenPort" if port == self.listen_port else "the VIP port, listenPort - 2"
            return "namesrvListenPort", f"another port: {port} is {use}"
        if self.brokers > 1 and not 0 < self.listen_port <= 65_535 - PORT_STEP * (self.brokers - 1):
            return "listenPort", (
                f"a port from which {self.brokers} brokers find theirs, {PORT_STEP} above each "
                "other and below 65536; none picks a free one"
            )
        if (self.http_listen_port or 0) > 65_535 - PORT_STEP * (self.brokers - 1):
            return "httpListenPort", f"a lower port: each broker's is {PORT_STEP} above another's"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """A second copy of the log, which an Apache RocketMQ slave keeps."""

    slave_addresses: str = setting(
        "slaveAddresses",
        "",
        checked(lambda text: text and parse_address_pattern(text), f"{EXPECTED}, or empty"),
        "Addresses from which an Apache RocketMQ slave may copy the log through haListenPort; "
        "empty: nothing listens there. RocketMQ has no authentication for it.",
    )
    ha_listen_port: int = setting(
        "haListenPort",
        10_912,
        _PORT,
        "Port through which a slave copies the log; name servers get it, and slaves from them.",
    )
    min_in_sync_replicas: int = setting(
        "minInSyncReplicas",
        1,
        integer(1, 2, "copies"),
        "2: a message or decision is acknowledged, and consumers see it, when a slave has it, too.",
    )
    slave_timeout_ms: int = setting(
        "slaveTimeout",
        3_000,
        duration(0, _DAY_MS),
        "With minInSyncReplicas=2, time without a slave that keeps up after which messages are "
        "refused with code 14; until then they wait for it.",
    )

    def contradiction(self) -> tuple[str, str] | None:
        """Return a key that contradicts the other settings, and what it should be; or None."""
        if self.min_in_sync_replicas > 1 and not self.slave_addresses:
            return "slaveAddresses", "the address of the slave, since minInSyncReplicas=2"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log on standard error."""

    level: LogLevel = setting(
        "logLevel", LogLevel.INFO, choice(LogLevel), "Least level that is logged.", live=True
    )
    form: LogFormat = setting(
        "logFormat",
        LogFormat.TEXT,
        choice(LogFormat),
        "Lines of the log: event=… key=value …, or JSON objects with the same fields.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefaults:
    """Names of this broker, and what it creates automatically."""

    broker_name: str = setting(
        "brokerName", "broker-a", _BROKER_NAME, "Name of this broker in routes."
    )
    broker_id: int = setting(
        "brokerId",
        0,
        integer(0, 2**31 - 1, "0: the master"),
        "Number of this process among those of its name; producers send to the master, which "
        "has 0.",
    )
    cluster_name: str = setting(
        "brokerClusterName", "DefaultCluster", _BROKER_NAME, "Name of its cluster in routes."
    )
    auto_create: bool = setting(
        "autoCreateTopicEnable", True, SWITCH, "Create a topic on its first message.", live=True
    )
    default_queue_nums: int = setting(
        "defaultTopicQueueNums",
        8,
        integer(1, 1_024, "queues"),
        "Maximum number of queues of such a topic.",
        live=True,
    )
    trace_topic: bool = setting(
        "traceTopicEnable",
        False,
        SWITCH,
        "Create RMQ_SYS_TRACE_TOPIC with one queue at start instead of on its first message.",
    )
    auto_create_groups: bool = setting(
        "autoCreateSubscriptionGroup",
        True,
        SWITCH,
        "Create a consumer group on its first use.",
        live=True,
    )
    store_replies: bool = setting(
        "storeReplyMessageEnable",
        True,
        SWITCH,
        "Also store replies of request-reply, in the topic <brokerClusterName>_REPLY_TOPIC.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """What consumers may do."""

    refuse_unequal: bool = setting(
        "refuseUnequalSubscriptions",
        False,
        SWITCH,
        "Refuse a consumer whose topics or filters differ from those of other members of its "
        "group. If false, this is a warning, and meanwhile the group misses messages.",
        live=True,
    )
    property_filter: bool = setting(
        "enablePropertyFilter",
        True,
        SWITCH,
        "Serve consumers that select messages by an SQL92 filter on their properties.",
    )
    server_side_reset: bool = setting(
        "useServerSideResetOffset",
        True,
        SWITCH,
        "Reset the offsets of a group in the broker, which also works without connected "
        "consumers. If false, the broker tells connected consumers to reset their offsets, "
        "which takes official ones ten seconds.",
        live=True,
    )
    retry_topic_v2: bool = setting(
        "enableRetryTopicV2",
        False,
        SWITCH,
        "Join group and topic by a + in the names of the retry topics of pop, so that no two are "
        "equal. If false, they are joined by a _, as every RocketMQ 5 understands it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where and how messages are kept."""

    root: Path = setting(
        "storePathRootDir",
        Path("~/.halfmq/store").expanduser(),
        DIRECTORY,
        "Directory of all data; only one broker can use it at a time.",
    )
    commit_log_path: Path | None = setting(
        "storePathCommitLog",
        None,
        DIRECTORY,
        "Directory of the commit log (storePathRootDir/commitlog).",
    )
    flush_mode: FlushMode = setting(
        "flushDiskType",
        _STORE.flush_mode,
        choice(FlushMode),
        "SYNC_FLUSH: an acknowledged message is on disk. ASYNC_FLUSH: a power failure loses the "
        "last interval.",
    )
    flush_interval_ms: int = setting(
        "flushIntervalCommitLog",
        _STORE.flush_interval_ms,
        duration(1, 60_000),
        "Time between flushes with ASYNC_FLUSH.",
    )
    flush_interval_consume_queue_ms: int = setting(
        "flushIntervalConsumeQueue",
        _STORE.flush_interval_consume_queue_ms,
        duration(10, 600_000),
        "Time between flushes of consume queues.",
    )
    commit_log_file_size: int = setting(
        "mappedFileSizeCommitLog",
        _STORE.commit_log_file_size,
        integer(4_096, 1 << 40, "bytes"),
        "Size of one log file; do not change it for an existing store.",
    )
    consume_queue_file_size: int = setting(
        "mappedFileSizeConsumeQueue",
        _STORE.consume_queue_file_size,
        integer(20, 1 << 34, "bytes"),
        "Size of one consume queue file, rounded up to a multiple of 20.",
    )
    max_message_size: int = setting(
        "maxMessageSize",
        4_194_304,
        integer(1, 16_000_000, "bytes"),
        "Maximum size of a message body.",
    )
    index_enabled: bool = setting(
        "messageIndexEnable", _STORE.index_enabled, SWITCH, "Index messages by key and unique id."
    )
    max_hash_slots: int = setting(
        "maxHashSlotNum",
        _STORE.max_hash_slots,
        integer(1, 500_000_000, "slots"),
        "Hash slots of an index file.",
    )
    max_index_items: int = setting(
        "maxIndexNum",
        _STORE.max_index_items,
        integer(2, 2_000_000_000, "items"),
        "Items of an index file.",
    )
    append_property_crc: bool = setting(
        "enabledAppendPropCRC",
        _STORE.append_property_crc,
        SWITCH,
        "Store a checksum of the whole record, not only of the body.",
    )
    archive_url: str = setting(
        "archiveUrl",
        "",
        pattern(r"(|(s3|gs|az|file)://.+[^/])", "a URL like s3://bucket/folder, or empty"),
        "Object store to which full files are copied before they are deleted, and from which old "
        "messages are consumed; it needs pip install 'halfmq[archive]'. Empty: none.",
    )
    file_reserved_hours: int = setting(
        "fileReservedTime",
        72,
        integer(0, 1_000_000, "hours"),
        "Minimum time for which messages are kept; then whole log files are deleted.",
        live=True,
        live_min=24,
    )
    delete_when: str = setting(
        "deleteWhen",
        "04",
        pattern(_HOURS, "hours of the day from 00 to 23, several separated by ;"),
        "Local hours at which log files are deleted; at any hour if disk space runs low.",
        live=True,
    )

    def store_config(self, delay_levels_ms: tuple[int, ...]) -> StoreConfig:
        """Return the settings that the store uses."""
        return StoreConfig(
            root=self.root,
            commit_log_path=self.commit_log_path,
            commit_log_file_size=self.commit_log_file_size,
            consume_queue_file_size=self.consume_queue_file_size,
            flush_mode=self.flush_mode,
            flush_interval_ms=self.flush_interval_ms,
            flush_interval_consume_queue_ms=self.flush_interval_consume_queue_ms,
            index_enabled=self.index_enabled,
            max_hash_slots=self.max_hash_slots,
            max_index_items=self.max_index_items,
            append_property_crc=self.append_property_crc,
            archive_url=self.archive_url,
            delay_levels_ms=delay_levels_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Limits for the disk of the log; see `disk_limits`."""

    warn_ratio: int = setting(
        "diskMaxUsedSpaceRatio",
        75,
        _PERCENT,
        "Above this usage a warning is logged, and old files are deleted at any hour.",
        live=True,
    )
    refuse_ratio: int = setting(
        "diskSpaceWarningLevelRatio",
        90,
        _PERCENT,
        "Above this usage messages and half messages are rejected with SERVICE_NOT_AVAILABLE, "
        "so that clients try another broker; consumption, decisions and checks continue.",
        live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig:
    """When and how often a producer is asked about an undecided half message."""

    timeout_ms: int = setting(
        "transactionTimeOut",
        6_000,
        duration(1, 30 * _DAY_MS),
        "Age at which the first check is due.",
        live=True,
    )
    check_interval_ms: int = setting(
        "transactionCheckInterval",
        30_000,
        duration(1, 30 * _DAY_MS),
        "Time between two checks.",
        live=True,
    )
    check_max: int = setting(
        "transactionCheckMax",
        15,
        integer(1, 1_000_000),
        "Number of delivered checks after which the message is parked.",
        live=True,
    )
    pending_max: int = setting(
        "transactionPendingMax",
        1_000_000,
        integer(1, 100_000_000, "halves"),
        "Maximum number of undecided half messages; further ones are rejected with SYSTEM_BUSY. "
        "A million take 300 MiB of memory.",
        live=True,
        live_min=1_000,
    )
    group_pending_max: int = setting(
        "transactionPendingMaxPerGroup",
        0,
        integer(0, 100_000_000, "transactions; 0: no limit"),
        "Maximum number of undecided transactions of one producer group; further ones are "
        "rejected with SYSTEM_BUSY.",
        live=True,
        live_min=10,
    )
    reject: bool = setting(
        "rejectTransactionMessage",
        False,
        SWITCH,
        "Reject half messages with NO_PERMISSION.",
        live=True,
    )
    unflushed_topics: frozenset[str] = setting(
        "transactionAsyncFlushTopics",
        frozenset(),
        _TOPICS,
        "Topics whose half messages and decisions are acknowledged before they are on disk, "
        "independent of flushDiskType: a power failure may lose a message whose row was "
        "committed.",
    )
    op_batch_size: int = setting(
        "transactionOpMsgMaxSize",
        4_096,
        integer(20, 1 << 20, "bytes"),
        "Maximum size of an op message.",
    )
    op_batch_interval_ms: int = setting(
        "transactionOpBatchInterval",
        3_000,
        duration(1, 600_000),
        "Maximum time until an op message is written.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig:
    """Delayed delivery by level."""

    levels: str = setting(
        "messageDelayLevel",
        DEFAULT_LEVELS,
        checked(parse_delay_levels, "times like 1s 5s 1m 2h 1d, separated by blanks"),
        "Delays of the levels 1, 2, ….",
    )
    timer_delay_s_max: int = setting(
        "timerMaxDelaySec",
        40 * 86_400,
        integer(1, 400 * 86_400),
        "Longest time in seconds until a message with TIMER_DELAY_SEC, TIMER_DELAY_MS or "
        "TIMER_DELIVER_MS is delivered. RocketMQ allows 3 days, because it loses messages that "
        "wait longer than the log is kept; halfmq stores those again.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """All settings, in sections."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    logs: LogConfig = field(default_factory=LogConfig)
    topics: TopicDefaults = field(default_factory=TopicDefaults)
    consumers: ConsumerConfig = field(default_factory=ConsumerConfig)
    store: StoreSettings = field(default_factory=StoreSettings)
    disk: DiskConfig = field(default_factory=DiskConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)

    def contradiction(self) -> tuple[str, str] | None:
        """Return a key that contradicts the other settings, and what it should be; or None."""
        for part in (self.network, self.replication, self.access, self.tls):
            found = part.contradiction()
            if found is not None:
                return found
        if (
            self.replication.min_in_sync_replicas > 1
            and self.store.flush_mode is not FlushMode.SYNC_FLUSH
        ):
            return "flushDiskType", "SYNC_FLUSH, since minInSyncReplicas=2: slaves get what is safe"
        return None


SECTIONS: Final = {
    "network": NetworkConfig,
    "replication": ReplicationConfig,
    "logs": LogConfig,
    "topics": TopicDefaults,
    "consumers": ConsumerConfig,
    "store": StoreSettings,
    "disk": DiskConfig,
    "transaction": TransactionConfig,
    "delay": DelayConfig,
    "access": AccessConfig,
    "tls": TlsConfig,
}
"""By attribute of `BrokerConfig`."""
