"""`kill -9` of the broker while it checks: checks that a snapshot has still count."""

from __future__ import annotations

import asyncio
from pathlib import Path

from halfmq.client import (
    Admin,
    ClientConfig,
    Decision,
    Message,
    MessageView,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S

CHECK_MAX = 6


def _config(broker: BrokerProcess) -> ClientConfig:
    return ClientConfig(namesrv=broker.address, reconnect_delay_min=0.02, reconnect_delay_max=0.1)


async def _unknown(_message: MessageView) -> Decision:
    return Decision.UNKNOWN


async def _leave_undecided(broker: BrokerProcess) -> None:
    producer = TransactionProducer("pg", checker=_unknown, config=_config(broker))
    async with producer, producer.transaction(Message("orders", b"row")) as tx:
        tx.decide(Decision.UNKNOWN)


async def _check_until_snapshot(broker: BrokerProcess) -> bool:
    """Answer checks until a snapshot is taken; return False if the broker gives up before."""
    config = _config(broker)
    producer = TransactionProducer("pg", checker=_unknown, config=config)
    async with producer, Admin(config=config) as admin, asyncio.timeout(PATIENCE_S):
        while True:
            (found,) = [one async for one in admin.transactions()]
            if found.parked_reason:
                return False
            (metrics,) = (await admin.metrics()).values()
            if int(metrics["halfmq.transactions.snapshots_taken"]):
                return True
            await asyncio.sleep(0.02)


def test_checks_that_a_snapshot_has_count_after_a_kill(tmp_path: Path) -> None:
    """A broker that is killed repeatedly, without other traffic, finally gives up."""
    settings = {
        "transactionTimeOut": 100,
        "transactionCheckInterval": 1_000,
        "transactionCheckMax": CHECK_MAX,
    }
    kills = 0
    with broker_process(tmp_path, **settings) as broker:
        asyncio.run(_leave_undecided(broker))
        while kills <= CHECK_MAX and asyncio.run(_check_until_snapshot(broker)):
            broker.kill()
            kills += 1
            broker.start()

    # Each run adds at least one check to the snapshot; there was none before the first.
    assert 0 < kills <= CHECK_MAX
