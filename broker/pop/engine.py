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

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
from attrs import define

from halfmq.remoting.pop import ORDER_QUEUE, PopHandle, parse_handle, topic_of_kind
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import PROPERTY_POP_FROM, get_property
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import RETRY_PREFIX, dead_letter_topic, retry_topic
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ..errors import NotYetError, RequestRefusedError, UnfinishedError
from ..limits.kept import POP_IN_FLIGHT, POP_LOCKS, POP_PAIRS, Kept
from ..loop.fetches import Fetch
from ..net.long_polling import Wanted
from ..tables.consumer_offsets import NO_OFFSET, ConsumerOffsetTable
from .in_flight import Lapsed, PopQueue
from .order import OrderLock
from .records import LEFT, REVIVE_QUEUES, PopRecord, decode_pop
from .retries import Retries, base_topic, was_popped
from .revive_log import ReviveLog

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
    _offsets: ConsumerOffsetTable  # where the groups continue
    _log: ReviveLog  # what pops and acknowledgements store
    _retries: Retries  # what becomes visible again
    # Whether a new group that begins at the end gets all messages of a queue.
    _is_young: Callable[[str, int], bool]
    _now_ms: Callable[[], int]  # the wall clock
    _monotonic_ms: Callable[[], int]  # the clock that counts invisible times
    _fetch: Fetch  # reads what is not in memory
    _wake: Callable[[], None]  # schedules `tick`
    _visible: Callable[[str], None]  # called with a topic of which messages may be popped again

    def __attrs_post_init__(self) -> None:
        self._in_flight, self._locks = self._log.in_flight, self._log.locks
        self.popped: set[tuple[str, str]] = set()  # group and topic that pop now
        self._pulled: set[tuple[str, str]] = set()  # that have popped and pull now
        self._settling: deque[Lapsed] = deque()  # of queues that were reset or deleted
        self._draining: set[tuple[str, str]] = set()  # whose retries go where they are pulled
        self._acknowledged: dict[tuple[str, str, PopHandle], None] = {}
        self._pops = 0
        self._first_pop_ms = 0  # the least time of the next pop
        self._progress_at = self._ticked_ms = self._monotonic_ms()

    def load(self) -> None:
        """Find the messages in flight; the store must be open."""
        self._offsets.on_forget = self._forgotten
        for key in (key for batch in self._offsets.key_batches() for key in batch):
            topic, _, group = key.rpartition("@")
            base = base_topic(group, topic)
            if base != topic:
                self.popped.add((group, base))
        for revive_queue in range(REVIVE_QUEUES):
            for offset, said in self._log.read(revive_queue):
                self._replay_one(said, revive_queue, offset)
        for group, topic in self.popped:
            if self._in_flight.of_group(group):
                self._replay_retries(group, topic)

    def _replay_retries(self, group: str, topic: str) -> None:
        """End deliveries of which the retry is stored, but not the record that they are done.

        Both are written at once, so a power cut parts them only at the end of the log: these
        retries are the last of their queue.
        """
        names = [one.topic for one in self._retries.queues(group, topic)]
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
                    self._store.append([self._log.done(queue, [handle])])
                    self._in_flight.remove(queue, handle.offset)

    def _replay_one(self, said: PopRecord, revive_queue: int, revive_offset: int) -> None:
        if not said.is_checkpoint:
            for offset in said.offsets:
                checkpoint = self._in_flight.get(said.queue, offset)
                if checkpoint is not None and checkpoint.is_of(said.start, said.pop_ms):
                    self._in_flight.remove(said.queue, offset)
            return
        queue, base = said.queue, base_topic(said.queue.group, said.queue.topic)
        if not said.offsets:
            if said.start == LEFT:
                self.popped.discard((queue.group, base))
                self._locks.end(queue.group, queue.topic)
            else:
                self._move(queue, said.start)
                self._log.set_lock(queue, said.lock, revive_offset)
            if said.lock is not None:
                self.popped.add((queue.group, base))
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
            self._log.add(said, revive_queue, revive_offset, left_ms)

    def arrived(self, request: AppendRequest) -> None:
        """Take a record that RocketMQ's timer has brought to the end of a revive queue."""
        said, revive_queue = decode_pop(request.body), request.queue_id
        if said is None:
            return
        end = self._store.queues.bounds(self._log.topic, revive_queue)[1]
        if not said.is_checkpoint:
            self._replay_one(said, revive_queue, end)
        elif said.offsets:
            self._log.add(said, revive_queue, end, FOREIGN_GRACE_MS)
            self._wake()

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
                PopRecord(one.queue, pop_ms, one.start, tuple(one.offsets), wish.invisible_ms)
                for one in found
            ]
            self._log.store_checkpoints(said, revive_queue, left_ms=wish.invisible_ms)
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
        retries = [] if wish.in_order else self._retries.queues(wish.group, wish.topic)
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
            records = [one for one in records if was_popped(one[1])]
        return Taken(queue, start, records, next_offset)

    def _lock(self, taken: Taken, pop_ms: int, wish: Wish) -> None:
        """Lock the queue for messages in order; too many deliveries make a dead letter instead."""
        lock = self._locks.next(
            taken.queue,
            taken.offsets,
            taken.next_offset,
            pop_ms=pop_ms,
            invisible_ms=wish.invisible_ms,
            attempt_id=wish.attempt_id,
        )
        taken.times, limit = lock.times, self._retries.limit(wish.group)
        dead = [one for one in taken.records if lock.times.get(one[0], 0) > limit]
        for offset, _ in dead:
            lock = lock.without(offset)
        letters = self._retries.dead_letters(taken.queue, [one for _, one in dead]) if dead else ()
        self._store_lock(taken.queue, lock, letters)
        taken.records = [one for one in taken.records if one not in dead]

    def _store_lock(
        self, queue: PopQueue, lock: OrderLock, more: Sequence[AppendRequest] = ()
    ) -> int:
        """Store what is left of a lock and where the group continues; return the end of the log."""
        position = lock.position
        end = self._log.store_position(queue, position, lock if lock.invisible_ms else None, more)
        self._move(queue, position)
        self._wake()
        return end

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
            held = self._locks.get(queue)
            assert held is not None  # or the handles would not count
            lock = held.lock
            for handle in handles:
                lock = lock.without(handle.offset)
            end = self._store_lock(queue, lock)
            self._visible(queue.topic)
            return end
        (stored,) = self._store.append([self._log.done(queue, handles)])
        for handle in handles:
            self._in_flight.remove(queue, handle.offset)
        return stored.end

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
        if handle.revive_queue == ORDER_QUEUE:
            held = self._locks.get(queue)
            assert held is not None  # or the handle would not count
            lock = held.lock.hidden(
                handle.offset, self._monotonic_ms() - held.popped_ms + invisible_ms
            )
            end = self._store_lock(queue, lock)
            return handle._replace(invisible_ms=lock.invisible_ms[handle.offset]), end
        pop_ms = max(self._now_ms(), handle.pop_ms + 1)  # so that the old handle is another one
        said = PopRecord(queue, pop_ms, handle.offset, (handle.offset,), invisible_ms)
        done = self._log.done(queue, [handle])
        end = self._log.store_checkpoints([said], handle.revive_queue, done, left_ms=invisible_ms)
        changed = handle._replace(start=handle.offset, pop_ms=pop_ms, invisible_ms=invisible_ms)
        return changed, end

    def _check(self, queue: PopQueue, handle: PopHandle) -> None:
        if handle.revive_queue == ORDER_QUEUE:
            counts = self._locks.holds(queue, handle, self._monotonic_ms())
        else:
            counts = self._is_in_flight(queue, handle)
        if not counts or handle.broker_name != self._log.broker_name:
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
        self._log.store_position(queue, offset)

    def _clear(self, queue: PopQueue) -> None:
        self._locks.put(queue, None)
        self._first_pop_ms = self._now_ms() + 1  # so that a start can tell which pop is later
        self._settling += self._in_flight.take_queue(queue)
        self._settle()

    def _forgotten(self, group: str, topic: str, queue_ids: Collection[int]) -> None:
        """Forget what is in flight of a topic or group that is deleted, also for a start."""
        queues = [PopQueue(group, topic, queue_id) for queue_id in queue_ids]
        if any((group, base_topic(group, topic)) in self.popped for queue in queues):
            for queue in queues:
                self._clear(queue)
                self._log.store_position(queue, 0)

    def _move(self, queue: PopQueue, offset: int) -> None:
        group, topic, queue_id = queue
        if self._offsets.query(group, topic, queue_id) != offset:
            self._offsets.keep(group, topic, queue_id, offset)

    def on_pull(self, group: str, topic: str) -> None:
        """Let a group pull what it has popped: its retries go to the retry topic that it pulls."""
        key = group, topic
        self.popped.discard(key)
        self._pulled.add(key)
        self._draining.add(key)
        self._locks.end(group, topic)
        self._log.store_position(PopQueue(group, topic, 0), LEFT)
        self._wake()

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
            self._log.save_progress()
            self._log.write_again()
        times = self._in_flight.next_due_ms(), self._locks.next_release_ms(now_ms)
        waits = [one - now_ms for one in times if one is not None]
        wait_s = max(min(waits, default=PROGRESS_MS) / 1_000, 0)
        return 0 if self._draining or self._settling else min(wait_s, IDLE_TICK_S)

    def _revive(self, due: Lapsed) -> None:
        """Store messages again, as their next delivery."""
        try:
            records = [self._record(due.queue, offset) for offset in due.offsets]
            pulls = (due.queue.group, base_topic(*due.queue[:2])) in self._pulled
            copies = [
                self._retries.copy(due, one, pulls=pulls) for one in records if one is not None
            ]
            done = self._log.done(due.queue, due.handles())
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
            self._store.append([self._log.done(due.queue, due.handles()) for due in batch])
            for _ in batch:
                self._settling.popleft()
            self._wake()

    def _drain(self) -> None:
        """Pop some retries of groups that pull now, so that they become visible where they pull."""
        for key in list(islice(self._draining, BATCH_MAX)):
            group, topic = key
            found = 0
            for queue in self._retries.queues(group, topic):
                _, end = self._store.queues.bounds(queue.topic, 0)
                start = self._position(queue)
                offsets = tuple(range(start, min(end, start + 32)))
                if offsets:
                    said = PopRecord(queue, self._now_ms(), start, offsets)
                    self._log.store_checkpoints([said], 0, left_ms=0)
                    self._move(queue, offsets[-1] + 1)
                    found += len(offsets)
            if not found:
                self._draining.discard(key)

    def kept(self) -> Kept:
        return {
            POP_IN_FLIGHT: self._in_flight.count + len(self._settling),
            POP_LOCKS: len(self._locks),
            POP_PAIRS: len(self.popped) + len(self._pulled),
        }
