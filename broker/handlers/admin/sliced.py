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
    """The stages of an answer: the things that each is about, and the results so far."""

    request: RemotingCommand
    stages: dict[int, tuple[Sequence[Any], list[Any]]] = msgspec.field(default_factory=dict)


def collect(
    request: RemotingCommand,
    connection: Connection,
    things: Callable[[], Sequence[T]],
    result_of: Callable[[T], R],
    *,
    stage: int = 0,
    is_last: bool = True,
) -> list[R]:
    """Return the result for each thing, in order; ``things`` is called once for a request.

    An answer that needs the results of one call for the next numbers its stages. All but one of
    them are not the last.

    Raises:
        NotInMemoryError: ``result_of`` needs bytes that are not in memory; serve it again then.
        UnfinishedError: There is more to do than one turn of the loop allows; likewise.
    """
    progress = connection.unfinished
    if not isinstance(progress, _Progress) or progress.request is not request:
        progress = connection.unfinished = _Progress(request)
    if stage not in progress.stages:
        progress.stages[stage] = things(), []
    all_things, results = progress.stages[stage]
    turn = Slice()
    for number, thing in enumerate(all_things[len(results) :]):
        if number and turn.is_over:
            raise UnfinishedError
        results.append(result_of(thing))
    if is_last:
        connection.unfinished = None
    return results
