"""Log replay: apply records in log order to the table of undecided transactions.

The same records always give the same table, and a record that the table already reflects changes
nothing. So a start may begin anywhere before the point that a snapshot covers.

Six kinds of record matter:

=====================================  ========================================================
half topic, no transaction bits        a half; with TRANSACTION_CHECK_TIMES a copy of one
half topic, bits 0xC                   halfmq's rollback record, links to its half
half topic, bits 0x4                   halfmq's resumed record, links to its half
any other topic, bits 0x8              a final message, links to its half or to a copy of it
op topic, tag ``d``                    half queue offsets of decided transactions
TRANS_CHECK_MAX_TIME_TOPIC             the copy of a parked half; halfmq's links to it
=====================================  ========================================================

The halves of several messages in one transaction are adjacent, the leader first. If some are
missing, the append was cut off and no client got an answer: such a transaction is ``incomplete``.
The leader's final message decides for all, and the other final messages follow it; those that a
crash cut off are ``unfinished``. The service repairs both.

In a log written by halfmq these links suffice. A log written by Apache RocketMQ contains copies
that refer to their half only by UNIQ_KEY. Keeping the key of every transaction takes more memory
than everything else here, so it is done only on demand: ``ForeignRecordError`` requests a second
replay of the whole log with ``by_key=True``.

A damaged record must not hide the records after it: a half that is missing from the table counts as
decided, so its message would be lost. The store's scan therefore continues at the next valid
record. The content of the damaged record is lost, and the store logs it.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.message_store import MessageStore

from ..half import GroupMembership, group_membership, immunity_s, other_halves
from ..state.pending import MemberHalf, Pending, PendingTable
from ..state.state_machine import State, TransactionEvent, Verdict, outcome, parked_reason_of
from .snapshot_file import load_snapshot, remove_snapshot

KEYS_OF_DECIDED: Final = 500_000
"""Keys of decided transactions kept for late copies, about 250 bytes each. RocketMQ copies a
decided half only until it notices the decision, within some minutes."""

logger = logging.getLogger(__name__)

_PREPARED: Final = int(TransactionType.PREPARED)
_COMMIT: Final = int(TransactionType.COMMIT)
_ROLLBACK: Final = int(TransactionType.ROLLBACK)


class ForeignRecordError(Exception):
    """The log holds records of Apache RocketMQ that only a replay by key can assign."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"the record at offset {self.offset} is tied to its transaction by key only"


