"""Pulls that wait are answered as soon as what they wait for may be read, whatever came between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.limits.kept import HELD_PULL_BYTES
from halfmq.broker.loop import slices
from halfmq.broker.net.long_polling import HeldPull, LongPolling
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from tests.support.broker_doubles import FakeConnection, as_store

QUEUE = ("orders", 3)
OTHER = ("orders", 4)


class Log:
    """A log of one message per 100 bytes; the test appends and flushes."""

    def __init__(self) -> None:
        self.write_offset = 0
        self.readable_offset = self.durable_offset = 0
        self.messages: dict[tuple[str, int], list[int]] = {}  # ends of each queue's messages

    def request_flush(self) -> None:
        """Nothing: the test calls `flushed`."""

    def append(self, polling: LongPolling, *queues: tuple[str, int]) -> None:
        for queue in queues:
            self.write_offset += 100
            self.messages.setdefault(queue, []).append(self.write_offset)
        polling.mark_arrivals(queues)

    def flushed(self, polling: LongPolling, offset: int) -> None:
        self.readable_offset = offset
        polling.wake()


class Broker:
    """Long polling that finds the first readable message of a queue."""

    def __init__(self) -> None:
        self.log = Log()
        self.polling = LongPolling()
        self.polling.answer_by(self._answer, as_store(self.log))
        self.searches = 0

    def _answer(self, held: HeldPull, timed_out: bool) -> bytes | None:
        self.searches += 1
        ends = self.log.messages.get(held.key, [])
        found = any(end <= self.log.readable_offset for end in ends)
        return b"found" if found else b"nothing" if timed_out else None

    def hold(
        self,
        queue: tuple[str, int] = QUEUE,
        *,
        searched_until: int | None = None,
        deadline: float = 1e9,
        client: FakeConnection | None = None,
        group: str = "cg",
        size: int = 1_000,
    ) -> FakeConnection:
        client = client or FakeConnection()
        readable = self.log.readable_offset if searched_until is None else searched_until
        held = HeldPull(
            key=queue,
            command=RemotingCommand(code=11),
            connection=client,
            deadline=deadline,
            next_offset=0,
            wanted=None,
            searched_until=readable,
            group=group,
            size=size,
        )
        self.polling.hold(held)
        return client


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    held = [one for queue in made.polling.waiting.values() for one in queue]
    assert made.polling.count == len(held)
    assert made.polling.bytes == sum(one.size for one in held if not one.connection.closed)


def test_a_message_answers_the_pull_after_its_flush(broker: Broker) -> None:
    """Before the flush the message cannot be read."""
    client = broker.hold()
    broker.log.append(broker.polling, QUEUE)
    assert client.written == []

    broker.log.flushed(broker.polling, 100)

    assert client.written == [b"found"]


def test_a_pull_between_append_and_flush_is_answered_after_the_flush(broker: Broker) -> None:
    """Nobody waited when the message was appended; its consumer must not wait for the time-out."""
    broker.log.append(broker.polling, QUEUE)
    client = broker.hold()

    broker.log.flushed(broker.polling, 100)

    assert client.written == [b"found"]


def test_a_flush_between_search_and_hold_is_not_missed(broker: Broker) -> None:
    """The flush thread moves the end of what is readable at any time."""
    broker.log.append(broker.polling, QUEUE)
    broker.log.readable_offset = 100
    client = broker.hold(searched_until=0)

    broker.polling.wake()

    assert client.written == [b"found"]


def test_the_flush_of_an_earlier_group_keeps_the_mark(broker: Broker) -> None:
    """It began before the append, so the message is not readable after it."""
    client = broker.hold()
    broker.log.append(broker.polling, OTHER)
    broker.log.append(broker.polling, QUEUE)

    broker.log.flushed(broker.polling, 100)
    assert client.written == []
    broker.log.flushed(broker.polling, 200)

    assert client.written == [b"found"]


def test_further_messages_do_not_delay_the_answer(broker: Broker) -> None:
    """Each flush starts a search, although later messages are not readable."""
    client = broker.hold()
    broker.log.append(broker.polling, QUEUE)
    broker.log.append(broker.polling, QUEUE)

    broker.log.flushed(broker.polling, 100)

    assert client.written == [b"found"]


def test_queues_without_new_messages_are_not_searched(broker: Broker) -> None:
    """A thousand idle consumers add no work for busy ones."""
    client = broker.hold(OTHER)
    broker.log.append(broker.polling, QUEUE)
    broker.log.flushed(broker.polling, 100)

    assert broker.searches == 0
    assert client.written == []


def test_a_pull_that_finds_nothing_is_searched_once_more(broker: Broker) -> None:
    """For messages that were unreadable when it arrived; later appends mark the queue."""
    broker.log.append(broker.polling, OTHER)
    broker.hold()
    for offset in (100, 100, 100):
        broker.log.flushed(broker.polling, offset)

    assert broker.searches == 1


async def test_pulls_are_answered_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may wait for one message; each pass of the loop answers some of them."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # one step each
    await broker.polling.start()
    clients = [broker.hold() for _ in range(5)]
    broker.log.append(broker.polling, QUEUE)
    searches = []

    broker.log.flushed(broker.polling, 100)
    for _ in range(6):
        searches.append(broker.searches)
        await asyncio.sleep(0)

    assert searches == [1, 2, 3, 4, 5, 5]
    assert [client.written for client in clients] == [[b"found"]] * 5
    await broker.polling.stop()


async def test_a_message_that_arrives_during_a_search_is_found(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is flushed before the search has reached the last pull, or after it."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    await broker.polling.start()
    broker.log.append(broker.polling, OTHER)
    clients = [broker.hold() for _ in range(4)]
    broker.log.flushed(broker.polling, 100)  # a search finds nothing for the first of them
    await asyncio.sleep(0)

    broker.log.append(broker.polling, QUEUE)
    broker.log.flushed(broker.polling, 200)
    late = broker.hold(searched_until=100)
    for _ in range(12):
        await asyncio.sleep(0)

    assert [client.written for client in (*clients, late)] == [[b"found"]] * 5
    await broker.polling.stop()


async def test_pulls_whose_time_is_up_are_answered_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers that started together time out together; messages are still delivered meanwhile."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    await broker.polling.start()
    idle = [broker.hold(OTHER, deadline=0.0) for _ in range(4)]
    patient = broker.hold(OTHER)
    waiting = broker.hold()
    # The timer of the sweep must not depend on the real clock.
    broker.polling._sweep()
    await asyncio.sleep(0)
    assert broker.searches < len(idle)

    broker.log.append(broker.polling, QUEUE)
    broker.log.flushed(broker.polling, 100)
    for _ in range(12):
        await asyncio.sleep(0)

    assert [client.written for client in idle] == [[b"nothing"]] * 4
    assert (waiting.written, patient.written) == ([b"found"], [])
    assert broker.polling.count == 1
    await broker.polling.stop()


def test_a_connection_and_a_group_hold_their_shares(broker: Broker) -> None:
    """Whoever has too many is refused; what others hold, and may hold, is not less for it."""
    limit, size = HELD_PULL_BYTES, 1 << 20
    greedy = FakeConnection()
    for _ in range(limit.of_connection // size):
        broker.hold(client=greedy, size=size)
    with pytest.raises(RequestRefusedError) as caught:
        broker.hold(client=greedy, size=size)
    assert caught.value.code == ResponseCode.SYSTEM_BUSY
    for _ in range((limit.most // 2 - broker.polling.bytes) // size):
        broker.hold(size=size)
    with pytest.raises(RequestRefusedError):
        broker.hold(size=size)
    other = broker.hold(group="other", size=size)

    broker.log.append(broker.polling, QUEUE)
    broker.log.flushed(broker.polling, 100)

    assert other.written == [b"found"]
    assert broker.polling.bytes == 0


def test_above_the_limit_the_largest_holder_is_closed(broker: Broker) -> None:
    """All groups of a peer together do not take the room of others."""
    patient, size = broker.hold(), 1 << 20
    greedy = [FakeConnection(f"127.0.0.2:{number}") for number in range(100)]
    for number in range(HELD_PULL_BYTES.most // size):
        broker.hold(client=greedy[number], group=f"g{number}", size=size)

    assert any(one.closed for one in greedy)
    assert not patient.closed
    assert broker.polling.bytes <= HELD_PULL_BYTES.most
