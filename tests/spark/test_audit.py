"""The audit against what is known to be in a log."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.auditor import Anomaly, Audit, audited
from halfmq.spark_jobs.judge import Kind, State
from tests.support import golden_store
from tests.support.log_writer import (
    COMMIT,
    HALF,
    OP,
    Apache,
    LogWriter,
    Ours,
    Transactions,
    Written,
)

SEGMENT = 1 << 16
IN_THE_LOG = {  # the words of the golden stores
    "COMMITTED": State.COMMITTED,
    "COMMITTED_WITHOUT_OP": State.COMMITTED,
    "ROLLED_BACK": State.ROLLED_BACK,
    "DISCARDED": State.PARKED,
    "UNDECIDED": State.PENDING,
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


@dataclass
class Planted:
    """A log, and what an audit of it must find."""

    log: LogWriter
    random: random.Random
    states: dict[str, str] = field(default_factory=dict)
    anomalies: list[tuple[str, str]] = field(default_factory=list)
    faults: int = 0

    def decide(self, half: Written, state: State) -> None:
        self.states[half.properties["UNIQ_KEY"]] = state

    def wrong(self, kind: Kind, half: Written | None = None) -> None:
        self.anomalies.append((str(kind), half.properties["UNIQ_KEY"] if half else ""))


def healthy(planted: Planted, dialect: Apache) -> None:
    """One transaction in which nothing is wrong."""
    choose = planted.random
    half = dialect.half(dialect.key(), body=b"x" * choose.randrange(60))
    newest, times = half, 0
    if not isinstance(dialect, Ours):
        while choose.random() < 0.2:
            times += 1
            newest = dialect.check(half, times)
    if choose.random() < 0.3:
        planted.log.append("plain", b"y" * choose.randrange(80), {"UNIQ_KEY": dialect.key()})
    answer = choose.random()
    decided_on = choose.choice([half, newest])
    if answer < 0.6:
        dialect.commit(decided_on)
        planted.decide(half, State.COMMITTED)
    elif answer < 0.85:
        dialect.rollback(decided_on)
        planted.decide(half, State.ROLLED_BACK)
    elif answer < 0.93:
        planted.decide(half, State.PENDING)
    else:
        dialect.discard(newest)
        planted.decide(half, State.PARKED)
        if choose.random() < 0.3:  # an operator decides it after all
            dialect.commit(newest)
            planted.decide(half, State.COMMITTED)


def committed_twice(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    dialect.commit(half)
    dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.COMMITTED_TWICE, half)


def commit_after_rollback(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    dialect.rollback(half)
    if planted.random.random() < 0.5:
        dialect.write_ops()
    dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.COMMIT_AFTER_ROLLBACK, half)


def decision_without_half(planted: Planted, dialect: Apache) -> None:
    half = Written(planted.log.end + 1, 0, 0, "", b"", {
        "UNIQ_KEY": dialect.key(), "PGROUP": "pg", "REAL_TOPIC": "orders", "REAL_QID": "0",
    })  # fmt: skip
    Transactions.commit(dialect, half, names=planted.log.written[0].offset + 1)
    planted.wrong(Kind.DECISION_WITHOUT_HALF, half)


def op_without_half(planted: Planted, dialect: Apache) -> None:
    dialect.done(10_000_000 + planted.faults)
    planted.wrong(Kind.OP_WITHOUT_HALF)


def duplicate_prepare(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    twin = dialect.half(half.properties["UNIQ_KEY"])
    dialect.commit(half)
    dialect.rollback(twin)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.DUPLICATE_PREPARE, half)


FAULTS = [
    committed_twice,
    commit_after_rollback,
    decision_without_half,
    op_without_half,
    duplicate_prepare,
]


def plant(folder: Path, seed: int, transactions: int, *, fault_every: int) -> Planted:
    """Write a log that RocketMQ began and halfmq went on with, with faults among the healthy."""
    planted = Planted(LogWriter(folder, segment_size=SEGMENT), random.Random(seed))
    older = Apache(planted.log, op_each=seed % 2 == 0)
    dialects: list[Apache] = [older, Ours(planted.log)]
    dialects[1].key = older.key  # type: ignore[method-assign]  # no key twice
    for number in range(transactions):
        dialect = dialects[0 if number < transactions // 2 else 1]
        if number % fault_every == fault_every - 1:
            FAULTS[planted.faults % len(FAULTS)](planted, dialect)
            planted.faults += 1
        else:
            healthy(planted, dialect)
        if planted.random.random() < 0.02:
            dialect.write_ops()
        if number == transactions // 2 - 1:
            dialect.write_ops()
    dialects[1].write_ops()
    planted.log.close()
    return planted


@contextmanager
def audit_of(spark: SparkSession, folder: Path) -> Iterator[Audit]:
    with audited(spark, str(folder)) as audit:
        yield audit


def test_ten_thousand_transactions_and_every_fault_among_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both dialects in one log: no fault is missed, none invented, every state is right."""
    planted = plant(tmp_path, seed=4711, transactions=10_000, fault_every=80)

    with audit_of(spark, tmp_path) as audit:
        assert found(audit.anomalies) == sorted(planted.anomalies)
        assert states_of(audit) == planted.states
    assert audit.states == Counter(planted.states.values()) + Counter(
        {
            str(State.UNFOUNDED): sum(
                kind == "decision_without_half" for kind, _ in planted.anomalies
            )
        }
    )


