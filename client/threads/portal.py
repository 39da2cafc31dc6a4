"""Portal: runs async clients on the event loop of a background thread, for other threads.

All clients of the process share the thread, which ends when the last of them is closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ..errors import ClientClosedError, ClientError, ForkedError, GreenThreadsError
from ..events import Health
from ..net.base_client import BaseClient

try:  # imported here and not on first use, when a fork could interrupt the import in a thread
    import uvloop
except ImportError:  # on Windows
    uvloop = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOOP_SECONDS: Final = 30.0
"""How long a call waits before it checks whether the background thread still runs, and then how
long it waits for that thread to respond."""

GREEN_THREADS: Final = (
    (
        ("gevent.monkey", "is_module_patched", "threading"),
        "gevent.monkey.patch_all(thread=False, queue=False)",
    ),
    (("eventlet.patcher", "is_monkey_patched", "thread"), "eventlet.monkey_patch(thread=False)"),
)
"""Libraries that replace threads: module, function and argument that tell, and how to avoid it."""

R = TypeVar("R")
A = TypeVar("A", bound=BaseClient)


class _Call(Generic[R]):
    """A coroutine that runs on the background thread while the calling thread waits.

    A signal handler may raise in the waiting thread. A ``concurrent.futures.Future`` does not
    survive that: interrupted while it acquires its lock, it never releases it, and the background
    thread waits forever to set the result. A ``SimpleQueue`` has no lock in Python code.
    """

    def __init__(self, work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._work = work
        self._task: asyncio.Task[R] | None = None
        self._done: queue.SimpleQueue[asyncio.Task[R]] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin on the background thread; from then on ``cancel`` ends it, also if this raises."""
        self.loop.call_soon_threadsafe(self._start)

    def result(self) -> R:
        """Wait for the coroutine and return its result; call this only once.

        Raises:
            asyncio.CancelledError: The coroutine was cancelled, because the loop has ended.
            ClientError: The loop has ended without cancelling it, or is blocked.
        """
        while True:
            try:
                return self._done.get(timeout=LOOP_SECONDS).result()
            except queue.Empty:
                self._check_loop()

    def _check_loop(self) -> None:
        runs: queue.SimpleQueue[bool] = queue.SimpleQueue()
        with contextlib.suppress(RuntimeError, queue.Empty):  # closed; blocked
            self.loop.call_soon_threadsafe(runs.put, True)
            runs.get(timeout=LOOP_SECONDS)
            return
        raise ClientError(
            f"the thread halfmq-client has done nothing for {LOOP_SECONDS:g} s: a coroutine given "
            "to it, such as an async checker, blocks without await"
        )

    def drop(self) -> None:
        """Give up a call that was not started."""
        self._work.close()

    def cancel(self) -> None:
        """Request cancellation without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all its tasks are done
            self.loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self.loop.create_task(self._work)
        self._task.add_done_callback(self._done.put)

    def _cancel(self) -> None:
        if self._task is None:
            self.drop()
        else:
            self._task.cancel()


class _LoopThread:
    """The background thread: started for its first user, stopped after its last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may stop a client while it is held
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._parent_objects: list[object] = []

    def reset_after_fork(self) -> None:
        """Reset in a forked child, which has no thread and perhaps a copy of a held lock."""
        if self._loop is not None:
            # Kept alive: garbage collection would close what the parent's loop still uses.
            tasks = asyncio.all_tasks(self._loop)
            self._parent_objects.append((self._loop, tasks))
        self._lock = threading.RLock()
        self._users = 0
        self._loop = self._thread = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        """Register a user, start the thread for the first one, and return its loop."""
        with self._lock:
            if self._loop is None:
                self._loop = _new_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="halfmq-client", daemon=True
                )
                self._thread.start()
            self._users += 1
            return self._loop

    def submit(self, call: _Call[Any]) -> None:
        """Start a call; when the thread ends, unfinished calls are cancelled.

        Raises:
            ClientClosedError: The loop has ended.
        """
        with self._lock:
            if call.loop is self._loop:
                call.start()
                return
        call.drop()
        raise ClientClosedError("the client")

    def release(self) -> None:
        """Unregister a user; the last one ends the thread."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LOOP_SECONDS)  # it is a daemon thread, in case it is blocked

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        # An executor of its own: the loop's would wait on shutdown for a checker that hangs.
        workers = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="halfmq-worker")
        loop.set_default_executor(workers)
        try:
            _run_until_stopped(loop)
            loop.run_until_complete(_cancel_all(loop))  # otherwise their callers wait forever
        finally:
            workers.shutdown(wait=False)
            loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # from a user's coroutine; the others continue
            logger.exception("event=loop_interrupted")
        else:
            return


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = (uvloop or asyncio).new_event_loop()
    return loop


_thread = _LoopThread()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_thread.reset_after_fork)


def _check_threads() -> None:
    """Raise GreenThreadsError if a thread would be a greenlet: the loop would never yield."""
    for (module, function, argument), remedy in GREEN_THREADS:
        if module in sys.modules and getattr(sys.modules[module], function)(argument):
            raise GreenThreadsError(module.partition(".")[0], remedy)


class Facade(Generic[A]):
    """Runs an async client on the background thread."""

    def __init__(self, client: A) -> None:
        self.asynchronous = client
        """The wrapped async client; its methods run only on the background thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closing = threading.Lock()

    @property
    def client_id(self) -> str:
        """The id by which brokers identify this client; empty before the start."""
        return self.asynchronous.client_id

    def start(self) -> None:
        """Connect to the brokers; ``with`` calls this. Raises the errors of the async client.

        Raises:
            GreenThreadsError: gevent or eventlet has replaced threads; says what to do.
        """
        if self._loop is not None:
            self._check_process()
            raise ClientClosedError(self._name)
        _check_threads()
        self._pid = os.getpid()
        loop = _thread.acquire()
        try:
            self._wait(self.asynchronous.start(), loop)
        except BaseException:
            try:  # interrupted by a signal, it may have started
                self._wait(self.asynchronous.close(), loop)
            finally:
                _thread.release()
            raise
        self._loop = loop

    def wait_until_available(self, timeout: float) -> None:
        """Wait until a broker accepts connections, for at most ``timeout`` seconds.

        For services that start before their broker; call it before ``start`` or at any later time.

        Raises:
            ConnectError: There is no broker in time; says why.
        """
        _check_threads()
        loop = _thread.acquire()
        try:
            self._wait(self.asynchronous.wait_until_available(timeout), loop)
        finally:
            _thread.release()

    def health(self) -> Health:
        """Return whether it is connected, what it waits for, and how far its queues are."""
        if self._loop is None:
            return Health(connected=False, waiting_for=("start",))
        return self.wait(self.asynchronous.health())

    def close(self) -> None:
        """Unregister from the brokers and disconnect; safe to call twice and from several threads.

        In a forked child it does nothing: the client belongs to the parent.
        """
        if self._loop is not None and self._pid != os.getpid():
            return
        with self._closing:
            if self._loop is not None:
                try:
                    self.wait(self.asynchronous.close())
                finally:
                    self._loop = None
                    _thread.release()

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the background thread and return its result.

        An exception of a signal handler (Ctrl-C) cancels the coroutine.

        Raises:
            ClientClosedError: The client is not running, or another thread has closed it.
            ForkedError: This is a forked child of the client's process.
        """
        loop = self._loop
        if loop is None:
            work.close()
            raise ClientClosedError(self._name)
        try:
            self._check_process()
        except ForkedError:
            work.close()
            raise
        return self._wait(work, loop)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(self._name, self._pid)

    def hand_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the background thread without waiting; drop it if closed."""
        if self._loop is None:
            work.close()
            return
        with contextlib.suppress(ClientClosedError):
            _thread.submit(_Call(work, self._loop))

    @property
    def _name(self) -> str:
        """The name of this client in errors."""
        return f"{type(self).__name__} {self.asynchronous.group}"

    @staticmethod
    def _wait(work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> R:
        call = _Call(work, loop)
        try:
            _thread.submit(call)
            return call.result()
        except asyncio.CancelledError as error:  # the loop ended
            raise ClientClosedError("the client") from error
        except BaseException:
            call.cancel()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
