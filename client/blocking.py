"""The blocking client: the names of ``halfmq.client`` without ``await``.

::

    with Producer("orders-producer") as producer:
        result = producer.send(Message("orders", b"hello"))

    with TransactionProducer("orders-tx", checker=checker) as producer:
        with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
            save_order(tx.id)

    try:
        with Consumer("billing", {"orders": "*"}) as consumer:
            for message in consumer:
                message.ack()
    except KeyboardInterrupt:  # Ctrl-C; without this, Python prints a traceback
        raise SystemExit(130)

These classes wrap the async client, which runs on the event loop of a background thread. All
objects of this module share the thread, and it ends when the last of them is closed. Every method
submits its call to that thread and waits for the result. Methods may be called from any thread.

A process that forks (gunicorn ``--preload``, Celery, ``multiprocessing``) must start its clients
after the fork: in a child, a client that the parent started raises ``ForkedError``. Only a
``receive`` without a timeout can wait forever: each call has the limits of the async client, and
fails within a minute if the background thread is blocked or has ended.

The block of a transaction runs in the thread that entered it, and so does a listener's
``execute_local_transaction``, so that both may use a database connection of that thread. Checkers
are called in worker threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import os
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterator, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from . import admin as aio_admin
from . import consumer as aio_consumer
from . import producer as aio_producer
from . import transaction as aio_transaction
from .access import Acl, AclEntry, PolicyType, User
from .admin import PAGE_SIZE, Counted, DelayedMessage, PendingTransaction, State, Topic, Traffic
from .administration.dead_letters import DeadLetter, DeadLetterCause, Redriven
from .administration.diagnosis import Diagnosis
from .administration.group_offsets import GroupOffset, TimeSpan
from .administration.groups import ConsumerGroup, GroupMember
from .administration.running_consumers import ConsumedQueue, DirectConsumption, RunningConsumer
from .administration.topics import QueueRange
from .arguments import OrderKeys, check_callable
from .config import ClientConfig
from .consuming.delivery import CONSUMER_CLOSED, log_late_ack
from .consuming.filters import SqlFilter
from .consuming.runner import RetryPolicy, RunSummary, ending_on_signals, is_async
from .credentials import Credentials, CredentialsSource
from .errors import (
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ForkedError,
    GreenThreadsError,
)
from .events import ConsumerEvent, TopicMissing, UnequalSubscriptions
from .ledger import TransactionLedger
from .message import (
    Decision,
    Message,
    MessageQueue,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from .message import (
    MessageView as AsyncMessageView,
)
from .net.base_client import BaseClient
from .transaction import Transaction, TransactionListener
from .transactional.check_back import Checker, as_decision, call_user_function

__all__ = [
    "Acl",
    "AclEntry",
    "Admin",
    "Checker",
    "ClientConfig",
    "ConsumedQueue",
    "Consumer",
    "ConsumerEvent",
    "ConsumerGroup",
    "Counted",
    "Credentials",
    "CredentialsSource",
    "DeadLetter",
    "DeadLetterCause",
    "Decision",
    "DelayedMessage",
    "DirectConsumption",
    "GroupMember",
    "GroupOffset",
    "Message",
    "MessageQueue",
    "MessageView",
    "PendingTransaction",
    "PolicyType",
    "Producer",
    "QueueRange",
    "ReceivedMessage",
    "Redriven",
    "RetryPolicy",
    "RunSummary",
    "RunningConsumer",
    "SendResult",
    "SendStatus",
    "SqlFilter",
    "TimeSpan",
    "Topic",
    "TopicMissing",
    "Traffic",
    "Transaction",
    "TransactionLedger",
    "TransactionListener",
    "TransactionProducer",
    "UnequalSubscriptions",
    "User",
]

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

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=BaseClient)
F = TypeVar("F", bound="_Facade[Any]")


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

    def cancel(self, undo: Callable[[R], object] | None = None) -> None:
        """Request cancellation without waiting for it; ``undo`` gets a result that came first."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all its tasks are done
            self.loop.call_soon_threadsafe(self._cancel, undo)

    def _start(self) -> None:
        self._task = self.loop.create_task(self._work)
        self._task.add_done_callback(self._done.put)

    def _cancel(self, undo: Callable[[R], object] | None) -> None:
        task = self._task
        if task is None:
            self.drop()
        elif task.cancel() or undo is None or task.cancelled():
            pass
        elif task.exception() is None:
            undo(task.result())


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


