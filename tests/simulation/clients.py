"""The users' programs: producers with local transactions, consumers, and an operator.

Producers end their transactions in every way: normally, by an exception before or after the row is
committed, or by a cancellation at any await, once or again during the cleanup. They send messages
that nearly fill a log file, and forge properties that only brokers may set. Consumers retry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from halfmq.client import (
    Admin,
    ClientConfig,
    ClientError,
    Consumer,
    Decision,
    Message,
    MessageView,
    Transaction,
    TransactionProducer,
)
from halfmq.remoting.recall_handle import parse_recall_handle
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import PROPERTY_TRANSACTION_HALF_ID

from .ledger import Ledger
from .loop import Process
from .scenario import Attempt

if TYPE_CHECKING:
    from .world import World

GROUP: Final = "payers"
READERS: Final = "readers"
TOPICS: Final = ("orders", "invoices")
DELAYS_S: Final = (0.2, 3.0, 20.0)
DELAY_LEVELS: Final = ((1, 1.0), (2, 5.0), (3, 10.0))
"""Of plain messages, with their seconds."""
GIANT_RESERVE: Final = (300, 700)
"""Bytes by which a giant body is smaller than a file of the log, from and below."""
LONGEST_LOCAL_S: Final = 120.0
RETRY_S: Final = 0.2  # between two attempts of a program to get started


class LocalError(Exception):
    """The local transaction failed, or its driver says so: the row may still be committed."""


class Clients:
    """All that users run."""

    def __init__(self, world: World, namesrv: str) -> None:
        self._world = world
        self._namesrv = namesrv
        self._begun = 0
        self.ledger = Ledger(world)
        self.under_way: dict[str, Process] = {}  # messages and transactions, by key

    def _config(self, process: Process) -> ClientConfig:
        return ClientConfig(
            namesrv=self._namesrv,
            instance_name=process.name,
            connect_timeout=1.0,
            heartbeat_interval=5.0,
            rebalance_interval=5.0,
            offset_commit_interval=1.0,
            route_refresh_interval=5.0,
            pull_suspend=5.0,
            compress_over=None,  # giants are to be stored as they are
        )

    def forget(self, process: Process) -> None:
        """Drop the work of a dead process."""
        for key in [key for key, owner in self.under_way.items() if owner is process]:
            del self.under_way[key]

    # --- producers

    async def produce(self, process: Process) -> None:
        """Run a producer with its share of the remaining transactions."""
        while True:
            producer = TransactionProducer(GROUP, checker=self.check, config=self._config(process))
            try:
                await producer.start()
                break
            except ClientError:
                await asyncio.sleep(RETRY_S)
        workers = [self._work(producer, process) for _ in range(self._world.scenario.workers)]
        await asyncio.gather(*workers)

    async def _work(self, producer: TransactionProducer, process: Process) -> None:
        world = self._world
        while self._begun < world.scenario.transactions and not world.settling:
            self._begun += 1
            key = f"k{self._begun}"
            self.under_way[key] = process
            try:
                await self._produce_one(producer, key)
            finally:
                if not process.dead:
                    self.under_way.pop(key, None)
            await asyncio.sleep(world.chance.random() ** 3 * world.scenario.seconds / 4)

    async def _produce_one(self, producer: TransactionProducer, key: str) -> None:
        chance = self._world.chance
        if chance.random() < 0.7:
            await self._transact(producer, key)
        elif chance.random() < self._world.scenario.batches:
            await self._send_batch(producer, key)
        else:
            await self._send(producer, key)

    async def _send(self, producer: TransactionProducer, key: str) -> None:
        records = self._world.records
        chance = self._world.chance
        message = Message(chance.choice(TOPICS), key.encode(), keys=key)
        if chance.random() < 0.1:
            message.delay_level, delay_s = chance.choice(DELAY_LEVELS)
            now = self._world.loop.now
            records.plain_due[key] = now, now + delay_s
        elif chance.random() < 0.3:
            now, delay_s = self._world.loop.now, chance.choice(DELAYS_S)
            message.deliver_after = timedelta(seconds=delay_s)
            records.plain_due[key] = now, now + delay_s
        records.plain_sent[key] = None
        self._forge(message)
        with contextlib.suppress(ClientError):
            result = await producer.send(message)
            records.plain_acknowledged[key] = None
            if result.recall_handle is not None and chance.random() < 0.5:
                await self._recall(producer, key, result.recall_handle)

    async def _recall(self, producer: TransactionProducer, key: str, handle: str) -> None:
        """Recall a message, some of them when it is too late."""
        world = self._world
        await asyncio.sleep(world.chance.random() ** 2 * 4.0)
        world.records.recall_tried[key] = None
        await producer.recall(handle)
        world.loop.record_event("recalled", key)
        world.records.recalled[key] = parse_recall_handle(handle).place
        world.records.events["recall"] += 1

    def _forge(self, message: Message) -> None:
        """Sometimes add the half id of another transaction to a message."""
        chance, attempts = self._world.chance, self._world.records.attempts
        if attempts and chance.random() < 0.1:
            attempt = attempts[chance.choice(list(attempts))]
            if attempt.half_ids:
                message.properties = {PROPERTY_TRANSACTION_HALF_ID: attempt.half_ids[0]}

    async def _send_batch(self, producer: TransactionProducer, key: str) -> None:
        world, records = self._world, self._world.records
        topic = world.chance.choice(TOPICS)
        size = min(world.scenario.body_size, 900)
        # Of a batch all bodies together may be as long as the one of a single message.
        count = world.chance.randrange(2, 7) if size < 900 else 2
        keys = [f"{key}.{number}" for number in range(count)]
        records.plain_sent.update(dict.fromkeys(keys))
        messages = [Message(topic, one.encode().ljust(size), keys=one) for one in keys]
        self._forge(messages[-1])
        with contextlib.suppress(ClientError):
            await producer.send_batch(messages)
            records.plain_acknowledged.update(dict.fromkeys(keys))
            records.events["batch"] += 1

    async def _transact(self, producer: TransactionProducer, key: str) -> None:
        world = self._world
        chance, records = world.chance, world.records
        count = chance.randrange(2, 5) if chance.random() < world.scenario.several else 1
        bodies = [f"{key}/{number}" for number in range(count)]
        attempt = records.attempts[key] = Attempt(key, bodies)
        if chance.random() < 0.1:
            attempt.delay_s = chance.choice(DELAYS_S)
        delay = timedelta(seconds=attempt.delay_s) if attempt.delay_s else None
        size = world.scenario.body_size
        if world.scenario.giants and count == 1 and chance.random() < 0.15:
            size = world.scenario.log_file_size - chance.randrange(*GIANT_RESERVE)
        messages = [
            Message(
                chance.choice(TOPICS),
                body.encode().ljust(size),
                keys=key,
                deliver_after=delay,
            )
            for body in bodies
        ]
        self._forge(messages[-1])
        transaction = producer.transaction(messages)
        try:
            async with self._patience(), transaction:
                attempt.half_ids = [result.offset_message_id for result in transaction.results]
                world.loop.record_event("prepared", key, *attempt.half_ids)
                if not await self._local(transaction):
                    transaction.decide(Decision.UNKNOWN)
        except LocalError:
            records.events["local failure"] += 1
        except TimeoutError:
            records.events["cancelled"] += 1
        except ClientError as error:
            records.events[type(error).__name__] += 1
        attempt.ended, attempt.accepted = transaction.decision, transaction.decided
        world.loop.record_event("ended", key, str(attempt.ended), attempt.accepted)

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Sometimes cancel the block, once, or again during its cleanup."""
        chance = self._world.chance
        if chance.random() >= self._world.scenario.impatience:
            yield
            return
        first = chance.random() * chance.choice((0.02, 0.1, 1.0))
        again = first + chance.random() * chance.choice((0.01, 0.1, 10.0))
        async with asyncio.timeout(again), asyncio.timeout(first):
            yield

    async def _local(self, transaction: Transaction) -> bool:
        """Run the local transaction; return False if its outcome is not known here.

        Raises:
            LocalError: It failed, or its driver says so.
        """
        world = self._world
        chance, key = world.chance, str(transaction.message.keys)
        longest = LONGEST_LOCAL_S if chance.random() < 0.03 else world.scenario.local_s
        await asyncio.sleep(chance.random() * longest)
        if chance.random() < 0.2:
            if chance.random() < 0.3:
                transaction.rollback()
            raise LocalError(key)
        if not await self.ledger.save(key):
            raise LocalError(key)
        if chance.random() < 0.05:
            world.records.events["failed after commit"] += 1
            raise LocalError(key)
        return chance.random() >= 0.05

    async def check(self, message: MessageView) -> Decision:
        """Check a transaction, as the producers' checker."""
        world = self._world
        world.records.events["check"] += 1
        await asyncio.sleep(world.chance.random() * 0.02)
        if not world.settling:
            mood = world.chance.random()
            if mood < 0.1:
                return Decision.UNKNOWN
            if mood < 0.12:
                await asyncio.sleep(40.0)
            if mood > 0.98:
                raise LocalError(message.keys)
        decision = await self.ledger.look_up(message.keys)
        await asyncio.sleep(world.chance.random() * 0.02)
        return decision

    # --- consumers

    async def consume(self, process: Process) -> None:
        """Run a member of the consumer group."""
        world = self._world
        while True:
            consumer = Consumer(
                READERS,
                dict.fromkeys(TOPICS, "*"),
                start_from="first",
                config=self._config(process),
            )
            try:
                await consumer.start()
                break
            except ClientError:
                await asyncio.sleep(RETRY_S)
        async for message in consumer:
            self._consumed(message)
            if not world.settling and world.chance.random() < 0.03:
                await message.retry(delay_level=1)
            else:
                await message.ack()

    def _consumed(self, message: MessageView) -> None:
        world = self._world
        records = world.records
        body = message.body.decode().rstrip()
        records.delivered[body] += 1
        world.loop.record_event("delivered", body, message.topic, message.queue_offset)
        half_id = message.half_message_id
        if half_id is not None:
            records.half_ids.setdefault(body, set()).add(half_id)
        self._check_time(message, body)

    def _check_time(self, message: MessageView, body: str) -> None:
        world, key = self._world, message.keys
        attempt = world.records.attempts.get(key)
        since = due = 0.0
        if attempt is not None and attempt.delay_s and attempt.row_at:
            since, due = attempt.row_at, attempt.row_at + attempt.delay_s
        elif key in world.records.plain_due:
            since, due = world.records.plain_due[key]
        early = due - world.loop.now
        stepped, started = world.records.clock_stepped_at, world.records.started_at
        # A broker that starts delivers what is due by the clock, however the clock came to it. So
        # does one that has stored a message again, with its time, before the old file is deleted.
        by_clock = since < started or "TIMER_DELIVER_MS" in message.properties
        if early > 0.002 and not (since < stepped and by_clock):
            world.violate(f"{body} was delivered {early:.3f} s before its time")

    # --- the operator

    async def operate(self, process: Process) -> None:
        """Run an operator, who decides parked transactions."""
        while True:
            admin = Admin(config=self._config(process))
            try:
                await admin.start()
                break
            except ClientError:
                await asyncio.sleep(RETRY_S)
        while True:
            if self._world.settling or self._world.scenario.operator:
                try:
                    await self._decide_parked(admin)
                except ClientError as error:
                    self._world.records.events[f"operator {type(error).__name__}"] += 1
            await asyncio.sleep(1.0)

    async def _decide_parked(self, admin: Admin) -> None:
        async for parked in admin.transactions(state="parked"):
            self._world.loop.record_event("operator", parked.keys)
            if not self._world.settling and self._world.chance.random() < 0.3:
                offset = parse_offset_message_id(parked.half_message_id).physical_offset
                self._world.records.resumed[offset] = None
                await admin.resume(parked.half_message_id)
                continue
            decision = await self.ledger.look_up(parked.keys)
            if decision is Decision.COMMIT:
                await admin.commit(parked.half_message_id)
            elif decision is Decision.ROLLBACK:
                await admin.rollback(parked.half_message_id)
                self._world.records.operator_rollbacks[parked.keys] = None
