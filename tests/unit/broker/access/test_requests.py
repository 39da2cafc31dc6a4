"""Requests whose resource is known only when a record has been read, by a broker with sockets.

A decision names an offset and not a topic; so do single records and retries. The broker asks for
the right on what it finds there. Without these checks whoever may sign could read and decide
everything.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    encode_heartbeat,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import QueryMessageRequestHeader, ViewMessageRequestHeader
from halfmq.remoting.own_requests import (
    PreparedMessage,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_end_results,
    decode_prepared_results,
    encode_entries,
)
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import decode_record, decode_records
from halfmq.store.format.topics import (
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from tests.support.access import PUBLISHER, STRANGER, SUBSCRIBER, SignedPeer
from tests.support.broker_doubles import START_MS
from tests.support.guarded_rig import COLLEAGUE, REFUSED, Guarded, guarded, names_the_missing_right
from tests.support.peers import COMMIT, ROLLBACK, UNKNOWN, Half
from tests.support.race_windows import HOUR_MS


async def _end_many(
    peer: SignedPeer, half: Half, decision: int, *, from_check: bool = False
) -> tuple[int, str]:
    """Decide by END_TRANSACTIONS; return the code and the remark of the one result."""
    end = TransactionEnd(
        commit_log_offset=half.offset,
        tran_state_table_offset=half.queue_offset,
        decision=decision,
        transaction_id=half.transaction_id,
        from_check=from_check,
    )
    header = TransactionsRequestHeader(producer_group=half.group)
    answer = await peer.call(RequestCode.END_TRANSACTIONS, header, encode_entries([end]))
    assert answer.code == 0, answer.remark
    (result,) = decode_end_results(answer.body)
    return result.code, result.remark or ""


# -- decisions


@guarded()
async def test_only_the_principal_that_prepared_decides(guarded: Guarded) -> None:
    """Any other principal is refused, and the transaction stays undecided."""
    publisher, colleague, stranger = [
        await guarded.peer(one) for one in (PUBLISHER, COLLEAGUE, STRANGER)
    ]
    half = await publisher.prepare("K1")

    for decision in (COMMIT, ROLLBACK):
        for other in (colleague, stranger):
            answer = await other.end(half, decision)
            assert names_the_missing_right(answer, "Pub Topic:orders")
            code, remark = await _end_many(other, half, decision)
            assert (code, "no permission" in remark) == (REFUSED, True)
    assert guarded.undecided == 1
    assert (await publisher.end(half, COMMIT)).code == 0
    assert guarded.rig.bodies() == [b"row 1"]


@guarded()
async def test_a_refused_decision_is_logged_and_counted_once(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for one-way decisions, whose senders get no answer."""
    publisher, colleague = await guarded.peer(PUBLISHER), await guarded.peer(COLLEAGUE)
    half = await publisher.prepare("K1")

    with caplog.at_level(logging.WARNING):
        await colleague.end(half, COMMIT)
        assert await guarded.refused() == 1
        colleague.end_one_way(half, COMMIT)
        await colleague.sync()
        assert await guarded.refused() == 2
        await _end_many(colleague, half, COMMIT)
        assert await guarded.refused() == 3

    lines = [one.message for one in caplog.records if "Pub Topic:orders" in one.message]
    assert len(lines) == 3
    assert all("event=access_denied" in line for line in lines)


@pytest.mark.parametrize("killed", [False, True])
@guarded()
async def test_a_transaction_stays_bound_to_its_principal_after_a_restart(
    guarded: Guarded, killed: bool
) -> None:
    """The half record names the principal."""
    publisher = await guarded.peer(PUBLISHER)
    half = await publisher.prepare("K1")
    await (guarded.rig.kill() if killed else guarded.rig.restart())
    publisher, colleague = await guarded.peer(PUBLISHER), await guarded.peer(COLLEAGUE)

    assert names_the_missing_right(await colleague.end(half, COMMIT), "Pub Topic:orders")
    code, _remark = await _end_many(colleague, half, ROLLBACK)
    assert code == REFUSED
    assert (await _end_many(publisher, half, COMMIT))[0] == 0
    assert guarded.rig.bodies() == [b"row 1"]


