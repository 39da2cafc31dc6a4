"""docs/access-table.md: who may ask what, measured at a broker and not copied from its rules.

``python -m tests.access_table`` writes it. For each request code a well-formed request of each
subject goes through the access control and the router of a running broker, for both front ends; a
request is allowed if nothing counted it as refused. A test compares the file with what is measured.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfmq.broker.access.config import AccessConfig, KeyPair
from halfmq.broker.access.requirements import requirements_of
from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings, TransactionConfig
from halfmq.broker.service import Broker
from halfmq.remoting.access_bodies import (
    AclInfo,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
    encode_access,
)
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    LockBatchBody,
    ProducerData,
    QueueKey,
    encode_heartbeat,
    encode_lock_batch,
    encode_subscription_check,
    subscription_data,
)
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.ext_fields import Header, fields_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS, response_header
from halfmq.remoting.headers import (
    EndTransactionRequestHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
)
from halfmq.remoting.own_requests import PreparedMessage, TransactionEnd, encode_entries
from halfmq.remoting.replies import encode_request
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.topics import (
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    TRACE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from tests.support.access import ADMIN, PUBLISHER, STRANGER, SUBSCRIBER, Account, signed_frame
from tests.support.broker_doubles import FakeConnection
from tests.support.broker_parts import access_of, router_of, store_of
from tests.support.peers import until

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "access-table.md"
START_MS: Final = 1_700_000_000_000
LOG_FILE_SIZE: Final = 1 << 20

ACCOUNTS: Final = f"""
accounts:
- {{accessKey: {PUBLISHER.name}, secretKey: {PUBLISHER.secret}, topicPerms: [orders=PUB]}}
- {{accessKey: {SUBSCRIBER.name}, secretKey: {SUBSCRIBER.secret},
   topicPerms: [orders=SUB], groupPerms: [readers=SUB]}}
- {{accessKey: {STRANGER.name}, secretKey: {STRANGER.secret},
   topicPerms: [payments=PUB|SUB], groupPerms: [theirs=SUB]}}
