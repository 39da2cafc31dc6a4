"""Transactions: half message, decision, and what the broker is told when it asks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ClientClosedError,
    ClientConfig,
    ConfigurationError,
    DecisionConflictError,
    HalfNotDurableError,
    InvalidMessageError,
    MessageView,
    SendTimeoutError,
    Transaction,
    TransactionListener,
    TransactionProducer,
    UnsupportedRequestError,
    transaction,
)
from halfmq.client.administration import transactions as administration
from halfmq.client.message import Decision
from halfmq.remoting.codes import ResponseCode
from halfmq.testing import InMemoryBroker
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_transactions import (
    COMMIT,
    END,
    IMPATIENT,
    MESSAGE,
    QUICK,
    ROLLBACK,
    SEND,
    UNKNOWN,
    LocalError,
    commits,
    ends,
    new_producer,
    undecided,
)
from tests.support.fake_broker import Cut, FakeBroker, Ignore, Refuse, fake_broker, until


async def fail_after(action: Callable[[], object]) -> None:
    action()
    raise LocalError


@on_both_loops
async def test_leaving_normally_commits(broker: FakeBroker) -> None:
    """The half message is stored before the block runs, and delivered after it."""
    async with new_producer(broker) as producer:
        async with producer.transaction(MESSAGE) as tx:
            (half,) = broker.halves.values()
            assert broker.messages("orders") == []
            assert half.record.property_map["UNIQ_KEY"] == tx.id
            assert half.record.msg_id == tx.message_id
            assert (tx.decision, tx.decided) == (None, False)
        assert (tx.decision, tx.decided) == (Decision.COMMIT, True)

    (final,) = broker.messages("orders")
    assert final.body == b"o-2"
    view = MessageView(final, "broker-a")
    assert (view.transaction_id, view.keys) == (tx.id, "o-2")


class Asked:
    """A checker that says what it is told to and notes what it was asked about."""

    def __init__(self, *answers: Decision | Exception) -> None:
        self.answers = list(answers)
        self.views: list[MessageView] = []
        self.release = asyncio.Event()
        self.release.set()

    async def __call__(self, message: MessageView) -> Decision:
        self.views.append(message)
        await self.release.wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def asked_and_committed(broker: FakeBroker, transaction_id: str) -> None:
    """A check of the broker reaches the checker, and that answers COMMIT."""
    half = broker.half_of(transaction_id)
    assert half.decisions == []
    assert broker.check(half)
    await until(lambda: half.decisions == [COMMIT])


@on_both_loops
@pytest.mark.parametrize("answer", [Decision.COMMIT, Decision.ROLLBACK])
async def test_a_block_left_by_an_error_is_decided_by_the_checker(
    broker: FakeBroker, answer: Decision
) -> None:
    """The row may have been committed before the error, which propagates."""
    checker = Asked(answer)
    async with new_producer(broker, checker) as producer:
        with pytest.raises(LocalError):
            async with producer.transaction(MESSAGE) as tx:
                raise LocalError

    assert (tx.decision, tx.decided) == (answer, True)
    assert broker.half_of(tx.id).decisions == [answer]
    assert [view.transaction_id for view in checker.views] == [tx.id]
    assert len(broker.messages("orders")) == (answer is Decision.COMMIT)


@in_steady_time
@pytest.mark.parametrize("answer", [Decision.UNKNOWN, ValueError("no database"), None])
async def test_a_checker_that_cannot_tell_leaves_it_to_the_broker(
    broker: FakeBroker, answer: Decision | Exception | None
) -> None:
    """It answers UNKNOWN, raises or takes long; a later check of the broker decides."""
    checker = Asked(Decision.COMMIT if answer is None else answer, Decision.COMMIT)
    if answer is None:
        checker.release.clear()
    config = replace(QUICK, own_check_timeout=0.05)  # not as long as a check of the broker may take
    async with new_producer(broker, checker, config) as producer:
        with pytest.raises(LocalError):
            async with producer.transaction(MESSAGE) as tx:
                raise LocalError
        assert (tx.decision, tx.decided) == (Decision.UNKNOWN, False)
        checker.release.set()
        await asked_and_committed(broker, tx.id)

    assert len(checker.views) == 2


@on_both_loops
async def test_a_cancelled_block_is_decided_by_the_checker(broker: FakeBroker) -> None:
    """A request that times out in a web server must not separate row and message."""
    checker = Asked(Decision.COMMIT)
    async with new_producer(broker, checker) as producer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), producer.transaction(MESSAGE):
                raise AssertionError("it is cancelled while the half message is sent")
        entered = asyncio.Event()

        async def work() -> None:
            async with asyncio.timeout(60), producer.transaction(MESSAGE):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.ensure_future(work())
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])

    assert task.cancelled()
    assert len(checker.views) == 1
    assert [half.decisions for half in broker.halves.values()][-1] == [COMMIT]


@on_both_loops
async def test_members_of_a_task_group_are_decided_one_by_one(broker: FakeBroker) -> None:
    """A failure cancels the others, and each transaction is checked by itself."""
    checker = Asked(Decision.ROLLBACK)
    everybody = asyncio.Barrier(4)

    async def work(producer: TransactionProducer, fails: bool) -> None:
        async with producer.transaction(MESSAGE):
            await everybody.wait()
            if fails:
                raise LocalError
            await asyncio.sleep(60)

    async def run(producer: TransactionProducer) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(work(producer, fails=number == 2))

    async with new_producer(broker, checker) as producer:
        with pytest.raises(ExceptionGroup) as caught:
            await run(producer)

    assert [type(error) for error in caught.value.exceptions] == [LocalError]
    assert [half.decisions for half in broker.halves.values()] == [[ROLLBACK]] * 4


@on_both_loops
async def test_a_second_cancellation_leaves_it_to_the_broker(broker: FakeBroker) -> None:
    """The caller does not wait, and the transaction no longer counts as running."""
    checker = Asked(Decision.COMMIT)
    checker.release.clear()
    transactions: list[Transaction] = []

    async def work(producer: TransactionProducer) -> None:
        async with producer.transaction(MESSAGE) as tx:
            transactions.append(tx)
            raise LocalError

    async with new_producer(broker, checker) as producer:
        task = asyncio.ensure_future(work(producer))
        await until(lambda: bool(checker.views))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        (tx,) = transactions
        assert (tx.decision, tx.decided) == (Decision.UNKNOWN, False)
        checker.release.set()
        await asked_and_committed(broker, tx.id)


async def test_cancelled_while_the_checkers_answer_is_sent_still_sends_it() -> None:
    """The decision does not change after it was made."""
    async with fake_broker() as broker, new_producer(broker, Asked(Decision.COMMIT)) as producer:
        broker.create_topic("orders")
        broker.fail(END, Refuse(ResponseCode.SYSTEM_BUSY))

        async def work() -> None:
            async with producer.transaction(MESSAGE):
                raise LocalError

        task = asyncio.ensure_future(work())
        await until(lambda: bool(broker.requests_of(END)))
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        await until(lambda: len(broker.messages("orders")) == 1)
        assert [end.commit_or_rollback for end in ends(broker)] == [COMMIT] * 2


@on_both_loops
async def test_rollback_asks_nobody(broker: FakeBroker) -> None:
    """The program knows that its database transaction was rolled back."""
    async with new_producer(broker) as producer:
        tx = producer.transaction(MESSAGE)
        with pytest.raises(LocalError):
            async with tx:
                await fail_after(tx.rollback)
        async with producer.transaction(MESSAGE) as nothing_to_do:
            nothing_to_do.rollback()

    assert [half.decisions for half in broker.halves.values()] == [[ROLLBACK]] * 2
    assert (tx.decision, nothing_to_do.decision) == (Decision.ROLLBACK, Decision.ROLLBACK)


@on_both_loops
async def test_a_coroutine_that_is_closed_leaves_it_to_the_broker(broker: FakeBroker) -> None:
    """It must not await anything; this also applies to abandoned generators."""
    checker = Asked(Decision.COMMIT)

    async def block(tx: Transaction) -> AsyncGenerator[None, None]:
        async with tx:
            yield

    async with new_producer(broker, checker) as producer:
        tx = producer.transaction(MESSAGE)
        generator = block(tx)
        await anext(generator)
        await generator.aclose()
        assert (tx.decision, tx.decided) == (Decision.UNKNOWN, False)
        await asked_and_committed(broker, tx.id)

        bare = producer.transaction(MESSAGE)
        await bare.__aenter__()
        closing = bare.__aexit__(GeneratorExit, GeneratorExit(), None)
        with pytest.raises(StopIteration):
            closing.send(None)  # it never suspends
        await asked_and_committed(broker, bare.id)


@on_both_loops
async def test_a_transaction_that_nobody_has_any_more_is_not_running(broker: FakeBroker) -> None:
    """Its block was interrupted and never left; then the checker may be called."""
    checker = Asked(Decision.COMMIT)
    async with new_producer(broker, checker) as producer:
        tx: Transaction | None = producer.transaction(MESSAGE)
        assert tx is not None
        await tx.__aenter__()
        half = broker.half_of(tx.id)
        broker.check(half)
        await until(lambda: half.decisions == [UNKNOWN])
        tx = None
        gc.collect()
        broker.check(half)
        await until(lambda: half.decisions == [UNKNOWN, COMMIT])


@on_both_loops
async def test_a_producer_closed_meanwhile_decides_nothing(broker: FakeBroker) -> None:
    """The checker's answer cannot be sent, so the broker asks another member."""
    checker = Asked(Decision.COMMIT)
    producer = new_producer(broker, checker)
    await producer.start()
    tx = producer.transaction(MESSAGE)

    async def close() -> None:
        await producer.close()
        raise LocalError

    with pytest.raises(LocalError):
        async with tx:
            await close()

    assert (tx.decision, tx.decided) == (Decision.COMMIT, False)
    assert broker.half_of(tx.id).decisions == []


