"""Rewriting a message to and from its half form; pure functions over bytes.

A half message is the producer's message under another topic: ``RMQ_SYS_TRANS_HALF_TOPIC``, queue
0, with the real topic and queue kept in the properties ``REAL_TOPIC`` and ``REAL_QID``. Its
transaction bits are cleared, so that it takes a slot in the half topic's consume queue, by whose
offset op messages name it.

Four records follow from a stored half. All of them carry the half's physical offset in
``preparedTransactionOffset``, which makes the log alone tell what became of every half:

* the **final** message (bits 0x8): the message as the producer meant it, and the decision
  "committed" in one append;
* the **rollback** record (bits 0xC, topic of the half, no body): the decision "rolled back". It
  enters no consume queue and no index. Apache RocketMQ has no such record and passes over it;
* the **parked** copy in ``TRANS_CHECK_MAX_TIME_TOPIC``: nobody could say, an operator may;
* the **check** request's body, which is sent and not stored.

The commit path works on the bytes of the stored half and decodes only what it needs, because it
runs once per transaction.

Source: RocketMQ ``TransactionalMessageBridge.java``, ``EndTransactionProcessor.java``,
``MessageDecoder.java``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from halfmq.store.draft import Draft
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import (
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    get_property,
    tags_code,
    terminated,
    without_properties,
)
from halfmq.store.format.record import (
    HEADS,
    MAGIC_V1,
    MAGIC_V2,
    SYS_FLAG_AT,
    TOPIC_LENGTH_V1_MAX,
    decode_record,
    encode_record,
    without_crc_tail,
)
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

IMMUNITY_S_MAX: Final = 259_200
"""Longest time without a check that a message can ask for, in seconds: three days, RocketMQ's
``fileReservedTime``. A later first check would find that the half has been deleted by age."""

_DIGITS_MAX: Final = 18  # of a number read from a property; no cut number falls below the limit
_HALF_TOPIC_BYTES: Final = HALF_TOPIC.encode()
_TOPIC_FIELD: Final = bytes([len(_HALF_TOPIC_BYTES)]) + _HALF_TOPIC_BYTES
_KEPT_FLAGS: Final = ~(TRANSACTION_MASK | HOSTS_MASK)  # the store sets the bits of the hosts
_SYS_FLAG_LOW: Final = SYS_FLAG_AT + 3  # the byte of sys_flag that tells the head's layout

# Apache RocketMQ marks its check copies with these. A producer's message that brings them (it may
# have been consumed from such a store and sent on) must not look like a copy of another half.
_MARKS_OF_COPIES: Final = (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRAN_PREPARED_QUEUE_OFFSET)
_COPY_MARK: Final = b"TRANSACTION_CHECK_TIMES\x01"
_PREPARED_MARK: Final = b"TRAN_PREPARED_QUEUE_OFFSET\x01"


class StoredHalf(NamedTuple):
    """The parts of a half record that other records are made from."""

    queue_offset: int
    physical_offset: int
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    body: bytes
    properties: bytes


def half_draft(message: Draft, unique_key: str) -> Draft:
    """Return what is stored in place of a producer's transactional message."""
    properties = message.properties
    if _COPY_MARK in properties or _PREPARED_MARK in properties:
        properties = without_properties(properties, _MARKS_OF_COPIES)
    return Draft(
        topic=HALF_TOPIC,
        queue_id=0,
        body=message.body,
        properties=b"%bREAL_TOPIC\x01%b\x02REAL_QID\x01%d\x02__transactionId__\x01%b\x02"
        % (
            terminated(properties),
            message.topic.encode(),
            message.queue_id,
            unique_key.encode(),
        ),
        tags_code=message.tags_code,
        flag=message.flag,
        sys_flag=message.sys_flag & ~TRANSACTION_MASK,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
    )


