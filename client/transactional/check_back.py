"""Check-back: answer a broker's checks of undecided transactions by calling the checker.

A halfmq broker sends a check as a request. It is acknowledged at once, before the checker is
called, or rejected with a reason, and the broker then checks with another member of the group. The
answer follows as a decision like any other, resent until it is confirmed, on the connection that is
open by then. An official broker sends a check one-way and gets a one-way answer on the same
connection.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
)
from halfmq.store.format import properties as names
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.ids import pack_host, parse_offset_message_id
from halfmq.store.format.record import decode_record, new_record

from ..config import ClientConfig
from ..errors import AccessDeniedError, ClientClosedError, ClientError
from ..message import Decision, MessageView, SendResult
from ..net.connection import BrokerConnection
from ..net.message_encoding import EncodedMessage
from ..net.telemetry import CHECK, Telemetry, about
from .checker_pool import CheckerPool, RunInThread
from .databases import is_database_error
from .decisions import DecisionSender, Ending, OnSettled
from .recorded_transactions import LedgerLook

logger = logging.getLogger(__name__)

UNSETTLED_MAX: Final = 10_000
"""Unsettled transactions kept for later checks, about 200 bytes each."""

T = TypeVar("T")

Checker: TypeAlias = Callable[[MessageView], Decision | Awaitable[Decision]]
"""Returns the outcome of a local transaction. A plain function runs in a worker thread."""


class CheckBack:
    """Answers the checks of one producer by calling its checker."""

    def __init__(
        self,
        group: str,
        config: ClientConfig,
        decisions: DecisionSender,
        known_decision: Callable[[str, MessageView], Decision | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Create it; ``known_decision`` returns what the producer knows without its checker."""
        self.checker: Checker | None = None
        self.telemetry: Telemetry | None = None
        self.closing = False
        """While the producer closes, checks are rejected so that the broker asks another member."""
        self._group = group
        self._config = config
        self._decisions = decisions
        self._known_decision = known_decision
        self._spawn = spawn
        self._in_progress: set[str] = set()
        self._pool = CheckerPool(config.check_concurrency, config.check_timeout)

    def on_check_request(self, command: RemotingCommand, connection: BrokerConnection) -> None:
        """Accept or reject a check; acknowledge it unless it is one-way."""
        reason = self._accept(command, connection)
        if command.is_one_way:
            return
        if reason is None:
            connection.reply(command)
        else:
            connection.reply(command, ResponseCode.SYSTEM_ERROR, reason)

    def _accept(self, command: RemotingCommand, connection: BrokerConnection) -> str | None:
        """Start a task that answers the check; if it is rejected, return the reason."""
        header = command.header
        if not isinstance(header, CheckTransactionStateRequestHeader):
            return _not_understood(connection, command.header_error or "it has no fields")
        try:
            message = MessageView(decode_record(command.body), header.broker_name or "")
        except CorruptRecordError as error:
            return _not_understood(connection, str(error))
        check = _Check(header, message, connection, acknowledged=not command.is_one_way)
        group = message.properties.get(names.PROPERTY_PGROUP)
        if group != self._group:
            logger.warning(
                "event=check_for_another_group group=%s transaction=%s", group, check.identity
            )
            return f"this is a producer of group {self._group}, not of {group}"
        if check.identity in self._in_progress:
            logger.debug("event=check_repeated transaction=%s", check.identity)
            return None
        if len(self._in_progress) >= self._config.check_queue_max:
            logger.warning("event=check_dropped transaction=%s", check.identity)
            return f"{len(self._in_progress)} checks are waiting here"
        if self.closing and check.acknowledged:
            return "this producer is being closed"
        try:
            known = self._known_decision(check.identity, message)
        except ClientClosedError as error:
            # Until a broker notices that the producer has closed, it sends checks.
            return f"it is not running: {error}"
        if known is None and self.checker is None:
            logger.warning("event=check_without_checker transaction=%s", check.identity)
            if check.acknowledged:
                return "this producer has no checker"
            known = Decision.UNKNOWN
        if known is None and self._pool.exhausted and check.acknowledged:
            return f"all {self._config.check_concurrency} calls of its checker hang"
        self._in_progress.add(check.identity)
        self._spawn(self._answer(check, known))
        return None

    async def _answer(self, check: _Check, decision: Decision | None) -> None:
        handed_over = False
        try:
            if decision is None:
                decision = await self._run_checker(check.message)
            if check.acknowledged:
                self._decisions.send(check.ending(decision, self._on_settled))
                handed_over = True  # it stays in progress until the decision is settled
                return
            answer = check.one_way_answer(self._group, decision)
            check.connection.send_one_way(RequestCode.END_TRANSACTION, answer)
            logger.info(
                "event=check_answered transaction=%s decision=%s", check.identity, decision.name
            )
        except ClientError as error:
            logger.info(
                "event=check_not_answered transaction=%s reason=%r", check.identity, str(error)
            )
        finally:
            if not handed_over:
                self._in_progress.discard(check.identity)

    def _on_settled(self, ending: Ending, _final: str | None, error: BaseException | None) -> None:
        self._in_progress.discard(ending.transaction_id)
        if error is None:
            logger.info(
                "event=check_answered transaction=%s decision=%s",
                ending.transaction_id,
                ending.decision.name,
            )
        else:
            # Not kept: the broker checks again, and the checker may know more by then. A denied
            # decision stays denied, so it is a warning.
            level = logging.WARNING if isinstance(error, AccessDeniedError) else logging.INFO
            logger.log(
                level,
                "event=check_not_answered transaction=%s decision=%s reason=%r",
                ending.transaction_id,
                ending.decision.name,
                str(error),
            )

    async def check_own(self, message: MessageView) -> Decision:
        """Call the checker for a transaction of this producer; UNKNOWN if it cannot decide."""
        return Decision.UNKNOWN if self.checker is None else await self._run_checker(message)

    async def look(self, ledger: LedgerLook, transaction_id: str) -> bool | None:
        """Return whether the row is committed; None if the database does not answer now."""
        try:
            return await self._pool.run(partial(_call_look, ledger, transaction_id))
        except Exception as error:
            if not is_database_error(error):  # a time limit of the pool is one
                raise
            logger.warning("event=ledger_not_read transaction=%s reason=%r", transaction_id, error)
            return None

    async def _run_checker(self, message: MessageView) -> Decision:
        assert self.checker is not None, "a check without a checker is rejected"
        try:
            with about(self.telemetry, CHECK, message):
                return await self._pool.run(partial(_call_checker, self.checker, message))
        except TimeoutError:
            logger.error(  # noqa: TRY400 -- the stack of the hanging call is not known
                "event=check_timed_out transaction=%s seconds=%g counts_as=UNKNOWN",
                message.transaction_id,
                self._config.check_timeout,
            )
            return Decision.UNKNOWN


