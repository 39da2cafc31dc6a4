"""Sending: where a message goes, what is tried again, and what the caller hears."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import pytest

from halfmq.client import (
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientConfig,
    ConfigurationError,
    ConnectError,
    ConnectionLostError,
    Decision,
    Message,
    MessageTooLargeError,
    MessageView,
    Producer,
    RouteNotFoundError,
    SendStatus,
    SendTimeoutError,
    TransactionProducer,
)
from halfmq.client.message import MessageQueue
from halfmq.client.net.retry import backoff_seconds
from halfmq.client.net.routes import Route
from halfmq.client.net.session import refresh_pause
from halfmq.client.producer import choose_queue
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.store.format.ids import java_string_hash
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.fake_broker import Cut, FakeBroker, Ignore, Peer, Refuse, fake_broker, until
from tests.support.patience import PATIENCE_S

SEND = RequestCode.SEND_MESSAGE_V2
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
MESSAGE = Message("orders", b"hello", tags="created", keys="o-1")
QUICK = ClientConfig(reconnect_delay_min=0.01, reconnect_delay_max=0.02)
IMPATIENT = replace(QUICK, send_timeout=0.3, request_timeout=0.3)
"""For answers that never come, in steady time."""


@on_both_loops
async def test_a_send_tells_where_the_message_lies(broker: FakeBroker) -> None:
    """The result has queue, offset and ids."""
    async with Producer("g", namesrv=broker.address) as producer:
        result = await producer.send(MESSAGE)

    (stored,) = broker.messages("orders")
    assert stored.body == b"hello"
    assert stored.property_map == {"UNIQ_KEY": result.message_id, "TAGS": "created", "KEYS": "o-1"}
    assert result.queue == MessageQueue("orders", "broker-a", stored.queue_id)
    assert (result.queue_offset, result.status) == (0, SendStatus.SEND_OK)
    assert result.offset_message_id == stored.msg_id


@on_both_loops
async def test_many_sends_at_once_all_arrive(broker: FakeBroker) -> None:
    """One producer serves any number of tasks, and uses all queues."""
    async with Producer("g", namesrv=broker.address) as producer:
        results = await asyncio.gather(
            *(producer.send(Message("orders", b"%d" % n)) for n in range(200))
        )

    assert sorted(int(record.body) for record in broker.messages("orders")) == list(range(200))
    assert len({result.message_id for result in results}) == 200
    assert [len(queue) for queue in broker.queues["orders"]] == [50] * 4


@on_both_loops
async def test_a_first_send_creates_the_topic(broker: FakeBroker) -> None:
    """The route of TBW102 is used, with four queues as in the official client."""
    async with Producer("g", namesrv=broker.address) as producer:
        await producer.send(Message("fresh", b"x"))
        await producer.send(Message("fresh", b"y"))

    assert len(broker.queues["fresh"]) == 4
    header = broker.requests_of(SEND)[0].header
    assert isinstance(header, SendMessageRequestHeader)
    assert (header.default_topic, header.default_topic_queue_nums) == ("TBW102", 4)


async def test_an_unknown_topic_is_an_error_when_nobody_creates_it() -> None:
    """A retry would not help, so the error comes at once."""
    async with (
        fake_broker(auto_create=False) as broker,
        Producer("g", namesrv=broker.address) as producer,
    ):
        with pytest.raises(RouteNotFoundError, match="fresh") as caught:
            await producer.send(Message("fresh", b"x"))

    assert not caught.value.retriable


@on_both_loops
@pytest.mark.parametrize("code", [1, 2, 14, 16, 17, 204, 205, 1500])
async def test_a_passing_refusal_is_tried_again_with_the_same_id(
    broker: FakeBroker, code: int
) -> None:
    """These are the codes on which official clients retry."""
    broker.fail(SEND, Refuse(code), Refuse(code))

    async with Producer("g", namesrv=broker.address) as producer:
        result = await producer.send(MESSAGE)

    properties = [
        request.header.properties
        for request in broker.requests_of(SEND)
        if isinstance(request.header, SendMessageRequestHeader)
    ]
    assert len(properties) == 3
    assert set(properties) == {properties[0]}
    assert result.message_id in str(properties[0])


async def test_attempts_may_be_limited() -> None:
    """With one attempt, no message is ever sent twice."""
    config = ClientConfig(send_attempts_max=1)
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=config) as producer,
    ):
        broker.fail(SEND, Refuse(ResponseCode.SYSTEM_BUSY, "too much"))

        with pytest.raises(BrokerRefusedError, match=r"SYSTEM_BUSY \(2\): too much") as caught:
            await producer.send(MESSAGE)

        assert (caught.value.code, caught.value.retriable) == (2, True)
        assert len(broker.requests_of(SEND)) == 1


async def test_the_third_answer_that_a_route_is_old_is_the_callers() -> None:
    """Each attempt used a fresh route, so waiting would not help."""
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=QUICK) as producer,
    ):
        broker.fail(SEND, *[Refuse(ResponseCode.NO_PERMISSION)] * 4)

        with pytest.raises(BrokerRefusedError, match="NO_PERMISSION"):
            await producer.send(MESSAGE)

        assert len(broker.requests_of(SEND)) == 3


SENDS: Final[dict[str, Callable[[Producer], Awaitable[object]]]] = {
    "send": lambda producer: producer.send(MESSAGE),
    "ordered": lambda producer: producer.send(MESSAGE, order_key="o-1"),
    "batch": lambda producer: producer.send_batch([MESSAGE, MESSAGE]),
    "oneway": lambda producer: producer.send_oneway(MESSAGE),
    "several": lambda producer: _transact(producer, [MESSAGE, MESSAGE]),
    "transaction": lambda producer: _transact(producer, MESSAGE),
}


async def _transact(producer: Producer, messages: Message | list[Message]) -> None:
    assert isinstance(producer, TransactionProducer)
    async with producer.transaction(messages):
        pass


@on_both_loops
@pytest.mark.parametrize(
    ("form", "known"),
    # Not the ordered one that may be stored on the connection that is lost.
    [(form, known) for form in SENDS for known in (False, True) if not known or form != "ordered"],
)
async def test_a_restart_of_the_broker_costs_latency_and_no_error(
    broker: FakeBroker, form: str, *, known: bool
) -> None:
    """This holds however often it refuses connections, and whatever request comes first."""
    async with TransactionProducer("g", _commit, namesrv=broker.address, config=QUICK) as producer:
        if known:
            await producer.send(MESSAGE)
        await broker.stop()
        sending = asyncio.ensure_future(SENDS[form](producer))
        await asyncio.sleep(0.2)  # several attempts; fewer on a busy machine do no harm
        await broker.restart()
        await sending

    assert broker.requests


@pytest.mark.parametrize("form", [form for form in SENDS if form != "oneway"])
@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
async def test_a_busy_broker_is_asked_again_until_it_is_not(form: str, code: int) -> None:
    """A queue that is full for half a second causes no error."""
    wanted = RequestCode.SEND_BATCH_MESSAGE if form == "batch" else SEND
    if form == "several":
        wanted = RequestCode.PREPARE_TRANSACTION
    async with (
        fake_broker() as broker,
        TransactionProducer("g", _commit, namesrv=broker.address, config=QUICK) as producer,
    ):
        broker.fail(wanted, *[Refuse(code)] * 20)
        await SENDS[form](producer)

        assert len(broker.requests_of(wanted)) == 21


@in_steady_time
async def test_a_server_that_hangs_up_at_once_is_not_asked_in_a_tight_loop() -> None:
    """A pause follows each attempt, and the caller gets the last error."""
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=IMPATIENT) as producer,
    ):
        broker.fail(ROUTE, *[Cut()] * 1000)

        with pytest.raises(ConnectError, match=r"no route of orders: .* closed by the peer"):
            await producer.send(MESSAGE)

        pauses_max = IMPATIENT.send_timeout / (IMPATIENT.reconnect_delay_min / 2)
        assert 2 <= len(broker.requests_of(ROUTE)) <= 2 + pauses_max


def test_pauses_grow_to_their_maximum_and_differ() -> None:
    """They double, minus up to a half at random, so that clients do not reconnect together."""
    config = ClientConfig(reconnect_delay_min=0.1, reconnect_delay_max=0.5)
    longest = [backoff_seconds(n, config, lambda: 0.0) for n in range(1, 6)]
    shortest = [backoff_seconds(n, config, lambda: 0.5) for n in range(1, 6)]

    assert longest == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert shortest == [seconds * 0.75 for seconds in longest]
    assert backoff_seconds(10_000, config, lambda: 0.0) == 0.5


def _commit(_message: MessageView) -> Decision:
    return Decision.COMMIT


async def test_a_final_refusal_is_not_tried_again() -> None:
    """A retry of an illegal message would not help."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.fail(SEND, Refuse(ResponseCode.MESSAGE_ILLEGAL))

        with pytest.raises(BrokerRefusedError) as caught:
            await producer.send(MESSAGE)

        assert not caught.value.retriable
        assert len(broker.requests_of(SEND)) == 1


