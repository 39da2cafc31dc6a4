"""Our broker process on stores that Apache RocketMQ left in the middle of transactions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.broker.transaction.checks.checker import RESTART_GRACE_MS
from halfmq.client import Admin, ClientConfig, Decision, Message, MessageView, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.store.format.flags import TransactionType
from tests.support.golden_store import GoldenStore, unpack
from tests.support.ledger_log import LogTruth, read_log
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import Wire

GOLDEN: Final = (
    "tx-midway-killed",
    pytest.param("tx-midway-clean", marks=pytest.mark.campaign),
    pytest.param("v4-tx", marks=pytest.mark.campaign),
)
TOPIC: Final = "tx_orders"
QUEUES: Final = range(2)
FORMAT: Final = (
    "mappedFileSizeCommitLog",
    "mappedFileSizeConsumeQueue",
    "maxMessageSize",
    "maxHashSlotNum",
    "maxIndexNum",
)
"""Settings that are part of a format: ours must be those of the broker that wrote the store."""

Transaction = dict[str, Any]


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> GoldenStore:
    return unpack(request.param, tmp_path)


def _broker_settings(golden: GoldenStore) -> dict[str, object]:
    recorded = golden.truth["broker_config"]
    return {
        **{key: recorded[key] for key in FORMAT},
        "storePathRootDir": golden.root,
        # Longer than the grace after a start, so that what is overdue comes before it.
        "transactionTimeOut": 2 * RESTART_GRACE_MS,
        "transactionCheckInterval": 300,
        "transactionCheckMax": 1000,
    }


def _in_state(golden: GoldenStore, *states: str) -> list[Transaction]:
    return [each for each in golden.truth["transactions"] if each["state_in_the_log"] in states]


def _keys(transactions: Iterable[Transaction]) -> set[str]:
    return {transaction["uniqKey"] for transaction in transactions}


class Group:
    """A member of a producer group that keeps what it is asked; every second answer is a commit."""

    def __init__(self, broker: BrokerProcess, name: str) -> None:
        self.asked: list[str] = []
        self.committed: set[str] = set()
        self._marker_asked = asyncio.Event()
        self._marker = ""
        config = ClientConfig(namesrv=broker.address)
        self.producer = TransactionProducer(name, checker=self._check, config=config)

    async def _check(self, message: MessageView) -> Decision:
        assert message.transaction_id is not None
        if message.keys == "marker":
            self._marker_asked.set()
            return Decision.ROLLBACK
        self.asked.append(message.transaction_id)
        if len(self.asked) % 2:
            self.committed.add(message.transaction_id)
            return Decision.COMMIT
        return Decision.ROLLBACK

    async def wait_for_marker(self) -> None:
        """Return when a new transaction is asked about: what was due before has been asked."""
        async with self.producer.transaction(Message(TOPIC, b"marker", keys="marker")) as marker:
            marker.decide(Decision.UNKNOWN)
        await asyncio.wait_for(self._marker_asked.wait(), PATIENCE_S)


async def _ask(broker: BrokerProcess, name: str) -> Group:
    group = Group(broker, name)
    async with group.producer:
        await group.wait_for_marker()
        await asyncio.sleep(0)
    return group


def _delivered(broker: BrokerProcess) -> Counter[str]:
    """What a consumer is given of the topic, by unique key."""
    with Wire(broker.address) as wire:
        records = [record for queue in QUEUES for record in wire.records(TOPIC, queue)]
    return Counter(record.property_map["UNIQ_KEY"] for record in records)


def _finals(golden: GoldenStore, truth: LogTruth) -> dict[str, int]:
    """Final messages in the log, by unique key; whichever copy of the half they name."""
    found = Counter(truth.halves[half].property_map["UNIQ_KEY"] for half in truth.finals.elements())
    return {key: found[key] for key in _keys(golden.truth["transactions"])}


def test_exactly_what_is_undecided_is_asked_about(golden: GoldenStore, tmp_path: Path) -> None:
    """Once each, and the answer is carried out; what was decided or given up is not touched."""
    with broker_process(tmp_path / "broker", **_broker_settings(golden)) as broker:
        before, finals_before = _delivered(broker), _finals(golden, read_log(golden.root))
        groups = [asyncio.run(_ask(broker, name)) for name in ("pg_tx", "pg_other", "pg_gone")]
        asked = [key for group in groups for key in group.asked]
        committed = set().union(*(group.committed for group in groups))

        assert sorted(asked) == sorted(_keys(_in_state(golden, "UNDECIDED")))
        assert 0 < len(committed) < len(asked)
        assert _delivered(broker) - before == Counter(committed)
        assert before <= _delivered(broker)

        broker.kill()
        broker.start()
        again = [asyncio.run(_ask(broker, name)) for name in ("pg_tx", "pg_other", "pg_gone")]
        assert [key for group in again for key in group.asked] == []
    finals = _finals(golden, read_log(golden.root))
    assert finals == {key: finals_before[key] + (key in committed) for key in finals}


def _end(wire: Wire, transaction: Transaction, decision: TransactionType) -> int:
    """Decide as an official client answers a check: by the newest copy it was shown."""
    half = transaction["halves"][-1]
    header = EndTransactionRequestHeader(
        producer_group=transaction["producerGroup"],
        tran_state_table_offset=half["queueOffset"],
        commit_log_offset=half["commitLogOffset"],
        commit_or_rollback=decision,
        msg_id=transaction["uniqKey"],
        topic=TOPIC,
        from_transaction_check=True,
        transaction_id=transaction["uniqKey"],
    )
    return wire.ask(RequestCode.END_TRANSACTION, header).code


def test_what_was_decided_stays_decided(golden: GoldenStore, tmp_path: Path) -> None:
    """The same decision again changes nothing, the opposite one is refused, also after a kill."""
    with broker_process(tmp_path / "broker", **_broker_settings(golden)) as broker:
        before = _delivered(broker)
        for _ in range(2):
            with Wire(broker.address) as wire:
                for transaction in _in_state(golden, "COMMITTED"):
                    codes = [_end(wire, transaction, it) for it in _BOTH]
                    assert codes == [ResponseCode.SUCCESS, ResponseCode.ILLEGAL_OPERATION]
                for transaction in _in_state(golden, "ROLLED_BACK"):
                    codes = [_end(wire, transaction, it) for it in _BOTH]
                    assert codes == [ResponseCode.ILLEGAL_OPERATION, ResponseCode.SUCCESS]
            assert _delivered(broker) == before
            broker.kill()
            broker.start()


_BOTH: Final = (TransactionType.COMMIT, TransactionType.ROLLBACK)


def test_what_was_given_up_is_listed_and_can_be_decided(
    golden: GoldenStore, tmp_path: Path
) -> None:
    """RocketMQ drops it into a topic; here an operator commits one and rolls the other back."""
    discarded = _in_state(golden, "DISCARDED")

    async def decide(broker: BrokerProcess) -> tuple[set[str], str]:
        async with Admin(namesrv=broker.address) as admin:
            parked = [one async for one in admin.transactions(state="parked")]
            first, second = parked
            await admin.commit(first.half_message_id, reason="the row is there")
            await admin.rollback(second.half_message_id, reason="it is not")
            left = [one async for one in admin.transactions(state="parked")]
            assert left == []
        return {one.transaction_id for one in parked}, first.transaction_id

    with broker_process(tmp_path / "broker", **_broker_settings(golden)) as broker:
        before = _delivered(broker)
        parked, committed = asyncio.run(decide(broker))

        assert parked == _keys(discarded)
        assert _delivered(broker) - before == Counter([committed])
        broker.kill()
        broker.start()
        assert _delivered(broker) - before == Counter([committed])
