"""Checks: acknowledged at once to a halfmq broker, and answered until the answer is confirmed."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from halfmq.client import Decision, MessageView
from halfmq.client.transactional.checker_pool import CheckerPool, RunInThread
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import EndTransactionRequestHeader
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_transactions import (
    COMMIT,
    END,
    ENDS,
    IMPATIENT,
    MESSAGE,
    QUICK,
    ROLLBACK,
    UNKNOWN,
    LocalError,
    commits,
    ends,
    never,
    new_producer,
    undecided,
)
from tests.support.fake_broker import Cut, FakeBroker, Ignore, Refuse, fake_broker, until


@on_both_loops
async def test_a_check_is_acknowledged_before_anybody_is_asked(broker: FakeBroker) -> None:
    """The acknowledgement does not wait for the checker."""
    release = asyncio.Event()

    async def checker(_message: MessageView) -> Decision:
        await release.wait()
        return Decision.COMMIT

    async with new_producer(broker, checker) as producer:
        identity = await undecided(producer)
        broker.check(broker.half_of(identity))
        await until(lambda: broker.acknowledged == [(identity, ResponseCode.SUCCESS, None)])
        assert broker.requests_of(END) == []
        release.set()
        await until(lambda: broker.half_of(identity).decisions == [COMMIT])


@on_both_loops
async def test_an_answer_is_repeated_until_confirmed(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds also if the connection of the check was lost: routes have the address."""
    caplog.set_level("INFO")
    async with new_producer(broker, commits) as producer:
        identity = await undecided(producer)
        broker.fail(END, Cut(), Refuse(ResponseCode.SYSTEM_BUSY), Cut(after_doing=True))
        broker.check(broker.half_of(identity))
        await until(lambda: len(broker.requests_of(END)) == 4)
        await until(lambda: "event=check_answered" in caplog.text)

    assert broker.half_of(identity).decisions == [COMMIT, COMMIT]
    assert len(broker.messages("orders")) == 1
    assert len(broker.peers) == 0


async def test_a_check_repeated_meanwhile_is_acknowledged_and_asks_nobody_again() -> None:
    """The checker runs once, even if an acknowledgement was lost."""
    release = asyncio.Event()
    asked = 0

    async def checker(_message: MessageView) -> Decision:
        nonlocal asked
        asked += 1
        await release.wait()
        return Decision.COMMIT

    async with fake_broker() as broker, new_producer(broker, checker) as producer:
        identity = await undecided(producer)
        for _ in range(2):
            broker.check(broker.half_of(identity))
        await until(lambda: [code for _, code, _ in broker.acknowledged] == [0, 0])
        release.set()
        await until(lambda: broker.half_of(identity).decisions == [COMMIT])

    assert asked == 1


async def test_a_producer_without_a_checker_says_so() -> None:
    """The broker then asks another member of the group at once."""
    async with fake_broker() as broker, new_producer(broker, never) as producer:
        identity = await undecided(producer)
        await producer.close()
        async with new_producer(broker, None):
            broker.check(broker.half_of(identity))
            await until(lambda: bool(broker.acknowledged))

    assert broker.acknowledged == [
        (identity, ResponseCode.SYSTEM_ERROR, "this producer has no checker")
    ]
    assert ends(broker) == []


async def test_what_a_producer_knows_itself_needs_no_checker() -> None:
    """A transaction that runs here is UNKNOWN, with and without a checker."""
    async with fake_broker() as broker, new_producer(broker, never) as producer:
        async with producer.transaction(MESSAGE) as tx:
            # A producer cannot prepare without a checker, so it loses it here.
            producer._check_back.checker = None
            broker.check(broker.half_of(tx.id))
            await until(lambda: broker.half_of(tx.id).decisions == [UNKNOWN])

        assert broker.acknowledged == [(tx.id, ResponseCode.SUCCESS, None)]


async def test_a_full_queue_of_checks_is_a_refusal() -> None:
    """The broker can then ask another member without waiting for a timeout."""
    release = asyncio.Event()

    async def checker(_message: MessageView) -> Decision:
        await release.wait()
        return Decision.COMMIT

    config = replace(QUICK, check_queue_max=1)
    async with fake_broker() as broker, new_producer(broker, checker, config) as producer:
        first, second = [await undecided(producer) for _ in range(2)]
        for identity in (first, second):
            broker.check(broker.half_of(identity))
        await until(lambda: len(broker.acknowledged) == 2)
        release.set()
        await until(lambda: broker.half_of(first).decisions == [COMMIT])

    assert broker.acknowledged == [
        (first, ResponseCode.SUCCESS, None),
        (second, ResponseCode.SYSTEM_ERROR, "1 checks are waiting here"),
    ]


