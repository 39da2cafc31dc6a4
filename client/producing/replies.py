"""Requests that wait for a reply, which the broker pushes to the client that sent the request.

A request is an ordinary message with an id for its reply and the id of this client; any consumer of
the topic may reply, of any client of RocketMQ since 4.6.

Source: RocketMQ ``DefaultMQProducerImpl.request``, ``ClientRemotingProcessor.receiveReplyMessage``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias
from uuid import uuid4

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.headers import ReplyMessageRequestHeader
from halfmq.store.format import properties as names
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import new_record

from ..message import ReceivedMessage
from ..net.connection import BrokerConnection
from ..net.message_encoding import EncodedMessage

logger = logging.getLogger(__name__)

Reply: TypeAlias = asyncio.Future[ReceivedMessage]

_NO_HOST = pack_host("0.0.0.0", 0)  # noqa: S104 -- a reply is not stored here


class AwaitedReplies:
    """The requests of a producer whose reply has not come; each has a caller that waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, Reply] = {}

    @contextmanager
    def awaiting(
        self, encoded: EncodedMessage, client_id: str, seconds: float
    ) -> Iterator[tuple[EncodedMessage, Reply]]:
        """Return the request for a message, and its reply, which counts while the block runs."""
        key = uuid4().hex
        added = {
            names.PROPERTY_CORRELATION_ID: key,
            names.PROPERTY_REPLY_TO_CLIENT: client_id,
            names.PROPERTY_TTL: str(round(seconds * 1000)),
        }
        text = "".join(f"{name}\x01{value}\x02" for name, value in added.items())
        reply = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            yield encoded._replace(properties=encoded.properties + text), reply
        finally:
            del self._waiting[key]

    def on_reply(self, request: RemotingCommand, connection: BrokerConnection) -> None:
        """Take a reply that the broker pushes; one that nobody waits for is dropped."""
        try:
            header = request.header_as(ReplyMessageRequestHeader)
        except ProtocolError as error:
            logger.warning("event=request_refused code=%d reason=%r", request.code, str(error))
            connection.reply(request, ResponseCode.SYSTEM_ERROR, str(error))
            return
        record = new_record(
            topic=header.topic,
            queue_id=header.queue_id,
            body=request.body,
            properties=(header.properties or "").encode(),
            sys_flag=header.sys_flag,
            flag=header.flag,
            born_timestamp=header.born_timestamp,
            born_host=_NO_HOST,
            store_timestamp=header.store_timestamp,
            store_host=_NO_HOST,
        )
        reply = self._waiting.get(record.property_map.get(names.PROPERTY_CORRELATION_ID, ""))
        if reply is None or reply.done():
            logger.info("event=reply_not_awaited topic=%s", header.topic)
        else:
            reply.set_result(ReceivedMessage(record, connection.address))
        connection.reply(request)