def _not_understood(connection: BrokerConnection, reason: str) -> str:
    logger.warning("event=check_not_understood broker=%s reason=%r", connection.address, reason)
    return f"the check is not understood: {reason}"


@dataclass(slots=True)
class _Check:
    """One check from a broker."""

    header: CheckTransactionStateRequestHeader
    message: MessageView
    connection: BrokerConnection
    acknowledged: bool

    @property
    def identity(self) -> str:
        """The transaction's id."""
        return self.header.transaction_id or self.message.message_id

    def ending(self, decision: Decision, on_settled: OnSettled) -> Ending:
        """Return the answer as a decision that is resent until confirmed."""
        return Ending(
            self.identity,
            decision,
            self.header.broker_name or "",
            self.header.commit_log_offset,
            self.header.tran_state_table_offset,
            self.message.topic,
            on_settled,
            from_check=True,
            address=self.connection.address,
        )

    def one_way_answer(self, group: str, decision: Decision) -> EndTransactionRequestHeader:
        """Return the answer as official clients send it."""
        return EndTransactionRequestHeader(
            producer_group=group,
            tran_state_table_offset=self.header.tran_state_table_offset,
            commit_log_offset=self.header.commit_log_offset,
            commit_or_rollback=decision,
            msg_id=self.header.msg_id or self.identity,
            # The real topic, not the half topic that the official client sends back: with access
            # control a producer has no permission for that, and the answer would be rejected.
            topic=self.message.topic,
            from_transaction_check=True,
            transaction_id=self.identity,
            broker_name=self.header.broker_name,
        )


