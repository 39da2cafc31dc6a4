"""The public API as users write it, for type checkers: it must pass mypy and pyright as it is.

Nothing here runs. A type that a user would have to spell out or cast shows as an error.
"""

from __future__ import annotations

import sqlite3
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from halfmq.client import (
    AccessDeniedError,
    AclEntry,
    Admin,
    AuthenticationError,
    AutocommitError,
    BrokerRefusedError,
    ClientConfig,
    ClientError,
    Consumer,
    ConsumerEvent,
    Counted,
    Credentials,
    DeadLetter,
    DeadLetterCause,
    Decision,
    DirectConsumption,
    GroupOffset,
    Message,
    MessageQueue,
    MessageView,
    PendingTransaction,
    Producer,
    QueueRange,
    ReceivedMessage,
    Redriven,
    RunningConsumer,
    SendResult,
    SendStatus,
    TimeSpan,
    TlsError,
    Topic,
    TopicMissing,
    Traffic,
    Transaction,
    TransactionFencedError,
    TransactionLedger,
    TransactionListener,
    TransactionNotRecordedError,
    TransactionProducer,
    UnequalSubscriptions,
    User,
    blocking,
)
from halfmq.client.codecs import json, msgpack
from halfmq.client.testing import broker_process


def on_event(event: ConsumerEvent) -> None:
    if isinstance(event, TopicMissing):
        show(event.topic, *event.nearest)
    elif isinstance(event, UnequalSubscriptions):
        show(event.topic, event.filter, event.other_client_id, event.other_filter)
    show(event.name, event.group, str(event))


def show(*values: object) -> None:
    """Stands for whatever a program does with them."""


async def order_exists(key: str) -> bool:
    return bool(key)


async def checker(message: MessageView) -> Decision:
    return Decision.COMMIT if await order_exists(message.keys) else Decision.ROLLBACK


def plain_checker(message: MessageView) -> Decision:
    return Decision.COMMIT if message.transaction_id else Decision.UNKNOWN


class Orders(TransactionListener):
    """A listener may mix plain and async methods."""

    def execute_local_transaction(self, transaction: Transaction, arg: object) -> Decision:
        return Decision.COMMIT if transaction.id and arg else Decision.ROLLBACK

    async def check_local_transaction(self, message: MessageView) -> Decision:
        return await checker(message)


async def producing() -> SendResult:
    config = ClientConfig(send_timeout=5.0, header_type="json", compress_over=None)
    message = Message("orders", b"hello", tags="created", keys=["o-1"], properties={"a": "b"})
    async with Producer("orders-producer", namesrv="127.0.0.1:9876", config=config) as producer:
        try:
            result = await producer.send(message, order_key="o-1")
        except BrokerRefusedError as error:
            code: int = error.code
            raise ClientError(code, error.retriable) from error
        await producer.send_batch([message, message])
        await producer.send_oneway(message)
        await producer.send(message, timeout=0.5)
        reply: ReceivedMessage = await producer.request(message, timeout=1.0)
        show(reply.body)
    queue: MessageQueue = result.queue
    status: SendStatus = result.status
    place: tuple[str, int, int] = (queue.broker_name, queue.queue_id, result.queue_offset)
    show(result.message_id, place, status, result.offset_message_id)
    return result


async def transacting() -> None:
    async with TransactionProducer("orders-tx", checker=checker) as producer:
        async with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
            identity: str = tx.id
            tx.decide(Decision.UNKNOWN)
            tx.rollback()
        decided: bool = tx.decided
        show(identity, decided, tx.message_id, tx.result.queue_offset)
    async with TransactionProducer("orders-tx", plain_checker, topics=("orders",)) as producer:
        done = await producer.send_in_transaction(
            Message("orders", b"o-3"), Orders(), arg=3, order_key="c-1"
        )
        decision: Decision | None = done.decision
        show(decision)


async def transacting_with_a_ledger() -> None:
    ledger = TransactionLedger()
    database = sqlite3.connect("orders.db")
    ledger.create_table(database)
    messages = [
        Message("orders", b"o-4", deliver_after=timedelta(days=1)),
        Message("bills", b"b-4", deliver_at=datetime(2030, 1, 1, tzinfo=UTC)),
    ]
    own = ledger.checker(lambda: sqlite3.connect("orders.db"))
    async with TransactionProducer("orders-tx", own) as producer:
        try:
            async with producer.transaction(messages, order_key=["c-1", None]) as tx:
                with database:
                    ledger.record(database, tx.id)
                    ledger.record(database.cursor(), tx.id)
                    database.execute(*ledger.statement(tx.id, "qmark"))
        except TransactionFencedError as error:
            show(error.transaction_id)
            return
        except TransactionNotRecordedError as error:
            show(error.transaction_id, error.still_open)
            return
        final: str | None = tx.final_message_id
        places: list[int] = [result.queue_offset for result in tx.results]
        show(final, places, tx.messages[0].topic)
        for transaction in await producer.pending():
            show(transaction.age, transaction.owner, transaction.checks_delivered)
    pruned: int = ledger.prune(database, timedelta(days=7))
    show(pruned)


