"""What deciding one transaction and deciding many have in common.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from halfmq.remoting.codes import ResponseCode
from halfmq.store.format.flags import TransactionType
from halfmq.store.log.append_request import AppendResult

from ...ports import Connection
from ...transaction.deciding import DecisionRequest, Ended, PlannedDecision
from ...transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from ...transaction.state.state_machine import Event

logger = logging.getLogger(__name__)

EVENTS: Final[Mapping[int, Event]] = {
    int(TransactionType.COMMIT): Event.COMMIT,
    int(TransactionType.ROLLBACK): Event.ROLLBACK,
    int(TransactionType.NONE): Event.UNKNOWN,
}
"""commitOrRollback → event; the numbers are the transaction bits of sysFlag."""

ERROR_CODES: Final[Mapping[type[TransactionError], ResponseCode]] = {
    HalfNotFoundError: ResponseCode.SYSTEM_ERROR,
    HalfMismatchError: ResponseCode.SYSTEM_ERROR,
    DecisionForgottenError: ResponseCode.SYSTEM_ERROR,
    DecidedOtherwiseError: ResponseCode.ILLEGAL_OPERATION,
}
"""Refusal → answer, with RocketMQ's codes where RocketMQ refuses."""


class Transactions(Protocol):
    """What deciding needs of the transaction service."""

    def end(self, request: DecisionRequest) -> Ended: ...

    def plan(self, request: DecisionRequest) -> PlannedDecision | None: ...

    def decided(self, planned: PlannedDecision, appended: Sequence[AppendResult]) -> int: ...

    def abandon(self, planned: PlannedDecision) -> None: ...


def wrong_decision(decision: int) -> str:
    """Return the remark about a number that is no decision."""
    return f"commitOrRollback field wrong: {decision}, expected 8 (commit), 12 (rollback) or 0"


def stands_at(error: TransactionError) -> int:
    """Return the log position that must be durable before a refusal is true for good."""
    return error.position if isinstance(error, DecidedOtherwiseError) else 0


def log_refusal(request: DecisionRequest, connection: Connection, error: TransactionError) -> None:
    """Log what was refused and why: one-way senders get no answer."""
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
