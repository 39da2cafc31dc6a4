"""Administration of transactions: list and decide them, resume their checks.

QUERY_TRANSACTIONS (9000) and DECIDE_TRANSACTION (9003) are halfmq's own, see ``docs/wire.md``;
RESUME_CHECK_HALF_MESSAGE (323) is RocketMQ's.

An operator's decision has the rules of a producer's: the first one wins, and its answer waits for
the disk. Each is logged with the operator's reason.

Source: RocketMQ ``AdminBrokerProcessor#resumeCheckHalfMessage``.
"""

import logging
from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PageResponseHeader, ResumeCheckHalfMessageRequestHeader
from halfmq.remoting.own_requests import (
    TRANSACTIONS_MAX,
    DecideTransactionRequestHeader,
    FinalMessageResponseHeader,
    QueryTransactionsRequestHeader,
    encode_entries,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC

from ...errors import RequestRefusedError
from ...logs import EACH
from ...net.group_append import GroupAppend
from ...ports import Connection, Handlers, serves
from ...transaction.errors import DecidedOtherwiseError, TransactionError
from ...transaction.operator_actions import OperatorActions
from ...transaction.pending_view import PendingView

logger = logging.getLogger(__name__)

RESUME: Final = "resume"
ACTIONS: Final = ("commit", "rollback", RESUME)
STATES: Final = ("prepared", "parked")


@define(eq=False, repr=False)
class TransactionAdminHandlers(Handlers):
    """Serves queries and decisions of undecided transactions."""

    _view: PendingView
    _actions: OperatorActions
    _named_record: Callable[[int], bytes | None]
    _group: GroupAppend

    @serves(RequestCode.QUERY_TRANSACTIONS)
    def query_transactions(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with one undecided transaction, or with a page of them, the oldest first."""
        header = request.header_as(QueryTransactionsRequestHeader)
        if header.transaction_id is not None:
            found = self._view.find(header.transaction_id)
            return encode_reply(request, body=encode_entries([] if found is None else [found]))
        if not 1 <= header.max_count <= TRANSACTIONS_MAX:
            raise RequestRefusedError(
                f"maxCount is {header.max_count}, expected 1 to {TRANSACTIONS_MAX}"
            )
        if header.state is not None and header.state not in STATES:
            raise RequestRefusedError(
                f"state is {header.state!r}, expected one of {', '.join(STATES)}"
            )
        infos, next_after = self._view.page(
            header.after, header.max_count, header.producer_group, header.state
        )
        return encode_reply(
            request,
            header=PageResponseHeader(next_after=next_after),
            body=encode_entries(infos),
        )

    @serves(RequestCode.DECIDE_TRANSACTION)
    def decide_transaction(self, request: RemotingCommand, connection: Connection) -> None:
        """Decide a transaction instead of its producers, or resume its checks."""
        header = request.header_as(DecideTransactionRequestHeader)
        offset, action = header.transaction_offset, header.action
        if action not in ACTIONS:
            raise RequestRefusedError(f"action is {action!r}, expected one of {', '.join(ACTIONS)}")
        self._group.append_staged()  # a first decision may be staged
        try:
            if action == RESUME:
                ended = self._actions.resume(offset)
            else:
                ended = self._actions.decide(offset, action)
        except TransactionError as error:
            _log(logging.WARNING, "operator_refused", header, connection, str(error))
            code = (
                ResponseCode.ILLEGAL_OPERATION
                if isinstance(error, DecidedOtherwiseError)
                else ResponseCode.SYSTEM_ERROR
            )
            raise RequestRefusedError(str(error), code) from error
        _log(logging.INFO, "operator_decided", header, connection, header.reason or "")
        reply = encode_reply(request, header=FinalMessageResponseHeader(msg_id=ended.message_id))
        connection.respond(request, reply, ended.position)

    @serves(RequestCode.RESUME_CHECK_HALF_MESSAGE)
    def resume_check(self, request: RemotingCommand, connection: Connection) -> None:
        """Resume the checks of a parked transaction, by RocketMQ's request."""
        header = request.header_as(ResumeCheckHalfMessageRequestHeader)
        offset = self._half_offset(header.msg_id or "")
        self._group.append_staged()
        try:
            ended = self._actions.resume(offset)
        except TransactionError as error:
            raise RequestRefusedError(str(error)) from error
        logger.info(
            "event=operator_decided half_offset=%d action=resume peer=%s",
            offset,
            connection.name,
            extra=EACH,
        )
        connection.respond(request, encode_reply(request), ended.position)

    def _half_offset(self, message_id: str) -> int:
        """Return the physical offset of the half whose id, or whose parked copy's id, this is.

        Raises:
            RequestRefusedError: The id is invalid, or its transaction is not undecided.
        """
        try:
            offset = parse_offset_message_id(message_id).physical_offset
        except ValueError as error:
            raise RequestRefusedError(f"msgId: {error}") from error
        encoded = self._named_record(offset)
        record = None if encoded is None else decode_record(encoded, check_crc=False)
        if record is None or record.topic != TRANS_CHECK_MAX_TIME_TOPIC:
            return offset
        if record.prepared_transaction_offset:
            return record.prepared_transaction_offset
        # RocketMQ's copies have no link, and one to the half at offset 0 looks the same.
        key = get_property(record.properties, b"UNIQ_KEY")
        found = None if key is None else self._view.find(key.decode(errors="replace"))
        if found is None:
            raise RequestRefusedError("the transaction of this message is not undecided")
        return found.offset


def _log(
    level: int,
    event: str,
    header: DecideTransactionRequestHeader,
    connection: Connection,
    reason: str,
) -> None:
    logger.log(
        level,
        "event=%s half_offset=%d action=%s peer=%s reason=%r",
        event,
        header.transaction_offset,
        header.action,
        connection.name,
        reason,
        extra=EACH,
    )
