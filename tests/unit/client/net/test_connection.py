"""Connections against a scripted broker: loss, silence, limits, and finding name servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    ConnectError,
    ConnectionLostError,
    Consumer,
    Message,
    Producer,
    RequestTimeoutError,
    TransactionProducer,
    WrongLoopError,
)
from halfmq.client.net import session
from halfmq.client.net.connection import BrokerConnection, ServerRequestHandler
from halfmq.client.net.connection_pool import ConnectionPool
from halfmq.remoting.admin_headers import GetConsumerRunningInfoRequestHeader
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply, encode_request
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_parts import session_of
from tests.support.fake_broker import Cut, FakeBroker, Ignore, Refuse, fake_broker, until
from tests.support.patience import PATIENCE_S

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
FIELDS = {"topic": "orders"}
QUICK = ClientConfig(reconnect_delay_min=0.01, reconnect_delay_max=0.02)
IMPATIENT = replace(QUICK, request_timeout=0.5, send_timeout=0.1)
"""For answers that never come, in steady time."""


@contextlib.asynccontextmanager
async def new_pool(
    config: ClientConfig = QUICK, handlers: Mapping[int, ServerRequestHandler] | None = None
) -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(config, handlers or {})
    try:
        yield pool
    finally:
        await pool.close()


async def free_port() -> int:
    """A port on which nobody listens."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


@in_steady_time
async def test_a_closed_port_is_named() -> None:
    """The error names the address if no broker runs there."""
    port = await free_port()

    with pytest.raises(ConnectError) as caught:
        async with Producer("g", namesrv=f"127.0.0.1:{port}", config=IMPATIENT):
            pass

    assert str(caught.value) == (
        f"cannot connect to 127.0.0.1:{port}: connection refused; is the broker running?"
    )


@on_both_loops
async def test_a_start_waits_for_a_broker_that_starts_too() -> None:
    """A client and a broker may start at the same time, as when a machine boots."""
    broker = FakeBroker()
    producer = Producer("g", namesrv=f"127.0.0.1:{await free_port()}", config=QUICK)
    starting = asyncio.ensure_future(producer.start())
    await asyncio.sleep(0.1)  # several attempts; fewer on a busy machine do no harm
    await broker.start(int(producer.config.namesrv_addresses[0].rpartition(":")[2]))

    await starting
    await producer.close()
    await broker.stop()


@in_steady_time
async def test_a_server_that_never_answers_is_named_with_what_it_was_asked() -> None:
    """The error names address and request if a server accepts connections but never answers."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    with pytest.raises(RequestTimeoutError) as caught:
        await Producer("g", namesrv=address, config=IMPATIENT).start()
    server.close()

    assert str(caught.value) == (
        f"no answer from {address} to GET_ROUTEINFO_BY_TOPIC (105) within 0.5 s; "
        "a RocketMQ or halfmq server was expected at this address"
    )


@in_steady_time
async def test_an_unknown_host_is_named() -> None:
    """An unknown host name gets an error of its own, not a network error."""
    with pytest.raises(ConnectError, match=r"no\.such\.host\.invalid:9876: the host name"):
        await Producer("g", namesrv="no.such.host.invalid", config=IMPATIENT).start()


@in_steady_time
@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_a_host_name_that_cannot_be_one_is_named(host: str) -> None:
    """Names that Python's own encoding rejects, before any look-up, get a clear error."""
    async with new_pool() as pool:
        with pytest.raises(ConnectError, match=f"{host}:9876: not a valid address"):
            await pool.get(f"{host}:9876", PATIENCE_S)


@on_both_loops
async def test_the_next_name_server_is_asked_when_one_is_down(broker: FakeBroker) -> None:
    """A client with several name servers works while one of them is down."""
    dead = f"127.0.0.1:{await free_port()}"

    async with Producer("g", namesrv=f"{dead};{broker.address}") as producer:
        await producer.send(Message("orders", b"x"))

    assert len(broker.messages("orders")) == 1


