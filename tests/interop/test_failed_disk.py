"""A broker whose disk fails under it, as its clients see that."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.net import server
from halfmq.broker.service import Broker
from halfmq.client import BrokerRefusedError, ClientConfig, ClientError, Consumer, Message, Producer
from halfmq.store.files import disk
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S


def _broker(root: Path) -> Broker:
    network = NetworkConfig(bind_address="127.0.0.1", listen_port=0, namesrv_listen_port=0)
    settings = StoreSettings(
        root=root, commit_log_file_size=1 << 20, max_hash_slots=100, max_index_items=400
    )
    return Broker(BrokerConfig(network=network, store=settings))


def _broken(_fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


@on_both_loops
async def test_after_a_failed_flush_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when later ones would succeed; senders are told why, and a restart mends it."""
    monkeypatch.setattr(server, "CLOSE_TIMEOUT_S", 0.1)  # replies wait that will never be sent
    broker = _broker(tmp_path)
    await broker.start()
    once = ClientConfig(namesrv=broker.namesrv_address, send_attempts_max=1)
    impatient = replace(once, send_timeout=0.5)
    async with (
        Producer("p", config=once) as producer,
        Producer("p", config=impatient) as unanswered,
    ):
        await unanswered.send_oneway(Message("orders", b"before"))  # it knows the route now
        await producer.send(Message("orders", b"before"))
        with monkeypatch.context() as patch:
            patch.setattr(disk, "fdatasync", _broken)
            with pytest.raises(ClientError):
                await unanswered.send(Message("orders", b"during"))
            await until(lambda: "flush_failed" in caplog.text)
        with pytest.raises(BrokerRefusedError, match=r"flush failed after offset.*Input/output"):
            await producer.send(Message("orders", b"behind"))
    await broker.stop()
    critical = [one.getMessage() for one in caplog.records if one.levelname == "CRITICAL"]
    assert ["flush_failed" in critical[0], "restart the broker" in critical[1]] == [True, True]

    broker = _broker(tmp_path)
    await broker.start()
    config = ClientConfig(namesrv=broker.namesrv_address)
    async with Producer("p", config=config) as producer:
        await producer.send(Message("orders", b"after"))
    bodies: set[bytes] = set()
    async with Consumer("c", {"orders": "*"}, start_from="first", config=config) as consumer:
        while not {b"before", b"after"} <= bodies:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            bodies.add(message.body)
            await message.ack()
    await broker.stop()
    assert bodies <= {b"before", b"during", b"after"}
