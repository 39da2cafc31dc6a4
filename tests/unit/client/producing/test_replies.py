"""Requests without a reply, and replies without a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from halfmq.client import (
    ConfigurationError,
    Consumer,
    InvalidMessageError,
    Message,
    MessageTooLargeError,
    Producer,
    ReplyTimeoutError,
)
from halfmq.client.config import ClientConfig
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import ReplyMessageRequestHeader
from tests.support.fake_broker import FakeBroker, Peer, fake_broker, until

PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with fake_broker() as one:
        yield one


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
    """Nothing is sent."""
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
