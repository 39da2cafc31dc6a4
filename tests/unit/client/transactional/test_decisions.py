"""Delivery of decisions: many in one request, each with its own result."""

from __future__ import annotations

import asyncio

import pytest

from halfmq.client import DecisionConflictError, Transaction, TransactionProducer
from halfmq.client.message import Decision
from halfmq.client.transactional import decisions as client_decisions
from halfmq.remoting.codes import ResponseCode
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_parts import tasks_of
from tests.support.client_transactions import (
    COMMIT,
    END,
    ENDS,
    IMPATIENT,
    MESSAGE,
    ROLLBACK,
    new_producer,
)
from tests.support.fake_broker import Answer, Cut, FakeBroker, Ignore, Refuse, fake_broker, until


async def prepared(producer: TransactionProducer, count: int) -> list[Transaction]:
    transactions = [producer.transaction(MESSAGE) for _ in range(count)]
    for transaction in transactions:
        await transaction.__aenter__()
    return transactions


async def finish(producer: TransactionProducer, transactions: list[Transaction]) -> list[object]:
    """Commit all in one pass of the loop."""
    return await asyncio.gather(
        *(producer.finish(transaction, Decision.COMMIT) for transaction in transactions),
        return_exceptions=True,
    )


@on_both_loops
async def test_decisions_of_one_pass_leave_as_one_request(broker: FakeBroker) -> None:
    """Many concurrent transactions need few round trips."""
    async with new_producer(broker) as producer:
        transactions = await prepared(producer, 5)
        await finish(producer, transactions)

    assert (len(broker.requests_of(END)), len(broker.requests_of(ENDS))) == (0, 1)
    finals = {final.property_map["UNIQ_KEY"]: final for final in broker.messages("orders")}
    assert len(finals) == 5
    for transaction in transactions:
        assert (transaction.decision, transaction.decided) == (Decision.COMMIT, True)
        assert transaction.final_message_id == finals[transaction.id].msg_id


@on_both_loops
async def test_a_decision_that_is_alone_is_an_end_transaction(broker: FakeBroker) -> None:
    """A confirmed COMMIT has the id of the final message; a ROLLBACK has none."""
    async with new_producer(broker) as producer:
        async with producer.transaction(MESSAGE) as committed:
            pass
        async with producer.transaction(MESSAGE) as rolled_back:
            rolled_back.decide(Decision.ROLLBACK)

    (final,) = broker.messages("orders")
    assert (len(broker.requests_of(END)), len(broker.requests_of(ENDS))) == (2, 0)
    assert committed.final_message_id == final.msg_id
    assert (rolled_back.decided, rolled_back.final_message_id) == (True, None)


@on_both_loops
async def test_a_lost_answer_to_a_batch_yields_no_second_message(broker: FakeBroker) -> None:
    """The batch is resent, and its results have the ids of the first final messages."""
    broker.fail(ENDS, Cut(after_doing=True), Cut(), Refuse(ResponseCode.SYSTEM_BUSY))
    async with new_producer(broker) as producer:
        transactions = await prepared(producer, 3)
        await finish(producer, transactions)

    finals = broker.messages("orders")
    assert [half.decisions for half in broker.halves.values()] == [[COMMIT, COMMIT]] * 3
    assert {t.final_message_id for t in transactions} == {final.msg_id for final in finals}
    assert len(finals) == 3
    assert all(transaction.decided for transaction in transactions)


@on_both_loops
async def test_each_transaction_of_a_batch_has_its_own_result(broker: FakeBroker) -> None:
    """Only a transaction that was rolled back before gets the error."""
    async with new_producer(broker) as producer:
        first, late, last = await prepared(producer, 3)
        broker.half_of(late.id).decisions.append(ROLLBACK)
        outcomes = await finish(producer, [first, late, last])

    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        DecisionConflictError,
        type(None),
    ]
    assert (first.decided, late.decided, last.decided) == (True, False, True)
    assert late.final_message_id is None


@in_steady_time
async def test_only_what_may_help_is_told_again() -> None:
    """Only the refused decision is resent, by itself, until the timeout."""
    async with fake_broker() as broker, new_producer(broker, config=IMPATIENT) as producer:
        known, unknown = await prepared(producer, 2)
        half = broker.half_of(unknown.id)
        del broker.halves[half.record.physical_offset]
        await finish(producer, [known, unknown])
        assert (known.decided, unknown.decided) == (True, False)
        # SYSTEM_ERROR is worth another try, alone and then no longer in a batch.
        assert len(broker.requests_of(ENDS)) == 1
        assert len(broker.requests_of(END)) > 1


async def test_a_batch_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker refuses longer batches."""
    monkeypatch.setattr(client_decisions, "ENDS_MAX", 2)
    async with fake_broker() as broker, new_producer(broker) as producer:
        transactions = await prepared(producer, 5)
        await finish(producer, transactions)

    assert (len(broker.requests_of(ENDS)), len(broker.requests_of(END))) == (2, 1)
    assert all(transaction.decided for transaction in transactions)


async def test_an_older_broker_of_ours_gets_them_one_by_one() -> None:
    """It answers once that it does not support batches."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        broker.batches = False
        for _ in range(2):
            transactions = await prepared(producer, 3)
            await finish(producer, transactions)
            assert all(transaction.decided for transaction in transactions)

    assert (len(broker.requests_of(ENDS)), len(broker.requests_of(END))) == (1, 6)


async def test_an_official_broker_gets_them_one_by_one() -> None:
    """It does not return the id of the final message."""
    async with fake_broker(halfmq=False) as broker, new_producer(broker) as producer:
        transactions = await prepared(producer, 3)
        await finish(producer, transactions)

    assert (len(broker.requests_of(ENDS)), len(broker.requests_of(END))) == (0, 3)
    assert {(t.decided, t.final_message_id) for t in transactions} == {(True, None)}


async def test_a_nonsensical_answer_to_a_batch_is_no_confirmation() -> None:
    """This covers too few results, and bytes that are not results."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        for body in (b"\x90", b"nonsense"):
            transactions = await prepared(producer, 2)
            broker.fail(ENDS, Answer(body))
            await finish(producer, transactions)
            assert not any(transaction.decided for transaction in transactions)


async def test_closing_settles_a_batch_that_has_not_left() -> None:
    """Callers that wait for it return."""
    async with fake_broker() as broker:
        producer = new_producer(broker)
        await producer.start()
        transactions = await prepared(producer, 2)
        broker.fail(ENDS, Ignore())
        waiting = asyncio.ensure_future(finish(producer, transactions))
        await until(lambda: bool(broker.requests_of(ENDS)))
        # Ended as a loop that stops ends it, at a moment that a user cannot hit.
        for task in tasks_of(producer):
            task.cancel()

        assert await waiting == [None, None]
        assert not any(transaction.decided for transaction in transactions)
        await producer.close()


async def test_a_batch_cancelled_before_its_first_step_is_settled() -> None:
    """Its task never ran, so it could not settle the decisions itself."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        transactions = await prepared(producer, 2)
        finishing = [
            asyncio.ensure_future(producer.finish(transaction, Decision.COMMIT))
            for transaction in transactions
        ]
        await asyncio.sleep(0)  # its callers have decided, and the request has not left
        # The moment at which one is open shows in nothing else.
        assert producer._decisions._open_batches
        # Ended as a loop that stops ends it, at a moment that a user cannot hit.
        for task in tasks_of(producer):
            task.cancel()

        assert await asyncio.gather(*finishing) == [None, None]
        assert broker.requests_of(ENDS) == []
        # A batch that stays open shows in nothing else.
        assert not producer._decisions._open_batches
