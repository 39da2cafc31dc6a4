"""The audit against what is known to be in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.audit.auditor import Anomaly, Audit, audited
from halfmq.spark_jobs.audit.checks import Checks
from halfmq.spark_jobs.audit.rules.model import AuditedState, Kind
from tests.support import golden_store
from tests.support.log_writer import COMMIT, HALF, OP, Apache, LogWriter, Ours
from tests.support.planted_log import PENDING_AGE, plant

SEGMENT = 1 << 16
IN_THE_LOG = {  # the words of the golden stores
    "COMMITTED": AuditedState.COMMITTED,
    "COMMITTED_WITHOUT_OP": AuditedState.COMMITTED,
    "ROLLED_BACK": AuditedState.ROLLED_BACK,
    "DISCARDED": AuditedState.PARKED,
    "UNDECIDED": AuditedState.PENDING,
}


def states_of(audit: Audit) -> dict[str, str]:
    return {row["transactionId"]: row["state"] for row in audit.transactions.collect()}


def found(anomalies: Iterable[Anomaly]) -> list[tuple[str, str | None]]:
    return sorted((anomaly.kind, anomaly.transaction_id or "") for anomaly in anomalies)


@pytest.mark.parametrize("name", ["tx-midway-clean", "v4-tx"])
def test_a_store_of_rocketmq_audits_to_what_was_done_to_it(
    name: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Every transaction's state, and the two that RocketMQ decided twice; nothing else.

    A third store, stopped by SIGKILL, is audited by the tests of the command.
    """
    store = golden_store.unpack(name, tmp_path)
    told = store.truth["transactions"]

    with audited(spark, str(store.root)) as audit:
        states = states_of(audit)

    assert states == {tx["uniqKey"]: IN_THE_LOG[tx["state_in_the_log"]] for tx in told}
    assert audit.states == Counter(states.values())
    wrong = {
        "committed twice": Kind.COMMITTED_TWICE,
        "rolled back, then committed": Kind.COMMIT_AFTER_ROLLBACK,
    }
    assert found(audit.anomalies) == sorted(
        (str(wrong[tx["what"]]), tx["uniqKey"]) for tx in told if tx["what"] in wrong
    )
    assert audit.log.records == len(store.messages)
    assert audit.log.bytes == sum(message["storeSize"] for message in store.messages)


OF_TRANSACTIONS: list[tuple[Kind, tuple[int, ...]]] = [
    (Kind.COMMIT_AFTER_ROLLBACK, (11098, 11625)),
    (Kind.COMMITTED_TWICE, (9574, 10065)),
]
# What was damaged on purpose, and what RocketMQ itself did wrong; see README-store.md.
WRONG: dict[str, list[tuple[Kind, tuple[int, ...]]]] = {
    "plain-badcrc": [(Kind.CRC, (225680,))],
    "clean-cq-short": [(Kind.MISSING_QUEUE_ENTRY, (234367,))],
    "stale-cq": [
        (Kind.WRONG_QUEUE_ENTRY, (offset,))
        for offset in (224478, 224867, 225165, 225680, 226104, 226402, 226835)
    ],
    "tx-midway-clean": OF_TRANSACTIONS,
    "tx-midway-killed": OF_TRANSACTIONS,
    "v4-tx": [
        (Kind.COMMIT_AFTER_ROLLBACK, (10360, 10496)),
        (Kind.COMMITTED_TWICE, (8837, 9373)),
    ],
}


