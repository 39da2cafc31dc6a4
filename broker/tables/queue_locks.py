"""Queue locks of consumers that consume in order.

A group's queue belongs to the client that locked it last, until it unlocks or has not renewed for
`LOCK_EXPIRY_MS`. Group, topic and queue need not exist. Locks live in memory: after a restart
everybody may lock again, and clients hold theirs for 30 s only.

Source: RocketMQ `RebalanceLockManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from halfmq.remoting.bodies import QueueKey
from halfmq.remoting.codes import ResponseCode

from ..errors import RequestRefusedError

LOCK_EXPIRY_MS: Final = 60_000
"""Milliseconds since the last renewal after which a lock is void; clients renew every 20 s.
Source: `rocketmq.broker.rebalance.lockMaxLiveTime`."""

LOCKS_MAX: Final = 200_000
"""Locks held at one time, about 250 bytes each."""


class _Lock(NamedTuple):
    client_id: str
    renewed_ms: int


class QueueLocks:
    """Who owns which queue of which group."""

    def __init__(self, *, now_ms: Callable[[], int], locks_max: int = LOCKS_MAX) -> None:
        self._now_ms = now_ms
        self._locks_max = locks_max
        self._groups: dict[str, dict[QueueKey, _Lock]] = {}
        self._count = 0

    def lock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> list[QueueKey]:
        """Lock or renew; return those queues that the client owns now.

        Raises:
            RequestRefusedError: There are too many locks.
        """
        now = self._now_ms()
        wanted = list(queues)
        self._check_room(len(wanted))
        held = self._groups.setdefault(group, {})
        before = len(held)
        owned = []
        for queue in wanted:
            lock = held.get(queue)
            if lock is None or lock.client_id == client_id or _is_expired(lock, now):
                held[queue] = _Lock(client_id, now)
                owned.append(queue)
        self._count += len(held) - before
        if not held:
            del self._groups[group]
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> None:
        """Give up those queues that the client owns."""
        held = self._groups.get(group)
        if held is None:
            return
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
                self._count -= 1
        if not held:
            del self._groups[group]

    def any_held(self, group: str) -> bool:
        """Tell whether someone holds a queue of the group."""
        now = self._now_ms()
        locks = self._groups.get(group, {}).values()
        return any(not _is_expired(lock, now) for lock in locks)

    def expire(self) -> Iterator[None]:
        """Forget locks that are void, group by group: those that are gone shall take no memory."""
        for group in list(self._groups):
            held = self._groups.get(group, {})
            now = self._now_ms()
            for queue in [queue for queue, lock in held.items() if _is_expired(lock, now)]:
                del held[queue]
                self._count -= 1
            if not held:
                self._groups.pop(group, None)
            yield

    def _check_room(self, wanted: int) -> None:
        if self._count + wanted <= self._locks_max:
            return
        for _ in self.expire():
            pass
        if self._count + wanted > self._locks_max:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"{self._count} queues are locked, the limit is {self._locks_max}",
            )


def _is_expired(lock: _Lock, now_ms: int) -> bool:
    return now_ms - lock.renewed_ms > LOCK_EXPIRY_MS
