"""PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361), with long polling.

A found pull is answered from contiguous ranges of the log. A large range is sent from the page
cache to the socket without a copy in this process; several small ones are read once, into the
buffer for the socket. Ranges of the log and queue entries that are not in memory are read by a
thread: the event loop never waits for the disk. The codes, offsets and remarks are those of
RocketMQ's `DefaultPullMessageResultHandler`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import add
from typing import Final, TypeVar

from halfmq.remoting.bodies import SUBSCRIBE_ALL, subscription_data
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import SubscriptionError
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.remoting.replies import encode_pull_reply, encode_reply
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...errors import RequestRefusedError
from ...filters.compiled_filter import CompiledFilter
from ...filters.filters_in_use import FiltersInUse
from ...net.long_polling import HeldPull, LongPolling, Wanted
from ...net.replay_pace import ReplayPace
from ...net.router import serve
from ...ports import Connection, Handler
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.groups import GroupTable
from ...tables.statistics import Statistics
from ...tables.topics import TopicTable
from .sql_search import Search, Searcher

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")
_Call = tuple[Callable[..., None], tuple[object, ...]]  # costs a third of a `partial`

COMMIT_OFFSET_FLAG: Final = 1
SUSPEND_FLAG: Final = 2
SUBSCRIPTION_FLAG: Final = 4
CLASS_FILTER_FLAG: Final = 8
"""Bits of a pull's sysFlag. Source: `PullSysFlag`."""

UNDECIDED_TOPICS: Final = frozenset({HALF_TOPIC, OP_TOPIC})
"""Topics that cannot be pulled: consumers never see a half message. Operators list undecided
transactions instead."""

MESSAGES_MAX: Final = 32
"""Messages of one answer from memory, RocketMQ's `maxTransferCountOnMessageInMemory`: what clients
ask for by default; a larger wish is served in several pulls."""

BYTES_MAX: Final = 262_144
"""Bytes of one answer unless one message alone is larger, `maxTransferBytesOnMessageInMemory`."""

SUSPEND_MS_MAX: Final = 60_000
"""Longest time a pull is held, ms: twice what the slowest official client waits for an answer."""

TAG_TYPES: Final = frozenset({None, "", "TAG"})
"""Expression types that mean tags. Source: `ExpressionType.isTagType`."""

COPIED_MAX: Final = 16_384
"""Smaller answers are joined with others of the same read instead of being sent alone."""

STAGED_BYTES_MAX: Final = 768 << 10
"""Bytes of answers from which on they are sent without waiting for the end of a pass of the loop:
with one more they still fit into the memory that the store reads them into."""

READ_AHEAD: Final = 2 << 20
"""Bytes of log after a cold answer that are read with it: a replaying consumer requests them next
and finds them in memory. Otherwise the event loop would start that read."""

COLD_READ_THREADS: Final = 4
"""Threads that wait for the disk, without holding a lock."""

COLD_READS_MAX: Final = 256
"""Cold reads running or queued, at most 256 KiB each; the client must retry further pulls."""

_CODES: Final = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
# Looking up an enum member takes 70 ns, and a pull 30 us.
_FOUND: Final = GetStatus.FOUND
_SUCCESS: Final = ResponseCode.SUCCESS

# RocketMQ creates a queue when it is pulled, so its clients expect an unknown one to be empty.
_REMARKS: Final = {GetStatus.NO_MATCHED_LOGIC_QUEUE: GetStatus.NO_MESSAGE_IN_QUEUE.name}


