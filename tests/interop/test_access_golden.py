"""Recordings made under access control, played again against a broker with the same users.

Every recorded request goes to the broker as it is, signature and all, over connections of its own.
What was refused there must be refused here with the same code, and nothing else may be. Requests
that pass are compared no further, as the topics and messages of the recordings are not there;
`test_golden_answers` does that. Where ours differs on purpose, a row of `DEVIATIONS` says so and
why; a row that no recorded request needs fails a test.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from halfmq.broker.access.users import SUPER
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.access_bodies import decode_acls, decode_users
from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from tests.support.access import Account
from tests.support.access_files import Policy, user_settings, write_plain_acl, write_users
from tests.support.frames import FILES, RecordedFrame, recorded
from tests.support.patience import PATIENCE_S

USERS_FILES: Final = [name for name in FILES if name.startswith("acl2-")] + ["raw-5.3.3-acl"]
ACCOUNTS_FILES: Final = ["broker-4.9.7-acl1"]
WHERE_USERS_ARE_MADE: Final = ["acl2-mqadmin-5.3.3"]

ACCOUNTS: Final[list[tuple[Account, dict[str, Any]]]] = [
    (
        Account("RocketMQ", "12345678"),
        {
            "topicPerms": ["T=PUB", "a49_smoke=PUB|SUB"],
            "defaultTopicPerm": "SUB",
            "defaultGroupPerm": "SUB",
        },
    ),
    (Account("rocketmq2", "12345678"), {"admin": True}),
]


class Exchange(NamedTuple):
    """A recorded request, the code it was answered with, and ours."""

    file: str
    request: RecordedFrame
    official: int
    remark: str
    ours: int = -1
    our_remark: str = ""


class Deviation(NamedTuple):
    """One thing that is answered otherwise, on purpose."""

    what: str
    why: str
    applies: Callable[[Exchange], bool]


OPEN_THERE: Final = {
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.GET_BROKER_CONFIG,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_TOPICS_BY_CLUSTER,
}

QUEUE_BOUNDS: Final = {
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
}

ROUTES: Final = {RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO}

DEVIATIONS: Final = (
    Deviation(
        "a route without a valid signature: refused",
        "the name server of the recordings had no users; here both roles are one process",
        lambda it: it.request.code in ROUTES and it.ours == ResponseCode.NO_PERMISSION,
    ),
    Deviation(
        "settings, groups, configuration and lists: refused to a user without the right",
        "RocketMQ 5.3.3 asks for nothing, as the headers of these requests have no annotation",
        lambda it: it.request.code in OPEN_THERE and it.ours == ResponseCode.NO_PERMISSION,
    ),
    Deviation(
        "bounds of a queue: open to whoever may publish or subscribe",
        "RocketMQ 5.3.3 asks for Get alone, and a consumer with Sub cannot begin at the end",
        lambda it: it.request.code in QUEUE_BOUNDS and it.official == ResponseCode.NO_PERMISSION,
    ),
    Deviation(
        "a query by key whose last field is not signed: believed, whatever the client's version",
        "RocketMQ 5.3.3 leaves the field out for versions up to 4.9.3 only",
        lambda it: it.request.code == RequestCode.QUERY_MESSAGE and "check signature" in it.remark,
    ),
    Deviation(
        "a single message: its own topic decides, not the one that the request names",
        "the official broker gives any message to whoever has a right on some topic",
        lambda it: it.request.code == RequestCode.VIEW_MESSAGE_BY_ID,
    ),
    Deviation(
        "the decision of a half that is not there: 1, whatever topic the request names",
        "the half's real topic counts; RocketMQ 5.3.3 refuses answers to its own questions",
        lambda it: (
            it.request.code == RequestCode.END_TRANSACTION
            and "RMQ_SYS_TRANS_HALF_TOPIC" in it.remark
            and it.ours == ResponseCode.SYSTEM_ERROR
        ),
    ),
)


class Answering:
    """Connections of one recording."""

    def __init__(self, broker: BrokerProcess, stack: ExitStack) -> None:
        host, _, port = broker.address.rpartition(":")
        self._address = host, int(port)
        self._stack = stack
        self._connections: dict[int, tuple[socket.socket, FrameDecoder]] = {}

    def answer(self, frame: RecordedFrame) -> RemotingCommand:
        """Send a recorded request on its connection; return the answer."""
        if frame.connection not in self._connections:
            connected = socket.create_connection(self._address, PATIENCE_S)
            self._stack.callback(connected.close)
            self._connections[frame.connection] = connected, FrameDecoder(responses_first=True)
        connected, decoder = self._connections[frame.connection]
        connected.sendall(frame.frame)
        while data := connected.recv(1 << 16):
            for command in decoder.receive_data(data):
                if command.is_response and command.opaque == frame.opaque:
                    return command
        raise AssertionError(f"the connection ended: {frame}")


def _exchanges(file: str) -> Iterator[Exchange]:
    """Return the recorded requests that were answered, in the order in which they were sent."""
    answers: dict[tuple[int, object], RecordedFrame] = {}
    lines = recorded(file)
    for line in lines:
        if not line.direction.startswith("client") and line.flag is not None and line.flag & 1:
            answers.setdefault((line.connection, line.opaque), line)
    for line in lines:
        if not line.direction.startswith("client") or line.code is None or line.flag is None:
            continue
        answer = answers.get((line.connection, line.opaque))
        if line.flag & (1 | FLAG_ONE_WAY) or answer is None:
            continue
        assert answer.code is not None
        (command,) = FrameDecoder(responses_first=True).receive_data(answer.frame)
        yield Exchange(file, line, answer.code, command.remark or "")


def _recorded_users(store: Path) -> None:
    """Write the users of the recordings, as their listings show them."""
    answers = {
        (line.connection, line.opaque): line.body
        for line in recorded("raw-5.3.3-acl")
        if line.flag == 1 and line.code == 0
    }

    def body(code: int) -> bytes:
        for line in recorded("raw-5.3.3-acl"):
            if line.code == code and (line.connection, line.opaque) in answers:
                return answers[line.connection, line.opaque]
        raise AssertionError(code)

    policies = {
        acl.subject: [
            Policy(entry.resource, ",".join(entry.actions), entry.decision or "")
            for policy in acl.policies
            for entry in policy.entries
        ]
        for acl in decode_acls(body(RequestCode.AUTH_LIST_ACL))
    }
    users = decode_users(body(RequestCode.AUTH_LIST_USER))
    write_users(
        store,
        [
            (Account(user.username, user.password or ""), policies[f"User:{user.username}"])
            for user in users
            if user.user_type != SUPER
        ],
    )


class Brokers:
    """Brokers with the users or accounts of the recordings, each started when it is needed."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._home, self._stack = home, stack
        self._started: dict[str, BrokerProcess] = {}

    def of(self, file: str) -> BrokerProcess:
        """Return the broker for a recording."""
        shared = "users" if file in USERS_FILES and file not in WHERE_USERS_ARE_MADE else file
        if shared not in self._started:
            home = self._home / shared
            started = broker_process(home / "broker", **self._settings(file, home))
            self._started[shared] = self._stack.enter_context(started)
        return self._started[shared]

    @staticmethod
    def _settings(file: str, home: Path) -> dict[str, object]:
        home.mkdir()
        if file in ACCOUNTS_FILES:
            path = write_plain_acl(home / "plain_acl.yml", ACCOUNTS)
            return {"aclEnable": "true", "plainAclFile": path}
        if file in WHERE_USERS_ARE_MADE:  # all but this one, whose recording is left out
            write_users(home / "broker" / "store", [(Account("bob", "bob1234567"), [])])
        else:
            _recorded_users(home / "broker" / "store")
        first = {"username": "rocketmq", "password": "12345678"}
        return user_settings(initAuthenticationUser=json.dumps(first))


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Brokers with the users or accounts of the recordings."""
    with ExitStack() as stack:
        yield Brokers(tmp_path_factory.mktemp("access"), stack)


def _play(file: str, brokers: Brokers) -> list[Exchange]:
    with ExitStack() as stack:
        answering = Answering(brokers.of(file), stack)
        played = []
        for exchange in _exchanges(file):
            answer = answering.answer(exchange.request)
            played.append(exchange._replace(ours=answer.code, our_remark=answer.remark or ""))
        return played


def _is_refusal(code: int, remark: str) -> bool:
    """Whether access control said no; a plain ACL says it with 1, like many others."""
    if code == ResponseCode.SYSTEM_ERROR:
        return "AclException" in remark or remark.startswith(("accessKey:", "No accessKey"))
    return code == ResponseCode.NO_PERMISSION


def _differs(one: Exchange) -> bool:
    there = _is_refusal(one.official, one.remark)
    here = _is_refusal(one.ours, one.our_remark)
    return there != here or (there and one.official != one.ours)


@pytest.mark.parametrize("file", [*USERS_FILES, *ACCOUNTS_FILES])
def test_what_was_refused_is_refused_and_nothing_else(file: str, brokers: Brokers) -> None:
    """Official clients of every language sign for users; those of 4.9.7 and 5.3.3 for accounts."""
    played = _play(file, brokers)

    unexplained = [
        one for one in played if _differs(one) and not any(row.applies(one) for row in DEVIATIONS)
    ]
    assert played
    assert not unexplained, "\n".join(
        f"{one.request.code}: {one.official} {one.remark} → {one.ours} {one.our_remark}"
        for one in unexplained
    )


def test_every_deviation_is_met_by_a_recorded_request(brokers: Brokers) -> None:
    """The table lists nothing that the recordings do not show."""
    played = _play("raw-5.3.3-acl", brokers)

    for row in DEVIATIONS:
        assert any(row.applies(one) and _differs(one) for one in played), row.what
