"""The blocking facade: the same client from threads without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pytest

import halfmq.client as aio
from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    ClientError,
    ConfigurationError,
    ConnectError,
    Decision,
    Message,
    blocking,
)
from halfmq.client import transaction as aio_transaction
from halfmq.client.admin import PAGE_SIZE
from halfmq.client.threads import portal
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from tests.support.broker_thread import BrokerThread
from tests.support.fake_broker import Peer, until
from tests.support.interruptions import InterruptionError, raising_at_call
from tests.support.operated import Operated
from tests.support.patience import PATIENCE_S

MESSAGE = Message("orders", b"o-2", keys="o-2")
QUICK = ClientConfig(reconnect_delay_min=0.01, reconnect_delay_max=0.02, retry_delay=0.01)
CALLS_MAX = 500
"""More calls than there are in one ``receive``."""


class LocalError(Exception):
    """What a local transaction may raise."""


@pytest.fixture
def served() -> Iterator[BrokerThread]:
    thread = BrokerThread()
    yield thread
    thread.close()


def test_send_and_consume_without_await(served: BrokerThread) -> None:
    """The example of the README works without ``async`` and ``await``."""
    address = served.broker.address
    with blocking.Producer("g", namesrv=address) as producer:
        result = producer.send(Message("orders", b"1", tags="created"), order_key="k")
        producer.send_batch([Message("orders", b"2", tags="created")] * 2, order_key="k")
        producer.send_oneway(Message("orders", b"3", tags="other"), order_key="k")
    bodies = []
    with blocking.Consumer("billing", {"orders": "created"}, namesrv=address) as consumer:
        for message in consumer:
            bodies.append(message.body)
            assert message.ack()
            if len(bodies) == 3:
                break
        assert consumer.receive(timeout=0.02) is None
        consumer.commit()
        assert len(consumer.assignment) == 5

    assert bodies == [b"1", b"2", b"2"]
    assert result.queue_offset == 0
    assert "halfmq-client" not in {thread.name for thread in threading.enumerate()}


def test_a_transaction_runs_in_the_callers_thread(served: BrokerThread) -> None:
    """A database connection belongs to the thread that opened it."""
    threads: list[threading.Thread] = []

    def checker(_message: aio.MessageView) -> Decision:
        threads.append(threading.current_thread())
        return Decision.COMMIT

    broker = served.broker
    with blocking.TransactionProducer("orders-tx", checker=checker, namesrv=broker.address) as p:
        with p.transaction(MESSAGE) as committed:
            assert broker.half_of(committed.id).decisions == []
        assert committed.decided

        raised = p.transaction(MESSAGE)
        with pytest.raises(LocalError), raised as asked:
            raise LocalError
        assert (asked.decision, asked.decided) == (Decision.COMMIT, True)

        with p.transaction(MESSAGE) as unknown:
            unknown.decide(Decision.UNKNOWN)
        half = broker.half_of(unknown.id)
        served.loop.call_soon_threadsafe(broker.check, half)
        served.run(until(lambda: half.decisions == [Decision.COMMIT]))

    assert len(broker.messages("orders")) == 3
    assert len(threads) == 2
    assert not {threading.main_thread(), served.thread} & set(threads)


def _commit(_message: aio.MessageView) -> Decision:
    return Decision.COMMIT


class Listener(aio.TransactionListener):
    """Remembers the thread it ran in."""

    def __init__(self, outcome: Decision | Exception) -> None:
        self.outcome = outcome
        self.threads: list[threading.Thread] = []

    def execute_local_transaction(self, transaction: aio.Transaction, arg: object) -> Decision:
        self.threads.append(threading.current_thread())
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def check_local_transaction(self, message: aio.MessageView) -> Decision:
        return Decision.COMMIT


class AsyncListener(Listener):
    """A listener whose local transaction is a coroutine."""

    async def execute_local_transaction(  # type: ignore[override]
        self, transaction: aio.Transaction, arg: object
    ) -> Decision:
        return Decision.COMMIT


@pytest.mark.parametrize("outcome", [Decision.COMMIT, Decision.ROLLBACK, LocalError()])
def test_a_listener_runs_in_the_callers_thread(
    served: BrokerThread, outcome: Decision | Exception
) -> None:
    """As in RocketMQ, where it runs in the sending thread."""
    listener = Listener(outcome)
    address = served.broker.address
    with blocking.TransactionProducer("orders-tx", namesrv=address) as producer:
        tx = producer.send_in_transaction(MESSAGE, listener, arg=1)

    assert listener.threads == [threading.current_thread()]
    assert tx.decision is (outcome if isinstance(outcome, Decision) else Decision.UNKNOWN)


def test_an_async_listener_works_as_well(served: BrokerThread) -> None:
    """One listener class can serve both clients."""
    listener = AsyncListener(Decision.COMMIT)
    address = served.broker.address
    with blocking.TransactionProducer("orders-tx", listener, namesrv=address) as producer:
        assert producer.send_in_transaction(MESSAGE).decided


def test_a_message_given_back_comes_again(served: BrokerThread) -> None:
    """It is redelivered through the retry topic or locally, as with the async client."""
    served.broker.send_back_supported = False
    address = served.broker.address
    with blocking.Producer("g", namesrv=address) as producer:
        producer.send(MESSAGE)
    with blocking.Consumer("billing", {"orders": "*"}, namesrv=address, config=QUICK) as consumer:
        first = consumer.receive(5)
        assert first is not None
        first.retry(timedelta(0), reason="no stock")
        again = consumer.receive(5)
        assert again is not None
        assert (again.delivery_attempt, again.message_id) == (2, first.message_id)
        assert again.ack()


def test_closing_from_another_thread_ends_the_loop(served: BrokerThread) -> None:
    """This is the usual way to stop a worker."""
    ended = threading.Event()
    with blocking.Consumer("billing", {"orders": "*"}, namesrv=served.broker.address) as consumer:

        def loop() -> None:
            for _message in consumer:
                pass
            ended.set()

        worker = threading.Thread(target=loop)
        worker.start()
        consumer.close()
        worker.join(PATIENCE_S)

    assert ended.is_set()


def test_a_signal_handler_may_stop_a_consumer(served: BrokerThread) -> None:
    """As SIGTERM does to a worker: the loop ends after the message in hand, which counts."""
    address = served.broker.address
    with blocking.Producer("g", namesrv=address) as producer:
        for _ in range(3):
            producer.send(MESSAGE, order_key="one")
    acks = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with blocking.Consumer("billing", {"orders": "*"}, namesrv=address) as consumer:
            signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
            for message in consumer:
                os.kill(os.getpid(), signal.SIGTERM)
                with pytest.raises(ClientClosedError):
                    consumer.receive()
                assert consumer.receive(PATIENCE_S) is None
                assert message.extend(60)
                acks.append(message.ack())
        consumer.stop()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert acks == [True]
    assert sum(served.broker.offsets.values()) == 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", [blocking.Consumer.receive, blocking.Consumer.__next__])
def test_a_receive_that_a_signal_handler_interrupts_loses_no_message(
    served: BrokerThread, call: Callable[[blocking.Consumer], blocking.MessageView]
) -> None:
    """The handler may raise at any call in it; the message is the next one, in order."""
    address = served.broker.address
    config = ClientConfig(pull_batch=1)
    with (
        blocking.Producer("g", namesrv=address) as producer,
        blocking.Consumer(
            "billing",
            {"orders": "*"},
            start_from="first",
            ack_timeout=None,
            namesrv=address,
            config=config,
        ) as consumer,
    ):
        for number in range(1, CALLS_MAX):
            producer.send(Message("orders", b"%d" % number), order_key="one")
            got = None
            with (
                contextlib.suppress(InterruptionError),
                raising_at_call(number, lambda: InterruptionError("anywhere")) as places,
            ):
                got = call(consumer)
            if got is None:
                got = consumer.receive(PATIENCE_S)
            assert got is not None, places
            assert (got.body, got.delivery_attempt) == (b"%d" % number, 1), places
            assert got.ack()
            if not places:
                break

    assert not places
    assert number > 10


def test_most_messages_cross_no_threads(
    served: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are handed over many at a time, and acknowledged so."""
    address, count = served.broker.address, 256
    with blocking.Producer("g", namesrv=address) as producer:
        for number in range(count // 8):
            bodies = [b"%d" % (number * 8 + one) for one in range(8)]
            producer.send_batch([Message("orders", body) for body in bodies], order_key="one")
    waits = 0
    wait = portal.Facade.wait

    def counted(facade: Any, work: Coroutine[Any, Any, Any]) -> Any:
        nonlocal waits
        waits += 1
        return wait(facade, work)

    with blocking.Consumer(
        "billing", {"orders": "*"}, start_from="first", namesrv=address
    ) as consumer:
        monkeypatch.setattr(portal.Facade, "wait", counted)
        for number in range(count):
            message = consumer.receive()
            assert message.body == b"%d" % number
            assert message.ack()
        assert not message.ack()

    assert waits < count / 4
    assert sum(served.broker.offsets.values()) == count


def test_several_consumers_are_waited_for_at_once(served: BrokerThread) -> None:
    """The next message of any of them is returned, with its consumer."""
    address = served.broker.address
    with (
        blocking.Producer("g", namesrv=address) as producer,
        blocking.Consumer("a", {"orders": "*"}, start_from="first", namesrv=address) as orders,
        blocking.Consumer("b", {"invoices": "*"}, start_from="first", namesrv=address) as invoices,
    ):
        both = [orders, invoices]
        assert blocking.receive_any(both, timeout=0.02) is None
        for topic, expected in (("invoices", invoices), ("orders", orders)):
            producer.send(Message(topic, topic.encode()))
            consumer, message = blocking.receive_any(both)
            assert (consumer, message.body) == (expected, topic.encode())
            assert message.ack()

        orders.stop()
        producer.send(Message("invoices", b"last"))
        assert blocking.receive_any(both)[0] is invoices
        invoices.close()
        assert blocking.receive_any(both, timeout=PATIENCE_S) is None
        with pytest.raises(ClientClosedError):
            blocking.receive_any(both)
        with pytest.raises(ConfigurationError, match="timeout"):
            blocking.receive_any(both, timeout=-1)
        with pytest.raises(ConfigurationError, match="consumers"):
            blocking.receive_any([])


def test_busy_consumers_take_turns(served: BrokerThread) -> None:
    """None of them waits until the others have no more messages."""
    address = served.broker.address
    with (
        blocking.Producer("g", namesrv=address) as producer,
        blocking.Consumer("a", {"orders": "*"}, start_from="first", namesrv=address) as orders,
        blocking.Consumer("b", {"orders": "*"}, start_from="first", namesrv=address) as others,
    ):
        producer.send_batch([Message("orders", b"x")] * 8)
        both = [orders, others]
        waiting = [one.asynchronous.handover for one in both]
        served.run(until(lambda: all(one is not None and one.has_more for one in waiting)))

        assert {blocking.receive_any(both)[0] for _ in range(2)} == set(both)


def test_many_threads_share_one_producer(served: BrokerThread) -> None:
    """Each call returns the result of its own message."""
    with blocking.Producer("g", namesrv=served.broker.address) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.send(MESSAGE) for _ in range(20)])
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(served.broker.messages("orders")) == 100


