"""Our client, unmodified, against the broker and name server of Apache RocketMQ 5.3.3.

Its jars come from Maven Central; it speaks JSON headers, asks about undecided transactions, and
gives unacked messages back by its own delay levels. One broker serves all tests, each of which
uses topics and groups of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from inspect import iscoroutinefunction, signature
from typing import NamedTuple

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ClientConfig,
    Consumer,
    Decision,
    FilterError,
    Message,
    MessageView,
    Producer,
    RouteNotFoundError,
    SqlFilter,
    TransactionProducer,
    blocking,
)
from halfmq.remoting.codes import ResponseCode
from tests.interop import test_client_admin as at_halfmq
from tests.interop import test_client_against_broker as clients
from tests.interop import test_dead_letters as letters
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import rocketmq_broker

pytestmark = pytest.mark.campaign

"""Seconds after which a message that has not come will not come."""
CHECK_WAIT = 70.0
"""Seconds for some of the broker's looks for undecided transactions, on a busy machine."""
QUICK_CHECKS = {"transactionCheckInterval": 5_000, "transactionTimeOut": 1_000}
"""Milliseconds. It notes decisions 3 s late (transactionOpBatchInterval); asking more often, it
would ask about decided ones, and deliver once more for every COMMIT it gets."""
"""Seconds until a consumer that started before its topic has found it: routes are asked for again
each second, and the broker tells its name server at once."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a running official broker."""
    home = tmp_path_factory.mktemp("rocketmq")
    with contextlib.ExitStack() as stack:
        settings = {
            **QUICK_CHECKS,
            "autoCreateTopicEnable": "true",
            "enablePropertyFilter": "true",
            "timerWheelEnable": "true",  # or it deletes no topic
        }
        broker = stack.enter_context(rocketmq_broker(home / "store", home, **settings))
        wait_until_registered(broker.namesrv)
        yield broker.namesrv


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_numbers)}"


def wait_until_registered(namesrv: str) -> None:
    """The broker listens before its name server knows that it creates topics."""
    deadline = time.monotonic() + PATIENCE_S
    with blocking.Producer("g", namesrv=namesrv) as producer:
        while True:
            try:
                producer.send(Message("ready", b"x"))
            except RouteNotFoundError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return


async def take(consumer: Consumer, count: int, *, seconds: float = PATIENCE_S) -> list[MessageView]:
    messages: list[MessageView] = []
    for _ in range(count):
        message = await consumer.receive(timeout=seconds)
        assert message is not None, f"only {len(messages)} of {count} came"
        assert await message.ack()
        messages.append(message)
    return messages


async def nothing_more(consumer: Consumer, seconds: float = 0.5) -> None:
    assert await consumer.receive(timeout=seconds) is None


async def test_an_sql_filter_selects_by_properties(namesrv: str, topic: str) -> None:
    """As against our broker; a wrong expression is reported with its position."""
    async with Producer("g", namesrv=namesrv) as producer:
        for number in range(6):
            properties = {"number": str(number), "region": "EU" if number % 2 else "US"}
            message = Message(topic, b"%d" % number, properties=properties)
            await producer.send(message, order_key="k")
    wanted = SqlFilter("number BETWEEN 1 AND 4 AND region = 'EU'")
    async with Consumer(f"g-{topic}", {topic: wanted}, namesrv=namesrv) as consumer:
        messages = await take(consumer, 2)
        await nothing_more(consumer)

    assert [message.body for message in messages] == [b"1", b"3"]
    with pytest.raises(FilterError, match="ParseException: Encountered") as caught:
        await Consumer("wrong", {topic: SqlFilter("number == 5")}, namesrv=namesrv).start()
    assert caught.value.position == 8


async def test_what_is_not_acked_comes_again(namesrv: str, topic: str) -> None:
    """Given back by its reader after a second, or for lack of an ack after ten."""
    async with Producer("g", namesrv=namesrv) as producer:
        await producer.send(Message(topic, b"given back"), order_key="k")
        sent = await producer.send(Message(topic, b"forgotten"), order_key="k")
    async with Consumer(f"g-{topic}", {topic: "*"}, namesrv=namesrv, ack_timeout=0.5) as consumer:
        for _ in range(2):
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            if message.body == b"given back":
                await message.retry(delay_level=1)
        given_back, forgotten = await take(consumer, 2)
        await nothing_more(consumer, 1.0)

    assert (given_back.body, given_back.delivery_attempt) == (b"given back", 2)
    assert (forgotten.body, forgotten.delivery_attempt) == (b"forgotten", 2)
    assert forgotten.topic == topic
    assert forgotten.message_id == sent.message_id


