"""Retries of failed messages: CONSUMER_SEND_MSG_BACK (36), and retries sent by clients.

The message is stored again for its group: in the retry topic, with a delay that grows with each
retry, or in the dead-letter topic after too many retries. Clients whose request 36 fails send the
message to the retry topic themselves; `retried` applies the same rules to those.

Source: RocketMQ `AbstractSendMessageProcessor.consumerSendMsgBack`, `handleRetryAndDLQ`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from halfmq.remoting.codes import VERSION, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import ConsumerSendMsgBackRequestHeader, SendMessageRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.flags import TransactionType, with_transaction_type
from halfmq.store.format.half_id import half_message_id
from halfmq.store.format.properties import (
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_WAIT,
    decode_properties,
    get_property,
    tags_code,
    without_properties,
)
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ...access import requirements
from ...delay.levels import DelayLevels, with_properties
from ...disk.send_refusal import SendRefusal
from ...errors import RequestRefusedError
from ...ports import Connection, Handler, Store
from ...tables.groups import GroupConfig, GroupTable
from ...tables.queue_locks import QueueLocks
from ...tables.topic_config import TopicConfig
from ...tables.topics import TopicTable
from ..subjects import require

logger = logging.getLogger(__name__)

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry when the client leaves it to us; each round takes the next."""

MAX_RECONSUME_TIMES_SINCE: Final = 121
"""MQVersion ordinal (3.4.9) from which a client's own limit counts."""

_NEVER_CONSUMED: Final = frozenset({HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC})
"""Topics that no consumer reads. Sending one of their records back would let a half message out."""


class SendBackHandler:
    """Stores failed messages for their group again."""

    def __init__(
        self,
        store: Store,
        topics: TopicTable,
        groups: GroupTable,
        levels: DelayLevels,
        locks: QueueLocks,
        refusal: SendRefusal,
        *,
        sync_flush: bool,
        count: Callable[[str, str], None] = lambda _topic, _group: None,
    ) -> None:
        """Wire it; ``count`` is called with topic and group of each message sent back."""
        self._store = store
        self._topics = topics
        self._groups = groups
        self._levels = levels
        self._locks = locks
        self._refusal = refusal
        self._sync_flush = sync_flush
        self._count = count

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Store the record at an offset for its group again.

        Raises:
            RequestRefusedError: Also while messages are refused: the consumer keeps the message
                and consumes it again by itself, a little later.
        """
        if self._refusal.refusing:
            raise self._refusal.refusal()
        header = request.header
        assert isinstance(header, ConsumerSendMsgBackRequestHeader)
        config = self._group(header.group)
        if config.retry_queue_nums <= 0:  # the group wants no retries
            return encode_reply(request)
        record = self._store.reader.record_at(header.offset) if header.offset >= 0 else None
        if record is None or record.topic in _NEVER_CONSUMED:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}"
            )
        require(request, requirements.topic(record.topic, requirements.SUB))
        limit = _limit(config, header.max_reconsume_times, request.version)
        if header.delay_level < 0 or record.reconsume_times >= limit:
            message = self._dead(record, config, connection.store_host)
        else:
            message = self._retry(record, config, header.delay_level, connection.store_host)
        (appended,) = self._store.append((message,))
        of_topic = get_property(message.properties, PROPERTY_RETRY_TOPIC.encode())
        self._count((of_topic or b"").decode(), header.group)
        # Not before it is durable: the client forgets the message, although WAIT=false is in it.
        durable_at = appended.end if self._sync_flush else 0
        connection.respond(request, encode_reply(request), durable_at)
        return None

    def retried(
        self, header: SendMessageRequestHeader, message: AppendRequest, version: int = VERSION
    ) -> AppendRequest:
        """Return a retry that a client sends, moved to the dead letters if it must be.

        `version` is the client's. Call it for topics that begin with `%RETRY%`.

        Raises:
            RequestRefusedError: The group does not exist and may not be created.
        """
        config = self._group(message.topic.removeprefix(RETRY_PREFIX))
        limit = _limit(config, header.max_reconsume_times, version)
        # A group that consumes in order does not retry this way: its message would be overtaken.
        if message.reconsume_times <= limit and not self._locks.any_held(config.name):
            return message
        return self._moved_to_dead_letters(message, config)

    def _group(self, name: str) -> GroupConfig:
        config = self._groups.ensure(name)
        if config is None:
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {name} "
                "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.",
            )
        return config

    def _retry(
        self, record: Record, config: GroupConfig, level: int, store_host: bytes
    ) -> AppendRequest:
        topic = _writable(self._topics.ensure_retry(config.name, config.retry_queue_nums))
        message = _again(record, level or FIRST_RETRY_LEVEL + record.reconsume_times, store_host)
        queue_id = random.randrange(config.retry_queue_nums)  # noqa: S311  # spreads load, no secret
        return self._levels.delayed(replace(message, topic=topic.name, queue_id=queue_id))

    def _dead(self, record: Record, config: GroupConfig, store_host: bytes) -> AppendRequest:
        return self._moved_to_dead_letters(_again(record, 0, store_host), config)

    def _moved_to_dead_letters(self, message: AppendRequest, config: GroupConfig) -> AppendRequest:
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


def _limit(config: GroupConfig, of_client: int | None, version: int) -> int:
    """Return after how many deliveries a message is dead."""
    if of_client is None or version < MAX_RECONSUME_TIMES_SINCE:
        return config.retry_max_times
    return of_client


def _writable(topic: TopicConfig) -> TopicConfig:
    if not topic.writable:
        raise RequestRefusedError(
            ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
        )
    return topic


def _again(record: Record, level: int, store_host: bytes) -> AppendRequest:
    """Return a consumed record as the message that stores it again, in its old topic still."""
    properties = decode_properties(record.properties)
    changed = {
        PROPERTY_RETRY_TOPIC: properties.get(PROPERTY_RETRY_TOPIC, record.topic),
        PROPERTY_ORIGIN_MESSAGE_ID: properties.get(PROPERTY_ORIGIN_MESSAGE_ID, record.msg_id),
        PROPERTY_WAIT: "false",
        PROPERTY_DELAY: str(level),
    }
    # The copy is one that readers believe; what a sender may have written is not passed on.
    kept = without_properties(record.properties, (PROPERTY_TRANSACTION_HALF_ID,))
    half_id = half_message_id(record)
    if half_id is not None:
        changed[PROPERTY_TRANSACTION_HALF_ID] = half_id
    return AppendRequest(
        topic=record.topic,
        queue_id=record.queue_id,
        body=record.body,
        properties=with_properties(kept, changed.items()),
        tags_code=tags_code(record.properties),
        flag=record.flag,
        # A consumed message may have been a commit. Its copy decides nothing.
        sys_flag=with_transaction_type(record.sys_flag, TransactionType.NONE),
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=store_host,
        reconsume_times=record.reconsume_times + 1,
    )
