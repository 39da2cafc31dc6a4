"""Invariants that must hold after every run.

* A local transaction has committed if and only if its messages were delivered, at least once. Under
  ASYNC_FLUSH consumers read messages that are not on disk yet; after a power cut they may be ahead
  of the queue, and skip the messages that replace lost ones. Then "delivered" means: in its queue.
  Without the fence users are promised less; all other invariants still hold.
* Acknowledged halves can be decided; at the end all are decided, and commits are delivered.
* A half has at most one final message in the log, and none after an accepted rollback.
* So has a message, however often its producer sent it: duplicates are one transaction.
* A broker that starts knows every confirmed decision, and no transaction with missing halves is
  undecided. It knows which messages wait for their time.
* Every acknowledged half is in the log, and is decided, pending or parked.
* Consumers get all or none of several messages in one transaction.
* Nothing is delivered early. Of a message that waits, one record at most says that it was
  delivered, recalled or stored again, and nobody gets one whose recall was answered.
* A message whose acknowledgement was answered, by a group that shares messages, does not come to it
  again; a handle that was changed acknowledges nothing; groups in order get no message before one
  that nobody has acknowledged.
* The queue offsets of a queue have no gap, and its entries lead to its records.
* The table of undecided transactions equals the one that the log gives.
* A consumer sees the same half id in every delivery of a message, and none in messages that were
  sent outside of transactions, whatever their properties.
* Acknowledged plain messages were delivered, unless the flush mode allows their loss.
* ``halfmq store verify`` finds nothing, neither in log and queues nor in index and tables.
* No process logged an error, and no callback failed.

Old log files are deleted by age. Their content is in the archive of the run, and counts as if it
were still there; but consumers need not have read it.

The log is read here by separate code, so that a mistake of the store's reader is not repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from halfmq.broker.delay.waiting import place_of
from halfmq.client import Decision
from halfmq.store.config import FlushMode
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.format.queue_entry import ENTRY_SIZE, unpack_entry
from halfmq.store.format.record import MAGIC_BLANK, PREFIX, Record, decode_record
from halfmq.store.format.topics import (
    DELAYED_TOPICS,
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from halfmq.store.tools.state import StoreState
from halfmq.store.tools.verify import verify
from tests.support.broker_parts import pending_of, waits_of

from .scenario import ROW

if TYPE_CHECKING:
    from .world import World

_MASK, _COMMIT, _ROLLBACK = 0xC, 0x8, 0xC
_NO_QUEUE: Final = frozenset({0x4, 0xC})


class Log(NamedTuple):
    """What the log says about transactions."""

    records: list[Record]
    start: int  # physical offset before which it was deleted by age
    halves: dict[int, Record]
    leaders: dict[int, int]  # by the offset of each half: its transaction's
    sizes: dict[int, int]  # by transaction: how many halves it says it has
    finals: dict[int, list[Record]]  # by the offset of the half
    rollbacks: dict[int, list[Record]]  # by transaction

    def undecided(self) -> list[int]:
        """Return the transactions without a decision, in log order."""
        return [
            half
            for half, leader in self.leaders.items()
            if half == leader and half not in self.finals and half not in self.rollbacks
        ]

    def halves_of(self, leader: int) -> list[int]:
        """Return the offsets of a transaction's halves."""
        return [half for half, its_leader in self.leaders.items() if its_leader == leader]


def _files(directory: Path) -> dict[int, bytes]:
    """Return the files of a log or a queue by their offsets, in their order."""
    return {int(path.name): path.read_bytes() for path in sorted(directory.iterdir())}


def read_log(world: World) -> Log:
    """Read every record of the log, and of those files of it that were deleted by age."""
    file_size = world.scenario.log_file_size
    present = _files(world.disk.root / "commitlog")
    files = {**world.records.archive, **present}
    start = min(present, default=0)
    records: list[Record] = []
    for number, (base, content) in enumerate(sorted(files.items())):
        assert base == number * file_size, f"the log has no file {number * file_size}"
        position = 0
        while position + PREFIX.size <= len(content):
            size, magic = PREFIX.unpack_from(content, position)
            if magic == MAGIC_BLANK or size == 0:
                break
            record = decode_record(content, position, base=base)
            assert record.physical_offset == base + position, "a record lies where it says"
            records.append(record)
            position += size
        assert len(content) == file_size
    log = Log(records, start, {}, {}, {}, defaultdict(list), defaultdict(list))
    for record in records:
        _sort_in(log, record)
    return log


def _sort_in(log: Log, record: Record) -> None:
    bits = record.sys_flag & _MASK
    link = record.prepared_transaction_offset
    if record.topic == HALF_TOPIC and bits == 0:
        offset = record.physical_offset
        log.halves[offset] = record
        group = get_property(record.properties, b"TRANSACTION_GROUP")
        parts = (group or b",0,1").rsplit(b",", 2)
        if len(parts) != 3:
            raise ValueError(f"the half at {offset} has half a property: {group!r:.80}")
        _, index, count = parts
        leader = offset if index == b"0" else next(reversed(log.leaders.values()), -1)
        assert leader >= 0, f"the half at {offset} has no leader"
        log.leaders[offset] = leader
        log.sizes[leader] = int(count)
    elif record.topic == HALF_TOPIC and bits == _ROLLBACK:
        log.rollbacks[link].append(record)
    elif bits == _COMMIT and not record.topic.startswith(RETRY_PREFIX):
        log.finals[link].append(record)


def _body(record: Record) -> str:
    return record.body.decode().rstrip()


def undelivered(world: World) -> list[str]:
    """Return the bodies that must be delivered by the end, and are not yet."""
    records = world.records
    if _may_be_ahead(world) or not world.scenario.fenced:
        return []
    plain = [key for key in records.plain_acknowledged if key not in records.recall_tried]
    wanted = [*_committed(world), *plain]
    missing = [body for body in wanted if not records.delivered[body]]
    missing += world.poppers.missing(wanted)
    if not missing or not records.archive:
        return missing
    expired = _expired(world)
    return [body for body in missing if body.partition(" ")[0] not in expired]


def _expired(world: World) -> set[str]:
    """Return the bodies of messages that were deleted by age."""
    log = read_log(world)
    return {
        _body(record)
        for record in log.records
        if record.physical_offset < log.start and record.topic != HALF_TOPIC
    }


def _committed(world: World) -> list[str]:
    records = world.records
    return [
        body
        for key, row in records.ledger.items()
        if row == ROW
        for body in records.attempts[key].bodies
    ]


def _may_be_ahead(world: World) -> bool:
    """Return whether consumers may have read messages that a power cut removed."""
    return world.scenario.flush_mode is FlushMode.ASYNC_FLUSH and world.records.power_cuts > 0


def check_table(world: World) -> Log:
    """Compare the broker's table with the log, when nothing is under way; return the log."""
    assert world.broker is not None
    log = read_log(world)
    table = sorted(entry.offset for entry in pending_of(world.broker))
    if table != log.undecided():
        world.violate(f"the table has {table}, the log says {log.undecided()}")
    return log


def check_start(world: World) -> None:
    """Check that a broker that has just started knows every confirmed decision."""
    assert world.broker is not None
    log = check_table(world)
    _check_waiting(world, log)
    undecided = set(log.undecided())
    for leader in undecided:
        if len(log.halves_of(leader)) != log.sizes[leader]:
            world.violate(f"the transaction at {leader} lacks halves, and may be decided")
    for attempt in world.records.attempts.values():
        if attempt.accepted and attempt.ended is not Decision.UNKNOWN:
            offset = parse_offset_message_id(attempt.half_ids[0]).physical_offset
            if offset in undecided:
                world.violate(f"the accepted decision about {attempt.key} is forgotten")


def check(world: World) -> None:
    """Check all invariants after the broker has stopped."""
    try:
        log = read_log(world)
        _check_ledger(world, log)
        _check_finals(world, log)
        _check_groups(world, log)
        _check_acknowledged(world, log)
        _check_delays(world, log)
        _check_queues(world, log)
        _verify(world)
    except Exception as error:  # noqa: BLE001 -- a store that cannot be read is a finding
        world.violate(f"the store is not sound: {error!r}")


def _check_ledger(world: World, log: Log) -> None:
    records = world.records
    if not world.scenario.fenced:
        return
    for body in undelivered(world):
        world.violate(f"{body} was committed and never delivered")
    final = {_body(one) for finals in log.finals.values() for one in finals}
    for body in _committed(world):
        if body not in final:
            world.violate(f"{body} was committed and has no final")
    for body, times in records.delivered.items():
        key = body.partition("/")[0]
        if key not in records.attempts and key not in records.plain_sent:
            world.violate(f"{body} was delivered, and was never sent")
        elif key in records.attempts and records.ledger.get(key) != ROW:
            world.violate(f"{body} was not committed, and delivered {times} times")


def _check_finals(world: World, log: Log) -> None:
    for half, finals in log.finals.items():
        if half not in log.halves:
            world.violate(f"finals at {_where(finals)} decide {half}, where no half is")
        elif len(finals) > 1:
            world.violate(f"the half at {half} has {len(finals)} finals, at {_where(finals)}")
    times = Counter(_body(final) for finals in log.finals.values() for final in finals)
    for body, count in times.items():
        if count > 1:
            world.violate(f"{body} has {count} finals, of several halves")
    for leader, rollbacks in log.rollbacks.items():
        if len(rollbacks) > 1 or log.leaders.get(leader) != leader:
            world.violate(f"the half at {leader} has rollbacks at {_where(rollbacks)}")


