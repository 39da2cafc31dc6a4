"""TransactionProducer: a local transaction and a message, both or neither.

The half message is stored first and shown to nobody. Then the local transaction runs, and its end
decides: COMMIT delivers the message, ROLLBACK drops it. When the decision never arrives, because
this process died or the network broke, the broker asks any producer of the group what became of
the local transaction; the ``checker`` looks it up, usually by ``message.keys`` or
``message.transaction_id`` in the database, and answers.

What that means for a checker:

* It is asked about transactions of any producer of the group, also of one that is dead, so it may
  look only at what survives a crash: the database.
* No row may mean "rolled back" or "still running". A producer of ours does not ask its checker
  about a transaction that is running in itself, but another producer of the group cannot know:
  answer UNKNOWN while in doubt, and set ``transactionTimeOut`` at the broker above the longest
  local transaction.

A decision is sent as a request that the broker confirms, and repeated until it is: a halfmq broker
answers the same decision the same way. An official broker would deliver a message again for each
COMMIT it gets, so there a COMMIT whose answer was lost is not repeated; the check settles it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
)
from halfmq.store.format import properties as names
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import decode_record

from .config import ClientConfig
from .connection import Connection, ServerRequestHandler
from .encoding import draft_half
from .errors import (
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectError,
    DecisionConflictError,
    HalfNotDurableError,
)
from .message import Decision, Message, MessageView, SendResult, SendStatus
from .producer import Producer, leaves_doubt
from .session import Session

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long closing waits for decisions and checks under way; what is cut off, the check settles."""
RETRY_PAUSE: Final = 0.1
"""Seconds between attempts to deliver a decision."""
REMEMBERED_MAX: Final = 10_000
"""Unsettled transactions remembered for the case that the broker asks, about 200 bytes each."""

T = TypeVar("T")

Checker: TypeAlias = Callable[[MessageView], Decision | Awaitable[Decision]]
"""Says what became of a local transaction. A plain function runs in a worker thread."""


class TransactionListener(ABC):
    """Local transaction and check in one object, as RocketMQ's TransactionListener.

    Either method may be ``async``; a plain one runs in a worker thread, so that it may block.
    """

    @abstractmethod
    def execute_local_transaction(
        self, transaction: Transaction, arg: object
    ) -> Decision | Awaitable[Decision]:
        """Run the local transaction for ``transaction.message``; its id is ``transaction.id``."""

    @abstractmethod
    def check_local_transaction(self, message: MessageView) -> Decision | Awaitable[Decision]:
        """Say what became of the local transaction of this message."""