async def test_a_producer_that_is_being_closed_takes_no_check() -> None:
    """It may have no time to answer; checks that it has accepted are still answered."""
    release = asyncio.Event()

    async def checker(_message: MessageView) -> Decision:
        await release.wait()
        return Decision.COMMIT

    async with fake_broker() as broker, new_producer(broker, checker) as producer:
        taken, refused = [await undecided(producer) for _ in range(2)]
        broker.check(broker.half_of(taken))
        await until(lambda: len(broker.acknowledged) == 1)
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        broker.check(broker.half_of(refused))
        await until(lambda: len(broker.acknowledged) == 2)
        release.set()
        await closing

    assert broker.acknowledged[1:] == [
        (refused, ResponseCode.SYSTEM_ERROR, "this producer is being closed")
    ]
    assert broker.half_of(taken).decisions == [COMMIT]
    assert broker.half_of(refused).decisions == []


async def test_a_check_for_another_group_or_without_sense_is_refused() -> None:
    """Another member may understand it."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        half = broker.half_of(await undecided(producer))
        peer = broker.producers("orders-tx")[0]
        broker.asked[0] = "no fields"
        peer.send(RequestCode.CHECK_TRANSACTION_STATE, {"topic": "x"}, opaque=0)
        broker.asked[1] = "no record"
        header = {"tranStateTableOffset": "0", "commitLogOffset": "0"}
        peer.send(RequestCode.CHECK_TRANSACTION_STATE, header, b"no record", opaque=1)
        foreign = half.record.properties.replace(b"orders-tx", b"others-tx")
        half.record = half.record._replace(properties=foreign)
        broker.check(half, group="orders-tx")
        await until(lambda: len(broker.acknowledged) == 3)

    assert [(name, code) for name, code, _ in broker.acknowledged[:2]] == [
        ("no fields", ResponseCode.SYSTEM_ERROR),
        ("no record", ResponseCode.SYSTEM_ERROR),
    ]
    assert broker.acknowledged[2][2] == "this is a producer of group orders-tx, not of others-tx"


async def test_an_official_broker_asks_and_is_answered_one_way() -> None:
    """It does not support acknowledgements, and accepts answers only on the same connection."""
    async with fake_broker(halfmq=False) as broker, new_producer(broker, commits) as producer:
        identity = await undecided(producer)
        broker.check(broker.half_of(identity))
        await until(lambda: broker.half_of(identity).decisions == [COMMIT])

    (request,) = broker.requests_of(END)
    assert request.is_one_way
    assert isinstance(request.header, EndTransactionRequestHeader)
    assert request.header.from_transaction_check
    assert broker.acknowledged == []


@on_both_loops
async def test_answers_to_many_checks_share_a_request(broker: FakeBroker) -> None:
    """After an outage there may be thousands."""
    async with new_producer(broker, commits) as producer:
        identities = [await undecided(producer) for _ in range(10)]
        for identity in identities:
            broker.check(broker.half_of(identity))
        await until(lambda: len(broker.messages("orders")) == 10)

    assert broker.requests_of(END) == []
    assert len(broker.requests_of(ENDS)) == 1


async def test_a_conflicting_answer_is_logged_and_over(caplog: pytest.LogCaptureFixture) -> None:
    """Another producer has decided meanwhile, which is not an error here."""
    caplog.set_level("INFO")
    async with fake_broker() as broker, new_producer(broker, commits) as producer:
        identity = await undecided(producer)
        broker.half_of(identity).decisions.append(12)
        broker.check(broker.half_of(identity))
        await until(lambda: "event=check_not_answered" in caplog.text)
        # The check is no longer in progress: the next one is answered too.
        broker.check(broker.half_of(identity))
        await until(lambda: caplog.text.count("event=check_not_answered") == 2)

    assert broker.messages("orders") == []


class AsyncCallable:
    """An object whose call is a coroutine, which inspection does not tell."""

    async def __call__(self, message: MessageView) -> Decision:
        return await commits(message)


@on_both_loops
async def test_a_restarted_producer_is_asked_without_having_sent(broker: FakeBroker) -> None:
    """It answers for the process that died between its commit and its decision."""
    asked: list[MessageView] = []

    async def checker(message: MessageView) -> Decision:
        asked.append(message)
        return Decision.COMMIT

    async with new_producer(broker) as first, first.transaction(MESSAGE) as tx:
        tx.decide(Decision.UNKNOWN)
    async with new_producer(broker, checker):
        assert broker.check(broker.half_of(tx.id))
        await until(lambda: len(broker.messages("orders")) == 1)

    (message,) = asked
    assert (message.keys, message.body, message.topic) == ("o-2", b"o-2", "orders")
    assert (message.transaction_id, message.message_id) == (tx.id, tx.id)
    answer = ends(broker)[-1]
    assert (answer.from_transaction_check, answer.commit_or_rollback) == (True, COMMIT)
    assert (answer.topic, answer.transaction_id) == ("orders", tx.id)
    assert not broker.requests_of(END)[-1].is_one_way
    assert broker.acknowledged == [(tx.id, ResponseCode.SUCCESS, None)]


def blocking_checker(_message: MessageView) -> Decision:
    assert threading.current_thread() is not threading.main_thread()
    return Decision.ROLLBACK


async def failing_checker(_message: MessageView) -> Decision:
    raise LocalError("database is away")


@on_both_loops
@pytest.mark.parametrize(
    ("checker", "decision"),
    [
        (commits, COMMIT),
        (blocking_checker, ROLLBACK),
        (functools.partial(commits), COMMIT),
        (AsyncCallable(), COMMIT),
        (failing_checker, UNKNOWN),
        (lambda _message: True, UNKNOWN),
        (lambda _message: None, UNKNOWN),
    ],
)
async def test_checkers_may_be_plain_or_async_and_may_fail(
    broker: FakeBroker, checker: Callable[[MessageView], object], decision: int
) -> None:
    """A plain one runs in a thread; any result that is not a Decision counts as UNKNOWN."""
    async with new_producer(broker, checker) as producer:
        identity = await undecided(producer)

        broker.check(broker.half_of(identity))
        await until(lambda: bool(broker.half_of(identity).decisions))

    assert broker.half_of(identity).decisions == [decision]


async def test_checks_are_bounded_and_the_rest_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After an outage thousands may be due, and the database must not get all at once."""
    running = most = 0
    release = asyncio.Event()

    async def checker(_message: MessageView) -> Decision:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return Decision.COMMIT

    config = replace(QUICK, check_concurrency=2, check_queue_max=5)
    async with fake_broker() as broker, new_producer(broker, checker, config) as producer:
        identities = [await undecided(producer) for _ in range(7)]
        for identity in identities + identities:
            broker.check(broker.half_of(identity))
        await until(lambda: running == 2)
        await until(lambda: caplog.text.count("event=check_dropped") >= 2)
        release.set()

        await until(lambda: len(broker.messages("orders")) == 5)

        assert most == 2
        for identity in identities[5:]:
            broker.check(broker.half_of(identity))
        await until(lambda: len(broker.messages("orders")) == 7)


