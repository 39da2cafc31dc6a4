"""Commit-log records, byte for byte."""

import mmap
import pickle
from typing import Final

import pytest

from halfmq.store.format.errors import CorruptRecordError, StoreError
from halfmq.store.format.flags import BORN_HOST_V6, STORE_HOST_V6
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import (
    BLANK_SIZE,
    CRC_TAIL_SIZE,
    HEAD_V4,
    HEADS,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    Buffer,
    Record,
    blank,
    crc_tail_matches,
    decode_record,
    decode_records,
    encode_record,
    new_record,
    seal_crc_tail,
    with_crc_tail,
    without_crc_tail,
)

# The record that the description of the format encodes by hand.
WORKED: Final = bytes.fromhex(
    "00000065 daa320a7 58932aac 00000001 00000000 0000000000000005 0000000000001000 00000000"
    "0000018bcfe56800 7f0000010000d431 0000018bcfe5687b 7f00000100002a9f 00000000"
    "0000000000000000 00000002 6869 01 54 0007 54414753014102"
)
WORKED_TAIL: Final = bytes.fromhex("5f5f435243333223 01 35323332353932373831 02")
PROPERTIES_AT: Final = 94
V4_HOST: Final = pack_host("127.0.0.1", 10911)
V6_HOST: Final = pack_host("2001:db8::1", 10911)


def worked_record(**changes: object) -> Record:
    record = new_record(
        topic="T",
        queue_id=1,
        body=b"hi",
        properties=b"TAGS\x01A\x02",
        queue_offset=5,
        physical_offset=4096,
        born_timestamp=1_700_000_000_000,
        born_host=pack_host("127.0.0.1", 54321),
        store_timestamp=1_700_000_000_123,
        store_host=V4_HOST,
    )
    return record._replace(**changes)  # type: ignore[arg-type]  # names and types as in Record


def test_a_record_is_byte_for_byte_what_rocketmq_writes() -> None:
    """RocketMQ must be able to read halfmq's log, and halfmq RocketMQ's."""
    assert encode_record(worked_record()) == WORKED
    assert decode_record(WORKED) == worked_record()


def test_the_fields_of_the_worked_record_are_read() -> None:
    """Each field has the position that the description gives."""
    record = decode_record(WORKED)

    assert record.total_size == 101
    assert record.magic == MAGIC_V1
    assert record.body_crc == 0x58932AAC
    assert (record.queue_id, record.queue_offset, record.physical_offset) == (1, 5, 4096)
    assert (record.body, record.topic, record.property_map) == (b"hi", "T", {"TAGS": "A"})
    assert record.msg_id == "7F00000100002A9F0000000000001000"
    assert record.end == 4197


@pytest.mark.parametrize(
    ("topic", "magic"),
    [("t" * 127, MAGIC_V1), ("t" * 128, MAGIC_V2), ("%RETRY%" + "g" * 248, MAGIC_V2)],
)
def test_a_long_topic_makes_a_version_2_record(topic: str, magic: int) -> None:
    """Version 1 has a signed byte for the length; RocketMQ switches at the same length."""
    record = new_record(
        topic=topic,
        queue_id=0,
        body=b"",
        properties=b"",
        born_timestamp=1,
        born_host=V4_HOST,
        store_timestamp=2,
        store_host=V4_HOST,
    )

    assert record.magic == magic
    assert record.total_size == 91 + len(topic) + (magic == MAGIC_V2)
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    ("born_host", "store_host", "flag", "size"),
    [
        (V4_HOST, V4_HOST, 0, 91),
        (V6_HOST, V4_HOST, BORN_HOST_V6, 103),
        (V4_HOST, V6_HOST, STORE_HOST_V6, 103),
        (V6_HOST, V6_HOST, BORN_HOST_V6 | STORE_HOST_V6, 115),
    ],
)
def test_every_mix_of_hosts_has_its_layout(
    born_host: bytes, store_host: bytes, flag: int, size: int
) -> None:
    """The flags give the width of the hosts, which shifts the fields after them."""
    record = new_record(
        topic="",
        queue_id=0,
        body=b"",
        properties=b"",
        born_timestamp=1,
        born_host=born_host,
        store_timestamp=2,
        store_host=store_host,
        sys_flag=BORN_HOST_V6 | STORE_HOST_V6 | 0x8,  # wrong host bits are corrected
        prepared_transaction_offset=77,
    )

    assert record.sys_flag == flag | 0x8
    assert record.total_size == size == HEADS[flag].size + 3
    assert decode_record(encode_record(record)) == record