async def test_a_topic_that_is_closed_is_left_after_three_attempts() -> None:
    """Another broker may accept it; the error says that the same call does not help later."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        for _ in range(4):
            broker.fail(SEND, Refuse(ResponseCode.NO_PERMISSION))

        with pytest.raises(BrokerRefusedError) as caught:
            await producer.send(MESSAGE)

        assert not caught.value.retriable
        assert len(broker.requests_of(SEND)) == 3


@pytest.mark.parametrize("status", [10, 11, 12])
async def test_stored_but_not_safe_counts_as_sent(status: int) -> None:
    """The status of the result says how durable the message is."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.create_topic("orders")
        broker.send_status = status
        result = await producer.send(MESSAGE)

    assert (result.status, result.queue_offset) == (SendStatus(status), 0)


@on_both_loops
async def test_a_lost_connection_is_tried_again(broker: FakeBroker) -> None:
    """The message may then be stored twice, with one id."""
    async with Producer("g", namesrv=broker.address, config=QUICK) as producer:
        broker.fail(SEND, Cut(after_doing=True))
        result = await producer.send(MESSAGE)

    ids = [record.property_map["UNIQ_KEY"] for record in broker.messages("orders")]
    assert ids == [result.message_id] * 2


@in_steady_time
async def test_silence_ends_in_a_timeout_that_says_so(broker: FakeBroker) -> None:
    """The error has the address and the time, and says that the message may be stored."""
    async with Producer("g", namesrv=broker.address, config=IMPATIENT) as producer:
        broker.fail(SEND, Ignore(after_doing=True))

        with pytest.raises(SendTimeoutError) as caught:
            await producer.send(MESSAGE)

    assert str(caught.value) == (
        f"sent once within 0.3 s, last to {broker.address}: no answer in time"
    )
    assert caught.value.retriable
    assert len(broker.messages("orders")) == 1


