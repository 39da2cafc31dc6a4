"""Running handlers: what becomes of each message, order, stops and signals."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from halfmq.client import ClientError, ConfigurationError, MessageView, RetryPolicy, blocking
from halfmq.client.consuming.runner import Runner, RunSummary, ending_on_signals
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import new_record
from tests.support.broker_thread import BrokerThread
from tests.support.client_loops import in_steady_time
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S

HOST = pack_host("127.0.0.1", 1)
SETTLED: contextvars.ContextVar[str] = contextvars.ContextVar("SETTLED", default="none")


class Source:
    """A consumer with given messages, which notes how each was settled."""

    def __init__(self, *bodies: bytes, ends: bool = True, error: Exception | None = None) -> None:
        self.ready = deque(self.message(offset, body) for offset, body in enumerate(bodies))
        self.settled: list[tuple[str, str]] = []
        self.extended: list[str] = []
        self.moved: set[str] = set()
        self._ends = ends
        self._error = error
        self._stopped = asyncio.Event()

    def message(self, offset: int, body: bytes) -> MessageView:
        record = new_record(
            topic="orders",
            queue_id=0,
            body=body,
            properties=b"",
            born_timestamp=0,
            born_host=HOST,
            store_timestamp=0,
            store_host=HOST,
            queue_offset=offset,
        )
        return MessageView(record, "broker-a", _Deliverer(self, body.decode()))

    async def take(self) -> MessageView | None:
        if self.ready and not self._stopped.is_set():
            return self.ready.popleft()
        if self._error is not None:
            raise self._error
        if not self._ends:
            await self._stopped.wait()
        return None

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()


class _Deliverer:
    def __init__(self, source: Source, body: str) -> None:
        self._source = source
        self._body = body

    @property
    def pending(self) -> bool:
        return self._body not in self._source.moved

    async def acknowledge(self) -> bool:
        self._source.settled.append((self._body, "ack"))
        return self._body != "late"

    async def redeliver(self, delay_level: int, reason: str, _seconds: float | None = None) -> None:
        self._source.settled.append((self._body, f"{delay_level} {reason}"))

    async def extend(self, _seconds: float) -> bool:
        self._source.extended.append(self._body)
        return True

    async def reply(self, _body: bytes, _properties: object) -> None:
        raise AssertionError


def runner(handler: Callable[[Any], Any], **arguments: Any) -> Runner:
    defaults: dict[str, Any] = {
        "concurrency": 8,
        "ordered_by": None,
        "policy": None,
        "drain_seconds": PATIENCE_S,
    }
    return Runner(handler, **(defaults | arguments))


async def run(
    source: Source,
    handler: Callable[[Any], Any],
    ack_timeout: float | None = None,
    **arguments: Any,
) -> RunSummary:
    async with asyncio.timeout(PATIENCE_S):
        return await runner(handler, **arguments).run(
            source.take, source.wait_stopped, source.stop, ack_timeout
        )


POLICY = RetryPolicy(
    reject=(KeyError,),
    delays={
        LookupError: [timedelta(seconds=1), timedelta(hours=2)],
        OSError: [timedelta(minutes=1)],
    },
)


@pytest.mark.parametrize("kind", ["async", "plain", "object", "awaitable"])
async def test_what_a_handler_does_decides_what_becomes_of_its_message(kind: str) -> None:
    """Returned: acknowledged. Raised: by the policy, with the reason. Its own decision stays."""
    source = Source(b"ok", b"late", b"IndexError", b"KeyError", b"OSError", b"ValueError")
    SETTLED.set("outside")
    threads = set()

    def plain(message: MessageView) -> None:
        assert SETTLED.get() == "outside"
        threads.add(threading.current_thread().name)
        name = message.body.decode()
        if name.endswith("Error"):
            raise getattr(__import__("builtins"), name)(name)

    async def handle(message: MessageView) -> None:
        plain(message)

    def call(function: Callable[[Any], Any], message: MessageView) -> Any:
        return function(message)

    class Handler:
        async def __call__(self, message: MessageView) -> None:
            plain(message)

    handlers: dict[str, Callable[[MessageView], Any]] = {
        "async": handle,
        "plain": plain,
        "object": Handler(),
        "awaitable": functools.partial(call, handle),
    }
    summary = await run(source, handlers[kind], policy=POLICY)

    assert summary == RunSummary(handled=1, retried=3, rejected=1, left=1)
    assert dict(source.settled) == {
        "ok": "ack",
        "late": "ack",
        "IndexError": "1 IndexError: IndexError",
        "KeyError": "-1 KeyError: 'KeyError'",
        "OSError": "5 OSError: OSError",
        "ValueError": "0 ValueError: ValueError",
    }
    assert threads == {"halfmq-handler" if kind == "plain" else "MainThread"}


async def test_a_handler_may_settle_its_message_itself() -> None:
    """Nothing is added to its decision, also if it raises then."""
    source = Source(b"0", b"1")

    async def handle(message: MessageView) -> None:
        await message.reject("by hand")
        if message.body == b"1":
            raise ValueError

    assert await run(source, handle) == RunSummary(handled=2)
    assert sorted(source.settled) == [("0", "-1 by hand"), ("1", "-1 by hand")]


def test_later_retries_have_the_last_delay_of_the_policy() -> None:
    """The first class that matches counts."""
    delays = [POLICY.delay(IndexError(), attempt) for attempt in (1, 2, 9)]
    assert delays == [timedelta(seconds=1), timedelta(hours=2), timedelta(hours=2)]
    assert POLICY.delay(ValueError(), 1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"reject": ("ValueError",)},
        {"delays": {ValueError: []}},
        {"delays": {ValueError: [timedelta(days=1)]}},
        {"delays": {BaseException: [timedelta(0)]}},
    ],
)
def test_a_policy_that_cannot_work_is_refused_at_once(wrong: dict[str, Any]) -> None:
    """Not when the first handler fails."""
    with pytest.raises(ConfigurationError):
        RetryPolicy(**wrong)


async def test_messages_of_a_key_are_handled_in_order_and_others_meanwhile() -> None:
    """A busy key takes one slot, however many of its messages wait."""
    source = Source(b"a1", b"a2", b"a3", b"b1", b"", b"b2")
    order: list[str] = []
    done = asyncio.Event()
    running: set[str] = set()

    async def handle(message: MessageView) -> None:
        name = message.body.decode()
        assert name[:1] not in running or not name
        running.add(name[:1])
        if name == "a1":
            await asyncio.wait_for(done.wait(), PATIENCE_S)  # until all others have had a turn
        await asyncio.sleep(0)
        order.append(name)
        running.discard(name[:1])
        if {"b1", "b2", ""} <= set(order):
            done.set()

    def key(message: MessageView) -> str | None:
        return message.body[:1].decode() or None

    summary = await run(source, handle, concurrency=2, ordered_by=key)

    assert summary == RunSummary(handled=6)
    assert [name for name in order if name[:1] == "a"] == ["a1", "a2", "a3"]
    assert [name for name in order if name[:1] == "b"] == ["b1", "b2"]


async def test_what_has_moved_to_another_member_is_not_handled_here() -> None:
    """Messages wait behind the first one of their key while their queue is revoked."""
    source = Source(b"a1", b"a2", b"a3")
    handled: list[bytes] = []

    async def handle(message: MessageView) -> None:
        handled.append(message.body)
        await asyncio.sleep(0)
        source.moved |= {"a2", "a3"}

    summary = await run(source, handle, ordered_by=lambda message: message.body[:1])

    assert handled == [b"a1"]
    assert summary == RunSummary(handled=1, left=2)


@pytest.mark.parametrize("key", [lambda _message: [], lambda message: message.nothing])
async def test_a_message_whose_key_cannot_be_found_is_retried(key: Callable[[Any], Any]) -> None:
    """It must not end the worker, and every other one after it."""
    source = Source(b"0", b"1")

    async def handle(_message: MessageView) -> None:
        raise AssertionError

    assert await run(source, handle, ordered_by=key) == RunSummary(retried=2)


async def test_there_are_never_more_handlers_than_slots() -> None:
    """``concurrency`` protects what handlers use."""
    source = Source(*(b"%d" % number for number in range(20)))
    running, most = 0, 0

    async def handle(_message: MessageView) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    assert await run(source, handle, concurrency=3) == RunSummary(handled=20)
    assert most == 3


@in_steady_time
async def test_running_handlers_are_extended_and_settled_ones_are_not() -> None:
    """Whatever a handler takes, nobody else gets its message."""
    source = Source(b"long", b"short")

    async def handle(message: MessageView) -> None:
        if message.body == b"long":
            await until(lambda: len(source.extended) == 4)

    assert await run(source, handle, ack_timeout=0.3) == RunSummary(handled=2)
    assert source.extended == ["long"] * 4


@in_steady_time
@pytest.mark.parametrize("threaded", [False, True])
async def test_a_stop_waits_for_what_is_in_hand_but_not_longer_than_it_may(threaded: bool) -> None:
    """What is not handled by then is left to the group; a hanging thread keeps nobody."""
    source = Source(b"quick", b"hangs", ends=False)
    stuck, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def handle(message: MessageView) -> None:
        if message.body == b"hangs":
            begun.set()
            await asyncio.Event().wait()

    def plain(message: MessageView) -> None:
        if message.body == b"hangs":
            loop.call_soon_threadsafe(begun.set)
            stuck.wait(PATIENCE_S)

    running = asyncio.ensure_future(run(source, plain if threaded else handle, drain_seconds=0.05))
    await begun.wait()
    await source.stop()

    assert await running == RunSummary(handled=1, left=1)
    assert source.settled == [("quick", "ack")]
    stuck.set()


async def test_an_error_of_the_consumer_is_raised_after_what_is_in_hand() -> None:
    """A worker must not go on without messages as if all were well."""
    source = Source(b"0", error=ClientError("denied"))

    async def handle(_message: MessageView) -> None:
        await asyncio.sleep(0)

    with pytest.raises(ClientError, match="denied"):
        await run(source, handle)
    assert source.settled == [("0", "ack")]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopIteration()])
@pytest.mark.parametrize("threaded", [False, True])
async def test_exceptions_that_mean_something_to_python_are_failures_too(
    error: BaseException, threaded: bool
) -> None:
    """They come from what a handler calls, and the message must not be forgotten."""
    source = Source(b"0")

    def plain(_message: MessageView) -> None:
        raise error

    async def handle(_message: MessageView) -> None:
        raise error

    assert await run(source, plain if threaded else handle) == RunSummary(retried=1)


async def test_a_cancelled_run_cancels_its_handlers() -> None:
    """Nothing keeps running without anybody who waits for it."""
    source = Source(b"0", ends=False)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(_message: MessageView) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(run(source, handle))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert ended.is_set()
    assert source.settled == []


def test_signals_end_all_runs_and_the_old_handlers_come_back() -> None:
    """A program may consume with several consumers, and has handlers of its own."""
    ended: list[str] = []
    own: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: own.append(number))
    # A Spark session in this process leaves a handler of its own.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            ending_on_signals(lambda: ended.append("a"), wanted=True),
            ending_on_signals(lambda: ended.append("b"), wanted=True),
            ending_on_signals(lambda: ended.append("c"), wanted=False),
        ):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupts)

    assert ended == ["a", "b"] * 3
    assert own == [signal.SIGTERM]
    assert after is signal.default_int_handler


def test_the_blocking_client_runs_handlers_in_threads_until_a_signal() -> None:
    """The twin of the async client, with messages whose methods block."""
    served = BrokerThread()
    address = served.broker.address
    bodies: list[bytes] = []

    def handle(message: blocking.MessageView) -> None:
        assert threading.current_thread().name == "halfmq-handler"
        assert message.extend(60)
        bodies.append(message.body)
        if len(bodies) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    async def wrong(_message: object) -> None: ...

    try:
        with blocking.Producer("g", namesrv=address) as producer:
            for number in range(3):
                producer.send(blocking.Message("orders", b"%d" % number), order_key="k")
        with blocking.Consumer("billing", {"orders": "*"}, namesrv=address) as consumer:
            with pytest.raises(ConfigurationError, match="plain function"):
                consumer.run(wrong)
            summary = consumer.run(handle, ordered_by=lambda message: message.keys or "one")
        with pytest.raises(ClientError):
            consumer.run(handle)
    finally:
        served.close()

    assert bodies == [b"0", b"1", b"2"]
    assert summary == RunSummary(handled=3)
