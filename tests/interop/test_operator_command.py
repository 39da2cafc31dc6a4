"""The command ``halfmq`` as a process of its own, against a broker of its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmq.client import (
    Admin,
    Consumer,
    Decision,
    Message,
    PendingTransaction,
    Transaction,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S
from tests.support.python import python

GROUP = "orders-tx"


@dataclass
class Outcome:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """A shell in which a broker's address is known."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._environment = {**os.environ, "NAMESRV_ADDR": broker.address}

    async def __call__(self, *words: str) -> Outcome:
        done = await asyncio.to_thread(
            python, "-m", "halfmq.command", *words, env=self._environment
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    async def pipe(self, *words: str) -> Outcome:
        """Run the command into a pipe that nobody reads."""
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "halfmq.command", *words],
                env=self._environment,
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        finally:
            os.close(writer)
        return Outcome(done.returncode, "", done.stderr)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that asks nobody about anything for as long as the tests take."""
    directory = tmp_path_factory.mktemp("operated")
    with broker_process(directory, transactionTimeOut=600_000) as running:
        yield running


@pytest.fixture
def halfmq(broker: BrokerProcess) -> Shell:
    return Shell(broker)


async def never_known(_message: object) -> Decision:
    return Decision.UNKNOWN


@asynccontextmanager
async def undecided(
    broker: BrokerProcess, topic: str, group: str = GROUP, count: int = 1
) -> AsyncIterator[list[Transaction]]:
    """Transactions whose producer does not know how they ended, and stays connected."""
    async with TransactionProducer(group, never_known, namesrv=broker.address) as producer:
        transactions = []
        for number in range(count):
            async with producer.transaction(Message(topic, b"x", keys=f"o-{number}")) as one:
                one.decide(Decision.UNKNOWN)
            transactions.append(one)
        yield transactions


async def test_a_transaction_is_seen_and_committed(broker: BrokerProcess, halfmq: Shell) -> None:
    """From the list to the consumer, whose message names the same transaction."""
    async with undecided(broker, "seen", "seen-tx", 2) as (first, second):
        listed = (await halfmq("tx", "list", "--group", "seen-tx", "--json")).json
        assert [one["transaction_id"] for one in listed] == [first.id, second.id]
        assert {one["state"] for one in listed} == {"prepared"}
        assert {(one["topic"], one["messages"]) for one in listed} == {("seen", 1)}
        assert [one["keys"] for one in listed] == ["o-0", "o-1"]
        assert listed[0]["owner"].startswith("127.0.0.1:")
        table = (await halfmq("tx", "list", "--group", "seen-tx")).out.splitlines()
        assert table[0].split("  ")[:1] == ["HALF MESSAGE ID"]
        ids = [[one["half_message_id"], one["transaction_id"]] for one in listed]
        assert [line.split()[:2] for line in table[1:]] == ids

        by_id, by_key = listed[0]["half_message_id"], listed[1]["transaction_id"]
        committed = await halfmq("tx", "commit", by_id, "--reason", "the row is there", "--json")
        rolled_back = await halfmq("tx", "rollback", by_key)

    assert (committed.code, rolled_back.code) == (0, 0), committed.err + rolled_back.err
    async with Consumer("seen-group", {"seen": "*"}, namesrv=broker.address) as consumer:
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        assert message.offset_message_id == committed.json["message_id"]
        assert message.keys == "o-0"
        assert await consumer.receive(timeout=0.3) is None
    assert (await halfmq("tx", "list", "--group", "seen-tx", "--json")).json == []
    assert "the row is there" in broker.log


async def _parked(admin: Admin) -> PendingTransaction:
    """Wait until a transaction is parked."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = [one async for one in admin.transactions(state="parked")]
            if found:
                return found[0]
            await asyncio.sleep(0.05)


async def _copy(broker: BrokerProcess) -> str:
    """Return the offset id of the parked copy."""
    topics = {"TRANS_CHECK_MAX_TIME_TOPIC": "*"}
    async with Consumer("operators", topics, namesrv=broker.address) as consumer:
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        return message.offset_message_id


@pytest.mark.parametrize("named_by", ["half", "copy"])
async def test_a_parked_transaction_is_resumed(tmp_path: Path, named_by: str) -> None:
    """Its producers are asked again, and this time they know.

    An operator may name it by what consumers of the parked messages see, as RocketMQ's tools do.
    """
    asked: list[str] = []
    known = asyncio.Event()

    async def checker(message: Any) -> Decision:
        asked.append(message.transaction_id)
        return Decision.COMMIT if known.is_set() else Decision.UNKNOWN

    quick = {"transactionTimeOut": 200, "transactionCheckInterval": 200}
    with broker_process(tmp_path, **quick, transactionCheckMax=2) as broker:
        halfmq = Shell(broker)
        async with (
            TransactionProducer(GROUP, checker, namesrv=broker.address) as producer,
            Admin(namesrv=broker.address) as admin,
        ):
            async with producer.transaction(Message("later", b"x")) as transaction:
                transaction.decide(Decision.UNKNOWN)
            parked = await _parked(admin)
            known.set()
            times = len(asked)
            chosen = parked.half_message_id if named_by == "half" else await _copy(broker)
            resumed = await halfmq("tx", "resume", chosen)
            async with Consumer("later", {"later": "*"}, namesrv=broker.address) as consumer:
                assert await consumer.receive(timeout=PATIENCE_S) is not None

    assert (resumed.code, resumed.out) == (0, f"resumed {chosen}\n"), resumed.err
    assert parked.transaction_id == transaction.id
    assert (parked.state, parked.next_check) == ("parked", None)
    assert parked.parked_reason == "unknown"
    assert parked.checks_delivered == times == 2
    assert len(asked) == times + 1


async def test_a_listing_that_is_not_read_to_its_end_ends_quietly(
    broker: BrokerProcess, halfmq: Shell
) -> None:
    """As in ``halfmq tx list | head``."""
    async with undecided(broker, "unread", "unread-tx", 30):
        done = await halfmq.pipe("tx", "list")

    assert (done.code, done.err) == (0, "")


def test_an_interrupted_command_says_nothing() -> None:
    """Ctrl-C while a broker does not answer: status 130 as of other programs, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-m", "halfmq.command", "tx", "list", f"--namesrv=127.0.0.1:{port}"],
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C is ignored where this test itself runs in the background of a shell.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        ) as process:
            connected, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
            connected.close()

    assert (process.returncode, errors) == (130, "")