@on_both_loops
async def test_closing_waits_for_the_checker(broker: FakeBroker) -> None:
    """It also waits until the decision is delivered."""
    checker = Asked(Decision.COMMIT)
    checker.release.clear()
    producer = new_producer(broker, checker)
    await producer.start()
    tx = producer.transaction(MESSAGE)

    async def work() -> None:
        async with tx:
            raise LocalError

    task = asyncio.ensure_future(work())
    await until(lambda: bool(checker.views))
    closing = asyncio.ensure_future(producer.close())
    await asyncio.sleep(0)
    checker.release.set()
    await closing
    await asyncio.wait([task])

    assert isinstance(task.exception(), LocalError)
    assert (tx.decision, tx.decided) == (Decision.COMMIT, True)


async def test_closing_cuts_off_a_checker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own error propagates; the broker asks another member."""
    monkeypatch.setattr(transaction, "CLOSE_SECONDS", 0.01)
    checker = Asked(Decision.COMMIT)
    checker.release.clear()
    async with fake_broker() as broker:
        broker.create_topic("orders")
        producer = new_producer(broker, checker)
        await producer.start()
        tx = producer.transaction(MESSAGE)

        async def work() -> None:
            async with tx:
                raise LocalError

        task = asyncio.ensure_future(work())
        await until(lambda: bool(checker.views))
        await producer.close()
        await asyncio.wait([task])

        assert isinstance(task.exception(), LocalError)
        assert tx.decision is Decision.UNKNOWN


@on_both_loops
async def test_cancelled_while_the_half_message_is_sent_rolls_it_back(broker: FakeBroker) -> None:
    """It may be stored, and its block will never run."""
    async with new_producer(broker, config=ClientConfig()) as producer:
        entering = asyncio.ensure_future(producer.transaction(MESSAGE).__aenter__())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])

    assert entering.cancelled()
    assert [half.decisions for half in broker.halves.values()] in ([], [[ROLLBACK]])


async def test_cancelled_while_deciding_still_decides() -> None:
    """The decision is sent although its caller no longer waits."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        broker.create_topic("orders")
        broker.fail(END, Refuse(ResponseCode.SYSTEM_BUSY))

        async def work() -> None:
            async with producer.transaction(MESSAGE):
                pass

        task = asyncio.ensure_future(work())
        await until(lambda: bool(broker.requests_of(END)))
        task.cancel()
        await asyncio.wait([task])

        await until(lambda: len(broker.messages("orders")) == 1)