class _Facade(Generic[A]):
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

    def wait(self, work: Coroutine[Any, Any, R], undo: Callable[[R], object] | None = None) -> R:
        """Run a coroutine on the background thread and return its result.

        An exception of a signal handler (Ctrl-C) cancels the coroutine. If that is too late,
        ``undo`` is called there with the result, which nobody gets.

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
        return self._wait(work, loop, undo)

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
    def _wait(
        work: Coroutine[Any, Any, R],
        loop: asyncio.AbstractEventLoop,
        undo: Callable[[R], object] | None = None,
    ) -> R:
        call = _Call(work, loop)
        try:
            _thread.submit(call)
            return call.result()
        except asyncio.CancelledError as error:  # the loop ended
            raise ClientClosedError("the client") from error
        except BaseException:
            call.cancel(undo)
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


class _BlockingMethod(Generic[P, R]):
    """A blocking method for an async method, with the same signature and docstring."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method

    def __get__(self, facade: _Facade[Any] | None, _owner: type[object]) -> Callable[P, R]:
        method = self._method

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            assert facade is not None, "a method of an instance"
            return facade.wait(method(facade.asynchronous, *args, **kwargs))

        return call


def _same_arguments_as(
    kind: Callable[P, A],
) -> Callable[[Callable[[F, A], None]], Callable[Concatenate[F, P], None]]:
    """Give an ``__init__`` the arguments of the async client, which is created and passed to it."""

    def decorate(init: Callable[[F, A], None]) -> Callable[Concatenate[F, P], None]:
        def made(self: F, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, kind(*args, **kwargs))

        functools.update_wrapper(made, kind.__init__)
        return made

    return decorate


class Producer(_Facade[aio_producer.Producer]):
    """Sends messages for a producer group; see ``halfmq.client.Producer``."""

    @_same_arguments_as(aio_producer.Producer)
    def __init__(self, client: aio_producer.Producer) -> None:
        super().__init__(client)

    send = _BlockingMethod(aio_producer.Producer.send)
    send_batch = _BlockingMethod(aio_producer.Producer.send_batch)
    send_oneway = _BlockingMethod(aio_producer.Producer.send_oneway)
    recall = _BlockingMethod(aio_producer.Producer.recall)


class TransactionProducer(_Facade[aio_transaction.TransactionProducer]):
    """Sends transactional messages; see ``halfmq.client.TransactionProducer``."""

    @_same_arguments_as(aio_transaction.TransactionProducer)
    def __init__(self, client: aio_transaction.TransactionProducer) -> None:
        super().__init__(client)

    send = _BlockingMethod(aio_producer.Producer.send)
    send_batch = _BlockingMethod(aio_producer.Producer.send_batch)
    send_oneway = _BlockingMethod(aio_producer.Producer.send_oneway)
    recall = _BlockingMethod(aio_producer.Producer.recall)
    pending = _BlockingMethod(aio_transaction.TransactionProducer.pending)

    def transaction(
        self, messages: Message | Sequence[Message], *, order_key: OrderKeys = None
    ) -> contextlib.AbstractContextManager[Transaction]:
        """Return the context manager of one local transaction; its block runs in this thread."""
        transaction = self.asynchronous.transaction(messages, order_key=order_key)
        return _BlockingTransaction(self, transaction)

    def send_in_transaction(
        self,
        messages: Message | Sequence[Message],
        listener: TransactionListener | None = None,
        arg: object = None,
        *,
        order_key: OrderKeys = None,
    ) -> Transaction:
        """Run a transaction with a listener, as in RocketMQ; a plain one runs in this thread."""
        listener = self.asynchronous.use_listener(listener)
        execute = listener.execute_local_transaction
        entered = Transaction(self.asynchronous, messages, order_key)
        with _BlockingTransaction(self, entered) as transaction:
            transaction.decide(Decision.UNKNOWN)
            if inspect.iscoroutinefunction(execute):
                transaction.take_outcome(self.wait(call_user_function(execute, transaction, arg)))
            else:
                try:
                    transaction.take_outcome(as_decision(execute(transaction, arg), execute))
                except Exception:
                    logger.exception(
                        "event=user_function_failed function=%r counts_as=UNKNOWN", str(execute)
                    )
        return transaction


