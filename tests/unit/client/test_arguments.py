"""Wrong arguments: a program hears which one is wrong, and what would do."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from halfmq.client import (
    Admin,
    BadAnswerError,
    ClientConfig,
    ClientError,
    ConfigurationError,
    ConnectionLostError,
    Consumer,
    Decision,
    InvalidMessageError,
    Message,
    MessageView,
    Producer,
    RequestTimeoutError,
    TlsError,
    Transaction,
    TransactionLedger,
    TransactionProducer,
    blocking,
)
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import FakeBroker, fake_broker

MESSAGE = Message("orders", b"x")
WRONG: Final[list[Any]] = [
    None,
    0,
    7,
    -1,
    1 << 70,
    2.5,
    float("nan"),
    True,
    "",
    "a b",
    "a.b",
    "\x01",
    "\ud800",
    "é",
    "x" * 300,
    b"",
    b"orders",
    bytearray(b"x"),
    memoryview(b"x"),
    [],
    [1],
    [None],
    [b"x"],
    ["\ud800"],
    (1, 2),
    {},
    {1: 2},
    {"a": None},
    {"a": 1},
    {b"a": b"b"},
    {"\ud800": "a"},
    {"orders": None},
    set(),
    object(),
    object,
    lambda: None,
    datetime(2030, 1, 1),  # noqa: DTZ001 -- one without a time zone
    datetime.max.replace(tzinfo=UTC),
    datetime.min.replace(tzinfo=UTC),
    timedelta.max,
    timedelta(-1),
    MESSAGE,
    Decision.COMMIT,
]
"""Each goes wherever an argument is taken; some are right in some places."""


@contextmanager
def _right_or_told(name: str) -> Iterator[None]:
    """No error, or one of the client's own that names the argument or says what was expected."""
    try:
        yield
    except ClientError as raised:
        told = str(raised)
    else:
        return
    assert told, name
    assert "object has no attribute" not in told


MAKERS: Final[dict[str, tuple[Callable[..., object], list[str]]]] = {
    "Message": (
        lambda **given: Message(**({"topic": "orders", "body": b"x"} | given)),
        [
            *("topic", "body", "tags", "keys", "properties", "delay_level", "deliver_after"),
            *("deliver_at", "wait_durable", "flag"),
        ],
    ),
    "ClientConfig": (ClientConfig, list(ClientConfig.__dataclass_fields__)),
    "Producer": (
        lambda **given: Producer(**({"group": "g"} | given)),
        ["group", "namesrv", "config"],
    ),
    "TransactionProducer": (
        lambda **given: TransactionProducer(**({"group": "g"} | given)),
        ["group", "checker", "topics", "namesrv", "config"],
    ),
    "Consumer": (
        lambda **given: Consumer(**({"group": "g", "subscriptions": {"orders": "*"}} | given)),
        [
            *("group", "subscriptions", "start_from", "ack_timeout", "retries_max"),
            *("broadcasting", "offsets_file", "on_event", "namesrv", "config"),
        ],
    ),
    "Admin": (Admin, ["namesrv", "config"]),
    "TransactionLedger": (TransactionLedger, ["table", "paramstyle"]),
    "blocking.Producer": (
        lambda **given: blocking.Producer(**({"group": "g"} | given)),
        ["group", "namesrv", "config"],
    ),
}


@pytest.mark.parametrize(
    ("made", "argument"), [(made, name) for made, (_, names) in MAKERS.items() for name in names]
)
def test_no_constructor_lets_a_foreign_error_out(made: str, argument: str) -> None:
    """Every argument accepts every wrong value or raises a ClientError that names it."""
    make, _ = MAKERS[made]
    for value in WRONG:
        with _right_or_told(argument):
            make(**{argument: value})


@asynccontextmanager
async def _clients(broker: FakeBroker) -> AsyncIterator[dict[str, Callable[[Any], Any]]]:
    """Calls that take one argument each, on clients that run."""
    address = broker.address
    quick = ClientConfig(send_timeout=0.5, request_timeout=0.5, namesrv=address)
    async with (
        TransactionProducer("g", _commit, config=quick) as producer,
        Consumer("c", {"orders": "*"}, config=quick, start_from="first") as consumer,
        Admin(config=quick) as admin,
    ):
        await producer.send(MESSAGE)
        message = await consumer.receive()
        assert message is not None

        async def transact(messages: Any) -> None:
            async with producer.transaction(messages):
                pass

        async def decide(decision: Any) -> None:
            async with producer.transaction(MESSAGE) as transaction:
                transaction.decide(decision)

        yield {
            "send message": producer.send,
            "send order_key": lambda value: producer.send(MESSAGE, order_key=value),
            "send_batch messages": producer.send_batch,
            "send_batch one message": lambda value: producer.send_batch([MESSAGE, value]),
            "send_batch order_key": lambda value: producer.send_batch([MESSAGE], order_key=value),
            "send_oneway message": producer.send_oneway,
            "send_oneway order_key": lambda value: producer.send_oneway(MESSAGE, order_key=value),
            "transaction messages": transact,
            "transaction one message": lambda value: transact([MESSAGE, value]),
            "decide decision": decide,
            "send_in_transaction messages": producer.send_in_transaction,
            "send_in_transaction listener": lambda value: producer.send_in_transaction(
                MESSAGE, value
            ),
            "receive timeout": lambda value: consumer.receive(0 if value is None else value),
            "retry delay_level": message.retry,
            "admin transaction": admin.transaction,
            "admin commit": admin.commit,
            "admin commit reason": lambda value: admin.commit("0" * 32, reason=value),
            "admin rollback": admin.rollback,
            "admin resume": admin.resume,
            "admin page group": admin.page,
            "admin page state": lambda value: admin.page(state=value),
            "admin page after": lambda value: admin.page(after=value),
            "admin page limit": lambda value: admin.page(limit=value),
            "admin groups": admin.groups,
        }