@on_both_loops
@pytest.mark.parametrize("decision", list(Decision))
async def test_an_explicit_decision_wins(broker: FakeBroker, decision: Decision) -> None:
    """``decide`` overrides how the block ends."""
    async with new_producer(broker) as producer:
        tx = producer.transaction(MESSAGE)
        with pytest.raises(LocalError):
            async with tx:
                await fail_after(lambda: tx.decide(decision))

    expected = [] if decision is Decision.UNKNOWN else [decision]
    assert broker.half_of(tx.id).decisions == expected
    assert (tx.decision, tx.decided) == (decision, bool(expected))


@on_both_loops
@pytest.mark.parametrize("status", [10, 11, 12])
async def test_a_half_message_that_is_not_safe_stops_the_transaction(
    broker: FakeBroker, status: int
) -> None:
    """A power failure could lose it after the row was written."""
    broker.send_status = status
    async with new_producer(broker) as producer:
        with pytest.raises(HalfNotDurableError) as caught:
            async with producer.transaction(MESSAGE):
                raise AssertionError("the block must not run")

    assert caught.value.retriable
    assert broker.half_of(caught.value.transaction_id).decisions == [ROLLBACK]


async def test_a_refused_half_message_does_not_run_the_block() -> None:
    """The error is that of an ordinary send."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        broker.fail(SEND, Refuse(ResponseCode.MESSAGE_ILLEGAL))

        with pytest.raises(BrokerRefusedError):
            async with producer.transaction(MESSAGE):
                raise AssertionError("the block must not run")

        assert broker.requests_of(END) == []
        with pytest.raises(InvalidMessageError):
            await producer.transaction(replace(MESSAGE, delay_level=1)).__aenter__()


@on_both_loops
async def test_a_decision_is_repeated_until_confirmed(broker: FakeBroker) -> None:
    """On a halfmq broker decisions are idempotent."""
    broker.fail(END, Cut(), Cut(after_doing=True))
    async with new_producer(broker) as producer, producer.transaction(MESSAGE) as tx:
        pass

    assert tx.decided
    assert broker.half_of(tx.id).decisions == [COMMIT, COMMIT]
    assert len(broker.messages("orders")) == 1


async def test_an_official_broker_gets_a_commit_once_when_in_doubt() -> None:
    """It would deliver the message once per COMMIT; its check settles the transaction."""
    async with fake_broker(halfmq=False) as broker:
        broker.create_topic("orders")
        async with new_producer(broker) as producer:
            broker.fail(END, Cut(after_doing=True))
            async with producer.transaction(MESSAGE) as commit:
                pass
            broker.fail(END, Cut(after_doing=True))
            async with producer.transaction(MESSAGE) as rollback:
                rollback.rollback()

        assert (commit.decided, broker.half_of(commit.id).decisions) == (False, [COMMIT])
        assert (rollback.decided, len(broker.half_of(rollback.id).decisions)) == (True, 2)
        assert len(broker.messages("orders")) == 1


@in_steady_time
async def test_an_undelivered_commit_is_no_error_of_the_block(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The row is committed; this producer answers the later check without its checker."""
    broker.fail(END, *[Ignore()] * 9)
    async with new_producer(broker, config=IMPATIENT) as producer:
        async with producer.transaction(MESSAGE) as tx:
            pass
        assert (tx.decision, tx.decided) == (Decision.COMMIT, False)
        assert tx.id in caplog.text
        broker.forgive()

        # Its silence has cost the broker the connection; it asks again when there is another.
        await until(lambda: broker.check(broker.half_of(tx.id)) and bool(broker.messages("orders")))

    assert ends(broker)[-1].from_transaction_check


