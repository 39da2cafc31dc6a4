"""The client at brokers with access control: it signs, and says what it may not do."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.client import (
    AccessDeniedError,
    AclEntry,
    Admin,
    AuthenticationError,
    BrokerRefusedError,
    ClientConfig,
    ConfigurationError,
    Consumer,
    Credentials,
    Decision,
    Message,
    Producer,
    TransactionProducer,
    blocking,
)
from halfmq.client.net.response_errors import error_from_code
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from halfmq.remoting.msgpack_header import split_signature
from halfmq.remoting.replies import encode_request
from halfmq.remoting.serialization import ext_fields
from halfmq.remoting.signature import Identity, Signer, signed_text
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import FakeBroker, Refuse, until
from tests.support.guarded_broker import ADMIN, PUBLISHER, SUBSCRIBER, GuardedBroker
from tests.support.patience import PATIENCE_S

MESSAGE = Message("orders", b"o-1", keys="o-1")
BILLING = {"orders": "*"}
SECRETS = re.compile("publisher-secret|subscriber-secret|admin-secret|wrong-secret")


@pytest.fixture(params=["acl", "users"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GuardedBroker]:
    """A broker with plain ACL, and one with users."""
    broker = GuardedBroker(tmp_path, request.param)
    yield broker
    broker.close()


@pytest.fixture
def with_users(tmp_path: Path) -> Iterator[GuardedBroker]:
    broker = GuardedBroker(tmp_path, "users")
    yield broker
    broker.close()


def word(broker: GuardedBroker) -> str:
    """What the broker's front end calls who signs."""
    return "accessKey" if broker.broker.config.access.acl_enabled else "User"


# -- what is allowed works


