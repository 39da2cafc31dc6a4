"""Clients in processes of their own, as containers, workers and web servers have them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.broker_thread import BrokerThread
from tests.support.python import python


@pytest.fixture
def served() -> Iterator[BrokerThread]:
    thread = BrokerThread()
    yield thread
    thread.close()


def run(program: str, served: BrokerThread) -> subprocess.CompletedProcess[str]:
    """Run a program with the address of the broker as its argument."""
    return python("-c", program, served.broker.address)


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


GREEN = """
import sys, warnings
warnings.simplefilter("ignore")  # eventlet discourages its use
import {library}, {module}
{patch}
from halfmq.client.blocking import Consumer, Message, Producer
from halfmq.client.errors import GreenThreadsError

try:
    with Producer("writers", namesrv=sys.argv[1]) as producer:
        producer.send(Message("orders", b"x"))
    with Consumer("r", {{"orders": "*"}}, namesrv=sys.argv[1], start_from="first") as consumer:
        print(consumer.receive().ack())
except GreenThreadsError as error:
    assert error.remedy in str(error) and error.library == {library!r}
    print(error.remedy)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "patch"),
    [
        ("gevent.monkey", "gevent.monkey.patch_all()"),
        ("eventlet.patcher", "eventlet.monkey_patch()"),
    ],
)
def test_under_green_threads_the_start_fails_at_once_with_a_remedy_that_works(
    served: BrokerThread, module: str, patch: str
) -> None:
    """It would hang: the thread of the client would be a greenlet that never yields."""
    library = module.partition(".")[0]
    refused = run(GREEN.format(library=library, module=module, patch=patch), served)
    assert refused.returncode == 0, refused.stderr
    remedy = refused.stdout.strip()
    assert remedy.startswith(library)

    done = run(GREEN.format(library=library, module=module, patch=remedy), served)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
