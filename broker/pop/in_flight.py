"""The messages that consumers have popped and not acknowledged yet; pure, without a log.

A pop makes one checkpoint for each queue. A checkpoint is one number with its due time in the
highest bits: all its messages refer to it in a dictionary, and a heap has it once. So a message in
flight takes at most 200 bytes.
"""

import heapq
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from halfmq.remoting.pop import PopHandle, kind_of

_Key = TypeVar("_Key")

CHUNK: Final = 1_024
"""Records of a revive queue that are counted together; a start reads whole chunks."""

SLACK: Final = 1_024
"""Checkpoints in the heap of which nothing is in flight any more, beside half of all."""

_WIDTHS: Final = (48, 24, 44, 40, 10, 48, 48, 24)  # bits of the fields of a checkpoint


class PopQueue(NamedTuple):
    """A queue as one group pops it."""

    group: str
    topic: str  # perhaps a retry topic
    queue_id: int


class PopCheckpoint(NamedTuple):
    """What all messages of one pop from one queue share."""

    due_ms: int  # by the monotonic clock
    number: int  # of the queue in the table; the table sets it
    pop_ms: int  # by the wall clock
    invisible_ms: int
    revive_queue: int
    revive_offset: int  # of its record in the revive queue
    start: int  # queue offset
    span: int  # queue offsets from there to the last message, and one

    def is_of(self, start: int, pop_ms: int) -> bool:
        return (self.start, self.pop_ms) == (start, pop_ms)

    def packed(self) -> int:
        """Return the checkpoint as one number, which is ordered by due time."""
        packed = 0
        for value, width in zip(self, _WIDTHS, strict=True):
            assert 0 <= value < 1 << width
            packed = packed << width | value
        return packed


def _unpacked(packed: int) -> PopCheckpoint:
    values: list[int] = []
    for width in reversed(_WIDTHS):
        values.append(packed & ((1 << width) - 1))
        packed >>= width
    return PopCheckpoint(*reversed(values))


_DUE_SHIFT: Final = sum(_WIDTHS[1:])


class Lapsed(NamedTuple):
    """Messages of one checkpoint that nobody has acknowledged."""

    queue: PopQueue
    checkpoint: PopCheckpoint
    offsets: list[int]

    def handles(self) -> list[PopHandle]:
        """Return the handles of the messages; the broker's name is not in them."""
        _, _, pop_ms, invisible_ms, revive_queue, _, start, _ = self.checkpoint
        shared = start, pop_ms, invisible_ms, revive_queue, kind_of(self.queue.topic), ""
        return [PopHandle(*shared, self.queue.queue_id, offset) for offset in self.offsets]


class InFlight:
    """Popped messages by group, queue and offset, and when they become visible again."""

    def __init__(self) -> None:
        self._numbers: dict[PopQueue, int] = {}
        self._queues: list[PopQueue] = []  # by number
        self._free: list[int] = []  # numbers of queues with nothing in flight
        self._flights: list[dict[int, int]] = []  # by number: queue offset → packed checkpoint
        self._heap: list[int] = []  # packed checkpoints
        self._chunks: dict[int, dict[int, int]] = {}  # revive queue → chunk → messages in flight
        self._of_group: dict[str, int] = {}
        self.count = 0

    def of_group(self, group: str) -> int:
        return self._of_group.get(group, 0)

    def add(self, queue: PopQueue, checkpoint: PopCheckpoint, offsets: Sequence[int]) -> None:
        """Add the messages of a checkpoint; this ends earlier deliveries of them."""
        number = self._numbers.get(queue)
        if number is None:
            number = self._numbers[queue] = self._number(queue)
        flights = self._flights[number]
        for offset in offsets:
            if (old := flights.pop(offset, None)) is not None:
                self._count(queue.group, _unpacked(old), -1)
        packed = checkpoint._replace(number=number).packed()
        flights.update(dict.fromkeys(offsets, packed))
        self._count(queue.group, checkpoint, len(offsets))
        heapq.heappush(self._heap, packed)

    def _number(self, queue: PopQueue) -> int:
        if self._free:  # a checkpoint in the heap that has this number still is another one
            number = self._free.pop()
            self._queues[number] = queue
            return number
        self._queues.append(queue)
        self._flights.append({})
        return len(self._queues) - 1

    def get(self, queue: PopQueue, offset: int) -> PopCheckpoint | None:
        packed = self._of(queue).get(offset)
        return None if packed is None else _unpacked(packed)

    def remove(self, queue: PopQueue, offset: int) -> bool:
        """Remove a message; return whether it was in flight."""
        flights = self._of(queue)
        packed = flights.pop(offset, None)
        if packed is None:
            return False
        self._count(queue.group, _unpacked(packed), -1)
        if not flights:
            number = self._numbers.pop(queue)
            self._flights[number] = {}  # a dict that was large stays so
            self._free.append(number)
        if len(self._heap) > 2 * self.count + SLACK:
            self._heap = list({one for flights in self._flights for one in flights.values()})
            heapq.heapify(self._heap)
        return True

    def take_queue(self, queue: PopQueue) -> list[Lapsed]:
        """Remove and return all messages of a queue."""
        found: dict[int, list[int]] = {}
        for offset, packed in self._of(queue).items():
            found.setdefault(packed, []).append(offset)
        for offsets in found.values():
            for offset in offsets:
                self.remove(queue, offset)
        return [Lapsed(queue, _unpacked(packed), offsets) for packed, offsets in found.items()]

    def next_due_ms(self) -> int | None:
        return self._heap[0] >> _DUE_SHIFT if self._heap else None

    def take_due(self, now_ms: int) -> Lapsed | None:
        """Remove and return the messages of a checkpoint that are due; None if none are."""
        while self._heap and self._heap[0] >> _DUE_SHIFT <= now_ms:
            packed = heapq.heappop(self._heap)
            checkpoint = _unpacked(packed)
            queue, flights = self._queues[checkpoint.number], self._flights[checkpoint.number]
            span = range(checkpoint.start, checkpoint.start + checkpoint.span)
            offsets = [offset for offset in span if flights.get(offset) == packed]
            for offset in offsets:
                self.remove(queue, offset)
            if offsets:
                return Lapsed(queue, checkpoint, offsets)
        return None

    def first_chunk(self, revive_queue: int) -> int | None:
        """Return the oldest chunk of a revive queue that a start must read; None if none."""
        return min(self._chunks.get(revive_queue, ()), default=None)

    def _of(self, queue: PopQueue) -> dict[int, int]:
        number = self._numbers.get(queue)
        return {} if number is None else self._flights[number]

    def _count(self, group: str, checkpoint: PopCheckpoint, messages: int) -> None:
        chunks = self._chunks.setdefault(checkpoint.revive_queue, {})
        _add(chunks, checkpoint.revive_offset // CHUNK, messages)
        _add(self._of_group, group, messages)
        self.count += messages


def _add(counts: dict[_Key, int], key: _Key, number: int) -> None:
    counts[key] = counts.get(key, 0) + number
    if not counts[key]:
        del counts[key]
