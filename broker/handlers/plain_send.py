"""The short path of sending: single messages without anything special about them, and halves.

Nearly every message is one: its topic exists, and its properties ask for no delay. Such a message
is staged by one look at the topic table and one at the *shape* of its properties, which is all of
them but the unique key: a producer sends the same few shapes over and over, so what they mean is
worked out once. Everything else is left to `send`, which knows every rule; nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final, NamedTuple, Protocol

import msgspec

from halfmq.remoting.codes import FLAG_ONE_WAY
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.remoting.replies import encode_send_reply
from halfmq.store.draft import Appended, Draft
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.index import UNIQUE_KEY_SIZE
from halfmq.store.format.properties import get_property, tags_code
from halfmq.store.format.topics import CLIENTS_MAY_NOT_SEND

from ..connection import Connection, Handler
from ..group_append import GroupAppend
from ..topics import TopicConfig
from ..transaction.admission import FINAL_RESERVE, RECORD_RESERVE, UNIQUE_KEY_SIZE_MAX
from ..transaction.half import half_draft
from ..transaction.twins import Twins
from .subjects import prepared_by

PROPERTIES_SIZE_MAX: Final = 32_767
"""Bytes of all properties of a record, whose length field is an int16."""

SHAPES_MAX: Final = 4_096
"""Shapes remembered, about 500 bytes each; with that many of them, producers put something of their
own into every message, and remembering serves nobody."""

_UNIQUE_KEY: Final = "UNIQ_KEY\x01"
_NOT_PLAIN: Final = (b"DELAY\x01", b"TIMER_", b"TRANSACTION_", _UNIQUE_KEY.encode())


class Shape(NamedTuple):
    """What the properties around a unique key mean."""

    plain: bool  # False: whoever knows every rule has to look at the message
    suffix: bytes  # what the broker adds
    has_keys: bool  # beside the unique one
    tags_code: int
    waits: bool  # for the disk, unless the broker flushes by itself
    producer_group: str  # of a half message; empty: the message is none


class StagedMessage(msgspec.Struct, gc=False):
    """A message that will be appended as it is."""

    draft: Draft
    request: RemotingCommand
    connection: Connection
    unique_key: str
    waits: bool

    def appended(self, one: Appended) -> bytes | None:
        """Answer it, when it is on disk if it has to be."""
        request = self.request
        if request.flag & FLAG_ONE_WAY:
            return None
        draft = self.draft
        reply = encode_send_reply(
            request,
            offset_message_id(draft.store_host, one.physical_offset),
            draft.queue_id,
            one.queue_offset,
            self.unique_key,
        )
        if self.waits:
            self.connection.reply_when_durable(one.physical_offset + one.size, reply)
            return None
        return reply

    def refused(self) -> None:
        """Nothing was changed yet."""


class StagedHalf(msgspec.Struct, gc=False):
    """A transactional message whose half will be appended."""

    draft: Draft
    request: RemotingCommand
    connection: Connection
    unique_key: str
    message: Draft  # as the producer sent it
    producer_group: str
    twin_key: int
    transactions: Transactions
    waits: bool  # for the disk; not when the topic opts out

    def appended(self, one: Appended) -> bytes | None:
        """Enter the transaction; its answer waits for the disk unless its topic opts out."""
        request, connection, message = self.request, self.connection, self.message
        self.transactions.prepared(
            message, self.draft, one, self.producer_group, self.twin_key, connection
        )
        if request.flag & FLAG_ONE_WAY:
            return None
        reply = encode_send_reply(
            request,
            offset_message_id(message.store_host, one.physical_offset),
            message.queue_id,
            one.queue_offset,
            self.unique_key,
        )
        if not self.waits:
            return reply
        connection.reply_when_durable(one.physical_offset + one.size, reply)
        return None

    def refused(self) -> None:
        """Have the same half sent again taken for a new one."""
        self.transactions.twins.forget(self.twin_key)


class Topics(Protocol):
    """What sending needs of the topic table."""

    def get(self, name: str) -> TopicConfig | None: ...


class Transactions(Protocol):
    """What the short path needs of the transaction service."""

    def takes_prepares(self, group: str) -> bool: ...

    @property
    def twins(self) -> Twins: ...

    @property
    def unflushed_topics(self) -> Container[str]: ...

    def prepared(
        self,
        message: Draft,
        half: Draft,
        appended: Appended,
        producer_group: str,
        key: int,
        connection: Connection,
    ) -> None: ...


class PlainSends:
    """Stages messages that need no second look."""

    def __init__(
        self,
        group: GroupAppend,
        topics: Topics,
        transactions: Transactions,
        *,
        broker_properties: bytes,
        max_message_size: int,
        record_size_max: int,
        sync_flush: bool,
        send_alone: Handler,
    ) -> None:
        """`send_alone` serves one message by every rule, when its group could not be appended."""
        self._group = group
        self._get_topic = topics.get
        self._transactions = transactions
        self._twins = transactions.twins
        self._unflushed_topics = transactions.unflushed_topics
        self._broker_properties = broker_properties
        self._max_message_size = max_message_size
        self._half_size_max = record_size_max - RECORD_RESERVE
        self._sync_flush = sync_flush
        self._send_alone = send_alone
        self._shapes: dict[tuple[str, str], Shape] = {}

    def take(self, request: RemotingCommand, connection: Connection) -> bool:
        """Stage the message if it is a plain one; it is answered when it has been appended."""
        header = request.header
        # The header is the plain dict when it did not fit its class.
        if not isinstance(header, SendMessageRequestHeader):
            return False
        name = header.topic
        topic = self._get_topic(name)
        body = request.body
        text = header.properties
        if (
            topic is None
            or name in CLIENTS_MAY_NOT_SEND
            or name[0] == "%"
            or not 0 <= header.queue_id < topic.write_queue_nums
            or header.batch
            or not body
            or len(body) > self._max_message_size
            or not text
        ):
            return False
        head, _, behind = text.partition(_UNIQUE_KEY)
        unique_key, ended, tail = behind.partition("\x02")
        if not ended or not unique_key or (head and head[-1] != "\x02"):
            return False
        shape = self._shapes.get((head, tail)) or self._learn(head, tail)
        raw = text.encode() + shape.suffix
        transactional = header.sys_flag & TRANSACTION_MASK or shape.producer_group
        if (
            not shape.plain
            or len(raw) > PROPERTIES_SIZE_MAX
            or (
                transactional
                and not self._may_prepare(header, shape, unique_key, len(body), len(raw))
            )
        ):
            return False
        if transactional:
            raw = prepared_by(raw, request)
        has_usual_key = len(unique_key) == UNIQUE_KEY_SIZE and unique_key.isascii()
        draft = Draft(
            topic=name,
            queue_id=header.queue_id,
            body=body,
            properties=raw,
            tags_code=shape.tags_code,
            flag=header.flag,
            sys_flag=header.sys_flag & ~HOSTS_MASK,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
            unique_key=unique_key if has_usual_key and not shape.has_keys else None,
        )
        if not transactional:
            waits = shape.waits and self._sync_flush
            staged = StagedMessage(draft, request, connection, unique_key, waits)
            self._group.stage(staged, self._send_alone)
            return True
        key = self._twins.expect(shape.producer_group, unique_key)
        if key == 0:
            return False
        half = StagedHalf(
            half_draft(draft, unique_key),
            request,
            connection,
            unique_key,
            draft,
            shape.producer_group,
            key,
            self._transactions,
            name not in self._unflushed_topics,
        )
        self._group.stage(half, self._send_alone)
        return True

    def _may_prepare(
        self,
        header: SendMessageRequestHeader,
        shape: Shape,
        unique_key: str,
        body_size: int,
        properties_size: int,
    ) -> bool:
        """Tell whether a message with marks of a transaction is certainly a half message."""
        return (
            shape.producer_group != ""
            and len(unique_key) <= UNIQUE_KEY_SIZE_MAX
            and properties_size <= PROPERTIES_SIZE_MAX - FINAL_RESERVE
            and body_size + properties_size <= self._half_size_max
            and not header.reconsume_times
            and self._transactions.takes_prepares(shape.producer_group)
        )

    def _learn(self, head: str, tail: str) -> Shape:
        """Work out what a shape means, and remember it."""
        if len(self._shapes) >= SHAPES_MAX:
            self._shapes.clear()
        around = (head + tail).encode()
        closing = b"" if not tail or tail[-1] == "\x02" else b"\x02"
        known = b"" if b"CLUSTER\x01" in around else self._broker_properties
        is_half = get_property(around, b"TRAN_MSG") == b"true"
        group = get_property(around, b"PGROUP") if is_half else None
        shape = self._shapes[head, tail] = Shape(
            plain=not any(name in around for name in _NOT_PLAIN)
            and (b"TRAN_MSG\x01" not in around or group is not None),
            suffix=closing + known,
            has_keys=b"KEYS\x01" in around,
            tags_code=tags_code(around),
            waits=b"WAIT\x01false\x02" not in around + b"\x02",
            producer_group="" if group is None else group.decode(),
        )
        return shape
