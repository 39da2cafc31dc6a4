"""What the rules of an audit work with: records of transactions, states, findings, the log."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from ...log.transaction_parts import Part

PAUSE_COUNTS_MS: Final = 2_000  # so that a quiet broker is found out after some records
CHECKS_MAX: Final = 15  # RocketMQ's transactionCheckMax: it gives up after so many copies


class AuditedState(StrEnum):
    """What became of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    PENDING = "pending"
    PARKED = "parked"  # the broker has given up asking; can still be decided
    EXPIRED = "expired"  # decided here, but its half is no longer in the log
    UNFOUNDED = "unfounded"  # decided here, and never prepared
    UNDETERMINED = "undetermined"  # an op says decided; what would say how cannot be read


class Kind(StrEnum):
    """The kinds of findings."""

    COMMITTED_TWICE = "committed_twice"
    COMMIT_AFTER_ROLLBACK = "commit_after_rollback"
    ROLLBACK_AFTER_COMMIT = "rollback_after_commit"
    DECISION_WITHOUT_HALF = "decision_without_half"
    OP_WITHOUT_HALF = "op_without_half"
    PARKED_WITHOUT_HALF = "parked_without_half"
    DUPLICATE_PREPARE = "duplicate_prepare"
    MISSING_FINAL = "missing_final"  # committed, and a message of it has no final
    MISSING_DECISION = "missing_decision"  # an op, where rollbacks are records, and no decision
    ALTERED_FINAL = "altered_final"  # it differs from its half
    INVISIBLE_MESSAGE = "invisible_message"  # its bits keep it out of its queue
    UNMARKED_FINAL = "unmarked_final"  # it names its half, and lacks the bits of a commit
    UNLINKED_DELIVERY = "unlinked_delivery"  # by a record that is no final message
    OVERDUE_DELIVERY = "overdue_delivery"  # it is due, and was never delivered
    EARLY_DELIVERY = "early_delivery"  # before it was due
    LATE_DELIVERY = "late_delivery"  # long after, while the broker was at work
    DELIVERED_TWICE = "delivered_twice"  # what waited once
    ALTERED_DELIVERY = "altered_delivery"  # it differs from the plain message that waited
    SPLIT_GROUP = "split_group"  # some of several messages decided otherwise than the rest
    OVERDUE_HALF = "overdue_half"
    LOST_PARKING = "lost_parking"
    PARKED_TWICE = "parked_twice"  # without having been resumed
    ROLLED_BACK_TWICE = "rolled_back_twice"
    MISPLACED_HALF = "misplaced_half"  # not in queue 0 of its topic
    HALF_AFTER_FINAL = "half_after_final"  # by the times at which they were stored
    OUT_OF_ORDER = "out_of_order"
    QUEUE_GAP = "queue_gap"
    WRONG_QUEUE_ENTRY = "wrong_queue_entry"
    MISSING_QUEUE_ENTRY = "missing_queue_entry"
    UNKNOWN_QUEUE = "unknown_queue"
    CORRUPT_RECORD = "corrupt_record"
    CRC = "crc"
    GAP = "gap"
    OVERLAP = "overlap"


class MessageContent(NamedTuple):
    """What a half and its final have in common."""

    topic: int  # hash of the real one
    queue: int  # the real one
    rest: int  # hash of everything else, see ``log/final_content.py``
    body_size: int  # bytes


class LogEvent(NamedTuple):
    """One record of a key group."""

    part: Part
    offset: int  # physical, of the record itself
    reference: int  # physical offset of the half that it names; of a half, its place in its queue
    check_times: int | None = None  # of a half: None for an original, else a copy
    number: int = 0  # which of several messages it is about; 0 is the leader
    total: int = 1  # how many messages the transaction has
    time_ms: int = 0  # when it was stored
    content: MessageContent | None = None  # of halves and what delivers them; None: not known
    due_ms: int = 0  # of WAITING: when it is to be delivered
    sound: bool = True  # matches its CRC; a final that does not decides nothing
    half_id: int | None = None  # the offset of a half, as the final's property says it


Found = tuple[str, list[int], str, int | None]
"""A finding as a row of ``FINDING_DDL``."""
FINDING_COLUMNS: Final = ("kind", "offsets", "detail", "at")
FINDING_DDL: Final = "kind string, offsets array<bigint>, detail string, at bigint"
# ``at`` is the physical offset of a record that says whose transaction it is.


