"""What the log says about transactions: records in, in log order, and the table is the result.

The same records always give the same table, and a record that the table already reflects changes
nothing. So a start may begin anywhere before the point that a snapshot covers.

Five kinds of record matter:

=====================================  ========================================================
half topic, no transaction bits        a half; with TRANSACTION_CHECK_TIMES a copy of one
half topic, bits 0xC                   our rollback record, links to its half
any other topic, bits 0x8              a final message, links to its half or to a copy of it
op topic, tag ``d``                    half queue offsets of decided transactions
TRANS_CHECK_MAX_TIME_TOPIC             the copy of a parked half, ours links to it
=====================================  ========================================================

The log of halfmq needs no more than these links. One in which Apache RocketMQ has been at work
holds copies that are tied to their half by nothing but UNIQ_KEY. Keeping the key of every
transaction costs more memory than everything else here, so it is done only on demand:
``ForeignRecordError`` asks for a second reading of the whole log with ``by_key=True``.
"""

from __future__ import annotations

from typing import Final

from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

from .half import immunity_s
from .pending import Event, Pending, PendingTable, State, Verdict, outcome, parked_reason_of

KEYS_OF_DECIDED: Final = 500_000
"""How many keys beyond those of undecided transactions are kept for late copies, at about 250 bytes
each. RocketMQ copies a decided half only while it has not noticed the decision, some minutes."""

_COMMIT: Final = int(TransactionType.COMMIT)
_ROLLBACK: Final = int(TransactionType.ROLLBACK)


class ForeignRecordError(Exception):
    """The log holds records of Apache RocketMQ that only a reading by key can place."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"the record at offset {self.offset} is tied to its transaction by key only"


class Fold:
    """Applies log records to a table."""

    def __init__(self, table: PendingTable, *, by_key: bool = False) -> None:
        self._table = table
        self._first_by_key: dict[bytes, int] | None = {} if by_key else None
        self._key_at_zero: bytes | None = None
        # Half queue offsets of undecided transactions, and of decided ones without an op message.
        self._first_by_queue_offset: dict[int, int] = {}
        self.unmirrored: dict[int, None] = {}  # an ordered set
        for entry in table:
            self._first_by_queue_offset[entry.queue_offset] = entry.offset
        for copy in table.copies.values():
            if copy.first in table:
                self._first_by_queue_offset[copy.queue_offset] = copy.first

    def apply(self, record: Record) -> None:
        """Take the next record of the log.

        Raises:
            ForeignRecordError: Start again at the log's minimum, with an empty table and by key.
        """
        bits = record.sys_flag & TRANSACTION_MASK
        topic = record.topic
        if topic == HALF_TOPIC:
            if bits == 0:
                self._half(record)
            elif bits == _ROLLBACK:
                self._found(record.prepared_transaction_offset, Event.ROLLBACK_FOUND, record)
        elif bits == _COMMIT:
            self._final(record)
        elif topic == OP_TOPIC:
            self._op(record)
        elif topic == TRANS_CHECK_MAX_TIME_TOPIC:
            self._parked(record)

    def note_key_at_zero(self, key: bytes) -> None:
        """Tell the UNIQ_KEY of the half at offset 0, when the table came with that half.

        Zero is also what field 14 holds in records that are no decision, so there the key counts.
        """
        self._key_at_zero = key

    # --- one method per kind of record

    def _half(self, record: Record) -> None:
        table = self._table
        offset = record.physical_offset
        checks = get_property(record.properties, b"TRANSACTION_CHECK_TIMES")
        if checks is not None:
            self._copy(record, int(checks) if checks.isdigit() else 0)
        elif offset not in table and offset not in table.decided:
            self._enter(record, checks=0)
        if offset == 0:
            self._key_at_zero = get_property(record.properties, b"UNIQ_KEY")

    def _enter(self, record: Record, *, checks: int) -> None:
        entry = self._table.add(
            record.physical_offset,
            record.queue_offset,
            record.store_timestamp,
            (get_property(record.properties, b"PGROUP") or b"").decode(errors="replace"),
            immunity_s=immunity_s(record.properties),
            checks=checks,
        )
        self._first_by_queue_offset[record.queue_offset] = entry.offset
        if self._first_by_key is not None:
            self._keep_key(self._first_by_key, record, entry.offset)

    def _keep_key(self, keys: dict[bytes, int], record: Record, offset: int) -> None:
        key = get_property(record.properties, b"UNIQ_KEY")
        # Of twins, whose producer sent twice after a lost answer, an undecided one is the one that
        # copies are made of.
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
        """A check copy of Apache RocketMQ: another name of a transaction, or all we have of it."""
        offset = record.physical_offset
        if offset in self._table.copies:
            return
        first = self._find_by_key(record)
        if first is None:  # its half has been deleted by age
            self._enter(record, checks=checks)
            return
        self._table.add_copy(offset, first, record.queue_offset)
        entry = self._table.get(first)
        if entry is None:
            self.unmirrored[record.queue_offset] = None
            return
        self._first_by_queue_offset[record.queue_offset] = first
        if checks == 0:
            self._found(first, Event.RESUMED_FOUND, record)
        entry.checks = checks

    def _final(self, record: Record) -> None:
        first = self._table.first_of(record.prepared_transaction_offset)
        if first == 0 and not self._is_half_zero(record):
            return  # a consumer's retry of a committed message keeps the bits and has no link
        self._found(first, Event.FINAL_FOUND, record)

    def _op(self, record: Record) -> None:
        if get_property(record.properties, b"TAGS") != b"d":
            return
        for number in record.body.split(b","):
            if not number.isdigit():
                continue
            queue_offset = int(number)
            first = self._first_by_queue_offset.pop(queue_offset, None)
            self.unmirrored.pop(queue_offset, None)
            if first is not None:
                self._found(first, Event.OP_FOUND, record)

    def _parked(self, record: Record) -> None:
        first = record.prepared_transaction_offset
        if first == 0 and not self._is_half_zero(record):
            by_key = self._find_by_key(record)  # RocketMQ leaves field 14 empty here
            if by_key is None:
                return
            first = by_key
        self._found(first, Event.PARKED_FOUND, record)

    # --- what they share

    def _found(self, first: int, event: Event, record: Record) -> None:
        """Apply a fact about a transaction; one that is not known any more is remembered."""
        table = self._table
        entry = table.get(first)
        if entry is not None:
            state, verdict = outcome(entry.state, event)
            if verdict is Verdict.NOTE:
                self._enter_state(entry, state, record)
            return
        decided = table.decided.find(first)
        if decided is not None:
            state, verdict = outcome(decided.state, event)
            if verdict is Verdict.NOTE:
                table.decided.remember(first, state, record.physical_offset)
        elif event is Event.FINAL_FOUND:
            table.decided.remember(first, State.COMMITTED, record.physical_offset)
        elif event is Event.ROLLBACK_FOUND:
            table.decided.remember(first, State.ROLLED_BACK, record.physical_offset)

    def _enter_state(self, entry: Pending, state: State, record: Record) -> None:
        if state is State.PARKED:
            reason = get_property(record.properties, b"TRANSACTION_PARKED")
            self._table.park(entry, parked_reason_of(reason))
        elif state is State.PREPARED:
            self._table.resume(entry)
        else:
            for queue_offset in self._table.names_of(entry):
                if self._first_by_queue_offset.pop(queue_offset, None) is not None:
                    self.unmirrored[queue_offset] = None
            self._table.decide(entry, state, record.physical_offset)

    def _find_by_key(self, record: Record) -> int | None:
        if self._first_by_key is None:
            raise ForeignRecordError(record.physical_offset)
        key = get_property(record.properties, b"UNIQ_KEY")
        return None if key is None else self._first_by_key.get(key)

    def _is_half_zero(self, record: Record) -> bool:
        key = get_property(record.properties, b"UNIQ_KEY")
        return key is not None and key == self._key_at_zero
