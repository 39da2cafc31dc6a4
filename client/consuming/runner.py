"""Handler runner: calls a handler for each message, some at a time, until the consumer is stopped.

Messages are taken in the order of their queues. Those of one key form a line that one task works
off, the others have a task each; a message in a line holds no slot of ``concurrency``. Everything
taken is in hand: the runner extends it until it is settled, and a stop waits for all of it. A
message that was given up instead would make the group repeat the later ones of its queue too, since
a queue has one offset.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Final

from ..arguments import check_callable, check_count, check_kind, check_seconds
from ..daemon_thread import DaemonThread
from ..errors import AlreadyProcessedError, ConfigurationError
from ..message import MessageView, level_of_delay

logger = logging.getLogger(__name__)

CONCURRENCY_MAX: Final = 1024
"""Handlers at a time; each plain one has a thread."""
IN_HAND_PER_SLOT: Final = 4
"""Messages in hand for each slot with ``ordered_by``: those of a busy key wait while others run.
More of them would repeat more after a crash, and make a stop longer."""
EXTENSIONS: Final = 3
"""Extensions within one ack timeout: two may be late."""
STOP_SIGNALS: Final[tuple[int, ...]] = (signal.SIGTERM, signal.SIGINT)
CANCEL_SECONDS: Final = 5.0
"""How long a cancelled handler may take to clean up."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """What becomes of a message whose handler raised an exception.

    ::

        RetryPolicy(
            reject=(ValueError,),
            delays={ConnectionError: [timedelta(seconds=5), timedelta(minutes=1)]},
        )
    """

    reject: tuple[type[Exception], ...] = ()
    """Exceptions after which the message is a dead letter at once."""
    delays: Mapping[type[Exception], Sequence[timedelta]] = field(default_factory=dict)
    """Delays of the first, second, … retry after an exception, the last one for all further ones.
    The first class that matches counts; after any other exception the broker chooses."""

    def __post_init__(self) -> None:
        given: tuple[object, ...] = (*self.reject, *self.delays)
        for kind in given:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise ConfigurationError("reject or delays", kind, "classes of exceptions")
        for delays in self.delays.values():
            if not delays:
                raise ConfigurationError("delays", delays, "one timedelta or more")
            for delay in delays:
                level_of_delay(delay)

    def delay(self, error: BaseException, attempt: int) -> timedelta | None:
        """Return the delay after an attempt, the first is 1; None: the broker's."""
        for kind, delays in self.delays.items():
            if isinstance(error, kind):
                return delays[min(attempt, len(delays)) - 1]
        return None


@dataclass(slots=True)
class RunSummary:
    """What ``run`` has done with its messages, each delivery counted once."""

    handled: int = 0
    """The handler returned, and the acknowledgement counts or was the handler's own decision."""
    retried: int = 0
    """The handler raised: the group gets the message again after a delay."""
    rejected: int = 0
    """The handler raised what the policy rejects: the message is a dead letter."""
    left: int = 0
    """Not handled within ``drain_seconds``, or acknowledged too late: the group gets it again."""


