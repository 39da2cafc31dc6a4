"""What a final message must have in common with its half, as one number.

A final keeps everything of its half but the transaction bits, its place, its store time, and the
properties in ``MAY_DIFFER``. Order does not count among properties: RocketMQ writes them in the
order of a hash map.

Source: RocketMQ ``EndTransactionProcessor``, ``HookUtils``; ``broker/transaction/half_records.py``.
"""

from typing import Final

import numpy as np

from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_CRC32,
    PROPERTY_DELAY,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ENQUEUE_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_TRANSACTION_PRINCIPAL,
)

from .hashes import Hashes, hashed, hashes_of, mixed
from .rows import PropertyBlock, Rows

# The real topic and queue are compared where the record goes to; the others a commit, or the wait
# for a delay, adds and takes away.
MAY_DIFFER: Final = (
    PROPERTY_REAL_TOPIC,
    PROPERTY_REAL_QID,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_TRANSACTION_PRINCIPAL,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_DELAY,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ENQUEUE_MS,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_CRC32,
)
NUMBERS: Final = ("flag", "born_timestamp", "reconsume_times", "body_crc", "body_size")
HOSTS: Final = ("born_host", "store_host")
_NAMES: Final = [name.encode() + NAME_VALUE_SEPARATOR for name in MAY_DIFFER]


def content_hashes(rows: Rows) -> Hashes:
    """Hash what a final must have in common with its half, but for topic and queue."""
    content = rows.sum_over_properties(_property_hashes)
    kept_flags = (rows.field("sys_flag") & ~TRANSACTION_MASK).astype(np.uint64)
    content = mixed(content ^ kept_flags)
    for name in NUMBERS:
        content = mixed(content ^ rows.field(name).astype(np.uint64))
    for name in HOSTS:
        content = mixed(content ^ hashes_of(rows.hosts(name)))
    return content


def _property_hashes(block: PropertyBlock) -> Hashes:
    starts, ends = block.bounds
    hashes = hashed(block.words, starts, np.maximum(ends, starts))
    hashes[block.are_named(_NAMES) | (ends <= starts)] = 0
    return hashes