@on_both_loops
async def test_a_commit_that_comes_too_late_is_an_error(broker: FakeBroker) -> None:
    """The row exists and the message will not be delivered: the program must know."""
    async with new_producer(broker) as producer:
        with pytest.raises(DecisionConflictError, match="COMMIT of transaction"):
            async with producer.transaction(MESSAGE) as tx:
                broker.half_of(tx.id).decisions.append(ROLLBACK)

    assert not tx.decided


async def test_a_rollback_that_comes_too_late_keeps_the_users_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The user's error propagates; the conflict is logged."""
    checker = Asked(Decision.ROLLBACK)
    async with fake_broker() as broker, new_producer(broker, checker) as producer:
        tx = producer.transaction(MESSAGE)
        with pytest.raises(LocalError):
            async with tx:
                await fail_after(lambda: broker.half_of(tx.id).decisions.append(COMMIT))

    assert "event=decision_refused" in caplog.text


@on_both_loops
async def test_a_running_transaction_is_not_given_to_the_checker(broker: FakeBroker) -> None:
    """Its row is not visible yet, so the checker would answer ROLLBACK."""
    async with new_producer(broker) as producer, producer.transaction(MESSAGE) as tx:
        broker.check(broker.half_of(tx.id))
        await until(lambda: broker.half_of(tx.id).decisions == [UNKNOWN])

    assert broker.half_of(tx.id).decisions == [UNKNOWN, COMMIT]