- {{accessKey: {ADMIN.name}, secretKey: {ADMIN.secret}, admin: true}}
"""

POLICIES: Final = {
    PUBLISHER: [("Topic:orders", "Pub")],
    SUBSCRIBER: [("Topic:orders", "Sub"), ("Group:readers", "Sub")],
    STRANGER: [("Topic:payments", "Pub"), ("Topic:payments", "Sub"), ("Group:theirs", "Sub")],
}


class Subject(NamedTuple):
    """Who sends; without an account nothing is signed."""

    title: str
    account: Account | None


SUBJECTS: Final = (
    Subject("anonymous", None),
    Subject("wrong secret", Account(ADMIN.name, "not its secret")),
    Subject("publisher", PUBLISHER),
    Subject("subscriber", SUBSCRIBER),
    Subject("other topic", STRANGER),
    Subject("admin", ADMIN),
)

FRONT_ENDS: Final = ("plain ACL", "users")


class Sample(NamedTuple):
    """A well-formed request."""

    code: int
    about: str  # empty: the topic orders and the groups readers and writers
    header: Header | Mapping[str, str] | None
    body: bytes


class Row(NamedTuple):
    """A sample, what it needs, and for each subject where it is allowed."""

    sample: Sample
    needs: str
    allowed: tuple[frozenset[str], ...]


# -- requests

_TEXTS: Final = {
    "topic": "orders",
    "consumer_group": "readers",
    "group": "readers",
    "group_name": "readers",
    "src_group": "readers",
    "dest_group": "readers",
    "producer_group": "writers",
    "default_topic": "TBW102",
    "action": "commit",
    "username": "somebody",
    "subject": "User:somebody",
    "stats_name": "TOPIC_PUT_NUMS",
    "stats_key": "orders",
    "topic_filter_type": "SINGLE_TAG",
}
_NAMES: Final = {
    "topic": "orders",
    "consumerGroup": "readers",
    "compareGroup": "readers",
    "filterGroups": "readers",
}
"""Fields of headers that have no class yet."""

_OPTIONAL: Final = frozenset({"topic", "consumer_group", "producer_group", "username", "subject"})
_PERMISSIONS: Final = AclInfo(
    subject="User:somebody",
    policies=(
        PolicyInfo(
            entries=(PolicyEntryInfo(actions=("Pub",), decision="Allow", resource="Topic:t"),)
        ),
    ),
)
_GROUP_JSON: Final = {"groupName": "readers", "consumeEnable": True}
_TOPIC_JSON: Final = {"topicName": "orders", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
_QUEUES: Final = LockBatchBody(
    client_id="c",
    consumer_group="readers",
    mq_set=(QueueKey(topic="orders", broker_name="broker-a", queue_id=0),),
)


def _heartbeat(*, consumer: bool) -> bytes:
    of_consumer = ConsumerData(
        group_name="readers", subscription_data_set=(subscription_data("orders", "*"),)
    )
    return encode_heartbeat(
        HeartbeatData(
            client_id="c",
            consumer_data_set=(of_consumer,) if consumer else (),
            producer_data_set=() if consumer else (ProducerData(group_name="writers"),),
        )
    )


def _prepared(key: str) -> str:
    marks = {"TRAN_MSG": "true", "PGROUP": "writers", "UNIQ_KEY": key}
    return encode_properties(marks).decode()


_BODIES: Final[Mapping[int, bytes]] = {
    RequestCode.SEND_MESSAGE: b"body",
    RequestCode.SEND_MESSAGE_V2: b"body",
    RequestCode.SEND_BATCH_MESSAGE: b"body",
    RequestCode.HEART_BEAT: _heartbeat(consumer=True),
    RequestCode.LOCK_BATCH_MQ: encode_lock_batch(_QUEUES),
    RequestCode.UNLOCK_BATCH_MQ: encode_lock_batch(_QUEUES),
    RequestCode.CHECK_CLIENT_CONFIG: encode_subscription_check(
        "c", "readers", subscription_data("orders", "*")
    ),
    RequestCode.QUERY_ASSIGNMENT: json.dumps(_NAMES).encode(),
    RequestCode.SET_MESSAGE_REQUEST_MODE: json.dumps(_NAMES).encode(),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: json.dumps(
        {"topicConfigList": [_TOPIC_JSON]}
    ).encode(),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: json.dumps(_GROUP_JSON).encode(),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: json.dumps(
        {"groupConfigList": [_GROUP_JSON]}
    ).encode(),
    RequestCode.BATCH_ACK_MESSAGE: json.dumps({"acks": [{"c": "readers", "t": "orders"}]}).encode(),
    RequestCode.AUTH_CREATE_USER: encode_access(UserInfo(username="somebody", password="secret")),
    RequestCode.AUTH_UPDATE_USER: encode_access(UserInfo(username="somebody", password="secret")),
    RequestCode.AUTH_CREATE_ACL: encode_access(_PERMISSIONS),
    RequestCode.AUTH_UPDATE_ACL: encode_access(_PERMISSIONS),
    RequestCode.PREPARE_TRANSACTION: encode_entries(
        [PreparedMessage("orders", 0, 0, 4, START_MS, _prepared("P"), b"body")]
    ),
}


def _header(code: int, **other: object) -> Header | Mapping[str, str]:
    kind = REQUEST_HEADERS.get(code)
    if kind is None:
        return _NAMES
    values: dict[str, object] = {}
    for field in fields_of(kind):
        if field.required or field.attribute in _OPTIONAL:
            text = _TEXTS.get(field.attribute, "x")
            values[field.attribute] = text if field.kind is str else field.kind(0)
    return kind(**(values | other))


class Stored(NamedTuple):
    """What requests that name a record are about: a message of the topic, and a half."""

    message: int  # physical offset
    half: int
    half_queue_offset: int


def samples(stored: Stored) -> Iterator[Sample]:
    """Give a request of every code, and more of those that differ by what they name."""
    end = TransactionEnd(stored.half, stored.half_queue_offset, 0, "K1")
    records: dict[int, dict[str, object]] = {
        RequestCode.CONSUMER_SEND_MSG_BACK: {"offset": stored.message},
        RequestCode.VIEW_MESSAGE_BY_ID: {"offset": stored.message},
        RequestCode.DECIDE_TRANSACTION: {"transaction_offset": stored.half},
    }
    for code in sorted(RequestCode):
        header = _header(code, **records.get(code, {}))
        body = _BODIES.get(code, b"")
        match code:
            case RequestCode.END_TRANSACTION:
                header = _end(stored)
            case RequestCode.END_TRANSACTIONS:
                body = encode_entries([end])
        yield Sample(code, "", header, body)
        yield from _more(code, stored)


def _end(stored: Stored, *, from_check: bool = False) -> EndTransactionRequestHeader:
    return EndTransactionRequestHeader(
        producer_group="writers",
        tran_state_table_offset=stored.half_queue_offset,
        commit_log_offset=stored.half,
        commit_or_rollback=0,
        msg_id="K1",
        transaction_id="K1",
        from_transaction_check=from_check,
    )


def _more(code: int, stored: Stored) -> Iterator[Sample]:
    match code:
        case RequestCode.SEND_MESSAGE_V2:
            for topic in ("%RETRY%readers", HALF_TOPIC, TRACE_TOPIC):
                yield Sample(code, topic, _header(code, topic=topic), b"body")
        case RequestCode.PULL_MESSAGE:
            for topic in (
                *("%RETRY%readers", "%DLQ%readers", HALF_TOPIC, OP_TOPIC),
                *(SCHEDULE_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC),
            ):
                yield Sample(code, topic, _header(code, topic=topic), b"")
        case RequestCode.HEART_BEAT:
            yield Sample(code, "a producer", _header(code), _heartbeat(consumer=False))
        case RequestCode.VIEW_MESSAGE_BY_ID:
            yield Sample(code, "a half message", _header(code, offset=stored.half), b"")
        case RequestCode.QUERY_TRANSACTIONS:
            yield Sample(code, "all groups", _header(code, producer_group=None), b"")
            one = _header(code, producer_group=None, transaction_id="K1")
            yield Sample(code, "one by its key", one, b"")


# -- a broker


async def _start(front_end: str, folder: Path) -> Broker:
    file = folder / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    plain = front_end == "plain ACL"
    access = (
        AccessConfig(acl_enabled=True, plain_acl_file=file)
        if plain
        else AccessConfig(
            authentication_enabled=True,
            authorization_enabled=True,
            initial_user=KeyPair(*ADMIN),
        )
    )
    broker = Broker(
        BrokerConfig(
            network=NetworkConfig(listen_port=0, namesrv_listen_port=0),
            store=StoreSettings(root=folder / "store", commit_log_file_size=LOG_FILE_SIZE),
            transaction=TransactionConfig(timeout_ms=3_600_000),
            access=access,
        )
    )
    await broker.start()
    users = access_of(broker).users
    if users is not None:
        await users.create_user(UserInfo(username="somebody", password="secret"))
        for (name, secret), granted in POLICIES.items():
            await users.create_user(UserInfo(username=name, password=secret))
            for resource, _action in granted:
                actions = tuple(action for one, action in granted if one == resource)
                entry = PolicyEntryInfo(actions=actions, decision="Allow", resource=resource)
                policies = (PolicyInfo(entries=(entry,)),)
                await users.put_acl(AclInfo(subject=f"User:{name}", policies=policies))
    return broker


async def _dispatch(broker: Broker, frame: bytes) -> FakeConnection:
    """Serve a request; return its connection, to which the answer is or will be written."""
    (command,) = FrameDecoder().receive_data(frame)
    assert command.header_error is None, (command.code, command.header_error)
    connection = FakeConnection()
    router_of(broker).dispatch(command, connection)
    for _ in range(3):  # what is staged is appended and answered after the pass
        await asyncio.sleep(0)
    return connection


async def _store(broker: Broker) -> Stored:
    """Have the publisher send a message and prepare a transaction."""

    async def send(sys_flag: int, properties: str) -> SendMessageResponseHeader:
        header = _header(RequestCode.SEND_MESSAGE, sys_flag=sys_flag, properties=properties)
        assert isinstance(header, SendMessageRequestHeader)
        frame = signed_frame(PUBLISHER, RequestCode.SEND_MESSAGE, header, b"body")
        connection = await _dispatch(broker, frame)
        await until(lambda: bool(connection.written or connection.held))
        reply = (connection.written or [held for _position, held in connection.held])[0]
        (answer,) = FrameDecoder(responses_first=True).receive_data(reply)
        assert answer.code == 0, answer.remark
        return response_header(answer, SendMessageResponseHeader)

    message = await send(0, "")
    half = await send(4, _prepared("K1"))
    store = store_of(broker)
    store.request_flush()  # a record is found when it is on disk
    await until(lambda: store.durable_offset >= store.write_offset)
    offsets = [parse_offset_message_id(one.msg_id).physical_offset for one in (message, half)]
    return Stored(offsets[0], offsets[1], half.queue_offset)


async def _is_allowed(broker: Broker, subject: Subject, sample: Sample) -> bool:
    before = sum(access_of(broker).metrics().values())
    if subject.account is None:
        frame = encode_request(
            sample.code, opaque=1, header=sample.header, body=sample.body, header_type=0
        )
    else:
        frame = signed_frame(
            subject.account,
            sample.code,
            sample.header,
            sample.body,
            header_type=HeaderType.JSON,
        )
    await _dispatch(broker, frame)
    return sum(access_of(broker).metrics().values()) == before


async def _measure(front_end: str, subject: Subject) -> tuple[list[Sample], list[bool]]:
    """Ask everything of a broker of its own: what one subject changes is not there for the next."""
    with tempfile.TemporaryDirectory() as folder:
        broker = await _start(front_end, Path(folder))
        try:
            stored = await _store(broker)
            asked = list(samples(stored))
            return asked, [await _is_allowed(broker, subject, sample) for sample in asked]
        finally:
            await broker.stop()


def _needs(sample: Sample) -> str:
    requirements = requirements_of(sample.code, _typed(sample), sample.body)
    assert requirements is not None, f"{sample.code} has no rule"
    texts = [f"{' or '.join(one.actions)} {one.resource}" for one in requirements]
    return ", ".join(f"`{text}`" for text in texts) or "a signature"


def _typed(sample: Sample) -> object:
    (command,) = FrameDecoder().receive_data(
        encode_request(sample.code, opaque=1, header=sample.header, body=sample.body)
    )
    return command.header


def measure() -> list[Row]:
    """Return who may ask what, as a running broker has it."""
    allowed: list[list[set[str]]] = []
    asked: list[Sample] = []
    for subject in SUBJECTS:
        where: list[set[str]] = []
        for front_end in FRONT_ENDS:
            asked, answers = asyncio.run(_measure(front_end, subject))
            where = where or [set() for _ in answers]
            for at, yes in enumerate(answers):
                if yes:
                    where[at].add(front_end)
        allowed.append(where)
    return [
        Row(sample, _needs(sample), tuple(frozenset(of_one[at]) for of_one in allowed))
        for at, sample in enumerate(asked)
    ]


# -- the document

HEAD: Final = """\
# Who may ask what