def test_a_failed_start_raises_and_leaves_no_thread(served: BrokerThread) -> None:
    address = served.broker.address
    served.run(served.broker.stop())
    config = ClientConfig(send_timeout=1.0)
    with pytest.raises(ConnectError, match="is the broker running") as caught:
        blocking.Producer("g", namesrv=address, config=config).start()

    lines = traceback.format_exception(caught.value)
    assert "".join(lines).count("Traceback") == 1  # no cause that says the same
    assert len("".join(lines).splitlines()) < 20
    assert "halfmq-client" not in {thread.name for thread in threading.enumerate()}
    served.run(served.broker.restart())


def test_a_closed_facade_says_so(served: BrokerThread) -> None:
    """It raises ClientClosedError before the start and after the close."""
    producer = blocking.Producer("g", namesrv=served.broker.address)
    with pytest.raises(ClientClosedError):
        producer.send(MESSAGE)
    with producer:
        pass
    producer.close()
    with pytest.raises(ClientClosedError):
        producer.send(MESSAGE)


@pytest.mark.parametrize("name", ["Producer", "TransactionProducer", "Consumer", "MessageView"])
def test_the_facade_offers_every_public_method(name: str) -> None:
    """The same names, and the same arguments."""
    asynchronous, facade = getattr(aio, name), getattr(blocking, name)
    ours = {
        "new_key",
        "prepare",
        "finish",
        "look_and_finish",
        "check_and_finish",
        "use_listener",
        "deliverer",
        "handover",
    }
    public = {n for n in dir(asynchronous) if not n.startswith("_")} - ours
    missing = public - set(dir(facade)) - {"group", "config"}

    assert not missing
    for method in sorted(public):
        mine, theirs = getattr(facade, method), getattr(asynchronous, method)
        if inspect.isfunction(mine) and inspect.isfunction(theirs):
            parameters = list(inspect.signature(theirs).parameters)
            assert list(inspect.signature(mine).parameters) == parameters


