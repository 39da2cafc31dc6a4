"""Official Java clients with access keys, users and TLS: what is allowed works, the rest is told.

Client 4.9.8 signs for a plain ACL; 5.3.3 for a plain ACL and for users with policies. Each also
over TLS, where the client checks the broker's certificate and shows its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.format.ids import parse_offset_message_id
from tests.support.access import Account
from tests.support.access_files import (
    APPLICATION,
    NOBODY,
    OPERATOR,
    OTHER,
    STRANGER,
    Certificates,
    Policy,
    deny,
    user_settings,
    write_plain_acl,
    write_users,
)
from tests.support.java_clients import JavaClient, Kind, Line, class_path, java_client

pytestmark = pytest.mark.campaign

SETTINGS: dict[str, object] = {
    "messageDelayLevel": "1s 2s 1s 1s 1s",
    "transactionTimeOut": 3000,
    "transactionCheckInterval": 2000,
}

SCENARIOS = (
    *("send", "batch", "look_up", "orderly", "retry", "pull", "lite_pull", "transactions"),
)
TOPICS = [*(f"java-{name}" for name in SCENARIOS), "java-lite_pull-sql", "java-shared"]
ROLES = ("consumer", "reader", "selecting")
GROUPS = [f"java-{name}-{role}" for name in SCENARIOS for role in ROLES]
DEAD = "%DLQ%java-retry-consumer"

NO_ROUTE = 10005
"""What the client itself says if it may not ask for the route of a topic."""

PLAIN_ACL: list[tuple[Account, dict[str, Any]]] = [
    (OPERATOR, {"admin": True}),
    (
        APPLICATION,
        {
            "topicPerms": [*(f"{name}=PUB|SUB" for name in TOPICS), f"{DEAD}=SUB", "denied=DENY"],
            "groupPerms": [*(f"{name}=SUB" for name in GROUPS), "java-attempt-group=SUB"],
        },
    ),
    (OTHER, {"topicPerms": ["java-shared=PUB", "java-send=SUB"], "defaultGroupPerm": "SUB"}),
]

USERS = [
    (
        APPLICATION,
        [
            Policy("Topic:java-*", "Pub,Sub"),
            Policy(f"Topic:{DEAD}", "Sub"),
            Policy("Group:java-*", "Sub"),
            Policy("Topic:*", "Pub,Sub"),
            deny("Topic:denied", "Pub,Sub"),
            deny("Topic:not-*", "Pub,Sub"),
            deny("Group:not-*", "Sub"),
        ],
    ),
    (
        OTHER,
        [
            Policy("Topic:java-shared", "Pub"),
            Policy("Topic:java-send", "Sub"),
            Policy("Group:*", "Sub"),
        ],
    ),
]


class Setup(NamedTuple):
    """A client version, what it signs for, and whether it speaks TLS."""

    version: str
    front_end: str
    tls: bool

    @property
    def refusal(self) -> int:
        """The code that clients expect."""
        plain = self.front_end == "plain-acl"
        return ResponseCode.SYSTEM_ERROR if plain else ResponseCode.NO_PERMISSION


SETUPS = [
    Setup(version, front_end, tls)
    for version, front_end in (("4.9.8", "plain-acl"), ("5.3.3", "plain-acl"), ("5.3.3", "users"))
    for tls in (False, True)
]


class Java:
    """A broker with access control and a JVM whose clients sign as the application."""

    def __init__(self, setup: Setup, home: Path) -> None:
        self.setup, self.home = setup, home
        self.certificates = Certificates(home / "certificates")
        self.accounts = home / "plain_acl.yml"
        self.broker: BrokerProcess
        self.client: JavaClient

    def settings(self) -> dict[str, object]:
        settings = dict(SETTINGS)
        if self.setup.front_end == "plain-acl":
            write_plain_acl(self.accounts, PLAIN_ACL)
            settings |= {"aclEnable": "true", "plainAclFile": self.accounts}
        else:
            write_users(self.home / "broker" / "store", USERS)
            settings |= user_settings()
        if self.setup.tls:
            settings |= self.certificates.broker_settings(client_auth="require")
        return settings

    def kind(self) -> Kind:
        options = [
            f"-Dhalfmq.accessKey={APPLICATION.name}",
            f"-Dhalfmq.secretKey={APPLICATION.secret}",
            f"-Drocketmq.home.dir={self.home}",
        ]
        if self.setup.tls:
            options += self.certificates.java_options
        return Kind(self.setup.version, tuple(options))

    def attempts(self, keys: Account, *attempts: tuple[str, ...]) -> list[tuple[str, int]]:
        """Have these made side by side; return event and code of each."""
        runs = [self.client.start("attempt", *keys, *one) for one in attempts]
        outcomes = [self.client.lines(run)[-1] for run in runs]
        return [(line["event"], line.get("code", 0)) for line in outcomes]

    def ask(self, keys: Account, code: int, fields: dict[str, object], body: str = "") -> Line:
        """Have the official remoting client send a request; return the answer."""
        listed = ",".join(f"{name}={value}" for name, value in fields.items())
        (answer,) = self.client.run("ask", *keys, int(code), listed, body)
        return answer

    def half(self, keys: Account = APPLICATION) -> Line:
        """Have a transaction prepared that stays undecided; return what is told of the half."""
        properties = "TRAN_MSG\x01true\x02PGROUP\x01nobody\x02UNIQ_KEY\x01A1B2\x02"
        fields = _send_fields("java-shared") | {"sysFlag": 4, "properties": properties}
        answer = self.ask(keys, RequestCode.SEND_MESSAGE, fields, "a half")
        assert answer["code"] == ResponseCode.SUCCESS
        return answer

    def end(self, keys: Account, half: Line, *, from_check: bool = False) -> Line:
        """Commit a half message."""
        fields = {
            "producerGroup": "nobody",
            "tranStateTableOffset": half["queue_offset"],
            "commitLogOffset": parse_offset_message_id(half["id"]).physical_offset,
            "commitOrRollback": 8,
            "fromTransactionCheck": str(from_check).lower(),
            "msgId": "A1B2",
            "transactionId": "A1B2",
            "topic": "java-shared",
        }
        return self.ask(keys, RequestCode.END_TRANSACTION, fields)


@pytest.fixture(
    scope="module", params=SETUPS, ids=lambda it: "-".join([*it[:2], *(["tls"] * it.tls)])
)
def java(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Java]:
    """A broker and a JVM."""
    setup: Setup = request.param
    class_path(setup.version)
    java = Java(setup, tmp_path_factory.mktemp("access"))
    with (
        broker_process(java.home / "broker", **java.settings()) as java.broker,
        java_client(java.kind(), java.broker.address, java.home / "client") as java.client,
    ):
        yield java


def _of(lines: list[Line], event: str) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def _bodies(lines: list[Line], event: str = "consumed") -> Counter[Any]:
    return Counter(line["body"] for line in _of(lines, event))


def test_what_is_allowed_works(java: Java) -> None:
    """Sends of each kind, queries, push and pull consumption, retries, order, and transactions.

    A transaction whose producer did not decide is settled by the answer to the broker's question,
    from an account that has rights on the real topic only.
    """
    runs = {name: java.client.start(name) for name in SCENARIOS}
    seen = {name: java.client.lines(run) for name, run in runs.items()}

    assert set(_bodies(seen["send"])) == {"sync-0", "sync-1", "async-0", "async-1", "one-way"}
    assert set(_bodies(seen["batch"])) == {f"batch-{number}" for number in range(5)}
    found = {f"look-up-{number}" for number in range(3)}
    assert set(_bodies(seen["look_up"], "by_offset_id")) == found
    assert set(_bodies(seen["look_up"], "by_unique_key")) == found
    assert set(_bodies(seen["look_up"], "by_key")) == found
    assert {"o-12", "o-13"} <= set(_bodies(seen["orderly"]))
    assert _bodies(seen["retry"]) == {"once": 2, "never": 2}
    assert [line["topic"] for line in _of(seen["retry"], "dead")] == [DEAD]
    assert len(_of(seen["pull"], "by_time")) == 6
    assert [line["queue_offset"] for line in _of(seen["pull"], "committed")] == [3]
    pulled = {*(f"l-{number}" for number in range(9)), "s-1", "s-2"}
    assert set(_bodies(seen["lite_pull"], "polled")) == pulled
    transactions = _bodies(seen["transactions"])
    assert transactions.pop("marker") == 4
    assert transactions == dict.fromkeys(
        ["commit", "unknown-commit", "unknown-late", "exception-commit"], 1
    )
    asked = _bodies(seen["transactions"], "checked")
    assert {"unknown-commit", "unknown-rollback", "unknown-late", "exception-commit"} == set(asked)
    assert "code=37" not in java.broker.log  # no decision was refused
    assert "java-transactions" not in "".join(
        line for line in java.broker.log.splitlines() if "access_denied" in line
    )


def test_what_is_not_allowed_is_refused_with_the_code_that_clients_expect(java: Java) -> None:
    """Without a rule, with one that denies, and for a group of somebody else."""
    code = java.setup.refusal
    topics = ("not-mine", "denied")
    attempts: list[tuple[str, ...]] = [
        (how, topic) for topic in topics for how in ("send", "async", "batch", "prepare")
    ]
    attempts += [
        ("pull", "not-mine", "java-attempt-group"),
        ("pull", "denied", "java-attempt-group"),
        ("pull", "java-shared", "not-my-group"),
    ]

    made = java.attempts(OPERATOR, *(("send", topic) for topic in (*topics, "java-shared")))
    assert made == [("allowed", 0)] * 3  # a client looks for a topic before it pulls
    refused = java.attempts(APPLICATION, *attempts)

    assert dict(zip(attempts, refused, strict=True)) == dict.fromkeys(attempts, ("refused", code))
    assert java.attempts(OTHER, ("send", "java-shared"), ("send", "java-send")) == [
        ("allowed", 0),
        ("refused", code),
    ]
    answer = java.ask(APPLICATION, RequestCode.SEND_MESSAGE, {**_send_fields("not-mine")}, "a body")
    assert answer["code"] == code
    assert APPLICATION.name in answer["text"]
    assert "Topic:not-mine" in answer["text"]
    assert APPLICATION.secret not in java.broker.log


def _send_fields(topic: str) -> dict[str, object]:
    return {
        "producerGroup": "g",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": 1,
        "flag": 0,
    }


def test_a_one_way_send_that_is_not_allowed_stores_nothing(java: Java) -> None:
    """Its sender is not told, as with each one-way request; the broker's log and count say it."""
    assert java.attempts(APPLICATION, ("one_way", "not-made")) == [("allowed", 0)]

    route = java.ask(OPERATOR, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "not-made"})
    assert route["code"] == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (Account(APPLICATION.name, "wrong-secret"), "check signature failed"),
        (STRANGER, "check signature failed"),  # the answer does not tell which names exist
        (NOBODY, ""),
    ],
    ids=["wrong-secret", "unknown", "unsigned"],
)
def test_who_does_not_sign_as_somebody_known_is_refused_everything(
    java: Java, keys: Account, reason: str
) -> None:
    """Also a route, so that the client itself says that it has none."""
    route = java.ask(keys, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "java-shared"})
    send = java.ask(keys, RequestCode.SEND_MESSAGE, _send_fields("java-shared"), "a body")

    assert (route["code"], send["code"]) == (java.setup.refusal, java.setup.refusal)
    assert reason in route["text"]
    assert reason in send["text"]
    assert java.attempts(keys, ("send", "java-shared")) == [("refused", NO_ROUTE)]


