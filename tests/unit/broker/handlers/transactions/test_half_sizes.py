"""A half that nearly fills a file of the log: taken only if all that may follow from it fits."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.own_requests import (
    TransactionsRequestHeader,
    decode_prepared_results,
    encode_entries,
)
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer
from tests.support.prepares import part
from tests.support.race_windows import Rig, windowed

FILE_SIZE = 65_536  # mappedFileSizeCommitLog
RECORD_MAX = FILE_SIZE - 8
SETTINGS: dict[str, Any] = {"commit_log_file_size": FILE_SIZE, "check_max": 1}
LONG = "t" * 127


async def _try(producer: Peer, key: str, size: int, **how: Any) -> Half | str:
    """Prepare a message with a body of so many bytes; return its half or why it is refused."""
    header, body = producer.half_request(key, bytes(size), **how)
    answer = await producer.call(RequestCode.SEND_MESSAGE_V2, header, body)
    if answer.code == ResponseCode.SUCCESS:
        return producer.half_of(answer, body)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL, answer.remark
    return answer.remark or ""


def _check_refusal(remark: str) -> None:
    """A refusal says what the message needs, what there is, and what to do."""
    assert "mappedFileSizeCommitLog" in remark
    needed, allowed = map(int, re.findall(r"up to (\d+) bytes .* may have (\d+)", remark)[0])
    assert allowed == RECORD_MAX < needed


async def _end_all(rig: Rig, producer: Peer, halves: list[Half]) -> None:
    """Commit a third of the halves, roll back a third, and have the others parked."""
    for number, half in enumerate(halves):
        if number % 3 < 2:
            answer = await producer.end(half, COMMIT if number % 3 else ROLLBACK)
            assert answer.code == 0, f"{len(half.body)} bytes: {answer.remark}"
    left = len(halves[2::3])
    await rig.wait_for(lambda: rig.metrics["pending_parked"] == left)
    assert rig.metrics["pending"] == left
    assert len(rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC)) == left


@pytest.mark.parametrize("topic", ["orders", LONG])
@pytest.mark.parametrize("extra", [{}, {"TRANSACTION_DELAY_MS": "3000"}], ids=["now", "delayed"])
@pytest.mark.parametrize("crc", [False, True])
@windowed(**SETTINGS)
async def test_every_size_is_refused_or_can_be_decided_and_parked(
    rig: Rig, topic: str, extra: dict[str, str], *, crc: bool
) -> None:
    """Through the window in which the half fits and its final message does not."""
    await rig.restart(append_property_crc=crc)
    producer = await rig.peer()
    halves: list[Half] = []
    refused: list[int] = []
    for size in range(FILE_SIZE - 1_200, FILE_SIZE - 100, 27):
        found = await _try(producer, f"K{size}", size, topic=topic, **extra)
        if isinstance(found, Half):
            assert not refused, "a larger one than one that was refused"
            halves.append(found)
        else:
            _check_refusal(found)
            refused.append(size)
    assert halves
    assert refused

    await _end_all(rig, producer, halves)
    await rig.wait(6_000)

    delivered = rig.consumed(topic)
    assert len(delivered) == len(halves[1::3])
    largest = max(record.total_size for record in rig.records())
    assert largest > RECORD_MAX - 300, "the bound is not wasteful"


@pytest.mark.parametrize("crc", [False, True])
@windowed(**SETTINGS)
async def test_halves_of_any_shape_are_refused_or_can_be_decided_and_parked(
    rig: Rig, *, crc: bool
) -> None:
    """Topics, keys, properties and delays of any length, at random, where a file is nearly full."""
    seed = int(os.environ.get("HALFMQ_SEED") or random.randrange(1 << 32))
    print(f"HALFMQ_SEED={seed}")
    chance = random.Random(seed)
    await rig.restart(append_property_crc=crc)
    producer = await rig.peer()
    halves: list[Half] = []
    refused = 0
    for number in range(120):
        key = f"{number:0{chance.choice([4, 32, 128, 129, 2_000, 9_000])}d}"
        topic = chance.choice(["o", "orders", LONG])
        how: dict[str, str] = {"X": "x" * chance.choice([1, 100, 12_000])}
        if chance.random() < 0.5:
            how |= chance.choice(
                [{"TRANSACTION_DELAY_MS": "3000"}, {"TRANSACTION_DELIVER_MS": "1700000003000"}]
            )
        sent = 2 * len(key) + len(how["X"]) + 2 * len(topic)
        size = FILE_SIZE - sent - chance.randrange(200, 1_000)
        found = await _try(producer, key, size, topic=topic, **how)
        if isinstance(found, Half):
            halves.append(found)
        else:
            _check_refusal(found)
            refused += 1
    print(f"taken={len(halves)} refused={refused}")
    assert halves
    assert refused

    await _end_all(rig, producer, halves)
    await rig.wait(6_000)

    delivered = [record for topic in ("o", "orders", LONG) for record in rig.consumed(topic)]
    assert len(delivered) == len(halves[1::3])


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK, None])
@windowed(**SETTINGS)
async def test_several_messages_are_refused_together_or_can_be_decided(
    rig: Rig, decision: int | None
) -> None:
    """One of them may nearly fill a file; keys of the leader are in each of the halves."""
    producer = await rig.peer(ours=True)
    header = TransactionsRequestHeader(producer_group="pg")
    halves: list[Half] = []
    refused = 0
    for size in range(FILE_SIZE - 12_000, FILE_SIZE - 200, 127):
        key = f"{size:0{[8, 128, 3_000][size % 3]}d}"
        parts = [part(key, b"leader", queue_id=0), part(f"K{size}", bytes(size), queue_id=0)]
        answer = await producer.call(
            RequestCode.PREPARE_TRANSACTION, header, encode_entries(parts[size % 2 :])
        )
        if answer.code != ResponseCode.SUCCESS:
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL, answer.remark
            refused += 1
            continue
        first = decode_prepared_results(answer.body)[0]
        offset = parse_offset_message_id(first.message_id).physical_offset
        halves.append(Half(offset, first.queue_offset, first.message_id, "", "pg", b""))
    assert halves
    assert refused

    if decision is None:
        await rig.wait_for(lambda: rig.metrics["pending_parked"] == len(halves))
    else:
        for half in halves:
            answer = await producer.end(half, decision)
            assert answer.code == 0, answer.remark
        assert rig.metrics["pending"] == 0


@windowed(**SETTINGS)
async def test_a_lower_limit_for_messages_keeps_no_half_from_its_decision(rig: Rig) -> None:
    """`maxMessageSize` is about what is sent; what was taken is committed, delayed and parked."""
    producer = await rig.peer()
    halves = []
    for number in range(6):
        extra: dict[str, Any] = {"TRANSACTION_DELAY_MS": "3000"} if number > 2 else {}
        found = await _try(producer, f"K{number}", 50_000, **extra)
        assert isinstance(found, Half)
        halves.append(found)
    await rig.restart(max_message_size=1_000)
    producer = await rig.peer()

    assert isinstance(await _try(producer, "L", 1_001), str)
    await _end_all(rig, producer, halves)
    await rig.wait(6_000)

    assert [len(body) for body in rig.bodies()] == [50_000, 50_000]