class _BlockingTransaction(contextlib.AbstractContextManager[Transaction]):
    """The context manager of a transaction whose block runs in the caller's thread.

    A signal handler may raise at any point in its methods.
    """

    def __init__(self, producer: TransactionProducer, transaction: Transaction) -> None:
        self._producer = producer
        self._transaction = transaction
        self._entered = False

    def __enter__(self) -> Transaction:
        if self._entered:
            raise ClientError("a transaction can be entered only once")
        self._entered = True
        transaction = self._transaction
        try:
            self._producer.wait(transaction.__aenter__())
            return transaction  # noqa: TRY300 -- a signal may still raise here
        except BaseException:
            transaction.running = False  # interrupted by a signal, it may have been stored
            self._producer.hand_over(transaction.abandon())
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        transaction = self._transaction
        transaction.running = False  # first, so that the checker may decide whatever happens here
        if isinstance(error, GeneratorExit):
            # Garbage collection closes a generator, perhaps on the background thread itself.
            transaction.decision = Decision.UNKNOWN
            return
        try:
            self._producer.wait(transaction.__aexit__(kind, error, trace))
        except (ClientClosedError, ForkedError) as closed:
            # Closed by another thread: the checker will decide. In a forked child: the parent will.
            logger.warning(
                "event=decision_not_delivered transaction=%s reason=%r", transaction.id, str(closed)
            )


class MessageView(ReceivedMessage):
    """A message handed to a blocking consumer."""

    __slots__ = ("_consumer", "_view")

    def __init__(self, view: AsyncMessageView, consumer: Consumer) -> None:
        super().__init__(view.record, view.queue.broker_name)
        self.delivery_attempt = view.delivery_attempt
        self._view = view
        self._consumer = consumer

    def ack(self) -> bool:
        """Acknowledge the message; return False if it is too late, which is logged."""
        try:
            return self._consumer.wait(self._view.ack())
        except ClientClosedError:  # another thread closed the consumer
            log_late_ack(self.queue, self.queue_offset, CONSUMER_CLOSED)
            return False

    def retry(
        self, delay: timedelta | None = None, *, reason: str | None = None, delay_level: int = 0
    ) -> None:
        """Report that processing failed, and have the message redelivered after a delay.

        See ``halfmq.client.MessageView.retry``.
        """
        with contextlib.suppress(ClientClosedError):  # then it is redelivered anyway
            self._consumer.wait(self._view.retry(delay, reason=reason, delay_level=delay_level))

    def reject(self, reason: str | None = None) -> None:
        """Report that processing can never succeed: the message becomes a dead letter at once."""
        with contextlib.suppress(ClientClosedError):  # then it is redelivered
            self._consumer.wait(self._view.reject(reason))

    def extend(self, seconds: float) -> bool:
        """Let the handler have the message for ``seconds`` from now; False if it is too late."""
        try:
            return self._consumer.wait(self._view.extend(seconds))
        except ClientClosedError:
            return False

    @property
    def settled(self) -> bool:
        """Whether ``ack``, ``retry`` or ``reject`` was called."""
        return self._view.settled

    def put_back(self) -> None:
        """Undo the delivery, on the background thread: the message comes next."""
        self._view.put_back()


