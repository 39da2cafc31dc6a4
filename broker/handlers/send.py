"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).

Plain messages take the short path of `plain_send`. What it leaves is served here by every rule: new
topics, half messages, delayed ones, retries, batches, refusals. Checks and answers are those of
RocketMQ's `SendMessageProcessor`, in its order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.remoting.replies import encode_send_reply
from halfmq.store.draft import AlikeUnits, Appended, AppendedBatch, Batch, Draft, Units
from halfmq.store.format import topics as topic_names
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK
from halfmq.store.format.ids import UniqueKeyFactory, offset_message_id, offset_message_ids
from halfmq.store.format.properties import (
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    decode_properties,
    encode_properties,
    get_property,
    tags_code,
)

from ..access import requirements
from ..connection import Connection, Handler
from ..delay import delay_level, with_properties
from ..errors import RequestRefusedError
from ..group_append import GroupAppend
from ..router import answer
from ..topics import TopicConfig
from ..transaction.admission import REFUSAL_FIELDS, fault_in_batch, without_brokers_own
from ..transaction.twins import FirstHalf
from . import plain_send
from .batch_units import read_units
from .plain_send import PROPERTIES_SIZE_MAX, PlainSends
from .subjects import prepared_by, require


class Topics(Protocol):
    """What sending needs of the topic table."""

    def get(self, name: str) -> TopicConfig | None: ...

    def create_on_send(
        self, topic: str, default_topic: str, queue_nums: int, remote: str
    ) -> TopicConfig | None: ...


class Log(Protocol):
    """What sending needs of the store."""

    def append(self, group: Sequence[Draft], *, contiguous: bool = False) -> list[Appended]: ...

    def append_batch(self, batch: Batch) -> AppendedBatch: ...


class Overload(Protocol):
    """Whether the disk has fallen too far behind to take messages."""

    refusing: bool

    @property
    def refusal(self) -> str: ...


class Transactions(plain_send.Transactions, Protocol):
    """What sending needs of the transaction service."""

    def prepare(
        self, message: Draft, producer_group: str, unique_key: str, connection: Connection
    ) -> Appended: ...

    def refuse_prepares(self, group: str, broker_address: str) -> None: ...

    def twin(
        self,
        messages: Sequence[tuple[Draft, str]],
        producer_group: str,
        connection: Connection,
    ) -> list[FirstHalf] | None: ...

    def committed_message(self, half_message_id: str) -> Draft | None: ...


_OF_RETRIES: Final = (
    PROPERTY_RETRY_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_WAIT,
    PROPERTY_DELAY,
)
"""Properties of a retry that the message it repeats does not have."""

Delay = Callable[[Draft], Draft]
Retry = Callable[[SendMessageRequestHeader, Draft, int], Draft]


