"""Answers with many items, collected over several turns of the event loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from halfmq.remoting.command import RemotingCommand

from ...errors import UnfinishedError
from ...loop.slices import Slice
from ...ports import Connection

T = TypeVar("T")
R = TypeVar("R")


class _Progress(msgspec.Struct):
    """The stages of an answer: the items of each, and the results so far."""

    request: RemotingCommand
    stages: dict[int, tuple[Sequence[Any], list[Any]]] = msgspec.field(default_factory=dict)


class _Work(msgspec.Struct):
    """The work that one answer needs."""

    request: RemotingCommand
    steps: Iterator[object]


def complete(
    request: RemotingCommand, connection: Connection, work: Callable[[], Iterator[object]]
) -> None:
    """Do the work that an answer needs; ``work`` is called once per request.

    Raises:
        UnfinishedError: One turn of the loop is not enough. Serve the request again in the next.
    """
    progress = connection.unfinished
    if not isinstance(progress, _Work) or progress.request is not request:
        progress = connection.unfinished = _Work(request, work())
    if not Slice().advance(progress.steps):
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
    progress = connection.unfinished
    if not isinstance(progress, _Progress) or progress.request is not request:
        progress = connection.unfinished = _Progress(request)
    if stage not in progress.stages:
        progress.stages[stage] = items(), []
    all_items, results = progress.stages[stage]
    turn = Slice()
    for number, item in enumerate(all_items[len(results) :]):
        if number and turn.is_over:
            raise UnfinishedError
        results.append(result_of(item))
    if is_last:
        connection.unfinished = None
    return results
