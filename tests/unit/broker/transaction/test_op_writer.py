"""Op messages: batched, delayed, and written again after a failure."""

from collections.abc import Sequence
from pathlib import Path

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.op_writer import RECORDS_PER_TICK, RETRY_MS, OpWriter
from halfmq.store.errors import StoreError
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.topics import OP_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import START_MS
from tests.support.golden_store import unpack
from tests.support.transactions import HOST, golden_log

CONFIG = TransactionConfig(op_batch_size=40, op_batch_interval_ms=3_000)


class Log:
    """Keeps the requests, and refuses them while `failing`."""

    def __init__(self) -> None:
        self.drafts: list[AppendRequest] = []
        self.failing = False

    def append(self, group: Sequence[AppendRequest]) -> list[AppendResult]:
        if self.failing:
            raise StoreError("no room")
        self.drafts += group
        return []

    @property
    def bodies(self) -> list[bytes]:
        return [draft.body for draft in self.drafts]


def test_an_op_message_is_what_rocketmq_writes() -> None:
    """Its broker reads the tag and the body; the record has nothing else."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    writer.add(12)
    writer.add(15)
    writer.drain()
    (ours,) = log.drafts

    assert (ours.topic, ours.queue_id, ours.body, ours.sys_flag) == (OP_TOPIC, 0, b"12,15,", 0)
    assert (ours.born_host, ours.store_host, ours.born_timestamp) == (HOST, HOST, START_MS)
    assert decode_properties(ours.properties) == {"TAGS": "d", "WAIT": "true"}
    assert ours.tags_code == ord("d")


def test_an_op_message_has_the_properties_of_an_official_one(tmp_path: Path) -> None:
    """Compared with an op record of an official store."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    writer.add(16)
    writer.drain()
    (ours,) = log.drafts
    theirs = [
        record
        for record in golden_log(unpack("tx-midway-killed", tmp_path)).records()
        if record.topic == OP_TOPIC and record.body == b"16,"
    ]

    assert [decode_properties(one.properties) for one in theirs] == [
        decode_properties(ours.properties)
    ]


def test_offsets_are_written_once_per_interval() -> None:
    """One op message holds all decisions of three seconds."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    assert writer.tick(START_MS) == 3_000
    writer.add(1)
    writer.add(2)
    assert writer.tick(START_MS + 2_999) == 1
    assert log.bodies == []

    assert writer.tick(START_MS + 3_000) == 3_000
    assert log.bodies == [b"1,2,"]


def test_a_full_batch_is_written_at_once_in_bodies_of_the_configured_size() -> None:
    """Each body ends with the offset that reaches the size; none is lost between bodies."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    writer.tick(START_MS)
    offsets = list(range(995, 1_040))
    for offset in offsets:
        writer.add(offset)

    assert writer.tick(START_MS + 1) == 3_000

    assert len(log.bodies[0]) == 40  # five offsets of three digits and four of four
    for body in log.bodies[:-1]:
        *before, _last, _end = body.split(b",")
        assert len(body) >= 40 > len(b",".join([*before, b""]))
    assert [int(part) for body in log.bodies for part in body.split(b",") if part] == offsets


def test_very_many_offsets_are_written_in_slices() -> None:
    """After a crash very many may be without an op message."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    writer.add_all(range(1_000, 2_000))

    assert writer.tick(START_MS) == 0
    assert len(log.drafts) == RECORDS_PER_TICK
    writer.drain()

    assert list(writer.waiting) == []
    assert sum(body.count(b",") for body in log.bodies) == 1_000
    assert writer.written == len(log.drafts)


def test_a_failed_write_is_tried_again() -> None:
    """No request waits for op messages; the offsets are kept."""
    log = Log()
    writer = OpWriter(log.append, CONFIG, HOST, lambda: START_MS)
    writer.add(7)
    log.failing = True
    assert writer.tick(START_MS) == RETRY_MS
    writer.drain()
    log.failing = False
    writer.tick(START_MS + RETRY_MS)

    assert log.bodies == [b"7,"]
