"""`TRANSACTION_HALF_ID`: only messages that the broker committed have it."""

from __future__ import annotations

from typing import Any

import pytest

from halfmq.client import MessageView
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.properties import decode_properties, encode_properties
from halfmq.store.format.record import Record
from halfmq.store.log.append_request import AppendRequest
from tests.support.broker_doubles import START_MS, draft
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer
from tests.support.race_windows import Rig, windowed

RETRY = "%RETRY%billing"
DEAD = "%DLQ%billing"


def _half_id(record: Record) -> str | None:
    """Return the half message id that a consumer of a record sees."""
    return MessageView(record, "broker-a").half_message_id


async def _committed(rig: Rig, producer: Peer, **properties: str) -> tuple[Half, Record]:
    half = await producer.prepare("T1", b"true", **properties)
    assert (await producer.end(half, COMMIT)).code == 0
    await rig.settle()
    return half, rig.consumed()[0]


def _foreign(record: Record) -> dict[str, Any]:
    """Return all properties of a consumed message, for another one that is no half message."""
    properties = {**record.property_map, "TRAN_MSG": "false"}
    del properties["UNIQ_KEY"]
    return properties


async def _old_version(producer: Peer, properties: dict[str, Any]) -> None:
    header = SendMessageRequestHeader(
        producer_group="pg",
        topic="orders",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=START_MS,
        flag=0,
        properties=encode_properties({"UNIQ_KEY": "F1"} | properties).decode(),
    )
    assert (await producer.call(RequestCode.SEND_MESSAGE, header, b"forged")).code == 0


async def _batch_of_forged_units(producer: Peer, properties: dict[str, Any]) -> None:
    raws = [encode_properties({"UNIQ_KEY": f"F{number}"} | properties) for number in range(3)]
    units = [BatchUnit(0, b"forged", raw) for raw in raws]
    assert (await producer.plain("F", encode_batch(units), batch=True)).code == 0


async def _forged_batch(producer: Peer, properties: dict[str, Any]) -> None:
    units = [BatchUnit(0, b"forged", b"UNIQ_KEY\x01F%d\x02" % number) for number in range(3)]
    assert (await producer.plain("F", encode_batch(units), batch=True, **properties)).code == 0


async def _plain(producer: Peer, properties: dict[str, Any]) -> None:
    assert (await producer.plain("F1", b"forged", **properties)).code == 0


async def _delayed(producer: Peer, properties: dict[str, Any]) -> None:
    assert (await producer.plain("F1", b"forged", **properties | {"DELAY": "1"})).code == 0


async def _delayed_retry(producer: Peer, properties: dict[str, Any]) -> None:
    changed = properties | {"DELAY": "1", "TRAN_MSG": "true"}
    answer = await producer.plain("F1", b"forged", reconsume_times=1, **changed)
    assert answer.code == 0


async def _half(producer: Peer, properties: dict[str, Any]) -> None:
    half = await producer.prepare("F1", b"forged", **properties | {"TRAN_MSG": "true"})
    assert (await producer.end(half, COMMIT)).code == 0