def test_a_log_without_faults_is_clean(spark: SparkSession, tmp_path: Path) -> None:
    """Not one false alarm, in the dialect of 4.x, with checks, late decisions and parking."""
    planted = plant(tmp_path, seed=4712, transactions=3_000, fault_every=1_000_000)

    with audit_of(spark, tmp_path) as audit:
        assert audit.anomalies == []
        assert audit.is_clean
        assert states_of(audit) == planted.states


def test_what_expired_or_was_lost_is_held_against_nobody(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Without its oldest segments, a missing and a damaged one: these are told, and no more."""
    planted = plant(tmp_path, seed=4713, transactions=3_000, fault_every=1_000_000)
    segments = sorted(tmp_path.iterdir())
    for path in segments[:3]:
        path.unlink()
    segments[10].unlink()
    damaged = next(
        r for r in planted.log.written if r.offset > 15 * SEGMENT and "UNIQ_KEY" in r.properties
    )
    with segments[15].open("r+b") as file:
        file.seek(damaged.offset % SEGMENT + 4)
        file.write(bytes(4))

    with audit_of(spark, tmp_path) as audit:
        kinds = [(anomaly.kind, anomaly.offsets) for anomaly in audit.anomalies]
        states = states_of(audit)

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
    for key, state in planted.states.items():
        # A rollback of RocketMQ is told by its op alone; with the op, it is lost.
        if key not in touched and state != State.ROLLED_BACK:
            assert states[key] == state


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
    log.append("orders", b"", nameless, sys_flag=COMMIT, prepared=named_by_place.offset)
    log.close()

    with audit_of(spark, tmp_path) as audit:
        assert [(a.kind, a.offsets) for a in audit.anomalies] == [
            (Kind.OP_WITHOUT_HALF, [op.offset]),
            (Kind.DECISION_WITHOUT_HALF, [op.offset + op.size]),
        ]
        assert (audit.states[State.ROLLED_BACK], audit.states[State.COMMITTED]) == (1, 1)
        assert audit.states[State.PENDING] == 1


def test_a_delayed_commit_is_decided_where_it_waits(spark: SparkSession, tmp_path: Path) -> None:
    """The record that waits first decides; its copies, and consumers' retries, decide nothing."""
    log = LogWriter(tmp_path)
    transactions = Ours(log)
    for number in range(4):
        half = transactions.half(transactions.key())  # the first one lies at offset 0
        transactions.commit_delayed(half, waits=1 + number % 2, by_rocketmq=number > 1)
    undecided = transactions.half(transactions.key())
    for topic in ("SCHEDULE_TOPIC_XXXX", "%RETRY%cg", "%DLQ%cg"):
        log.append(topic, b"", undecided.properties, sys_flag=COMMIT, reconsume_times=1)
    log.close()

    with audit_of(spark, tmp_path) as audit:
        assert audit.anomalies == []
        assert (audit.states[State.COMMITTED], audit.states[State.PENDING]) == (4, 1)
