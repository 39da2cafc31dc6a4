"""The C++ client (PyPI wheel `rocketmq` 0.4.4) with access keys; it does not speak TLS."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.access import Account
from tests.support.access_files import APPLICATION, write_plain_acl
from tests.support.python import python

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        importlib.util.find_spec("rocketmq") is None,
        reason="the wheel rocketmq 0.4.4 exists for Linux on x86-64 only; the C++ client is NOT "
        "tested",
    ),
]

RIGHTS = {
    "topicPerms": [
        *(f"cpp{name}=PUB|SUB" for name in ("", "-batch", "-order", "-retry", "-pull")),
        "cpp-denied=DENY",
    ],
    "groupPerms": [f"cpp{name}-consumer=SUB" for name in ("", "-batch", "-retry", "-pull")],
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a plain ACL."""
    home = tmp_path_factory.mktemp("cpp")
    file = write_plain_acl(home / "plain_acl.yml", [(APPLICATION, RIGHTS)])
    settings = {"messageDelayLevel": "1s 1s 1s 1s", "aclEnable": "true", "plainAclFile": file}
    with broker_process(home / "broker", **settings) as running:
        yield running


def _run(broker: BrokerProcess, scenario: str, home: Path, keys: Account) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "HALFMQ_ACCESS_KEY": keys.name,
        "HALFMQ_SECRET_KEY": keys.secret,
    }
    done = python(
        "-m", "tests.support.cpp_client", broker.address, scenario, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr + broker.log
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("scenario", "bodies"),
    [
        ("send_and_consume", {"m-0", "m-1", "m-3", "m-4", "m-5"}),
        ("batch", {"b-0", "b-1", "b-2"}),
        ("retry", {"again"}),
        ("pull", {"p-0", "p-1", "p-2", "p-3"}),
    ],
)
def test_what_is_allowed_works(
    broker: BrokerProcess, tmp_path: Path, scenario: str, bodies: set[str]
) -> None:
    """Sends, push and pull consumption, and messages that are sent back."""
    lines = _run(broker, scenario, tmp_path, APPLICATION)

    assert {line["consumed"]["body"] for line in lines if "consumed" in line} == bodies


def test_what_is_not_allowed_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    """By a rule that denies, without one, and with a wrong secret."""
    lines = _run(broker, "refused", tmp_path, APPLICATION)
    forged = _run(broker, "refused", tmp_path, Account(APPLICATION.name, "wrong-secret"))

    assert [line["topic"] for line in lines if line["kind"] is None] == ["cpp"]
    assert [line["topic"] for line in forged if line["kind"] is None] == []
