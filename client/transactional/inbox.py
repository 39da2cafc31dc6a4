"""Inbox: a table of processed messages, so that each is processed once.

Messages are delivered at least once. A consumer that inserts a message's ``inbox_id`` in the local
transaction that does its work notices a second delivery: the primary key refuses the row. A second
delivery at the same time waits for the first one's transaction.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from operator import methodcaller
from typing import Any

from ..arguments import check_text
from ..errors import AlreadyProcessedError, AutocommitError, ClientError
from ..message import ReceivedMessage
from .database_table import DatabaseTable, Target, host_ms
from .databases import (
    Database,
    check_blocking,
    check_ownable,
    clock_of,
    is_duplicate,
    run_blocking,
)


class Inbox(DatabaseTable):
    """The messages that a consumer group has processed.

    ::

        inbox = Inbox("shipping")

        for message in consumer:
            with suppress(AlreadyProcessedError), database:
                inbox.record(database, message)
                database.execute("insert into parcels …")
            message.ack()

    Groups that share a database may share the table. ``prune`` deletes the group's old rows: a
    message that comes again after its row is gone is processed again. Use :meth:`record` with the
    same connections and sessions as ``TransactionLedger.record``.
    """

    def __init__(
        self, group: str, table: str = "halfmq_inbox", *, paramstyle: str | None = None
    ) -> None:
        """Create an inbox for a consumer group; nothing is executed yet.

        Args:
            group: The consumer group: other groups process the same messages, too.
            table: Its table, with a schema if necessary.
            paramstyle: As of ``TransactionLedger``.

        Raises:
            ConfigurationError: The table's name needs quoting, or the paramstyle is unknown.
        """
        check_text("group", group)
        super().__init__(table, paramstyle)
        self._group = group

    @property
    def create_statement(self) -> str:
        """The statement that creates the table if it is missing, for migrations."""
        return self._sql(
            "create table if not exists TABLE (consumer_group varchar(255) not null, "
            "id char(32) not null, recorded_at bigint not null, primary key (consumer_group, id))"
        )

    def record(self, target: Target, message: ReceivedMessage) -> None:
        """Insert the message in the local transaction that does its work, as its first statement.

        Raises:
            AlreadyProcessedError: It was processed before: roll back, and acknowledge it.
            AutocommitError: No transaction is open, so the row would be committed by itself.
            ConfigurationError: ``target`` is asynchronous.
        """
        self.run_blocking_work(
            target, partial(self._record, message), "`await inbox.record_async(…)`"
        )

    async def record_async(self, target: object, message: ReceivedMessage) -> None:
        """As :meth:`record`, for asynchronous sessions and connections."""
        await self.run_async(target, partial(self._record, message))

    @asynccontextmanager
    async def processing(
        self,
        session: object,
        message: ReceivedMessage,
        acknowledge: Callable[[], Awaitable[object]],
        run: Callable[[Callable[[Database], Coroutine[Any, Any, None]]], Awaitable[None]],
    ) -> AsyncGenerator[None]:
        """Process a message in a transaction that is begun and committed here.

        See ``halfmq.client.Consumer.inbox``. ``run`` runs statements in the session.
        """
        check_ownable(session, "call inbox.record() in its transaction")
        try:
            await run(partial(self._begin, message))
        except AlreadyProcessedError:
            await acknowledge()
            raise
        try:
            yield
            await run(partial(self._commit, message))
        except BaseException:
            with suppress(Exception):
                await run(methodcaller("rollback"))
            raise
        await acknowledge()

    @contextmanager
    def processing_blocking(
        self, session: Target, message: ReceivedMessage, acknowledge: Callable[[], object]
    ) -> Generator[None]:
        """As :meth:`processing`, for blocking sessions and connections."""
        check_blocking(session, "`halfmq.client.Consumer`, the asynchronous one")

        async def run(work: Callable[[Database], Coroutine[Any, Any, None]]) -> None:
            self.run_blocking_work(session, work, "")

        async def done() -> None:
            acknowledge()

        block = self.processing(session, message, done, run)
        run_blocking(block.__aenter__())
        try:
            yield
        except BaseException as error:
            run_blocking(block.__aexit__(type(error), error, error.__traceback__))
            raise
        run_blocking(block.__aexit__(None, None, None))

    async def _begin(self, message: ReceivedMessage, database: Database) -> None:
        await database.begin()
        try:
            await self._record(message, database)
        except BaseException:
            with suppress(Exception):
                await database.rollback()
            raise

    async def _record(self, message: ReceivedMessage, database: Database) -> None:
        if await database.autocommits():
            raise AutocommitError(message.inbox_id)
        clock = clock_of(database)
        insert = "insert into TABLE (consumer_group, id, recorded_at) values ({}, {}, NOW)"
        values = (self._group, message.inbox_id, *([] if clock else [host_ms()]))
        try:
            await database.execute(self._sql(insert, clock), *values)
        except Exception as error:
            if is_duplicate(error):
                raise AlreadyProcessedError(self._group, message.inbox_id) from error
            raise

    async def _commit(self, message: ReceivedMessage, database: Database) -> None:
        """Commit if the row is there; `owned_transaction` says what may have taken it."""
        await database.flush()
        select = "select id from TABLE where consumer_group = {} and id = {}"
        if not await database.fetch(self._sql(select), self._group, message.inbox_id):
            raise ClientError(
                f"the inbox has lost the row of message {message.inbox_id}: the transaction was "
                "rolled back in the block, and the message will come again"
            )
        await database.commit()

    async def _prune(self, age_ms: int, database: Database) -> int:
        clock = clock_of(database)
        delete = "delete from TABLE where consumer_group = {} and recorded_at < NOW - {}"
        values = (*([] if clock else [host_ms()]), age_ms)
        pruned = await database.execute(self._sql(delete, clock), self._group, *values)
        await database.commit()
        return pruned
