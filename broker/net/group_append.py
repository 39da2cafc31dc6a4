"""Appends of one pass of the event loop, made as one group.

Most of what an append costs, it costs however many records it takes: a system call under
SYNC_FLUSH, and the way through the layers of the store. So a handler that knows what it will append
only *stages* it; at the end of the pass, when all readable sockets were served, everything staged
is appended at once, in the order in which it came, and each record's answer is given. A batch is a
group by itself and appended where it comes, but its answer, too, leaves at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, cast

from halfmq.remoting.codes import FLAG_ONE_WAY
from halfmq.remoting.command import RemotingCommand
from halfmq.store.errors import StoreError
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ..ports import Connection, Handler

logger = logging.getLogger(__name__)

GROUP_MAX: Final = 1_024
"""Records staged before they are appended at once: a few milliseconds of work."""

LATE_BYTES_MAX: Final = 1 << 20
"""Bytes of replies kept for the end of a pass; beyond, they are written at once. More than batches
of all producers of a busy broker get in one pass: bounds what one that reads nothing has kept."""


class Staged(Protocol):
    """A record to append, and what follows from it."""

    @property
    def draft(self) -> AppendRequest: ...

    @property
    def request(self) -> RemotingCommand: ...

    @property
    def connection(self) -> Connection: ...

    def appended(self, one: AppendResult) -> bytes | None:
        """Take note of it; return a reply that need not wait for the disk."""
        ...

    def refused(self) -> None:
        """Forget it: the group could not be appended, and the request is served alone."""
        ...


class StagedSeveral(Protocol):
    """Records to append side by side, and what follows from them."""

    @property
    def drafts(self) -> Sequence[AppendRequest]: ...

    @property
    def request(self) -> RemotingCommand: ...

    @property
    def connection(self) -> Connection: ...

    def appended(self, several: Sequence[AppendResult]) -> bytes | None:
        """Take note of them; return a reply that need not wait for the disk."""
        ...

    def refused(self) -> None:
        """Forget them: the group could not be appended, and the request is served alone."""
        ...


class Log(Protocol):
    """What this needs of the store."""

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]: ...


def _call_soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


class GroupAppend:
    """Collects staged records and appends them together."""

    def __init__(
        self, log: Log, *, call_soon: Callable[[Callable[[], None]], object] = _call_soon
    ) -> None:
        """`call_soon` has a function called at the end of this pass of the event loop."""
        self._append = log.append
        self._call_soon = call_soon
        self._staged: list[tuple[Staged, Handler]] = []
        self._several: dict[int, StagedSeveral] = {}  # those among `_staged`, by place
        self._records_of_several = 0
        self._late: dict[Connection, list[bytes]] = {}
        self._late_bytes = 0

    def stage(self, staged: Staged, alone: Handler) -> None:
        """Append the record at the end of this pass; `alone` serves its request if that fails.

        `alone` must not stage anything, and must not raise.
        """
        waiting = self._staged
        waiting.append((staged, alone))
        if len(waiting) == 1:
            self._call_soon(self.append_staged)
        elif len(waiting) >= GROUP_MAX:
            self.append_staged()

    def stage_several(self, staged: StagedSeveral, alone: Handler) -> None:
        """Append records side by side at the end of this pass; otherwise as `stage`."""
        waiting = self._staged
        self._several[len(waiting)] = staged
        self._records_of_several += len(staged.drafts)
        waiting.append((cast("Staged", staged), alone))
        if len(waiting) == 1:
            self._call_soon(self.append_staged)
        if len(waiting) + self._records_of_several > GROUP_MAX:
            self.append_staged()

    def append_staged(self) -> None:
        """Append what is staged now; nothing happens if nothing is."""
        group, self._staged = self._staged, []
        if not group:
            return
        try:
            if self._several:
                appended = self._append_with_several(group)
            else:
                appended = self._append([staged.draft for staged, _ in group])
        except Exception as error:  # whatever it is, each of them is owed an answer
            if not isinstance(error, StoreError):
                logger.exception("event=group_failed records=%d", len(group))
            _serve_alone(group)
            return
        replies: dict[Connection, list[bytes]] = {}
        for (staged, _), one in zip(group, appended, strict=True):
            try:
                reply = staged.appended(one)
            except Exception:  # of one request; the others are in the log and want their answers
                logger.exception("event=staged_failed appended=%r", one)
                continue
            if reply is not None:
                connection = staged.connection
                ready = replies.get(connection)
                if ready is None:
                    replies[connection] = [reply]
                else:
                    ready.append(reply)
        _write(replies)

    def reply_after_pass(self, connection: Connection, reply: bytes) -> None:
        """Write a reply when all readable sockets were served.

        A reply wakes its receiver, to whom the system may give the processor of this loop at once:
        better when the loop has nothing left to do, and once for the replies to all.
        """
        if not self._late:
            self._call_soon(self._write_late)
        self._late.setdefault(connection, []).append(reply)
        self._late_bytes += len(reply)
        if self._late_bytes > LATE_BYTES_MAX:
            self._write_late()

    def _write_late(self) -> None:
        late, self._late, self._late_bytes = self._late, {}, 0
        _write(late)

    def _append_with_several(self, group: Sequence[tuple[Staged, Handler]]) -> list[AppendResult]:
        """Append a group; return per request where its record lies, or a list of such places."""
        places, self._several, self._records_of_several = self._several, {}, 0
        drafts: list[AppendRequest] = []
        for place, (staged, _) in enumerate(group):
            several = places.get(place)
            if several is None:
                drafts.append(staged.draft)
            else:
                drafts += several.drafts
        appended = self._append(drafts)
        results: list[AppendResult | list[AppendResult]] = []
        at = 0
        for place in range(len(group)):
            several = places.get(place)
            count = 1 if several is None else len(several.drafts)
            results.append(appended[at] if several is None else appended[at : at + count])
            at += count
        return cast("list[AppendResult]", results)


def _write(replies: Mapping[Connection, Sequence[bytes]]) -> None:
    for connection, ready in replies.items():
        connection.write(ready[0] if len(ready) == 1 else b"".join(ready))


def _serve_alone(group: Sequence[tuple[Staged, Handler]]) -> None:
    """Give each request of a failed group what it deserves by itself: one may be at fault."""
    for staged, _ in group:
        staged.refused()
    for staged, alone in group:
        reply = alone(staged.request, staged.connection)
        if reply is not None and not staged.request.flag & FLAG_ONE_WAY:
            staged.connection.write(reply)