class PullHandler:
    """Serves consumers."""

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: GroupTable,
        registry: ClientRegistry,
        offsets: ConsumerOffsetTable,
        long_polling: LongPolling,
        statistics: Statistics,
        filters: FiltersInUse,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._registry = registry
        self._offsets = offsets
        self._long_polling = long_polling
        self._filters = filters
        self._delivered = statistics.delivered
        self._cold_readers = ThreadPoolExecutor(COLD_READ_THREADS, thread_name_prefix="cold-read")
        self._cold_reads = 0
        self._staged: list[_Call] = []  # each sends an answer of this pass of the loop
        self._staged_bytes = 0
        self._pace = ReplayPace(store)
        long_polling.answer_by(self._answer_held, store)

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    async def start(self) -> None:
        """Nothing to do: threads start with the first cold read."""

    async def stop(self) -> None:
        """Wait for reads of the disk that are under way."""
        await asyncio.to_thread(self._cold_readers.shutdown, cancel_futures=True)

    def pull(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Answer with messages, or hold the pull until some come."""
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        self._admit(header, connection)
        wanted = self._wanted(header)
        if (moved := self._moved(request, header)) is not None:
            return moved
        if header.sys_flag & COMMIT_OFFSET_FLAG:
            self._offsets.commit(
                header.consumer_group, header.topic, header.queue_id, header.commit_offset
            )
        return self._look(request, connection, wanted)

    def _moved(self, request: RemotingCommand, header: PullMessageRequestHeader) -> bytes | None:
        """Send the consumer to the offset to which an operator has reset it; None if not reset."""
        offset = self._offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if offset is None or offset == header.queue_offset:
            return None
        first, end = self._store.queues.bounds(header.topic, header.queue_id)
        return encode_pull_reply(
            request,
            ResponseCode.PULL_OFFSET_MOVED,
            next_begin_offset=offset,
            min_offset=first,
            max_offset=end,
            remark="OFFSET_RESET",
            body_size=0,
        )

    def _look(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: Wanted,
        *,
        wait: bool = False,
        paced: bool = False,
    ) -> bytes | None:
        if isinstance(wanted, CompiledFilter):
            return self._search(request, connection, wanted, wait=wait, paced=paced)
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        readable_offset = self._store.readable_offset
        result = self._store.queues.get(
            header.topic,
            header.queue_id,
            header.queue_offset,
            max_count=min(max(header.max_msg_nums, 1), MESSAGES_MAX),
            max_bytes=BYTES_MAX,
            tag_codes=wanted,
            wait=wait,
        )
        if result.status is _FOUND:
            if not paced and not self._pace.admits(
                result.ranges[0][0], self._look_later, request, connection, wanted
            ):
                return None
            self._delivered(header.topic, header.consumer_group, header.queue_id, result)
            return self._found(request, connection, result, at_once=paced)
        if result.status is GetStatus.NOT_IN_MEMORY:
            self._warm(request, connection, wanted)
            return None
        return self._not_found(request, connection, wanted, result, readable_offset)

    def _not_found(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: Wanted,
        result: GetResult,
        readable_offset: int,
    ) -> bytes | None:
        """Hold the pull if it asks for it and there may be messages later; else answer."""
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        code, next_offset = _not_found(result, header.queue_offset)
        if code is ResponseCode.PULL_NOT_FOUND and header.sys_flag & SUSPEND_FLAG:
            held = HeldPull(
                key=(header.topic, header.queue_id),
                command=request,
                connection=connection,
                deadline=_deadline(header.suspend_timeout_millis),
                next_offset=next_offset,
                wanted=wanted,
                looked_until=readable_offset,
            )
            if self._long_polling.hold(held):
                return None
        return _empty(request, code, result, next_offset)

    def _look_later(self, request: RemotingCommand, connection: Connection, wanted: Wanted) -> None:
        if not connection.closed:
            serve(partial(self._look, wanted=wanted, paced=True), request, connection)

    # --- SQL92 filters

    def _search(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: CompiledFilter,
        *,
        wait: bool,
        paced: bool,
    ) -> bytes | None:
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        readable_offset = self._store.readable_offset
        searcher = self._searcher(header, wanted)
        found = searcher.look(header.queue_offset, wait=wait)
        if (
            found.result.status is _FOUND
            and not paced
            and not self._pace.admits(
                found.result.ranges[0][0], self._look_later, request, connection, wanted
            )
        ):
            return None
        searcher.search(found, wait=wait)
        if found.records:
            return self._matching(request, found)
        if found.is_cold:
            self._search_on_disk(request, connection, wanted, found)
            return None
        if found.next_offset != header.queue_offset or found.result.status is _FOUND:
            return _retry(request, found.result, found.next_offset)
        if found.result.status is GetStatus.NOT_IN_MEMORY:
            self._warm(request, connection, wanted)
            return None
        return self._not_found(request, connection, wanted, found.result, readable_offset)

    def _searcher(self, header: PullMessageRequestHeader, wanted: CompiledFilter) -> Searcher:
        max_count = min(max(header.max_msg_nums, 1), MESSAGES_MAX)
        return Searcher(self._store, header, wanted, max_count=max_count, max_bytes=BYTES_MAX)

    def _search_on_disk(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: CompiledFilter,
        found: Search,
    ) -> None:
        """Have a thread read the next messages; then answer with those that match."""
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)

        def answer(content: bytes) -> bytes:
            self._searcher(header, wanted).take(found, content)
            if found.records:
                return self._matching(request, found)
            return _retry(request, found.result, found.next_offset)

        self._find_on_disk(request, connection, result=found.result, answer=answer)

    def _matching(self, request: RemotingCommand, found: Search) -> bytes:
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        result = GetResult(
            _FOUND,
            found.next_offset,
            found.result.min_offset,
            found.result.max_offset,
            [],  # the records are here already
            len(found.records),
            found.size,
        )
        self._delivered(header.topic, header.consumer_group, header.queue_id, result)
        return b"".join([_full(request, result), *found.records])

    def _answer_held_search(
        self, held: HeldPull, wanted: CompiledFilter, timed_out: bool
    ) -> bytes | None:
        """Do for an SQL92 filter what `_answer_held` does."""
        request = held.command
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        searcher = self._searcher(header, wanted)
        found = searcher.look(held.next_offset)
        searcher.search(found)
        if found.records:
            return self._matching(request, found)
        held.next_offset, status = found.next_offset, found.result.status
        if status is _FOUND or status is GetStatus.NOT_IN_MEMORY:  # there is more to search
            return _retry(request, found.result, held.next_offset)
        return self._nothing_new(held, found.result, timed_out)

    # --- answers

    def _found(
        self, request: RemotingCommand, connection: Connection, result: GetResult, *, at_once: bool
    ) -> bytes | None:
        head = _full(request, result)
        if result.size < COPIED_MAX:
            reply = self._store.reader.read(result.ranges, prefix=head)
            if reply is not None:
                return reply
        elif len(result.ranges) == 1 and self._store.reader.can_send_parts:
            send = self._send_part, (request, connection, result, head)
            self._stage(send, result.size, at_once=at_once)
            return None
        elif (view := self._store.reader.view(result.ranges, prefix=head)) is not None:
            self._stage((connection.write, (view,)), len(view), at_once=at_once)
            return None
        self._find_on_disk(request, connection, result=result)
        return None

    def _stage(self, send: _Call, size: int, *, at_once: bool) -> None:
        self._staged.append(send)
        self._staged_bytes += size
        if at_once or self._staged_bytes >= STAGED_BYTES_MAX:
            self._send_staged()
        elif len(self._staged) == 1:
            asyncio.get_running_loop().call_soon(self._send_staged)

    def _send_staged(self) -> None:
        """Send what was answered in this pass of the loop.

        Each client that sleeps has to be woken, by an interrupt of another processor, which takes
        as long as a tenth of a pull; one that has just got an answer is still awake.
        """
        staged, self._staged, self._staged_bytes = self._staged, [], 0
        for send, arguments in staged:
            send(*arguments)
        self._store.reader.forget_views()

    def _send_part(
        self, request: RemotingCommand, connection: Connection, result: GetResult, head: bytes
    ) -> None:
        """Have the system send messages that lie in one piece."""
        try:
            part = self._store.reader.file_part(*result.ranges[0])
        except OSError:
            part = None  # who reads it next says what is wrong, or that it was deleted by age
        if part is not None:
            connection.write_part(head, part)
            return
        serve(partial(self._find_on_disk, result=result), request, connection)

    def _find_on_disk(
        self,
        request: RemotingCommand,
        connection: Connection,
        *,
        result: GetResult,
        answer: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Have a thread read the messages, and answer then.

        Without ``answer``, which makes the reply of them, it is all of them.
        """
        future = self._on_thread(
            lambda: self._store.reader.read_cold(result.ranges, ahead=READ_AHEAD)
        )
        answer = answer or partial(add, _full(request, result))
        finish = partial(
            self._cold_done, request=request, connection=connection, result=result, answer=answer
        )
        future.add_done_callback(lambda done: self._pace.spend(lambda: finish(done)))

    def _on_thread(self, work: Callable[[], _Read]) -> asyncio.Future[_Read]:
        if self._cold_reads >= COLD_READS_MAX:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_BUSY, "[PCBUSY_CLEAN_QUEUE]too many reads wait for the disk"
            )
        self._cold_reads += 1
        return asyncio.get_running_loop().run_in_executor(self._cold_readers, work)

    def _warm(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: Wanted,
    ) -> None:
        """Have the queue's entries brought into memory, and answer then."""
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        topic, queue_id, offset = header.topic, header.queue_id, header.queue_offset

        look = partial(self._look, wanted=wanted, wait=True, paced=True)

        def warmed(done: asyncio.Future[None]) -> None:
            self._cold_reads -= 1
            if done.cancelled() or connection.closed:
                return
            if (error := done.exception()) is not None:
                # Where it cannot be read, or was deleted by age, the second look says so.
                logger.warning("event=queue_not_read queue=%s:%d error=%r", topic, queue_id, error)
            serve(look, request, connection)

        future = self._on_thread(lambda: self._store.queues.warm(topic, queue_id, offset))
        future.add_done_callback(lambda done: self._pace.spend(lambda: warmed(done)))

    def _cold_done(
        self,
        done: asyncio.Future[bytes],
        request: RemotingCommand,
        connection: Connection,
        result: GetResult,
        answer: Callable[[bytes], bytes],
    ) -> None:
        self._cold_reads -= 1
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            reply = answer(done.result())
        elif isinstance(error, FileNotFoundError):  # deleted by age meanwhile
            asked = request.header
            assert isinstance(asked, PullMessageRequestHeader)
            reply = _retry(request, result, asked.queue_offset)
        else:
            logger.error("event=cold_read_failed ranges=%s error=%r", result.ranges, error)
            remark = f"the log is unreadable: {error}"
            reply = encode_reply(request, ResponseCode.SYSTEM_ERROR, remark=remark)
        connection.respond(request, reply)

    def _answer_held(self, held: HeldPull, timed_out: bool) -> bytes | None:
        """Look again for a held pull; None when there is nothing and its time is not up."""
        request = held.command
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        if (moved := self._moved(request, header)) is not None:
            return moved
        if isinstance(held.wanted, CompiledFilter):
            return self._answer_held_search(held, held.wanted, timed_out)
        result = self._store.queues.get(
            header.topic,
            header.queue_id,
            held.next_offset,
            max_count=min(max(header.max_msg_nums, 1), MESSAGES_MAX),
            max_bytes=BYTES_MAX,
            tag_codes=held.wanted,
            wait=False,
        )
        if result.status is GetStatus.NOT_IN_MEMORY:
            return _retry(request, result, held.next_offset)
        if result.status is _FOUND:
            answer = self._store.reader.read(result.ranges, prefix=_full(request, result))
            # Just written, so usually in memory; otherwise the client pulls again at once.
            if answer is None:
                return _retry(request, result, held.next_offset)
            self._delivered(header.topic, header.consumer_group, header.queue_id, result)
            return answer
        if result.status is GetStatus.NO_MATCHED_MESSAGE:
            held.next_offset = result.next_offset
        return self._nothing_new(held, result, timed_out)

    def _nothing_new(self, held: HeldPull, result: GetResult, timed_out: bool) -> bytes | None:
        request = held.command
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        if not timed_out:
            return None
        if held.next_offset != header.queue_offset:
            return _retry(request, result, held.next_offset)
        code, next_offset = _not_found(result, held.next_offset)
        return _empty(request, code, result, next_offset)

    # --- admission

    def _admit(self, header: PullMessageRequestHeader, connection: Connection) -> None:
        may_consume = self._groups.admit(header.consumer_group)
        if may_consume is None:
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist, create it first",
            )
        if not may_consume:
            raise RequestRefusedError(
                ResponseCode.NO_PERMISSION,
                f"subscription group no permission, {header.consumer_group}",
                {"forbiddenType": "2"},
            )
        refusal = self._registry.refusal(header.consumer_group, connection)
        if refusal is not None:
            raise RequestRefusedError(ResponseCode.NO_PERMISSION, str(refusal))
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestRefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please!",
            )
        if not topic.readable or header.topic in UNDECIDED_TOPICS:
            raise RequestRefusedError(
                ResponseCode.NO_PERMISSION,
                f"the topic[{header.topic}] pulling message is forbidden",
                {"forbiddenType": "3"},
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise RequestRefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] "
                f"consumer:[/{connection.name}]",
            )

    def _wanted(self, header: PullMessageRequestHeader) -> Wanted:
        """Return what the consumer subscribes to, by this request or by its heartbeat."""
        if header.sys_flag & CLASS_FILTER_FLAG:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR,
                "The broker does not support consumer to filter message by class, only by SQL92",
            )
        if header.sys_flag & SUBSCRIPTION_FLAG:
            return self._wanted_by_request(header)
        group, topic = header.consumer_group, header.topic
        if not self._groups.may_broadcast(group) and self._registry.is_broadcasting(group):
            raise RequestRefusedError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{group}] can not consume by broadcast way",
                {"forbiddenType": "4"},
            )
        if not self._groups.may_read(group, topic):
            raise RequestRefusedError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{group}] is forbidden for topic[{topic}]",
                {"forbiddenType": "5"},
            )
        subscription = self._registry.subscription_of(group, topic)
        if subscription is None:
            missing = "subscription" if self._registry.has_consumers(group) else "group info"
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's {missing} not exist"
            )
        if subscription.sub_version < header.sub_version:
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
            )
        kind = subscription.expression_type
        if kind in TAG_TYPES:
            return subscription.codes
        return self._filters.compiled(
            kind, subscription.sub_string, ResponseCode.FILTER_DATA_NOT_EXIST
        )

    def _wanted_by_request(self, header: PullMessageRequestHeader) -> Wanted:
        kind = header.expression_type
        if kind is not None and kind not in TAG_TYPES:
            return self._filters.compiled(
                kind, header.subscription or "", ResponseCode.SUBSCRIPTION_PARSE_FAILED
            )
        if header.subscription == SUBSCRIBE_ALL:
            return None  # as nearly all do; not worth an object
        try:
            return subscription_data(header.topic, header.subscription).codes
        except SubscriptionError as error:
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed"
            ) from error