@in_steady_time
async def test_all_name_servers_are_named_when_all_are_down() -> None:
    """The error names every name server that was tried."""
    addresses = [f"127.0.0.1:{await free_port()}" for _ in range(2)]

    with pytest.raises(ConnectError) as caught:
        await Producer("g", namesrv=";".join(addresses), config=IMPATIENT).start()

    assert all(address in str(caught.value) for address in addresses)


@on_both_loops
async def test_a_lost_connection_fails_what_waits_for_an_answer(broker: FakeBroker) -> None:
    """The request may have been executed, so its caller gets an error."""
    async with new_pool() as pool:
        broker.fail(ROUTE, Ignore(), Cut())
        connection = await pool.get(broker.address, PATIENCE_S)
        first = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))
        second = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))

        results = await asyncio.gather(first, second, return_exceptions=True)

        assert [type(result) for result in results] == [ConnectionLostError] * 2
        assert (await pool.get(broker.address, PATIENCE_S)) is not connection


@in_steady_time
async def test_a_slow_answer_times_out_and_the_connection_stays(broker: FakeBroker) -> None:
    """A connection is closed only if its peer sends nothing at all."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        broker.fail(ROUTE, Ignore())
        slow = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=0.1))
        await until(lambda: len(broker.requests) == 1)
        await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)

        with pytest.raises(RequestTimeoutError, match=r"\(105\) within 0\.1 s"):
            await slow

        assert pool.get_open(broker.address) is connection


@in_steady_time
async def test_a_silent_peer_is_given_up(broker: FakeBroker) -> None:
    """Otherwise a half-open connection would time out every request for minutes."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        await asyncio.sleep(0.01)  # else silence is no later than the last sign of life
        broker.fail(ROUTE, Ignore())

        with pytest.raises(RequestTimeoutError):
            await connection.request(ROUTE, FIELDS, seconds=0.1)

        await connection.wait_closed()
        assert pool.get_open(broker.address) is None


@on_both_loops
async def test_go_away_moves_new_requests_to_a_new_connection(broker: FakeBroker) -> None:
    """A broker that shuts down answers 1500 and expects clients to reconnect."""
    async with new_pool() as pool:
        old = await pool.get(broker.address, PATIENCE_S)
        broker.fail(ROUTE, Refuse(ResponseCode.GO_AWAY))

        answer = await old.request(ROUTE, FIELDS, seconds=PATIENCE_S)

        assert answer.code == ResponseCode.GO_AWAY
        assert (await pool.get(broker.address, PATIENCE_S)) is not old
        await old.wait_closed()


@in_steady_time
async def test_requests_above_the_limit_wait_for_an_answer(broker: FakeBroker) -> None:
    """In-flight requests are limited per connection; further ones wait and do not fail."""
    pool = ConnectionPool(ClientConfig(in_flight_max=2), {})
    connection = await pool.get(broker.address, PATIENCE_S)
    await asyncio.sleep(0.01)  # else silence is no later than the last sign of life
    broker.fail(ROUTE, Ignore(), Ignore())
    stuck = [asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=0.2)) for _ in "ab"]
    third = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))
    await until(lambda: len(broker.requests_of(ROUTE)) == 2)
    assert not third.done()

    results = await asyncio.gather(*stuck, third, return_exceptions=True)

    assert [type(result) for result in results] == [
        RequestTimeoutError,
        RequestTimeoutError,
        ConnectionLostError,  # the peer sent nothing in time
    ]
    again = await pool.get(broker.address, PATIENCE_S)
    many = (again.request(ROUTE, FIELDS, seconds=PATIENCE_S) for _ in range(50))
    answers = await asyncio.gather(*many)
    assert all(answer.code == 0 for answer in answers)
    await pool.close()


@in_steady_time
async def test_a_request_that_finds_no_room_times_out(broker: FakeBroker) -> None:
    """The wait for a free slot counts towards the timeout of the request."""
    pool = ConnectionPool(ClientConfig(in_flight_max=1), {})
    connection = await pool.get(broker.address, PATIENCE_S)
    broker.fail(ROUTE, Ignore())
    stuck = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))

    with pytest.raises(RequestTimeoutError):
        await connection.request(ROUTE, FIELDS, seconds=0.05)

    stuck.cancel()
    await pool.close()


