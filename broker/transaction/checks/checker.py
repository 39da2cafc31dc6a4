"""Check-back: if a decision does not arrive, the broker sends checks to the producer's group.

Each undecided transaction that needs a check is in exactly one stage, recorded in ``Pending.due``:
in the timetable until it is due (the number of its bucket), then in the queue of its group
(``QUEUED``), then sent to a producer (``IN_FLIGHT``), and then in the timetable again. Before it is
sent, its half may have to be read from the disk (``READING``). A decision only removes the
transaction from the table; an entry of a stage that is not in the table, or is there with another
stage, is dropped.

A halfmq client acknowledges a check as soon as it has received it. Only then is the check counted;
after a refusal, a lost connection or no acknowledgement the check goes to the next member of the
group. If each member has been tried, it is retried later. To official clients a check is sent
one-way, and counted when it was written to an open connection that reads. After ``check_max``
counted checks, and the time for the last answer, the transaction is parked. While no member of a
group is connected, no check is sent or counted, however long that takes.

Each group has a queue, and the groups take turns, so a group with very many due checks, or one that
does not answer, delays no other. All work is done in ``tick``, in slices; events (an
acknowledgement, a half that was read) are queued for the next slice.

Times are on the monotonic clock, so a step of the wall clock moves no check. Only after a restart
is the age of a half taken from its store timestamp and the wall clock; a timestamp in the future
counts as age 0. So the first check is never later than the wait after the prepare or the restart.
The producer's clock is not used.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Final, NamedTuple, Protocol

from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import CheckTransactionStateRequestHeader
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.topics import HALF_TOPIC

from ...config import TransactionConfig
from ...loop.fetches import Fetch
from ...loop.slices import Slice
from ...ports import Connection
from ..half import StoredHalf, unique_key
from ..half_records import check_body
from ..state.pending import Pending, PendingTable
from ..state.state_machine import TransactionEvent, Verdict, outcome
from .group_queues import Group, GroupQueues
from .timetable import BUCKET_MS, Timetable

logger = logging.getLogger(__name__)

BACK_OFF: Final = 1.5
"""Factor by which the pause grows after each delivered check."""

BACK_OFF_MAX_MS: Final = 600_000
"""Longest pause between two checks, unless the configured interval is longer: ten minutes."""

JITTER: Final = 0.1
"""Share by which a pause is lengthened or shortened at random, to spread checks due together."""

CHECKS_PER_TURN: Final = 8
"""Checks of one group before the turn of the next group."""

ENTRIES_PER_STEP: Final = 50
"""Due transactions processed between two reads of the clock. Most have been decided and take 0.2
us; to queue one for its group takes a microsecond."""

STALE_MAX: Final = 100_000
"""Stale timetable entries of decided transactions, beyond two per undecided one, before a sweep: 4
MB. A message may request a first check after days, and any number may be decided until then."""

SWEEP_PAUSE_MS: Final = 5
"""Time between two slices of a sweep, which takes a few hundredths of the loop's time."""

DURABLE_WAIT_MS: Final = 500
"""Time until the check of a half that was not on disk is tried again; usually the half is on disk
by then, or the disk has failed."""

RESTART_GRACE_MS: Final = 400
"""Time after a start before the first check: producers that reconnect at once may send the
decision. A group that reconnects later is checked then."""

COLD_READS_MAX: Final = 16
"""Halves fetched at one time: enough to keep the threads busy, and so few that a request that needs
a thread waits for at most four reads. Their size is at most 64 MiB."""

# Stages of a transaction outside the timetable; in the timetable, `due` is the bucket's number.
UNPLANNED: Final = 0
QUEUED: Final = -1
IN_FLIGHT: Final = -2
READING: Final = -3

_SUCCESS: Final = int(ResponseCode.SUCCESS)
_CHECK: Final = RequestCode.CHECK_TRANSACTION_STATE


class ProducerDirectory(Protocol):
    """The connected producers."""

    def producers_of(self, group: str) -> Sequence[Connection]: ...

    def has_left(self, group: str, connection: Connection) -> bool:
        """Return whether a connection has left the group but is still open."""
        ...


class _Acknowledgement(NamedTuple):
    """The result of a check that has to be acknowledged."""

    entry: Pending
    producer: Connection  # to which the check was sent
    tried: tuple[Connection, ...]  # producers that did not accept it before
    accepted: bool


