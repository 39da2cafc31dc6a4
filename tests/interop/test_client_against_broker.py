"""Our client against our broker, as two processes: the whole path, disk included."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from halfmq.client import (
    Admin,
    ClientConfig,
    Consumer,
    Decision,
    Message,
    MessageQueue,
    MessageView,
    Producer,
    SendStatus,
    TransactionProducer,
    blocking,
)
from halfmq.client.testing import BrokerProcess, BrokerStartError, broker_process
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.replies import encode_request
from halfmq.store.format.record import Record
from tests.support.client_loops import on_both_loops
from tests.support.client_parts import session_of
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S

SMALL_FILES = {"mappedFileSizeCommitLog": 16 << 20}
"""For tests that start a broker twice: looking for the log's end takes time by the file size."""

_numbers = itertools.count()
"""Seconds after which a message that has not come will not come; the machine may be busy."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests that do not kill it; each uses topics and groups of its own."""
    with broker_process(
        tmp_path_factory.mktemp("broker"), transactionTimeOut=500, transactionCheckInterval=200
    ) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_numbers)}"


async def take(consumer: Consumer, count: int) -> list[MessageView]:
    messages: list[MessageView] = []
    for _ in range(count):
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None, f"only {len(messages)} of {count} came"
        await message.ack()
        messages.append(message)
    return messages


@pytest.mark.parametrize(("own", "is_dead"), [(None, True), (5, False)])
async def test_the_retries_of_the_group_count_unless_the_consumer_names_others(
    served: BrokerProcess, topic: str, own: int | None, is_dead: bool
) -> None:
    """A group with ``max_retries=0`` has no retry, unless its consumer says so."""
    group = f"{topic}-group"
    async with (
        Admin(namesrv=served.address) as admin,
        Producer("g", namesrv=served.address) as producer,
    ):
        await admin.create_group(group, max_retries=0)
        await producer.send(Message(topic, b"x"))
        async with Consumer(
            group, {topic: "*"}, retries_max=own, namesrv=served.address
        ) as consumer:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            await message.retry(delay_level=1)
        dead_letters = await session_of(producer).routes.fetch(f"%DLQ%{group}")
    assert (dead_letters is not None) is is_dead


async def nothing_more(consumer: Consumer) -> None:
    assert await consumer.receive(timeout=0.3) is None


@on_both_loops
@pytest.mark.parametrize("header_type", ["auto", "json"])
async def test_what_was_sent_is_consumed(
    served: BrokerProcess, topic: str, header_type: Any
) -> None:
    """Single, batch, one-way, compressed and tagged messages, with both kinds of header."""
    config = ClientConfig(header_type=header_type)
    long = b"long " * 2000
    async with Producer("g", namesrv=served.address, config=config) as producer:
        message = Message(topic, b"hello", tags="created", keys="o-1", properties={"a": "ü"})
        result = await producer.send(message, order_key="k")
        await producer.send(Message(topic, b"filtered", tags="other"), order_key="k")
        await producer.send(Message(topic, long, tags="paid"), order_key="k")
        batch = [Message(topic, b"%d" % n, tags="paid") for n in range(3)]
        ids = (await producer.send_batch(batch, order_key="k")).message_id.split(",")
        await producer.send_oneway(Message(topic, b"one-way", tags="paid"), order_key="k")
    group = f"billing-{topic}"
    subscription = {topic: "created || paid"}
    async with Consumer(group, subscription, namesrv=served.address, config=config) as consumer:
        messages = await take(consumer, 6)
        await nothing_more(consumer)

    first = messages[0]
    assert [m.body for m in messages] == [b"hello", long, b"0", b"1", b"2", b"one-way"]
    assert [m.message_id for m in messages[2:5]] == ids
    assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, 0)
    assert (first.message_id, first.offset_message_id) == (
        result.message_id,
        result.offset_message_id,
    )
    assert (first.keys, first.tags, first.properties["a"]) == ("o-1", "created", "ü")
    assert first.queue == result.queue


