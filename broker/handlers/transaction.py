"""END_TRANSACTION (37): a producer decides about its half message. END_TRANSACTIONS (9001): many.

Official clients send it one-way and never learn of a refusal, so each refusal is a line in the log.
CHECK_TRANSACTION_STATE (39) goes the other way only; as a request to the broker it is unknown.

Whatever is answered is true for good: the answer waits until the decision it tells of is on disk,
be it the one that was asked for, the same taken before, or the opposite one that stands.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from halfmq.remoting.codes import FLAG_ONE_WAY, HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_end_reply, encode_reply
from halfmq.remoting.transaction_headers import EndTransactionsRequestHeader
from halfmq.remoting.transactions import EndResult, TransactionEnd, decode_ends, encode_entries
from halfmq.store.draft import Appended, Draft
from halfmq.store.errors import StoreError
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.ids import offset_message_id

from ..connection import Connection, Handler
from ..errors import RequestRefusedError
from ..group_append import GroupAppend
from ..router import STORE_ERROR_CODES, answer
from ..transaction.deciding import Ended, PlannedDecision
from ..transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from ..transaction.pending import Event, State

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

    def end(
        self,
        offset: int,
        queue_offset: int,
        producer_group: str,
        event: Event,
        from_check: bool = False,
    ) -> Ended: ...

    def plan(
        self,
        offset: int,
        queue_offset: int,
        producer_group: str,
        event: Event,
        from_check: bool = False,
    ) -> PlannedDecision | None: ...

    def decided(self, planned: PlannedDecision, appended: Sequence[Appended]) -> int: ...

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
        self.finish((one,))
        return None

    def finish(self, appended: Sequence[Appended]) -> None:
        """Carry it out, be it one record or several."""
        planned, request = self.planned, self.request
        position = self.transactions.decided(planned, appended)
        if not request.flag & FLAG_ONE_WAY:
            if request.header_type == _MSGPACK and planned.state is _COMMITTED:
                final_offset = appended[0].physical_offset
                message_id = offset_message_id(planned.draft.store_host, final_offset)
                reply = encode_end_reply(request, message_id)
            else:
                reply = encode_reply(request)
            self.connection.reply_when_durable(position, reply)

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.transactions.abandon(self.planned)


class StagedGroupDecision(msgspec.Struct, gc=False):
    """A first decision about several messages."""

    one: StagedDecision

    @property
    def drafts(self) -> Sequence[Draft]:
        """The record that decides, and the other final messages."""
        return (self.one.draft, *self.one.planned.rest)

    @property
    def request(self) -> RemotingCommand:
        """What asked for it."""
        return self.one.request

    @property
    def connection(self) -> Connection:
        """By which it came."""
        return self.one.connection

    def appended(self, several: Sequence[Appended]) -> bytes | None:
        """Carry it out; its answer waits for the disk in every flush mode."""
        self.one.finish(several)
        return None

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.one.refused()


class StagedBatch(msgspec.Struct, gc=False):
    """The first decisions among many, and what the others wait for."""

    drafts: Sequence[Draft]
    request: RemotingCommand
    connection: Connection
    ends: Sequence[TransactionEnd]
    planned: Sequence[PlannedDecision | None]  # by place in `ends`
    handler: TransactionHandler

    def appended(self, several: Sequence[Appended]) -> bytes | None:
        """Carry them out, then serve the others; one answer for all."""
        return self.handler.finish_batch(self, several)

    def refused(self) -> None:
        """Leave the transactions as they were."""
        self.handler.abandon_batch(self)


_MSGPACK: Final = int(HeaderType.MSGPACK)
_COMMITTED: Final = State.COMMITTED
WRONG_DECISION: Final = "commitOrRollback field wrong"


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
        self._end_batch_alone: Handler = partial(answer, self._end_each)

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {
            RequestCode.END_TRANSACTION: self.end_transaction,
            RequestCode.END_TRANSACTIONS: self.end_transactions,
        }

    # --- one decision

    def end_transaction(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Decide a transaction; the answer waits for the disk in every flush mode."""
        header = request.header
        assert isinstance(header, EndTransactionRequestHeader)
        event = EVENTS.get(header.commit_or_rollback)
        if event is None:
            raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, WRONG_DECISION)
        planned = self._plan(
            header.commit_log_offset,
            header.tran_state_table_offset,
            header.producer_group,
            event,
            header.from_transaction_check,
        )
        if planned is not None:
            staged = StagedDecision(planned.draft, request, connection, planned, self._transactions)
            if planned.rest:
                self._group.stage_several(StagedGroupDecision(staged), self._end_alone)
            else:
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
            ended = self._end(
                header.commit_log_offset,
                header.tran_state_table_offset,
                header.producer_group,
                event,
                header.from_transaction_check,
            )
        except TransactionError as error:
            end = TransactionEnd(
                commit_log_offset=header.commit_log_offset,
                tran_state_table_offset=header.tran_state_table_offset,
                decision=header.commit_or_rollback,
                from_check=header.from_transaction_check,
            )
            _log_refusal(end, header.producer_group, connection, error)
            reply = encode_reply(request, ERROR_CODES[type(error)], remark=str(error))
            return self._when_durable(request, connection, _stands_at(error), reply)
        # "Not known yet" is answered as well, unlike by RocketMQ: Go waits for every answer.
        return self._when_durable(
            request, connection, ended.position, _reply(request, ended.message_id)
        )

    def _when_durable(
        self, request: RemotingCommand, connection: Connection, position: int, reply: bytes
    ) -> bytes | None:
        """Return the reply, or hold it until the log is on disk up to a position."""
        if request.flag & FLAG_ONE_WAY:
            self._ask_flush()  # nobody's reply will, and the message is delivered only when durable
            return None
        if position <= self._log.durable_offset:
            return reply
        connection.reply_when_durable(position, reply)
        return None

    # --- many decisions

    def end_transactions(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Decide many transactions, each by itself; one answer when all of it is on disk."""
        header = request.header
        assert isinstance(header, EndTransactionsRequestHeader)
        ends = decode_ends(request.body)
        drafts: list[Draft] = []
        plans: list[PlannedDecision | None] = []
        for end in ends:
            event = EVENTS.get(end.decision)
            planned = None
            if event is not None:
                planned = self._plan(
                    end.commit_log_offset,
                    end.tran_state_table_offset,
                    header.producer_group,
                    event,
                    end.from_check,
                )
            plans.append(planned)
            if planned is not None:
                drafts.append(planned.draft)
                drafts += planned.rest
        if not drafts:
            self._group.append_staged()
            return self._end_each(request, connection)
        staged = StagedBatch(drafts, request, connection, ends, plans, self)
        self._group.stage_several(staged, self._end_batch_alone)
        self._ask_flush()
        if None in plans:
            # The rest is served behind everything that is staged so far, and before what follows.
            self._group.append_staged()
        return None

    def finish_batch(self, batch: StagedBatch, appended: Sequence[Appended]) -> bytes | None:
        """Carry out the planned decisions, whose records are in the log, then the others."""
        position = at = 0
        results: list[EndResult | None] = []
        for planned in batch.planned:
            if planned is None:
                results.append(None)
                continue
            behind = at + 1 + len(planned.rest)
            position = self._transactions.decided(planned, appended[at:behind])
            host = planned.message_host
            message_id = (
                None if host is None else offset_message_id(host, appended[at].physical_offset)
            )
            results.append(EndResult(code=ResponseCode.SUCCESS, message_id=message_id))
            at = behind
        return self._answer_batch(batch.request, batch.connection, batch.ends, results, position)

    def abandon_batch(self, batch: StagedBatch) -> None:
        """Forget the planned decisions: their records could not be appended."""
        for planned in batch.planned:
            if planned is not None:
                self._transactions.abandon(planned)

    def _end_each(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        ends = decode_ends(request.body)
        return self._answer_batch(request, connection, ends, [None] * len(ends), 0)

    def _answer_batch(
        self,
        request: RemotingCommand,
        connection: Connection,
        ends: Sequence[TransactionEnd],
        results: Sequence[EndResult | None],
        position: int,
    ) -> bytes | None:
        """Serve by every rule what has no result yet; answer when all of it is on disk."""
        header = request.header
        assert isinstance(header, EndTransactionsRequestHeader)
        entries: list[EndResult] = []
        for end, known in zip(ends, results, strict=True):
            result = known
            if result is None:
                result, stands_at = self._end_one(end, header.producer_group, connection)
                position = max(position, stands_at)
            entries.append(result)
        reply = encode_reply(request, body=encode_entries(entries))
        return self._when_durable(request, connection, position, reply)

    def _end_one(
        self, end: TransactionEnd, group: str, connection: Connection
    ) -> tuple[EndResult, int]:
        """Apply one of many; return its result and the log position that makes it true."""
        event = EVENTS.get(end.decision)
        if event is None:
            return EndResult(code=ResponseCode.SYSTEM_ERROR, remark=WRONG_DECISION), 0
        try:
            ended = self._end(
                end.commit_log_offset, end.tran_state_table_offset, group, event, end.from_check
            )
        except TransactionError as error:
            _log_refusal(end, group, connection, error)
            result = EndResult(code=ERROR_CODES[type(error)], remark=str(error))
            return result, _stands_at(error)
        except RequestRefusedError as refusal:
            return EndResult(code=refusal.code, remark=refusal.remark), 0
        except StoreError as error:
            code = STORE_ERROR_CODES.get(type(error), ResponseCode.SYSTEM_ERROR)
            return EndResult(code=code, remark=str(error)), 0
        return EndResult(code=ResponseCode.SUCCESS, message_id=ended.message_id), ended.position


def _reply(request: RemotingCommand, message_id: str | None) -> bytes:
    """Return the answer to a decision: clients of ours are told the id of the final message."""
    if request.header_type != _MSGPACK or message_id is None:
        return encode_reply(request)
    return encode_end_reply(request, message_id)


def _stands_at(error: TransactionError) -> int:
    """Return the log position that must be durable before a refusal is true for good."""
    return error.position if isinstance(error, DecidedOtherwiseError) else 0


def _log_refusal(
    end: TransactionEnd, group: str, connection: Connection, error: TransactionError
) -> None:
    event = EVENTS[end.decision]
    logger.warning(
        "event=decision_refused half_offset=%d decision=%s from_check=%s group=%s peer=%s "
        "reason=%r",
        end.commit_log_offset,
        event.name,
        end.from_check,
        group,
        connection.name,
        str(error),
    )
