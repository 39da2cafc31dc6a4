"""Queue locks of consumers that consume in order.

A client that locks a queue of its group owns it until it unlocks it, or until `LOCK_EXPIRY_MS`
after its last renewal; if it is not connected, until `CLIENT_EXPIRY_MS` after that. Group, topic
and queue need not exist. Locks are only in memory: after a restart any client may lock again, and
clients consider a lock valid for only 30 s.

Source: RocketMQ `RebalanceLockManager`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from attrs import define, field

from halfmq.remoting.bodies import QueueKey
from halfmq.remoting.codes import ResponseCode

from ..errors import RequestRefusedError
from ..limits.kept import QUEUE_LOCKS, Kept

LOCK_EXPIRY_MS: Final = 60_000
"""Milliseconds since the last renewal after which a lock expires; clients renew every 20 s.
Source: `rocketmq.broker.rebalance.lockMaxLiveTime`."""

CLIENT_EXPIRY_MS: Final = 30_000
"""The same for a client that is not connected. It may have lost only its connection; then it
continues to consume until it considers its locks expired, after this time.
Source: `rocketmq.client.rebalance.lockMaxLiveTime`."""


class _Lock(NamedTuple):
    client_id: str
    renewed_ms: int


@define(eq=False, repr=False)
class QueueLocks:
    """The owners of the locked queues of each group.

    `is_connected` takes a group and a client id of a consumer.
    """

    _now_ms: Callable[[], int]
    _is_connected: Callable[[str, str], bool] = lambda _group, _client_id: True
    _locks_max: int = QUEUE_LOCKS.most
    _groups: dict[str, dict[QueueKey, _Lock]] = field(init=False, factory=dict)
    _count: int = field(init=False, default=0)

    def lock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> list[QueueKey]:
        """Lock or renew queues; return those that the client owns now.

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
            if lock is None or lock.client_id == client_id or self._is_expired(group, lock, now):
                held[queue] = _Lock(client_id, now)
                owned.append(queue)
        self._count += len(held) - before
        if not held:
            del self._groups[group]
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> None:
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
        """Return whether a client holds a queue of the group."""
        now = self._now_ms()
        locks = self._groups.get(group, {}).values()
        return any(not self._is_expired(group, lock, now) for lock in locks)

    def expire(self) -> Iterator[None]:
        """Remove expired locks, group by group, to free their memory."""
        for group in list(self._groups):
            held = self._groups.get(group, {})
            now = self._now_ms()
            expired = [one for one, lock in held.items() if self._is_expired(group, lock, now)]
            for queue in expired:
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
                f"{self._count} queues are locked, the limit is {self._locks_max}",
                ResponseCode.SYSTEM_BUSY,
            )

    def _is_expired(self, group: str, lock: _Lock, now_ms: int) -> bool:
        age_ms = now_ms - lock.renewed_ms
        if age_ms <= CLIENT_EXPIRY_MS:
            return False
        return age_ms > LOCK_EXPIRY_MS or not self._is_connected(group, lock.client_id)

    def kept(self) -> Kept:
        return {QUEUE_LOCKS: self._count}