async def test_a_group_goes_on_where_it_stopped(served: BrokerProcess, topic: str) -> None:
    """Offsets are kept at the broker; what was not acked comes again."""
    async with Producer("g", namesrv=served.address) as producer:
        for n in range(6):
            await producer.send(Message(topic, b"%d" % n), order_key="k")
    group = f"billing-{topic}"
    async with Consumer(group, {topic: "*"}, namesrv=served.address) as consumer:
        await take(consumer, 3)
        assert await consumer.receive(timeout=PATIENCE_S) is not None  # taken, and not acked
    async with Consumer(group, {topic: "*"}, namesrv=served.address) as consumer:
        bodies = [message.body for message in await take(consumer, 3)]

    assert bodies == [b"3", b"4", b"5"]


def _delete_old(port: int) -> None:
    """Have the broker delete what may go, as `mqadmin deleteExpiredCommitLog` does."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(encode_request(RequestCode.DELETE_EXPIRED_COMMITLOG, opaque=1))
        assert connection.recv(4096)


@pytest.mark.parametrize("share", ["queues", "messages"])
async def test_a_new_group_skips_what_an_old_topic_has(
    tmp_path: Path, share: Literal["queues", "messages"]
) -> None:
    """By default, once a message of the topic was deleted; it gets what is sent from then on."""
    settings = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 60}
    with broker_process(tmp_path, fileReservedTime=0, **settings) as broker:
        config = ClientConfig(namesrv=broker.address)
        async with Admin(config=config) as admin, Producer("old", config=config) as producer:
            await admin.create_topic("old", queues=1)
            for _ in range(6):
                await producer.send(Message("old", b"old"))
                await producer.send(Message("other", os.urandom(400_000)))  # two fill a file
            _delete_old(int(broker.address.rpartition(":")[2]))

            async with asyncio.timeout(PATIENCE_S):
                while (await admin.queues("old"))[0].first == 0:  # noqa: ASYNC110 -- its retention
                    await asyncio.sleep(0.05)
            async with Consumer("new", {"old": "*"}, share=share, config=config) as consumer:
                for number in range(3):
                    await producer.send(Message("old", b"new-%d" % number))
                bodies = [one.body for one in await take(consumer, 3)]
            (queue,) = await admin.queues("old")
        assert bodies == [b"new-0", b"new-1", b"new-2"]
        assert queue.end - queue.first > 3  # old ones were there


async def test_a_waiting_consumer_gets_a_message_at_once(served: BrokerProcess, topic: str) -> None:
    """Held pulls are answered when a message is stored, not when their time is over."""
    config = ClientConfig(pull_suspend=2 * PATIENCE_S)
    async with (
        Producer("g", namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address, config=config) as consumer,
    ):
        await producer.send(Message(topic, b"first"))
        await take(consumer, 1)
        for n in range(4):  # every queue has a pull waiting
            await producer.send(Message(topic, b"%d" % n))
            await take(consumer, 1)


async def test_members_of_a_group_share_the_queues(served: BrokerProcess, topic: str) -> None:
    """Each message goes to one of them, and all of them together get all."""
    config = ClientConfig(rebalance_interval=1.0)
    group = f"billing-{topic}"

    def member() -> Consumer:
        return Consumer(group, {topic: "*"}, namesrv=served.address, config=config)

    async with Producer("g", namesrv=served.address) as producer:
        await producer.send(Message(topic, b"creates the topic"))
        async with member() as first, member() as second:
            members = (first, second)

            def owned() -> list[MessageQueue]:
                return [q for member in members for q in member.assignment if q.topic == topic]

            await until(
                lambda: len(owned()) == 4 and all(member.assignment for member in members),
                PATIENCE_S,
            )
            assert len(set(owned())) == 4
            for n in range(40):
                await producer.send(Message(topic, b"%d" % n))

            seen: dict[bytes, set[str]] = {}

            async def drain(consumer: Consumer) -> None:
                async for message in consumer:
                    seen.setdefault(message.body, set()).add(consumer.client_id)
                    await message.ack()

            drains = [asyncio.ensure_future(drain(member)) for member in members]
            await until(lambda: {b"%d" % n for n in range(40)} <= set(seen))
        await asyncio.gather(*drains)  # the end of the consumers is theirs

    assert {client for clients in seen.values() for client in clients} == {
        first.client_id,
        second.client_id,
    }


async def test_a_message_not_acked_comes_again(served: BrokerProcess, topic: str) -> None:
    """Through the broker's retry topic or from this consumer; never not at all."""
    config = ClientConfig(retry_delay=0.1)
    async with Producer("g", namesrv=served.address) as producer:
        await producer.send(Message(topic, b"again"))
    async with Consumer(
        f"g-{topic}", {topic: "*"}, namesrv=served.address, config=config
    ) as consumer:
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        await message.retry(timedelta(seconds=1), reason="no stock")
        again = await consumer.receive(timeout=PATIENCE_S)
        assert again is not None
        await again.reject("sold out")
    dead_letters = {f"%DLQ%g-{topic}": "*"}
    async with Consumer(
        "dead", dead_letters, start_from="first", namesrv=served.address
    ) as consumer:
        (dead,) = await take(consumer, 1)

    assert (again.failure_reason, dead.failure_reason) == ("no stock", "sold out")
    assert (dead.body, dead.properties["RETRY_TOPIC"]) == (b"again", topic)
    assert dead.properties["FAILURE_QUEUE"] == str(message.queue.queue_id)
    assert (again.body, again.topic, again.delivery_attempt) == (b"again", topic, 2)
    assert again.message_id == message.message_id


