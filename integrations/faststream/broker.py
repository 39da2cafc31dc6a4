"""`HalfmqBroker` and `HalfmqRouter`: where handlers and publishers are declared."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Unpack

from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response import PublishType
from faststream.specification.schema import BrokerSpec

from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    ClientError,
    ConfigurationError,
    Producer,
    SqlFilter,
    TransactionProducer,
)

from . import internals
from .endpoints import (
    HalfmqBrokerConfig,
    HalfmqPublisher,
    HalfmqSubscriber,
    PublisherSchema,
    Shown,
    SubscriberConfig,
    SubscriberSchema,
)
from .messages import HalfmqMessage, PublishSettings, RawMessage
from .producer import COLLECTING, HalfmqProducer


class HalfmqRegistrator(internals.Registrator[RawMessage, HalfmqBrokerConfig]):
    """Declares handlers and publishers, of a broker or a router."""

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str | None = None,
        tags: str | SqlFilter = "*",
        max_workers: int = 1,
        ack_policy: AckPolicy = internals.EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
        **consumer: Any,
    ) -> HalfmqSubscriber:
        """Return a decorator: the handler gets the messages of a topic.

        ``group`` is the consumer group, by default the broker's ``group`` and the topic. ``tags``
        selects messages, ``"a || b"`` or ``sql("…")``; ``max_workers`` are handled at one time. By
        the default ``ack_policy`` a message whose handler fails is retried, after delays that the
        broker chooses, and finally a dead letter. ``consumer`` are more settings of
        ``halfmq.client.Consumer``: ``start_from``, ``ordered``. The others are FastStream's.
        """
        outer: Any = self.config
        config = SubscriberConfig(no_reply=no_reply, _outer_config=outer, _ack_policy=ack_policy)
        calls: internals.CallsCollection[Any] = internals.CallsCollection()
        shown = Shown(
            topic=topic, title_=title, description_=description, include_in_schema=include_in_schema
        )
        schema = SubscriberSchema(outer, shown, calls)
        made = HalfmqSubscriber(config, schema, calls, group, tags, max_workers, consumer)
        super().subscriber(made, persistent=persistent)
        return made.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: Mapping[str, str] | None = None,
        tags: str | None = None,
        order_key: str | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
    ) -> HalfmqPublisher:
        """Return a publisher of a topic; as a decorator, it publishes what the handler returns.

        All its messages have these ``headers``, as properties, this tag and this ``order_key``:
        messages of one key keep their order. The other arguments are FastStream's.
        """
        outer: Any = self.config
        shown = Shown(
            topic=topic,
            schema_=schema,
            title_=title,
            description_=description,
            include_in_schema=include_in_schema,
        )
        made = HalfmqPublisher(PublisherSchema(outer, shown), headers or {}, tags, order_key)
        super().publisher(made, persistent=persistent)
        return made


class HalfmqRoute(internals.SubscriberRoute):
    """A handler for ``HalfmqRouter(handlers=…)``, with the settings of `subscriber`."""


class HalfmqRoutePublisher(internals.ArgsContainer):
    """A publisher for `HalfmqRoute`, with the settings of `publisher`."""


class HalfmqRouter(HalfmqRegistrator, internals.BrokerRouter[RawMessage, HalfmqBrokerConfig]):
    """Handlers and publishers that a broker includes."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[HalfmqRoute] = (),
        *,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = internals.EMPTY,
    ) -> None:
        """``prefix`` begins the topics of all handlers and publishers."""
        super().__init__(
            handlers=handlers,
            config=HalfmqBrokerConfig(
                prefix=prefix,
                broker_dependencies=dependencies,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                include_in_schema=include_in_schema,
                ack_policy=ack_policy,
            ),
            routers=routers,
        )


