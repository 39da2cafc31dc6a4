"""A running consumer answers operators: about itself, its offsets, and one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from halfmq.client import ClientConfig, Consumer, Message, Producer
from halfmq.client.consuming import operator_requests
from halfmq.remoting.admin_headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)
from halfmq.remoting.bodies import (
    QueueKey,
    decode_consumer_status,
    encode_offset_list,
    encode_offset_table,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.running_info import (
    DirectOutcome,
    DirectResult,
    decode_direct_result,
    decode_running_info,
)
from halfmq.store.format.record import Record, encode_record
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.fake_broker import FakeBroker, Peer, until

TOPIC: Final = "one-queue"
QUICK: Final = ClientConfig(offset_commit_interval=0.02)
QUEUE: Final = QueueKey(topic=TOPIC, broker_name="broker-a", queue_id=0)


@asynccontextmanager
async def consuming(broker: FakeBroker, *bodies: str, **arguments: Any) -> AsyncIterator[Consumer]:
    """A consumer of one queue with these messages, none of which it has taken."""
    broker.create_topic(TOPIC, queues=1)
    async with Producer("g", namesrv=broker.address) as producer:
        for body in bodies:
            await producer.send(Message(TOPIC, body.encode()))
    settings: dict[str, Any] = {"start_from": "first", "config": QUICK, **arguments}
    async with Consumer("readers", {TOPIC: "*"}, namesrv=broker.address, **settings) as consumer:
        await until(lambda: bool(consumer.assignment))
        yield consumer


def consumer_peer(broker: FakeBroker) -> Peer:
    (peer,) = [peer for peer in broker.peers if "readers" in peer.consumer_groups]
    return peer


async def ask(broker: FakeBroker, code: int, header: Header, body: bytes = b"") -> RemotingCommand:
    """Send a request to the consumer; return its answer."""
    peer = consumer_peer(broker)
    before = len(peer.answers)
    peer.send(code, header, body, opaque=1_000 + before)
    await until(lambda: len(peer.answers) > before)
    return peer.answers[-1]


def about(group: str = "readers", **fields: Any) -> GetConsumerRunningInfoRequestHeader:
    return GetConsumerRunningInfoRequestHeader(consumer_group=group, client_id="c", **fields)


async def take(consumer: Consumer, count: int, *, ack: bool = True) -> list[str]:
    taken = []
    for _ in range(count):
        message = await consumer.receive(5)
        assert message is not None
        taken.append(message.body.decode())
        if ack:
            assert await message.ack()
    return taken


@on_both_loops
async def test_it_tells_about_itself(broker: FakeBroker) -> None:
    """Subscriptions, and per queue the offset and what is unacknowledged; stacks if wanted."""
    async with consuming(broker, "a", "b", "c") as consumer:
        await take(consumer, 1)
        answer = await ask(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, about())
        info = decode_running_info(answer.body)
        progress = info.queues[QUEUE]

        assert (progress.commit_offset, progress.cached_msg_count) == (1, 2)
        assert (progress.cached_msg_min_offset, progress.cached_msg_max_offset) == (1, 2)
        assert progress.last_pull_timestamp > 0
        assert progress.last_consume_timestamp > 0
        assert {one.topic: one.sub_string for one in info.subscriptions} == {
            TOPIC: "*",
            "%RETRY%readers": "*",
        }
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info.stacks is None

        header = about(jstack_enable=True)
        answer = await ask(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        stacks = decode_running_info(answer.body).stacks or ""
        assert "pull one-queue@broker-a:0" in stacks
        assert "QueuePuller.run" in stacks
        assert "BrokerConnection.request" in stacks  # where the pull waits


@on_both_loops
async def test_it_tells_its_offsets_in_a_topic(broker: FakeBroker) -> None:
    """Where another consumer would resume, whether committed yet or not."""
    async with consuming(broker, "a", "b", "c") as consumer:
        await take(consumer, 2)
        header = GetConsumerStatusRequestHeader(topic=TOPIC, group="readers")
        answer = await ask(broker, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, header)
        assert decode_consumer_status(answer.body) == {QUEUE: 2}


@pytest.mark.parametrize("encode", [encode_offset_table, encode_offset_list])
@on_both_loops
async def test_it_continues_where_it_is_reset(broker: FakeBroker, encode: Any) -> None:
    """At once, and what it had pulled before is delivered no more; queues of others stay."""
    async with consuming(broker, "a", "b", "c") as consumer:
        assert await take(consumer, 2) == ["a", "b"]
        in_hand = await consumer.receive(5)
        offsets: Mapping[QueueKey, int] = {
            QUEUE: 1,
            QueueKey(topic=TOPIC, broker_name="broker-z", queue_id=0): 1,
        }
        header = ResetOffsetRequestHeader(topic=TOPIC, group="readers", timestamp=0, is_force=True)
        consumer_peer(broker).send(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, encode(offsets)
        )
        assert await take(consumer, 2) == ["b", "c"]
        assert in_hand is not None
        assert not await in_hand.ack()
        await consumer.commit()
        assert broker.offsets["readers", TOPIC, 0] == 3


@on_both_loops
async def test_after_a_reset_it_commits_up_to_the_old_offset(broker: FakeBroker) -> None:
    """Otherwise the group lags for good, and the next start delivers all again."""
    async with consuming(broker, "a", "b", "c") as consumer:
        await take(consumer, 3)
        await consumer.commit()
        broker.offsets["readers", TOPIC, 0] = 0  # by the broker that resets the group
        header = ResetOffsetRequestHeader(topic=TOPIC, group="readers", timestamp=0, is_force=True)
        consumer_peer(broker).send(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, encode_offset_table({QUEUE: 0})
        )
        assert await take(consumer, 3) == ["a", "b", "c"]
        await consumer.commit()
        assert broker.offsets["readers", TOPIC, 0] == 3


async def give(broker: FakeBroker, record: Record) -> asyncio.Task[RemotingCommand]:
    header = ConsumeMessageDirectlyRequestHeader(consumer_group="readers", broker_name="broker-a")
    body = encode_record(record)
    return asyncio.create_task(ask(broker, RequestCode.CONSUME_MESSAGE_DIRECTLY, header, body))


def result_of(answer: RemotingCommand) -> DirectResult:
    assert answer.code == 0, answer.remark
    return decode_direct_result(answer.body)


@on_both_loops
async def test_it_consumes_a_message_that_it_is_given(broker: FakeBroker) -> None:
    """Before all others, in the user's loop; no offset changes, and it is told what came of it."""
    async with consuming(broker, "a", "b") as consumer:
        assert await take(consumer, 2) == ["a", "b"]
        for ack, outcome in ((True, DirectOutcome.SUCCESS), (False, DirectOutcome.LATER)):
            answer = await give(broker, broker.messages(TOPIC)[0])
            message = await consumer.receive(5)
            assert message is not None
            assert (message.body, message.queue.broker_name) == (b"a", "broker-a")
            await (message.ack() if ack else message.retry())
            assert result_of(await answer).consume_result == outcome
        await consumer.commit()
        assert broker.offsets["readers", TOPIC, 0] == 2
        assert broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK) == []


