"""An event loop with simulated time, and the processes that run on it.

Everything is a callback: a step of a task, a timer, arriving bytes, a round of a helper thread, a
job of an executor. Callbacks run one at a time, in an order that depends only on the seed. Time
does not pass while a callback runs; it advances a little from one to the next, and jumps to the
next timer if nothing is ready. So a simulated minute of waiting costs nothing, and a run with the
same seed is always the same run.

A *process* is the set of callbacks whose context belongs to it: contexts are inherited, so
everything that a process starts belongs to it. After a kill none of its callbacks runs again.
Nothing is unwound: no ``finally`` is executed. Its objects are kept until the run is over, because
their destructors must not run while another process runs.

A thread that waits for the disk lets others run meanwhile. Here it calls ``wait_like_a_thread``,
which runs the loop from inside the waiting callback.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

if TYPE_CHECKING:
    _EventLoop = Any  # it has two dozen methods more, which nothing here calls
else:
    _EventLoop = asyncio.AbstractEventLoop

EPOCH_S: Final = 1_700_000_000.0
"""Where the wall clock begins, in seconds since 1970."""
STEP_S: Final = 2e-6
"""Time that a callback takes."""
THREAD_WAKE_S_MAX: Final = 0.002
"""How long it may take until a thread that was woken, or started, runs."""
NESTED_MAX: Final = 4
"""Threads that may be in the middle of waiting for the disk at one time."""
STEPS_MAX: Final = 400_000
"""Callbacks of a run that ends; most have some thousand."""
TRACE_KEPT: Final = 400_000
"""Events of a trace that are kept; a run has some ten thousand."""

PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar(
    "process", default=None
)


class Killed(BaseException):
    """The current process is dead and must do nothing more, not even clean up."""


class Process:
    """A simulated operating-system process."""

    def __init__(self, name: str, address: str, loop: SimulationLoop) -> None:
        self.name = name
        self.address = address
        self.dead = False
        self.steps = 0
        self.die_at_step = -1
        self.on_step_of_death: Callable[[], None] = lambda: None
        self.may_nest = True
        self.waiting_threads = 0  # of its own, in the middle of waiting for the disk
        self.stopped_until = 0.0  # time at which a suspended process (SIGSTOP) continues
        self.held_back: list[asyncio.Handle] = []
        self.disk: Any = None
        self.faulty = False  # a system call has failed, so it may log errors
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._loop = loop
        self.tasks: list[asyncio.Task[Any]] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that belongs to the process."""
        task: asyncio.Task[Any] = self._loop.create_task(main, context=self.context.copy())
        return task

    def call_at(self, when: float, work: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Schedule a call in the process."""
        return self._loop.call_at(when, work, *args, context=self.context.copy())

    def note_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task alive at least as long as it runs."""
        self.tasks.append(task)
        if len(self.tasks) > 256:
            self.tasks = [task for task in self.tasks if not task.done()]


_task_numbers = itertools.count()


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that the order of sets does not depend on addresses."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._number = next(_task_numbers)
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulationLoop(_EventLoop):  # type: ignore[misc]
    """The loop; see the module's text."""

    def __init__(self, chance: random.Random, *, keep_trace: bool = False) -> None:
        self.chance = chance
        self.now = 1_000.0  # seconds of the monotonic clock
        self.steps = 0
        self.process: Process | None = None  # whose callback runs
        self.clocks: dict[str, float] = {}
        """By a machine's address: seconds by which its wall clock is ahead of true time."""
        self.network: Any = None
        self.digest = 0  # of everything that has happened
        self.trace: list[tuple[Any, ...]] | None = [] if keep_trace else None
        self.failures: list[str] = []  # errors that no live process caught
        self.errors: list[str] = []  # what live processes logged as errors
        self.over = False  # nothing that is destroyed now counts
        self.halted = False  # no callback runs any more: the run would not end
        self.depth = 0
        self.in_thread = False  # whether the current callback represents a helper thread
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._numbers = itertools.count()
        self._stopped: list[Process] = []
        self._kept: list[object] = []
        self._closed = False
        self._in_order = 0.0  # when the last callback from a thread arrives
        global _task_numbers  # noqa: PLW0603 -- numbers begin anew with each run
        _task_numbers = itertools.count()

    # --- running

    def run_while(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Run callbacks while a condition holds; return False if time ran out first."""
        end = self.now + seconds
        while condition():
            if self.now >= end or not self._pass(end):
                return not condition()
        return True

    def run_for(self, seconds: float) -> None:
        """Run callbacks for a time."""
        end = self.now + seconds
        while self.now < end and self._pass(end):
            pass
        self.now = max(self.now, end)

    def wait_like_a_thread(self, seconds: float) -> None:
        """Let others run before the caller continues; do nothing if it is no helper thread.

        Raises:
            Killed: The caller's process was killed meanwhile.
        """
        process = self.process
        if process is None or not (self.in_thread and process.may_nest) or self.depth >= NESTED_MAX:
            return
        self.depth += 1
        process.waiting_threads += 1
        try:
            self.run_for(seconds)
        finally:
            self.depth -= 1
            process.waiting_threads -= 1
            self.process, self.in_thread = process, True
        if process.dead:
            raise Killed

    def _pass(self, end: float) -> bool:
        """Run what is ready, or go on to the next timer; False when there is none before `end`."""
        if self.halted:
            return False
        ready, timers = self._ready, self._timers
        if not ready and timers:
            when = timers[0][0]
            if when > end:
                self.now = end
                return False
            self.now = max(self.now, when)
        now = self.now
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[2])
        if not ready:
            return bool(timers)
        for _ in range(len(ready)):
            if not ready:  # a nested pass has run the rest
                break
            # Handles are asyncio's; this loop runs them as asyncio's loops do.
            handle = ready.popleft()
            if not handle._cancelled:
                self._run(handle)
        return True

    def _run(self, handle: Any) -> None:
        # See above: asyncio has no public way to run a handle.
        process = handle._context.get(PROCESS)
        if process is not None:
            if process.dead:
                self._kept.append(handle)
                return
            if process.stopped_until > self.now:
                process.held_back.append(handle)
                return
            process.steps += 1
            if process.steps == process.die_at_step:
                process.on_step_of_death()
                self._kept.append(handle)
                return
        self.steps += 1
        self.now += STEP_S
        if self.steps == STEPS_MAX:
            self.halt("the run does not end")
        outer, self.process = (self.process, self.in_thread), process
        self.in_thread = False
        if self.trace is not None:
            self.note("run", process.name if process else "-", _name_of(handle._callback))
        try:
            handle._context.run(handle._callback, *handle._args)
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001 -- every error is recorded
            self.fail(f"{process.name if process else 'world'}: {error!r} in {handle!r}")
        finally:
            self.process, self.in_thread = outer
            if process is not None and process.dead:
                self._kept.append(handle)

    # --- processes

    def stop_process(self, process: Process, seconds: float) -> None:
        """Suspend a process for a while, as SIGSTOP, swapping or garbage collection does."""
        process.stopped_until = self.now + seconds
        self.call_at(process.stopped_until, self._continue, process)

    def _continue(self, process: Process) -> None:
        held_back, process.held_back = process.held_back, []
        self._ready.extend(held_back)

    def mark_dead(self, process: Process) -> None:
        """Mark a process as dead, and keep its objects until the run is over."""
        process.dead = True
        self._kept.append(process)
        self._kept.extend(process.held_back)
        for task in process.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def note(self, *event: Any) -> None:
        """Add an event to the trace."""
        assert self.trace is not None
        if len(self.trace) < TRACE_KEPT:
            self.trace.append((round(self.now, 7), *event))

    def record_event(self, *event: Any) -> None:
        """Add an event to the digest, and to the trace if there is one."""
        self.digest = crc32(repr((self.now, *event)).encode(), self.digest)
        if self.trace is not None:
            self.note(*event)

    def fail(self, reason: str) -> None:
        """Record an error that no process caught."""
        self.failures.append(f"t={self.now:.6f} {reason}")

    def halt(self, reason: str) -> None:
        """Run no more callbacks."""
        if not self.halted:
            self.halted = True
            self.fail(reason)

    # --- asyncio.AbstractEventLoop

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._kept.clear()

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Call a little later, but never before what was called this way earlier."""
        arrival = self.now + self.chance.random() * THREAD_WAKE_S_MAX
        self._in_order = max(self._in_order, arrival)
        return self.call_at(self._in_order, callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: it is dropped when it would be due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = SimulatedTask(coro, loop=self, name=name, context=context)
        process = (context or contextvars.copy_context()).get(PROCESS)
        if process is not None:
            process.note_task(task)
        return task

    def run_in_executor(
        self, _executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do the work as a callback of its own, after a moment."""
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 -- as an executor does
                outcome, value = future.set_exception, error
            else:
                outcome, value = future.set_result, result
            self.call_soon_threadsafe(_unless_done, future, outcome, value)

        self.call_later(self.chance.random() * THREAD_WAKE_S_MAX, work)
        return future

    async def create_server(
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return self.network.listen(factory, host, port)

    async def create_connection(self, factory: Any, host: Any, port: Any, **_: Any) -> Any:
        return await self.network.connect(factory, host, port)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process = self.process
        error = context.get("exception")
        if isinstance(error, Killed) or (process is not None and process.dead) or self.over:
            return
        self.fail(f"{process.name if process else 'world'}: {context.get('message')} {error!r}")


def _unless_done(future: asyncio.Future[Any], outcome: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        outcome(value)


def _name_of(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return f"task {getattr(coroutine, '__qualname__', coroutine)}"
    return str(getattr(callback, "__qualname__", type(callback).__name__))


class SimulatedWorker:
    """A ``halfmq.store.files.worker`` whose rounds are callbacks instead of a thread."""

    def __init__(
        self,
        loop: SimulationLoop,
        process: Process,
        work: Callable[[bool], float | None],
        first_pause: float,
    ) -> None:
        self._loop = loop
        self._process = process
        self._work = work
        self._pause: float | None = first_pause
        self._woken = False
        self._running = self._started = self._stopped = False
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._started = True
        self._plan()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            if self._started and not self._running and not self._stopped:
                self._plan()

    def stop(self) -> bool:
        assert not self._running, "a process is stopped when its threads do not wait"
        self._stopped = True
        if self._handle is not None:
            self._handle.cancel()
        return self._started

    def _plan(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._pause is None:
            return
        pause = self._loop.chance.random() * THREAD_WAKE_S_MAX if self._woken else self._pause
        self._handle = self._process.call_at(self._loop.now + pause, self._round)

    def _round(self) -> None:
        woken, self._woken = self._woken, False
        self._running = self._loop.in_thread = True
        self._pause = self._work(woken)
        self._running = False
        if not self._stopped:
            self._plan()


class SimulatedThread:
    """Stands for ``threading.Thread``: the target is run as one callback."""

    loop: SimulationLoop  # set while a simulation runs

    def __init__(self, *, target: Callable[..., object], args: Any = (), **_: Any) -> None:
        self._target, self._args = target, args
        self._started = self._done = self._running = False

    def start(self) -> None:
        self._started = True
        self.loop.call_later(self.loop.chance.random() * THREAD_WAKE_S_MAX, self._run)

    def is_alive(self) -> bool:
        return self._started and not self._done

    def join(self, _timeout: float | None = None) -> None:
        if self._started and not self._done and not self._running:
            self._run()
        assert not self._running, "a process is stopped when its threads do not wait"

    def _run(self) -> None:
        if self._done or self._running:
            return
        self._running = self.loop.in_thread = True
        try:
            self._target(*self._args)
        finally:
            self._running = False
            self._done = True
