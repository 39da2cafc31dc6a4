"""Answers about many things, collected over several turns of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from halfmq.remoting.command import RemotingCommand

from ...errors import UnfinishedError
from ...loop.slices import Slice
from ...ports import Connection

T = TypeVar("T")
R = TypeVar("R")


class _Progress(msgspec.Struct):
    """The things that a request is about, and the results so far."""

    request: RemotingCommand
    things: Sequence[Any]
    results: list[Any] = msgspec.field(default_factory=list)


def collect(
    request: RemotingCommand,
    connection: Connection,
    things: Callable[[], Sequence[T]],
    result_of: Callable[[T], R],
) -> list[R]:
    """Return the result for each thing, in order; ``things`` is called once for a request.

    Raises:
        NotInMemoryError: ``result_of`` needs bytes that are not in memory; serve it again then.
        UnfinishedError: There is more to do than one turn of the loop allows; likewise.
    """
    progress = connection.unfinished
    if not isinstance(progress, _Progress) or progress.request is not request:
        progress = connection.unfinished = _Progress(request, things())
    turn, results = Slice(), progress.results
    for number, thing in enumerate(progress.things[len(results) :]):
        if number and turn.is_over:
            raise UnfinishedError
        results.append(result_of(thing))
    connection.unfinished = None
    return results
