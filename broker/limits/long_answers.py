"""Answers with many items, collected over several turns of the event loop by a few connections."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import msgspec

from halfmq.remoting.command import RemotingCommand
from halfmq.store.files.page_cache import NotInMemoryError

from ..errors import UnfinishedError
from ..loop.slices import Slice
from ..ports import Connection
from .kept import LONG_ANSWERS

T = TypeVar("T")
R = TypeVar("R")

Work = Generator[NotInMemoryError | None, None, T]
"""Steps of a work, and its result. A step may be an error: bytes that are to be read first."""


class LongAnswers:
    """The connections that collect one; others wait, so that their results are not all kept."""

    def __init__(self) -> None:
        self._collecting: set[Connection] = set()
        self._waiting: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._collecting)

    def begin(self, connection: Connection) -> None:
        """Do nothing, unless the answer has waited and others still take all places.

        Raises:
            UnfinishedError: Serve the request again when another answer is complete.
        """
        if connection.unfinished is self and len(self) >= LONG_ANSWERS.most:
            raise UnfinishedError(self._waiting.append)

    def next_turn(self, connection: Connection) -> UnfinishedError:
        """Return the error that has an answer continued in the next turn.

        If too many are collected already, it begins anew when another one is complete.
        """
        if connection not in self._collecting and len(self) >= LONG_ANSWERS.most:
            connection.unfinished = self
            return UnfinishedError(self._waiting.append)
        self._collecting.add(connection)
        return UnfinishedError()

    def end(self, connection: Connection) -> None:
        """Let others begin: the answer is complete, or given up."""
        if connection in self._collecting:
            self._collecting.discard(connection)
            connection.unfinished = None
            waiting, self._waiting = self._waiting, []
            for resume in waiting:  # all of them: those of closed connections begin nothing
                resume()


class _Progress(msgspec.Struct):
    """The stages of an answer: the items of each, and the results so far."""

    request: RemotingCommand
    stages: dict[int, tuple[Sequence[Any], list[Any]]] = msgspec.field(default_factory=dict)


class _Work(msgspec.Struct):
    """The work that one answer needs."""

    request: RemotingCommand
    steps: Work[Any]


def complete(request: RemotingCommand, connection: Connection, work: Callable[[], Work[T]]) -> T:
    """Return the result of the work that an answer needs; ``work`` is called once per request.

    Raises:
        NotInMemoryError: Serve the request again when these bytes are in memory.
        UnfinishedError: One turn of the loop is not enough. Serve the request again in the next.
    """
    connection.long_answers.begin(connection)
    progress = connection.unfinished
    if not isinstance(progress, _Work) or progress.request is not request:
        progress = connection.unfinished = _Work(request, work())
    turn = Slice()
    while True:
        try:
            missing = next(progress.steps)
        except StopIteration as end:
            _end(connection)
            return cast("T", end.value)
        except BaseException:
            _end(connection)
            raise
        if missing is not None:
            raise missing
        if turn.is_over:
            raise connection.long_answers.next_turn(connection)


def take_turn(request: RemotingCommand, connection: Connection) -> None:
    """Have a request of some milliseconds served in a turn: hundreds may come in one pass.

    Raises:
        UnfinishedError: Serve it again in the next turn.
    """
    if connection.unfinished is not request:
        connection.unfinished = request
        raise UnfinishedError
    connection.unfinished = None


def collect(
    request: RemotingCommand,
    connection: Connection,
    items: Callable[[], Sequence[T]],
    result_of: Callable[[T], R],
    *,
    stage: int = 0,
    is_last: bool = True,
) -> list[R]:
    """Return the result of each item, in order; ``items`` is called once per request.

    An answer may need several calls. It numbers them as stages and sets ``is_last`` for one, after
    which the connection keeps no more results.

    Raises:
        NotInMemoryError: ``result_of`` needs bytes that are not in memory. Serve the request again
            when they are.
        UnfinishedError: One turn of the loop is not enough. Serve the request again in the next.
    """
    connection.long_answers.begin(connection)
    progress = connection.unfinished
    if not isinstance(progress, _Progress) or progress.request is not request:
        progress = connection.unfinished = _Progress(request)
    if stage not in progress.stages:
        progress.stages[stage] = items(), []
    all_items, results = progress.stages[stage]
    turn = Slice()
    for number, item in enumerate(all_items[len(results) :]):
        if number and turn.is_over:
            raise connection.long_answers.next_turn(connection)
        results.append(result_of(item))
    if is_last:
        _end(connection)
    return results


def _end(connection: Connection) -> None:
    connection.unfinished = None
    connection.long_answers.end(connection)
