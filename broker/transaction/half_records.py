"""The records that are made from a stored half; pure functions over bytes.

All of them carry the half's physical offset in ``preparedTransactionOffset``, so the log alone
shows how every transaction ended:

* the **final** message (bits 0x8): the producer's message and the decision "committed" in one
  append. Its property ``TRANSACTION_HALF_ID`` is the offset message id of the half, by which a
  consumer identifies the transaction even if the message is sent again;
* the **rollback** record (bits 0xC, topic of the half, no body): the decision "rolled back". It
  enters no consume queue and no index. Apache RocketMQ has no such record and skips it;
* the **parked** copy in ``TRANS_CHECK_MAX_TIME_TOPIC``: no producer decided, an operator may;
* the **resumed** record (bits 0x4, topic of the half, no body): an operator has resumed checks of
  a parked half. It has no key either, so Apache RocketMQ skips it as well;
* the **check** request's body, which is sent and not stored.

The leader's final message of a transaction of several, or its rollback record, names the other
halves that it decides in ``TRANSACTION_HALVES``.

The commit path works on the bytes of the stored half and decodes only what it needs, because it
runs once per transaction.

Source: RocketMQ ``EndTransactionProcessor.java``, ``MessageDecoder.java``.
"""

from binascii import hexlify
from collections.abc import Iterable, Sequence
from typing import Final

from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import PROPERTIES_SIZE_MAX, get_property, tags_code, terminated
from halfmq.store.format.record import encode_record, new_record
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from .half import HALVES_MARK, StoredHalf, without_marks_of_copies, without_principal
from .state.state_machine import ParkedReason

_TAIL_MAX: Final = 32  # bytes of the CRC property that the store may add
_COMMIT: Final = int(TransactionType.COMMIT)
_ROLLBACK: Final = int(TransactionType.ROLLBACK)
_KEPT_FLAGS: Final = ~(TRANSACTION_MASK | HOSTS_MASK)  # the store sets the bits of the hosts


def prepared_final(message: AppendRequest, half: AppendRequest, half_offset: int) -> AppendRequest:
    """Turn a message whose half has just been appended into its final message; return it.

    The result equals ``final_request`` of the stored record, which need not be read back. Complete
    it with ``committed``.
    """
    message.properties = half.properties
    message.sys_flag = half.sys_flag & _KEPT_FLAGS | _COMMIT
    message.prepared_transaction_offset = half_offset
    return message


def final_request(half: StoredHalf) -> AppendRequest:
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


def _destination(properties: bytes) -> tuple[str, int]:
    """Return the topic and queue of the message."""
    # Halves written by halfmq end with the three properties that `half_request` appends.
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


def committed(final: AppendRequest, other_halves: Sequence[int] = ()) -> AppendRequest:
    """Complete a final message; its append is the commit.

    Args:
        final: Made by ``final_request`` or ``prepared_final``, not appended yet.
        other_halves: Their offsets, if the message is the leader of several.
    """
    properties = without_principal(final.properties)
    if other_halves or properties[-1] != 2:
        properties = terminated(properties) + _halves_property(other_halves)
    half_id = hexlify(final.store_host + final.prepared_transaction_offset.to_bytes(8, "big"))
    properties = b"".join((properties, b"TRANSACTION_HALF_ID\x01", half_id.upper(), b"\x02"))
    # Our halves have room for it. For one of Apache RocketMQ, delivery matters more than the id.
    if len(properties) <= PROPERTIES_SIZE_MAX - _TAIL_MAX:
        final.properties = properties
    return final


def _halves_property(offsets: Iterable[int]) -> bytes:
    value = b",".join([b"%d" % offset for offset in offsets])
    return b"%b%b\x02" % (HALVES_MARK, value) if value else b""


def committed_again(half: StoredHalf) -> AppendRequest:
    """Return the message of a committed half for another append, for example a retry.

    It has the content and the half message id of the final message, and is no decision.

    Raises:
        ValueError: The half does not name the topic of its message.
    """
    again = committed(final_request(half))
    again.sys_flag &= _KEPT_FLAGS
    again.prepared_transaction_offset = 0
    return again


def rollback_request(final: AppendRequest, other_halves: Sequence[int] = ()) -> AppendRequest:
    """Return the record that rolls back the transaction of this final message.

    ``other_halves`` are their offsets, if the message is the leader of several.
    """
    parts = [_halves_property(other_halves)]
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


def bare_request(
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


def parked_request(half: StoredHalf, reason: ParkedReason) -> AppendRequest:
    """Return the copy for operators of a message that no producer decided."""
    parked = final_request(half)
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
    properties = without_marks_of_copies(without_principal(half.properties))
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
