"""The users' database: written by local transactions, read by checkers.

It is outside of all processes, atomic, and never loses a commit. A local transaction inserts a row
under its key and commits; from the insert on, the key is locked. A lookup inserts a tombstone under
the same key, unless a row exists: so a later local transaction fails. The documentation asks users
to do so, and with it *row ⇔ message* must hold.

A statement that was sent is executed, even if the task that waits for it is cancelled: its thread
continues. Only the death of the process ends it, and then the database rolls back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from halfmq.client import Decision

from .scenario import ROW, TOMBSTONE

if TYPE_CHECKING:
    from .loop import Process
    from .world import World

STATEMENT_S_MAX: Final = 0.01
"""How long a statement, or its answer, is under way."""
COMMIT_S_MAX: Final = 3.0
"""How long a commit may take, at times: longer than a lookup waits for its key."""
LOCK_S: Final = 1.0
"""How long a lookup waits for a key that is locked."""
LOCK_RETRY_S: Final = 0.02


class Ledger:
    """The table in which transactions insert their rows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._locked: dict[str, None] = {}

    async def save(self, key: str) -> bool:
        """Insert the row of a transaction and commit; return False if there is a tombstone."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        world = self._world
        world.later(self._soon(), self._insert, key, answer, world.loop.process)
        return await answer

    def _soon(self) -> float:
        return self._world.chance.random() * STATEMENT_S_MAX

    def _insert(self, key: str, answer: asyncio.Future[bool], process: Process) -> None:
        world = self._world
        if key in world.records.ledger:
            self._reply(process, answer, saved=False)
            return
        self._locked[key] = None
        longest = COMMIT_S_MAX if world.chance.random() < 0.05 else STATEMENT_S_MAX
        sent = 0.0 if process.dead else world.chance.random() * longest
        world.later(sent, self._commit, key, answer, process)

    def _commit(self, key: str, answer: asyncio.Future[bool], process: Process) -> None:
        world = self._world
        del self._locked[key]
        committed = not process.dead
        if committed:
            world.records.ledger[key] = ROW
            world.records.attempts[key].row_at = world.loop.now
        world.loop.record_event("row", key, committed)
        self._reply(process, answer, saved=True)

    def _reply(self, process: Process, answer: asyncio.Future[bool], *, saved: bool) -> None:
        if not process.dead:
            process.call_at(self._world.loop.now + self._soon(), _answer, answer, saved)

    async def look_up(self, key: str) -> Decision:
        """Return the decision about a transaction; UNKNOWN while its row is locked."""
        clock = asyncio.get_running_loop().time
        end = clock() + LOCK_S
        while key in self._locked:
            if clock() >= end:
                return Decision.UNKNOWN
            await asyncio.sleep(LOCK_RETRY_S)
        return self.fence(key)

    def fence(self, key: str) -> Decision:
        """Say whether there is a row; fenced, none now means that none will be.

        Without the fence a row may come later, and its COMMIT be refused: no broker can help that.
        The broker's answers must hold in that case as well.
        """
        ledger = self._world.records.ledger
        if self._world.scenario.fenced:
            ledger.setdefault(key, TOMBSTONE)
        row = ledger.get(key)
        self._world.loop.record_event("looked up", key, row)
        return Decision.COMMIT if row == ROW else Decision.ROLLBACK


def _answer(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