@in_steady_time
async def test_a_doubt_is_not_hidden_by_a_later_clear_failure() -> None:
    """Only "connection refused" would mean that nothing was stored."""
    async with fake_broker() as broker:
        async with Producer("g", namesrv=broker.address, config=IMPATIENT) as producer:
            await producer.send(MESSAGE)
            broker.fail(SEND, Cut(after_doing=True, for_good=True))

            with pytest.raises(ConnectionLostError) as caught:
                await producer.send(MESSAGE)

        assert isinstance(caught.value.__cause__, ConnectError)


@in_steady_time
async def test_a_route_to_where_nobody_listens_is_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The address, the name server that gave it, and the broker's settings to change."""
    async with fake_broker() as broker:
        server, broker.address = broker.address, "127.0.0.1:1"
        explained = (
            f"cannot connect to 127.0.0.1:1: connection refused; is the broker running? (name "
            f"server {server} gave this address: the broker has to listen there, by its "
            "bindAddress, or to give another one, by its brokerIP1)"
        )
        async with Producer("g", namesrv=server, config=IMPATIENT) as producer:
            (warning,) = [one for one in caplog.records if "broker_lost" in one.message]
            assert explained in warning.message

            with pytest.raises(ConnectError) as caught:
                await producer.send(MESSAGE)

        assert str(caught.value) == explained


