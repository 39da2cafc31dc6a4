"""Locks of queues that a group pops in order.

A pop in order locks its queue: nobody else of the group gets messages of it until all of these are
acknowledged, or all the others are visible again. A repeated pop with the same attempt id, whose
answer was lost, gets the same messages. Each change of a lock is stored with the position of the
group, so that a lock outlives the broker, but not its own time.

Source: RocketMQ ``ConsumerOrderInfoManager``.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from halfmq.remoting.pop import PopHandle

from ..limits.kept import POP_LOCKS
from .in_flight import PopQueue


class OrderLock(msgspec.Struct, frozen=True, omit_defaults=True):
    """The messages of the last pop from a queue."""

    pop_ms: int
    end: int  # queue offset after the last message
    invisible_ms: dict[int, int]  # from the pop on; by queue offset, of those not acknowledged
    attempt_id: str | None = None
    times: dict[int, int] = {}  # by queue offset: how often a message was delivered before, if ever
    done: frozenset[int] = frozenset()  # acknowledged, but not all before them

    @property
    def position(self) -> int:
        """Return the queue offset at which the group continues."""
        if self.invisible_ms:
            return min(self.invisible_ms)
        position = self.end
        while position in self.done:  # an earlier pop asked for more
            position += 1
        return position

    def without(self, offset: int) -> "OrderLock":
        """Return what is left when a message is acknowledged."""
        left = {one: ms for one, ms in self.invisible_ms.items() if one != offset}
        first = min(left, default=0)
        done = frozenset(one for one in (*self.done, offset) if one > first)
        return replace(self, invisible_ms=left, done=done)

    def hidden(self, offset: int, invisible_ms: int) -> "OrderLock":
        """Return the lock when a message is hidden for another time, counted from the pop.

        The time is never the one before, so that the handle with it is another one.
        """
        if invisible_ms == self.invisible_ms[offset]:
            invisible_ms += 1
        return replace(self, invisible_ms=self.invisible_ms | {offset: invisible_ms})


class HeldLock(NamedTuple):
    """A lock in this process."""

    lock: OrderLock
    popped_ms: int  # by the monotonic clock
    revive_offset: int  # of its record in the log

    @property
    def released_ms(self) -> int:
        return self.popped_ms + max(self.lock.invisible_ms.values())


class OrderLocks:
    """Locks by group and queue."""

    def __init__(self) -> None:
        self._held: dict[PopQueue, HeldLock] = {}  # the latest pop last

    def __len__(self) -> int:
        return len(self._held)

    def get(self, queue: PopQueue) -> HeldLock | None:
        return self._held.get(queue)

    def put(self, queue: PopQueue, held: HeldLock | None) -> None:
        """Set what is left of the lock of a queue; None ends it."""
        last = self._held.get(queue)
        if held is None:
            self._held.pop(queue, None)
        elif last is not None and last.lock.pop_ms == held.lock.pop_ms:
            self._held[queue] = held._replace(popped_ms=last.popped_ms)
        else:
            self._held.pop(queue, None)
            self._held[queue] = held

    def end(self, group: str, topic: str) -> None:
        """End the locks of all queues of a topic."""
        for queue in [one for one in self._held if one[:2] == (group, topic)]:
            del self._held[queue]

    def has_room(self, queues: int, now_ms: int) -> bool:
        """Return whether so many more queues can be locked; forget old locks that have ended.

        Messages of a forgotten lock that were acknowledged, but not all before them, come again.
        """
        for queue in list(islice(self._held, max(len(self) + queues - POP_LOCKS.most, 0))):
            if self._held[queue].released_ms <= now_ms:
                del self._held[queue]
        return len(self) + queues <= POP_LOCKS.most

    def is_blocked(self, queue: PopQueue, attempt_id: str | None, now_ms: int) -> bool:
        """Return whether a pop gets nothing from this queue now."""
        held = self._held.get(queue)
        if held is None or (attempt_id and attempt_id == held.lock.attempt_id):
            return False
        return held.released_ms > now_ms

    def next(
        self,
        queue: PopQueue,
        offsets: Sequence[int],
        end: int,
        *,
        pop_ms: int,
        invisible_ms: int,
        attempt_id: str | None,
    ) -> OrderLock:
        """Return the lock of a pop, which follows the last one of its queue."""
        held = self._held.get(queue)
        times: dict[int, int] = {}
        if held is not None:
            last = held.lock
            more = 0 if attempt_id and attempt_id == last.attempt_id else 1
            before = {one: last.times.get(one, 0) + more for one in last.invisible_ms}
            times = {one: before[one] for one in offsets if before.get(one)}
        invisible = dict.fromkeys(offsets, invisible_ms)
        return OrderLock(pop_ms, end, invisible, attempt_id, times, self.done(queue))

    def done(self, queue: PopQueue) -> frozenset[int]:
        """Return the messages that are acknowledged, although not all before them are."""
        held = self._held.get(queue)
        return frozenset() if held is None else held.lock.done

    def holds(self, queue: PopQueue, handle: PopHandle, now_ms: int) -> bool:
        """Return whether a handle is that of a message in a lock that has not ended."""
        held = self._held.get(queue)
        return (
            held is not None
            and held.lock.pop_ms == handle.pop_ms
            and held.lock.invisible_ms.get(handle.offset) == handle.invisible_ms
            and held.popped_ms + handle.invisible_ms > now_ms
        )

    def released(self, since_ms: int, now_ms: int) -> list[PopQueue]:
        """Return the queues whose locks have ended by themselves after one time, up to another."""
        held = self._held.items()
        return [queue for queue, one in held if since_ms < one.released_ms <= now_ms]

    def next_release_ms(self, now_ms: int) -> int | None:
        times = (one.released_ms for one in self._held.values())
        return min((one for one in times if one > now_ms), default=None)

    def first_revive_offset(self) -> int | None:
        """Return where the oldest record of a lock is; a start must read from there."""
        return min((one.revive_offset for one in self._held.values()), default=None)
