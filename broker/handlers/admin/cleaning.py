"""Deletion of files on request: old files of the log (329), queue files (306, 316).

RocketMQ keeps queues without messages, and those of unknown topics, until these requests. Here
their files are deleted with the files of the log, so 306 and 316 only delete what an interrupted
deletion has left.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#cleanExpiredConsumeQueue`, `#cleanUnusedTopic`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import define

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...ports import Connection, Handlers, serves

logger = logging.getLogger(__name__)


@define(eq=False, repr=False)
class CleaningHandlers(Handlers):
    """Requests the deletion of files; answers at once, as RocketMQ does."""

    _delete_expired: Callable[[], None]  # starts the deletion of old files of the log, at any hour
    _delete_queue_files: Callable[[], None]  # deletes files of queues without messages

    @serves(RequestCode.DELETE_EXPIRED_COMMITLOG)
    def clean_log(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Delete files of the log that are older than the retention time."""
        logger.info("event=deletion_asked what=log peer=%s", connection.name)
        self._delete_expired()
        return encode_reply(request)

    @serves(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.CLEAN_UNUSED_TOPIC)
    def clean_queues(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Delete queue files whose messages were deleted."""
        logger.info("event=deletion_asked what=queues peer=%s", connection.name)
        self._delete_queue_files()
        return encode_reply(request)