@in_steady_time
async def test_close_waits_for_the_answers_of_sends_under_way() -> None:
    """Their callers learn where the messages lie; what is not answered by then may be stored."""
    async with fake_broker() as broker:
        producer = Producer("g", namesrv=broker.address)
        await producer.start()
        await producer.send(MESSAGE)
        at_once = broker.handlers[SEND]

        def later(command: RemotingCommand, peer: Peer) -> None:
            reply = at_once(command, peer) or b""
            asyncio.get_running_loop().call_later(0.5, peer.transport.write, reply)

        broker.handlers[SEND] = later
        sends = [asyncio.create_task(producer.send(MESSAGE)) for _ in range(3)]
        await until(lambda: len(broker.requests_of(SEND)) == 4)
        await producer.close()
        assert [(await send).status for send in sends] == [SendStatus.SEND_OK] * 3

        broker.handlers[SEND] = at_once
        producer = Producer("g", namesrv=broker.address)
        await producer.start()
        broker.fail(SEND, Ignore())
        lost = asyncio.create_task(producer.send(MESSAGE))
        await until(lambda: len(broker.requests_of(SEND)) == 5)
        await producer.close()
        with pytest.raises(ConnectionLostError, match="the client was closed"):
            await lost


@on_both_loops
async def test_one_order_key_keeps_one_queue(broker: FakeBroker) -> None:
    """It is the queue that Java's SelectMessageQueueByHash chooses for the key."""
    async with Producer("g", namesrv=broker.address) as producer:
        for n in range(8):
            await producer.send(Message("orders", b"%d" % n), order_key="o-1")

    queue = broker.queues["orders"][abs(java_string_hash("o-1")) % 4]
    assert [int(record.body) for record in queue] == list(range(8))


async def test_an_ordered_message_is_not_sent_again_when_it_may_be_stored() -> None:
    """The copy could be stored after its successor."""
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=QUICK) as producer,
    ):
        broker.fail(SEND, Cut(after_doing=True))
        with pytest.raises(ConnectionLostError):
            await producer.send(MESSAGE, order_key="o-1")

        broker.fail(SEND, Refuse(ResponseCode.SYSTEM_BUSY))
        await producer.send(MESSAGE, order_key="o-1")  # refused is not stored: tried again

        assert len(broker.messages("orders")) == 2


def test_a_retry_prefers_another_broker() -> None:
    """Another broker may accept what one cannot accept now."""
    queues = tuple(MessageQueue("t", name, n) for name in ("a", "b") for n in range(2))
    route = Route("t", queues, queues, {"a": "1", "b": "2"})

    assert {choose_queue(route, None, "a").broker_name for _ in range(9)} == {"b"}
    assert {choose_queue(route, None).broker_name for _ in range(9)} == {"a", "b"}
    alone = Route("t", queues[:2], queues[:2], {"a": "1"})
    assert {choose_queue(alone, None, "a").queue_id for _ in range(9)} == {0, 1}


@on_both_loops
async def test_a_batch_is_stored_in_one_queue_in_order(broker: FakeBroker) -> None:
    """It is one request, and each message has its own id."""
    async with Producer("g", namesrv=broker.address) as producer:
        batch = [Message("orders", b"%d" % n, tags="a") for n in range(10)]
        result = await producer.send_batch(batch)

    records = broker.messages("orders")
    assert [int(record.body) for record in records] == list(range(10))
    assert {record.queue_id for record in records} == {result.queue.queue_id}
    ids = [record.property_map["UNIQ_KEY"] for record in records]
    assert result.message_id.split(",") == ids
    assert len(set(ids)) == 10
    assert len(broker.requests_of(RequestCode.SEND_BATCH_MESSAGE)) == 1


@on_both_loops
async def test_a_oneway_send_waits_for_nobody(broker: FakeBroker) -> None:
    """The broker does not answer it."""
    async with Producer("g", namesrv=broker.address) as producer:
        await producer.send_oneway(MESSAGE)
        await until(lambda: len(broker.messages("orders")) == 1)

    (request,) = broker.requests_of(SEND)
    assert request.is_one_way


@on_both_loops
async def test_a_oneway_send_leaves_before_the_producer_closes(broker: FakeBroker) -> None:
    """Closing sends what is buffered."""
    async with Producer("g", namesrv=broker.address) as producer:
        for _ in range(50):
            await producer.send_oneway(MESSAGE)

    await until(lambda: len(broker.messages("orders")) == 50)


async def test_a_message_above_the_limit_never_leaves() -> None:
    """The broker would receive it only to reject it."""
    config = ClientConfig(message_size_max=100)
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=config) as producer,
    ):
        with pytest.raises(MessageTooLargeError):
            await producer.send(Message("orders", b"x" * 101))

        assert broker.requests_of(SEND) == []