@pytest.mark.parametrize("name", golden_store.NAMES)
def test_what_is_wrong_with_a_golden_store_is_found_and_nothing_else(
    name: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Order, queues, consume queues, topics, CRCs, digests and transactions."""
    with audited(spark, str(golden_store.unpack(name, tmp_path).root)) as audit:
        told = sorted((Kind(one.kind), tuple(one.offsets)) for one in audit.anomalies)
        assert told == sorted(WRONG.get(name, [])), [one.detail for one in audit.anomalies]


@contextmanager
def audit_of(spark: SparkSession, folder: Path) -> Iterator[Audit]:
    with audited(spark, str(folder)) as audit:
        yield audit


def test_thousands_of_transactions_and_every_fault_among_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both dialects in one log: no fault is missed, none invented, every state is right.

    With many seeds, without Spark, in ``tests/unit/spark_jobs/audit/test_planted.py``.
    """
    planted = plant(tmp_path, seed=4711, steps=6_000, fault_every=40)

    with audited(spark, str(tmp_path), checks=Checks(pending_age=PENDING_AGE)) as audit:
        found = sorted((Kind(a.kind), tuple(a.offsets)) for a in audit.anomalies)
        described = audit.transactions.collect()

    assert found == planted.expected
    states = {row["halfOffset"]: row["state"] for row in described if row["halfOffset"] is not None}
    parked = [row for row in described if row["halfOffset"] is None]
    records = {record.offset: record for record in planted.log.written}
    halves = {record.offset for record in planted.log.written if record.topic == HALF}
    expected = {half: state for half, state in planted.states.items() if half in halves}
    assert states == expected
    assert len(parked) == len(planted.states) - len(expected)
    unfounded = {str(AuditedState.UNFOUNDED): planted.decisions_on_nothing}
    assert audit.states == Counter(map(str, planted.states.values())) + Counter(unfounded)
    for row in described:
        if row["halfOffset"] is not None:
            record = records[row["halfOffset"]]
            assert row["transactionId"] == record.properties["UNIQ_KEY"]
            assert row["topic"] == record.properties["REAL_TOPIC"]
    for anomaly in audit.anomalies:
        for place, offset in zip(anomaly.places, anomaly.offsets, strict=True):
            base = int(Path(place.file).name)
            size = records[offset].size if offset in records else 0  # no record begins there
            assert (base + place.position, place.size) == (offset, size)


def test_a_log_without_faults_is_clean(spark: SparkSession, tmp_path: Path) -> None:
    """Not one false alarm, in the dialect of 4.x, with checks, late decisions and parking."""
    planted = plant(tmp_path, seed=4712, steps=3_000, fault_every=None)

    with audited(spark, str(tmp_path)) as audit:
        assert audit.anomalies == []
        assert audit.is_clean
        assert audit.states == Counter(map(str, planted.states.values()))


def test_what_expired_or_was_lost_is_held_against_nobody(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Without its oldest segments, a missing and a damaged one: these are told, and no more."""
    planted = plant(tmp_path, seed=4713, steps=3_000, fault_every=None)
    folder = planted.log.folder
    segments = sorted(folder.iterdir())
    for path in segments[:3]:
        path.unlink()
    segments[10].unlink()
    damaged = next(
        r for r in planted.log.written if r.offset > 15 * SEGMENT and "UNIQ_KEY" in r.properties
    )
    with segments[15].open("r+b") as file:
        file.seek(damaged.offset % SEGMENT + 4)
        file.write(bytes(4))

    with audit_of(spark, folder) as audit:
        kinds = [(anomaly.kind, anomaly.offsets) for anomaly in audit.anomalies]
        states = {row["halfOffset"]: row["state"] for row in audit.transactions.collect()}

    gone = {range(3 * SEGMENT), range(10 * SEGMENT, 11 * SEGMENT)}
    assert kinds == [
        (Kind.GAP, [10 * SEGMENT, 11 * SEGMENT]),
        (Kind.CORRUPT_RECORD, [damaged.offset, damaged.offset + damaged.size]),
    ]
    assert audit.log.first_offset == 3 * SEGMENT
    touched = {
        record.properties.get("UNIQ_KEY")
        for record in planted.log.written
        if any(record.offset in place for place in gone) or record == damaged
    }
    ops_lost = any(
        record.topic == OP and record.offset in place
        for record in planted.log.written
        for place in gone
    )
    assert ops_lost
    keys = {record.offset: record.properties.get("UNIQ_KEY") for record in planted.log.written}
    for half, state in planted.states.items():
        # A rollback of RocketMQ is told by its op alone; with the op, it is lost.
        if keys[half] not in touched and str(state) != AuditedState.ROLLED_BACK:
            assert states[half] == state


def test_damage_of_the_files_is_reported_with_its_place(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A flipped body bit, a zeroed block, a file that reaches into the next one."""
    log = LogWriter(tmp_path, segment_size=1 << 12)
    transactions = Ours(log)
    for _ in range(40):
        transactions.commit(transactions.half(transactions.key(), body=b"a body"))
    log.close()
    flipped, zeroed = log.written[4], log.written[12]
    path = tmp_path / f"{0:020}"
    content = bytearray(path.read_bytes())
    content[flipped.offset + 90] ^= 1
    path.write_bytes(content)
    second = tmp_path / f"{1 << 12:020}"
    zeroed = next(record for record in log.written if record.offset > 1 << 12)
    content = bytearray(second.read_bytes())
    start = zeroed.offset - (1 << 12)
    content[start : start + zeroed.size] = bytes(zeroed.size)
    second.write_bytes(content)
    third = tmp_path / f"{2 << 12:020}"
    third.write_bytes(third.read_bytes() + bytes(100))

    with audit_of(spark, tmp_path) as audit:
        anomalies = {(a.kind, tuple(a.offsets)): a.transaction_id for a in audit.anomalies}

    end_of_third = 3 << 12
    assert anomalies.pop((Kind.CRC, (flipped.offset,))) == flipped.properties["UNIQ_KEY"]
    anomalies.pop((Kind.GAP, (zeroed.offset, zeroed.offset + zeroed.size)))
    anomalies.pop((Kind.OVERLAP, (end_of_third, end_of_third + 100)))
    assert {kind for kind, _ in anomalies} <= {Kind.CORRUPT_RECORD}


def test_odd_records_are_taken_for_what_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """An op that lists no number is told, its numbers count; a half needs no unique key."""
    log = LogWriter(tmp_path)
    transactions = Apache(log)
    half = transactions.half(transactions.key())
    op = log.append(OP, f"{half.queue_offset},oops,".encode(), {"TAGS": "d"})
    other = {"UNIQ_KEY": transactions.key()}
    log.append("orders", b"", other, sys_flag=COMMIT, prepared=half.offset)
    nameless = {"REAL_TOPIC": "orders", "REAL_QID": "0"}
    log.append(HALF, b"", nameless)
    named_by_place = log.append(HALF, b"", nameless)
    fields = {"prepared": named_by_place.offset, "born": named_by_place.born}
    log.append("orders", b"", nameless, sys_flag=COMMIT, **fields)
    log.close()

    with audit_of(spark, tmp_path) as audit:
        assert [(a.kind, a.offsets) for a in audit.anomalies] == [
            (Kind.OP_WITHOUT_HALF, [op.offset]),
            (Kind.DECISION_WITHOUT_HALF, [op.offset + op.size]),
        ]
        assert (audit.states[AuditedState.ROLLED_BACK], audit.states[AuditedState.COMMITTED]) == (
            1,
            1,
        )
        assert audit.states[AuditedState.PENDING] == 1


def test_a_delayed_commit_is_decided_where_it_waits(spark: SparkSession, tmp_path: Path) -> None:
    """The record that waits first decides; its copies, and consumers' retries, decide nothing."""
    log = LogWriter(tmp_path)
    transactions = Ours(log)
    for number in range(4):
        half = transactions.half(transactions.key())  # the first one lies at offset 0
        transactions.commit_delayed(half, waits=1 + number % 2, by_rocketmq=number > 1)
    undecided = transactions.half(transactions.key())
    retry = {**undecided.properties, "REAL_TOPIC": "%RETRY%cg"}
    for topic in ("SCHEDULE_TOPIC_XXXX", "%RETRY%cg", "%DLQ%cg"):
        log.append(topic, b"", retry, sys_flag=COMMIT, reconsume_times=1)
    log.close()

    with audit_of(spark, tmp_path) as audit:
        assert audit.anomalies == []
        assert (audit.states[AuditedState.COMMITTED], audit.states[AuditedState.PENDING]) == (4, 1)
