"""Half messages: made from a producer's message, parsed from a record; pure functions over bytes.

A half message is the producer's message under another topic: ``RMQ_SYS_TRANS_HALF_TOPIC``, queue
0, with the real topic and queue kept in the properties ``REAL_TOPIC`` and ``REAL_QID``. Its
transaction bits are cleared, so that it takes a slot in the half topic's consume queue, by whose
offset op messages name it.

Every half of a several-message transaction has ``TRANSACTION_GROUP``: the leader's unique key, its
own index, and how many there are.

Source: RocketMQ ``TransactionalMessageBridge.java``.
"""

from typing import Final, NamedTuple

import msgspec

from halfmq.store.format.crc import crc32
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK
from halfmq.store.format.properties import (
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PRINCIPAL,
    get_property,
    terminated,
    without_properties,
)
from halfmq.store.format.record import (
    CRC_MASK,
    HEAD_SIZE_MAX,
    HEADS,
    MAGIC_V1,
    topic_field,
    without_crc_tail,
)
from halfmq.store.format.record_fields import HOST_BITS_AT, PROPERTIES_LENGTH
from halfmq.store.format.topics import HALF_TOPIC
from halfmq.store.log.append_request import AppendRequest

IMMUNITY_S_MAX: Final = 259_200
"""Longest time without a check that a message can request, in seconds: three days, RocketMQ's
``fileReservedTime``. Before a later check the half would have been deleted by age."""

_DIGITS_MAX: Final = 18  # of a number read from a property; a cut number stays above the limit
_TOPIC_FIELD: Final = topic_field(HALF_TOPIC.encode(), version_2=False)
_BODY_TO_PROPERTIES: Final = len(_TOPIC_FIELD) + PROPERTIES_LENGTH.size

# Apache RocketMQ marks its check copies with these. A producer's message that brings them (it may
# have been consumed from such a store and sent on) must not look like a copy of another half.
_MARKS_OF_COPIES: Final = (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRAN_PREPARED_QUEUE_OFFSET)
# They are searched with `rfind`: `in` first tests whether bytes are a number, which takes longer
# than the search.
_COPY_MARK: Final = b"TRANSACTION_CHECK_TIMES\x01"
_PREPARED_MARK: Final = b"TRAN_PREPARED_QUEUE_OFFSET\x01"
_GROUP_MARK: Final = b"TRANSACTION_GROUP\x01"
HALVES_MARK: Final = b"TRANSACTION_HALVES\x01"
_PRINCIPAL_MARK: Final = b"TRANSACTION_PRINCIPAL\x01"


class GroupMembership(NamedTuple):
    """The position of a half in a transaction of several messages."""

    leader_key: bytes  # UNIQ_KEY of the first half
    number: int  # 0 is the leader
    total: int  # how many halves there are


class StoredHalf(msgspec.Struct, gc=False):
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
    size: int  # bytes of the record


def half_request(message: AppendRequest, unique_key: str) -> AppendRequest:
    """Return the half that is stored for a producer's transactional message."""
    own = (
        f"REAL_TOPIC\x01{message.topic}\x02REAL_QID\x01{message.queue_id}\x02"
        f"__transactionId__\x01{unique_key}\x02"
    )
    return AppendRequest(
        topic=HALF_TOPIC,
        queue_id=0,
        body=message.body,
        properties=terminated(without_marks_of_copies(message.properties)) + own.encode(),
        tags_code=message.tags_code,
        flag=message.flag,
        sys_flag=message.sys_flag & ~TRANSACTION_MASK,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
    )


def with_principal(properties: bytes, name: str) -> bytes:
    """Return a half's properties with the name of the principal that prepares it."""
    return b"%b%b%b\x02" % (terminated(properties), _PRINCIPAL_MARK, name.encode())


def principal_of(properties: bytes) -> str | None:
    """Return the principal that prepared a half; None without access control."""
    if _PRINCIPAL_MARK not in properties:
        return None
    name = get_property(properties, PROPERTY_TRANSACTION_PRINCIPAL.encode())
    return None if name is None else name.decode()