@on_both_loops
async def test_cancelled_requests_leave_nothing_behind(broker: FakeBroker) -> None:
    """Their answers are dropped, and the connection serves the next request."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        requests = [connection.request(ROUTE, FIELDS, seconds=PATIENCE_S) for _ in range(20)]
        tasks = [asyncio.ensure_future(request) for request in requests]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

        answer = await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)

        assert answer.code == 0


@on_both_loops
async def test_garbage_ends_the_connection_and_nothing_else(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """After garbage no frame boundary is known: log it once, and reconnect."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)
        broker.fail(ROUTE, Ignore())
        waiting = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))
        await until(lambda: len(broker.requests) == 2)
        broker.peers[0].transport.write(b"\xff" * 100)

        with pytest.raises(ConnectionLostError, match="broke the protocol"):
            await waiting

        assert "event=protocol_error" in caplog.text
        assert await (await pool.get(broker.address, PATIENCE_S)).request(
            ROUTE, FIELDS, seconds=PATIENCE_S
        )


@on_both_loops
async def test_whole_answers_before_garbage_still_count(broker: FakeBroker) -> None:
    """Answers that arrived before the garbage reach their callers."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        broker.fail(ROUTE, Ignore())
        waiting = asyncio.ensure_future(connection.request(ROUTE, FIELDS, seconds=PATIENCE_S))
        await until(lambda: bool(broker.requests))
        broker.peers[0].transport.write(encode_reply(broker.requests[0]) + b"\xff" * 100)

        assert (await waiting).code == 0


@on_both_loops
async def test_requests_of_the_broker_are_answered_or_refused(broker: FakeBroker) -> None:
    """Without an answer, an operator's tool would wait for its full timeout."""
    served: list[int] = []

    def serve(command: RemotingCommand, _connection: BrokerConnection) -> None:
        served.append(command.code)

    pool = ConnectionPool(QUICK, {int(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED): serve})
    await pool.get(broker.address, PATIENCE_S)
    await until(lambda: bool(broker.peers))
    write = broker.peers[0].transport.write
    write(encode_request(40, opaque=1, header={"consumerGroup": "g"}, one_way=True))
    write(encode_request(220, opaque=2, header={}, one_way=True))
    header = GetConsumerRunningInfoRequestHeader(consumer_group="g", client_id="c")
    write(encode_request(RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=77, header=header))

    await until(lambda: bool(broker.peers[0].answers))

    (answer,) = broker.peers[0].answers
    assert served == [40]
    assert answer.opaque == 77
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    await pool.close()


@in_steady_time
async def test_reconnecting_is_spaced_however_many_wait() -> None:
    """Many callers share one connection attempt, and attempts have pauses between them."""
    async with new_pool() as pool:
        address = f"127.0.0.1:{await free_port()}"
        for _ in range(3):
            with pytest.raises(ConnectError):
                await pool.get(address, PATIENCE_S)
        clock = asyncio.get_running_loop().time
        failed_at = clock()
        # Attempts to connect to a closed port can be counted only from inside.
        dial = pool._connect
        dialled_at: list[float] = []

        async def dialled(address: str) -> BrokerConnection:
            dialled_at.append(clock())
            return await dial(address)

        pool._connect = dialled  # type: ignore[method-assign]
        results = await asyncio.gather(
            *(pool.get(address, PATIENCE_S) for _ in range(50)), return_exceptions=True
        )

        assert {type(result) for result in results} == {ConnectError}
        (once,) = dialled_at
        assert once >= failed_at + QUICK.reconnect_delay_max / 2  # the other half is random


@on_both_loops
async def test_a_broker_that_comes_back_is_found(broker: FakeBroker) -> None:
    """A client reconnects to a restarted broker without a restart of its own."""
    async with new_pool() as pool:
        connection = await pool.get(broker.address, PATIENCE_S)
        await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)
        await broker.stop()
        await connection.wait_closed()
        with pytest.raises(ConnectError):
            await pool.get(broker.address, PATIENCE_S)

        await broker.restart()
        connection = await pool.get(broker.address, PATIENCE_S)

        assert (await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)).code == 0