@define(eq=False, repr=False, slots=False)
class Checker:
    """Sends check requests, and parks a transaction after ``check_max`` of them."""

    _table: PendingTable  # the undecided transactions
    _producers: ProducerDirectory  # the connected producers
    _config: TransactionConfig  # times and number of checks
    _broker_name: str  # sent with each check
    # Returns the half at an offset; None if there is no valid one. Raises NotInMemoryError if
    # it must be read from the disk first.
    _read_half: Callable[[int], StoredHalf | None]
    _fetch: Fetch  # reads what is not in memory and calls back on this thread, at once or later
    # Parks a transaction; returns False if that could not be recorded.
    _park: Callable[[Pending, StoredHalf], bool]
    _random: Random  # source of the jitter
    _monotonic_ms: Callable[[], int]  # the clock of ``tick``
    _wake: Callable[[], None] = lambda: None  # schedules ``tick`` soon
    # Returns whether the half at an offset is on disk.
    _is_durable: Callable[[int], bool] = lambda _offset: True
    # Returns whether a producer may see the message, which a check contains.
    _may_see: Callable[[Connection, StoredHalf], bool] = lambda _producer, _half: True

    def __attrs_post_init__(self) -> None:
        self._timeout_ms = self._config.timeout_ms
        self._timetable = Timetable()
        self._sweep: Iterator[None] | None = None  # of the timetable, while one is running
        self._bucket = 0  # number of the bucket that is being processed
        self._due = array("q")  # the rest of this bucket, in reverse order
        self._queues = GroupQueues(
            has_member=lambda group: bool(self._members_of(group)),
            is_undecided=lambda offset: offset in self._table,
        )
        self._acknowledgements: deque[_Acknowledgement] = deque()
        self._arrived: list[tuple[Pending, tuple[Connection, ...], bool]] = []
        self._fetching = 0  # halves requested and not yet removed from `_arrived`
        self._fetched: set[int] = set()  # halves whose next read may wait for the disk
        self._cold_blocked: dict[str, Group] = {}  # groups that wait until fewer halves are fetched
        # Within one tick: members by group, and producers that accept no more.
        self._members: dict[str, Sequence[Connection]] = {}
        self._full: set[Connection] = set()
        self.sent = 0
        self.delivered = 0
        self.not_accepted = 0  # refused, lost with the connection, or without acknowledgement

    def configure(self, config: TransactionConfig) -> None:
        """Apply new times to checks that are scheduled from now on."""
        self._config = config
        self._timeout_ms = config.timeout_ms

    def schedule_first(self, entry: Pending) -> None:
        """Schedule the first check of a transaction that has just been prepared."""
        # `_first_wait_ms` without another call, for the hot path
        wait_ms = entry.progress.immunity_s * 1_000 or self._timeout_ms
        entry.due = self._timetable.add(self._monotonic_ms() + wait_ms, entry.offset)

    def schedule_again(self, entry: Pending, age_ms: int, *, grace_ms: int = 0) -> None:
        """Schedule the next check of a transaction that was restored or resumed.

        Args:
            entry: The transaction.
            age_ms: Milliseconds since its half was stored, by the wall clock. Negative if that
                clock was set back meanwhile; then the whole wait begins now.
            grace_ms: Shortest time until the check.
        """
        wait_ms = self._first_wait_ms(entry) - max(age_ms, 0)
        if wait_ms < grace_ms:
            wait_ms = grace_ms
            if entry.checks >= self._config.check_max:
                # The last check may have been sent just before the restart.
                wait_ms += self._config.check_interval_ms
        self._schedule(entry, self._monotonic_ms() + wait_ms)

    def _first_wait_ms(self, entry: Pending) -> int:
        # As in RocketMQ, the time requested by the message replaces the default, longer or shorter.
        return entry.immunity_s * 1_000 or self._timeout_ms

    def on_producer(self, group: str) -> None:
        """Send the due checks of a group; one of its producers has connected."""
        self._queues.on_connected(group)

    def next_check_in_ms(self, entry: Pending) -> int | None:
        """Return the milliseconds until the next check; None if it is not scheduled.

        A check is not scheduled if it is due but no producer is connected, if it is being sent, or
        if the transaction is parked.
        """
        if entry.due <= 0 or not _needs_check(entry):
            return None
        return max(entry.due * BUCKET_MS - self._monotonic_ms(), 0)

    @property
    def waiting_for_producers(self) -> int:
        """Due transactions without a connected producer; some may have been decided meanwhile."""
        return self._queues.without_members

    def tick(self, now_ms: int, time_slice: Slice) -> int | None:
        """Do what is due, in a slice; return the milliseconds until the next call, or None."""
        self._members.clear()
        self._full.clear()
        self._process_acknowledgements(now_ms, time_slice)
        self._process_fetched(now_ms)
        self._queues.run_retries(now_ms, time_slice)
        self._queue_due(now_ms, time_slice)
        self._serve_groups(now_ms, time_slice)
        self._drop_stale(time_slice)
        if self._queues.has_turns or self._due or self._acknowledgements or self._arrived:
            return 0
        at_ms = [self._timetable.next_due_ms, self._queues.next_retry_ms]
        waits = [one - now_ms for one in at_ms if one is not None]
        if self._sweep is not None:
            waits.append(SWEEP_PAUSE_MS)
        return max(min(waits), 0) if waits else None

    def _drop_stale(self, time_slice: Slice) -> None:
        """Remove stale entries of decided transactions if there are too many."""
        timetable = self._timetable
        if self._sweep is None and timetable.size > 2 * len(self._table) + STALE_MAX:
            self._sweep = timetable.sweep(self._is_planned)
        if self._sweep is not None and time_slice.advance(self._sweep):
            self._sweep = None

    def _is_planned(self, offset: int, number: int) -> bool:
        entry = self._table.get(offset)
        return entry is not None and entry.due == number

    def _queue_due(self, now_ms: int, time_slice: Slice) -> None:
        """Move due transactions from the timetable to the queues of their groups."""
        find = self._table.get
        while True:
            for _ in range(ENTRIES_PER_STEP):
                if not self._due:
                    found = self._timetable.pop_due(now_ms)
                    if found is None:
                        return
                    self._bucket, self._due = found
                    self._due.reverse()
                entry = find(self._due.pop())
                if entry is None or entry.due != self._bucket:
                    continue  # decided, or scheduled for another time
                if _needs_check(entry):
                    self._enqueue(entry)
                else:
                    entry.due = UNPLANNED
            if time_slice.is_over:
                return

    def _enqueue(self, entry: Pending, *, first: bool = False) -> Group:
        entry.due = QUEUED
        return self._queues.add(entry.group, entry.offset, first=first)

    def _serve_groups(self, now_ms: int, time_slice: Slice) -> None:
        """Serve the groups in turn, as many as fit into the slice, and at least one."""
        queues = self._queues
        while queues.has_turns:
            group = queues.next_turn()
            self._serve_group(group, now_ms, time_slice)
            queues.end_turn(group, now_ms)
            if time_slice.is_over:
                return

    def _serve_group(self, group: Group, now_ms: int, time_slice: Slice) -> None:
        waiting = group.waiting
        entries = checks = 0
        while (
            waiting
            and checks < CHECKS_PER_TURN
            and entries < ENTRIES_PER_STEP
            and not group.blocked
        ):
            entries += 1
            offset = waiting.popleft()
            is_fetched = offset in self._fetched
            self._fetched.discard(offset)
            entry = self._table.get(offset)
            if entry is None or entry.due != QUEUED:
                group.tried.pop(offset, None)  # decided, or scheduled for another time
            elif not _needs_check(entry):
                group.tried.pop(offset, None)
                entry.due = UNPLANNED
            elif self._process_safely(entry, group, is_fetched, now_ms):
                checks += 1
                if time_slice.is_over:  # a message of 4 MiB takes ten milliseconds by itself
                    return

    def _process_safely(self, entry: Pending, group: Group, is_fetched: bool, now_ms: int) -> bool:
        try:
            return self._process(entry, group, is_fetched, now_ms)
        except Exception:
            # A fault of one half must not stop the others; it is kept and tried again.
            logger.exception("event=check_failed half_offset=%d", entry.offset)
            group.tried.pop(entry.offset, None)
            self._schedule(entry, now_ms + self._config.check_interval_ms)
            return True

    def _process(self, entry: Pending, group: Group, is_fetched: bool, now_ms: int) -> bool:
        """Send a check of one transaction, or park it; return False if only a lookup was needed."""
        if not self._is_durable(entry.offset):
            # After a power cut another half may get its offset, and a decision in answer to this
            # check would end that one.
            self._schedule(entry, now_ms + DURABLE_WAIT_MS)
            return True
        tried = group.tried.get(entry.offset, ())
        parks = entry.checks >= self._config.check_max
        target = None if parks else self._next_target(entry, tried)
        if target is None and not parks:
            self._set_aside(entry, group, now_ms, tried_all=bool(tried))
            return False
        try:
            with allowed_to_wait(is_fetched):
                half = self._read_half(entry.offset)
        except NotInMemoryError as missing:
            self._fetch_half(entry, group, tried, missing)
            return True
        if half is None:
            self._retry_later(entry, now_ms)
            group.tried.pop(entry.offset, None)
            return True
        if target is None:
            entry.due = UNPLANNED
            if not self._park(entry, half):
                self._schedule(entry, now_ms + self._config.check_interval_ms)
            return True
        header, body = self._check_request(entry, half)
        while target is not None:
            if not self._may_see(target, half):
                tried = group.tried[entry.offset] = (*tried, target)
            elif self._send(entry, target, tried, header, body):
                group.tried.pop(entry.offset, None)
                if entry.due != IN_FLIGHT:
                    self.delivered += 1
                    self._count_delivered(entry, now_ms)
                return True
            else:
                self._full.add(target)
            target = self._next_target(entry, tried)
        self._set_aside(entry, group, now_ms, tried_all=bool(tried))
        return True

    def _set_aside(self, entry: Pending, group: Group, now_ms: int, *, tried_all: bool) -> None:
        """Set a transaction aside: its check can be sent to no producer now."""
        if tried_all:
            del group.tried[entry.offset]
            self._queues.not_accepted_by_any(group, entry.offset, now_ms)
        elif self._members_of(entry.group):
            self._queues.not_writable(group, entry.offset, now_ms)
        else:
            if not group.without_member:
                logger.warning(
                    "event=group_without_members group=%s half_offset=%d undecided=%d",
                    entry.group,
                    entry.offset,
                    self._table.count_of(entry.group),
                )
            self._queues.no_member(group, entry.offset, now_ms)

    def _members_of(self, group: str) -> Sequence[Connection]:
        members = self._members.get(group)
        if members is None:
            members = self._members[group] = self._producers.producers_of(group)
        return members

    def _next_target(self, entry: Pending, tried: tuple[Connection, ...]) -> Connection | None:
        """Return the producer to send the next check to; None if none can be written to.

        The first check goes to the connection that prepared the message, even before it is
        registered as a member, unless it has left the group. Later checks rotate through the whole
        group, so that other members get one if some member never answers.
        """
        owner = entry.owner
        if owner is not None and (owner.closed or self._producers.has_left(entry.group, owner)):
            entry.owner = owner = None
        members = self._members_of(entry.group)
        if (
            owner is not None
            and (not entry.checks or not members)
            and self._can_take(owner)
            and owner not in tried
        ):
            return owner
        count = len(members)
        first = entry.queue_offset + entry.checks
        for number in range(first, first + count):
            member = members[number % count]
            if self._can_take(member) and member not in tried:
                return member
        return None

    def _can_take(self, producer: Connection) -> bool:
        return producer.writable and not producer.closed and producer not in self._full

    def _send(
        self,
        entry: Pending,
        target: Connection,
        tried: tuple[Connection, ...],
        header: CheckTransactionStateRequestHeader,
        body: bytes,
    ) -> bool:
        """Send a check; mark it as in flight if the producer acknowledges checks."""
        if target.acknowledges:
            on_acknowledgement = partial(self._on_acknowledgement, entry, target, tried)
            if not target.ask(_CHECK, header, body, on_acknowledgement):
                return False
            entry.due = IN_FLIGHT
        elif not target.send_request(_CHECK, header, body):
            return False
        entry.sent += 1
        self.sent += 1
        logger.debug(
            "event=transaction_check half_offset=%d group=%s peer=%s sent=%d",
            entry.offset,
            entry.group,
            target.name,
            entry.sent,
        )
        return True

    def _check_request(
        self, entry: Pending, half: StoredHalf
    ) -> tuple[CheckTransactionStateRequestHeader, bytes]:
        offset_id = offset_message_id(half.store_host, entry.offset)
        key = unique_key(half) or offset_id
        header = CheckTransactionStateRequestHeader(
            topic=HALF_TOPIC,
            tran_state_table_offset=entry.queue_offset,
            commit_log_offset=entry.offset,
            msg_id=key,
            transaction_id=key,
            offset_msg_id=offset_id,
            broker_name=self._broker_name,
        )
        return header, check_body(half, entry.checks + 1)

    def _schedule(self, entry: Pending, due_ms: int) -> None:
        entry.due = self._timetable.add(due_ms, entry.offset)

    def _count_delivered(self, entry: Pending, now_ms: int) -> None:
        entry.checks += 1
        self._schedule(entry, now_ms + self._pause_ms(entry.checks))

    def _pause_ms(self, delivered: int) -> int:
        """Return how long to wait for the answer to a check, by its number from 1."""
        interval_ms = self._config.check_interval_ms
        pause_ms = interval_ms * BACK_OFF ** min(delivered - 1, 64)  # finite, whatever the number
        pause_ms = min(pause_ms, max(interval_ms, BACK_OFF_MAX_MS))
        return round(pause_ms * self._random.uniform(1 - JITTER, 1 + JITTER))

    def _on_acknowledgement(
        self,
        entry: Pending,
        producer: Connection,
        tried: tuple[Connection, ...],
        answer: RemotingCommand | None,
    ) -> None:
        """Queue the result for the next tick; connections call this at any time."""
        accepted = answer is not None and answer.code == _SUCCESS
        self._acknowledgements.append(_Acknowledgement(entry, producer, tried, accepted))
        if len(self._acknowledgements) == 1:
            self._wake()

    def _process_acknowledgements(self, now_ms: int, time_slice: Slice) -> None:
        acknowledgements = self._acknowledgements
        while acknowledgements:
            entry, producer, tried, accepted = acknowledgements.popleft()
            is_current = entry.due == IN_FLIGHT and self._table.get(entry.offset) is entry
            if accepted:
                self._queues.accepted(entry.group)
                self.delivered += 1
                if is_current:
                    self._count_delivered(entry, now_ms)
            else:
                self._queues.not_accepted(entry.group)
                self.not_accepted += 1
                if is_current:
                    group = self._enqueue(entry, first=True)
                    group.tried[entry.offset] = (*tried, producer)
            if time_slice.is_over:
                return

    def _fetch_half(
        self, entry: Pending, group: Group, tried: tuple[Connection, ...], missing: NotInMemoryError
    ) -> None:
        """Start to fetch a half; its transaction is processed when that is done."""
        if self._fetching >= COLD_READS_MAX:
            self._queues.block(group, entry.offset)
            self._cold_blocked[group.name] = group
            return
        group.tried.pop(entry.offset, None)
        self._fetching += 1
        entry.due = READING
        self._fetch(missing, partial(self._on_fetched, entry, tried))

    def _on_fetched(self, entry: Pending, tried: tuple[Connection, ...], is_there: bool) -> None:
        self._arrived.append((entry, tried, is_there))
        if len(self._arrived) == 1:
            self._wake()

    def _process_fetched(self, now_ms: int) -> None:
        while self._arrived:
            entry, tried, is_there = self._arrived.pop()  # in reverse: each goes to the front
            self._fetching -= 1
            if entry.due != READING or self._table.get(entry.offset) is not entry:
                continue
            if not is_there:
                self._retry_later(entry, now_ms)
                continue
            self._fetched.add(entry.offset)
            group = self._enqueue(entry, first=True)
            if tried:
                group.tried[entry.offset] = tried
        if self._cold_blocked and self._fetching < COLD_READS_MAX:
            for blocked in self._cold_blocked.values():
                self._queues.unblock(blocked)
            self._cold_blocked.clear()

    def _retry_later(self, entry: Pending, now_ms: int) -> None:
        """Schedule the next try: the half cannot be read."""
        logger.error("event=half_unreadable half_offset=%d", entry.offset)
        self._schedule(entry, now_ms + self._config.check_interval_ms)


def _needs_check(entry: Pending) -> bool:
    return outcome(entry.state, TransactionEvent.DUE).verdict is Verdict.CHECK
