"""Fillers: what takes the place of records that the disk has damaged.

A damaged record must not stay: RocketMQ ends its recovery there and cuts all that follows. Nor may
its place in the queue close up: RocketMQ appends the next entry wherever its queue ends, so that
every later message would stand one place too low. So a filler is a whole record with an empty
body of the same length and with topic, queue id and queue offset of the lost one, and RocketMQ
gives it to consumers as a message of zeros. Our own consumers never see it: its queue entry
carries ``FILLER_TAGS_CODE``, which no tag has, and pulls leave it out.

Where it is not known what was lost, the filler is a rollback record, which has no queue entry.

No message of any sender can be taken for one, since what tells it is not the sender's to set: it
links to a half before the beginning of the log.
"""

from typing import Final

from .flags import HOSTS_MASK, TransactionType
from .ids import HOST_V4_SIZE
from .properties import encode_properties
from .record import TOPIC_LENGTH_V1_MAX, encode_record, new_record, record_size
from .record_fields import struct_of
from .topics import HALF_TOPIC, SCHEDULE_TOPIC

# Set in the flags of every filler, so that whoever looks at those anyway need not look further
# at other records. A sender may set it too; the link decides.
FILLER_BIT: Final = 0x4000_0000
# Beyond the hash of any tag (int32) and of any time in ms to come; "HMQF" and "FLLR".
FILLER_TAGS_CODE: Final = 0x484D5146_464C4C52
FILLER_TAGS_CODE_LOW: Final = FILLER_TAGS_CODE & 0xFFFF_FFFF  # what tag filters see of it

_NO_TOPIC: Final = "-"  # of fillers for nobody knows what
_NO_HOST: Final = bytes(HOST_V4_SIZE)
_LINK: Final = struct_of("prepared_transaction_offset")  # with IPv4 hosts, as fillers have them
# RocketMQ delivers what is due in the schedule topic to its real topic, and drops what would go
# there; without a real topic it would try for ever.
_DROPPED: Final = encode_properties({"REAL_TOPIC": HALF_TOPIC, "REAL_QID": "0"})

FILLER_SIZE_MIN: Final = record_size(0, len(_NO_TOPIC), 0)
assert FILLER_SIZE_MIN == 92  # no record is smaller, so a filler fits wherever one was


def filler_size(topic: str) -> int:
    """Return the bytes that a filler for a record of this topic takes at least."""
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
    # In the half topic the commit bits, which no half has, so that nobody takes it for one.
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
    """Tell whether the whole record that starts at ``position`` is a filler, given its flags."""
    if sys_flag & (FILLER_BIT | HOSTS_MASK) != FILLER_BIT:
        return False
    link: int = _LINK.unpack_from(buffer, position)[0]
    return link < 0