@on_both_loops
async def test_a_closed_pool_opens_nothing(broker: FakeBroker) -> None:
    """A request after the close must not open a socket that nobody closes."""
    pool = ConnectionPool(QUICK, {})
    await pool.close()

    with pytest.raises(ClientClosedError):
        await pool.get(broker.address, PATIENCE_S)


@on_both_loops
async def test_closing_tells_those_who_wait_for_a_broker_that_is_away(broker: FakeBroker) -> None:
    """Waiting sends get ClientClosedError, because their tasks were not cancelled."""
    config = ClientConfig(reconnect_delay_min=2.0, reconnect_delay_max=2.0)
    producer = Producer("g", namesrv=broker.address, config=config)
    await producer.start()
    await producer.send(Message("orders", b"x"))
    await broker.stop()
    # A user sees the loss of a connection only with the next request.
    await until(lambda: session_of(producer).brokers.get_open(broker.address) is None)
    topics = ("orders", "unknown")  # one waits for the broker, one for the name server
    sends = [asyncio.ensure_future(producer.send(Message(topic, b"x"))) for topic in topics]
    await asyncio.sleep(0.1)

    await producer.close()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*sends, return_exceptions=True)

    assert all(isinstance(result, ClientClosedError | ConnectError) for result in results)
    await broker.restart()


