"""END_TRANSACTIONS (9001): many decisions by one request, each by itself.

Those that are first decisions are appended together, and the others are served after them. A batch
of 1,024 may be about gibibytes of messages, or about halves that are not in memory. So one turn of
the event loop does a part of it, and what was done is kept by the connection until the next turn,
or until what is missing was read; the answer comes when all of it is on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.transaction_bodies import (
    EndResult,
    TransactionEnd,
    decode_ends,
    encode_entries,
)
from halfmq.remoting.transaction_headers import EndTransactionsRequestHeader
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ...errors import RequestRefusedError, UnfinishedError
from ...loop.slices import Slice
from ...net.group_append import GroupAppend
from ...net.router import STORE_ERROR_CODES
from ...ports import AppendLog, Connection
from ...transaction.deciding import DecisionRequest, PlannedDecision
from ...transaction.errors import TransactionError
from ...transaction.state.state_machine import Event
from ..subjects import may_decide
from .end_rules import ERROR_CODES, EVENTS, Transactions, log_refusal, stands_at, wrong_decision

logger = logging.getLogger(__name__)

TURN_BYTES: Final = 1 << 20
"""Bytes of messages that are decided in one turn of the event loop: reading them back and appending
them takes a few milliseconds. The last message may have more, as a single one may."""

READ_AHEAD: Final = 32
"""Decisions whose halves are brought into memory together, when the first of them is not there:
128 MiB of the largest messages."""


class Log(AppendLog, Protocol):
    """What deciding many transactions needs of the store."""

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError: ...


class Batch(msgspec.Struct):
    """Many decisions, and what became of them so far."""

    command: RemotingCommand
    connection: Connection
    ends: Sequence[TransactionEnd]
    results: list[EndResult | None]  # of each; None: there is none yet
    looked_at: int = 0  # so many of the first have a result, or are in `others`
    others: list[int] = msgspec.field(default_factory=list)  # no first decisions; the last is next
    position: int = 0  # where the log must be durable for the results to be true

    @property
    def group(self) -> str:
        """The producer group that decides."""
        header = self.command.header
        assert isinstance(header, EndTransactionsRequestHeader)
        return header.producer_group


class StagedFirsts(msgspec.Struct, gc=False):
    """First decisions of a batch."""

    requests: Sequence[AppendRequest]
    batch: Batch
    planned: Sequence[tuple[int, PlannedDecision]]  # with the number in the batch
    batches: EndBatches
    is_whole: bool  # these are all of the batch

    @property
    def command(self) -> RemotingCommand:
        """The request for them."""
        return self.batch.command

    @property
    def connection(self) -> Connection:
        """The connection of their producer."""
        return self.batch.connection

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Complete them; answer the request if these were all."""
        self.batches.finish(self, results)

    def refused(self) -> None:
        """Leave the transactions as they were."""
        self.batches.abandon(self)


