"""Messages to send and received messages: Message, SendResult, MessageView and their parts.

A :class:`Message` is validated by its constructor, so that a mistake shows in the line that made it
and not in an error from the broker. A received message is a view of the stored record: fields are
decoded on first access, because most consumers read only three of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, cast

from halfmq.store.format import properties as names
from halfmq.store.format.half_id import half_message_id
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.record import Record
from halfmq.store.format.topics import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
)

from .arguments import (
    INT32,
    body_error,
    check_count,
    check_delivery,
    check_kind,
    check_number,
    check_properties,
    check_seconds,
    check_tag,
    is_topic,
    join_keys,
    not_text_error,
    topic_error,
)
from .errors import ClientError, ConfigurationError, InvalidMessageError, UnreadableBodyError
from .net.compression import decompress_body

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    V = TypeVar("V", default=bytes)
else:
    from typing import TypeVar

    V = TypeVar("V")

# Source: RocketMQ MessageStoreConfig.messageDelayLevel, its default.
DELAY_SECONDS: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
DELAY_LEVEL_MAX: Final = len(DELAY_SECONDS)
DELAY_LEVELS: Final = range(DELAY_LEVEL_MAX + 1)
DEAD_LETTER_LEVEL: Final = -1
"""In place of a delay level: to the dead letters at once."""
REASON_LENGTH_MAX: Final = 255
"""Characters of a failure's reason that are kept; the wire's limit for a text in a header."""


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker; its sort order is the one of rebalancing."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


class Decision(IntEnum):
    """The outcome of a local transaction, with its value on the wire."""

    UNKNOWN = 0x0
    """Not known yet: the broker checks again later."""
    COMMIT = 0x8
    ROLLBACK = 0xC


class SendStatus(IntEnum):
    """The durability of a stored message; the value is the broker's response code."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class SendResult(NamedTuple):
    """Where a message was stored."""

    message_id: str
    """UNIQ_KEY, created by this client; for a batch, all ids joined by ``,``."""
    queue: MessageQueue
    queue_offset: int
    """For a batch, of its first message; for a half message, its offset in the half topic."""
    offset_message_id: str
    """Store address and commit-log offset, which locate the record without an index."""
    status: SendStatus = SendStatus.SEND_OK
    transaction_id: str | None = None
    region_id: str | None = None
    recall_handle: str | None = None
    """Of a message with ``deliver_after`` or ``deliver_at``: :meth:`Producer.recall` takes it."""


@dataclass(slots=True)
class Message:
    """One message to send: ``Message("orders", b"hello", tags="created", keys="o-1")``.

    The constructor validates it, so build another one instead of changing it. (It is not frozen:
    that would triple the construction time, a considerable part of a send.)

    Raises:
        InvalidMessageError: A rule of the format is broken; says which.
    """

    topic: str
    body: bytes
    tags: str | None = field(default=None, kw_only=True)
    """One tag, by which consumers may filter: no blanks, no quotes, none of ``|&!<>=(),;*?``."""
    keys: str | Sequence[str] | None = field(default=None, kw_only=True)
    """Business keys to find the message by; a string has them separated by blanks."""
    properties: Mapping[str, str] | None = field(default=None, kw_only=True)
    """The application's own names and values; RocketMQ's names are reserved."""
    delay_level: int = field(default=0, kw_only=True)
    """1 to 18: delivered after 1s 5s 10s 30s 1m … 10m 20m 30m 1h 2h; 0: at once."""
    deliver_after: timedelta | None = field(default=None, kw_only=True)
    """The delay until delivery, up to 40 days; in a transaction it counts from the commit. Brokers
    of RocketMQ 5 take up to three days, and none in a transaction."""
    deliver_at: datetime | None = field(default=None, kw_only=True)
    """The time of delivery; a time in the past means at once."""
    wait_durable: bool = field(default=True, kw_only=True)
    """False: the broker may answer before the message is on disk."""
    flag: int = field(default=0, kw_only=True)
    """A number for the application, delivered unchanged."""

    def __post_init__(self) -> None:
        if not is_topic(self.topic):
            raise InvalidMessageError(topic_error(self.topic))
        if not isinstance(self.body, bytes):
            raise InvalidMessageError(body_error(self.body))
        if not self.body:
            raise InvalidMessageError("the body is empty; RocketMQ clients refuse such messages")
        if self.delay_level != 0:
            check_number("delay_level", self.delay_level, DELAY_LEVELS)
        if self.flag != 0:
            check_number("flag", self.flag, INT32)
        if self.deliver_after is not None or self.deliver_at is not None:
            check_delivery(self)
        if self.tags is not None:
            if not isinstance(self.tags, str):
                raise not_text_error("tags", self.tags)
            check_tag(self.tags)
        if self.keys is not None:
            join_keys(self.keys)
        if self.properties is not None:
            check_properties(self.properties)