class Finding(NamedTuple):
    """One thing that is wrong; ``offsets`` are physical, of the records that show it."""

    kind: Kind
    offsets: list[int]
    detail: str


class AuditedTransaction(NamedTuple):
    """One transaction of a key group."""

    state: AuditedState
    half: int | None  # physical offset of its first half; None when that is not in the log
    decided: int | None = None  # physical offset of the record or op that decided it
    checks: int = 0  # as often the log shows that its producer was asked
    halves: int = 1  # records that it takes up as a half: copies, and several messages
    took_ms: int | None = None  # from its first half to the decision
    lost: tuple[int, int] | None = None  # an undetermined one's decision may have lain here


class KeyGroupVerdict(NamedTuple):
    """What became of a key group, and what is wrong with it."""

    transactions: list[AuditedTransaction]
    findings: list[Finding]


class LogBounds(NamedTuple):
    """Which parts of the log can be read, and which broker wrote which."""

    first_offset: int
    damage: tuple[tuple[int, int], ...] = ()  # ranges [start, end) that could not be read, sorted
    last_offset: int | None = None  # of the last record
    # Ranges [start, end) written by brokers whose rollbacks are records, sorted: see ``dialects``.
    records_rollbacks: tuple[tuple[int, int], ...] = ()
    write_queues: Mapping[int, int] | None = None  # by hash of the topic, where a store tells
    # By hash of the topic: each queue with its last record; where no store tells.
    last_in_queues: Mapping[int, Sequence[tuple[int, int]]] | None = None

    def records_rollback(self, offset: int) -> bool:
        """Tell whether a rollback at this place of the log would have written a record."""
        at = bisect_right(self.records_rollbacks, offset, key=lambda written: written[1])
        return at < len(self.records_rollbacks) and self.records_rollbacks[at][0] <= offset

    def has_queue(self, topic: int, queue: int, offset: int) -> bool | None:
        """Tell whether a topic had a queue when the record at ``offset`` was written.

        A later record in it, or in one above it, proves that it had. None: that is not known.
        """
        if self.write_queues is not None:
            count = self.write_queues.get(topic)
            return None if count is None else queue < count
        known = (self.last_in_queues or {}).get(topic, ())
        return any(one >= queue and last > offset for one, last in known) or None

    def is_unreadable(self, offset: int) -> bool:
        """Tell whether a record at this offset may well have existed."""
        return self.hides(offset, offset + 1)

    def hides(self, start: int, end: int | None = None) -> bool:
        """Tell whether part of [start, end) cannot be read; no end: all that follows."""
        if start < self.first_offset:
            return True
        at = bisect_right(self.damage, start, key=lambda damaged: damaged[1])
        return at < len(self.damage) and (end is None or self.damage[at][0] < end)

    def lost(self, size: int, start: int, end: int) -> tuple[int, int] | None:
        """Find a range within [start, end) that cannot be read and has room for so many bytes."""
        at = bisect_right(self.damage, start, key=lambda damaged: damaged[1])
        for damaged in self.damage[at:]:
            if damaged[0] >= end:
                break
            if min(end, damaged[1]) - max(start, damaged[0]) >= size:
                return damaged
        return None


class TimeLimits(NamedTuple):
    """The times and limits from which rules tell late from not yet due."""

    overdue_before_ms: int | None = None  # prepared earlier: it should have been decided
    passed_slot: int = 0  # RocketMQ's checks will not come back to half queue offsets below
    checks_max: int = CHECKS_MAX
    newest_ms: int = 0  # when the last record of the log was stored
    pauses: tuple[tuple[int, int], ...] = ()  # ms, in which nothing was written, sorted
    clock_steps: tuple[int, ...] = ()  # physical offsets at which the clock was set back

    def worked_ms(self, start: int, end: int) -> int:
        """Say for how long between two times the log shows that a broker was at work.

        A pause counts as little: no more than that a record follows a record.
        """
        at = bisect_right(self.pauses, start, key=lambda pause: pause[1])
        worked = end - start
        for first, last in self.pauses[at:]:
            if first >= end:
                break
            worked -= min(last, end) - max(first, start)
            worked += PAUSE_COUNTS_MS if start <= first else 0
        return worked


NO_TIME_LIMITS: Final = TimeLimits()
