"""The same names without ``await``, for programs that have no event loop.

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

There is one client, the async one. It runs on the event loop of a background thread, which all
objects of this module share and which ends when the last of them is closed; every method here hands
its call to that thread and waits for the outcome. Methods may be called from any thread.

A process that forks (gunicorn ``--preload``, Celery, ``multiprocessing``) starts its clients after
the fork: in a child, what the parent has started raises ``ForkedError``. Nothing waits for ever but
a ``receive`` without a timeout: each call has the limits of the async client, and one whose
background thread does not run any more, or is blocked, ends after a minute at most.

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
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar

from . import admin as aio_admin
from . import consumer as aio_consumer
from . import producer as aio_producer
from . import transaction as aio_transaction
from .access import Acl, AclEntry, PolicyType, User
from .admin import PAGE_SIZE, PendingTransaction, State
from .config import ClientConfig
from .credentials import Credentials, CredentialsSource
from .errors import ClientClosedError, ClientError, ForkedError
from .events import ConsumerEvent, TopicMissing, UnequalSubscriptions
from .groups import ConsumerGroup, GroupMember
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
from .transaction import Transaction, TransactionListener
from .transactional.check_back import Checker, as_decision, ask

__all__ = [
    "Acl",
    "AclEntry",
    "Admin",
    "Checker",
    "ClientConfig",
    "Consumer",
    "ConsumerEvent",
    "ConsumerGroup",
    "Credentials",
    "CredentialsSource",
    "Decision",
    "GroupMember",
    "Message",
    "MessageQueue",
    "MessageView",
    "PendingTransaction",
    "PolicyType",
    "Producer",
    "SendResult",
    "SendStatus",
    "TopicMissing",
    "Transaction",
    "TransactionLedger",
    "TransactionListener",
    "TransactionProducer",
    "UnequalSubscriptions",
    "User",
]

try:  # here and not when it is needed, or a fork could find its import under way in a thread
    import uvloop
except ImportError:  # on Windows
    uvloop = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOOP_SECONDS: Final = 30.0
"""Until a thread that waits for the background thread looks whether that still runs; and until it
stops waiting for one that does not answer."""

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound="_AsyncClient")
F = TypeVar("F", bound="_Facade[Any]")


class _Call(Generic[R]):
    """A coroutine on the background thread, for the thread that waits for it.

    A signal handler may raise while it waits. A ``concurrent.futures.Future`` does not bear that:
    interrupted as it takes its lock it keeps that, and the background thread waits for ever to set
    the result. A ``SimpleQueue`` has no lock in Python code.
    """

    def __init__(self, work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self._task: asyncio.Task[R] | None = None
        self._done: queue.SimpleQueue[asyncio.Task[R]] = queue.SimpleQueue()
        loop.call_soon_threadsafe(self._start)

    def outcome(self) -> R:
        """Wait for the end; to be called once.

        Raises:
            asyncio.CancelledError: It was cancelled, because the loop has ended.
            ClientError: The loop does not run any more, or something blocks it.
        """
        while True:
            try:
                return self._done.get(timeout=LOOP_SECONDS).result()
            except queue.Empty:
                self._look_at_the_loop()

    def _look_at_the_loop(self) -> None:
        runs: queue.SimpleQueue[bool] = queue.SimpleQueue()
        with contextlib.suppress(RuntimeError, queue.Empty):  # closed; blocked
            self._loop.call_soon_threadsafe(runs.put, True)
            runs.get(timeout=LOOP_SECONDS)
            return
        raise ClientError(
            f"the thread halfmq-client has done nothing for {LOOP_SECONDS:g} s: a coroutine given "
            "to it, such as an async checker, blocks without await"
        )

    def cancel(self) -> None:
        """Have it cancelled, and do not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and everything on it over
            self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._done.put)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _LoopThread:
    """The background thread: started for its first user, stopped after its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._of_parents: list[object] = []

    def forget(self) -> None:
        """In a forked child: the thread has stayed with the parent, perhaps with the lock held."""
        if self._loop is not None:
            # Kept, for to be collected would close what the parent's loop still uses.
            tasks = asyncio.all_tasks(self._loop)
            self._of_parents.append((self._loop, tasks))
        self._lock = threading.Lock()
        self._users = 0
        self._loop = self._thread = None

    def enter(self) -> asyncio.AbstractEventLoop:
        """Become a user; the loop is running on return."""
        with self._lock:
            if self._loop is None:
                self._loop = _new_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="halfmq-client", daemon=True
                )
                self._thread.start()
            self._users += 1
            return self._loop

    def submit(self, work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> _Call[R]:
        """Run a coroutine there; nothing that was taken in is left unfinished by the end.

        Raises:
            ClientClosedError: The loop has ended.
        """
        with self._lock:
            if loop is self._loop:
                return _Call(work, loop)
        work.close()
        raise ClientClosedError("the client")

    def leave(self) -> None:
        """Stop being a user; the last one ends the thread."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LOOP_SECONDS)  # it is a daemon, should something block it

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        # Its own, for the loop's cannot be left without waiting for a checker that hangs.
        workers = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="halfmq-worker")
        loop.set_default_executor(workers)
        try:
            _run_until_stopped(loop)
            loop.run_until_complete(_cancel_all(loop))  # or their callers would wait for ever
        finally:
            workers.shutdown(wait=False)
            loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # of a user's coroutine; others go on
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
    os.register_at_fork(after_in_child=_thread.forget)


