"""Asking producers back: when a decision does not come, the producer's group is asked for it.

Each undecided transaction is in exactly one place: in the timetable until it is due, then in
``_ready``, then back in the timetable for its next check; or, when nobody of its group is
connected, in ``_absent`` until somebody is. A decision does not touch these places, it takes the
transaction off the table; what is found here and not there is dropped.

Only a check that was written to a live connection counts. After ``check_max`` of them and one more
interval for the last answer the transaction is parked. A group that is away is neither asked nor
counted, however long it takes.

Time is the broker's store time; the producer's clock plays no part.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import CheckTransactionStateRequestHeader
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.topics import HALF_TOPIC

from ..config import TransactionConfig
from .half import StoredHalf, check_body, unique_key
from .pending import Pending, PendingTable, Producer, State

logger = logging.getLogger(__name__)

BUCKET_MS: Final = 50
"""Due times are kept to this precision; a check is up to this much late and never early."""

CHECKS_PER_TICK: Final = 32
"""Checks sent between two turns of the loop: each reads and encodes a message, about 30 us."""

LOOKS_PER_TICK: Final = 2_000
"""Due transactions looked at between two turns of the loop: most have been decided, at 0.2 us."""

BUSY_RETRY_MS: Final = 1_000
"""How soon a check is tried again when every connection of the group has too much to read."""

RESTART_GRACE_MS: Final = 400
"""Time after a start before the first check: producers that come back at once may bring the
decision. A group that is not back yet is asked when it is."""

ABSENT_SWEEP_MS: Final = 5_000
"""How often groups that are away are looked for, should the news of a connection have been lost."""


class ProducerDirectory(Protocol):
    """Which producers are connected."""

    def producers_of(self, group: str) -> Sequence[Producer]:
        """Return the connections of a group, perhaps none."""
        ...


class Timetable:
    """Transactions by due time: one list entry each, whatever their number."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[int]] = {}
        self._order: list[int] = []  # heap of the buckets that exist

    def add(self, due_ms: int, offset: int) -> None:
        """Have the transaction returned at its due time or up to ``BUCKET_MS`` later."""
        bucket = -(-due_ms // BUCKET_MS)
        members = self._buckets.get(bucket)
        if members is None:
            self._buckets[bucket] = [offset]
            heapq.heappush(self._order, bucket)
        else:
            members.append(offset)

    def take_due(self, now_ms: int) -> list[int]:
        """Remove and return what one bucket holds that is due; nothing when none is."""
        if not self._order or self._order[0] * BUCKET_MS > now_ms:
            return []
        return self._buckets.pop(heapq.heappop(self._order))

    @property
    def next_due_ms(self) -> int | None:
        """When something may be due next."""
        return self._order[0] * BUCKET_MS if self._order else None


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
        park: Callable[[Pending], bool],
    ) -> None:
        self._table = table
        self._producers = producers
        self._config = config
        self._broker_name = broker_name
        self._read_half = read_half
        self._park = park
        self._timetable = Timetable()
        self._ready: deque[int] = deque()
        self._absent: dict[str, list[int]] = {}
        self._next_sweep_ms = 0
        self._turn = 0
        self.sent = 0

    def schedule_first(self, entry: Pending, not_before_ms: int = 0) -> None:
        """Plan the first check of a transaction, from the age of its half."""
        # RocketMQ takes the message's own time in place of the broker's, be it longer or shorter.
        wait_ms = entry.immunity_s * 1_000 or self._config.timeout_ms
        self._timetable.add(max(entry.store_timestamp + wait_ms, not_before_ms), entry.offset)

    def tick(self, now_ms: int) -> int | None:
        """Send what is due; return the milliseconds until there is more to do, None if unknown."""
        ready = self._ready
        if now_ms >= self._next_sweep_ms:
            self._next_sweep_ms = now_ms + ABSENT_SWEEP_MS
            self._look_for_absent()
        while len(ready) < LOOKS_PER_TICK and (due := self._timetable.take_due(now_ms)):
            ready.extend(due)
        checks_left = CHECKS_PER_TICK
        for _ in range(min(len(ready), LOOKS_PER_TICK)):
            entry = self._table.get(ready.popleft())
            if entry is None or entry.state is not State.PREPARED:
                continue  # decided or parked meanwhile
            checks_left -= self._attend(entry, now_ms)
            if not checks_left:
                break
        if ready:
            return 0
        next_due_ms = self._timetable.next_due_ms
        return None if next_due_ms is None else max(next_due_ms - now_ms, 0)

    def on_producer(self, group: str) -> None:
        """Make what is due of a group ready at once; one of its producers has connected."""
        waiting = self._absent.pop(group, None)
        if waiting:
            self._ready.extend(waiting)

    @property
    def waiting_for_producers(self) -> int:
        """How many are due while their group is away; some may have been decided meanwhile."""
        return sum(map(len, self._absent.values()))

    def _look_for_absent(self) -> None:
        for group in [group for group in self._absent if self._producers.producers_of(group)]:
            self.on_producer(group)

    def _attend(self, entry: Pending, now_ms: int) -> bool:
        """Do what is due about one transaction; tell whether that read its half."""
        config = self._config
        if entry.checks >= config.check_max:
            if not self._park(entry):
                self._timetable.add(now_ms + config.check_interval_ms, entry.offset)
            return True
        targets = self._targets(entry)
        if not targets:
            self._absent.setdefault(entry.group, []).append(entry.offset)
            return False
        asked = self._ask(entry, targets)
        self._timetable.add(
            now_ms + (config.check_interval_ms if asked else BUSY_RETRY_MS), entry.offset
        )
        return True

    def _targets(self, entry: Pending) -> list[Producer]:
        """Return whom to ask, the best one first.

        The first question goes to the connection that prepared the message. Later ones go round the
        whole group, so that one producer that never answers does not keep the others from it.
        """
        members = [one for one in self._producers.producers_of(entry.group) if not one.closed]
        owner = entry.owner
        if owner is not None and owner.closed:
            entry.owner = owner = None
        self._turn += 1
        if members:
            first = self._turn % len(members)
            members = members[first:] + members[:first]
        if owner is not None and (not members or (entry.checks == 0 and owner in members)):
            members = [owner, *(one for one in members if one is not owner)]
        return members

    def _ask(self, entry: Pending, targets: Sequence[Producer]) -> bool:
        """Send one check to the first of the connections that takes it; False when none does."""
        writable = [one for one in targets if one.writable]
        if not writable:
            return False
        try:
            header, body = self._question(entry)
        except (ValueError, StoreError):
            # Nothing can be delivered without the half; but nothing is lost by keeping it, and the
            # other transactions must not suffer.
            logger.exception("event=half_unreadable half_offset=%d", entry.offset)
            return True
        for connection in writable:
            if connection.send_request(RequestCode.CHECK_TRANSACTION_STATE, header, body):
                entry.checks += 1
                self.sent += 1
                logger.debug(
                    "event=transaction_check half_offset=%d group=%s peer=%s check=%d",
                    entry.offset,
                    entry.group,
                    connection.name,
                    entry.checks,
                )
                return True
        return False

    def _question(self, entry: Pending) -> tuple[CheckTransactionStateRequestHeader, bytes]:
        half = self._read_half(entry.offset)
        if half is None:
            raise ValueError("no half message to be read there")
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
