"""Pop: each message goes to one member of a group, and to another one if that does not finish.

`pop` takes messages from the queues of a topic and moves the group's offsets past them. They are in
flight until `acknowledge`. `change_invisible` sets when a message becomes visible again; then
`tick` stores it again in the retry topic of the group and the topic, which `pop` reads too, or in
the dead-letter topic after too many deliveries.

**The log decides.** Each pop and acknowledgement is a record of the revive topic (`records`). The
table of what is in flight (`in_flight`) is memory; a start reads the revive topic from the offsets
of `REVIVE_GROUP` on, before which everything is settled. The answer to an acknowledgement waits
for the disk, so after a kill only unacknowledged messages come again, and their handles stay valid.

**Pull and pop.** Both use the same offsets. When a group pulls a topic that it has popped, messages
in flight, and those in the retry topic of pop, go to the retry topic that it pulls.

Source: RocketMQ ``PopMessageProcessor``, ``AckMessageProcessor``, ``PopReviveService``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
from attrs import define

from halfmq.remoting.codes import INT32_MAX
from halfmq.remoting.pop import (
    ORDER_QUEUE,
    PopHandle,
    kind_of,
    parse_handle,
    pop_retry_topic,
    topic_of_kind,
)
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import (
    PROPERTY_FIRST_POP_TIME,
    PROPERTY_POP_FROM,
    get_property,
)
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import RETRY_PREFIX, dead_letter_topic, retry_topic
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ..delay.levels import with_properties
from ..errors import NotYetError, RequestRefusedError, UnfinishedError
from ..limits.kept import POP_IN_FLIGHT, POP_LOCKS, POP_PAIRS, Kept
from ..loop.fetches import Fetch
from ..net.long_polling import Wanted
from ..tables.consumer_offsets import NO_OFFSET, ConsumerOffsetTable
from ..tables.group_table import GroupTable
from ..tables.topic_table import TopicTable
from .in_flight import CHUNK, InFlight, Lapsed, PopCheckpoint, PopQueue
from .order import OrderLocks
from .records import LEFT, REVIVE_GROUP, REVIVE_QUEUES, PopRecord, PopRecords, decode_pop

logger = logging.getLogger(__name__)

GROUP_MAX: Final = POP_IN_FLIGHT.most // 5
"""Messages in flight of one group."""

BATCH_MAX: Final = 8
"""Checkpoints, of up to 32 messages, that become visible before the loop may serve others."""

RETRIES_AT_ONCE: Final = 32  # of one checkpoint

IDLE_TICK_S: Final = 1.0
RETRY_AFTER_ERROR_MS: Final = 10_000
"""Milliseconds until a message is tried again that the disk or the store refused."""

NEW_TOPICS_MS: Final = 100
"""Milliseconds until a message is tried again whose topic waits for those of others."""

PROGRESS_MS: Final = 5_000
"""Milliseconds between two times at which the progress in the revive topic is saved."""

OLD_CHUNKS: Final = 16
"""Chunks of a revive queue after which a checkpoint is written again: a start reads no more."""

FOREIGN_GRACE_MS: Final = 4_000
"""Milliseconds for acknowledgements that RocketMQ's timer brings after their checkpoints."""

REPEATS_MAX: Final = 10_000
"""Latest acknowledgements that are kept, so that a repeated request gets the same answer."""

Messages = tuple[int, list[tuple[int, bytes]]]
"""Next queue offset to read, and queue offset and bytes of each record."""

Read = Callable[[PopQueue, int, int, Wanted], Messages]
"""Reads a queue from an offset on: at most so many messages that match."""


class Wish(msgspec.Struct, kw_only=True):
    """What a pop asks for."""

    group: str
    topic: str
    queue_id: int  # -1: any
    queue_count: int
    max_count: int
    invisible_ms: int
    wanted: Wanted = None
    from_end: bool = False  # where a new group begins
    in_order: bool = False
    attempt_id: str | None = None


class Taken(msgspec.Struct):
    """Messages of one queue that a pop has found."""

    queue: PopQueue
    start: int  # queue offset of the checkpoint
    records: list[tuple[int, bytes]]  # queue offset and bytes
    next_offset: int
    times: Mapping[int, int] = {}  # of a pop in order: earlier deliveries by queue offset

    @property
    def offsets(self) -> list[int]:
        return [offset for offset, _ in self.records]


