"""Pop: POP_MESSAGE (200050), ACK_MESSAGE (200051), and what belongs to them.

The work is done by `PopEngine`; here are the requests, with RocketMQ's codes.

Source: RocketMQ `PopMessageProcessor`, `AckMessageProcessor`, `ChangeInvisibleTimeProcessor`,
`NotificationProcessor`, `PollingInfoProcessor`, `PeekMessageProcessor`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attrs import define

from halfmq.remoting.codes import INT32_MAX, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.remoting.pop import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationRequestHeader,
    NotificationResponseHeader,
    PeekMessageRequestHeader,
    PollingInfoRequestHeader,
    PollingInfoResponseHeader,
    PopHandle,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
    decode_batch_ack,
    kind_of,
    offsets_text,
    parse_handle,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import PROPERTY_POP_CK
from halfmq.store.format.record import MAGIC_V1, decode_record, encode_record, without_crcs
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...delay.levels import with_properties
from ...errors import RequestRefusedError, invalid_parameter
from ...filters.compiled_filter import CompiledFilter
from ...loop.fetches import Fetch
from ...net.long_polling import HeldPull, LongPolling, Wanted, size_of
from ...pop.engine import HandleError, Messages, PopEngine, PopFullError, Popped, Taken, Wish
from ...pop.in_flight import PopQueue
from ...ports import Connection, Handlers, serves
from ...tables.message_statistics import Statistics
from ...tables.topic_table import TopicTable
from .pull import SUSPEND_MS_MAX
from .pull_admission import SUBSCRIPTION_FLAG, PullAdmission
from .pull_replies import BYTES_MAX
from .sql_search import SqlSearch

MESSAGES_MAX: Final = 32  # of one pop, as in RocketMQ

INVISIBLE_MS_MAX: Final = 12 * 3_600_000
"""Longest time for which a message may be hidden, ms; the limit of RocketMQ's proxy. The log keeps
a message at least as long."""

READS_MAX: Final = 16  # of up to 800 entries of one queue, for messages that match

_Waits: TypeAlias = PopMessageRequestHeader | NotificationRequestHeader
_ALL_QUEUES: Final = -1


class _ColdQueueError(NotInMemoryError):
    """Entries of a queue are only on disk."""

    def __init__(self, warm: Callable[[], None]) -> None:
        super().__init__(())
        self._warm = warm

    def fetch(self) -> None:
        """Read them, waiting for the disk."""
        self._warm()


@define(eq=False, repr=False, slots=False)
class PopHandler(Handlers):
    """Serves the requests of pop."""

    _store: MessageStore
    _engine: PopEngine
    _admission: PullAdmission
    _topics: TopicTable
    _polling: LongPolling
    _statistics: Statistics
    _broker_name: str
    _sync_flush: bool
    _now_ms: Callable[[], int]
    _fetch: Fetch

    def __attrs_post_init__(self) -> None:
        self._delivered = self._statistics.delivered
        self._polling.answer_by(self._answer_held, self._store)

    @serves(RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION)
    def pop(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Answer with messages, or wait until there are some; NOTIFICATION does not take them."""
        header = request.header
        assert isinstance(header, PopMessageRequestHeader | NotificationRequestHeader)
        self._check(header)
        wanted = self._wanted(header, connection)
        searched_until = self._store.readable_offset
        reply = self._find(request, connection, wanted)
        if reply is not None:
            return reply
        if header.poll_time <= 0:
            return self._nothing(request)
        held = HeldPull(
            key=(header.topic, _ALL_QUEUES),
            command=(kept := self._admission.to_keep(request)),
            connection=connection,
            deadline=asyncio.get_running_loop().time()
            + min(header.poll_time, SUSPEND_MS_MAX) / 1_000,
            next_offset=0,
            wanted=wanted,
            searched_until=searched_until,
            group=header.consumer_group,
            size=size_of(request, wanted, kept),
        )
        try:
            self._polling.hold(held)
        except RequestRefusedError as refusal:
            return self._full(request, refusal.remark)
        return None

    def _check(self, header: _Waits) -> None:
        if isinstance(header, PopMessageRequestHeader):
            _within("maxMsgNums", header.max_msg_nums, 1, MESSAGES_MAX)
            _within("invisibleTime", header.invisible_time, 1, INVISIBLE_MS_MAX)
            _within("initMode", header.init_mode, 0, 1)
        _within("queueId", header.queue_id, _ALL_QUEUES, INT32_MAX)

    def _wanted(self, header: _Waits, connection: Connection) -> Wanted:
        as_pull = _as_pull(header)
        self._admission.admit(as_pull, connection)
        return self._admission.wanted(as_pull, connection)

    def _find(
        self, request: RemotingCommand, connection: Connection, wanted: Wanted
    ) -> bytes | None:
        """Return the answer with messages; None if there are none now."""
        header = request.header
        wish = self._wish(header, wanted)
        if isinstance(header, NotificationRequestHeader):
            if not self._engine.has_messages(wish, self._read):
                return None
            return encode_reply(request, header=NotificationResponseHeader(has_msg=True))
        try:
            popped = self._engine.pop(wish, self._read)
        except PopFullError as error:
            return self._full(request, str(error))
        if popped.parts:
            return self._found(request, popped, wish)
        # The filter excludes a long run of messages: the client pops again at once.
        return self._nothing(request) if popped.rest else None

    def _wish(self, header: object, wanted: Wanted) -> Wish:
        assert isinstance(header, _Waits | PeekMessageRequestHeader)
        topic = self._topics.get(header.topic)
        assert topic is not None  # it was admitted
        wish = Wish(
            group=header.consumer_group,
            topic=header.topic,
            queue_id=header.queue_id,
            queue_count=topic.read_queue_nums,
            max_count=1,
            invisible_ms=0,
            wanted=wanted,
        )
        if not isinstance(header, NotificationRequestHeader):
            wish.max_count = header.max_msg_nums
        if not isinstance(header, PeekMessageRequestHeader):
            wish.in_order, wish.attempt_id = header.order, header.attempt_id
        if isinstance(header, PopMessageRequestHeader):
            wish.invisible_ms, wish.from_end = header.invisible_time, header.init_mode == 1
        return wish

    def _read(self, queue: PopQueue, offset: int, count: int, wanted: Wanted) -> Messages:
        """Return messages of a queue from an offset on.

        Raises:
            NotInMemoryError: They must be read from the disk first.
        """
        if isinstance(wanted, CompiledFilter):
            return self._search(queue, offset, count, wanted)
        for _ in range(READS_MAX):
            result = self._store.queues.get(
                queue.topic,
                queue.queue_id,
                offset,
                max_count=count,
                max_bytes=BYTES_MAX,
                tag_codes=wanted,
                wait=False,
            )
            if result.status is GetStatus.NOT_IN_MEMORY:
                raise self._cold(queue, offset)
            if result.status is GetStatus.FOUND:
                return result.next_offset, self._records(result)
            if result.next_offset == offset:
                break
            offset = result.next_offset
        return offset, []

    def _search(self, queue: PopQueue, offset: int, count: int, wanted: CompiledFilter) -> Messages:
        place = queue.topic, queue.queue_id, offset
        found = SqlSearch(self._store, *place, wanted, max_count=count, max_bytes=BYTES_MAX)
        found.search()
        if found.result.status is GetStatus.NOT_IN_MEMORY and not found.records:
            raise self._cold(queue, found.next_offset)
        if found.is_cold and not found.records:
            raise self._store.reader.lacking_ranges(found.result.ranges)
        return found.next_offset, [(decode_record(one).queue_offset, one) for one in found.records]

    def _records(self, result: GetResult) -> list[tuple[int, bytes]]:
        content = self._store.reader.read(result.ranges)
        if content is None:
            raise self._store.reader.lacking_ranges(result.ranges)
        found: list[tuple[int, bytes]] = []
        position = 0
        while position < len(content):
            size = int.from_bytes(content[position : position + 4])
            queue_offset = int.from_bytes(content[position + 20 : position + 28])
            found.append((queue_offset, content[position : position + size]))
            position += size
        return found

    def _cold(self, queue: PopQueue, offset: int) -> NotInMemoryError:
        return _ColdQueueError(lambda: self._store.queues.warm(queue.topic, queue.queue_id, offset))

    def _found(self, request: RemotingCommand, popped: Popped, wish: Wish) -> bytes:
        parts = popped.parts
        for one in parts:
            size = sum(len(record) for _, record in one.records)
            result = GetResult(GetStatus.FOUND, one.next_offset, 0, 0, [], len(one.records), size)
            self._delivered(one.queue.topic, wish.group, one.queue.queue_id, result)
        kinds = [(kind_of(one.queue.topic), one) for one in parts]
        times = [
            f"{kind} qo{one.queue.queue_id}%{offset} {one.times.get(offset, 0)}"
            for kind, one in kinds
            for offset in one.offsets
        ]
        answer = PopMessageResponseHeader(
            pop_time=popped.pop_ms,
            invisible_time=wish.invisible_ms,
            revive_qid=popped.revive_queue,
            rest_num=popped.rest,
            start_offset_info=";".join(
                offsets_text(kind, one.queue.queue_id, [one.start]) for kind, one in kinds
            ),
            msg_offset_info=";".join(
                offsets_text(kind, one.queue.queue_id, one.offsets) for kind, one in kinds
            ),
            order_count_info=";".join(times) if wish.in_order else None,
        )
        body = b"".join(
            record
            if one.queue.topic == wish.topic
            else self._retry(record, self._handle(one, offset, popped, wish), wish.topic)
            for one in parts
            for offset, record in one.records
        )
        return encode_reply(request, header=answer, body=body, remark=GetStatus.FOUND.name)

    def _handle(self, part: Taken, offset: int, popped: Popped, wish: Wish) -> PopHandle:
        checkpoint = part.start, popped.pop_ms, wish.invisible_ms, popped.revive_queue
        queue = part.queue
        return PopHandle(
            *checkpoint, kind_of(queue.topic), self._broker_name, queue.queue_id, offset
        )

    def _retry(self, encoded: bytes, handle: PopHandle, topic: str) -> bytes:
        """Return the record of a retry as the client expects it: of its topic, with its handle."""
        record = decode_record(encoded, check_crc=False)
        changed = ((PROPERTY_POP_CK, str(handle)),)
        properties = with_properties(without_crcs(record.properties), changed)
        return encode_record(record._replace(magic=MAGIC_V1, topic=topic, properties=properties))

    def _nothing(self, request: RemotingCommand) -> bytes:
        header = request.header
        if isinstance(header, NotificationRequestHeader):
            return encode_reply(request, header=NotificationResponseHeader(has_msg=False))
        assert isinstance(header, PopMessageRequestHeader)
        answer = _empty(self._now_ms(), header.invisible_time)
        remark = GetStatus.NO_MESSAGE_IN_QUEUE.name
        return encode_reply(request, ResponseCode.POLLING_TIMEOUT, header=answer, remark=remark)

    def _full(self, request: RemotingCommand, remark: str) -> bytes:
        if isinstance(request.header, NotificationRequestHeader):
            full = NotificationResponseHeader(has_msg=False, polling_full=True)
            return encode_reply(request, header=full)
        answer = _empty(self._now_ms(), 0)
        return encode_reply(request, ResponseCode.POLLING_FULL, header=answer, remark=remark)

    def _answer_held(self, held: HeldPull, timed_out: bool) -> bytes | None:
        request, connection = held.command, held.connection
        header = request.header
        assert isinstance(header, PopMessageRequestHeader | NotificationRequestHeader)
        try:
            self._admission.admit_again(request, connection, _as_pull(header))
            reply = self._find(request, connection, held.wanted)
        except NotInMemoryError as missing:
            if timed_out:
                return self._nothing(request)
            self._fetch(missing, lambda _is_there: self._polling.search_again([held.key]))
            return None
        except RequestRefusedError as refusal:
            return encode_reply(request, refusal.code, remark=refusal.remark)
        return self._nothing(request) if reply is None and timed_out else reply

    @serves(RequestCode.PEEK_MESSAGE)
    def peek(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the messages that a pop would get."""
        header = request.header_as(PeekMessageRequestHeader)
        _within("maxMsgNums", header.max_msg_nums, 1, MESSAGES_MAX)
        _within("queueId", header.queue_id, _ALL_QUEUES, INT32_MAX)
        self._admission.admit(_as_pull(header), connection)
        found = self._engine.peek(self._wish(header, None), self._read)
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        answer = _empty(self._now_ms(), 0)
        return encode_reply(request, code, header=answer, body=b"".join(found))

    @serves(RequestCode.ACK_MESSAGE)
    def acknowledge(self, request: RemotingCommand, connection: Connection) -> None:
        """End the delivery of a message; the answer 0 means that it does not come again."""
        header = request.header_as(AckMessageRequestHeader)
        handle = self._handle_of(header)
        end = self._acknowledge(header.consumer_group, header.topic, [handle])
        connection.respond(request, encode_reply(request), end)

    @serves(RequestCode.BATCH_ACK_MESSAGE)
    def acknowledge_batch(self, request: RemotingCommand, connection: Connection) -> None:
        """End the delivery of several messages; 208 if one of the handles is refused."""
        body = decode_batch_ack(request.body)
        found = [(ack, ack.handles(body.broker_name)) for ack in body.acks]
        if not any(handles for _, handles in found):
            raise RequestRefusedError("acks: no message is named", ResponseCode.NO_MESSAGE)
        end, refusal = 0, None
        for ack, handles in found:
            try:
                if handles:
                    end = self._acknowledge(ack.group, ack.popped_topic, handles)
            except RequestRefusedError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        connection.respond(request, encode_reply(request), end)

    def _acknowledge(self, group: str, topic: str, handles: Sequence[PopHandle]) -> int:
        try:
            end = self._engine.acknowledge(group, topic, handles)
        except HandleError as error:
            raise RequestRefusedError(str(error), ResponseCode.NO_MESSAGE) from error
        return end if self._sync_flush else 0

    @serves(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
    def change_invisible(self, request: RemotingCommand, connection: Connection) -> None:
        """Hide a message for so long from now on; the answer has what its new handle is made of."""
        header = request.header_as(ChangeInvisibleTimeRequestHeader)
        _within("invisibleTime", header.invisible_time, 0, INVISIBLE_MS_MAX)
        handle = self._handle_of(header)
        try:
            changed, end = self._engine.change_invisible(
                header.consumer_group, header.topic, handle, header.invisible_time
            )
        except HandleError as error:
            raise RequestRefusedError(str(error), ResponseCode.NO_MESSAGE) from error
        answer = ChangeInvisibleTimeResponseHeader(
            pop_time=changed.pop_ms,
            invisible_time=changed.invisible_ms,
            revive_qid=changed.revive_queue,
        )
        reply = encode_reply(request, header=answer)
        connection.respond(request, reply, end if self._sync_flush else 0)

    def _handle_of(self, header: AckMessageRequestHeader) -> PopHandle:
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestRefusedError(
                f"topic[{header.topic}] not exist, apply first please!",
                ResponseCode.TOPIC_NOT_EXIST,
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise RequestRefusedError(
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}]",
                ResponseCode.MESSAGE_ILLEGAL,
            )
        try:
            handle = parse_handle(header.extra_info, header.offset)
        except ValueError as error:
            raise RequestRefusedError(
                f"extraInfo={header.extra_info[:200]!r} is no handle ({error}): expected the "
                "property POP_CK of a popped message"
            ) from error
        return handle._replace(queue_id=header.queue_id)

    @serves(RequestCode.POLLING_INFO)
    def polling_info(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer how many pops of a group wait."""
        header = request.header_as(PollingInfoRequestHeader)
        waiting = self._polling.waiting.get((header.topic, _ALL_QUEUES), ())
        count = sum(held.group == header.consumer_group for held in waiting)
        return encode_reply(request, header=PollingInfoResponseHeader(polling_num=count))


def _empty(now_ms: int, invisible_ms: int) -> PopMessageResponseHeader:
    return PopMessageResponseHeader(
        pop_time=now_ms,
        invisible_time=invisible_ms,
        revive_qid=0,
        rest_num=0,
        start_offset_info="",
        msg_offset_info="",
    )


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise invalid_parameter(f"{name}={value}, expected {least} to {most}")


def _as_pull(header: _Waits | PeekMessageRequestHeader) -> PullMessageRequestHeader:
    """Return the pull that needs the same permissions and has the same filter."""
    text, kind = "*", None
    if not isinstance(header, PeekMessageRequestHeader):
        text, kind = header.exp or "*", header.exp_type
    return PullMessageRequestHeader(
        consumer_group=header.consumer_group,
        topic=header.topic,
        queue_id=max(header.queue_id, 0),
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=SUBSCRIPTION_FLAG,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription=text,
        expression_type=kind,
    )