@pytest.mark.parametrize("header_type", ["json", "msgpack"])
@on_both_loops
async def test_every_request_is_signed(
    guarded: GuardedBroker, header_type: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Sends of every kind, a transaction, consuming, redelivery, offsets and the close."""
    config = ClientConfig(header_type=header_type, retry_delay=0.01)
    address = guarded.address
    async with Producer("p", namesrv=address, config=config, **PUBLISHER) as producer:
        await producer.send(MESSAGE)
        await producer.send_batch([MESSAGE, MESSAGE])
        await producer.send_oneway(MESSAGE)
    checker = _commits
    async with TransactionProducer(
        "tx", checker, namesrv=address, config=config, **PUBLISHER
    ) as transactions:
        async with transactions.transaction(MESSAGE) as committed:
            pass
        async with transactions.transaction([MESSAGE, MESSAGE]) as several:
            pass
        assert committed.decided
        assert several.decided
    async with Consumer(
        "billing", BILLING, start_from="first", namesrv=address, config=config, **SUBSCRIBER
    ) as consumer:
        bodies: list[bytes] = []
        while len(bodies) < 8:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            bodies.append(message.body)
            assert await message.ack()
        await consumer.commit()
    assert sorted(bodies) == [b"first", *[b"o-1"] * 7]
    assert "event=access_denied" not in caplog.text


@on_both_loops
async def test_a_check_is_answered_by_whoever_may_publish(guarded: GuardedBroker) -> None:
    """Checks work with access control as without it."""
    address = guarded.address
    async with (
        TransactionProducer("tx", _commits, namesrv=address, **PUBLISHER) as producer,
        Consumer("billing", BILLING, namesrv=address, **SUBSCRIBER) as consumer,
    ):
        async with producer.transaction(MESSAGE) as tx:
            tx.decide(Decision.UNKNOWN)
        while (message := await consumer.receive(30)) is not None and message.body != b"o-1":
            await message.ack()
        assert message is not None


async def _commits(_message: object) -> Decision:
    return Decision.COMMIT


def test_the_blocking_client_signs_too(guarded: GuardedBroker) -> None:
    """It accepts the same arguments, or a configuration."""
    config = ClientConfig(**PUBLISHER)
    with blocking.Producer("p", namesrv=guarded.address, config=config) as producer:
        producer.send(MESSAGE)
    with blocking.Consumer(
        "billing", BILLING, start_from="first", namesrv=guarded.address, **SUBSCRIBER
    ) as consumer:
        for message in consumer:
            message.ack()
            if message.body == b"o-1":
                break
    with blocking.Admin(namesrv=guarded.address, **ADMIN) as admin:
        assert list(admin.transactions()) == []


# -- what is not is refused, and says what


@on_both_loops
async def test_a_send_that_is_not_allowed_names_who_what_and_where(guarded: GuardedBroker) -> None:
    """The error comes at once, because a retry would not help."""
    config = ClientConfig(send_timeout=60)
    async with Producer("p", namesrv=guarded.address, config=config, **SUBSCRIBER) as producer:
        for sending in (
            producer.send(MESSAGE),
            producer.send_batch([MESSAGE]),
        ):
            with pytest.raises(AccessDeniedError) as caught:
                await sending
            error = caught.value
            assert (error.subject, error.action, error.resource) == (
                f"{word(guarded)}:subscriber",
                "Pub",
                "Topic:orders",
            )
            assert not error.retriable
            assert not isinstance(error, AuthenticationError)
            assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@on_both_loops
async def test_a_transaction_that_is_not_allowed_does_not_run(guarded: GuardedBroker) -> None:
    """Entering its block raises, with one message and with several."""
    async with TransactionProducer(
        "tx", _commits, namesrv=guarded.address, **SUBSCRIBER
    ) as producer:
        for messages in (MESSAGE, [MESSAGE, MESSAGE]):
            with pytest.raises(AccessDeniedError, match="Pub"):
                async with producer.transaction(messages):
                    raise AssertionError("the local transaction ran")
        with pytest.raises(AccessDeniedError):
            await producer.pending()


@on_both_loops
async def test_a_consumer_that_may_not_consume_does_not_start(guarded: GuardedBroker) -> None:
    """Of a group of its own, or a topic of its own."""
    for group, topics, resource in (
        ("stranger", BILLING, "Group:stranger"),
        ("billing", {"orders": "*", "payments": "*"}, "Topic:payments"),
    ):
        consumer = Consumer(group, topics, namesrv=guarded.address, **SUBSCRIBER)
        with pytest.raises(AccessDeniedError) as caught:
            await consumer.start()
        assert (caught.value.action, caught.value.resource) == ("Sub", resource)


@pytest.mark.parametrize(
    ("key", "secret", "subject"),
    [
        (None, None, ""),
        ("publisher", "wrong-secret", ":publisher"),
        ("nobody-known", "wrong-secret", ":nobody-known"),
    ],
)
@on_both_loops
async def test_no_client_starts_with_a_key_that_is_not_accepted(
    guarded: GuardedBroker, key: str | None, secret: str | None, subject: str
) -> None:
    """Neither without a key, nor with a wrong secret, nor with an unknown name."""
    common: dict[str, Any] = {"namesrv": guarded.address, "access_key": key, "secret_key": secret}
    clients = (
        Producer("p", **common),
        TransactionProducer("tx", _commits, **common),
        Consumer("billing", BILLING, **common),
        Admin(**common),
    )
    for client in clients:
        with pytest.raises(AuthenticationError) as caught:
            await client.start()
        assert caught.value.subject == (word(guarded) + subject if subject else "")
        assert not caught.value.retriable
    for facade in (blocking.Producer("p", **common), blocking.Admin(**common)):
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(facade.start)


@on_both_loops
async def test_a_consumer_learns_that_it_may_no_longer_consume(with_users: GuardedBroker) -> None:
    """``receive`` raises while pulls are refused, and returns messages afterwards."""
    address = with_users.address
    config = ClientConfig(pull_suspend=0.05)
    async with (
        Admin(namesrv=address, **ADMIN) as admin,
        Consumer(
            "billing", BILLING, start_from="first", namesrv=address, config=config, **SUBSCRIBER
        ) as consumer,
    ):
        first = await consumer.receive(10)
        assert first is not None
        await first.ack()

        await admin.delete_acl("subscriber", "Topic:orders")
        with pytest.raises(AccessDeniedError) as caught:
            await consumer.receive(30)
        assert caught.value.resource == "Topic:orders"

        await admin.create_acl("subscriber", AclEntry(resource="Topic:orders", actions=["Sub"]))
        async with Producer("p", namesrv=address, **PUBLISHER) as producer:
            await producer.send(MESSAGE)
        message = None
        while message is None:
            try:
                message = await consumer.receive(30)
            except AccessDeniedError:
                await asyncio.sleep(0.01)
        assert message.body == b"o-1"


@on_both_loops
async def test_a_consumer_that_may_not_read_its_offsets_does_not_wait_in_silence(
    broker: FakeBroker,
) -> None:
    """``receive`` raises also if only the request for offsets is refused."""
    remark = (
        "User:bob has no permission to access Group:billing from 127.0.0.1, no matched policies."
    )
    async with Producer("p", namesrv=broker.address) as producer:
        await producer.send(MESSAGE)
    broker.fail(RequestCode.QUERY_CONSUMER_OFFSET, *[Refuse(16, remark)] * 5)
    async with Consumer("billing", BILLING, start_from="first", namesrv=broker.address) as consumer:
        with pytest.raises(AccessDeniedError) as caught:
            await consumer.receive(30)
        assert (caught.value.subject, caught.value.resource) == ("User:bob", "Group:billing")
        message = None
        while message is None:
            try:
                message = await consumer.receive(30)
            except AccessDeniedError:
                await asyncio.sleep(0.01)


@on_both_loops
async def test_an_answer_to_a_check_that_is_refused_is_a_warning(
    with_users: GuardedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """No caller waits for it, so the log says that this producer may not decide."""
    address = with_users.address
    async with Admin(namesrv=address, **ADMIN) as admin:

        async def checker(_message: object) -> Decision:
            await admin.delete_acl("publisher", "Topic:orders")
            return Decision.COMMIT

        async with TransactionProducer("tx", checker, namesrv=address, **PUBLISHER) as producer:
            async with producer.transaction(MESSAGE) as tx:
                tx.decide(Decision.UNKNOWN)
            await until(lambda: "event=check_not_answered" in caplog.text)
    line = next(one for one in caplog.records if "event=check_not_answered" in one.getMessage())
    assert line.levelno == logging.WARNING
    assert "Topic:orders" in line.getMessage()


@on_both_loops
async def test_admin_requests_that_are_refused_are_not_taken_for_unknown_ids(
    guarded: GuardedBroker,
) -> None:
    """Plain ACL refuses with the code that also means "there is none"."""
    half = "7F00000100002A9F0000000000000000"
    async with Admin(namesrv=guarded.address, **PUBLISHER) as admin:
        for asking in (admin.commit(half), admin.metrics(), admin.resume(half)):
            with pytest.raises(AccessDeniedError) as caught:
                await asking
            assert caught.value.resource == "Cluster:DefaultCluster"


# -- secrets that change


@pytest.mark.parametrize("kind", ["plain", "async"])
@on_both_loops
async def test_credentials_are_asked_for_again_when_they_are_refused(
    with_users: GuardedBroker, kind: str
) -> None:
    """A rotation of the secret causes no error, however many requests are in flight."""
    secrets = ["publisher-secret"]
    calls: list[str] = []

    def now() -> Credentials:
        calls.append(secrets[-1])
        return Credentials("publisher", secrets[-1])

    async def later() -> Credentials:
        await asyncio.sleep(0)
        return now()

    source = now if kind == "plain" else later
    address = with_users.address
    async with (
        Admin(namesrv=address, **ADMIN) as admin,
        Producer("p", namesrv=address, credentials=source) as producer,
    ):
        await producer.send(MESSAGE)
        assert calls == ["publisher-secret"]

        await admin.update_user("publisher", password="the next secret")
        secrets.append("the next secret")
        await asyncio.gather(*(producer.send(MESSAGE) for _ in range(50)))
        assert calls == ["publisher-secret", "the next secret"]

        await admin.update_user("publisher", password="unknown to the client")
        with pytest.raises(AuthenticationError):
            await producer.send(MESSAGE)
        assert calls == ["publisher-secret", "the next secret", "the next secret"]


@on_both_loops
async def test_a_function_that_fails_leaves_the_refusal(
    with_users: GuardedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start its error is raised; later it is logged, and the request is refused."""
    fails = True

    def source() -> Credentials:
        if fails:
            raise LookupError("the vault is sealed")
        return Credentials(**PUBLISHER)

    address = with_users.address
    with pytest.raises(LookupError, match="sealed"):
        await Producer("p", namesrv=address, credentials=source).start()
    fails = False
    async with (
        Admin(namesrv=address, **ADMIN) as admin,
        Producer("p", namesrv=address, credentials=source) as producer,
    ):
        fails = True
        await admin.update_user("publisher", enabled=False)
        with pytest.raises(AuthenticationError, match="disabled"):
            await producer.send(MESSAGE)
    assert "the vault is sealed" in caplog.text


async def test_a_function_must_return_credentials() -> None:
    """What it returned instead is not shown, as it may hold the secret."""

    def source() -> Any:
        return ("key", "wrong-secret")

    with pytest.raises(ConfigurationError, match="credentials is 'tuple', expected") as caught:
        await Producer("p", credentials=source).start()
    assert not SECRETS.search(str(caught.value))


# -- arguments


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"access_key": "a"}, "secret_key is None, expected both"),
        ({"secret_key": "wrong-secret"}, "access_key is None, expected both"),
        ({"access_key": "", "secret_key": "wrong-secret"}, "access_key is ''"),
        ({"access_key": "a", "secret_key": b"wrong-secret"}, "secret_key is .*bytes, not shown"),
        ({**PUBLISHER, "credentials": dict}, "expected None, because access_key is given"),
        ({"tls": "yes"}, "tls is 'yes', expected True, False or"),
    ],
)
def test_a_wrong_argument_is_named_and_no_secret_is_shown(
    settings: dict[str, Any], complaint: str
) -> None:
    """This applies to the configuration and to arguments."""
    for make in (lambda: ClientConfig(**settings), lambda: Producer("p", **settings)):
        with pytest.raises(ConfigurationError, match=complaint) as caught:
            make()
        assert not SECRETS.search(f"{caught.value!s} {caught.value!r}")


