"""Commit-log records, byte for byte as Apache RocketMQ writes them.

The positions of the fields are in ``record_fields``. Version 2 differs from version 1 only in the
magic and in a topic length of two bytes instead of one; it is used when the topic has more than
127 characters.

The body CRC (31 bits) covers only the stored body: it does not detect a topic or properties that a
crash has left zero. With the setting ``enabledAppendPropCRC``, the properties end
with a 20-byte property that holds a CRC of everything before it.

A file ends with a blank: the number of bytes left, then a magic of its own. Unwritten space is
zero.

Source: RocketMQ ``MessageExtEncoder.java``, ``MessageDecoder.java``, ``CommitLog.java``.
"""

import struct
from mmap import mmap
from typing import Final, NamedTuple

from .crc import crc32
from .errors import CorruptRecordError
from .flags import BORN_HOST_V6, HOSTS_MASK, STORE_HOST_V6, with_host_bits
from .ids import HOST_V4_SIZE, HOST_V6_SIZE, offset_message_id
from .properties import PROPERTIES_SIZE_MAX, PROPERTY_CRC32, decode_properties, without_properties
from .record_fields import (
    FIELDS,
    HOST_MIXES,
    PROPERTIES_LENGTH,
    TOPIC_LENGTH_V1,
    TOPIC_LENGTH_V2,
    struct_of,
)

Buffer = bytes | bytearray | memoryview | mmap
Range = tuple[int, int]  # a part of the log: physical offset, length in bytes

MAGIC_V1: Final = 0xDAA3_20A7
MAGIC_V2: Final = 0xDAA3_20AB
MAGIC_BLANK: Final = 0xCBD4_3194
MAGIC_AT: Final = FIELDS["magic"].position  # in a blank as well
MAGIC_START: Final = MAGIC_V1.to_bytes(4, "big")[:3]  # of both versions, for searches
assert MAGIC_V2.to_bytes(4, "big").startswith(MAGIC_START)
CRC_MASK: Final = 0x7FFF_FFFF  # RocketMQ keeps CRCs non-negative in a Java int
TOPIC_LENGTH_V1_MAX: Final = 127  # characters; beyond, RocketMQ writes version 2

PREFIX: Final = struct_of("total_size", "magic")  # enough to walk from record to record
BLANK_SIZE: Final = PREFIX.size  # bytes that every file keeps free after its last record, at least

# All fields of the head, by sys_flag & HOSTS_MASK.
HEADS: Final = {hosts: struct_of(*FIELDS, hosts=hosts) for hosts in HOST_MIXES}
HEAD_V4: Final = HEADS[0]
HEAD_SIZE_MAX: Final = HEADS[HOSTS_MASK].size  # bytes, with IPv6 hosts
assert HEAD_V4.size == 88  # RocketMQ's calMsgLength without body, topic and properties
assert [head.size for head in HEADS.values()] == [88, 100, 100, 112]

CRC_TAIL_SIZE: Final = 20  # "__CRC32#", 0x01, ten digits, 0x02
CRC_TAIL_START: Final = b"__CRC32#\x01"
_CRC_TAIL_BLANK: Final = CRC_TAIL_START + b"0" * 10 + b"\x02"
assert len(_CRC_TAIL_BLANK) == CRC_TAIL_SIZE

# Bytes of an empty version 1 record.
RECORD_SIZE_MIN: Final = HEAD_V4.size + TOPIC_LENGTH_V1.size + PROPERTIES_LENGTH.size

_SYS_FLAG: Final = struct_of("sys_flag")
_SIZES: Final = struct_of("total_size", "magic", "queue_offset", "sys_flag", "body_size")
_BODY_SIZE: Final = {hosts: struct_of("body_size", hosts=hosts) for hosts in HOST_MIXES}
_STORE_TIMESTAMP: Final = {hosts: struct_of("store_timestamp", hosts=hosts) for hosts in HOST_MIXES}


