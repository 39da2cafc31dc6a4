"""A broker whose directory or disk is lost acknowledges nothing more, says so, and ends with 4."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.broker.cli import ExitCode
from halfmq.client import BrokerRefusedError, ClientConfig, Message, Producer
from halfmq.client.blocking import Producer as BlockingProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S

SENDS = 20  # in flight while the disk fails


def rename(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def remove_lock(root: Path) -> None:
    (root / "lock").unlink()


def wait_for_end(broker: BrokerProcess) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while broker.running:
        assert time.monotonic() < deadline, "the broker goes on"
        time.sleep(0.01)


@pytest.mark.parametrize("lose", [rename, shutil.rmtree, remove_lock])
def test_a_broker_that_loses_its_directory_ends_and_writes_nothing(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    """It ends by itself, with the reason; what another broker could open stays as it is."""
    root = tmp_path / "store"
    with broker_process(tmp_path) as broker:
        with BlockingProducer("senders", namesrv=broker.address) as producer:
            producer.send(Message("orders", b"kept"))
        lose(root)
        wait_for_end(broker)
        assert broker.stop() == ExitCode.STORE_UNUSABLE

    assert "event=store_failed" in broker.log
    assert "was removed, renamed or replaced" in broker.log
    assert lose is remove_lock or not root.exists()
    assert not (root / "config" / "subscriptionGroup.json").exists()  # written by an ordered stop


def test_a_second_broker_takes_a_store_over_without_loss(tmp_path: Path) -> None:
    """After the file `lock` was removed, the first broker ends before the second one serves."""
    settings = {"storePathRootDir": tmp_path / "store"}
    with broker_process(tmp_path / "first", **settings) as first:
        with BlockingProducer("senders", namesrv=first.address) as producer:
            producer.send(Message("orders", b"one"))
        remove_lock(tmp_path / "store")
        with broker_process(tmp_path / "second", **settings) as second:
            with BlockingProducer("senders", namesrv=second.address) as producer:
                sent = producer.send(Message("orders", b"two"))
            wait_for_end(first)
            assert sent.message_id
            second.kill()
            second.start()
            assert second.stop() == ExitCode.STOPPED


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_no_usual_signal_ends_a_broker_out_of_order(tmp_path: Path, number: signal.Signals) -> None:
    """A closed terminal stops it in order; signals for users are ignored."""
    with broker_process(tmp_path) as broker:
        os.kill(broker.pid, number)
        if number is signal.SIGHUP:
            wait_for_end(broker)
        assert broker.stop() == ExitCode.STOPPED

    assert "clean=True" in broker.log
    assert ("event=signal_ignored" in broker.log) == (number is not signal.SIGHUP)


FAILING = """
import os, sys
from pathlib import Path
from halfmq.store.files import disk
from halfmq.broker.cli import main
fails = Path(sys.argv[1])
def fdatasync(fd):
    if fails.exists() and "commitlog" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(5, "Input/output error")
    os.fdatasync(fd)
disk.fdatasync = fdatasync
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors in /proc")
def test_sends_in_flight_are_refused_when_a_flush_fails(tmp_path: Path) -> None:
    """At once and with the reason, not by silence; the broker's exit code says so, too."""
    settings = {"storePathRootDir": tmp_path / "store", "listenPort": 0, "namesrvListenPort": 0}
    arguments = [part for item in settings.items() for part in ("--set", f"{item[0]}={item[1]}")]
    child = subprocess.Popen(
        [sys.executable, "-c", FAILING, str(tmp_path / "fails"), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    ready = child.stdout.readline()
    config = ClientConfig(
        namesrv=ready.split("namesrv=")[1].split()[0],
        send_attempts_max=1,
        send_timeout=PATIENCE_S,
    )

    async def send() -> list[BaseException | object]:
        async with Producer("senders", config=config) as producer:
            await producer.send(Message("orders", b"first"))
            (tmp_path / "fails").touch()
            messages = [producer.send(Message("orders", b"x")) for _ in range(SENDS)]
            return await asyncio.gather(*messages, return_exceptions=True)

    try:
        answers = asyncio.run(send())
    finally:
        child.terminate()
        assert child.wait(PATIENCE_S) == ExitCode.STORE_UNUSABLE
        child.stdout.close()

    for answer in answers:
        assert isinstance(answer, BrokerRefusedError)
        assert "flush failed" in str(answer)
