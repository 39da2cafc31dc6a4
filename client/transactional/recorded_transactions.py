"""The transactions that this process has recorded in a ledger.

A producer uses this to detect a block that ended normally without a row in the ledger. The table is
shared by the whole process, by ledger table and transaction id, because the recording ledger may be
another object than the one whose checker the producer has, and because a worker thread may record.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

RECORDED_MAX: Final = 10_000
"""Transactions kept, about 250 bytes each; the oldest are evicted first. After an eviction the
producer looks into the ledger, which has the row."""

C = TypeVar("C")

_TABLE: Final = "halfmq_ledger_table"
# Every step is one atomic call: threads need no lock, so a fork cannot copy a lock that is held.
_recorded: Final[OrderedDict[tuple[str, str], None]] = OrderedDict()


def mark_recorded(table: str, transaction_id: str) -> None:
    """Note that the local transaction has inserted its row."""
    _recorded[table, transaction_id] = None
    if len(_recorded) > RECORDED_MAX:
        _recorded.popitem(last=False)


def tag_checker(checker: C, table: str) -> C:
    """Tag a checker with its ledger's table; ``functools.wraps`` copies the tag to a wrapper."""
    setattr(checker, _TABLE, table)
    return checker


def lacks_ledger_row(checker: object, transaction_id: str) -> bool:
    """Return whether this process has recorded no row of the transaction in the checker's ledger.

    False for a checker that does not belong to a ledger. Removes the transaction from the table, so
    call this only once, when the transaction ends.
    """
    table = getattr(checker, _TABLE, None)
    return table is not None and _recorded.pop((table, transaction_id), False) is False
