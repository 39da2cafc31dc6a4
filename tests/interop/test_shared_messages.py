"""Consumers that share messages (pop) instead of queues, at halfmq and at RocketMQ 5.3.3."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client import (
    Admin,
    ClientConfig,
    ConfigurationError,
    Consumer,
    Message,
    MessageQueue,
    Producer,
    UnsupportedRequestError,
    blocking,
)
from halfmq.client.consuming.delivery import Delivery, DeliveryBuffer
from halfmq.client.testing import broker_process
from tests.support.fake_broker import fake_broker
from tests.support.patience import PATIENCE_S, until
from tests.support.rocketmq_broker import rocketmq_broker

_numbers = itertools.count()

OURS: Final = "halfmq"


@pytest.fixture(
    scope="module", params=[OURS, pytest.param("RocketMQ 5.3.3", marks=pytest.mark.campaign)]
)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A running broker and its name server."""
    home = tmp_path_factory.mktemp("broker")
    if request.param == OURS:
        with broker_process(home) as ours:
            yield Place(OURS, ours.address)
        return
    settings = {"autoCreateTopicEnable": "true", "timerWheelEnable": "true"}
    with rocketmq_broker(home / "store", home, **settings) as theirs:
        theirs.wait_for_route("TBW102")
        yield Place("RocketMQ", theirs.namesrv)


class Place:
    """A broker, with a topic and a group for one test."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.config = name, ClientConfig(namesrv=address)
        number = next(_numbers)
        self.topic, self.group = f"shared-{number}", f"sharing-{number}"

    def renewed(self) -> Place:
        return Place(self.name, str(self.config.namesrv))

    def consumer(self, **changed: Any) -> Consumer:
        usual: dict[str, Any] = {
            "start_from": "first",
            "share": "messages",
            "config": self.config,
            "ack_timeout": 60.0,
        }
        return Consumer(self.group, {self.topic: "*"}, **usual | changed)

    async def send(self, *bodies: bytes, queues: int = 1) -> None:
        async with Producer("senders", config=self.config) as producer:
            if self.topic not in await _topics(self.config):
                async with Admin(config=self.config) as admin:
                    await admin.create_topic(self.topic, queues=queues)
            for body in bodies:
                await producer.send(Message(self.topic, body))


async def _topics(config: ClientConfig) -> set[str]:
    async with Admin(config=config) as admin:
        return {one.name for one in await admin.topics()}


@pytest.fixture
def shared(place: Place) -> Place:
    return place.renewed()


async def test_more_members_than_queues_get_messages_at_one_time(shared: Place) -> None:
    """One queue, three members, one message each; none gets the message of another."""
    await shared.send(b"a", b"b", b"c")
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(shared.consumer()) for _ in range(3)]
        found = [await member.receive() for member in members]
        assert sorted(one.body for one in found) == [b"a", b"b", b"c"]
        assert MessageQueue(shared.topic, "broker-a", -1) in members[0].assignment
        assert [await one.ack() for one in found] == [True, True, True]
        assert await found[0].ack() is False
        assert await members[0].receive(timeout=0.2) is None


async def test_what_is_sent_while_members_wait_arrives(shared: Place) -> None:
    """A held request wakes the member; batches, filters and a stop work as with queues."""
    await shared.send()
    async with shared.consumer(start_from="last", ack_timeout=30.0) as consumer:
        waiting = asyncio.ensure_future(consumer.receive_many(10))
        await asyncio.sleep(0)
        await shared.send(b"first")
        (first,) = await asyncio.wait_for(waiting, PATIENCE_S)
        assert (first.body, first.delivery_attempt) == (b"first", 1)
        await first.ack()
        await shared.send(b"second")
        await consumer.pause(shared.topic)
        assert await consumer.receive(timeout=0.2) is None
        await consumer.resume()
        second = await consumer.receive()
        await consumer.stop()
        assert await second.ack()
        assert await consumer.receive(timeout=1) is None


async def test_a_retried_message_comes_again_and_a_rejected_one_is_dead(shared: Place) -> None:
    """A retry comes to any member after its delay; an extended one is acknowledged later."""
    await shared.send(b"m")
    async with shared.consumer(ack_timeout=2.0) as consumer:
        message = await consumer.receive()
        assert await message.extend(30)
        await asyncio.sleep(2.5)  # its first time is over
        await message.retry(timedelta(milliseconds=200), reason="not now")
        assert await message.ack() is False
        again = await consumer.receive()
        assert (again.body, again.delivery_attempt) == (b"m", 2)
        assert (again.topic, again.inbox_id) == (shared.topic, message.inbox_id)
        await again.reject("never")
        assert await consumer.receive(timeout=0.2) is None
    async with Admin(config=shared.config) as admin:
        (letter,) = [one async for one in admin.dead_letters(shared.group)]
        assert letter.body == b"m"
        assert letter.failure_reason in ("never", None)


async def test_the_acknowledgement_of_a_late_member_does_not_count(shared: Place) -> None:
    """The message has gone to another member, whose acknowledgement counts."""
    await shared.send(b"m")
    async with shared.consumer(ack_timeout=1.0) as late, shared.consumer() as other:
        message = await late.receive()
        again = await asyncio.wait_for(other.receive(), PATIENCE_S)
        assert again.delivery_attempt == 2
        assert await message.extend(5) is False
        assert await message.ack() is False
        assert await again.ack()
        assert await other.receive(timeout=0.2) is None


async def test_ordered_members_get_one_message_of_a_queue_at_a_time(shared: Place) -> None:
    """A retried message holds its queue, and each delivery of it is counted."""
    await shared.send(b"1", b"2", b"3")
    async with (
        shared.consumer(ordered=True) as one,
        shared.consumer(ordered=True) as other,
    ):
        first = await one.receive()
        assert await other.receive(timeout=0.3) is None
        await first.retry(timedelta(milliseconds=100))
        seen = [(first.body, first.delivery_attempt)]
        takers = [asyncio.ensure_future(member.receive()) for member in (one, other)]
        while len(seen) < 4:
            done, _ = await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                message = task.result()
                seen.append((message.body, message.delivery_attempt))
                assert await message.ack()
                takers[takers.index(task)] = asyncio.ensure_future(
                    (one if takers.index(task) == 0 else other).receive()
                )
        for task in takers:
            task.cancel()
        await asyncio.wait(takers)
    assert seen == [(b"1", 1), (b"1", 2), (b"2", 1), (b"3", 1)]


async def test_a_stopped_member_gives_back_what_nobody_received(
    shared: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was popped for a call that gave up waits for no ack_timeout."""
    await shared.send()
    async with shared.consumer(ack_timeout=600.0) as one, shared.consumer() as other:
        waiting = asyncio.ensure_future(one.receive())
        popped = DeliveryBuffer.add_popped

        def give_up(buffer: DeliveryBuffer, deliveries: list[Delivery]) -> None:
            waiting.cancel()
            popped(buffer, deliveries)

        monkeypatch.setattr(DeliveryBuffer, "add_popped", give_up)
        await shared.send(b"m")
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await one.stop()
        message = await asyncio.wait_for(other.receive(), PATIENCE_S)
        assert message.body == b"m"
        await message.ack()


