"""The audit, the producers and the broker agree: accounts of one run that share no state."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pyarrow import parquet

from halfmq.client import (
    Admin,
    ClientConfig,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.spark_jobs.__main__ import main
from tests.support.auditing import Outcome, audit_here
from tests.support.oracle import records as oracle

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


# --- several messages, delays, operators and kills

ROUNDS = 2
PER_ROUND = 600
AT_WORK = 16
# Who leaves a transaction open without immunity finds it parked within a second.
ASKED_AT_ONCE = {"transactionTimeOut": 200, "transactionCheckInterval": 200}
IMMUNE = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "7200"}
PARKED_MIN = 20  # that an operator has decided about, in each round


def _messages(number: int, *, open_: bool) -> Message | list[Message]:
    """One message, several, or one with a delay; of those left open some are parked soon."""
    more = IMMUNE if open_ and number % 3 else {}
    body = b"%d" % number
    if number % 4 == 0:
        others = [Message(f"beside{n}", body) for n in range(1 + number % 3)]
        return [Message("audited", body, properties=more), *others]
    if number % 4 == 1:
        delay = timedelta(seconds=1 if number % 8 == 1 else 3600)
        return Message("audited", body, properties=more, deliver_after=delay)
    return Message("audited", body, properties=more)


async def _transact(
    producer: TransactionProducer, numbers: Iterator[int], recorded: dict[int, str]
) -> None:
    """Run transactions; record by the half's offset what is known for certain."""
    for number in numbers:
        decision = _decision(number // 4)
        open_ = decision is Decision.UNKNOWN
        async with producer.transaction(_messages(number, open_=open_)) as tx:
            tx.decide(decision)
        if tx.decided:
            recorded[int(tx.message_id[-16:], 16)] = STATES[decision]
        if number % 50 == 0:
            delay = timedelta(seconds=1 if number % 100 else 3600)
            await producer.send(Message("reminders", b"%d" % number, deliver_after=delay))


def _numbers(first: int, count: int, reached: asyncio.Event) -> Iterator[int]:
    """Count without an end, and tell when so many have been given out."""
    yield from range(first, first + count)
    reached.set()
    yield from itertools.count(first + count)


async def _operate(admin: Admin, choose: random.Random) -> None:
    """Commit, roll back and resume parked transactions, until there were enough; leave one be."""
    done = 0
    left = ""
    while done < PARKED_MIN:
        for transaction in await admin.page(state="parked"):
            left = left or transaction.half_message_id
            if transaction.half_message_id == left:
                continue
            act = choose.choice([admin.commit, admin.rollback, admin.resume])
            await act(transaction.half_message_id)
            done += 1


async def _round(broker: BrokerProcess, first: int, recorded: dict[int, str]) -> None:
    """Have producers and an operator at work, and kill the broker amid transactions."""
    config = ClientConfig(namesrv=broker.address)
    choose = random.Random(first)
    async with TransactionProducer("auditees", checker=_never, config=config) as producer:
        async with Admin(config=config) as admin, asyncio.TaskGroup() as group:
            group.create_task(_operate(admin, choose))
            numbers = iter(range(first, first + PER_ROUND))
            for _ in range(AT_WORK):
                group.create_task(_transact(producer, numbers, recorded))
        enough = asyncio.Event()
        endless = _numbers(first + PER_ROUND, choose.randrange(50, 300), enough)
        working = [
            asyncio.create_task(_transact(producer, endless, recorded)) for _ in range(AT_WORK)
        ]
        await enough.wait()
        broker.kill()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def _table(broker: BrokerProcess) -> dict[int, str]:
    """What the broker says of undecided transactions, by the half's offset."""
    states = {"prepared": "pending", "parked": "parked"}
    async with Admin(config=ClientConfig(namesrv=broker.address)) as admin:
        return {one.offset: states[one.state] async for one in admin.transactions()}


def _agree(outcome: Outcome, recorded: dict[int, str], table: dict[int, str]) -> None:
    told = {half: str(state) for half, state in outcome.transactions.items()}
    assert outcome.found == [], outcome.details
    assert {half: told.get(half) for half in recorded} == recorded
    assert {h: s for h, s in told.items() if s in {"pending", "parked"}} == table


@pytest.mark.filterwarnings("default")  # PySpark's own
@pytest.mark.campaign
def test_a_killed_brokers_table_is_what_the_audit_says(tmp_path: Path) -> None:
    """Several messages, delays, parking, an operator's decisions and resumptions, and SIGKILL.

    Whoever is right about an undecided transaction, both say the same, and no confirmed decision
    is missing. Nothing counts as an anomaly, not even amid a start.
    """
    store = tmp_path / "store"
    recorded: dict[int, str] = {}
    with broker_process(
        tmp_path, transactionCheckMax=1, mappedFileSizeCommitLog=1 << 20, **ASKED_AT_ONCE
    ) as broker:
        for number in range(ROUNDS):
            broker.restart(**ASKED_AT_ONCE)
            asyncio.run(_round(broker, number * 1_000_000, recorded))
            assert audit_here(store, step=1 << 16).found == []  # as the crash left it
            broker.start(transactionTimeOut="1h", transactionCheckInterval="1h")
            _agree(audit_here(store, step=1 << 18), recorded, asyncio.run(_table(broker)))
        table = Counter(asyncio.run(_table(broker)).values())

        code = main(["audit", str(store), "--json", str(tmp_path / "summary.json")])

    counts = json.loads((tmp_path / "summary.json").read_text())["transactions"]
    assert code == 0
    assert table["pending"]
    assert table["parked"]
    assert {state: counts[state] for state in ("pending", "parked")} == table
    assert counts["committed"] >= sum(state == "committed" for state in recorded.values())


# --- everything but transactions


async def _live(broker: BrokerProcess) -> None:
    """Delays by level and by time, recalls, retries, dead letters, replies, topics made anew."""
    config = ClientConfig(namesrv=broker.address)

    async def handle(message: MessageView) -> None:
        number = int(message.body)
        if message.topic == "questions":
            await message.reply(message.body)
        elif number % 7 == 0 and not message.delivery_attempt > 2:
            await message.retry(timedelta(seconds=1))
        elif number % 11 == 0:
            await message.reject("never")

    async with (
        Producer("pg", config=config) as producer,
        Admin(config=config) as admin,
        Consumer("cg", {"plain": "*", "late": "*", "questions": "*"}, config=config,
                 start_from="first") as consumer,
    ):  # fmt: skip
        working = asyncio.create_task(consumer.run(handle))
        for number in range(120):
            body = b"%d" % number
            await producer.send(Message("plain", body, keys=[f"k{number}"], tags="a"))
            delay = timedelta(milliseconds=700 + 100 * (number % 20))
            sent = await producer.send(Message("late", body, deliver_after=delay))
            if number % 5 == 0:
                assert sent.recall_handle
                await producer.recall(sent.recall_handle)
            if number % 3 == 0:
                await producer.send(Message("late", body, delay_level=1 + number % 2))
            if number % 10 == 0:
                await producer.request(Message("questions", body), timeout=20)
            if number % 40 == 20:
                await admin.delete_topic("plain")
                await admin.create_topic("plain")
            await asyncio.sleep(0.05)
        await asyncio.sleep(9)  # whatever is due has been delivered
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def test_delays_retries_replies_and_recalls_alarm_nobody(tmp_path: Path) -> None:
    """Neither amid the run, nor after a kill and a start, nor after an orderly stop."""
    store = tmp_path / "store"
    with broker_process(tmp_path, mappedFileSizeCommitLog=1 << 20) as broker:
        asyncio.run(_live(broker))
        _is_clean(store)
        broker.kill()
        broker.start()
        asyncio.run(_live(broker))
        _is_clean(store)
    _is_clean(store)


def _is_clean(store: Path) -> None:
    outcome = audit_here(store, step=1 << 18)
    assert outcome.found == [], outcome.details
    delays = [one for one in oracle.read(store / "commitlog", []) if one.topic == oracle.TIMER]
    assert len(delays) > 100
