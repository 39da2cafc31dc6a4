"""`TestHalfmqBroker`: handlers are called without a broker."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock

import anyio
from faststream.exceptions import SubscriberNotFound

from .broker import HalfmqBroker
from .endpoints import HalfmqPublisher, HalfmqSubscriber
from .internals import DefaultCodec, TestBroker, change_producer
from .messages import REPLY_TO_CLIENT, FakeMessage, HalfmqPublishCommand
from .producer import REQUEST_S, HalfmqProducer


class TestHalfmqBroker(TestBroker[HalfmqBroker, Any], broker=HalfmqBroker):
    """Calls the handlers of a topic when a message is published: one of each group.

    With ``with_real=True`` it starts the real broker and clients; ``halfmq.testing`` has one that
    needs no server.
    """

    __test__ = False

    def create_publisher_fake_subscriber(
        self, broker: HalfmqBroker, publisher: HalfmqPublisher
    ) -> tuple[HalfmqSubscriber, bool]:
        """Return a subscriber of the publisher's topic, and whether the user has declared it."""
        for one in subscribers_of(publisher.topic, self.brokers):
            return one, True
        return broker.subscriber(publisher.topic, persistent=False), False

    @contextmanager
    def _patch_producer(self, broker: HalfmqBroker) -> Generator[None]:
        fake = FakeProducer(broker, self.brokers)
        with change_producer(broker.config.broker_config, fake):
            yield

    async def _fake_connect(self, broker: HalfmqBroker, *args: Any, **kwargs: Any) -> Any:
        return AsyncMock()


def subscribers_of(topic: str, brokers: Iterable[HalfmqBroker]) -> list[HalfmqSubscriber]:
    """Return the subscribers of a topic."""
    every = (one for broker in brokers for one in broker.subscribers)
    return [one for one in every if isinstance(one, HalfmqSubscriber) and one.topic == topic]


class FakeProducer(HalfmqProducer):
    """Calls handlers instead of sending."""

    def __init__(self, broker: HalfmqBroker, brokers: Sequence[HalfmqBroker]) -> None:
        super().__init__(broker._parser, broker._decoder)  # noqa: SLF001 -- of FastStream's base class
        self._brokers = brokers
        self.codec = broker.config.broker_codec or DefaultCodec()
        self._serializer = broker.config.fd_config._serializer  # noqa: SLF001 -- as above

    async def publish(self, cmd: HalfmqPublishCommand) -> Any:
        message = await self._message(cmd)
        subscribers = subscribers_of(cmd.destination, self._brokers)
        for one in {one.group: one for one in subscribers}.values():
            await one.process_message(message)

    async def request(self, cmd: HalfmqPublishCommand) -> Any:
        message = await self._message(cmd)
        for one in subscribers_of(cmd.destination, self._brokers):
            with anyio.fail_after(cmd.timeout or REQUEST_S):
                result = await one.process_message(message)
            reply = HalfmqPublishCommand.from_cmd(result.as_publish_command())
            reply.destination = cmd.destination
            return await self._message(reply)
        raise SubscriberNotFound

    async def _message(self, cmd: HalfmqPublishCommand) -> FakeMessage:
        body, properties = await cmd.encoded(self.codec, self._serializer)
        properties.pop(REPLY_TO_CLIENT, None)
        return FakeMessage(cmd.destination, body, properties, cmd.correlation_id or "")