class _AsyncClient(Protocol):
    """What a facade stands in front of."""

    group: str

    @property
    def client_id(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class _Facade(Generic[A]):
    """Runs an async client on the background thread."""

    def __init__(self, client: A) -> None:
        self.asynchronous = client
        """The client that does the work; its methods belong to the background thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closing = threading.Lock()

    @property
    def client_id(self) -> str:
        """Under which the brokers know this client; empty before the start."""
        return self.asynchronous.client_id

    def start(self) -> None:
        """Connect and be ready; ``with`` does it. Raises what the async client raises."""
        if self._loop is not None:
            self._check_process()
            raise ClientClosedError(self._name)
        self._pid = os.getpid()
        loop = _thread.enter()
        try:
            self._wait(self.asynchronous.start(), loop)
        except BaseException:
            try:  # interrupted, it may be up by now
                self._wait(self.asynchronous.close(), loop)
            finally:
                _thread.leave()
            raise
        self._loop = loop

    def close(self) -> None:
        """Take leave of the brokers; safe to call twice, from several threads too.

        In a forked child it does nothing: the client is the parent's.
        """
        if self._loop is not None and self._pid != os.getpid():
            return
        with self._closing:
            if self._loop is not None:
                try:
                    self.wait(self.asynchronous.close())
                finally:
                    self._loop = None
                    _thread.leave()

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the background thread and return its outcome.

        Interrupted (Ctrl-C), it is cancelled there.

        Raises:
            ClientClosedError: The client is not running, or another thread has closed it.
            ForkedError: It runs in the process of which this is a forked child.
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
        """Run a coroutine on the background thread and do not wait; without one, drop it."""
        if self._loop is None:
            work.close()
            return
        with contextlib.suppress(ClientClosedError):
            _thread.submit(work, self._loop)

    @property
    def _name(self) -> str:
        """How errors call this client."""
        return f"{type(self).__name__} {self.asynchronous.group}"

    @staticmethod
    def _wait(work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> R:
        call = _thread.submit(work, loop)
        try:
            return call.outcome()
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


class _Waiting(Generic[P, R]):
    """A method that waits for the async method of the same name: its signature and its text."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method

    def __get__(self, facade: _Facade[Any] | None, _owner: type[object]) -> Callable[P, R]:
        method = self._method

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            assert facade is not None, "a method of an instance"
            return facade.wait(method(facade.asynchronous, *args, **kwargs))

        return call


def _made_like(
    kind: Callable[P, A],
) -> Callable[[Callable[[F, A], None]], Callable[Concatenate[F, P], None]]:
    """Give an ``__init__`` that takes the async client the arguments which make that client."""

    def decorate(init: Callable[[F, A], None]) -> Callable[Concatenate[F, P], None]:
        def made(self: F, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, kind(*args, **kwargs))

        functools.update_wrapper(made, kind.__init__)
        return made

    return decorate


class Producer(_Facade[aio_producer.Producer]):
    """Sends messages for a producer group; see ``halfmq.client.Producer``."""

    @_made_like(aio_producer.Producer)
    def __init__(self, client: aio_producer.Producer) -> None:
        super().__init__(client)

    send = _Waiting(aio_producer.Producer.send)
    send_batch = _Waiting(aio_producer.Producer.send_batch)
    send_oneway = _Waiting(aio_producer.Producer.send_oneway)


class TransactionProducer(_Facade[aio_transaction.TransactionProducer]):
    """Messages that follow a local transaction; see ``halfmq.client.TransactionProducer``."""

    @_made_like(aio_transaction.TransactionProducer)
    def __init__(self, client: aio_transaction.TransactionProducer) -> None:
        super().__init__(client)

    send = _Waiting(aio_producer.Producer.send)
    send_batch = _Waiting(aio_producer.Producer.send_batch)
    send_oneway = _Waiting(aio_producer.Producer.send_oneway)
    pending = _Waiting(aio_transaction.TransactionProducer.pending)

    def transaction(
        self, messages: Message | Sequence[Message]
    ) -> contextlib.AbstractContextManager[Transaction]:
        """The context of one local transaction, whose block runs in this thread."""
        return _Entered(self, self.asynchronous.transaction(messages))

    def send_in_transaction(
        self,
        messages: Message | Sequence[Message],
        listener: TransactionListener | None = None,
        arg: object = None,
    ) -> Transaction:
        """RocketMQ's form; the listener runs in this thread, if it is a plain function."""
        listener = self.asynchronous.use_listener(listener)
        execute = listener.execute_local_transaction
        with _Entered(self, Transaction(self.asynchronous, messages)) as transaction:
            transaction.decide(Decision.UNKNOWN)
            if inspect.iscoroutinefunction(execute):
                transaction.decide(self.wait(ask(execute, transaction, arg)))
            else:
                try:
                    transaction.decide(as_decision(execute(transaction, arg), execute))
                except Exception:
                    logger.exception(
                        "event=user_function_failed function=%s counts_as=UNKNOWN", execute
                    )
        return transaction


class _Entered(contextlib.AbstractContextManager[Transaction]):
    """The context of a transaction whose block runs in the caller's thread.

    A signal handler may raise at any point in here.
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
            return transaction  # noqa: TRY300 -- a signal may still come before
        except BaseException:
            transaction.running = False  # interrupted, it may be stored by now
            self._producer.hand_over(transaction.abandon())
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        transaction = self._transaction
        transaction.running = False  # first: from here on the checker can tell, whatever comes
        if isinstance(error, GeneratorExit):
            # The collector closes a generator, perhaps on the very thread that would be waited for.
            transaction.decision = Decision.UNKNOWN
            return
        try:
            self._producer.wait(transaction.__aexit__(kind, error, trace))
        except (ClientClosedError, ForkedError) as closed:
            # By another thread: the checker will tell. Or in a forked child: the parent will.
            logger.warning(
                "event=decision_not_delivered transaction=%s reason=%s", transaction.id, closed
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
        """Say that the message is dealt with; False when it came too late."""
        try:
            return self._consumer.wait(self._view.ack())
        except ClientClosedError:  # another thread closed the consumer
            return False

    def retry(self, delay_level: int = 0) -> None:
        """Say that the message could not be dealt with, and have it delivered again later."""
        with contextlib.suppress(ClientClosedError):  # then it comes again anyway
            self._consumer.wait(self._view.retry(delay_level))


class Consumer(_Facade[aio_consumer.Consumer]):
    """Consumes topics for a group; see ``halfmq.client.Consumer``.

    ``for message in consumer`` ends when another thread closes the consumer. ``on_event`` is called
    on the background thread.
    """

    @_made_like(aio_consumer.Consumer)
    def __init__(self, client: aio_consumer.Consumer) -> None:
        super().__init__(client)

    commit = _Waiting(aio_consumer.Consumer.commit)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues this consumer reads now."""
        return self.asynchronous.assignment

    def receive(self, timeout: float | None = None) -> MessageView | None:
        """The next message; None when ``timeout`` seconds passed or the consumer was closed.

        Raises:
            ClientClosedError: The consumer was never started.
        """
        try:
            view = self.wait(self.asynchronous.receive(timeout))
        except ClientClosedError:
            if not self.client_id:
                raise
            return None
        return None if view is None else MessageView(view, self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageView:
        message = self.receive()
        if message is None:
            raise StopIteration
        return message


class Admin(_Facade[aio_admin.Admin]):
    """Looks at undecided transactions, decides about them, lists groups; see ``client.Admin``."""

    @_made_like(aio_admin.Admin)
    def __init__(self, client: aio_admin.Admin) -> None:
        super().__init__(client)

    page = _Waiting(aio_admin.Admin.page)
    transaction = _Waiting(aio_admin.Admin.transaction)
    commit = _Waiting(aio_admin.Admin.commit)
    rollback = _Waiting(aio_admin.Admin.rollback)
    resume = _Waiting(aio_admin.Admin.resume)
    metrics = _Waiting(aio_admin.Admin.metrics)
    groups = _Waiting(aio_admin.Admin.groups)
    users = _Waiting(aio_admin.Admin.users)
    user = _Waiting(aio_admin.Admin.user)
    create_user = _Waiting(aio_admin.Admin.create_user)
    update_user = _Waiting(aio_admin.Admin.update_user)
    delete_user = _Waiting(aio_admin.Admin.delete_user)
    copy_users = _Waiting(aio_admin.Admin.copy_users)
    acls = _Waiting(aio_admin.Admin.acls)
    acl = _Waiting(aio_admin.Admin.acl)
    create_acl = _Waiting(aio_admin.Admin.create_acl)
    update_acl = _Waiting(aio_admin.Admin.update_acl)
    delete_acl = _Waiting(aio_admin.Admin.delete_acl)
    copy_acls = _Waiting(aio_admin.Admin.copy_acls)

    def transactions(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int | None = None,
    ) -> Iterator[PendingTransaction]:
        """Give undecided transactions, by broker name, then the oldest first."""
        while limit is None or limit > 0:
            wanted = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit)
            page = self.page(group, state, after, wanted)
            yield from page
            if len(page) < wanted:
                return
            after = page[-1]
            limit = None if limit is None else limit - len(page)
