"""The answer to GET_BROKER_RUNTIME_INFO (28): RocketMQ's keys for its tools, and halfmq's metrics.

Tools print columns of RocketMQ's keys, and some stop at the first missing one, so keys without a
meaning in this broker (queues of thread pools, for example) are 0. Latencies and failures of
appends are not measured: their keys are left out, or -1 and ``null`` if RocketMQ's exporter for
Prometheus fails without them. Rates are averages over the last 10, 60 and 600 seconds, or over up
to twice as long.

halfmq's keys begin with ``halfmq.``; every value is a whole number as text.

Source: RocketMQ ``AdminBrokerProcessor#prepareRuntimeInfo``, ``StoreStatsService#getRuntimeInfo``,
``DefaultMessageStore#getRuntimeInfo``; recorded answers of 5.3.3.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import define

from halfmq.remoting.codes import INT32_MAX, VERSION
from halfmq.store.message_store import MessageStore

from .tables.message_statistics import MESSAGES, TIMES, Counter, Statistics

VERSION_NAME: Final = "V5_3_3"
"""The name of the version that we report in every header."""

_POOLS: Final = ("send", "pull", "litePull", "query", "ack")
_NOT_MEASURED: Final[Mapping[str, str]] = {
    "putMessageDistributeTime": "null",
    "putMessageEntireTimeMax": "-1",
    "getMessageEntireTimeMax": "-1",
}
_WITHOUT_MEANING: Final[Mapping[str, str]] = {
    **{f"{pool}ThreadPoolQueueSize": "0" for pool in _POOLS},
    **{f"{pool}ThreadPoolQueueCapacity": "0" for pool in _POOLS},
    **{f"{pool}ThreadPoolQueueHeadWaitTimeMills": "0" for pool in _POOLS},
    "EndTransactionQueueSize": "0",
    "EndTransactionThreadPoolQueueCapacity": "0",
    "dispatchBehindBytes": "0",
    "dispatchMaxBuffer": "0",
    "pageCacheLockTimeMills": "0",
    "remainTransientStoreBufferNumbs": str(INT32_MAX),  # 0 would be a store that is out of them
    "startAcceptSendRequestTimeStamp": "0",
    "timerReadBehind": "0",
    "timerOffsetBehind": "0",
    "timerCongestNum": "0",
    "timerEnqueueTps": "0.0",
    "timerDequeueTps": "0.0",
}


@define(eq=False, repr=False, slots=False)
class RuntimeInfo:
    """Collects the table when it is called."""

    _store: MessageStore  # for offsets and times
    _statistics: Statistics  # for counts and rates
    _metrics: Callable[[], Mapping[str, object]]  # returns the numbers of each part
    _root: Path  # the directory whose disk is measured
    _now_ms: Callable[[], int]  # the wall clock

    def __attrs_post_init__(self) -> None:
        self._boot_ms = self._now_ms()

    def __call__(self) -> dict[str, str]:
        """Return every key with its value as text."""
        return {
            **_NOT_MEASURED,
            **_WITHOUT_MEANING,
            **self._life(),
            **self._traffic(),
            **self._disk(),
            **self._offsets(),
            **self._ours(),
        }

    def _life(self) -> dict[str, str]:
        return {
            "brokerActive": "true",
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "bootTimestamp": str(self._boot_ms),
            "runtime": _in_words((self._now_ms() - self._boot_ms) // 1000),
        }

    def _traffic(self) -> dict[str, str]:
        statistics = self._statistics
        stored, delivered = statistics.all_stored, statistics.all_delivered
        count = max(stored.messages, 1)  # as RocketMQ, which divides by it
        transferred = self._rates(MESSAGES, delivered)
        return {
            "putTps": self._rates(MESSAGES, stored),
            "getFoundTps": self._rates(TIMES, delivered),
            "getMissTps": self._rates(TIMES, statistics.missed),
            "getTotalTps": self._rates(TIMES, delivered, statistics.missed),
            "getTransferredTps": transferred,
            "getTransferedTps": transferred,  # the spelling that tools of 4.9 read
            "putMessageTimesTotal": str(count),
            "putMessageSizeTotal": str(stored.size),
            "putMessageAverageSize": str(stored.size / count),
            **{name: str(total) for name, total in statistics.daily_counts().items()},
        }

    def _rates(self, column: int, *counters: Counter) -> str:
        rate = self._statistics.rate
        return " ".join(
            str(sum(rate(counter, column, seconds) for counter in counters))
            for seconds in (10, 60, 600)
        )

    def _disk(self) -> dict[str, str]:
        usage = shutil.disk_usage(self._root)
        # As `df` and RocketMQ: without what is reserved for root, rounded up.
        percent = math.ceil(100 * usage.used / ((usage.used + usage.free) or 1))
        ratio = str(percent / 100)
        free = usage.total - usage.used
        return {
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{self._root / 'commitlog'}": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {_size(usage.total)}, Free : {_size(free)}.",
        }

    def _offsets(self) -> dict[str, str]:
        log = self._store
        is_empty = log.write_offset <= log.min_offset
        oldest = None if is_empty else log.reader.record_at(log.min_offset)
        return {
            "commitLogMinOffset": str(log.min_offset),
            "commitLogMaxOffset": str(log.write_offset),
            "earliestMessageTimeStamp": "-1" if oldest is None else str(oldest.store_timestamp),
            "remainHowManyDataToFlush": _size(log.write_offset - log.durable_offset),
        }

    def _ours(self) -> dict[str, str]:
        log = self._store
        offsets = {
            "min_offset": log.min_offset,
            "durable_offset": log.durable_offset,
            "write_offset": log.write_offset,
        }
        numbers = flattened({"store": offsets, **self._metrics()}, "halfmq.")
        return {name: str(value) for name, value in numbers}


def flattened(numbers: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the numbers in nested maps with their dotted names."""
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _in_words(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _size(count: int) -> str:
    """Return bytes as RocketMQ writes them. Source: MixAll#humanReadableByteCount."""
    if count < 1024:
        return f"{count} B"
    power, prefix = 1024, ""
    for prefix in "KMGTPE":
        if count < power * 1024 or prefix == "E":
            break
        power *= 1024
    return f"{count / power:.1f} {prefix}iB"
