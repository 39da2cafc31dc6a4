"""PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361), with long polling.

Messages are sent as contiguous ranges of the log. A large range goes from the page cache to the
socket without a copy in this process; several small ones are read once, into the buffer for the
socket. A thread reads ranges and queue entries that are not in memory: the event loop never waits
for the disk. The codes, offsets and remarks are those of RocketMQ's
`DefaultPullMessageResultHandler`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import add
from typing import Final, TypeVar

from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.remoting.replies import encode_pull_reply, encode_reply
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...errors import RequestRefusedError
from ...filters.compiled_filter import CompiledFilter
from ...limits.kept import REPLAYED_PULL_BYTES, Kept
from ...limits.long_answers import take_turn
from ...loop.services import Service
from ...net.long_polling import HeldPull, LongPolling, Wanted, size_of
from ...net.replay_pace import ReplayPace
from ...net.router import refusal_reply, serve
from ...ports import Connection, Handlers, serves
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.message_statistics import Statistics
from .archived_pulls import ArchivedPulls
from .pull_admission import PullAdmission
from .pull_replies import BYTES_MAX, code_and_offset, count_max, empty, found_head, retry
from .sql_search import SqlSearch

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")
_Call = tuple[Callable[..., None], tuple[object, ...]]  # costs a third of a `partial`

COMMIT_OFFSET_FLAG: Final = 1
SUSPEND_FLAG: Final = 2
"""Bits of a pull's sysFlag. Source: `PullSysFlag`."""

SUSPEND_MS_MAX: Final = 60_000
"""Longest time a pull is held, ms: twice what the slowest official client waits for an answer."""

COPIED_MAX: Final = 16_384
"""Smaller answers are joined with others of the same read instead of being sent alone."""

STAGED_BYTES_MAX: Final = 768 << 10
"""Bytes of staged answers that are sent without waiting for the end of a pass of the loop: with one
more answer they still fit into the buffer into which the store reads them."""

READ_AHEAD: Final = 2 << 20
"""Bytes of log that a thread reads before a replaying consumer requests them. It then finds them in
memory, and gets them without a copy and without a wait for the disk."""

PARTS_REMEMBERED: Final = 16
"""Parts of the log, of ``READ_AHEAD`` bytes each, that are not looked at again: as many replays at
different places ask for each part once."""

COLD_READ_THREADS: Final = 4
"""Threads that wait for the disk, without holding a lock."""

COLD_READS_MAX: Final = 256
"""Cold reads running or queued, at most 256 KiB each; the client must retry further pulls."""

_FOUND: Final = GetStatus.FOUND  # looking up an enum member takes 70 ns, and a pull 30 us