class Record(NamedTuple):
    """One message as the commit log holds it; field by field in the order of the file.

    The lengths of body, topic and properties are left out.
    """

    total_size: int  # bytes of the whole record
    magic: int  # MAGIC_V1 or MAGIC_V2
    body_crc: int  # CRC-32 of the body, 31 bits
    queue_id: int
    flag: int  # the application's own; opaque
    queue_offset: int  # position in the consume queue; 0 for a prepared or rollback record
    physical_offset: int  # bytes from the start of the commit log to this record
    sys_flag: int  # see flags.py
    born_timestamp: int  # ms, the producer's clock
    born_host: bytes  # address and int32 port, 8 or 20 bytes
    store_timestamp: int  # ms, the broker's clock
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int  # of a decision: physical offset of its half record
    body: bytes  # as received; compressed stays compressed
    topic: str
    properties: bytes

    @property
    def end(self) -> int:
        return self.physical_offset + self.total_size

    @property
    def msg_id(self) -> str:
        return offset_message_id(self.store_host, self.physical_offset)

    @property
    def property_map(self) -> dict[str, str]:
        return decode_properties(self.properties)


assert Record._fields == (*list(FIELDS)[:-1], "body", "topic", "properties")


def new_record(
    *,
    topic: str,
    queue_id: int,
    body: bytes,
    properties: bytes,
    born_timestamp: int,
    born_host: bytes,
    store_timestamp: int,
    store_host: bytes,
    queue_offset: int = 0,
    physical_offset: int = 0,
    flag: int = 0,
    sys_flag: int = 0,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> Record:
    """Build a record; size, version, body CRC and the host bits follow from the rest."""
    version_2 = len(topic) > TOPIC_LENGTH_V1_MAX
    return Record(
        total_size=record_size(
            len(body),
            len(topic.encode()),
            len(properties),
            born_host_size=len(born_host),
            store_host_size=len(store_host),
            version_2=version_2,
        ),
        magic=MAGIC_V2 if version_2 else MAGIC_V1,
        body_crc=crc32(body) & CRC_MASK,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=with_host_bits(sys_flag, born_host, store_host),
        born_timestamp=born_timestamp,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        body=body,
        topic=topic,
        properties=properties,
    )


def record_size(
    body_size: int,
    topic_size: int,
    properties_size: int,
    *,
    born_host_size: int = HOST_V4_SIZE,
    store_host_size: int = HOST_V4_SIZE,
    version_2: bool = False,
) -> int:
    """Return how many bytes such a record takes; all sizes in bytes."""
    hosts = born_host_size + store_host_size - 2 * HOST_V4_SIZE
    return RECORD_SIZE_MIN + version_2 + hosts + body_size + topic_size + properties_size


def encode_record(record: Record) -> bytes:
    """Return the bytes of the file.

    Total size and body CRC are computed and not taken from the record; all other fields are written
    unchanged. ``with_crc_tail`` and ``seal_crc_tail`` add the CRC over everything.

    Raises:
        ValueError: A host does not fit its bit in ``sys_flag``, a topic its version, or the
            properties their length field.
    """
    topic = record.topic.encode()
    version_2 = record.magic == MAGIC_V2
    _check_encodable(record, len(topic), version_2=version_2)
    total_size = record_size(
        len(record.body),
        len(topic),
        len(record.properties),
        born_host_size=len(record.born_host),
        store_host_size=len(record.store_host),
        version_2=version_2,
    )
    head = HEADS[record.sys_flag & HOSTS_MASK].pack(
        total_size, record.magic, crc32(record.body) & CRC_MASK, *record[3:14], len(record.body)
    )
    topic_length = TOPIC_LENGTH_V2 if version_2 else TOPIC_LENGTH_V1
    return b"".join(
        (
            head,
            record.body,
            topic_length.pack(len(topic)),
            topic,
            PROPERTIES_LENGTH.pack(len(record.properties)),
            record.properties,
        )
    )


def topic_field(topic: bytes, *, version_2: bool) -> bytes:
    """Return a topic with its length before it."""
    length = TOPIC_LENGTH_V2 if version_2 else TOPIC_LENGTH_V1
    return length.pack(len(topic)) + topic


def _check_encodable(record: Record, topic_size: int, *, version_2: bool) -> None:
    """Refuse invalid fields; struct would silently cut or pad a host."""
    if record.magic not in {MAGIC_V1, MAGIC_V2}:
        raise ValueError(f"{record.magic:#x} is no magic of a record")
    if topic_size > (0x7FFF if version_2 else 0x7F):
        raise ValueError(f"a topic of {topic_size} bytes does not fit this record version")
    if len(record.properties) > PROPERTIES_SIZE_MAX:
        raise ValueError(
            f"properties of {len(record.properties)} bytes exceed {PROPERTIES_SIZE_MAX}"
        )
    hosts = ((record.born_host, BORN_HOST_V6), (record.store_host, STORE_HOST_V6))
    for host, bit in hosts:
        size = HOST_V6_SIZE if record.sys_flag & bit else HOST_V4_SIZE
        if len(host) != size:
            raise ValueError(f"sys_flag announces a host of {size} bytes, got {len(host)}")


def decode_record(
    buffer: Buffer, position: int = 0, *, check_crc: bool = True, base: int = 0
) -> Record:
    """Read the whole record that starts at ``position``.

    ``base`` is the physical offset of the buffer's first byte, for the error only. The record's
    own ``physical_offset`` is not compared with it: the caller knows whether it should be.

    Raises:
        CorruptRecordError: There is no whole, valid record here.
    """
    try:
        return _decode(buffer, position, check_crc=check_crc)
    except _DefectError as defect:
        raise CorruptRecordError(base + position, str(defect)) from None
    except struct.error:
        raise CorruptRecordError(base + position, "cut short within its head") from None


class _DefectError(Exception):
    """The reason, without the offset, which only the caller knows."""


def _decode(buffer: Buffer, position: int, *, check_crc: bool) -> Record:
    total_size, magic = PREFIX.unpack_from(buffer, position)
    if magic not in {MAGIC_V1, MAGIC_V2}:
        raise _DefectError(_non_record(total_size, magic))
    end = position + total_size
    if total_size < RECORD_SIZE_MIN or end > len(buffer):
        raise _DefectError(f"a size of {total_size} with {len(buffer) - position} bytes left")
    (sys_flag,) = _SYS_FLAG.unpack_from(buffer, position)
    head = HEADS[sys_flag & HOSTS_MASK]
    *fixed, body_size = head.unpack_from(buffer, position)

    body_start = position + head.size
    topic_length_at = body_start + body_size
    if body_size < 0 or topic_length_at >= end:
        raise _DefectError(f"a body length of {body_size} in {total_size} bytes")
    length = TOPIC_LENGTH_V2 if magic == MAGIC_V2 else TOPIC_LENGTH_V1
    (topic_size,) = length.unpack_from(buffer, topic_length_at)
    topic_start = topic_length_at + length.size
    properties_length_at = topic_start + topic_size
    if topic_size < 0 or properties_length_at + PROPERTIES_LENGTH.size > end:
        raise _DefectError(f"a topic length of {topic_size} in {total_size} bytes")
    (properties_size,) = PROPERTIES_LENGTH.unpack_from(buffer, properties_length_at)
    properties_start = properties_length_at + PROPERTIES_LENGTH.size
    if properties_start + properties_size != end:
        raise _DefectError(f"lengths that do not add up to {total_size} bytes")

    body = bytes(buffer[body_start:topic_length_at])
    if check_crc and crc32(body) & CRC_MASK != fixed[2]:
        raise _DefectError("a body that does not match its CRC")
    try:
        topic = str(buffer[topic_start:properties_length_at], "utf-8")
    except UnicodeDecodeError:
        raise _DefectError("a topic that is not UTF-8") from None
    properties = bytes(buffer[properties_start:end])
    return Record._make((*fixed, body, topic, properties))


def _non_record(total_size: int, magic: int) -> str:
    """Describe the bytes at a position where no record begins."""
    if magic == MAGIC_BLANK:
        return "a blank, which ends the file"
    if total_size == magic == 0:
        return "unwritten space"
    return f"unknown magic {magic:#010x}"


def decode_records(buffer: Buffer) -> list[Record]:
    """Read records that follow each other without a gap, as in the body of a pull answer.

    Raises:
        CorruptRecordError: Somewhere there is no whole, valid record; ``offset`` counts from the
            start of the buffer.
    """
    records: list[Record] = []
    position = 0
    while position < len(buffer):
        record = decode_record(buffer, position)
        records.append(record)
        position += record.total_size
    return records


def properties_at(buffer: bytes, position: int) -> tuple[int, int, bytes]:
    """Return size, queue offset and properties of a record without decoding the rest.

    Raises:
        CorruptRecordError: There is no whole record here; no CRC is checked. ``offset`` is the
            position.
    """
    try:
        size, magic, queue_offset, sys_flag, body_size = _SIZES.unpack_from(buffer, position)
        topic_at = position + _SIZES.size + body_size
        if hosts := sys_flag & HOSTS_MASK:
            after_hosts = _BODY_SIZE[hosts]
            (body_size,) = after_hosts.unpack_from(buffer, position)
            topic_at = position + after_hosts.size + body_size
        length = TOPIC_LENGTH_V2 if magic == MAGIC_V2 else TOPIC_LENGTH_V1
        (topic_size,) = length.unpack_from(buffer, topic_at)
        length_at = topic_at + length.size + topic_size
        (properties_size,) = PROPERTIES_LENGTH.unpack_from(buffer, length_at)
    except struct.error:
        raise CorruptRecordError(position, "cut short") from None
    start, end = length_at + PROPERTIES_LENGTH.size, position + size
    fits = position < topic_at < length_at and start <= end <= len(buffer)
    if not fits or start + properties_size != end or magic not in {MAGIC_V1, MAGIC_V2}:
        raise CorruptRecordError(position, "lengths that do not add up")
    return size, queue_offset, buffer[start:end]


def store_timestamp(buffer: Buffer, position: int, sys_flag: int) -> int:
    """Return the store time in ms of the record at a position, given its flags."""
    timestamp: int = _STORE_TIMESTAMP[sys_flag & HOSTS_MASK].unpack_from(buffer, position)[0]
    return timestamp


def blank(size_left: int) -> bytes:
    """Return what ends a file that has ``size_left`` bytes left, at least 8."""
    assert size_left >= BLANK_SIZE
    return PREFIX.pack(size_left, MAGIC_BLANK)


def with_crc_tail(properties: bytes) -> bytes:
    """Return the properties with room for the CRC over the whole record, and no older one."""
    properties = without_crcs(properties)
    separator = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
    return properties + separator + _CRC_TAIL_BLANK


def without_crcs(properties: bytes) -> bytes:
    """Return the properties without any CRC of a whole record, at the end or elsewhere.

    A message that is stored again has the CRC of its previous record, and a client may send one.
    """
    if CRC_TAIL_START not in properties:
        return properties
    return without_properties(properties, (PROPERTY_CRC32,))


def without_crc_tail(properties: bytes) -> bytes:
    """Return the properties without the CRC at their end, if there is one."""
    if properties[-CRC_TAIL_SIZE:].startswith(CRC_TAIL_START):
        return properties[:-CRC_TAIL_SIZE]
    return properties


def seal_crc_tail(encoded: bytes) -> bytes:
    """Return a record encoded with ``with_crc_tail`` with the CRC filled in.

    Call it last: the CRC covers offsets and timestamps too.
    """
    content = encoded[:-CRC_TAIL_SIZE]
    return content + crc_tail(content)


def crc_tail(content: Buffer) -> bytes:
    """Return the last 20 bytes of a record, given all bytes before them.

    RocketMQ writes the decimal digits least significant first, padded with zeros at the end.
    """
    digits = f"{crc32(content) & CRC_MASK:010d}"[::-1]
    return b"%b%b\x02" % (CRC_TAIL_START, digits.encode())


def crc_tail_matches(encoded: Buffer) -> bool | None:
    """Check the CRC over a whole encoded record; None when the record carries none."""
    tail = bytes(encoded[-CRC_TAIL_SIZE:])
    if not tail.startswith(CRC_TAIL_START):
        return None
    return tail == crc_tail(encoded[:-CRC_TAIL_SIZE])