async def transacting_with_an_asynchronous_ledger(engine: AsyncEngine) -> None:
    ledger = TransactionLedger()
    own = ledger.async_checker(engine.connect)
    async with engine.connect() as connection, TransactionProducer("orders-tx", own) as producer:
        await ledger.create_table_async(connection)
        try:
            async with producer.transaction(Message("orders", b"o-5")) as tx:
                await ledger.record_async(connection, tx.id)
        except AutocommitError as error:
            show(error.transaction_id)
        pruned: int = await ledger.prune_async(connection, timedelta(days=7))
        show(pruned)


async def consuming() -> None:
    async with Consumer(
        "billing",
        {"orders": "created || paid"},
        start_from=datetime(2025, 1, 1, tzinfo=UTC),
        ack_timeout=30.0,
        on_event=on_event,
    ) as consumer:
        async for message in consumer:
            text: str = message.topic + message.tags + message.keys + message.properties["a"]
            born: datetime = message.born_timestamp
            attempt: int = message.delivery_attempt
            show(text, born, attempt, message.body.decode(), message.queue.queue_id)
            inbox: str = message.inbox_id
            half: str | None = message.half_message_id
            show(inbox, half)
            extended: bool = await message.extend(60)
            show(extended)
            if not await message.ack():
                await message.retry(timedelta(seconds=10), reason="busy")
        view: MessageView | None = await consumer.receive(timeout=1.0)
        show(view)
        text = (await consumer.receive()).tags
        await consumer.commit()
        await consumer.stop()


async def rotating() -> Credentials:
    return Credentials("orders-app", await secret())


async def secret() -> str:
    return "…"


async def protected() -> None:
    trust = ssl.create_default_context(cafile="ca.pem")
    config = ClientConfig(access_key="orders-app", secret_key="…", tls=trust)
    try:
        async with Producer("p", config=config) as producer:
            await producer.send(Message("orders", b"x"))
        async with TransactionProducer("tx", checker, credentials=rotating, tls=True):
            pass
        async with Consumer("c", {"orders": "*"}, access_key="a", secret_key="…", tls=trust):
            pass
    except AuthenticationError as error:
        show(error.subject)
    except AccessDeniedError as error:
        who: tuple[str, str, str] = (error.subject, error.action, error.resource)
        show(who, error.retriable, error.code)
    except TlsError as error:
        show(error.address, error.reason)


async def keeping_users() -> None:
    async with Admin(access_key="root", secret_key="…") as admin:
        await admin.create_user("orders-app", "…", enabled=False)
        await admin.update_user("orders-app", enabled=True)
        entry = AclEntry(resource="Topic:orders*", actions=["Pub", "Sub"], sources=["10.0.0.0/8"])
        await admin.create_acl("orders-app", entry)
        users: list[User] = await admin.users("orders")
        acl = await admin.acl(users[0].name)
        if acl is not None:
            show(acl.subject, [(one.resource, one.actions, one.allow) for one in acl.entries])
        copied: list[str] = await admin.copy_acls("10.0.0.2:10911", ["orders-app"])
        show(copied)
        await admin.delete_acl("orders-app", "Topic:orders*")
        await admin.delete_user("orders-app")


def keeping_users_without_await() -> None:
    with blocking.Admin(credentials=lambda: Credentials("root", "…"), tls=True) as admin:
        names: list[str] = [user.name for user in admin.users()]
        admin.copy_acls("10.0.0.2:10911", names)


