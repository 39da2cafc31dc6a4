"""Fill the table at a start: from the snapshot and the log after it, or from the log alone.

A damaged record must not hide the records after it: a half that is missing from the table counts as
decided, so its message would be lost. The store's scan therefore continues at the next valid
record. The content of the damaged record is lost, and the store logs it.

The store returns only records that may matter. Records that recovery has just scanned are read by
their offsets, so that the log is not scanned twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmq.store.format.properties import get_property

from ..log_port import TransactionLog
from ..state.pending import PendingTable
from .log_replay import ForeignRecordError, LogReplay
from .snapshot_file import load_snapshot, remove_snapshot

logger = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """What a replay found besides the table."""

    position: int  # where the replay of the log began
    without_op: Sequence[int]  # half queue offsets of decided transactions without an op message
    incomplete: Sequence[int] = ()  # leaders of groups with missing halves
    unfinished: Sequence[int] = ()  # halves whose leader is committed, without a final message


def replay(log: TransactionLog, table: PendingTable, snapshot_path: Path) -> Replayed:
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
    log: TransactionLog, table: PendingTable, position: int, ops: Iterable[int], *, by_key: bool
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