class LogReplay:
    """Applies log records to a table."""

    def __init__(self, table: PendingTable, *, by_key: bool = False) -> None:
        self._table = table
        self._first_by_key: dict[bytes, int] | None = {} if by_key else None
        self._key_at_zero: bytes | None = None
        # Half queue offsets of undecided transactions, and of decided ones without an op message.
        self._first_by_queue_offset: dict[int, int] = {}
        self.without_op: dict[int, None] = {}  # an ordered set
        self.incomplete: dict[int, int] = {}  # leader -> number of missing members
        self.unfinished: dict[int, None] = {}  # halves whose leader is committed
        self._leader = (b"", -1)  # unique key and offset of the latest
        for entry in table:
            self._first_by_queue_offset[entry.queue_offset] = entry.offset
        for copy in table.copies.values():
            if table.transaction_of(copy.first) in table:
                self._first_by_queue_offset[copy.queue_offset] = copy.first
        for members in table.groups.values():
            for member in members:
                self._first_by_queue_offset[member.queue_offset] = member.offset

    def apply(self, record: Record) -> None:
        """Apply the next record of the log.

        Raises:
            ForeignRecordError: Restart at the log's minimum, with an empty table and by key.
        """
        bits = record.sys_flag & TRANSACTION_MASK
        topic = record.topic
        if topic == HALF_TOPIC:
            if bits == 0:
                self._half(record)
            elif bits == _ROLLBACK:
                self._apply_finding(
                    record.prepared_transaction_offset, TransactionEvent.ROLLBACK_FOUND, record
                )
            elif bits == _PREPARED:
                self._apply_finding(
                    record.prepared_transaction_offset, TransactionEvent.RESUMED_FOUND, record
                )
        elif bits == _COMMIT:
            self._final(record)
        elif topic == OP_TOPIC:
            self._op(record)
        elif topic == TRANS_CHECK_MAX_TIME_TOPIC:
            self._parked(record)

    def set_key_at_zero(self, key: bytes) -> None:
        """Set the UNIQ_KEY of the half at offset 0, if a snapshot contains that half.

        Records that are no decision have 0 in field 14 too, so the key distinguishes them.
        """
        self._key_at_zero = key

    def _half(self, record: Record) -> None:
        table = self._table
        offset = record.physical_offset
        checks = get_property(record.properties, b"TRANSACTION_CHECK_TIMES")
        if checks is not None:
            self._copy(record, int(checks) if checks.isdigit() else 0)
        else:
            mark = group_membership(record.properties)
            if mark is not None and mark.number > 0:
                self._member(record, mark)
            else:
                if offset not in table and offset not in table.decided:
                    self._add(record, checks=0)
                    if mark is not None and mark.total > 1:
                        self.incomplete[offset] = mark.total - 1
                if mark is not None:
                    self._leader = (mark.leader_key, offset)
        if offset == 0:
            self._key_at_zero = get_property(record.properties, b"UNIQ_KEY")

    def _add(self, record: Record, *, checks: int) -> None:
        entry = self._table.add(
            record.physical_offset,
            record.queue_offset,
            record.store_timestamp,
            _text_of(record, b"PGROUP"),
            _text_of(record, b"REAL_TOPIC"),
            immunity_s=immunity_s(record.properties),
            checks=checks,
        )
        self._first_by_queue_offset[record.queue_offset] = entry.offset
        if self._first_by_key is not None:
            self._keep_key(self._first_by_key, record, entry.offset)

    def _member(self, record: Record, mark: GroupMembership) -> None:
        """Add a further half of the transaction whose leader has just been read."""
        table = self._table
        offset = record.physical_offset
        leader_key, leader = self._leader
        if (
            offset in table.decided
            or table.is_member(offset)
            or leader_key != mark.leader_key
            or leader not in table
        ):
            return  # known, decided, or its leader is damaged
        table.add_member(leader, MemberHalf(offset, record.queue_offset))
        self._first_by_queue_offset[record.queue_offset] = offset
        missing = self.incomplete.get(leader, 0) - 1
        if missing > 0:
            self.incomplete[leader] = missing
        else:
            self.incomplete.pop(leader, None)
        if self._first_by_key is not None:
            self._keep_key(self._first_by_key, record, offset)

    def _keep_key(self, keys: dict[bytes, int], record: Record, offset: int) -> None:
        key = get_property(record.properties, b"UNIQ_KEY")
        # If a half was prepared twice, after a lost answer, copies are made of an undecided one.
        if key is None or keys.get(key, -1) in self._table:
            return
        keys[key] = offset
        if len(keys) > 2 * len(self._table) + 2 * KEYS_OF_DECIDED:
            self._first_by_key = {
                known: first
                for known, first in keys.items()
                if first in self._table or first in self._table.decided
            }

    def _copy(self, record: Record, checks: int) -> None:
        """Apply a check copy of Apache RocketMQ: an alias of a transaction, or all that is left."""
        offset = record.physical_offset
        if offset in self._table.copies:
            return
        first = self._find_by_key(record)
        if first is None:  # its half has been deleted by age
            self._add(record, checks=checks)
            return
        self._table.add_copy(offset, first, record.queue_offset)
        entry = self._table.get(self._table.transaction_of(first))
        if entry is None:
            self.without_op[record.queue_offset] = None
            return
        self._first_by_queue_offset[record.queue_offset] = first
        if checks == 0:
            self._apply_finding(entry.offset, TransactionEvent.RESUMED_FOUND, record)
        entry.checks = checks

    def _final(self, record: Record) -> None:
        table = self._table
        linked = record.prepared_transaction_offset
        copy = table.copies.get(linked)
        first = linked if copy is None else copy.first
        if first == 0 and not self._is_half_zero(record):
            return  # a consumer's retry of a committed message keeps the bits and has no link
        if first in self.unfinished:
            del self.unfinished[first]  # it follows the final message of its leader
        elif table.is_member(first):
            self._decide_member(first, State.COMMITTED, record)
        else:
            others = other_halves(record.properties) or [
                member.offset for member in table.groups.get(first, ())
            ]
            if self._apply_finding(first, TransactionEvent.FINAL_FOUND, record):
                self.unfinished.update(dict.fromkeys(others))

    def _op(self, record: Record) -> None:
        if get_property(record.properties, b"TAGS") != b"d":
            return
        for number in record.body.split(b","):
            if not number.isdigit():
                continue
            queue_offset = int(number)
            first = self._first_by_queue_offset.pop(queue_offset, None)
            self.without_op.pop(queue_offset, None)
            if first is None:
                continue
            if self._table.is_member(first):
                self._decide_member(first, State.ROLLED_BACK, record)
            else:
                self._apply_finding(first, TransactionEvent.OP_FOUND, record)

    def _parked(self, record: Record) -> None:
        first = record.prepared_transaction_offset
        if first == 0 and not self._is_half_zero(record):
            by_key = self._find_by_key(record)  # RocketMQ leaves field 14 empty here
            if by_key is None:
                return
            first = by_key
        self._apply_finding(
            self._table.transaction_of(first), TransactionEvent.PARKED_FOUND, record
        )

    def _apply_finding(self, first: int, event: TransactionEvent, record: Record) -> bool:
        """Apply an event; return whether it changed the state of the transaction.

        The decision about a transaction that is no longer known is added to the cache.
        """
        table = self._table
        entry = table.get(first)
        if entry is not None:
            state, verdict = outcome(entry.state, event)
            if verdict is Verdict.TRANSITION:
                self._set_state(entry, state, record)
            return verdict is Verdict.TRANSITION
        decided = table.decided.find(first)
        if decided is not None:
            state, verdict = outcome(decided.state, event)
            if verdict is Verdict.TRANSITION:
                table.decided.add(first, state, record.physical_offset)
            return verdict is Verdict.TRANSITION
        if event is TransactionEvent.FINAL_FOUND:
            table.decided.add(first, State.COMMITTED, record.physical_offset)
        elif event is TransactionEvent.ROLLBACK_FOUND:
            table.decided.add(first, State.ROLLED_BACK, record.physical_offset)
        return event is TransactionEvent.FINAL_FOUND

    def _decide_member(self, offset: int, state: State, record: Record) -> None:
        """Apply Apache RocketMQ's decision about one of several halves."""
        member = self._table.decide_member(offset, state, record.physical_offset)
        if member is not None:
            self._note_without_op(self._table.op_offsets_of_member(member))

    def _note_without_op(self, queue_offsets: Iterable[int]) -> None:
        """Request op messages for halves that have none yet."""
        for queue_offset in queue_offsets:
            if self._first_by_queue_offset.pop(queue_offset, None) is not None:
                self.without_op[queue_offset] = None

    def _set_state(self, entry: Pending, state: State, record: Record) -> None:
        if state is State.PARKED:
            reason = get_property(record.properties, b"TRANSACTION_PARKED")
            self._table.park(entry, parked_reason_of(reason))
        elif state is State.PREPARED:
            self._table.resume(entry)
        else:
            self._note_without_op(self._table.op_offsets_of(entry))
            self.incomplete.pop(entry.offset, None)
            self._table.decide(entry, state, record.physical_offset)

    def _find_by_key(self, record: Record) -> int | None:
        if self._first_by_key is None:
            raise ForeignRecordError(record.physical_offset)
        key = get_property(record.properties, b"UNIQ_KEY")
        return None if key is None else self._first_by_key.get(key)

    def _is_half_zero(self, record: Record) -> bool:
        key = get_property(record.properties, b"UNIQ_KEY")
        return key is not None and key == self._key_at_zero


class Replayed(NamedTuple):
    """What a replay found besides the table."""

    position: int  # where the replay of the log began
    without_op: Sequence[int]  # half queue offsets of decided transactions without an op message
    incomplete: Sequence[int] = ()  # leaders of groups with missing halves
    unfinished: Sequence[int] = ()  # halves whose leader is committed, without a final message


def _text_of(record: Record, name: bytes) -> str:
    return (get_property(record.properties, name) or b"").decode(errors="replace")


def replay(log: MessageStore, table: PendingTable, snapshot_path: Path) -> Replayed:
    """Fill an empty table from the snapshot and the log."""
    ops: list[int] = []
    position = load_snapshot(snapshot_path, log, table, ops)
    if position is None:
        position = log.min_offset
    try:
        return _read(log, table, position, ops, by_key=False)
    except ForeignRecordError as error:
        logger.info("event=transactions_by_key reason=%r", str(error))
    table.clear()
    remove_snapshot(snapshot_path)
    position = log.min_offset
    return _read(log, table, position, (), by_key=True)


def _read(
    log: MessageStore, table: PendingTable, position: int, ops: Iterable[int], *, by_key: bool
) -> Replayed:
    log_replay = LogReplay(table, by_key=by_key)
    log_replay.without_op.update(dict.fromkeys(ops))
    if 0 in table and (record := log.reader.record_at(0)) is not None:
        key = get_property(record.properties, b"UNIQ_KEY")
        if key is not None:
            log_replay.set_key_at_zero(key)
    for record in log.reader.scan_transactions(position):
        log_replay.apply(record)
    return Replayed(
        position,
        list(log_replay.without_op),
        list(log_replay.incomplete),
        list(log_replay.unfinished),
    )
