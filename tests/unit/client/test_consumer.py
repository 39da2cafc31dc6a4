"""Consuming: sharing queues, acks and offsets, redelivery, and ends without loss."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    Consumer,
    ConsumerEvent,
    Message,
    MessageView,
    Producer,
    TopicMissing,
    UnequalSubscriptions,
    UnequalSubscriptionsError,
)
from halfmq.client.consuming import assignment, refusals
from halfmq.client.consuming.assignment import missing_topic_interval
from halfmq.client.consuming.refusals import REMINDER_INTERVAL
from halfmq.client.net.session import wall_clock_ms
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    ConsumerSendMsgBackRequestHeader,
    GetRouteInfoRequestHeader,
    HeartbeatResponseHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
)
from halfmq.remoting.replies import encode_reply
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_parts import session_of
from tests.support.fake_broker import (
    Answer,
    Cut,
    FakeBroker,
    Ignore,
    Peer,
    Refuse,
    fake_broker,
    until,
)
from tests.support.patience import PATIENCE_S

PULL = RequestCode.PULL_MESSAGE
QUICK = ClientConfig(
    reconnect_delay_min=0.01,
    reconnect_delay_max=0.02,
    offset_commit_interval=0.02,
    retry_delay=0.02,
    pull_suspend=2.0,
)


RETRY_S = 0.1
"""Seconds to the next attempt at sharing out queues; a second in earnest."""


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "REBALANCE_RETRY", RETRY_S)


async def publish(
    broker: FakeBroker, *bodies: str, topic: str = "orders", tags: str = "created"
) -> None:
    """Send messages to one queue, in order."""
    async with Producer("g", namesrv=broker.address) as producer:
        for body in bodies:
            await producer.send(Message(topic, body.encode(), tags=tags), order_key="one")


def new_consumer(broker: FakeBroker, **arguments: Any) -> Consumer:
    defaults: dict[str, Any] = {"config": QUICK, "subscriptions": {"orders": "*"}}
    return Consumer("billing", namesrv=broker.address, **(defaults | arguments))


def only(
    name: str, function: Callable[[ConsumerEvent], object]
) -> Callable[[ConsumerEvent], object]:
    """A function for ``on_event`` that gets the events of one name."""
    return lambda event: function(event) if event.name == name else None


async def take(consumer: Consumer, count: int, *, ack: bool = True) -> list[str]:
    """Bodies of the next messages."""
    bodies: list[str] = []
    for _ in range(count):
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None, f"only {bodies} came"
        bodies.append(message.body.decode())
        if ack:
            assert await message.ack()
    return bodies


def committed(broker: FakeBroker, topic: str = "orders") -> int:
    """The sum of the group's offsets in a topic: how many messages it is done with."""
    return sum(
        offset for (*place, _), offset in broker.offsets.items() if place == ["billing", topic]
    )


