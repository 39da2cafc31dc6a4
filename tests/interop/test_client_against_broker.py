"""Our client against our broker, as two processes: the whole path, disk included."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from halfmq.client import (
    Admin,
    BrokerRefusedError,
    ClientConfig,
    ClientError,
    Consumer,
    Decision,
    Message,
    MessageQueue,
    MessageView,
    Producer,
    SendStatus,
    TransactionFencedError,
    TransactionLedger,
    TransactionProducer,
    blocking,
)
from halfmq.client.net.session import Session
from halfmq.client.testing import BrokerProcess, BrokerStartError, broker_process
from halfmq.store.format.record import Record
from tests.support.client_loops import on_both_loops
from tests.support.client_parts import session_of
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S

SMALL_FILES = {"mappedFileSizeCommitLog": 16 << 20}
"""For tests that start a broker twice: looking for the log's end takes time by the file size."""

T = TypeVar("T")

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


async def unknown(_message: MessageView) -> Decision:
    """For producers that decide themselves."""
    return Decision.UNKNOWN


async def settled(ask: Callable[[], Awaitable[T]], condition: Callable[[T], bool]) -> T:
    """The first answer that fulfils a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(answer := await ask()):  # noqa: ASYNC110 -- the broker tells when asked
            await asyncio.sleep(0.05)
        return answer


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


@pytest.mark.parametrize("decision", [Decision.COMMIT, Decision.ROLLBACK])
async def test_another_producer_of_the_group_settles_what_one_left_open(
    served: BrokerProcess, topic: str, decision: Decision
) -> None:
    """The one that sent it is gone; the one that starts later is asked."""
    group = f"tx-{topic}"
    asked = asyncio.Event()
    seen: list[MessageView] = []

    async def checker(message: MessageView) -> Decision:
        seen.append(message)
        asked.set()
        return decision

    async with (
        TransactionProducer(group, checker=unknown, namesrv=served.address) as first,
        first.transaction(Message(topic, b"open", keys="o-1")) as tx,
    ):
        tx.decide(Decision.UNKNOWN)
    async with (
        TransactionProducer(group, checker=checker, namesrv=served.address),
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        bodies = [b"open"] if decision is Decision.COMMIT else []
        assert [message.body for message in await take(consumer, len(bodies))] == bodies
        await nothing_more(consumer)

    assert (seen[0].keys, seen[0].transaction_id, seen[0].topic) == ("o-1", tx.id, topic)
    assert len(seen) == 1


async def test_a_slow_local_transaction_is_not_rolled_back_by_a_check(
    served: BrokerProcess, topic: str
) -> None:
    """It takes longer than transactionTimeOut, and the checker would not find its row yet."""

    async def checker(_message: MessageView) -> Decision:
        return Decision.ROLLBACK

    group = f"tx-{topic}"
    async with (
        TransactionProducer(group, checker=checker, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        async with producer.transaction(Message(topic, b"slow")) as tx:
            await settled(producer.pending, lambda pending: pending[0].checks_answered > 0)
        (message,) = await take(consumer, 1)

    assert tx.decided
    assert message.body == b"slow"


@on_both_loops
async def test_several_messages_become_visible_together(served: BrokerProcess, topic: str) -> None:
    """To two topics, after the decision and not before; none of a rolled back transaction."""
    invoices = f"{topic}-invoices"
    group = f"tx-{topic}"
    subscription = {topic: "*", invoices: "*"}
    async with (
        TransactionProducer(group, checker=unknown, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", subscription, namesrv=served.address) as consumer,
    ):
        for name in subscription:
            await producer.send(Message(name, b"creates the topic"))
        await take(consumer, 2)
        messages = [Message(topic, b"1"), Message(invoices, b"2", tags="new"), Message(topic, b"3")]
        async with producer.transaction(messages) as tx:
            await nothing_more(consumer)
        async with producer.transaction(messages) as rolled_back:
            rolled_back.rollback()
        taken = sorted(await take(consumer, 3), key=lambda message: message.body)
        await nothing_more(consumer)

    assert [(message.topic, message.body) for message in taken] == [
        (topic, b"1"),
        (invoices, b"2"),
        (topic, b"3"),
    ]
    assert [m.half_message_id for m in taken] == [r.offset_message_id for r in tx.results]
    assert [m.message_id for m in taken] == [r.message_id for r in tx.results]
    assert tx.final_message_id == taken[0].offset_message_id


async def test_decisions_in_batches_have_their_own_results(
    served: BrokerProcess, topic: str
) -> None:
    """Hundred transactions end at once; each knows its own final message."""
    group = f"tx-{topic}"
    async with (
        TransactionProducer(group, checker=unknown, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        transactions = [producer.transaction(Message(topic, b"%d" % n)) for n in range(100)]
        await asyncio.gather(*(transaction.__aenter__() for transaction in transactions))
        for transaction in transactions[::4]:
            transaction.decide(Decision.ROLLBACK)
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in transactions))
        taken = {message.transaction_id: message for message in await take(consumer, 75)}
        await nothing_more(consumer)

    for n, transaction in enumerate(transactions):
        assert transaction.decided
        message = taken.get(transaction.id)
        if n % 4 == 0:
            assert (message, transaction.final_message_id) == (None, None)
        else:
            assert message is not None
            assert transaction.final_message_id == message.offset_message_id
            assert transaction.message_id == message.half_message_id


async def test_a_delay_counts_from_the_commit(served: BrokerProcess, topic: str) -> None:
    """Not from the time at which the half message was stored."""
    group = f"tx-{topic}"
    delay = timedelta(seconds=0.6)
    soon = Message(topic, b"after", deliver_after=delay)
    past = Message(topic, b"at", deliver_at=datetime.now(UTC) - timedelta(hours=1))
    async with (
        TransactionProducer(group, checker=unknown, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        async with producer.transaction([soon, past, Message(topic, b"now")]) as tx:
            await asyncio.sleep(0.3)  # the half message gets older
        taken = {message.body: message for message in await take(consumer, 3)}
        await nothing_more(consumer)

    # Stored where consumers read, by the broker's clock: with the commit, and when it was due.
    at_once, late = taken[b"now"], taken[b"after"]
    assert late.store_timestamp - at_once.store_timestamp >= delay
    assert taken[b"at"].store_timestamp == at_once.store_timestamp
    assert late.half_message_id == tx.message_id


async def test_pending_shows_who_was_asked(served: BrokerProcess, topic: str) -> None:
    """Until somebody decides: then the transaction is gone from the list."""
    group = f"tx-{topic}"
    async with TransactionProducer(group, checker=unknown, namesrv=served.address) as producer:
        async with producer.transaction([Message(topic, b"x", keys="o-1")] * 2) as tx:
            (before,) = await producer.pending()
            assert (before.transaction_id, before.half_message_id) == (tx.id, tx.message_id)
            assert (before.group, before.topic, before.keys) == (group, topic, "o-1")
            assert (before.state, before.messages) == ("prepared", 2)
            assert before.owner is not None
            # The answer counts at once, the receipt of the check at the checker's next tick.
            (asked,) = await settled(
                producer.pending,
                lambda pending: min(pending[0].checks_answered, pending[0].checks_delivered) > 0,
            )
            assert asked.checks_sent >= asked.checks_delivered
        assert await producer.pending() == []


async def test_a_half_message_sent_again_is_stored_once(
    served: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers a retry after a lost answer with the ids of the first."""
    group = f"tx-{topic}"
    async with (
        TransactionProducer(group, checker=unknown, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        # Two messages with one key, which no user can have.
        monkeypatch.setattr(Session, "new_key", lambda _session: "0123456789ABCDEF" * 2)
        async with producer.transaction(Message(topic, b"x")) as first:
            pass
        async with producer.transaction(Message(topic, b"x")) as again:
            pass
        await take(consumer, 1)
        await nothing_more(consumer)

    assert (first.message_id, first.final_message_id) == (again.message_id, again.final_message_id)


async def test_a_ledger_settles_what_a_dead_producer_left(
    served: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    """With its row: delivered. Without: rolled back, and it cannot commit any more."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "orders.db")

    group = f"tx-{topic}"
    ledger = TransactionLedger()
    with contextlib.closing(connect()) as database:
        ledger.create_table(database)
        gone = TransactionProducer(group, checker=unknown, namesrv=served.address)
        await gone.start()
        done, slow = [gone.transaction(Message(topic, body)) for body in (b"done", b"slow")]
        for transaction in (done, slow):
            await transaction.__aenter__()
        with database:
            ledger.record(database.cursor(), done.id)
        await gone.close()
        async with (
            TransactionProducer(group, ledger.checker(connect), namesrv=served.address) as producer,
            Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
        ):
            (message,) = await take(consumer, 1)
            await settled(producer.pending, lambda pending: not pending)
            await nothing_more(consumer)
        with pytest.raises(TransactionFencedError), database:
            ledger.record(database.cursor(), slow.id)

    assert message.transaction_id == done.id


async def test_transactional_messages_of_one_key_come_in_the_order_of_their_commits(
    served: BrokerProcess, topic: str
) -> None:
    """From one queue, also if their transactions were prepared in another order."""
    keys = ("c-1", "c-2", "c-3")
    async with (
        TransactionProducer(f"tx-{topic}", checker=unknown, namesrv=served.address) as producer,
        Consumer(f"g-{topic}", {topic: "*"}, namesrv=served.address) as consumer,
    ):
        for key in keys:
            late = producer.transaction(Message(topic, b"3", keys=key), order_key=key)
            async with late:
                for body in (b"1", b"2", b"never"):
                    message = Message(topic, body, keys=key)
                    async with producer.transaction(message, order_key=key) as tx:
                        if body == b"never":
                            tx.rollback()
        messages = await take(consumer, 3 * len(keys))
        await nothing_more(consumer)

    for key in keys:
        mine = [message for message in messages if message.keys == key]
        assert [message.body for message in mine] == [b"1", b"2", b"3"]
        assert len({message.queue for message in mine}) == 1


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


async def test_a_broker_that_takes_no_transactions_says_so(tmp_path: Path) -> None:
    """The block does not run."""
    with broker_process(tmp_path, rejectTransactionMessage=True) as broker:
        config = ClientConfig(send_attempts_max=1)
        async with TransactionProducer(
            "tx", lambda _: Decision.COMMIT, namesrv=broker.address, config=config
        ) as producer:
            with pytest.raises(BrokerRefusedError, match="NO_PERMISSION"):
                async with producer.transaction(Message("orders", b"x")):
                    raise AssertionError("the block must not run")


async def test_a_topic_is_not_created_when_the_broker_does_not_allow_it(tmp_path: Path) -> None:
    """The error names the topic."""
    with broker_process(tmp_path, autoCreateTopicEnable=False) as broker:
        async with Producer("g", namesrv=broker.address) as producer:
            with pytest.raises(ClientError, match="orders"):
                await producer.send(Message("orders", b"x"))


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


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfmq")


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
