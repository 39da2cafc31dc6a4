"""Retries of failed messages: CONSUMER_SEND_MSG_BACK (36), and retries sent by clients.

The message is stored again for its group: in the retry topic, with a delay that grows with each
retry, or in the dead-letter topic after too many retries. A client whose request 36 fails sends the
message to the retry topic itself; `retried` applies the same rules to it.

Source: RocketMQ `AbstractSendMessageProcessor.consumerSendMsgBack`, `handleRetryAndDLQ`.
"""

import logging
import random
from collections.abc import Callable
from typing import Final

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.codes import VERSION, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import ConsumerSendMsgBackRequestHeader, SendMessageRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.flags import TransactionType, with_transaction_type
from halfmq.store.format.half_id import half_message_id
from halfmq.store.format.properties import (
    PROPERTIES_SIZE_MAX,
    PROPERTY_DELAY,
    PROPERTY_FAILURE_QUEUE,
    PROPERTY_FAILURE_REASON,
    PROPERTY_FAILURE_TIME,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRAN_MSG,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_WAIT,
    decode_properties,
    get_property,
    tags_code,
    without_properties,
)
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import DELAYED_TOPICS, HALF_TOPIC, OP_TOPIC, RETRY_PREFIX
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ...access import requirements
from ...delay.levels import DelayLevels, with_properties
from ...delay.timer_records import TimerError, TimerRule
from ...disk.send_refusal import SendRefusal
from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.group_table import GroupConfig, GroupTable
from ...tables.queue_locks import QueueLocks
from ...tables.topic_config import TopicConfig
from ...tables.topic_table import TopicTable
from ..access_checks import require

logger = logging.getLogger(__name__)

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry if the client names none; each further retry has the next one."""

MAX_RECONSUME_TIMES_SINCE: Final = 121
"""MQVersion ordinal (3.4.9) from which a client's own limit counts."""

_RESERVED_SIZE: Final = 1024
"""Bytes of properties that a copy gets while it waits and when it is delivered: topics and numbers.
The reason of a failure must leave room for them."""

_NEVER_CONSUMED: Final = DELAYED_TOPICS | {HALF_TOPIC, OP_TOPIC}
"""Topics that no consumer reads. Sending one of their records back would reveal a half message."""


