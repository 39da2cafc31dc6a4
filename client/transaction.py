"""TransactionProducer: commit a local transaction and its messages together, or neither.

The half messages are stored first; consumers do not see them. Then the local transaction runs, and
the decision follows: COMMIT delivers the messages, ROLLBACK drops them. If the outcome of the local
transaction is unknown, the ``checker`` is called: for the broker, if no decision arrives because a
process died or the network failed, and for the producer itself, if an exception or a cancellation
ends the block. The checker is that of a ``TransactionLedger``, or a function that finds the row by
``message.keys`` or ``message.transaction_id``. For a transaction with several messages it gets the
first one.

Rules for a checker without a ledger:

* It is called for transactions of any producer of the group, also of one that has died, so it may
  only use what survives a crash: the database.
* A missing row may mean "rolled back" or "still running". A producer does not call its own checker
  while the block of the transaction runs. But another producer of the group does not know that;
  and after an exception has ended the block, a worker thread or the database server may still be
  working. So a checker may answer ROLLBACK only if the row can no longer appear. A ledger ensures
  this with a row of its own; without one, answer UNKNOWN while the local transaction may still run
  (``message.store_timestamp`` is the time of the half message).

``decisions`` describes how decisions are sent, ``check_back`` how checks are answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

from halfmq.remoting.codes import RequestCode

from .arguments import (
    OrderKeys,
    check_callable,
    is_topic,
    topic_error,
)
from .codecs import Codec
from .config import ConnectionOptions
from .errors import (
    ClientClosedError,
    ClientError,
    ConfigurationError,
    DecisionConflictError,
    HalfNotDurableError,
    TransactionNotCommittedError,
    TransactionNotRecordedError,
)
from .message import (
    Decision,
    Message,
    MessageView,
    SendResult,
    SendStatus,
    V,
)
from .net.connection import ServerRequestHandler
from .net.message_encoding import EncodedMessage, encode_half_message
from .net.retry import outcome_unknown
from .net.session import Session, wall_clock_ms
from .net.telemetry import COMMIT, PREPARE, ROLLBACK, sending
from .producer import Producer
from .transactional.check_back import (
    CheckBack,
    Checker,
    Recent,
    call_user_function,
)
from .transactional.decisions import DecisionSender, Ending
from .transactional.multi_message_prepare import check_supported, prepare_messages
from .transactional.owned_transaction import OwnedTransaction
from .transactional.recorded_transactions import (
    Recordings,
    look_of,
    says_open,
)
from .transactional.transaction_block import Transaction, TransactionListener

if TYPE_CHECKING:
    from .administration.transactions import PendingTransaction

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long closing waits for decisions and checks in progress; a later check settles the rest."""

T = TypeVar("T")