def test_arguments_replace_the_credentials_of_the_configuration() -> None:
    """A key from one and a function from the other are never combined."""
    config = ClientConfig(credentials=lambda: Credentials("a", "b"))

    producer = Producer("p", config=config, **PUBLISHER)

    assert producer.config.credentials is None
    assert producer.config.access_key == "publisher"


@on_both_loops
async def test_no_secret_is_shown_anywhere(
    guarded: GuardedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither ``repr`` nor any log line contains the secret, whatever fails."""
    caplog.set_level(logging.DEBUG)
    config = ClientConfig(**PUBLISHER)
    shown = [repr(config), repr(Credentials(**PUBLISHER))]
    for credentials in (SUBSCRIBER, PUBLISHER | {"secret_key": "wrong-secret"}):
        producer = Producer("p", namesrv=guarded.address, **credentials)
        try:
            async with producer:
                await producer.send(MESSAGE)
        except BrokerRefusedError as error:
            shown += [str(error), repr(error), repr(vars(error))]
        shown.append(repr(vars(producer)))
    assert not SECRETS.search("\n".join([*shown, caplog.text]))


# -- on the wire


def test_a_signed_msgpack_frame_byte_by_byte() -> None:
    """Elements eight and nine are as docs/wire.md describes them."""
    frame = encode_request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        opaque=7,
        header=GetRouteInfoRequestHeader(topic="orders"),
        body=b"body",
        header_type=2,
        version=479,
        signed_by=Identity("publisher", Signer("publisher-secret")),
    )

    assert frame == bytes.fromhex(GOLDEN)
    (command,) = FrameDecoder().receive_data(frame)
    key, signature, text = split_signature(command.raw_header)
    assert key == "publisher"
    assert Signer("publisher-secret").verify(signature, text, b"body")


GOLDEN = (
    "0000003a 02000032 99 69 07 00 03 cd01df c0 92 a6 6f7264657273 c0 a9 7075626c6973686572 "
    "c414 08f9c8b0afb9381ecdfdd9b26e734e26ae5096d3 626f6479"
)
"""Length, type and length of the header; code, opaque, flag, language, version, no remark, topic
and an absent field; access key; signature of what stands between 99 and c414, and of the body."""


@pytest.mark.parametrize("header_type", [0, 1])
@pytest.mark.parametrize("typed", [False, True])
def test_other_frames_are_signed_as_official_clients_do(header_type: int, typed: bool) -> None:
    """The signed text is the values of all ext fields in order, then the body."""
    header = GetRouteInfoRequestHeader(topic="orders")
    frame = encode_request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        opaque=7,
        header=header if typed else texts_of(header),
        body=b"body",
        header_type=header_type,
        signed_by=Identity("publisher", Signer("publisher-secret")),
    )

    (command,) = FrameDecoder().receive_data(frame)
    fields = ext_fields(command)
    assert fields["AccessKey"] == "publisher"
    text = signed_text(fields)
    assert Signer("publisher-secret").verify(fields["Signature"], text, b"body")


@pytest.mark.parametrize("header", [None, {"topic": "orders"}])
def test_a_msgpack_header_without_a_class_is_signed_too(header: dict[str, str] | None) -> None:
    """This covers an empty header and a map."""
    frame = encode_request(
        105, opaque=7, header=header, header_type=2, signed_by=Identity("p", Signer("s"))
    )
    (command,) = FrameDecoder().receive_data(frame)
    key, signature, text = split_signature(command.raw_header)
    assert (key, Signer("s").verify(signature, text)) == ("p", True)


@on_both_loops
async def test_without_credentials_nothing_is_signed(broker: FakeBroker) -> None:
    """The frame of a client without credentials is unchanged."""
    async with Producer("p", namesrv=broker.address) as producer:
        await producer.send(MESSAGE)

    for request in broker.requests:
        assert "AccessKey" not in ext_fields(request)
        assert split_signature(request.raw_header) == ("", b"", b"")


@pytest.mark.parametrize(
    ("code", "remark", "expected"),
    [
        (16, "username cannot be null.", ("",)),
        (16, "User:bob is not found.", ("User:bob",)),
        (16, "User:bob is disabled.", ("User:bob",)),
        (16, "check signature failed.", ("",)),
        (16, "Authentication failed. Please verify the credentials and try again.", ("",)),
        (1, "accessKey:bob: check signature failed.", ("accessKey:bob",)),
        (
            1,
            (
                "org.apache.rocketmq.acl.common.AclException: Check signature failed for "
                "accessKey=rocketmq2, org.apache.rocketmq.acl.plain.PlainPermissionManager.validate"
            ),
            ("accessKey:rocketmq2",),
        ),
        (
            1,
            "org.apache.rocketmq.acl.common.AclException: No accessKey is configured, org.apache",
            ("",),
        ),
        (
            16,
            (
                "User:alice has no permission to access Topic:acl_t from 127.0.0.1, no matched "
                "policies."
            ),
            ("User:alice", "", "Topic:acl_t"),
        ),
        (
            16,
            (
                "User:alice has no permission to Sub or Get Group:g from 10.0.0.1, the decision is "
                "deny."
            ),
            ("User:alice", "Sub or Get", "Group:g"),
        ),
        (
            1,
            "org.apache.rocketmq.acl.common.AclException: No default permission for topic:T, org",
            ("", "", "Topic:T"),
        ),
        (
            1,
            (
                "org.apache.rocketmq.acl.common.AclException: Need admin permission for request "
                "code=17, but accessKey=rocketmq is not, org.apache"
            ),
            ("accessKey:rocketmq", "", ""),
        ),
        (16, "the broker[10.0.0.1] sending message is forbidden", None),
        (16, "The user is existed", None),
        (1, "User:x is not found.", ("User:x",)),
        (1, "disk full", None),
        (17, "User:bob is not found.", None),
    ],
)
def test_remarks_of_official_brokers_are_understood(
    code: int, remark: str, expected: tuple[str, ...] | None
) -> None:
    """They send no fields: the error has what the remark contains."""
    error = error_from_code(code, remark)

    assert (error.code, error.remark) == (code, remark)
    if expected is None:
        assert type(error) is BrokerRefusedError
    elif len(expected) == 1:
        assert isinstance(error, AuthenticationError)
        assert error.subject == expected[0]
    else:
        assert isinstance(error, AccessDeniedError)
        assert not isinstance(error, AuthenticationError)
        assert (error.subject, error.action, error.resource) == expected
