"""END_TRANSACTION (37): a producer decides its half message; `end_batch` decides several.

Official clients send it one-way and do not get a refusal, so each refusal is logged.

Every answer is final: it waits until the decision that it reports is on disk, whether that is the
requested one, an equal earlier one, or the opposite one. Only a first decision about a topic that
opts out (`transactionAsyncFlushTopics`) is answered at once.

Source: RocketMQ ``EndTransactionProcessor.java``.
"""

from functools import partial
from typing import Final

from attrs import define

from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.replies import encode_end_reply, encode_reply

from ...errors import RequestRefusedError
from ...net.group_append import GroupAppend
from ...ports import Connection, Handlers, serves
from ...transaction.deciding import DecisionRequest, Decisions, Ended
from ...transaction.errors import TransactionError
from ..access_checks import may_decide
from .end_rules import (
    ERROR_CODES,
    EVENTS,
    StagedDecision,
    durable_at,
    log_refusal,
    plan,
    wrong_decision,
)

LARGE_BODY: Final = 65_536
"""Bytes of a message above which its decision is appended at once: one read of a socket may contain
800 decisions, and staged ones keep their messages in memory."""

_MSGPACK: Final = int(HeaderType.MSGPACK)


@define(eq=False, repr=False)
class TransactionHandler(Handlers):
    """Serves decisions of producers."""

    _decisions: Decisions
    _group: GroupAppend

    @serves(RequestCode.END_TRANSACTION)
    def end_transaction(self, request: RemotingCommand, connection: Connection) -> None:
        """Decide a transaction; the answer waits for the disk unless the topic opts out."""
        header = request.header
        assert isinstance(header, EndTransactionRequestHeader)
        event = EVENTS.get(header.commit_or_rollback)
        if event is None:
            raise RequestRefusedError(wrong_decision(header.commit_or_rollback))
        decision = DecisionRequest(
            header.commit_log_offset,
            header.tran_state_table_offset,
            header.producer_group,
            event,
            header.from_transaction_check,
            _names(header),
            may_decide(request, from_check=header.from_transaction_check),
        )
        try:
            planned = plan(self._decisions, self._group, decision)
        except TransactionError as error:
            log_refusal(decision, connection, error)
            reply = encode_reply(request, ERROR_CODES[type(error)], remark=str(error))
            connection.respond(request, reply, durable_at(error))
            return
        if isinstance(planned, Ended):
            # UNKNOWN is answered too, unlike by RocketMQ, because Go clients wait for every answer.
            _answer(request, connection, planned)
            return
        on_ended = partial(_answer, request, connection)
        staged = StagedDecision(
            planned.requests, request, connection, planned, self._decisions, on_ended
        )
        self._group.stage(staged, staged.append_alone)
        if len(planned.requests[0].body) > LARGE_BODY:
            self._group.append_staged()


def _answer(request: RemotingCommand, connection: Connection, ended: Ended) -> None:
    """Answer a decision; clients of halfmq also get the id of the final message."""
    if request.header_type == _MSGPACK and ended.message_id is not None:
        reply = encode_end_reply(request, ended.message_id)
    else:
        reply = encode_reply(request)
    connection.respond(request, reply, ended.position)


def _names(header: EndTransactionRequestHeader) -> tuple[str, ...]:
    """Return the names of its transaction in a request; old clients send none."""
    return (header.transaction_id, header.msg_id) if header.transaction_id else ()
