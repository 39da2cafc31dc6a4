"""Queue locks: a consumer in order holds a queue only while it has the lock of its group on it.

Brokers know who holds a lock. It is renewed with each rebalance; a consumer that cannot renew one
gives the queue up, well before the broker gives the lock to another member, of any client.

Source: RocketMQ ``RebalanceImpl.lock``, ``ProcessQueue.REBALANCE_LOCK_MAX_LIVE_TIME``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from halfmq.remoting.bodies import (
    LockBatchBody,
    QueueKey,
    decode_locked_queues,
    encode_lock_batch,
)
from halfmq.remoting.codes import RequestCode

from ..errors import ClientError
from ..message import MessageQueue
from ..net.response_errors import answer_of, expect_success
from ..net.session import Session
from .offsets import broker_address

logger = logging.getLogger(__name__)

LOCK_RENEWAL: Final = 20.0
"""Seconds between two renewals, as official clients."""
LOCK_SECONDS: Final = 30.0
"""Seconds from the last renewal after which a lock counts as lost; brokers keep one for 60 s."""


class HeldLocks:
    """The locks that one consumer holds."""

    def __init__(self, group: str, on_lost: Callable[[MessageQueue], None]) -> None:
        """Wire it; ``on_lost`` is called when a lock was not renewed in time."""
        self._group = group
        self._on_lost = on_lost
        self._expiry: dict[MessageQueue, asyncio.TimerHandle] = {}

    async def lock(self, session: Session, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues or renew their locks; return those that this consumer holds now.

        Raises:
            ClientError: A broker does not answer, or refuses.
        """
        held: set[MessageQueue] = set()
        loop = asyncio.get_running_loop()
        for name, of_broker in _by_broker(queues).items():
            asked_at = loop.time()
            address = broker_address(session, of_broker[0])
            body = self._body(session, of_broker)
            answer = await session.call(address, RequestCode.LOCK_BATCH_MQ, None, body)
            with answer_of(address):
                keys = decode_locked_queues(expect_success(answer).body)
            locked = {MessageQueue(key.topic, name, key.queue_id) for key in keys}
            for queue in of_broker:
                self._forget(queue)
                if queue in locked:
                    expires_at = asked_at + LOCK_SECONDS
                    self._expiry[queue] = loop.call_at(expires_at, self._expired, queue)
            held |= locked
        return held

    async def unlock(self, session: Session, queues: Iterable[MessageQueue]) -> None:
        """Release the locks that are held; a broker that does not answer lets them expire."""
        held = [queue for queue in queues if queue in self._expiry]
        for queue in held:
            self._forget(queue)
        for of_broker in _by_broker(held).values():
            try:
                address = broker_address(session, of_broker[0])
                body = self._body(session, of_broker)
                await session.call(address, RequestCode.UNLOCK_BATCH_MQ, None, body)
            except ClientError as error:
                logger.debug("event=not_unlocked group=%s reason=%r", self._group, str(error))

    def close(self) -> None:
        """Forget all locks."""
        for queue in list(self._expiry):
            self._forget(queue)

    def _body(self, session: Session, queues: list[MessageQueue]) -> bytes:
        keys = tuple(
            QueueKey(topic=one.topic, broker_name=one.broker_name, queue_id=one.queue_id)
            for one in queues
        )
        body = LockBatchBody(client_id=session.client_id, consumer_group=self._group, mq_set=keys)
        return encode_lock_batch(body)

    def _forget(self, queue: MessageQueue) -> None:
        timer = self._expiry.pop(queue, None)
        if timer is not None:
            timer.cancel()

    def _expired(self, queue: MessageQueue) -> None:
        self._forget(queue)
        logger.warning("event=lock_lost group=%s queue=%s", self._group, queue)
        self._on_lost(queue)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        found[queue.broker_name].append(queue)
    return found
