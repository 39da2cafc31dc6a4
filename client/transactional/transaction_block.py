"""Transaction: the block of one local transaction, and the listener that may run in its place.

What the block's end means for the messages is decided here; ``TransactionProducer`` stores half
messages and sends decisions.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Protocol, Self

from halfmq.store.format.ids import parse_offset_message_id

from ..arguments import OrderKeys, check_kind, check_order_keys
from ..errors import BadAnswerError, ClientError, DecisionConflictError
from ..message import Decision, Message, MessageView, SendResult
from ..net.message_encoding import EncodedMessage
from ..net.session import wall_clock_ms
from .check_back import checked_view
from .decisions import Ending, OnSettled
from .multi_message_prepare import check_messages
from .recorded_transactions import Recordings, begin_recordings, end_recordings

logger = logging.getLogger(__name__)


class Settler(Protocol):
    """The producer of a transaction, which stores its half messages and sends its decision."""

    def new_key(self) -> str:
        """Return a new message key, which is the id of a transaction that it leads."""

    async def prepare(self, transaction: Transaction) -> None:
        """Store the half messages."""

    async def finish(self, transaction: Transaction, decision: Decision) -> None:
        """Send the decision."""

    async def look_and_finish(self, transaction: Transaction, recordings: Recordings) -> None:
        """Send COMMIT, with a ledger only if its row is committed."""

    async def check_and_finish(self, transaction: Transaction) -> None:
        """Call the checker and send its decision."""


class TransactionListener(ABC):
    """The local transaction and its check in one object, like RocketMQ's TransactionListener.

    Either method may be ``async``; a plain one runs in a worker thread, so it may block.
    """

    @abstractmethod
    def execute_local_transaction(
        self, transaction: Transaction, arg: object
    ) -> Decision | Awaitable[Decision]:
        """Run the local transaction for ``transaction.message``, with the id ``transaction.id``."""

    @abstractmethod
    def check_local_transaction(self, message: MessageView) -> Decision | Awaitable[Decision]:
        """Return the outcome of the local transaction of this message."""


class Transaction:
    """One local transaction: its half messages and its decision.

    Created by :meth:`TransactionProducer.transaction`.

    ``async with`` stores the half messages and runs the block. If the block ends normally, the
    transaction is committed; if the checker is that of a :class:`TransactionLedger`, only after a
    look at the row, in a new transaction of the database. After an exception or a cancellation it
    is unknown whether the row was committed, so the producer's checker is called, its decision is
    sent, and the exception propagates. If look or checker take longer than
    ``config.own_check_timeout``, or a cancellation arrives meanwhile, the broker checks later. The
    local transaction must end inside the block. :meth:`rollback` and :meth:`decide` override all
    this, for a block that knows the outcome.

    A normal end of the block raises :class:`TransactionNotCommittedError` if the ledger's row is
    not committed; its subclass :class:`TransactionNotRecordedError` if it was never recorded; and
    :class:`DecisionConflictError` if the transaction was rolled back before.

    It raises nothing, but logs a warning, if the database cannot be asked, or if a COMMIT cannot be
    delivered: the local transaction has committed as far as anybody knows, an error would make the
    program do it again, and the broker will check. ``decided`` is False then.
    """

    def __init__(
        self,
        producer: Settler,
        messages: Message | Sequence[Message],
        order_key: OrderKeys = None,
        *,
        collects: bool = False,
    ) -> None:
        """Create a transaction; nothing is sent before it is entered.

        With ``collects`` it has no messages yet, and ``store`` sends those of ``add``.

        Raises:
            ConfigurationError: ``order_key`` is neither a text nor a list with one per message.
            InvalidMessageError: No message, or too many for one transaction.
        """
        self.messages: tuple[Message, ...] = () if collects else check_messages(messages)
        """The messages that a commit delivers; the first one is the leader, which checkers see."""
        self.order_keys = check_order_keys(order_key, len(self.messages))
        """The order key of each message, or None."""
        self.decision: Decision | None = None
        """The decision, whether it could be sent or not; None while the block or the checker
        runs."""
        self.decided = False
        """Whether the broker confirmed the decision."""
        self.final_message_id: str | None = None
        """The offset id of the (first) message that consumers get; None unless the broker confirmed
        a COMMIT and returned the id, as a halfmq broker does."""
        self.running = True
        """Whether the block may still run; meanwhile the checker is not called."""
        self._producer = producer
        self._encoded: EncodedMessage | None = None
        self._results: Sequence[SendResult] = ()
        self._half_offset = -1
        self._born_ms = self._stored_ms = 0
        self._explicit: Decision | None = None
        self._entered = False
        self.collects = collects
        """Whether :meth:`add` takes messages: in a block that began without any, until it ends."""
        self._id = ""
        self._recordings = Recordings()

    @property
    def id(self) -> str:
        """The transaction id, which checkers see as ``message.transaction_id``."""
        assert self._id, "the id exists once the block has been entered"
        return self._id

    def add(self, message: Message, *, order_key: str | None = None) -> None:
        """Deliver a message if the transaction commits, in a block that began without messages.

        Raises:
            ClientError: The block began with its messages, or has ended.
            ConfigurationError: The order key cannot be used.
            InvalidMessageError: There are 64 already.
        """
        if not self.collects:
            raise ClientError(
                "messages are added in the block of transaction(session=…) without messages"
            )
        messages = check_messages([*self.messages, message])
        self.order_keys = check_order_keys([*self.order_keys, order_key], len(messages))
        self.messages = messages

    @property
    def message(self) -> Message:
        """The message; with several messages, the first one."""
        return self.messages[0]

    @property
    def results(self) -> Sequence[SendResult]:
        """Where the half messages were stored, in the order of ``messages``."""
        assert self._results, "the half messages are stored when the block is entered"
        return self._results

    @property
    def result(self) -> SendResult:
        """Where the (first) half message was stored."""
        return self.results[0]

    @property
    def message_id(self) -> str:
        """The offset id of the half message: what consumers see as ``half_message_id``."""
        return self.result.offset_message_id

    def stored(self, first: EncodedMessage, born_ms: int, results: Sequence[SendResult]) -> None:
        """Set where the half messages are stored; called by the producer.

        ``first`` is the first message.

        Raises:
            BadAnswerError: The broker's answer has no offset, which a decision needs.
        """
        try:
            half = parse_offset_message_id(results[0].offset_message_id)
        except ValueError as error:
            raise BadAnswerError(results[0].queue.broker_name, str(error)) from error
        self._encoded, self._results, self._half_offset = first, results, half.physical_offset
        self._born_ms, self._stored_ms = born_ms, wall_clock_ms()
        self._recordings = begin_recordings(self.id)

    def as_checked(self) -> MessageView:
        """Return the message in the form that checkers get; called by the producer."""
        assert self._encoded is not None, "only a stored transaction is checked"
        halves = len(self.messages)
        return checked_view(self._encoded, self.result, halves, self._born_ms, self._stored_ms)

    def ending(self, decision: Decision, on_settled: OnSettled) -> Ending:
        """Return the decision in the form that is sent; called by the producer."""
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

    @property
    def chosen(self) -> Decision | None:
        """What :meth:`decide` or :meth:`rollback` has set; None: the end of the block decides."""
        return self._explicit

    def decide(self, decision: Decision) -> None:
        """Set the decision, however the block ends. UNKNOWN leaves it to the broker's check.

        Raises:
            ConfigurationError: ``decision`` is not a Decision.
        """
        check_kind("decision", decision, Decision)
        self._explicit = decision

    def take_outcome(self, outcome: Decision) -> None:
        """Set what a listener has decided; its COMMIT counts as a normal end of a block."""
        self._explicit = None if outcome is Decision.COMMIT else outcome

    def rollback(self) -> None:
        """Set the decision to ROLLBACK, however the block ends, without calling the checker.

        For a block that knows that its row was not committed and never will be: roll back the
        database transaction first.
        """
        self.decide(Decision.ROLLBACK)

    async def abandon(self) -> None:
        """Roll back half messages whose block will never run; called by the blocking client."""
        if self._encoded is not None and self.decision is None:
            await self._producer.finish(self, Decision.ROLLBACK)

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ClientError("a transaction can be entered only once")
        self._entered = True
        self._id = self._producer.new_key()
        if not self.collects:
            await self._producer.prepare(self)
        return self

    async def store(self) -> None:
        """Store the half messages that the block has added, if any; it can add no more.

        Raises:
            ClientError: Of :meth:`TransactionProducer.transaction`; the broker has none of them.
        """
        self.collects = False
        if self.messages and self._encoded is None:
            await self._producer.prepare(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running = self.collects = False
        if self._encoded is None:
            return  # the block has added no message, or its database transaction was rolled back
        end_recordings(self.id)
        if isinstance(error, GeneratorExit):
            # A coroutine that is being closed must not await anything: the broker will check.
            self.decision = Decision.UNKNOWN
            return
        try:
            if self._explicit is not None:
                await self._producer.finish(self, self._explicit)
            elif error is None:
                await self._producer.look_and_finish(self, self._recordings)
            else:
                self._recordings.clear()  # they hold connections, whose locks would stop the check
                await self._producer.check_and_finish(self)
        except DecisionConflictError:
            if error is None:
                raise
            logger.exception("event=decision_refused transaction=%s", self.id)
        finally:
            self._recordings.clear()

    def __repr__(self) -> str:
        return f"<Transaction {self._id or None} decision={self.decision} decided={self.decided}>"