class SendHandler:
    """Stores what producers send."""

    def __init__(
        self,
        log: Log,
        group: GroupAppend,
        topics: Topics,
        transactions: Transactions,
        overload: Overload,
        *,
        delayed: Delay,
        retried: Retry,
        cluster_name: str,
        max_message_size: int,
        record_size_max: int,
        sync_flush: bool,
        unique_keys: UniqueKeyFactory,
    ) -> None:
        self._append = log.append
        self._append_batch = log.append_batch
        self._topics = topics
        self._get_topic = topics.get
        self._transactions = transactions
        self._overload = overload
        self._delayed, self._retried = delayed, retried
        self._max_message_size = max_message_size
        self._sync_flush = sync_flush
        self._unique_keys = unique_keys
        # What every stored message says of the broker that took it. Consumers of request-reply
        # messages find the reply topic by CLUSTER.
        self._broker_properties = (
            f"MSG_REGION\x01DefaultRegion\x02CLUSTER\x01{cluster_name}\x02TRACE_ON\x01true\x02"
        ).encode()
        self._group = group
        self._plain = PlainSends(
            group,
            topics,
            transactions,
            broker_properties=self._broker_properties,
            max_message_size=max_message_size,
            record_size_max=record_size_max,
            sync_flush=sync_flush,
            send_alone=partial(answer, self._send_by_every_rule),
        )
        self._take = self._plain.take

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
        }

    def send(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Store one message or one batch; the answer waits for the disk when it has to."""
        if self._overload.refusing:
            self.refuse()
        if self._take(request, connection):
            return None
        self._group.append_staged()  # what came before stays before
        return self._send_by_every_rule(request, connection)

    def refuse(self) -> None:
        """Raise if messages are refused now; decisions are served all the same.

        Raises:
            RequestRefusedError: SYSTEM_BUSY, on which clients try again, here or elsewhere.
        """
        if self._overload.refusing:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_BUSY, self._overload.refusal, REFUSAL_FIELDS
            )

    def _send_by_every_rule(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        header = request.header
        assert isinstance(header, SendMessageRequestHeader)
        queue_id = self._admit(header, connection)
        if header.batch:
            return self._send_batch(request, header, queue_id, connection)
        draft, unique_key = self._drafted(header, queue_id, request.body, connection)
        raw = draft.properties
        if (
            b"TRAN_MSG\x01" in raw
            or b"DELAY\x01" in raw
            or b"TIMER_" in raw
            or header.sys_flag & TRANSACTION_MASK
            or header.topic[0] == "%"
        ):
            return self._special(request, header, draft, unique_key, connection)
        appended = self._append((draft,))[0]
        return self._answer(request, draft, appended, unique_key, connection)

    def drafted(
        self, header: SendMessageRequestHeader, body: bytes, connection: Connection
    ) -> tuple[Draft, str]:
        """Return what a single message is to be stored as, and its unique key.

        Raises:
            RequestRefusedError: It cannot be stored.
        """
        return self._drafted(header, self._admit(header, connection), body, connection)

    def _drafted(
        self,
        header: SendMessageRequestHeader,
        queue_id: int,
        body: bytes,
        connection: Connection,
    ) -> tuple[Draft, str]:
        if not body or len(body) > self._max_message_size:
            raise self._body_refusal(body)
        raw = header.properties.encode() if header.properties else b""
        if raw and raw[-1] != 2:
            raw += b"\x02"
        raw = without_brokers_own(raw)
        unique = get_property(raw, b"UNIQ_KEY")
        if unique is None:
            unique_key = self._unique_keys.create()
            raw += b"UNIQ_KEY\x01%s\x02" % unique_key.encode()
        else:
            unique_key = unique.decode()
        if b"CLUSTER\x01" not in raw:
            raw += self._broker_properties
        if len(raw) > PROPERTIES_SIZE_MAX:
            raise self._illegal(len(body), len(raw))
        return Draft(
            topic=header.topic,
            queue_id=queue_id,
            body=body,
            properties=raw,
            tags_code=tags_code(raw),
            flag=header.flag,
            sys_flag=header.sys_flag & ~HOSTS_MASK,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
        ), unique_key

    def _answer(
        self,
        request: RemotingCommand,
        draft: Draft,
        appended: Appended,
        unique_key: str,
        connection: Connection,
    ) -> bytes | None:
        if request.flag & FLAG_ONE_WAY:
            return None
        reply = encode_send_reply(
            request,
            offset_message_id(draft.store_host, appended.physical_offset),
            draft.queue_id,
            appended.queue_offset,
            unique_key,
        )
        if self._sync_flush and b"WAIT\x01false\x02" not in draft.properties:
            connection.reply_when_durable(appended.physical_offset + appended.size, reply)
            return None
        return reply

    # --- the ways off the short path

    def _special(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        draft: Draft,
        unique_key: str,
        connection: Connection,
    ) -> bytes | None:
        """Serve a half, delayed or retried message, or find that it is none of these."""
        properties = decode_properties(draft.properties)
        level = delay_level(draft.properties)
        # A consumer's retry of a committed message still carries TRAN_MSG; it is no half message.
        # Source: SendMessageProcessor, since 4.6.1.
        is_retry = draft.reconsume_times > 0 and level > 0
        if properties.get("TRAN_MSG", "").lower() == "true" and not is_retry:
            return self._prepare(request, header, draft, properties, unique_key, connection)
        if header.sys_flag & TRANSACTION_MASK:
            raise _refused_bits(draft, level, properties.get("TRAN_MSG"))
        _refuse_timer(properties)
        answered = draft
        if header.topic.startswith(topic_names.RETRY_PREFIX):
            draft = self._retry(
                header, self._vouched(request, header, draft, unique_key), request.version
            )
        if level > 0 and not draft.topic.startswith(topic_names.DEAD_LETTER_PREFIX):
            draft = self._delayed(draft)
        appended = self._append((draft,))[0]
        if draft.topic == topic_names.SCHEDULE_TOPIC:  # the client asked for another queue
            return self._answer(request, answered, appended, unique_key, connection)
        return self._answer(request, draft, appended, unique_key, connection)

    def _vouched(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        retry: Draft,
        unique_key: str,
    ) -> Draft:
        """Return a retry that a client sends, with its half message id if that can be believed.

        Clients do this when their request to send a message back has failed. One that names the
        half of a committed message in this log gets that message's content from there, as if the
        broker had stored the retry by itself; any other stays without an id.
        """
        named = get_property((header.properties or "").encode(), b"TRANSACTION_HALF_ID")
        if named is None:
            return retry
        message = self._transactions.committed_message(named.decode())
        if (
            message is None
            or get_property(message.properties, b"UNIQ_KEY") != unique_key.encode()
            or get_property(retry.properties, b"RETRY_TOPIC") != message.topic.encode()
        ):
            return retry
        require(request, requirements.topic(message.topic, requirements.SUB))
        own = ((name, get_property(retry.properties, name.encode())) for name in _OF_RETRIES)
        return replace(
            message,
            topic=retry.topic,
            queue_id=retry.queue_id,
            properties=with_properties(
                message.properties,
                [(name, value.decode()) for name, value in own if value is not None],
            ),
            store_host=retry.store_host,
            reconsume_times=retry.reconsume_times,
        )

    def _retry(self, header: SendMessageRequestHeader, draft: Draft, version: int) -> Draft:
        try:
            return self._retried(header, draft, version)
        except RequestRefusedError as refusal:
            raise RequestRefusedError(refusal.code, refusal.remark, REFUSAL_FIELDS) from refusal

    def _prepare(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        draft: Draft,
        properties: dict[str, str],
        unique_key: str,
        connection: Connection,
    ) -> bytes | None:
        """Store a half message; its answer waits for the disk unless its topic opts out."""
        group = properties.get("PGROUP")
        if not group:
            raise RequestRefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                "a transactional message without the property PGROUP: set it to the producer "
                "group, or nobody could be asked about the transaction",
                REFUSAL_FIELDS,
            )
        draft.properties = prepared_by(draft.properties, request)
        twin = self._transactions.twin([(draft, unique_key)], group, connection)
        if twin is not None:
            (first,) = twin
        else:
            self._transactions.refuse_prepares(group, connection.broker_address)
            appended = self._transactions.prepare(draft, group, unique_key, connection)
            first = FirstHalf(
                appended.physical_offset, appended.queue_offset, draft.queue_id, draft.store_host
            )
        if request.flag & FLAG_ONE_WAY:
            return None
        reply = encode_send_reply(
            request,
            offset_message_id(first.store_host, first.physical_offset),
            first.queue_id,
            first.queue_offset,
            unique_key,
        )
        if draft.topic in self._transactions.unflushed_topics:
            return reply
        # A flush covers whole records: what is durable beyond its first byte is durable.
        connection.reply_when_durable(first.physical_offset + 1, reply)
        return None

    def _send_batch(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        queue_id: int,
        connection: Connection,
    ) -> bytes | None:
        """Store the units of a batch as records of their own, side by side."""
        self._admit_batch(request, header)
        shared = decode_properties(without_brokers_own((header.properties or "").encode()))
        # RocketMQ adds the header's properties to each unit, its id too. That we leave out: every
        # reader would take it for the id of all units, and find none by its own.
        unique_key = shared.pop("UNIQ_KEY", None)
        wait = shared.pop("WAIT", None)  # official clients set it in the units as well
        suffix = encode_properties(shared) + self._broker_properties
        waiting = b"" if wait is None else b"WAIT\x01%s\x02" % wait.encode()
        units = self._units(request.body, waiting, suffix)
        batch = Batch(
            topic=header.topic,
            queue_id=queue_id,
            units=units,
            sys_flag=header.sys_flag & ~HOSTS_MASK,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        appended = self._append_batch(batch)
        if request.flag & FLAG_ONE_WAY:
            return None
        reply = encode_send_reply(
            request,
            offset_message_ids(batch.store_host, appended.physical_offsets),
            queue_id,
            appended.queue_offset,
            unique_key,
        )
        if self._sync_flush and wait != "false":
            connection.reply_when_durable(appended.end, reply)
            return None
        self._group.reply_after_pass(connection, reply)
        return None

    def _units(self, body: bytes, missing_wait: bytes, suffix: bytes) -> Units | AlikeUnits:
        try:
            units = read_units(body, missing_wait=missing_wait, suffix=suffix)
        except ValueError as error:
            raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        if not units.bodies:
            raise RequestRefusedError(
                ResponseCode.MESSAGE_ILLEGAL, "the batch holds no message", REFUSAL_FIELDS
            )
        worst, size = units.longest_properties()
        if size > PROPERTIES_SIZE_MAX:
            raise self._illegal(len(units.bodies[worst]), size)
        return units

    # --- admission

    def _admit(self, header: SendMessageRequestHeader, connection: Connection) -> int:
        """Find or create the topic; return the queue to use."""
        topic = self._get_topic(header.topic)
        if topic is None:
            topic = self._create(header, connection)
        elif header.topic in topic_names.CLIENTS_MAY_NOT_SEND:
            raise RequestRefusedError(
                ResponseCode.NO_PERMISSION,
                f"Sending message to topic[{header.topic}] is forbidden.",
                REFUSAL_FIELDS,
            )
        queues = max(topic.read_queue_nums, topic.write_queue_nums)
        if header.queue_id < 0:
            return random.randrange(max(topic.write_queue_nums, 1))  # noqa: S311  # spreads load, no secret
        if header.queue_id >= queues:
            raise RequestRefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{header.queue_id}] is illegal, {topic} "
                f"Producer: {connection.name}",
                REFUSAL_FIELDS,
            )
        return header.queue_id

    def _create(self, header: SendMessageRequestHeader, connection: Connection) -> TopicConfig:
        try:
            topic = self._topics.create_on_send(
                header.topic, header.default_topic, header.default_topic_queue_nums, connection.name
            )
        except RequestRefusedError as refusal:
            raise RequestRefusedError(refusal.code, refusal.remark, REFUSAL_FIELDS) from refusal
        if topic is None:
            raise RequestRefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please! create it, or set "
                "autoCreateTopicEnable=true",
                REFUSAL_FIELDS,
            )
        return topic

    def _admit_batch(self, request: RemotingCommand, header: SendMessageRequestHeader) -> None:
        illegal = None
        fault = fault_in_batch((header.properties or "").encode(), "The batch")
        if header.topic.startswith(topic_names.RETRY_PREFIX):
            illegal = f"batch request does not support retry group {header.topic}"
        elif header.sys_flag & TRANSACTION_MASK:
            illegal = (
                f"{self._illegal_remark()} A batch cannot be transactional: send its messages one "
                "by one."
            )
        elif fault is not None:
            illegal = f"{self._illegal_remark()} {fault}"
        elif len(request.body) > self._max_message_size:
            raise RequestRefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"message body size exceeded, msg body size: {len(request.body)}, "
                f"maxMessageSize: {self._max_message_size}",
                REFUSAL_FIELDS,
            )
        if illegal is not None:
            raise RequestRefusedError(ResponseCode.MESSAGE_ILLEGAL, illegal, REFUSAL_FIELDS)

    def _body_refusal(self, body: bytes) -> RequestRefusedError:
        if not body:  # RocketMQ 5.3.3 fails with a null pointer and answers the same code
            return RequestRefusedError(ResponseCode.SYSTEM_ERROR, "the message has no body")
        return self._illegal(len(body), 0)

    def _illegal(self, body_size: int, properties_size: int) -> RequestRefusedError:
        return RequestRefusedError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"{self._illegal_remark()} Sent: body {body_size}B, properties {properties_size}B",
            REFUSAL_FIELDS,
        )

    def _illegal_remark(self) -> str:
        # RocketMQ's words, which people and tools know. Source: SendMessageProcessor.
        return (
            "the message is illegal, maybe msg body or properties length not matched. msg body "
            f"length limit {self._max_message_size}B, msg properties length limit 32KB."
        )


def _refused_bits(draft: Draft, level: int, marked: str | None) -> RequestRefusedError:
    """Return the refusal of a message with transaction bits that is no half message."""
    if marked is not None and marked.lower() == "true":
        # Consumers before 4.6.1 send it. RocketMQ stores it where nobody consumes it; refused, the
        # consumer keeps the message and tries again.
        remark = (
            f"a retry (reconsumeTimes={draft.reconsume_times}, DELAY={level}) of a committed "
            f"message has transaction bits in sysFlag ({draft.sys_flag:#x}): clear the bits (0xC), "
            "or send it back by CONSUMER_SEND_MSG_BACK (36)"
        )
    else:
        remark = (
            "the message has transaction bits in sysFlag without the property TRAN_MSG=true: "
            "set it to prepare a transaction, or clear the bits (0xC)"
        )
    return RequestRefusedError(ResponseCode.MESSAGE_ILLEGAL, remark, REFUSAL_FIELDS)


def _refuse_timer(properties: dict[str, str]) -> None:
    """Refuse delivery at an arbitrary time: delivering at once would be silently wrong."""
    for name in ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"):
        if name in properties:
            raise RequestRefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"delivery at a chosen time ({name}) is not offered; use a delay level (DELAY)",
                REFUSAL_FIELDS,
            )