class ReceivedMessage:
    """A stored message, the base of the async and the blocking ``MessageView``."""

    __slots__ = ("_body", "_properties", "_record", "decoded", "delivery_attempt", "queue", "topic")

    topic: str
    """The topic to which it was sent, also if it comes from a retry topic."""
    queue: MessageQueue
    delivery_attempt: int
    """1 for the first delivery; each redelivery adds one."""

    def __init__(self, record: Record, broker_name: str) -> None:
        self._record = record
        self._properties: Mapping[str, str] | None = None
        self._body: bytes | None = None
        self.decoded: tuple[Any] | None = None
        """What the consumer's codec has made of the body."""
        self.topic = record.topic
        if record.topic.startswith(RETRY_PREFIX):
            self.topic = self.properties.get(names.PROPERTY_RETRY_TOPIC, record.topic)
        self.queue = MessageQueue(record.topic, broker_name, record.queue_id)
        self.delivery_attempt = record.reconsume_times + 1

    @property
    def body(self) -> bytes:
        """The bytes that were sent, decompressed.

        Raises:
            UnreadableBodyError: It cannot be decompressed; for LZ4 and ZSTD, which Java clients
                since 5.0 may choose, install ``halfmq[compression]``.
        """
        if self._body is None:
            self._body = self._decompressed_body()
        return self._body

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties: the sender's own, and those that clients and brokers have added."""
        if self._properties is None:
            self._properties = MappingProxyType(decode_properties(self._record.properties))
        return self._properties

    @property
    def tags(self) -> str:
        """The tag; ``""`` if it has none (the wire format has no empty tags)."""
        return self.properties.get(names.PROPERTY_TAGS, "")

    @property
    def keys(self) -> str:
        """The sender's keys, separated by blanks; ``""`` if it has none."""
        return self.properties.get(names.PROPERTY_KEYS, "")

    @property
    def message_id(self) -> str:
        """The sender's id (UNIQ_KEY), the same in every redelivery.

        Without one, the location of the first copy. Another message has the same id if a program
        sends it with all properties of a received one, or if a Java producer sends one ``Message``
        object several times. For deduplication use ``inbox_id``.
        """
        properties = self.properties
        own = properties.get(names.PROPERTY_UNIQ_KEY)
        return own or properties.get(names.PROPERTY_ORIGIN_MESSAGE_ID) or self._record.msg_id

    @property
    def inbox_id(self) -> str:
        """32 hex digits that identify the message: the key for a table of processed messages.

        Every message has one, with or without a transaction, from any client and broker. It is the
        same in every redelivery, in retries, after delays, in the dead letter topic, in a dead
        letter that is sent again to its topic, and in the copies that a repeated send may store.
        It is made of the sender's id, the topic and the body, so that only an equal message can
        have the same.
        """
        try:
            body = self.body
        except UnreadableBodyError:
            body = self._record.body
        topic = self._record.topic
        if topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
            topic = self.properties.get(names.PROPERTY_RETRY_TOPIC, topic)
        name = f"{self.message_id}\0{topic}\0".encode(errors="surrogatepass")
        return blake2b(name + body, digest_size=16).hexdigest()

    @property
    def failure_reason(self) -> str | None:
        """Why its last delivery failed, as given to ``retry`` or ``reject``; None if unknown.

        Only halfmq's clients and brokers have it, for redelivered messages and dead letters.
        """
        return self.properties.get(names.PROPERTY_FAILURE_REASON)

    @property
    def offset_message_id(self) -> str:
        """The location of this copy: broker address and commit-log offset."""
        return self._record.msg_id

    @property
    def transaction_id(self) -> str | None:
        """The transaction it was sent in; None for an ordinary message."""
        is_marked = self.properties.get(names.PROPERTY_TRAN_MSG, "").lower() == "true"
        # Retries and dead letters have only what the broker added to their half.
        is_part = is_marked or names.PROPERTY_TRANSACTION_ID in self.properties
        return self.message_id if is_part else None

    @property
    def half_message_id(self) -> str | None:
        """The location of the half of a committed message; None for an ordinary message.

        It is the same in every redelivery, independent of offset resets and of a producer's
        retries, and unique among committed messages. It links a message to its transaction; the
        producer has it as ``transaction.results[n].offset_message_id``. For a table of processed
        messages use ``inbox_id``, which every message has.

        Only the broker sets it: it is None for a message that was sent with another message's id in
        its properties, and for a retry that Apache RocketMQ stored.
        """
        return half_message_id(self._record)

    @property
    def queue_offset(self) -> int:
        """The offset of the message in its queue."""
        return self._record.queue_offset

    @property
    def record(self) -> Record:
        """The stored record, for fields that have no property here."""
        return self._record

    @property
    def flag(self) -> int:
        """The ``flag`` that the sender set."""
        return self._record.flag

    @property
    def born_timestamp(self) -> datetime:
        """When it was sent, by the sender's clock (UTC)."""
        return datetime.fromtimestamp(self._record.born_timestamp / 1000, UTC)

    @property
    def store_timestamp(self) -> datetime:
        """When it was stored, by the broker's clock (UTC)."""
        return datetime.fromtimestamp(self._record.store_timestamp / 1000, UTC)

    def decode(self, decode: Callable[[bytes], object]) -> str | None:
        """Decode the body for ``value``; return why that fails, or None."""
        try:
            self.decoded = (decode(self.body),)
        except Exception as error:  # noqa: BLE001 -- of any codec
            return f"not decoded: {type(error).__name__}: {error}"
        return None

    def _decompressed_body(self) -> bytes:
        try:
            return decompress_body(self._record.body, self._record.sys_flag)
        except ValueError as error:
            raise UnreadableBodyError(self.message_id, str(error)) from error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.message_id} {self.queue} #{self.queue_offset}>"