def test_the_head_with_ipv4_hosts_has_its_fields_in_the_order_of_the_file() -> None:
    """``CommitLog.append`` packs them with this ``Struct``."""
    fields = HEAD_V4.unpack_from(WORKED)

    assert fields[:3] == (101, MAGIC_V1, 0x58932AAC)
    assert fields[-1] == 2


def test_any_buffer_can_be_read_at_any_position() -> None:
    """Maps, parts of answers and whole files are decoded without a copy."""
    padded = b"\xff" * 13 + WORKED
    mapped = mmap.mmap(-1, len(padded))
    mapped.write(padded)
    buffers: list[Buffer] = [padded, bytearray(padded), memoryview(padded), mapped]

    for buffer in buffers:
        record = decode_record(buffer, 13)
        assert record == worked_record()
        assert type(record.body) is type(record.properties) is type(record.born_host) is bytes
    mapped.close()


def test_a_pull_answer_that_is_cut_short_is_refused() -> None:
    """The error names the position of the incomplete record."""
    with pytest.raises(CorruptRecordError) as caught:
        decode_records(WORKED + WORKED[:-1])

    assert caught.value.offset == 101


@pytest.mark.parametrize("size", range(PROPERTIES_AT))
def test_a_record_whose_end_never_reached_the_disk_is_refused(size: int) -> None:
    """Zeros follow the cut, because files are created with their full size."""
    torn = WORKED[:size].ljust(4096, b"\0")

    with pytest.raises(CorruptRecordError):
        decode_record(torn)


@pytest.mark.parametrize("size", range(PROPERTIES_AT, len(WORKED)))
def test_only_the_crc_tail_finds_a_cut_within_the_properties(size: int) -> None:
    """No other check covers properties; RocketMQ accepts such a record, so halfmq must too."""
    torn = WORKED[:size].ljust(len(WORKED), b"\0")
    record = worked_record(properties=with_crc_tail(b"TAGS\x01A\x02"))
    torn_with_tail = seal_crc_tail(encode_record(record))[:size].ljust(121, b"\0")

    assert decode_record(torn).body == b"hi"
    assert not crc_tail_matches(torn_with_tail)


def test_a_body_that_does_not_match_its_crc_is_refused_unless_asked_otherwise() -> None:
    """The setting checkCRCOnRecover can disable the check."""
    damaged = WORKED.replace(b"hi", b"ho")

    with pytest.raises(CorruptRecordError, match="CRC"):
        decode_record(damaged)
    assert decode_record(damaged, check_crc=False).body == b"ho"


def test_the_crc_of_an_empty_body_is_checked_too() -> None:
    """It is zero, and a flipped bit in it is detected."""
    empty = bytearray(encode_record(worked_record(body=b"")))
    empty[8] ^= 0x40

    with pytest.raises(CorruptRecordError, match="CRC"):
        decode_record(empty)


