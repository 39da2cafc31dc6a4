"""Sends that share a request, and requests that wait for a reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ClientConfig,
    ConfigurationError,
    Consumer,
    InvalidMessageError,
    Message,
    MessageTooLargeError,
    Producer,
    ReplyTimeoutError,
    SendResult,
    TransactionProducer,
)
from halfmq.client.producing.batching import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import ReplyMessageRequestHeader
from tests.support.fake_broker import FakeBroker, Peer, Refuse, fake_broker, until

LINGERING = ClientConfig(linger=0.01, compress_over=None)
FOREVER = ClientConfig(linger=60.0, compress_over=None, send_timeout=5.0)
BATCH, SINGLE = RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with fake_broker() as one:
        yield one


async def send_all(
    producer: Producer, messages: list[Message], order_key: str | None = None
) -> list[SendResult]:
    return await asyncio.gather(*(producer.send(one, order_key=order_key) for one in messages))


@pytest.mark.parametrize("kind", [Producer, TransactionProducer])
async def test_sends_share_a_request_and_have_their_own_results(
    broker: FakeBroker, kind: type[Producer]
) -> None:
    """Ids and offsets are those under which each message is stored."""
    messages = [Message("orders", b"%d" % number, keys=f"k{number}") for number in range(10)]
    async with kind("g", namesrv=broker.address, config=LINGERING) as producer:
        results = await send_all(producer, messages)

    assert len(broker.requests_of(BATCH)) == 1
    stored = {record.msg_id: record for record in broker.messages("orders")}
    for result, message in zip(results, messages, strict=True):
        record = stored[result.offset_message_id]
        assert (record.body, record.queue_offset) == (message.body, result.queue_offset)
        assert record.property_map["UNIQ_KEY"] == result.message_id


async def test_one_order_key_keeps_to_one_queue_and_its_order(broker: FakeBroker) -> None:
    """Different keys, topics and durabilities are in different requests."""
    async with Producer("g", namesrv=broker.address, config=LINGERING) as producer:
        a, b, _, _ = await asyncio.gather(
            send_all(producer, [Message("orders", b"%d" % n) for n in range(8)], order_key="a"),
            send_all(producer, [Message("orders", b"%d" % n) for n in range(8)], order_key="b"),
            send_all(producer, [Message("invoices", b"x")] * 2),
            send_all(producer, [Message("invoices", b"x", wait_durable=False)] * 2),
        )

    assert len(broker.requests_of(BATCH)) == 4
    for results in (a, b):
        assert len({one.queue for one in results}) == 1
        assert [one.queue_offset for one in results] == sorted(one.queue_offset for one in results)


async def test_what_cannot_wait_is_sent_at_once(broker: FakeBroker) -> None:
    """Delayed messages, compressed bodies, and sends with a time limit of their own."""
    config = ClientConfig(linger=60.0)
    async with Producer("g", namesrv=broker.address, config=config) as producer:
        await producer.send(Message("orders", b"x", deliver_after=timedelta(seconds=1)))
        await producer.send(Message("orders", b"x", delay_level=1))
        await producer.send(Message("orders", b"x" * 5000))
        await producer.send(Message("orders", b"x"), timeout=5.0)

    assert len(broker.requests_of(SINGLE)) == 4


async def test_a_full_batch_does_not_wait(broker: FakeBroker) -> None:
    """At a number of messages, or of bytes."""
    half = Message("orders", b"x" * (BATCH_BYTES_MAX // 2 + 1))
    async with Producer("g", namesrv=broker.address, config=FOREVER) as producer:
        await send_all(producer, [Message("orders", b"x")] * BATCH_MESSAGES_MAX)
        await producer.send(Message("orders", b"x" * BATCH_BYTES_MAX))
        first = asyncio.create_task(producer.send(half))
        second = asyncio.create_task(producer.send(half))
        await first
        assert not second.done()

    assert (await second).queue.topic == "orders"  # the close has sent it
    assert len(broker.messages("orders")) == BATCH_MESSAGES_MAX + 3


async def test_a_message_that_is_too_large_fails_alone(broker: FakeBroker) -> None:
    """The others of its batch are stored."""
    config = ClientConfig(linger=0.01, compress_over=None, message_size_max=1000)
    async with Producer("g", namesrv=broker.address, config=config) as producer:
        small, large = await asyncio.gather(
            producer.send(Message("orders", b"x")),
            producer.send(Message("orders", b"x" * 1001)),
            return_exceptions=True,
        )

    assert isinstance(small, SendResult)
    assert isinstance(large, MessageTooLargeError)


async def test_a_refusal_reaches_every_sender_and_no_cancelled_one(broker: FakeBroker) -> None:
    """Each may try again; who gave up hears nothing."""
    broker.fail(BATCH, Refuse(ResponseCode.MESSAGE_ILLEGAL))
    async with Producer("g", namesrv=broker.address, config=FOREVER) as producer:
        sends = [asyncio.create_task(producer.send(Message("orders", b"x"))) for _ in range(3)]
        await asyncio.sleep(0)
        sends[0].cancel()
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*sends, return_exceptions=True)

    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert [type(one) for one in outcomes[1:]] == [BrokerRefusedError] * 2


@pytest.mark.parametrize("linger", [0, -1, "1", float("nan"), True])
def test_a_wrong_linger_is_an_error(linger: float) -> None:
    with pytest.raises(ConfigurationError, match="linger"):
        ClientConfig(linger=linger)


PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


def push(peer: Peer, properties: str, body: bytes = b"reply") -> None:
    header = ReplyMessageRequestHeader(
        producer_group="g",
        topic="DefaultCluster_REPLY_TOPIC",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
        born_host="127.0.0.1:1",
        store_host="127.0.0.1:1",
        store_timestamp=0,
        properties=properties,
    )
    peer.send(PUSH, header, body, opaque=7)


async def test_a_request_without_a_reply_ends_in_time(broker: FakeBroker) -> None:
    """The message is stored, and the text says what to look for; a late reply is dropped."""
    async with Producer("g", namesrv=broker.address) as producer:
        with pytest.raises(ReplyTimeoutError, match=r"within 0\.05 s.*message\.reply") as caught:
            await producer.request(Message("questions", b"x"), timeout=0.05)
        (peer,) = broker.producers("g")
        (stored,) = broker.messages("questions")
        key = stored.property_map["CORRELATION_ID"]
        push(peer, f"CORRELATION_ID\x01{key}\x02")
        push(peer, "")
        await until(lambda: len(peer.answers) == 2)

    assert caught.value.message_id == stored.property_map["UNIQ_KEY"]
    assert stored.property_map["REPLY_TO_CLIENT"] == producer.client_id
    assert stored.property_map["TTL"] == "50"
    assert {answer.code for answer in peer.answers} == {ResponseCode.SUCCESS}


async def test_a_reply_reaches_the_request_that_waits(broker: FakeBroker) -> None:
    """A second one is dropped."""
    async with Producer("g", namesrv=broker.address) as producer:
        asking = asyncio.create_task(producer.request(Message("questions", b"x"), timeout=60))
        await until(lambda: bool(broker.messages("questions")))
        (peer,) = broker.producers("g")
        key = broker.messages("questions")[0].property_map["CORRELATION_ID"]
        for body in (b"first", b"second"):
            push(peer, f"CORRELATION_ID\x01{key}\x02colour\x01blue\x02", body)
        reply = await asking

    assert (reply.body, reply.properties["colour"]) == (b"first", "blue")


@pytest.mark.parametrize("seconds", [0, -1, "1", True])
async def test_a_wrong_time_limit_is_an_error(broker: FakeBroker, seconds: float) -> None:
    async with Producer("g", namesrv=broker.address) as producer:
        with pytest.raises(ConfigurationError, match="timeout"):
            await producer.request(Message("questions", b"x"), timeout=seconds)

    assert broker.messages("questions") == []


async def test_only_requests_are_replied_to(broker: FakeBroker) -> None:
    """And only with bytes, within the limit."""
    config = ClientConfig(namesrv=broker.address, message_size_max=100)
    async with (
        Producer("g", config=config) as producer,
        Consumer("r", {"questions": "*"}, start_from="first", config=config) as consumer,
    ):
        await producer.send(Message("questions", b"x"))
        message = await consumer.receive()
        with pytest.raises(InvalidMessageError, match="asks for no reply"):
            await message.reply(b"y")
        with pytest.raises(InvalidMessageError, match="expected bytes"):
            await message.reply("y")  # type: ignore[arg-type]
        with pytest.raises(MessageTooLargeError, match="101"):
            await message.reply(b"y" * 101)

    assert broker.requests_of(RequestCode.SEND_REPLY_MESSAGE_V2) == []
