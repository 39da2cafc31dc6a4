"""The metrics that the broker exposes, and their text formats.

Names and labels are those of RocketMQ 5 where it has the metric; all others begin with ``halfmq_``.
Source: RocketMQ 5.3.3 ``BrokerMetricsConstant``, ``DefaultStoreMetricsConstant``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeAlias

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from .histogram import Histogram

SERIES_MAX: Final = 2_000
"""Series of one metric, some 200 bytes of text each. What has no series of its own is counted in
the one whose labels are ``other``, so that names which clients choose cannot fill Prometheus."""

OTHER: Final = "other"

PIECE_SERIES: Final = 100
"""Series written at a time."""

_Labels: TypeAlias = tuple[str, ...]
_Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One metric."""

    name: str
    kind: _Kind
    help: str
    labels: tuple[str, ...] = ()
    takes_largest: bool = False
    """Whether the series ``other`` has the largest value instead of the sum."""


FAMILIES: Final[dict[str, Family]] = {}
"""All metrics by name, in the order of the documentation."""


def _family(
    name: str, kind: _Kind, help_text: str, *labels: str, takes_largest: bool = False
) -> Family:
    made = FAMILIES[name] = Family(name, kind, help_text, labels, takes_largest)
    return made


# Of RocketMQ.
MESSAGES_IN: Final = _family(
    "rocketmq_messages_in_total", "counter", "messages stored", "topic", "is_system"
)
BYTES_IN: Final = _family(
    "rocketmq_throughput_in_total", "counter", "bytes stored", "topic", "is_system"
)
MESSAGES_OUT: Final = _family(
    "rocketmq_messages_out_total",
    "counter",
    "messages delivered",
    *("topic", "consumer_group", "is_retry"),
)
BYTES_OUT: Final = _family(
    "rocketmq_throughput_out_total",
    "counter",
    "bytes delivered",
    *("topic", "consumer_group", "is_retry"),
)
LAG_MESSAGES: Final = _family(
    "rocketmq_consumer_lag_messages",
    "gauge",
    "messages that a group has not acknowledged",
    *("consumer_group", "topic", "is_retry"),
)
LAG_LATENCY: Final = _family(
    "rocketmq_consumer_lag_latency",
    "gauge",
    "milliseconds since the oldest of them was stored",
    *("consumer_group", "topic", "is_retry"),
    takes_largest=True,
)
SEND_TO_DLQ: Final = _family(
    "rocketmq_send_to_dlq_messages_total",
    "counter",
    "messages ever moved to the dead letters of a group",
    "consumer_group",
)
CONSUMERS: Final = _family(
    "rocketmq_consumer_connections", "gauge", "connected consumers", "consumer_group"
)
PRODUCERS: Final = _family(
    "rocketmq_producer_connections", "gauge", "connected producers", "producer_group"
)
TOPICS: Final = _family("rocketmq_topic_number", "gauge", "topics")
GROUPS: Final = _family("rocketmq_consumer_group_number", "gauge", "consumer groups")
HALF_MESSAGES: Final = _family("rocketmq_half_messages", "gauge", "undecided half messages")
COMMITTED: Final = _family("rocketmq_commit_messages_total", "counter", "committed transactions")
ROLLED_BACK: Final = _family(
    "rocketmq_rollback_messages_total", "counter", "rolled back transactions"
)
STORAGE_SIZE: Final = _family("rocketmq_storage_size", "gauge", "bytes of the commit log")
FLUSH_BEHIND: Final = _family(
    "rocketmq_storage_flush_behind_bytes", "gauge", "bytes of the log that are not on disk yet"
)
RESERVE_TIME: Final = _family(
    "rocketmq_storage_message_reserve_time",
    "gauge",
    "milliseconds since the oldest message was stored",
)

# Of halfmq.
PENDING: Final = _family(
    "halfmq_transactions_pending", "gauge", "undecided transactions", *("producer_group", "topic")
)
PENDING_AGE: Final = _family(
    "halfmq_transactions_oldest_age_seconds",
    "gauge",
    "age of the oldest undecided transaction",
    *("producer_group", "topic"),
    takes_largest=True,
)
DECISION_TIME: Final = _family(
    "halfmq_transaction_decision_seconds", "histogram", "time from half message to decision"
)
FLUSH_TIME: Final = _family("halfmq_flush_seconds", "histogram", "duration of one flush of the log")
LOOP_DELAY: Final = _family(
    "halfmq_event_loop_delay_seconds",
    "histogram",
    "how late the event loop runs a timer, ten times a second",
)
LAG_SECONDS: Final = _family(
    "halfmq_consumer_lag_seconds",
    "gauge",
    "seconds since the oldest unacknowledged message was stored",
    *("consumer_group", "topic", "is_retry"),
    takes_largest=True,
)
RETRIED: Final = _family(
    "halfmq_retried_messages_total",
    "counter",
    "messages that consumers sent back for a retry",
    *("topic", "consumer_group"),
)
DEAD_LETTERS: Final = _family(
    "halfmq_dead_letters", "gauge", "stored dead letters", "consumer_group"
)
CONNECTIONS: Final = _family("halfmq_connections", "gauge", "open connections")
WRITABLE: Final = _family(
    "halfmq_writable", "gauge", "1 if messages are accepted; 0 while they are refused"
)
DISK_FULL_IN: Final = _family(
    "halfmq_disk_full_in_seconds",
    "gauge",
    "time until the disk refuses messages, at the rate of the last ten minutes; +Inf at rest",
)
LIMIT_USED: Final = _family(
    "halfmq_limit_used", "gauge", "how much is kept for peers; see operations.md", "limit"
)
LIMIT_MOST: Final = _family("halfmq_limit_most", "gauge", "how much of it at most", "limit")