@on_both_loops
async def test_only_committed_transactions_are_delivered(served: BrokerProcess, topic: str) -> None:
    """Nobody sees a half message, and nobody is asked about a decided one."""
    asked: list[str] = []

    async def checker(message: MessageView) -> Decision:
        asked.append(message.keys)
        return Decision.UNKNOWN

    group = f"tx-{topic}"
    async with (
        TransactionProducer(group, checker=checker, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        async with producer.transaction(Message(topic, b"yes", keys="o-1")) as tx:
            await nothing_more(consumer)
        async with producer.transaction(Message(topic, b"no", keys="o-2")) as no:
            no.rollback()
        (message,) = await take(consumer, 1)
        async with producer.transaction(Message(topic, b"open", keys="o-3")) as later:
            later.decide(Decision.UNKNOWN)
        await until(lambda: bool(asked))  # questions about the others were due before
        await nothing_more(consumer)

    assert (message.body, message.transaction_id, tx.decided) == (b"yes", tx.id, True)
    assert set(asked) == {"o-3"}


@pytest.mark.parametrize("messages", [1, 2])
async def test_a_producer_asks_its_checker_as_the_broker_does(
    served: BrokerProcess, topic: str, messages: int
) -> None:
    """When an error leaves the block; a checker that was written for one works for the other."""
    asked: list[MessageView] = []
    again = asyncio.Event()

    async def checker(message: MessageView) -> Decision:
        asked.append(message)
        if len(asked) == 1:
            return Decision.UNKNOWN
        again.set()
        return Decision.ROLLBACK

    body = b"packed" * 2000
    sent = [Message(topic, body, keys="o-1", tags="t", flag=7, properties={"a": "ü"})] * messages
    namesrv = served.address
    async with TransactionProducer(f"tx-{topic}", checker=checker, namesrv=namesrv) as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(sent) as tx:
                raise ZeroDivisionError
        await again.wait()

    own, brokers = asked[0], asked[1]
    # The broker alone knows itself, where the connection came from, and the time of its append.
    hidden = {"MSG_REGION", "CLUSTER", "TRACE_ON"}
    shown = {name: value for name, value in brokers.properties.items() if name not in hidden}
    assert own.properties == shown
    for name in Record._fields:
        if name not in {"total_size", "properties", "born_host"} and "timestamp" not in name:
            assert getattr(own.record, name) == getattr(brokers.record, name), name
    for name in ("born_timestamp", "store_timestamp"):
        difference = getattr(own, name) - getattr(brokers, name)
        assert abs(difference) < timedelta(minutes=1)
    for view in asked:
        assert (view.transaction_id, view.offset_message_id) == (tx.id, tx.message_id)
        assert (view.topic, view.queue, view.body) == (topic, tx.result.queue, body)
    assert own.half_message_id == brokers.half_message_id


def test_the_blocking_facade(served: BrokerProcess, topic: str) -> None:
    """The same from a program without an event loop."""

    def checker(_message: MessageView) -> Decision:
        return Decision.COMMIT

    address = served.address
    with blocking.Producer("g", namesrv=address) as producer:
        producer.send(Message(topic, b"plain"), order_key="k")
    with blocking.TransactionProducer(f"tx-{topic}", checker, namesrv=address) as transactions:
        with transactions.transaction(Message(topic, b"committed")) as tx:
            pass
        with transactions.transaction(Message(topic, b"checked")) as unknown:
            unknown.decide(Decision.UNKNOWN)
        bodies = set()
        with blocking.Consumer(f"g-{topic}", {topic: "*"}, namesrv=address) as consumer:
            for message in consumer:
                assert message.ack()
                bodies.add(message.body)
                if len(bodies) == 3:
                    break

    assert tx.decided
    assert bodies == {b"plain", b"committed", b"checked"}


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restart_under_load_is_no_error(tmp_path: Path, end: str) -> None:
    """Clients go on while the broker is stopped or killed, and what was answered is delivered."""
    config = ClientConfig(send_timeout=PATIENCE_S)  # the default may be short on a busy machine
    slowest: dict[str, float] = {}
    bodies: set[bytes] = set()
    stopped = asyncio.Event()
    clock = asyncio.get_running_loop().time
    with broker_process(tmp_path, **SMALL_FILES) as broker:
        async with (
            Consumer("billing", {"orders": "*"}, namesrv=broker.address) as consumer,
            TransactionProducer(
                "tx", lambda _: Decision.COMMIT, namesrv=broker.address, config=config
            ) as producer,
        ):

            async def transact(messages: Message | list[Message]) -> None:
                async with producer.transaction(messages):
                    pass

            forms: dict[str, Callable[[Message], Awaitable[object]]] = {
                "send": producer.send,
                "batch": lambda message: producer.send_batch([message]),
                "oneway": producer.send_oneway,
                "transaction": transact,
                "several": lambda message: transact([message, message]),
            }

            async def send_until_stopped(name: str) -> None:
                for n in itertools.count():
                    body = f"{name} {n}".encode()
                    before = clock()
                    await forms[name](Message("orders", body))
                    slowest[name] = max(slowest.get(name, 0.0), clock() - before)
                    if name != "oneway":  # of which a restart loses what nobody answered
                        bodies.add(body)
                    if stopped.is_set():
                        return
                    await asyncio.sleep(0.001)

            sending = [asyncio.ensure_future(send_until_stopped(name)) for name in forms]
            for _ in range(3):
                least = len(bodies) + 50
                while len(bodies) < least and not any(task.done() for task in sending):
                    await asyncio.wait(sending, timeout=0.005)
                getattr(broker, end)()
                await asyncio.to_thread(broker.start)
            stopped.set()
            await asyncio.gather(*sending)
            print("slowest, seconds:", {name: round(s, 3) for name, s in slowest.items()})
            seen: set[bytes] = set()
            while not seen >= bodies:
                (message,) = await take(consumer, 1)
                seen.add(message.body)


def test_a_broker_that_does_not_start_tells_why(tmp_path: Path) -> None:
    """The log's end is in the error, not in a file that is gone by then."""
    with (
        pytest.raises(BrokerStartError, match=r"exit code 2[\s\S]*flushDiskType"),
        broker_process(tmp_path, flushDiskType="SOMETIMES"),
    ):
        raise AssertionError("it must not start")


def test_a_restart_keeps_address_and_messages(tmp_path: Path) -> None:
    """So that clients find it again."""
    with broker_process(tmp_path, **SMALL_FILES) as broker:
        address, pid = broker.address, broker.pid
        with blocking.Producer("g", namesrv=address) as producer:
            first = producer.send(Message("orders", b"x"), order_key="k")
        broker.restart()
        with blocking.Producer("g", namesrv=broker.address) as producer:
            second = producer.send(Message("orders", b"y"), order_key="k")

        assert broker.address == address
        assert broker.pid != pid
        assert (first.queue_offset, second.queue_offset) == (0, 1)
    assert not broker.running


def test_what_threads_acknowledge_just_before_the_close_counts(
    served: BrokerProcess, topic: str
) -> None:
    """In every queue: acknowledgements of threads are collected before queues are given back."""
    with blocking.Admin(namesrv=served.address) as admin:
        admin.create_topic(topic, queues=4)
        with blocking.Producer("p", namesrv=served.address) as producer:
            for number in range(12):
                producer.send(Message(topic, b"x", keys=str(number)))
        with blocking.Consumer(
            topic, {topic: "*"}, start_from="first", namesrv=served.address
        ) as consumer:
            for _ in range(12):
                message = consumer.receive(PATIENCE_S)
                assert message is not None
                assert message.ack()

        assert [one.lag for one in admin.offsets(topic, topic)] == [0, 0, 0, 0]