@define(eq=False, repr=False)
class SendBackHandler(Handlers):
    """Stores failed messages again for their group."""

    _store: MessageStore
    _topics: TopicTable
    _groups: GroupTable
    _levels: DelayLevels
    _timer_rule: TimerRule
    _locks: QueueLocks
    _refusal: SendRefusal
    _require_room: Callable[[], None]
    _sync_flush: bool
    _now_ms: Callable[[], int]
    # Called with topic and group of each message.
    _count: Callable[[str, str], None] = lambda _topic, _group: None

    @serves(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Store the record at an offset again for its group.

        Raises:
            RequestRefusedError: There is no such record or group, the disk is too slow or full, or
                too many messages wait.
                The consumer then keeps the message and consumes it again a little later.
        """
        if self._refusal.refusing:
            raise self._refusal.refusal()
        header = request.header_as(ConsumerSendMsgBackRequestHeader)
        config = self._group(header.group)
        if config.retry_queue_nums <= 0:  # the group is configured without retries
            return encode_reply(request)
        encoded = self._store.named_record(header.offset)
        record = None if encoded is None else decode_record(encoded, check_crc=False)
        if record is None or record.topic in _NEVER_CONSUMED:
            raise RequestRefusedError(f"look message by offset failed, {header.offset}")
        require(request, requirements.topic(record.topic, requirements.SUB))
        limit = _delivery_limit(config, header.max_reconsume_times, request.version)
        is_dead = header.delay_level < 0 or record.reconsume_times >= limit
        level = header.delay_level or FIRST_RETRY_LEVEL + record.reconsume_times
        copy = retry_copy(record, 0 if is_dead else level, connection.store_host)
        if header.reason is not None:
            copy = _with_failure(copy, record, header.reason, self._now_ms())
        message = (
            self._dead_letter(copy, config)
            if is_dead
            else self._retry(copy, config, header.delay_ms)
        )
        (appended,) = self._store.append((message,))
        of_topic = get_property(message.properties, PROPERTY_RETRY_TOPIC.encode())
        self._count((of_topic or b"").decode(), header.group)
        # Wait for the disk despite the property WAIT=false, because the client drops the message.
        durable_at = appended.end if self._sync_flush else 0
        connection.respond(request, encode_reply(request), durable_at)
        return None

    def retried(
        self, header: SendMessageRequestHeader, message: AppendRequest, version: int = VERSION
    ) -> AppendRequest:
        """Return a client's retry, moved to the dead-letter topic after too many deliveries.

        `version` is the client's. The topic of `message` begins with `%RETRY%`.

        Raises:
            RequestRefusedError: The group does not exist and may not be created.
        """
        config = self._group(message.topic.removeprefix(RETRY_PREFIX))
        limit = _delivery_limit(config, header.max_reconsume_times, version)
        # A group that consumes in order does not retry this way: later messages would overtake it.
        if message.reconsume_times <= limit and not self._locks.any_held(config.name):
            return message
        return self._dead_letter(message, config)

    def _group(self, name: str) -> GroupConfig:
        config = self._groups.ensure(name)
        if config is None:
            raise RequestRefusedError(
                f"subscription group not exist, {name} "
                "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.",
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            )
        return config

    def _retry(
        self, message: AppendRequest, config: GroupConfig, delay_ms: int | None
    ) -> AppendRequest:
        self._require_room()
        topic = _writable(self._topics.ensure_retry(config.name, config.retry_queue_nums))
        queue_id = random.randrange(config.retry_queue_nums)  # noqa: S311  # spreads load, no secret
        message = replace(message, topic=topic.name, queue_id=queue_id)
        if delay_ms is None:
            return self._levels.delayed(message)
        try:
            return self._timer_rule.retried(message, delay_ms)
        except TimerError as error:
            raise RequestRefusedError(str(error), ResponseCode.MESSAGE_ILLEGAL) from error

    def _dead_letter(self, message: AppendRequest, config: GroupConfig) -> AppendRequest:
        topic = _writable(self._topics.ensure_dead_letter(config.name))
        logger.warning(
            "event=dead_letter group=%s from=%s reconsume_times=%d",
            config.name,
            message.topic,
            message.reconsume_times,
        )
        return replace(
            message,
            topic=topic.name,
            queue_id=0,
            properties=with_properties(message.properties, ((PROPERTY_DELAY, "0"),)),
        )


def _delivery_limit(config: GroupConfig, client_limit: int | None, version: int) -> int:
    """Return after how many retries a message becomes a dead letter.

    A client that names no limit, or -1 as in RocketMQ's clients, leaves it to the group.
    """
    if client_limit is None or client_limit < 0 or version < MAX_RECONSUME_TIMES_SINCE:
        return config.retry_max_times
    return client_limit


def _writable(topic: TopicConfig) -> TopicConfig:
    if not topic.writable:
        raise RequestRefusedError(
            f"the topic[{topic.name}] sending message is forbidden", ResponseCode.NO_PERMISSION
        )
    return topic


def retry_copy(record: Record, level: int, store_host: bytes) -> AppendRequest:
    """Return the copy of a consumed record that is its retry, not yet in the retry topic."""
    properties = decode_properties(record.properties)
    changed = {
        PROPERTY_RETRY_TOPIC: properties.get(PROPERTY_RETRY_TOPIC, record.topic),
        PROPERTY_ORIGIN_MESSAGE_ID: properties.get(PROPERTY_ORIGIN_MESSAGE_ID, record.msg_id),
        PROPERTY_WAIT: "false",
        PROPERTY_DELAY: str(level),
    }
    # Readers trust the half's id of a retry, so a value written by a sender must not remain. The
    # mark of a half must not either: a dead letter is sent again with its properties.
    # An earlier failure is not this one.
    removed = (
        PROPERTY_TRANSACTION_HALF_ID,
        PROPERTY_TRAN_MSG,
        PROPERTY_FAILURE_REASON,
        PROPERTY_FAILURE_TIME,
    )
    kept = without_properties(record.properties, removed)
    half_id = half_message_id(record)
    if half_id is not None:
        changed[PROPERTY_TRANSACTION_HALF_ID] = half_id
        # An old RocketMQ has not written it; without it, readers do not trust the half's id.
        changed[PROPERTY_TRANSACTION_ID] = properties.get(PROPERTY_TRANSACTION_ID, half_id)
    return AppendRequest(
        topic=record.topic,
        queue_id=record.queue_id,
        body=record.body,
        properties=with_properties(kept, changed.items()),
        tags_code=tags_code(record.properties),
        flag=record.flag,
        # The record may be the final message of a commit, but its copy must decide nothing.
        sys_flag=with_transaction_type(record.sys_flag, TransactionType.NONE),
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=store_host,
        reconsume_times=record.reconsume_times + 1,
    )


def _with_failure(
    message: AppendRequest, record: Record, reason: str, now_ms: int
) -> AppendRequest:
    """Return the copy of a failed record with when and why it failed, and its first queue.

    A reason that would make the properties too long is left out with the rest.
    """
    changed = [(PROPERTY_FAILURE_TIME, str(now_ms))]
    if reason:
        # A separator would begin a property, such as one that only brokers may write.
        shown = reason.replace("\x01", " ").replace("\x02", " ")
        changed.append((PROPERTY_FAILURE_REASON, shown))
    if not record.topic.startswith(RETRY_PREFIX):
        changed.append((PROPERTY_FAILURE_QUEUE, str(record.queue_id)))
    properties = with_properties(message.properties, changed)
    if len(properties) > PROPERTIES_SIZE_MAX - _RESERVED_SIZE:
        return message
    return replace(message, properties=properties)
