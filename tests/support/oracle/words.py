"""The names of findings and of states, as ``docs/audit.md`` promises them."""

from enum import StrEnum

Found = tuple[str, tuple[int, ...]]
"""A kind, and the physical offsets that show it, ascending."""


class State(StrEnum):
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    PENDING = "pending"
    PARKED = "parked"
    UNDETERMINED = "undetermined"


class Kind(StrEnum):
    COMMITTED_TWICE = "committed_twice"
    COMMIT_AFTER_ROLLBACK = "commit_after_rollback"
    ROLLBACK_AFTER_COMMIT = "rollback_after_commit"
    DECISION_WITHOUT_HALF = "decision_without_half"
    OP_WITHOUT_HALF = "op_without_half"
    PARKED_WITHOUT_HALF = "parked_without_half"
    DUPLICATE_PREPARE = "duplicate_prepare"
    MISSING_FINAL = "missing_final"
    MISSING_DECISION = "missing_decision"
    ALTERED_FINAL = "altered_final"
    INVISIBLE_MESSAGE = "invisible_message"
    UNMARKED_FINAL = "unmarked_final"
    UNLINKED_DELIVERY = "unlinked_delivery"
    OVERDUE_DELIVERY = "overdue_delivery"
    EARLY_DELIVERY = "early_delivery"
    LATE_DELIVERY = "late_delivery"
    ALTERED_DELIVERY = "altered_delivery"
    DELIVERED_TWICE = "delivered_twice"
    SPLIT_GROUP = "split_group"
    OVERDUE_HALF = "overdue_half"
    LOST_PARKING = "lost_parking"
    PARKED_TWICE = "parked_twice"
    ROLLED_BACK_TWICE = "rolled_back_twice"
    MISPLACED_HALF = "misplaced_half"
    HALF_AFTER_FINAL = "half_after_final"
    OUT_OF_ORDER = "out_of_order"
    QUEUE_GAP = "queue_gap"
    WRONG_QUEUE_ENTRY = "wrong_queue_entry"
    MISSING_QUEUE_ENTRY = "missing_queue_entry"
    UNKNOWN_QUEUE = "unknown_queue"
    CORRUPT_RECORD = "corrupt_record"
    CRC = "crc"
    GAP = "gap"
    OVERLAP = "overlap"


OF_QUEUES = {
    Kind.OUT_OF_ORDER,
    Kind.QUEUE_GAP,
    Kind.WRONG_QUEUE_ENTRY,
    Kind.MISSING_QUEUE_ENTRY,
    Kind.UNKNOWN_QUEUE,
}
