"""What a Python program does with each broker, by that broker's own asyncio client.

Run as a process of its own for each load, so that its processor time is the client's:
``python -m benchmarks.python_peer_clients NAME ADDRESS LOAD OUTSTANDING SECONDS`` prints messages,
seconds and processor seconds.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Final

BODY: Final = b"m" * 1024
TOPIC: Final = "benchmark"
BATCH: Final = 64
"""Messages of a batch, and most that are received at one time."""
DRAIN_S: Final = 1.0
"""Seconds without a message after which the queue is empty."""

_numbers = count()


class Client:
    """One program; a load that a broker does not offer is left out by not defining it."""

    send: Callable[[], Awaitable[int]]
    """Send one message, with a key and a tag where the broker has them; return 1."""
    batch: Callable[[], Awaitable[int]]
    transaction: Callable[[], Awaitable[int]]
    receive: Callable[[], Awaitable[int]]
    """Receive up to `BATCH` messages and acknowledge them; return how many."""


@asynccontextmanager
async def halfmq(address: str, load: str) -> AsyncIterator[Client]:
    """halfmq; its transactions need no ledger here: what is measured is the broker's part."""
    from halfmq.client import Consumer, Decision, Message, TransactionProducer

    def message() -> Message:
        return Message(TOPIC, BODY, tags="created", keys=f"k-{next(_numbers)}")

    client = Client()
    if load == "receive":
        group = Consumer("bench", {TOPIC: "*"}, namesrv=address, start_from="first")
        async with group as consumer:

            async def receive() -> int:
                found = await consumer.receive_many(BATCH, timeout=DRAIN_S)
                for one in found:
                    await one.ack()
                return len(found)

            client.receive = receive
            yield client
            return
    checked = TransactionProducer("bench", lambda _message: Decision.UNKNOWN, namesrv=address)
    async with checked as producer:

        async def send() -> int:
            await producer.send(message())
            return 1

        async def batch() -> int:
            await producer.send_batch([message() for _ in range(BATCH)])
            return BATCH

        async def transaction() -> int:
            async with producer.transaction(message()):
                pass
            return 1

        client.send, client.batch, client.transaction = send, batch, transaction
        yield client


@asynccontextmanager
async def redis(address: str, load: str) -> AsyncIterator[Client]:
    """Redis Streams."""
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError

    host, port = address.split(":")
    client = Client()
    server: Any = Redis(host=host, port=int(port), max_connections=300)
    if load == "receive":
        with suppress(ResponseError):  # it exists
            await server.xgroup_create(TOPIC, "bench", id="0", mkstream=True)

    def fields() -> dict[str, Any]:
        return {"body": BODY, "key": f"k-{next(_numbers)}", "tag": "created"}

    async def send() -> int:
        await server.xadd(TOPIC, fields())
        return 1

    async def batch() -> int:
        async with server.pipeline(transaction=False) as pipeline:
            for _ in range(BATCH):
                pipeline.xadd(TOPIC, fields())
            await pipeline.execute()
        return BATCH

    async def receive() -> int:
        wait = int(DRAIN_S * 1_000)
        found = await server.xreadgroup("bench", "c", {TOPIC: ">"}, count=BATCH, block=wait)
        ids = [entry[0] for _, entries in found for entry in entries]
        if ids:
            await server.xack(TOPIC, "bench", *ids)
        return len(ids)

    client.send, client.batch, client.receive = send, batch, receive
    yield client
    await server.aclose()


