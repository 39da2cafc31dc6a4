"""Two halfmq brokers that know each other, and how one of them comes to refuse messages."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import free_ports
from halfmq.client.blocking import Admin
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.bodies import decode_route
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import Wire

POLL_S = 0.1


def wait_for_route(address: str, topic: str, names: set[str]) -> None:
    """Return when the name server at an address has the topic on just these brokers."""
    deadline = time.monotonic() + PATIENCE_S
    found: set[str] = set()
    while found != names:
        assert time.monotonic() < deadline, f"{address} knows {topic} on {found}, not {names}"
        time.sleep(POLL_S)
        with Wire(address) as wire:
            header = GetRouteInfoRequestHeader(topic=topic)
            answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        route = decode_route(answer.body) if answer.code == 0 else None
        found = {queues.broker_name for queues in route.queue_datas} if route else set()


class BrokerPair:
    """Two halfmq brokers that register with each other."""

    def __init__(self, first: BrokerProcess, second: BrokerProcess) -> None:
        self.brokers = {"halfmq-a": first, "halfmq-b": second}
        self.namesrv = f"{first.address};{second.address}"

    def wait_for_routes(self, topic: str, names: set[str]) -> None:
        for name, broker in self.brokers.items():
            if name in names:
                wait_for_route(broker.address, topic, names)


@contextlib.contextmanager
def broker_pair(home: Path) -> Iterator[BrokerPair]:
    """Run two brokers for the duration of the block; both have a file of settings."""
    first = free_ports(6) + 2
    ports = first, first + 3
    namesrv = ";".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        brokers = [
            stack.enter_context(
                broker_process(
                    home / name,
                    conf=settings_file(home / name),
                    brokerName=name,
                    listenPort=port,
                    namesrvAddr=namesrv,
                )
            )
            for name, port in zip(("halfmq-a", "halfmq-b"), ports, strict=True)
        ]
        pair = BrokerPair(*brokers)
        pair.wait_for_routes("TBW102", set(pair.brokers))
        yield pair


def settings_file(home: Path) -> Path:
    """Return an empty file of settings: only a broker that has one can be changed while it runs."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "broker.conf"
    path.touch()
    return path


def refuse_messages(broker: BrokerProcess) -> None:
    """Have a broker refuse messages, as if its disk were full; skip the test on an empty disk."""
    space = shutil.disk_usage(broker.directory)
    if space.free > 0.89 * space.total:
        pytest.skip("the disk is nearly empty, and full means 10 % or more: NOT tested")
    _set_full_from(broker, 10)
    wait_until(lambda: refused_messages(broker) > 0, "it refuses messages")


def accept_messages(broker: BrokerProcess) -> None:
    """Have a broker take messages again."""
    _set_full_from(broker, 100)
    wait_until(lambda: _metric(broker, "is_full") == 0, "it has space again")


def refused_messages(broker: BrokerProcess) -> int:
    """Return how many messages a broker, and those that it knows, have refused so far."""
    return _metric(broker, "messages_refused")


def _set_full_from(broker: BrokerProcess, percent: int) -> None:
    body = f"diskSpaceWarningLevelRatio={percent}\n".encode()
    with Wire(broker.address) as wire:
        answer = wire.ask(RequestCode.UPDATE_BROKER_CONFIG, body=body)
    assert answer.code == 0, answer.remark


def _metric(broker: BrokerProcess, name: str) -> int:
    with Admin(namesrv=broker.address) as admin:
        metrics = admin.metrics().values()
    return sum(int(one[f"halfmq.disk.{name}"]) for one in metrics)
