"""``halfmq store`` as a process of its own, on the directory of a broker that is at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from halfmq.client.blocking import Message, Producer, TransactionProducer
from halfmq.client.message import Decision
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S
from tests.support.python import python

SETTINGS = {"mappedFileSizeCommitLog": 65_536, "maxHashSlotNum": 1000, "maxIndexNum": 4000}


def halfmq(*words: object, code: int = 0) -> str:
    """Run the command and return what it prints."""
    done = python("-m", "halfmq.command", "store", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def verified(root: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(halfmq("verify", root, "--json"))
    return report


class Load:
    """A producer of messages and transactions that works until it is stopped."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.sent = 0
        self.failure: BaseException | None = None
        self._broker = broker
        self._stopping = threading.Event()
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            with self._progress:
                self.failure = error
                self._progress.notify_all()

    def _send(self) -> None:
        address = self._broker.address
        with (
            Producer("load", namesrv=address) as producer,
            TransactionProducer("load-tx", lambda _: Decision.COMMIT, namesrv=address) as decider,
        ):
            while not self._stopping.is_set():
                keys = f"key-{self.sent}"
                producer.send(Message("load", b"x" * (1 + self.sent % 900), tags="a", keys=keys))
                with decider.transaction(Message("decided", b"y", keys=keys)):
                    pass
                with self._progress:
                    self.sent += 1
                    self._progress.notify_all()

    def reach(self, count: int) -> None:
        """Return when so many messages were sent."""
        with self._progress:
            assert self._progress.wait_for(lambda: self.sent >= count or self.failure, PATIENCE_S)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose files roll every few messages."""
    with broker_process(tmp_path / "broker", **SETTINGS) as running:
        yield running


def root_of(broker: BrokerProcess) -> Path:
    found_all = broker.directory.rglob("commitlog")
    (found,) = (path for path in found_all if path.parent.name != "digests")
    return found.parent


def test_a_store_at_work_is_verified_dumped_and_copied(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """Under load nothing looks damaged, and the copy is a store of its own."""
    root = root_of(broker)
    with Load(broker) as load:
        before = load.sent
        reports = [verified(root) for _ in range(3)]
        copied = json.loads(
            halfmq("copy", root, tmp_path / "copy", "--queues", "--config", "--json")
        )
        lines = halfmq("dump", root, "--json", "--topic", "load").splitlines()
        load.reach(before + 20)  # it goes on

    assert [report["sound"] for report in reports] == [True] * 3, reports
    assert {report["state"] for report in reports} == {"open"}
    assert [json.loads(line)["queue_offset"] for line in lines]
    copy = verified(tmp_path / "copy")
    assert copy["log"]["end_offset"] == copied["end_offset"] >= reports[-1]["log"]["end_offset"]
    assert copy["tables"] > 0

    broker.stop()
    closed = verified(root)
    assert (closed["state"], closed["sound"]) == ("closed", True)
    assert closed["damage"]["counts"] == closed["notes"]["counts"] == {}
    assert closed["log"]["records"] > copy["log"]["records"]


def test_a_copy_starts_another_broker(broker: BrokerProcess, tmp_path: Path) -> None:
    """With the log alone, from which everything else follows."""
    with Load(broker) as load:
        load.reach(50)
    copied = tmp_path / "second" / "store"
    copied.parent.mkdir()
    halfmq("copy", root_of(broker), copied)
    with broker_process(tmp_path / "second", storePathRootDir=copied, **SETTINGS) as second:
        with Producer("load", namesrv=second.address) as producer:
            producer.send(Message("load", b"goes on"))
        second.stop()

    assert verified(copied)["log"]["records"] > 50


def test_a_dump_ends_quietly_when_nobody_reads(broker: BrokerProcess) -> None:
    """`halfmq store dump DIR | head` is no error."""
    with Load(broker) as load:
        load.reach(5)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "halfmq.command", "store", "dump", str(root_of(broker))],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")
