"""The commit log: every record of every topic, one after another.

``append`` takes a group of requests and is the only place that assigns physical and queue offsets.
It is the hot path of the broker: heads are packed in one step, the parts of a group are joined once
and written in one piece, and each consume-queue entry is written in the same loop. The group counts
as written when ``write_offset`` moves past it, which is the last step; if the group fails before,
its effects are undone.

A record never spans two files. If it does not fit, the rest of the file becomes a blank and the
record begins the next file, which a helper thread has prepared (``prepare_ahead``). So at least
eight bytes stay free after the last record of a file.
Source: RocketMQ ``CommitLog.java``, ``DefaultAppendMessageCallback``.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, NoReturn

from ..config import StoreConfig
from ..errors import (
    DiskFullError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreError,
    WriteFailedError,
)
from ..files import disk
from ..files.mapped_file import LogFile, create_file, zero_tail
from ..files.mapped_file_queue import MappedFileQueue
from ..format.crc import crc32
from ..format.flags import HOSTS_MASK, NO_QUEUE_ENTRY
from ..format.ids import HOST_V4_SIZE
from ..format.properties import PROPERTIES_SIZE_MAX
from ..format.queue_entry import ENTRY_SIZE, LAYOUT
from ..format.record import (
    BLANK_SIZE,
    CRC_MASK,
    CRC_TAIL_SIZE,
    CRC_TAIL_START,
    HEAD_SIZE_MAX,
    HEAD_V4,
    blank,
    encode_record,
    new_record,
    seal_crc_tail,
    with_crc_tail,
    without_crcs,
)
from ..format.record_fields import PROPERTIES_LENGTH, TOPIC_LENGTH_V2
from ..format.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable
from .append_request import AppendRequest, AppendResult
from .queue_dispatch import delivery_time, timer_code

logger = logging.getLogger(__name__)

# How far ahead of the appender space is prepared: a quarter second at 130 MB/s.
READY_AHEAD: Final = 32 << 20  # bytes
# The appender checks its limit and wakes the helper after this much; much less than READY_AHEAD.
WAKE_EVERY: Final = 4 << 20  # bytes
_UNUSUAL: Final = NO_QUEUE_ENTRY | HOSTS_MASK  # flags that the fast path does not handle
# Bytes of a record without body, properties and topic, at most.
_BESIDE_MAX: Final = (
    HEAD_SIZE_MAX + TOPIC_LENGTH_V2.size + PROPERTIES_LENGTH.size + CRC_TAIL_SIZE + 1
)
_CHARACTER_MAX: Final = 4  # bytes of one in UTF-8
_CRC_NAME: Final = slice(-CRC_TAIL_SIZE, len(CRC_TAIL_START) - CRC_TAIL_SIZE)  # of their end


class CommitLog:
    """The writing end of the log; one thread appends, one helper prepares files."""

    def __init__(self, config: StoreConfig, queues: QueueTable, now_ms: Callable[[], int]) -> None:
        self.files = MappedFileQueue(config.commit_log_directory, config.commit_log_file_size)
        self.write_offset = 0  # physical offset after the last record
        self.last_record = -1  # physical offset of the last record; -1 without one
        self.last_store_timestamp = 0  # ms, of the last record; never goes back
        self.wake_helper: Callable[[], None] = lambda: None  # called when prepare_ahead is due
        # Returns whether senders wait for flushes, which are faster if zeros were written before.
        self.flushes_awaited: Callable[[], bool] = lambda: True
        # Called when a failed append could not be undone: no other append may follow.
        self.on_failure: Callable[[StoreError], None] = lambda error: None
        self._queues = queues
        self._now_ms = now_ms
        self._record_max = config.record_size_max
        self._append_property_crc = config.append_property_crc
        self._delay_levels_ms = config.delay_levels_ms
        self._active: LogFile | None = None  # None: the next append opens it
        self._limit = 0  # physical offset up to which a record needs no ``_make_room``
        self._spare: LogFile | None = None  # the next file, made by the helper
        self._zeros = True  # whether space is prepared with zeros
        self._files_lock = Lock()  # held while a file is created, by either thread

    def start(self, write_offset: int, last_store_timestamp: int, *, last_record: int = -1) -> None:
        """Continue after the last record that recovery found."""
        self.write_offset = write_offset
        self.last_record = last_record
        self.last_store_timestamp = last_store_timestamp
        try:
            self._make_room(write_offset, write_offset)
        except DiskFullError as error:
            # Stored messages can still be consumed; each append raises the error again.
            logger.warning("event=no_space error=%r", str(error))

    @property
    def min_offset(self) -> int:
        """The physical offset of the first byte that still exists."""
        return self.files.bases[0] if self.files.bases else self.write_offset

    @property
    def reserved_ahead(self) -> int:
        """Bytes of log that can still be written without allocating disk space."""
        ahead = 0
        active, spare = self._active, self._spare
        if active is not None:
            ahead = max(active.reserved_end, active.ready_end) - (self.write_offset - active.base)
        return ahead if spare is None else ahead + max(spare.reserved_end, spare.ready_end)

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        """Write the records of a group; all of them or, with an error, none.

        With ``contiguous`` they follow each other in one file.

        Raises:
            RecordTooLargeError: A record or the contiguous group does not fit into a file.
            PropertiesTooLongError: The properties of one of the requests are too long.
            DiskFullError: There is no space for a file of the log or of a queue.
            WriteFailedError: The system refused to write for another reason.
        """
        now = max(self._now_ms(), self.last_store_timestamp)
        done: list[AppendResult] = []
        start = self.write_offset
        try:
            end = self._stage(group, now, done, roll=contiguous and self._must_roll(group))
        except BaseException as error:
            self._undo_failed(error, start, group, done)
            raise
        if done:
            self.last_record = done[-1].physical_offset
        # The flusher reads these two in the opposite order, so what it reads as the time is
        # never newer than what it then finds written.
        self.write_offset = end
        self.last_store_timestamp = now
        return done

    def _stage(
        self, group: Sequence[AppendRequest], now: int, done: list[AppendResult], *, roll: bool
    ) -> int:
        """Write a group after ``write_offset``, without moving it, and return the end of the group.

        One function, because calls per record would cost as much as the record. A queue advances
        last, when nothing can fail any more: a record that is not in ``done`` has no entry.
        """
        offset = chunk_start = self.write_offset
        limit = 0 if roll else self._limit
        queues, record_max = self._queues, self._record_max
        parts: list[bytes] = []
        pack_head, pack_entry, pack_length = HEAD_V4.pack, LAYOUT.pack_into, PROPERTIES_LENGTH.pack
        add = done.append
        encoded = b""
        for request in group:
            queue = queues[request.topic, request.queue_id]
            body, properties, sys_flag = request.body, request.properties, request.sys_flag
            # A sender may have copied the CRC of another record.
            if properties[_CRC_NAME] == CRC_TAIL_START:
                properties = request.properties = without_crcs(properties)
            born_host, store_host = request.born_host, request.store_host
            tags_code = request.tags_code
            body_size, properties_size = len(body), len(properties)
            size = queue.overhead + body_size + properties_size
            special = (
                sys_flag & _UNUSUAL
                or queue.special
                or len(born_host) + len(store_host) != 2 * HOST_V4_SIZE
            )
            if special:
                encoded, tags_code = self._encode_special(request, queue, offset, now)
                size = len(encoded)
            if size > record_max or properties_size > PROPERTIES_SIZE_MAX:
                self._refuse(request, size)
            if offset + size > limit:
                if roll or offset + size + BLANK_SIZE > self._file_end(offset):
                    self._write(chunk_start, parts)
                    parts = []
                    roll = False
                    offset = chunk_start = self._roll(offset)
                    if special:
                        encoded, _ = self._encode_special(request, queue, offset, now)
                limit = self._make_room(offset, offset + size)
            end = offset + size
            queue_offset = queue.next_offset
            if special:
                parts.append(encoded)
            else:
                head = pack_head(
                    size, queue.magic, crc32(body) & CRC_MASK, request.queue_id, request.flag,
                    queue_offset, offset, sys_flag, request.born_timestamp, born_host, now,
                    store_host, request.reconsume_times, request.prepared_transaction_offset,
                    body_size,
                )  # fmt: skip
                parts += (head, body, queue.topic_field, pack_length(properties_size), properties)
            if special and sys_flag & NO_QUEUE_ENTRY:
                queue_offset = 0
            else:
                position = queue.position
                if position >= queue.limit:
                    queue.grow()
                    position = queue.position
                pack_entry(queue.map, position, offset, size, tags_code)
                queue.position = position + ENTRY_SIZE
                queue.next_offset = queue_offset + 1
                queue.last_end = end
                queue.appended_bytes += size
            add(AppendResult(offset, size, queue_offset, now))
            offset = end
        self._write(chunk_start, parts)
        return offset

    def _encode_special(
        self, request: AppendRequest, queue: ConsumeQueue, offset: int, now: int
    ) -> tuple[bytes, int]:
        """Encode records that the fast path cannot: IPv6 hosts, CRC tail, no queue entry, a delay.

        Return the record, and the tags code of its queue entry.
        """
        properties, tags_code = request.properties, request.tags_code
        if queue.topic == SCHEDULE_TOPIC:
            tags_code = delivery_time(properties, now, self._delay_levels_ms)
        elif queue.topic == TIMER_TOPIC:
            tags_code = timer_code(properties, now)
        if self._append_property_crc:
            properties = with_crc_tail(properties)
        if len(properties) > PROPERTIES_SIZE_MAX:
            raise PropertiesTooLongError(len(properties), PROPERTIES_SIZE_MAX)
        record = new_record(
            topic=request.topic,
            queue_id=request.queue_id,
            body=request.body,
            properties=properties,
            born_timestamp=request.born_timestamp,
            born_host=request.born_host,
            store_timestamp=now,
            store_host=request.store_host,
            queue_offset=0 if request.sys_flag & NO_QUEUE_ENTRY else queue.next_offset,
            physical_offset=offset,
            flag=request.flag,
            sys_flag=request.sys_flag,
            reconsume_times=request.reconsume_times,
            prepared_transaction_offset=request.prepared_transaction_offset,
        )
        encoded = encode_record(record)
        return (seal_crc_tail(encoded) if self._append_property_crc else encoded), tags_code

    def _refuse(self, request: AppendRequest, size: int) -> NoReturn:
        if len(request.properties) > PROPERTIES_SIZE_MAX:
            raise PropertiesTooLongError(len(request.properties), PROPERTIES_SIZE_MAX)
        raise RecordTooLargeError("a record", size, self._record_max)

    def _must_roll(self, group: Sequence[AppendRequest]) -> bool:
        """Return whether a contiguous group needs a new file."""
        room = self._file_end(self.write_offset) - self.write_offset - BLANK_SIZE
        size_max = len(group) * _BESIDE_MAX + sum(
            [
                len(request.body) + len(request.properties) + len(request.topic) * _CHARACTER_MAX
                for request in group
            ]
        )
        if size_max <= min(room, self._record_max):
            return False
        size = sum(map(self._size_of, group))
        if size > self._record_max:
            raise RecordTooLargeError("a batch", size, self._record_max)
        return size > room

    def _size_of(self, request: AppendRequest) -> int:
        queue = self._queues[request.topic, request.queue_id]
        properties = request.properties
        if self._append_property_crc:
            properties = with_crc_tail(properties)
        hosts = len(request.born_host) + len(request.store_host) - 2 * HOST_V4_SIZE
        return queue.overhead + hosts + len(request.body) + len(properties)

    def _file_end(self, offset: int) -> int:
        """Return the end of the file in which a record at ``offset`` would begin.

        An offset at the end of a file belongs to the next file.
        """
        return self.files.base_of(offset) + self.files.file_size

    def _write(self, start: int, parts: list[bytes]) -> None:
        if parts:
            assert self._active is not None
            self._active.write(start - self._active.base, b"".join(parts))

    def _undo_failed(
        self,
        error: BaseException,
        start: int,
        group: Sequence[AppendRequest],
        done: list[AppendResult],
    ) -> None:
        """Undo a failed group.

        Raises:
            WriteFailedError: A system call failed; or undoing failed as well. In the second case
                records may lie after the end of the log and would mix with later ones, so nothing
                is appended until the next start has examined them.
        """
        try:
            self._undo(start, group, done)
        except OSError as again:
            failure = WriteFailedError(f"{error}; nor could that be undone: {again}")
            logger.critical("event=append_not_undone offset=%d error=%r", start, str(failure))
            self.on_failure(failure)
            raise failure from error
        if isinstance(error, OSError):
            raise WriteFailedError(str(error)) from error

    def _undo(self, start: int, group: Sequence[AppendRequest], done: list[AppendResult]) -> None:
        """Remove the queue entries, files and bytes that a failed group has written."""
        first_offsets: dict[ConsumeQueue, int] = {}
        for request, appended in zip(group, done, strict=False):
            if not request.sys_flag & NO_QUEUE_ENTRY:
                queue = self._queues[request.topic, request.queue_id]
                first_offsets.setdefault(queue, appended.queue_offset)
                queue.appended_bytes -= appended.size
        for queue, first_offset in first_offsets.items():
            queue.cut(first_offset)
        base = self.files.base_of(start)
        with self._files_lock:
            if self._active is not None and self._active.base != base:
                self.close_files()
                self.files.remove_from(base + self.files.file_size)
        if base in self.files.bases:
            zero_tail(self.files.path(base), start - base)

    def _make_room(self, offset: int, end: int) -> int:
        """Prepare space for a record that ends at ``end``; return the new limit."""
        if self._active is None:
            self._active = self._open_active(offset)
        active = self._active
        needed = end + BLANK_SIZE - active.base
        if active.ready_end < needed:
            active.make_ready(needed, zeros=self._zeros)
        self.wake_helper()
        self._limit = min(active.base + active.ready_end - BLANK_SIZE, end + WAKE_EVERY)
        return self._limit

    def _open_active(self, offset: int) -> LogFile:
        base = self.files.base_of(offset)
        with self._files_lock:
            if base not in self.files.bases:
                return self._take_next(base)
            return self._open(base, written_end=offset - base, is_new=False)

    def _open(self, base: int, *, written_end: int, is_new: bool) -> LogFile:
        return LogFile(
            self.files.path(base),
            base,
            self.files.file_size,
            written_end=written_end,
            is_new=is_new,
        )

    def _roll(self, offset: int) -> int:
        """End the active file with a blank; return the begin of the next file."""
        assert offset % self.files.file_size, "an empty file takes any record"
        following = self._file_end(offset)
        full = self._active or self._open_active(offset)
        position = offset - full.base
        full.make_ready(position + BLANK_SIZE, zeros=self._zeros)
        with self._files_lock:
            self._active = self._take_next(following)
        try:
            full.write(position, blank(following - offset))
        finally:
            full.close()
        return following

    def _take_next(self, base: int) -> LogFile:
        """Return the file that begins at ``base``; create it if the helper has not."""
        spare, self._spare = self._spare, None
        if spare is None:
            spare = self._create(base)
        assert spare.base == base
        self.files.add(base)
        return spare

    def _create(self, base: int) -> LogFile:
        path = self.files.path(base)
        disk.remove(path)  # may be left from a failed attempt
        create_file(path, self.files.file_size)
        try:
            return self._open(base, written_end=0, is_new=True)
        except BaseException:
            disk.unlink(path)
            raise

    def prepare_ahead(self) -> None:
        """Prepare the space that the appender will reach soon; called on the helper thread.

        Raises:
            DiskFullError: There is no space for the next file.
        """
        active = self._active
        if active is None:
            return
        zeros = self._zeros = self.flushes_awaited()
        target = self.write_offset - active.base + READY_AHEAD
        active.make_ready_ahead(min(target, active.size), zeros=zeros)
        if target <= active.size:
            return
        with self._files_lock:
            if self._active is not active:
                return  # the appender was faster and wakes the helper again when needed
            if self._spare is None:
                self._spare = self._create_durably(active.base + active.size)
            spare = self._spare
        spare.make_ready_ahead(min(target - active.size, spare.size), zeros=zeros)

    def _create_durably(self, base: int) -> LogFile:
        created = self._create(base)
        try:
            disk.sync_directory(self.files.directory)
        except OSError:
            # A second sync might succeed without having written the name.
            created.close()
            disk.unlink(created.path)
            raise
        return created

    def close_files(self) -> None:
        """Close the files open for appending; delete the prepared file that is still empty."""
        if self._spare is not None:
            self._spare.close()
            disk.remove(self._spare.path)
            self._spare = None
        if self._active is not None:
            self._active.close()
            self._active = None
        self._limit = 0
