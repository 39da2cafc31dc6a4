"""The state machine of a transaction.

It is PREPARED until the producer decides; the first decision makes it COMMITTED or ROLLED_BACK for
good. PARKED is PREPARED without further checks: it waits for a late decision or an operator.

``RESULTS`` maps state and event to the new state and a verdict. There are three kinds of events.
Requests of producers and operators (COMMIT to RESUME) get a verdict that says how to serve them.
Steps of the check-back (DUE to EXPIRED) change the counters and end in PARKED. Findings (…_FOUND)
are read from the log and override the table: a final record makes any transaction
COMMITTED, because consumers may have received it.
"""

from enum import IntEnum
from typing import Final, NamedTuple


class State(IntEnum):
    """The state of a transaction."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


class TransactionEvent(IntEnum):
    """What can happen to a transaction: requests, steps of the check-back, findings in the log."""

    COMMIT = 0  # from the producer, on its own or in answer to a check
    ROLLBACK = 1
    UNKNOWN = 2  # the producer has not decided yet
    OPERATOR_COMMIT = 3  # an operator decides instead of the producer
    OPERATOR_ROLLBACK = 4
    RESUME = 5  # an operator resumes the checks
    DUE = 6  # its next check is due
    DELIVERED = 7  # a check has reached a producer
    ANSWERED = 8  # a producer has answered a check, perhaps with UNKNOWN
    GIVE_UP = 9  # no decision after the last check
    EXPIRED = 10  # its half is old enough to be deleted
    FINAL_FOUND = 11  # in the log: the final message
    ROLLBACK_FOUND = 12  # in the log: halfmq's rollback record
    OP_FOUND = 13  # in the log: an op message, the same for commit and rollback
    PARKED_FOUND = 14  # in the log: the copy for operators
    RESUMED_FOUND = 15  # in the log: halfmq's record, or a half that Apache RocketMQ resumed
    DELETED_FOUND = 16  # the log begins after its half


class Verdict(IntEnum):
    """How an event is handled."""

    DECIDE = 0  # the first decision: append its record, answer when that is durable
    REPEAT = 1  # the same decision again: the same answer, and no record
    REFUSE = 2  # the opposite decision: an error that names the first
    TRANSITION = 3  # only set the new state
    IGNORE = 4  # keep the state
    CHECK = 5  # send a check, or park it after the last
    COUNT = 6  # keep the state; count the event
    FORGET = 7  # remove the transaction undecided: its half was deleted


class ParkedReason(IntEnum):
    """Why no more checks are sent about a transaction."""

    NOT_PARKED = 0
    NO_ANSWER = 1  # no check was answered
    UNKNOWN = 2  # checks were answered, and never with a decision
    EXPIRED = 3  # its half is old enough to be deleted
    NOT_RECORDED = 4  # parked by Apache RocketMQ, which records no reason

    @property
    def text(self) -> str | None:
        """As shown in properties, metrics and tools; None without a reason."""
        return _REASON_TEXTS.get(self)


_REASON_TEXTS: Final = {
    ParkedReason.NO_ANSWER: "no-answer",
    ParkedReason.UNKNOWN: "unknown",
    ParkedReason.EXPIRED: "expired",
}
PARKING_REASONS: Final = tuple(_REASON_TEXTS)
"""The reasons that this broker records when it parks."""
_REASONS_BY_TEXT: Final = {text.encode(): reason for reason, text in _REASON_TEXTS.items()}


def parked_reason_of(text: bytes | None) -> ParkedReason:
    """Parse the reason in a parked copy's property."""
    return _REASONS_BY_TEXT.get(text or b"", ParkedReason.NOT_RECORDED)


class Result(NamedTuple):
    """The entry of the state table for one state and one event."""

    state: State
    verdict: Verdict