@define(eq=False, repr=False, slots=False)
class PullHandler(Handlers, Service):
    """Serves pulls."""

    _store: MessageStore
    _admission: PullAdmission
    _offsets: ConsumerOffsetTable
    _long_polling: LongPolling
    _statistics: Statistics
    _popped: Container[tuple[str, str]] = frozenset()  # groups and topics
    # Called before a pull of a group and a topic in ``popped``.
    _on_pull: Callable[[str, str], None] = lambda _group, _topic: None

    def __attrs_post_init__(self) -> None:
        self._delivered = self._statistics.delivered
        self._missed = self._statistics.missed
        self._cold_readers = ThreadPoolExecutor(COLD_READ_THREADS, thread_name_prefix="cold-read")
        self._cold_reads = 0
        self._parts_ahead: deque[int] = deque(maxlen=PARTS_REMEMBERED)  # their numbers
        self._staged: list[_Call] = []  # each sends an answer of this pass of the loop
        self._staged_bytes = 0
        self._pace = ReplayPace(self._store)
        self.archived = ArchivedPulls(self._store, self._statistics, self._pace)
        self._long_polling.answer_by(self._answer_held, self._store)

    async def stop(self) -> None:
        """Wait for the reads of the disk that are running."""
        await asyncio.to_thread(self._cold_readers.shutdown, cancel_futures=True)
        await self.archived.stop()

    @serves(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def pull(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Answer with messages, or hold the pull until some arrive."""
        header = request.header
        assert isinstance(header, PullMessageRequestHeader)
        self._admission.admit(header, connection)
        wanted = self._admission.wanted(header, connection)
        if (header.consumer_group, header.topic) in self._popped:
            self._on_pull(header.consumer_group, header.topic)
        if (reset := self._reset(request, header, is_held=False)) is not None:
            return reset
        if header.sys_flag & COMMIT_OFFSET_FLAG:
            self._offsets.commit(
                header.consumer_group,
                header.topic,
                header.queue_id,
                header.commit_offset,
                end=self._store.queues.bounds(header.topic, header.queue_id)[1],
            )
        return self._find(request, connection, header, wanted)

    def _reset(
        self, request: RemotingCommand, header: PullMessageRequestHeader, *, is_held: bool
    ) -> bytes | None:
        """Send the consumer to the offset to which an operator has reset it; None if not reset.

        A held pull was sent before the reset, perhaps by an earlier owner of the queue. So it does
        not end the reset, even if it waits at this offset.
        """
        queue = header.consumer_group, header.topic, header.queue_id
        offset = self._offsets.pending_reset(*queue)
        if offset is None:
            return None
        is_there = offset == header.queue_offset
        if is_there and not is_held:
            self._offsets.end_reset(*queue)
            return None
        first = self._store.queues.first_offset(header.topic, header.queue_id)
        _, end = self._store.queues.bounds(header.topic, header.queue_id)
        return encode_pull_reply(
            request,
            # On OFFSET_MOVED an official client gives the queue up until a rebalance.
            ResponseCode.PULL_RETRY_IMMEDIATELY if is_there else ResponseCode.PULL_OFFSET_MOVED,
            next_begin_offset=offset,
            min_offset=first,
            max_offset=end,
            remark="OFFSET_RESET",
            body_size=0,
        )

    def _find(
        self,
        request: RemotingCommand,
        connection: Connection,
        header: PullMessageRequestHeader,
        wanted: Wanted,
        *,
        wait: bool = False,
        paced: bool = False,
    ) -> bytes | None:
        if paced:  # it has waited for the disk, or for other consumers
            self._admission.admit_again(request, connection)
        readable_offset = self._store.readable_offset
        search = None
        if isinstance(wanted, CompiledFilter):
            if not paced:
                take_turn(request, connection)
            search = self._search(header, header.queue_offset, wanted, wait=wait)
            result = search.result
        else:
            result = self._get(header, header.queue_offset, wanted, wait)
        if result.status is _FOUND:
            self._read_ahead(result.ranges[0][0])
            if not paced and not self._admits(result, request, connection, wanted):
                return None
            if search is None:
                self._delivered(header.topic, header.consumer_group, header.queue_id, result)
                return self._send_found(request, connection, result, at_once=paced)
            search.search()
            if search.is_cold and not search.records:
                self._search_on_disk(request, connection, search)
                return None
            result = search.result
            if search.next_offset != header.queue_offset or result.status is _FOUND:
                return self._matching(request, search)
        if result.status is GetStatus.NOT_IN_MEMORY:
            self._warm(request, connection, wanted)
            return None
        if result.status is GetStatus.ARCHIVED:
            self.archived.begin(request, connection, wanted, result)
            return None
        return self._not_found(request, connection, wanted, result, readable_offset)

    def _get(
        self,
        header: PullMessageRequestHeader,
        offset: int,
        tags: frozenset[int] | None,
        wait: bool,  # for the disk
    ) -> GetResult:
        return self._store.queues.get(
            header.topic,
            header.queue_id,
            offset,
            max_count=count_max(header),
            max_bytes=BYTES_MAX,
            tag_codes=tags,
            wait=wait,
            archived=True,
        )

    def _not_found(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: Wanted,
        result: GetResult,
        readable_offset: int,
    ) -> bytes | None:
        """Hold the pull if its client wants that and messages may arrive; otherwise answer it."""
        self._missed.times += 1
        header = request.header_as(PullMessageRequestHeader)
        code, next_offset = code_and_offset(result, header.queue_offset)
        if code is ResponseCode.PULL_NOT_FOUND and header.sys_flag & SUSPEND_FLAG:
            held = HeldPull(
                key=(header.topic, header.queue_id),
                command=(kept := self._admission.to_keep(request)),
                connection=connection,
                deadline=_deadline(header.suspend_timeout_millis),
                next_offset=next_offset,
                wanted=wanted,
                searched_until=readable_offset,
                group=header.consumer_group,
                size=size_of(request, wanted, kept),
            )
            self._long_polling.hold(held)
            return None
        return empty(request, code, result, next_offset)

    def _admits(
        self, result: GetResult, request: RemotingCommand, connection: Connection, wanted: Wanted
    ) -> bool:
        """Return whether a pull is answered now; otherwise it is served in its turn."""
        return not self._pace.is_replay(result.ranges[0][0]) or self._pace.admits(
            *(self._find_later, request, connection, wanted), size=size_of(request, wanted)
        )

    def _find_later(self, request: RemotingCommand, connection: Connection, wanted: Wanted) -> None:
        if not connection.closed:
            header = request.header_as(PullMessageRequestHeader)
            find = partial(self._find, header=header, wanted=wanted, paced=True)
            serve(find, request, connection)

    def _search(
        self,
        header: PullMessageRequestHeader,
        offset: int,
        wanted: CompiledFilter,
        *,
        wait: bool = False,
    ) -> SqlSearch:
        return SqlSearch(
            *(self._store, header.topic, header.queue_id, offset, wanted),
            max_count=count_max(header),
            max_bytes=BYTES_MAX,
            wait=wait,
            archived=True,
        )

    def _search_on_disk(
        self, request: RemotingCommand, connection: Connection, search: SqlSearch
    ) -> None:
        """Read the next messages on a thread, then answer with those that match."""

        def answer(content: bytes) -> bytes:
            search.take(content)
            return self._matching(request, search)

        self._read_on_disk(request, connection, result=search.result, answer=answer)

    def _matching(self, request: RemotingCommand, search: SqlSearch) -> bytes:
        """Answer with the messages that match; without any, the client pulls on at once."""
        if not search.records:
            return retry(request, search.result, search.next_offset)
        header = request.header_as(PullMessageRequestHeader)
        result = GetResult(
            _FOUND,
            search.next_offset,
            search.result.min_offset,
            search.result.max_offset,
            [],  # the records are here already
            len(search.records),
            search.size,
        )
        self._delivered(header.topic, header.consumer_group, header.queue_id, result)
        return b"".join([found_head(request, result), *search.records])

    def _send_found(
        self, request: RemotingCommand, connection: Connection, result: GetResult, *, at_once: bool
    ) -> bytes | None:
        head = found_head(request, result)
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
        self._read_on_disk(request, connection, result=result)
        return None

    def _stage(self, send: _Call, size: int, *, at_once: bool) -> None:
        self._staged.append(send)
        self._staged_bytes += size
        if at_once or self._staged_bytes >= STAGED_BYTES_MAX:
            self._send_staged()
        elif len(self._staged) == 1:
            asyncio.get_running_loop().call_soon(self._send_staged)

    def _send_staged(self) -> None:
        """Send the answers of this pass of the loop together.

        To wake a sleeping client, the kernel interrupts another processor, which takes as long as
        a tenth of a pull. A client that has just received an answer is still awake.
        """
        staged, self._staged, self._staged_bytes = self._staged, [], 0
        for send, arguments in staged:
            send(*arguments)
        self._store.reader.forget_views()

    def _send_part(
        self, request: RemotingCommand, connection: Connection, result: GetResult, head: bytes
    ) -> None:
        """Send contiguous messages from the page cache to the socket."""
        try:
            part = self._store.reader.file_part(*result.ranges[0])
        except OSError:
            part = None  # the read below reports the error, or that retention deleted the file
        if part is not None:
            connection.write_part(head, part)
            return
        serve(partial(self._read_on_disk, result=result), request, connection)

    def _read_on_disk(
        self,
        request: RemotingCommand,
        connection: Connection,
        *,
        result: GetResult,
        answer: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Read the messages on a thread, then answer the pull.

        ``answer`` makes the reply from the bytes of all messages; None: they are all sent.
        """
        future = self._on_thread(lambda: self._store.reader.read_cold(result.ranges))
        answer = answer or partial(add, found_head(request, result))
        finish = partial(
            self._cold_done, request=request, connection=connection, result=result, answer=answer
        )
        future.add_done_callback(lambda done: self._pace.spend(lambda: finish(done)))

    def _read_ahead(self, physical_offset: int) -> None:
        """Let a thread read the part of the log after the one with this offset."""
        part = physical_offset // READ_AHEAD + 1
        if part in self._parts_ahead or self._cold_reads >= COLD_READS_MAX:
            return
        self._parts_ahead.append(part)
        missing = self._store.reader.missing_part(part * READ_AHEAD, READ_AHEAD)
        if missing is not None:
            self._on_thread(missing.fetch).add_done_callback(self._has_read_ahead)

    def _has_read_ahead(self, done: asyncio.Future[None]) -> None:
        self._cold_reads -= 1
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.warning("event=read_ahead_failed error=%r", error)

    def _on_thread(self, work: Callable[[], _Read]) -> asyncio.Future[_Read]:
        if self._cold_reads >= COLD_READS_MAX:
            raise RequestRefusedError(
                "[PCBUSY_CLEAN_QUEUE]too many reads wait for the disk", ResponseCode.SYSTEM_BUSY
            )
        self._cold_reads += 1
        return asyncio.get_running_loop().run_in_executor(self._cold_readers, work)

    def _warm(self, request: RemotingCommand, connection: Connection, wanted: Wanted) -> None:
        """Read the queue's entries into memory on a thread, then answer the pull."""
        header = request.header_as(PullMessageRequestHeader)
        topic, queue_id, offset = header.topic, header.queue_id, header.queue_offset

        find = partial(self._find, header=header, wanted=wanted, wait=True, paced=True)

        def warmed(done: asyncio.Future[None]) -> None:
            self._cold_reads -= 1
            if done.cancelled() or connection.closed:
                return
            if (error := done.exception()) is not None:
                # The second attempt answers with the error, or that retention deleted the file.
                logger.warning("event=queue_not_read queue=%s:%d error=%r", topic, queue_id, error)
            serve(find, request, connection)

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
        elif isinstance(error, FileNotFoundError):  # retention has deleted the file meanwhile
            header = request.header_as(PullMessageRequestHeader)
            reply = retry(request, result, header.queue_offset)
        else:
            logger.error("event=cold_read_failed ranges=%s error=%r", result.ranges, error)
            remark = f"the log is unreadable: {error}"
            reply = encode_reply(request, ResponseCode.SYSTEM_ERROR, remark=remark)
        connection.respond(request, reply)

    def _answer_held(self, held: HeldPull, timed_out: bool) -> bytes | None:
        """Return the answer to a held pull; None if there is no message and it has time left."""
        request = held.command
        header = request.header_as(PullMessageRequestHeader)
        try:
            self._admission.admit_again(request, held.connection)
        except RequestRefusedError as refusal:
            return refusal_reply(refusal, request, held.connection)
        if (reset := self._reset(request, header, is_held=True)) is not None:
            return reset
        if isinstance(held.wanted, CompiledFilter):
            search = self._search(header, held.next_offset, held.wanted)
            search.search()
            held.next_offset, result = search.next_offset, search.result
            if search.records or result.status is _FOUND:
                return self._matching(request, search)
        else:
            result = self._get(header, held.next_offset, held.wanted, False)
            if result.status is GetStatus.NO_MATCHED_MESSAGE:
                held.next_offset = result.next_offset
        if result.status is _FOUND:
            answer = self._store.reader.read(result.ranges, prefix=found_head(request, result))
            # Recent messages are usually in memory; otherwise the client pulls again at once.
            if answer is None:
                return retry(request, result, held.next_offset)
            self._delivered(header.topic, header.consumer_group, header.queue_id, result)
            return answer
        if result.status is GetStatus.NOT_IN_MEMORY:
            return retry(request, result, held.next_offset)
        return self._nothing_new(held, result, timed_out)

    def _nothing_new(self, held: HeldPull, result: GetResult, timed_out: bool) -> bytes | None:
        request = held.command
        header = request.header_as(PullMessageRequestHeader)
        if not timed_out:
            return None
        if held.next_offset != header.queue_offset:
            return retry(request, result, held.next_offset)
        code, next_offset = code_and_offset(result, held.next_offset)
        return empty(request, code, result, next_offset)

    def kept(self) -> Kept:
        return {REPLAYED_PULL_BYTES: self._pace.bytes}


def _deadline(suspend_ms: int) -> float:
    return asyncio.get_running_loop().time() + min(max(suspend_ms, 0), SUSPEND_MS_MAX) / 1_000
