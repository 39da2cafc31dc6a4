"""Messages of FastStream and of halfmq: headers are properties, FastStream encodes bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, TypeAlias, TypedDict, Unpack

from faststream.message import StreamMessage, decode_message
from faststream.response import PublishCommand, PublishType, Response

from halfmq.client import Message, MessageView

from .internals import Context

CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation_id"
REPLY_TO: Final = "reply_to"
"""Names of properties, those of FastStream's other brokers."""

EMPTY_BODY: Final = "faststream_empty"
"""Property of a message whose body is empty: RocketMQ's protocol refuses such bodies, so that it is
sent with one byte."""

REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
"""Property of a request whose sender waits. Source: RocketMQ ``MessageConst``."""

_OURS: Final = frozenset({CONTENT_TYPE, CORRELATION_ID, REPLY_TO, EMPTY_BODY})


@dataclass
class FakeMessage:
    """A message that no broker has seen, of `TestHalfmqBroker`."""

    topic: str
    body: bytes
    properties: Mapping[str, str] = field(default_factory=dict)
    message_id: str = ""

    async def ack(self) -> bool:
        return True

    async def retry(self, delay: timedelta | None = None, *, reason: str | None = None) -> None:
        """Nothing is delivered again."""

    async def reject(self, reason: str | None = None) -> None:
        """There are no dead letters."""

    async def reply(self, body: bytes, properties: Mapping[str, str] | None = None) -> None:
        """The test's producer returns what the handler returned."""


RawMessage: TypeAlias = MessageView | FakeMessage


class PublishSettings(TypedDict, total=False):
    """Settings of a published message; without their own comment, of ``halfmq.client.Message``."""

    headers: Mapping[str, str] | None
    """Its properties."""
    correlation_id: str | None
    """Repeated by replies and in the log; made if it is missing."""
    reply_to: str
    """The topic to which the handler's return value is published."""
    tags: str | None
    keys: list[str] | None
    order_key: str | None
    """Messages of one key keep their order."""
    deliver_after: timedelta | None
    deliver_at: datetime | None
    timeout: float | None
    """Seconds of all attempts, or of a request and its reply."""


class HalfmqMessage(StreamMessage[RawMessage]):
    """A message in a handler."""

    async def ack(self) -> None:
        """Acknowledge it; it is not delivered again."""
        if self.committed is None:
            await self.raw_message.ack()
        await super().ack()

    async def nack(self, delay: timedelta | None = None, reason: str | None = None) -> None:
        """Have it delivered again, after a delay that the broker chooses or ``delay``.

        ``raise NackMessage(delay=timedelta(minutes=5))`` in a handler does so.
        """
        if self.committed is None:
            await self.raw_message.retry(delay, reason=reason)
        await super().nack()

    async def reject(self, reason: str | None = None) -> None:
        """Make it a dead letter."""
        if self.committed is None:
            await self.raw_message.reject(reason)
        await super().reject()


HandledMessage: TypeAlias = Annotated[HalfmqMessage, Context("message")]
"""The type of an argument that is the message of a handler, not its body."""


async def parse_message(raw: RawMessage) -> HalfmqMessage:
    """Return FastStream's form of a message."""
    properties = raw.properties
    return HalfmqMessage(
        raw_message=raw,
        body=b"" if EMPTY_BODY in properties else raw.body,
        headers={key: value for key, value in properties.items() if key not in _OURS},
        content_type=properties.get(CONTENT_TYPE),
        correlation_id=properties.get(CORRELATION_ID),
        reply_to=properties.get(REPLY_TO) or properties.get(REPLY_TO_CLIENT, ""),
        message_id=raw.message_id,
    )


async def decode(message: StreamMessage[Any]) -> Any:
    """Decode a body by its content type."""
    return decode_message(message)


class HalfmqResponse(Response):
    """A handler's return value with settings of its message."""

    def __init__(self, body: Any, **settings: Unpack[PublishSettings]) -> None:
        headers = dict(settings.get("headers") or {})
        super().__init__(body, headers=headers, correlation_id=settings.get("correlation_id"))
        self._settings = settings

    def as_publish_command(self) -> HalfmqPublishCommand:
        self._settings["headers"] = self.headers
        self._settings["correlation_id"] = self.correlation_id
        return HalfmqPublishCommand(self.body, PublishType.PUBLISH, **self._settings)


class HalfmqPublishCommand(PublishCommand):
    """A message to be published."""

    def __init__(
        self, message: Any, kind: PublishType, topic: str = "", **settings: Unpack[PublishSettings]
    ) -> None:
        unknown = settings.keys() - PublishSettings.__annotations__.keys()
        if unknown:
            raise TypeError(f"unexpected setting {min(unknown)!r} of a message")
        super().__init__(
            body=message,
            destination=topic,
            correlation_id=settings.get("correlation_id"),
            headers=dict(settings.get("headers") or {}),
            reply_to=settings.get("reply_to", ""),
            _publish_type=kind,
        )
        self.tags, self.order_key = settings.get("tags"), settings.get("order_key")
        self.timeout = settings.get("timeout")
        self.request: RawMessage | None = None  # to which this is the reply
        self._settings = settings

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> HalfmqPublishCommand:
        """Return the command of a message that was published for any broker."""
        if isinstance(cmd, HalfmqPublishCommand):
            return cmd
        settings = PublishSettings(
            headers=cmd.headers, correlation_id=cmd.correlation_id, reply_to=cmd.reply_to
        )
        return cls(cmd.body, cmd.publish_type, cmd.destination, **settings)

    async def encoded(self, codec: Any, serializer: Any) -> tuple[bytes, dict[str, str]]:
        """Return body and properties of the message."""
        body, content_type = await codec.encode(self.body, serializer)
        ours = {
            CONTENT_TYPE: content_type,
            CORRELATION_ID: self.correlation_id,
            REPLY_TO: self.reply_to,
            EMPTY_BODY: None if body else "1",
        }
        given = {str(key): str(value) for key, value in (self.headers or {}).items()}
        return body or b"\0", given | {key: value for key, value in ours.items() if value}

    def message(self, body: bytes, properties: Mapping[str, str]) -> Message:
        """Return the message for the client."""
        return Message(
            self.destination,
            body,
            tags=self.tags,
            keys=self._settings.get("keys") or [],
            properties=properties,
            deliver_after=self._settings.get("deliver_after"),
            deliver_at=self._settings.get("deliver_at"),
        )
