"""Logs with every anomaly that an audit looks for, among many records in which nothing is wrong.

``plant`` writes a store that Apache RocketMQ began and halfmq went on with, and says what an audit
must find in it: each transaction's state, by the offset of its half, and each anomaly with the
offsets that show it. The same seed gives the same bytes.
"""

import random
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from .log_writer import (
    HALF,
    OP,
    PARKED,
    SCHEDULE,
    Apache,
    LogWriter,
    Ours,
    Transactions,
    Written,
    write_store,
)
from .oracle.delays import LEVELS
from .oracle.words import Found, Kind, State

PENDING_AGE = timedelta(days=10)  # longer than the retries of millions of records take together
LATER = 2 * PENDING_AGE // timedelta(milliseconds=1)  # ms that pass amid the log
QUEUES = {f"plain{n}": 4 for n in range(4)}
QUEUES |= {"orders": 8, "faulty": 8, HALF: 1, OP: 1, PARKED: 1, SCHEDULE: 18}


@dataclass
class Planted:
    """A log being written, and what an audit must find in it."""

    log: LogWriter
    random: random.Random
    states: dict[int, State] = field(default_factory=dict)  # by the half's offset
    anomalies: list[Callable[[], Found]] = field(default_factory=list)  # known when all is written
    decisions_on_nothing: int = 0
    damage: list[Callable[[], None]] = field(default_factory=list)  # done to the files at the end
    is_late: bool = False  # the clock has been put forward
    spare: int = 0  # numbers given out once

    def decide(self, half: Written, state: State) -> None:
        self.states[half.offset] = state

    def wrong(self, kind: Kind, *offsets: int | Callable[[], int]) -> None:
        """Expect an anomaly; an offset may become known later."""
        self.anomalies.append(
            lambda: (kind, tuple(sorted(o if isinstance(o, int) else o() for o in offsets)))
        )

    def next(self) -> int:
        self.spare += 1
        return self.spare

    def ops_of(self, half: Written) -> list[int]:
        """The op records that name a half, when all is written."""
        return self._ops[str(half.queue_offset).encode()]

    @cached_property
    def _ops(self) -> dict[bytes, list[int]]:
        """Where the op records lie that name a place among the halves."""
        ops: dict[bytes, list[int]] = defaultdict(list)
        for record in self.log.written:
            if record.topic == OP:
                for slot in {*record.body.split(b",")}:
                    ops[slot].append(record.offset)
        return ops

    @property
    def expected(self) -> list[Found]:
        return sorted(anomaly() for anomaly in self.anomalies)


# --- what is healthy


def plain(planted: Planted, dialect: Apache) -> None:
    choose = planted.random
    topic, queue = f"plain{choose.randrange(4)}", choose.randrange(4)
    properties = {"UNIQ_KEY": dialect.key(), "KEYS": f"k{choose.randrange(99)}"}
    if choose.random() < 0.5:
        properties["TAGS"] = choose.choice(["created", "paid", "tag-é"])
    planted.log.append(topic, b"y" * choose.randrange(80), properties, queue_id=queue)


def retried(planted: Planted, dialect: Apache) -> None:
    """A consumer gives a committed message back: copies with its flags, and without its link."""
    half = dialect.half(dialect.key())
    final = dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    bits = 0 if isinstance(dialect, Ours) else 0x8
    # As in the golden store ``delay-retry-dlq``: the retry topic is the real one of what waits.
    retry = {"DELAY": "3", "RETRY_TOPIC": "orders", "REAL_TOPIC": "%RETRY%cg", "REAL_QID": "0"}
    for topic, queue in ((SCHEDULE, 2), ("%RETRY%cg", 0), ("%DLQ%cg", 0)):
        properties = {**final.properties, **retry}
        planted.log.append(
            topic,
            half.body,
            properties,
            queue_id=queue,
            sys_flag=bits,
            reconsume_times=1,
            born=half.born,
        )
        planted.log.now += 10_000 if topic == SCHEDULE else 0


