"""Half-open connections: a host vanishes from the network, and nobody closes anything."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from halfmq.client import (
    ClientConfig,
    ClientError,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.go_client import go_client, going
from tests.support.hosts import Network, NoNetworkError, network
from tests.support.java_clients import Kind, Line, class_path, java_client
from tests.support.patience import PATIENCE_S, until

pytestmark = pytest.mark.campaign

TOPIC = "steady"


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Three hosts with a network between them."""
    try:
        with network("broker", "one", "two") as made:
            yield made
    except NoNetworkError as missing:
        pytest.skip(f"{missing}; half-open connections are NOT tested")


@pytest.fixture
def broker(hosts: Network, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker on a host of its own."""
    settings = {
        "bindAddress": hosts.address("broker"),
        "transactionTimeOut": 1000,
        "transactionCheckInterval": 1000,
        "transactionCheckMax": 1000,
    }
    with hosts.inside("broker"), broker_process(tmp_path / "b", **settings) as running:
        yield running


class Steady:
    """Sends a message every 20 ms and consumes them; keeps what became of each."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer, self.consumer = producer, consumer
        self.acknowledged: list[str] = []
        self.failed: list[tuple[str, float]] = []  # error, seconds
        self.received: set[str] = set()

    async def send(self) -> None:
        """Send until cancelled."""
        number = 0
        while True:
            number += 1
            began = time.monotonic()
            try:
                await self.producer.send(Message(TOPIC, b"%d" % number))
                self.acknowledged.append(str(number))
            except ClientError as error:
                self.failed.append((type(error).__name__, time.monotonic() - began))
            await asyncio.sleep(0.02)

    async def receive(self) -> None:
        """Receive until cancelled."""
        async for message in self.consumer:
            self.received.add(message.body.decode())
            await message.ack()


async def test_our_client_resumes_when_its_broker_is_back(
    hosts: Network, broker: BrokerProcess
) -> None:
    """Sends raise while it is away, and nothing acknowledged is lost; `close` returns anyway."""
    with hosts.inside("one"):
        config = ClientConfig(  # the defaults; other tests are more patient
            namesrv=broker.address, connect_timeout=3.0, request_timeout=3.0, send_timeout=3.0
        )
        producer = Producer("steady-producer", config=config)
        consumer = Consumer("steady-consumer", {TOPIC: "*"}, config=config)
        await producer.start()
        await producer.send(Message(TOPIC, b"founding"))
        await consumer.start()
        steady = Steady(producer, consumer)
        tasks = [asyncio.create_task(steady.send()), asyncio.create_task(steady.receive())]
        await until(lambda: len(steady.received) > 20)

        hosts.vanish("broker")
        await until(lambda: len(steady.failed) >= 3)
        hosts.rejoin("broker")
        sent, seen = len(steady.acknowledged), len(steady.received)
        sends = await until(lambda: len(steady.acknowledged) > sent + 5)
        receives = sends + await until(lambda: len(steady.received) > seen + 5)
        print(f"failed={steady.failed} sends again after {sends:.1f} s, receives {receives:.1f}")
        tasks[0].cancel()
        await until(lambda: set(steady.acknowledged) <= steady.received)

        hosts.vanish("broker")
        began = time.monotonic()
        tasks[1].cancel()
        await asyncio.wait_for(asyncio.gather(consumer.close(), producer.close()), PATIENCE_S)
        print(f"closed after {time.monotonic() - began:.1f} s")
        await asyncio.gather(*tasks, return_exceptions=True)


TAKEN_OVER_S = 240.0
"""Patience with a broker that takes up to 140 s to drop a consumer that has vanished."""
JAVA = Kind("5.3.3", (f"-Dpatience={TAKEN_OVER_S:.0f}",))


async def test_the_others_take_over_from_a_host_that_vanishes(
    hosts: Network, broker: BrokerProcess, tmp_path: Path
) -> None:
    """Nobody closes its connections; its queues, and the locks of an orderly one, become free.

    A Java consumer and one of ours share the group ``mixed``, two orderly Java consumers the group
    ``ordered``. When the network is back, the host consumes again.
    """
    class_path(JAVA.version)
    ours: set[str] = set()
    theirs: dict[str, list[Line]] = defaultdict(list)

    async def receive(consumer: Consumer) -> None:
        async for message in consumer:
            ours.add(message.body.decode())
            await message.ack()

    config = ClientConfig(namesrv=broker.address)
    with ExitStack() as running:
        clients = {}
        for host in ("one", "two"):
            with hosts.inside(host):
                java = java_client(JAVA, broker.address, tmp_path / host)
                clients[host] = running.enter_context(java)
        vanishing, staying = clients["one"], clients["two"]
        running.enter_context(hosts.inside("two"))
        producer = Producer("vanishing-producer", config=config)
        consumer = Consumer("mixed", {"mixed": "*"}, config=config)

        async def send(word: str) -> set[str]:
            """Send two messages to each of four queues."""
            bodies = [f"{word}-{number}" for number in range(8)]
            for number, body in enumerate(bodies):
                for topic in ("mixed", "ordered"):
                    message = Message(topic, body.encode(), tags="T")
                    await producer.send(message, order_key=f"key-{number % 4}")
            return set(bodies)

        async with producer, consumer:
            await send("founding")
            task = asyncio.create_task(receive(consumer))
            survivor = staying.start("member", "ordered", "ordered", "orderly", "4,2,4")
            staying.said(survivor, "owns", count=4)
            mixed = vanishing.start("member", "mixed", "mixed", "concurrent", "2,99")
            orderly = vanishing.start("member", "ordered", "ordered", "orderly", "2,99")
            for run in (mixed, orderly):
                vanishing.said(run, "owns", count=2)
            staying.said(survivor, "owns", count=2)

            def hear() -> dict[str, set[str]]:
                """Return the bodies that each run has consumed so far."""
                listened = (("mixed", vanishing, mixed), ("orderly", vanishing, orderly))
                for name, client, run in (*listened, ("survivor", staying, survivor)):
                    theirs[name] += client.heard(run)
                return {
                    name: {line["body"] for line in lines if line["event"] == "consumed"}
                    for name, lines in theirs.items()
                }

            hosts.vanish("one")
            after = await send("after")
            seconds = await until(lambda: after <= ours, TAKEN_OVER_S)
            locks = await until(lambda: after <= hear()["survivor"], TAKEN_OVER_S)
            print(f"taken over after {seconds:.0f} s, with locks after {seconds + locks:.0f} s")
            hosts.rejoin("one")
            began, number = time.monotonic(), 0
            while not (_is_back(hear()["mixed"]) and _is_back(hear()["orderly"])):
                assert time.monotonic() < began + TAKEN_OVER_S, "it does not consume again"
                number += 1
                await send(f"back{number}")
                await asyncio.sleep(1)
            print(f"consumes again {time.monotonic() - began:.0f} s after the network is back")
            last = await send("last")
            await until(lambda: last <= ours | hear()["mixed"], TAKEN_OVER_S)
            await until(lambda: last <= hear()["survivor"] | hear()["orderly"], TAKEN_OVER_S)
            task.cancel()

    for name in ("survivor", "orderly"):
        for queue in range(4):
            said = [line for line in theirs[name] if line["event"] == "consumed"]
            offsets = [line["queue_offset"] for line in said if line["queue"] == queue]
            assert offsets == sorted(offsets)


def _is_back(bodies: set[str]) -> bool:
    return any(body.startswith("back") for body in bodies)


async def test_go_clients_go_on_when_their_host_is_back(
    hosts: Network, broker: BrokerProcess, tmp_path: Path
) -> None:
    """Ours takes over from a Go consumer; a Go producer repeats the send that it was at.

    When the network is back, the Go consumer gets its share of the queues again, and all that the
    producer was told to be stored is there.
    """
    go_client()
    ours: dict[str, set[str]] = {"mixed": set(), "produced": set()}
    theirs: dict[str, set[str]] = {"consumed": set(), "sent": set()}

    async def receive(consumer: Consumer) -> None:
        async for message in consumer:
            ours[message.topic].add(message.body.decode())
            await message.ack()

    config = ClientConfig(namesrv=broker.address)
    async with AsyncExitStack() as running:
        running.enter_context(hosts.inside("two"))
        producer = await running.enter_async_context(Producer("vanishing", config=config))

        async def send(word: str) -> set[str]:
            """Send a message to each of four queues."""
            bodies = [f"{word}-{number}" for number in range(4)]
            for number, body in enumerate(bodies):
                message = Message("mixed", body.encode())
                await producer.send(message, order_key=f"key-{number}")
            return set(bodies)

        await send("founding")
        await producer.send(Message("produced", b"founding"))
        for topic in ours:
            consumer = Consumer(topic, {topic: "*"}, config=config)
            await running.enter_async_context(consumer)
            task = asyncio.create_task(receive(consumer))
            running.callback(task.cancel)
        with hosts.inside("one"):
            member = going(broker.address, tmp_path, "member", "mixed", "concurrent")
            sender = going(broker.address, tmp_path, "retrying", "produced", "100000")
            go = [running.enter_context(process) for process in (member, sender)]

        def hear() -> dict[str, set[str]]:
            """Return what the Go clients have consumed and sent so far."""
            for line in go[0].heard() + go[1].heard():
                theirs.setdefault(line["event"], set()).add(line.get("body", ""))
            return theirs

        async def until_consumed_there(word: str) -> None:
            """Send until the Go consumer has got some."""
            number = 0
            while not any(body.startswith(word) for body in hear()["consumed"]):
                number += 1
                assert number < TAKEN_OVER_S, "it does not consume"
                await send(f"{word}{number}")
                await asyncio.sleep(1)

        await until_consumed_there("before")
        await until(lambda: bool(hear()["sent"]))
        hosts.vanish("one")
        after = await send("after")
        await until(lambda: after <= ours["mixed"], TAKEN_OVER_S)
        sent = len(hear()["sent"])
        hosts.rejoin("one")
        await until_consumed_there("back")
        await until(lambda: len(hear()["sent"]) > sent, TAKEN_OVER_S)
        last = await send("last")
        await until(lambda: last <= ours["mixed"] | hear()["consumed"], TAKEN_OVER_S)
        go[1].kill()
        await until(lambda: hear()["sent"] <= ours["produced"])


async def test_a_producer_that_vanishes_leaves_its_transactions_to_its_group(
    hosts: Network, broker: BrokerProcess, tmp_path: Path
) -> None:
    """Another producer is asked; when the network is back, the first one is asked, too."""
    class_path(JAVA.version)
    with ExitStack() as running:
        clients, runs = {}, {}
        for host in ("one", "two"):
            with hosts.inside(host):
                java = java_client(JAVA, broker.address, tmp_path / host)
                clients[host] = running.enter_context(java)
            runs[host] = clients[host].start("undecided", TOPIC, "transacting", f"of-{host}")
            clients[host].said(runs[host], "sent")

        def asked(host: str) -> bool:
            """Whether a host has been asked about the message of host one, since the last call."""
            lines = clients[host].heard(runs[host])
            return any((one["event"], one["body"]) == ("checked", "of-one") for one in lines)

        hosts.vanish("one")
        asked("two")
        await until(lambda: asked("two"), TAKEN_OVER_S)
        asked("one")
        hosts.rejoin("one")
        await until(lambda: asked("one"), TAKEN_OVER_S)

        running.enter_context(hosts.inside("two"))
        config = ClientConfig(namesrv=broker.address)
        decided: set[bytes] = set()

        def commit(message: MessageView) -> Decision:
            decided.add(message.body)
            return Decision.COMMIT

        async with (
            TransactionProducer("transacting", checker=commit, config=config) as producer,
            Consumer("readers", {TOPIC: "*"}, start_from="first", config=config) as consumer,
        ):
            async with producer.transaction(Message(TOPIC, b"of-ours")):
                pass  # the end of the block commits
            received: set[bytes] = set()
            while not received >= {b"of-one", b"of-two", b"of-ours"}:
                message = await consumer.receive(timeout=TAKEN_OVER_S)
                assert message is not None
                received.add(message.body)
                await message.ack()
        assert decided == {b"of-one", b"of-two"}


async def test_the_others_take_over_from_a_client_that_is_stopped(tmp_path: Path) -> None:
    """Its connections stay open; when it goes on, it shares the queues again."""
    class_path(JAVA.version)
    with ExitStack() as running:
        broker = running.enter_context(broker_process(tmp_path / "b"))
        clients = {}
        for name in ("one", "two"):
            java = java_client(JAVA, broker.address, tmp_path / name)
            clients[name] = running.enter_context(java)
        producer = Producer("writers", config=ClientConfig(namesrv=broker.address))
        sent: set[str] = set()
        consumed: dict[str, set[str]] = {"one": set(), "two": set()}

        async def send(word: str) -> set[str]:
            """Send two messages to each of four queues."""
            bodies = {f"{word}-{number}" for number in range(8)}
            for body in bodies:
                key = f"key-{int(body[-1]) % 4}"
                await producer.send(Message(TOPIC, body.encode(), tags="T"), order_key=key)
            sent.update(bodies)
            return bodies

        def keep(name: str, lines: list[Line]) -> set[str]:
            consumed[name] |= {one["body"] for one in lines if one["event"] == "consumed"}
            return consumed[name]

        def hear(name: str) -> set[str]:
            return keep(name, clients[name].heard(runs[name]))

        def own(name: str, count: int) -> None:
            keep(name, clients[name].until(runs[name], "owns", count=count))

        async with producer:
            await send("founding")
            runs = {"two": clients["two"].start("member", TOPIC, "g", "concurrent", "4,2,4,2,99")}
            own("two", 4)
            runs["one"] = clients["one"].start("member", TOPIC, "g", "concurrent", "2,99")
            own("one", 2)
            own("two", 2)
            with clients["one"].stopped():
                taken = await send("stopped")
                await until(lambda: taken <= hear("two"), TAKEN_OVER_S)
            number = 0
            while not any(body.startswith("back") for body in hear("one")):
                number += 1
                assert number < TAKEN_OVER_S, "it does not consume again"
                await send(f"back{number}")
                await asyncio.sleep(1)
            await until(lambda: sent <= hear("one") | hear("two"), TAKEN_OVER_S)