class Consumer(_Facade[aio_consumer.Consumer]):
    """Consumes topics for a group; see ``halfmq.client.Consumer``.

    ``for message in consumer`` ends when another thread or a signal handler stops the consumer, or
    another thread closes it. An exception of a signal handler loses no message: one that the call
    has not returned yet comes next. ``on_event`` is called on the background thread.
    """

    @_same_arguments_as(aio_consumer.Consumer)
    def __init__(self, client: aio_consumer.Consumer) -> None:
        super().__init__(client)

    commit = _BlockingMethod(aio_consumer.Consumer.commit)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that are assigned to this consumer now."""
        return self.asynchronous.assignment

    @overload
    def receive(self, timeout: None = None) -> MessageView: ...

    @overload
    def receive(self, timeout: float) -> MessageView | None: ...

    def receive(self, timeout: float | None = None) -> MessageView | None:
        """Return the next message; with a timeout, None if there is none in so many seconds.

        Once the consumer is stopped or closed, a call with a timeout returns None at once.

        Raises:
            ClientClosedError: The consumer was never started. Without a timeout, also: it was
                stopped or closed.
        """
        # No call may follow this one: a signal handler that raises there would lose the message.
        try:
            return self.wait(self._receive(timeout), undo=_put_back)
        except ClientClosedError:
            if timeout is None or not self.client_id:
                raise
            return None

    async def _receive(self, timeout: float | None) -> MessageView | None:  # noqa: ASYNC109
        view = await self.asynchronous.receive(timeout)
        return None if view is None else MessageView(view, self)

    def run(
        self,
        handler: Callable[[MessageView], object],
        *,
        concurrency: int = 8,
        ordered_by: Callable[[ReceivedMessage], Hashable] | None = None,
        policy: RetryPolicy | None = None,
        drain_seconds: float = 30.0,
        signals: bool = True,
    ) -> RunSummary:
        """Call a plain handler, in threads, for each message until the consumer is stopped.

        ``ordered_by`` is called on the background thread, so it must return at once. All else is
        as in ``halfmq.client.Consumer.run``.
        """
        check_callable("handler", handler)
        if is_async(handler):
            raise ConfigurationError(
                "handler", handler, "a plain function; halfmq.client.Consumer takes async ones"
            )
        running = self.asynchronous.run(
            lambda view: handler(MessageView(view, self)),
            concurrency=concurrency,
            ordered_by=ordered_by,
            policy=policy,
            drain_seconds=drain_seconds,
        )
        with ending_on_signals(self.stop, wanted=signals):
            return self.wait(running)

    def stop(self) -> None:
        """Hand out no more messages: loops end, and ``receive`` returns at once.

        The consumer keeps its queues, and acknowledgements of messages in hand still count; then
        ``close`` commits the offsets and leaves the group. A signal handler may call this.
        """
        self.hand_over(self.asynchronous.stop())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageView:
        try:
            return self.receive()
        except ClientClosedError:
            if not self.client_id:
                raise
            raise StopIteration from None


def _put_back(message: MessageView | None) -> None:
    if message is not None:
        message.put_back()


class Admin(_Facade[aio_admin.Admin]):
    """Decides transactions, administers topics, groups and users; see ``halfmq.client.Admin``."""

    @_same_arguments_as(aio_admin.Admin)
    def __init__(self, client: aio_admin.Admin) -> None:
        super().__init__(client)

    page = _BlockingMethod(aio_admin.Admin.page)
    transaction = _BlockingMethod(aio_admin.Admin.transaction)
    commit = _BlockingMethod(aio_admin.Admin.commit)
    rollback = _BlockingMethod(aio_admin.Admin.rollback)
    resume = _BlockingMethod(aio_admin.Admin.resume)
    metrics = _BlockingMethod(aio_admin.Admin.metrics)
    broker_statuses = _BlockingMethod(aio_admin.Admin.broker_statuses)
    settings = _BlockingMethod(aio_admin.Admin.settings)
    change_setting = _BlockingMethod(aio_admin.Admin.change_setting)
    traffic = _BlockingMethod(aio_admin.Admin.traffic)
    groups = _BlockingMethod(aio_admin.Admin.groups)
    topics = _BlockingMethod(aio_admin.Admin.topics)
    create_topic = _BlockingMethod(aio_admin.Admin.create_topic)
    delete_topic = _BlockingMethod(aio_admin.Admin.delete_topic)
    create_group = _BlockingMethod(aio_admin.Admin.create_group)
    delete_group = _BlockingMethod(aio_admin.Admin.delete_group)
    queues = _BlockingMethod(aio_admin.Admin.queues)
    groups_of = _BlockingMethod(aio_admin.Admin.groups_of)
    offsets = _BlockingMethod(aio_admin.Admin.offsets)
    reset_offsets = _BlockingMethod(aio_admin.Admin.reset_offsets)
    reset_offset = _BlockingMethod(aio_admin.Admin.reset_offset)
    clone_offsets = _BlockingMethod(aio_admin.Admin.clone_offsets)
    time_spans = _BlockingMethod(aio_admin.Admin.time_spans)
    offsets_at = _BlockingMethod(aio_admin.Admin.offsets_at)
    group_names = _BlockingMethod(aio_admin.Admin.group_names)
    lag = _BlockingMethod(aio_admin.Admin.lag)
    connected_groups = _BlockingMethod(aio_admin.Admin.connected_groups)
    consumption = _BlockingMethod(aio_admin.Admin.consumption)
    running_consumer = _BlockingMethod(aio_admin.Admin.running_consumer)
    consume_directly = _BlockingMethod(aio_admin.Admin.consume_directly)
    message = _BlockingMethod(aio_admin.Admin.message)
    delayed = _BlockingMethod(aio_admin.Admin.delayed)
    cancel_delayed = _BlockingMethod(aio_admin.Admin.cancel_delayed)
    messages_with_key = _BlockingMethod(aio_admin.Admin.messages_with_key)
    dead_letter_groups = _BlockingMethod(aio_admin.Admin.dead_letter_groups)
    dead_letter = _BlockingMethod(aio_admin.Admin.dead_letter)
    dead_letter_causes = _BlockingMethod(aio_admin.Admin.dead_letter_causes)
    redrive = _BlockingMethod(aio_admin.Admin.redrive)
    users = _BlockingMethod(aio_admin.Admin.users)
    user = _BlockingMethod(aio_admin.Admin.user)
    create_user = _BlockingMethod(aio_admin.Admin.create_user)
    update_user = _BlockingMethod(aio_admin.Admin.update_user)
    delete_user = _BlockingMethod(aio_admin.Admin.delete_user)
    acls = _BlockingMethod(aio_admin.Admin.acls)
    acl = _BlockingMethod(aio_admin.Admin.acl)
    create_acl = _BlockingMethod(aio_admin.Admin.create_acl)
    update_acl = _BlockingMethod(aio_admin.Admin.update_acl)
    delete_acl = _BlockingMethod(aio_admin.Admin.delete_acl)
    copy_acls = _BlockingMethod(aio_admin.Admin.copy_acls)

    def transactions(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int | None = None,
    ) -> Iterator[PendingTransaction]:
        """Iterate over undecided transactions, by broker name, then the oldest first."""
        while limit is None or limit > 0:
            wanted = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit)
            page = self.page(group, state, after, wanted)
            yield from page
            if len(page) < wanted:
                return
            after = page[-1]
            limit = None if limit is None else limit - len(page)

    def dead_letters(
        self,
        group: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        cause: str | None = None,
    ) -> Iterator[DeadLetter]:
        """Iterate over the dead letters of a group, queue by queue, the oldest first."""
        return self._iterate(
            self.asynchronous.dead_letters(group, since=since, until=until, cause=cause)
        )

    def browse(
        self,
        topic: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        latest: int | None = None,
    ) -> Iterator[ReceivedMessage]:
        """Iterate over the stored messages of a topic, queue by queue, the oldest first."""
        return self._iterate(
            self.asynchronous.browse(topic, since=since, until=until, latest=latest)
        )

    def diagnose(self) -> Iterator[Diagnosis]:
        """Check brokers, clocks, disks, groups, dead letters and transactions."""
        return self._iterate(self.asynchronous.diagnose())

    def follow(self, topic: str) -> Iterator[ReceivedMessage]:
        """Iterate over the messages that are stored in a topic from now on; it never ends."""
        return self._iterate(self.asynchronous.follow(topic))

    def _iterate(self, source: AsyncGenerator[R, None]) -> Iterator[R]:
        async def following() -> R | None:
            return await anext(source, None)

        try:
            while (one := self.wait(following())) is not None:
                yield one
        finally:
            with contextlib.suppress(ClientError):  # closed before the loop has ended
                self.wait(source.aclose())