def level_of_delay(delay: timedelta) -> int:
    """Return the broker's first delay level that is not shorter.

    Raises:
        ConfigurationError: It is no timedelta, negative, or longer than the last level.
    """
    given: object = delay
    longest = timedelta(seconds=DELAY_SECONDS[-1])
    if not isinstance(given, timedelta) or not timedelta() <= given <= longest:
        raise ConfigurationError("delay", delay, f"a timedelta from 0 to {longest}")
    return bisect_left(DELAY_SECONDS, given.total_seconds()) + 1


def _cut_reason(reason: str | None) -> str:
    if reason is None:
        return ""
    check_kind("reason", reason, str)
    return reason[:REASON_LENGTH_MAX].encode(errors="replace").decode()


class Deliverer(Protocol):
    """Acknowledges or redelivers one message of a consumer."""

    @property
    def pending(self) -> bool:
        """Whether the consumer still has the message; otherwise the group gets it again."""

    async def acknowledge(self) -> bool:
        """Acknowledge the message; return False if it is too late."""

    async def redeliver(self, delay_level: int, reason: str, seconds: float | None = None) -> None:
        """Redeliver the message after a delay, or with ``DEAD_LETTER_LEVEL`` never.

        ``delay_level`` is the broker's first level that is not below ``seconds``, if these are
        given, or else the only delay.
        """

    async def extend(self, seconds: float) -> bool:
        """Do not redeliver the message within ``seconds``; return False if it is too late."""

    async def reply(self, body: bytes, properties: Mapping[str, str] | None) -> None:
        """Send the reply to a request."""


