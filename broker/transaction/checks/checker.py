"""Asking producers back: when a decision does not come, the producer's group is asked for it.

Each undecided transaction that is to be asked about is in exactly one place, which ``Pending.due``
names: in the timetable until it is due (the number of its bucket), then in the queue of its group
(``QUEUED``), then on its way to a producer (``IN_FLIGHT``), and from there in the timetable again.
Between these, its half may have to be read from the disk (``READING``). A decision does not touch
the places, it takes the transaction off the table; what is found in a place and not on the table,
or on the table with another place, is dropped.

A client of ours acknowledges a check at once ("I have it and will answer"). Only then does it
count; a refusal, a lost connection or silence sends the question to the next member of the group,
and when each has been tried, it waits. To official clients a check goes one-way, and counts when it
was written to a live connection that reads. After ``check_max`` checks that count, and the time for
the last answer, the transaction is parked. A group that is away is neither asked nor counted,
however long it takes.

A group has a queue, and the groups take turns, so a group with very many due, or one that does not
answer, delays no other. All work is done in ``tick``, in slices; news (an acknowledgement, a half
that was read) only waits there for the next slice.

Time is the monotonic clock, so a step of the wall clock moves no check. Only after a restart does
the store timestamp of a half count, as its age by the wall clock; a timestamp in the future makes
it new. So the first check is never later than the wait after the prepare or the restart. The
producer's clock plays no part.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Final, NamedTuple, Protocol

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import CheckTransactionStateRequestHeader
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.topics import HALF_TOPIC

from ...config import TransactionConfig
from ...loop.fetches import Fetch
from ...loop.slices import Slice
from ..half import StoredHalf, check_body, unique_key
from ..pending import Event, Pending, PendingTable, Producer, Verdict, outcome
from .group_queues import Group, GroupQueues
from .timetable import BUCKET_MS, Timetable

logger = logging.getLogger(__name__)

BACK_OFF: Final = 1.5
"""How much longer the pause after each delivered check is than the one before."""

BACK_OFF_MAX_MS: Final = 600_000
"""Longest pause between two checks, unless the configured interval is longer: ten minutes."""

JITTER: Final = 0.1
"""Share by which a pause is longer or shorter, so that what was due together does not stay so."""

CHECKS_PER_TURN: Final = 8
"""Checks of one group before the next group has its turn."""

LOOKS_PER_STEP: Final = 50
"""Due transactions looked at between two looks at the clock: most have been decided, at 0.2 us; to
put one into its group's queue takes a microsecond."""

STALE_MAX: Final = 100_000
"""Entries of the timetable, beyond two for each undecided transaction, that may be left over from
decided ones: 4 MB. A message's own time may be days, in which as many as one likes are decided."""

SWEEP_PAUSE_MS: Final = 5
"""Time between two slices in which those are dropped: a few hundredths of the loop's time."""

DURABLE_WAIT_MS: Final = 500
"""Time until a half that is not on disk when its check is due is looked at again; by then it mostly
is, or the disk has failed."""

RESTART_GRACE_MS: Final = 400
"""Time after a start before the first check: producers that come back at once may bring the
decision. A group that is not back yet is asked when it is."""

COLD_READS_MAX: Final = 16
"""Halves that are being fetched: enough to keep the threads at work, and few enough that a request
that needs one as well waits for four reads at most. They have 64 MiB at the largest."""

# Places of a transaction that is not in the timetable; those in it have the bucket's number.
UNPLANNED: Final = 0
QUEUED: Final = -1
IN_FLIGHT: Final = -2
READING: Final = -3

_SUCCESS: Final = int(ResponseCode.SUCCESS)
_CHECK: Final = RequestCode.CHECK_TRANSACTION_STATE


class ProducerDirectory(Protocol):
    """Which producers are connected."""

    def producers_of(self, group: str) -> Sequence[Producer]:
        """Return the connections of a group, perhaps none."""
        ...

    def has_left(self, group: str, connection: Producer) -> bool:
        """Whether a connection was a member of the group and is no longer, though it lives."""
        ...


class _Receipt(NamedTuple):
    """What came of a check that has to be acknowledged."""

    entry: Pending
    asked: Producer
    tried: tuple[Producer, ...]  # who was asked before and did not take it
    taken: bool