class TransactionProducer(Producer[V]):
    """A producer whose messages are delivered if and only if a local transaction commits.

    ::

        async with TransactionProducer("orders-tx", checker=checker) as producer:
            async with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
                await save_order(tx.id)

    At its start it registers with all brokers of the cluster. So a producer that is started after a
    crash gets the checks of transactions that the crashed one left undecided.
    """

    def __init__(
        self,
        group: str,
        checker: Checker | TransactionListener | None = None,
        *,
        topics: tuple[str, ...] = (),
        codec: Codec[V] | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        """Create a member of a producer group, whose members answer checks for each other.

        Args:
            group: The same name for all producers that share a database, also after a restart.
            checker: Returns the outcome of a local transaction. It may be omitted if every
                transaction uses :meth:`send_in_transaction`; the last listener then answers checks.
            topics: The brokers of these topics are also registered with at the start, for clusters
                whose name server does not list all brokers.
            codec: Encodes the values of :meth:`message`.
            connection: Addresses, credentials, TLS and settings.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(group, codec=codec, **connection)
        if checker is not None and not isinstance(checker, TransactionListener):
            check_callable("checker", checker)
        given: object = topics
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ConfigurationError("topics", topics, "several names, such as ('orders',)")
        for topic in topics:
            if not is_topic(topic):
                raise ConfigurationError("topics", topic, f"a topic: {topic_error(topic)}")
        self._topics = tuple(topics)
        # Weak: a transaction whose block was interrupted by a signal may never be finished, and
        # must not count as running after it was garbage-collected.
        self._open: WeakValueDictionary[str, Transaction] = WeakValueDictionary()
        # Finished transactions whose outcome the broker may not know: a half that an attempt before
        # the successful one may also have stored, by its offset id; and decisions.
        self._uncertain: Recent[str] = Recent()
        self._undelivered: Recent[Decision] = Recent()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: Session | None = None
        self._decisions = DecisionSender(group, self.config, self._current_session, self._spawn)
        self._check_back = CheckBack(
            group, self.config, self._decisions, self._known_decision, self._spawn
        )
        self._listener = checker if isinstance(checker, TransactionListener) else None
        self._check_back.checker = (
            checker.check_local_transaction if isinstance(checker, TransactionListener) else checker
        )

    @overload
    def transaction(
        self, messages: Message | Sequence[Message], *, order_key: OrderKeys = None
    ) -> Transaction: ...

    @overload
    def transaction(
        self,
        messages: Message | Sequence[Message] = (),
        *,
        order_key: OrderKeys = None,
        session: object,
    ) -> AbstractAsyncContextManager[Transaction]: ...

    def transaction(
        self,
        messages: Message | Sequence[Message] = (),
        *,
        order_key: OrderKeys = None,
        session: object = None,
    ) -> AbstractAsyncContextManager[Transaction]:
        """Return the context manager of one local transaction; see :class:`Transaction`.

        With ``session`` (SQLAlchemy's ``AsyncSession`` or ``AsyncConnection``, a connection of
        asyncpg, psycopg, aiosqlite or aiomysql), halfmq owns the database transaction too: it
        begins it, writes the ledger's row, and commits it at the end of the block, just before the
        message. The session must be in no transaction, and the checker that of a ledger. What is
        raised before the commit rolls back both; do not commit in the block. If the messages depend
        on what the block does, such as the number of a new row, leave them out: the block calls
        ``add`` of the transaction, and what it has added is prepared just before the commit.

        Several messages, also to several topics, are all delivered or none. They must go to one
        halfmq broker; the limits are 64 messages and 16 MiB together.

        Messages of a topic with the same ``order_key`` go to one queue, as with :meth:`send`, in
        the order in which their transactions are committed: that of their blocks, if these run one
        after the other and each COMMIT is confirmed. A list has a key or None for each message.

        Entering raises what :meth:`send` raises, and :class:`HalfNotDurableError` if the half
        message may not be on disk: then the block has not run, and nothing is delivered.

        Raises:
            ConfigurationError: The producer has no checker, or an order key cannot be used. When
                entered: the broker is not halfmq's, and does not support these messages; or no
                single broker has the queues of all order keys.
            InvalidMessageError: No message, or too many.
        """
        if self._check_back.checker is None:
            raise ConfigurationError("checker", None, "a function that answers the broker's checks")
        if session is None:
            return Transaction(self, messages, order_key)
        transaction = Transaction(self, messages, order_key, collects=not messages)
        ledger = self.ledger
        return OwnedTransaction(
            transaction,
            ledger,
            session,
            enter=transaction.__aenter__,
            store=transaction.store,
            leave=transaction.__aexit__,
            run=partial(ledger.run_async, session),
        )

    @property
    def ledger(self) -> Any:
        """The ledger of the checker, for transactions whose session the producer owns.

        Raises:
            ConfigurationError: The checker does not belong to a ledger.
        """
        look = look_of(self._check_back.checker)
        if look is None:
            expected = "ledger.checker(…) or ledger.async_checker(…), since session= needs a ledger"
            raise ConfigurationError("checker", self._check_back.checker, expected)
        return look.ledger

    async def send_in_transaction(
        self,
        messages: Message | Sequence[Message],
        listener: TransactionListener | None = None,
        arg: object = None,
        *,
        order_key: OrderKeys = None,
    ) -> Transaction:
        """Store the half messages and let the listener run and decide, as in RocketMQ.

        If the listener raises, or returns anything but a Decision, this is logged and counts as
        UNKNOWN. The returned transaction is finished; see its ``decision`` and ``decided``. If the
        producer has the checker of a ledger, a COMMIT is sent only if the row is committed, as at
        the end of a block.

        Raises:
            ClientError: The half message could not be stored; the listener did not run.
            TransactionNotCommittedError: The listener returned COMMIT without a row in the ledger.
        """
        listener = self.use_listener(listener)
        async with Transaction(self, messages, order_key) as transaction:
            # If cancelled, the listener's worker thread continues: only a check can decide then.
            transaction.decide(Decision.UNKNOWN)
            outcome = await call_user_function(listener.execute_local_transaction, transaction, arg)
            transaction.take_outcome(outcome)
        return transaction

    def use_listener(self, listener: TransactionListener | None) -> TransactionListener:
        """Return the given listener or the last one; it answers checks unless there is a checker.

        Raises:
            ConfigurationError: There is no listener.
        """
        listener = listener or self._listener
        if not isinstance(listener, TransactionListener):
            raise ConfigurationError("listener", listener, "a TransactionListener")
        if self._check_back.checker is None or self._listener is not None:
            self._listener = listener
            self._check_back.checker = listener.check_local_transaction
        return listener

    async def pending(self) -> list[PendingTransaction]:
        """Return the undecided transactions of this group on all brokers.

        Sorted by broker, the oldest first; those of other producers of the group are included.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
            ClientError: A broker does not answer, or refuses.
        """
        from .administration.transactions import pending_pages  # noqa: PLC0415 -- for operators

        pages = pending_pages(self._session, group=self.group)
        return [transaction async for page in pages for transaction in page]

    async def close(self) -> None:
        """Wait up to 5 s for decisions and checks in progress, then close; safe to call twice."""
        if self._is_inherited():
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

    def new_key(self) -> str:
        """Return the key of a message; called by :class:`Transaction`."""
        return self._session.new_key()

    async def prepare(self, transaction: Transaction) -> None:
        """Store the half messages of a transaction; called by :class:`Transaction`."""
        session = self._session
        check_supported(transaction.messages, halfmq=session.routes.halfmq)
        with sending(self.telemetry, PREPARE, transaction.messages) as messages:
            await self._prepare(session, transaction, messages)

    async def _prepare(
        self, session: Session, transaction: Transaction, messages: Sequence[Message]
    ) -> None:
        transaction_id, born_ms = transaction.id, wall_clock_ms()
        encoded_messages = [
            encode_half_message(message, key or session.new_key(), self.group, self.config)
            for message, key in zip_longest(messages, (transaction_id,))
        ]
        failures: list[ClientError] = []
        sending = self._spawn(
            self._store(session, encoded_messages, transaction.order_keys, failures)
        )
        self._open[transaction_id] = transaction
        # Like asyncio.wait, at a third of its cost: the caller may be cancelled, the task not.
        stored = asyncio.get_running_loop().create_future()
        sending.add_done_callback(partial(_wake, stored))
        try:
            await stored
        except asyncio.CancelledError:
            self._spawn(self._abandon(transaction, encoded_messages[0], born_ms, sending))
            raise
        try:
            results = self._results_of(sending)
            transaction.stored(encoded_messages[0], born_ms, results)
        except BaseException:
            del self._open[transaction_id]
            if any(map(outcome_unknown, failures)):  # stored perhaps, and its block will never run
                self._undelivered[transaction_id] = Decision.ROLLBACK
            raise
        if any(map(outcome_unknown, failures)):
            self._uncertain[transaction_id] = transaction.message_id
        status = results[0].status
        if status is not SendStatus.SEND_OK:
            await self.finish(transaction, Decision.ROLLBACK)
            raise HalfNotDurableError(transaction_id, status.name)

    async def _store(
        self,
        session: Session,
        encoded_messages: Sequence[EncodedMessage],
        keys: Sequence[str | None],
        failures: list[ClientError],
    ) -> Sequence[SendResult]:
        if len(encoded_messages) > 1:
            return await prepare_messages(
                session, self.config, self.group, encoded_messages, keys, failures
            )
        code = RequestCode.SEND_MESSAGE_V2
        return [await self._transmit(session, code, encoded_messages[0], keys[0], failures)]

    def _results_of(self, sending: asyncio.Task[Sequence[SendResult]]) -> Sequence[SendResult]:
        if sending.cancelled():  # by close()
            raise ClientClosedError(self._name)
        return sending.result()

    async def finish(self, transaction: Transaction, decision: Decision) -> None:
        """Send the decision, also if the caller is cancelled meanwhile.

        Raises:
            DecisionConflictError: The transaction already has the opposite decision.
        """
        transaction.decision = decision
        if decision is Decision.UNKNOWN:  # nothing is sent; the broker will check
            self._open.pop(transaction.id, None)
            return
        if self.telemetry is None:
            await self._send_decision(transaction, decision)
            return
        operation = COMMIT if decision is Decision.COMMIT else ROLLBACK
        with self.telemetry.settling(operation, transaction.id, transaction.message.topic):
            await self._send_decision(transaction, decision)

    async def _send_decision(self, transaction: Transaction, decision: Decision) -> None:
        ending = transaction.ending(decision, partial(self._on_settled, transaction))
        waiter = ending.waiter = asyncio.get_running_loop().create_future()
        try:
            self._decisions.send(ending)
        except ClientClosedError as error:
            self._on_settled(transaction, ending, None, error)
        await waiter

    async def look_and_finish(self, transaction: Transaction, recordings: Recordings) -> None:
        """Send COMMIT after a normal end, with a ledger only if its row is committed.

        Raises:
            TransactionNotCommittedError: It is not; the broker will check.
            DecisionConflictError: The transaction already has the opposite decision.
        """
        ledger = look_of(self._check_back.checker)
        if ledger is None:
            await self.finish(transaction, Decision.COMMIT)
            return
        found: bool | None = None
        try:
            look = self._check_back.look(ledger, transaction.id)
            found = await self._answer(transaction, look)
        finally:
            await self._finish_if_known(transaction, Decision.COMMIT if found else None)
        if ledger.table not in recordings and not found:
            raise TransactionNotRecordedError(transaction.id)
        if found is False:
            still_open = recordings[ledger.table]
            raise TransactionNotCommittedError(transaction.id, says_open(still_open))

    async def check_and_finish(self, transaction: Transaction) -> None:
        """Call the checker and send its decision; UNKNOWN if the caller is cancelled meanwhile.

        Raises:
            DecisionConflictError: The transaction already has the opposite decision.
        """
        decision: Decision | None = None
        try:
            check = self._check_back.check_own(transaction.as_checked())
            decision = await self._answer(transaction, check)
        finally:
            await self._finish_if_known(transaction, decision)

    async def _finish_if_known(self, transaction: Transaction, decision: Decision | None) -> None:
        if not decision:
            logger.warning("event=transaction_undecided transaction=%s", transaction.id)
        await self.finish(transaction, decision or Decision.UNKNOWN)

    async def _answer(
        self, transaction: Transaction, question: Coroutine[object, object, T]
    ) -> T | None:
        """Return what the database says; None if that takes too long, or the producer is closed.

        The question is a task of its own: close() waits for it, and the caller does not wait while
        a driver cleans up after its cancellation.
        """
        asking = self._spawn(question)
        try:
            done, _ = await asyncio.wait([asking], timeout=self.config.own_check_timeout)
            if not done:
                logger.warning(
                    "event=own_check_timed_out transaction=%s seconds=%g",
                    transaction.id,
                    self.config.own_check_timeout,
                )
            return asking.result() if done and not asking.cancelled() else None
        finally:
            asking.cancel()

    async def _abandon(
        self,
        transaction: Transaction,
        encoded: EncodedMessage,
        born_ms: int,
        sending: asyncio.Task[Sequence[SendResult]],
    ) -> None:
        """Roll back a half message whose sender was cancelled before it was stored."""
        try:
            transaction.stored(encoded, born_ms, await sending)
            await self.finish(transaction, Decision.ROLLBACK)
        except ClientError as error:
            logger.info(
                "event=half_message_abandoned transaction=%s reason=%r",
                encoded.unique_key,
                str(error),
            )
            self._open.pop(encoded.unique_key, None)
            self._undelivered[encoded.unique_key] = Decision.ROLLBACK

    def _on_settled(
        self,
        transaction: Transaction,
        ending: Ending,
        final: str | None,
        error: BaseException | None,
    ) -> None:
        """Update the transaction after its decision was confirmed, rejected, or not delivered."""
        self._open.pop(ending.transaction_id, None)
        reported: BaseException | None = None
        if error is None:
            transaction.decided = True
            transaction.final_message_id = final
        elif isinstance(error, ClientError) and not isinstance(error, DecisionConflictError):
            self._undelivered[ending.transaction_id] = ending.decision
            logger.warning(
                "event=decision_not_delivered transaction=%s decision=%s reason=%r",
                ending.transaction_id,
                ending.decision.name,
                str(error),
            )
        else:
            reported = error
        if ending.waiter is None or ending.waiter.done():
            return  # its caller was cancelled
        if reported is None:
            ending.waiter.set_result(None)
        else:
            ending.waiter.set_exception(reported)

    def _known_decision(self, transaction_id: str, message: MessageView) -> Decision | None:
        """Return the decision if this producer knows it without its checker, else None."""
        session = self._current_session()
        used = self._uncertain.get(transaction_id, message.offset_message_id)
        if session.routes.halfmq and used != message.offset_message_id:
            return Decision.ROLLBACK  # this half is a duplicate of the one that was decided
        transaction = self._open.get(transaction_id)
        if transaction is not None and transaction.running:
            return Decision.UNKNOWN  # its row may exist but not be visible yet
        if transaction is not None and transaction.decision:
            return transaction.decision
        return self._undelivered.get(transaction_id)

    # -- wiring

    def _handlers(self) -> dict[int, ServerRequestHandler]:
        code = RequestCode.CHECK_TRANSACTION_STATE
        return {**super()._handlers(), code: self._check_back.on_check_request}

    async def _start_session(self, session: Session) -> None:
        self._starting, self._check_back.closing = session, False
        self._check_back.telemetry = self.telemetry
        try:
            await session.start(whole_cluster=True, topics=self._topics)
            self._begin_batches()
        finally:
            self._starting = None

    def _current_session(self) -> Session:
        """The session, also during the start: a broker sends checks right after the handshake."""
        return self._starting or self._session

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # if the caller was cancelled, nobody has retrieved it


def _wake(waiter: asyncio.Future[None], _task: asyncio.Task[Any]) -> None:
    if not waiter.done():  # its caller was cancelled
        waiter.set_result(None)
