"""Clients in processes of their own, as containers, workers and web servers have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.broker_thread import BrokerThread
from tests.support.patience import PATIENCE_S


@pytest.fixture
def served() -> Iterator[BrokerThread]:
    thread = BrokerThread()
    yield thread
    thread.close()


def run(program: str, served: BrokerThread) -> subprocess.CompletedProcess[str]:
    """Run a program with the address of the broker as its argument."""
    return subprocess.run(
        [sys.executable, "-c", program, served.broker.address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


EQUAL_CONTAINERS = """
import os, sys
from halfmq.client.blocking import Consumer
os.getpid = lambda: 1

for _ in range(2):
    if os.fork() == 0:
        for _ in range(2):
            with Consumer("billing", {"orders": "*"}, namesrv=sys.argv[1]) as consumer:
                os.write(1, consumer.client_id.encode() + b"\\n")
        os._exit(0)
os.wait(), os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_clients_with_equal_addresses_and_process_ids_have_different_ids(
    served: BrokerThread,
) -> None:
    """As in containers: with one id, both would be given all queues of the group."""
    done = run(EQUAL_CONTAINERS, served)

    assert done.stderr == ""
    ids = done.stdout.split()
    assert len(set(ids)) == 4, ids
    assert {one.partition("#")[0] for one in ids} == {"127.0.0.1@1"}  # as RocketMQ's tools read it
