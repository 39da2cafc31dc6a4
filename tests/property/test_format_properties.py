"""Properties, batches and hashes, compared with the simplest code for them."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from halfmq.store.format.batch import BatchUnit, decode_batch, encode_batch
from halfmq.store.format.ids import (
    OffsetMessageId,
    java_string_hash,
    offset_message_id,
    offset_message_ids,
    pack_host,
    parse_offset_message_id,
    unpack_host,
)
from halfmq.store.format.index import (
    index_key,
    index_key_hash,
    index_key_hashes,
    index_keys,
    seconds_after,
)
from halfmq.store.format.properties import (
    TagsCodeCache,
    decode_properties,
    encode_properties,
    get_property,
    tags_code,
    tags_codes,
    without_properties,
)

NAMES = st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=5)
VALUES = st.text(st.characters(exclude_characters="\x02", codec="utf-8"), min_size=1, max_size=9)
# Few letters, so that names repeat, contain each other and meet separators everywhere.
RAW = st.lists(st.sampled_from([b"\x01", b"\x02", b"K", b"KE", b"TAGS", b"\xc3\xb6"]), max_size=12)
UNITS = st.builds(
    BatchUnit,
    flag=st.integers(-(2**31), 2**31 - 1),
    body=st.binary(max_size=30),
    properties=st.binary(max_size=30),
)


@given(properties=st.dictionaries(NAMES, VALUES, max_size=6))
def test_properties_are_read_back_in_order(properties: dict[str, str]) -> None:
    """Also without the last separator."""
    raw = encode_properties(properties)

    assert list(decode_properties(raw).items()) == list(properties.items())
    assert decode_properties(raw.removesuffix(b"\x02")) == properties


@given(parts=RAW, name=st.sampled_from(["K", "KE", "KEK", "TAGS"]))
def test_one_property_is_what_the_map_has_under_its_name(parts: list[bytes], name: str) -> None:
    """No bytes raise an error."""
    raw = b"".join(parts)
    value = get_property(raw, name.encode())

    assert (None if value is None else value.decode()) == decode_properties(raw).get(name)
    assert tags_code(raw) == java_string_hash(decode_properties(raw).get("TAGS", ""))
    assert tags_codes([raw, b"TAGS\x01t\x02", raw]) == [tags_code(raw), 116, tags_code(raw)]


SEGMENTS = st.lists(
    st.sampled_from([b"K\x01v\x02", b"TAGS\x01A\x02", b"TAGS\x01B", b"\x02", b"TAGS\x01", b"\x01"]),
    max_size=6,
)


@given(many=st.lists(st.one_of(RAW, SEGMENTS), min_size=2, max_size=9))
def test_the_codes_of_many_are_those_of_each(many: list[list[bytes]]) -> None:
    """Independent of earlier calls, and of the bytes around them in a chunk."""
    codes = TagsCodeCache()
    for raw in map(b"".join, many):
        chunk = b"\x02TAGS\x01A\x02" + raw + b"\x02TAGS\x01B\x02"
        assert codes.code_at(chunk, 8, 8 + len(raw)) == tags_code(raw)


@given(parts=RAW, name=st.sampled_from(["K", "KE", "KEK", "TAGS"]))
def test_what_is_taken_out_is_gone_and_nothing_else(parts: list[bytes], name: str) -> None:
    """No bytes raise an error."""
    raw = b"".join(parts)
    expected = decode_properties(raw)
    expected.pop(name, None)

    assert decode_properties(without_properties(raw, [name])) == expected


@given(units=st.lists(UNITS, max_size=6))
def test_units_of_a_batch_are_read_back(units: list[BatchUnit]) -> None:
    """In order, with the same bodies and properties."""
    assert decode_batch(encode_batch(units)) == units


@given(units=st.lists(UNITS, min_size=1, max_size=3), data=st.data())
def test_a_damaged_batch_is_refused_or_read_to_its_end(
    units: list[BatchUnit], data: st.DataObject
) -> None:
    """Bytes from the network give ValueError or units that share no byte."""
    batch = bytearray(encode_batch(units))
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(0, len(batch) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode_batch(bytes(batch[: data.draw(st.integers(0, len(batch)))]))
    except ValueError:
        return

    assert len(encode_batch(again)) <= len(batch)


@given(text=st.text(max_size=200))
def test_the_string_hash_is_javas(text: str) -> None:
    """Over UTF-16 units, wrapping at 32 bits."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF

    assert java_string_hash(text) == (value ^ 0x8000_0000) - 0x8000_0000