def route_questions(broker: FakeBroker, topic: str) -> list[RemotingCommand]:
    """The questions that clients asked for the route of a topic."""
    return [
        request
        for request in broker.requests_of(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        if isinstance(request.header, GetRouteInfoRequestHeader) and request.header.topic == topic
    ]


@asynccontextmanager
async def running(*consumers: Consumer) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for consumer in consumers:
            await stack.enter_async_context(consumer)
        yield


@on_both_loops
async def test_heartbeat_precedes_the_first_pull_on_its_connection(broker: FakeBroker) -> None:
    """A broker refuses pulls of a group that it does not know on this connection."""
    await publish(broker, "1")
    broker.requests.clear()
    async with new_consumer(broker) as consumer:
        await take(consumer, 1)

    codes = [request.code for request in broker.requests]
    assert codes.index(RequestCode.HEART_BEAT) < codes.index(PULL)


@on_both_loops
async def test_tags_are_compared_as_text(broker: FakeBroker) -> None:
    """The broker compares hashes of tags; "Aa" and "BB" have the same hash."""
    await publish(broker, "no", tags="BB")
    await publish(broker, "yes", tags="Aa")
    async with new_consumer(broker, subscriptions={"orders": "Aa"}) as consumer:
        assert await take(consumer, 1) == ["yes"]

    assert committed(broker) == 2


@on_both_loops
async def test_the_offset_waits_for_the_first_unacked_message(broker: FakeBroker) -> None:
    """Messages after an unacknowledged one are redelivered if the process dies."""
    await publish(broker, "0", "1", "2", "3")
    async with new_consumer(broker) as consumer:
        messages = [await consumer.receive() for _ in range(4)]
        for number in (0, 2, 3):
            message = messages[number]
            assert message is not None
            await message.ack()
        await consumer.commit()
        assert committed(broker) == 1

    assert committed(broker) == 1
    async with new_consumer(broker) as consumer:
        assert await take(consumer, 3) == ["1", "2", "3"]


@on_both_loops
async def test_offsets_are_written_while_running(broker: FakeBroker) -> None:
    """After a crash only the messages of a few seconds are redelivered."""
    await publish(broker, "0", "1")
    async with new_consumer(broker) as consumer:
        await take(consumer, 2)
        await until(lambda: committed(broker) == 2)


@on_both_loops
async def test_a_cancelled_loop_loses_nothing(broker: FakeBroker) -> None:
    """Messages that it has not returned come with the next loop, whenever it is cancelled."""
    bodies = [str(n) for n in range(40)]
    await publish(broker, *bodies)
    seen: list[str] = []

    async def loop(consumer: Consumer) -> None:
        async for message in consumer:
            seen.append(message.body.decode())
            await message.ack()
            await asyncio.sleep(0)

    async with new_consumer(broker) as consumer:
        while len(seen) < 40:
            task = asyncio.ensure_future(loop(consumer))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    assert seen == bodies
    assert committed(broker) == 40


@on_both_loops
async def test_a_message_in_hand_when_the_loop_is_cancelled_comes_again(broker: FakeBroker) -> None:
    """It was not acknowledged, so its work may be half done."""
    await publish(broker, "0", "1")
    in_hand = asyncio.Event()

    async def loop(consumer: Consumer) -> None:
        async for _message in consumer:
            in_hand.set()
            await asyncio.sleep(60)

    async with new_consumer(broker) as consumer:
        task = asyncio.ensure_future(loop(consumer))
        await in_hand.wait()
        task.cancel()
        await asyncio.wait([task])

    async with new_consumer(broker) as consumer:
        assert await take(consumer, 2) == ["0", "1"]


@on_both_loops
async def test_closing_ends_the_loop_of_another_task(broker: FakeBroker) -> None:
    """It ends without an exception, and acknowledges nothing."""
    await publish(broker, "0", "1")
    seen = []
    async with new_consumer(broker) as consumer:

        async def loop() -> None:
            async for message in consumer:
                seen.append(message)  # noqa: PERF401 -- must be seen while the loop runs

        tasks = [asyncio.ensure_future(loop()) for _ in range(3)]
        await until(lambda: len(seen) == 2)
        await consumer.close()
        await asyncio.gather(*tasks)

    assert committed(broker) == 0
    assert await consumer.receive(timeout=PATIENCE_S) is None
    with pytest.raises(ClientClosedError):
        await consumer.receive()


@on_both_loops
async def test_a_stopped_consumer_finishes_what_is_in_hand(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """It hands out nothing more, though more is there; acknowledgements count, and close leaves."""
    await publish(broker, "0", "1", "2")
    async with new_consumer(broker) as consumer:
        in_hand = await consumer.receive()
        late = await consumer.receive()
        loop = asyncio.ensure_future(anext(consumer, None))
        assert (await loop) is not None
        waiting = asyncio.ensure_future(anext(consumer, None))
        await asyncio.sleep(0)

        await consumer.stop()
        await consumer.stop()
        pulls = len(broker.requests_of(PULL))
        await publish(broker, "3")

        assert await waiting is None
        assert [message async for message in consumer] == []
        assert await consumer.receive(timeout=PATIENCE_S) is None
        with pytest.raises(ClientClosedError):
            await consumer.receive()
        assert consumer.assignment
        assert await in_hand.extend(60)
        assert await in_hand.ack()
        assert len(broker.requests_of(PULL)) == pulls

    assert committed(broker) == 1
    assert not await late.ack()
    assert not await late.extend(60)
    assert "call stop() first" in caplog.text
    async with new_consumer(broker) as consumer:
        assert await take(consumer, 3) == ["1", "2", "3"]


@on_both_loops
async def test_a_stopped_consumer_takes_no_queue(broker: FakeBroker) -> None:
    """Another member leaves, and an operator resets an offset, while it drains."""
    config = replace(QUICK, rebalance_interval=0.05)
    async with new_consumer(broker, config=config) as consumer, new_consumer(broker) as other:
        await until(lambda: len(consumer.assignment) > 0 and len(other.assignment) > 0)
        before = consumer.assignment
        await consumer.stop()
        pulls = len(broker.requests_of(PULL))
        await other.close()
        members = len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        await until(
            lambda: len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) >= members + 2
        )
        assert set(consumer.assignment) <= set(before)
        assert len(broker.requests_of(PULL)) == pulls


@on_both_loops
async def test_several_tasks_share_one_consumer(broker: FakeBroker) -> None:
    """Each message goes to one of them."""
    seen: list[bytes] = []
    async with new_consumer(broker) as consumer:

        async def loop() -> None:
            async for message in consumer:
                await asyncio.sleep(0)
                seen.append(message.body)
                await message.ack()

        tasks = [asyncio.ensure_future(loop()) for _ in range(4)]
        await publish(broker, *(str(n) for n in range(50)))
        await until(lambda: len(seen) == 50)
        await consumer.close()
        await asyncio.gather(*tasks)

    assert sorted(seen, key=int) == [b"%d" % n for n in range(50)]
    assert committed(broker) == 50


@on_both_loops
async def test_receive_may_wait_for_a_while_only(broker: FakeBroker) -> None:
    """It returns None after the timeout, and loses no message."""
    async with new_consumer(broker) as consumer:
        assert await consumer.receive(timeout=0.02) is None
        await publish(broker, "0")
        assert await take(consumer, 1) == ["0"]


async def test_an_unstarted_consumer_says_so() -> None:
    """Otherwise it would wait forever."""
    with pytest.raises(ClientClosedError):
        await Consumer("billing", {"orders": "*"}).receive()


# -- groups


@on_both_loops
async def test_an_ack_after_the_queue_moved_does_not_count(broker: FakeBroker) -> None:
    """The new owner gets the message again; ``ack`` returns False to the old one."""
    await publish(broker, "0")
    async with new_consumer(broker) as first:
        message = await first.receive()
        assert message is not None
        moved = new_consumer(broker)
        async with moved:
            await until(lambda: len(first.assignment) + len(moved.assignment) == 5)
            loser = first if message.queue in moved.assignment else moved
            if loser is first:
                assert not await message.ack()
                assert await take(moved, 1) == ["0"]
            else:
                assert await message.ack()


@on_both_loops
async def test_every_member_of_a_broadcast_gets_everything(broker: FakeBroker) -> None:
    """No member changes the group's offsets at the broker."""
    first = new_consumer(broker, broadcasting=True, start_from="first")
    second = new_consumer(broker, broadcasting=True, start_from="first")
    async with running(first, second):
        await publish(broker, "0", "1")
        assert await take(first, 2) == ["0", "1"]
        assert await take(second, 2) == ["0", "1"]
        assert all(queue.topic == "orders" for queue in first.assignment)

    assert broker.offsets == {}


@on_both_loops
async def test_a_broadcast_consumer_may_keep_its_offsets(
    broker: FakeBroker, tmp_path: Path
) -> None:
    """It stores them in a file, and continues there after a restart."""
    path = tmp_path / "sub" / "offsets.json"
    arguments: dict[str, Any] = {"broadcasting": True, "start_from": "first", "offsets_file": path}
    await publish(broker, "0", "1")
    async with new_consumer(broker, **arguments) as consumer:
        assert await take(consumer, 1) == ["0"]

    assert sum(json.loads(path.read_text()).values()) == 1
    async with new_consumer(broker, **arguments) as consumer:
        assert await take(consumer, 1) == ["1"]


# -- where a group starts


@pytest.mark.parametrize(
    ("start_from", "young", "expected"),
    [
        ("last", False, ["new"]),
        ("last", True, ["old", "new"]),
        ("first", False, ["old", "new"]),
        (datetime(2023, 11, 14, 22, 14, tzinfo=UTC), True, ["new"]),
    ],
)
async def test_a_new_group_starts_where_it_was_told(
    start_from: Any, young: bool, expected: list[str]
) -> None:
    """Without a time, brokers start it at the first message of a new topic."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "old")
        broker.now_ms += 60_000
        broker.young = young
        async with new_consumer(broker, start_from=start_from) as consumer:
            await until(lambda: len(consumer.assignment) == 2)
            await publish(broker, "new")
            assert await take(consumer, len(expected)) == expected


async def test_last_loses_nothing_that_is_sent_after_the_start() -> None:
    """Whichever member gets the queue, and whenever; also if the queue is new."""
    shares = RequestCode.GET_CONSUMER_LIST_BY_GROUP
    config = replace(QUICK, heartbeat_interval=0.05, rebalance_interval=0.05)
    async with fake_broker(orders=1) as broker:
        broker.young = False
        await publish(broker, "old")
        broker.fail(shares, *[Refuse(ResponseCode.SYSTEM_ERROR)] * 1_000)  # nobody gets a queue
        first, second = (new_consumer(broker, config=config) for _ in range(2))
        await first.start()
        await publish(broker, "1")
        await second.start()
        await publish(broker, "2")
        broker.queues["orders"].append([])
        broker.now_ms = wall_clock_ms()
        broker.store(broker.messages("orders")[-1]._replace(body=b"3", queue_id=1))
        broker.forgive()
        taken: list[str] = []

        async def consume(consumer: Consumer) -> None:
            async for message in consumer:
                taken.append(message.body.decode())
                await message.ack()

        loops = [asyncio.create_task(consume(one)) for one in (first, second)]
        await until(lambda: set(taken) >= {"1", "2", "3"})
        assert "old" not in taken
        await first.close()
        await second.close()
        await asyncio.gather(*loops)


async def test_a_broadcast_from_the_last_message_loses_nothing_sent_after_the_start() -> None:
    """The queues are shared out after ``start`` has returned."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "old")
        async with new_consumer(broker, broadcasting=True) as consumer:
            broker.store(broker.messages("orders")[-1]._replace(body=b"new"))
            assert await take(consumer, 1) == ["new"]


async def test_a_group_that_read_nothing_yet_keeps_its_start() -> None:
    """Otherwise "last" would skip messages sent between two runs."""
    async with fake_broker(orders=1) as broker:
        async with new_consumer(broker) as consumer:
            await until(lambda: len(consumer.assignment) == 2)
        await publish(broker, "while away")
        broker.fail(RequestCode.GET_MAX_OFFSET, *[Refuse(ResponseCode.SYSTEM_ERROR)] * 9)
        async with new_consumer(broker) as consumer:
            assert await take(consumer, 1) == ["while away"]


async def test_a_topic_that_does_not_exist_yet_is_waited_for() -> None:
    """Consumers often start before the first message is sent."""
    async with (
        fake_broker() as broker,
        new_consumer(broker, subscriptions={"later": "*"}) as consumer,
    ):
        await publish(broker, "0", topic="later")
        assert await take(consumer, 1) == ["0"]


@on_both_loops
async def test_a_missing_topic_is_told_once_with_the_nearest_names(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error shows in the log and in ``on_event``."""
    monkeypatch.setattr(assignment, "MISSING_TOPIC_INTERVAL", 0.01)
    for name in ("orders", "order_events", "payments", "%RETRY%order-events"):
        broker.create_topic(name)
    events: list[ConsumerEvent] = []
    config = replace(QUICK, rebalance_interval=0.05)
    async with new_consumer(
        broker,
        subscriptions={"Order-Events": "*", "orders": "*"},
        on_event=only("topic_missing", events.append),
        config=config,
    ):
        await until(lambda: len(route_questions(broker, "Order-Events")) > 20)

    assert events == [TopicMissing("billing", "Order-Events", ("order_events", "orders"))]
    (line,) = [line for line in caplog.messages if "topic_missing" in line]
    assert line == (
        "event=topic_missing group=billing reason='topic Order-Events does not exist; it is "
        "consumed once it is created; similar topics: order_events, orders'"
    )


@in_steady_time
async def test_a_lost_broker_is_one_line_for_all_queues(caplog: pytest.LogCaptureFixture) -> None:
    """Every queue is pulled again each second, and offsets are committed every five."""
    caplog.set_level("DEBUG", "halfmq")
    async with fake_broker() as broker:
        broker.queues["orders"] = [[] for _ in range(8)]
        async with Consumer("g", {"orders": "*"}, namesrv=broker.address, config=QUICK):
            await until(lambda: len(broker.requests_of(PULL)) >= 9)
            await broker.stop()
            await until(lambda: caplog.text.count("event=pull_failed") > 30)
            ours = [one for one in caplog.records if one.name.startswith("halfmq.")]

    events = [one.message.split()[0] for one in ours if one.levelno >= logging.WARNING]
    assert events == ["event=broker_lost"]


@on_both_loops
async def test_other_topics_are_consumed_while_one_is_missing(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up of a missing topic requests its route, and no list of members."""
    monkeypatch.setattr(assignment, "MISSING_TOPIC_INTERVAL", 0.01)
    await publish(broker, "0")
    async with new_consumer(broker, subscriptions={"later": "*", "orders": "*"}) as consumer:
        assert await take(consumer, 1) == ["0"]
        await until(lambda: len(route_questions(broker, "later")) > 10)
        looks = len(route_questions(broker, "later"))
        shared = len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        await until(lambda: len(route_questions(broker, "later")) > looks + 20)
        assert len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) == shared

        await publish(broker, "1", topic="later")
        assert await take(consumer, 1) == ["1"]


@pytest.mark.parametrize(("missing", "seconds"), [(1, 0.5), (10, 0.5), (40, 2.0), (1000, 50.0)])
def test_many_missing_topics_are_looked_for_more_rarely(missing: int, seconds: float) -> None:
    """A consumer looks up one twice a second, and all together 20 times a second."""
    assert missing_topic_interval(missing) == seconds


@on_both_loops
@pytest.mark.parametrize("broadcasting", [False, True])
async def test_a_topic_created_while_it_is_waited_for_is_read_from_its_first_message(
    broker: FakeBroker, broadcasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer was there first, so "last" skips nothing."""
    monkeypatch.setattr(assignment, "MISSING_TOPIC_INTERVAL", 0.01)
    missed = asyncio.Event()
    broker.young = False  # otherwise the broker answers with the first message
    async with new_consumer(
        broker,
        subscriptions={"later": "*"},
        broadcasting=broadcasting,
        on_event=only("topic_missing", lambda _event: missed.set()),
    ) as consumer:
        await missed.wait()
        await publish(broker, "0", topic="later")
        assert await take(consumer, 1) == ["0"]


@on_both_loops
async def test_a_name_server_that_knows_no_topic_at_all_makes_none_new(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just started, so a topic that it reports later may be old."""
    monkeypatch.setattr(assignment, "MISSING_TOPIC_INTERVAL", 0.01)
    missed = asyncio.Event()
    broker.fail(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Answer(b'{"topicList":[]}'))
    async with new_consumer(
        broker,
        subscriptions={"later": "*"},
        broadcasting=True,
        on_event=only("topic_missing", lambda _event: missed.set()),
    ) as consumer:
        await missed.wait()
        await publish(broker, "old", topic="later")
        await until(lambda: len(consumer.assignment) == 4)
        await until(lambda: len(broker.requests_of(PULL)) >= 4)
        await publish(broker, "new", topic="later")
        assert await take(consumer, 1) == ["new"]


@on_both_loops
async def test_an_event_function_that_fails_stops_nothing(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its traceback is logged, and the consumer continues."""

    def fail(_event: ConsumerEvent) -> None:
        raise ZeroDivisionError

    async with new_consumer(broker, subscriptions={"later": "*"}, on_event=fail) as consumer:
        await until(lambda: "ZeroDivisionError" in caplog.text)
        await publish(broker, "0", topic="later")
        assert await take(consumer, 1) == ["0"]


# -- members that subscribe differently

OTHERS = HeartbeatResponseHeader(
    unequal_topic="orders", unequal_client_id="other", unequal_filter="paid"
)
OFTEN = replace(QUICK, heartbeat_interval=0.01)


@on_both_loops
@pytest.mark.parametrize("header_type", ["json", "msgpack"])
async def test_a_consumer_warns_once_a_minute_while_another_subscribes_differently(
    broker: FakeBroker,
    header_type: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warning has both filters; the end of the difference is logged too."""
    caplog.set_level(logging.INFO)
    broker.unequal = OTHERS
    events: list[ConsumerEvent] = []
    consumer = new_consumer(
        broker,
        subscriptions={"orders": "created"},
        on_event=only("unequal_subscriptions", events.append),
        config=replace(OFTEN, header_type=header_type),
    )
    async with consumer:
        assert ClientConfig().heartbeat_interval == 30 < REMINDER_INTERVAL < 60
        await until(lambda: len(broker.requests_of(RequestCode.HEART_BEAT)) > 20)
        assert events == [
            UnequalSubscriptions(
                "billing", "orders", consumer.client_id, "created", "other", "paid"
            )
        ]
        (line,) = [line for line in caplog.messages if "unequal" in line]
        assert line == f"event=unequal_subscriptions group=billing reason={str(events[0])!r}"
        assert "'created'" in line
        assert "'paid'" in line

        monkeypatch.setattr(refusals, "REMINDER_INTERVAL", 0.0)
        # The next reminder is minutes away on the real clock.
        consumer._refusals.reminder_due = 0.0
        await until(lambda: len(events) > 3)
        broker.unequal = None
        await until(lambda: "event=subscriptions_equal group=billing" in caplog.messages)
    assert set(events) == {events[0]}


@on_both_loops
async def test_a_consumer_that_is_refused_does_not_start(broker: FakeBroker) -> None:
    """Otherwise it would wait forever without a queue."""
    broker.unequal, broker.refuses_unequal = OTHERS, True
    consumer = new_consumer(broker, subscriptions={"refunds": "*"})
    with pytest.raises(UnequalSubscriptionsError, match="they differ") as refusal:
        await consumer.start()
    error = refusal.value
    facts = (error.topic, error.filter, error.other_client_id, error.other_filter)
    assert facts == ("orders", None, "other", "paid")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(ClientClosedError):
        await consumer.receive()


@on_both_loops
async def test_a_consumer_that_is_refused_later_raises_until_it_is_accepted(
    broker: FakeBroker,
) -> None:
    """This happens after a broker restart; waiting calls of ``receive`` raise too."""
    await publish(broker, "0")
    async with new_consumer(broker, config=OFTEN) as consumer:
        await take(consumer, 1)
        waiting = [asyncio.ensure_future(consumer.receive()) for _ in range(3)]
        await asyncio.sleep(0)
        broker.unequal, broker.refuses_unequal = OTHERS, True
        for task in waiting:
            with pytest.raises(UnequalSubscriptionsError):
                await task
        with pytest.raises(UnequalSubscriptionsError):
            await anext(consumer)

        broker.unequal = None
        beats = len(broker.requests_of(RequestCode.HEART_BEAT))
        await until(lambda: len(broker.requests_of(RequestCode.HEART_BEAT)) > beats + 2)
        await publish(broker, "1")
        assert await take(consumer, 1) == ["1"]


# -- redelivery


@on_both_loops
async def test_a_message_given_back_comes_again_through_the_retry_topic(broker: FakeBroker) -> None:
    """It has its own topic and the attempt, and does not block later messages."""
    await publish(broker, "0", "1")
    attempts: list[tuple[bytes, str, int]] = []
    ids: set[str] = set()
    async with new_consumer(broker) as consumer:
        async for message in consumer:
            attempts.append((message.body, message.topic, message.delivery_attempt))
            ids.add(message.inbox_id)
            if message.body == b"0" and message.delivery_attempt < 3:
                await message.retry(delay_level=2)
            else:
                assert await message.ack()
            if len(attempts) == 4:
                break

    assert sorted(attempts) == [
        (b"0", "orders", 1),
        (b"0", "orders", 2),
        (b"0", "orders", 3),
        (b"1", "orders", 1),
    ]
    assert len(ids) == 2
    header = broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK)[0].header
    assert isinstance(header, ConsumerSendMsgBackRequestHeader)
    assert (header.group, header.delay_level, header.max_reconsume_times) == ("billing", 2, None)
    assert (committed(broker), committed(broker, "%RETRY%billing")) == (2, 2)


@on_both_loops
async def test_a_message_no_broker_takes_back_is_delivered_again_here(broker: FakeBroker) -> None:
    """Some brokers do not support the request; then the offset waits for the message."""
    broker.send_back_supported = False
    await publish(broker, "0")
    async with new_consumer(broker) as consumer:
        for attempt in (1, 2, 3):
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            assert (message.body, message.delivery_attempt) == (b"0", attempt)
            if attempt < 3:
                await message.retry()
        await consumer.commit()
        assert committed(broker) == 0
        assert message is not None
        assert await message.ack()

    assert committed(broker) == 1


@in_steady_time
async def test_a_broadcasting_consumer_drops_what_it_rejects(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no dead letters, and would otherwise have the message again and again."""
    await publish(broker, "0", "1")
    async with new_consumer(broker, broadcasting=True, start_from="first") as consumer:
        message = await consumer.receive()
        await message.reject("unreadable")
        assert await take(consumer, 1) == ["1"]
        assert await consumer.receive(timeout=0.1) is None

    assert "event=message_dropped" in caplog.text
    assert broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK) == []


@in_steady_time
@pytest.mark.parametrize("supported", [True, False])
async def test_a_message_not_acked_in_time_comes_again(broker: FakeBroker, supported: bool) -> None:
    """A late ``ack`` counts unless the broker has the message back."""
    broker.send_back_supported = supported
    await publish(broker, "0", "1")
    async with new_consumer(broker, ack_timeout=0.2) as consumer:
        stuck = await consumer.receive()
        assert stuck is not None
        assert await take(consumer, 1) == ["1"]
        again = await consumer.receive(timeout=PATIENCE_S)
        assert again is not None
        assert (again.body, again.delivery_attempt, again.topic) == (b"0", 2, "orders")
        assert await stuck.ack() is not supported  # the broker has it now, or we still have
        assert await again.ack() is supported
        assert await consumer.receive(timeout=0.5) is None

    assert committed(broker) == 2


@in_steady_time
async def test_a_long_handler_keeps_its_message_as_long_as_it_extends(broker: FakeBroker) -> None:
    """It comes to nobody else, and the ``ack`` counts; without extending, it comes again."""
    await publish(broker, "0")
    async with new_consumer(broker, ack_timeout=0.2) as consumer:
        message = await consumer.receive()
        for _ in range(4):
            assert await message.extend(0.3)
            assert await message.extend(0.01)  # does not shorten it
            assert await consumer.receive(timeout=0.2) is None
        assert broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK) == []
        assert await message.ack()
        assert not await message.extend(1)

        await publish(broker, "1")
        message = await consumer.receive()
        assert await message.extend(0.3)
        again = await consumer.receive(timeout=PATIENCE_S)
        assert again is not None
        assert (again.body, again.delivery_attempt) == (b"1", 2)
        assert not await message.extend(1)
        assert not await message.ack()
        assert await again.ack()


@in_steady_time
async def test_a_handler_that_is_too_slow_is_told_the_remedy_before_its_message_comes_again(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names setting and method; the late acknowledgement is a second one."""
    logged: list[str] = []

    def take_back(command: RemotingCommand, _peer: Peer) -> bytes:
        logged.append(caplog.text)
        return encode_reply(command)

    broker.handlers[RequestCode.CONSUMER_SEND_MSG_BACK] = take_back
    await publish(broker, "0")
    async with new_consumer(broker, ack_timeout=0.1) as consumer:
        message = await consumer.receive()
        await until(lambda: bool(logged))
        assert "attempt=1" in logged[0]
        assert "ack_timeout=0.1" in logged[0]
        assert "message.extend" in logged[0]
        assert "ack_too_late" not in logged[0]
        assert not await message.ack()
        assert "event=ack_too_late" in caplog.text


async def test_an_ack_timeout_of_none_waits_for_good() -> None:
    """It is for work that takes hours."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "0")
        async with new_consumer(broker, ack_timeout=None) as consumer:
            message = await consumer.receive()
            assert await consumer.receive(timeout=0.1) is None
            assert await message.extend(1)
            assert await message.ack()


@in_steady_time
async def test_a_late_ack_spares_a_redelivery_that_is_still_waiting(broker: FakeBroker) -> None:
    broker.send_back_supported = False
    await publish(broker, "0")
    config = ClientConfig(retry_delay=0.05)
    async with new_consumer(broker, config=config) as consumer:
        message = await consumer.receive()
        assert message is not None
        await message.retry()
        assert await message.ack()
        assert await consumer.receive(timeout=0.15) is None


# -- trouble


@on_both_loops
async def test_failed_pulls_are_repeated(broker: FakeBroker) -> None:
    """They are retried after a second, after flow control at once; nothing is skipped."""
    await publish(broker, "0")
    broker.fail(PULL, *[Refuse(ResponseCode.FLOW_CONTROL)] * 9, Refuse(ResponseCode.SYSTEM_ERROR))
    async with new_consumer(broker) as consumer:
        assert await take(consumer, 1) == ["0"]


async def test_a_broker_that_forgot_the_subscription_hears_it_again() -> None:
    """It answers 24; the consumer then sends a heartbeat at once."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "0")
        broker.fail(PULL, *[Refuse(ResponseCode.SUBSCRIPTION_NOT_EXIST)] * 2)
        async with new_consumer(broker) as consumer:
            assert await take(consumer, 1) == ["0"]

        assert len(broker.requests_of(RequestCode.HEART_BEAT)) >= 3


async def test_an_offset_that_no_longer_exists_is_corrected() -> None:
    """The consumer continues at the offset that the broker returns, and commits it."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "0", "1")
        broker.offsets["billing", "orders", 0] = 1000
        async with new_consumer(broker) as consumer:
            await until(lambda: committed(broker) == 2)
            await publish(broker, "2")
            assert await take(consumer, 1) == ["2"]


async def test_damaged_records_do_not_stop_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    """They are skipped with an error in the log; the others are delivered."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "0", "1", "2")
        whole = broker.pulled

        def damaged(command: Any, code: int, next_: int, end: int, body: bytes) -> bytes:
            second = int.from_bytes(body[:4], "big") if body else 0
            header = command.header
            assert isinstance(header, PullMessageRequestHeader)
            if header.queue_offset == 0:
                body = body[: second + 4] + bytes(4) + body[second + 8 :]
            elif header.queue_offset == 1:
                body = bytes(8) + body[8:]
                next_ = 2
            return whole(command, code, next_, end, body)

        broker.pulled = damaged  # type: ignore[method-assign]
        async with new_consumer(broker) as consumer:
            assert await take(consumer, 2) == ["0", "2"]

    assert "event=bad_record" in caplog.text


@pytest.mark.parametrize(
    ("limit", "expected"),
    [({"cached_messages_max": 10}, 10), ({"cached_span_max": 5}, 5), ({"cached_bytes_max": 1}, 1)],
)
async def test_pulling_pauses_while_too_much_is_unacked(
    limit: dict[str, int], expected: int
) -> None:
    """Memory is bounded however slow the loop is; pulling continues after acks."""
    config = ClientConfig(pull_batch=1, pull_suspend=1.0, **limit)  # type: ignore[arg-type]
    async with fake_broker(orders=1) as broker:
        broker.pull_max = 1
        await publish(broker, *(str(n) for n in range(20)))
        async with new_consumer(broker, config=config) as consumer:
            held: list[MessageView] = []
            for _ in range(expected):
                message = await consumer.receive(timeout=PATIENCE_S)
                assert message is not None
                held.append(message)
            assert await consumer.receive(timeout=0.1) is None
            for message in held:
                await message.ack()
            assert await take(consumer, 20 - expected) == [str(n) for n in range(expected, 20)]


async def test_a_failed_group_question_changes_nothing() -> None:
    """A member that cannot list the group keeps its queues; two members would share one."""
    async with fake_broker() as broker, new_consumer(broker) as consumer:
        broker.create_topic("orders", 4)
        await until(lambda: len(consumer.assignment) == 5)
        members = RequestCode.GET_CONSUMER_LIST_BY_GROUP
        asked = len(broker.requests_of(members))
        broker.fail(members, Refuse(1), Refuse(1), Ignore(), Cut())
        broker.notify_members("billing")
        await until(lambda: len(broker.requests_of(members)) > asked)

        assert len(consumer.assignment) == 5


@in_steady_time
async def test_a_failed_start_leaves_nothing_running() -> None:
    """The caller sees one error, and no task or socket stays behind."""
    async with fake_broker() as broker:
        address = broker.address
    before = asyncio.all_tasks()
    config = ClientConfig(send_timeout=0.2)
    consumer = Consumer("billing", {"orders": "*"}, namesrv=address, config=config)
    with pytest.raises(Exception, match="connection refused"):
        await consumer.start()

    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@in_steady_time
async def test_a_queue_is_pulled_once_although_another_could_not_be_taken() -> None:
    """One queue is refused, the other answered late: the next attempt must not take it twice."""
    late = asyncio.Event()
    async with fake_broker(orders=2) as broker:
        answer = broker.handlers[RequestCode.QUERY_CONSUMER_OFFSET]
        asked = 0

        def refuse_one_delay_one(command: RemotingCommand, peer: Peer) -> bytes | None:
            nonlocal asked
            header = command.header
            assert isinstance(header, QueryConsumerOffsetRequestHeader)
            asked += header.topic == "orders"
            if header.topic == "orders" and asked == 1:
                return encode_reply(command, ResponseCode.SYSTEM_ERROR, remark="scripted")
            reply = answer(command, peer)
            if header.topic == "orders" and asked == 2:
                assert reply is not None
                loop = asyncio.get_running_loop()
                loop.call_later(1.3 * RETRY_S, peer.transport.write, reply)
                loop.call_later(1.3 * RETRY_S, late.set)
                return None
            return reply

        broker.handlers[RequestCode.QUERY_CONSUMER_OFFSET] = refuse_one_delay_one
        async with new_consumer(broker) as consumer:
            await late.wait()
            for _ in range(3):  # answered after what follows from the late answer
                # The next heartbeat is half a minute away on the real clock.
                await session_of(consumer).heartbeat(broker.address)
            await until(lambda: [q.topic for q in consumer.assignment].count("orders") == 2)
            names = sorted(task.get_name() for task in asyncio.all_tasks())
            pulls = [name for name in names if name.startswith("pull orders")]

    assert pulls == ["pull orders@broker-a:0", "pull orders@broker-a:1"]
