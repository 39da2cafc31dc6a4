"""The nouns ``topic``, ``group``, ``message`` and ``config`` of the command, at a real broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from halfmq import __version__
from halfmq.client import Message
from halfmq.client.administration.settings import BrokerCalls, BrokerStatus
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.command.main import main
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.python import python


class Shell:
    """Runs the command in this process, with a broker that it knows."""

    def __init__(self, broker: BrokerProcess, capture: pytest.CaptureFixture[str]) -> None:
        self._broker, self._capture = broker, capture

    def __call__(self, *words: str, code: int = 0) -> str:
        """Return the output; fail unless it ends with this code."""
        ended = main([*words, "--namesrv", self._broker.address])
        shown = self._capture.readouterr()
        assert ended == code, shown.err
        return shown.out if code == 0 else shown.err

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def table(self, *words: str) -> list[list[str]]:
        """Return the cells of a table without its titles."""
        return [line.split() for line in self(*words).splitlines()[1:]]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("cluster")
    with broker_process(directory, messageDelayLevel="1h 1h 1h 1h") as running:
        yield running


@pytest.fixture
def halfmq(broker: BrokerProcess, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(broker, capsys)


def test_a_topic_from_its_creation_to_its_end(halfmq: Shell) -> None:
    """Created, listed, changed in one respect at a time, and deleted."""
    assert halfmq("topic", "create", "plants", "--queues", "2") == "created topic plants\n"
    assert "exists" in halfmq("topic", "create", "plants", code=1)
    halfmq("message", "send", "plants", "fern")
    (row,) = [one for one in halfmq.table("topic", "list") if one[0] == "plants"]
    assert row[1:3] == ["2", "1"]
    assert row[-3:] == ["read,", "write", "-"]

    halfmq("topic", "change", "plants", "--no-writable")
    halfmq("topic", "change", "plants", "--queues", "3")
    shown = halfmq.json("topic", "show", "plants")
    (part,) = shown["brokers"]
    assert (part["write_queues"], part["read_queues"]) == (3, 3)
    assert (part["readable"], part["writable"]) == (True, False)
    assert sum(one["end"] for one in shown["queues"]) == 1

    assert halfmq("topic", "delete", "plants") == "deleted topic plants\n"
    assert halfmq("topic", "show", "plants", code=1) == "halfmq: there is no topic plants\n"
    assert all(one["name"] != "plants" for one in halfmq.json("topic", "list"))


def test_the_brokers_own_topics_are_listed_on_request(halfmq: Shell) -> None:
    """Half messages and such would hide the user's topics."""
    plain = {one["name"] for one in halfmq.json("topic", "list")}
    every = {one["name"] for one in halfmq.json("topic", "list", "--all")}

    assert every - plain > {"RMQ_SYS_TRANS_HALF_TOPIC", "DefaultCluster", "broker-a"}
    assert not any(one.startswith(("RMQ_", "rmq_", "Default", "broker", "%")) for one in plain)
    groups = {one["name"] for one in halfmq.json("group", "list")}
    assert "TOOLS_CONSUMER" not in groups
    assert "TOOLS_CONSUMER" in {one["name"] for one in halfmq.json("group", "list", "--all")}


def test_groups_are_listed_with_members_or_without(broker: BrokerProcess, halfmq: Shell) -> None:
    """The lag counts messages and time, also of a group that nobody consumes for any more."""
    with Producer("p", namesrv=broker.address) as producer:
        for number in range(3):
            producer.send(Message("lagging", b"x", keys=str(number)))
    with Consumer("slow", {"lagging": "*"}, namesrv=broker.address) as consumer:
        message = consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        assert message.ack()
        (group,) = [one for one in halfmq.json("group", "list") if one["name"] == "slow"]
        (member,) = group["members"]
        assert member["filters"]["lagging"] == "*"

    def left() -> bool:
        shown = halfmq.json("group", "show", "slow")
        return bool(shown["members"] == [] and shown["lag"] == 2)

    wait_until(left, "its offset is not committed")
    assert halfmq.json("group", "show", "slow")["lag_seconds"] > 0
    (row,) = [one for one in halfmq.table("group", "list") if one[0] == "slow"]
    assert row[1:6] == ["-", "0", "0", "-", "2"]
    assert "there is no consumer group" in halfmq("group", "show", "nobody", code=1)


