"""The guard in front of the router: who gets through, and what the others are told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from halfmq.broker.access.control import LINES_PER_SECOND_MAX, AccessControl, Subject
from halfmq.broker.access.plain_acl import PlainAcl
from halfmq.broker.access.requirements import REQUIREMENTS, requirements_of, topic
from halfmq.broker.access.rules import Action
from halfmq.broker.config_file import load_config
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.net.router import Router
from halfmq.broker.ports import Connection
from halfmq.broker.service import Broker
from halfmq.remoting import msgpack_header
from halfmq.remoting.codes import FLAG_ONE_WAY, HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS
from halfmq.remoting.headers import GetRouteInfoRequestHeader, SendMessageRequestHeaderV2
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.serialization import encode_frame, encode_header, join_frame
from halfmq.remoting.signature import Signer, signed_text
from tests.support.broker_doubles import FakeConnection
from tests.support.broker_parts import router_of
from tests.support.frames import all_recorded, recorded
from tests.support.usual_headers import send_header

ACCOUNTS = """
globalWhiteRemoteAddresses: [10.10.10.10]
accounts:
- {accessKey: RocketMQ, secretKey: "12345678", whiteRemoteAddress: 10.9.0.1,
   topicPerms: [T=PUB, secret=DENY, a49_smoke=PUB|SUB],
   defaultGroupPerm: SUB, defaultTopicPerm: SUB}