One line for each request code, served or not, as a running broker answers it. The file is written
by `python -m tests.access_table`, and a test compares it with what the broker does.

The topic is `orders`, the consumer group `readers`, the producer group `writers`, unless the line
says otherwise. The publisher has PUB on the topic and has prepared the transaction; the subscriber
has SUB on topic and group; "other topic" has both on another topic and group; the administrator is
a super user, or an `admin` account. "Wrong secret" signs as the administrator, with a secret that
is not its own. *yes* holds for both front ends, plain ACL and users; *no* is a refusal, before
anything else is said about the request. "A signature" may mean more for requests that name a
record: the right on what is found there is asked for when it has been read. See
[security.md](security.md).
"""


def _cell(where: frozenset[str]) -> str:
    if len(where) == len(FRONT_ENDS):
        return "yes"
    return next(iter(where)) + " only" if where else "no"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Give the lines of the document."""
    yield from HEAD.splitlines()
    yield ""
    titles = ["code", "request", "needs", *[subject.title for subject in SUBJECTS]]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        about = f", {row.sample.about}" if row.sample.about else ""
        cells: list[Any] = [
            row.sample.code,
            RequestCode(row.sample.code).name + about,
            row.needs,
            *map(_cell, row.allowed),
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text("\n".join(lines(measure())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