class Popped(msgspec.Struct):
    """The result of a pop."""

    pop_ms: int
    revive_queue: int
    parts: list[Taken]
    rest: int  # messages that the group has not popped yet


class PopFullError(Exception):
    """So many messages are in flight that no more are given out."""


class HandleError(Exception):
    """A handle is of no delivery that still counts."""


@define(eq=False, repr=False, slots=False)
class PopEngine:
    """Pops messages; call `tick` after the seconds that it returns."""

    _store: MessageStore  # of messages and records
    _topics: TopicTable  # for retry and dead-letter topics
    _groups: GroupTable  # for the limits of deliveries
    _offsets: ConsumerOffsetTable  # where the groups continue
    _records: PopRecords  # makes the records of the revive topic
    # Returns the copy of a record that is its next delivery.
    _retry_copy: Callable[[Record, bytes], AppendRequest]
    # Whether a new group that begins at the end gets all messages of a queue.
    _is_young: Callable[[str, int], bool]
    _version_2: bool  # whether messages become visible again in retry topics of version 2
    _now_ms: Callable[[], int]  # the wall clock
    _monotonic_ms: Callable[[], int]  # the clock that counts invisible times
    _fetch: Fetch  # reads what is not in memory
    _wake: Callable[[], None]  # schedules `tick`
    _visible: Callable[[str], None]  # called with a topic of which messages may be popped again

    def __attrs_post_init__(self) -> None:
        self._in_flight, self._locks = InFlight(), OrderLocks()
        self.popped: set[tuple[str, str]] = set()  # group and topic that pop now
        self._pulled: set[tuple[str, str]] = set()  # that have popped and pull now
        self._settling: deque[Lapsed] = deque()  # of queues that were reset or deleted
        self._draining: set[tuple[str, str]] = set()  # whose retries go where they are pulled
        self._base_of: dict[str, str] = {}  # retry topic → topic
        self._acknowledged: dict[tuple[str, str, PopHandle], None] = {}
        self._pops = 0
        self._first_pop_ms = 0  # the least time of the next pop
        self._settled: dict[int, int] = {}  # revive queue → offset settled at the last save
        self._progress_at = self._ticked_ms = self._monotonic_ms()

    # --- a start

    def load(self) -> None:
        """Find the messages in flight; the store must be open."""
        self._offsets.on_forget = self._forgotten
        for key in (key for batch in self._offsets.key_batches() for key in batch):
            if not key.startswith(RETRY_PREFIX):
                continue
            topic, _, group = key.rpartition("@")
            for separator in "_+":
                prefix = f"{RETRY_PREFIX}{group}{separator}"
                if topic.startswith(prefix):
                    self.popped.add((group, topic.removeprefix(prefix)))
        for revive_queue in range(REVIVE_QUEUES):
            self._replay(revive_queue)
        for group, topic in self.popped:
            if self._in_flight.of_group(group):
                self._replay_retries(group, topic)

    def _replay_retries(self, group: str, topic: str) -> None:
        """End deliveries of which the retry is stored, but not the record that they are done.

        Both are written at once, so a power cut parts them only at the end of the log: these
        retries are the last of their queue.
        """
        names = [one.topic for one in self._retry_queues(group, topic)]
        for name in (*names, retry_topic(group), dead_letter_topic(group)):
            first, end = self._store.queues.bounds(name, 0)
            start = max(first, end - RETRIES_AT_ONCE)
            for entry in self._store.queues.entries(name, 0, start, end - start):
                record = self._store.reader.record_at(entry.physical_offset)
                said = record and get_property(record.properties, PROPERTY_POP_FROM.encode())
                if not said:
                    continue
                handle = parse_handle(said.decode(), int(said.split(b" ")[-1]))
                popped_from = topic_of_kind(handle.kind, topic, group)
                queue = PopQueue(group, popped_from, handle.queue_id)
                if self._is_in_flight(queue, handle):
                    self._store.append([self._done_record(queue, [handle])])
                    self._in_flight.remove(queue, handle.offset)

    def _replay(self, revive_queue: int) -> None:
        topic = self._records.topic
        first, end = self._store.queues.bounds(topic, revive_queue)
        settled = self._offsets.query(REVIVE_GROUP, topic, revive_queue)
        offset = min(max(settled + 1, first), end)
        while offset < end:
            entries = self._store.queues.entries(topic, revive_queue, offset, CHUNK)
            for revive_offset, entry in enumerate(entries, offset):
                record = self._store.reader.record_at(entry.physical_offset)
                said = None if record is None else decode_pop(record.body)
                if said is not None:
                    self._replay_one(said, revive_queue, revive_offset)
            offset += len(entries)

    def _replay_one(self, said: PopRecord, revive_queue: int, revive_offset: int) -> None:
        if not said.is_checkpoint:
            for offset in said.offsets:
                checkpoint = self._in_flight.get(said.queue, offset)
                if checkpoint is not None and checkpoint.is_of(said.start, said.pop_ms):
                    self._in_flight.remove(said.queue, offset)
            return
        queue, base = said.queue, self._base(said.queue)
        if not said.offsets:
            if said.start == LEFT:
                self.popped.discard((queue.group, base))
            else:
                self._move(queue, said.start)
            return
        self.popped.add((queue.group, base))
        self._move(queue, max(said.offsets[-1] + 1, self._position(queue)))
        left_ms = max(said.pop_ms + said.invisible_ms - self._now_ms(), 0)
        left_ms = min(left_ms, said.invisible_ms)
        # A later pop of the same message, after a reset, may be in a queue that was read before.
        found = [self._in_flight.get(queue, offset) for offset in said.offsets]
        said.offsets = tuple(
            offset
            for offset, one in zip(said.offsets, found, strict=True)
            if one is None or one.pop_ms <= said.pop_ms
        )
        if said.offsets:
            self._add(said, revive_queue, revive_offset, left_ms)

    def _add(self, said: PopRecord, revive_queue: int, revive_offset: int, left_ms: int) -> None:
        checkpoint = PopCheckpoint(
            due_ms=self._monotonic_ms() + left_ms,
            number=0,
            pop_ms=said.pop_ms,
            invisible_ms=said.invisible_ms,
            revive_queue=revive_queue,
            revive_offset=revive_offset,
            start=said.start,
            span=said.offsets[-1] - said.start + 1,
        )
        self._in_flight.add(said.queue, checkpoint, said.offsets)

    def arrived(self, request: AppendRequest) -> None:
        """Take a record that RocketMQ's timer has brought to the end of a revive queue."""
        said, revive_queue = decode_pop(request.body), request.queue_id
        if said is None:
            return
        end = self._store.queues.bounds(self._records.topic, revive_queue)[1]
        if not said.is_checkpoint:
            self._replay_one(said, revive_queue, end)
        elif said.offsets:
            self._add(said, revive_queue, end, FOREIGN_GRACE_MS)
            self._wake()

    # --- pop

    def pop(self, wish: Wish, read: Read) -> Popped:
        """Take messages, if there are some.

        Raises:
            PopFullError: Too many messages are in flight.
            NotInMemoryError: Messages must be read from the disk first; nothing is taken.
            StoreError: The pop could not be stored; nothing is taken.
        """
        in_flight = self._in_flight.of_group(wish.group)
        if in_flight >= GROUP_MAX or self._in_flight.count >= POP_IN_FLIGHT.most:
            raise PopFullError(
                f"{in_flight} messages of group {wish.group} are in flight, "
                f"{self._in_flight.count} of all groups; the limits are {GROUP_MAX} and "
                f"{POP_IN_FLIGHT.most}: acknowledge some first"
            )
        taken, rest = self._find(wish, read)
        found = [one for one in taken if one.records]
        if found:
            self._begin(wish, len(found))
        revive_queue = ORDER_QUEUE if wish.in_order else self._pops % REVIVE_QUEUES
        pop_ms = max(self._now_ms(), self._first_pop_ms)
        if found:
            self._pops += 1
        if wish.in_order:
            for one in found:
                self._lock(one, pop_ms, wish)
        elif found:
            said = [
                PopRecord(one.queue, pop_ms, one.start, tuple(one.offsets), wish.invisible_ms, True)
                for one in found
            ]
            self._store_checkpoints(said, revive_queue, left_ms=wish.invisible_ms)
        for one in taken:  # also past messages that the filter excludes
            if not (wish.in_order and one.records):
                self._move(one.queue, one.next_offset)
        return Popped(pop_ms, revive_queue, [one for one in found if one.records], rest)

    def peek(self, wish: Wish, read: Read) -> list[bytes]:
        taken, _ = self._find(wish, read)
        return [record for one in taken for _, record in one.records]

    def has_messages(self, wish: Wish, read: Read) -> bool:
        """Return whether a pop would get messages now, or after it was repeated at once."""
        taken, rest = self._find(wish, read)
        # The filter may exclude a long run of messages, past which only a pop moves.
        return rest > 0 or any(one.records for one in taken)

    def _begin(self, wish: Wish, queues: int) -> None:
        if wish.in_order and not self._locks.has_room(queues, self._monotonic_ms()):
            raise PopFullError(f"{len(self._locks)} queues are locked: acknowledge messages first")
        key = wish.group, wish.topic
        if key in self.popped:
            return
        self._pulled.discard(key)
        if len(self.popped) + len(self._pulled) >= POP_PAIRS.most:
            raise PopFullError(f"groups pop {POP_PAIRS.most} topics, which is the limit")
        self.popped.add(key)
        self._draining.discard(key)

    def _find(self, wish: Wish, read: Read) -> tuple[list[Taken], int]:
        """Return what a pop takes from each queue, and how much it leaves."""
        ordinary = [
            PopQueue(wish.group, wish.topic, (self._pops + number) % wish.queue_count)
            for number in range(wish.queue_count)
        ]
        if wish.queue_id >= 0:
            ordinary = [PopQueue(wish.group, wish.topic, wish.queue_id)]
        retries = [] if wish.in_order else self._retry_queues(wish.group, wish.topic)
        # Retries come first in one of five pops only, so that they do not keep back new messages.
        queues = [*retries, *ordinary] if self._pops % 5 == 0 else [*ordinary, *retries]
        now_ms = self._monotonic_ms()
        taken: list[Taken] = []
        found = rest = 0
        for queue in queues:
            _, end = self._store.queues.bounds(queue.topic, queue.queue_id)
            start = min(self._position(queue, from_end=wish.from_end), end)
            room = wish.max_count - found
            if wish.in_order and self._locks.is_blocked(queue, wish.attempt_id, now_ms):
                continue
            if room > 0 and start < end:
                one = self._take(queue, start, room, wish, read)
                found += len(one.records)
                taken.append(one)
                start = one.next_offset
            rest += end - start
        return taken, rest

    def _take(self, queue: PopQueue, start: int, room: int, wish: Wish, read: Read) -> Taken:
        is_retry = queue.topic != wish.topic
        done = self._locks.done(queue) if wish.in_order else set()
        wanted = None if is_retry else wish.wanted
        next_offset, records = read(queue, start, room, wanted)
        if done:  # the first one is not among them, so that a pop never searches far
            records = [one for one in records if one[0] not in done]
        if is_retry:
            # Version 1 of the name may be that of another group's ordinary retry topic.
            records = [one for one in records if _was_popped(one[1])]
        return Taken(queue, start, records, next_offset)

    def _retry_queues(self, group: str, topic: str) -> list[PopQueue]:
        names = (pop_retry_topic(topic, group, version_2=one) for one in (False, True))
        found = [name for name in names if name in self._topics]
        self._base_of |= dict.fromkeys(found, topic)
        return [PopQueue(group, name, 0) for name in found]

    def _store_checkpoints(
        self, said: Sequence[PopRecord], revive_queue: int, *more: AppendRequest, left_ms: int
    ) -> int:
        """Store checkpoints and then other records; return where the log ends after them.

        Their messages become visible after `left_ms`.
        """
        self._topics.ensure(self._records.topic, REVIVE_QUEUES)
        now_ms = self._now_ms()
        appended = self._store.append(
            [
                *(
                    self._records.checkpoint(
                        one.queue,
                        revive_queue,
                        one.start,
                        one.offsets,
                        one.pop_ms,
                        one.invisible_ms,
                        now_ms,
                    )
                    for one in said
                ),
                *more,
            ]
        )
        for one, stored in zip(said, appended, strict=False):
            self._add(one, revive_queue, stored.queue_offset, left_ms)
        self._wake()
        return appended[-1].end

    def _lock(self, taken: Taken, pop_ms: int, wish: Wish) -> None:
        """Lock the queue for messages in order; too many deliveries make a dead letter instead."""
        taken.times = self._locks.lock(
            taken.queue,
            taken.offsets,
            taken.next_offset,
            pop_ms=pop_ms,
            invisible_ms=wish.invisible_ms,
            attempt_id=wish.attempt_id,
            now_ms=self._monotonic_ms(),
        )
        config = self._groups.get(wish.group)
        limit = INT32_MAX if config is None else config.retry_max_times
        dead = [one for one in taken.records if taken.times[one[0]] > limit]
        if dead:
            self._topics.ensure(dead_letter_topic(wish.group))
            self._store.append(
                [
                    self._dead_letter(taken.queue, decode_record(one, check_crc=False))
                    for _, one in dead
                ]
            )
            taken.records = [one for one in taken.records if one not in dead]
            for offset, _ in dead:
                self._move_in_order(taken.queue, offset)
        self._wake()

    def _dead_letter(self, queue: PopQueue, record: Record) -> AppendRequest:
        copy = self._retry_copy(record, record.store_host)
        logger.warning(
            "event=dead_letter group=%s from=%s reconsume_times=%d",
            queue.group,
            queue.topic,
            copy.reconsume_times,
        )
        copy.topic, copy.queue_id = self._topics.ensure_dead_letter(queue.group).name, 0
        return copy

    def _move_in_order(self, queue: PopQueue, offset: int) -> int:
        """Acknowledge a message of a locked queue; return where the log must be on disk."""
        position = self._locks.acknowledge(queue, offset)
        self._move(queue, position)
        return self._store_position(queue, position)

    # --- acknowledge, change

    def acknowledge(self, group: str, topic: str, handles: Sequence[PopHandle]) -> int:
        """End the deliveries of one pop from one queue; return where the log must be on disk.

        Raises:
            HandleError: One of the handles does not count any more; the others are acknowledged.
            StoreError: That could not be stored.
        """
        end, refused = 0, None
        valid: list[PopHandle] = []
        queue = PopQueue(group, topic, handles[0].queue_id)
        for handle in handles:
            try:
                if (group, topic, handle) not in self._acknowledged:
                    self._check(queue, handle)
                    valid.append(handle)
                end = self._store.write_offset
            except HandleError as error:
                refused = error
        if valid:
            end = self._store_acknowledgements(queue, valid)
        for handle in valid:
            self._acknowledged[group, topic, handle] = None
            if len(self._acknowledged) > REPEATS_MAX:
                del self._acknowledged[next(iter(self._acknowledged))]
        if refused is not None:
            raise refused
        return end

    def _store_acknowledgements(self, queue: PopQueue, handles: Sequence[PopHandle]) -> int:
        if handles[0].revive_queue == ORDER_QUEUE:
            end = max([self._move_in_order(queue, handle.offset) for handle in handles])
            self._visible(queue.topic)
            return end
        (stored,) = self._store.append([self._done_record(queue, handles)])
        for handle in handles:
            self._in_flight.remove(queue, handle.offset)
        return stored.end

    def _done_record(self, queue: PopQueue, handles: Sequence[PopHandle]) -> AppendRequest:
        first = handles[0]
        offsets = [handle.offset for handle in handles]
        return self._records.acknowledgement(
            queue, first.revive_queue, first.start, offsets, first.pop_ms, self._now_ms()
        )

    def change_invisible(
        self, group: str, topic: str, handle: PopHandle, invisible_ms: int
    ) -> tuple[PopHandle, int]:
        """Hide a message for so long from now on; return its new handle, and where the log must be.

        Raises:
            HandleError: The handle does not count any more.
            StoreError: That could not be stored; the old handle stays valid.
        """
        queue = PopQueue(group, topic, handle.queue_id)
        self._check(queue, handle)
        now_ms = self._monotonic_ms()
        if handle.revive_queue == ORDER_QUEUE:
            left_ms = max(self._now_ms() - handle.pop_ms, 0) + invisible_ms
            left_ms = self._locks.hide(queue, handle.offset, left_ms, now_ms + invisible_ms)
            self._wake()
            return handle._replace(invisible_ms=left_ms), 0
        pop_ms = max(self._now_ms(), handle.pop_ms + 1)  # so that the old handle is another one
        said = PopRecord(queue, pop_ms, handle.offset, (handle.offset,), invisible_ms, True)
        done = self._done_record(queue, [handle])
        end = self._store_checkpoints([said], handle.revive_queue, done, left_ms=invisible_ms)
        changed = handle._replace(start=handle.offset, pop_ms=pop_ms, invisible_ms=invisible_ms)
        return changed, end

    def _check(self, queue: PopQueue, handle: PopHandle) -> None:
        if handle.revive_queue == ORDER_QUEUE:
            counts = self._locks.holds(queue, handle, self._monotonic_ms())
        else:
            counts = self._is_in_flight(queue, handle)
        if not counts or handle.broker_name != self._records.broker_name:
            raise HandleError(
                f"extraInfo={str(handle)!r} names no message that group {queue.group} has in "
                f"flight in queue {queue.queue_id} of {queue.topic}: its invisible time is over, "
                "it was acknowledged or changed, or it was never popped"
            )

    def _is_in_flight(self, queue: PopQueue, handle: PopHandle) -> bool:
        found = self._in_flight.get(queue, handle.offset)
        return found is not None and (
            (found.start, found.pop_ms, found.invisible_ms, found.revive_queue) == handle[:4]
        )

    # --- where groups continue

    def _position(self, queue: PopQueue, *, from_end: bool = False) -> int:
        group, topic, queue_id = queue
        reset = self._offsets.pending_reset(group, topic, queue_id)
        if reset is not None:
            self._reset(queue, reset)
            return reset
        first, end = self._store.queues.bounds(topic, queue_id)
        offset = self._offsets.query(group, topic, queue_id)
        if offset == NO_OFFSET:
            is_new = from_end and not topic.startswith(RETRY_PREFIX)
            offset = end if is_new and not self._is_young(topic, queue_id) else first
            self._move(queue, offset)  # raises if there is no room for it
        return max(offset, first)

    def _reset(self, queue: PopQueue, offset: int) -> None:
        """Continue where an operator has set the group, with nothing in flight."""
        self._clear(queue)
        self._offsets.end_reset(*queue)
        self._move(queue, offset)
        self._store_position(queue, offset)

    def _clear(self, queue: PopQueue) -> None:
        self._locks.release(queue)
        self._first_pop_ms = self._now_ms() + 1  # so that a start can tell which pop is later
        self._settling += self._in_flight.take_queue(queue)
        self._settle()

    def _forgotten(self, group: str, topic: str, queue_ids: Collection[int]) -> None:
        """Forget what is in flight of a topic or group that is deleted, also for a start."""
        queues = [PopQueue(group, topic, queue_id) for queue_id in queue_ids]
        if any((group, self._base(queue)) in self.popped for queue in queues):
            for queue in queues:
                self._clear(queue)
                self._store_position(queue, 0)

    def _move(self, queue: PopQueue, offset: int) -> None:
        group, topic, queue_id = queue
        if self._offsets.query(group, topic, queue_id) != offset:
            self._offsets.keep(group, topic, queue_id, offset)

    def _store_position(self, queue: PopQueue, offset: int) -> int:
        """Store where a group continues; return where the log ends after it."""
        self._topics.ensure(self._records.topic, REVIVE_QUEUES)
        now_ms = self._now_ms()
        record = self._records.checkpoint(queue, 0, offset, (), now_ms, 0, now_ms)
        (stored,) = self._store.append([record])
        return stored.end

    def on_pull(self, group: str, topic: str) -> None:
        """Let a group pull what it has popped: its retries go to the retry topic that it pulls."""
        key = group, topic
        self.popped.discard(key)
        self._pulled.add(key)
        self._draining.add(key)
        self._store_position(PopQueue(group, topic, 0), LEFT)
        self._wake()

    # --- what becomes visible again

    def tick(self) -> float:
        """Make messages visible whose time is over; return the seconds until the next call."""
        now_ms = self._monotonic_ms()
        self._drain()
        try:
            self._settle()
        except StoreError as error:
            logger.warning("event=pop_not_settled error=%r", str(error))
        for _ in range(BATCH_MAX):
            due = self._in_flight.take_due(now_ms)
            if due is None:
                break
            self._revive(due)
        for queue in self._locks.released(self._ticked_ms, now_ms):
            self._visible(queue.topic)
        self._ticked_ms = now_ms
        if now_ms - self._progress_at >= PROGRESS_MS:
            self._progress_at = now_ms
            self._save_progress()
            self._write_again()
        times = self._in_flight.next_due_ms(), self._locks.next_release_ms(now_ms)
        waits = [one - now_ms for one in times if one is not None]
        wait_s = max(min(waits, default=PROGRESS_MS) / 1_000, 0)
        return 0 if self._draining or self._settling else min(wait_s, IDLE_TICK_S)

    def _revive(self, due: Lapsed) -> None:
        """Store messages again, as their next delivery."""
        try:
            records = [self._record(due.queue, offset) for offset in due.offsets]
            copies = [self._copy(due, record) for record in records if record is not None]
            done = self._done_record(due.queue, _handles(due))
            self._store.append([*copies, done])
        except NotInMemoryError as error:
            self._begin_fetch(due, error)
        except NotYetError as error:  # a new topic, which a thread saves
            error.wait(lambda no: self._put_off(due, RETRY_AFTER_ERROR_MS if no else 0), 0)
        except UnfinishedError:  # many new topics
            self._put_off(due, NEW_TOPICS_MS)
        except (StoreError, OSError, RequestRefusedError) as error:
            logger.warning("event=pop_retry_failed queue=%s error=%r", due.queue, str(error))
            self._put_off(due, RETRY_AFTER_ERROR_MS)

    def _record(self, queue: PopQueue, offset: int) -> Record | None:
        entries = self._store.queues.entries(queue.topic, queue.queue_id, offset, 1)
        encoded = self._store.reader.record_bytes(entries[0].physical_offset) if entries else None
        return None if encoded is None else decode_record(encoded, check_crc=False)

    def _copy(self, due: Lapsed, record: Record) -> AppendRequest:
        group, base = due.queue.group, self._base(due.queue)
        config = self._groups.get(group)
        copy = self._retry_copy(record, record.store_host)
        if config is not None and record.reconsume_times >= config.retry_max_times:
            return self._with_source(self._dead_letter(due.queue, record), due, record.queue_offset)
        if (group, base) in self._pulled:
            copy.topic = self._topics.ensure_retry(group).name
        else:
            name = due.queue.topic
            if not name.startswith(RETRY_PREFIX):
                name = pop_retry_topic(base, group, version_2=self._version_2)
            copy.topic = self._topics.ensure_retry(name.removeprefix(RETRY_PREFIX)).name
            self._base_of.setdefault(name, base)
        copy.queue_id = 0
        return self._with_source(copy, due, record.queue_offset)

    def _with_source(self, copy: AppendRequest, due: Lapsed, offset: int) -> AppendRequest:
        """Return a retry with what a start must know; see `_replay_retries`."""
        (handle,) = _handles(due._replace(offsets=[offset]))
        added = [(PROPERTY_POP_FROM, str(handle))]
        if get_property(copy.properties, PROPERTY_FIRST_POP_TIME.encode()) is None:
            added.append((PROPERTY_FIRST_POP_TIME, str(due.checkpoint.pop_ms)))
        copy.properties = with_properties(copy.properties, added)
        return copy

    def _begin_fetch(self, due: Lapsed, missing: NotInMemoryError) -> None:
        def on_fetched(is_there: bool) -> None:
            self._put_off(due, 0 if is_there else RETRY_AFTER_ERROR_MS)

        self._fetch(missing, on_fetched)

    def _put_off(self, due: Lapsed, ms: int) -> None:
        checkpoint = due.checkpoint._replace(due_ms=self._monotonic_ms() + ms)
        self._in_flight.add(due.queue, checkpoint, due.offsets)
        self._wake()

    def _settle(self) -> None:
        """Store that some messages are done, without another delivery; the tick goes on."""
        batch = list(islice(self._settling, BATCH_MAX))
        if batch:
            self._store.append([self._done_record(due.queue, _handles(due)) for due in batch])
            for _ in batch:
                self._settling.popleft()
            self._wake()

    def _base(self, queue: PopQueue) -> str:
        """Return the topic of which a queue has messages or retries."""
        for separator in "_+":
            prefix = f"{RETRY_PREFIX}{queue.group}{separator}"
            if queue.topic.startswith(prefix):
                return queue.topic.removeprefix(prefix)
        return queue.topic

    def topic_of(self, topic: str) -> str:
        """Return the topic whose pops get the messages of a topic, perhaps a retry topic."""
        return self._base_of.get(topic, topic)

    def _drain(self) -> None:
        """Pop some retries of groups that pull now, so that they become visible where they pull."""
        for key in list(islice(self._draining, BATCH_MAX)):
            group, topic = key
            found = 0
            for queue in self._retry_queues(group, topic):
                _, end = self._store.queues.bounds(queue.topic, 0)
                start = self._position(queue)
                offsets = tuple(range(start, min(end, start + 32)))
                if offsets:
                    said = PopRecord(queue, self._now_ms(), start, offsets, 0, True)
                    self._store_checkpoints([said], 0, left_ms=0)
                    self._move(queue, offsets[-1] + 1)
                    found += len(offsets)
            if not found:
                self._draining.discard(key)

    # --- how far the revive topic is settled

    def _save_progress(self) -> None:
        """Save what was settled when this was called last: the offsets of groups are saved too."""
        topic = self._records.topic
        for revive_queue in range(REVIVE_QUEUES):
            settled = self._settled.get(revive_queue, -1)
            if settled > self._offsets.query(REVIVE_GROUP, topic, revive_queue):
                self._offsets.keep(REVIVE_GROUP, topic, revive_queue, settled)
            chunk = self._in_flight.first_chunk(revive_queue)
            _, end = self._store.queues.bounds(topic, revive_queue)
            self._settled[revive_queue] = (end if chunk is None else min(chunk * CHUNK, end)) - 1

    def _write_again(self) -> None:
        """Store old checkpoints again of which messages are in flight; see `OLD_CHUNKS`."""
        for revive_queue in range(REVIVE_QUEUES):
            chunk = self._in_flight.first_chunk(revive_queue)
            _, end = self._store.queues.bounds(self._records.topic, revive_queue)
            if chunk is None or end // CHUNK - chunk < OLD_CHUNKS:
                continue
            try:
                self._write_chunk_again(revive_queue, chunk)
            except (NotInMemoryError, StoreError, OSError) as error:
                logger.warning("event=pop_not_written_again error=%r", str(error))

    def _write_chunk_again(self, revive_queue: int, chunk: int) -> None:
        topic = self._records.topic
        entries = self._store.queues.entries(topic, revive_queue, chunk * CHUNK, CHUNK)
        for entry in entries:
            record = self._store.reader.record_at(entry.physical_offset)
            said = None if record is None else decode_pop(record.body)
            if said is None or not said.is_checkpoint:
                continue
            left = {
                offset: one
                for offset in said.offsets
                if (one := self._in_flight.get(said.queue, offset)) is not None
                and one.is_of(said.start, said.pop_ms)
            }
            for checkpoint in set(left.values()):
                said.offsets = tuple(left)
                left_ms = max(checkpoint.due_ms - self._monotonic_ms(), 0)
                self._store_checkpoints([said], revive_queue, left_ms=left_ms)

    def kept(self) -> Kept:
        return {
            POP_IN_FLIGHT: self._in_flight.count + len(self._settling),
            POP_LOCKS: len(self._locks),
            POP_PAIRS: len(self.popped) + len(self._pulled),
        }


def _handles(due: Lapsed) -> list[PopHandle]:
    _, _, pop_ms, invisible_ms, revive_queue, _, start, _ = due.checkpoint
    checkpoint = start, pop_ms, invisible_ms, revive_queue
    queue, kind = due.queue, kind_of(due.queue.topic)
    return [PopHandle(*checkpoint, kind, "", queue.queue_id, offset) for offset in due.offsets]


def _was_popped(record: bytes) -> bool:
    decoded = decode_record(record, check_crc=False)
    return get_property(decoded.properties, PROPERTY_FIRST_POP_TIME.encode()) is not None