class Checker:
    """Sends check requests, and gives up after as many as the configuration allows."""

    def __init__(
        self,
        table: PendingTable,
        producers: ProducerDirectory,
        config: TransactionConfig,
        *,
        broker_name: str,
        read_half: Callable[[int], StoredHalf | None],
        fetch: Fetch,
        park: Callable[[Pending, StoredHalf], bool],
        random: Random,
        monotonic_ms: Callable[[], int],
        wake: Callable[[], None] = lambda: None,
        is_durable: Callable[[int], bool] = lambda _offset: True,
        may_ask: Callable[[Producer, StoredHalf], bool] = lambda _producer, _half: True,
    ) -> None:
        """Wire it.

        Args:
            table: The undecided transactions.
            producers: Who can be asked.
            config: When, and how often.
            broker_name: Told to who is asked.
            read_half: Returns the half at an offset; None when there is none that is sound. Raises
                NotInMemoryError when it would have to wait for the disk, and may not.
            fetch: Has it in memory then, and calls back on this thread, at once or later.
            park: Records that a transaction is given up; False when that could not be recorded.
            random: Source of the jitter.
            monotonic_ms: The clock of ``tick``.
            wake: Has ``tick`` called soon.
            is_durable: Tells whether the half at an offset is on disk.
            may_ask: Tells whether a producer may see this message, which a check shows it.
        """
        self._table = table
        self._producers = producers
        self._config = config
        self._timeout_ms = config.timeout_ms
        self._broker_name = broker_name
        self._read_half = read_half
        self._fetch = fetch
        self._park = park
        self._random = random
        self._monotonic_ms = monotonic_ms
        self._wake = wake
        self._is_durable = is_durable
        self._may_ask = may_ask
        self._timetable = Timetable()
        self._sweep: Iterator[None] | None = None  # of the timetable, while it goes on
        self._bucket = 0  # number of the bucket that is being looked through
        self._due = array("q")  # the rest of it, last one first
        self._queues = GroupQueues(
            is_away=lambda group: not self._members_of(group),
            is_gone=lambda offset: offset not in table,
        )
        self._receipts: deque[_Receipt] = deque()
        self._arrived: list[tuple[Pending, tuple[Producer, ...], bool]] = []
        self._fetching = 0  # halves asked for and not yet taken from `_arrived`
        self._fetched: set[int] = set()  # halves; should one be gone again, it is waited for
        self._cold_blocked: dict[str, Group] = {}  # those that wait until fewer are fetched
        # Within one tick: members by group, and those that take no more for now.
        self._members: dict[str, Sequence[Producer]] = {}
        self._full: set[Producer] = set()
        self.sent = 0
        self.delivered = 0
        self.not_taken = 0  # refused, lost with the connection, or not acknowledged in time

    # --- what others say

    def schedule_first(self, entry: Pending) -> None:
        """Plan the first check of a transaction that has just been prepared."""
        wait_ms = entry.progress.immunity_s * 1_000 or self._timeout_ms  # once per transaction
        entry.due = self._timetable.add(self._monotonic_ms() + wait_ms, entry.offset)

    def schedule_again(self, entry: Pending, age_ms: int, *, grace_ms: int = 0) -> None:
        """Plan the next check of a transaction that was restored or resumed.

        Args:
            entry: The transaction.
            age_ms: Milliseconds since its half was stored, by the wall clock. Less than 0 when that
                clock was set back meanwhile; then the whole wait begins now.
            grace_ms: How soon it may be asked about.
        """
        wait_ms = self._first_wait_ms(entry) - max(age_ms, 0)
        if wait_ms < grace_ms:
            wait_ms = grace_ms
            if entry.checks >= self._config.check_max:
                # The broker was restarted: the last check may have been a moment before.
                wait_ms += self._config.check_interval_ms
        self._plan(entry, self._monotonic_ms() + wait_ms)

    def _first_wait_ms(self, entry: Pending) -> int:
        # As in RocketMQ, the message's own time replaces the broker's, longer or shorter.
        return entry.immunity_s * 1_000 or self._timeout_ms

    def on_producer(self, group: str) -> None:
        """Make what is due of a group ready at once; one of its producers has connected."""
        self._queues.come(group)

    # --- what others ask

    def next_check_in_ms(self, entry: Pending) -> int | None:
        """Return how long until the transaction is asked about; None when nobody can tell.

        That is: it is due, and its group is away, or it is just being asked; or it is parked.
        """
        if entry.due <= 0 or not _is_asked_about(entry):
            return None
        return max(entry.due * BUCKET_MS - self._monotonic_ms(), 0)

    @property
    def waiting_for_producers(self) -> int:
        """How many are due while their group is away; some may have been decided meanwhile."""
        return self._queues.away

    # --- time goes on

    def tick(self, now_ms: int, time_slice: Slice) -> int | None:
        """Do what is due, in a slice; return the milliseconds until there is more, or None."""
        self._members.clear()
        self._full.clear()
        self._process_receipts(now_ms, time_slice)
        self._process_fetched(now_ms)
        self._queues.run_retries(now_ms, time_slice)
        self._queue_due(now_ms, time_slice)
        self._serve_groups(now_ms, time_slice)
        self._drop_stale(time_slice)
        if self._queues.has_turns or self._due or self._receipts or self._arrived:
            return 0
        at_ms = [self._timetable.next_due_ms, self._queues.next_retry_ms]
        waits = [one - now_ms for one in at_ms if one is not None]
        if self._sweep is not None:
            waits.append(SWEEP_PAUSE_MS)
        return max(min(waits), 0) if waits else None

    def _drop_stale(self, time_slice: Slice) -> None:
        """Drop what was decided long before it is due, when that has become too much."""
        timetable = self._timetable
        if self._sweep is None and timetable.size > 2 * len(self._table) + STALE_MAX:
            self._sweep = timetable.sweep(self._is_planned)
        if self._sweep is not None and time_slice.advance(self._sweep):
            self._sweep = None

    def _is_planned(self, offset: int, number: int) -> bool:
        entry = self._table.get(offset)
        return entry is not None and entry.due == number

    def _queue_due(self, now_ms: int, time_slice: Slice) -> None:
        """Move what is due from the timetable to the queues of the groups."""
        find = self._table.get
        while True:
            for _ in range(LOOKS_PER_STEP):
                if not self._due:
                    found = self._timetable.pop_due(now_ms)
                    if found is None:
                        return
                    self._bucket, self._due = found
                    self._due.reverse()
                entry = find(self._due.pop())
                if entry is None or entry.due != self._bucket:
                    continue  # decided, or planned for another time
                if _is_asked_about(entry):
                    self._enqueue(entry)
                else:
                    entry.due = UNPLANNED
            if time_slice.is_over:
                return

    def _enqueue(self, entry: Pending, *, first: bool = False) -> Group:
        entry.due = QUEUED
        return self._queues.add(entry.group, entry.offset, first=first)

    # --- asking

    def _serve_groups(self, now_ms: int, time_slice: Slice) -> None:
        """Ask about what is due of the groups in turn, as much as a slice holds, at least one."""
        queues = self._queues
        while queues.has_turns:
            group = queues.next_turn()
            self._serve_group(group, now_ms, time_slice)
            queues.end_turn(group, now_ms)
            if time_slice.is_over:
                return

    def _serve_group(self, group: Group, now_ms: int, time_slice: Slice) -> None:
        waiting = group.waiting
        looks = checks = 0
        while waiting and checks < CHECKS_PER_TURN and looks < LOOKS_PER_STEP and not group.blocked:
            looks += 1
            offset = waiting.popleft()
            is_fetched = offset in self._fetched
            self._fetched.discard(offset)
            entry = self._table.get(offset)
            if entry is None or entry.due != QUEUED:
                group.tried.pop(offset, None)  # decided, or planned for another time
            elif not _is_asked_about(entry):
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
            # Whatever is wrong with one half: nothing is lost by keeping it, and the others must
            # not suffer.
            logger.exception("event=check_failed half_offset=%d", entry.offset)
            group.tried.pop(entry.offset, None)
            self._plan(entry, now_ms + self._config.check_interval_ms)
            return True

    def _process(self, entry: Pending, group: Group, is_fetched: bool, now_ms: int) -> bool:
        """Do what is due about one transaction; return whether that was more than a look."""
        if not self._is_durable(entry.offset):
            # After a power cut another half may have its offset, and a decision in answer to this
            # question would be about that one.
            self._plan(entry, now_ms + DURABLE_WAIT_MS)
            return True
        tried = group.tried.get(entry.offset, ())
        giving_up = entry.checks >= self._config.check_max
        target = None if giving_up else self._next_target(entry, tried)
        if target is None and not giving_up:
            self._nobody(entry, group, now_ms, asked_all=bool(tried))
            return False
        try:
            with allowed_to_wait(is_fetched):
                half = self._read_half(entry.offset)
        except NotInMemoryError as missing:
            self._fetch_half(entry, group, tried, missing)
            return True
        if half is None:
            self._put_off(entry, now_ms)
            group.tried.pop(entry.offset, None)
            return True
        if target is None:
            entry.due = UNPLANNED
            if not self._park(entry, half):
                self._plan(entry, now_ms + self._config.check_interval_ms)
            return True
        header, body = self._question(entry, half)
        while target is not None:
            if not self._may_ask(target, half):
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
        self._nobody(entry, group, now_ms, asked_all=bool(tried))
        return True

    def _nobody(self, entry: Pending, group: Group, now_ms: int, *, asked_all: bool) -> None:
        """Keep a transaction for later: there is nobody who can be asked about it now."""
        if asked_all:
            del group.tried[entry.offset]
            self._queues.refused(group, entry.offset, now_ms)
        elif self._members_of(entry.group):
            self._queues.busy(group, entry.offset, now_ms)
        else:
            self._queues.away_from(group, entry.offset, now_ms)

    def _members_of(self, group: str) -> Sequence[Producer]:
        members = self._members.get(group)
        if members is None:
            members = self._members[group] = self._producers.producers_of(group)
        return members

    def _next_target(self, entry: Pending, tried: tuple[Producer, ...]) -> Producer | None:
        """Return whom to ask; None when nobody is there who can be written to.

        The first question goes to the connection that prepared the message, even before it is
        registered as a member, unless it has left the group. Later ones go round the whole group,
        so that a member that never answers does not keep the others from it.
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

    def _can_take(self, producer: Producer) -> bool:
        return producer.writable and not producer.closed and producer not in self._full

    def _send(
        self,
        entry: Pending,
        target: Producer,
        tried: tuple[Producer, ...],
        header: CheckTransactionStateRequestHeader,
        body: bytes,
    ) -> bool:
        """Send the question, and note that it is on its way if its receipt will be told."""
        if target.acknowledges:
            on_receipt = partial(self._on_receipt, entry, target, tried)
            if not target.ask(_CHECK, header, body, on_receipt):
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

    def _question(
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

    # --- what comes of it

    def _plan(self, entry: Pending, due_ms: int) -> None:
        entry.due = self._timetable.add(due_ms, entry.offset)

    def _count_delivered(self, entry: Pending, now_ms: int) -> None:
        entry.checks += 1
        self._plan(entry, now_ms + self._pause_ms(entry.checks))

    def _pause_ms(self, delivered: int) -> int:
        """Return for how long the answer to a check is waited for, by its number from 1."""
        interval_ms = self._config.check_interval_ms
        pause_ms = interval_ms * BACK_OFF ** min(delivered - 1, 64)  # finite, whatever the number
        pause_ms = min(pause_ms, max(interval_ms, BACK_OFF_MAX_MS))
        return round(pause_ms * self._random.uniform(1 - JITTER, 1 + JITTER))

    def _on_receipt(
        self,
        entry: Pending,
        asked: Producer,
        tried: tuple[Producer, ...],
        answer: RemotingCommand | None,
    ) -> None:
        """Keep the news for the next tick; called from wherever a connection gets them."""
        taken = answer is not None and answer.code == _SUCCESS
        self._receipts.append(_Receipt(entry, asked, tried, taken))
        if len(self._receipts) == 1:
            self._wake()

    def _process_receipts(self, now_ms: int, time_slice: Slice) -> None:
        receipts = self._receipts
        while receipts:
            entry, asked, tried, taken = receipts.popleft()
            meant = entry.due == IN_FLIGHT and self._table.get(entry.offset) is entry
            if taken:
                self._queues.taken(entry.group)
                self.delivered += 1
                if meant:
                    self._count_delivered(entry, now_ms)
            else:
                self._queues.not_taken(entry.group)
                self.not_taken += 1
                if meant:
                    group = self._enqueue(entry, first=True)
                    group.tried[entry.offset] = (*tried, asked)
            if time_slice.is_over:
                return

    # --- halves that are not in memory

    def _fetch_half(
        self,
        entry: Pending,
        group: Group,
        tried: tuple[Producer, ...],
        missing: NotInMemoryError,
    ) -> None:
        """Have a half fetched; its transaction is attended to when that is done."""
        if self._fetching >= COLD_READS_MAX:
            self._queues.block(group, entry.offset)
            self._cold_blocked[group.name] = group
            return
        group.tried.pop(entry.offset, None)
        self._fetching += 1
        entry.due = READING
        self._fetch(missing, partial(self._on_fetched, entry, tried))

    def _on_fetched(self, entry: Pending, tried: tuple[Producer, ...], is_there: bool) -> None:
        self._arrived.append((entry, tried, is_there))
        if len(self._arrived) == 1:
            self._wake()

    def _process_fetched(self, now_ms: int) -> None:
        while self._arrived:
            entry, tried, is_there = self._arrived.pop()  # last one first: each goes to the front
            self._fetching -= 1
            if entry.due != READING or self._table.get(entry.offset) is not entry:
                continue
            if not is_there:
                self._put_off(entry, now_ms)
                continue
            self._fetched.add(entry.offset)
            group = self._enqueue(entry, first=True)
            if tried:
                group.tried[entry.offset] = tried
        if self._cold_blocked and self._fetching < COLD_READS_MAX:
            for blocked in self._cold_blocked.values():
                self._queues.unblock(blocked)
            self._cold_blocked.clear()

    def _put_off(self, entry: Pending, now_ms: int) -> None:
        """Try again later: the half cannot be read."""
        logger.error("event=half_unreadable half_offset=%d", entry.offset)
        self._plan(entry, now_ms + self._config.check_interval_ms)


def _is_asked_about(entry: Pending) -> bool:
    return outcome(entry.state, Event.DUE).verdict is Verdict.ASK