@on_both_loops
async def test_a_producer_that_is_started_again_answers_checks_again(broker: FakeBroker) -> None:
    """An application's producer is, with each of its tests."""
    producer = new_producer(broker, commits)
    for _ in range(2):
        async with producer:
            half = broker.half_of(await undecided(producer))
            await until(lambda: broker.check(half) and half.decisions == [COMMIT])  # noqa: B023
            async with producer.transaction(MESSAGE):
                pass

    assert len(broker.messages("orders")) == 4


@on_both_loops
async def test_a_half_message_sent_again_is_one_transaction(broker: FakeBroker) -> None:
    """A retry after a lost answer has the same id, by which the broker deduplicates."""
    async with new_producer(broker) as producer:
        broker.fail(SEND, Cut(after_doing=True))
        async with producer.transaction(MESSAGE) as tx:
            (half,) = broker.halves.values()
            assert half.record.msg_id == tx.message_id

    assert len(broker.requests_of(SEND)) == 2
    assert half.decisions == [COMMIT]
    assert len(broker.messages("orders")) == 1


@on_both_loops
async def test_a_second_copy_of_a_half_message_is_rolled_back(broker: FakeBroker) -> None:
    """Deduplication at the broker is limited; only one half message was decided."""
    broker.duplicates = False
    async with new_producer(broker) as producer:
        broker.fail(SEND, Cut(after_doing=True))
        async with producer.transaction(MESSAGE) as tx:
            pass
        stray, used = sorted(broker.halves.values(), key=lambda half: half.record.physical_offset)
        assert used.decisions == [COMMIT]

        broker.check(stray)
        await until(lambda: bool(stray.decisions))

    assert stray.decisions == [ROLLBACK]
    assert len(broker.messages("orders")) == 1
    assert tx.message_id == used.record.msg_id


@in_steady_time
async def test_a_half_message_whose_block_never_ran_is_rolled_back_by_its_check(
    broker: FakeBroker,
) -> None:
    """No attempt was answered, one was stored; the checker is not called."""
    async with new_producer(broker, config=IMPATIENT) as producer:
        broker.fail(SEND, *[Ignore(after_doing=True)] * 9)
        with pytest.raises(SendTimeoutError):
            await producer.transaction(MESSAGE).__aenter__()
        (half,) = broker.halves.values()
        await until(lambda: broker.check(half) and bool(half.decisions))

    assert half.decisions[0] == ROLLBACK


async def test_a_transaction_needs_somebody_to_ask() -> None:
    """Without a checker, the broker could never settle an undecided transaction."""
    async with fake_broker() as broker, new_producer(broker, None) as producer:
        with pytest.raises(ConfigurationError, match="checker"):
            producer.transaction(MESSAGE)
        with pytest.raises(ConfigurationError, match="listener"):
            await producer.send_in_transaction(MESSAGE)


