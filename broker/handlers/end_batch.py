"""END_TRANSACTIONS (9001): many decisions by one request, each by itself.

Those that are first decisions are appended together, and the others are served behind them. A
batch of 1,024 may be about gibibytes of messages, or about halves that are not in memory. So it is
done in slices, each of as much as one turn of the event loop should take, and the disk is read by
threads; the answer comes when all of it is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.transaction_headers import EndTransactionsRequestHeader
from halfmq.remoting.transactions import EndResult, TransactionEnd, decode_ends, encode_entries
from halfmq.store.draft import Appended, Draft
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import offset_message_id

from ..connection import Connection, Handler
from ..errors import RequestRefusedError
from ..group_append import GroupAppend
from ..router import STORE_ERROR_CODES, answer
from ..transaction.deciding import PlannedDecision
from ..transaction.errors import ColdHalfError, TransactionError
from .end_rules import (
    ERROR_CODES,
    EVENTS,
    Transactions,
    log_refusal,
    stands_at,
    wrong_decision,
)
from .later import Later
from .subjects import may_decide

SLICE_BYTES: Final = 1 << 20
"""Bytes of messages that are decided in one turn of the event loop: reading them back and appending
them takes ten milliseconds."""

READ_AHEAD: Final = 32
"""Decisions whose halves are brought into memory together, when the first of them is not there."""

WhenDurable = Callable[[RemotingCommand, Connection, int, bytes], bytes | None]
"""Returns a reply, or holds it until the log is on disk up to a position."""


class Batch(msgspec.Struct):
    """Many decisions, and how far they are."""

    request: RemotingCommand
    connection: Connection
    ends: Sequence[TransactionEnd]
    results: list[EndResult]  # of the first of them
    position: int = 0  # where the log must be durable for these to be true
    in_memory: int = 0  # the halves of so many have been read

    @property
    def group(self) -> str:
        """The producer group that decides."""
        header = self.request.header
        assert isinstance(header, EndTransactionsRequestHeader)
        return header.producer_group

    @property
    def is_over(self) -> bool:
        """Whether each decision has its result."""
        return len(self.results) == len(self.ends)


class StagedSlice(msgspec.Struct, gc=False):
    """First decisions among many, and what the others wait for."""

    drafts: Sequence[Draft]
    batch: Batch
    planned: Sequence[PlannedDecision | None]  # for the decisions behind those with a result
    batches: EndBatches

    @property
    def request(self) -> RemotingCommand:
        """What asked for it."""
        return self.batch.request

    @property
    def connection(self) -> Connection:
        """By which it came."""
        return self.batch.connection

    def appended(self, several: Sequence[Appended]) -> bytes | None:
        """Carry them out, then serve the others; return the answer if these were the last."""
        return self.batches.finish(self, several)

    def refused(self) -> None:
        """Leave the transactions as they were."""
        self.batches.abandon(self.planned)


class EndBatches:
    """Serves END_TRANSACTIONS."""

    def __init__(
        self,
        transactions: Transactions,
        group: GroupAppend,
        ask_flush: Callable[[], None],
        when_durable: WhenDurable,
        later: Later | None,
    ) -> None:
        """Wire it; without ``later`` all is done at once, waiting for the disk where it must."""
        self._transactions = transactions
        self._group = group
        self._ask_flush = ask_flush
        self._when_durable = when_durable
        self._later = later

    def end_transactions(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Decide many transactions, each by itself; one answer when all of it is on disk."""
        batch = Batch(request, connection, decode_ends(request.body), [])
        later = self._later
        if later is None:
            self._step(batch, at_once=True)
            return None
        if connection in later:
            later.add(connection, partial(self._step, batch))
            return None
        needed, reply = self._slice(batch, at_once=False)
        if needed is not None:
            later.begin(connection, partial(self._step, batch), needed)
        return reply

    def _step(self, batch: Batch, at_once: bool) -> Sequence[int] | None:
        while True:
            needed, reply = self._slice(batch, at_once)
            if reply is not None:
                batch.connection.write(reply)
            if needed is None or not at_once:
                return needed

    def _slice(self, batch: Batch, at_once: bool) -> tuple[Sequence[int] | None, bytes | None]:
        """Decide the next ones.

        Returns what is needed before the next slice, perhaps nothing, or None if there is none;
        and the reply if it is to be written now.
        """
        planned, cold = self._plan(batch, at_once)
        first, end = len(batch.results), len(batch.results) + len(planned)
        is_last = end == len(batch.ends)
        drafts = [draft for one in planned if one is not None for draft in (one.draft, *one.rest)]
        reply = None
        if drafts:
            staged = StagedSlice(drafts, batch, planned, self)
            alone: Handler = partial(answer, partial(self._slice_alone, staged))
            self._group.stage_several(staged, alone)
            self._ask_flush()
            if None in planned or first or not is_last:
                # The rest is served behind everything that is staged so far, and before what
                # follows.
                self._group.append_staged()
        else:
            self._group.append_staged()
            reply = self._take_results(batch, [None] * len(planned), 0)
        if is_last:
            return None, reply
        if not cold:
            return (), reply
        batch.in_memory = end + READ_AHEAD
        following = [one.commit_log_offset for one in batch.ends[end + 1 : batch.in_memory]]
        return (*cold, *following), reply

    def _plan(
        self, batch: Batch, at_once: bool
    ) -> tuple[list[PlannedDecision | None], Sequence[int]]:
        """Plan decisions until there are enough for now, or halves have to be read first."""
        plan, is_cold, group = self._transactions.plan, self._transactions.is_cold, batch.group
        planned: list[PlannedDecision | None] = []
        size = 0
        for number in range(len(batch.results), len(batch.ends)):
            end = batch.ends[number]
            event = EVENTS.get(end.decision)
            one = None
            offset = end.commit_log_offset
            if event is not None:
                wait = at_once or number < batch.in_memory
                try:
                    one = plan(
                        offset,
                        end.tran_state_table_offset,
                        group,
                        event,
                        end.from_check,
                        wait,
                        (end.transaction_id,),
                        may_decide(batch.request, from_check=end.from_check),
                    )
                except ColdHalfError as cold:
                    return planned, cold.offsets
                if one is None and not wait and is_cold(offset):
                    return planned, (offset,)
            planned.append(one)
            if one is not None:
                size += one.size
                if size > SLICE_BYTES:
                    break
        return planned, ()

    def finish(self, staged: StagedSlice, appended: Sequence[Appended]) -> bytes | None:
        """Carry out planned decisions, whose records are in the log, then serve the others."""
        position = at = 0
        results: list[EndResult | None] = []
        for planned in staged.planned:
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
        return self._take_results(staged.batch, results, position)

    def abandon(self, several: Sequence[PlannedDecision | None]) -> None:
        """Forget planned decisions: their records could not be appended."""
        for planned in several:
            if planned is not None:
                self._transactions.abandon(planned)

    def _slice_alone(
        self, staged: StagedSlice, _request: RemotingCommand, _connection: Connection
    ) -> bytes | None:
        """Serve each of a slice that could not be appended."""
        return self._take_results(staged.batch, [None] * len(staged.planned), 0)

    def _take_results(
        self, batch: Batch, results: Sequence[EndResult | None], position: int
    ) -> bytes | None:
        """Serve by every rule what has no result yet; answer the batch when it is over."""
        batch.position = max(batch.position, position)
        for known in results:
            result = known
            if result is None:
                result, stands = self._end_one(batch.ends[len(batch.results)], batch)
                batch.position = max(batch.position, stands)
            batch.results.append(result)
        if not batch.is_over:
            return None
        reply = encode_reply(batch.request, body=encode_entries(batch.results))
        return self._when_durable(batch.request, batch.connection, batch.position, reply)

    def _end_one(self, end: TransactionEnd, batch: Batch) -> tuple[EndResult, int]:
        """Apply one of many; return its result and the log position that makes it true."""
        event = EVENTS.get(end.decision)
        if event is None:
            remark = wrong_decision(end.decision)
            return EndResult(code=ResponseCode.SYSTEM_ERROR, remark=remark), 0
        group = batch.group
        try:
            ended = self._transactions.end(
                end.commit_log_offset,
                end.tran_state_table_offset,
                group,
                event,
                end.from_check,
                (end.transaction_id,),
                may_decide(batch.request, from_check=end.from_check),
            )
        except TransactionError as error:
            log_refusal(end, group, batch.connection, error)
            return EndResult(code=ERROR_CODES[type(error)], remark=str(error)), stands_at(error)
        except RequestRefusedError as refusal:
            refusal.answered(batch.request, batch.connection)
            return EndResult(code=refusal.code, remark=refusal.remark), 0
        except StoreError as error:
            code = STORE_ERROR_CODES.get(type(error), ResponseCode.SYSTEM_ERROR)
            return EndResult(code=code, remark=str(error)), 0
        return EndResult(code=ResponseCode.SUCCESS, message_id=ended.message_id), ended.position