@in_steady_time
async def test_a_checker_that_hangs_stops_no_other_check() -> None:
    """It counts as UNKNOWN, and its slot goes to the next check."""
    called = 0

    async def checker(_message: MessageView) -> Decision:
        nonlocal called
        called += 1
        if called == 1:
            await asyncio.Event().wait()
        return Decision.COMMIT

    config = replace(QUICK, check_concurrency=1, check_timeout=0.1)
    async with fake_broker() as broker, new_producer(broker, checker, config) as producer:
        first, second = [await undecided(producer) for _ in range(2)]
        for identity in (first, second):
            broker.check(broker.half_of(identity))

        await until(lambda: len(broker.messages("orders")) == 1)

        assert broker.half_of(first).decisions == [UNKNOWN]
        assert broker.half_of(second).decisions == [COMMIT]


@in_steady_time
async def test_checkers_that_hang_on_threads_hang_nothing_else() -> None:
    """The program and other checks continue; the broker asks other members."""
    release = threading.Event()
    asked: list[bytes] = []

    def checker(message: MessageView) -> Decision:
        asked.append(message.body)
        if len(asked) <= 3:
            release.wait()
        return Decision.COMMIT

    config = replace(QUICK, check_concurrency=3, check_timeout=0.1)
    async with fake_broker() as broker, new_producer(broker, checker, config) as producer:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        identities = [await undecided(producer) for _ in range(5)]
        for identity in identities[:4]:
            broker.check(broker.half_of(identity))
        for identity in identities[:4]:
            await until(lambda: bool(broker.half_of(identity).decisions))  # noqa: B023
        assert [broker.half_of(one).decisions for one in identities[:4]] == [[UNKNOWN]] * 4
        assert await asyncio.to_thread(lambda: 7) == 7
        assert all(thread.daemon for thread in threading.enumerate() if "checker" in thread.name)

        broker.check(broker.half_of(identities[4]))
        await until(lambda: len(broker.acknowledged) == 5)
        assert broker.acknowledged[-1] == (
            identities[4],
            ResponseCode.SYSTEM_ERROR,
            "all 3 calls of its checker hang",
        )
        assert len(asked) == 3

        release.set()
        # That a thread is free again shows in nothing else.
        await until(lambda: not producer._check_back._pool.exhausted)
        for identity in identities:
            broker.check(broker.half_of(identity))
        await until(lambda: len(broker.messages("orders")) == 5)


