"""Subscribers and publishers, and what AsyncAPI shows of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack, cast

from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand, PublishType
from faststream.specification.schema import Message as SchemaMessage
from faststream.specification.schema import Operation, PublisherSpec, SubscriberSpec

from halfmq.client import ClientConfig, Consumer, SqlFilter

from . import internals
from .messages import (
    REPLY_TO_CLIENT,
    HalfmqMessage,
    HalfmqPublishCommand,
    HandledMessage,
    PublishSettings,
    RawMessage,
    decode,
    parse_message,
)
from .producer import HalfmqProducer, ReplyPublisher

C = TypeVar("C", SubscriberSpec, PublisherSpec)


@dataclass(kw_only=True)
class HalfmqBrokerConfig(internals.BrokerConfig):
    """What a broker hands to its subscribers and publishers."""

    producer: internals.ProducerProto[Any] = field(default_factory=HalfmqProducer)
    group: str = "faststream"
    client_config: ClientConfig = field(default_factory=ClientConfig)
    default_driver_annotations: Mapping[Any, Any] = field(
        default_factory=lambda: {HalfmqMessage: HandledMessage}
    )
    """What an error suggests for arguments of these types."""

    def command(
        self, kind: PublishType, message: Any, topic: str, settings: PublishSettings
    ) -> HalfmqPublishCommand:
        """Return the command of a message, with a correlation id."""
        settings["correlation_id"] = settings.get("correlation_id") or self.id_generator()
        return HalfmqPublishCommand(message, kind, topic, **settings)


@dataclass(kw_only=True)
class SubscriberConfig(internals.SubscriberUsecaseConfig):
    """Settings of a subscriber."""

    _outer_config: HalfmqBrokerConfig = field(default_factory=HalfmqBrokerConfig)

    @property
    def ack_policy(self) -> AckPolicy:
        """The subscriber's policy, else the broker's; by default a failed message is retried."""
        if self._ack_policy is not internals.EMPTY:
            return self._ack_policy
        outer = self._outer_config.ack_policy
        return AckPolicy.NACK_ON_ERROR if outer is internals.EMPTY else outer


@dataclass(kw_only=True)
class Shown(internals.PublisherSpecificationConfig):
    """What AsyncAPI shows of a subscriber or publisher."""

    topic: str
    schema_: Any = None


class _Endpoint:
    """What a subscriber and a publisher have in common."""

    _outer_config: Any
    specification: Any

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return str(self.specification.topic)


class HalfmqSubscriber(_Endpoint, internals.TasksMixin, internals.SubscriberUsecase[RawMessage]):
    """Handles the messages of a topic with a consumer of its own, ``max_workers`` at one time."""

    def __init__(
        self,
        config: SubscriberConfig,
        specification: Any,
        calls: Any,
        group: str | None,
        tags: str | SqlFilter,
        max_workers: int,
        settings: Mapping[str, Any],
    ) -> None:
        config.parser, config.decoder = parse_message, decode
        super().__init__(config, specification, calls)
        self._group, self._tags, self._settings = group, tags, settings
        self._max_workers = max_workers
        self._consumer: Consumer | None = None

    @property
    def group(self) -> str:
        """The consumer group: members of one must subscribe equally, so each topic has its own."""
        name = self._group or f"{self._outer_config.group}-{self.topic}"
        return re.sub(r"[^\w%|-]", "_", name, flags=re.ASCII)

    async def start(self) -> None:
        """Start to consume."""
        await super().start()
        if self.calls:
            await self._started_consumer()
            for _ in range(self._max_workers):
                self.add_task(self._consume_loop)
        self._post_start()

    async def stop(self) -> None:
        """Take no more messages, wait for the handlers, then commit and leave the group."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()
        await super().stop()
        if consumer is not None:
            await consumer.close()

    async def get_one(self, *, timeout: float = 5.0) -> HalfmqMessage | None:  # noqa: ASYNC109 -- FastStream's
        """Return the next message of a subscriber without handlers; None after ``timeout``."""
        assert not self.calls, "get_one is for subscribers without handlers"
        consumer = await self._started_consumer()
        return await self._processed(await consumer.receive(timeout=timeout))

    async def __aiter__(self) -> AsyncIterator[HalfmqMessage]:
        assert not self.calls, "iteration is for subscribers without handlers"
        async for raw in await self._started_consumer():
            message = await self._processed(raw)
            assert message is not None
            yield message

    async def _processed(self, raw: Any) -> HalfmqMessage | None:
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        middlewares = (one(raw, context=context) for one in self._broker_middlewares)
        message = await internals.process_msg(
            msg=raw, middlewares=middlewares, parser=parser, decoder=decoder
        )
        return cast("HalfmqMessage | None", message)

    async def _started_consumer(self) -> Consumer:
        if self._consumer is None:
            settings = {"ack_timeout": None, **self._settings}  # a handler may take any time
            config = self._outer_config.client_config
            consumer = Consumer(self.group, {self.topic: self._tags}, config=config, **settings)
            await consumer.start()
            self._consumer = consumer
        return self._consumer

    async def _consume_loop(self) -> None:
        assert self._consumer is not None
        async for message in self._consumer:
            await self.consume(message)

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[Any]:
        raw = message.raw_message
        request = raw if REPLY_TO_CLIENT in raw.properties else None
        return [ReplyPublisher(self._outer_config.producer, message.reply_to, request)]

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        """Return what log lines show; the ends of ids differ, their beginnings do not."""
        message_id = getattr(message, "message_id", "")
        return {"topic": self.topic, "group": self.group, "message_id": message_id[-10:]}