def test_a_reset_is_previewed_and_made(broker: BrokerProcess, halfmq: Shell) -> None:
    """The preview names the offsets that the reset then sets, and changes nothing."""
    halfmq("topic", "create", "again", "--queues", "1")
    with Admin(namesrv=broker.address) as admin:
        admin.create_group("again")
    halfmq("message", "send", "again", "one")
    between = datetime.now(UTC).isoformat()
    halfmq("message", "send", "again", "two")
    halfmq("group", "reset", "again", "again", "--to", "last")

    preview = halfmq.json("group", "reset", "again", "again", "--to", between, "--dry-run")
    assert [(one["from"], one["to"]) for one in preview["queues"]] == [(2, 1)]
    assert halfmq.json("group", "show", "again")["lag"] == 0
    made = halfmq.json("group", "reset", "again", "again", "--to", between)
    assert made["queues"] == preview["queues"]
    assert halfmq.json("group", "show", "again")["lag"] == 1
    assert "--to" in halfmq("group", "reset", "again", "again", "--to", "noon", code=2)

    assert halfmq("group", "delete", "again", "--offsets") == "deleted group again\n"
    assert "there is no consumer group" in halfmq("group", "delete", "again", code=1)
    assert all(one["name"] != "again" for one in halfmq.json("group", "list"))


def test_a_message_is_found_and_its_fate_known(broker: BrokerProcess, halfmq: Shell) -> None:
    """By key, id or place; consumed, waiting, retried and dead are told apart by group."""
    sent = halfmq.json("message", "send", "fates", "hello", "--keys", "k-1 k-2", "--tags", "T")
    (found,) = halfmq.json("message", "find", "fates", "k-2")
    assert found["message_id"] == sent["message_id"]
    assert (found["body"], found["tags"]) == ("hello", "T")
    with Admin(namesrv=broker.address) as admin:
        admin.create_group("waits")
        admin.reset_offsets("waits", "fates", "first")
    for group in ("takes", "retries", "rejects"):
        with Consumer(group, {"fates": "*"}, namesrv=broker.address) as consumer:
            message = consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            if group == "takes":
                assert message.ack()
            elif group == "retries":
                message.retry()
            else:
                message.reject("odd")
            consumer.stop()

    def fates() -> dict[str, str]:
        shown = halfmq.json("message", "show", sent["message_id"], "--topic", "fates")
        return {one["group"]: one["fate"] for one in shown["groups"]}

    wait_until(
        lambda: (
            fates()
            == {
                "takes": "consumed",
                "waits": "waiting",
                "retries": "retrying",
                "rejects": "dead letter",
            }
        ),
        "its fate is not known",
    )
    by_place = halfmq("message", "show", sent["offset_message_id"])
    assert "dead letter" in by_place
    assert "no broker has a message" in halfmq("message", "show", "nothing", code=1)


def test_the_latest_messages_are_browsed(halfmq: Shell) -> None:
    """The newest ones of all queues, or those from a time on; control characters do not pass."""
    halfmq("topic", "create", "browsed", "--queues", "2")
    for number in range(6):
        halfmq("message", "send", "browsed", f"n-{number}\x1b[2J")

    latest = halfmq.json("message", "browse", "browsed", "--limit", "4")
    since = halfmq.json("message", "browse", "browsed", "--since", latest[0]["stored_at"])
    shown = halfmq("message", "browse", "browsed")

    assert [one["body"][:3] for one in latest] == ["n-2", "n-3", "n-4", "n-5"]
    assert since == latest
    assert "\x1b" not in shown
    assert "n-5?[2J" in shown
    assert halfmq("message", "browse", "browsed", "--until", "2020-01-01") == (
        "topic browsed has no such messages\n"
    )


def test_a_body_comes_from_a_file(halfmq: Shell, tmp_path: Path) -> None:
    """Bytes that are no text are shown in base64."""
    file = tmp_path / "body"
    file.write_bytes(b"\xff\x00")
    sent = halfmq.json("message", "send", "files", "--file", str(file))

    shown = halfmq.json("message", "show", sent["offset_message_id"])
    assert shown["body_base64"] == "/wA="
    assert "BODY or --file" in halfmq("message", "send", "files", code=2)
    assert "cannot be read" in halfmq("message", "send", "files", "--file", "/none", code=2)


