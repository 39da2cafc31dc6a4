"""Race windows in which a decision is lost, repeated, late, or names the wrong record."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from typing import Final

import pytest

from halfmq.client import (
    Decision,
    Message,
    MessageView,
    TransactionFencedError,
    TransactionLedger,
    TransactionProducer,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.own_requests import (
    FinalMessageResponseHeader,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_end_results,
    encode_entries,
)
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.topics import OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer, until
from tests.support.race_windows import HOUR_MS, INTERVAL_MS, TIMEOUT_MS, Rig, windowed
from tests.support.usual_headers import send_header

MANY: Final = 500


@windowed()
async def test_w06_a_lost_decision_is_asked_for_when_it_is_due(rig: Rig) -> None:
    """After a lost one-way END, the check gets the decision."""
    producer = await rig.peer()
    half = await producer.prepare("K1")

    await rig.wait(TIMEOUT_MS + 100, step_ms=50)
    (check,) = producer.checks
    await producer.answer_check(check, COMMIT)

    assert check.offset == half.offset
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w06_no_decision_is_dropped_while_the_disk_is_behind(rig: Rig) -> None:
    """One-way decisions that wait longer than RocketMQ's three seconds are all accepted."""
    producer = await rig.peer()
    halves = [await producer.prepare(f"{number:032X}") for number in range(MANY)]
    rig.disk.held = True
    for half in halves:
        producer.end_one_way(half, COMMIT)
    await producer.sync()
    await rig.wait(5_000)
    rig.disk.held = False
    await rig.settle()

    assert rig.service.metrics()["pending"] == 0
    assert len(rig.consumed()) == MANY
    await rig.wait(HOUR_MS)
    assert producer.checks == []


@windowed()
async def test_w06_a_lost_answer_never_makes_a_second_message(rig: Rig) -> None:
    """A halfmq client repeats a decision without an answer, and gets the answer of the first."""

    async def never_asked(_message: MessageView) -> Decision:
        raise AssertionError("the decision was confirmed")

    async def decide(producer: TransactionProducer) -> bool:
        async with producer.transaction(Message("orders", b"row 1")) as transaction:
            rig.disk.held = True  # the answer to the decision waits for the disk
        return transaction.decided

    producer = TransactionProducer("pg", checker=never_asked, config=rig.client())
    await rig.patiently(producer.__aenter__())
    deciding = asyncio.ensure_future(decide(producer))
    await until(lambda: rig.metrics["committed"] == 1)
    for connection in rig.connections:
        connection.abort()
    await until(lambda: not rig.connections)
    rig.disk.held = False

    assert await rig.patiently(_result(deciding))
    await rig.patiently(producer.close())

    assert rig.metrics["repeated"] == 1
    assert rig.bodies() == [b"row 1"]


async def _result(task: asyncio.Future[bool]) -> bool:
    return await task


@windowed()
async def test_w07_a_commit_after_the_first_check_is_delivered_once(rig: Rig) -> None:
    """A slow local transaction gets a check, and decides before it answers."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100)
    (check,) = producer.checks

    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert (await producer.answer_check(check, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(HOUR_MS)

    assert len(producer.checks) == 1
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w08_commit_after_accepted_rollback_is_refused(rig: Rig) -> None:
    """The first decision wins, also after a kill; the refusal names it and its time."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100)
    (check,) = producer.checks
    assert (await producer.answer_check(check, ROLLBACK)).code == ResponseCode.SUCCESS

    first = await producer.end(half, COMMIT)
    await rig.kill()
    late = await (await rig.peer()).end(half, COMMIT)

    for refusal in (first, late):
        assert refusal.code == ResponseCode.ILLEGAL_OPERATION
        assert "rolled back at 2023-11-14T22:13:26" in (refusal.remark or "")
    assert rig.finals_of(half) == []
    assert rig.bodies() == []


