"""Collects the metrics of one scrape on the event loop, in slices.

Values change while the slices go on, so figures of one scrape may differ by the traffic of some
milliseconds. Ages of messages that are not in memory are read on a helper thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from attrs import define

from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.format.topics import RETRY_PREFIX, dead_letter_topic
from halfmq.store.message_store import MessageStore

from ..loop.fetches import Fetch
from ..loop.slices import PAUSE_S, Slice
from ..runtime_info import flattened
from ..tables.all_tables import Tables
from ..tables.message_statistics import SIZE, Statistics
from ..transaction.state.pending import PendingTable
from . import families as f
from .families import Found
from .histogram import Histogram

Numbers = Mapping[str, object]

_RATE_S: Final = 600
"""Seconds over which the growth of the log is averaged for the forecast of the disk."""


@define(eq=False, repr=False, slots=False)
class Collector:
    """Collects all metrics of a broker."""

    _store: MessageStore  # for the log and the ends of queues
    _tables: Tables  # for topics, groups and offsets
    _statistics: Statistics  # for counts of messages
    _pending: PendingTable  # the undecided transactions
    _metrics: Callable[[], Numbers]  # returns the numbers of each part of the broker
    _refuses: Callable[[], bool]  # returns whether messages are refused now
    # Returns the bytes that may be written until the disk refuses messages.
    _bytes_left: Callable[[], int]
    _histograms: Mapping[f.Family, Histogram]  # measured durations
    _fetch: Fetch  # reads parts of files into memory
    _now_ms: Callable[[], int]  # the wall clock

    def __attrs_post_init__(self) -> None:
        self._one = asyncio.Lock()
        self._slice = Slice()

    async def collect(self) -> Found:
        """Return the values of now; one collection at a time."""
        async with self._one:
            self._slice = Slice()
            found = Found()
            self._broker(found)
            await self._transactions(found)
            await self._messages(found)
            await self._lag(found)
            await self._clients(found)
            return found

    async def _breathe(self) -> None:
        """Let requests pass if the slice is over."""
        if self._slice.is_over:
            await asyncio.sleep(PAUSE_S)
            self._slice = Slice()

    def _broker(self, found: Found) -> None:
        log, parts = self._store, self._metrics()
        numbers = dict(flattened(parts))
        for key, family in f.NUMBERS.items():
            value = numbers.get(key, 0)
            found.add(family, float(value) if isinstance(value, int | float) else 0.0)
        found.add(f.COMMITTED, float(str(numbers["transactions.committed"])))
        found.add(f.ROLLED_BACK, float(str(numbers["transactions.rolled_back"])))
        found.add(f.HALF_MESSAGES, self._pending.halves)
        found.add(f.TOPICS, len(self._tables.topics))
        found.add(f.GROUPS, sum(1 for _ in self._tables.groups))
        found.add(f.CONNECTIONS, float(str(numbers["connections"])))
        found.add(f.STORAGE_SIZE, log.write_offset - log.min_offset)
        found.add(f.FLUSH_BEHIND, log.write_offset - log.durable_offset)
        found.add(f.WRITABLE, not self._refuses())
        found.add(f.DISK_FULL_IN, self._disk_full_in())
        limits = parts["limits"]
        assert isinstance(limits, Mapping)
        for limit, numbers_of in limits.items():
            found.add(f.LIMIT_USED, numbers_of["used"], limit)
            found.add(f.LIMIT_MOST, numbers_of["most"], limit)
        found.histograms.update(self._histograms)

    def _disk_full_in(self) -> float:
        rate = self._statistics.rate(self._statistics.all_stored, SIZE, _RATE_S)
        return max(self._bytes_left(), 0) / rate if rate > 0 else float("inf")

    async def _transactions(self, found: Found) -> None:
        """The oldest of an origin comes first in the table: end when each was seen."""
        left = set()
        for origin in self._pending.origins():
            found.add(f.PENDING, origin.count, origin.group, origin.topic)
            left.add((origin.group, origin.topic))
            await self._breathe()
        now, after = self._now_ms(), -1
        while left and (block := self._pending.after(after)):
            after = block[-1].offset
            for entry in block:
                labels = entry.origin.group, entry.origin.topic
                if labels in left:
                    left.remove(labels)
                    age_s = max(now - entry.store_timestamp, 0) / 1_000
                    found.add(f.PENDING_AGE, age_s, *labels)
            await self._breathe()

    async def _messages(self, found: Found) -> None:
        for _ in self._statistics.count_new():
            await self._breathe()
        is_system = self._tables.topics.is_system
        for topic, stored in self._statistics.stored_by_topic():
            labels = topic, _text(is_system(topic))
            found.add(f.MESSAGES_IN, stored.messages, *labels)
            found.add(f.BYTES_IN, stored.size, *labels)
            await self._breathe()
        for (topic, group), delivered in self._statistics.delivered_by_group():
            of_group = topic, group, _text(topic.startswith(RETRY_PREFIX))
            found.add(f.MESSAGES_OUT, delivered.messages, *of_group)
            found.add(f.BYTES_OUT, delivered.size, *of_group)
            await self._breathe()
        for (topic, group), retried in self._statistics.sent_back_by_group():
            found.add(f.RETRIED, retried.messages, topic, group)
            await self._breathe()
        oldest = await self._stored_at_log_begin()
        found.add(f.RESERVE_TIME, 0 if oldest < 0 else max(self._now_ms() - oldest, 0))

    async def _stored_at_log_begin(self) -> int:
        log = self._store
        if log.write_offset <= log.min_offset:
            return -1
        return await self._when_in_memory(lambda: log.reader.store_timestamp(log.min_offset))

    async def _lag(self, found: Found) -> None:
        offsets, queues = self._tables.offsets, self._store.queues
        for keys in offsets.key_batches():
            for key in keys:
                topic, _, group = key.rpartition("@")
                if topic not in self._tables.topics:
                    continue
                lag, oldest = 0, -1
                for queue_id, offset in list(offsets.queues_of_key(key).items()):
                    first, end = queues.bounds(topic, queue_id)
                    at = max(offset, first)
                    if at < end:
                        lag += end - at
                        stored = await self._store_time(topic, queue_id, at)
                        oldest = stored if oldest < 0 else min(oldest, stored)
                    await self._breathe()
                labels = group, topic, _text(topic.startswith(RETRY_PREFIX))
                found.add(f.LAG_MESSAGES, lag, *labels)
                late = 0 if oldest < 0 else max(self._now_ms() - oldest, 0)
                found.add(f.LAG_LATENCY, late, *labels)
                found.add(f.LAG_SECONDS, late / 1_000, *labels)

    async def _store_time(self, topic: str, queue_id: int, offset: int) -> int:
        queues = self._store.queues
        return await self._when_in_memory(lambda: queues.store_time_at(topic, queue_id, offset))

    async def _when_in_memory(self, read: Callable[[], int]) -> int:
        """Return what ``read`` returns, or -1 if the disk cannot read it."""
        while True:
            try:
                with allowed_to_wait(False):
                    return read()
            except NotInMemoryError as missing:
                fetched = asyncio.get_running_loop().create_future()
                self._fetch(missing, fetched.set_result)
                if not await fetched:
                    return -1
            except OSError:  # deleted meanwhile
                return -1

    async def _clients(self, found: Found) -> None:
        registry, topics, queues = self._tables.registry, self._tables.topics, self._store.queues
        for group, known in list(registry.consumer_groups.items()):
            found.add(f.CONSUMERS, len(known.members), group)
            await self._breathe()
        for group, members in list(registry.producer_groups.items()):
            found.add(f.PRODUCERS, len(members), group)
            await self._breathe()
        for config in list(self._tables.groups):
            topic = topics.get(dead_letter_topic(config.name))
            if topic is not None:
                for queue_id in range(topic.read_queue_nums):
                    first, end = queues.bounds(topic.name, queue_id)
                    found.add(f.DEAD_LETTERS, end - first, config.name)
                    found.add(f.SEND_TO_DLQ, end, config.name)
            await self._breathe()


def _text(is_so: bool) -> str:
    return str(is_so).lower()
