"""Looking at undecided transactions and deciding about them, against a scripted broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    ConfigurationError,
    ConnectError,
    DecisionConflictError,
    RequestTimeoutError,
)
from halfmq.client.admin import Admin, PendingTransaction
from halfmq.client.errors import BadAnswerError, TransactionNotFoundError, UnsupportedRequestError
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.own_requests import encode_entries
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.ids import offset_message_id, pack_host
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.fake_broker import FakeBroker, Ignore, fake_broker
from tests.support.operated import Operated

QUERY = RequestCode.QUERY_TRANSACTIONS
DECIDE = RequestCode.DECIDE_TRANSACTION
IMPATIENT = ClientConfig(request_timeout=0.2, send_timeout=0.2)


@on_both_loops
async def test_undecided_transactions_are_listed_page_by_page(broker: FakeBroker) -> None:
    """A loop over all of them needs no thought of pages, and sees each once."""
    operated = Operated(broker, 100, 200, 300, 400, 500)
    async with Admin(namesrv=broker.address) as admin:
        found = [transaction async for transaction in admin.transactions()]

    assert [one.offset for one in found] == [100, 200, 300, 400, 500]
    assert len(broker.requests_of(QUERY)) == 3
    assert found[0] == PendingTransaction(
        half_message_id=operated.id_of(100),
        transaction_id="Key100",
        group="pg",
        topic="orders",
        keys="o-1",
        state="prepared",
        age=1.5,
        prepared_at=datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        owner=None,
        producers=None,
        checks_sent=3,
        checks_delivered=2,
        checks_answered=1,
        next_check=2.5,
        parked_reason=None,
        messages=1,
        broker_name="broker-a",
        offset=100,
    )


@on_both_loops
async def test_a_listing_takes_no_more_than_it_was_asked_for(broker: FakeBroker) -> None:
    """Filters and limits are the broker's work; a listing can go on where another ended."""
    Operated(broker, 100, 200, 300, 400, 500)
    async with Admin(namesrv=broker.address) as admin:
        first = await admin.page("pg", "parked", limit=3)
        second = await admin.page("pg", "parked", after=first[-1], limit=3)
        elsewhere = replace(first[-1], broker_name="broker-z")
        behind = await admin.page(after=elsewhere)

    assert [one.offset for one in first + second] == [100, 200, 300, 400, 500]
    assert behind == []
    assert [texts_of(one.header) for one in broker.requests_of(QUERY)] == [
        {
            "producerGroup": "pg",
            "state": "parked",
            "after": after,
            "maxCount": count,
            "bname": "broker-a",
        }
        for after, count in (("-1", "3"), ("200", "1"), ("300", "3"))
    ]


async def test_a_state_that_does_not_exist_is_told_at_once() -> None:
    """And not answered by an empty list."""
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        with pytest.raises(ConfigurationError, match="state is 'odd'"):
            await admin.page(state="odd")  # type: ignore[arg-type]


@on_both_loops
async def test_one_transaction_is_found_by_either_id(broker: FakeBroker) -> None:
    """The one that consumers see, in any case, or the one that its producer knows."""
    operated = Operated(broker, 100, 200)
    async with Admin(namesrv=broker.address) as admin:
        by_id = await admin.transaction(operated.id_of(200).lower())
        by_key = await admin.transaction("Key200")

        assert by_id is not None
        assert by_id == by_key
        assert by_id.offset == 200
        assert await admin.transaction("other") is None


async def test_an_offset_alone_makes_no_transaction() -> None:
    """A broker that looks only at the offset in an id of another broker is not believed."""
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        operated = Operated(broker, 100)
        foreign = offset_message_id(pack_host("10.0.0.1", 10911), 100)
        info = operated.infos[0]
        broker.handlers[QUERY] = lambda command, _: encode_reply(
            command, body=encode_entries([info])
        )

        assert await admin.transaction(foreign) is None
        with pytest.raises(TransactionNotFoundError, match="nothing undecided has this id"):
            await admin.commit(foreign)
        assert operated.decided == []


@on_both_loops
async def test_an_operator_decides(broker: FakeBroker) -> None:
    """By either id, with a reason for the log; a commit tells where the message is."""
    operated = Operated(broker, 100, 200)
    async with Admin(namesrv=broker.address) as admin:
        assert await admin.commit("Key100", reason="the row is there") == "FINAL"
        await admin.rollback(operated.id_of(200))
        await admin.resume("Key200", reason="the service is back")

    assert operated.decided == [
        (100, "commit", "the row is there"),
        (200, "rollback", None),
        (200, "resume", "the service is back"),
    ]


