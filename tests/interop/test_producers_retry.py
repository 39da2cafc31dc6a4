"""Official producers repeat sends that a broker refuses, or that die with it: no caller notices."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from halfmq.client.blocking import Admin
from halfmq.client.testing import BrokerProcess
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import SendMessageRequestHeader
from tests.support.broker_pair import (
    accept_messages,
    broker_pair,
    filling_broker,
    refuse_messages,
    refused_messages,
)
from tests.support.fake_broker import Refuse, fake_broker
from tests.support.features import feature
from tests.support.go_client import go_client, going
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
CLIENTS = ["Java 5.3.3", "Java 4.9.8", "Go 2.1.2", "C++ 0.4.4"]
MANY = 100_000
"""Retries of a producer that shall never give up."""
QUEUES = 4

pytestmark = pytest.mark.campaign

Sent = Callable[[], dict[str, Any]]
"""Waits for the next message that a client has sent. If a send fails, the client ends instead."""


@contextmanager
def retrying(client: str, namesrv: str, topic: str, retries: int, home: Path) -> Iterator[Sent]:
    """A client that sends one message after the other, for the length of the block."""
    language, version = client.split()
    if language == "Java":
        class_path(version)
    if language == "Go":
        go_client()
    if language == "Java":
        with java_client(Kind(version), namesrv, home / "java") as java:
            run = java.start("retrying", topic, retries)
            yield lambda: java.said(run, "sent")
    elif language == "Go":
        with going(namesrv, home, "retrying", topic, str(retries)) as go:
            yield go.next
    else:
        with _cpp(namesrv, topic, home) as sent:
            yield sent


@contextmanager
def _cpp(namesrv: str, topic: str, home: Path) -> Iterator[Sent]:
    """The C++ client; it has no setting for retries."""
    with _running(namesrv, home, "retrying", topic) as process:
        assert process.stdout is not None
        said = (json.loads(line) for line in process.stdout if line.startswith("{"))
        yield lambda: next(said)


@contextmanager
def _running(namesrv: str, home: Path, *scenario: str) -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("rocketmq", reason="the wheel is for Linux; the C++ client is NOT tested")
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.cpp_client", namesrv, *scenario],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@feature(
    "a send that is refused is repeated at another queue", "Java 5.3.3", "Java 4.9.8", "Go 2.1.2"
)
@pytest.mark.parametrize("client", CLIENTS[:3])
def test_a_refused_send_is_repeated_at_the_next_queue(client: str, tmp_path: Path) -> None:
    """As often as the client is set to, until the broker has space again."""
    with (
        filling_broker(tmp_path / "b") as broker,
        Admin(namesrv=broker.address) as admin,
    ):
        admin.create_topic("orders", queues=QUEUES)
        with retrying(client, broker.address, "orders", MANY, tmp_path) as sent:
            queues = [sent()["queue"]]
            refuse_messages(broker)
            wait_until(lambda: refused_messages(broker) >= QUEUES, "it is asked again")
            accept_messages(broker)
            refused = refused_messages(broker)
            stored = sum(one.end for one in admin.queues("orders"))
            while len(queues) <= stored:  # one of them was sent when all was over
                queues.append(sent()["queue"])

    # Each attempt, refused or not, goes to the queue after that of the one before.
    assert (queues[-1] - queues[0]) % QUEUES == (len(queues) - 1 + refused) % QUEUES


@feature("a send that is refused is repeated at another queue", "C++ 0.4.4")
def test_the_cpp_client_repeats_a_refused_send(tmp_path: Path) -> None:
    """It sends it three times, which no setting changes; then it tells its caller."""
    with filling_broker(tmp_path / "b") as broker:
        with Admin(namesrv=broker.address) as admin:
            admin.create_topic("orders", queues=QUEUES)
        with retrying("C++ 0.4.4", broker.address, "orders", 0, tmp_path) as sent:
            sent()
            refuse_messages(broker)
            with pytest.raises(StopIteration):
                _read_all(sent)
        assert refused_messages(broker) == 3


async def test_the_cpp_client_skips_a_queue_between_attempts(tmp_path: Path) -> None:
    """Every other attempt of its is for another broker; of a chosen queue it tries only that one.

    A broker that refuses stores no queue, so a double tells which ones are tried.
    """
    async with fake_broker() as broker:
        broker.create_topic("orders", QUEUES)
        broker.fail(RequestCode.SEND_MESSAGE, *[Refuse(ResponseCode.SYSTEM_ERROR)] * 6)
        with _running(broker.address, tmp_path, "repeated") as client:
            assert await asyncio.to_thread(client.wait, PATIENCE_S) == 0
        tried = broker.requests_of(RequestCode.SEND_MESSAGE)

    queues = [cast("SendMessageRequestHeader", one.header).queue_id for one in tried]
    assert queues == [0, 2, 0, 1, 1]  # `send_orderly` has three retries, but half are not sent


def _read_all(sent: Sent) -> None:
    while True:
        sent()


@feature(
    "a broker refuses or dies: its producers retry at another",
    *("Java 5.3.3", "Java 4.9.8", "Go 2.1.2", "C++ 0.4.4"),
)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("loss", [refuse_messages, BrokerProcess.kill])
def test_sends_go_on_at_another_broker(
    client: str, loss: Callable[[BrokerProcess], None], tmp_path: Path
) -> None:
    """Clients know the route by the lost broker for another 30 s; no send fails."""
    # The Go client tries one queue after the other, also if their broker is dead.
    retries = 2 * QUEUES if client.startswith("Go") else 2
    with broker_pair(tmp_path) as pair, Admin(namesrv=pair.namesrv) as admin:
        admin.create_topic("orders", queues=QUEUES)
        pair.wait_for_routes("orders", set(pair.brokers))
        with retrying(client, pair.namesrv, "orders", retries, tmp_path) as sent:
            while any(one.end == 0 for one in admin.queues("orders")):
                sent()
            loss(pair.brokers["halfmq-b"])
            for _ in range(4 * QUEUES):
                sent()
