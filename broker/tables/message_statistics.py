"""Count stored and delivered messages: totals, and the last minute, hour and day.

Stored messages are counted from the ends of the consume queues, delivered ones once per pull. The
counters are sampled every ten seconds, and a request counts what is new before its answer: totals
are of now. Minute, hour and day are the difference between the newest sample and the oldest of the
period. So they are up to ten seconds old, and rates are averages over the period, or since the
start if that is shorter.

Names are RocketMQ's. Its latencies and its counts of commercial accounts and pop do not exist here.

Source: RocketMQ 5.3.3 ``BrokerStatsManager``, ``StatsItem``, ``BrokerStats``.
"""

import logging
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from attrs import define

from halfmq.store.queue.pull_selection import GetResult

from ..loop.slices import PeriodicWork

logger = logging.getLogger(__name__)

SAMPLE_S: Final = 10.0
"""Seconds between two samples, as in RocketMQ."""

COUNTERS_MAX: Final = 8_192
"""Topics, and pairs of topic and group, that have their own counters, of 1.5 KiB each. Others count
only in the broker's totals."""

PULLED_QUEUES_MAX: Final = 65_536
"""Queues for which the last pulled offset of each group is kept, some 120 bytes each."""


class Ring(NamedTuple):
    """The samples of one period: rows of each counter, one overwritten every `interval_ms`."""

    interval_ms: int
    rows: range


_MINUTE: Final = Ring(int(SAMPLE_S * 1_000), range(7))
_HOUR: Final = Ring(600_000, range(7, 14))
_DAY: Final = Ring(3_600_000, range(14, 39))
_RINGS: Final = (_MINUTE, _HOUR, _DAY)
_ROWS: Final = 39
assert _DAY.rows.stop == _ROWS

TIMES, MESSAGES, SIZE = range(3)  # columns of a sample

_Key = TypeVar("_Key")


class Counter:
    """Times, messages and bytes since the start, with samples of them."""

    __slots__ = ("added", "messages", "pulled", "samples", "size", "times")

    def __init__(self) -> None:
        self.times = 0  # pulls that got messages; of stored messages, each
        self.messages = 0
        self.size = 0  # bytes of their records
        self.added = (0, 0, 0)  # times, messages and bytes that are in the totals
        self.samples = array("q", bytes(_ROWS * 3 * 8))
        self.pulled: dict[int, int] = {}  # by queue id: the offset after the last message delivered

    def sample(self, rows: Sequence[int]) -> None:
        """Keep the counts in these rows."""
        counts = array("q", (self.times, self.messages, self.size))
        for row in rows:
            self.samples[row * 3 : row * 3 + 3] = counts

    def counts_at(self, row: int) -> tuple[int, int, int]:
        """Return times, messages and bytes of a sample."""
        times, messages, size = self.samples[row * 3 : row * 3 + 3]
        return times, messages, size

    def is_idle(self) -> bool:
        """Return whether nothing was counted in a day."""
        counts = self.times, self.messages, self.size
        return all(self.counts_at(row) == counts for row in _DAY.rows)


class Period(NamedTuple):
    """What was counted in a period."""

    total: int
    per_second: float
    average: float  # of one time


class Periods(NamedTuple):
    """The same number in each period."""

    minute: Period
    hour: Period
    day: Period


