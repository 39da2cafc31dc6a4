"""Replies of request-reply messaging: SEND_REPLY_MESSAGE (324) and its V2 (325).

A request is an ordinary message with the client id of its producer in REPLY_TO_CLIENT. Its consumer
sends the reply to the broker, which pushes it to that client (PUSH_REPLY_MESSAGE_TO_CLIENT, 326) on
the connection of the client's heartbeats, and answers the consumer when the client has answered.

Source: RocketMQ 5.3.3 `ReplyMessageProcessor`.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import ReplyMessageRequestHeader, SendMessageRequestHeader
from halfmq.remoting.replies import encode_reply, encode_send_reply
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ...errors import REFUSAL_FIELDS, MessageRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry

logger = logging.getLogger(__name__)

_NOT_STORED: Final = "0"  # RocketMQ's message id of a reply that is not stored


class StoredReply(NamedTuple):
    """Where a reply is stored, for the answer to its sender."""

    msg_id: str
    queue_id: int
    queue_offset: int
    durable_at: int  # position of the log up to which the answer waits for the disk


Validate = Callable[[SendMessageRequestHeader, bytes, Connection], AppendRequest]


@define(eq=False, repr=False)
class ReplyHandler(Handlers):
    """Passes replies to the clients that wait for them."""

    _log: MessageStore  # where replies are stored
    _registry: ClientRegistry
    _validate: Validate  # returns a reply as it is stored, or raises RequestRefusedError
    _append_staged: Callable[[], None]  # appends the records of earlier requests
    _refuse_sends: Callable[[], None]  # raises if the disk is too slow to accept more
    _topic: str  # the only topic for replies
    _stores: bool  # whether each reply is also stored as a message of that topic
    _sync_flush: bool  # whether answers wait for the disk
    _now_ms: Callable[[], int]

    @serves(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    def reply(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Store the reply and push it to the client; answer when the client has answered.

        Raises:
            RequestRefusedError: It cannot be stored, or its client is not connected.
        """
        header = request.header_as(SendMessageRequestHeader)
        if header.topic != self._topic:  # a sender of replies needs no right on their topic
            raise MessageRefusedError(
                f"a reply goes to the topic {self._topic}, not to {header.topic}",
                ResponseCode.NO_PERMISSION,
            )
        message = self._validate(header, request.body, connection)
        client_id, client = self._client(header)
        stored = self._store_reply(message)
        waiting = replace(request, body=b"", raw_header=b"")  # less memory until the client answers

        def on_answer(answer: RemotingCommand | None) -> None:
            self._answer(waiting, connection, stored, client_id, answer)

        push = self._push_header(header, message.properties.decode(), connection)
        if not client.ask(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, push, request.body, on_answer):
            on_answer(None)
        return None

    def _client(self, header: SendMessageRequestHeader) -> tuple[str, Connection]:
        properties = (header.properties or "").encode()
        client_id = (get_property(properties, b"REPLY_TO_CLIENT") or b"").decode()
        if not client_id:
            raise MessageRefusedError(
                "reply message properties[REPLY_TO_CLIENT] is null", ResponseCode.SYSTEM_ERROR
            )
        client = self._registry.producer_by_id(client_id)
        if client is None:
            logger.warning("event=reply_without_client client=%s", client_id)
            raise MessageRefusedError(
                f"push reply message fail, channel of <{client_id}> not found.",
                ResponseCode.SYSTEM_ERROR,
            )
        return client_id, client

    def _store_reply(self, message: AppendRequest) -> StoredReply:
        """Store a reply if replies are stored; return where."""
        if not self._stores:
            return StoredReply(_NOT_STORED, message.queue_id, 0, 0)
        self._refuse_sends()
        self._append_staged()  # keeps the order of arrival
        (result,) = self._log.append((message,))
        return StoredReply(
            offset_message_id(message.store_host, result.physical_offset),
            message.queue_id,
            result.queue_offset,
            result.end if self._sync_flush else 0,
        )

    def _answer(
        self,
        request: RemotingCommand,
        connection: Connection,
        stored: StoredReply,
        client_id: str,
        answer: RemotingCommand | None,
    ) -> None:
        """Answer the sender of a reply after the client has answered the push, or not."""
        if answer is None or answer.code != ResponseCode.SUCCESS:
            reason = "no answer" if answer is None else answer.remark
            logger.warning("event=reply_not_taken client=%s reason=%r", client_id, reason)
            refusal = encode_reply(
                request,
                ResponseCode.SYSTEM_ERROR,
                header=REFUSAL_FIELDS,
                remark=f"push reply message to {client_id}fail.",
            )
            connection.respond(request, refusal)
        else:
            reply = encode_send_reply(
                request, stored.msg_id, stored.queue_id, stored.queue_offset, None
            )
            connection.respond(request, reply, stored.durable_at)

    def _push_header(
        self, sent: SendMessageRequestHeader, properties: str, connection: Connection
    ) -> ReplyMessageRequestHeader:
        now_ms = self._now_ms()
        return ReplyMessageRequestHeader(
            producer_group=sent.producer_group,
            topic=sent.topic,
            default_topic=sent.default_topic,
            default_topic_queue_nums=sent.default_topic_queue_nums,
            queue_id=sent.queue_id,
            sys_flag=sent.sys_flag,
            born_timestamp=sent.born_timestamp,
            flag=sent.flag,
            born_host=connection.name,
            store_host=connection.broker_address,
            store_timestamp=now_ms,
            properties=f"{properties}PUSH_REPLY_TIME\x01{now_ms}\x02",
            reconsume_times=sent.reconsume_times,
            unit_mode=sent.unit_mode,
        )
