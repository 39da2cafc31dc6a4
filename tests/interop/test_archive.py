"""A broker with an archive: consumers of old messages, kills, and what is made of the archive."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client import ClientConfig, Message
from halfmq.client.blocking import Admin, Consumer, Producer, SqlFilter
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.command.main import main
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.replies import encode_request
from tests.support.archives import BUCKET, S3_ENVIRONMENT, s3_server
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
LOG_FILE = 1 << 16
SETTINGS = {
    "mappedFileSizeCommitLog": LOG_FILE,
    "mappedFileSizeConsumeQueue": 400,  # bytes: twenty messages
    "fileReservedTime": 0,
}
COUNT = 300  # messages of about a kilobyte
TOPIC = "old|%er"  # a name that needs care in URLs


@pytest.fixture(params=["file", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Yield the URL of an empty archive."""
    if request.param == "file":
        yield f"file://{tmp_path / 'archive'}"
        return
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        yield f"s3://{BUCKET}/archive"


def fill(broker: BrokerProcess, topic: str = TOPIC) -> list[bytes]:
    """Send messages, every other one with the tag b; return their bodies."""
    bodies = [f"{number:0>1000}".encode() for number in range(COUNT)]
    with Admin(namesrv=broker.address) as admin:
        admin.create_topic(topic, queues=2)
    with Producer("writers", namesrv=broker.address) as producer:
        for number, body in enumerate(bodies):
            named = {"n": f"{number}"}
            producer.send(Message(topic, body, tags="ab"[number % 2], properties=named))
    return bodies


def delete_old(broker: BrokerProcess) -> None:
    """Return when old files are archived and deleted."""
    port = int(broker.address.rpartition(":")[2])

    def are_deleted() -> bool:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(encode_request(RequestCode.DELETE_EXPIRED_COMMITLOG, opaque=1))
            assert connection.recv(4096)
        return first_file(broker) >= 3 * LOG_FILE

    wait_until(are_deleted, "nothing is deleted")


def first_file(broker: BrokerProcess) -> int:
    """Return where the log begins."""
    return min(int(path.name) for path in Path(broker.ready["store"], "commitlog").iterdir())


def consumed(
    broker: BrokerProcess, group: str, count: int, wanted: str | SqlFilter = "*"
) -> Counter[bytes]:
    """Return the first messages that a new group gets."""
    found = Counter[bytes]()
    with Consumer(group, {TOPIC: wanted}, namesrv=broker.address, start_from="first") as consumer:
        while found.total() < count:
            message = consumer.receive(PATIENCE_S)
            assert message is not None, (found.total(), broker.log[-2000:])
            found[message.body] += 1
            message.ack()
    return found


