"""Checks: acknowledged at once to a halfmq broker, and answered until the answer is confirmed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from halfmq.client import Decision, MessageView
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import EndTransactionRequestHeader
from tests.support.client_loops import on_both_loops
from tests.support.client_transactions import (
    COMMIT,
    END,
    ENDS,
    MESSAGE,
    QUICK,
    UNKNOWN,
    commits,
    ends,
    never,
    new_producer,
    undecided,
)
from tests.support.fake_broker import Cut, FakeBroker, Refuse, fake_broker, until

PATIENT = replace(QUICK, send_timeout=3.0)


@on_both_loops
async def test_a_check_is_acknowledged_before_anybody_is_asked(broker: FakeBroker) -> None:
    """The broker learns that its question has arrived however long the answer takes."""
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
async def test_an_answer_is_repeated_until_confirmed(broker: FakeBroker) -> None:
    """Also when the connection by which the check came is gone: the routes know the way."""
    async with new_producer(broker, commits, PATIENT) as producer:
        identity = await undecided(producer)
        broker.fail(END, Cut(), Refuse(ResponseCode.SYSTEM_BUSY), Cut(after_doing=True))
        broker.check(broker.half_of(identity))
        await until(lambda: len(broker.requests_of(END)) == 4)
        await until(lambda: not producer._check_back._under_check)

    assert broker.half_of(identity).decisions == [COMMIT, COMMIT]
    assert len(broker.messages("orders")) == 1
    assert len(broker.peers) == 0


async def test_a_check_repeated_meanwhile_is_acknowledged_and_asks_nobody_again() -> None:
    """One question to the database is enough, whoever has lost the acknowledgement."""
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
    """A transaction that runs here is "not known yet", with a checker or without."""
    async with fake_broker() as broker, new_producer(broker, never) as producer:
        async with producer.transaction(MESSAGE) as tx:
            producer._check_back.checker = None
            broker.check(broker.half_of(tx.id))
            await until(lambda: broker.half_of(tx.id).decisions == [UNKNOWN])

        assert broker.acknowledged == [(tx.id, ResponseCode.SUCCESS, None)]


async def test_a_full_queue_of_checks_is_a_refusal() -> None:
    """An unanswered check would cost the broker its time to find another member."""
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
    """It may not have the time to answer; one that it has taken is still answered."""
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
    """It knows nothing of acknowledgements, and takes no answer but on its own connection."""
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
    """Somebody else has decided meanwhile; that is no error of this producer."""
    caplog.set_level("INFO")
    async with fake_broker() as broker, new_producer(broker, commits) as producer:
        identity = await undecided(producer)
        broker.half_of(identity).decisions.append(12)
        broker.check(broker.half_of(identity))
        await until(lambda: "event=check_not_answered" in caplog.text)
        assert not producer._check_back._under_check

    assert broker.messages("orders") == []
