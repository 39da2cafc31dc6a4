"""Checks as they reach the checker of a ledger."""

from __future__ import annotations

from typing import Final

from halfmq.client import MessageView
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import new_record

NOW_MS: Final = 1_700_000_000_000
DAY_MS: Final = 86_400_000
HOST: Final = pack_host("127.0.0.1", 10911)


def asked_about(transaction_id: str, prepared_ms: int = NOW_MS) -> MessageView:
    """A check of this transaction as it reaches a checker."""
    record = new_record(
        topic="orders",
        queue_id=0,
        body=b"x",
        properties=f"TRAN_MSG\x01true\x02UNIQ_KEY\x01{transaction_id}\x02".encode(),
        born_timestamp=prepared_ms,
        born_host=HOST,
        store_timestamp=prepared_ms,
        store_host=HOST,
    )
    return MessageView(record, "broker-a")