def test_consumers_read_what_is_only_in_the_archive(tmp_path: Path, url: str) -> None:
    """From the first message on, by tag or filter, and after a restart; each comes once."""
    with broker_process(tmp_path, archiveUrl=url, **SETTINGS) as broker:
        bodies = fill(broker)
        delete_old(broker)
        with Admin(namesrv=broker.address) as admin:
            assert all(queue.first == 0 for queue in admin.queues(TOPIC))
        assert consumed(broker, "all", COUNT) == Counter(bodies)
        assert consumed(broker, "tagged", COUNT // 2, "b") == Counter(bodies[1::2])
        assert consumed(broker, "sql", 10, SqlFilter("n < 10")) == Counter(bodies[:10])
        broker.restart()
        assert first_file(broker) >= 3 * LOG_FILE
        assert consumed(broker, "later", COUNT) == Counter(bodies)


@pytest.mark.campaign
def test_official_consumers_read_it(tmp_path: Path) -> None:
    """Java's push consumer, and the pull consumer of the C++ client in Python."""
    kind = Kind("5.3.3")
    class_path(kind.version)
    url = f"file://{tmp_path / 'archive'}"
    with broker_process(tmp_path, archiveUrl=url, **SETTINGS) as broker:
        bodies = fill(broker)
        delete_old(broker)
        with java_client(kind, broker.address, tmp_path / "java") as java:
            lines = java.run("consume", TOPIC, "*", COUNT)
        found = [one["crc"] for one in lines if one["event"] == "consumed"]
        assert sorted(found) == sorted(map(zlib.crc32, bodies))

        command = [sys.executable, "-m", "tests.support.cpp_client", broker.address, "read", TOPIC]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        texts = [json.loads(line)["consumed"]["body"] for line in done.stdout.splitlines()]
        assert sorted(texts) == [body.decode() for body in bodies]


def test_a_dead_archive_delays_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old messages wait for it and come once; new ones are sent and consumed meanwhile."""
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # it never answers
        s3_server() as endpoint,
    ):
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        with broker_process(tmp_path, archiveUrl=f"s3://{BUCKET}/a", **SETTINGS) as broker:
            bodies = fill(broker)
            delete_old(broker)
            broker.stop()
            monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            broker.start()
            config = ClientConfig(namesrv=broker.address)
            with (
                Consumer("old", {TOPIC: "*"}, config=config, start_from="first") as old,
                Consumer("new", {"new": "*"}, config=config) as new,
                Producer("writers", config=config) as producer,
            ):
                wait_until(lambda: "archived_pull_failed" in broker.log, "it has an answer")
                for number in range(20):
                    producer.send(Message("new", b"%d" % number))
                    assert new.receive(PATIENCE_S) is not None
                assert old.receive(0.1) is None
            broker.stop()
            monkeypatch.setenv("AWS_ENDPOINT", endpoint)
            broker.start()
            assert consumed(broker, "old", COUNT) == Counter(bodies)


def test_a_killed_broker_archives_everything(tmp_path: Path) -> None:
    """By ``kill -9`` while it uploads; afterwards a store made of the archive is sound."""
    url = f"file://{tmp_path / 'archive'}"
    archived, sent = tmp_path / "archive" / "commitlog", list[bytes]()
    with broker_process(tmp_path, archiveUrl=url, **SETTINGS) as broker:
        for number in range(3):
            sent += fill(broker)
            end = (number + 1) * 3 * LOG_FILE
            wait_until((archived / f"{end:020d}").exists, "it is not uploaded")
            broker.kill()
            broker.start()
        log = Path(broker.ready["store"], "commitlog")
        full = sorted(log.iterdir())[-3]  # the last one may have been made ahead
        wait_until((archived / full.name).exists, "it is not archived")
        assert consumed(broker, "all", len(sent)) == Counter(sent)
        broker.stop()
    assert main(["store", "restore", url, str(tmp_path / "restored")]) == 0
    assert main(["store", "verify", str(tmp_path / "restored")]) == 0
    restored = sorted((tmp_path / "restored" / "commitlog").iterdir())
    assert restored[-1].name >= full.name
    for path in restored:
        assert path.read_bytes() == (log / path.name).read_bytes()


def test_a_restored_store_is_served(tmp_path: Path) -> None:
    """All of the archive, which is then continued; what was in the open file is not there."""
    url = f"file://{tmp_path / 'archive'}"
    restore = ["store", "restore", url, str(tmp_path / "two" / "store")]
    with broker_process(tmp_path / "one", archiveUrl=url, **SETTINGS) as broker:
        bodies = fill(broker)
        delete_old(broker)
    assert main(restore) == 0
    assert main(restore) == 2  # it is there already
    log = tmp_path / "two" / "store" / "commitlog"
    count = len(list(log.iterdir())) * (LOG_FILE // 1_400)
    with broker_process(tmp_path / "two", archiveUrl=url, **SETTINGS) as broker:
        found = consumed(broker, "all", count)
        assert found == Counter(bodies) & found
        fill(broker, "more")
        last = sorted(log.iterdir())[-3]
        wait_until((tmp_path / "archive" / "commitlog" / last.name).exists, "it is not continued")
