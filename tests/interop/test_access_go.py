"""The official Go client v2.1.2 with access keys and with users; it does not speak TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.access import Account
from tests.support.access_files import (
    APPLICATION,
    STRANGER,
    Policy,
    deny,
    user_settings,
    write_plain_acl,
    write_users,
)
from tests.support.go_client import Line, go_client, run_go

pytestmark = pytest.mark.campaign

TOPICS = ("go-send", "go-retry", "go-transactions")
ACCOUNTS: list[tuple[Account, dict[str, Any]]] = [
    (
        APPLICATION,
        {
            "topicPerms": [*(f"{name}=PUB|SUB" for name in TOPICS), "go-denied=DENY"],
            "groupPerms": [f"{name}-consumer=SUB" for name in TOPICS],
        },
    )
]
USERS = [
    (
        APPLICATION,
        [
            Policy("Topic:go-*", "Pub,Sub"),
            Policy("Group:go-*", "Sub"),
            deny("Topic:go-denied", "Pub,Sub"),
        ],
    )
]


@pytest.fixture(scope="module", params=["plain-acl", "users"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """A broker that asks who sends."""
    go_client()
    home = tmp_path_factory.mktemp("go")
    settings: dict[str, object] = {
        "messageDelayLevel": "1s 1s 1s 1s",
        "transactionTimeOut": 2000,
        "transactionCheckInterval": 2000,
    }
    if request.param == "users":
        write_users(home / "broker" / "store", USERS)
        settings |= user_settings()
    else:
        file = write_plain_acl(home / "plain_acl.yml", ACCOUNTS)
        settings |= {"aclEnable": "true", "plainAclFile": file}
    with broker_process(home / "broker", **settings) as running:
        yield running


def _bodies(lines: list[Line], event: str) -> set[str]:
    return {line["body"] for line in lines if line["event"] == event}


def test_what_is_allowed_works(broker: BrokerProcess, tmp_path: Path) -> None:
    """Sends of each kind, retries, and transactions that the broker has to ask about."""
    seen = {
        name: run_go(broker.address, name, tmp_path, keys=APPLICATION)
        for name in ("send", "retry", "transactions")
    }

    singles = {"sync-0", "sync-1", "async", "one-way", "a" * 6000}
    assert _bodies(seen["send"], "consumed") == singles | {f"batch-{i}" for i in range(3)}
    retried = [line["times"] for line in seen["retry"] if line["event"] == "consumed"]
    assert retried == [0, 1]
    consumed = _bodies(seen["transactions"], "consumed")
    assert consumed == {"commit", "unknown-commit", "marker"}
    checked = _bodies(seen["transactions"], "checked")
    assert checked == {"unknown-commit", "unknown-rollback"}


def test_what_is_not_allowed_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    """The client shows the remark, with subject, action and resource."""
    lines = run_go(broker.address, "refused", tmp_path, keys=APPLICATION)

    told = {(line["event"], line["topic"]): line["error"] for line in lines}
    for event in ("sync", "async"):
        assert told[event, "go-send"] == "<nil>"
        for topic in ("go-denied", "not-mine"):
            assert APPLICATION.name in told[event, topic]
            assert f"no permission to Pub Topic:{topic}" in told[event, topic]


@pytest.mark.parametrize(
    "keys",
    [Account(APPLICATION.name, "wrong-secret"), STRANGER, Account("", "")],
    ids=["wrong-secret", "unknown", "unsigned"],
)
def test_who_does_not_sign_as_somebody_known_learns_no_route(
    broker: BrokerProcess, tmp_path: Path, keys: Account
) -> None:
    lines = run_go(broker.address, "refused", tmp_path, keys=keys)

    assert len(lines) == 6
    assert all(line["error"] != "<nil>" for line in lines), lines