class _Channel:
    """A channel in AsyncAPI."""

    config: Shown
    _outer_config: Any

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    def _spec(self, made: type[C], name: str, text: str | None, payload: Any) -> dict[str, C]:
        message = SchemaMessage(title=f"{name}:Message", payload=payload)
        operation = Operation(message=message, bindings=None)
        return {name: made(text, operation, bindings=None, address=self.topic)}


class SubscriberSchema(_Channel, internals.SubscriberSpecification[Any, Any]):
    """A subscriber in AsyncAPI."""

    @property
    def channel_labels(self) -> list[str]:
        """What the channel is named after."""
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the channel."""
        payload = internals.resolve_payloads(self.get_payloads())
        return self._spec(SubscriberSpec, self.name, self.description, payload)


class HalfmqPublisher(_Endpoint, internals.PublisherUsecase):
    """Publishes to one topic: what handlers return, or by `publish`."""

    def __init__(
        self,
        specification: Any,
        headers: Mapping[str, str],
        tags: str | None,
        order_key: str | None,
    ) -> None:
        outer = specification._outer_config  # noqa: SLF001 -- FastStream's, which has no other
        super().__init__(internals.PublisherUsecaseConfig(_outer_config=outer), specification)
        self.headers, self._tags, self._order_key = dict(headers), tags, order_key

    async def publish(
        self, message: Any, topic: str = "", **settings: Unpack[PublishSettings]
    ) -> Any:
        """Publish a message, as `HalfmqBroker.publish` does."""
        cmd, producer = self._command(PublishType.PUBLISH, message, topic, settings)
        return await self._basic_publish(cmd, producer=producer, _extra_middlewares=())

    async def request(
        self, message: Any, topic: str = "", **settings: Unpack[PublishSettings]
    ) -> Any:
        """Publish a request and return its reply, a `HalfmqMessage`."""
        cmd, producer = self._command(PublishType.REQUEST, message, topic, settings)
        return await self._basic_request(cmd, producer=producer)

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        await self._basic_publish(
            self._completed(HalfmqPublishCommand.from_cmd(cmd)),
            producer=self._outer_config.producer,
            _extra_middlewares=_extra_middlewares,
        )

    def _command(
        self, kind: PublishType, message: Any, topic: str, settings: PublishSettings
    ) -> tuple[HalfmqPublishCommand, Any]:
        outer = self._outer_config
        cmd = outer.broker_config.command(kind, message, topic, settings)
        return self._completed(cmd), outer.producer

    def _completed(self, cmd: HalfmqPublishCommand) -> HalfmqPublishCommand:
        cmd.destination = cmd.destination or self.topic
        cmd.add_headers(self.headers, override=False)
        cmd.tags, cmd.order_key = cmd.tags or self._tags, cmd.order_key or self._order_key
        return cmd


class PublisherSchema(_Channel, internals.PublisherSpecification[Any, Any]):
    """A publisher in AsyncAPI."""

    @property
    def name(self) -> str:
        """The channel's name."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the channel."""
        payload = internals.resolve_payloads(self.get_payloads(), "Publisher")
        return self._spec(PublisherSpec, self.name, self.config.description_, payload)
