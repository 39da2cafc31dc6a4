"""Clients in processes that fork: the child is told at once, and the parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.python import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

SET_UP = """
import asyncio, concurrent.futures, gc, multiprocessing, os, sys, threading
from halfmq import client as aio
from halfmq.client import ForkedError, ClientConfig
from halfmq.client.blocking import Consumer, Message, Producer, TransactionProducer, Decision

ADDRESS = sys.argv[1]
MESSAGE = Message("orders", b"x")
FORK = multiprocessing.get_context("fork")

def in_child(work):
    "Run it in a forked child, and return its exit status."
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        sys.exit(0)  # with all that an interpreter does at its end
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked(call):
    "The call fails at once because of the fork, and says how to mend it."
    try:
        call()
    except ForkedError as error:
        assert "after the fork" in str(error) and str(os.getpid()) in str(error), error
    else:
        raise AssertionError("no error")
"""

BLOCKING = """
producer, consumer = Producer("g", namesrv=ADDRESS), Consumer("c", {"orders": "*"}, namesrv=ADDRESS)
tx = TransactionProducer("t", lambda _: Decision.COMMIT, namesrv=ADDRESS)
producer.start(); consumer.start(); tx.start()
producer.send(MESSAGE)
received = consumer.receive()

def child():
    forked(lambda: producer.send(MESSAGE))
    forked(lambda: producer.send_batch([MESSAGE]))
    forked(lambda: producer.send_oneway(MESSAGE))
    forked(lambda: tx.transaction(MESSAGE).__enter__())
    forked(tx.pending)
    forked(lambda: consumer.receive(timeout=0.1))
    forked(consumer.receive)
    forked(lambda: next(consumer))
    forked(received.ack)
    forked(received.retry)
    forked(producer.start)
    producer.close(); consumer.close(); tx.close()
    with Producer("g", namesrv=ADDRESS) as own:
        own.send(MESSAGE)

def child_that_collects():
    global producer, consumer, tx, received
    producer = consumer = tx = received = None
    gc.collect()

for n in range(5):
    assert in_child(child) == 0
    assert in_child(child_that_collects) == 0
    producer.send(MESSAGE)
with tx.transaction(MESSAGE) as transaction:
    assert in_child(lambda: None) == 0
assert transaction.decided
assert received.ack()
for n in range(11):
    assert consumer.receive().ack()
producer.close(); consumer.close(); tx.close()
"""

LOCKS = """
# Another thread starts, uses and closes clients all the time, so that locks are held at the fork.
stop = threading.Event()
def busy():
    while not stop.is_set():
        with Producer("g", namesrv=ADDRESS) as own:
            own.send(MESSAGE)
thread = threading.Thread(target=busy, daemon=True)
thread.start()
def child():
    with Producer("g", namesrv=ADDRESS) as own:
        own.send(MESSAGE)
    os._exit(0)  # the interpreter's own end does not bear all that threads leave
for n in range(20):
    assert in_child(child) == 0
stop.set()
thread.join()
"""

POOLS = """
producer = Producer("g", namesrv=ADDRESS)
producer.start()

def use(_n):
    try:
        producer.send(MESSAGE)
    except ForkedError:
        return os.getpid()

own = None
def initializer():
    global own
    own = Producer("g", namesrv=ADDRESS)
    own.start()

def use_own(_n):
    return own.send(MESSAGE).message_id

with FORK.Pool(2) as pool:
    assert all(pid not in {None, os.getpid()} for pid in pool.map(use, range(4)))
with FORK.Pool(2, initializer) as pool:
    assert len(set(pool.map(use_own, range(8)))) == 8
    pool.close(); pool.join()
with concurrent.futures.ProcessPoolExecutor(2, FORK) as pool:
    assert all(pid not in {None, os.getpid()} for pid in pool.map(use, range(4)))
with concurrent.futures.ProcessPoolExecutor(2, FORK, initializer) as pool:
    assert len(set(pool.map(use_own, range(8)))) == 8
producer.send(MESSAGE)
producer.close()
"""

ASYNC = """
async def main():
    async with aio.Producer("g", namesrv=ADDRESS) as producer:
        async with aio.Consumer("c", {"orders": "*"}, namesrv=ADDRESS) as consumer:
            await producer.send(MESSAGE)
            message = await consumer.receive()

            def child():
                for work in (producer.send(MESSAGE), consumer.receive(), message.ack()):
                    forked(lambda: asyncio.run(work))
                asyncio.run(producer.close())
                asyncio.run(consumer.close())

                async def anew():
                    async with aio.Producer("g", namesrv=ADDRESS) as own:
                        await own.send(MESSAGE)
                asyncio.run(anew())
                os._exit(0)  # else the parent's frames, which are below, would go on here

            pid = os.fork()
            if pid == 0:
                try:
                    asyncio._set_running_loop(None)  # as Python does itself from 3.12 on
                    child()
                except BaseException as error:
                    print(repr(error), file=sys.stderr)
                os._exit(1)
            assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
            await producer.send(MESSAGE)
            assert await message.ack()
            assert (await consumer.receive()) is not None

asyncio.run(main())
try:
    import uvloop
except ImportError:
    sys.exit()
uvloop.run(main())
"""

IMPORTS = """
# One that is under way in another thread at the fork never ends in the child.
before = set(sys.modules)
with TransactionProducer("tx", lambda _: Decision.COMMIT, namesrv=ADDRESS) as producer:
    producer.send(MESSAGE)
    with producer.transaction(MESSAGE):
        pass
with Consumer("imports", {"orders": "*"}, start_from="first", namesrv=ADDRESS) as consumer:
    next(consumer).ack()
late = set(sys.modules) - before
assert not late, late
"""

ORPHAN = """
# The parent dies while its child lives: the broker must notice at once.
producer = Producer("g", namesrv=ADDRESS)
producer.start()
if os.fork():
    os._exit(0)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One for all tests here."""
    with broker_process(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.mark.parametrize(
    "script",
    [BLOCKING, LOCKS, POOLS, ASYNC, IMPORTS],
    ids=["blocking", "locks", "pools", "async", "imports"],
)
def test_a_forked_child_is_told_at_once_and_the_parent_goes_on(
    broker: BrokerProcess, script: str
) -> None:
    """Nothing hangs on either side, whoever forks; and a client made after the fork works."""
    done = python("-W", "ignore::DeprecationWarning", "-c", SET_UP + script, broker.address)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists connections in /proc")
def test_the_broker_notices_the_end_of_a_parent_whose_child_lives(broker: BrokerProcess) -> None:
    """The child holds none of its connections open."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SET_UP + ORPHAN, broker.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.wait(PATIENCE_S) == 0  # the parent; the child has the pipes
        try:
            # The child closes them when it first runs, which may be after the end of the parent.
            wait_until(lambda: _connections_to(broker.address) == 0, "the end of its connections")
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _connections_to(address: str) -> int:
    """Established connections whose other end is the broker, as the system sees them."""
    port = int(address.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
