"""The queues in which messages wait, and what became of each message in them.

Messages with a time of delivery, and commits with a delay, wait in the timer queue; those with a
delay level in the queue of their level. A *place* is a queue and an offset in it, in one number.

Due times are kept by two clocks: a delay is counted on the monotonic clock, so that steps of the
wall clock have no effect on it; a time of delivery is a time by the wall clock.
"""

import heapq
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from halfmq.store.format.topics import SCHEDULE_TOPIC, TIMER_TOPIC

from ..tables.table_file import JsonObject, as_integer, as_text

TIMER_QUEUE: Final = 0
"""Number of the timer queue here, and its id in its topic: RocketMQ uses this one alone. The queue
of a delay level has the number of the level."""

OFFSET_BITS: Final = 40
"""Of a place, below the number of its queue: more messages than a queue ever has."""

QUEUES_MAX: Final = 256
"""Queues whose places fit into 48 bits, with those of levels that were removed from the setting."""

PENDING, DELIVERED, RECALLED = 0, 1, 2
_UNDURABLE: Final = 4  # added while the record that says so is not on disk
_AFTER_POWER_CUT: Final = bytes(0 if state & _UNDURABLE else state for state in range(256))
_FOR_GOOD: Final = re.compile(rb"[\1\2]*")


def number_of(topic: str, queue_id: int) -> int | None:
    """Return the number of a queue in which messages wait; None for any other queue."""
    if topic == SCHEDULE_TOPIC:
        return queue_id + 1
    return TIMER_QUEUE if (topic, queue_id) == (TIMER_TOPIC, 0) else None


def place_of(number: int, queue_offset: int) -> int:
    """Return the place of a message in a queue."""
    return number << OFFSET_BITS | queue_offset


def queue_offset_of(place: int) -> int:
    """Return the offset in its queue of the message at a place."""
    return place & (1 << OFFSET_BITS) - 1


class WaitingQueue:
    """One queue, with one byte for each message from the first that is not done for good."""

    def __init__(self, number: int, saved: JsonObject) -> None:
        """Begin with what `packed` has put into a file."""
        self.number = number
        self.topic = TIMER_TOPIC if number == TIMER_QUEUE else SCHEDULE_TOPIC
        self.queue_id = max(number - 1, 0)
        self.base = as_integer(saved.get("queueOffset"), 0)
        self._states = _unpacked(as_text(saved.get("done"), ""))

    def limit(self, first: int, end: int) -> None:
        """Take the messages from one offset to another; those that are not known yet wait."""
        base = min(max(self.base, first), end)
        del self._states[: base - self.base]
        del self._states[end - base :]
        self._states.extend(bytes(end - base - len(self._states)))
        self.base = base

    @property
    def end(self) -> int:
        """Queue offset of the next message."""
        return self.base + len(self._states)

    def add(self, state: int) -> None:
        self._states.append(state)

    def state(self, queue_offset: int) -> int:
        """Return what became of a message; it was delivered if it is not known any more."""
        at = queue_offset - self.base
        return self._states[at] & ~_UNDURABLE if 0 <= at < len(self._states) else DELIVERED

    def mark(self, queue_offset: int, state: int, *, durable: bool) -> None:
        """Say what became of a message, and whether the record that says so is on disk."""
        at = queue_offset - self.base
        if 0 <= at < len(self._states):
            self._states[at] = state if durable else state | _UNDURABLE

    def next_pending(self, queue_offset: int) -> int | None:
        """Return the first message from an offset on that waits."""
        at = self._states.find(PENDING, max(queue_offset - self.base, 0))
        return None if at < 0 else self.base + at

    def trim(self) -> None:
        """Forget the messages before the first one that is not done for good."""
        done = _FOR_GOOD.match(self._states)
        assert done is not None
        count = done.end()
        del done  # or the states could not be resized
        del self._states[:count]
        self.base += count

    def saved_states(self) -> tuple[int, bytes]:
        """Return the first offset, and the states that remain after a power cut."""
        return self.base, bytes(self._states.translate(_AFTER_POWER_CUT))


def packed(base: int, states: bytes) -> JsonObject:
    """Return states for a file; a million of them take some milliseconds."""
    return {"queueOffset": base, "done": b64encode(zlib.compress(states, 1)).decode()}


def _unpacked(text: str) -> bytearray:
    """Return the states of a file; empty if they are damaged: the log has them all."""
    try:
        return bytearray(zlib.decompress(b64decode(text))) if text else bytearray()
    except (ValueError, zlib.error):
        return bytearray()


_PLACE_BITS: Final = 48
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1

# Due time and place in one number, which takes half the memory of a tuple. Messages that are due
# at the same time come in the order of their places.
_Heap = list[int]


class Due(NamedTuple):
    """A message that was taken out because it is due; `DueTimes.put_back` takes it."""

    place: int
    heap: _Heap
    entry: int


class DueTimes:
    """The places of messages in the order of their due times."""

    def __init__(self, now_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        """Wire it; `now_ms` is the wall clock."""
        self._by_wall_clock: _Heap = []
        self._by_monotonic_clock: _Heap = []
        self._clocks = ((self._by_wall_clock, now_ms), (self._by_monotonic_clock, monotonic_ms))
        self._monotonic_ms = monotonic_ms

    def __len__(self) -> int:
        return len(self._by_wall_clock) + len(self._by_monotonic_clock)

    def add_at(self, due_ms: int, place: int) -> bool:
        """Add a message that is due at a time; return whether it is the next one."""
        return self._add(self._by_wall_clock, due_ms, place)

    def add_after(self, wait_ms: int, place: int) -> bool:
        """Add a message that is due after some time; return whether it is the next one."""
        return self._add(self._by_monotonic_clock, self._monotonic_ms() + wait_ms, place)

    @staticmethod
    def _add(heap: _Heap, due_ms: int, place: int) -> bool:
        heapq.heappush(heap, due_ms << _PLACE_BITS | place)
        return heap[0] & _PLACE_MASK == place

    def take_due(self, count: int) -> list[Due]:
        """Take out messages that are due, at most so many."""
        due: list[Due] = []
        self._clocks = self._clocks[::-1]  # many by one clock do not hold up those by the other
        for heap, clock_ms in self._clocks:
            end = clock_ms() + 1 << _PLACE_BITS
            while heap and heap[0] < end and len(due) < count:
                entry = heapq.heappop(heap)
                due.append(Due(entry & _PLACE_MASK, heap, entry))
        return due

    @staticmethod
    def put_back(due: Iterable[Due]) -> None:
        """Add messages again that were taken out, with their due times."""
        for one in due:
            heapq.heappush(one.heap, one.entry)

    def wait_s(self, most: float) -> float:
        """Return the seconds until the next message is due, at most so many."""
        for heap, clock_ms in self._clocks:
            if heap:
                most = min(most, ((heap[0] >> _PLACE_BITS) - clock_ms()) / 1_000)
        return max(most, 0)
