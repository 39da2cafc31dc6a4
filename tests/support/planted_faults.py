"""Logs with every fault of transactions that the bytes of a log can show, and the truth beside it.

Each function plants one fault among healthy records, in the dialect of halfmq or of Apache
RocketMQ, and notes the finding that an audit must report and the states that it must count. As in
``planted_log``, of which this is a part, the bytes are packed by ``log_writer``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .log_writer import (
    COMMIT,
    HALF,
    PREPARED,
    ROLLBACK,
    Apache,
    LogWriter,
    Ours,
    Written,
    write_store,
)
from .oracle.words import Kind, State
from .planted_delays import DELAYS_OF_BOTH, DELAYS_OF_OURS, HEALTHY_DELAYS
from .planted_log import (
    HEALTHY_OF_BOTH,
    HEALTHY_OF_OURS,
    LATER,
    QUEUES,
    Planted,
    overwrite,
    plain,
    several,
    transaction,
)

Fault = Callable[[Planted, Apache], None]
SEGMENT = 1 << 15  # small, so that transactions lie across the borders
_SHRUNK = "shrunk"  # a topic of which six of eight queues are gone
ORDERS: dict[str, tuple[str, ...]] = {
    "halfmq's": ("halfmq",),
    "of RocketMQ 4.9": ("4.9",),
    "of RocketMQ 5.3": ("5.3",),
    "RocketMQ's, then halfmq's": ("5.3", "halfmq"),
    "halfmq's, then RocketMQ's": ("halfmq", "4.9"),
    "in turn": ("4.9", "halfmq", "5.3", "halfmq"),
}


# --- what is healthy, beside what ``planted_log`` has


def shrunk(planted: Planted, dialect: Apache) -> None:
    """Prepared for a queue that is gone when it is committed: it takes one that is left.

    RocketMQ takes the one that is gone, which is a finding of another kind.
    """
    half = dialect.half(dialect.key(), REAL_TOPIC=_SHRUNK, REAL_QID="7")
    _commit(dialect, half, queue_id=1)
    planted.decide(half, State.COMMITTED)


def sent_twice(planted: Planted, dialect: Apache) -> None:
    """A plain message whose producer did not get the answer."""
    properties = {"UNIQ_KEY": dialect.key(), "KEYS": "twice"}
    for _ in range(2):
        planted.log.append("plain0", b"sent twice", properties)


def listed_twice(planted: Planted, dialect: Apache) -> None:
    """An op of ours names a committed half twice, as after a start that made ops good."""
    half = dialect.half(dialect.key())
    dialect.commit(half)
    if isinstance(dialect, Ours):
        dialect.done(half.queue_offset)
    planted.decide(half, State.COMMITTED)


def waits(planted: Planted, dialect: Apache) -> None:
    """A delayed commit that is not due before the log ends, put on once."""
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    for again in (False, True):
        dialect.wait(half, planted.log.now + 10 * LATER, again=again)
    planted.decide(half, State.COMMITTED)


def with_copies(planted: Planted, dialect: Apache) -> None:
    """Asked about by RocketMQ, decided on a copy."""
    half = dialect.half(dialect.key())
    copies = [half]
    if not isinstance(dialect, Ours):
        copies += [dialect.check(half, times) for times in (1, 2)]
    dialect.commit(copies[-1])
    planted.decide(half, State.COMMITTED)


def reordered(planted: Planted, dialect: Apache) -> None:
    """Healthy: RocketMQ writes properties in the order of a hash map."""
    half = dialect.half(dialect.key(), KEYS="k", colour="red", size="L")
    properties = dict(reversed(half.properties.items()))
    dialect.commit(half._replace(properties=properties))
    planted.decide(half, State.COMMITTED)


MORE_OF_BOTH: list[Fault] = [sent_twice, listed_twice, with_copies, reordered]
MORE_OF_OURS: list[Fault] = [shrunk, waits]


# --- what is wrong


def final_gone(planted: Planted, dialect: Apache) -> None:
    """The final of a committed transaction is not there; its op is."""
    half = dialect.half(dialect.key())
    _some(planted, dialect)
    dialect.done(half.queue_offset)
    planted.decide(half, State.PENDING)
    planted.wrong(Kind.MISSING_DECISION, half.offset, lambda: planted.ops_of(half)[0])


def finals_of_several_gone(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    for half in halves:
        dialect.done(half.queue_offset)
    planted.decide(halves[0], State.PENDING)
    offsets = [half.offset for half in halves]
    planted.wrong(Kind.MISSING_DECISION, *offsets, lambda: planted.ops_of(halves[0])[0])


def op_of_another(planted: Planted, dialect: Apache) -> None:
    """The op of a committed half names an undecided one."""
    half, victim = dialect.half(dialect.key()), dialect.half(dialect.key())
    final = dialect.commit(half)
    dialect.take_back(half.queue_offset)
    dialect.done(victim.queue_offset)
    assert final.sys_flag == COMMIT
    planted.decide(half, State.COMMITTED)
    planted.decide(victim, State.PENDING)
    planted.wrong(Kind.MISSING_DECISION, victim.offset, lambda: planted.ops_of(victim)[0])


def op_of_another_then_decided(planted: Planted, dialect: Apache) -> None:
    """As above, and the other one is decided later."""
    half = dialect.half(dialect.key())
    dialect.done(half.queue_offset)
    dialect.write_ops()
    dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.MISSING_DECISION, half.offset, lambda: planted.ops_of(half)[0])


def parked_with_op(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    dialect.discard(half)
    dialect.done(half.queue_offset)
    planted.decide(half, State.PARKED)
    planted.wrong(Kind.MISSING_DECISION, half.offset, lambda: planted.ops_of(half)[0])


_PROPERTIES: dict[str, dict[str, str | None]] = {  # what the final has instead; None: nothing
    "property added": {"colour": "red"},
    "property changed": {"size": "42"},
    "property gone": {"size": None},
    "another half's transaction id": {"__transactionId__": "7F0000010001"},
    "no TRAN_MSG": {"TRAN_MSG": None},
    "WAIT": {"WAIT": "false"},
    "tags": {"TAGS": "Created"},
    "no tags": {"TAGS": None},
    "keys": {"KEYS": "other"},
    "topic": {"REAL_TOPIC": "plain1"},
}
_FIELDS: dict[str, dict[str, Any]] = {
    "compression bit": {"sys_flag": COMMIT | 1},
    "flag": {"flag": 3},
    "born time": {"born": 1_600_000_000_000},
    "born host": {"born_host": bytes([127, 0, 0, 9, 0, 0, 1, 1])},
    "born host of another kind": {"born_host": bytes(19) + b"\1"},
    "store host": {"store_host": bytes([127, 0, 0, 9, 0, 0, 1, 1])},
    "reconsume times": {"reconsume_times": 1},
}


def altered(planted: Planted, dialect: Apache) -> None:
    """The final differs from its half in one way; its CRC is right."""
    ways = ["body", "length", "queue", *_PROPERTIES, *_FIELDS]
    what = ways[planted.next() % len(ways)]
    more: dict[str, str] = {"size": "L", "WAIT": "true", "KEYS": f"KEYS{planted.next()}"}
    key = dialect.key()
    half = dialect.half(key, body=b"an order of two items", __transactionId__=key, **more)
    fields = dict(_FIELDS.get(what, {}))
    changed = half
    if what in _PROPERTIES:
        wanted = {**half.properties, **_PROPERTIES[what]}
        changed = half._replace(properties={k: v for k, v in wanted.items() if v is not None})
    elif what == "body":
        changed = half._replace(body=b"an order of six items")
    elif what == "length":
        changed = half._replace(body=half.body[:-1])
    elif what == "queue":
        fields = {"queue_id": planted.random.choice([0, 1, 2, 4, 7])}  # REAL_QID says 3
    final = _commit(dialect, changed, **fields)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.ALTERED_FINAL, half.offset, final.offset)


def id_of_another_half(planted: Planted, dialect: Apache) -> None:
    """Consumers would take the message for one of another transaction."""
    assert isinstance(dialect, Ours)
    half, other = dialect.half(dialect.key()), dialect.half(dialect.key())
    final = _commit(dialect, half, identity=other.offset)
    dialect.commit(other)
    planted.decide(half, State.COMMITTED)
    planted.decide(other, State.COMMITTED)
    planted.wrong(Kind.ALTERED_FINAL, half.offset, final.offset)


def invisible(planted: Planted, dialect: Apache) -> None:
    """A client set transaction flags, and not the property that makes a half of a message."""
    flags = planted.random.choice([PREPARED, ROLLBACK])
    properties = {"UNIQ_KEY": dialect.key()}
    record = planted.log.append("plain0", b"never seen", properties, sys_flag=flags)
    planted.wrong(Kind.INVISIBLE_MESSAGE, record.offset)


def altered_follower(planted: Planted, dialect: Apache) -> None:
    """Of several messages one that is not the first."""
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    finals = dialect.commit_several([*halves[:2], halves[2]._replace(body=b"one of sevural")])
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.ALTERED_FINAL, halves[2].offset, finals[2].offset)


def altered_delivery(planted: Planted, dialect: Apache) -> None:
    """What consumers get after the delay differs from what was prepared."""
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    dialect.wait(half, planted.log.now + 5)
    planted.log.now += 10
    arrived = dialect.arrive(half._replace(body=b"ordex"))
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.ALTERED_FINAL, half.offset, arrived.offset)


def _beside(planted: Planted, dialect: Apache, half: Written) -> None:
    """Deliver a message by a record that is no final of it, and expect that to be found."""
    properties = dict(half.properties)
    if isinstance(dialect, Ours):
        properties["TRANSACTION_HALF_ID"] = f"7F00000100002A9F{half.offset:016X}"
    topic, queue = properties["REAL_TOPIC"], int(properties["REAL_QID"])
    record = planted.log.append(topic, half.body, properties, queue_id=queue, born=half.born)
    planted.wrong(Kind.UNLINKED_DELIVERY, half.offset, record.offset)


def delivered_again(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    dialect.commit(half)
    _some(planted, dialect)
    _beside(planted, dialect, half)
    planted.decide(half, State.COMMITTED)


def delivered_though_rolled_back(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    dialect.rollback(half)
    _beside(planted, dialect, half)
    planted.decide(half, State.ROLLED_BACK)


def delivered_though_undecided(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    _beside(planted, dialect, half)
    planted.decide(half, State.PENDING)
    if not planted.is_late:
        planted.wrong(Kind.OVERDUE_HALF, half.offset)


def bits_lost(planted: Planted, dialect: Apache) -> None:
    """The flags of the final lack the bits of a commit."""
    half = dialect.half(dialect.key())
    flags = planted.random.choice([0, PREPARED, ROLLBACK])
    final = _commit(dialect, half, sys_flag=flags)
    planted.decide(half, State.COMMITTED)
    if flags:
        planted.wrong(Kind.INVISIBLE_MESSAGE, final.offset)
    planted.wrong(Kind.UNMARKED_FINAL, half.offset, final.offset)


def link_lost(planted: Planted, dialect: Apache) -> None:
    """The final names a half that is none, though its key says whose it is."""
    half = dialect.half(dialect.key())
    nowhere = planted.random.choice([0, half.offset + 1]) or planted.log.written[0].offset + 1
    final = dialect.commit(half, names=nowhere)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.DECISION_WITHOUT_HALF, final.offset)


def link_and_bits_lost(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    _beside(planted, dialect, half)
    dialect.done(half.queue_offset)
    planted.decide(half, State.COMMITTED)


def never_delivered(planted: Planted, dialect: Apache) -> None:
    """A delayed commit is due, and the log goes on for long without it."""
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    last = dialect.wait(half, planted.log.now + 5)
    if planted.random.random() < 0.5:
        last = dialect.wait(half, planted.log.now + 5, again=True)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.OVERDUE_DELIVERY, half.offset, last.offset)


def arrived_twice(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    dialect.wait(half, planted.log.now + 5)
    planted.log.now += 10
    by_rocketmq = planted.random.random() < 0.5
    arrivals = [dialect.arrive(half, by_rocketmq=by_rocketmq) for _ in range(2)]
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.DELIVERED_TWICE, *(record.offset for record in arrivals))


def leaders_final_gone(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    finals = [dialect.commit(half) for half in halves[1:]]
    dialect.done(halves[0].queue_offset)
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.MISSING_FINAL, halves[0].offset, finals[0].offset)


def followers_final_gone(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    finals = dialect.commit_several(halves, finals=2)
    dialect.done(halves[2].queue_offset)
    plain(planted, dialect)
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.MISSING_FINAL, halves[2].offset, finals[0].offset)


def several_faults(planted: Planted, dialect: Apache) -> None:
    """Committed twice, the second time with another body; and delivered beside that."""
    half = dialect.half(dialect.key())
    finals = [dialect.commit(half), _commit(dialect, half._replace(body=b"ordex"))]
    _beside(planted, dialect, half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.COMMITTED_TWICE, *(final.offset for final in finals))
    planted.wrong(Kind.ALTERED_FINAL, half.offset, finals[1].offset)


def final_with_wrong_crc(planted: Planted, dialect: Apache) -> None:
    """The body of the final is damaged in place; its op is there."""
    half = dialect.half(dialect.key(), body=b"an order")
    final = dialect.commit(half)
    _damage_body(planted, final)
    planted.decide(half, State.UNDETERMINED)
    planted.wrong(Kind.CRC, final.offset)


def leaders_final_damaged(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    final = dialect.commit_several(halves)[0]
    _damage_body(planted, final)
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.CRC, final.offset)


def final_destroyed(planted: Planted, dialect: Apache) -> None:
    """The final is zeros, or its head is garbage; its op is there."""
    half = dialect.half(dialect.key(), body=b"an order")
    plain(planted, dialect)
    final = dialect.commit(half)
    plain(planted, dialect)
    dialect.write_ops()
    is_zeros = planted.random.random() < 0.5
    start, content = final.offset, bytes(final.size)
    if not is_zeros:
        start, content = final.offset + 4, b"????"
    planted.damage.append(lambda: overwrite(planted, start, content))
    planted.decide(half, State.UNDETERMINED)
    kind = Kind.GAP if is_zeros else Kind.CORRUPT_RECORD
    planted.wrong(kind, final.offset, final.offset + final.size)


def half_damaged(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key(), body=b"an order")
    dialect.commit(half)
    _damage_body(planted, half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.CRC, half.offset)


def op_damaged(planted: Planted, dialect: Apache) -> None:
    """A bit of an op makes it name an undecided half."""
    dialect.write_ops()
    while (half := dialect.half(dialect.key())).queue_offset % 2:
        dialect.commit(half)
        planted.decide(half, State.COMMITTED)
    victim = dialect.half(dialect.key())
    dialect.write_ops()
    dialect.commit(half)
    dialect.write_ops()
    op = planted.log.written[-1]
    digits = len(str(half.queue_offset))
    planted.damage.append(lambda: _flip(planted, op.offset + 88 + digits - 1))  # 4 becomes 5
    planted.decide(half, State.COMMITTED)
    planted.decide(victim, State.PENDING)
    planted.wrong(Kind.CRC, op.offset)
    if not planted.is_late:
        planted.wrong(Kind.OVERDUE_HALF, victim.offset)


def parked_twice(planted: Planted, dialect: Apache) -> None:
    half = dialect.half(dialect.key())
    parked = [dialect.discard(half) for _ in range(2)]
    planted.decide(half, State.PARKED)
    planted.wrong(Kind.PARKED_TWICE, *(one.offset for one in parked))


def misplaced_half(planted: Planted, dialect: Apache) -> None:
    """In a queue of the half topic that no check looks at; committed by its producer."""
    half = dialect.half(dialect.key())
    dialect.commit(half)
    planted.decide(half, State.COMMITTED)
    key = dialect.key()
    properties = {**half.properties, "UNIQ_KEY": key}
    misplaced = planted.log.append(HALF, half.body, properties, queue_id=1)
    _commit(dialect, misplaced, has_op=False)
    planted.decide(misplaced, State.COMMITTED)
    planted.wrong(Kind.MISPLACED_HALF, misplaced.offset)


def half_after_final(planted: Planted, dialect: Apache) -> None:
    """By their times; no checksum covers them. Alone amid a segment it is no step of the clock."""
    while not 1_000 < planted.log.end % SEGMENT < SEGMENT - 2_000:
        plain(planted, dialect)
    properties = {**_HALF_PROPERTIES, "UNIQ_KEY": dialect.key()}
    half = planted.log.append(HALF, b"order", properties, stored=planted.log.now + 5_000)
    plain(planted, dialect)
    final = dialect.commit(half)
    plain(planted, dialect)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.HALF_AFTER_FINAL, half.offset, final.offset)


_HALF_PROPERTIES = {"TRAN_MSG": "true", "PGROUP": "pg", "REAL_TOPIC": "orders", "REAL_QID": "3"}


def rolled_back_twice(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    records = [dialect.rollback(half) for _ in range(2)]
    planted.decide(half, State.ROLLED_BACK)
    planted.wrong(Kind.ROLLED_BACK_TWICE, *(one.offset for one in records))


def member_twice(planted: Planted, dialect: Apache) -> None:
    """The half of one of several messages, which is not the first, is there twice."""
    assert isinstance(dialect, Ours)
    halves = dialect.several(3)
    again = planted.log.append(HALF, halves[1].body, halves[1].properties, born=halves[1].born)
    dialect.commit_several(halves)
    planted.decide(halves[0], State.COMMITTED)
    planted.wrong(Kind.DUPLICATE_PREPARE, halves[1].offset, again.offset)


def totals_differ(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    first, second = dialect.several(2)
    key = dialect.key()
    group = f"{first.properties['UNIQ_KEY']},2,4"
    third = dialect.half(key, b"one of several", TRANSACTION_GROUP=group)
    dialect.rollback_several([first, second, third])
    planted.decide(first, State.ROLLED_BACK)
    planted.wrong(Kind.SPLIT_GROUP, first.offset, third.offset)


# What destroys records excuses what they may have held, so it has logs of its own.
DESTROYED: list[Fault] = [final_destroyed, final_with_wrong_crc]
OF_BOTH: list[Fault] = [
    altered,
    altered,
    altered,
    invisible,
    delivered_again,
    delivered_though_rolled_back,
    delivered_though_undecided,
    bits_lost,
    link_lost,
    several_faults,
    final_with_wrong_crc,
    half_damaged,
    op_damaged,
]
OF_OURS: list[Fault] = [
    final_gone,
    finals_of_several_gone,
    op_of_another,
    op_of_another_then_decided,
    parked_with_op,
    altered_follower,
    altered_delivery,
    id_of_another_half,
    link_and_bits_lost,
    never_delivered,
    arrived_twice,
    leaders_final_gone,
    followers_final_gone,
    leaders_final_damaged,
]


def _some(planted: Planted, dialect: Apache) -> None:
    """Something healthy in between; sometimes so much that a segment ends there."""
    for _ in range(planted.random.choice([0, 1, 3, 40])):
        plain(planted, dialect)


def _commit(
    dialect: Apache,
    half: Written,
    *,
    identity: int | None = None,
    has_op: bool = True,
    **fields: Any,
) -> Written:
    """Append a final that is not as it should be; ``identity`` is the half that its id names."""
    properties = dict(half.properties)
    if isinstance(dialect, Ours):
        identity = half.offset if identity is None else identity
        properties["TRANSACTION_HALF_ID"] = f"7F00000100002A9F{identity:016X}"
    queue = fields.pop("queue_id", int(properties["REAL_QID"]))
    fields = {"sys_flag": COMMIT, "prepared": half.offset, "born": half.born, **fields}
    topic = properties["REAL_TOPIC"]
    final = dialect.log.append(topic, half.body, properties, queue_id=queue, **fields)
    if has_op:
        dialect.done(half.queue_offset)
    return final


def _damage_body(planted: Planted, record: Written) -> None:
    planted.damage.append(lambda: _flip(planted, record.offset + 88))


def _flip(planted: Planted, offset: int) -> None:
    path = planted.log.folder / f"{offset - offset % planted.log.segment_size:020}"
    with path.open("r+b") as file:
        file.seek(offset % planted.log.segment_size)
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))


OF_BOTH += [parked_twice, misplaced_half, half_after_final, *DELAYS_OF_BOTH]
OF_OURS += [rolled_back_twice, member_twice, totals_differ, *DELAYS_OF_OURS]


# --- whole logs


def plant_faults(
    root: Path,
    seed: int,
    *,
    order: Sequence[str],
    faults: Sequence[Fault] | None = None,
    steps: int = 300,
    fault_every: int | None = 7,
) -> Planted:
    """Write a store by brokers in turn: ``steps`` times something, every so often a fault.

    Without ``faults`` all that a dialect allows are planted, in a random order. The first and the
    last steps of each broker's part are faults; between brokers lies a decision of either.
    """
    log = LogWriter(root / "commitlog", segment_size=SEGMENT)
    planted = Planted(log, random.Random(seed))
    dialects: dict[str, Apache] = {
        "4.9": Apache(log, op_each=True),
        "5.3": Apache(log),
        "halfmq": Ours(log),
    }
    for dialect in dialects.values():
        dialect.key = dialects["4.9"].key  # type: ignore[method-assign]  # no key twice
    for part, name in enumerate(order):
        dialect = dialects[name]
        _decided(planted, dialect)
        _part(planted, dialect, steps // len(order), fault_every, faults)
        dialect.write_ops()
        _decided(planted, dialect)
        dialect.write_ops()
        if part == len(order) // 2 or len(order) == 1:
            log.now += LATER
            planted.is_late = True
            _part(planted, dialect, steps // 4, fault_every, faults)
            dialect.write_ops()
            _decided(planted, dialect)
            dialect.write_ops()
    for _ in range(9):  # what was due is overdue
        log.now += 1_000
        plain(planted, dialect)
    log.close()
    topics = {record.topic: 1 for record in log.written if record.topic.startswith("%")}
    write_store(log, QUEUES | topics | {_SHRUNK: 2})
    for damage in planted.damage:
        damage()
    return planted


def _decided(planted: Planted, dialect: Apache) -> None:
    """A transaction that shows which broker is at work."""
    half = dialect.half(dialect.key())
    dialect.commit(half)
    planted.decide(half, State.COMMITTED)


def _part(
    planted: Planted,
    dialect: Apache,
    steps: int,
    fault_every: int | None,
    faults: Sequence[Fault] | None,
) -> None:
    choose = planted.random
    is_ours = isinstance(dialect, Ours)
    healthy = [*HEALTHY_OF_BOTH, *MORE_OF_BOTH, *HEALTHY_DELAYS, transaction, transaction]
    healthy += [*HEALTHY_OF_OURS, *MORE_OF_OURS, several] if is_ours else []
    known = list(faults if faults is not None else OF_BOTH + (OF_OURS if is_ours else []))
    choose.shuffle(known)
    for step in range(steps):
        if fault_every and known and step % fault_every == 0:
            known[step // fault_every % len(known)](planted, dialect)
        else:
            choose.choice(healthy)(planted, dialect)
        if choose.random() < 0.05:
            dialect.write_ops()
