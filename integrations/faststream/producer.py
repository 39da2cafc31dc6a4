"""Publishing: FastStream's commands become halfmq's messages."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Final

from faststream.exceptions import FeatureNotSupportedException, IncorrectState
from faststream.response import PublishCommand

from halfmq.client import Producer, ReplyTimeoutError, Transaction

from .internals import DefaultCodec, FakePublisher, ParserComposition, ProducerProto
from .messages import HalfmqPublishCommand, RawMessage, decode, parse_message

COLLECTING: Final[ContextVar[Transaction | None]] = ContextVar(
    "halfmq_faststream_transaction", default=None
)
"""The transaction in whose block, or in a task of it, a message is published."""

REQUEST_S: Final = 30.0
"""Seconds that a request waits for its reply if its caller says nothing, as in other brokers."""


class HalfmqProducer(ProducerProto[HalfmqPublishCommand]):
    """Sends with one client, that of the broker."""

    def __init__(self, parser: Any = None, decoder: Any = None) -> None:
        self._parser = ParserComposition(parser, parse_message)
        self._decoder = ParserComposition(decoder, decode)
        self.codec: Any = DefaultCodec()
        self._serializer: Any = None
        self.client: Producer | None = None

    def connect(self, client: Producer, serializer: Any, codec: Any) -> None:
        """Send with a client from now on."""
        self.client, self._serializer, self.codec = client, serializer, codec or DefaultCodec()

    async def publish(self, cmd: HalfmqPublishCommand) -> Any:
        """Send a message or a reply, or add it to the open transaction.

        Returns:
            The ``SendResult``; None for a reply, and in a transaction.
        """
        body, properties = await cmd.encoded(self.codec, self._serializer)
        if cmd.request is not None:
            return await cmd.request.reply(body, properties)
        message, transaction = cmd.message(body, properties), COLLECTING.get()
        if transaction is not None and transaction.collects:  # not after its block, in a task
            transaction.add(message, order_key=cmd.order_key)
            return None
        return await self._connected.send(message, order_key=cmd.order_key, timeout=cmd.timeout)

    async def request(self, cmd: HalfmqPublishCommand) -> Any:
        """Send a message and return its reply.

        Raises:
            TimeoutError: There is none in time.
        """
        message = cmd.message(*await cmd.encoded(self.codec, self._serializer))
        seconds = cmd.timeout or REQUEST_S
        try:
            async with asyncio.timeout(seconds):
                client, key = self._connected, cmd.order_key
                return await client.request(message, order_key=key, timeout=seconds)
        except ReplyTimeoutError as error:
            raise TimeoutError(str(error)) from error

    async def publish_batch(self, cmd: HalfmqPublishCommand) -> Any:
        raise FeatureNotSupportedException(
            "halfmq has no batches of unlike messages: publish them one after the other; "
            "Producer(linger=…) sends those of one topic together"
        )

    @property
    def _connected(self) -> Producer:
        if self.client is None:
            raise IncorrectState("the broker is not connected: await broker.connect() or start()")
        return self.client


class ReplyPublisher(FakePublisher):
    """Publishes what a handler returns for a message that asks for a reply."""

    def __init__(self, producer: Any, topic: str, request: RawMessage | None) -> None:
        """Reply to a topic, or to the client that waits for the reply to ``request``."""
        super().__init__(producer=producer)
        self._topic, self._request = topic, request

    def patch_command(self, cmd: PublishCommand) -> HalfmqPublishCommand:
        """Return the command with its destination."""
        reply = HalfmqPublishCommand.from_cmd(super().patch_command(cmd))
        reply.destination, reply.request = self._topic, self._request
        return reply