class HalfmqBroker(
    HalfmqRegistrator, internals.BrokerUsecase[RawMessage, Producer, HalfmqBrokerConfig]
):
    """A halfmq broker for FastStream."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str = "faststream",
        checker: Any = None,
        client: ClientConfig | None = None,
        graceful_timeout: float | None = 15.0,
        decoder: Any = None,
        parser: Any = None,
        codec: Any = None,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[Any] = (),
        ack_policy: AckPolicy = internals.EMPTY,
        id_generator: Any = gen_cor_id,
        specification_url: str | None = None,
        protocol: str = "rocketmq",
        protocol_version: str = "5",
        description: str | None = None,
        tags: Iterable[Any] = (),
        security: Any = None,
        logger: Any = internals.EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: Any = internals.EMPTY,
        provider: Any = internals.dependency_provider,
        context: Any = None,
        **settings: Any,
    ) -> None:
        """Declare the broker; `start` connects.

        ``namesrv`` is ``host:port``, several with ``;``, by default ``NAMESRV_ADDR``. ``group`` is
        the producer group, and begins the names of consumer groups. ``checker`` is
        ``ledger.async_checker(…)``, for :meth:`transaction`. ``client`` has all other settings of
        the clients. The other arguments are FastStream's.
        """
        own = client or ClientConfig()
        config = own if namesrv is None else replace(own, namesrv=namesrv)
        self._group, self._checker = group, checker
        self._sender = HalfmqProducer(parser, decoder)
        super().__init__(
            routers=routers,
            config=HalfmqBrokerConfig(
                group=group,
                client_config=config,
                producer=self._sender,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=internals.make_logger_state(logger, log_level, _Logging),
                fd_config=internals.FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider,
                    context=context or internals.ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                description=description,
                url=[specification_url] if specification_url else config.namesrv_addresses,
                protocol=protocol,
                protocol_version=protocol_version,
                tags=tags,
                security=security,
            ),
            **settings,
        )

    async def _connect(self) -> Producer:
        config = self.config.client_config
        producer = (
            Producer(self._group, config=config)
            if self._checker is None
            else TransactionProducer(self._group, self._checker, config=config)
        )
        await producer.start()
        serializer = self.config.fd_config._serializer  # noqa: SLF001 -- FastStream has no other
        self._sender.connect(producer, serializer, self.config.broker_codec)
        return producer

    async def start(self) -> None:
        """Connect, and start all subscribers."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Stop the subscribers, then close the producer."""
        await super().stop(exc_type, exc_val, exc_tb)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._sender.client = None

    async def ping(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 -- FastStream's
        """Return whether a name server or broker answers."""
        if self._connection is None:
            return False
        try:
            await self._connection.wait_until_available(timeout or 5.0)
        except ClientError:
            return False
        return True

    async def publish(
        self, message: Any = None, topic: str = "", **settings: Unpack[PublishSettings]
    ) -> Any:
        """Publish a message: anything that FastStream can encode.

        Returns:
            A ``SendResult``; None in a :meth:`transaction`.
        """
        cmd = self.config.broker_config.command(PublishType.PUBLISH, message, topic, settings)
        return await self._basic_publish(cmd, producer=self.config.producer)

    async def request(  # type: ignore[override]
        self, message: Any = None, topic: str = "", **settings: Unpack[PublishSettings]
    ) -> HalfmqMessage:
        """Publish a request and return the reply: what the handler returns.

        Handlers of other clients of RocketMQ that reply are waited for as well, 30 seconds unless
        ``timeout`` says another number.
        """
        cmd = self.config.broker_config.command(PublishType.REQUEST, message, topic, settings)
        reply: HalfmqMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply

    @asynccontextmanager
    async def transaction(self, session: Any) -> AsyncGenerator[None]:
        """Publish what the block publishes if, and only if, its database transaction commits.

        ``session`` is what the ledger of the broker's ``checker`` takes, SQLAlchemy's
        ``AsyncSession`` for one; it is committed here. Messages are collected, and prepared just
        before the commit: at most 64, 16 MiB together. What the block raises rolls back.

        Raises:
            ConfigurationError: The broker has no checker, or the session is in a transaction
                already, or has several engines.
            ClientClosedError: The broker is not connected.
        """
        producer = self._connection
        if self._checker is None:
            raise ConfigurationError("checker", None, "ledger.async_checker(…), of HalfmqBroker")
        if not isinstance(producer, TransactionProducer):
            raise ClientClosedError("HalfmqBroker")
        async with producer.transaction(session=session) as transaction:
            token = COLLECTING.set(transaction)
            try:
                yield
            finally:
                COLLECTING.reset(token)


class _Logging(internals.DefaultLoggerStorage):
    """The logger of handlers: topic, group and message id in columns."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"topic": 5, "group": 5}

    def register_subscriber(self, params: dict[str, Any]) -> None:
        for name, width in self._widths.items():
            self._widths[name] = max(width, len(params.get(name, "")))

    def get_logger(self, *, context: Any) -> Any:
        found = self._get_logger_ref()
        if not found:
            columns = "".join(f"%({name})-{width}s | " for name, width in self._widths.items())
            found = internals.get_broker_logger(
                name="halfmq",
                default_context=dict.fromkeys(self._widths, ""),
                message_id_ln=10,
                fmt=f"%(asctime)s %(levelname)-8s - {columns}%(message_id)-10s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(found)
        return found