# Of "T#" and this key the hash is -2**31, of which Java has no absolute value.
SMALLEST = "7F00000100002A139A551B0002G8A9=I"
KEYS = st.one_of(
    st.text("0123456789ABCDEFabcdef", min_size=32, max_size=32),
    st.text(st.characters(exclude_characters="\x01\x02 ", codec="utf-8"), min_size=1, max_size=20),
)
KEY_BYTES = st.one_of(  # as from the network, including surrogates
    KEYS.map(str.encode),
    st.text(st.characters(exclude_characters="\x01\x02 ")).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    ),
    st.binary(max_size=40).map(lambda raw: raw.translate(None, b"\x01\x02 ")),
)


@given(st.lists(st.tuples(st.text("ab中", max_size=3), KEY_BYTES)))
@example([("T", SMALLEST.encode())])
@example([("T", b"k" * 32_767), ("T", "\U0001f600".encode() * 8_000), ("中", b"k" * 32_767)])
@example([(f"t{number % 7}", b"%d" % 7 ** (number % 40)) for number in range(5_000)])
def test_keys_hashed_together_have_the_hashes_of_each(pairs: list[tuple[str, bytes]]) -> None:
    """Any number of keys of any length, hashed over UTF-16 units as in Java."""
    texts = [f"{topic}#".encode() + key for topic, key in pairs]

    hashes = index_key_hashes(texts)

    assert hashes.dtype == np.int32
    expected = [
        index_key_hash(index_key(topic, key.decode(errors="replace"))) for topic, key in pairs
    ]
    assert hashes.tolist() == expected


@given(
    unique_key=st.one_of(st.just(""), KEYS),
    keys=st.lists(KEYS, max_size=3),
    repeated=st.booleans(),
    data=st.data(),
)
def test_the_keys_of_a_record_are_found_wherever_they_stand(
    unique_key: str, keys: list[str], repeated: bool, data: st.DataObject
) -> None:
    """The last of equal names counts unless it is empty; other names with the same end do not."""
    parts = [
        f"UNIQ_KEY\x01{unique_key}\x02",
        f"KEYS\x01 {'  '.join(keys)}\x02" if keys else "KEYS\x01\x02",
        "MY_UNIQ_KEY\x01no\x02",
        "MY_KEYS\x01no\x02",
        "A\x01KEYS\x01no\x02",
        "WAIT\x01true\x02",
    ]
    text = "".join(data.draw(st.permutations(parts)))
    if repeated:
        text = f"KEYS\x01old\x02UNIQ_KEY\x01old\x02{text}"
    old = ["old"] if repeated else []
    named = ([unique_key] if unique_key else old) + (keys or old)
    properties = text.encode()
    if data.draw(st.booleans()):
        properties = properties.removesuffix(b"\x02")

    assert [key.decode() for key in index_keys(properties)] == named


@given(
    begin=st.integers(-1, 10**13),
    times=st.lists(st.integers(0, 10**13), min_size=1, max_size=20),
)
def test_the_seconds_of_items_are_clamped(begin: int, times: list[int]) -> None:
    """Neither negative nor more than an int32; without a begin they are 0."""
    expected = [
        min(max((time - begin) // 1000, 0), 2**31 - 1) if begin > 0 else 0 for time in times
    ]

    assert seconds_after(begin, np.array(times)).tolist() == expected


@given(
    address=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)),
    offsets=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
)
def test_ids_of_a_batch_are_those_of_its_messages(address: object, offsets: list[int]) -> None:
    host = pack_host(str(address), 10_911)

    together = offset_message_ids(host, offsets)

    assert together.split(",") == [offset_message_id(host, offset) for offset in offsets]


@given(
    address=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)),
    port=st.integers(0, 65535),
    physical_offset=st.integers(0, 2**63 - 1),
)
def test_an_offset_message_id_is_read_back(
    address: object, port: int, physical_offset: int
) -> None:
    host = pack_host(str(address), port)
    message_id = offset_message_id(host, physical_offset)

    assert pack_host(*unpack_host(host)) == host
    assert message_id == message_id.upper()
    assert parse_offset_message_id(message_id) == OffsetMessageId(host, physical_offset)
