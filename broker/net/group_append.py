"""Appends of one pass of the event loop, combined into one group.

Most of the cost of an append does not depend on the number of records: a system call under
SYNC_FLUSH, and the calls through the layers of the store. So a handler only *stages* its records;
at the end of the pass, after all readable sockets were served, everything staged is appended at
once, in its order of arrival, and each request is answered. A batch is a group by itself and
appended immediately, but its answer is sent at the end of the pass as well.
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
"""Bytes of replies kept for the end of a pass; beyond, they are written at once. Batches of all
producers of a busy broker get less in one pass: this bounds memory for a peer that does not
read."""


class Staged(Protocol):
    """A record to append, and how its request is answered."""

    @property
    def draft(self) -> AppendRequest: ...

    @property
    def request(self) -> RemotingCommand: ...

    @property
    def connection(self) -> Connection: ...

    def appended(self, one: AppendResult) -> bytes | None:
        """Process the result; return a reply that need not wait for the disk."""
        ...

    def refused(self) -> None:
        """Drop the record: the group could not be appended, and the request is served alone."""
        ...


class StagedSeveral(Protocol):
    """Records to append contiguously, and how their request is answered."""

    @property
    def drafts(self) -> Sequence[AppendRequest]: ...

    @property
    def request(self) -> RemotingCommand: ...

    @property
    def connection(self) -> Connection: ...

    def appended(self, several: Sequence[AppendResult]) -> bytes | None:
        """Process the results; return a reply that need not wait for the disk."""
        ...

    def refused(self) -> None:
        """Drop the records: the group could not be appended, and the request is served alone."""
        ...


class Log(Protocol):
    """The part of the store that a group is appended to."""

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
        """`call_soon` schedules a function for the end of this pass of the event loop."""
        self._append = log.append
        self._call_soon = call_soon
        self._staged: list[tuple[Staged, Handler]] = []
        self._several: dict[int, StagedSeveral] = {}  # those among `_staged`, by index
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
        """Append records contiguously at the end of this pass; otherwise the same as `stage`."""
        waiting = self._staged
        self._several[len(waiting)] = staged
        self._records_of_several += len(staged.drafts)
        waiting.append((cast("Staged", staged), alone))
        if len(waiting) == 1:
            self._call_soon(self.append_staged)
        if len(waiting) + self._records_of_several > GROUP_MAX:
            self.append_staged()

    def append_staged(self) -> None:
        """Append all staged records now, if there are any."""
        group, self._staged = self._staged, []
        if not group:
            return
        try:
            if self._several:
                appended = self._append_with_several(group)
            else:
                appended = self._append([staged.draft for staged, _ in group])
        except Exception as error:  # each request must be answered
            if not isinstance(error, StoreError):
                logger.exception("event=group_failed records=%d", len(group))
            _serve_alone(group)
            return
        replies: dict[Connection, list[bytes]] = {}
        for (staged, _), one in zip(group, appended, strict=True):
            try:
                reply = staged.appended(one)
            except Exception:  # the other records are in the log, and need answers
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
        """Write a reply after all readable sockets were served.

        A reply wakes its receiver, and the scheduler may run it at once instead of this loop. So
        the replies to all peers are written together, when the loop has nothing left to do.
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
        """Append a group; return per request its append result, or a list of results."""
        by_index, self._several, self._records_of_several = self._several, {}, 0
        drafts: list[AppendRequest] = []
        for index, (staged, _) in enumerate(group):
            several = by_index.get(index)
            if several is None:
                drafts.append(staged.draft)
            else:
                drafts += several.drafts
        appended = self._append(drafts)
        results: list[AppendResult | list[AppendResult]] = []
        at = 0
        for index in range(len(group)):
            several = by_index.get(index)
            count = 1 if several is None else len(several.drafts)
            results.append(appended[at] if several is None else appended[at : at + count])
            at += count
        return cast("list[AppendResult]", results)


def _write(replies: Mapping[Connection, Sequence[bytes]]) -> None:
    for connection, ready in replies.items():
        connection.write(ready[0] if len(ready) == 1 else b"".join(ready))


def _serve_alone(group: Sequence[tuple[Staged, Handler]]) -> None:
    """Serve each request of a failed group by itself: only one may be at fault."""
    for staged, _ in group:
        staged.refused()
    for staged, alone in group:
        reply = alone(staged.request, staged.connection)
        if reply is not None and not staged.request.flag & FLAG_ONE_WAY:
            staged.connection.write(reply)
