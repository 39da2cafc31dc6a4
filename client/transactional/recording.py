"""Which transactions this process has recorded in a ledger.

By this a producer notices that a block was left normally and its ledger has no row. The record is
kept for the whole process, by table and transaction id, because the ledger that records need not be
the object whose checker the producer has, and because a worker thread may record.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

RECORDED_MAX: Final = 10_000
"""Transactions remembered, about 250 bytes each; the oldest go first. Of one that was forgotten the
producer asks the ledger, which knows."""

C = TypeVar("C")

_TABLE: Final = "halfmq_ledger_table"
# One call per step, each atomic: threads need no lock, so a fork cannot copy one that is held.
_recorded: Final[OrderedDict[tuple[str, str], None]] = OrderedDict()


def note_recorded(table: str, transaction_id: str) -> None:
    """The local transaction has inserted its row."""
    _recorded[table, transaction_id] = None
    if len(_recorded) > RECORDED_MAX:
        _recorded.popitem(last=False)


def checks_table(checker: C, table: str) -> C:
    """Mark a checker as that of a ledger; ``functools.wraps`` passes the mark on to a wrapper."""
    setattr(checker, _TABLE, table)
    return checker


def take_unrecorded(checker: object, transaction_id: str) -> bool:
    """Whether the checker is a ledger's, and this process has not recorded this transaction in it.

    To be asked once, when the transaction ends: it is forgotten then.
    """
    table = getattr(checker, _TABLE, None)
    return table is not None and _recorded.pop((table, transaction_id), False) is False