@pytest.mark.parametrize("closed", [False, True])
async def test_a_producer_that_does_not_run_says_so(closed: bool) -> None:
    """It raises ClientClosedError before the start and after the close."""
    async with fake_broker() as broker:
        producer = Producer("g", namesrv=broker.address)
        if closed:
            async with producer:
                pass
            await producer.close()  # a second time does no harm
        with pytest.raises(ClientClosedError, match="Producer g is not running"):
            await producer.send(MESSAGE)
        await producer.start()  # also again
        await producer.send(MESSAGE)
        await producer.close()


async def test_an_answer_without_its_fields_is_the_brokers_fault() -> None:
    """The caller gets BadAnswerError, not KeyError."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.fail(SEND, Refuse(ResponseCode.SUCCESS))

        with pytest.raises(BadAnswerError, match="msgId"):
            await producer.send(MESSAGE)


async def test_the_producer_leaves_its_group_when_it_closes() -> None:
    """Otherwise the broker would send checks to it."""
    async with fake_broker() as broker:
        async with Producer("g", namesrv=broker.address):
            assert len(broker.producers("g")) == 1

        assert len(broker.requests_of(RequestCode.UNREGISTER_CLIENT)) == 1


async def test_a_topic_that_grows_is_noticed() -> None:
    """Routes are fetched again with the heartbeats."""
    config = ClientConfig(heartbeat_interval=0.05)
    async with (
        fake_broker() as broker,
        Producer("g", namesrv=broker.address, config=config) as producer,
    ):
        broker.create_topic("orders", 1)
        await producer.send(MESSAGE)
        broker.queues["orders"].append([])

        async with asyncio.timeout(PATIENCE_S):
            while (await producer.send(MESSAGE)).queue.queue_id != 1:
                pass


def test_routes_that_have_lost_a_broker_are_fetched_again_soon() -> None:
    """A broker that is restarted is back in seconds, and not left out for half a minute."""
    config, pauses = ClientConfig(), [30.0]
    for is_whole in (True, False, True, True, False, True, True, True, True, True, True):
        pauses.append(refresh_pause(pauses[-1], config, is_whole=is_whole))

    assert pauses[1:] == [30, 1, 2, 4, 1, 2, 4, 8, 16, 30, 30]
    assert refresh_pause(9, replace(config, route_refresh_interval=5), is_whole=True) == 5


async def test_tasks_that_need_the_same_route_share_one_question() -> None:
    """Many first sends to a topic fetch its route once."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.create_topic("orders")
        before = len(broker.requests_of(ROUTE))

        await asyncio.gather(*(producer.send(MESSAGE) for _ in range(50)))

        assert len(broker.requests_of(ROUTE)) == before + 1


@in_steady_time
async def test_a_send_may_have_its_own_time_limit() -> None:
    """For all attempts together; the others keep ``send_timeout``."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.fail(SEND, Ignore())
        with pytest.raises(SendTimeoutError, match=r"within 0\.2 s"):
            await producer.send(MESSAGE, timeout=0.2)
        broker.fail(RequestCode.SEND_BATCH_MESSAGE, Ignore())
        with pytest.raises(SendTimeoutError, match=r"within 0\.1 s"):
            await producer.send_batch([MESSAGE], timeout=0.1)
        await producer.send(MESSAGE, timeout=PATIENCE_S)
        sent = len(broker.requests_of(SEND))
        for wrong in (0, -1, float("inf"), "1", True):
            with pytest.raises(ConfigurationError, match="timeout"):
                await producer.send(MESSAGE, timeout=wrong)  # type: ignore[arg-type]

    assert len(broker.requests_of(SEND)) == sent


async def test_a_cancelled_send_leaves_the_producer_whole() -> None:
    """Its answer is dropped."""
    async with fake_broker() as broker, Producer("g", namesrv=broker.address) as producer:
        broker.fail(SEND, Ignore())
        sending = asyncio.ensure_future(producer.send(MESSAGE))
        await until(lambda: bool(broker.requests_of(SEND)))
        sending.cancel()

        await producer.send(MESSAGE)

        assert sending.cancelled()