class EndBatches:
    """Serves END_TRANSACTIONS."""

    def __init__(
        self,
        transactions: Transactions,
        log: Log,
        group: GroupAppend,
    ) -> None:
        self._transactions = transactions
        self._log = log
        self._group = group

    def end_transactions(self, request: RemotingCommand, connection: Connection) -> None:
        """Decide many transactions, each by itself; one answer when all of it is on disk.

        Raises:
            NotInMemoryError: The next decision needs what is not in memory.
            UnfinishedError: There is more to do than one turn of the loop allows.
        """
        batch = connection.unfinished
        if not isinstance(batch, Batch) or batch.command is not request:
            ends = decode_ends(request.body)
            batch = Batch(request, connection, ends, [None] * len(ends))
        connection.unfinished = batch
        is_staged = not batch.others and self._decide_firsts(batch)
        self._decide_others(batch)
        if batch.others or batch.looked_at < len(batch.ends):
            raise UnfinishedError
        connection.unfinished = None
        if not is_staged:
            self._answer(batch)

    # --- first decisions

    def _decide_firsts(self, batch: Batch) -> bool:
        """Append the first decisions among the next ones.

        Return True if these are all of the batch, so that it will be answered with them.
        """
        start = batch.looked_at
        planned = self._plan(batch)
        requests = [request for _, one in planned for request in one.requests]
        is_whole = bool(planned) and len(planned) == len(batch.ends)
        if requests:
            staged = StagedFirsts(requests, batch, planned, self, is_whole)
            self._group.stage(staged, partial(self._serve_refused, staged))
        if is_whole:
            return True
        # The rest is served after everything that is staged so far, and before what follows.
        self._group.append_staged()
        batch.others = [n for n in range(start, batch.looked_at) if batch.results[n] is None]
        batch.others.reverse()
        return False

    def _plan(self, batch: Batch) -> list[tuple[int, PlannedDecision]]:
        """Plan first decisions until there are enough for one turn, or halves have to be read."""
        plan = self._transactions.plan
        planned: list[tuple[int, PlannedDecision]] = []
        size, start = 0, batch.looked_at
        for number in range(start, len(batch.ends)):
            end = batch.ends[number]
            event = EVENTS.get(end.decision)
            batch.looked_at = number + 1
            if event is None:
                continue
            try:
                one = plan(_request_of(end, event, batch))
            except NotInMemoryError as missing:
                batch.looked_at = number
                if number > start:
                    break
                following = batch.ends[number + 1 : number + READ_AHEAD]
                raise self._with_next(missing, following) from None
            if one is not None:
                planned.append((number, one))
                size += one.size
                if size > TURN_BYTES:
                    break
        return planned

    def finish(self, staged: StagedFirsts, appended: Sequence[AppendResult]) -> None:
        """Complete planned decisions, whose records are in the log."""
        batch, at = staged.batch, 0
        for number, planned in staged.planned:
            end = at + len(planned.requests)
            self._carry_out(batch, number, planned, appended[at:end])
            at = end
        if staged.is_whole:
            self._answer(batch)

    def _carry_out(
        self, batch: Batch, number: int, planned: PlannedDecision, appended: Sequence[AppendResult]
    ) -> None:
        position = self._transactions.decided(planned, appended)
        batch.position = max(batch.position, position)
        batch.results[number] = EndResult(
            code=ResponseCode.SUCCESS, message_id=planned.message_id(appended)
        )

    def abandon(self, staged: StagedFirsts) -> None:
        """Forget planned decisions: their records could not be appended."""
        for _, planned in staged.planned:
            self._transactions.abandon(planned)

    def _serve_refused(
        self, staged: StagedFirsts, _command: RemotingCommand, _connection: Connection
    ) -> None:
        """Append each first decision by itself: together they could not be."""
        if not staged.is_whole:
            return  # they are among the others of this turn now
        batch = staged.batch
        for number, planned in staged.planned:
            try:
                appended = self._log.append(planned.requests)
            except StoreError as error:
                batch.results[number] = _refused(error)
            else:
                self._carry_out(batch, number, planned, appended)
        self._answer(batch)

    # --- the others

    def _decide_others(self, batch: Batch) -> None:
        """Serve by every rule what is no first decision, as much as one turn allows.

        For each a half is read and checked, which takes 15 us, or nine milliseconds if it is large.
        """
        turn, waiting = Slice(), len(batch.others)
        while batch.others and (len(batch.others) == waiting or not turn.is_over):
            try:
                self._decide_one(batch, batch.others[-1])
            except NotInMemoryError as missing:
                if len(batch.others) < waiting:
                    return
                following = batch.others[-2 : -READ_AHEAD - 1 : -1]
                raise self._with_next(missing, [batch.ends[n] for n in following]) from None
            batch.others.pop()

    def _with_next(
        self, missing: NotInMemoryError, ends: Sequence[TransactionEnd]
    ) -> NotInMemoryError:
        """Return an error that has the halves of the next decisions fetched as well."""
        following = self._log.lacking(end.commit_log_offset for end in ends)
        return NotInMemoryError([*missing.missing, *following.missing])

    def _decide_one(self, batch: Batch, number: int) -> None:
        result, position = self._end(batch, batch.ends[number])
        batch.results[number] = result
        batch.position = max(batch.position, position)

    def _end(self, batch: Batch, end: TransactionEnd) -> tuple[EndResult, int]:
        """Apply one of many; return its result and the log position that makes it true."""
        event = EVENTS.get(end.decision)
        if event is None:
            remark = wrong_decision(end.decision)
            return EndResult(code=ResponseCode.SYSTEM_ERROR, remark=remark), 0
        request = _request_of(end, event, batch)
        try:
            ended = self._transactions.end(request)
        except TransactionError as error:
            log_refusal(request, batch.connection, error)
            return EndResult(code=ERROR_CODES[type(error)], remark=str(error)), stands_at(error)
        except RequestRefusedError as refusal:
            refusal.answered(batch.command, batch.connection)
            return EndResult(code=refusal.code, remark=refusal.remark), 0
        except StoreError as error:
            return _refused(error), 0
        except OSError as error:
            logger.error(  # noqa: TRY400  # the error says it all
                "event=half_unreadable half_offset=%d error=%r", end.commit_log_offset, str(error)
            )
            remark = f"the half cannot be read: {error}"
            return EndResult(code=ResponseCode.SYSTEM_ERROR, remark=remark), 0
        return EndResult(code=ResponseCode.SUCCESS, message_id=ended.message_id), ended.position

    def _answer(self, batch: Batch) -> None:
        results = [result for result in batch.results if result is not None]
        assert len(results) == len(batch.ends)
        reply = encode_reply(batch.command, body=encode_entries(results))
        batch.connection.respond(batch.command, reply, batch.position)


def _request_of(end: TransactionEnd, event: Event, batch: Batch) -> DecisionRequest:
    return DecisionRequest(
        end.commit_log_offset,
        end.tran_state_table_offset,
        batch.group,
        event,
        end.from_check,
        (end.transaction_id,),
        may_decide(batch.command, from_check=end.from_check),
    )


def _refused(error: StoreError) -> EndResult:
    code = STORE_ERROR_CODES.get(type(error), ResponseCode.SYSTEM_ERROR)
    return EndResult(code=code, remark=str(error))
