"""Property strings and the bodies of batch sends."""

import pytest

from halfmq.store.format.batch import BatchUnit, decode_batch, encode_batch
from halfmq.store.format.properties import (
    decode_properties,
    encode_properties,
    get_property,
    tag_hash,
    tags_code,
    terminated,
    without_properties,
)

UNIT = bytes.fromhex(
    "0000001f 00000000 00000000 00000000 00000002 6869 0007 54414753014102"
)  # body "hi", TAGS=A


def test_properties_are_names_and_values_one_after_another() -> None:
    """In the order of the map, each with its separator, also the last one."""
    raw = encode_properties({"TAGS": "A", "KEYS": "k1 k2", "größe": "中"})

    assert raw == "TAGS\x01A\x02KEYS\x01k1 k2\x02größe\x01中\x02".encode()
    assert decode_properties(raw) == {"TAGS": "A", "KEYS": "k1 k2", "größe": "中"}
    assert decode_properties(raw.decode()) == decode_properties(raw)


def test_an_empty_value_is_not_written() -> None:
    """Readers ignore a property without a value."""
    assert encode_properties({"TAGS": "", "KEYS": "k"}) == b"KEYS\x01k\x02"


@pytest.mark.parametrize(
    ("name", "value"), [("", "v"), ("a\x01b", "v"), ("a\x02b", "v"), ("a", "v\x02w")]
)
def test_what_could_not_be_read_back_is_refused(name: str, value: str) -> None:
    """Nothing is escaped in the format."""
    with pytest.raises(ValueError, match="property"):
        encode_properties({name: value})


@pytest.mark.parametrize(
    ("raw", "properties"),
    [
        (b"", {}),
        (b"TAGS\x01A", {"TAGS": "A"}),  # written without the last separator
        (b"TAGS\x01A\x02\x02\x02KEYS\x01k\x02", {"TAGS": "A", "KEYS": "k"}),
        (b"TAGS\x01\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"\x01v\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"TAGS\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01\x01\x02", {"a": "\x01"}),
        (b"a\x011\x02b\x012\x02a\x013\x02", {"a": "3", "b": "2"}),
        (b"a\x011\x02a\x01\x02", {"a": "1"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_properties_are_read_as_rocketmq_reads_them(raw: bytes, properties: dict[str, str]) -> None:
    """Also malformed ones: batch units are stored unchanged."""
    assert decode_properties(raw) == properties
    for name in ("TAGS", "KEYS", "a", "b", "v"):
        value = get_property(raw, name.encode())
        assert (None if value is None else value.decode(errors="replace")) == properties.get(name)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"KEYS\x01k\x02", b"k"),
        (b"MY_KEYS\x01no\x02", None),
        (b"MY_KEYS\x01no\x02KEYS\x01k\x02", b"k"),
        (b"KEYS\x01k\x02MY_KEYS\x01no\x02", b"k"),
        (b"a\x01KEYS\x01no\x02", None),  # inside a value
        (b"KEYS\x01KEYS\x01k\x02", b"KEYS\x01k"),
        (b"KEYS\x01first\x02a\x01b\x02KEYS\x01last", b"last"),
        (b"KEYS\x01first\x02KEYS\x01\x02KEYS\x01\x02", b"first"),
        (b"KEYS\x01\x02", None),
        (b"KEYS", None),
        (b"KEYS2\x01no\x02", None),
    ],
)
def test_one_property_is_found_without_reading_the_others(raw: bytes, value: bytes | None) -> None:
    """The whole name must match, not only its beginning or end."""
    assert get_property(raw, b"KEYS") == value


@pytest.mark.parametrize(
    "part", [b"KEYS\x01\x02", b"xKEYS\x01v\x02", b"KEYS\x01", b"\x01", b"\x02"]
)
def test_a_search_ends_in_malformed_properties_of_any_length(part: bytes) -> None:
    """Peers may send up to 32 767 bytes of them."""
    assert get_property(part * 4000, b"KEYS") in {None, part * 3999}


def test_properties_can_be_taken_out_and_added() -> None:
    """The other properties keep their bytes and their order."""
    raw = b"a\x01\xff\x02DELAY\x013\x02b\x012\x02DELAY\x014"

    assert without_properties(raw, ["DELAY", "absent"]) == b"a\x01\xff\x02b\x012\x02"
    assert terminated(b"a\x011") == terminated(b"a\x011\x02") == b"a\x011\x02"
    assert terminated(b"") == b""


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", 0),
        (b"TAGS\x01\x02", 0),
        (b"KEYS\x01k\x02TAGS\x01TagA\x02", 2598919),
        (b"TAGS\x01order-created\x02", -392709271),
        (b"TAGS\x01a||b\x02", 3012833),
        ("TAGS\x01中".encode(), 20013),
    ],
)
def test_the_tags_code_is_the_hash_of_the_whole_value(raw: bytes, code: int) -> None:
    """The broker filters by this code alone."""
    assert tags_code(raw) == code


def test_a_subscribed_tag_has_the_code_of_its_messages() -> None:
    """A subscription to a tag matches messages with that tag."""
    assert tag_hash("TagA") == tags_code(b"TAGS\x01TagA\x02")
    assert tag_hash("") == 0


def test_a_batch_unit_is_byte_for_byte_what_rocketmq_writes() -> None:
    """Official clients send this form."""
    assert encode_batch([BatchUnit(0, b"hi", b"TAGS\x01A\x02")]) == UNIT
    assert decode_batch(UNIT) == [BatchUnit(0, b"hi", b"TAGS\x01A\x02")]


def test_sizes_and_crcs_of_units_are_not_trusted() -> None:
    """RocketMQ's broker reads neither, and some clients write zeros."""
    assert decode_batch(b"\xff" * 12 + UNIT[12:]) == decode_batch(UNIT)


@pytest.mark.parametrize("size", range(1, len(UNIT)))
def test_a_batch_that_is_cut_short_is_refused(size: int) -> None:
    """A batch is stored as a whole or not at all."""
    with pytest.raises(ValueError, match="batch unit at byte 31"):
        decode_batch(UNIT + UNIT[:size])


@pytest.mark.parametrize(
    "unit",
    [
        UNIT[:16] + b"\xff\xff\xff\xff" + UNIT[20:],
        UNIT[:16] + b"\x80\x00\x00\x00" + UNIT[20:],
        UNIT[:16] + b"\x7f\xff\xff\xff" + UNIT[20:],
        UNIT[:22] + b"\xff\xff" + UNIT[24:],
        UNIT[:22] + b"\x00\x08" + UNIT[24:],
    ],
)
def test_a_unit_with_an_impossible_length_is_refused(unit: bytes) -> None:
    """Peers may send any bytes."""
    with pytest.raises(ValueError, match="batch unit at byte 0"):
        decode_batch(unit)


def test_properties_too_long_for_their_length_field_are_refused() -> None:
    """Their length would overflow the int16 field."""
    with pytest.raises(ValueError, match="32768"):
        encode_batch([BatchUnit(0, b"", b"x" * 32_768)])
