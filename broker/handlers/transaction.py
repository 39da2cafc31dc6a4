"""END_TRANSACTION (37): a producer decides about its half message.

Official clients send it one-way and never learn of a refusal, so each refusal is a line in the log.
CHECK_TRANSACTION_STATE (39) goes the other way only; as a request to the broker it is unknown.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.flags import TransactionType

from ..connection import Connection, Handler
from ..errors import RequestRefusedError
from ..transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from ..transaction.pending import Event

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
    """What the handler needs of the transaction service."""

    def end(self, offset: int, queue_offset: int, producer_group: str, event: Event) -> int: ...


class Log(Protocol):
    """What the handler needs of the store."""

    @property
    def durable_offset(self) -> int: ...


class TransactionHandler:
    """Takes decisions, and answers them when they are on disk."""

    def __init__(self, transactions: Transactions, log: Log, ask_flush: Callable[[], None]) -> None:
        """Wire it; ``ask_flush`` has the log flushed after this pass of the event loop."""
        self._end = transactions.end
        self._log = log
        self._ask_flush = ask_flush

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.END_TRANSACTION: self.end_transaction}

    def end_transaction(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Decide a transaction; the answer waits for the disk in every flush mode."""
        header = request.header
        assert isinstance(header, EndTransactionRequestHeader)
        event = EVENTS.get(header.commit_or_rollback)
        if event is None:
            raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, "commitOrRollback field wrong")
        try:
            position = self._end(
                header.commit_log_offset,
                header.tran_state_table_offset,
                header.producer_group,
                event,
            )
        except TransactionError as error:
            logger.warning(
                "event=decision_refused half_offset=%d decision=%s from_check=%s group=%s "
                "peer=%s reason=%r",
                header.commit_log_offset,
                event.name,
                header.from_transaction_check,
                header.producer_group,
                connection.name,
                str(error),
            )
            raise RequestRefusedError(ERROR_CODES[type(error)], str(error)) from error
        if request.flag & FLAG_ONE_WAY:
            self._ask_flush()  # nobody's reply will, and the message is delivered only when durable
            return None
        # "Not known yet" is answered as well, unlike by RocketMQ: Go waits for every answer.
        reply = encode_reply(request)
        if position <= self._log.durable_offset:
            return reply
        connection.reply_when_durable(position, reply)
        return None