def transaction(planted: Planted, dialect: Apache) -> None:
    """Prepared, perhaps asked about, then decided or not."""
    choose = planted.random
    half = dialect.half(dialect.key(), body=b"x" * choose.randrange(60))
    newest, times = half, 0
    if not isinstance(dialect, Ours):
        while choose.random() < 0.2:
            times += 1
            newest = dialect.check(half, times)
    for _ in range(choose.randrange(3)):
        plain(planted, dialect)
    decided_on = choose.choice([half, newest])
    answer = choose.random()
    if answer < 0.6:
        dialect.commit(decided_on)
        planted.decide(half, State.COMMITTED)
    elif answer < 0.85 or not planted.is_late:
        dialect.rollback(decided_on)
        planted.decide(half, State.ROLLED_BACK)
    else:
        planted.decide(half, State.PENDING)


def parked(planted: Planted, dialect: Apache) -> None:
    """Given up; then decided after all, or resumed, or neither."""
    half = dialect.half(dialect.key())
    dialect.discard(half)
    planted.decide(half, State.PARKED)
    answer = planted.random.random()
    if answer < 0.3:
        dialect.commit(half)
        planted.decide(half, State.COMMITTED)
    elif answer < 0.7:
        again = dialect.resume(half) if isinstance(dialect, Ours) else dialect.check(half, 0)
        if planted.is_late:
            planted.decide(half, State.PENDING)
        else:
            dialect.rollback(half if isinstance(dialect, Ours) else again)
            planted.decide(half, State.ROLLED_BACK)


def again(planted: Planted, dialect: Apache) -> None:
    """Rolled back, then prepared anew under the same key."""
    half = dialect.half(dialect.key())
    dialect.rollback(half)
    dialect.write_ops()
    anew = dialect.half(half.properties["UNIQ_KEY"])
    dialect.commit(anew)
    planted.decide(half, State.ROLLED_BACK)
    planted.decide(anew, State.COMMITTED)


