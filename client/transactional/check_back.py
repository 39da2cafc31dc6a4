"""Answering checks: a broker asks what became of a local transaction, and the checker knows.

A halfmq broker asks by a request and wants to know at once whether its question has arrived: it is
told "I will answer" before anybody is asked, or why not, and then asks another member of the group.
The answer follows as a decision like any other, repeated until it is confirmed, by whatever
connection there is by then. An official broker asks one-way and is answered one-way, on the
connection it asked by.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
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
from ..net.connection import Connection
from ..net.encoding import Draft
from .checker_calls import CheckerCalls, InThread
from .decisions import Decisions, Ending, Settled

logger = logging.getLogger(__name__)

REMEMBERED_MAX: Final = 10_000
"""Unsettled transactions remembered for the case that the broker asks, about 200 bytes each."""

T = TypeVar("T")

Checker: TypeAlias = Callable[[MessageView], Decision | Awaitable[Decision]]
"""Says what became of a local transaction. A plain function runs in a worker thread."""


class CheckBack:
    """Takes the checks of one producer, asks its checker and answers."""

    def __init__(
        self,
        group: str,
        config: ClientConfig,
        decisions: Decisions,
        known_decision: Callable[[str, MessageView], Decision | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Prepare; ``known_decision`` says what the producer knows without its checker."""
        self.checker: Checker | None = None
        self.closing = False
        """While the producer waits for what is under way, another member is asked at once."""
        self._group = group
        self._config = config
        self._decisions = decisions
        self._known_decision = known_decision
        self._spawn = spawn
        self._under_check: set[str] = set()
        self._calls = CheckerCalls(config.check_concurrency, config.check_timeout)

    def requested(self, command: RemotingCommand, connection: Connection) -> None:
        """Take a check, and acknowledge it if it is a request that wants to be answered."""
        refusal = self._take(command, connection)
        if command.is_one_way:
            return
        if refusal is None:
            connection.reply(command)
        else:
            connection.reply(command, ResponseCode.SYSTEM_ERROR, refusal)

    def _take(self, command: RemotingCommand, connection: Connection) -> str | None:
        """Have a check answered in a task; or return why it will not be."""
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
        if check.identity in self._under_check:
            logger.debug("event=check_repeated transaction=%s", check.identity)
            return None
        if len(self._under_check) >= self._config.check_queue_max:
            logger.warning("event=check_dropped transaction=%s", check.identity)
            return f"{len(self._under_check)} checks are waiting here"
        if self.closing and check.acknowledged:
            return "this producer is being closed"
        try:
            known = self._known_decision(check.identity, message)
        except ClientClosedError as error:
            # A broker asks until it has heard that a producer has closed.
            return f"it is not running: {error}"
        if known is None and self.checker is None:
            logger.warning("event=check_without_checker transaction=%s", check.identity)
            if check.acknowledged:
                return "this producer has no checker"
            known = Decision.UNKNOWN
        if known is None and self._calls.hangs and check.acknowledged:
            return f"all {self._config.check_concurrency} calls of its checker hang"
        self._under_check.add(check.identity)
        self._spawn(self._answer(check, known))
        return None

    async def _answer(self, check: _Check, decision: Decision | None) -> None:
        handed_over = False
        try:
            if decision is None:
                decision = await self._ask_checker(check.message)
            if check.acknowledged:
                self._decisions.tell(check.ending(decision, self._settled))
                handed_over = True  # it stays under check until that is over
                return
            answer = check.one_way_answer(self._group, decision)
            check.connection.send_one_way(RequestCode.END_TRANSACTION, answer)
            logger.info(
                "event=check_answered transaction=%s decision=%s", check.identity, decision.name
            )
        except ClientError as error:
            logger.info("event=check_not_answered transaction=%s reason=%s", check.identity, error)
        finally:
            if not handed_over:
                self._under_check.discard(check.identity)

    def _settled(self, ending: Ending, _final: str | None, error: BaseException | None) -> None:
        self._under_check.discard(ending.transaction_id)
        if error is None:
            logger.info(
                "event=check_answered transaction=%s decision=%s",
                ending.transaction_id,
                ending.decision.name,
            )
        else:
            # Not remembered: the broker asks again, and the checker may know better by then. But
            # what this client may not answer it never may.
            level = logging.WARNING if isinstance(error, AccessDeniedError) else logging.INFO
            logger.log(
                level,
                "event=check_not_answered transaction=%s decision=%s reason=%s",
                ending.transaction_id,
                ending.decision.name,
                error,
            )

    async def ask_about_own(self, message: MessageView) -> Decision:
        """What the checker says of a transaction of this producer; UNKNOWN if it cannot tell.

        It takes at most ``config.check_timeout`` seconds, the wait for other calls included.
        """
        if self.checker is None:
            return Decision.UNKNOWN
        try:
            async with asyncio.timeout(self._config.check_timeout):
                return await self._ask_checker(message)
        except TimeoutError:  # it had no turn in that time
            return Decision.UNKNOWN

    async def _ask_checker(self, message: MessageView) -> Decision:
        assert self.checker is not None, "a check without a checker is not taken"
        try:
            return await self._calls.run(partial(_ask_on, self.checker, message))
        except TimeoutError:
            logger.error(  # noqa: TRY400 -- where it hangs is the user's to know
                "event=check_timed_out transaction=%s seconds=%g counts_as=UNKNOWN",
                message.transaction_id,
                self._config.check_timeout,
            )
            return Decision.UNKNOWN


def _not_understood(connection: Connection, reason: str) -> str:
    logger.warning("event=check_not_understood broker=%s reason=%s", connection.address, reason)
    return f"the check is not understood: {reason}"