@windowed()
async def test_w08_the_fence_makes_the_late_local_commit_fail(rig: Rig) -> None:
    """A check that finds no row inserts a tombstone, so the slow local transaction fails."""
    path = rig.root.parent / "orders.db"
    database = sqlite3.connect(path)
    database.execute("create table orders (id text primary key)")
    ledger = TransactionLedger()
    ledger.create_table(database)
    checker = ledger.checker(lambda: sqlite3.connect(path))
    producers = [TransactionProducer("pg", checker=checker, config=rig.client()) for _ in range(2)]
    for producer in producers:
        await rig.patiently(producer.__aenter__())
    transaction = producers[0].transaction(Message("orders", b"row 1"))
    await rig.patiently(transaction.__aenter__())
    # The slow producer answers UNKNOWN while its transaction runs; the other one cannot know.
    await rig.wait_for(lambda: rig.metrics["checks_delivered"] == 1)
    await until(lambda: rig.metrics["checks_answered"] == 1)
    await rig.wait_for(lambda: rig.metrics["checks_delivered"] == 2)
    await until(lambda: rig.metrics["rolled_back"] == 1)

    database.execute("insert into orders values ('o-1')")
    with pytest.raises(TransactionFencedError) as fenced:
        ledger.record(database.cursor(), transaction.id)
    database.rollback()
    await rig.patiently(transaction.__aexit__(type(fenced.value), fenced.value, None))
    for producer in producers:
        await rig.patiently(producer.close())

    assert database.execute("select * from orders").fetchall() == []
    assert rig.bodies() == []
    assert rig.metrics["refused"] == 0  # the broker never heard a second opinion


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@windowed()
async def test_w09_the_same_decision_again_gets_the_same_answer(rig: Rig, decision: int) -> None:
    """In one burst, later, or after a kill: one record, and the id of one final message."""
    producer = await rig.peer(ours=True)
    half = await producer.prepare("K1")
    header = producer.end_request(half, decision)
    frames = [producer.frame(RequestCode.END_TRANSACTION, header) for _ in range(5)]
    producer.write(b"".join(frame for _, frame in frames))
    answers = [await producer.answer(opaque) for opaque, _ in frames]
    end = rig.store.write_offset
    answers.append(await producer.end(half, decision))
    assert rig.store.write_offset == end
    await rig.kill()
    producer = await rig.peer(ours=True)
    answers.append(await producer.end(half, decision))

    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    ids = {response_header(answer, FinalMessageResponseHeader).msg_id for answer in answers}
    assert ids == ({rig.final_id(half)} if decision == COMMIT else {None})
    assert rig.bodies() == ([b"row 1"] if decision == COMMIT else [])


@windowed()
async def test_w09_a_batch_of_decisions_takes_each_transaction_once(rig: Rig) -> None:
    """Duplicates and opposites in one batch, and the batch again, change nothing."""
    producer = await rig.peer(ours=True)
    one, two = await producer.prepare("K1", b"one"), await producer.prepare("K2", b"two")
    ends = [
        TransactionEnd(half.offset, half.queue_offset, decision)
        for half, decision in [(one, COMMIT), (one, COMMIT), (one, ROLLBACK), (two, ROLLBACK)]
    ]
    results = []
    for _ in range(2):
        answer = await producer.call(
            RequestCode.END_TRANSACTIONS,
            TransactionsRequestHeader(producer_group="pg"),
            encode_entries(ends),
        )
        results.append(decode_end_results(answer.body))

    assert [result.code for result in results[0]] == [0, 0, ResponseCode.ILLEGAL_OPERATION, 0]
    assert [result.message_id for result in results[0][:2]] == [rig.final_id(one)] * 2
    assert results[0] == results[1]
    assert rig.bodies() == [b"one"]


async def _plain(producer: Peer) -> Half:
    """Send a message that resembles a half as much as a client can make it."""
    properties = encode_properties(
        {"PGROUP": "pg", "UNIQ_KEY": "K9", "REAL_TOPIC": "orders", "REAL_QID": "0"}
    )
    header = send_header(topic="plain", default_topic_queue_nums=1, properties=properties.decode())
    answer = await producer.call(RequestCode.SEND_MESSAGE_V2, header, b"plain")
    return producer.half_of(answer)