def test_a_topic_is_followed(broker: BrokerProcess) -> None:
    """Each message that is sent meanwhile is a line; Ctrl-C ends it."""
    with Admin(namesrv=broker.address) as admin, Producer("p", namesrv=broker.address) as producer:
        admin.create_topic("followed", queues=1)
        producer.send(Message("followed", b"before"))
        command = [sys.executable, "-m", "halfmq.command", "message", "tail", "followed", "--json"]
        environment = {**os.environ, "NAMESRV_ADDR": broker.address}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            os.set_blocking(tail.stdout.fileno(), False)
            lines: list[str] = []

            def seen() -> bool:
                producer.send(Message("followed", b"while"))
                lines.extend(tail.stdout or [])
                return len(lines) >= 2

            wait_until(seen, "nothing is shown")
            tail.send_signal(2)
            assert tail.wait(PATIENCE_S) == 130
    assert {json.loads(line)["body"] for line in lines} == {"while"}


def test_settings_are_read_and_changed(halfmq: Shell) -> None:
    """One that takes effect at a start only is refused with the reason."""
    assert halfmq("config", "set", "transactionCheckMax", "7") == "transactionCheckMax=7\n"
    assert halfmq("config", "get", "transactionCheckMax").split() == ["broker-a", "7"]
    assert halfmq.json("config", "get", "transactionCheckMax") == {"broker-a": 7}
    (one,) = halfmq.json("config", "list", "--filter", "checkmax")
    source = one.pop("source")
    assert source.endswith("halfmqSettings.conf")
    assert one == {
        "broker": "broker-a",
        "key": "transactionCheckMax",
        "value": 7,
        "change": "live",
    }
    shown = {cells[1]: cells[2:] for cells in halfmq.table("config", "list")}
    assert shown["listenPort"][1:] == ["restart", "--set"]
    assert shown["deleteWhen"] == ["04", "live", "default"]
    assert "listenPort" in halfmq("config", "set", "listenPort", "1", code=1)
    assert "no broker has a setting" in halfmq("config", "get", "nothing", code=1)


def test_the_log_level_is_changed_while_it_runs(broker: BrokerProcess, halfmq: Shell) -> None:
    """For a minute, without a restart."""
    assert " DEBUG " not in broker.log
    halfmq("config", "set", "logLevel", "DEBUG")
    halfmq("topic", "create", "debugged")
    wait_until(lambda: " DEBUG halfmq." in broker.log, "nothing is logged at DEBUG")
    halfmq("config", "set", "logLevel", "INFO")


def test_whatever_waits_is_listed_and_cancelled(broker: BrokerProcess, halfmq: Shell) -> None:
    """Messages with a time, with a delay level, retries; by topic and time."""
    with Producer("p", namesrv=broker.address) as producer:
        producer.send(Message("meals", b"retried", keys="retried"))
        with Consumer("cooks", {"meals": "*"}, namesrv=broker.address) as consumer:
            message = consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            message.retry(timedelta(hours=2))
        producer.send(Message("meals", b"level", keys="level", delay_level=1))
        producer.send(Message("meals", b"timed", keys="timed", deliver_after=timedelta(hours=3)))

    def waiting(topic: str) -> dict[str, Any]:
        return {one["keys"]: one for one in halfmq.json("delayed", "list", "--topic", topic)}

    found = {**waiting("meals"), **waiting("%RETRY%cooks")}
    assert list(found) == ["level", "timed", "retried"]
    for keys, hours in (("level", 1), ("retried", 2), ("timed", 3)):
        due, stored = (datetime.fromisoformat(found[keys][n]) for n in ("deliver_at", "stored_at"))
        assert abs(due - stored - timedelta(hours=hours)) < timedelta(seconds=1)
        assert halfmq("delayed", "cancel", found[keys]["recall_handle"]).startswith("cancelled")
    assert {**waiting("meals"), **waiting("%RETRY%cooks")} == {}


def test_the_version_is_that_of_the_package() -> None:
    """Without a broker."""
    done = python("-m", "halfmq", "--version", check=True)
    assert done.stdout == f"{__version__}\n" == "0.1.0\n"


