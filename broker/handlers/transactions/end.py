"""END_TRANSACTION (37): a producer decides its half message. For several see `end_batch`.

Official clients send it one-way and do not get a refusal, so each refusal is logged.
CHECK_TRANSACTION_STATE (39) is sent only by the broker; as a request to it the code is unknown.

Every answer is final: it waits until the decision that it reports is on disk, whether that is the
requested one, the same one taken before, or the opposite one. Only a first decision about a topic
that opts out (`transactionAsyncFlushTopics`) is answered at once.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from halfmq.remoting.codes import FLAG_ONE_WAY, HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_end_reply, encode_reply
from halfmq.store.format.ids import offset_message_id
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ...errors import RequestRefusedError
from ...net.group_append import GroupAppend
from ...net.router import answer
from ...ports import Connection, Handler
from ...transaction.deciding import DecisionRequest, PlannedDecision
from ...transaction.errors import TransactionError
from ...transaction.state.state_machine import State
from ..subjects import may_decide
from . import end_batch
from .end_batch import EndBatches
from .end_rules import ERROR_CODES, EVENTS, Transactions, log_refusal, stands_at, wrong_decision


class StagedDecision(msgspec.Struct, gc=False):
    """A first decision that will be appended with others."""

    draft: AppendRequest
    request: RemotingCommand
    connection: Connection
    planned: PlannedDecision
    transactions: Transactions

    @property
    def drafts(self) -> Sequence[AppendRequest]:
        """The record that decides, and the other final messages of several."""
        return (self.draft, *self.planned.rest)

    def appended(self, one: AppendResult) -> bytes | None:
        """Complete the decision; the answer waits for the disk if necessary."""
        return self.finish((one,))

    def finish(self, appended: Sequence[AppendResult]) -> bytes | None:
        """Complete a decision of one or several records; return the answer if it need not wait."""
        planned, request = self.planned, self.request
        position = self.transactions.decided(planned, appended)
        if request.flag & FLAG_ONE_WAY:
            return None
        if request.header_type == _MSGPACK and planned.state is _COMMITTED:
            final_offset = appended[0].physical_offset
            message_id = offset_message_id(planned.draft.store_host, final_offset)
            reply = encode_end_reply(request, message_id)
        else:
            reply = encode_reply(request)
        if not planned.waits:
            return reply
        self.connection.reply_when_durable(position, reply)
        return None

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.transactions.abandon(self.planned)


class StagedGroupDecision(msgspec.Struct, gc=False):
    """A first decision about several messages."""

    one: StagedDecision

    @property
    def drafts(self) -> Sequence[AppendRequest]:
        """The record that decides, and the other final messages."""
        return self.one.drafts

    @property
    def request(self) -> RemotingCommand:
        """What asked for it."""
        return self.one.request

    @property
    def connection(self) -> Connection:
        """By which it came."""
        return self.one.connection

    def appended(self, several: Sequence[AppendResult]) -> bytes | None:
        """Complete the decision; the answer waits for the disk if necessary."""
        return self.one.finish(several)

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.one.refused()


LARGE_BODY: Final = 65_536
"""Bytes of a message above which its decision is not staged with others: one read of a socket may
bring 800 decisions, and all their messages would be in memory at the same time."""

_MSGPACK: Final = int(HeaderType.MSGPACK)
_COMMITTED: Final = State.COMMITTED


class Log(end_batch.Log, Protocol):
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
        """Wire it.

        Args:
            transactions: Decides.
            log: Tells what is on disk.
            group: Appends decisions together with others.
            ask_flush: Has the log flushed after this pass of the event loop.
        """
        self._transactions = transactions
        self._plan = transactions.plan
        self._end = transactions.end
        self._log = log
        self._group = group
        self._ask_flush = ask_flush
        self._batches = EndBatches(transactions, log, group, ask_flush, self._when_durable)

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {
            RequestCode.END_TRANSACTION: self.end_transaction,
            RequestCode.END_TRANSACTIONS: self._batches.end_transactions,
        }

    # --- one decision

    def end_transaction(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Decide a transaction; the answer waits for the disk unless the topic opts out."""
        header = request.header
        assert isinstance(header, EndTransactionRequestHeader)
        event = EVENTS.get(header.commit_or_rollback)
        if event is None:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR, wrong_decision(header.commit_or_rollback)
            )
        decision = DecisionRequest(
            header.commit_log_offset,
            header.tran_state_table_offset,
            header.producer_group,
            event,
            header.from_transaction_check,
            _names(header),
            may_decide(request, from_check=header.from_transaction_check),
        )
        planned = self._plan(decision)
        if planned is not None:
            self._stage(planned, request, connection)
            return None
        self._group.append_staged()  # the first decision may be among what is staged
        return self._end_by_every_rule(decision, request, connection)

    def _stage(
        self, planned: PlannedDecision, request: RemotingCommand, connection: Connection
    ) -> None:
        staged = StagedDecision(planned.draft, request, connection, planned, self._transactions)
        alone: Handler = partial(answer, partial(self._append_alone, staged))
        if planned.rest:
            self._group.stage_several(StagedGroupDecision(staged), alone)
        else:
            self._group.stage(staged, alone)
        if len(planned.draft.body) > LARGE_BODY:
            self._group.append_staged()
        if planned.waits:
            self._ask_flush()

    def _append_alone(
        self, staged: StagedDecision, _request: RemotingCommand, _connection: Connection
    ) -> bytes | None:
        """Append a decision by itself: with others it could not be."""
        return staged.finish(self._log.append(staged.drafts))

    def _end_by_every_rule(
        self, decision: DecisionRequest, request: RemotingCommand, connection: Connection
    ) -> bytes | None:
        try:
            ended = self._end(decision)
        except TransactionError as error:
            log_refusal(decision, connection, error)
            reply = encode_reply(request, ERROR_CODES[type(error)], remark=str(error))
            return self._when_durable(request, connection, stands_at(error), reply)
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


def _reply(request: RemotingCommand, message_id: str | None) -> bytes:
    """Return the answer to a decision; halfmq clients get the id of the final message."""
    if request.header_type != _MSGPACK or message_id is None:
        return encode_reply(request)
    return encode_end_reply(request, message_id)


def _names(header: EndTransactionRequestHeader) -> tuple[str, ...]:
    """Return what a request calls its transaction; old clients do not say."""
    return (header.transaction_id, header.msg_id) if header.transaction_id else ()
