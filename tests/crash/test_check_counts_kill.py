"""`kill -9` of the broker while it asks: what was asked counts, as far as a snapshot has it."""

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

CHECK_MAX = 6
PATIENCE_S = 60.0


def _config(broker: BrokerProcess) -> ClientConfig:
    return ClientConfig(namesrv=broker.address, reconnect_delay_min=0.02, reconnect_delay_max=0.1)


async def _unknown(_message: MessageView) -> Decision:
    return Decision.UNKNOWN


async def _leave_undecided(broker: BrokerProcess) -> None:
    producer = TransactionProducer("pg", checker=_unknown, config=_config(broker))
    async with producer, producer.transaction(Message("orders", b"row")) as tx:
        tx.decide(Decision.UNKNOWN)


async def _asked_until_noted(broker: BrokerProcess) -> bool:
    """Have the producer asked until a snapshot notes that; False when the broker gave up first."""
    config = _config(broker)
    producer = TransactionProducer("pg", checker=_unknown, config=config)
    async with producer, Admin(config=config) as admin, asyncio.timeout(PATIENCE_S):
        while True:
            (told,) = [one async for one in admin.transactions()]
            if told.parked_reason:
                return False
            (metrics,) = (await admin.metrics()).values()
            if int(metrics["halfmq.transactions.snapshots_taken"]):
                return True
            await asyncio.sleep(0.02)


def test_checks_that_a_snapshot_has_count_after_a_kill(tmp_path: Path) -> None:
    """A broker that is killed again and again, without other traffic, gives up in the end."""
    settings = {
        "transactionTimeOut": 100,
        "transactionCheckInterval": 1_000,
        "transactionCheckMax": CHECK_MAX,
    }
    kills = 0
    with broker_process(tmp_path, **settings) as broker:
        asyncio.run(_leave_undecided(broker))
        while kills <= CHECK_MAX and asyncio.run(_asked_until_noted(broker)):
            broker.kill()
            kills += 1
            broker.start()

    # Each time one check more is noted, at least; and none was asked before the first snapshot.
    assert 0 < kills <= CHECK_MAX
