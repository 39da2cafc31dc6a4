"""Messages of FastStream and of halfmq: headers are properties, FastStream encodes bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Protocol, TypeAlias

from faststream.message import StreamMessage, decode_message
from faststream.response import PublishCommand, PublishType, Response

from halfmq.client import Message

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


class RawMessage(Protocol):
    """What the adapter uses of a ``halfmq.client.MessageView``; a test broker has its own."""

    @property
    def topic(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def message_id(self) -> str: ...

    async def ack(self) -> object: ...
    async def retry(self, delay: timedelta | None = None, *, reason: str | None = None) -> None: ...
    async def reject(self, reason: str | None = None) -> None: ...
    async def reply(self, body: bytes, properties: Mapping[str, str] | None = None) -> None: ...


@dataclass
class FakeMessage:
    """A message that no broker has seen."""

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
    """A handler's return value with settings of its message; see `HalfmqPublishCommand`."""

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(body=body, headers=headers, correlation_id=correlation_id)
        self._settings = settings

    def as_publish_command(self) -> HalfmqPublishCommand:
        return HalfmqPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            _publish_type=PublishType.PUBLISH,
            **self._settings,
        )


class HalfmqPublishCommand(PublishCommand):
    """A message to be published."""

    def __init__(
        self,
        message: Any,
        *,
        topic: str = "",
        correlation_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        reply_to: str = "",
        tags: str | None = None,
        keys: list[str] | None = None,
        order_key: str | None = None,
        deliver_after: timedelta | None = None,
        deliver_at: datetime | None = None,
        timeout: float | None = None,
        _publish_type: PublishType,
    ) -> None:
        """``timeout`` is in seconds; the settings are those of ``halfmq.client.Message``."""
        super().__init__(
            body=message,
            destination=topic,
            correlation_id=correlation_id,
            headers=dict(headers or {}),
            reply_to=reply_to,
            _publish_type=_publish_type,
        )
        self.tags, self.keys, self.order_key = tags, keys, order_key
        self.deliver_after, self.deliver_at = deliver_after, deliver_at
        self.timeout = timeout
        self.request: RawMessage | None = None  # to which this is the reply

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> HalfmqPublishCommand:
        """Return the command of a message that was published for any broker."""
        if isinstance(cmd, HalfmqPublishCommand):
            return cmd
        return cls(
            cmd.body,
            topic=cmd.destination,
            correlation_id=cmd.correlation_id,
            headers=cmd.headers,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )

    def properties(self, content_type: str | None, *, empty: bool) -> dict[str, str]:
        """Return the properties of the message."""
        ours = {
            CONTENT_TYPE: content_type,
            CORRELATION_ID: self.correlation_id,
            REPLY_TO: self.reply_to,
            EMPTY_BODY: "1" if empty else None,
        }
        given = {str(key): str(value) for key, value in (self.headers or {}).items()}
        return given | {key: value for key, value in ours.items() if value}

    def message(self, body: bytes, content_type: str | None) -> Message:
        """Return the message for the client."""
        return Message(
            self.destination,
            body or b"\0",
            tags=self.tags,
            keys=self.keys or [],
            properties=self.properties(content_type, empty=not body),
            deliver_after=self.deliver_after,
            deliver_at=self.deliver_at,
        )