@windowed(check_max=1)
async def test_w18_only_a_half_record_can_be_decided(rig: Rig) -> None:
    """A decision that names any other record is refused, and changes no transaction."""
    producer = await rig.peer()
    victim = await producer.prepare("K1", b"victim")  # half queue offset 0
    committed, rolled_back = await producer.prepare("K2"), await producer.prepare("K3")
    await producer.end(committed, COMMIT)
    await producer.end(rolled_back, ROLLBACK)
    await rig.wait(TIMEOUT_MS + 2 * INTERVAL_MS)
    plain = await _plain(producer)
    named = [
        record
        for record in rig.records()
        if record.prepared_transaction_offset
        or record.topic in {OP_TOPIC, "plain"}
        or record.topic == TRANS_CHECK_MAX_TIME_TOPIC
    ]
    assert {record.physical_offset for record in named} > {plain.offset}
    assert len({(record.topic, record.sys_flag & 0xC) for record in named}) >= 4
    end, decided = rig.store.write_offset, rig.service.metrics()["committed"]

    for record in named:
        false_half = Half(record.physical_offset, record.queue_offset, "", "", "pg", b"")
        answer = await producer.end(false_half, COMMIT)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        # A rollback record has no entry in a queue, so nobody can name it.
        why = (
            "Find prepared" if record.sys_flag & 0xC == 0xC else "The record is not a half message"
        )
        assert (answer.remark or "").startswith(why)

    assert rig.store.write_offset == end
    assert rig.service.metrics()["committed"] == decided
    assert (await producer.end(victim, COMMIT)).code == ResponseCode.SUCCESS
    assert sorted(rig.bodies()) == [b"row 1", b"victim"]


@windowed()
async def test_w18_a_decision_must_come_from_the_group_that_prepared(rig: Rig) -> None:
    """Another group, or another queue offset, decides nothing."""
    producer, stranger = await rig.peer("pg"), await rig.peer("strangers")
    half = await producer.prepare("K1")
    end = rig.store.write_offset

    for forged in (
        Half(half.offset, half.queue_offset, "", "", "strangers", b""),
        Half(half.offset, half.queue_offset + 1, "", "", "pg", b""),
        Half(half.offset + 1, half.queue_offset, "", "", "pg", b""),
    ):
        assert (await stranger.end(forged, COMMIT)).code == ResponseCode.SYSTEM_ERROR

    assert rig.store.write_offset == end
    assert (await producer.end(half, ROLLBACK)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@windowed()
async def test_w18_a_decision_must_name_the_transaction_of_the_half(
    rig: Rig, decision: int
) -> None:
    """After a power cut another half may have the offset that a producer knows."""
    producer = await rig.peer(ours=True)
    half = await producer.prepare("1" * 32)
    other = replace(half, transaction_id="2" * 32)
    batch = encode_entries(
        [TransactionEnd(half.offset, half.queue_offset, decision, other.transaction_id)]
    )
    batch_header = TransactionsRequestHeader(producer_group="pg")

    refused = [await producer.end(other, decision)]
    (result,) = decode_end_results(
        (await producer.call(RequestCode.END_TRANSACTIONS, batch_header, batch)).body
    )
    assert rig.metrics["pending"] == 1
    assert (await producer.end(half, decision)).code == ResponseCode.SUCCESS
    refused.append(await producer.end(other, decision))  # decided, and still not that one

    assert {answer.code for answer in refused} == {result.code} == {ResponseCode.SYSTEM_ERROR}
    for remark in (refused[0].remark, refused[1].remark, result.remark):
        assert f"is that of {half.transaction_id!r}" in (remark or "")


@windowed()
async def test_w23_answers_to_two_checks_are_one_decision(rig: Rig) -> None:
    """A slow producer answers two checks; both name one half, which is committed once."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.wait(TIMEOUT_MS + 3 * INTERVAL_MS)
    first, second, *_ = producer.checks
    assert first.offset == second.offset == half.offset

    answers = [await producer.answer_check(check, COMMIT) for check in (second, first)]
    await rig.wait(HOUR_MS)
    count = len(producer.checks)
    await rig.wait(HOUR_MS)

    assert [answer.code for answer in answers] == [ResponseCode.SUCCESS] * 2
    assert len(producer.checks) == count
    assert rig.bodies() == [b"row 1"]