@on_both_loops
@pytest.mark.parametrize("kind", [Producer, TransactionProducer, Consumer])
@pytest.mark.parametrize("silent", [False, True])
async def test_a_close_that_is_cancelled_leaves_nothing_open(
    broker: FakeBroker, kind: type[Any], silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled close still closes every socket."""
    monkeypatch.setattr(session, "UNREGISTER_SECONDS", 0.1)
    arguments = [{"orders": "*"}] if kind is Consumer else []
    for steps in range(1, 7):
        client = kind("g", *arguments, namesrv=broker.address, config=QUICK)
        await client.start()
        if silent:
            broker.fail(RequestCode.UNREGISTER_CLIENT, Ignore())
        closing = asyncio.ensure_future(client.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])

        await until(lambda: not broker.peers)
        await client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await until(lambda others=others: all(task.done() for task in others))  # type: ignore[misc]


@on_both_loops
async def test_a_halfmq_broker_is_spoken_to_in_msgpack(broker: FakeBroker) -> None:
    """It is recognised by its answer to the first request, which has a JSON header."""
    async with Producer("g", namesrv=broker.address) as producer:
        await producer.send(Message("orders", b"x"))

    kinds = {(request.code, request.header_type) for request in broker.requests}
    assert (RequestCode.GET_ROUTEINFO_BY_TOPIC, HeaderType.JSON) in kinds
    assert (RequestCode.SEND_MESSAGE_V2, HeaderType.MSGPACK) in kinds
    assert (RequestCode.HEART_BEAT, HeaderType.MSGPACK) in kinds


@pytest.mark.parametrize(("halfmq", "choice"), [(False, "auto"), (True, "json")])
@on_both_loops
async def test_others_are_spoken_to_in_json(halfmq: bool, choice: Any) -> None:
    """An official broker closes the connection on a header type it does not know."""
    async with fake_broker(halfmq=halfmq) as broker:
        config = ClientConfig(header_type=choice)
        async with Producer("g", namesrv=broker.address, config=config) as producer:
            await producer.send(Message("orders", b"x"))

        assert {request.header_type for request in broker.requests} == {HeaderType.JSON}


@on_both_loops
async def test_the_connection_to_a_broker_is_opened_again_at_once(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks must reach a transaction producer that has nothing to send."""
    caplog.set_level(logging.INFO)
    async with Producer("g", namesrv=broker.address, config=QUICK):
        await until(lambda: len(broker.producers("g")) == 1)
        await broker.stop()
        await asyncio.sleep(0.1)
        await broker.restart()

        await until(lambda: len(broker.producers("g")) == 1)

    assert caplog.text.count("event=broker_lost") == 1
    await until(lambda: not broker.producers("g"))


@on_both_loops
async def test_heartbeats_go_to_all_brokers_although_one_is_missing(broker: FakeBroker) -> None:
    """An unreachable broker must not delay the heartbeats to the others."""
    config = ClientConfig(
        heartbeat_interval=0.1, reconnect_delay_min=0.01, reconnect_delay_max=0.02
    )
    async with Producer("g", namesrv=broker.address, config=config) as producer:
        # A stale route, whose broker is gone: an old answer of a name server leaves it.
        session_of(producer).routes._cluster["broker-b"] = f"127.0.0.1:{await free_port()}"
        before = len(broker.requests_of(RequestCode.HEART_BEAT))

        await until(lambda: len(broker.requests_of(RequestCode.HEART_BEAT)) >= before + 3)


@on_both_loops
async def test_a_peer_that_does_not_read_slows_senders_down(broker: FakeBroker) -> None:
    """Backpressure applies once the write buffer is full."""
    config = ClientConfig(write_buffer_max=64 << 10, compress_over=None)
    body = bytes(1 << 20)
    async with Producer("g", namesrv=broker.address, config=config) as producer:
        await producer.send(Message("orders", b"x"))
        for peer in broker.peers:
            peer.transport.pause_reading()

        async def send_all() -> None:
            for _ in range(30):
                await producer.send_oneway(Message("orders", body))

        sending = asyncio.ensure_future(send_all())
        await asyncio.wait([sending], timeout=0.3)
        assert not sending.done()
        for peer in broker.peers:
            peer.transport.resume_reading()
        await asyncio.wait_for(sending, PATIENCE_S)
        await until(lambda: len(broker.messages("orders")) == 31)


@on_both_loops
async def test_a_oneway_send_waits_no_longer_for_a_peer_that_does_not_read(
    broker: FakeBroker,
) -> None:
    """Its wait for room in the write buffer ends after ``send_timeout``."""
    config = ClientConfig(write_buffer_max=64 << 10, compress_over=None, send_timeout=0.3)
    async with Producer("g", namesrv=broker.address, config=config) as producer:
        await producer.send(Message("orders", b"x"))
        for peer in broker.peers:
            peer.transport.pause_reading()

        async def send_all() -> None:
            for _ in range(30):
                await producer.send_oneway(Message("orders", bytes(1 << 20)))

        with pytest.raises(RequestTimeoutError):
            await asyncio.wait_for(send_all(), PATIENCE_S)


@on_both_loops
async def test_closing_does_not_wait_for_a_peer_that_does_not_read(broker: FakeBroker) -> None:
    """A broker that hangs must not delay the end of the program."""
    config = ClientConfig(write_buffer_max=64 << 20, compress_over=None)
    pool = ConnectionPool(config, {})
    connection = await pool.get(broker.address, PATIENCE_S)
    await connection.request(ROUTE, FIELDS, seconds=PATIENCE_S)
    broker.peers[0].transport.pause_reading()
    for _ in range(30):
        connection.send_one_way(9999, None, bytes(1 << 20))

    async with asyncio.timeout(PATIENCE_S):
        await pool.close()

    assert connection.closed


@on_both_loops
async def test_a_client_works_on_its_own_loop_only(broker: FakeBroker) -> None:
    """Used from another thread's loop it would wait forever or corrupt its state."""
    broker.create_topic("orders")
    async with (
        Producer("g", namesrv=broker.address) as producer,
        Consumer(
            "billing", {"orders": "*"}, start_from="first", namesrv=broker.address
        ) as consumer,
    ):
        await producer.send(Message("orders", b"x"))
        message = await consumer.receive()
        assert message is not None
        for work in (
            partial(producer.send, Message("orders", b"x")),
            partial(producer.send_oneway, Message("orders", b"x")),
            consumer.receive,
            consumer.commit,
            message.ack,
            message.retry,
            producer.close,
            consumer.close,
        ):
            with pytest.raises(WrongLoopError, match="started on another event loop"):
                await asyncio.to_thread(asyncio.run, work())
        assert await message.ack()
