"""Decisions on their way: the broker is told until it confirms, of many at once in one request.

What is decided in one pass of the event loop, for half messages of one halfmq broker, leaves as one
END_TRANSACTIONS; a decision that is alone as END_TRANSACTION, and so does each for an official
broker, which knows nothing else. Answers to checks go the same way as a producer's own decisions.

A halfmq broker takes the same decision twice as one, so there whatever gets no answer is told
again. An official broker would deliver a message again for each COMMIT it gets: a COMMIT whose
answer was lost is not repeated there, and its check settles it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.transaction_bodies import (
    ENDS_MAX,
    TransactionEnd,
    decode_end_results,
    encode_entries,
)
from halfmq.remoting.transaction_headers import (
    EndTransactionResponseHeader,
    EndTransactionsRequestHeader,
)

from ..config import ClientConfig
from ..errors import (
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConnectError,
    DecisionConflictError,
)
from ..message import Decision
from ..net.refusals import refusal, refusal_of
from ..net.retry import leaves_doubt
from ..net.session import Session, typed

logger = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.1
"""Seconds between attempts to deliver a decision."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(slots=True, eq=False)
class Ending:
    """One decision about one half message, until it is confirmed or given up."""

    transaction_id: str
    decision: Decision
    broker_name: str
    half_offset: int
    """Physical offset of the half record."""
    queue_offset: int
    """Of the half, in the half topic."""
    topic: str
    """The real one: by it an official broker under access control tells who may decide."""
    on_settled: Settled
    from_check: bool = False
    address: str | None = None
    """Where to go when no route names the broker."""
    waiter: asyncio.Future[None] | None = field(default=None, repr=False)
    """For whoever waits for it; ``on_settled`` completes it."""


Settled: TypeAlias = Callable[[Ending, str | None, BaseException | None], None]
"""Told of an ending once: the final message's id, or why there is no confirmation."""


