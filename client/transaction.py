"""TransactionProducer: a local transaction and its messages, all or none.

The half messages are stored first and shown to nobody. Then the local transaction runs, and the
decision follows: COMMIT delivers the messages, ROLLBACK drops them. The ``checker`` is asked what
became of a local transaction wherever that is not known: by the broker, when no decision arrives
because a process died or the network broke, and by the producer itself, when an exception or a
cancellation leaves the block. It is that of a ``TransactionLedger``, or a function that finds the
row by ``message.keys`` or ``message.transaction_id``. Of a transaction with several messages it is
shown the first.

What that means for a checker of one's own:

* It is asked about transactions of any producer of the group, also of one that is dead, so it may
  look only at what survives a crash: the database.
* No row may mean "rolled back" or "still running". A producer does not ask its checker while the
  block of a transaction runs in itself. But another producer of the group cannot know that; and
  when a block has been left by an exception, a worker thread or the database server may still be
  at work. So a checker may say ROLLBACK only if the row can no longer come. A ledger makes sure of
  that by a row of its own; without one, answer UNKNOWN as long as the local transaction may run
  (``message.store_timestamp`` tells the age of the half message).

How decisions travel stands in ``decisions``, how checks are answered in ``check_back``.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from weakref import WeakValueDictionary

from halfmq.remoting.codes import RequestCode
from halfmq.store.format.ids import parse_offset_message_id

from .admin import PendingTransaction, pending_pages
from .arguments import check_callable, check_kind
from .config import ClientConfig
from .credentials import CredentialsSource
from .errors import (
    BadAnswerError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    DecisionConflictError,
    HalfNotDurableError,
    TransactionNotRecordedError,
)
from .message import (
    Decision,
    Message,
    MessageView,
    SendResult,
    SendStatus,
    is_topic,
    topic_error,
)
from .net.connection import ServerRequestHandler
from .net.encoding import Draft, draft_half
from .net.retry import leaves_doubt
from .net.session import Session, wall_clock_ms
from .producer import Producer
from .transactional.check_back import CheckBack, Checker, Memory, as_checked, ask
from .transactional.decisions import Decisions, Ending, Settled
from .transactional.recording import take_unrecorded
from .transactional.several_messages import check_messages, check_supported, prepare_several

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long closing waits for decisions and checks under way; what is cut off, the check settles."""

