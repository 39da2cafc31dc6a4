"""Locks of queues that a group pops in order.

A pop in order locks its queue: nobody else of the group gets messages of it until all of these are
acknowledged, or all the others are visible again. A repeated pop with the same attempt id, whose
answer was lost, gets the same messages. Locks are in memory only: after a start, the messages from
the first unacknowledged one on come again.

Source: RocketMQ ``ConsumerOrderInfoManager``.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from halfmq.remoting.pop import PopHandle

from ..limits.kept import POP_LOCKS
from .in_flight import PopQueue


class OrderLock(msgspec.Struct):
    """The messages of the last pop from a queue."""

    pop_ms: int
    invisible_ms: int
    attempt_id: str | None
    visible_ms: dict[int, int]  # by queue offset, of those not acknowledged; monotonic clock
    changed_ms: dict[int, int]  # by queue offset: the invisible time in the handle that counts now
    times: dict[int, int]  # by queue offset: how often a message was delivered before
    end: int  # queue offset after the last message
    done: set[int]  # acknowledged, but not all before them

    @property
    def released_ms(self) -> int:
        return max(self.visible_ms.values(), default=0)


class OrderLocks:
    """Locks by group and queue."""

    def __init__(self) -> None:
        self._locks: dict[PopQueue, OrderLock] = {}  # the latest pop last

    def __len__(self) -> int:
        return len(self._locks)

    def has_room(self, queues: int, now_ms: int) -> bool:
        """Return whether so many more queues can be locked; forget old locks that have ended.

        Messages of a forgotten lock that were acknowledged, but not all before them, come again.
        """
        for queue in list(islice(self._locks, max(len(self) + queues - POP_LOCKS.most, 0))):
            if self._locks[queue].released_ms <= now_ms:
                del self._locks[queue]
        return len(self) + queues <= POP_LOCKS.most

    def is_blocked(self, queue: PopQueue, attempt_id: str | None, now_ms: int) -> bool:
        """Return whether a pop gets nothing from this queue now."""
        lock = self._locks.get(queue)
        if lock is None or (attempt_id and attempt_id == lock.attempt_id):
            return False
        return lock.released_ms > now_ms

    def lock(
        self,
        queue: PopQueue,
        offsets: Sequence[int],
        end: int,
        *,
        pop_ms: int,
        invisible_ms: int,
        attempt_id: str | None,
        now_ms: int,
    ) -> Mapping[int, int]:
        """Lock a queue; return how often each message was delivered before."""
        last = self._locks.get(queue)
        more = 0 if last is not None and attempt_id and attempt_id == last.attempt_id else 1
        before = {} if last is None else {one: last.times[one] + more for one in last.visible_ms}
        times = {offset: before.get(offset, 0) for offset in offsets}
        visible_ms = dict.fromkeys(offsets, now_ms + invisible_ms)
        done = self.done(queue)
        self._locks.pop(queue, None)
        self._locks[queue] = OrderLock(
            pop_ms, invisible_ms, attempt_id, visible_ms, {}, times, end, done
        )
        return times

    def done(self, queue: PopQueue) -> set[int]:
        """Return the messages that are acknowledged, although not all before them are."""
        lock = self._locks.get(queue)
        return set() if lock is None else lock.done

    def holds(self, queue: PopQueue, handle: PopHandle, now_ms: int) -> bool:
        """Return whether a handle is that of a message in a lock that has not ended."""
        lock, offset = self._locks.get(queue), handle.offset
        return (
            lock is not None
            and lock.pop_ms == handle.pop_ms
            and lock.changed_ms.get(offset, lock.invisible_ms) == handle.invisible_ms
            and lock.visible_ms.get(offset, 0) > now_ms
        )

    def hide(self, queue: PopQueue, offset: int, invisible_ms: int, visible_ms: int) -> int:
        """Hide a message until a time; return the invisible time for its new handle.

        `invisible_ms` counts from the pop. The handle with it is another one than the last.
        """
        lock = self._locks[queue]
        before = lock.changed_ms.get(offset, lock.invisible_ms)
        lock.visible_ms[offset] = visible_ms
        lock.changed_ms[offset] = invisible_ms if invisible_ms != before else before + 1
        return lock.changed_ms[offset]

    def acknowledge(self, queue: PopQueue, offset: int) -> int:
        """Acknowledge a message of a lock; return where the group continues."""
        lock = self._locks[queue]
        del lock.visible_ms[offset]
        lock.done.add(offset)
        if lock.visible_ms:
            return min(lock.visible_ms)
        del self._locks[queue]
        while lock.end in lock.done:  # an earlier pop asked for more
            lock.end += 1
        return lock.end

    def release(self, queue: PopQueue) -> None:
        """End a lock."""
        self._locks.pop(queue, None)

    def released(self, since_ms: int, now_ms: int) -> list[PopQueue]:
        """Return the queues whose locks have ended by themselves after one time, up to another."""
        locks = self._locks.items()
        return [queue for queue, one in locks if since_ms < one.released_ms <= now_ms]

    def next_release_ms(self, now_ms: int) -> int | None:
        times = (one.released_ms for one in self._locks.values())
        return min((one for one in times if one > now_ms), default=None)
