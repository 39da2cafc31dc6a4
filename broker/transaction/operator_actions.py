"""What operators do about transactions: decide in a producer's place, or resume the checks."""

from collections.abc import Callable
from typing import Final

from attrs import define

from .checks.checker import Checker
from .checks.parking import Parking
from .deciding import Decisions, Ended
from .state.counters import Counters
from .state.pending import PendingTable
from .state.state_machine import TransactionEvent

ACTIONS: Final = {
    "commit": TransactionEvent.OPERATOR_COMMIT,
    "rollback": TransactionEvent.OPERATOR_ROLLBACK,
}
"""The decisions of operators."""


@define(eq=False, repr=False)
class OperatorActions:
    """Serves operators; their decisions are decisions like those of producers."""

    _table: PendingTable
    _decisions: Decisions
    _parking: Parking
    _checker: Checker
    _counters: Counters
    _now_ms: Callable[[], int]

    def decide(self, offset: int, action: str) -> Ended:
        """Apply an operator's decision, "commit" or "rollback".

        Raises:
            TransactionError: The request is refused; the transaction is unchanged.
            RequestRefusedError: The message has no destination now; nothing has changed.
            StoreError: The decision could not be appended; the transaction is unchanged.
            NotInMemoryError: The half must be read from disk first; nothing has changed.
        """
        event = ACTIONS[action]
        entry = self._table.get(self._table.transaction_of(offset))
        if entry is None:
            return self._decisions.answer_decided(offset, event)
        ended = self._decisions.decide(entry, event)
        self._counters.decided_by_operators += 1
        return ended

    def resume(self, offset: int) -> Ended:
        """Resume the checks of a parked transaction, from the first one.

        Nothing happens if it is not parked.

        Raises:
            TransactionError: There is no such transaction, or it is decided.
            StoreError: That could not be recorded; the transaction stays parked.
        """
        entry = self._table.get(self._table.transaction_of(offset))
        if entry is None:
            return self._decisions.answer_decided(offset, TransactionEvent.RESUME)
        position = self._parking.resume(entry)
        if position:
            self._checker.schedule_again(entry, self._now_ms() - entry.store_timestamp)
        return Ended(position)
