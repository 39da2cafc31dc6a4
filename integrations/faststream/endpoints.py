"""Subscribers and publishers, and what AsyncAPI shows of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand, PublishType
from faststream.specification.schema import Message as SchemaMessage
from faststream.specification.schema import Operation, PublisherSpec, SubscriberSpec

from halfmq.client import ClientConfig, Consumer, Producer

from .internals import (
    EMPTY,
    BrokerConfig,
    ConcurrentMixin,
    ProducerProto,
    PublisherSpecification,
    PublisherSpecificationConfig,
    PublisherUsecase,
    PublisherUsecaseConfig,
    SubscriberSpecification,
    SubscriberSpecificationConfig,
    SubscriberUsecase,
    SubscriberUsecaseConfig,
    TasksMixin,
    process_msg,
    resolve_payloads,
)
from .messages import (
    REPLY_TO_CLIENT,
    HalfmqMessage,
    HalfmqPublishCommand,
    HandledMessage,
    RawMessage,
    decode,
    parse_message,
)
from .producer import HalfmqProducer, ReplyPublisher


@dataclass(kw_only=True)
class HalfmqBrokerConfig(BrokerConfig):
    """What a broker hands to its subscribers and publishers."""

    producer: ProducerProto[Any] = field(default_factory=HalfmqProducer)
    group: str = "faststream"
    client_config: ClientConfig = field(default_factory=ClientConfig)
    default_driver_annotations: Mapping[Any, Any] = field(
        default_factory=lambda: {HalfmqMessage: HandledMessage}
    )
    """What an error suggests for arguments of these types."""

    def connect(self, client: Producer) -> None:
        """Let publishers send with a client."""
        producer = cast("HalfmqProducer", self.producer)
        producer.connect(client, self.fd_config._serializer, self.broker_codec)  # noqa: SLF001 -- FastStream has no other

    def disconnect(self) -> None:
        """Let publishers send nothing more."""
        cast("HalfmqProducer", self.producer).disconnect()


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    """Settings of a subscriber."""

    _outer_config: HalfmqBrokerConfig = field(default_factory=HalfmqBrokerConfig)
    topic: str
    group: str | None
    consumer: Mapping[str, Any]
    tags: Any

    @property
    def ack_policy(self) -> AckPolicy:
        """The subscriber's policy, else the broker's; by default a failed message is retried."""
        if self._ack_policy is not EMPTY:
            return self._ack_policy
        outer = self._outer_config.ack_policy
        return AckPolicy.NACK_ON_ERROR if outer is EMPTY else outer


@dataclass(kw_only=True)
class TopicOfSubscriber(SubscriberSpecificationConfig):
    """For AsyncAPI."""

    topic: str


@dataclass(kw_only=True)
class TopicOfPublisher(PublisherSpecificationConfig):
    """For AsyncAPI."""

    topic: str


class HalfmqSubscriber(TasksMixin, SubscriberUsecase[RawMessage]):
    """Handles the messages of a topic, one at a time, with a consumer of its own."""

    _outer_config: Any

    def __init__(self, config: SubscriberConfig, specification: Any, calls: Any) -> None:
        config.parser, config.decoder = parse_message, decode
        super().__init__(config, specification, calls)
        self._topic, self._group, self._tags = config.topic, config.group, config.tags
        self._settings = config.consumer
        self._consumer: Consumer | None = None

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return f"{self._outer_config.prefix}{self._topic}"

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
        message = await process_msg(
            msg=raw, middlewares=middlewares, parser=parser, decoder=decoder
        )
        return cast("HalfmqMessage | None", message)

    async def _started_consumer(self) -> Consumer:
        if self._consumer is None:
            settings = {
                "ack_timeout": None,
                **self._settings,
            }  # the handler takes as long as it takes
            consumer = Consumer(
                self.group,
                {self.topic: self._tags},
                config=self._outer_config.client_config,
                **settings,
            )
            await consumer.start()
            self._consumer = consumer
        return self._consumer

    async def _consume_loop(self) -> None:
        assert self._consumer is not None
        async for message in self._consumer:
            await self._take(message)

    async def _take(self, message: RawMessage) -> None:
        await self.consume(message)

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[Any]:
        raw = message.raw_message
        request = raw if REPLY_TO_CLIENT in raw.properties else None
        return [ReplyPublisher(self._outer_config.producer, message.reply_to, request)]

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        """Return what log lines show; the ends of ids differ, their beginnings do not."""
        message_id = getattr(message, "message_id", "")
        return {"topic": self.topic, "group": self.group, "message_id": message_id[-10:]}


class ConcurrentHalfmqSubscriber(ConcurrentMixin[RawMessage], HalfmqSubscriber):
    """Handles several messages at one time."""

    async def start(self) -> None:
        await super().start()
        self.start_consume_task()

    async def _take(self, message: RawMessage) -> None:
        await self._put_msg(message)


class SubscriberSchema(SubscriberSpecification[Any, TopicOfSubscriber]):
    """A subscriber in AsyncAPI."""

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        """What the channel is named after."""
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the channel."""
        message = SchemaMessage(
            title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads())
        )
        return {
            self.name: SubscriberSpec(
                address=self.topic,
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    """Settings of a publisher: of its messages, unless one has its own."""

    _outer_config: HalfmqBrokerConfig = field(default_factory=HalfmqBrokerConfig)
    topic: str
    headers: Mapping[str, str]
    tags: str | None
    order_key: str | None


class HalfmqPublisher(PublisherUsecase):
    """Publishes to one topic: what handlers return, or by `publish`."""

    _outer_config: Any

    def __init__(self, config: PublisherConfig, specification: Any) -> None:
        super().__init__(config, specification)
        self._topic, self.headers = config.topic, dict(config.headers)
        self._tags, self._order_key = config.tags, config.order_key

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return f"{self._outer_config.prefix}{self._topic}"

    async def publish(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        **settings: Any,
    ) -> Any:
        """Publish a message; the settings are those of `HalfmqBroker.publish`."""
        cmd = self._completed(
            HalfmqPublishCommand(
                message,
                topic=topic,
                headers=headers,
                correlation_id=correlation_id or self._outer_config.id_generator(),
                _publish_type=PublishType.PUBLISH,
                **settings,
            )
        )
        producer = self._outer_config.producer
        return await self._basic_publish(cmd, producer=producer, _extra_middlewares=())

    async def request(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- of the request and its reply
    ) -> Any:
        """Publish a request and return its reply, a `HalfmqMessage`."""
        cmd = self._completed(
            HalfmqPublishCommand(
                message,
                topic=topic,
                headers=headers,
                correlation_id=correlation_id or self._outer_config.id_generator(),
                timeout=timeout,
                _publish_type=PublishType.REQUEST,
            )
        )
        return await self._basic_request(cmd, producer=self._outer_config.producer)

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        await self._basic_publish(
            self._completed(HalfmqPublishCommand.from_cmd(cmd)),
            producer=self._outer_config.producer,
            _extra_middlewares=_extra_middlewares,
        )

    def _completed(self, cmd: HalfmqPublishCommand) -> HalfmqPublishCommand:
        cmd.destination = cmd.destination or self.topic
        cmd.add_headers(self.headers, override=False)
        cmd.tags, cmd.order_key = cmd.tags or self._tags, cmd.order_key or self._order_key
        return cmd


class PublisherSchema(PublisherSpecification[Any, TopicOfPublisher]):
    """A publisher in AsyncAPI."""

    @property
    def topic(self) -> str:
        """The topic, with the prefix of routers."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        """The channel's name."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the channel."""
        message = SchemaMessage(
            title=f"{self.name}:Message",
            payload=resolve_payloads(self.get_payloads(), "Publisher"),
        )
        return {
            self.name: PublisherSpec(
                address=self.topic,
                description=self.config.description_,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }
