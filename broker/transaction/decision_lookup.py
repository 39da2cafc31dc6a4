"""Look up how a transaction ended: in the table's recent decisions, or in the log.

The result is used only to answer repeated requests. Nothing is appended, because every undecided
half is in the table.
"""

from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.store.errors import StoreError
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.topics import HALF_TOPIC, TIMER_TOPIC
from halfmq.store.message_store import MessageStore

from ..delay.timer_records import COMMIT_DELAY_PREFIX
from .half import StoredHalf, group_membership, is_copy, real_topic, unique_key
from .half_reader import ReadHalf
from .state.caches import RecordedDecision
from .state.pending import PendingTable
from .state.state_machine import State

INDEX_HITS_MAX: Final = 64
"""Records read to find an old decision: those with the same unique key, in practice one."""

_COMMIT: Final = int(TransactionType.COMMIT)


@define(eq=False, repr=False)
class DecisionLookup:
    """Finds the decisions of transactions."""

    _log: MessageStore
    _table: PendingTable
    _read_half: ReadHalf
    _now_ms: Callable[[], int]

    def find(self, first: int, half: StoredHalf) -> RecordedDecision | None:
        """Return how a transaction ended; None if that is unknown.

        Args:
            first: Offset of its first half, which identifies it in the table.
            half: The half, member or copy that the request names.
        """
        decision = self._table.decided.find(first)
        if decision is not None:
            return decision
        mark = group_membership(half.properties)
        if mark is not None and mark.number > 0:
            leader = self._leader_of(half, mark.leader_key.decode(errors="replace"))
            if leader is None or leader.physical_offset in self._table:
                return None  # the member was decided alone, by Apache RocketMQ
            return self.find(leader.physical_offset, leader)
        return self._in_log(first, half)

    def state_of(self, offset: int, half: StoredHalf) -> State:
        """Return the state of the transaction of a half; ROLLED_BACK if its decision is unknown."""
        first = self._table.transaction_of(offset)
        entry = self._table.get(first)
        if entry is not None:
            return entry.state
        decision = self.find(first, half)
        return State.ROLLED_BACK if decision is None else decision.state

    def decided_ms(self, decision: RecordedDecision) -> int:
        """Return when a decision was stored, in ms by the broker's clock; 0 if unknown."""
        if decision.position < 0:
            return 0
        try:
            return self._log.reader.store_timestamp(decision.position)
        except (OSError, StoreError):
            return 0

    def _in_log(self, first: int, half: StoredHalf) -> RecordedDecision | None:
        """Find a decision that is no longer in memory.

        Every final message is in the index. If none is found, although the index contains the half
        and covers all decisions that have left memory, the transaction was rolled back. Nothing
        can be concluded if more records have its key than were read.
        """
        topic, key = real_topic(half), unique_key(half)
        if topic is None or key is None:
            return None
        positions, all_seen = self._finals_indexed(topic, key, half)
        for position in positions:
            final = self._log.reader.record_at(position)
            if (
                final is not None
                and final.topic in {topic, TIMER_TOPIC}
                and final.sys_flag & TRANSACTION_MASK == _COMMIT
                and self._is_link_to(first, final.prepared_transaction_offset, half, key)
            ):
                return RecordedDecision(State.COMMITTED, position)
        _, indexed_until = self._log.index.last_update
        if (
            all_seen
            and half.physical_offset in self.indexed(HALF_TOPIC, key, half.store_timestamp)
            and indexed_until >= self._table.decided.forgotten_final
        ):
            return RecordedDecision(State.ROLLED_BACK, -1)
        return None

    def _finals_indexed(self, topic: str, key: str, half: StoredHalf) -> tuple[list[int], bool]:
        """Return the offsets of candidates for the final message, and whether these are all."""
        found = self.indexed(topic, key, half.store_timestamp)
        all_seen = len(found) < INDEX_HITS_MAX
        if COMMIT_DELAY_PREFIX in half.properties:
            delayed = self.indexed(TIMER_TOPIC, key, half.store_timestamp)
            all_seen = all_seen and len(delayed) < INDEX_HITS_MAX
            found += delayed
        return found, all_seen

    def indexed(self, topic: str, key: str, since_ms: int) -> list[int]:
        """Return the offsets of indexed records with a key, stored since a time in ms."""
        # Index times are whole seconds from the file's first entry, and clocks may step.
        # The newest record may have been stored while the wall clock was ahead.
        newest_ms = max(self._now_ms(), self._log.index.last_update[0])
        return self._log.index.query(
            topic, key, INDEX_HITS_MAX, since_ms - 60_000, newest_ms + 60_000
        )

    def _leader_of(self, member: StoredHalf, leader_key: str) -> StoredHalf | None:
        """Return the leader of a member: the last leader with its key before it in the log."""
        before = [
            offset
            for offset in self.indexed(HALF_TOPIC, leader_key, member.store_timestamp)
            if offset < member.physical_offset
        ]
        for offset in reversed(before):
            leader = self._read_half(offset)
            mark = None if leader is None else group_membership(leader.properties)
            if mark is not None and (mark.leader_key.decode(errors="replace"), mark.number) == (
                leader_key,
                0,
            ):
                return leader
        return None

    def _is_link_to(self, first: int, linked_offset: int, half: StoredHalf, key: str) -> bool:
        """Return whether a final message links to the transaction that ``half`` belongs to.

        RocketMQ's final messages may link to any check copy. A half that was prepared twice has
        the same key and is another transaction; so of two records with one key, one must be a copy.
        """
        if linked_offset in {first, half.physical_offset} or is_copy(half):
            return True
        linked = self._read_half(linked_offset)
        return linked is not None and unique_key(linked) == key and is_copy(linked)
