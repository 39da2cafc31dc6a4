"""DecisionSender: send decisions to brokers, in batches, until they are confirmed.

The decisions of one event-loop iteration about half messages of one halfmq broker are sent as one
END_TRANSACTIONS request. A single decision is sent as END_TRANSACTION, and so are all decisions for
an official broker, which supports nothing else. Answers to checks are sent in the same way as a
producer's own decisions.

On a halfmq broker decisions are idempotent, so every unanswered decision is resent. An official
broker would deliver the message again for each COMMIT, so a COMMIT whose answer was lost is not
resent there; the broker's check settles it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.own_requests import (
    ENDS_MAX,
    FinalMessageResponseHeader,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_end_results,
    encode_entries,
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
from ..net.response_errors import answer_of, error_from_code, error_from_response, expect_success
from ..net.retry import outcome_unknown
from ..net.session import Session, typed

logger = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.1
"""Seconds between attempts to deliver a decision."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(slots=True, eq=False)
class Ending:
    """One decision about one half message, to be sent with END_TRANSACTION or END_TRANSACTIONS."""

    transaction_id: str
    decision: Decision
    broker_name: str
    half_offset: int
    """Physical offset of the half record."""
    queue_offset: int
    """Of the half, in the half topic."""
    topic: str
    """The real topic: an official broker with access control checks the permission for it."""
    on_settled: OnSettled
    from_check: bool = False
    address: str | None = None
    """The broker's address, used if no route names the broker."""
    waiter: asyncio.Future[None] | None = field(default=None, repr=False)
    """For a caller that waits for the outcome; ``on_settled`` completes it."""


OnSettled: TypeAlias = Callable[[Ending, str | None, BaseException | None], None]
"""Called once per ending, with the final message's id or the reason for a missing confirmation."""


class DecisionSender:
    """Sends the decisions of one producer."""

    def __init__(
        self, group: str, config: ClientConfig, session: Callable[[], Session], spawn: Spawn
    ) -> None:
        """Create a sender; ``spawn`` starts a task that the producer awaits when it closes."""
        self._group = group
        self._config = config
        self._session = session
        self._spawn = spawn
        self._open_batches: dict[str, list[Ending]] = {}
        self._no_batch_brokers: set[str] = set()  # halfmq brokers too old for END_TRANSACTIONS

    def send(self, ending: Ending) -> None:
        """Send a decision, in one request with others of this event-loop iteration.

        Its ``on_settled`` is called within ``config.send_timeout`` seconds.

        Raises:
            ClientClosedError: The producer is not running.
        """
        name = ending.broker_name
        if name in self._no_batch_brokers or not self._session().routes.halfmq:
            self._start(name, [ending])
            return
        batch = self._open_batches.get(name)
        if batch is not None and len(batch) < ENDS_MAX:
            batch.append(ending)
        else:
            batch = self._open_batches[name] = [ending]
            self._start(name, batch)  # which takes its first step in the next pass of the loop

    def _start(self, broker_name: str, batch: list[Ending]) -> None:
        task = self._spawn(self._deliver(broker_name, batch))
        task.add_done_callback(partial(self._ended, broker_name, batch))

    async def _deliver(self, broker_name: str, batch: list[Ending]) -> None:
        """Send the batch until every decision is settled, and remove the settled ones from it."""
        self._close_batch(broker_name, batch)
        session = self._session()
        clock = session.clock
        deadline = clock() + self._config.send_timeout
        while True:
            outcomes: Sequence[str | ClientError | None]
            try:
                outcomes = await self._send_once(
                    session, broker_name, batch, max(deadline - clock(), RETRY_PAUSE)
                )
            except ClientError as error:
                outcomes = [error] * len(batch)
            last = clock() + RETRY_PAUSE >= deadline
            attempted, batch[:] = list(batch), []
            for ending, outcome in zip(attempted, outcomes, strict=True):
                if not isinstance(outcome, ClientError):
                    ending.on_settled(ending, outcome, None)
                elif last or not _may_resend(outcome, ending.decision, session):
                    ending.on_settled(ending, None, outcome)
                else:
                    reason = outcome
                    batch.append(ending)
            if not batch:
                return
            logger.info(
                "event=decision_again broker=%s transactions=%d first=%s reason=%r",
                broker_name,
                len(batch),
                batch[0].transaction_id,
                str(reason),
            )
            await asyncio.sleep(RETRY_PAUSE)

    def _close_batch(self, broker_name: str, batch: list[Ending]) -> None:
        if self._open_batches.get(broker_name) is batch:
            del self._open_batches[broker_name]

    def _ended(self, broker_name: str, batch: list[Ending], task: asyncio.Task[None]) -> None:
        """Settle what a task has left; close() may have cancelled it before it started."""
        self._close_batch(broker_name, batch)
        if batch:
            error = None if task.cancelled() else task.exception()
            for ending in batch:
                ending.on_settled(ending, None, error or ClientClosedError("the producer"))

    async def _send_once(
        self, session: Session, broker_name: str, batch: list[Ending], seconds: float
    ) -> Sequence[str | ClientError | None]:
        """Return, for each decision, the final message's id or the error.

        Raises:
            ClientError: The request as a whole failed.
        """
        address = session.routes.address_of(broker_name) or batch[0].address
        if address is None:
            raise ConnectError(broker_name, "no name server knows this broker any more")
        seconds = min(seconds, self._config.request_timeout)
        if len(batch) == 1:
            return [await self._send_single(session, address, batch[0], seconds)]
        return await self._send_batch(session, address, batch, seconds)

    async def _send_single(
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
            raise _decision_error(
                error_from_response(answer), ending, conflicts=session.routes.halfmq
            )
        if answer.header is None:
            return None
        return typed(answer, FinalMessageResponseHeader, address).msg_id

    async def _send_batch(
        self, session: Session, address: str, batch: list[Ending], seconds: float
    ) -> Sequence[str | ClientError | None]:
        broker_name = batch[0].broker_name
        header = TransactionsRequestHeader(
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
            self._no_batch_brokers.add(broker_name)
            for ending in batch:
                self._start(broker_name, [ending])
            batch.clear()
            return []
        expect_success(answer)
        with answer_of(address):
            results = decode_end_results(answer.body)
        if len(results) != len(batch):
            raise BadAnswerError(address, f"{len(results)} results for {len(batch)} decisions")
        return [
            result.message_id
            if result.code == ResponseCode.SUCCESS
            else _decision_error(
                error_from_code(result.code, result.remark or ""), ending, conflicts=True
            )
            for ending, result in zip(batch, results, strict=True)
        ]


def _may_resend(error: ClientError, decision: Decision, session: Session) -> bool:
    """Return whether resending may help and cannot deliver a message twice."""
    harmless = decision is not Decision.COMMIT or session.routes.halfmq
    return error.retriable and (harmless or not outcome_unknown(error))


def _decision_error(error: BrokerRefusedError, ending: Ending, *, conflicts: bool) -> ClientError:
    """Return the error for a rejected decision; only halfmq's ILLEGAL_OPERATION is a conflict."""
    if conflicts and error.code == ResponseCode.ILLEGAL_OPERATION:
        wanted = ending.decision.name
        return DecisionConflictError(error.code, error.remark, ending.transaction_id, wanted)
    return error