async def test_a_call_that_was_given_up_ends_without_a_trace() -> None:
    """Its thread may end long after the loop, without an error."""
    release = threading.Event()
    calls = CheckerPool(1, seconds=0.01)

    async def call(in_thread: RunInThread) -> object:
        return await in_thread(release.wait)

    with pytest.raises(TimeoutError):
        await calls.run(call)
    assert calls.exhausted
    with pytest.raises(TimeoutError):
        await calls.run(call)
    cancelled = CheckerPool(1, seconds=60.0)
    first = asyncio.create_task(cancelled.run(call))
    waiting = [asyncio.create_task(cancelled.run(call)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    release.set()
    assert await first is True
    assert await waiting[1] is True
    await until(lambda: not calls.exhausted)
    # A count that is wrong would stop all checks, later.
    assert (calls._running, cancelled._running) == (0, 0)


async def test_checks_that_make_no_sense_are_logged_and_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A malformed check must not end the connection or the producer."""
    caplog.set_level(logging.WARNING)
    async with fake_broker() as broker, new_producer(broker) as producer:
        identity = await undecided(producer)
        half = broker.half_of(identity)
        peer = broker.producers("orders-tx")[0]
        peer.send(RequestCode.CHECK_TRANSACTION_STATE, {"topic": "x"})
        header = {"tranStateTableOffset": "0", "commitLogOffset": "0"}
        peer.send(RequestCode.CHECK_TRANSACTION_STATE, header, b"no record")
        foreign = half.record.properties.replace(b"orders-tx", b"others-tx")
        half.record = half.record._replace(properties=foreign)
        broker.check(half, group="orders-tx")

        await until(lambda: "group=others-tx" in caplog.text)

        assert caplog.text.count("event=check_not_understood") == 2
        await producer.send(MESSAGE)
        assert broker.requests_of(END) == []


@in_steady_time
async def test_a_check_that_comes_before_the_start_is_over_is_answered(broker: FakeBroker) -> None:
    """A broker sends checks right after the handshake."""
    async with new_producer(broker) as producer:
        identity = await undecided(producer)
    late = new_producer(broker, commits, IMPATIENT)
    broker.fail(RequestCode.HEART_BEAT, Ignore(after_doing=True))  # the start waits for it
    starting = asyncio.ensure_future(late.start())
    await until(lambda: bool(broker.producers("orders-tx")))

    broker.check(broker.half_of(identity))
    await until(lambda: broker.acknowledged == [(identity, ResponseCode.SUCCESS, None)])
    await until(lambda: broker.half_of(identity).decisions == [COMMIT])

    await starting
    await late.close()


@in_steady_time
async def test_a_check_that_comes_after_the_end_is_refused(broker: FakeBroker) -> None:
    """A broker may send checks until it has unregistered the producer."""
    producer = new_producer(broker)
    await producer.start()
    identity = await undecided(producer)
    broker.fail(RequestCode.UNREGISTER_CLIENT, Ignore())
    closing = asyncio.ensure_future(producer.close())
    await until(lambda: bool(broker.requests_of(RequestCode.UNREGISTER_CLIENT)))
    for acknowledges in (True, False):
        broker.halfmq = acknowledges
        broker.check(broker.half_of(identity))
    await closing

    assert [code for _, code, _ in broker.acknowledged] == [ResponseCode.SYSTEM_ERROR]
    assert broker.half_of(identity).decisions == []