class MessageView(ReceivedMessage, Generic[V]):
    """A message for an async consumer or a transaction checker."""

    __slots__ = ("_deliverer", "settled")

    def __init__(
        self,
        record: Record,
        broker_name: str,
        deliverer: Deliverer | None = None,
        *,
        earlier_attempts: int = 0,
    ) -> None:
        super().__init__(record, broker_name)
        self._deliverer = deliverer
        self.settled = False
        """Whether ``ack``, ``retry`` or ``reject`` was called."""
        self.delivery_attempt += earlier_attempts

    @property
    def value(self) -> V:
        """What the consumer's codec has made of the body; without a codec, the body."""
        return cast("V", self.body if self.decoded is None else self.decoded[0])

    async def ack(self) -> bool:
        """Acknowledge the message: it was processed and need not be redelivered.

        The group's offset moves past it once all messages before it in the queue are acknowledged
        too, and is committed to the broker every few seconds and at close. So after a crash of this
        process some acknowledged messages are redelivered. Where members share messages, the broker
        answers, and what counts does not come again.

        Returns:
            Whether it counts. False if it is too late, which is logged: the message was already
            sent back, so that it will be redelivered; its queue has moved to another consumer of
            the group; its time is over, or the broker did not answer, where members share messages;
            or the consumer is closed. False as well if it was acknowledged before.
        """
        deliverer = self.deliverer
        self.settled = True
        return await deliverer.acknowledge()

    async def retry(
        self, delay: timedelta | None = None, *, reason: str | None = None, delay_level: int = 0
    ) -> None:
        """Report that processing failed, and have the message redelivered after a delay.

        If the broker does not accept it back, this consumer redelivers it.

        Args:
            delay: How long, up to two hours. Other brokers than halfmq have eighteen delays (1, 5,
                10 and 30 s, 1 to 10 min, 20 and 30 min, 1 and 2 h), and take the next longer one,
                unless members share messages. None: 10 s at first, growing with each attempt.
            reason: Why it failed, for ``failure_reason``; the first 255 characters are kept.
            delay_level: In place of ``delay``, the number of a delay of the broker, the first is 1.

        Raises:
            ConfigurationError: An argument cannot be used; nothing was sent.
        """
        check_count("delay_level", delay_level, DELAY_LEVELS)
        if delay is not None:
            if delay_level:
                raise ConfigurationError("delay_level", delay_level, "one of it and delay, not two")
            delay_level = level_of_delay(delay)
        await self._redeliver(delay_level, reason, delay)

    async def reject(self, reason: str | None = None) -> None:
        """Report that processing can never succeed: the message becomes a dead letter at once.

        It goes to the topic ``%DLQ%group``, with the reason. A broadcasting consumer has no such
        topic: there the message is logged and acknowledged. If the broker does not accept it, this
        consumer redelivers it.
        """
        await self._redeliver(DEAD_LETTER_LEVEL, reason)

    async def extend(self, seconds: float) -> bool:
        """Let the handler have the message for ``seconds`` from now, however long it had it.

        For a handler that takes longer than the consumer's ``ack_timeout``. It may be called again
        and again; a time that ends later is not shortened. It does not keep the queue, which may
        move to another consumer of the group; where members share messages, it keeps the message.

        Returns:
            False if it is too late, as with ``ack``: the message will be redelivered.
        """
        check_seconds("seconds", seconds)
        return await self.deliverer.extend(seconds)

    async def reply(self, body: bytes, properties: Mapping[str, str] | None = None) -> None:
        """Send a reply to the client that sent this message with ``request``, and waits for it.

        It settles nothing: acknowledge the message as any other. A request that is redelivered may
        be replied to again; its client takes the first reply.

        Raises:
            InvalidMessageError: The message asks for no reply, the body is not bytes, or a
                property cannot be used.
            BrokerRefusedError: The client that waits is not connected any more.
            ClientError: The broker cannot be reached, or does not answer.
        """
        if properties is not None:
            check_properties(properties)
        await self.deliverer.reply(body, properties)

    async def _redeliver(
        self, delay_level: int, reason: str | None, delay: timedelta | None = None
    ) -> None:
        deliverer, text = self.deliverer, _cut_reason(reason)
        self.settled = True
        seconds = None if delay is None else delay.total_seconds()
        await deliverer.redeliver(delay_level, text, seconds)

    @property
    def deliverer(self) -> Deliverer:
        """What acknowledges or redelivers the message; for the blocking client."""
        if self._deliverer is None:
            raise ClientError("a message under check is answered with a Decision, not with ack")
        return self._deliverer