def immunity_s(properties: bytes) -> int:
    """Return for how many seconds the producer asked not to be checked; 0 when it did not."""
    value = get_property(properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
    if value is None or not value.isdigit():
        return 0
    return min(int(value[:_DIGITS_MAX]), IMMUNITY_S_MAX)


def parse_half(record: bytes) -> StoredHalf | None:
    """Take a stored record apart; None when it is whole but not a half message."""
    head = HEADS[record[_SYS_FLAG_LOW] & HOSTS_MASK]
    (
        _,
        magic,
        _,
        _,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_timestamp,
        born_host,
        store_timestamp,
        store_host,
        reconsume_times,
        _,
        body_size,
    ) = head.unpack_from(record)
    body_end = head.size + body_size
    properties_at = body_end + len(_TOPIC_FIELD) + 2
    if (
        magic != MAGIC_V1
        or sys_flag & TRANSACTION_MASK
        or not record.startswith(_TOPIC_FIELD, body_end)
    ):
        return None
    return StoredHalf(
        queue_offset,
        physical_offset,
        flag,
        sys_flag,
        born_timestamp,
        born_host,
        store_timestamp,
        store_host,
        reconsume_times,
        record[head.size : body_end],
        without_crc_tail(record[properties_at:]),
    )


def real_topic(half: StoredHalf) -> str | None:
    """Return the topic the producer sent to; None when the record does not say."""
    topic = get_property(half.properties, b"REAL_TOPIC")
    return None if topic is None else topic.decode()


def unique_key(half: StoredHalf) -> str | None:
    """Return the message's UNIQ_KEY, by which clients know the transaction."""
    key = get_property(half.properties, b"UNIQ_KEY")
    return None if key is None else key.decode(errors="replace")


def final_draft(half: StoredHalf) -> Draft:
    """Return the message as consumers get it; its append is the commit.

    The stored properties are kept whole, with ``TRAN_MSG`` and ``REAL_*``: Java consumers find the
    transaction id only while ``TRAN_MSG`` is there.

    Raises:
        ValueError: The half does not say where the message belongs.
    """
    properties = half.properties
    topic = get_property(properties, b"REAL_TOPIC")
    if topic is None:
        raise ValueError(f"half record at {half.physical_offset} has no REAL_TOPIC")
    return Draft(
        topic=topic.decode(),
        queue_id=int(get_property(properties, b"REAL_QID") or 0),
        body=half.body,
        properties=properties,
        tags_code=tags_code(properties),
        flag=half.flag,
        sys_flag=half.sys_flag & _KEPT_FLAGS | TransactionType.COMMIT,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_host=half.store_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.physical_offset,
    )


def rollback_draft(half: StoredHalf) -> Draft:
    """Return the record that says: this transaction was rolled back."""
    parts = []
    for name in (b"PGROUP", b"UNIQ_KEY", b"__transactionId__"):
        value = get_property(half.properties, name)
        if value is not None:
            parts.append(b"%b\x01%b\x02" % (name, value))
    return Draft(
        topic=HALF_TOPIC,
        queue_id=0,
        body=b"",
        properties=b"".join(parts),
        sys_flag=TransactionType.ROLLBACK,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_host=half.store_host,
        prepared_transaction_offset=half.physical_offset,
    )


def parked_draft(half: StoredHalf) -> Draft:
    """Return the copy for operators of a message that no producer could decide about."""
    return Draft(
        topic=TRANS_CHECK_MAX_TIME_TOPIC,
        queue_id=0,
        body=half.body,
        properties=half.properties,
        tags_code=tags_code(half.properties),
        flag=half.flag,
        sys_flag=half.sys_flag & _KEPT_FLAGS,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_host=half.store_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.physical_offset,
    )


def check_body(record: bytes, check_number: int) -> bytes:
    """Return the body of a check request: the stored half under its real topic and queue.

    ``TRANSACTION_CHECK_TIMES`` tells the producer's listener how often it has been asked, as a
    check copy of Apache RocketMQ would.

    Raises:
        ValueError: The half does not say where the message belongs.
    """
    half = decode_record(record, check_crc=False)
    properties = without_properties(without_crc_tail(half.properties), _MARKS_OF_COPIES)
    topic = get_property(properties, b"REAL_TOPIC")
    if topic is None:
        raise ValueError(f"half record at {half.physical_offset} has no REAL_TOPIC")
    name = topic.decode()
    return encode_record(
        half._replace(
            magic=MAGIC_V2 if len(name) > TOPIC_LENGTH_V1_MAX else MAGIC_V1,
            topic=name,
            queue_id=int(get_property(properties, b"REAL_QID") or 0),
            properties=properties + b"TRANSACTION_CHECK_TIMES\x01%d\x02" % check_number,
        )
    )
