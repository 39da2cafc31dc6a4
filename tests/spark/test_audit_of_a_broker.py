"""The audit and the producers agree: two accounts of one run that share no state."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet

from halfmq.client import ClientConfig, Decision, Message, MessageView, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.spark_jobs.__main__ import main

TRANSACTIONS = 10_000
AT_ONCE = 64
STATES = {
    Decision.COMMIT: "committed",
    Decision.ROLLBACK: "rolled_back",
    Decision.UNKNOWN: "pending",
}


async def _never(_message: MessageView) -> Decision:
    return Decision.UNKNOWN


def _decision(number: int) -> Decision:
    """Six of ten commit, three roll back, one never says."""
    last = number % 10
    return Decision.COMMIT if last < 6 else Decision.ROLLBACK if last < 9 else Decision.UNKNOWN


async def _produce(broker: BrokerProcess) -> dict[str, str]:
    """Run mixed transactions; return what their producers recorded, by transaction id."""
    recorded: dict[str, str] = {}
    numbers = iter(range(TRANSACTIONS))
    config = ClientConfig(namesrv=broker.address)
    async with TransactionProducer("auditees", checker=_never, config=config) as producer:

        async def work() -> None:
            for number in numbers:
                decision = _decision(number)
                async with producer.transaction(Message("audited", b"%d" % number)) as tx:
                    tx.decide(decision)
                recorded[tx.id] = STATES[decision]

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
    return recorded


@pytest.mark.filterwarnings("default")  # PySpark's own
def test_ten_thousand_transactions_audit_to_what_producers_recorded(tmp_path: Path) -> None:
    """Each one, by its id, on the live directory and without an anomaly."""
    summary, output = tmp_path / "summary.json", tmp_path / "audit"
    with broker_process(
        tmp_path, transactionTimeOut="1h", mappedFileSizeCommitLog=4 << 20
    ) as broker:
        recorded = asyncio.run(_produce(broker))

        code = main(
            ["audit", str(tmp_path / "store"), "--json", str(summary), "--output", str(output)]
        )

    counts = json.loads(summary.read_text())["transactions"]
    expected = Counter(recorded.values())
    assert code == 0
    assert {state: counts[state] for state in STATES.values()} == expected
    assert counts["total"] == TRANSACTIONS
    found = parquet.read_table(output / "transactions").to_pylist()
    assert {row["transactionId"]: row["state"] for row in found} == recorded