@in_steady_time
async def test_a_message_that_nobody_takes_is_answered_in_time(broker: FakeBroker) -> None:
    """The broker waits ten seconds; the message is not delivered later."""
    async with consuming(broker, "a") as consumer:
        await take(consumer, 1)
        result = result_of(await (await give(broker, broker.messages(TOPIC)[0])))
        assert result.consume_result == DirectOutcome.RETURN_NULL
        assert result.remark == "not acknowledged in 9 seconds"
        assert await consumer.receive(0.01) is None


@on_both_loops
async def test_what_cannot_be_answered_is_refused(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group, too many messages, and bytes that are none; the consumer continues."""
    monkeypatch.setattr(operator_requests, "DIRECT_MAX", 0)
    directly = RequestCode.CONSUME_MESSAGE_DIRECTLY
    async with consuming(broker, "a") as consumer:
        for code, header, body, remark in (
            (RequestCode.GET_CONSUMER_RUNNING_INFO, about("others"), b"", "Group <others> not"),
            (directly, ConsumeMessageDirectlyRequestHeader(consumer_group="readers"), b"?", "rec"),
            (
                directly,
                ConsumeMessageDirectlyRequestHeader(consumer_group="readers"),
                encode_record(broker.messages(TOPIC)[0]),
                "at most 0 messages",
            ),
        ):
            answer = await ask(broker, code, header, body)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert remark in (answer.remark or "")
        reset = ResetOffsetRequestHeader(topic=TOPIC, group="readers", timestamp=0, is_force=True)
        consumer_peer(broker).send(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, b"garbage")
        assert await take(consumer, 1) == ["a"]
