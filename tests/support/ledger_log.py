"""What a commit log says about transactions, read from its files, also while a broker writes them.

Independent of the broker's own reading: it knows only halves, finals, rollback records and links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC


@dataclass
class LogTruth:
    """Transactions of a log; a half is known by its physical offset."""

    halves: dict[int, Record] = field(default_factory=dict)
    finals: Counter[int] = field(default_factory=Counter)  # by half
    rollbacks: Counter[int] = field(default_factory=Counter)  # by half
    parked: Counter[int] = field(default_factory=Counter)

    @property
    def undecided(self) -> list[int]:
        """Halves about which, or about whose leader, there is no decision."""
        leaders = {
            half.property_map["UNIQ_KEY"]: offset
            for offset, half in self.halves.items()
            if _leader_key(half) == half.property_map["UNIQ_KEY"]
        }
        return [
            offset
            for offset, half in self.halves.items()
            if not self.is_decided(offset)
            and not self.rollbacks[leaders.get(_leader_key(half), offset)]
        ]

    def is_decided(self, half: int) -> bool:
        """Whether the half itself has a final or a rollback record."""
        return bool(self.finals[half] or self.rollbacks[half])

    @property
    def decided_twice(self) -> list[int]:
        """Halves with more than one record that decides."""
        return [half for half in self.halves if self.finals[half] + self.rollbacks[half] > 1]

    @property
    def keys_twice(self) -> list[str]:
        """Unique keys that more than one final message carries: transactions delivered twice."""
        keys = Counter(self.halves[half].property_map["UNIQ_KEY"] for half in self.finals)
        return [key for key, count in keys.items() if count > 1]

    @property
    def unlinked(self) -> list[int]:
        """Links of decisions that lead to no half."""
        return [half for half in {*self.finals, *self.rollbacks} if half not in self.halves]


def _leader_key(half: Record) -> str:
    properties = half.property_map
    return properties.get("TRANSACTION_GROUP", properties["UNIQ_KEY"]).partition(",")[0]


def read_log(store: Path) -> LogTruth:
    """Read all transactions of a store directory."""
    truth = LogTruth()
    for record in records_of(store):
        bits = record.sys_flag & TRANSACTION_MASK
        link = record.prepared_transaction_offset
        if record.topic == HALF_TOPIC and bits == 0:
            truth.halves[record.physical_offset] = record
        elif record.topic == HALF_TOPIC and bits == TransactionType.ROLLBACK:
            truth.rollbacks[link] += 1
        elif record.topic == TRANS_CHECK_MAX_TIME_TOPIC:
            truth.parked[link] += 1
        elif record.topic != OP_TOPIC and bits == TransactionType.COMMIT:
            truth.finals[link] += 1
    return truth


def records_of(store: Path) -> Iterator[Record]:
    """Every record of the log, in order, up to where the writing is."""
    for path in sorted((store / "commitlog").iterdir()):
        segment = path.read_bytes()
        position = 0
        while True:
            try:
                record = decode_record(segment, position)
            except CorruptRecordError:
                break  # the blank at the end of a file, or what is not written yet
            if record.physical_offset != int(path.name) + position:
                break
            yield record
            position += record.total_size
