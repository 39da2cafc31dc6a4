"""Exceptions and cancellations at chosen places of a program, the same ones in every run."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Literal

Kind = Literal["cancel", "cancel when done", "raise"]
KINDS: Final[tuple[Kind, ...]] = ("cancel", "cancel when done", "raise")
"""``cancel`` while the awaited is under way, which then may run on (a thread does); ``cancel when
done``, before the coroutine learns of it; ``raise`` as a signal handler does, with nobody told."""


class InterruptionError(Exception):
    """What a signal handler of a program may raise."""


@types.coroutine
def interrupted(
    work: Coroutine[Any, Any, None], at: Collection[int], kind: Kind
) -> Generator[Any, Any, int]:
    """Await ``work``, interrupted at its first, second, … suspension; return how many it had.

    Throws what that leads to.
    """
    suspended = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return suspended
        error = None
        suspended += 1
        if suspended in at:
            task = asyncio.current_task()
            assert task is not None
            if kind == "raise":
                error = InterruptionError(f"at suspension {suspended}")
                continue
            if kind == "cancel" or awaited is None:  # a bare yield is done when it comes back
                task.cancel()
            else:
                awaited.add_done_callback(lambda _done, task=task: task.cancel())
        try:
            yield awaited
        except BaseException as raised:  # noqa: BLE001 -- it belongs to the coroutine
            error = raised


@contextmanager
def raising_at_call(number: int, error: Callable[[], BaseException]) -> Iterator[list[str]]:
    """Raise in this thread as it enters a function or returns from one of C, for the n-th time.

    These are the places, beside the ends of loops, where Python runs signal handlers. Yields a list
    with the place, as soon as it was reached.
    """
    calls = 0
    places: list[str] = []

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event in {"call", "c_return"}:
            calls += 1
            if calls == number:
                places.append(f"{event} {frame.f_code.co_qualname}:{frame.f_lineno}")
                raise error()  # which also ends the profiling

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(before)