_COUNTED: Final = {
    "transactions.prepared": "half messages stored",
    "transactions.unknown": "decisions UNKNOWN by producers",
    "transactions.repeated": "decisions that repeated the first one",
    "transactions.refused": "decisions refused because they contradict the first one",
    "transactions.decided_by_operators": "transactions decided by operators",
    "transactions.checks_sent": "checks sent to producers",
    "transactions.checks_delivered": "checks that reached a producer",
    "transactions.checks_answered": "checks that a producer answered",
    "transactions.checks_not_taken": "checks that failed: the producer did not take them",
    "transactions.parked": "transactions parked",
    "transactions.resumed": "transactions resumed",
    "transactions.expired": "undecided transactions deleted by age",
    "transactions.prepares_refused": "half messages refused because too many are undecided",
    "transactions.prepares_repeated": "repeated half messages, answered as the first",
    "delays.undeliverable": "delayed messages given up: damaged, or too large by now",
    "disk.messages_refused": "messages refused because of the disk",
    "retention.log_bytes_deleted": "bytes of the log deleted by age",
    "archive.reads": "pulls answered from the archive",
    "archive.failed_reads": "pulls that the archive could not answer",
    "access.refused_authentication": "requests refused: unknown sender",
    "access.refused_authorization": "requests refused: no permission",
}
_GAUGES: Final = {
    "transactions.pending_parked": "parked transactions",
    "transactions.waiting_for_producers": "transactions whose group has no producer to ask",
    "delays.waiting": "messages that wait for their delay or time of delivery",
    "delays.put_off": "those that are due and cannot be delivered yet",
    "disk.free_bytes": "free bytes of the disk",
    "disk.size_bytes": "bytes of the disk",
    "retention.blocked_at": "log offset at which deletion is blocked; -1 if it is not",
    "recovery.damages": "damaged places found at the start",
    "replication.required": "1 if messages wait for a slave (minInSyncReplicas=2)",
    "replication.connected": "1 if a slave copies the log",
    "replication.lag_bytes": "bytes of the log that the slave lacks",
    "archive.end_offset": "the archive has the log up to this offset",
    "archive.lag_bytes": "bytes of full log files that are not in the archive",
    "archive.failing": "1 if the last attempt to archive failed",
    "consumers.groups_unequal": "groups whose members have unequal subscriptions",
}
NUMBERS: Final[Mapping[str, Family]] = {
    **{
        key: _family(f"halfmq_{key.replace('.', '_')}_total", "counter", text)
        for key, text in _COUNTED.items()
    },
    **{
        key: _family(f"halfmq_{key.replace('.', '_')}", "gauge", text)
        for key, text in _GAUGES.items()
    },
}
"""The metrics of ``halfmq broker metrics`` that are shown here too, by their names there."""


class Found:
    """The values of one scrape."""

    def __init__(self) -> None:
        self.values: dict[Family, dict[_Labels, float]] = {}
        self.histograms: dict[Family, Histogram] = {}

    def add(self, family: Family, value: float, *labels: str) -> None:
        """Set a series, or add to it; beyond ``SERIES_MAX`` to the series ``other``."""
        series = self.values.setdefault(family, {})
        if labels not in series and len(series) >= SERIES_MAX:
            labels = (OTHER,) * len(labels)
        before = series.get(labels)
        if before is not None:
            value = max(before, value) if family.takes_largest else before + value
        series[labels] = value


def render(found: Found, common: Mapping[str, str], accept: str) -> tuple[Iterator[bytes], str]:
    """Return the text in pieces, and its content type, for the ``Accept`` of a request.

    ``common`` are labels of every series. A piece of ``PIECE_SERIES`` takes half a millisecond, so
    that other work of the event loop can come in between. Nothing but the piece is kept, or a
    scrape would set off a garbage collection of all objects.
    """
    encode, content_type = choose_encoder(accept)
    return _pieces(found, common, encode), content_type


def _pieces(
    found: Found, common: Mapping[str, str], encode: Callable[[_Collected], bytes]
) -> Iterator[bytes]:
    end = encode(_Collected([]))  # of OpenMetrics

    def text(metric: Metric) -> bytes:
        return encode(_Collected([metric])).removesuffix(end)

    for family, series in found.values.items():
        metric = Metric(family.name.removesuffix("_total"), family.help, family.kind)
        head = text(metric)
        yield head
        left = iter(series.items())
        while piece := list(islice(left, PIECE_SERIES)):
            metric.samples = [
                Sample(
                    family.name, {**common, **dict(zip(family.labels, labels, strict=True))}, value
                )
                for labels, value in piece
            ]
            yield text(metric).removeprefix(head)
    for family, histogram in found.histograms.items():
        buckets, total = histogram.cumulative()
        made = HistogramMetricFamily(family.name, family.help, labels=list(common))
        made.add_metric(list(common.values()), buckets=buckets, sum_value=total)
        yield text(made)
    yield end


class _Collected:
    """Metrics with the interface of a registry."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics
