"""Rewriting a message to and from its half form; pure functions over bytes.

A half message is the producer's message under another topic: ``RMQ_SYS_TRANS_HALF_TOPIC``, queue
0, with the real topic and queue kept in the properties ``REAL_TOPIC`` and ``REAL_QID``. Its
transaction bits are cleared, so that it takes a slot in the half topic's consume queue, by whose
offset op messages name it.

Five records are made from a stored half. All of them carry the half's physical offset in
``preparedTransactionOffset``, so the log alone shows how every transaction ended:

* the **final** message (bits 0x8): the producer's message and the decision "committed" in one
  append. Its property ``TRANSACTION_HALF_ID`` is the offset message id of the half, by which a
  consumer identifies the transaction even if the message is sent again;
* the **rollback** record (bits 0xC, topic of the half, no body): the decision "rolled back". It
  enters no consume queue and no index. Apache RocketMQ has no such record and skips it;
* the **parked** copy in ``TRANS_CHECK_MAX_TIME_TOPIC``: no producer decided, an operator may;
* the **resumed** record (bits 0x4, topic of the half, no body): an operator has resumed checks of
  a parked half. It has no key either, so Apache RocketMQ skips it as well;
* the **check** request's body, which is sent and not stored.

Every half of a several-message transaction has ``TRANSACTION_GROUP``: the leader's unique key, its
own index, and how many there are. The leader's final, or its rollback record, names the other
halves that it decides in ``TRANSACTION_HALVES``.

The commit path works on the bytes of the stored half and decodes only what it needs, because it
runs once per transaction.

Source: RocketMQ ``TransactionalMessageBridge.java``, ``EndTransactionProcessor.java``,
``MessageDecoder.java``.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from halfmq.store.format.crc import crc32
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import (
    PROPERTIES_SIZE_MAX,
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PRINCIPAL,
    get_property,
    tags_code,
    terminated,
    without_properties,
)
from halfmq.store.format.record import (
    CRC_MASK,
    HEAD_SIZE_MAX,
    HEADS,
    MAGIC_V1,
    encode_record,
    new_record,
    topic_field,
    without_crc_tail,
)
from halfmq.store.format.record_fields import HOST_BITS_AT, PROPERTIES_LENGTH
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from .pending import ParkedReason

IMMUNITY_S_MAX: Final = 259_200
"""Longest time without a check that a message can request, in seconds: three days, RocketMQ's
``fileReservedTime``. Before a later check the half would have been deleted by age."""

_DIGITS_MAX: Final = 18  # of a number read from a property; a cut number stays above the limit
_TOPIC_FIELD: Final = topic_field(HALF_TOPIC.encode(), version_2=False)
_BODY_TO_PROPERTIES: Final = len(_TOPIC_FIELD) + PROPERTIES_LENGTH.size
_TAIL_MAX: Final = 32  # bytes of the CRC property that the store may add
_COMMIT: Final = int(TransactionType.COMMIT)
_ROLLBACK: Final = int(TransactionType.ROLLBACK)
_KEPT_FLAGS: Final = ~(TRANSACTION_MASK | HOSTS_MASK)  # the store sets the bits of the hosts

# Apache RocketMQ marks its check copies with these. A producer's message that brings them (it may
# have been consumed from such a store and sent on) must not look like a copy of another half.
_MARKS_OF_COPIES: Final = (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRAN_PREPARED_QUEUE_OFFSET)
# They are searched with `rfind`: `in` first tests whether bytes are a number, which takes longer
# than the search.
_COPY_MARK: Final = b"TRANSACTION_CHECK_TIMES\x01"
_PREPARED_MARK: Final = b"TRAN_PREPARED_QUEUE_OFFSET\x01"
_GROUP_MARK: Final = b"TRANSACTION_GROUP\x01"
_HALVES_MARK: Final = b"TRANSACTION_HALVES\x01"
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


def half_draft(message: AppendRequest, unique_key: str) -> AppendRequest:
    """Return the half that is stored for a producer's transactional message."""
    own = (
        f"REAL_TOPIC\x01{message.topic}\x02REAL_QID\x01{message.queue_id}\x02"
        f"__transactionId__\x01{unique_key}\x02"
    )
    return AppendRequest(
        topic=HALF_TOPIC,
        queue_id=0,
        body=message.body,
        properties=terminated(_without_marks(message.properties)) + own.encode(),
        tags_code=message.tags_code,
        flag=message.flag,
        sys_flag=message.sys_flag & ~TRANSACTION_MASK,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
    )


