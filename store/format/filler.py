"""Fillers: records that replace damaged ones.

A damaged record must be replaced, because RocketMQ ends its recovery there and cuts off all later
records. Its queue offset must not be skipped either: RocketMQ appends the next entry at the end of
its queue, so that all later messages would be one offset too low. So a filler is a valid record of
the same length with the topic, queue id and queue offset of the lost one and a body of zeros, which
RocketMQ delivers. halfmq does not deliver it: its queue entry has ``FILLER_TAGS_CODE``, which no
tag has, and pulls leave it out.

If the lost record is unknown, the filler is a rollback record, which has no queue entry.

No message of a sender can be mistaken for a filler, because senders cannot set the field that marks
it: a link to a half before the beginning of the log.
"""

from typing import Final

from .flags import HOSTS_MASK, TransactionType
from .ids import HOST_V4_SIZE
from .properties import encode_properties
from .record import TOPIC_LENGTH_V1_MAX, encode_record, new_record, record_size
from .record_fields import struct_of
from .topics import HALF_TOPIC, SCHEDULE_TOPIC

# Set in the flags of every filler, so that other records can be ruled out by their flags. A sender
# may set it too; the link decides.
FILLER_BIT: Final = 0x4000_0000
# Greater than the hash of any tag (int32) and any future time in ms; "HMQF" and "FLLR".
FILLER_TAGS_CODE: Final = 0x484D5146_464C4C52
FILLER_TAGS_CODE_LOW: Final = FILLER_TAGS_CODE & 0xFFFF_FFFF  # the part that tag filters compare

_NO_TOPIC: Final = "-"  # of fillers for unknown records
_NO_HOST: Final = bytes(HOST_V4_SIZE)
_LINK: Final = struct_of("prepared_transaction_offset")  # with IPv4 hosts, as fillers have them
# RocketMQ delivers what is due in the schedule topic to its real topic, and drops what would go
# there; without a real topic it would try for ever.
_DROPPED: Final = encode_properties({"REAL_TOPIC": HALF_TOPIC, "REAL_QID": "0"})

FILLER_SIZE_MIN: Final = record_size(0, len(_NO_TOPIC), 0)
assert FILLER_SIZE_MIN == 92  # no record is smaller, so a filler fits wherever one was


def filler_size(topic: str) -> int:
    """Return the least size in bytes of a filler for a record of this topic."""
    version_2 = len(topic) > TOPIC_LENGTH_V1_MAX
    return record_size(0, len(topic.encode()), 0, version_2=version_2)


def anonymous_filler(size: int, physical_offset: int, store_timestamp: int) -> bytes:
    """Return a filler of ``size`` bytes for records of which nothing is known."""
    return _filler(
        _NO_TOPIC, 0, 0, size, physical_offset, store_timestamp, int(TransactionType.ROLLBACK), b""
    )


def queue_filler(
    topic: str,
    queue_id: int,
    queue_offset: int,
    *,
    size: int,
    physical_offset: int,
    store_timestamp: int,
) -> bytes:
    """Return a filler of ``size`` bytes, at least ``filler_size``, that keeps a queue offset."""
    # In the half topic the commit bits, which no half has, so that it is not taken for one.
    bits = TransactionType.COMMIT if topic == HALF_TOPIC else TransactionType.NONE
    properties = b""
    if topic == SCHEDULE_TOPIC and size >= filler_size(topic) + len(_DROPPED):
        properties = _DROPPED
    return _filler(
        topic, queue_id, queue_offset, size, physical_offset, store_timestamp, int(bits), properties
    )


def _filler(
    topic: str,
    queue_id: int,
    queue_offset: int,
    size: int,
    physical_offset: int,
    store_timestamp: int,
    bits: int,
    properties: bytes,
) -> bytes:
    body_size = size - filler_size(topic) - len(properties)
    assert body_size >= 0, "the place of a record is never too small for its filler"
    return encode_record(
        new_record(
            topic=topic,
            queue_id=queue_id,
            body=bytes(body_size),
            properties=properties,
            born_timestamp=0,  # RocketMQ leaves so old a half alone
            born_host=_NO_HOST,
            store_timestamp=store_timestamp,
            store_host=_NO_HOST,
            queue_offset=queue_offset,
            physical_offset=physical_offset,
            sys_flag=FILLER_BIT | bits,
            prepared_transaction_offset=-1 - physical_offset,
        )
    )


def is_filler(buffer: bytes, position: int, sys_flag: int) -> bool:
    """Return whether the valid record at ``position`` with these flags is a filler."""
    if sys_flag & (FILLER_BIT | HOSTS_MASK) != FILLER_BIT:
        return False
    link: int = _LINK.unpack_from(buffer, position)[0]
    return link < 0