def checked_view(
    encoded: EncodedMessage, result: SendResult, halves: int, born_ms: int, stored_ms: int
) -> MessageView:
    """Build the message view that the broker's first check of a half message would contain.

    Only what the broker alone knows is missing: the properties that describe the broker
    (MSG_REGION, CLUSTER, TRACE_ON) and ``born_host``. ``stored_ms`` is from this process's clock.

    Args:
        encoded: The half message as sent; with several messages, the leader.
        result: Where it was stored.
        halves: How many messages the transaction has.
        born_ms: When it was sent, in ms since 1970.
        stored_ms: When the broker's answer came, in ms since 1970.

    Source: ``half_request`` and ``check_body`` of the broker, TransactionalMessageBridge.java.
    """
    half = parse_offset_message_id(result.offset_message_id)
    key, queue = encoded.unique_key, result.queue
    group = f"{names.PROPERTY_TRANSACTION_GROUP}\x01{key},0,{halves}\x02" if halves > 1 else ""
    properties = (
        f"{group}{encoded.properties}{names.PROPERTY_REAL_TOPIC}\x01{queue.topic}\x02"
        f"{names.PROPERTY_REAL_QID}\x01{queue.queue_id}\x02"
        f"{names.PROPERTY_TRANSACTION_ID}\x01{key}\x02"
        f"{names.PROPERTY_TRANSACTION_CHECK_TIMES}\x011\x02"
    )
    record = new_record(
        topic=queue.topic,
        queue_id=queue.queue_id,
        body=encoded.body,
        properties=properties.encode(),
        born_timestamp=born_ms,
        born_host=pack_host("0.0.0.0", 0),  # noqa: S104 -- nothing listens there
        store_timestamp=stored_ms,
        store_host=half.store_host,
        queue_offset=result.queue_offset,
        physical_offset=half.physical_offset,
        flag=encoded.message.flag,
        sys_flag=encoded.sys_flag & ~TRANSACTION_MASK,
    )
    return MessageView(record, queue.broker_name)


class Recent(OrderedDict[str, T]):
    """What was noted of the last transactions, by id; the oldest are evicted first."""

    def __setitem__(self, transaction_id: str, value: T) -> None:
        super().__setitem__(transaction_id, value)
        if len(self) > UNSETTLED_MAX:
            self.popitem(last=False)


async def _call_look(ledger: LedgerLook, transaction_id: str, in_thread: RunInThread) -> bool:
    look = ledger.is_committed
    if inspect.iscoroutinefunction(look):
        return bool(await look(transaction_id))
    return bool(await in_thread(look, transaction_id))


async def _call_checker(checker: Checker, message: MessageView, in_thread: RunInThread) -> Decision:
    return await call_user_function(checker, message, in_thread=in_thread)


async def call_user_function(
    function: Callable[..., Decision | Awaitable[Decision]],
    *args: object,
    in_thread: RunInThread = asyncio.to_thread,
) -> Decision:
    """Call a user's function and return its decision.

    A plain function runs in a worker thread, because it may block. An exception, or a value that is
    not a Decision, is logged and counts as UNKNOWN.
    """
    try:
        if inspect.iscoroutinefunction(function):
            decision = await function(*args)
        else:
            decision = await in_thread(function, *args)
            if inspect.isawaitable(decision):
                decision = await decision
    except Exception:
        logger.exception("event=user_function_failed function=%r counts_as=UNKNOWN", str(function))
        return Decision.UNKNOWN
    return as_decision(decision, function)


def as_decision(answer: object, function: object) -> Decision:
    """Return a user function's result; log anything that is not a Decision and return UNKNOWN."""
    if isinstance(answer, Decision):
        return answer
    logger.error(
        "event=no_decision function=%r returned=%r counts_as=UNKNOWN", str(function), answer
    )
    return Decision.UNKNOWN
