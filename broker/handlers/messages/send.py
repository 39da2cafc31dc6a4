"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).

Every single message takes the same path: its topic is looked up, its properties are read once, and
its record is staged for the append at the end of this pass of the event loop. A batch is appended
at once. Checks, their order and the answers are those of RocketMQ's `SendMessageProcessor`.
"""

import random
from collections.abc import Callable
from typing import Final

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.remoting.replies import encode_send_reply
from halfmq.remoting.request_sizes import NAME_LENGTH_MAX
from halfmq.store.format import topics as topic_names
from halfmq.store.format.flags import (
    HOSTS_MASK,
    INNER_BATCH,
    TRANSACTION_MASK,
    TransactionType,
    with_transaction_type,
)
from halfmq.store.format.ids import UniqueKeyFactory, offset_message_id, offset_message_ids
from halfmq.store.format.properties import (
    PROPERTIES_SIZE_MAX,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    decode_properties,
    encode_properties,
    get_property,
    without_properties,
)
from halfmq.store.format.timers import TIMER_UNITS_MS
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ...access import requirements
from ...delay.levels import is_level, with_properties
from ...delay.timer_records import TimerError, TimerRule, Waiting
from ...disk.send_refusal import SendRefusal
from ...errors import MessageRefusedError, RequestRefusedError
from ...net.group_append import GroupAppend
from ...ports import Connection, Handlers, serves
from ...tables.topic_config import TopicConfig
from ...tables.topic_table import TopicTable
from ...transaction.admission import fault_in_batch, without_broker_properties, without_transaction
from ...transaction.deduplication import FirstHalf, deduplication_key
from ...transaction.prepares import Prepares
from ..access_checks import prepared_by, require
from .batch_units import Units, read_units
from .sent_properties import SentProperties, read_properties
from .staged import StagedHalf, StagedMessage, StagedTimer

_RETRY_PROPERTIES: Final = (
    PROPERTY_RETRY_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_WAIT,
    PROPERTY_DELAY,
)
"""Properties of a retry that the original message does not have."""

Delay = Callable[[AppendRequest], AppendRequest]
Retry = Callable[[SendMessageRequestHeader, AppendRequest, int], AppendRequest]


@define(eq=False, repr=False, slots=False)
class SendHandler(Handlers):
    """Stores what producers send."""

    _log: MessageStore
    _group: GroupAppend
    _topics: TopicTable
    _prepares: Prepares
    _refusal: SendRefusal
    _delayed: Delay
    _retried: Retry
    _timer_rule: TimerRule
    _require_room: Callable[[], None]
    _broker_name: str
    _cluster_name: str
    _max_message_size: int
    _sync_flush: bool
    _unique_keys: UniqueKeyFactory

    def __attrs_post_init__(self) -> None:
        self._append = self._log.append
        self._get_topic = self._topics.get
        self._new_key = self._unique_keys.create
        self._recent_prepares = self._prepares.recent_prepares
        # Properties that the broker adds to each message. Consumers of request-reply messages find
        # the reply topic by CLUSTER.
        self._broker_properties = (
            f"MSG_REGION\x01DefaultRegion\x02CLUSTER\x01{self._cluster_name}\x02"
            "TRACE_ON\x01true\x02"
        )

    @serves(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def send(self, request: RemotingCommand, connection: Connection) -> None:
        """Store one message or one batch; the answer waits for the disk under SYNC_FLUSH."""
        if self._refusal.refusing:
            self.refuse()
        header = request.header
        assert isinstance(header, SendMessageRequestHeader)
        if header.batch:
            self._group.append_staged()  # keeps the order of arrival
            queue_id = self._admit(header, connection)
            self._send_batch(request, header, queue_id, connection)
            return
        staged = self._staged(request, header, connection)
        if staged is not None:
            self._group.stage(staged, self._append_alone)

    def refuse(self) -> None:
        """Raise if messages are refused now, because of the disk; decisions never are.

        Raises:
            RequestRefusedError: With a code on which clients retry, here or at another broker.
        """
        if self._refusal.refusing:
            raise self._refusal.refusal()

    def _append_alone(self, request: RemotingCommand, connection: Connection) -> None:
        """Append one message alone, after its group could not be appended."""
        header = request.header
        assert isinstance(header, SendMessageRequestHeader)
        staged = self._staged(request, header, connection)
        if staged is None:
            return
        try:
            results = self._append(staged.requests)
        except BaseException:
            staged.abandoned()
            raise
        staged.appended(results)

    def _staged(
        self, request: RemotingCommand, header: SendMessageRequestHeader, connection: Connection
    ) -> StagedMessage | None:
        """Return what to append for a single message; None if the request has been answered.

        Raises:
            RequestRefusedError: It cannot be stored.
        """
        queue_id = self._admit(header, connection)
        message, sent = self._validated(header, queue_id, request.body, connection)
        if not sent.is_plain or header.sys_flag & TRANSACTION_MASK or header.topic[0] == "%":
            # A consumer's retry of a committed message still carries TRAN_MSG; it is no half
            # message. Source: SendMessageProcessor, since 4.6.1.
            is_retry = message.reconsume_times > 0 and sent.delay_level > 0
            if sent.is_transactional and not is_retry:
                if sent.is_prepare_of(header.producer_group):
                    return self._half(request, message, sent, connection)
                # Its library has set the bits because of TRAN_MSG.
                message.sys_flag = with_transaction_type(message.sys_flag, TransactionType.NONE)
            if sent.is_transactional:
                message.properties = without_transaction(message.properties)
            message = self._redirected(request, header, message, sent)
            if sent.timer is not None:
                waiting = self._waiting(message, sent.timer, sent.timer_value)
                if waiting is not None:
                    return StagedTimer(
                        (waiting.request,),
                        request,
                        connection,
                        sent.unique_key,
                        message.queue_id,
                        sent.waits and self._sync_flush,
                        message.topic,
                        waiting.due_ms,
                        self._broker_name,
                    )
        return StagedMessage(
            (message,),
            request,
            connection,
            sent.unique_key,
            queue_id if message.topic == topic_names.SCHEDULE_TOPIC else message.queue_id,
            sent.waits and self._sync_flush,
        )

    def validated(
        self, header: SendMessageRequestHeader, body: bytes, connection: Connection
    ) -> tuple[AppendRequest, str]:
        """Return one message of a transaction of several as it is stored, and its unique key.

        Raises:
            RequestRefusedError: It cannot be stored.
        """
        message, sent = self._validated(header, self._admit(header, connection), body, connection)
        self._prepares.refuse_delays(sent)
        return message, sent.unique_key

    def validated_reply(
        self, header: SendMessageRequestHeader, body: bytes, connection: Connection
    ) -> AppendRequest:
        """Return a reply as it is stored; unlike a message it may be empty, as Go clients send it.

        Raises:
            RequestRefusedError: It cannot be stored.
        """
        queue_id = self._admit(header, connection)
        message, sent = self._validated(header, queue_id, body, connection, may_be_empty=True)
        delayed = sent.delay_level or sent.timer
        if delayed or sent.is_transactional or header.sys_flag & TRANSACTION_MASK:
            raise MessageRefusedError("a reply can be neither transactional nor delayed")
        return message

    def _validated(
        self,
        header: SendMessageRequestHeader,
        queue_id: int,
        body: bytes,
        connection: Connection,
        *,
        may_be_empty: bool = False,
    ) -> tuple[AppendRequest, SentProperties]:
        if not (body or may_be_empty) or len(body) > self._max_message_size:
            raise self._body_refusal(body)
        if header.sys_flag & INNER_BATCH:  # Source: RocketMQ HookUtils#checkInnerBatch
            raise MessageRefusedError(
                f"sysFlag {header.sys_flag:#x} says that the message is a batch in one record "
                "(0x80): send a batch (320), or clear the bit"
            )
        sent = read_properties(header.properties, self._broker_properties, self._new_key)
        stored = sent.stored
        if len(stored) > PROPERTIES_SIZE_MAX:
            raise self._illegal(len(body), len(stored))
        return AppendRequest(
            topic=header.topic,
            queue_id=queue_id,
            body=body,
            properties=stored,
            tags_code=sent.tags_code,
            flag=header.flag,
            sys_flag=header.sys_flag & ~HOSTS_MASK,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
        ), sent

    def _redirected(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        message: AppendRequest,
        sent: SentProperties,
    ) -> AppendRequest:
        """Return what to store for a message that may be delayed or a retry."""
        if message.sys_flag & TRANSACTION_MASK:
            raise _refused_bits(message, sent)
        if sent.delay is not None and not is_level(sent.delay):
            raise MessageRefusedError(
                f"DELAY={sent.delay[:20]}: expected the number of a delay level"
            )
        if header.topic.startswith(topic_names.RETRY_PREFIX):
            self._group.append_staged()  # the original message may be among those staged
            message = self._retry(
                header, self._verified(request, header, message, sent.unique_key), request.version
            )
        if message.topic.startswith(topic_names.DEAD_LETTER_PREFIX):
            sent.timer = None
        elif sent.delay_level > 0:
            if sent.timer is not None:  # the level counts. Source: HookUtils#handleScheduleMessage
                sent.timer = None
                message.properties = without_properties(message.properties, TIMER_UNITS_MS)
            self._require_room()
            message = self._delayed(message)
        return message

    def _waiting(self, message: AppendRequest, name: str, value: str) -> Waiting | None:
        """Return how a message with a time of delivery is stored; None: deliver it now.

        Raises:
            RequestRefusedError: The time is invalid, or too many messages wait.
        """
        self._require_room()
        try:
            return self._timer_rule.waiting(message, name, value)
        except TimerError as error:
            raise MessageRefusedError(str(error)) from error

    def _verified(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        retry: AppendRequest,
        unique_key: str,
    ) -> AppendRequest:
        """Return a retry that a client sends, with its half message id if that can be verified.

        Clients send retries themselves if their request to send a message back has failed. A retry
        that names the half of a committed message in this log gets its content from that message,
        as if the broker had stored the retry. Any other stays without an id.
        """
        named = get_property((header.properties or "").encode(), b"TRANSACTION_HALF_ID")
        if named is None:
            return retry
        message = self._prepares.committed_message(named.decode())
        if (
            message is None
            or get_property(message.properties, b"UNIQ_KEY") != unique_key.encode()
            or get_property(retry.properties, b"RETRY_TOPIC") != message.topic.encode()
        ):
            return retry
        require(request, requirements.topic(message.topic, requirements.SUB))
        own = ((name, get_property(retry.properties, name.encode())) for name in _RETRY_PROPERTIES)
        return replace(
            message,
            topic=retry.topic,
            queue_id=retry.queue_id,
            properties=with_properties(
                without_transaction(message.properties),
                [(name, value.decode()) for name, value in own if value is not None],
            ),
            store_host=retry.store_host,
            reconsume_times=retry.reconsume_times,
        )

    def _retry(
        self, header: SendMessageRequestHeader, message: AppendRequest, version: int
    ) -> AppendRequest:
        try:
            return self._retried(header, message, version)
        except RequestRefusedError as refusal:
            raise MessageRefusedError(refusal.remark, refusal.code) from refusal

    def _half(
        self,
        request: RemotingCommand,
        message: AppendRequest,
        sent: SentProperties,
        connection: Connection,
    ) -> StagedHalf | None:
        """Return the half of a message; its answer waits for the disk unless its topic opts out.

        Return None for a duplicate of a stored half, after answering with the ids of that half.
        """
        group, unique_key = sent.producer_group, sent.unique_key
        if not group:
            raise MessageRefusedError(
                "a transactional message without the property PGROUP: set it to the producer "
                "group, or nobody could be asked about the transaction"
            )
        if len(group) > NAME_LENGTH_MAX:
            raise MessageRefusedError(
                f"the producer group of a transactional message has {len(group)} characters, "
                f"{NAME_LENGTH_MAX} are allowed"
            )
        message.properties = prepared_by(message.properties, request)
        waits = message.topic not in self._prepares.unflushed_topics
        key = self._recent_prepares.reserve(group, unique_key)
        if key == 0:
            self._group.append_staged()  # the first half may be among those staged
            found = self._prepares.find_duplicate([(message, unique_key)], group, connection)
            if found is not None:
                _answer_duplicate(request, found[0], unique_key, connection, waits=waits)
                return None
            key = self._recent_prepares.reserve(group, unique_key) or deduplication_key(
                group, unique_key
            )
        try:
            self._prepares.refuse_prepares(group, connection.broker_address)
            self._prepares.refuse_delays(sent)
            half = self._prepares.half_of(message, unique_key)
        except RequestRefusedError:
            self._recent_prepares.release(key)
            raise
        return StagedHalf(
            (half,),
            request,
            connection,
            unique_key,
            message.queue_id,
            waits,
            message,
            group,
            key,
            self._prepares,
        )

    def _send_batch(
        self,
        request: RemotingCommand,
        header: SendMessageRequestHeader,
        queue_id: int,
        connection: Connection,
    ) -> None:
        """Store each unit of a batch as a record, one directly after the other."""
        self._admit_batch(request, header)
        shared = decode_properties(without_broker_properties((header.properties or "").encode()))
        # RocketMQ adds the header's properties to each unit. The unique key is left out: it would
        # replace the key of each unit, by which the unit is found.
        unique_key = shared.pop("UNIQ_KEY", None)
        wait = shared.pop("WAIT", None)  # official clients also set it in the units
        suffix = encode_properties(shared) + self._broker_properties.encode()
        waiting = b"" if wait is None else b"WAIT\x01%s\x02" % wait.encode()
        units = self._units(request.body, waiting, suffix)
        common = AppendRequest(
            topic=header.topic,
            queue_id=queue_id,
            body=b"",
            properties=b"",
            sys_flag=header.sys_flag & ~(HOSTS_MASK | INNER_BATCH),
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        messages = [
            replace(common, flag=flag, body=body, properties=properties, tags_code=code)
            for flag, body, properties, code in zip(*units, strict=True)
        ]
        appended = self._append(messages, contiguous=True)
        reply = encode_send_reply(
            request,
            offset_message_ids(connection.store_host, [one.physical_offset for one in appended]),
            queue_id,
            appended[0].queue_offset,
            unique_key,
        )
        waits = self._sync_flush and wait != "false"
        connection.respond(request, reply, appended[-1].end if waits else 0)

    def _units(self, body: bytes, missing_wait: bytes, suffix: bytes) -> Units:
        try:
            units = read_units(body, missing_wait=missing_wait, suffix=suffix)
        except ValueError as error:
            raise RequestRefusedError(str(error)) from error
        if not units.bodies:
            raise MessageRefusedError("the batch holds no message")
        sizes = [*map(len, units.properties)]
        size = max(sizes)
        if size > PROPERTIES_SIZE_MAX:
            raise self._illegal(len(units.bodies[sizes.index(size)]), size)
        return units

    def _admit(self, header: SendMessageRequestHeader, connection: Connection) -> int:
        """Find or create the topic; return the queue to use."""
        topic = self._get_topic(header.topic)
        if topic is None:
            topic = self._create(header, connection)
        elif topic_names.is_broker_only(header.topic):
            raise MessageRefusedError(
                f"Sending message to topic[{header.topic}] is forbidden.",
                ResponseCode.NO_PERMISSION,
            )
        queue_id = header.queue_id
        if 0 <= queue_id < topic.write_queue_nums:
            return queue_id
        if queue_id < 0:
            return random.randrange(max(topic.write_queue_nums, 1))  # noqa: S311  # spreads load, no secret
        if queue_id >= topic.read_queue_nums:
            raise MessageRefusedError(
                f"request queueId[{queue_id}] is illegal, {topic} Producer: {connection.name}",
                ResponseCode.INVALID_PARAMETER,
            )
        return queue_id

    def _create(self, header: SendMessageRequestHeader, connection: Connection) -> TopicConfig:
        try:
            topic = self._topics.create_on_send(
                header.topic, header.default_topic, header.default_topic_queue_nums, connection.name
            )
        except RequestRefusedError as refusal:
            raise MessageRefusedError(refusal.remark, refusal.code) from refusal
        if topic is None:
            raise MessageRefusedError(
                f"topic[{header.topic}] not exist, apply first please! create it, or set "
                "autoCreateTopicEnable=true",
                ResponseCode.TOPIC_NOT_EXIST,
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
            raise MessageRefusedError(
                f"message body size exceeded, msg body size: {len(request.body)}, "
                f"maxMessageSize: {self._max_message_size}"
            )
        if illegal is not None:
            raise MessageRefusedError(illegal)

    def _body_refusal(self, body: bytes) -> RequestRefusedError:
        if not body:  # RocketMQ 5.3.3 fails with a null pointer and answers the same code
            return RequestRefusedError("the message has no body")
        return self._illegal(len(body), 0)

    def _illegal(self, body_size: int, properties_size: int) -> RequestRefusedError:
        return MessageRefusedError(
            f"{self._illegal_remark()} Sent: body {body_size}B, properties {properties_size}B"
        )

    def _illegal_remark(self) -> str:
        # RocketMQ's text, which people and tools know. Source: SendMessageProcessor.
        return (
            "the message is illegal, maybe msg body or properties length not matched. msg body "
            f"length limit {self._max_message_size}B, msg properties length limit 32KB."
        )


def _answer_duplicate(
    request: RemotingCommand,
    first: FirstHalf,
    unique_key: str,
    connection: Connection,
    *,
    waits: bool,
) -> None:
    """Answer a duplicate half with the ids of the first."""
    reply = encode_send_reply(
        request,
        offset_message_id(first.store_host, first.physical_offset),
        first.queue_id,
        first.queue_offset,
        unique_key,
    )
    # A flush covers whole records: a record is durable if its first byte is.
    connection.respond(request, reply, first.physical_offset + 1 if waits else 0)


def _refused_bits(message: AppendRequest, sent: SentProperties) -> RequestRefusedError:
    """Return the refusal of a message with transaction bits that is no half message."""
    if sent.is_transactional:
        # Consumers before 4.6.1 send it. RocketMQ stores it as a half that is never consumed. If it
        # is refused, the consumer keeps the message and tries again.
        remark = (
            f"a retry (reconsumeTimes={message.reconsume_times}, DELAY={sent.delay_level}) of a "
            f"committed message has transaction bits in sysFlag ({message.sys_flag:#x}): clear the "
            "bits (0xC), or send it back by CONSUMER_SEND_MSG_BACK (36)"
        )
    else:
        remark = (
            "the message has transaction bits in sysFlag without the property TRAN_MSG=true: "
            "set it to prepare a transaction, or clear the bits (0xC)"
        )
    return MessageRefusedError(remark)
