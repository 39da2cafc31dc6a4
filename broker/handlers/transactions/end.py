"""END_TRANSACTION (37): a producer decides its half message. For several see `end_batch`.

Official clients send it one-way and do not get a refusal, so each refusal is logged.
CHECK_TRANSACTION_STATE (39) is sent only by the broker; as a request to it the code is unknown.

Every answer is final: it waits until the decision that it reports is on disk, whether that is the
requested one, the same one taken before, or the opposite one. Only a first decision about a topic
that opts out (`transactionAsyncFlushTopics`) is answered at once.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_end_reply, encode_reply
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ...errors import RequestRefusedError
from ...net.group_append import GroupAppend
from ...ports import Connection, Handler
from ...transaction.deciding import DecisionRequest, PlannedDecision
from ...transaction.errors import TransactionError
from ..subjects import may_decide
from .end_batch import EndBatches, Log
from .end_rules import ERROR_CODES, EVENTS, Transactions, log_refusal, stands_at, wrong_decision


class StagedDecision(msgspec.Struct, gc=False):
    """A first decision that will be appended with others."""

    requests: Sequence[AppendRequest]  # the record that decides, then the other final messages
    command: RemotingCommand
    connection: Connection
    planned: PlannedDecision
    transactions: Transactions

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Complete the decision, and answer the request."""
        planned, command = self.planned, self.command
        durable_at = self.transactions.decided(planned, results)
        message_id = planned.message_id(results) if command.header_type == _MSGPACK else None
        self.connection.respond(command, _reply(command, message_id), durable_at)

    def refused(self) -> None:
        """Leave the transaction as it was."""
        self.transactions.abandon(self.planned)


LARGE_BODY: Final = 65_536
"""Bytes of a message above which its decision is not staged with others: one read of a socket may
bring 800 decisions, and all their messages would be in memory at the same time."""

_MSGPACK: Final = int(HeaderType.MSGPACK)


class TransactionHandler:
    """Takes decisions, and answers them when they are on disk."""

    def __init__(
        self,
        transactions: Transactions,
        log: Log,
        group: GroupAppend,
    ) -> None:
        self._transactions = transactions
        self._plan = transactions.plan
        self._end = transactions.end
        self._append = log.append
        self._group = group
        self._batches = EndBatches(transactions, log, group)

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {
            RequestCode.END_TRANSACTION: self.end_transaction,
            RequestCode.END_TRANSACTIONS: self._batches.end_transactions,
        }

    # --- one decision

    def end_transaction(self, request: RemotingCommand, connection: Connection) -> None:
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
            return
        self._group.append_staged()  # the first decision may be among what is staged
        self._end_by_every_rule(decision, request, connection)

    def _stage(
        self, planned: PlannedDecision, request: RemotingCommand, connection: Connection
    ) -> None:
        requests = planned.requests
        staged = StagedDecision(requests, request, connection, planned, self._transactions)
        self._group.stage(staged, partial(self._append_alone, staged))
        if len(requests[0].body) > LARGE_BODY:
            self._group.append_staged()

    def _append_alone(
        self, staged: StagedDecision, _request: RemotingCommand, _connection: Connection
    ) -> None:
        """Append a decision by itself: with others it could not be."""
        staged.appended(self._append(staged.requests))

    def _end_by_every_rule(
        self, decision: DecisionRequest, request: RemotingCommand, connection: Connection
    ) -> None:
        try:
            ended = self._end(decision)
        except TransactionError as error:
            log_refusal(decision, connection, error)
            reply = encode_reply(request, ERROR_CODES[type(error)], remark=str(error))
            connection.respond(request, reply, stands_at(error))
        else:
            # "Not known yet" is answered as well, unlike by RocketMQ: Go waits for every answer.
            connection.respond(request, _reply(request, ended.message_id), ended.position)


def _reply(request: RemotingCommand, message_id: str | None) -> bytes:
    """Return the answer to a decision; halfmq clients get the id of the final message."""
    if request.header_type != _MSGPACK or message_id is None:
        return encode_reply(request)
    return encode_end_reply(request, message_id)


def _names(header: EndTransactionRequestHeader) -> tuple[str, ...]:
    """Return what a request calls its transaction; old clients do not say."""
    return (header.transaction_id, header.msg_id) if header.transaction_id else ()
