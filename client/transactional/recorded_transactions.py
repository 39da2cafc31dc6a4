"""What the end of a block knows about its ledger: how to look, and what was recorded here.

Whether the row is committed, only a look into the ledger shows. What this process has recorded is
kept for the error of a block whose row is not there: was it never recorded, or is the transaction
of the connection that recorded it still open?
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakValueDictionary

C = TypeVar("C")

StillOpen: TypeAlias = Callable[[], bool]
"""Returns whether the database transaction that recorded is open; False also if unknown."""

_LOOK: Final = "halfmq_ledger_look"


@dataclass(frozen=True, slots=True)
class LedgerLook:
    """The look of a ledger's checker."""

    table: str
    is_committed: Callable[[str], bool | Awaitable[bool]]
    """Returns whether the row with this transaction id is committed; a plain function blocks."""
    ledger: Any
    """The ``TransactionLedger`` itself, for transactions that the producer owns."""


def attach_look(checker: C, look: LedgerLook) -> C:
    """Give a checker its ledger's look; ``functools.wraps`` copies it to a wrapper."""
    setattr(checker, _LOOK, look)
    return checker


def look_of(checker: object) -> LedgerLook | None:
    """Return the look of a checker; None if it does not belong to a ledger."""
    look: LedgerLook | None = getattr(checker, _LOOK, None)
    return look


class Recordings(dict[str, StillOpen]):
    """The rows of one transaction that this process has recorded, by the ledger's table."""


# The ledger that records may be another object than the one whose checker the producer has, and it
# knows only the transaction's id. Weak: a block that a signal interrupted may never end.
_open: Final[WeakValueDictionary[str, Recordings]] = WeakValueDictionary()


def begin_recordings(transaction_id: str) -> Recordings:
    """Return the recordings of a transaction whose block begins; its caller keeps them."""
    recordings = _open[transaction_id] = Recordings()
    return recordings


def end_recordings(transaction_id: str) -> None:
    """Take no more recordings of a transaction."""
    _open.pop(transaction_id, None)


def mark_recorded(table: str, transaction_id: str, still_open: StillOpen) -> None:
    """Note that a row was inserted, if a block of this process has that transaction."""
    recordings = _open.get(transaction_id)
    if recordings is not None:
        recordings[table] = still_open


def says_open(still_open: StillOpen) -> bool:
    """Return whether a connection says so; one that is closed, or back in its pool, does not."""
    try:
        return still_open()
    except Exception:  # noqa: BLE001 -- every driver has its own
        return False
