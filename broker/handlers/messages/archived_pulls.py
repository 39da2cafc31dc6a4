"""Pulls of messages that are only in the archive.

Threads of their own read them: a slow or dead object store delays nobody else. A pull that cannot
be answered gets the reason, and its client tries again; it is not sent past the messages.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from attrs import define, field

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.record import properties_at
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

from ...errors import RequestRefusedError
from ...filters.compiled_filter import CompiledFilter
from ...loop.services import Service
from ...net.long_polling import Wanted
from ...net.replay_pace import ReplayPace
from ...ports import Connection
from ...tables.message_statistics import Statistics
from .pull_replies import BYTES_MAX, code_and_offset, count_max, empty, found_head

logger = logging.getLogger(__name__)

READ_THREADS: Final = 4
"""Threads that wait for the object store."""

READS_MAX: Final = 64
"""Reads running or queued, at most 256 KiB each; the client must retry further pulls. If requests
to a dead object store take 20 s, the last one is answered after five minutes."""


@define(eq=False, repr=False)
class ArchivedPulls(Service):
    """Reads archived messages on threads and answers pulls with them."""

    _store: MessageStore
    _statistics: Statistics
    _pace: ReplayPace
    _threads: ThreadPoolExecutor = field(init=False)
    _reads: int = field(default=0, init=False)
    answered: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="archive-read")

    async def stop(self) -> None:
        """Wait for the reads that are running."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def metrics(self) -> dict[str, int]:
        """Return counters and gauges by name; none without an archive."""
        archiver = self._store.archiver
        if archiver is None:
            return {}
        return {**archiver.metrics(), "reads": self.answered, "failed_reads": self.failed}

    def begin(
        self,
        request: RemotingCommand,
        connection: Connection,
        wanted: Wanted,
        outside: GetResult,
    ) -> None:
        """Answer a pull later; ``outside`` is what the store has found.

        Raises:
            RequestRefusedError: Too many pulls wait for the archive.
        """
        if self._reads >= READS_MAX:
            raise RequestRefusedError(
                "[PCBUSY_CLEAN_QUEUE]too many pulls wait for the archive", ResponseCode.SYSTEM_BUSY
            )
        self._reads += 1
        header = request.header_as(PullMessageRequestHeader)
        future = asyncio.get_running_loop().run_in_executor(
            self._threads, self._read, header, wanted, outside
        )
        future.add_done_callback(
            lambda done: self._pace.spend(lambda: self._done(done, request, connection))
        )

    def _read(
        self, header: PullMessageRequestHeader, wanted: Wanted, outside: GetResult
    ) -> tuple[GetResult, bytes]:
        archive = self._store.archive
        assert archive is not None
        result = archive.get(
            *(header.topic, header.queue_id, header.queue_offset, outside.max_offset),
            max_count=count_max(header),
            max_bytes=BYTES_MAX,
            tag_codes=None if isinstance(wanted, CompiledFilter) else wanted,
        )
        content = archive.read(result.ranges)
        if isinstance(wanted, CompiledFilter):
            records = _matching(content, wanted)
            content = b"".join(records)
            result.count, result.size = len(records), len(content)
            if not records and result.status is GetStatus.FOUND:
                result.status = GetStatus.NO_MATCHED_MESSAGE
        return result, content

    def _done(
        self,
        done: asyncio.Future[tuple[GetResult, bytes]],
        request: RemotingCommand,
        connection: Connection,
    ) -> None:
        self._reads -= 1
        if done.cancelled():
            return
        header = request.header_as(PullMessageRequestHeader)
        error = done.exception()
        if error is not None:
            self.failed += 1
            place = header.topic, header.queue_id, header.queue_offset
            logger.warning(
                "event=archived_pull_failed queue=%s:%d offset=%d error=%r", *place, str(error)
            )
            reply = encode_reply(request, ResponseCode.SYSTEM_ERROR, remark=str(error))
            connection.respond(request, reply)
            return
        result, content = done.result()
        self.answered += 1
        if result.status is GetStatus.FOUND:
            self._statistics.delivered(header.topic, header.consumer_group, header.queue_id, result)
            connection.respond(request, found_head(request, result) + content)
            return
        code, next_offset = code_and_offset(result, header.queue_offset)
        connection.respond(request, empty(request, code, result, next_offset))


def _matching(content: bytes, wanted: CompiledFilter) -> list[bytes]:
    """Return the records whose properties an SQL92 filter matches."""
    records: list[bytes] = []
    position = 0
    while position < len(content):
        size, _, properties = properties_at(content, position)
        if wanted.matches(properties):
            records.append(content[position : position + size])
        position += size
    return records
