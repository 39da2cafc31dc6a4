"""Operators ask connected consumers through the broker, and always get an answer."""

from __future__ import annotations

from typing import Any, Final

import pytest

from halfmq.broker.handlers.admin import consumer_relays
from halfmq.broker.limits.kept import RELAYS
from halfmq.remoting.admin_headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, encode_consumer_status
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.fastjson import parse
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import SendMessageResponseHeader
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.format.record import decode_record
from tests.support.peers import Peer, until
from tests.support.race_windows import Rig, windowed

INFO: Final = RequestCode.GET_CONSUMER_RUNNING_INFO
DIRECTLY: Final = RequestCode.CONSUME_MESSAGE_DIRECTLY
STATUS: Final = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
STATUS_OF_CLIENT: Final = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT


def about(client: str = "reader", **fields: Any) -> GetConsumerRunningInfoRequestHeader:
    return GetConsumerRunningInfoRequestHeader(
        consumer_group="readers", client_id=client, jstack_enable=True, **fields
    )


def status(client: str | None = None) -> GetConsumerStatusRequestHeader:
    return GetConsumerStatusRequestHeader(topic="orders", group="readers", client_addr=client)


async def consumer(rig: Rig, name: str = "reader", *, ours: bool = False) -> Peer:
    peer = await rig.peer("readers", ours=ours, member=False, name=name)
    await peer.consume("orders")
    return peer


def offsets(*values: int) -> bytes:
    return encode_consumer_status(
        {
            QueueKey(broker_name="broker-a", queue_id=number, topic="orders"): offset
            for number, offset in enumerate(values)
        }
    )


@pytest.mark.parametrize("ours", [False, True])
@windowed()
async def test_the_answer_of_a_consumer_is_passed_on(rig: Rig, ours: bool) -> None:
    """Any code, remark and body; the request has the operator's fields."""
    operator, asked = await rig.peer(), await consumer(rig, ours=ours)
    for code, remark, body in ((0, None, b"{{}:1}\n"), (1, "no such group", b""), (777, "", b"x")):
        opaque = operator.send(INFO, about())
        question = await asked.asked_for(INFO)
        assert texts_of(question.header) == texts_of(about())
        assert not question.is_one_way
        asked.write(encode_reply(question, code, remark=remark, body=body))
        answer = await operator.answer(opaque)

        assert (answer.code, answer.remark or None, answer.body) == (code, remark or None, body)


@windowed()
async def test_a_consumer_that_does_not_answer_is_a_timeout(rig: Rig) -> None:
    """After ten seconds, in which other requests of the operator are served."""
    operator, asked = await rig.peer(), await consumer(rig)
    opaque = operator.send(INFO, about())
    question = await asked.asked_for(INFO)
    await rig.wait(9_000)
    await operator.sync()
    assert not operator.answered(opaque)

    await rig.wait(1_500)
    answer = await operator.answer(opaque)
    assert answer.code == ResponseCode.CONSUME_MSG_TIMEOUT
    assert answer.remark == "consumer <readers> <reader> Timeout: no answer in 10 seconds"
    asked.write(encode_reply(question))  # too late: nobody waits any more
    await asked.sync()


@windowed()
async def test_a_lost_consumer_is_reported_at_once(rig: Rig) -> None:
    """Without waiting for the time-out."""
    operator, asked = await rig.peer(), await consumer(rig)
    opaque = operator.send(INFO, about())
    await asked.asked_for(INFO)
    asked.close()

    answer = await operator.answer(opaque)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "its connection is lost" in (answer.remark or "")


@windowed()
async def test_a_lost_operator_frees_its_request(rig: Rig) -> None:
    """The answer is dropped, and another request can be relayed."""
    operator, asked = await rig.peer(), await consumer(rig)
    operator.send(INFO, about())
    question = await asked.asked_for(INFO)
    operator.close()
    asked.write(encode_reply(question, body=b"{}"))
    await asked.sync()


@windowed()
async def test_too_large_an_answer_is_refused(rig: Rig) -> None:
    """The broker keeps no more than its limit for one question."""
    operator, asked = await rig.peer(), await consumer(rig)
    opaque = operator.send(INFO, about())
    question = await asked.asked_for(INFO)
    asked.write(encode_reply(question, body=bytes(consumer_relays.ANSWER_BYTES_MAX + 1)))

    answer = await operator.answer(opaque)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "4194305 bytes, the limit is 4194304" in (answer.remark or "")


@pytest.mark.parametrize("code", [-1, 70_000])
@windowed()
async def test_an_answer_with_an_odd_code_is_passed_on(rig: Rig, code: int) -> None:
    """A binary header has 16 bits for a code, and the operator's may be one."""
    operator, asked = await rig.peer(), await consumer(rig, ours=True)
    opaque = operator.send(INFO, about())
    asked.write(encode_reply(await asked.asked_for(INFO), code, remark="odd"))

    answer = await operator.answer(opaque)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "odd")


@windowed()
async def test_relayed_requests_are_bounded(rig: Rig) -> None:
    """More are refused at once, and served after others have ended."""
    operator, asked = await rig.peer(), await consumer(rig)
    opaques = [operator.send(INFO, about()) for _ in range(RELAYS.most)]
    busy = await operator.call(INFO, about())
    assert busy.code == ResponseCode.SYSTEM_BUSY

    for _ in opaques:
        asked.write(encode_reply(await asked.asked_for(INFO)))
    for opaque in opaques:
        assert (await operator.answer(opaque)).code == 0
    opaque = operator.send(INFO, about())
    asked.write(encode_reply(await asked.asked_for(INFO)))
    assert (await operator.answer(opaque)).code == 0


