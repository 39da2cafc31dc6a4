"""Messages whose bodies a codec makes of values, and values of bodies."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from halfmq.client import (
    ConfigurationError,
    Consumer,
    ConsumerEvent,
    InvalidMessageError,
    Message,
    Producer,
    Rejected,
    blocking,
)
from halfmq.client.codecs import Codec, json, msgpack, raw
from halfmq.client.codecs import pydantic as of_pydantic
from tests.support.broker_thread import BrokerThread
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import fake_broker
from tests.support.patience import PATIENCE_S


@dataclass
class Order:
    number: str
    amount: int


class Bill(pydantic.BaseModel):
    number: str
    amount: int


ORDER, BILL = Order("o-1", 3), Bill(number="b-1", amount=4)


@pytest.mark.parametrize(
    ("codec", "value", "body"),
    [
        (json(Order), ORDER, b'{"number":"o-1","amount":3}'),
        (msgpack(Order), ORDER, msgspec.msgpack.encode(ORDER)),
        (of_pydantic(Bill), BILL, b'{"number":"b-1","amount":4}'),
        (raw, b"as it is", b"as it is"),
    ],
)
@on_both_loops
async def test_a_value_arrives_as_it_was_sent(codec: Codec[Any], value: Any, body: bytes) -> None:
    """With each of the codecs; the body is what the format says, for clients of others."""
    async with fake_broker() as broker:
        async with Producer("g", codec=codec, namesrv=broker.address) as producer:
            await producer.send(producer.message("orders", value, keys="k-1"))
        async with Consumer(
            "billing", {"orders": "*"}, codec=codec, start_from="first", namesrv=broker.address
        ) as consumer:
            message = await consumer.receive(PATIENCE_S)
            assert message is not None
            assert (message.value, message.body, message.keys) == (value, body, "k-1")


@on_both_loops
async def test_a_message_that_does_not_decode_is_rejected_with_the_reason() -> None:
    """The loop gets the next one, and so do a batch and a handler."""
    async with fake_broker() as broker:
        rejected: list[ConsumerEvent] = []
        async with Producer("g", namesrv=broker.address) as producer:
            for body in (b"not json", b'{"number":"o-1","amount":"three"}', b"[1]", b"{}") * 2:
                await producer.send(Message("orders", body), order_key="one")
            for _ in range(2):
                good = Message("orders", json(Order).encode(ORDER))
                await producer.send(good, order_key="one")
        async with Consumer(
            "billing",
            {"orders": "*"},
            codec=json(Order),
            start_from="first",
            on_event=rejected.append,
            namesrv=broker.address,
        ) as consumer:
            message = await consumer.receive(PATIENCE_S)
            assert message is not None
            assert message.value == ORDER
            assert await message.ack()
            assert [one.value for one in await consumer.receive_many(10, PATIENCE_S)] == [ORDER]

        reasons = [event.reason for event in rejected if isinstance(event, Rejected)]
        assert len(reasons) == 8
        assert reasons[0].startswith("not decoded: DecodeError: JSON is malformed")
        assert "Expected `int`, got `str` - at `$.amount`" in reasons[1]


def test_blocking_clients_have_codecs_too() -> None:
    """In the thread that receives, and in handlers."""
    with closing(BrokerThread()) as served:
        address, handled = served.broker.address, []
        with blocking.Producer("g", codec=json(Order), namesrv=address) as producer:
            producer.send(Message("orders", b"bad"), order_key="one")
            for _ in range(2):
                producer.send(producer.message("orders", ORDER), order_key="one")
        with blocking.Consumer(
            "billing", {"orders": "*"}, codec=json(Order), start_from="first", namesrv=address
        ) as consumer:
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            assert message.value == ORDER
            message.ack()

            def handle(one: blocking.MessageView[Order]) -> None:
                handled.append(one.value)
                consumer.stop()

            consumer.run(handle, signals=False)
        assert handled == [ORDER]


async def test_wrong_use_says_what_is_right() -> None:
    plain = Producer("g")
    with pytest.raises(ConfigurationError, match="a codec of halfmq"):
        plain.message("orders", b"x")
    with pytest.raises(ConfigurationError, match="codec"):
        Producer("g", codec="json")  # type: ignore[arg-type]
    with pytest.raises(InvalidMessageError, match="is not encoded"):
        Producer("g", codec=json(object)).message("orders", object())
    with pytest.raises(TypeError, match="'namesrvr'; expected some of namesrv"):
        Producer("g", namesrvr="127.0.0.1:9876")  # type: ignore[call-arg]