class Runner:
    """One call of ``Consumer.run``; see the module's docstring."""

    def __init__(
        self,
        handler: Callable[[Any], object],
        *,
        concurrency: int,
        ordered_by: Callable[[Any], Hashable] | None,
        policy: RetryPolicy | None,
        drain_seconds: float,
        processing: Callable[[MessageView], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Create it; each call of the handler is a block of ``processing``."""
        self._processing = processing
        check_callable("handler", handler)
        check_count("concurrency", concurrency, range(1, CONCURRENCY_MAX + 1))
        if ordered_by is not None:
            check_callable("ordered_by", ordered_by)
        if policy is not None:
            check_kind("policy", policy, RetryPolicy)
        check_seconds("drain_seconds", drain_seconds, zero=True)
        self._handler: Callable[[MessageView], Any] = handler
        self._is_async = is_async(handler)
        self._ordered_by = ordered_by
        self._policy = policy or RetryPolicy()
        self._drain_seconds = drain_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(concurrency * (IN_HAND_PER_SLOT if ordered_by else 1))
        self._lines: dict[Hashable, deque[MessageView]] = {}
        self._in_hand: set[MessageView] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._end = asyncio.Event()
        self._error: BaseException | None = None
        self._summary = RunSummary()

    def end(self) -> None:
        """Take no more messages, and drain."""
        self._end.set()

    async def run(
        self,
        take: Callable[[], Coroutine[Any, Any, MessageView[Any] | None]],
        wait_stopped: Callable[[], Coroutine[Any, Any, None]],
        stop: Callable[[], Coroutine[Any, Any, None]],
        ack_timeout: float | None,
    ) -> RunSummary:
        """Handle messages until the consumer is stopped; then drain, and return what was done.

        Args:
            take: Waits for the next message and returns it; None once the consumer is stopped.
            wait_stopped: Waits until the consumer is stopped.
            stop: Stops it.
            ack_timeout: Seconds after which the consumer redelivers what was not extended.
        """
        intake = asyncio.ensure_future(self._take_messages(take))
        helpers: list[asyncio.Task[Any]] = [
            intake,
            asyncio.ensure_future(wait_stopped()),
            asyncio.ensure_future(self._end.wait()),
        ]
        extending = asyncio.ensure_future(self._extend_forever(ack_timeout))
        try:
            await asyncio.wait(helpers, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(helpers)
            await stop()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._drain_seconds)
        finally:
            self._summary.left += len(self._in_hand)
            await _cancel([*helpers, extending, *self._tasks])
        if not intake.cancelled():
            intake.result()  # raises its error
        if self._error is not None:
            raise self._error
        return self._summary

    async def _take_messages(
        self, take: Callable[[], Coroutine[Any, Any, MessageView[Any] | None]]
    ) -> None:
        while True:
            await self._room.acquire()
            message = await take()
            if message is None:
                return
            self._in_hand.add(message)
            self._begin(message)

    def _begin(self, message: MessageView) -> None:
        """Start to handle a message, or put it in line after an earlier one of its key."""
        line, key, error = deque([message]), None, None
        if self._ordered_by is not None:
            try:
                key = self._ordered_by(message)
                if key in self._lines:
                    self._lines[key].append(message)
                    return
            except Exception as raised:  # noqa: BLE001 -- as if the handler had raised it
                key, error = None, raised
        if key is not None:
            self._lines[key] = line
        task = asyncio.create_task(self._work_off(line, key, error))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def _work_off(
        self, line: deque[MessageView], key: Hashable, error: Exception | None
    ) -> None:
        while line:
            async with self._slots:
                await self._handle(line.popleft(), error)
        if key is not None:
            del self._lines[key]

    async def _handle(self, message: MessageView, error: BaseException | None) -> None:
        # A message that waited here while its queue went to another member is handled there.
        is_ours = message.deliverer.pending
        if is_ours and error is None:
            error = await self._call(message)
        if not is_ours:
            self._summary.left += 1
        elif error is not None and not isinstance(error, AlreadyProcessedError):
            await self._failed(message, error)
        elif message.settled or await message.ack():
            self._summary.handled += 1
        else:
            self._summary.left += 1
        self._in_hand.remove(message)
        self._room.release()

    async def _call(self, message: MessageView) -> BaseException | None:
        """Call the handler and return the exception that it raised, if any."""
        try:
            with self._processing(message):
                if self._is_async:
                    await self._handler(message)
                else:
                    call = partial(self._handler, message)
                    result = await DaemonThread(call, name="halfmq-handler").result
                    if inspect.isawaitable(result):
                        await result
        except Exception as error:  # noqa: BLE001 -- the policy decides
            return error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return error  # from something that the handler awaited
        return None

    async def _failed(self, message: MessageView, error: BaseException) -> None:
        reject = isinstance(error, self._policy.reject)
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "event=handler_failed queue=%s offset=%d attempt=%d action=%s reason=%r",
            message.queue,
            message.queue_offset,
            message.delivery_attempt,
            "none" if message.settled else "reject" if reject else "retry",
            reason,
            exc_info=error,
        )
        if message.settled:
            self._summary.handled += 1
        elif reject:
            await message.reject(reason)
            self._summary.rejected += 1
        else:
            delay = self._policy.delay(error, message.delivery_attempt)
            await message.retry(delay, reason=reason)
            self._summary.retried += 1

    async def _extend_forever(self, ack_timeout: float | None) -> None:
        while ack_timeout is not None:
            await asyncio.sleep(ack_timeout / EXTENSIONS)
            await asyncio.gather(*(one.extend(ack_timeout) for one in self._in_hand))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._end.set()


def is_async(handler: Callable[..., object]) -> bool:
    """Return whether a handler is an ``async`` function, or an object that is called like one."""
    method = type(handler).__call__
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(method)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


class _Signals:
    """SIGTERM and SIGINT, while there are runs that they stop."""

    def __init__(self) -> None:
        self._runs: list[Callable[[], object]] = []
        self._previous: dict[int, Any] = {}

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object], *, wanted: bool) -> Iterator[None]:
        """Call ``end`` on a signal while the block runs, if it runs in the main thread.

        Then the previous handlers are restored; that of SIGINT already by the first one, so that
        Ctrl-C twice does not wait for the drain.
        """
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._runs:
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._received)
        self._runs.append(end)
        try:
            yield
        finally:
            self._runs.remove(end)
            if not self._runs:
                for number in STOP_SIGNALS:
                    self._restore(number)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        logger.info("event=stop_signal signal=%d", number)
        if number == signal.SIGINT:
            self._restore(number)
        for end in self._runs:
            end()

    def _restore(self, number: int) -> None:
        if number in self._previous:
            signal.signal(number, self._previous.pop(number) or signal.SIG_DFL)


ending_on_signals: Final = _Signals().ending
"""The context manager of all runs of this process, which share its handlers."""