async def test_every_member_of_a_broadcast_gets_everything(namesrv: str, topic: str) -> None:
    """And starts at the beginning when told so."""
    async with Producer("g", namesrv=namesrv) as producer:
        for n in range(8):
            await producer.send(Message(topic, b"%d" % n))

    def member() -> Consumer:
        return Consumer(
            f"g-{topic}", {topic: "*"}, broadcasting=True, start_from="first", namesrv=namesrv
        )

    async with member() as first, member() as second:
        for consumer in (first, second):
            bodies = {message.body for message in await take(consumer, 8)}
            assert bodies == {b"%d" % n for n in range(8)}
            await nothing_more(consumer)


async def test_a_refusal_carries_the_brokers_words(namesrv: str, topic: str) -> None:
    """Such as for a delay level that it does not have, or a topic nobody may write to."""
    config = ClientConfig(send_attempts_max=1)
    async with Producer("g", namesrv=namesrv, config=config) as producer:
        with pytest.raises(BrokerRefusedError) as caught:
            await producer.send(Message("SCHEDULE_TOPIC_XXXX", b"x"))

    assert caught.value.code in {ResponseCode.NO_PERMISSION, ResponseCode.INVALID_PARAMETER}
    assert "SCHEDULE_TOPIC_XXXX" in str(caught.value)


async def test_a_transaction_is_delivered_if_and_only_if_it_commits(
    namesrv: str, topic: str
) -> None:
    """Decided here, or by another producer of the group whom the broker asks."""
    asked: list[MessageView] = []

    async def unknown(_message: MessageView) -> Decision:
        return Decision.UNKNOWN

    async def checker(message: MessageView) -> Decision:
        asked.append(message)
        return Decision.COMMIT if message.keys == "found" else Decision.ROLLBACK

    group = f"tx-{topic}"
    async with Consumer(f"g-{topic}", {topic: "*"}, namesrv=namesrv) as consumer:
        async with TransactionProducer(group, checker=unknown, namesrv=namesrv) as producer:
            async with producer.transaction(Message(topic, b"yes", keys="o-1")) as tx:
                pass
            async with producer.transaction(Message(topic, b"no", keys="o-2")) as no:
                no.rollback()
            for keys in ("found", "lost"):
                async with producer.transaction(Message(topic, b"open", keys=keys)) as left:
                    left.decide(Decision.UNKNOWN)
        (yes,) = await take(consumer, 1)
        async with TransactionProducer(group, checker=checker, namesrv=namesrv):
            (found,) = await take(consumer, 1, seconds=CHECK_WAIT)
            await until(lambda: {m.keys for m in asked} >= {"found", "lost"}, CHECK_WAIT)
            await nothing_more(consumer, 2.0)

    assert (yes.body, yes.transaction_id, tx.decided) == (b"yes", tx.id, True)
    assert (found.body, found.keys) == (b"open", "found")
    assert {message.topic for message in asked} == {topic}


class Namesrv(NamedTuple):
    """Stands for the broker process that tests at halfmq are given."""

    address: str


@pytest.mark.parametrize(
    "promise",
    [
        clients.test_what_was_sent_is_consumed,
        clients.test_a_group_goes_on_where_it_stopped,
        clients.test_members_of_a_group_share_the_queues,
        clients.test_the_blocking_facade,
    ],
)
async def test_clients_work_as_with_halfmq(
    namesrv: str, topic: str, promise: Callable[..., Awaitable[None] | None]
) -> None:
    """What tests show of producers and consumers at halfmq; the headers are JSON here."""
    available = {
        "served": Namesrv(namesrv),
        "topic": topic,
        "header_type": "auto",
        "loop_factory": asyncio.new_event_loop,
    }
    wanted = {name: available[name] for name in signature(promise).parameters}
    if iscoroutinefunction(promise):
        await promise(**wanted)
    else:
        await asyncio.to_thread(promise, **wanted)


@pytest.mark.parametrize(
    "promise",
    [
        at_halfmq.test_a_topic_is_created_changed_and_deleted,
        at_halfmq.test_what_is_no_topic_is_refused,
        at_halfmq.test_it_shows_where_a_group_is_and_sends_it_elsewhere,
        at_halfmq.test_offsets_that_do_not_exist_are_refused,
        at_halfmq.test_messages_are_found_by_id_and_key,
        at_halfmq.test_a_running_consumer_is_asked,
        letters.test_a_letter_says_what_it_was_and_nothing_is_consumed,
        letters.test_what_is_sent_again_is_the_message_and_nothing_else,
        letters.test_each_letter_that_cannot_be_sent_says_why,
    ],
)
def test_administration_is_the_same(namesrv: str, topic: str, promise: Callable[..., None]) -> None:
    """What tests show of `Admin` at halfmq; RocketMQ takes any group's name and any setting."""
    with blocking.Admin(namesrv=namesrv) as admin:
        admin.create_topic(topic, queues=1)
        available = {"broker": Namesrv(namesrv), "admin": admin, "name": topic}
        promise(**{name: available[name] for name in signature(promise).parameters})