- {accessKey: rocketmq2, secretKey: "12345678", admin: true}
"""


class Guarded:
    """A router with access control, whose handlers answer everything with success."""

    def __init__(self, folder: Path) -> None:
        file = folder / "plain_acl.yml"
        file.write_text(ACCOUNTS)
        self.served: list[RemotingCommand] = []
        self.now = 0.0
        self.control = AccessControl(
            PlainAcl(file),
            cluster_name="DefaultCluster",
            belongs_to_other=lambda _client_id, _principal, _connection: False,
            clock=lambda: self.now,
        )
        self.router = Router(dict.fromkeys(RequestCode, self._serve), admit=self.control.admit)

    def _serve(self, command: RemotingCommand, _connection: Connection) -> bytes:
        self.served.append(command)
        return encode_reply(command)

    def answer(
        self, command: RemotingCommand, connection: FakeConnection | None = None
    ) -> RemotingCommand | None:
        connection = connection or FakeConnection()
        self.router.dispatch(command, connection)
        answers = FrameDecoder(responses_first=True).receive_data(b"".join(connection.written))
        connection.written.clear()
        return answers[0] if answers else None

    def code(
        self, command: RemotingCommand, connection: FakeConnection | None = None
    ) -> tuple[int, str]:
        answer = self.answer(command, connection)
        assert answer is not None
        return answer.code, answer.remark or ""


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    """A router with access control by the accounts above."""
    return Guarded(tmp_path)


def send(to: str) -> SendMessageRequestHeaderV2:
    """Return the header of a send."""
    return send_header(producer_group="g", topic=to, born_timestamp=1, properties="KEYS\x01k\x02")


def signed(
    code: int,
    header: Header,
    body: bytes = b"",
    *,
    key: str = "RocketMQ",
    secret: str = "12345678",
    header_type: HeaderType = HeaderType.JSON,
    flag: int = 0,
) -> RemotingCommand:
    """Return a request as it arrives from a client that signs."""
    if header_type is HeaderType.MSGPACK:
        raw = msgpack_header.encode(code, 1, flag, 3, 479, None, header)
        frame = join_frame(header_type, msgpack_header.sign(raw, body, key, Signer(secret)), body)
    else:
        texts = {**(texts_of(header) or {}), "AccessKey": key}
        texts["Signature"] = Signer(secret).sign(signed_text(texts), body)
        raw = encode_header(header_type, code, 1, flag, 0, 479, None, texts)
        frame = join_frame(header_type, raw, body)
    (command,) = FrameDecoder().receive_data(frame)
    return command


@pytest.mark.parametrize("header_type", HeaderType)
def test_a_signed_request_is_served_by_its_permissions(
    guarded: Guarded, header_type: HeaderType
) -> None:
    """PUB on T, DENY on secret, SUB on the rest; with each of the three headers."""

    def code(to: str) -> int:
        command = signed(RequestCode.SEND_MESSAGE_V2, send(to), b"body", header_type=header_type)
        return guarded.code(command)[0]

    assert code("T") == ResponseCode.SUCCESS
    assert code("secret") == ResponseCode.SYSTEM_ERROR
    assert code("other") == ResponseCode.SYSTEM_ERROR
    assert len(guarded.served) == 1


def test_a_refusal_names_subject_action_and_resource(guarded: Guarded) -> None:
    """In the remark for people, and in fields for programs; official clients skip those."""
    answer = guarded.answer(signed(RequestCode.SEND_MESSAGE_V2, send("secret"), b"body"))

    assert answer is not None
    assert answer.remark == (
        "accessKey:RocketMQ has no permission to Pub Topic:secret from 127.0.0.1, "
        "the decision is deny."
    )
    assert answer.header == {
        "subject": "accessKey:RocketMQ",
        "action": "Pub",
        "resource": "Topic:secret",
    }


@pytest.mark.parametrize("header_type", HeaderType)
def test_an_invalid_signature_is_refused_before_anything_else(
    guarded: Guarded, header_type: HeaderType
) -> None:
    """No key, an unknown key, a wrong secret; an unknown request code is not even mentioned."""
    route = GetRouteInfoRequestHeader(topic="T")
    unsigned = RemotingCommand(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, header=route, header_type=header_type
    )
    unknown_code = RemotingCommand(9_999, header={"a": "b"})

    def of(command: RemotingCommand) -> tuple[int, str]:
        (received,) = FrameDecoder().receive_data(encode_frame(command))
        return guarded.code(received)

    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    assert of(unsigned) == (1, "No accessKey is configured")
    assert of(unknown_code) == (1, "No accessKey is configured")
    assert guarded.code(signed(code, route, key="nobody", header_type=header_type)) == (
        1,
        "accessKey:nobody: check signature failed.",  # which does not tell who exists
    )
    assert guarded.code(signed(code, route, secret="wrong", header_type=header_type)) == (
        1,
        "accessKey:RocketMQ: check signature failed.",
    )
    assert not guarded.served
    assert guarded.control.refused == {"authentication": 4}


@pytest.mark.parametrize("header_type", HeaderType)
def test_a_changed_body_is_refused(guarded: Guarded, header_type: HeaderType) -> None:
    """The signature covers the body."""
    command = signed(RequestCode.SEND_MESSAGE_V2, send("T"), b"body", header_type=header_type)
    command.body = b"bodY"

    assert guarded.code(command)[1] == "accessKey:RocketMQ: check signature failed."


@pytest.mark.parametrize("signs_it", [False, True])
def test_the_signature_of_a_query_by_key_is_valid_from_old_and_new_clients(
    guarded: Guarded, signs_it: bool
) -> None:
    """Clients up to 4.9.3 add a field after signing, later ones sign it."""
    texts = {"topic": "other", "key": "K", "maxNum": "1", "beginTimestamp": "0"}
    texts |= {"endTimestamp": "9", "AccessKey": "RocketMQ"}
    unique = {"_UNIQUE_KEY_QUERY": "true"}
    text = signed_text({**texts, **unique} if signs_it else texts)
    texts |= {**unique, "Signature": Signer("12345678").sign(text)}
    raw = encode_header(HeaderType.JSON, RequestCode.QUERY_MESSAGE, 1, 0, 0, 395, None, texts)
    (command,) = FrameDecoder().receive_data(join_frame(HeaderType.JSON, raw, b""))

    assert guarded.code(command) == (ResponseCode.SUCCESS, "")


def test_every_principal_of_a_plain_acl_may_send_traces(guarded: Guarded) -> None:
    """As in RocketMQ; deleting or reading the trace topic needs a permission."""
    trace = "RMQ_SYS_TRACE_TOPIC"
    assert guarded.code(signed(RequestCode.SEND_MESSAGE_V2, send(trace), b"trace"))[0] == 0

    for code in (RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.GET_TOPIC_CONFIG):
        asked = signed(code, REQUEST_HEADERS[code](topic=trace))
        assert guarded.code(asked)[0] == ResponseCode.SYSTEM_ERROR


def test_trusted_addresses_need_no_signature(guarded: Guarded) -> None:
    """An address of the file needs no key, one of an account needs the access key."""
    unsigned = RemotingCommand(RequestCode.SEND_MESSAGE_V2, header=send("secret"))
    (received,) = FrameDecoder().receive_data(encode_frame(unsigned))
    of_account = signed(RequestCode.SEND_MESSAGE_V2, send("secret"), secret="wrong")

    assert guarded.code(received, FakeConnection("10.10.10.10:5000"))[0] == 0
    assert guarded.code(of_account, FakeConnection("10.9.0.1:5000"))[0] == 0
    assert guarded.code(received, FakeConnection("10.9.0.1:5000"))[0] == 1


def test_a_refused_one_way_request_is_dropped_and_counted(guarded: Guarded) -> None:
    """Its sender reads no answer."""
    command = signed(RequestCode.SEND_MESSAGE_V2, send("secret"), flag=FLAG_ONE_WAY)

    assert guarded.answer(command) is None
    assert guarded.control.refused == {"authorization": 1}


def test_a_handler_can_check_a_resource_found_in_a_record(guarded: Guarded) -> None:
    """A decision names an offset; only its half has the topic."""
    guarded.answer(signed(RequestCode.SEND_MESSAGE_V2, send("T")))
    subject = guarded.served[0].subject
    assert isinstance(subject, Subject)

    assert subject.name == "RocketMQ"
    assert subject.may(topic("T", Action.PUB))
    assert not subject.may(topic("secret", Action.PUB))
    with pytest.raises(RequestRefusedError, match="no permission to Pub Topic:secret"):
        subject.require(topic("secret", Action.PUB))


def test_a_flood_of_refusals_does_not_flood_the_log(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """Some lines per second are written; the next one has the number of omitted lines."""
    command = signed(RequestCode.SEND_MESSAGE_V2, send("secret"))
    with caplog.at_level(logging.WARNING):
        for _ in range(LINES_PER_SECOND_MAX + 90):
            guarded.answer(command)
        guarded.now = 1.0
        guarded.answer(command)

    lines = [one.message for one in caplog.records if "access_denied" in one.message]
    assert len(lines) == LINES_PER_SECOND_MAX + 1
    assert "not_logged=90" in lines[-1]
    assert not any("12345678" in line for line in lines)


def test_every_request_code_has_a_rule(tmp_path: Path) -> None:
    """Without a rule, a request would be open to every principal as soon as it is served."""
    file = tmp_path / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    root = f"storePathRootDir={tmp_path}"
    front_ends: list[list[str]] = [
        [],
        ["aclEnable=true", f"plainAclFile={file}"],
        ["authenticationEnabled=true"],
    ]
    served = [router_of(Broker(load_config(None, [root, *one]).config)).codes for one in front_ends]

    assert set(REQUIREMENTS) == set(RequestCode)
    assert frozenset().union(*served) <= set(RequestCode)


def test_recorded_requests_are_allowed_where_rocketmq_allows_them(guarded: Guarded) -> None:
    """Frames of Java clients 4.9.8 and 5.3.3 and of mqadmin, with the answers of RocketMQ 4.9.7."""
    lines = recorded("broker-4.9.7-acl1")
    refused_there = {
        (line.connection, line.opaque)
        for line in lines
        if not line.direction.startswith("client") and b"AclException" in line.frame
    }
    refused_here, asked = set(), set()
    for line in lines:
        if line.direction.startswith("client") and line.code in REQUIREMENTS:
            (command,) = FrameDecoder().receive_data(line.frame)
            answer = guarded.answer(command)
            asked.add((line.connection, line.opaque))
            if answer is not None and answer.code:
                refused_here.add((line.connection, line.opaque))

    assert len(asked) > 20
    assert refused_here == refused_there & asked
    assert refused_here


FREE = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
}
"""Asked for by every client, or addressed by a correlation id that only its receiver has told."""

DECIDED_LATE = {
    RequestCode.END_TRANSACTION,
    RequestCode.VIEW_MESSAGE_BY_ID,
    RequestCode.HEART_BEAT,  # of a producer
    RequestCode.UNREGISTER_CLIENT,  # likewise
}
"""Requests that may need nothing before a record has been read."""


def test_every_recorded_request_needs_a_right() -> None:
    """What official clients and tools send has a rule that fits its header and its body."""
    seen: set[int] = set()
    for line in all_recorded():
        if line.code not in REQUIREMENTS or "→client" in line.direction or line.flag != 0:
            continue
        try:
            (command,) = FrameDecoder().receive_data(line.frame)
            if command.header_error is not None:
                continue
            needed = requirements_of(command.code, command.header, command.body)
        except RemotingError:
            assert "raw-" in line.file, line  # garbage on purpose
            continue
        seen.add(command.code)
        assert needed or command.code in FREE | DECIDED_LATE, line

    assert len(seen) > 80


@pytest.mark.parametrize(
    ("code", "header", "body", "needs"),
    [
        (25, None, b"brokerPermission=4", ["Cluster:* Update"]),
        (26, None, b"", ["Cluster:* Get"]),
        (200, None, b'{"groupName":"g","consumeEnable":true}', ["Group:g Create"]),
        (225, None, b'{"groupConfigList":[{"groupName":"g"}]}', ["Group:g Create"]),
        (18, None, b'{"topicConfigList":[{"topicName":"t"}]}', ["Topic:t Create"]),
        (200151, None, b'{"acks":[{"c":"g","t":"t"}]}', ["Topic:t Sub", "Group:g Sub"]),
        (400, None, b'{"topic":"t","consumerGroup":"g"}', ["Topic:t Sub", "Group:g Sub"]),
    ],
)
def test_requests_without_a_header_class_need_a_right(
    code: int, header: dict[str, str] | None, body: bytes, needs: list[str]
) -> None:
    """RocketMQ 5.3.3 requires nothing there: every principal may send them."""
    needed = requirements_of(code, header, body) or ()

    assert [f"{one.resource} {one.actions[0]}" for one in needed] == needs


def test_an_unserved_request_without_a_right_is_refused_by_its_rule(guarded: Guarded) -> None:
    """The answer must not tell an unauthorized sender which requests are served."""
    texts = {"AccessKey": "RocketMQ"}
    texts["Signature"] = Signer("12345678").sign(signed_text(texts), b"brokerPermission=4")
    raw = encode_header(
        HeaderType.JSON, RequestCode.UPDATE_BROKER_CONFIG, 1, 0, 0, 479, None, texts
    )
    frame = join_frame(HeaderType.JSON, raw, b"brokerPermission=4")
    (command,) = FrameDecoder().receive_data(frame)

    code, remark = guarded.code(command)

    assert code == ResponseCode.SYSTEM_ERROR
    assert "no permission to Update Cluster:DefaultCluster" in remark
    assert not guarded.served
