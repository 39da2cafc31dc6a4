"""Staged messages and halves: what is appended, and the answer after the append."""

from collections.abc import Sequence

import msgspec

from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageResponseHeader
from halfmq.remoting.recall_handle import RecallHandle
from halfmq.remoting.replies import encode_reply, encode_send_reply
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.timers import timer_out_ms
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ...delay.waiting import TIMER_QUEUE, place_of
from ...ports import Connection
from ...transaction.prepares import Prepares


class StagedMessage(msgspec.Struct, gc=False):
    """A message that is appended with the others of this pass of the event loop."""

    requests: tuple[AppendRequest]
    command: RemotingCommand
    connection: Connection
    unique_key: str
    queue_id: int  # in the answer: of the real topic, even if the message is delayed
    waits: bool  # whether the answer waits for the disk

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Answer the request, after the flush if it waits for the disk."""
        result, command = results[0], self.command
        reply = encode_send_reply(
            command,
            offset_message_id(self.connection.store_host, result.physical_offset),
            self.queue_id,
            result.queue_offset,
            self.unique_key,
        )
        self.connection.respond(command, reply, result.end if self.waits else 0)

    def abandoned(self) -> None:
        """Do nothing; staging has changed nothing."""


class StagedTimer(StagedMessage, gc=False):
    """A message that waits for its time of delivery."""

    topic: str  # its real one
    due_ms: int
    broker_name: str

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Answer the request with the recall handle."""
        result, command = results[0], self.command
        handle = RecallHandle(
            self.topic,
            self.broker_name,
            timer_out_ms(self.due_ms) + 1,
            self.unique_key,
            place_of(TIMER_QUEUE, result.queue_offset),
        )
        header = SendMessageResponseHeader(
            msg_id=offset_message_id(self.connection.store_host, result.physical_offset),
            queue_id=self.queue_id,
            queue_offset=result.queue_offset,
            transaction_id=self.unique_key,
            msg_region="DefaultRegion",
            trace_on="true",
            recall_handle=handle.encode(),
        )
        reply = encode_reply(command, header=header)
        self.connection.respond(command, reply, result.end if self.waits else 0)


class StagedHalf(StagedMessage, gc=False):
    """A transactional message whose half is appended with the others."""

    message: AppendRequest  # as the producer sent it
    producer_group: str
    deduplication_key: int
    prepares: Prepares

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Add the transaction, and answer the request."""
        self.prepares.prepared(
            self.message,
            self.requests[0],
            results[0],
            self.producer_group,
            self.deduplication_key,
            self.connection,
        )
        StagedMessage.appended(self, results)

    def abandoned(self) -> None:
        """Release the deduplication key, so that the same half is not a duplicate of this one."""
        self.prepares.recent_prepares.release(self.deduplication_key)