@define(eq=False, repr=False, slots=False)
class Statistics:
    """The counters of a broker."""

    _take_appended: Callable[[], Iterator[tuple[str, int, int]]]  # ``QueueReader.take_appended``
    _cluster_name: str
    # Whether a topic is one of the system topics, which some totals leave out.
    _is_system: Callable[[str], bool]
    _now_ms: Callable[[], int]
    _monotonic_ms: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        self._stored: dict[str, Counter] = {}
        self._delivered: dict[tuple[str, str], Counter] = {}  # by topic and group
        self._sent_back: dict[tuple[str, str], Counter] = {}
        self._unnamed = Counter()  # deliveries to pairs beyond the limit
        self._pulled = 0  # entries in `pulled` of all counters
        self.all_stored, self.all_delivered = Counter(), Counter()
        self.missed = Counter()  # pulls that found nothing when they came
        self._users_stored, self._users_delivered = Counter(), Counter()  # not of system topics
        self._totals = (
            self.all_stored,
            self.all_delivered,
            self.missed,
            self._users_stored,
            self._users_delivered,
        )
        self._names = self._find_by_name()
        start = self._monotonic_ms()
        self._times = [start] * _ROWS  # when each row was sampled
        self._next_row = {ring: ring.rows[0] for ring in _RINGS}
        self._due = {ring: start + ring.interval_ms for ring in _RINGS}
        self._newest = _MINUTE.rows[-1]
        self._day = self._local_day()
        self._at_midnight = [(0, 0), (0, 0)]  # stored, delivered: when yesterday, and today began
        self.tick = PeriodicWork(SAMPLE_S, self._sample).tick

    def delivered(self, topic: str, group: str, queue_id: int, result: GetResult) -> None:
        """Count an answer to a pull."""
        counter = self._delivered.get((topic, group))
        if counter is None:
            counter = self._named(self._delivered, (topic, group)) or self._unnamed
        counter.times += 1
        counter.messages += result.count
        counter.size += result.size
        pulled = counter.pulled
        if queue_id in pulled:
            pulled[queue_id] = result.next_offset
        elif self._pulled < PULLED_QUEUES_MAX and counter is not self._unnamed:
            self._pulled += 1
            pulled[queue_id] = result.next_offset

    def sent_back(self, topic: str, group: str) -> None:
        """Count a message that a consumer has sent back for a retry."""
        counter = self._named(self._sent_back, (topic, group))
        if counter is not None:
            counter.times += 1
            counter.messages += 1

    def _named(self, counters: dict[_Key, Counter], key: _Key) -> Counter | None:
        counter = counters.get(key)
        if counter is None and len(counters) < COUNTERS_MAX:
            counter = counters[key] = Counter()
        return counter

    def count_new(self) -> Generator[None, None, None]:
        """Count what was stored and delivered up to now."""
        for topic, messages, size in self._take_appended():
            if messages > 0:
                self._count_stored(topic, messages, size)
            yield
        for topic, counter in self._all_delivered_by_topic():
            self._add_to_totals(topic, counter)
            yield

    def _sample(self) -> Iterator[None]:
        now = self._monotonic_ms()
        yield from self.count_new()
        self._start_new_day()
        rows = self._rows_due(now)
        for topic, counter in self._all_delivered_by_topic():
            self._add_to_totals(topic, counter)
            counter.sample(rows)  # at once, or the totals would lack a pull in between
            yield
        for counter in [*self._stored.values(), *self._sent_back.values(), *self._totals]:
            counter.sample(rows)
            yield
        for row in rows:
            self._times[row] = now
        self._newest = rows[0]
        if rows[-1] in _DAY.rows:
            self._forget_idle()

    def _rows_due(self, now: int) -> list[int]:
        """Return the rows to overwrite, that of the minute first."""
        rows = []
        for ring in _RINGS:
            if ring is _MINUTE or now >= self._due[ring]:
                self._due[ring] = now + ring.interval_ms
                row = self._next_row[ring]
                self._next_row[ring] = ring.rows[(row + 1 - ring.rows[0]) % len(ring.rows)]
                rows.append(row)
        return rows

    def _count_stored(self, topic: str, messages: int, size: int) -> None:
        counters = [self.all_stored, self._named(self._stored, topic)]
        if not self._is_system(topic):
            counters.append(self._users_stored)
        for counter in counters:
            if counter is not None:
                counter.times += messages
                counter.messages += messages
                counter.size += size

    def _add_to_totals(self, topic: str, counter: Counter) -> None:
        """Add the deliveries that are not in the totals yet."""
        before, counter.added = counter.added, (counter.times, counter.messages, counter.size)
        totals = [self.all_delivered]
        if not self._is_system(topic):
            totals.append(self._users_delivered)
        for total in totals:
            total.times += counter.times - before[0]
            total.messages += counter.messages - before[1]
            total.size += counter.size - before[2]

    def _all_delivered_by_topic(self) -> list[tuple[str, Counter]]:
        named = [(topic, counter) for (topic, _group), counter in self._delivered.items()]
        return [*named, ("", self._unnamed)]

    def _forget_idle(self) -> None:
        self._stored = {key: one for key, one in self._stored.items() if not one.is_idle()}
        self._sent_back = {key: one for key, one in self._sent_back.items() if not one.is_idle()}
        self._delivered = {key: one for key, one in self._delivered.items() if not one.is_idle()}
        self._pulled = sum(len(counter.pulled) for counter in self._delivered.values())

    def _start_new_day(self) -> None:
        day = self._local_day()
        if day != self._day:
            self._day = day
            now = self._users_stored.messages, self._users_delivered.messages
            self._at_midnight = [self._at_midnight[1], now]

    def _local_day(self) -> tuple[int, ...]:
        return time.localtime(self._now_ms() / 1_000)[:3]

    def stored_by_topic(self) -> list[tuple[str, Counter]]:
        return list(self._stored.items())

    def delivered_by_group(self) -> list[tuple[tuple[str, str], Counter]]:
        return list(self._delivered.items())

    def sent_back_by_group(self) -> list[tuple[tuple[str, str], Counter]]:
        """Return the counters of messages sent back for a retry by topic and group."""
        return list(self._sent_back.items())

    def find(self, name: str, key: str) -> Periods | None:
        """Return the counts under one of RocketMQ's names and a key; None if there are none.

        Keys are a topic, TOPIC@GROUP, or for the whole broker the cluster's name.
        """
        of_key, column = self._names.get(name, (lambda _key: None, 0))
        counter = of_key(key)
        if counter is None:
            return None
        return Periods(*(self._period(counter, ring, column) for ring in _RINGS))

    def _find_by_name(self) -> dict[str, tuple[Callable[[str], Counter | None], int]]:
        def stored(key: str) -> Counter | None:
            return self._stored.get(key)

        def delivered(key: str) -> Counter | None:
            return self._delivered.get(_pair(key))

        def total(counter: Counter) -> Callable[[str], Counter | None]:
            return lambda key: counter if key == self._cluster_name else None

        return {
            "TOPIC_PUT_NUMS": (stored, MESSAGES),
            "TOPIC_PUT_SIZE": (stored, SIZE),
            "GROUP_GET_NUMS": (delivered, MESSAGES),
            "GROUP_GET_SIZE": (delivered, SIZE),
            "SNDBCK_PUT_NUMS": (lambda key: self._sent_back.get(_pair(key)), MESSAGES),
            "BROKER_PUT_NUMS": (total(self.all_stored), MESSAGES),
            "BROKER_GET_NUMS": (total(self.all_delivered), MESSAGES),
            "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": (total(self._users_stored), MESSAGES),
            "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC": (total(self._users_delivered), MESSAGES),
        }

    def stored_per_second(self, topic: str) -> float:
        """Return the messages stored in a topic each second of the last minute."""
        counter = self._stored.get(topic)
        return 0.0 if counter is None else self._period(counter, _MINUTE, MESSAGES).per_second

    def delivered_per_second(self, topic: str, group: str) -> float:
        """Return the messages of a topic delivered to a group each second of the last minute."""
        counter = self._delivered.get((topic, group))
        return 0.0 if counter is None else self._period(counter, _MINUTE, MESSAGES).per_second

    def pulled_offset(self, topic: str, group: str, queue_id: int) -> int:
        """Return the queue offset after the last message delivered to a group; 0 if unknown."""
        counter = self._delivered.get((topic, group))
        return 0 if counter is None else counter.pulled.get(queue_id, 0)

    def rate(self, counter: Counter, column: int, seconds: int) -> float:
        """Return the count per second since the newest sample that is at least that old."""
        end = self._times[self._newest]
        old = [at for at in self._times if at <= end - seconds * 1_000] or [min(self._times)]
        return self._between(counter, self._times.index(max(old)), column)[1]

    def daily_counts(self) -> dict[str, int]:
        """Return the counts of users' messages at the begin of yesterday and today, and now."""
        (stored_before, delivered_before), (stored, delivered) = self._at_midnight
        return {
            "msgPutTotalYesterdayMorning": stored_before,
            "msgPutTotalTodayMorning": stored,
            "msgPutTotalTodayNow": self._users_stored.messages,
            "msgGetTotalYesterdayMorning": delivered_before,
            "msgGetTotalTodayMorning": delivered,
            "msgGetTotalTodayNow": self._users_delivered.messages,
        }

    def _period(self, counter: Counter, ring: Ring, column: int) -> Period:
        # The row to be overwritten next is the oldest.
        total, per_second = self._between(counter, self._next_row[ring], column)
        times, _ = self._between(counter, self._next_row[ring], TIMES)
        return Period(total, per_second, total / times if times else 0.0)

    def _between(self, counter: Counter, oldest: int, column: int) -> tuple[int, float]:
        """Return the count from a sample to the newest: in total, and per second."""
        newest = self._newest
        total = counter.counts_at(newest)[column] - counter.counts_at(oldest)[column]
        passed_ms = self._times[newest] - self._times[oldest]
        return total, total * 1_000 / passed_ms if passed_ms > 0 else 0.0


def _pair(key: str) -> tuple[str, str]:
    topic, _, group = key.partition("@")
    return topic, group
