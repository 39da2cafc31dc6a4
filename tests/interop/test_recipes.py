"""The recipe for gunicorn, as it stands: reloads, a killed worker and a stop under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from halfmq.client import Admin, Consumer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.documents import examples
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.programs import Program, free_port, running, wait_for_web

FILES: Final = {one.file: one.code for one in examples("docs/recipes.md") if one.file}
WORKERS: Final = 3
CUSTOMERS: Final = 6


class Customers:
    """Threads that order, each one thing after the other, until the shop is closed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._closed = threading.Event()
        self.confirmed: list[str] = []
        """What was answered with 201."""

    @contextmanager
    def ordering(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._order, args=(f"c{number}",))
            for number in range(CUSTOMERS)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._closed.set()
            for thread in threads:
                thread.join()

    def _order(self, name: str) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as web:
            while not self._closed.is_set():
                number += 1
                try:
                    answer = web.get(f"/{name}-{number}")
                except httpx.TransportError:  # of a worker that has gone
                    continue
                assert answer.status_code == 201, answer
                self.confirmed.append(f"{name}-{number}")

    def wait_for_more(self, count: int) -> None:
        enough = len(self.confirmed) + count
        wait_until(lambda: len(self.confirmed) >= enough, "nothing is sold")


def workers_of(server: Program) -> set[int]:
    pid = server.process.pid
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def producers(broker: BrokerProcess) -> set[str]:
    """The client ids of the producers that have connected."""
    return set(re.findall(r"event=producer_up group=shop client=(\S+)", broker.log))


async def undecided(broker: BrokerProcess) -> set[str]:
    """The transactions that nobody has decided."""
    async with Admin(namesrv=broker.address) as admin:
        return {one.half_message_id async for one in admin.transactions()}


async def delivered(broker: BrokerProcess, orders: int) -> Counter[str]:
    """The messages; there should be as many as orders."""
    messages: Counter[str] = Counter()
    async with Consumer(
        "g", {"web-orders": "*"}, start_from="first", namesrv=broker.address
    ) as consumer:
        while messages.total() < orders:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            messages[message.body.decode()] += 1
            await message.ack()
        assert await consumer.receive(timeout=0.5) is None
    return messages


@pytest.mark.parametrize("preload", [False, True])
def test_gunicorn_loses_and_forgets_nothing(preload: bool, tmp_path: Path) -> None:
    """Every order that is stored has its message, once; every confirmed order is stored."""
    for name, content in FILES.items():
        (tmp_path / str(name)).write_text(content)
    port = free_port()
    customers = Customers(f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "gunicorn", "-b", f"127.0.0.1:{port}", "shop:app"]
    command += ["--preload"] if preload else []
    with broker_process(tmp_path / "broker", transactionTimeOut=500) as broker:
        environment = {"NAMESRV_ADDR": broker.address, "HOME": str(tmp_path)}
        with running(command, tmp_path, environment, tmp_path / "log") as server:
            wait_for_web(f"http://127.0.0.1:{port}/first", server)
            with customers.ordering():
                customers.wait_for_more(20)
                assert len(producers(broker)) == WORKERS

                before = workers_of(server)
                server.process.send_signal(signal.SIGHUP)
                wait_until(lambda: workers_of(server).isdisjoint(before), server.output)
                customers.wait_for_more(20)
                assert len(producers(broker)) == 2 * WORKERS

                os.kill(min(workers_of(server)), signal.SIGKILL)
                customers.wait_for_more(50)
                left = asyncio.run(undecided(broker))
                wait_until(
                    lambda: left.isdisjoint(asyncio.run(undecided(broker))), "others are asked"
                )
                assert server.end() == 0
        with sqlite3.connect(tmp_path / "shop.db") as database:
            orders = [number for (number,) in database.execute("select number from orders")]
        assert asyncio.run(undecided(broker)) == set()
        messages = asyncio.run(delivered(broker, len(orders)))
    assert messages == Counter(orders)
    assert set(customers.confirmed) <= set(orders)
    assert "Error" not in server.output