def _commit(_message: MessageView) -> Decision:
    return Decision.COMMIT


async def test_no_call_lets_a_foreign_error_out() -> None:
    """Every argument of every call; the clients still work afterwards."""
    patient = (7, 2.5, True, 1 << 70)  # right as a timeout, and waited for
    async with fake_broker() as broker, _clients(broker) as calls:
        for name, call in calls.items():
            for value in WRONG:
                if name == "receive timeout" and value in patient:
                    continue
                with _right_or_told(name):
                    await call(value)
        await calls["send message"](MESSAGE)


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_a_ledger_records_ids_only(value: Any) -> None:
    """A value that is not text never reaches the database."""
    database = sqlite3.connect(":memory:")
    ledger = TransactionLedger()
    ledger.create_table(database)
    with _right_or_told("transaction_id"):
        ledger.record(database.cursor(), value)
    with _right_or_told("paramstyle"):
        ledger.statement("id", value)
    with _right_or_told("older_than"):
        ledger.prune(database, value)
    database.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"topic": b"orders"}, r"topic is b'orders', expected text: .*decode it"),
        ({"topic": "orders.created"}, r"topic is 'orders.created', .*orders_created, for example"),
        ({"topic": ""}, r"topic is '', "),
        ({"topic": None}, r"topic is None, "),
        ({"topic": "x" * 128}, r"topic has 128 characters, at most 127"),
        ({"body": "text"}, r"the body is str, expected bytes: encode\(\)"),
        ({"body": {"a": 1}}, r"the body is dict, expected bytes: serialize it"),
        ({"tags": b"created"}, r"tags is b'created', expected .*decode it"),
        ({"keys": 5}, r"keys is 5, expected text or a list of texts: str\(\)"),
        ({"keys": [5]}, r"keys has 5, expected text: str\(\)"),
        ({"keys": b"k"}, r"keys is b'k', .*decode it"),
        ({"properties": {"n": 5}}, r"property n is 5, expected text: str\(\)"),
        ({"properties": {b"n": "5"}}, r"name of a property is b'n', .*decode it"),
        ({"properties": [("n", "5")]}, r"properties is \[\('n', '5'\)\], expected a mapping"),
        ({"delay_level": "3"}, r"delay_level is '3', expected 0 to 18"),
        ({"flag": 1 << 31}, r"flag is 2147483648, expected -2147483648 to 2147483647"),
    ],
)
def test_a_wrong_message_says_what_would_do(given: dict[str, Any], told: str) -> None:
    """One line has the argument, its value and the remedy."""
    with pytest.raises(InvalidMessageError, match=told):
        Message(**({"topic": "orders", "body": b"x"} | given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("http://host:9876", r"namesrv is 'http://host:9876', expected no URL but host:9876"),
        ("rocketmq://host", "expected no URL but host, without rocketmq://"),
        ("a:9876,b:x", r"namesrv is 'b:x', expected host:port with a port in 1-65535"),
        (b"a:9876", "host:port, several separated by ;: .*decode it"),
        (["a:9876"], "host:port, several separated by ;: .*not list"),
        ("a b:9876", "host:port"),
        ("user@host:9876", "host:port"),
        ("[a]:9876", "host:port"),
        ("[::1", "host:port"),
        ("1:2:3", "host:port"),
        ("a/b", "host:port"),
    ],
)
def test_a_wrong_address_says_what_would_do(given: Any, told: str) -> None:
    """The constructor raises, before any timeout."""
    with pytest.raises(ConfigurationError, match=told):
        Producer("g", namesrv=given)


PEERS: Final[dict[str, bytes | None]] = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "tls": bytes.fromhex("15030300020246"),
    "redis": b"-ERR unknown command\r\n",
    "mysql": bytes.fromhex("4a0000000a382e302e333600"),
    "zeros": bytes(64),
    "garbage": struct.pack(">iI", 40, 20) + b"\xff" * 40,
    "closes": b"",
    "silent": None,
}


@on_both_loops
@pytest.mark.parametrize("greets", [False, True], ids=["answers", "greets"])
@pytest.mark.parametrize("peer", PEERS)
async def test_another_server_is_told_from_rocketmq(peer: str, *, greets: bool) -> None:
    """The error says that a RocketMQ or halfmq server was expected."""
    spoken = PEERS[peer]

    class Other(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
            self.transport: Any = transport
            if greets:
                self.speak()

        def data_received(self, data: bytes) -> None:
            if not greets:
                self.speak()

        def speak(self) -> None:
            if spoken is None:
                return
            self.transport.write(spoken)
            if not spoken:
                self.transport.close()

    server = await asyncio.get_running_loop().create_server(Other, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = ClientConfig(send_timeout=0.2, request_timeout=0.2, namesrv=address)
    async with server:
        for client in (
            Producer("g", config=config),
            Consumer("c", {"orders": "*"}, config=config),
            Admin(config=config),
        ):
            with pytest.raises(ClientError, match="RocketMQ or halfmq server was expected") as told:
                await client.start()
            assert address in str(told.value)
            kinds: dict[str, type[ClientError]] = {
                "closes": ConnectionLostError,
                "silent": RequestTimeoutError,
                "tls": TlsError,
            }
            if peer not in kinds:
                assert isinstance(told.value, BadAnswerError)
            elif not greets:
                assert isinstance(told.value, kinds[peer])


def test_a_transaction_is_of_messages_only() -> None:
    producer = TransactionProducer("g", _commit)
    for value in WRONG:
        if value is not MESSAGE:
            with pytest.raises(InvalidMessageError):
                Transaction(producer, value)
