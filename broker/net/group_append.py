"""Appends of one pass of the event loop, combined into one group.

Most of the cost of an append does not depend on the number of records: a system call under
SYNC_FLUSH, and the calls through the layers of the store. So a handler only *stages* its records.
At the end of the pass, after all readable sockets were served, everything staged is appended at
once, in order of arrival, and each request is answered. A batch is a group of its own and is
appended immediately.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from attrs import define

from halfmq.remoting.command import RemotingCommand
from halfmq.store.errors import StoreError
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.message_store import MessageStore

from ..ports import Connection, Handler
from .router import serve

logger = logging.getLogger(__name__)

GROUP_MAX: Final = 1_024
"""Staged records that are appended without waiting for the end of the pass: a few milliseconds of
work."""


class Staged(Protocol):
    """Records to append next to each other, and how their request is answered."""

    @property
    def requests(self) -> Sequence[AppendRequest]: ...

    @property
    def command(self) -> RemotingCommand: ...

    @property
    def connection(self) -> Connection: ...

    def appended(self, results: Sequence[AppendResult]) -> None:
        """Process the results, one for each record, and answer the request."""
        ...

    def abandoned(self) -> None:
        """Undo the staging: the group could not be appended, and the request is served alone."""
        ...


@define(eq=False, repr=False, slots=False)
class GroupAppend:
    """Collects staged records and appends them together."""

    _log: MessageStore
    # Schedules a function for the end of this pass of the loop.
    _call_soon: Callable[[Callable[[], None]], object]

    def __attrs_post_init__(self) -> None:
        self._append = self._log.append
        self._staged: list[tuple[Staged, Handler]] = []
        self._requests: list[AppendRequest] = []  # of all that is staged

    def stage(self, staged: Staged, alone: Handler) -> None:
        """Append records at the end of this pass; if that fails, `alone` serves their request.

        `alone` must append by itself instead of staging.
        """
        waiting = self._staged
        waiting.append((staged, alone))
        self._requests += staged.requests
        if len(waiting) == 1:
            self._call_soon(self.append_staged)
        if len(self._requests) >= GROUP_MAX:
            self.append_staged()

    def append_staged(self) -> None:
        if not self._staged:
            return
        group, self._staged = self._staged, []
        requests, self._requests = self._requests, []
        try:
            results = self._append(requests)
        except Exception as error:  # each request must be answered
            if not isinstance(error, StoreError):
                logger.exception("event=group_failed records=%d", len(requests))
            _serve_alone(group)
        else:
            _answer(group, results)


def _answer(group: Sequence[tuple[Staged, Handler]], results: Sequence[AppendResult]) -> None:
    start = 0
    for staged, _ in group:
        end = start + len(staged.requests)
        try:
            staged.appended(results[start:end])
        except Exception:  # the other records are in the log, and their requests need answers
            logger.exception("event=staged_failed appended=%r", results[start:end])
        start = end


def _serve_alone(group: Sequence[tuple[Staged, Handler]]) -> None:
    """Serve each request of a failed group by itself: perhaps only one of them is at fault."""
    for staged, _ in group:
        staged.abandoned()
    for staged, alone in group:
        serve(alone, staged.command, staged.connection)
