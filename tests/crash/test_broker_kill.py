"""`kill -9` of broker and producers: nothing acknowledged is lost, nothing decided is undone.

Real processes, real sockets, real files. By default a few rounds; as a campaign as many as fit into
`HALFMQ_CAMPAIGN_SECONDS` (60). The seed of each run is printed and can be set by `HALFMQ_SEED`.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from halfmq.client import (
    Admin,
    ClientConfig,
    Consumer,
    Decision,
    Message,
    MessageView,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.ledger import Ledger, consume_all, send_until
from tests.support.patience import PATIENCE_S
from tests.support.seeds import campaign_seconds, printed_seed

ROOT = Path(__file__).parents[2]
SENDERS = 8
SMALL_FILES = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20_000}
"""Settings with which a round fills many files."""


def _config(broker: BrokerProcess) -> ClientConfig:
    return ClientConfig(namesrv=broker.address, reconnect_delay_min=0.02, reconnect_delay_max=0.1)


async def _kill_under_load(broker: BrokerProcess, ledger: Ledger, seconds: list[float]) -> None:
    """Send from several producers while the broker is killed and started again."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(SENDERS):
            prefix = f"{len(ledger.sent)}-{number}"
            group.create_task(send_until(stop, ledger, _config(broker), prefix))
        for pause in seconds:
            await asyncio.sleep(pause)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
        stop.set()


def _check_kills(tmp_path: Path, rounds: int, chance: random.Random) -> Ledger:
    ledger = Ledger()
    with broker_process(tmp_path, **SMALL_FILES) as broker:
        pauses = [chance.uniform(0.05, 0.6) for _ in range(rounds)]
        asyncio.run(_kill_under_load(broker, ledger, pauses))
        asyncio.run(
            asyncio.wait_for(consume_all(ledger, _config(broker), ledger.acknowledged), PATIENCE_S)
        )
    assert ledger.acknowledged
    assert ledger.acknowledged <= ledger.consumed.keys()
    assert ledger.consumed.keys() <= ledger.sent  # every delivered message was sent
    return ledger


def test_nothing_acknowledged_is_lost_when_the_broker_is_killed(tmp_path: Path) -> None:
    """Answered sends are on disk; kills at random moments under load lose none of them."""
    ledger = _check_kills(tmp_path, 4, random.Random(printed_seed()))

    print(f"acknowledged={len(ledger.acknowledged)} sent={len(ledger.sent)}")


@pytest.mark.campaign
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    """The same until the campaign ends, each time on a new store."""
    chance = random.Random(printed_seed())
    end = time.monotonic() + campaign_seconds()
    kills = acknowledged = 0
    while time.monotonic() < end:
        ledger = _check_kills(tmp_path / str(kills), 10, chance)
        kills += 10
        acknowledged += len(ledger.acknowledged)

    print(f"kills={kills} acknowledged={acknowledged} lost=0")


async def _decide(broker: BrokerProcess, count: int) -> tuple[set[bytes], set[bytes]]:
    """Commit every other transaction, roll the rest back, and await all answers."""
    committed: set[bytes] = set()
    rolled_back: set[bytes] = set()

    async def one(number: int) -> None:
        body = f"d-{number}".encode()
        async with producer.transaction(Message("decided", body, keys=body.decode())) as tx:
            tx.decide(Decision.ROLLBACK if number % 2 else Decision.COMMIT)
        assert tx.decided
        (rolled_back if number % 2 else committed).add(body)

    async def unexpected(_message: MessageView) -> Decision:
        return Decision.UNKNOWN

    producer = TransactionProducer("deciders", checker=unexpected, config=_config(broker))
    async with producer:
        await asyncio.gather(*(one(number) for number in range(count)))
        await asyncio.to_thread(broker.kill)
    return committed, rolled_back


def test_decided_transactions_are_not_checked_after_a_kill(tmp_path: Path) -> None:
    """Decisions that were answered just before `kill -9` stay.

    (Apache RocketMQ checks every transaction again that was decided in the last seconds, and
    delivers those that are then committed a second time, rolled-back ones included.)
    """
    asked: list[str] = []
    undecided = asyncio.Event()

    async def checker(message: MessageView) -> Decision:
        asked.append(message.keys)
        undecided.set()
        return Decision.COMMIT

    async def after_the_kill(broker: BrokerProcess, committed: set[bytes]) -> list[bytes]:
        """Wait for the check of a later transaction: checks of earlier ones would come first."""
        bodies: list[bytes] = []
        config = _config(broker)
        producer = TransactionProducer("deciders", checker=checker, config=config)
        consumer = Consumer("readers", {"decided": "*"}, start_from="first", config=config)
        async with producer, consumer, asyncio.timeout(PATIENCE_S):
            async with producer.transaction(Message("decided", b"late", keys="late")) as tx:
                tx.decide(Decision.UNKNOWN)
            await undecided.wait()
            async for message in consumer:
                bodies.append(message.body)
                await message.ack()
                if committed | {b"late"} <= set(bodies):
                    break
        return bodies

    with broker_process(tmp_path, transactionTimeOut=200, transactionCheckInterval=200) as broker:
        committed, rolled_back = asyncio.run(_decide(broker, 60))
        broker.start()

        bodies = asyncio.run(after_the_kill(broker, committed))

    assert len(committed) == len(rolled_back) == 30
    assert set(asked) == {"late"}
    assert sorted(bodies) == sorted(committed | {b"late"})


CHECK_MAX = 6


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