@guarded()
async def test_an_answer_without_a_check_is_an_ordinary_decision(guarded: Guarded) -> None:
    """The binding cannot be evaded by marking a decision as the answer to a check."""
    publisher, colleague = await guarded.peer(PUBLISHER), await guarded.peer(COLLEAGUE)
    half = await publisher.prepare("K1")

    answer = await colleague.end(half, ROLLBACK, from_check=True)
    assert names_the_missing_right(answer, "Pub Topic:orders")
    code, _remark = await _end_many(colleague, half, ROLLBACK, from_check=True)
    assert code == REFUSED
    assert guarded.undecided == 1


@pytest.mark.parametrize("ours", [False, True])
@guarded()
async def test_every_principal_that_may_publish_to_the_topic_can_answer_checks(
    guarded: Guarded, ours: bool
) -> None:
    """A producer may have changed its key; RocketMQ 5.3.3 requires a right on the half topic."""
    publisher = await guarded.peer(PUBLISHER, ours=ours)
    await publisher.prepare("K1")
    await guarded.rig.lose(publisher)
    heir = await guarded.peer(COLLEAGUE, member=True, ours=ours)
    await guarded.rig.wait_for(lambda: bool(heir.checks))

    assert (await heir.answer_check(heir.checks[0], COMMIT)).code == 0
    assert guarded.rig.bodies() == [b"row 1"]


@guarded()
async def test_checks_are_sent_only_to_producers_that_may_publish(guarded: Guarded) -> None:
    """The check contains the message; a group member without the right never gets it."""
    publisher = await guarded.peer(PUBLISHER)
    half = await publisher.prepare("K1")
    await guarded.rig.lose(publisher)
    stranger = await guarded.peer(STRANGER, member=True)
    subscriber = await guarded.peer(SUBSCRIBER, member=True)
    await guarded.rig.wait(HOUR_MS // 4)
    assert stranger.checks == subscriber.checks == []

    heir = await guarded.peer(COLLEAGUE, member=True)
    await guarded.rig.wait_for(lambda: bool(heir.checks))
    answer = await stranger.end(half, COMMIT, from_check=True)
    assert names_the_missing_right(answer, "Pub Topic:orders")
    assert stranger.checks == subscriber.checks == []
    assert guarded.undecided == 1


@guarded()
async def test_an_unknown_decision_counts_only_from_a_principal_that_may_decide(
    guarded: Guarded,
) -> None:
    """Others could delay the next check, or cause the message to be parked."""
    publisher = await guarded.peer(PUBLISHER, member=True)
    half = await publisher.prepare("K1")
    await guarded.rig.wait_for(lambda: bool(publisher.checks))
    stranger = await guarded.peer(STRANGER)

    answer = await stranger.end(half, UNKNOWN, from_check=True)
    assert names_the_missing_right(answer, "Pub Topic:orders")
    assert guarded.rig.metrics["checks_answered"] == 0
    assert (await publisher.answer_check(publisher.checks[0], UNKNOWN)).code == 0
    assert guarded.rig.metrics["checks_answered"] == 1


@guarded(check_max=2)
async def test_the_principal_of_a_half_is_not_revealed(guarded: Guarded) -> None:
    """Neither in the check, nor in the final message, nor in the parked copy."""
    publisher = await guarded.peer(PUBLISHER, member=True)
    committed = await publisher.prepare("K1")
    await publisher.end(committed, COMMIT)
    await publisher.prepare("K2", b"row 2")
    publisher.acknowledge = lambda _check: 0
    rig = guarded.rig
    await rig.wait_for(lambda: bool(rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC)))

    shown = [*rig.records_of("orders"), *rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC)]
    shown += [decode_record(check.command.body) for check in publisher.checks]
    assert len(shown) >= 4
    assert not any(PUBLISHER.name.encode() in record.properties for record in shown)
    halves = rig.records_of(HALF_TOPIC)
    assert all(half.property_map["TRANSACTION_PRINCIPAL"] == PUBLISHER.name for half in halves[:1])