def of_principal(properties: bytes, name: str) -> bytes:
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


def _without_marks(properties: bytes) -> bytes:
    """Return the properties without the marks of Apache RocketMQ's check copies."""
    if properties.rfind(_COPY_MARK) < 0 and properties.rfind(_PREPARED_MARK) < 0:
        return properties
    return without_properties(properties, _MARKS_OF_COPIES)


def in_group(half: AppendRequest, mark: GroupMembership) -> AppendRequest:
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


def halves_beside(properties: bytes) -> list[int]:
    """Return the offsets of the other halves that a leader's decision record decides."""
    if _HALVES_MARK not in properties:
        return []
    value = get_property(properties, b"TRANSACTION_HALVES") or b""
    return [int(part[:_DIGITS_MAX]) for part in value.split(b",") if part.isdigit()]


def prepared_final(message: AppendRequest, half: AppendRequest, half_offset: int) -> AppendRequest:
    """Turn a message whose half has just been appended into its final message; return it.

    The result equals ``final_draft`` of the stored record, which need not be read back. Complete
    it with ``committed``.
    """
    message.properties = half.properties
    message.sys_flag = half.sys_flag & _KEPT_FLAGS | _COMMIT
    message.prepared_transaction_offset = half_offset
    return message


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
    )


def real_topic(half: StoredHalf) -> str | None:
    """Return the topic the producer sent to; None if the record does not name it."""
    topic = get_property(half.properties, b"REAL_TOPIC")
    return None if topic is None else topic.decode()


def is_copy(half: StoredHalf) -> bool:
    """Return whether the record is a check copy written by Apache RocketMQ."""
    return get_property(half.properties, b"TRANSACTION_CHECK_TIMES") is not None


def _destination(properties: bytes) -> tuple[str, int]:
    """Return the topic and queue of the message."""
    # Halves of ours end with the three properties that `half_draft` appends, in its order.
    parts = properties.rsplit(b"\x02", 4)
    if (
        len(parts) == 5
        and parts[1].startswith(b"REAL_TOPIC\x01")
        and parts[2].startswith(b"REAL_QID\x01")
        and parts[3].startswith(b"__transactionId__\x01")
        and not parts[4]
    ):
        return parts[1][11:].decode(), int(parts[2][9:])
    topic = get_property(properties, b"REAL_TOPIC")
    if topic is None:
        raise ValueError("a half record without REAL_TOPIC")
    return topic.decode(), int(get_property(properties, b"REAL_QID") or 0)


def unique_key(half: StoredHalf) -> str | None:
    """Return the message's UNIQ_KEY, by which clients identify the transaction."""
    key = get_property(half.properties, b"UNIQ_KEY")
    return None if key is None else key.decode(errors="replace")


def final_draft(half: StoredHalf) -> AppendRequest:
    """Return the message as consumers get it, without what ``committed`` adds.

    The stored properties are kept whole, with ``TRAN_MSG`` and ``REAL_*``: Java consumers find the
    transaction id only while ``TRAN_MSG`` is there.

    Raises:
        ValueError: The half does not name the topic of its message.
    """
    properties = half.properties
    topic, queue_id = _destination(properties)
    return AppendRequest(
        topic=topic,
        queue_id=queue_id,
        body=half.body,
        properties=properties,
        tags_code=tags_code(properties),
        flag=half.flag,
        sys_flag=half.sys_flag & _KEPT_FLAGS | _COMMIT,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_host=half.store_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.physical_offset,
    )