_S, _E, _V = State, TransactionEvent, Verdict
_RULES: Final[dict[tuple[State, TransactionEvent], Result]] = {
    (_S.PREPARED, _E.COMMIT): Result(_S.COMMITTED, _V.DECIDE),
    (_S.PREPARED, _E.ROLLBACK): Result(_S.ROLLED_BACK, _V.DECIDE),
    (_S.PREPARED, _E.OPERATOR_COMMIT): Result(_S.COMMITTED, _V.DECIDE),
    (_S.PREPARED, _E.OPERATOR_ROLLBACK): Result(_S.ROLLED_BACK, _V.DECIDE),
    (_S.PREPARED, _E.DUE): Result(_S.PREPARED, _V.CHECK),
    (_S.PREPARED, _E.DELIVERED): Result(_S.PREPARED, _V.COUNT),
    (_S.PREPARED, _E.ANSWERED): Result(_S.PREPARED, _V.COUNT),
    (_S.PREPARED, _E.GIVE_UP): Result(_S.PARKED, _V.TRANSITION),
    (_S.PREPARED, _E.EXPIRED): Result(_S.PARKED, _V.TRANSITION),
    (_S.PREPARED, _E.FINAL_FOUND): Result(_S.COMMITTED, _V.TRANSITION),
    (_S.PREPARED, _E.ROLLBACK_FOUND): Result(_S.ROLLED_BACK, _V.TRANSITION),
    # RocketMQ writes the op after the final message: no final so far means rolled back.
    (_S.PREPARED, _E.OP_FOUND): Result(_S.ROLLED_BACK, _V.TRANSITION),
    (_S.PREPARED, _E.PARKED_FOUND): Result(_S.PARKED, _V.TRANSITION),
    (_S.PREPARED, _E.DELETED_FOUND): Result(_S.PREPARED, _V.FORGET),
    # A decision that comes late is still the first one.
    (_S.PARKED, _E.COMMIT): Result(_S.COMMITTED, _V.DECIDE),
    (_S.PARKED, _E.ROLLBACK): Result(_S.ROLLED_BACK, _V.DECIDE),
    (_S.PARKED, _E.OPERATOR_COMMIT): Result(_S.COMMITTED, _V.DECIDE),
    (_S.PARKED, _E.OPERATOR_ROLLBACK): Result(_S.ROLLED_BACK, _V.DECIDE),
    (_S.PARKED, _E.RESUME): Result(_S.PREPARED, _V.TRANSITION),
    (_S.PARKED, _E.DELIVERED): Result(_S.PARKED, _V.COUNT),  # the acknowledgement came late
    (_S.PARKED, _E.ANSWERED): Result(_S.PARKED, _V.COUNT),
    (_S.PARKED, _E.FINAL_FOUND): Result(_S.COMMITTED, _V.TRANSITION),
    (_S.PARKED, _E.ROLLBACK_FOUND): Result(_S.ROLLED_BACK, _V.TRANSITION),
    (_S.PARKED, _E.OP_FOUND): Result(_S.ROLLED_BACK, _V.TRANSITION),
    (_S.PARKED, _E.RESUMED_FOUND): Result(_S.PREPARED, _V.TRANSITION),
    (_S.PARKED, _E.DELETED_FOUND): Result(_S.PARKED, _V.FORGET),
    (_S.COMMITTED, _E.COMMIT): Result(_S.COMMITTED, _V.REPEAT),
    (_S.COMMITTED, _E.ROLLBACK): Result(_S.COMMITTED, _V.REFUSE),
    (_S.COMMITTED, _E.OPERATOR_COMMIT): Result(_S.COMMITTED, _V.REPEAT),
    (_S.COMMITTED, _E.OPERATOR_ROLLBACK): Result(_S.COMMITTED, _V.REFUSE),
    (_S.COMMITTED, _E.RESUME): Result(_S.COMMITTED, _V.REFUSE),
    (_S.ROLLED_BACK, _E.COMMIT): Result(_S.ROLLED_BACK, _V.REFUSE),
    (_S.ROLLED_BACK, _E.ROLLBACK): Result(_S.ROLLED_BACK, _V.REPEAT),
    (_S.ROLLED_BACK, _E.OPERATOR_COMMIT): Result(_S.ROLLED_BACK, _V.REFUSE),
    (_S.ROLLED_BACK, _E.OPERATOR_ROLLBACK): Result(_S.ROLLED_BACK, _V.REPEAT),
    (_S.ROLLED_BACK, _E.RESUME): Result(_S.ROLLED_BACK, _V.REFUSE),
    # RocketMQ accepts a commit after a rollback. The message was delivered, so it counts.
    (_S.ROLLED_BACK, _E.FINAL_FOUND): Result(_S.COMMITTED, _V.TRANSITION),
}
"""What is not listed is ignored and keeps the state: also a second final message, since Apache
RocketMQ may commit twice, and the first one counts."""

RESULTS: Final = tuple(
    tuple(_RULES.get((state, event), Result(state, _V.IGNORE)) for event in TransactionEvent)
    for state in State
)
"""The table by state and event, for the hot path, which saves the call of ``outcome``."""


def outcome(state: State, event: TransactionEvent) -> Result:
    """Return the new state and the verdict for an event in this state."""
    return RESULTS[state][event]
