"""The README's examples run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client.blocking import Decision, Message, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _environment(broker: BrokerProcess, home: Path) -> dict[str, str]:
    """What a shell would have, but for the port: the test does not count on 9876 being free."""
    return {
        **os.environ,
        "NAMESRV_ADDR": broker.address,
        "HOME": str(home),
        "PYTHONUNBUFFERED": "1",
    }


def test_the_first_screen_has_the_two_commands() -> None:
    """One installs and starts the broker, one installs and runs the tests."""
    set_up = [block.strip() for block in _blocks("bash")[:2]]

    assert set_up == [
        "pip install . && broker --conf conf/broker.conf",
        "pip install -e '.[test]' && pytest",
    ]
    assert README.index(set_up[1]) < len("\n".join(README.splitlines()[:25]))


def test_it_can_be_read_in_one_go() -> None:
    """A README that nobody finishes protects nobody."""
    assert len(README.splitlines()) < 150


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose data lie where the README says, under a home directory of the test."""
    with broker_process(
        tmp_path / "broker", storePathRootDir=tmp_path / ".halfmq" / "store"
    ) as running:
        yield running


def test_the_examples_send_consume_and_commit(broker: BrokerProcess, tmp_path: Path) -> None:
    """Pasted as they stand: the message is consumed, and the row and its message both exist.

    Ctrl-C ends the consumer without a traceback.
    """
    asynchronous, blocking = _blocks("python")

    process = subprocess.Popen(
        [sys.executable, "-c", asynchronous],
        cwd=tmp_path,
        env=_environment(broker, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)  # the example goes on waiting for messages
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert re.fullmatch(r"[0-9A-F]{32,56} \S+ 0\n", first)
    assert second == "b'hello'\n"
    assert (process.returncode, errors) == (130, "")

    done = subprocess.run(
        [sys.executable, "-c", blocking],
        cwd=tmp_path,
        env=_environment(broker, tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "SEND_OK\n3 halves, nobody has seen them\n",
    ), done.stderr


def test_the_operators_line_runs(broker: BrokerProcess, tmp_path: Path) -> None:
    """Pasted into a shell, it tells of a transaction that nobody has decided."""
    line = next(block for block in _blocks("bash") if block.startswith("halfmq "))
    installed = tmp_path / "bin" / "halfmq"
    installed.parent.mkdir()
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m halfmq.command "$@"\n')
    installed.chmod(0o755)
    environment = _environment(broker, tmp_path)
    environment["PATH"] = f"{installed.parent}{os.pathsep}{environment['PATH']}"

    def unknown(_message: object) -> Decision:
        return Decision.UNKNOWN

    with TransactionProducer("orders-tx", unknown, namesrv=broker.address) as producer:
        with producer.transaction(Message("orders", b"o-5", keys="o-5")) as transaction:
            transaction.decide(Decision.UNKNOWN)
        done = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    assert "o-5" in done.stdout
    assert re.search(r"halfmq\.transactions\.pending +1\n", done.stdout)


def test_the_audit_line_runs_on_the_live_directory(broker: BrokerProcess, tmp_path: Path) -> None:
    """The line after the installation, pasted into a shell, finds the store and calls it clean."""
    asynchronous = _blocks("python")[0]
    line = next(block for block in _blocks("bash") if "audit" in block).partition("&& ")[2]
    environment = _environment(broker, tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", asynchronous],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "hello" in process.stdout.readline() + process.stdout.readline()
        process.kill()

    done = subprocess.run(
        line.replace("python ", f"{sys.executable} "),
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "committed" in done.stdout