def _deadline(suspend_ms: int) -> float:
    return asyncio.get_running_loop().time() + min(max(suspend_ms, 0), SUSPEND_MS_MAX) / 1_000


def _not_found(result: GetResult, asked_offset: int) -> tuple[ResponseCode, int]:
    """Code and next offset of an answer without messages. Source: `PullMessageProcessor`."""
    code = _CODES.get(result.status)
    if code is not None:
        return code, result.next_offset
    if asked_offset == 0:  # an empty or unknown queue: wait for its first message
        return ResponseCode.PULL_NOT_FOUND, 0
    return ResponseCode.PULL_OFFSET_MOVED, 0


def _full(request: RemotingCommand, result: GetResult) -> bytes:
    """Return the answer with messages, up to them."""
    return encode_pull_reply(
        request,
        _SUCCESS,
        next_begin_offset=result.next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark="FOUND",
        body_size=result.size,
    )


def _empty(
    request: RemotingCommand, code: ResponseCode, result: GetResult, next_offset: int
) -> bytes:
    return encode_pull_reply(
        request,
        code,
        next_begin_offset=next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark=_REMARKS.get(result.status) or result.status.name,
        body_size=0,
    )


def _retry(request: RemotingCommand, result: GetResult, next_offset: int) -> bytes:
    """Tell the client to pull again from `next_offset` at once."""
    return encode_pull_reply(
        request,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        next_begin_offset=next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark=GetStatus.NO_MATCHED_MESSAGE.name,
        body_size=0,
    )