@pytest.mark.parametrize("client", ["reader", "nobody", ""])
@windowed()
async def test_a_request_for_an_unconnected_consumer_is_refused(rig: Rig, client: str) -> None:
    operator = await rig.peer()
    answer = await operator.call(INFO, about(client))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == f"The Consumer <readers> <{client}> not online"


@windowed()
async def test_a_client_that_is_too_old_is_not_asked(rig: Rig) -> None:
    """It would never answer."""
    operator, asked = await rig.peer(), await consumer(rig)
    asked.write(encode_request(105, opaque=9, header={"topic": "TBW102"}, version=61))
    await until(lambda: asked.answered(9))
    for code, header in ((INFO, about()), (STATUS, status())):
        answer = await operator.call(code, header)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "too low to finish" in (answer.remark or "")


@windowed()
async def test_one_message_goes_to_one_consumer(rig: Rig) -> None:
    """As it is stored, with what the client needs to know of topic and group."""
    operator, asked = await rig.peer(), await consumer(rig)
    sent = await operator.plain("K1", b"body 1")
    message_id = response_header(sent, SendMessageResponseHeader).msg_id
    header = ConsumeMessageDirectlyRequestHeader(
        consumer_group="readers", client_id="reader", msg_id=message_id, topic="orders"
    )
    opaque = operator.send(DIRECTLY, header)
    question = await asked.asked_for(DIRECTLY)
    assert isinstance(question.header, ConsumeMessageDirectlyRequestHeader)
    assert question.header.broker_name == "broker-a"
    assert (question.header.topic_sys_flag, question.header.group_sys_flag) == (0, 0)
    record = decode_record(question.body)
    assert (record.topic, record.body, record.queue_offset) == ("orders", b"body 1", 0)
    asked.write(encode_reply(question, body=b'{"consumeResult":"CR_SUCCESS"}'))

    assert (await operator.answer(opaque)).body == b'{"consumeResult":"CR_SUCCESS"}'


@pytest.mark.parametrize(
    ("message_id", "remark"),
    [
        (None, "msgId: an offset message id has 32 or 56 digits"),
        ("7F00000100002A9F0000000000FFFFFF", "can not find message by the offset, 16777215"),
    ],
)
@windowed()
async def test_a_missing_message_is_relayed_to_nobody(
    rig: Rig, message_id: str | None, remark: str
) -> None:
    operator, _ = await rig.peer(), await consumer(rig)
    header = ConsumeMessageDirectlyRequestHeader(
        consumer_group="readers", client_id="reader", msg_id=message_id
    )
    answer = await operator.call(DIRECTLY, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert (answer.remark or "").startswith(remark)


@windowed()
async def test_offsets_come_from_every_consumer_that_answers(rig: Rig) -> None:
    """One that refuses, sends nonsense, or says nothing is left out."""
    operator = await rig.peer()
    members = [await consumer(rig, f"reader-{number}") for number in range(6)]
    opaque = operator.send(STATUS, status())
    questions = [await member.asked_for(STATUS_OF_CLIENT) for member in members]
    assert all(question.header == status() for question in questions)
    replies = [
        encode_reply(questions[0], body=offsets(5, 7)),
        encode_reply(questions[1], 1, remark="no", body=offsets(1)),
        encode_reply(questions[2], body=b"nonsense"),
        encode_reply(questions[3], body=bytes(consumer_relays.STATUS_BYTES_MAX + 1)),
        encode_reply(questions[4]),
    ]
    for member, reply in zip(members, replies, strict=False):
        member.write(reply)
        await member.sync()
    await rig.wait(6_000)

    answer = await operator.answer(opaque)
    assert answer.code == 0
    (only,) = parse(answer.body)["consumerTable"].items()
    assert only[0] == "reader-0"
    assert list(only[1].values()) == [5, 7]


@windowed()
async def test_offsets_of_one_consumer_are_asked_of_it_alone(rig: Rig) -> None:
    """The field of the client id is called clientAddr."""
    operator = await rig.peer()
    first, second = await consumer(rig, "first"), await consumer(rig, "second")
    opaque = operator.send(STATUS, status("second"))
    second.write(encode_reply(await second.asked_for(STATUS_OF_CLIENT), body=offsets(3)))

    assert list(parse((await operator.answer(opaque)).body)["consumerTable"]) == ["second"]
    assert not [one for one in first.requests if one.code == STATUS_OF_CLIENT]


@windowed()
async def test_a_group_without_consumers_or_with_too_many_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of one request has a limit."""
    operator = await rig.peer()
    nobody = await operator.call(STATUS, status())
    assert nobody.remark == "No Any Consumer online in the consumer group: [readers]"

    monkeypatch.setattr(consumer_relays, "STATUS_CLIENTS_MAX", 1)
    for name in ("first", "second"):
        await consumer(rig, name)
    many = await operator.call(STATUS, status())
    assert many.code == ResponseCode.SYSTEM_ERROR
    assert "2 consumers, at most 1 are asked" in (many.remark or "")
