"""Queue locks of consumers that consume in order: LOCK_BATCH_MQ (41), UNLOCK_BATCH_MQ (42).

Source: RocketMQ `AdminBrokerProcessor.lockBatchMQ`, `unlockBatchMQ`.
"""

from __future__ import annotations

from halfmq.remoting.bodies import LockBatchBody, decode_lock_batch, encode_locked_queues
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.queue_locks import QueueLocks


class LockHandlers(Handlers):
    """Locks queues for one consumer of a group at a time."""

    def __init__(self, locks: QueueLocks) -> None:
        self._locks = locks

    @serves(RequestCode.LOCK_BATCH_MQ)
    def lock(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Lock queues or renew their locks; answer with those that the client holds now."""
        body = _decode(request)
        owned = self._locks.lock(body.consumer_group, body.client_id, body.mq_set)
        return encode_reply(request, body=encode_locked_queues(owned))

    @serves(RequestCode.UNLOCK_BATCH_MQ)
    def unlock(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Unlock queues."""
        body = _decode(request)
        self._locks.unlock(body.consumer_group, body.client_id, body.mq_set)
        return encode_reply(request)


def _decode(request: RemotingCommand) -> LockBatchBody:
    if not request.body:
        raise RequestRefusedError("the request has no body")
    try:
        return decode_lock_batch(request.body)
    except BodyError as error:
        raise RequestRefusedError(str(error)) from error