class Transaction:
    """One half message and its decision; made by :meth:`TransactionProducer.transaction`.

    ``async with`` stores the half message, runs the block, and decides by how the block is left:
    normally is COMMIT, by an exception (cancellation too) is ROLLBACK. :meth:`decide` overrules
    that, for a block that knows better.

    When a COMMIT cannot be delivered, leaving the block raises nothing, because the local
    transaction has committed: ``decided`` is then False, a warning is logged, and the broker
    will ask the checker.
    """

    def __init__(self, producer: TransactionProducer, message: Message) -> None:
        self.message = message
        self.decision: Decision | None = None
        """What the broker was told, or would have been; None while the block runs."""
        self.decided = False
        """Whether the broker confirmed the decision."""
        self._producer = producer
        self._id: str | None = None
        self._result: SendResult | None = None
        self._explicit: Decision | None = None
        self._entered = False

    @property
    def id(self) -> str:
        """The transaction id, which checkers see as ``message.transaction_id``."""
        assert self._id is not None, "a transaction has an id once its block has been entered"
        return self._id

    @property
    def result(self) -> SendResult:
        """How the half message was stored."""
        assert self._result is not None, "the half message is stored when the block is entered"
        return self._result

    @property
    def message_id(self) -> str:
        """The offset id of the half message: broker address and commit-log offset."""
        return self.result.offset_message_id

    def stored(self, transaction_id: str, result: SendResult) -> None:
        """The half message is stored; called by the producer."""
        self._id, self._result = transaction_id, result

    def decide(self, decision: Decision) -> None:
        """Fix the decision, however the block is left. UNKNOWN leaves it to the checker."""
        self._explicit = decision

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ClientError("a transaction can be entered only once")
        self._entered = True
        await self._producer.prepare(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        decision = Decision.COMMIT if error is None else Decision.ROLLBACK
        if self._explicit is not None:
            decision = self._explicit
        try:
            await self._producer.finish(self, decision)
        except DecisionConflictError:
            if error is None:
                raise
            logger.exception("event=decision_refused transaction=%s", self.id)

    def __repr__(self) -> str:
        return f"<Transaction {self._id} decision={self.decision} decided={self.decided}>"


class TransactionProducer(Producer):
    """A producer whose messages are delivered if and only if a local transaction commits.

    ::

        async with TransactionProducer("orders-tx", checker=checker) as producer:
            async with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
                await save_order(tx.id)

    From its start on it is known to all brokers of the cluster, so that one started after a crash
    is asked about what the crashed one left undecided.
    """

    def __init__(
        self,
        group: str,
        checker: Checker | TransactionListener | None = None,
        *,
        topics: tuple[str, ...] = (),
        namesrv: str | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        """Take part in a producer group, whose members answer for each other.

        Args:
            group: The same name for all producers that share a database, also after a restart.
            checker: Asked what became of a local transaction. It may be left out when every
                transaction goes through :meth:`send_in_transaction`; checks then go to the
                listener used last.
            topics: Brokers of these are greeted at start too, in clusters that tell clients
                nothing else.
            namesrv: ``host:port``, several with ``;``; wins over the one in ``config``.
            config: Everything else.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(group, namesrv=namesrv, config=config)
        self._checker: Checker | None = (
            checker.check_local_transaction if isinstance(checker, TransactionListener) else checker
        )
        self._listener = checker if isinstance(checker, TransactionListener) else None
        self._topics = topics
        self._open: dict[str, Transaction] = {}
        self._memory = _Memory()
        self._under_check: set[str] = set()
        self._turns = asyncio.Semaphore(self.config.check_concurrency)
        self._tasks: set[asyncio.Task[object]] = set()

    def transaction(self, message: Message) -> Transaction:
        """The context of one local transaction; see :class:`Transaction`.

        Entering raises what :meth:`send` raises, and :class:`HalfNotDurableError` when the broker
        cannot vouch for the half message: then the block has not run, and nothing is delivered.

        Raises:
            ConfigurationError: The producer has no checker, and somebody has to know.
        """
        if self._checker is None:
            raise ConfigurationError("checker", None, "a function: the broker may ask")
        return Transaction(self, message)

    async def send_in_transaction(
        self, message: Message, listener: TransactionListener | None = None, arg: object = None
    ) -> Transaction:
        """RocketMQ's form: store the half message, let the listener run and decide.

        An exception or anything but a Decision from the listener is logged and counts as UNKNOWN.
        The transaction returned is over; its ``decision`` and ``decided`` say how.

        Raises:
            ClientError: The half message could not be stored; the listener did not run.
        """
        listener = self.use_listener(listener)
        async with Transaction(self, message) as transaction:
            # Cancelled in mid-call, its worker thread runs on: only the checker can tell then.
            transaction.decide(Decision.UNKNOWN)
            outcome = await ask(listener.execute_local_transaction, transaction, arg)
            transaction.decide(outcome)
        return transaction

    def use_listener(self, listener: TransactionListener | None) -> TransactionListener:
        """The listener given, or the one used last; it gets the checks unless there is a checker.

        Raises:
            ConfigurationError: There is none.
        """
        listener = listener or self._listener
        if listener is None:
            raise ConfigurationError("listener", None, "a TransactionListener")
        if self._checker is None or self._listener is not None:
            self._listener, self._checker = listener, listener.check_local_transaction
        return listener

    async def close(self) -> None:
        """Wait a little for decisions and checks under way, then close; safe to call twice."""
        try:
            clock = asyncio.get_running_loop().time
            deadline = clock() + CLOSE_SECONDS
            while self._tasks and (seconds := deadline - clock()) > 0:  # more may come meanwhile
                await asyncio.wait(self._tasks, timeout=seconds)
        finally:
            for task in self._tasks:
                task.cancel()
            await super().close()

    # -- half message and decision

    async def prepare(self, transaction: Transaction) -> None:
        """Store the half message; called by :class:`Transaction`."""
        session = self._session
        draft = draft_half(
            transaction.message, transaction_id := session.new_key(), self.group, self.config
        )
        failures: list[ClientError] = []
        sending = self._spawn(
            self._transmit(session, RequestCode.SEND_MESSAGE_V2, draft, None, failures)
        )
        self._open[transaction_id] = transaction
        try:
            await asyncio.wait([sending])
        except asyncio.CancelledError:
            self._spawn(self._abandon(transaction, transaction_id, sending))
            raise
        if sending.cancelled():  # by close()
            del self._open[transaction_id]
            raise ClientClosedError(self._name)
        try:
            result = sending.result()
        except BaseException:
            del self._open[transaction_id]
            raise
        transaction.stored(transaction_id, result)
        if any(map(leaves_doubt, failures)):
            self._memory.note_doubt(transaction_id, result.offset_message_id)
        if result.status is not SendStatus.SEND_OK:
            await self.finish(transaction, Decision.ROLLBACK)
            raise HalfNotDurableError(transaction_id, result.status.name)

    async def finish(self, transaction: Transaction, decision: Decision) -> None:
        """Deliver the decision, also when the caller is cancelled meanwhile.

        Raises:
            DecisionConflictError: The broker has decided otherwise before.
        """
        transaction.decision = decision
        delivering = self._spawn(self._deliver(transaction, decision))
        await asyncio.wait([delivering])
        if not delivering.cancelled():  # before it began, by close()
            delivering.result()

    async def _abandon(
        self, transaction: Transaction, transaction_id: str, sending: asyncio.Task[SendResult]
    ) -> None:
        """Roll back a half message whose sender was cancelled before it was stored."""
        try:
            transaction.stored(transaction_id, await sending)
            await self.finish(transaction, Decision.ROLLBACK)
        except ClientError as error:
            logger.info(
                "event=half_message_abandoned transaction=%s reason=%s", transaction_id, error
            )
            self._open.pop(transaction_id, None)

    async def _deliver(self, transaction: Transaction, decision: Decision) -> None:
        try:
            if decision is not Decision.UNKNOWN:  # which a broker does not even answer
                await self._tell(transaction, decision)
                transaction.decided = True
        except DecisionConflictError:
            raise
        except asyncio.CancelledError:  # close() did not wait for it any longer
            self._note_undelivered(transaction, decision, ClientClosedError(self._name))
        except ClientError as error:
            self._note_undelivered(transaction, decision, error)
        finally:
            self._open.pop(transaction.id, None)

    def _note_undelivered(
        self, transaction: Transaction, decision: Decision, reason: ClientError
    ) -> None:
        self._memory.note_undelivered(transaction.id, decision)
        logger.warning(
            "event=decision_not_delivered transaction=%s decision=%s reason=%s",
            transaction.id,
            decision.name,
            reason,
        )

    async def _tell(self, transaction: Transaction, decision: Decision) -> None:
        """Tell the broker until it confirms.

        Raises:
            ClientError: It did not in time, or refuses.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.config.send_timeout
        header = self._decision_header(transaction, decision)
        while True:
            try:
                await self._tell_once(transaction, header, max(deadline - clock(), RETRY_PAUSE))
            except ClientError as error:
                if clock() + RETRY_PAUSE >= deadline or not self._may_repeat(error, decision):
                    raise
                logger.info("event=decision_again transaction=%s reason=%s", transaction.id, error)
                await asyncio.sleep(RETRY_PAUSE)
            else:
                return

    async def _tell_once(
        self, transaction: Transaction, header: EndTransactionRequestHeader, seconds: float
    ) -> None:
        session = self._session
        broker_name = transaction.result.queue.broker_name
        address = session.routes.address_of(broker_name)
        if address is None:
            raise ConnectError(broker_name, "no name server knows this broker any more")
        seconds = min(seconds, self.config.request_timeout)
        answer = await session.call(address, RequestCode.END_TRANSACTION, header, seconds=seconds)
        if answer.code == ResponseCode.SUCCESS:
            return
        remark = answer.remark or ""
        if answer.code == ResponseCode.ILLEGAL_OPERATION and session.routes.halfmq:
            wanted = Decision(header.commit_or_rollback).name
            raise DecisionConflictError(answer.code, remark, transaction.id, wanted)
        raise BrokerRefusedError(answer.code, remark)

    def _may_repeat(self, error: ClientError, decision: Decision) -> bool:
        """An official broker delivers once per COMMIT it gets; ours takes it as one decision."""
        harmless = decision is Decision.ROLLBACK or self._session.routes.halfmq
        return error.retriable and (harmless or not leaves_doubt(error))

    def _decision_header(
        self, transaction: Transaction, decision: Decision
    ) -> EndTransactionRequestHeader:
        result = transaction.result
        try:
            half = parse_offset_message_id(result.offset_message_id)
        except ValueError as error:
            raise BadAnswerError(result.queue.broker_name, str(error)) from error
        return EndTransactionRequestHeader(
            producer_group=self.group,
            tran_state_table_offset=result.queue_offset,
            commit_log_offset=half.physical_offset,
            commit_or_rollback=decision,
            msg_id=transaction.id,
            topic=transaction.message.topic,
            transaction_id=transaction.id,
            broker_name=result.queue.broker_name,
        )

    # -- check-back

    def _check_requested(self, command: RemotingCommand, connection: Connection) -> None:
        """A broker asks about a half message; the answer follows in a task."""
        header = command.header
        if not isinstance(header, CheckTransactionStateRequestHeader):
            logger.warning(
                "event=check_not_understood broker=%s reason=%s",
                connection.address,
                command.header_error,
            )
            return
        try:
            message = MessageView(decode_record(command.body), header.broker_name or "")
        except CorruptRecordError as error:
            logger.warning(
                "event=check_not_understood broker=%s reason=%s", connection.address, error
            )
            return
        group = message.properties.get(names.PROPERTY_PGROUP)
        transaction_id = header.transaction_id or message.message_id
        if group != self.group:
            logger.warning(
                "event=check_for_another_group group=%s transaction=%s", group, transaction_id
            )
        elif transaction_id in self._under_check:
            logger.debug("event=check_repeated transaction=%s", transaction_id)
        elif len(self._under_check) >= self.config.check_queue_max:
            logger.warning("event=check_dropped transaction=%s", transaction_id)
        else:
            self._under_check.add(transaction_id)
            self._spawn(self._check(header, message, transaction_id, connection))

    async def _check(
        self,
        header: CheckTransactionStateRequestHeader,
        message: MessageView,
        transaction_id: str,
        connection: Connection,
    ) -> None:
        try:
            decision = self._known_decision(transaction_id, message)
            if decision is None:
                async with self._turns:
                    decision = await self._ask_checker(message)
            answer = EndTransactionRequestHeader(
                producer_group=self.group,
                tran_state_table_offset=header.tran_state_table_offset,
                commit_log_offset=header.commit_log_offset,
                commit_or_rollback=decision,
                msg_id=header.msg_id or transaction_id,
                # The real topic, not the half topic that the official client sends back: under
                # access control a producer has no rights on that, and would never be heard.
                topic=message.topic,
                from_transaction_check=True,
                transaction_id=transaction_id,
                broker_name=header.broker_name,
            )
            connection.send_one_way(RequestCode.END_TRANSACTION, answer)
            logger.info(
                "event=check_answered transaction=%s decision=%s", transaction_id, decision.name
            )
        except ClientError as error:
            logger.info("event=check_not_answered transaction=%s reason=%s", transaction_id, error)
        finally:
            self._under_check.discard(transaction_id)

    def _known_decision(self, transaction_id: str, message: MessageView) -> Decision | None:
        """What this producer knows without asking its checker."""
        if self._session.routes.halfmq and self._memory.is_stray(transaction_id, message):
            return Decision.ROLLBACK
        transaction = self._open.get(transaction_id)
        if transaction is not None:
            # The local transaction runs here and now: its row may be written but not yet visible.
            return transaction.decision or Decision.UNKNOWN
        return self._memory.undelivered(transaction_id)

    async def _ask_checker(self, message: MessageView) -> Decision:
        if self._checker is None:
            logger.warning("event=check_without_checker transaction=%s", message.transaction_id)
            return Decision.UNKNOWN
        seconds = self.config.check_timeout
        try:
            async with asyncio.timeout(seconds):  # or a few that hang would stop all checks
                return await ask(self._checker, message)
        except TimeoutError:
            logger.error(  # noqa: TRY400 -- where it hangs is the user's to know
                "event=check_timed_out transaction=%s seconds=%g counts_as=UNKNOWN",
                message.transaction_id,
                seconds,
            )
            return Decision.UNKNOWN

    # -- wiring

    def _handlers(self) -> dict[int, ServerRequestHandler]:
        return {RequestCode.CHECK_TRANSACTION_STATE: self._check_requested}

    async def _start_session(self, session: Session) -> None:
        await session.start(whole_cluster=True, topics=self._topics)

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled would leave it unread


class _Memory:
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
        _remember(self._undelivered, transaction_id, decision)

    def undelivered(self, transaction_id: str) -> Decision | None:
        return self._undelivered.get(transaction_id)


def _remember(memory: OrderedDict[str, T], transaction_id: str, value: T) -> None:
    memory[transaction_id] = value
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)


async def ask(function: Callable[..., Decision | Awaitable[Decision]], *args: object) -> Decision:
    """A user function's decision; a plain function runs in a worker thread, for it may block.

    An exception, or anything that is no Decision, is logged and counts as UNKNOWN.
    """
    try:
        if inspect.iscoroutinefunction(function):
            decision = await function(*args)
        else:
            decision = await asyncio.to_thread(function, *args)
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