@asynccontextmanager
async def nats(address: str, load: str) -> AsyncIterator[Client]:
    """NATS JetStream; it has no batches, but acknowledges without a round trip."""
    import nats as library
    from nats.errors import TimeoutError as NothingError
    from nats.js.api import StorageType, StreamConfig

    client, connection = Client(), await library.connect(f"nats://{address}")
    stream = connection.jetstream(publish_async_max_pending=4_096)
    await stream.add_stream(StreamConfig(TOPIC, subjects=[TOPIC], storage=StorageType.FILE))

    async def send() -> int:
        headers = {"key": f"k-{next(_numbers)}", "tag": "created"}
        await stream.publish(TOPIC, BODY, headers=headers)
        return 1

    client.send = send
    if load == "receive":
        pulls = await stream.pull_subscribe(TOPIC, durable="bench")

        async def receive() -> int:
            try:
                found = await pulls.fetch(BATCH, timeout=DRAIN_S)
            except NothingError:
                return 0
            for one in found:
                await one.ack()
            return len(found)

        client.receive = receive
    yield client
    await connection.close()


@asynccontextmanager
async def rabbitmq(address: str, load: str) -> AsyncIterator[Client]:
    """A quorum queue with publisher confirms; acknowledgements go without a round trip."""
    from aio_pika import DeliveryMode, Message, connect

    client, connection = Client(), await connect(f"amqp://guest:guest@{address}/")
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=4 * BATCH)
    queue = await channel.declare_queue(TOPIC, durable=True, arguments={"x-queue-type": "quorum"})

    async def send() -> int:
        headers: Any = {"key": f"k-{next(_numbers)}", "tag": "created"}
        message = Message(BODY, headers=headers, delivery_mode=DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, TOPIC)
        return 1

    client.send = send
    if load == "receive":
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        await queue.consume(arrived.put)

        async def receive() -> int:
            try:
                message = await asyncio.wait_for(arrived.get(), DRAIN_S)
            except TimeoutError:
                return 0
            done = 1
            while done < BATCH and not arrived.empty():
                message, done = arrived.get_nowait(), done + 1
            await message.ack(multiple=True)
            return done

        client.receive = receive
    yield client
    await connection.close()


@asynccontextmanager
async def kafka(address: str, load: str) -> AsyncIterator[Client]:
    """Kafka with aiokafka, which sends in batches by itself; a transaction may be aborted."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    client = Client()
    if load == "receive":
        consumer = AIOKafkaConsumer(
            TOPIC, bootstrap_servers=address, group_id="bench", auto_offset_reset="earliest",
            enable_auto_commit=False,
        )  # fmt: skip
        await consumer.start()

        async def receive() -> int:
            found = await consumer.getmany(timeout_ms=int(DRAIN_S * 1_000), max_records=BATCH)
            if found:
                await consumer.commit()
            return sum(map(len, found.values()))

        client.receive = receive
        yield client
        await consumer.stop()
        return
    transactional = "bench" if load == "transaction" else None
    producer = AIOKafkaProducer(
        bootstrap_servers=address, acks="all", transactional_id=transactional
    )
    await producer.start()

    async def send() -> int:
        key = f"k-{next(_numbers)}".encode()
        await producer.send_and_wait(TOPIC, BODY, key=key, headers=[("tag", b"created")])
        return 1

    async def batch() -> int:
        await asyncio.gather(*(send() for _ in range(BATCH)))
        return BATCH

    async def transaction() -> int:
        async with producer.transaction():
            await send()
        return 1

    client.send, client.batch, client.transaction = send, batch, transaction
    yield client
    await producer.stop()


CLIENTS: Final = {one.__name__: one for one in (halfmq, redis, nats, rabbitmq, kafka)}


async def measure(
    name: str, address: str, load: str, outstanding: int, seconds: float
) -> tuple[int, float, float]:
    """Return messages, seconds and processor seconds of this process."""
    async with CLIENTS[name](address, load) as client:
        step = getattr(client, load)
        for _ in range(3):
            await step()
        done, began, cpu = 0, time.perf_counter(), _cpu()
        end = began + seconds

        async def repeat() -> None:
            nonlocal done
            while time.perf_counter() < end:
                got = await step()
                done += got
                if not got:
                    return

        await asyncio.gather(*(repeat() for _ in range(outstanding)))
        return done, time.perf_counter() - began, _cpu() - cpu


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    name, address, load, outstanding, seconds = sys.argv[1:]
    print(*asyncio.run(measure(name, address, load, int(outstanding), float(seconds))))