def test_the_doctor_warns_of_delayed_messages_without_a_topic(
    halfmq: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait on, so that an operator can make room for their topic."""
    statuses = BrokerCalls.broker_statuses

    async def changed(admin: BrokerCalls) -> list[BrokerStatus]:
        return [
            replace(one, metrics={**one.metrics, "halfmq.delays.put_off": "3"})
            for one in await statuses(admin)
        ]

    monkeypatch.setattr(BrokerCalls, "broker_statuses", changed)
    (found,) = [one for one in halfmq.json("doctor") if "cannot be delivered" in one["text"]]

    assert (found["level"], found["text"].split()[0]) == ("warning", "3")
    assert "destination_lacking" in found["remedy"]


def test_the_doctor_names_what_is_wrong_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A healthy broker has no finding but ok; each fault then has one."""
    with broker_process(tmp_path, transactionTimeOut=200, transactionCheckMax=1) as broker:
        halfmq = Shell(broker, capsys)
        # Of a machine whose disk is nearly full it says so.
        found = [one for one in halfmq.json("doctor") if "of its disk" not in one["text"]]
        assert {one["level"] for one in found} == {"ok"}
        with Producer("p", namesrv=broker.address) as producer:
            producer.send(Message("t", b"x"))
        with Admin(namesrv=broker.address) as admin:
            admin.create_group("left")
            admin.reset_offsets("left", "t", "first")
        named = {(one["level"], one["subject"]): one for one in halfmq.json("doctor")}
        waiting = named["warning", "group left"]
        assert re.fullmatch(r"lags 1 messages, \d+ s: no consumer is connected", waiting["text"])
        assert "start a consumer" in waiting["remedy"]

        broker.restart(diskMaxUsedSpaceRatio=10, diskSpaceWarningLevelRatio=10)
        wait_until(
            lambda: "refuses messages" in _said(broker, "doctor"), "a full disk is not found"
        )
        assert main(["doctor", "--namesrv", broker.address]) == 1


def test_the_doctor_names_missing_permissions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its remedy, and it goes on with what it may ask."""
    owner = {"username": "owner", "password": "secret"}
    with broker_process(
        tmp_path,
        authenticationEnabled="true",
        authorizationEnabled="true",
        initAuthenticationUser=json.dumps(owner),
    ) as broker:
        with Admin(namesrv=broker.address, access_key="owner", secret_key="secret") as admin:
            admin.create_user("guest", "guest-secret")
        monkeypatch.setenv("HALFMQ_ACCESS_KEY", "guest")
        monkeypatch.setenv("HALFMQ_SECRET_KEY", "guest-secret")
        assert main(["doctor", "--json", "--namesrv", broker.address]) == 1
        found = json.loads(capsys.readouterr().out)
    problems = [one for one in found if one["level"] == "problem"]
    assert [one["subject"].split()[0] for one in problems] == ["broker", *["permissions"] * 2]
    assert all("halfmq acl create" in one["remedy"] for one in problems)


def _said(broker: BrokerProcess, *words: str) -> str:
    environment = {**os.environ, "NAMESRV_ADDR": broker.address}
    return python("-m", "halfmq.command", *words, env=environment).stdout


def test_a_quick_figure_leaves_nothing(halfmq: Shell) -> None:
    """It names both rates; its topic and group are gone."""
    figures = halfmq.json("bench", "--messages", "200")

    assert figures["sent_per_second"] > 0
    assert figures["received_per_second"] > 0
    assert not any("bench" in one["name"] for one in halfmq.json("topic", "list"))
    assert not any("bench" in one["name"] for one in halfmq.json("group", "list"))


def test_the_broker_runs_by_the_same_command(tmp_path: Path) -> None:
    """``halfmq broker run`` takes the options of ``broker`` and ends by its signals."""
    words = ["listenPort=0", "namesrvListenPort=0", "httpListenPort=-1"]
    sets = [part for word in (*words, f"storePathRootDir={tmp_path}") for part in ("--set", word)]
    command = [sys.executable, "-m", "halfmq.command", "broker", "run", *sets]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("ready listen=127.0.0.1:")
        running.terminate()
        assert running.wait(PATIENCE_S) == 0
