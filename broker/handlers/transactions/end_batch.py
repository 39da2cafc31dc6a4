"""END_TRANSACTIONS (9001): many decisions in one request, independent of each other.

First decisions are staged, so they are appended together. A batch of 1,024 may concern gibibytes of
messages, or halves that are not in memory. So one turn of the event loop processes a part of it;
the connection keeps the results until the next turn, or until the missing bytes are in memory. The
answer is sent when all decisions are on disk.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.own_requests import (
    EndResult,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_ends,
    encode_entries,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError

from ...errors import STORE_ERROR_CODES, RequestRefusedError, UnfinishedError
from ...loop.slices import Slice
from ...net.group_append import GroupAppend
from ...ports import Connection, Handlers, serves
from ...transaction.deciding import DecisionRequest, Decisions, Ended
from ...transaction.errors import TransactionError
from ...transaction.state.state_machine import TransactionEvent
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

logger = logging.getLogger(__name__)

TURN_BYTES: Final = 1 << 20
"""Bytes of messages that are decided in one turn of the event loop: reading them and appending them
takes a few milliseconds. The last message of a turn may exceed it, as a single one may."""

READ_AHEAD: Final = 32
"""Decisions whose halves are read into memory together if the first of them is not there: 128 MiB
of the largest messages."""


class Batch(msgspec.Struct):
    """Many decisions, and their results so far."""

    command: RemotingCommand
    connection: Connection
    ends: Sequence[TransactionEnd]
    results: dict[int, EndResult] = msgspec.field(default_factory=dict)  # by index in `ends`
    planned: int = 0  # number of decisions that have a result or are staged
    position: int = 0  # of the log, up to which it must be durable before the answer

    @property
    def group(self) -> str:
        header = self.command.header_as(TransactionsRequestHeader)
        return header.producer_group

    def ended(self, index: int, ended: Ended) -> None:
        """Add the result of one decision that was taken."""
        self.put(index, EndResult(ResponseCode.SUCCESS, None, ended.message_id), ended.position)

    def put(self, index: int, result: EndResult, position: int = 0) -> None:
        """Add one result, final when the log is durable up to `position`; answer after the last."""
        self.results[index] = result
        self.position = max(self.position, position)
        if len(self.results) == len(self.ends):
            self.answer()

    def answer(self) -> None:
        body = encode_entries([self.results[index] for index in range(len(self.ends))])
        reply = encode_reply(self.command, body=body)
        self.connection.respond(self.command, reply, self.position)


@define(eq=False, repr=False)
class EndBatches(Handlers):
    """Serves END_TRANSACTIONS."""

    _decisions: Decisions
    _group: GroupAppend
    _lacking: Callable[[Iterable[int]], NotInMemoryError]  # ``LogReader.lacking``

    @serves(RequestCode.END_TRANSACTIONS)
    def end_transactions(self, request: RemotingCommand, connection: Connection) -> None:
        """Decide many transactions; answer when all decisions are on disk.

        Raises:
            NotInMemoryError: The next decision needs data that are not in memory.
            UnfinishedError: There is more to do than one turn of the loop allows.
        """
        batch = connection.unfinished
        if not isinstance(batch, Batch) or batch.command is not request:
            batch = connection.unfinished = Batch(request, connection, decode_ends(request.body))
        self._decide_next(batch)
        if batch.planned < len(batch.ends):
            self._group.append_staged()  # before other requests add more
            raise UnfinishedError
        connection.unfinished = None
        if not batch.ends:
            batch.answer()

    def _decide_next(self, batch: Batch) -> None:
        """Process as many decisions as one turn allows, at least one."""
        turn, start, size = Slice(), batch.planned, 0
        while batch.planned < len(batch.ends) and size <= TURN_BYTES:
            index = batch.planned
            try:
                staged_size = self._decide(batch, index)
            except NotInMemoryError as missing:
                if index > start:
                    return
                following = batch.ends[index + 1 : index + READ_AHEAD]
                ahead = self._lacking(end.commit_log_offset for end in following)
                raise NotInMemoryError([*missing.missing, *ahead.missing]) from None
            batch.planned += 1
            size += staged_size
            # A decision that is not staged has read and checked a half, which may take 9 ms.
            if not staged_size and turn.is_over:
                return

    def _decide(self, batch: Batch, index: int) -> int:
        """Stage a first decision and return its size in bytes; otherwise add a result, return 0."""
        end = batch.ends[index]
        event = EVENTS.get(end.decision)
        if event is None:
            remark = wrong_decision(end.decision)
            batch.put(index, EndResult(ResponseCode.SYSTEM_ERROR, remark=remark))
            return 0
        request = _request_of(end, event, batch)
        try:
            planned = plan(self._decisions, self._group, request)
        except TransactionError as error:
            log_refusal(request, batch.connection, error)
            refused = EndResult(ERROR_CODES[type(error)], remark=str(error))
            batch.put(index, refused, durable_at(error))
        except RequestRefusedError as refusal:
            refusal.answered(batch.command, batch.connection)
            batch.put(index, EndResult(refusal.code, remark=refusal.remark))
        except StoreError as error:
            batch.put(index, _refused(error))
        except OSError as error:
            logger.error(  # noqa: TRY400  # the error says it all
                "event=half_unreadable half_offset=%d error=%r", end.commit_log_offset, str(error)
            )
            remark = f"the half cannot be read: {error}"
            batch.put(index, EndResult(ResponseCode.SYSTEM_ERROR, remark=remark))
        else:
            if not isinstance(planned, Ended):
                staged = StagedDecision(
                    planned.requests,
                    batch.command,
                    batch.connection,
                    planned,
                    self._decisions,
                    partial(batch.ended, index),
                )
                self._group.stage(staged, partial(_append_alone, staged, batch, index))
                return planned.size
            batch.ended(index, planned)
        return 0


def _append_alone(
    staged: StagedDecision,
    batch: Batch,
    index: int,
    command: RemotingCommand,
    connection: Connection,
) -> None:
    try:
        staged.append_alone(command, connection)
    except StoreError as error:
        batch.put(index, _refused(error))
    except Exception as error:  # the others have results, and one answer
        logger.exception("event=decision_failed half_offset=%d", staged.planned.entry.offset)
        batch.put(index, _refused(error))


def _request_of(end: TransactionEnd, event: TransactionEvent, batch: Batch) -> DecisionRequest:
    return DecisionRequest(
        end.commit_log_offset,
        end.tran_state_table_offset,
        batch.group,
        event,
        end.from_check,
        (end.transaction_id,),
        may_decide(batch.command, from_check=end.from_check),
    )


def _refused(error: Exception) -> EndResult:
    code = ResponseCode.SYSTEM_ERROR
    if isinstance(error, StoreError):
        code = STORE_ERROR_CODES.get(type(error), code)
    return EndResult(code, remark=str(error))