def test_a_transaction_is_decided_by_whoever_prepared_it(java: Java) -> None:
    """Another one with the right to send is refused, unless it answers the broker's question."""
    half = java.half()

    refused = java.end(OTHER, half)
    assert refused["code"] == java.setup.refusal
    assert "another principal has prepared this transaction" in refused["text"]
    forged = java.end(Account(APPLICATION.name, "wrong-secret"), half)
    assert forged["code"] == java.setup.refusal
    assert java.end(APPLICATION, half)["code"] == ResponseCode.SUCCESS

    taken_over = java.half()
    assert java.end(OTHER, taken_over, from_check=True)["code"] == ResponseCode.SUCCESS


def test_settings_groups_and_configuration_are_not_open_to_every_account(java: Java) -> None:
    """RocketMQ 5.3.3 lets any user change settings, create groups and read the configuration."""
    group = '{"groupName":"mine-now","consumeEnable":true}'
    asked: list[tuple[int, dict[str, object], str]] = [
        (RequestCode.UPDATE_BROKER_CONFIG, {}, "brokerPermission=4"),
        (RequestCode.GET_BROKER_CONFIG, {}, ""),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, group),
        (RequestCode.GET_BROKER_RUNTIME_INFO, {}, ""),
        (RequestCode.GET_ALL_TOPIC_CONFIG, {}, ""),
    ]

    answers = [java.ask(APPLICATION, code, fields, body) for code, fields, body in asked]

    assert [answer["code"] for answer in answers] == [java.setup.refusal] * len(asked)
    assert all("has no permission" in answer["text"] for answer in answers)
    allowed = java.ask(OPERATOR, RequestCode.GET_BROKER_RUNTIME_INFO, {})
    assert allowed["code"] == ResponseCode.SUCCESS