def test_an_error_names_the_offset_and_the_reason() -> None:
    """Operators need both; a Spark worker pickles the error."""
    with pytest.raises(CorruptRecordError) as caught:
        decode_record(b"\0" * 200, 8, base=1 << 30)

    assert str(caught.value) == "record at 1073741832: unwritten space"
    assert isinstance(caught.value, StoreError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.offset, again.reason) == (1073741832, "unwritten space")


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, b"\x00\x00\x00\x5a", "a size of 90"),
        (0, b"\x7f\xff\xff\xff", "a size of 2147483647"),
        (0, b"\xff\xff\xff\xff", "a size of -1"),
        (0, b"\x00\x00\x00\x64", "do not add up"),
        (4, b"\xda\xa3\x20\xa8", "unknown magic 0xdaa320a8"),
        (36, b"\x00\x00\x00\x10", "a body length"),  # an IPv6 host that is not there
        (84, b"\x80\x00\x00\x00", "a body length of -2147483648"),
        (84, b"\x00\x00\x00\x0d", "a body length of 13"),
        (90, b"\xff", "a topic length of -1"),
        (90, b"\x7f", "a topic length of 127"),
        (91, b"\xff", "a topic that is not UTF-8"),
        (92, b"\xff\xff", "do not add up"),
        (92, b"\x00\x06", "do not add up"),
    ],
)
def test_an_impossible_field_is_named(position: int, value: bytes, reason: str) -> None:
    """No length may lead outside of the record."""
    damaged = bytearray(WORKED)
    damaged[position : position + len(value)] = value

    with pytest.raises(CorruptRecordError, match=reason):
        decode_record(damaged + WORKED)


def test_a_blank_says_how_much_of_the_file_is_left() -> None:
    """It is not a record, and not damage either."""
    assert blank(1000) == bytes.fromhex("000003e8cbd43194")
    assert PREFIX.unpack(blank(BLANK_SIZE)) == (8, MAGIC_BLANK)
    with pytest.raises(CorruptRecordError, match="a blank, which ends the file"):
        decode_record(blank(200).ljust(200, b"\0"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"born_host": V6_HOST}, "a host of 8 bytes, got 20"),
        ({"store_host": b""}, "a host of 8 bytes, got 0"),
        ({"sys_flag": STORE_HOST_V6}, "a host of 20 bytes, got 8"),
        ({"topic": "t" * 128}, "a topic of 128 bytes"),
        ({"magic": MAGIC_V2, "topic": "t" * 0x8000}, "a topic of 32768 bytes"),
        ({"magic": MAGIC_BLANK}, "0xcbd43194 is no magic"),
        ({"properties": b"x" * 32_768}, "properties of 32768 bytes exceed 32767"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: dict[str, object], reason: str) -> None:
    """The struct module would silently cut or pad a host."""
    with pytest.raises(ValueError, match=reason):
        encode_record(worked_record(**change))


def test_size_and_crc_are_computed_when_a_record_is_written() -> None:
    """A caller that changes a record does not have to update them."""
    changed = worked_record(body=b"other", total_size=0, body_crc=0)

    assert decode_record(encode_record(changed)).body == b"other"


def test_the_crc_tail_is_byte_for_byte_what_rocketmq_writes() -> None:
    """The digits are in reverse order."""
    record = worked_record(properties=with_crc_tail(b"TAGS\x01A\x02"))
    sealed = seal_crc_tail(encode_record(record))

    assert (len(sealed), sealed[-CRC_TAIL_SIZE:]) == (121, WORKED_TAIL)
    assert crc_tail_matches(sealed) is True
    assert crc_tail_matches(memoryview(sealed)) is True
    assert crc_tail_matches(WORKED) is None


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", b""),
        (b"TAGS\x01A\x02", b"TAGS\x01A\x02"),
        (b"TAGS\x01A", b"TAGS\x01A\x02"),
        (b"TAGS\x01A\x02" + WORKED_TAIL, b"TAGS\x01A\x02"),
        (WORKED_TAIL, b""),
        (
            b"A\x01b\x02" + WORKED_TAIL + b"DELAY\x013\x02" + WORKED_TAIL,
            b"A\x01b\x02DELAY\x013\x02",
        ),
        (b"A\x01b\x02__CRC32#\x01x\x02DELAY\x013", b"A\x01b\x02DELAY\x013\x02"),
        (b"A\x01b\x02__CRC32#\x01", b"A\x01b\x02"),
        (b"MY__CRC32#\x01b\x02", b"MY__CRC32#\x01b\x02"),
    ],
)
def test_properties_get_one_fresh_crc_tail(before: bytes, kept: bytes) -> None:
    """A message that is stored again has an older one, and a client may send any text."""
    tailed = with_crc_tail(before)

    assert tailed == kept + b"__CRC32#\x010000000000\x02"
    assert without_crc_tail(tailed) == kept
    assert without_crc_tail(kept) == kept
