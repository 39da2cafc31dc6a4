"""END_TRANSACTION (37): a producer decides about its half message.

Official clients send it one-way and never learn of a refusal, so each refusal is a line in the log.
CHECK_TRANSACTION_STATE (39) goes the other way only; as a request to the broker it is unknown.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

import msgspec

from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.draft import Appended, Draft
from halfmq.store.format.flags import TransactionType

from ..connection import Connection, Handler
from ..errors import RequestRefusedError
from ..group_append import GroupAppend
from ..router import answer
from ..transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from ..transaction.pending import Event
from ..transaction.service import PlannedDecision

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

    def plan(
        self, offset: int, queue_offset: int, producer_group: str, event: Event
    ) -> PlannedDecision | None: ...

    def decided(self, planned: PlannedDecision, appended: Appended) -> int: ...

    def abandon(self, planned: PlannedDecision) -> None: ...


class StagedDecision(msgspec.Struct, gc=False):
    """A first decision that will be appended with others."""

    draft: Draft
    request: RemotingCommand
    connection: Connection
    planned: PlannedDecision
    transactions: Transactions

    def appended(self, one: Appended) -> bytes | None:
        """Carry it out; its answer waits for the disk in every flush mode."""
        position = self.transactions.decided(self.planned, one)
        if not self.request.flag & FLAG_ONE_WAY:
            self.connection.reply_when_durable(position, encode_reply(self.request))
        return None

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.transactions.abandon(self.planned)


class Log(Protocol):
    """What the handler needs of the store."""

    @property
    def durable_offset(self) -> int: ...


class TransactionHandler:
    """Takes decisions, and answers them when they are on disk."""

    def __init__(
        self,
        transactions: Transactions,
        log: Log,
        group: GroupAppend,
        ask_flush: Callable[[], None],
    ) -> None:
        """Wire it; ``ask_flush`` has the log flushed after this pass of the event loop."""
        self._transactions = transactions
        self._plan = transactions.plan
        self._end = transactions.end
        self._log = log
        self._group = group
        self._ask_flush = ask_flush
        self._end_alone: Handler = partial(answer, self._end_by_every_rule)

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
        planned = self._plan(
            header.commit_log_offset,
            header.tran_state_table_offset,
            header.producer_group,
            event,
        )
        if planned is not None:
            staged = StagedDecision(planned.draft, request, connection, planned, self._transactions)
            self._group.stage(staged, self._end_alone)
            self._ask_flush()
            return None
        self._group.append_staged()  # the first decision may be among what is staged
        return self._end_by_every_rule(request, connection)

    def _end_by_every_rule(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        header = request.header
        assert isinstance(header, EndTransactionRequestHeader)
        event = EVENTS[header.commit_or_rollback]
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