def without_principal(properties: bytes) -> bytes:
    """Return the properties without the principal, which only the broker may see."""
    if properties.rfind(_PRINCIPAL_MARK) < 0:
        return properties
    return without_properties(properties, (PROPERTY_TRANSACTION_PRINCIPAL,))


def without_marks_of_copies(properties: bytes) -> bytes:
    """Return the properties without the marks of Apache RocketMQ's check copies."""
    if properties.rfind(_COPY_MARK) < 0 and properties.rfind(_PREPARED_MARK) < 0:
        return properties
    return without_properties(properties, _MARKS_OF_COPIES)


def mark_in_group(half: AppendRequest, mark: GroupMembership) -> AppendRequest:
    """Mark a half, not appended yet, as one of several; return it."""
    half.properties = b"%b%b,%d,%d\x02%b" % (_GROUP_MARK, *mark, half.properties)
    return half


def group_membership(properties: bytes) -> GroupMembership | None:
    """Return the position of a half in its transaction; None if it is the only one."""
    if _GROUP_MARK not in properties:
        return None
    parts = (get_property(properties, b"TRANSACTION_GROUP") or b"").rsplit(b",", 2)
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return GroupMembership(parts[0], int(parts[1][:_DIGITS_MAX]), int(parts[2][:_DIGITS_MAX]))


def other_halves(properties: bytes) -> list[int]:
    """Return the offsets of the other halves that a leader's decision record decides."""
    if HALVES_MARK not in properties:
        return []
    value = get_property(properties, b"TRANSACTION_HALVES") or b""
    return [int(part[:_DIGITS_MAX]) for part in value.split(b",") if part.isdigit()]


def immunity_s(properties: bytes) -> int:
    """Return the requested seconds without a check; 0 if none were requested."""
    value = get_property(properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
    if value is None or not value.isdigit():
        return 0
    return min(int(value[:_DIGITS_MAX]), IMMUNITY_S_MAX)


def parse_half(record: bytes, offset: int) -> StoredHalf | None:
    """Parse the half record at a physical offset; ``record`` may have more bytes after it.

    Return None if the bytes do not begin with a whole, valid half record for ``offset``. The CRC
    is tested because records built from the half get a new one: a body that was damaged on disk
    must not be delivered as valid.
    """
    if len(record) < HEAD_SIZE_MAX:  # no half is shorter: its properties name its topic
        return None
    head = HEADS[record[HOST_BITS_AT] & HOSTS_MASK]
    (
        total_size,
        magic,
        body_crc,
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
    body_at = head.size
    body_end = body_at + body_size
    properties_at = body_end + _BODY_TO_PROPERTIES
    if (
        magic != MAGIC_V1
        or sys_flag & TRANSACTION_MASK
        or physical_offset != offset
        or not body_at <= body_end < properties_at <= total_size <= len(record)
        or not record.startswith(_TOPIC_FIELD, body_end)
    ):
        return None
    body = record[body_at:body_end]
    if crc32(body) & CRC_MASK != body_crc:
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
        body,
        without_crc_tail(record[properties_at:total_size]),
        total_size,
    )


def real_topic(half: StoredHalf) -> str | None:
    """Return the topic the producer sent to; None if the record does not name it."""
    topic = get_property(half.properties, b"REAL_TOPIC")
    return None if topic is None else topic.decode()


def is_copy(half: StoredHalf) -> bool:
    """Return whether the record is a check copy written by Apache RocketMQ."""
    return get_property(half.properties, b"TRANSACTION_CHECK_TIMES") is not None


def unique_key(half: StoredHalf) -> str | None:
    """Return the message's UNIQ_KEY, by which clients identify the transaction."""
    key = get_property(half.properties, b"UNIQ_KEY")
    return None if key is None else key.decode(errors="replace")
