"""A rolling restart of two brokers fails no send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
import pytest

from halfmq.client import Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.command.main import main
from tests.support.broker_pair import broker_pair
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import PATIENCE_S, wait_until


class Sending:
    """A thread that sends one message after the other until it is told to end, or one fails."""

    def __init__(self, send: Callable[[bytes], None], name: bytes) -> None:
        self.sent: list[bytes] = []
        self.failure: Exception | None = None
        self._send, self._name = send, name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.wait(0.002):
                body = b"%s-%d" % (self._name, len(self.sent))
                self._send(body)
                self.sent.append(body)
        except Exception as error:  # noqa: BLE001 -- the test shows it
            self.failure = error

    def go_on(self) -> None:
        """Return when some more are sent, or one has failed."""
        count = len(self.sent) + 20
        wait_until(lambda: self.failure is not None or len(self.sent) > count, "nothing is sent")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE_S)


def _code(broker: BrokerProcess) -> int:
    """Return the exit code of a broker that closes its sockets by itself."""
    wait_until(lambda: not broker.running, "it does not end")
    return broker.stop()


@pytest.mark.parametrize("version", [None, "5.3.3"])
def test_a_rolling_restart_fails_no_send(version: str | None, tmp_path: Path) -> None:
    """Of Python and Java, of messages and transactions; and all of them are delivered."""
    if version is not None:
        class_path(version)
    with broker_pair(tmp_path) as pair, ExitStack() as stack:
        with Admin(namesrv=pair.namesrv) as admin:
            admin.create_topic("orders", queues=2)
        pair.wait_for_routes("orders", set(pair.brokers))
        producer = stack.enter_context(Producer("p", namesrv=pair.namesrv))
        transactions = stack.enter_context(
            TransactionProducer("t", lambda _half: Decision.COMMIT, namesrv=pair.namesrv)
        )

        def send(body: bytes) -> None:
            producer.send(Message("orders", body))

        def commit(body: bytes) -> None:
            with transactions.transaction(Message("orders", body)):
                pass

        java = None
        if version is not None:
            java = stack.enter_context(java_client(Kind(version), pair.namesrv, tmp_path / "java"))
            run = java.start("retrying", "orders", 2)
        with Sending(send, b"m") as messages, Sending(commit, b"t") as committed:
            for name, broker in pair.brokers.items():
                assert (
                    main(["broker", "drain", name, "--wait", "3", "--namesrv", pair.namesrv]) == 0
                )
                assert _code(broker) == 0
                broker.start()
                pair.wait_for_routes("orders", set(pair.brokers))
                for one in (messages, committed):
                    one.go_on()
                if java is not None:
                    for _ in range(20):
                        java.said(run, "sent")  # it ends if a send fails
        assert (messages.failure, committed.failure) == (None, None)

        wanted = {*messages.sent, *committed.sent}
        with Consumer("all", {"orders": "*"}, namesrv=pair.namesrv, start_from="first") as consumer:
            while wanted:
                message = consumer.receive(PATIENCE_S)
                assert message is not None, f"{len(wanted)} are not delivered"
                wanted.discard(message.body)
                message.ack()


def test_a_drained_broker_is_not_ready_and_waits_for_producers_only(tmp_path: Path) -> None:
    """A probe takes it out of service; without producers it ends at once."""
    with broker_process(tmp_path, httpListenPort=0) as broker:
        words = ["broker", "drain", "--wait", "3600", "--namesrv", broker.address]
        with Producer("p", namesrv=broker.address) as producer:
            producer.send(Message("orders", b"x"))
            draining = threading.Thread(target=main, args=(words,))
            draining.start()
            url = f"http://{broker.ready['http']}/readyz"
            wait_until(
                lambda: httpx.get(url, timeout=PATIENCE_S).status_code == 503, "it stays ready"
            )
            assert broker.stop() == 0  # it waits for producers, but not for a signal
        draining.join(PATIENCE_S)
        assert not draining.is_alive()

        broker.start()
        assert main(words) == 0
        assert _code(broker) == 0
        assert broker.log.count("event=stopped") == 2