class Decisions:
    """Delivers the decisions of one producer."""

    def __init__(
        self, group: str, config: ClientConfig, session: Callable[[], Session], spawn: Spawn
    ) -> None:
        """Prepare; ``spawn`` starts a task whose end the producer waits for when it closes."""
        self._group = group
        self._config = config
        self._session = session
        self._spawn = spawn
        self._gathering: dict[str, list[Ending]] = {}
        self._one_by_one: set[str] = set()  # halfmq brokers too old for END_TRANSACTIONS

    def tell(self, ending: Ending) -> None:
        """Deliver it, together with what else is decided in this pass of the loop.

        It is over by ``config.send_timeout`` seconds from now, one way or the other.

        Raises:
            ClientClosedError: The producer is not running.
        """
        name = ending.broker_name
        if name in self._one_by_one or not self._session().routes.halfmq:
            self._start(name, [ending])
            return
        batch = self._gathering.get(name)
        if batch is not None and len(batch) < ENDS_MAX:
            batch.append(ending)
        else:
            batch = self._gathering[name] = [ending]
            self._start(name, batch)  # which takes its first step in the next pass of the loop

    def _start(self, broker_name: str, batch: list[Ending]) -> None:
        task = self._spawn(self._deliver(broker_name, batch))
        task.add_done_callback(partial(self._ended, broker_name, batch))

    async def _deliver(self, broker_name: str, batch: list[Ending]) -> None:
        """Tell the broker until every decision of the batch is settled; those are taken off it."""
        self._close_batch(broker_name, batch)
        session = self._session()
        clock = session.clock
        deadline = clock() + self._config.send_timeout
        while True:
            outcomes: Sequence[str | ClientError | None]
            try:
                outcomes = await self._tell_once(
                    session, broker_name, batch, max(deadline - clock(), RETRY_PAUSE)
                )
            except ClientError as error:
                outcomes = [error] * len(batch)
            last = clock() + RETRY_PAUSE >= deadline
            told, batch[:] = list(batch), []
            for ending, outcome in zip(told, outcomes, strict=True):
                if not isinstance(outcome, ClientError):
                    ending.on_settled(ending, outcome, None)
                elif last or not _may_repeat(outcome, ending.decision, session):
                    ending.on_settled(ending, None, outcome)
                else:
                    reason = outcome
                    batch.append(ending)
            if not batch:
                return
            logger.info(
                "event=decision_again broker=%s transactions=%d first=%s reason=%s",
                broker_name,
                len(batch),
                batch[0].transaction_id,
                reason,
            )
            await asyncio.sleep(RETRY_PAUSE)

    def _close_batch(self, broker_name: str, batch: list[Ending]) -> None:
        if self._gathering.get(broker_name) is batch:
            del self._gathering[broker_name]

    def _ended(self, broker_name: str, batch: list[Ending], task: asyncio.Task[None]) -> None:
        """Settle what a task has left; close() may have cancelled it before its first step."""
        self._close_batch(broker_name, batch)
        if batch:
            error = None if task.cancelled() else task.exception()
            for ending in batch:
                ending.on_settled(ending, None, error or ClientClosedError("the producer"))

    async def _tell_once(
        self, session: Session, broker_name: str, batch: list[Ending], seconds: float
    ) -> Sequence[str | ClientError | None]:
        """Return for each decision the final message's id, or why it is not confirmed.

        Raises:
            ClientError: There is no answer to any of them.
        """
        address = session.routes.address_of(broker_name) or batch[0].address
        if address is None:
            raise ConnectError(broker_name, "no name server knows this broker any more")
        seconds = min(seconds, self._config.request_timeout)
        if len(batch) == 1:
            return [await self._tell_one(session, address, batch[0], seconds)]
        return await self._tell_many(session, address, batch, seconds)

    async def _tell_one(
        self, session: Session, address: str, ending: Ending, seconds: float
    ) -> str | None:
        header = EndTransactionRequestHeader(
            producer_group=self._group,
            tran_state_table_offset=ending.queue_offset,
            commit_log_offset=ending.half_offset,
            commit_or_rollback=ending.decision,
            msg_id=ending.transaction_id,
            topic=ending.topic,
            from_transaction_check=ending.from_check,
            transaction_id=ending.transaction_id,
            broker_name=ending.broker_name,
        )
        answer = await session.call(address, RequestCode.END_TRANSACTION, header, seconds=seconds)
        if answer.code != ResponseCode.SUCCESS:
            raise _refused(refusal(answer), ending, conflicts=session.routes.halfmq)
        if answer.header is None:
            return None
        return typed(answer, EndTransactionResponseHeader, address).msg_id

    async def _tell_many(
        self, session: Session, address: str, batch: list[Ending], seconds: float
    ) -> Sequence[str | ClientError | None]:
        broker_name = batch[0].broker_name
        header = EndTransactionsRequestHeader(
            producer_group=self._group, broker_name=broker_name or None
        )
        body = encode_entries(
            [
                TransactionEnd(
                    ending.half_offset,
                    ending.queue_offset,
                    ending.decision,
                    ending.transaction_id,
                    ending.from_check,
                )
                for ending in batch
            ]
        )
        answer = await session.call(
            address, RequestCode.END_TRANSACTIONS, header, body, seconds=seconds
        )
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            self._one_by_one.add(broker_name)
            for ending in batch:
                self._start(broker_name, [ending])
            batch.clear()
            return []
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(answer)
        try:
            results = decode_end_results(answer.body)
        except ProtocolError as error:
            raise BadAnswerError(address, str(error)) from error
        if len(results) != len(batch):
            raise BadAnswerError(address, f"{len(results)} results for {len(batch)} decisions")
        return [
            result.message_id
            if result.code == ResponseCode.SUCCESS
            else _refused(refusal_of(result.code, result.remark or ""), ending, conflicts=True)
            for ending, result in zip(batch, results, strict=True)
        ]


def _may_repeat(error: ClientError, decision: Decision, session: Session) -> bool:
    """Whether to tell it again may help, and does no harm."""
    harmless = decision is not Decision.COMMIT or session.routes.halfmq
    return error.retriable and (harmless or not leaves_doubt(error))


def _refused(error: BrokerRefusedError, ending: Ending, *, conflicts: bool) -> ClientError:
    """The error for a broker's no; official brokers mean something else by ILLEGAL_OPERATION."""
    if conflicts and error.code == ResponseCode.ILLEGAL_OPERATION:
        wanted = ending.decision.name
        return DecisionConflictError(error.code, error.remark, ending.transaction_id, wanted)
    return error
