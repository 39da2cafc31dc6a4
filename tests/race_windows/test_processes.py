"""Race windows between real processes: producers that die, brokers that take over, by SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client import (
    ClientConfig,
    Decision,
    MessageView,
    TransactionLedger,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, BrokerStartError, broker_process
from halfmq.remoting.codes import HeaderType, ResponseCode
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.own_requests import FinalMessageResponseHeader
from halfmq.store.config import StoreConfig
from halfmq.store.format.record import Record
from halfmq.store.message_store import MessageStore
from tests.support import dying_producer
from tests.support.patience import PATIENCE_S
from tests.support.peers import COMMIT, ROLLBACK, Peer, until
from tests.support.python import python
from tests.support.stores import everything

ROOT: Final = Path(__file__).parents[2]
LOG_FILE_SIZE: Final = 1 << 20
SETTINGS: Final = {
    "mappedFileSizeCommitLog": LOG_FILE_SIZE,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxMessageSize": 100_000,
    "transactionTimeOut": 100,
    "transactionCheckInterval": 200,
}
IN_USE: Final = 3
"""The broker's exit code when another one has the directory."""
REPLICATION_CODES: Final = (905, 906, 907, 908, 909)
"""Requests between replicas: which one is the master, and how far it is replicated. Source:
RocketMQ ``RequestCode``."""


def _delivered(broker: BrokerProcess) -> list[Record]:
    """Return what consumers can get from the store of a stopped broker."""
    config = StoreConfig(
        root=broker.directory / "store",
        commit_log_file_size=LOG_FILE_SIZE,
        consume_queue_file_size=20_000,
    )
    store = MessageStore(config, now_ms=lambda: 0)
    store.open()
    try:
        return [record for record in everything(store) if record.topic == dying_producer.TOPIC]
    finally:
        store.close()


def _die(broker: BrokerProcess, path: Path, moment: str) -> None:
    """Run a producer of group ``heirs`` that dies before or after its local commit."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = python(
        dying_producer.__file__, broker.address, "heirs", path, "o-1", moment, env=environment
    )
    assert done.returncode == -9, done.stderr


async def _inherit(broker: BrokerProcess, path: Path) -> list[str]:
    """Join the group, answer one check from the database, and leave; return the keys checked."""
    asked: list[str] = []
    answered = asyncio.Event()
    loop = asyncio.get_running_loop()
    check = TransactionLedger().checker(lambda: sqlite3.connect(path))

    def checker(message: MessageView) -> Decision:
        decision = check(message)
        asked.append(message.keys)
        loop.call_soon_threadsafe(answered.set)
        return decision

    config = ClientConfig(namesrv=broker.address)
    async with TransactionProducer("heirs", checker=checker, config=config):
        async with asyncio.timeout(PATIENCE_S):
            await answered.wait()
    return asked


def _check_death(tmp_path: Path, moment: str, bodies: list[bytes], *, broker_too: bool) -> None:
    path = tmp_path / "orders.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        TransactionLedger().create_table(database)
        database.execute("create table orders (id text primary key)")
        with broker_process(tmp_path / "broker", **SETTINGS) as broker:
            _die(broker, path, moment)
            if broker_too:
                broker.kill()
                broker.start()
            asked = asyncio.run(_inherit(broker, path))
            broker.stop()

            assert [record.body for record in _delivered(broker)] == bodies
        assert set(asked) == {"o-1"}
        rows = database.execute("select id from orders").fetchall()
        assert [row[0].encode() for row in rows] == bodies  # a row and its message, or neither


def test_w20_a_producer_killed_before_its_local_commit_delivers_nothing(tmp_path: Path) -> None:
    """Another producer of the group gets the check, finds no row, and rolls back."""
    _check_death(tmp_path, "before", [], broker_too=False)


@pytest.mark.parametrize("broker_too", [False, True])
def test_w21_a_producer_killed_after_its_local_commit_delivers_once(
    tmp_path: Path, broker_too: bool
) -> None:
    """Another producer of the group gets the check, finds the row, and commits."""
    _check_death(tmp_path, "after", [b"o-1"], broker_too=broker_too)


@contextlib.asynccontextmanager
async def _peer(broker: BrokerProcess) -> AsyncIterator[Peer]:
    """A connected member of group ``pg``."""
    host, _, port = broker.address.rpartition(":")
    _, peer = await asyncio.get_running_loop().create_connection(
        lambda: Peer("pg", HeaderType.MSGPACK, "client"), host, int(port)
    )
    await peer.heartbeat()
    yield peer
    peer.close()
    await until(lambda: peer.closed)


def test_w26_another_process_on_the_same_files_goes_on(tmp_path: Path) -> None:
    """After SIGKILL the new process knows every offset, decision and answer."""

    async def before(broker: BrokerProcess) -> tuple[Any, ...]:
        async with _peer(broker) as peer:
            halves = [await peer.prepare(f"K{number}", b"%d" % number) for number in range(3)]
            answer = await peer.end(halves[0], COMMIT)
            await peer.end(halves[1], ROLLBACK)
        final_id = response_header(answer, FinalMessageResponseHeader).msg_id
        assert final_id is not None
        return (*halves, final_id)

    async def after(broker: BrokerProcess) -> None:
        async with _peer(broker) as peer:
            again = await peer.end(committed, COMMIT)
            refused = await peer.end(rolled_back, COMMIT)
            await until(lambda: bool(peer.checks))
            await peer.answer_check(peer.checks[0], COMMIT)

        assert again.code == ResponseCode.SUCCESS
        assert response_header(again, FinalMessageResponseHeader).msg_id == final_id
        assert refused.code == ResponseCode.ILLEGAL_OPERATION
        assert set(peer.asked) == {undecided.offset}

    with broker_process(tmp_path, **SETTINGS) as first:
        committed, rolled_back, undecided, final_id = asyncio.run(before(first))
        first.kill()
        with broker_process(tmp_path, **SETTINGS) as second:
            assert second.address != first.address
            asyncio.run(after(second))
            second.stop()
            assert [record.body for record in _delivered(second)] == [b"0", b"2"]


def test_w25_two_brokers_never_act_on_one_store(tmp_path: Path) -> None:
    """No slave can act as master: a second broker on the files does not start."""
    with (
        broker_process(tmp_path, **SETTINGS),
        pytest.raises(BrokerStartError) as refused,
        broker_process(tmp_path, **SETTINGS),
    ):
        pass
    assert refused.value.exit_code == IN_USE


def test_w25_a_broker_is_no_slave_and_moves_no_halves(tmp_path: Path) -> None:
    """`brokerRole=SLAVE` changes nothing, and requests between replicas are refused."""

    async def story(broker: BrokerProcess) -> None:
        async with _peer(broker) as peer:
            for code in REPLICATION_CODES:
                answer = await peer.call(code, None)
                assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED, code
            half = await peer.prepare("K1")
            await until(lambda: len(peer.checks) >= 2)  # where an acting slave would move the half
            assert set(peer.asked) == {half.offset}
            assert (await peer.end(half, COMMIT)).code == ResponseCode.SUCCESS

    with broker_process(tmp_path, **SETTINGS, brokerRole="SLAVE") as broker:
        asyncio.run(story(broker))
        broker.stop()
        assert len(_delivered(broker)) == 1
        assert "brokerRole" in broker.log