async def test_a_decided_transaction_is_asked_about_by_its_offset_id() -> None:
    """It is in no list any more, but its broker knows how it ended."""
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        operated = Operated(broker)
        await admin.commit(operated.id_of(300))
        operated.refusal = (ResponseCode.ILLEGAL_OPERATION, "it was rolled back at noon")

        with pytest.raises(DecisionConflictError, match=r"COMMIT .* it was rolled back at noon"):
            await admin.commit(operated.id_of(300))

    assert operated.decided == [(300, "commit", None)]


async def test_an_unknown_transaction_is_an_error_that_says_so() -> None:
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        operated = Operated(broker)
        operated.refusal = (ResponseCode.SYSTEM_ERROR, "no half message there")

        for call in (admin.commit, admin.rollback, admin.resume):
            with pytest.raises(TransactionNotFoundError, match="no transaction Key9: nothing"):
                await call("Key9")
            with pytest.raises(TransactionNotFoundError, match="no half message there"):
                await call(operated.id_of(900))


async def test_resume_takes_the_id_of_a_parked_copy() -> None:
    """That is what an operator finds in the topic of parked messages."""
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        operated = Operated(broker)
        broker.handlers[DECIDE] = lambda command, _: encode_reply(
            command, ResponseCode.SYSTEM_ERROR, remark="not a half message"
        )
        await admin.resume(operated.id_of(700))

        assert operated.resumed == [operated.id_of(700)]


async def test_an_official_broker_can_only_resume_and_tell_metrics() -> None:
    """Everything else names the broker and says that it is not halfmq's."""
    async with (
        fake_broker(halfmq=False) as broker,
        Admin(namesrv=broker.address) as admin,
    ):
        operated = Operated(broker)
        del broker.handlers[QUERY], broker.handlers[DECIDE]
        message_id = operated.id_of(700)

        for call in (admin.commit, admin.rollback, admin.transaction):
            with pytest.raises(UnsupportedRequestError, match=r"9000.*it is not halfmq's"):
                await call(message_id)
        with pytest.raises(UnsupportedRequestError):
            await admin.page()
        await admin.resume(message_id)
        assert operated.resumed == [message_id]
        assert await admin.metrics() == {"broker-a": {"brokerVersion": "479"}}
        assert {one.header_type for one in broker.requests} == {HeaderType.JSON}


async def test_a_broker_that_breaks_the_protocol_is_named() -> None:
    """Instead of an error from deep inside a decoder."""
    async with fake_broker() as broker, Admin(namesrv=broker.address) as admin:
        Operated(broker)
        for code in (QUERY, RequestCode.GET_BROKER_RUNTIME_INFO):
            broker.handlers[code] = lambda command, _: encode_reply(command, body=b"\xff")
        for call in (admin.page, admin.metrics):
            with pytest.raises(BadAnswerError, match=broker.address):
                await call()


@in_steady_time
async def test_a_silent_broker_is_a_timeout() -> None:
    """An operator's tool must come back."""
    async with fake_broker() as broker, Admin(namesrv=broker.address, config=IMPATIENT) as admin:
        broker.fail(QUERY, Ignore())
        with pytest.raises(RequestTimeoutError, match="QUERY_TRANSACTIONS"):
            await admin.page()


@on_both_loops
async def test_a_time_without_a_zone_is_refused(broker: FakeBroker) -> None:
    """It would be this machine's local time, which is another on each host."""
    noon = datetime(2026, 1, 1, 12)  # noqa: DTZ001 -- without a zone
    async with Admin(namesrv=broker.address, config=IMPATIENT) as admin:
        with pytest.raises(ConfigurationError, match=r"since is .*with a time zone"):
            await admin.messages_with_key("orders", "k", since=noon)
        with pytest.raises(ConfigurationError, match=r"until is .*with a time zone"):
            await admin.messages_with_key("orders", "k", until=noon)


@in_steady_time
async def test_an_admin_is_a_client_like_the_others() -> None:
    """Not usable before its start; and it says where it could not connect."""
    admin = Admin(namesrv="127.0.0.1:1", config=IMPATIENT)
    with pytest.raises(ClientClosedError):
        admin.transactions()
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        await admin.start()
