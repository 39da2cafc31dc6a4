"""The rules that END_TRANSACTION and END_TRANSACTIONS share.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.flags import TransactionType
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ...net.group_append import GroupAppend
from ...ports import Connection
from ...transaction.deciding import DecisionRequest, Decisions, Ended, PlannedDecision
from ...transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from ...transaction.state.state_machine import TransactionEvent

logger = logging.getLogger(__name__)

EVENTS: Final[Mapping[int, TransactionEvent]] = {
    int(TransactionType.COMMIT): TransactionEvent.COMMIT,
    int(TransactionType.ROLLBACK): TransactionEvent.ROLLBACK,
    int(TransactionType.NONE): TransactionEvent.UNKNOWN,
}
"""commitOrRollback → event; the numbers are the transaction bits of sysFlag."""

ERROR_CODES: Final[Mapping[type[TransactionError], ResponseCode]] = {
    HalfNotFoundError: ResponseCode.SYSTEM_ERROR,
    HalfMismatchError: ResponseCode.SYSTEM_ERROR,
    DecisionForgottenError: ResponseCode.SYSTEM_ERROR,
    DecidedOtherwiseError: ResponseCode.ILLEGAL_OPERATION,
}
"""Error → response code, RocketMQ's where RocketMQ refuses."""


class StagedDecision(msgspec.Struct, gc=False):
    """A first decision that is appended with others."""

    requests: Sequence[AppendRequest]
    command: RemotingCommand
    connection: Connection
    planned: PlannedDecision
    decisions: Decisions
    on_ended: Callable[[Ended], None]

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Complete the decision and answer its request."""
        self.on_ended(self.decisions.decided(self.planned, results))

    def abandoned(self) -> None:
        """Leave the transaction undecided."""
        self.decisions.abandon(self.planned)

    def append_alone(self, _command: RemotingCommand, _connection: Connection) -> None:
        """Append the decision alone, after the group could not be appended."""
        self.on_ended(self.decisions.carry_out(self.planned))


def plan(
    decisions: Decisions, group: GroupAppend, request: DecisionRequest
) -> PlannedDecision | Ended:
    """Return the answer to a request, or the decision to stage.

    Raises what ``Decisions.plan`` raises.
    """
    planned = decisions.plan(request)
    if planned is None:  # a decision about the same transaction is staged
        group.append_staged()
        planned = decisions.plan(request)
        assert planned is not None
    return planned


def wrong_decision(decision: int) -> str:
    """Return the remark about a `commitOrRollback` that is no decision."""
    return f"commitOrRollback field wrong: {decision}, expected 8 (commit), 12 (rollback) or 0"


def durable_at(error: TransactionError) -> int:
    """Return the log position that must be durable before a refusal is final; 0 for none."""
    return error.position if isinstance(error, DecidedOtherwiseError) else 0


def log_refusal(request: DecisionRequest, connection: Connection, error: TransactionError) -> None:
    """Log a refused decision with its reason, because one-way senders get no answer."""
    logger.warning(
        "event=decision_refused half_offset=%d decision=%s from_check=%s group=%s peer=%s "
        "reason=%r",
        request.offset,
        request.event.name,
        request.from_check,
        request.producer_group,
        connection.name,
        str(error),
    )