def test_the_module_offers_the_names_of_the_async_one() -> None:
    """Programs change an import, not their code; errors are the same classes."""
    errors = {name for name in aio.__all__ if name.endswith("Error")}

    assert (set(aio.__all__) - errors) | {"receive_any"} == set(blocking.__all__)


def test_closing_ends_the_waiting_of_other_threads(served: BrokerThread) -> None:
    """Otherwise they would wait forever for a loop that has ended."""
    config = ClientConfig(reconnect_delay_min=2.0, reconnect_delay_max=2.0)
    producer = blocking.Producer("g", namesrv=served.broker.address, config=config)
    producer.start()
    producer.send(MESSAGE)
    served.run(served.broker.stop())
    outcomes: list[object] = []

    def work(topic: str) -> None:
        try:
            outcomes.append(producer.send(Message(topic, b"x")))
        except ClientError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=[topic]) for topic in ("orders", "new") * 4]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    producer.close()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert all(isinstance(outcome, ClientError) for outcome in outcomes)
    assert len(outcomes) == 8
    served.run(served.broker.restart())


def test_many_threads_may_close(served: BrokerThread) -> None:
    """The background thread continues if another client uses it."""
    with blocking.Producer("other", namesrv=served.broker.address) as other:
        for _ in range(5):
            producer = blocking.Producer("g", namesrv=served.broker.address)
            producer.start()
            threads = [threading.Thread(target=producer.close) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert not any(thread.is_alive() for thread in threads)
        other.send(MESSAGE)

    assert "halfmq-client" not in {thread.name for thread in threading.enumerate()}


def test_a_second_start_does_no_harm(served: BrokerThread) -> None:
    """It raises, and the running client can still be used and closed."""
    with blocking.Producer("g", namesrv=served.broker.address) as producer:
        with pytest.raises(ClientClosedError):
            producer.start()
        producer.send(MESSAGE)

    assert "halfmq-client" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", [blocking.Producer, blocking.TransactionProducer])
def test_a_closed_producer_can_be_started_again(
    kind: type[blocking.Producer], served: BrokerThread
) -> None:
    """So can one whose start has failed, as soon as there is a broker."""
    producer = kind("g", namesrv=served.broker.address)
    for _ in range(3):
        with producer:
            producer.send(MESSAGE)
    with pytest.raises(ClientClosedError):
        producer.send(MESSAGE)
    consumer = blocking.Consumer("billing", {"orders": "*"}, namesrv=served.broker.address)
    with consumer:
        pass
    with pytest.raises(ClientClosedError, match="a consumer only once"):
        consumer.start()


def test_a_consumer_closed_in_mid_message_ends_its_loop(
    served: BrokerThread, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that has the message gets False from ``ack``, and no exception."""
    address = served.broker.address
    with blocking.Producer("g", namesrv=address) as producer:
        producer.send(MESSAGE)
    acks: list[bool] = []
    with blocking.Consumer("billing", {"orders": "*"}, namesrv=address) as consumer:
        for message in consumer:
            consumer.close()  # as another thread would
            acks += [message.ack(), message.extend(60)]
            message.retry()

    assert acks == [False, False]
    assert "call stop() first" in caplog.text


def test_a_producer_closed_in_mid_transaction_spoils_nothing(served: BrokerThread) -> None:
    """The local transaction has committed, so an undelivered decision raises nothing."""
    producer = blocking.TransactionProducer("tx", _commit, namesrv=served.broker.address)
    with producer, producer.transaction(MESSAGE) as tx:
        producer.close()  # as another thread would

    assert not tx.decided


def test_a_checker_that_hangs_does_not_hang_the_end(
    served: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a database that does not answer."""
    monkeypatch.setattr(aio_transaction, "CLOSE_SECONDS", 0.1)
    asked, release, returned = threading.Event(), threading.Event(), threading.Event()

    def checker(_message: aio.MessageView) -> Decision:
        asked.set()
        release.wait(PATIENCE_S)
        returned.set()
        return Decision.COMMIT

    async def check() -> None:
        served.broker.check(served.broker.half_of(tx.id))

    with blocking.TransactionProducer("tx", checker, namesrv=served.broker.address) as producer:
        with producer.transaction(MESSAGE) as tx:
            tx.decide(Decision.UNKNOWN)
        served.run(check())
        assert asked.wait(PATIENCE_S)
    assert not returned.is_set()
    release.set()


def interrupt(_command: RemotingCommand, _peer: Peer) -> None:
    """Ctrl-C, at the moment when the broker gets this request; it is not answered."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C as a program has it by default: what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("code", [RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT])
def test_an_interrupted_client_leaves_nothing_open(served: BrokerThread, code: RequestCode) -> None:
    """An interrupt may come during the start or the close."""
    served.broker.handlers[code] = interrupt

    with (
        pytest.raises(KeyboardInterrupt),
        blocking.Consumer("billing", {"orders": "*"}, namesrv=served.broker.address),
    ):
        pass

    assert "halfmq-client" not in {thread.name for thread in threading.enumerate()}
    served.run(until(lambda: not served.broker.peers))


def test_a_client_interrupted_when_it_is_just_up_is_closed(
    served: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``with`` block is never entered, so nobody else could close it."""
    # An interruption right after the start, which a signal hits by luck only.
    wait = portal.Facade._wait
    codes: list[str] = []

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> object:
        name = getattr(work, "__name__", "")
        codes.append(name)
        outcome = wait(work, loop)
        if name == "start":
            raise KeyboardInterrupt
        return outcome

    monkeypatch.setattr(portal.Facade, "_wait", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        blocking.Producer("g", namesrv=served.broker.address).start()

    assert codes == ["start", "close"]
    assert served.broker.requests_of(RequestCode.UNREGISTER_CLIENT)
    served.run(until(lambda: not served.broker.peers))


def test_an_operator_needs_no_event_loop(served: BrokerThread) -> None:
    """The blocking Admin lists and decides transactions as the async one does."""
    operated = Operated(served.broker, *range(100, 100 + 2 * PAGE_SIZE))
    operated.page_max = PAGE_SIZE
    with blocking.Admin(namesrv=served.broker.address) as admin:
        everything = [one.offset for one in admin.transactions()]
        few = [one.offset for one in admin.transactions(limit=3)]
        admin.rollback("Key101", reason="no such order")

    assert everything == list(range(100, 100 + 2 * PAGE_SIZE))
    assert few == [100, 101, 102]
    assert operated.decided == [(101, "rollback", "no such order")]


def test_a_background_thread_that_is_blocked_is_an_error(
    served: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine that blocks without await must not hang every thread of the program."""
    monkeypatch.setattr(portal, "LOOP_SECONDS", 0.05)
    free = threading.Event()

    async def block() -> None:
        free.wait(PATIENCE_S)

    with blocking.Producer("g", namesrv=served.broker.address) as producer:
        producer.hand_over(block())
        with pytest.raises(ClientError, match="blocks without await"):
            producer.send(MESSAGE)
        free.set()
        monkeypatch.undo()
        producer.send(MESSAGE)


def test_slow_work_is_waited_for(served: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no time limit while the background thread runs."""
    monkeypatch.setattr(portal, "LOOP_SECONDS", 0.5)
    with blocking.Producer("g", namesrv=served.broker.address) as producer:
        assert producer.wait(asyncio.sleep(0.8, "done")) == "done"


def test_a_coroutine_that_exits_ends_nobody_elses_work(served: BrokerThread) -> None:
    """``sys.exit`` in an async checker does not affect other calls."""

    async def leave() -> None:
        raise SystemExit(3)

    with blocking.Producer("g", namesrv=served.broker.address) as producer:
        with pytest.raises(SystemExit):
            producer.wait(leave())
        producer.send(MESSAGE)
