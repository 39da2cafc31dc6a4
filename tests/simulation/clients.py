"""The users' side: producers with local transactions, consumers, an operator, and the ledger.

The ledger is the users' database: outside all processes, atomic, never lost. A local transaction
writes a row under its key. The checker looks for the row and, finding none, leaves a tombstone
there, so that a local transaction that comes later fails. That is what the documentation asks of
users, and with it *row ⇔ message* must hold, whatever else happens.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    TransactionProducer,
)

from .loop import Process
from .scenario import ROW, TOMBSTONE, Attempt

if TYPE_CHECKING:
    from .world import World

GROUP: Final = "payers"
READERS: Final = "readers"
TOPICS: Final = ("orders", "invoices")
LONGEST_LOCAL_S: Final = 120.0
RETRY_S: Final = 0.2  # between two attempts of a program to get started


class LocalError(Exception):
    """The local transaction has failed and left no row."""


class Clients:
    """All that users run."""

    def __init__(self, world: World, namesrv: str) -> None:
        self._world = world
        self._namesrv = namesrv
        self._begun = 0
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
        )

    def forget(self, process: Process) -> None:
        """Note that a process is dead, and with it what it was about to do."""
        for key in [key for key, owner in self.under_way.items() if owner is process]:
            del self.under_way[key]

    # --- producers

    async def produce(self, process: Process) -> None:
        """Be a producer, with its share of the work that is left."""
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
        records.plain_sent[key] = None
        topic = self._world.chance.choice(TOPICS)
        with contextlib.suppress(ClientError):
            await producer.send(Message(topic, key.encode(), keys=key))
            records.plain_acknowledged[key] = None

    async def _send_batch(self, producer: TransactionProducer, key: str) -> None:
        world, records = self._world, self._world.records
        topic = world.chance.choice(TOPICS)
        size = world.scenario.body_size
        # Of a batch all bodies together may be as long as the one of a single message.
        count = world.chance.randrange(2, 7) if size < 900 else 2
        keys = [f"{key}.{number}" for number in range(count)]
        records.plain_sent.update(dict.fromkeys(keys))
        messages = [Message(topic, one.encode().ljust(size), keys=one) for one in keys]
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
            attempt.delay_s = chance.choice((0.2, 3.0))
        delay = timedelta(seconds=attempt.delay_s) if attempt.delay_s else None
        messages = [
            Message(
                chance.choice(TOPICS),
                body.encode().ljust(world.scenario.body_size),
                keys=key,
                deliver_after=delay,
            )
            for body in bodies
        ]
        transaction = producer.transaction(messages)
        try:
            async with transaction:
                attempt.half_ids = [result.offset_message_id for result in transaction.results]
                world.loop.witness("prepared", key, *attempt.half_ids)
                if not await self._local(key):
                    transaction.decide(Decision.UNKNOWN)
        except LocalError:
            records.events["local failure"] += 1
        except ClientError as error:
            records.events[type(error).__name__] += 1
        attempt.ended, attempt.accepted = transaction.decision, transaction.decided
        world.loop.witness("ended", key, str(attempt.ended), attempt.accepted)

    # --- the database

    async def _local(self, key: str) -> bool:
        """Run the local transaction; False when its outcome is not known here.

        Raises:
            LocalError: It has failed.
        """
        world = self._world
        chance = world.chance
        longest = LONGEST_LOCAL_S if chance.random() < 0.03 else world.scenario.local_s
        await asyncio.sleep(chance.random() * longest)
        if chance.random() < 0.2:
            raise LocalError(key)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # The statement is on its way to the database: it arrives even if we die now.
        world.later(chance.random() * 0.01, self._commit, key, answer, world.loop.process)
        if not await answer:
            raise LocalError(key)
        return chance.random() >= 0.05

    def _commit(self, key: str, answer: asyncio.Future[bool], process: Process) -> None:
        world = self._world
        records = world.records
        committed = key not in records.ledger
        if committed:
            records.ledger[key] = ROW
            records.attempts[key].row_at = world.loop.now
        world.loop.witness("row", key, committed)
        if not process.dead:
            when = world.loop.now + world.chance.random() * 0.01
            process.call_at(when, _answer, answer, committed)

    def look_up(self, key: str) -> Decision:
        """Say what the ledger knows of a transaction; fenced, no row now means that none will be.

        Without the fence a row may come later, and its COMMIT be refused: no broker can help that.
        What the broker says must hold all the same.
        """
        ledger = self._world.records.ledger
        if self._world.scenario.fenced:
            ledger.setdefault(key, TOMBSTONE)
        row = ledger.get(key)
        self._world.loop.witness("looked up", key, row)
        return Decision.COMMIT if row == ROW else Decision.ROLLBACK

    async def check(self, message: MessageView) -> Decision:
        """Be the checker of the producers."""
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
        decision = self.look_up(message.keys)
        await asyncio.sleep(world.chance.random() * 0.02)
        return decision

    # --- consumers

    async def consume(self, process: Process) -> None:
        """Be a member of the group of consumers."""
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
                await message.retry(1)
            else:
                await message.ack()

    def _consumed(self, message: MessageView) -> None:
        world = self._world
        records = world.records
        body = message.body.decode().rstrip()
        records.delivered[body] += 1
        world.loop.witness("delivered", body, message.topic, message.queue_offset)
        half_id = message.half_message_id
        if half_id is not None:
            records.half_ids.setdefault(body, set()).add(half_id)
        attempt = records.attempts.get(message.keys)
        if attempt is not None and attempt.delay_s:
            early = attempt.row_at + attempt.delay_s - world.loop.now
            if attempt.row_at and early > 0.002:  # due times are kept in whole milliseconds
                world.violate(f"{body} was delivered {early:.3f} s before its time")

    # --- the operator

    async def operate(self, process: Process) -> None:
        """Be an operator, who decides what the broker has given up asking about."""
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
            self._world.loop.witness("operator", parked.keys)
            if not self._world.settling and self._world.chance.random() < 0.3:
                await admin.resume(parked.half_message_id)
            elif self.look_up(parked.keys) is Decision.COMMIT:
                await admin.commit(parked.half_message_id)
            else:
                await admin.rollback(parked.half_message_id)
                self._world.records.operator_rollbacks[parked.keys] = None


def _answer(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