T = TypeVar("T")


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
    """One local transaction: its half messages and its decision.

    Made by :meth:`TransactionProducer.transaction`.

    ``async with`` stores the half messages and runs the block. Left normally, it commits. Left by
    an exception or a cancellation, it does not know whether the row was committed, so it asks the
    producer's checker, sends what that says, and the exception goes on; if the checker cannot tell
    within ``config.check_timeout``, or a second cancellation arrives meanwhile, the broker asks
    later. So the local transaction has to end inside the block: a check of one that is still open
    waits for its lock. :meth:`rollback` and :meth:`decide` overrule all that, for a block that
    knows.

    When a COMMIT cannot be delivered, leaving the block raises nothing, because the local
    transaction has committed: ``decided`` is then False, a warning is logged, and the broker
    will ask the checker.

    Leaving the block normally raises :class:`TransactionNotRecordedError` if the checker is that of
    a :class:`TransactionLedger` that has no row of this transaction, and
    :class:`DecisionConflictError` if the transaction was rolled back before.
    """

    def __init__(
        self, producer: TransactionProducer, messages: Message | Sequence[Message]
    ) -> None:
        """Prepare; what can be wrong with the messages by themselves shows here.

        Raises:
            InvalidMessageError: No message, or more than one transaction can have.
        """
        self.messages = check_messages(messages)
        """What a commit delivers, all or none; the first one leads and is what checkers see."""
        self.decision: Decision | None = None
        """What the broker was told, or would have been; None while the block runs, and while the
        checker is asked."""
        self.decided = False
        """Whether the broker confirmed the decision."""
        self.final_message_id: str | None = None
        """The offset id of the message that consumers get, of several the first one's; None unless
        the broker confirmed a COMMIT and, as a halfmq broker does, said where it lies."""
        self.running = True
        """Whether the block may still run; until then nobody asks the checker."""
        self._producer = producer
        self._draft: Draft | None = None
        self._results: Sequence[SendResult] = ()
        self._half_offset = -1
        self._born_ms = self._stored_ms = 0
        self._explicit: Decision | None = None
        self._entered = False

    @property
    def id(self) -> str:
        """The transaction id, which checkers see as ``message.transaction_id``."""
        assert self._draft is not None, "a transaction has an id once its block has been entered"
        return self._draft.unique_key

    @property
    def message(self) -> Message:
        """The message, of several the first one."""
        return self.messages[0]

    @property
    def results(self) -> Sequence[SendResult]:
        """How the half messages were stored, in the order of ``messages``."""
        assert self._results, "the half messages are stored when the block is entered"
        return self._results

    @property
    def result(self) -> SendResult:
        """How the half message was stored, of several the first one."""
        return self.results[0]

    @property
    def message_id(self) -> str:
        """The offset id of the half message: what consumers see as ``half_message_id``."""
        return self.result.offset_message_id

    def stored(self, draft: Draft, born_ms: int, results: Sequence[SendResult]) -> None:
        """The half messages are stored, the first of them from ``draft``; called by the producer.

        Raises:
            BadAnswerError: The broker does not say where, so that it could not be told either.
        """
        try:
            half = parse_offset_message_id(results[0].offset_message_id)
        except ValueError as error:
            raise BadAnswerError(results[0].queue.broker_name, str(error)) from error
        self._draft, self._results, self._half_offset = draft, results, half.physical_offset
        self._born_ms, self._stored_ms = born_ms, wall_clock_ms()

    def as_checked(self) -> MessageView:
        """The message as a checker sees it; called by the producer."""
        assert self._draft is not None, "only what is stored is asked about"
        halves = len(self.messages)
        return as_checked(self._draft, self.result, halves, self._born_ms, self._stored_ms)

    def ending(self, decision: Decision, on_settled: Settled) -> Ending:
        """The decision as it is delivered; called by the producer."""
        result = self.result
        return Ending(
            self.id,
            decision,
            result.queue.broker_name,
            self._half_offset,
            result.queue_offset,
            result.queue.topic,
            on_settled,
        )

    def decide(self, decision: Decision) -> None:
        """Fix the decision, however the block is left. UNKNOWN leaves it to the broker's check.

        Raises:
            ConfigurationError: It is no Decision.
        """
        check_kind("decision", decision, Decision)
        self._explicit = decision

    def rollback(self) -> None:
        """Fix ROLLBACK, however the block is left, and ask nobody.

        For a block that knows that its row was not committed and never will be: roll back your own
        database first.
        """
        self.decide(Decision.ROLLBACK)

    async def abandon(self) -> None:
        """Roll back half messages whose block will never run; called by the blocking form."""
        if self._draft is not None and self.decision is None:
            await self._producer.finish(self, Decision.ROLLBACK)

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
        self.running = False
        if isinstance(error, GeneratorExit):
            # A coroutine that is being closed may not wait for anything: the broker will ask.
            self.decision = Decision.UNKNOWN
            return
        unrecorded = self._producer.take_unrecorded(self)
        decision = self._explicit
        if decision is None and error is None and not unrecorded:
            decision = Decision.COMMIT
        try:
            await self._producer.finish(self, decision)
        except DecisionConflictError:
            if error is None:
                raise
            logger.exception("event=decision_refused transaction=%s", self.id)
        if decision is None and error is None and self.decision is not Decision.COMMIT:
            assert self.decision is not None, "it is finished"
            raise TransactionNotRecordedError(self.id, self.decision.name)

    def __repr__(self) -> str:
        identity = self._draft and self._draft.unique_key
        return f"<Transaction {identity} decision={self.decision} decided={self.decided}>"


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
        access_key: str | None = None,
        secret_key: str | None = None,
        credentials: CredentialsSource | None = None,
        tls: bool | ssl.SSLContext | None = None,
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
            namesrv: ``host:port``, several with ``;`` or ``,``; wins over the one in ``config``.
            access_key: Signs every request; wins over ``config``, as do the next three.
            secret_key: The secret of ``access_key``.
            credentials: A function that gives both, asked again when they are refused.
            tls: Whether connections are encrypted; an ``ssl.SSLContext`` says whom to trust.
            config: Everything else.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(
            group,
            namesrv=namesrv,
            access_key=access_key,
            secret_key=secret_key,
            credentials=credentials,
            tls=tls,
            config=config,
        )
        if checker is not None and not isinstance(checker, TransactionListener):
            check_callable("checker", checker)
        given: object = topics
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ConfigurationError("topics", topics, "several names, such as ('orders',)")
        for topic in topics:
            if not is_topic(topic):
                raise ConfigurationError("topics", topic, f"a topic: {topic_error(topic)}")
        self._topics = tuple(topics)
        # Weak: one whose block was interrupted before it could be left has nobody who decides about
        # it, and must not be taken for running once nobody has it any more.
        self._open: WeakValueDictionary[str, Transaction] = WeakValueDictionary()
        self._memory = Memory()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: Session | None = None
        self._decisions = Decisions(group, self.config, self._reachable, self._spawn)
        self._check_back = CheckBack(
            group, self.config, self._decisions, self._known_decision, self._spawn
        )
        self._listener = checker if isinstance(checker, TransactionListener) else None
        self._check_back.checker = (
            checker.check_local_transaction if isinstance(checker, TransactionListener) else checker
        )

    def transaction(self, messages: Message | Sequence[Message]) -> Transaction:
        """The context of one local transaction; see :class:`Transaction`.

        Several messages, to several topics if need be, are delivered all or none. They must go to
        one halfmq broker, there can be 64 of them, and together they must fit into 16 MiB.

        Entering raises what :meth:`send` raises, and :class:`HalfNotDurableError` when the broker
        cannot vouch for the half message: then the block has not run, and nothing is delivered.

        Raises:
            ConfigurationError: The producer has no checker, and somebody has to know. When
                entered: the broker is not halfmq's, and cannot do what was asked for.
            InvalidMessageError: No message, or too many.
        """
        if self._check_back.checker is None:
            raise ConfigurationError("checker", None, "a function: the broker may ask")
        return Transaction(self, messages)

    async def send_in_transaction(
        self,
        messages: Message | Sequence[Message],
        listener: TransactionListener | None = None,
        arg: object = None,
    ) -> Transaction:
        """RocketMQ's form: store the half message or messages, let the listener run and decide.

        An exception or anything but a Decision from the listener is logged and counts as UNKNOWN.
        The transaction returned is over; its ``decision`` and ``decided`` say how.

        Raises:
            ClientError: The half message could not be stored; the listener did not run.
        """
        listener = self.use_listener(listener)
        async with Transaction(self, messages) as transaction:
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
        if not isinstance(listener, TransactionListener):
            raise ConfigurationError("listener", listener, "a TransactionListener")
        if self._check_back.checker is None or self._listener is not None:
            self._listener = listener
            self._check_back.checker = listener.check_local_transaction
        return listener

    async def pending(self) -> list[PendingTransaction]:
        """What nobody has decided yet of this group's transactions, on all brokers.

        By broker, the oldest first; whichever producer prepared them, this one or another.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
            ClientError: A broker does not answer, or refuses.
        """
        pages = pending_pages(self._session, group=self.group)
        return [transaction async for page in pages for transaction in page]

    async def close(self) -> None:
        """Wait a little for decisions and checks under way, then close; safe to call twice."""
        if self._is_the_parents():
            return
        self._check_back.closing = True
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
        """Store the half messages; called by :class:`Transaction`."""
        session = self._session
        check_supported(transaction.messages, halfmq=session.routes.halfmq)
        drafts = [
            draft_half(message, session.new_key(), self.group, self.config)
            for message in transaction.messages
        ]
        transaction_id, born_ms = drafts[0].unique_key, wall_clock_ms()
        failures: list[ClientError] = []
        sending = self._spawn(self._store(session, drafts, failures))
        self._open[transaction_id] = transaction
        # What asyncio.wait does, at a third of its cost: the caller may be cancelled, the task not.
        stored = asyncio.get_running_loop().create_future()
        sending.add_done_callback(partial(_wake, stored))
        try:
            await stored
        except asyncio.CancelledError:
            self._spawn(self._abandon(transaction, drafts[0], born_ms, sending))
            raise
        try:
            results = self._results_of(sending)
            transaction.stored(drafts[0], born_ms, results)
        except BaseException:
            del self._open[transaction_id]
            if any(map(leaves_doubt, failures)):  # it may be stored, and its block will never run
                self._memory.note_undelivered(transaction_id, Decision.ROLLBACK)
            raise
        if any(map(leaves_doubt, failures)):
            self._memory.note_doubt(transaction_id, transaction.message_id)
        status = results[0].status
        if status is not SendStatus.SEND_OK:
            await self.finish(transaction, Decision.ROLLBACK)
            raise HalfNotDurableError(transaction_id, status.name)

    async def _store(
        self, session: Session, drafts: Sequence[Draft], failures: list[ClientError]
    ) -> Sequence[SendResult]:
        if len(drafts) > 1:
            return await prepare_several(session, self.config, self.group, drafts, failures)
        code = RequestCode.SEND_MESSAGE_V2
        return [await self._transmit(session, code, drafts[0], None, failures)]

    def _results_of(self, sending: asyncio.Task[Sequence[SendResult]]) -> Sequence[SendResult]:
        if sending.cancelled():  # by close()
            raise ClientClosedError(self._name)
        return sending.result()

    def take_unrecorded(self, transaction: Transaction) -> bool:
        """Whether the checker is a ledger's that lacks this transaction; called once, at its end.

        So far as this process knows: another may have recorded it.
        """
        return take_unrecorded(self._check_back.checker, transaction.id)

    async def finish(self, transaction: Transaction, decision: Decision | None) -> None:
        """Deliver the decision, also when the caller is cancelled meanwhile.

        None has the checker asked for it. When the caller is cancelled before that has answered,
        the decision is UNKNOWN.

        Raises:
            DecisionConflictError: The broker has decided otherwise before.
        """
        if decision is None:
            await self._ask_and_finish(transaction)
            return
        transaction.decision = decision
        if decision is Decision.UNKNOWN:  # which a broker learns when it asks
            self._open.pop(transaction.id, None)
            return
        ending = transaction.ending(decision, partial(self._settled, transaction))
        waiter = ending.waiter = asyncio.get_running_loop().create_future()
        try:
            self._decisions.tell(ending)
        except ClientClosedError as error:
            self._settled(transaction, ending, None, error)
        await waiter

    async def _ask_and_finish(self, transaction: Transaction) -> None:
        # In a task of its own, which close() waits for and which is not the caller's, who has been
        # cancelled once and may be again.
        asking = self._spawn(self._ask(transaction))
        try:
            await asyncio.wait([asking])
        finally:
            asking.cancel()  # without effect on one that is done
            if transaction.decision is None:
                await self.finish(transaction, Decision.UNKNOWN)
            if transaction.decision is Decision.UNKNOWN:
                logger.warning("event=transaction_undecided transaction=%s", transaction.id)
        if not asking.cancelled():
            asking.result()

    async def _ask(self, transaction: Transaction) -> None:
        decision = await self._check_back.ask_about_own(transaction.as_checked())
        await self.finish(transaction, decision)

    async def _abandon(
        self,
        transaction: Transaction,
        draft: Draft,
        born_ms: int,
        sending: asyncio.Task[Sequence[SendResult]],
    ) -> None:
        """Roll back a half message whose sender was cancelled before it was stored."""
        try:
            transaction.stored(draft, born_ms, await sending)
            await self.finish(transaction, Decision.ROLLBACK)
        except ClientError as error:
            logger.info(
                "event=half_message_abandoned transaction=%s reason=%s", draft.unique_key, error
            )
            self._open.pop(draft.unique_key, None)
            self._memory.note_undelivered(draft.unique_key, Decision.ROLLBACK)

    def _settled(
        self,
        transaction: Transaction,
        ending: Ending,
        final: str | None,
        error: BaseException | None,
    ) -> None:
        """A decision is confirmed, refused, or could not be delivered."""
        self._open.pop(ending.transaction_id, None)
        told: BaseException | None = None
        if error is None:
            transaction.decided = True
            transaction.final_message_id = final
        elif isinstance(error, ClientError) and not isinstance(error, DecisionConflictError):
            self._memory.note_undelivered(ending.transaction_id, ending.decision)
            logger.warning(
                "event=decision_not_delivered transaction=%s decision=%s reason=%s",
                ending.transaction_id,
                ending.decision.name,
                error,
            )
        else:
            told = error
        if ending.waiter is None or ending.waiter.done():
            return  # its caller was cancelled
        if told is None:
            ending.waiter.set_result(None)
        else:
            ending.waiter.set_exception(told)

    def _known_decision(self, transaction_id: str, message: MessageView) -> Decision | None:
        """What this producer knows without asking its checker."""
        session = self._reachable()
        if session.routes.halfmq and self._memory.is_stray(transaction_id, message):
            return Decision.ROLLBACK
        transaction = self._open.get(transaction_id)
        if transaction is not None and transaction.running:
            return Decision.UNKNOWN  # its row may be written but not yet visible
        if transaction is not None and transaction.decision:
            return transaction.decision
        return self._memory.undelivered(transaction_id)

    # -- wiring

    def _handlers(self) -> dict[int, ServerRequestHandler]:
        return {RequestCode.CHECK_TRANSACTION_STATE: self._check_back.requested}

    async def _start_session(self, session: Session) -> None:
        self._starting = session
        try:
            await session.start(whole_cluster=True, topics=self._topics)
        finally:
            self._starting = None

    def _reachable(self) -> Session:
        """The session, also while it starts: a broker asks as soon as it has been greeted."""
        return self._starting or self._session

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled would leave it unread


def _wake(waiter: asyncio.Future[None], _task: asyncio.Task[Any]) -> None:
    if not waiter.done():  # its caller was cancelled
        waiter.set_result(None)