class Listener(TransactionListener):
    """A listener in the style of RocketMQ's."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.executed: list[tuple[str, object]] = []
        self.checked: list[str] = []

    def execute_local_transaction(self, transaction: Transaction, arg: object) -> Decision:
        self.executed.append((transaction.id, arg))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome  # type: ignore[return-value] # wrong on purpose in one test

    async def check_local_transaction(self, message: MessageView) -> Decision:
        self.checked.append(message.message_id)
        return Decision.COMMIT


@on_both_loops
@pytest.mark.parametrize(
    ("outcome", "decision"),
    [
        (Decision.COMMIT, Decision.COMMIT),
        (Decision.ROLLBACK, Decision.ROLLBACK),
        (Decision.UNKNOWN, Decision.UNKNOWN),
        (LocalError(), Decision.UNKNOWN),
        (None, Decision.UNKNOWN),
    ],
)
async def test_a_listener_decides_as_in_rocketmq(
    broker: FakeBroker, outcome: object, decision: Decision
) -> None:
    """An exception counts as UNKNOWN, and a check follows."""
    listener = Listener(outcome)
    async with new_producer(broker, None) as producer:
        tx = await producer.send_in_transaction(MESSAGE, listener, arg=42)
        assert tx.decision is decision
        assert listener.executed == [(tx.id, 42)]
        if decision is Decision.UNKNOWN:
            broker.check(broker.half_of(tx.id))
            await until(lambda: len(broker.messages("orders")) == 1)
            assert listener.checked == [tx.id]


async def test_a_listener_given_at_the_start_serves_all() -> None:
    """It corresponds to TransactionMQProducer.setTransactionListener."""
    listener = Listener(Decision.COMMIT)
    async with (
        fake_broker() as broker,
        TransactionProducer("orders-tx", listener, namesrv=broker.address) as producer,
    ):
        tx = await producer.send_in_transaction(MESSAGE)
        async with producer.transaction(MESSAGE):
            pass

        assert tx.decided
        assert len(broker.messages("orders")) == 2


async def test_closing_waits_for_decisions_under_way() -> None:
    """A program may end right after a transaction."""
    async with fake_broker() as broker:
        broker.create_topic("orders")
        producer = new_producer(broker)
        await producer.start()
        tx = producer.transaction(MESSAGE)
        await tx.__aenter__()
        broker.fail(END, Refuse(ResponseCode.SYSTEM_BUSY))
        leaving = asyncio.ensure_future(tx.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await producer.close()
        await leaving

        assert tx.decided
        assert len(broker.messages("orders")) == 1


@in_steady_time
async def test_a_half_message_that_is_not_answered_is_a_timeout() -> None:
    """The local transaction does not run."""
    async with fake_broker() as broker, new_producer(broker, config=IMPATIENT) as producer:
        broker.fail(SEND, Ignore(after_doing=True))
        with pytest.raises(SendTimeoutError):
            async with producer.transaction(MESSAGE):
                raise AssertionError("the block must not run")


@in_steady_time
async def test_closing_ends_a_transaction_that_waits_for_its_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its block has not run; it gets ClientClosedError, because its task was not cancelled."""
    monkeypatch.setattr(transaction, "CLOSE_SECONDS", 0.1)
    async with fake_broker() as broker:
        producer = new_producer(broker)
        await producer.start()
        broker.fail(SEND, Ignore())
        entering = asyncio.ensure_future(producer.transaction(MESSAGE).__aenter__())
        await until(lambda: bool(broker.requests_of(SEND)))

        await producer.close()
        with pytest.raises(ClientClosedError):
            await entering


@in_steady_time
async def test_a_commit_that_closing_cuts_off_is_no_error_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The local transaction has committed; a later check settles it."""
    monkeypatch.setattr(transaction, "CLOSE_SECONDS", 0.1)
    async with fake_broker() as broker:
        producer = new_producer(broker)
        await producer.start()
        tx = producer.transaction(MESSAGE)
        await tx.__aenter__()
        broker.fail(END, Ignore())
        leaving = asyncio.ensure_future(tx.__aexit__(None, None, None))
        await until(lambda: bool(broker.requests_of(END)))

        await producer.close()
        await leaving

    assert (tx.decision, tx.decided) == (Decision.COMMIT, False)


async def test_pending_are_the_groups_undecided_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of every producer of this group only, however many pages they fill."""
    monkeypatch.setattr(administration, "PAGE_SIZE", 2)
    async with InMemoryBroker() as broker:
        other = TransactionProducer("others-tx", commits, namesrv=broker.address, config=QUICK)
        async with new_producer(broker) as producer, other:
            assert await producer.pending() == []
            await undecided(other)
            identities = [await undecided(producer) for _ in range(4)]
            await broker.advance(1)
            async with producer.transaction([MESSAGE, MESSAGE]) as tx:
                pending = await producer.pending()
            after = await producer.pending()

    assert [one.transaction_id for one in pending] == [*identities, tx.id]
    assert [one.transaction_id for one in after] == identities
    last = pending[-1]
    assert (last.half_message_id, last.group, last.state) == (
        tx.message_id,
        "orders-tx",
        "prepared",
    )
    assert (last.topic, last.keys, last.messages) == ("orders", "o-2", 2)
    assert (last.checks_sent, last.checks_delivered, last.checks_answered) == (0, 0, 0)
    assert pending[0].age > last.age >= 0


async def test_an_official_broker_does_not_tell_what_is_pending() -> None:
    async with fake_broker(halfmq=False) as broker, new_producer(broker) as producer:
        with pytest.raises(UnsupportedRequestError, match="QUERY_TRANSACTIONS"):
            await producer.pending()