def committed(final: AppendRequest, beside: Sequence[int] = ()) -> AppendRequest:
    """Complete a final message; its append is the commit.

    Args:
        final: Made by ``final_draft`` or ``prepared_final``, not appended yet.
        beside: Of the leader of several messages: the offsets of the other halves.
    """
    properties = without_principal(final.properties)
    if beside or properties[-1] != 2:
        properties = terminated(properties) + _halves(beside)
    half_id = hexlify(final.store_host + final.prepared_transaction_offset.to_bytes(8, "big"))
    properties = b"".join((properties, b"TRANSACTION_HALF_ID\x01", half_id.upper(), b"\x02"))
    # Our halves have room for it. For one of Apache RocketMQ, delivery matters more than the id.
    if len(properties) <= PROPERTIES_SIZE_MAX - _TAIL_MAX:
        final.properties = properties
    return final


def _halves(beside: Iterable[int]) -> bytes:
    offsets = b",".join([b"%d" % offset for offset in beside])
    return b"%b%b\x02" % (_HALVES_MARK, offsets) if offsets else b""


def committed_again(half: StoredHalf) -> AppendRequest:
    """Return the message of a committed half for another append, for example a retry.

    It has the content and the half message id of the final message, and is no decision.

    Raises:
        ValueError: The half does not name the topic of its message.
    """
    again = committed(final_draft(half))
    again.sys_flag &= _KEPT_FLAGS
    again.prepared_transaction_offset = 0
    return again


def rollback_draft(final: AppendRequest, beside: Sequence[int] = ()) -> AppendRequest:
    """Return the record that rolls back the transaction of this final message.

    ``beside`` are the offsets of the other halves, if the message is the leader of several.
    """
    parts = [_halves(beside)]
    for name in (b"PGROUP", b"UNIQ_KEY", b"__transactionId__"):
        value = get_property(final.properties, name)
        if value is not None:
            parts.append(b"%b\x01%b\x02" % (name, value))
    return AppendRequest(
        topic=HALF_TOPIC,
        queue_id=0,
        body=b"",
        properties=b"".join(parts),
        sys_flag=_ROLLBACK,
        born_timestamp=final.born_timestamp,
        born_host=final.born_host,
        store_host=final.store_host,
        prepared_transaction_offset=final.prepared_transaction_offset,
    )


def bare_draft(
    half_offset: int, group: str, kind: TransactionType, *, now_ms: int, host: bytes
) -> AppendRequest:
    """Return a record about a half that need not be read.

    ROLLBACK decides a half that cannot be read any more; PREPARED resumes the checks of a parked
    one.
    """
    return AppendRequest(
        topic=HALF_TOPIC,
        queue_id=0,
        body=b"",
        properties=b"PGROUP\x01%b\x02" % group.encode() if group else b"",
        sys_flag=int(kind),
        born_timestamp=now_ms,
        born_host=host,
        store_host=host,
        prepared_transaction_offset=half_offset,
    )


def parked_draft(half: StoredHalf, reason: ParkedReason) -> AppendRequest:
    """Return the copy for operators of a message that no producer decided."""
    parked = final_draft(half)
    if reason.text is not None:
        text = b"TRANSACTION_PARKED\x01%b\x02" % reason.text.encode()
        parked.properties = terminated(parked.properties) + text
    parked.properties = without_principal(parked.properties)
    parked.topic = TRANS_CHECK_MAX_TIME_TOPIC
    parked.queue_id = 0
    parked.sys_flag &= _KEPT_FLAGS
    return parked


def check_body(half: StoredHalf, check_number: int) -> bytes:
    """Return the body of a check request: the stored half under its real topic and queue.

    ``TRANSACTION_CHECK_TIMES`` gives the producer's listener the number of this check, as Apache
    RocketMQ does.

    Raises:
        ValueError: The half does not name the topic of its message.
    """
    properties = _without_marks(without_principal(half.properties))
    topic, queue_id = _destination(half.properties)
    number = b"TRANSACTION_CHECK_TIMES\x01%d\x02" % check_number
    record = new_record(
        topic=topic,
        queue_id=queue_id,
        body=half.body,
        properties=terminated(properties) + number,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_timestamp=half.store_timestamp,
        store_host=half.store_host,
        queue_offset=half.queue_offset,
        physical_offset=half.physical_offset,
        flag=half.flag,
        sys_flag=half.sys_flag,
        reconsume_times=half.reconsume_times,
    )
    return encode_record(record)