def _check_groups(world: World, log: Log) -> None:
    for leader, size in log.sizes.items():
        halves = log.halves_of(leader)
        final = [half for half in halves if half in log.finals]
        if leader in log.rollbacks and final:
            world.violate(f"the transaction at {leader} is rolled back, with finals of {final}")
        if final and (final != halves or len(halves) != size):
            world.violate(f"of the {size} halves at {halves}, finals are there of {final}")
        if len(halves) != size and leader not in log.rollbacks:
            world.violate(f"the transaction at {leader} has the halves {halves} of {size}")


def _check_acknowledged(world: World, log: Log) -> None:
    for attempt in world.records.attempts.values():
        offsets = [parse_offset_message_id(one).physical_offset for one in attempt.half_ids]
        for offset, body in zip(offsets, attempt.bodies, strict=False):
            half = log.halves.get(offset)
            if half is None or _body(half) != body:
                world.violate(f"the acknowledged half of {body} is not at {offset}")
        if not offsets or not attempt.accepted:
            continue
        if attempt.ended is Decision.COMMIT and offsets[0] not in log.finals:
            world.violate(f"the accepted commit of {attempt.key} is not in the log")
        if attempt.ended is Decision.ROLLBACK and offsets[0] not in log.rollbacks:
            world.violate(f"the accepted rollback of {attempt.key} is not in the log")
    for body, half_ids in world.records.half_ids.items():
        halves = {offset for offset, half in log.halves.items() if _body(half) == body}
        seen = {parse_offset_message_id(one).physical_offset for one in half_ids}
        if not seen <= halves:
            world.violate(f"consumers of {body} saw the halves {seen}, there are {halves}")


def _ended(log: Log) -> Counter[int]:
    """Return how many records say what became of the message that waited at a place."""
    links = ((one.prepared_transaction_offset, one.physical_offset) for one in log.records)
    # A filler names its own place in the log.
    return Counter(-1 - link for link, offset in links if link < 0 and -1 - link != offset)


def _check_delays(world: World, log: Log) -> None:
    """Check that nothing was delivered twice, or after its recall."""
    for place, count in _ended(log).items():
        if count > 1:
            world.violate(f"the message that waited at {place:#x} was delivered {count} times")
    links = {-1 - place for place in world.records.recalled.values()}
    for record in log.records:
        if record.prepared_transaction_offset in links and record.topic != TIMER_TOPIC:
            world.violate(f"{_body(record)} was recalled, and then delivered")


def _check_waiting(world: World, log: Log) -> None:
    """Check that a broker that has just started knows which messages wait."""
    assert world.broker is not None
    ended, waits = _ended(log), waits_of(world.broker)
    for record in log.records:
        if record.topic not in DELAYED_TOPICS or b"TIMER_DEL_UNIQKEY" in record.properties:
            continue
        number = record.queue_id + 1 if record.topic == SCHEDULE_TOPIC else 0
        place = place_of(number, record.queue_offset)
        if waits(place) == (place in ended):
            state = "waits, and was" if place in ended else "does not wait, and was not"
            world.violate(f"{_body(record)} {state} delivered")


def _check_queues(world: World, log: Log) -> None:
    queues: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in log.records:
        if record.sys_flag & _MASK not in _NO_QUEUE:
            queues[record.topic, record.queue_id].append(record)
    for (topic, queue_id), records in queues.items():
        name = f"{topic}:{queue_id}"
        offsets = [record.queue_offset for record in records]
        if offsets != list(range(len(records))):
            world.violate(f"{name} has the queue offsets {offsets}")
            continue
        directory = world.disk.root / "consumequeue" / topic / str(queue_id)
        files = _files(directory)
        first = min(files, default=0)  # byte with which the queue's first file begins
        content = b"".join(files.values())
        for record in records:
            if record.physical_offset < log.start:
                continue
            at = record.queue_offset * ENTRY_SIZE - first
            entry = unpack_entry(content[at : at + ENTRY_SIZE].ljust(ENTRY_SIZE, b"\0"))
            if at < 0 or (entry.physical_offset, entry.size) != (
                record.physical_offset,
                record.total_size,
            ):
                world.violate(f"{name}: entry {record.queue_offset} is {entry}")
                break
        if any(content[max(len(records) * ENTRY_SIZE - first, 0) :]):
            world.violate(f"{name} has entries after its last record")


def _verify(world: World) -> None:
    report = verify(world.disk.root)
    if report.state is not StoreState.CLOSED:
        world.violate(f"the store was stopped in good order, and is {report.state}")
    for finding in report.findings.damage:
        if finding.kind != "offset_ahead" or not _may_be_ahead(world):
            world.violate(f"verify: {finding}")


def _where(records: list[Record]) -> list[int]:
    return [record.physical_offset for record in records]