async def operating() -> None:
    async with Admin(namesrv="127.0.0.1:9876") as admin:
        async for transaction in admin.transactions(group="orders-tx", state="parked", limit=10):
            age: float = transaction.age
            planned: float | None = transaction.next_check
            show(age, planned, transaction.parked_reason, transaction.owner)
            message_id: str | None = await admin.commit(
                transaction.half_message_id, reason="the row is there"
            )
            show(message_id)
        one: PendingTransaction | None = await admin.transaction("transaction id")
        metrics: dict[str, dict[str, str]] = await admin.metrics()
        await admin.create_topic("orders", queues=8, attributes={"message.type": "FIFO"})
        topics: list[Topic] = await admin.topics()
        show(topics[0].name, topics[0].read_queues, topics[0].attributes.get("message.type"))
        await admin.create_group("billing", max_retries=3)
        await admin.delete_group("billing", offsets=True)
        await admin.delete_topic("orders")
        show(one, metrics)
        settings: dict[str, dict[str, str]] = await admin.settings()
        await admin.change_setting("fileReservedTime", "24")
        traffic: Traffic = await admin.traffic("orders", "billing")
        minute: Counted = traffic.minute
        show(settings, minute.messages, minute.per_second, traffic.hour, traffic.day)
        queues: list[QueueRange] = await admin.queues("orders")
        names: list[str] = await admin.groups_of("orders")
        offsets: list[GroupOffset] = await admin.offsets("billing", "orders")
        show(queues[0].end, names, offsets[0].lag, offsets[0].consumed)
        moved: dict[MessageQueue, int] = await admin.reset_offsets("billing", "orders", "first")
        await admin.reset_offset("billing", queues[0].queue, 7)
        await admin.clone_offsets("billing", "billing-2", "orders")
        spans: list[TimeSpan] = await admin.time_spans("billing", "orders")
        stored: ReceivedMessage | None = await admin.message("id", "orders")
        found: list[ReceivedMessage] = await admin.messages_with_key("orders", "o-1", limit=2)
        running: RunningConsumer = await admin.running_consumer("billing", "client", stacks=True)
        done: DirectConsumption = await admin.consume_directly("billing", "client", found[0])
        show(moved, spans[0].delay, stored, running.queues[0].cached, done.succeeded)
        async for letter in admin.dead_letters("billing", cause="card expired"):
            attempts: int = letter.attempts
            show(letter.topic, letter.inbox_id, letter.died_at, attempts)
        causes: list[DeadLetterCause] = await admin.dead_letter_causes("billing")
        again: Redriven = await admin.redrive("billing", rate=10, dry_run=True)
        show(causes[0].count, again.sent, again.topics["orders"], again.failures)
        for group in await admin.groups():
            filters: dict[str, str] = {t: f for m in group.members for t, f in m.filters.items()}
            show(group.name, group.message_model, group.unequal_topics, filters)


def without_await(directory: Path) -> None:
    with broker_process(directory, transactionTimeOut=1000) as broker:
        address: str = broker.address
        with blocking.Producer("orders-producer", namesrv=address) as producer:
            result: SendResult = producer.send(Message("orders", b"x"), order_key="o-1")
            producer.send_batch([Message("orders", b"x")])
            producer.send_oneway(Message("orders", b"x"))
        with blocking.TransactionProducer("orders-tx", checker=plain_checker) as transactions:
            with transactions.transaction(Message("orders", b"x")) as tx:
                identity: str = tx.id
            transactions.send_in_transaction(Message("orders", b"x"), Orders())
            with transactions.transaction([Message("orders", b"x")] * 2) as several:
                show(several.results, [one.age for one in transactions.pending()])
        with blocking.Consumer("billing", {"orders": "*"}, broadcasting=True) as consumer:
            for message in consumer:
                taken: bool = message.ack()
                show(identity, taken, result.queue, message.body)
            one: blocking.MessageView | None = consumer.receive(0.1)
            show(one, consumer.receive().inbox_id, consumer.receive(None).extend(60))
            taker, first = blocking.receive_any([consumer])
            counts: bool = taker is consumer and first.ack()
            show(counts, blocking.receive_any([consumer], timeout=1.0))
            consumer.stop()
        with blocking.Admin(namesrv=address) as admin:
            for transaction in admin.transactions(state="prepared"):
                admin.resume(transaction.transaction_id)
            letters: list[DeadLetter] = list(admin.dead_letters("billing"))
            show(admin.redrive("billing", letters[0].message_id).begun)
        broker.kill()
        broker.restart()


@dataclass
class Order:
    number: str
    amount: int


async def typed_messages() -> None:
    """A codec gives messages their types, on both sides and without a cast."""
    orders = json(Order)
    async with Producer("g", codec=orders, namesrv="127.0.0.1:9876") as producer:
        await producer.send(producer.message("orders", Order("o-1", 3), keys="o-1"))
    transactional = TransactionProducer("g", codec=orders)
    async with transactional.transaction(transactional.message("orders", Order("o-2", 4))):
        pass
    async with Consumer("billing", {"orders": "*"}, codec=orders) as consumer:
        async for message in consumer:
            amount: int = message.value.amount
            print(amount)
            await message.ack()

        async def handle(message: MessageView[Order]) -> None:
            print(message.value.number)

        await consumer.run(handle)
    plain: Consumer = Consumer("billing", {"orders": "*"})
    body: bytes = (await plain.receive()).value
    assert body


def typed_blocking_messages(consumer: blocking.Consumer[Order]) -> int:
    """So does the blocking client."""
    with blocking.Consumer("billing", {"orders": "*"}, codec=msgpack(Order)) as other:
        found = blocking.receive_any([consumer, other], timeout=1)
        print("none" if found is None else found[1].value.number)
        return other.receive().value.amount
