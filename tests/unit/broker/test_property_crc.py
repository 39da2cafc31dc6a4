"""`enabledAppendPropCRC=true`: every record ends in one fresh checksum, wherever it comes from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.own_requests import (
    TransactionsRequestHeader,
    decode_prepared_results,
    encode_entries,
)
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import crc_tail_matches
from halfmq.store.format.topics import (
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer
from tests.support.prepares import part
from tests.support.race_windows import Rig, windowed

FOREIGN: dict[str, Any] = {"__CRC32#": "0123456789"}  # what a client sends, of another record
TOPICS = {
    "orders",
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
    "%RETRY%billing",
    "%DLQ%billing",
}


async def _several(producer: Peer, key: str) -> Half:
    """Prepare three messages as one transaction; return the leader."""
    header = TransactionsRequestHeader(producer_group=producer.group)
    messages = [part(f"{key}-{number}", queue_id=0, **FOREIGN) for number in range(3)]
    answer = await producer.call(RequestCode.PREPARE_TRANSACTION, header, encode_entries(messages))
    assert answer.code == 0, answer.remark
    leader = decode_prepared_results(answer.body)[0]
    offset = parse_offset_message_id(leader.message_id).physical_offset
    return Half(offset, leader.queue_offset, leader.message_id, f"{key}-0", producer.group, b"")


async def _mixed_run(rig: Rig) -> None:
    """Have records of every kind written, most of them made of others."""
    producer = await rig.peer(ours=True)
    for number, properties in enumerate([{}, FOREIGN, {"CLUSTER": "c"} | FOREIGN]):
        assert (await producer.plain(f"P{number}", **properties)).code == 0
        assert (await producer.plain(f"D{number}", DELAY="2", **properties)).code == 0
    raw = b"UNIQ_KEY\x01B%d\x02__CRC32#\x010123456789\x02"
    units = [BatchUnit(0, b"unit", raw % number) for number in range(3)]
    units.append(BatchUnit(0, b"no end", b"A\x01b"))
    assert (await producer.plain("B", encode_batch(units), batch=True)).code == 0
    halves = [
        (await producer.prepare("T1"), COMMIT),
        (await producer.prepare("T2", **FOREIGN), ROLLBACK),
        (await producer.prepare("T3", TRANSACTION_DELAY_MS="7000", **FOREIGN), COMMIT),
        (await _several(producer, "T4"), COMMIT),
    ]
    for half, decision in halves:
        assert (await producer.end(half, decision)).code == 0
    await producer.prepare("T5", **FOREIGN)  # nobody decides
    await rig.wait(10_000)
    for record in rig.consumed():
        assert (await producer.send_back(record.physical_offset, "billing")).code == 0
    await rig.wait(3_000)
    for record in rig.consumed("%RETRY%billing"):
        assert (await producer.send_back(record.physical_offset, "billing", -1)).code == 0
    await rig.wait_for(lambda: rig.metrics["pending_parked"] == 1)


def _crcs(rig: Rig) -> Counter[tuple[str, int, bool | None]]:
    """Count records by topic, CRC properties, and whether the one at the end is right."""
    found: Counter[tuple[str, int, bool | None]] = Counter()
    for record in rig.records():
        encoded = rig.store.reader.record_bytes(record.physical_offset)
        assert encoded is not None
        names = [one.partition(b"\x01")[0] for one in record.properties.split(b"\x02")]
        found[record.topic, names.count(b"__CRC32#"), crc_tail_matches(encoded)] += 1
    return found


@windowed(append_property_crc=True, check_max=1)
async def test_every_record_of_a_mixed_run_ends_in_one_fresh_crc(rig: Rig) -> None:
    """Sends, batches, halves, decisions, delays, retries, dead letters, parked and op messages."""
    await _mixed_run(rig)

    crcs = _crcs(rig)
    print(dict(crcs))
    assert {topic for topic, _, _ in crcs} == TOPICS
    assert {(count, matches) for _, count, matches in crcs} == {(1, True)}


@pytest.mark.parametrize("killed", [False, True])
@windowed(check_max=1)
async def test_without_the_setting_no_record_ends_in_a_crc_it_brought(
    rig: Rig, *, killed: bool
) -> None:
    """A start would take it for the record's own, and the message for damaged."""
    await _mixed_run(rig)
    before = [record.physical_offset for record in rig.records()]

    assert {matches for _, _, matches in _crcs(rig)} == {None}

    await (rig.kill() if killed else rig.restart())

    assert [record.physical_offset for record in rig.records()] == before


@windowed(append_property_crc=True, check_max=1)
async def test_records_made_of_others_lose_the_crc_when_the_setting_is_off(rig: Rig) -> None:
    """Delayed and committed messages survive a change of the setting and a kill after it."""
    producer = await rig.peer()
    half = await producer.prepare("T1", TRANSACTION_DELAY_MS="7000")
    await producer.plain("P1", DELAY="2")
    await rig.restart(append_property_crc=False)
    producer = await rig.peer()
    await producer.end(half, COMMIT)
    await rig.wait(10_000)
    delivered = rig.consumed()
    assert len(delivered) == 2
    for record in delivered:
        encoded = rig.store.reader.record_bytes(record.physical_offset)
        assert encoded is not None
        assert crc_tail_matches(encoded) is None

    await rig.kill()

    assert rig.consumed() == delivered