async def test_a_new_group_begins_at_a_time(shared: Place) -> None:
    """Pop has no such thing: the first member stores the offset."""
    await shared.send(b"old")
    await asyncio.sleep(0.01)
    async with shared.consumer(start_from=datetime.now(UTC)) as consumer:
        await shared.send(b"new")
        assert (await consumer.receive()).body == b"new"


def test_blocking_members_share_messages(shared: Place) -> None:
    """Threads get messages of one queue at one time, and their acknowledgements count."""
    asyncio.run(shared.send(*(b"m%d" % number for number in range(20))))
    done: list[bytes] = []

    def handle(message: blocking.MessageView) -> None:
        assert message.extend(30)
        if message.body == b"m3" and message.delivery_attempt == 1:
            message.retry(timedelta(milliseconds=100))
            return
        assert message.ack()
        done.append(message.body)
        if len(done) == 18:
            consumer.stop()

    usual: dict[str, Any] = {"start_from": "first", "share": "messages", "config": shared.config}
    with blocking.Consumer(shared.group, {shared.topic: "*"}, **usual) as consumer:
        first = consumer.receive_many(2)
        assert all(one.ack() for one in first)
        more = consumer.receive_many(2 - len(first)) if len(first) < 2 else []
        assert all(one.ack() for one in more)
        done += [one.body for one in (*first, *more)][2:]
        consumer.run(handle, concurrency=4)
    assert len(set(done)) == len(done) == 18


WORKER = """
import asyncio, os, signal, sys
from halfmq.client import ClientConfig, Consumer

address, topic, group, path, dies_at = sys.argv[1:]
out = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
left = int(dies_at)

async def handle(message):
    global left
    os.write(out, b"got %s\\n" % message.body)
    await asyncio.sleep(0.005)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if await message.ack():
        os.write(out, b"ack %s\\n" % message.body)

async def main():
    config = ClientConfig(namesrv=address)
    usual = dict(start_from="first", share="messages", ack_timeout=3.0, config=config)
    async with Consumer(group, {topic: "*"}, **usual) as consumer:
        await consumer.run(handle, concurrency=1 if left > 0 else 4)

asyncio.run(main())
"""
MESSAGES: Final = 200


