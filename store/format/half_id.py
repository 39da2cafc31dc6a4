"""The transaction of a record, as far as the broker has confirmed it.

A committed message is known by the offset message id of its half. Its **final** record links to the
half, so the id follows from the record alone. Records that the broker derives from a final have no
link and carry the id in the property ``TRANSACTION_HALF_ID``: a delivered **delayed** message, a
**retry** and a **dead letter**. All of these kept ``__transactionId__`` of their half.

On any other record the property proves nothing, because any sender can write it. The broker removes
it from messages that clients send, and copies it only if this module accepts it.
"""

from typing import Final

from .flags import TRANSACTION_MASK, TransactionType
from .ids import offset_message_id
from .properties import get_property
from .record import Record
from .topics import DEAD_LETTER_PREFIX, RETRY_PREFIX

_OF_GROUPS: Final = (RETRY_PREFIX, DEAD_LETTER_PREFIX)


def half_message_id(record: Record) -> str | None:
    """Return the offset message id of the half that a record was committed from.

    None for any other record, whatever its properties say.
    """
    bits = record.sys_flag & TRANSACTION_MASK
    if bits == TransactionType.COMMIT:
        linked = record.prepared_transaction_offset
        # RocketMQ keeps the bits in retries, without a link; their transaction is unknown.
        if linked == 0 and record.topic.startswith(_OF_GROUPS):
            return None
        return offset_message_id(record.store_host, linked)
    if bits != TransactionType.NONE or not (_is_retry(record) or _was_delayed(record)):
        return None
    if get_property(record.properties, b"__transactionId__") is None:
        return None
    value = get_property(record.properties, b"TRANSACTION_HALF_ID")
    return None if value is None else value.decode(errors="replace")


def _is_retry(record: Record) -> bool:
    return record.reconsume_times > 0 and record.topic.startswith(_OF_GROUPS)


def _was_delayed(record: Record) -> bool:
    """Return whether the record names the one that it delivers; clients cannot set that."""
    return record.prepared_transaction_offset < 0
