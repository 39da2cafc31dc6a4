"""A database transaction that halfmq begins and commits, around the user's block.

The order is: half message, BEGIN, ledger row, the block, flush, a look at the ledger row by its
key, COMMIT, decision. Messages that the block adds are prepared after the flush. The look is the
last statement before COMMIT: it fails, or finds nothing, if a statement of the block has failed
unseen, or if a savepoint took the row with it.

* What is raised before COMMIT is sent rolls back, and decides ROLLBACK: nobody else commits.
* What is raised by COMMIT, and a cancellation from there on, leaves it open whether the row is
  committed. The producer's checker decides, as at the end of any block.
* If the block has ended the transaction itself, or the driver does not tell whether it has, the row
  decides too: by a look after a normal end, by the checker after an error. What the block did after
  a commit of its own is committed when the look has found the row, or else rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from contextvars import ContextVar
from operator import methodcaller
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..errors import TransactionNotCommittedError
from ..message import Decision
from .databases import Database, check_blocking, check_ownable, run_blocking
from .recorded_transactions import StillOpen, says_open

if TYPE_CHECKING:
    from .transaction_block import Transaction

Work = Callable[[Database], Coroutine[Any, Any, Any]]

_flush: Final[Work] = methodcaller("flush")
_commit: Final[Work] = methodcaller("commit")
_roll_back: Final[Work] = methodcaller("rollback")


OPEN: Final[ContextVar[Transaction | None]] = ContextVar("halfmq_transaction", default=None)
"""The transaction of the block that runs in this context."""


class OwnedTransaction(AbstractAsyncContextManager["Transaction"]):
    """Enters and exits both transactions; the same code for blocking and asynchronous drivers."""

    def __init__(
        self,
        half: Transaction,
        ledger: Any,
        session: object,
        *,
        enter: Callable[[], Awaitable[object]],
        store: Callable[[], Awaitable[object]],
        leave: Callable[..., Awaitable[object]],
        run: Callable[[Work], Awaitable[Any]],
    ) -> None:
        """Refuse a session that cannot be owned; nothing is sent.

        Args:
            half: The half message.
            ledger: The ``TransactionLedger``, whose row proves the database transaction.
            session: The user's session or connection.
            enter: Stores the half messages that are given already.
            store: Stores those that the block has added.
            leave: Sends the decision: ``__aexit__`` of the half's context manager.
            run: Runs statements in the session.

        Raises:
            ConfigurationError: The session has a transaction already, perhaps somebody else's, or
                several engines.
        """
        check_ownable(session, "leave out session= and record in the ledger")
        self._half, self._ledger = half, ledger
        self._enter, self._store, self._leave, self._run = enter, store, leave, run
        self._still_open: StillOpen = lambda: False
        self._driver_tells = False
        self._outer: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        """Store the half message, begin, and insert the ledger's row."""
        await self._enter()
        try:
            await self._run(self._begin)
        except BaseException as error:
            self._half.decide(Decision.ROLLBACK)
            await self._leave(type(error), error, error.__traceback__)
            raise
        self._outer = OPEN.get()  # of another session
        OPEN.set(self._half)
        return self._half

    async def _begin(self, database: Database) -> None:
        await database.begin()
        try:
            await self._ledger.insert_row(self._half.id, database)
            self._still_open = database.transaction_watch()
            self._driver_tells = says_open(self._still_open)
        except BaseException:
            with suppress(Exception):
                await database.rollback()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit or roll back, and send the decision.

        Raises:
            TransactionNotCommittedError: The row is not in the transaction; it is rolled back.
        """
        OPEN.set(self._outer)
        ended_by_block = self._driver_tells and not says_open(self._still_open)
        if isinstance(error, GeneratorExit):
            await self._leave(kind, error, trace)
            return
        if ended_by_block:
            await self._store()
            await self._leave_ended(kind, error, trace)
            return
        failure = error
        if failure is None and self._half.chosen is not Decision.ROLLBACK:
            failure = await self._failure_before_commit()
        if failure is not None or self._half.chosen is Decision.ROLLBACK:
            await self._roll_back(failure)
            if failure is not error and failure is not None:
                raise failure
            return
        try:
            await self._run(_commit)
        except BaseException as unknown:
            with suppress(Exception):
                await self._run(_roll_back)
            await self._leave(type(unknown), unknown, unknown.__traceback__)
            raise
        if self._half.chosen is None:
            self._half.decide(Decision.COMMIT)
        await self._leave(None, None, None)

    async def _leave_ended(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the row decide; then end what the block has begun after its own COMMIT."""
        try:
            await self._leave(kind, error, trace)
            if error is None and self._half.decision is Decision.COMMIT:
                await self._run(_commit)
        finally:
            with suppress(Exception):
                await self._run(_roll_back)  # if it is still there

    async def _failure_before_commit(self) -> BaseException | None:
        """Return why the transaction must not be committed; None if it may be."""
        try:
            await self._run(_flush)
            await self._store()
            if not await self._run(self._look):
                return TransactionNotCommittedError(self._half.id, still_open=False)
        except BaseException as failure:  # noqa: BLE001 -- raised when all is rolled back
            return failure
        return None

    async def _look(self, database: Database) -> bool:
        found: bool = await self._ledger.has_row(self._half.id, database)
        return found

    async def _roll_back(self, failure: BaseException | None) -> None:
        """Roll back; decide ROLLBACK if the driver tells that this ended the block's work."""
        may_decide = self._driver_tells
        try:
            await self._run(_roll_back)
        except BaseException:  # noqa: BLE001 -- the connection is lost: the checker decides
            may_decide = False
        if may_decide:
            self._half.decide(Decision.ROLLBACK)
        trace = None if failure is None else failure.__traceback__
        await self._leave(None if failure is None else type(failure), failure, trace)


class BlockingOwnedBlock(AbstractContextManager["Transaction"]):
    """The context manager of a transaction whose blocking session the producer owns."""

    def __init__(self, block: Any, ledger: Any, session: object) -> None:
        """``block`` is a ``BlockingTransaction``. Raises what `OwnedTransaction` raises."""
        check_blocking(session, "`halfmq.client.TransactionProducer`, the asynchronous one")

        async def enter() -> None:
            block.__enter__()

        async def store() -> None:
            block.store()

        async def leave(*error: Any) -> None:
            block.__exit__(*error)

        async def run(work: Work) -> Any:
            return ledger.run_blocking_work(session, work, "")

        self._owned = OwnedTransaction(
            block.transaction, ledger, session, enter=enter, store=store, leave=leave, run=run
        )

    def __enter__(self) -> Transaction:
        return run_blocking(self._owned.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run_blocking(self._owned.__aexit__(kind, error, trace))
