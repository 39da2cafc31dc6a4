"""Two halfmq brokers that know each other, and how one of them comes to refuse messages."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.processes import free_ports
from halfmq.client.blocking import Admin
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.bodies import decode_route
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import Wire
from tests.support.small_disk import fill, small_disk

POLL_S = 0.1
DISK = 64 << 20
SMALL_FILES: Final = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1_000,
    "maxIndexNum": 4_000,
}


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
    """Run two brokers for the duration of the block; each has a small disk."""
    first = free_ports(6) + 2
    ports = first, first + 3
    namesrv = ";".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        brokers = [
            stack.enter_context(
                filling_broker(
                    home / name,
                    brokerName=name,
                    listenPort=port,
                    namesrvAddr=namesrv,
                    registrationAddresses="127.0.0.1",
                )
            )
            for name, port in zip(("halfmq-a", "halfmq-b"), ports, strict=True)
        ]
        pair = BrokerPair(*brokers)
        pair.wait_for_routes("TBW102", set(pair.brokers))
        yield pair


@contextlib.contextmanager
def filling_broker(home: Path, **settings: object) -> Iterator[BrokerProcess]:
    """Run a broker whose disk is small enough to be filled; skip the test where none can be."""
    home.mkdir(parents=True, exist_ok=True)
    with (
        small_disk(home, "tmpfs", DISK) as disk,
        broker_process(home, storePathRootDir=disk / "store", **SMALL_FILES, **settings) as broker,
    ):
        yield broker


def _ballast(broker: BrokerProcess) -> Path:
    return Path(broker.ready["store"]).with_name("ballast")


def refuse_messages(broker: BrokerProcess) -> None:
    """Fill the disk of a broker, so that it refuses messages."""
    fill(_ballast(broker), round(0.95 * shutil.disk_usage(_ballast(broker).parent).free))
    wait_until(lambda: refused_messages(broker) > 0, "it refuses messages")


def accept_messages(broker: BrokerProcess) -> None:
    """Have a broker take messages again."""
    _ballast(broker).unlink()
    wait_until(lambda: _metric(broker, "is_full") == 0, "it has space again")


def refused_messages(broker: BrokerProcess) -> int:
    """Return how many messages a broker, and those that it knows, have refused so far."""
    return _metric(broker, "messages_refused")


def _metric(broker: BrokerProcess, name: str) -> int:
    with Admin(namesrv=broker.address) as admin:
        metrics = admin.metrics().values()
    return sum(int(one[f"halfmq.disk.{name}"]) for one in metrics)