WAYS = [
    _plain,
    _old_version,
    _batch_of_forged_units,
    _forged_batch,
    _delayed,
    _delayed_retry,
    _half,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@windowed()
async def test_a_forwarded_or_forged_id_is_removed(rig: Rig, way: Any) -> None:
    """However it is sent, and after a consumer has sent the message back."""
    producer = await rig.peer()
    half, true = await _committed(rig, producer)
    await way(producer, _foreign(true))
    await rig.wait(3_000)

    forged = [record for record in rig.consumed() if record.body == b"forged"]
    assert forged
    for record in forged:
        assert (_half_id(record) is None) is (way is not _half)
        assert _half_id(record) != half.message_id
        assert (await producer.send_back(record.physical_offset, "billing")).code == 0
    await rig.wait(3_000)

    assert half.message_id not in {_half_id(record) for record in rig.consumed(RETRY)}
    told = [one.property_map.get("TRANSACTION_HALF_ID") for one in rig.records()]
    assert told.count(half.message_id) == 1, "in the final message alone"
    assert _half_id(true) == half.message_id


@windowed()
async def test_the_id_is_the_same_in_delays_retries_and_dead_letters(rig: Rig) -> None:
    """An inbox recognises each record that the broker makes from a final message."""
    producer = await rig.peer()
    half = await producer.prepare("T1", TRANSACTION_DELAY_MS="7000")
    await producer.end(half, COMMIT)
    await rig.wait(9_000)
    (delivered,) = rig.consumed()
    for _ in range(2):
        newest = (rig.consumed(RETRY) or [delivered])[-1]
        assert (await producer.send_back(newest.physical_offset, "billing")).code == 0
        await rig.wait(3_000)
    assert (await producer.send_back(newest.physical_offset, "billing", -1)).code == 0
    await rig.settle()

    copies = [delivered, *rig.consumed(RETRY), *rig.consumed(DEAD)]
    assert [copy.topic for copy in copies] == ["orders", RETRY, RETRY, DEAD]
    assert {_half_id(copy) for copy in copies} == {half.message_id}


def _stored(rig: Rig, message: AppendRequest) -> Record:
    """Store a record as an earlier broker, or Apache RocketMQ, would have."""
    (appended,) = rig.store.append([message])
    record = rig.store.reader.record_at(appended.physical_offset)
    assert record is not None
    return record


@windowed(flush_mode="ASYNC_FLUSH")
async def test_a_stored_id_is_trusted_only_in_a_final_message(rig: Rig) -> None:
    """A forged id on disk is ignored, also after a consumer has sent its message back."""
    producer = await rig.peer()
    half, _ = await _committed(rig, producer)
    forged = f"TRANSACTION_HALF_ID\x01{half.message_id}\x02UNIQ_KEY\x01F\x02".encode()
    marked = forged + b"TRAN_MSG\x01true\x02"
    linked = draft("orders", properties=marked, sys_flag=0x8)
    linked.prepared_transaction_offset = 4_711
    records = [
        _stored(rig, draft("orders", properties=forged)),
        _stored(rig, draft("orders", properties=marked)),
        _stored(rig, draft("orders", properties=forged, reconsume_times=1)),
        _stored(rig, draft(RETRY, properties=forged, reconsume_times=1)),
        _stored(rig, draft(RETRY, properties=marked, reconsume_times=1, sys_flag=0x8)),
    ]
    assert [_half_id(record) for record in records] == [None] * 5
    final = _stored(rig, linked)  # by RocketMQ, from a half with a forged property
    told = _half_id(final)
    assert told is not None
    assert told.endswith(f"{4_711:016X}")

    for record in [*records, final]:
        assert (await producer.send_back(record.physical_offset, "billing")).code == 0
    await rig.wait(3_000)

    retries = rig.consumed(RETRY)[-6:]
    assert [_half_id(record) for record in retries] == [None] * 5 + [told]


# --- retries that clients send, because their request to send back failed


def _resent(record: Record, **changed: str) -> dict[str, Any]:
    """Return the properties of such a retry, as Java's consumer makes them."""
    properties: dict[str, Any] = {**record.property_map}
    properties |= {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "T1", "DELAY": "3"}
    del properties["TRAN_MSG"]
    del properties["UNIQ_KEY"]
    return properties | changed


@windowed()
async def test_a_retry_that_a_client_sends_keeps_the_id_and_the_true_content(rig: Rig) -> None:
    """The id names the committed message, so its content is stored, as for request code 36."""
    producer = await rig.peer()
    half, true = await _committed(rig, producer, TAGS="paid", colour="red")
    answer = await producer.plain(
        "T1", b"other", topic=RETRY, reconsume_times=1, **_resent(true, colour="blue")
    )
    assert answer.code == 0
    await rig.wait(12_000)

    (retry,) = rig.consumed(RETRY)
    assert _half_id(retry) == half.message_id
    assert (retry.body, retry.reconsume_times) == (b"true", 1)
    told = retry.property_map
    assert (told["colour"], told["TAGS"], told["RETRY_TOPIC"]) == ("red", "paid", "orders")
    assert (told["ORIGIN_MESSAGE_ID"], told["UNIQ_KEY"]) == ("T1", "T1")
    assert len(rig.finals_of(half)) == 1


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("T1", {"TRANSACTION_HALF_ID": "7F000001000000000000000000000000"}),
        ("T1", {"TRANSACTION_HALF_ID": "7F00000100002A9F0000000000FFFFFF"}),
        ("T1", {"TRANSACTION_HALF_ID": "no id"}),
        ("T1", {"RETRY_TOPIC": "payments"}),
        ("T2", {}),
    ],
    ids=["another host", "another offset", "no id", "another topic", "another message"],
)
@windowed()
async def test_a_retry_that_a_client_sends_of_anything_else_has_no_id(
    rig: Rig, key: str, changed: dict[str, str]
) -> None:
    """Of another half, another topic, or another message than the committed one."""
    producer = await rig.peer()
    _, true = await _committed(rig, producer)
    properties = _resent(true, **changed)
    answer = await producer.plain(key, b"other", topic=RETRY, reconsume_times=1, **properties)
    assert answer.code == 0
    await rig.wait(12_000)

    (retry,) = rig.consumed(RETRY)
    assert (retry.body, _half_id(retry)) == (b"other", None)
    assert "TRANSACTION_HALF_ID" not in retry.property_map


@pytest.mark.parametrize("decision", [None, ROLLBACK])
@windowed()
async def test_no_retry_has_the_id_of_a_half_that_is_not_committed(
    rig: Rig, decision: int | None
) -> None:
    """Otherwise an inbox would drop the message if it is committed later."""
    producer = await rig.peer()
    half = await producer.prepare("T1", b"true")
    if decision is not None:
        await producer.end(half, decision)
    properties: dict[str, Any] = {"TRANSACTION_HALF_ID": half.message_id, "RETRY_TOPIC": "orders"}
    await producer.plain("T1", b"true", topic=RETRY, reconsume_times=1, DELAY="1", **properties)
    await rig.wait(2_000)

    (retry,) = rig.consumed(RETRY)
    assert _half_id(retry) is None
    assert "TRANSACTION_HALF_ID" not in decode_properties(retry.properties)


@windowed()
async def test_the_refusal_of_an_old_consumers_retry_names_the_transaction_bits(rig: Rig) -> None:
    """It has TRAN_MSG=true, but must not have the bits of its producer's message."""
    producer = await rig.peer()
    _, true = await _committed(rig, producer)
    properties = _resent(true, TRAN_MSG="true")
    end = rig.store.write_offset
    answer = await producer.plain(
        "T1", b"true", topic=RETRY, reconsume_times=1, sys_flag=4, **properties
    )

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "reconsumeTimes=1, DELAY=3" in (answer.remark or "")
    assert "clear the bits (0xC)" in (answer.remark or "")
    assert "without the property" not in (answer.remark or "")
    assert rig.store.write_offset == end