def delayed(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    waits = planted.random.randrange(1, 4)
    dialect.commit_delayed(half, waits=waits, by_rocketmq=planted.random.random() < 0.3)
    planted.decide(half, State.COMMITTED)


def several(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    choose = planted.random
    count = choose.randrange(2, 6)
    answer = choose.random()
    cut_off = answer > 0.9
    halves = dialect.several(count - cut_off, of=count)
    if answer < 0.5:
        dialect.commit_several(halves)
        planted.decide(halves[0], State.COMMITTED)
    elif answer < 0.7 or cut_off or not planted.is_late:
        dialect.rollback_several(halves)
        planted.decide(halves[0], State.ROLLED_BACK)
    elif answer < 0.8:
        dialect.discard(halves[0])
        planted.decide(halves[0], State.PARKED)
    else:
        planted.decide(halves[0], State.PENDING)


def unreadable(planted: Planted, dialect: Apache) -> None:
    """Rolled back by a record that says nothing but where the half is."""
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    for _ in range(planted.random.randrange(40)):
        plain(planted, dialect)
    dialect.rollback_bare(half)
    planted.decide(half, State.ROLLED_BACK)


HEALTHY_OF_BOTH = [
    plain,
    transaction,
    transaction,
    transaction,
    transaction,
    parked,
    again,
    retried,
]
HEALTHY_OF_OURS = [delayed, several, unreadable]


# --- what is wrong


def committed_twice(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    finals = [dialect.commit(half), dialect.commit(half)]
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.COMMITTED_TWICE, *(final.offset for final in finals))


def commit_after_rollback(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    record = dialect.rollback(half)
    if planted.random.random() < 0.5:
        dialect.write_ops()
    final = dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    rollback = record.offset if record else lambda: planted.ops_of(half)[0]
    planted.wrong(Kind.COMMIT_AFTER_ROLLBACK, rollback, final.offset)


def rollback_after_commit(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    final = dialect.commit(half)
    dialect.write_ops()
    record = dialect.rollback(half)
    planted.decide(half, State.COMMITTED)
    rollback = record.offset if record else lambda: planted.ops_of(half)[1]
    planted.wrong(Kind.ROLLBACK_AFTER_COMMIT, final.offset, rollback)


def decision_without_half(planted: Planted, dialect: Apache) -> None:
    properties = {"UNIQ_KEY": dialect.key(), "PGROUP": "pg", "REAL_TOPIC": "orders"}
    half = Written(planted.log.end + 1, 0, 0, "", b"", {**properties, "REAL_QID": "0"})
    nowhere = planted.log.written[0].offset + 1
    if isinstance(dialect, Ours) and planted.random.random() < 0.5:
        record = dialect.log.append(HALF, b"", properties, sys_flag=0xC, prepared=nowhere)
    else:
        record = Transactions.commit(dialect, half, names=nowhere)
    planted.decisions_on_nothing += 1
    planted.wrong(Kind.DECISION_WITHOUT_HALF, record.offset)


def op_without_half(planted: Planted, dialect: Apache) -> None:
    half = Written(0, 0, 10_000_000 + planted.next(), "", b"", {})
    dialect.done(half.queue_offset)
    planted.wrong(Kind.OP_WITHOUT_HALF, lambda: planted.ops_of(half)[0])


def duplicate_prepare(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    duplicate = dialect.half(half.properties["UNIQ_KEY"])
    for _ in range(planted.random.randrange(40)):
        plain(planted, dialect)
    dialect.commit(half)
    dialect.rollback(duplicate)
    planted.decide(half, State.COMMITTED)
    planted.decide(duplicate, State.ROLLED_BACK)
    planted.wrong(Kind.DUPLICATE_PREPARE, half.offset, duplicate.offset)


def parked_without_half(planted: Planted, dialect: Apache) -> None:
    properties = {"UNIQ_KEY": dialect.key(), "PGROUP": "pg", "REAL_TOPIC": "orders"}
    nowhere = planted.log.written[0].offset + 1
    link = nowhere if isinstance(dialect, Ours) else 0
    record = planted.log.append(PARKED, b"", properties, prepared=link)
    planted.decide(record, State.PARKED)
    planted.wrong(Kind.PARKED_WITHOUT_HALF, record.offset)


def lost_parking(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    planted.decide(half, State.PENDING)
    if isinstance(dialect, Ours):  # resumed, so it must have been parked
        resumed = dialect.resume(half)
        planted.wrong(Kind.LOST_PARKING, half.offset, resumed.offset)
        if not planted.is_late:
            planted.wrong(Kind.OVERDUE_HALF, half.offset)
        return
    copies = [dialect.check(half, times) for times in range(1, 16)]
    offsets = [half.offset, *(copy.offset for copy in copies)]
    if planted.is_late:  # too late to be missed: the next round would park it
        return
    planted.wrong(Kind.LOST_PARKING, *offsets)
    planted.wrong(Kind.OVERDUE_HALF, *offsets)


def overdue(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    planted.decide(half, State.PENDING)
    if not planted.is_late:
        planted.wrong(Kind.OVERDUE_HALF, half.offset)


def missing_final(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    finals = dialect.commit_several(halves, finals=2)
    plain(planted, dialect)
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.MISSING_FINAL, halves[2].offset, finals[0].offset)


def split_group(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    answer = planted.random.random()
    if answer < 0.5:  # one committed alone
        halves = dialect.several(3)
        final = dialect.commit(halves[1])
        dialect.rollback_several(halves)
        planted.decide(halves[0], State.ROLLED_BACK)
    else:  # committed, though not all of them were there
        halves = dialect.several(2, of=3)
        final = dialect.commit_several(halves)[0]
        planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.SPLIT_GROUP, halves[0].offset, final.offset)


def out_of_order(planted: Planted, dialect: Apache) -> None:
    """Two records of one queue have changed places."""
    queue = _faulty_queue(planted)
    first = [_faulty(planted, dialect, queue) for _ in range(2)][-1].queue_offset
    swapped = [_faulty(planted, dialect, queue, slot) for slot in (first + 2, first + 1)]
    planted.log.skip_slots("faulty", queue, 2)
    _faulty(planted, dialect, queue)
    planted.wrong(Kind.OUT_OF_ORDER, *(record.offset for record in swapped))


def queue_gap(planted: Planted, dialect: Apache) -> None:
    queue = _faulty_queue(planted)
    before = [_faulty(planted, dialect, queue) for _ in range(2)][-1]
    planted.log.skip_slots("faulty", queue, planted.random.randrange(1, 9))
    planted.wrong(Kind.QUEUE_GAP, before.offset, _faulty(planted, dialect, queue).offset)


def wrong_queue_entry(planted: Planted, dialect: Apache) -> None:
    queue = _faulty_queue(planted)
    record = [_faulty(planted, dialect, queue) for _ in range(2)][-1]
    entry = [record.offset, record.size, 0]
    field = planted.random.randrange(4)
    entry[min(field, 2)] += 1 if field < 3 else -(1 << 63)  # looks like a place in an extension
    planted.damage.append(lambda: _overwrite_entry(planted, record, entry))
    planted.wrong(Kind.WRONG_QUEUE_ENTRY, record.offset)


def wrong_due_time(planted: Planted, dialect: Apache) -> None:
    """In the queue of a delay level, whose entries say when a broker delivers."""
    properties = {"DELAY": "18", "REAL_TOPIC": "plain", "REAL_QID": "0"}  # without a key: never due
    record = planted.log.append(SCHEDULE, b"later", properties, queue_id=17)
    due = record.stored + LEVELS[17] + planted.random.choice([-60_000, -1, 1, 3_600_000])
    entry = [record.offset, record.size, due]
    planted.damage.append(lambda: _overwrite_entry(planted, record, entry))
    planted.wrong(Kind.WRONG_QUEUE_ENTRY, record.offset)


def missing_queue_entry(planted: Planted, dialect: Apache) -> None:
    queue = _faulty_queue(planted)
    record = [_faulty(planted, dialect, queue) for _ in range(2)][-1]
    planted.damage.append(lambda: _overwrite_entry(planted, record, [0, 0, 0]))
    planted.wrong(Kind.MISSING_QUEUE_ENTRY, record.offset)


def entry_for_nothing(planted: Planted, dialect: Apache) -> None:
    """Behind the end of a queue of its own, of which there is one per call."""
    topic = f"ahead{planted.next()}"
    record = planted.log.append(topic, b"", {"UNIQ_KEY": dialect.key()})
    nowhere = planted.log.written[0].offset + 1
    ahead = record._replace(queue_offset=record.queue_offset + 1)
    planted.damage.append(lambda: _overwrite_entry(planted, ahead, [nowhere, 99, 0]))
    planted.wrong(Kind.WRONG_QUEUE_ENTRY, nowhere)


def unknown_topic(planted: Planted, dialect: Apache) -> None:
    topic = f"unknown{planted.next()}"
    records = [planted.log.append(topic, b"", {"UNIQ_KEY": dialect.key()}) for _ in range(2)]
    planted.wrong(Kind.UNKNOWN_QUEUE, *(record.offset for record in records))


def unknown_queue(planted: Planted, dialect: Apache) -> None:
    queue = 8 + planted.next()
    properties = {"UNIQ_KEY": dialect.key()}
    record = planted.log.append("orders", b"", properties, queue_id=queue)
    planted.wrong(Kind.UNKNOWN_QUEUE, record.offset)


def failed_crc(planted: Planted, dialect: Apache) -> None:
    record = planted.log.append("plain0", b"a body", {"UNIQ_KEY": dialect.key()}, body_crc=7)
    planted.wrong(Kind.CRC, record.offset)


def corrupt_record(planted: Planted, dialect: Apache) -> None:
    record = planted.log.append("plain0", b"a body", {"UNIQ_KEY": dialect.key()})
    plain(planted, dialect)
    planted.damage.append(lambda: overwrite(planted, record.offset + 4, b"????"))
    planted.wrong(Kind.CORRUPT_RECORD, record.offset, record.offset + record.size)


def zeroed_record(planted: Planted, dialect: Apache) -> None:
    record = planted.log.append("plain0", b"a body", {"UNIQ_KEY": dialect.key()})
    plain(planted, dialect)
    planted.damage.append(lambda: overwrite(planted, record.offset, bytes(record.size)))
    planted.wrong(Kind.GAP, record.offset, record.offset + record.size)


FAULTS_OF_OURS = [missing_final, split_group]
# What damages the log excuses what it may have held, so it has logs of its own.
DAMAGE = [failed_crc, corrupt_record, zeroed_record]
FAULTS_OF_BOTH = [
    committed_twice,
    commit_after_rollback,
    rollback_after_commit,
    decision_without_half,
    op_without_half,
    duplicate_prepare,
    parked_without_half,
    lost_parking,
    overdue,
    out_of_order,
    queue_gap,
    wrong_queue_entry,
    wrong_due_time,
    missing_queue_entry,
    entry_for_nothing,
    unknown_topic,
    unknown_queue,
    failed_crc,
]


def _faulty_queue(planted: Planted) -> int:
    return planted.random.randrange(8)


def _faulty(planted: Planted, dialect: Apache, queue: int, slot: int | None = None) -> Written:
    properties = {"UNIQ_KEY": dialect.key()}
    return planted.log.append("faulty", b"", properties, queue_id=queue, queue_offset=slot)


def _overwrite_entry(planted: Planted, record: Written, entry: list[int]) -> None:
    folder = planted.log.folder.parent / "consumequeue" / record.topic / str(record.queue_id)
    with (folder / f"{0:020}").open("r+b") as file:
        file.seek(record.queue_offset * 20)
        file.write(struct.pack(">qiq", *entry))


def overwrite(planted: Planted, offset: int, content: bytes) -> None:
    size = planted.log.segment_size
    with (planted.log.folder / f"{offset - offset % size:020}").open("r+b") as file:
        file.seek(offset % size)
        file.write(content)


def plant(
    root: Path,
    seed: int,
    steps: int,
    *,
    fault_every: int | None,
    faults: Sequence[Callable[[Planted, Apache], None]] | None = None,
    segment_size: int = 1 << 16,
) -> Planted:
    """Write a store: ``steps`` times something healthy, or a fault each ``fault_every``."""
    planted = Planted(LogWriter(root / "commitlog", segment_size=segment_size), random.Random(seed))
    apache = Apache(planted.log, op_each=seed % 2 == 0)
    ours = Ours(planted.log)
    ours.key = apache.key  # type: ignore[method-assign]  # no key twice
    plain(planted, apache)
    number = 0
    for step in range(steps):
        dialect = apache if step < steps // 2 else ours
        if step == steps // 2:
            apache.write_ops()
        if step == steps * 3 // 4:
            planted.log.now += LATER
            planted.is_late = True
        if fault_every and step % fault_every == fault_every - 1:
            known = faults or FAULTS_OF_BOTH + (FAULTS_OF_OURS if dialect is ours else [])
            known[number % len(known)](planted, dialect)
            number += 1
        else:
            extra = HEALTHY_OF_OURS if dialect is ours else []
            planted.random.choice(HEALTHY_OF_BOTH + extra)(planted, dialect)
        if planted.random.random() < 0.02:
            dialect.write_ops()
    ours.write_ops()
    planted.log.close()
    topics = {record.topic for record in planted.log.written}
    known_topics = {t: 1 for t in topics if t.startswith(("ahead", "%"))}
    write_store(planted.log, QUEUES | known_topics)
    for damage in planted.damage:
        damage()
    return planted