async def test_workers_that_are_killed_lose_nothing_and_repeat_nothing_acknowledged(
    shared: Place, tmp_path: Path
) -> None:
    """200 messages in two queues, five workers, one killed with a message in hand."""
    path = tmp_path / "handled"
    path.touch()
    await shared.send(*(b"m%d" % number for number in range(MESSAGES)), queues=2)

    def lines(kind: str) -> list[str]:
        return [one[4:] for one in path.read_text().split("\n")[:-1] if one.startswith(kind)]

    address = str(shared.config.namesrv)
    command = [sys.executable, "-c", WORKER, address, shared.topic, shared.group, str(path)]
    workers = [
        subprocess.Popen([*command, dies_at])  # noqa: ASYNC220 -- ended below
        for dies_at in ("5", "0", "0", "0", "0")
    ]
    try:
        await until(lambda: len(set(lines("ack"))) == MESSAGES)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(PATIENCE_S) for worker in workers]
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0]
    acknowledged: set[str] = set()
    for line in path.read_text().splitlines():
        kind, body = line.split()
        if kind == "ack":
            assert body not in acknowledged, f"{body} was acknowledged twice"
            acknowledged.add(body)
        else:
            assert body not in acknowledged, f"{body} came after it was acknowledged"


async def test_a_broker_without_pop_is_refused_at_the_start() -> None:
    async with fake_broker() as broker:
        consumer = Consumer(
            "g", {"orders": "*"}, share="messages", config=ClientConfig(namesrv=broker.address)
        )
        with pytest.raises(UnsupportedRequestError, match='share="queues"'):
            await consumer.start()


@pytest.mark.parametrize(
    "wrong", [{"ack_timeout": None}, {"ack_timeout": 50_000.0}, {"broadcasting": True}]
)
def test_what_needs_queues_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match='"messages"'):
        Consumer("g", {"orders": "*"}, share="messages", **wrong)


async def test_positions_and_seek_are_of_queues(shared: Place) -> None:
    """The error names what moves the group."""
    await shared.send(b"m")
    async with shared.consumer() as consumer:
        with pytest.raises(ConfigurationError, match=r"Admin\.offsets"):
            await consumer.positions()
        with pytest.raises(ConfigurationError, match="reset_offsets"):
            await consumer.seek(shared.topic, "first")


async def test_kills_of_the_broker_repeat_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    """SIGKILL five times under load: each message comes once for each time it was not settled."""
    rounds, per_round = 5, 60
    received, refused, counted = Counter[str](), Counter[str](), set[str]()  # by first copy
    settled: set[bytes] = set()
    again_after: list[str] = []

    def reached(count: int) -> bool:
        return len(received) > count

    async def work(consumer: Consumer) -> None:
        async for message in consumer:
            first_copy = message.properties.get("ORIGIN_MESSAGE_ID", message.offset_message_id)
            received[first_copy] += 1
            if first_copy in counted:
                again_after.append(first_copy)
            await asyncio.sleep(0.003)
            if await message.ack():
                counted.add(first_copy)
            else:
                refused[first_copy] += 1
            settled.add(message.body)

    with broker_process(tmp_path / "b", mappedFileSizeCommitLog=16 << 20) as broker:
        config = ClientConfig(namesrv=broker.address, send_timeout=60.0)
        place = Place(OURS, broker.address)
        await place.send(queues=2)
        async with contextlib.AsyncExitStack() as stack:
            members = [
                await stack.enter_async_context(place.consumer(ack_timeout=8.0)) for _ in range(4)
            ]
            tasks = [asyncio.create_task(work(member)) for member in members]
            producer = await stack.enter_async_context(Producer("senders", config=config))
            for number in range(rounds):
                bodies = [b"%d-%d" % (number, one) for one in range(per_round)]
                for body in bodies:
                    await producer.send(Message(place.topic, body))
                await until(partial(reached, number * per_round + 10))
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            # A message whose acknowledgement has no answer may count, and then comes no more.
            await until(lambda: len(settled) == rounds * per_round)
            for member in members:
                await member.stop()
            await asyncio.gather(*tasks)
    assert again_after == []
    assert all(times <= 1 + refused[one] for one, times in received.items())