class _Check:
    """One question of a broker."""

    __slots__ = ("_header", "acknowledged", "connection", "identity", "message")

    def __init__(
        self,
        header: CheckTransactionStateRequestHeader,
        message: MessageView,
        connection: Connection,
        *,
        acknowledged: bool,
    ) -> None:
        self._header = header
        self.message = message
        self.connection = connection
        self.acknowledged = acknowledged
        self.identity = header.transaction_id or message.message_id

    def ending(self, decision: Decision, on_settled: Settled) -> Ending:
        """The answer as a request that is confirmed."""
        return Ending(
            self.identity,
            decision,
            self._header.broker_name or "",
            self._header.commit_log_offset,
            self._header.tran_state_table_offset,
            self.message.topic,
            on_settled,
            from_check=True,
            address=self.connection.address,
        )

    def one_way_answer(self, group: str, decision: Decision) -> EndTransactionRequestHeader:
        """The answer as official clients give it."""
        return EndTransactionRequestHeader(
            producer_group=group,
            tran_state_table_offset=self._header.tran_state_table_offset,
            commit_log_offset=self._header.commit_log_offset,
            commit_or_rollback=decision,
            msg_id=self._header.msg_id or self.identity,
            # The real topic, not the half topic that the official client sends back: under
            # access control a producer has no rights on that, and would never be heard.
            topic=self.message.topic,
            from_transaction_check=True,
            transaction_id=self.identity,
            broker_name=self._header.broker_name,
        )


def as_checked(
    draft: Draft, result: SendResult, halves: int, born_ms: int, stored_ms: int
) -> MessageView:
    """A half message as the broker's first check of it would show it.

    Only what the broker alone knows is missing: the properties by which it tells of itself
    (MSG_REGION, CLUSTER, TRACE_ON) and ``born_host``. ``stored_ms`` is this process's clock.

    Args:
        draft: As it was sent; of several, the first.
        result: Where it was stored.
        halves: How many messages the transaction has.
        born_ms: When it was sent, in ms since 1970.
        stored_ms: When the broker's answer came.

    Source: ``half_draft`` and ``check_body`` of the broker, TransactionalMessageBridge.java.
    """
    half = parse_offset_message_id(result.offset_message_id)
    key, queue = draft.unique_key, result.queue
    group = f"{names.PROPERTY_TRANSACTION_GROUP}\x01{key},0,{halves}\x02" if halves > 1 else ""
    properties = (
        f"{group}{draft.properties}{names.PROPERTY_REAL_TOPIC}\x01{queue.topic}\x02"
        f"{names.PROPERTY_REAL_QID}\x01{queue.queue_id}\x02"
        f"{names.PROPERTY_TRANSACTION_ID}\x01{key}\x02"
        f"{names.PROPERTY_TRANSACTION_CHECK_TIMES}\x011\x02"
    )
    record = new_record(
        topic=queue.topic,
        queue_id=queue.queue_id,
        body=draft.body,
        properties=properties.encode(),
        born_timestamp=born_ms,
        born_host=pack_host("0.0.0.0", 0),  # noqa: S104 -- nothing listens there
        store_timestamp=stored_ms,
        store_host=half.store_host,
        queue_offset=result.queue_offset,
        physical_offset=half.physical_offset,
        flag=draft.message.flag,
        sys_flag=draft.sys_flag & ~TRANSACTION_MASK,
    )
    return MessageView(record, queue.broker_name)


class Memory:
    """What a producer remembers of transactions that are over; bounded, the oldest go first."""

    def __init__(self) -> None:
        self._doubts: OrderedDict[str, str] = OrderedDict()
        self._undelivered: OrderedDict[str, Decision] = OrderedDict()

    def note_doubt(self, transaction_id: str, message_id: str) -> None:
        """An attempt before the successful one may have stored the half message too."""
        _remember(self._doubts, transaction_id, message_id)

    def is_stray(self, transaction_id: str, message: MessageView) -> bool:
        """Whether this half message is not the one that the decision was about."""
        used = self._doubts.get(transaction_id)
        return used is not None and used != message.offset_message_id

    def note_undelivered(self, transaction_id: str, decision: Decision) -> None:
        """The broker was not told, or has not confirmed it."""
        _remember(self._undelivered, transaction_id, decision)

    def undelivered(self, transaction_id: str) -> Decision | None:
        """The decision that the broker may not know."""
        return self._undelivered.get(transaction_id)


def _remember(memory: OrderedDict[str, T], transaction_id: str, value: T) -> None:
    memory[transaction_id] = value
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)


async def _ask_on(checker: Checker, message: MessageView, in_thread: InThread) -> Decision:
    return await ask(checker, message, in_thread=in_thread)


async def ask(
    function: Callable[..., Decision | Awaitable[Decision]],
    *args: object,
    in_thread: InThread = asyncio.to_thread,
) -> Decision:
    """A user function's decision; a plain function runs in a worker thread, for it may block.

    An exception, or anything that is no Decision, is logged and counts as UNKNOWN.
    """
    try:
        if inspect.iscoroutinefunction(function):
            decision = await function(*args)
        else:
            decision = await in_thread(function, *args)
            if inspect.isawaitable(decision):
                decision = await decision
    except Exception:
        logger.exception("event=user_function_failed function=%s counts_as=UNKNOWN", function)
        return Decision.UNKNOWN
    return as_decision(decision, function)


def as_decision(answer: object, function: object) -> Decision:
    """What a user function returned; anything that is no Decision is logged and is UNKNOWN."""
    if isinstance(answer, Decision):
        return answer
    logger.error("event=no_decision function=%s returned=%r counts_as=UNKNOWN", function, answer)
    return Decision.UNKNOWN