@guarded()
async def test_the_principal_property_of_a_client_is_ignored(guarded: Guarded) -> None:
    """Only the broker sets it."""
    colleague, publisher = await guarded.peer(COLLEAGUE), await guarded.peer(PUBLISHER)
    header, body = publisher.half_request("K1", TRANSACTION_PRINCIPAL=COLLEAGUE.name)
    answer = await publisher.call(RequestCode.SEND_MESSAGE_V2, header, body)
    if answer.code == 0:  # left out, or refused: both are fine
        half = publisher.half_of(answer)
        assert names_the_missing_right(await colleague.end(half, COMMIT), "Pub Topic:orders")
        assert (await publisher.end(half, COMMIT)).code == 0
    plain = await publisher.plain("K2", TRANSACTION_PRINCIPAL=COLLEAGUE.name)

    records = guarded.rig.records_of("orders") + guarded.rig.records_of(HALF_TOPIC)
    assert plain.code in (0, ResponseCode.MESSAGE_ILLEGAL)
    assert not any(COLLEAGUE.name.encode() in record.properties for record in records)


# -- several messages


def _message(topic: str, key: str) -> PreparedMessage:
    marks = {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": key}
    return PreparedMessage(
        topic=topic,
        queue_id=0,
        flag=0,
        sys_flag=4,
        born_timestamp=START_MS,
        properties=encode_properties(marks).decode(),
        body=key.encode(),
    )


async def _prepare_several(peer: SignedPeer, *messages: PreparedMessage) -> RemotingCommand:
    header = TransactionsRequestHeader(producer_group="producers")
    return await peer.call(RequestCode.PREPARE_TRANSACTION, header, encode_entries(messages))


def _halves_of(answer: RemotingCommand, peer: SignedPeer, *keys: str) -> list[Half]:
    assert answer.code == 0, answer.remark
    return [
        Half(
            offset=int(one.message_id[-16:], 16),
            queue_offset=one.queue_offset,
            message_id=one.message_id,
            transaction_id=key,
            group=peer.group,
            body=key.encode(),
        )
        for key, one in zip(keys, decode_prepared_results(answer.body), strict=True)
    ]


@guarded()
async def test_each_message_of_a_transaction_needs_its_right(guarded: Guarded) -> None:
    """If one message may not be sent, all are refused."""
    colleague, publisher = await guarded.peer(COLLEAGUE), await guarded.peer(PUBLISHER)
    messages = _message("orders", "K1"), _message("payments", "K2")

    answer = await _prepare_several(colleague, *messages)
    assert names_the_missing_right(answer, "Pub Topic:payments")
    assert guarded.undecided == 0
    assert (await _prepare_several(publisher, *messages)).code == 0
    assert guarded.undecided == 1


@guarded()
async def test_deciding_a_transaction_needs_the_right_on_all_its_topics(guarded: Guarded) -> None:
    """Whichever of its halves is named, and also as the answer to a check."""
    publisher = await guarded.peer(PUBLISHER)
    answer = await _prepare_several(publisher, _message("orders", "K1"), _message("payments", "K2"))
    leader, member = _halves_of(answer, publisher, "K1", "K2")
    await guarded.rig.lose(publisher)
    colleague = await guarded.peer(COLLEAGUE, member=True)  # orders alone
    stranger = await guarded.peer(STRANGER, member=True)  # payments alone
    await guarded.rig.wait_for(lambda: bool(colleague.checks))

    for half in (leader, member):
        for from_check in (False, True):
            for peer in (colleague, stranger):
                refused = await peer.end(half, COMMIT, from_check=from_check)
                assert refused.code == REFUSED, (half, from_check, peer.account)
                assert "no permission" in (refused.remark or "")
    assert guarded.undecided == 1
    heir = await guarded.peer(PUBLISHER)
    assert (await heir.end(member, COMMIT)).code == 0
    assert guarded.rig.bodies("payments") == [b"K2"]


# -- records


@guarded()
async def test_a_record_of_another_topic_is_neither_shown_nor_sent_back(guarded: Guarded) -> None:
    """Knowing or guessing an offset gives no rights."""
    publisher, subscriber = await guarded.peer(PUBLISHER), await guarded.peer(SUBSCRIBER)
    stranger = await guarded.peer(STRANGER)
    assert (await publisher.plain("K1", b"secret body", KEYS="order-1")).code == 0
    (record,) = guarded.rig.records_of("orders")
    view = ViewMessageRequestHeader(offset=record.physical_offset)
    lying = ViewMessageRequestHeader(offset=record.physical_offset, topic="payments")

    for header in (view, lying):
        answer = await stranger.call(RequestCode.VIEW_MESSAGE_BY_ID, header)
        assert names_the_missing_right(answer, "Sub or Get Topic:orders")
        assert answer.body == b""
    answer = await stranger.send_back(record.physical_offset, "theirs")
    assert names_the_missing_right(answer, "Sub Topic:orders")
    answer = await stranger.send_back(record.physical_offset, "consumers")
    assert names_the_missing_right(answer, "Sub Group:consumers")
    assert len(guarded.rig.records_of(SCHEDULE_TOPIC)) == 0

    shown = await subscriber.call(RequestCode.VIEW_MESSAGE_BY_ID, view)
    assert decode_records(shown.body)[0].body == b"secret body"
    assert (await subscriber.send_back(record.physical_offset, "consumers")).code == 0


@guarded()
async def test_a_query_by_key_finds_only_what_its_sender_may_read(guarded: Guarded) -> None:
    """It names its topic and finds messages of that topic only."""
    publisher, subscriber = await guarded.peer(PUBLISHER), await guarded.peer(SUBSCRIBER)
    stranger = await guarded.peer(STRANGER)
    await publisher.plain("K1", KEYS="order-1")
    await guarded.rig.wait(1_000)

    def query(topic: str) -> QueryMessageRequestHeader:
        return QueryMessageRequestHeader(
            topic=topic,
            key="order-1",
            max_num=32,
            begin_timestamp=0,
            end_timestamp=START_MS + HOUR_MS,
        )

    answer = await stranger.call(RequestCode.QUERY_MESSAGE, query("orders"))
    assert names_the_missing_right(answer, "Sub or Get Topic:orders")
    answer = await stranger.call(RequestCode.QUERY_MESSAGE, query("payments"))
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    answer = await subscriber.call(RequestCode.QUERY_MESSAGE, query("orders"))
    assert (answer.code, len(decode_records(answer.body))) == (0, 1)


@guarded()
async def test_a_retry_does_not_reveal_a_message_of_another_topic(guarded: Guarded) -> None:
    """The broker takes the content of a retry from the half that it names."""
    publisher = await guarded.peer(PUBLISHER)
    half = await publisher.prepare("K1", b"secret body")
    await publisher.end(half, COMMIT)
    stranger = await guarded.peer(STRANGER, "theirs")
    subscriber = await guarded.peer(SUBSCRIBER, "consumers")
    retry: dict[str, Any] = {
        "TRANSACTION_HALF_ID": half.message_id,
        "RETRY_TOPIC": "orders",
        "DELAY": "1",
    }

    answer = await stranger.plain("K1", b"?", topic="%RETRY%theirs", reconsume_times=1, **retry)
    assert names_the_missing_right(answer, "Sub Topic:orders")
    assert not guarded.rig.records_of(SCHEDULE_TOPIC)
    answer = await subscriber.plain(
        "K1", b"?", topic="%RETRY%consumers", reconsume_times=1, **retry
    )
    assert answer.code == 0, answer.remark
    assert [one.body for one in guarded.rig.records_of(SCHEDULE_TOPIC)] == [b"secret body"]


# -- clients


def _heartbeat(*topics: str, group: str) -> bytes:
    subscriptions = tuple(subscription_data(topic, "*") for topic in topics)
    consumer = ConsumerData(group_name=group, subscription_data_set=subscriptions)
    return encode_heartbeat(HeartbeatData(client_id="c", consumer_data_set=(consumer,)))


@guarded()
async def test_a_heartbeat_with_a_forbidden_subscription_is_refused(guarded: Guarded) -> None:
    """Nothing of the heartbeat is registered."""
    stranger = await guarded.peer(STRANGER)

    async def beat(body: bytes) -> RemotingCommand:
        return await stranger.call(RequestCode.HEART_BEAT, None, body)

    answer = await beat(_heartbeat("payments", "orders", group="theirs"))
    assert names_the_missing_right(answer, "Sub Topic:orders")
    answer = await beat(_heartbeat("payments", group="consumers"))
    assert names_the_missing_right(answer, "Sub Group:consumers")
    assert (await beat(_heartbeat("payments", "%RETRY%theirs", group="theirs"))).code == 0
    producer = HeartbeatData(client_id="c", producer_data_set=(ProducerData(group_name="any"),))
    assert (await beat(encode_heartbeat(producer))).code == 0
