"""Properties, batches and hashes against the plainest way to say what they mean."""

from array import array
from itertools import accumulate, chain

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
    KeyHasher,
    SingleKeys,
    UniqueKeys,
    hashed_keys,
    index_key,
    index_key_hash,
    index_keys,
    joined_if_usual,
    seconds_after,
    seconds_column,
)
from halfmq.store.format.properties import (
    TagsCodes,
    decode_properties,
    encode_properties,
    get_property,
    tags_code,
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
    """Without its last separator, too."""
    raw = encode_properties(properties)

    assert list(decode_properties(raw).items()) == list(properties.items())
    assert decode_properties(raw.removesuffix(b"\x02")) == properties


@given(parts=RAW, name=st.sampled_from(["K", "KE", "KEK", "TAGS"]))
def test_one_property_is_what_the_map_has_under_its_name(parts: list[bytes], name: str) -> None:
    """Whatever the bytes are."""
    raw = b"".join(parts)
    value = get_property(raw, name.encode())

    assert (None if value is None else value.decode()) == decode_properties(raw).get(name)
    assert tags_code(raw) == java_string_hash(decode_properties(raw).get("TAGS", ""))


SEGMENTS = st.lists(
    st.sampled_from([b"K\x01v\x02", b"TAGS\x01A\x02", b"TAGS\x01B", b"\x02", b"TAGS\x01", b"\x01"]),
    max_size=6,
)


@given(many=st.lists(st.one_of(RAW, SEGMENTS), min_size=2, max_size=9))
def test_the_codes_of_many_are_those_of_each(many: list[list[bytes]]) -> None:
    """Whatever came before, and whatever stands around them in a chunk."""
    codes = TagsCodes()
    for raw in map(b"".join, many):
        chunk = b"\x02TAGS\x01A\x02" + raw + b"\x02TAGS\x01B\x02"
        assert codes.code_at(chunk, 8, 8 + len(raw)) == tags_code(raw)


@given(parts=RAW, name=st.sampled_from(["K", "KE", "KEK", "TAGS"]))
def test_what_is_taken_out_is_gone_and_nothing_else(parts: list[bytes], name: str) -> None:
    """Whatever the bytes are."""
    raw = b"".join(parts)
    expected = decode_properties(raw)
    expected.pop(name, None)

    assert decode_properties(without_properties(raw, [name])) == expected


@given(units=st.lists(UNITS, max_size=6))
def test_units_of_a_batch_are_read_back(units: list[BatchUnit]) -> None:
    """In order, with bodies and properties as they were."""
    assert decode_batch(encode_batch(units)) == units


@given(units=st.lists(UNITS, min_size=1, max_size=3), data=st.data())
def test_a_damaged_batch_is_refused_or_read_to_its_end(
    units: list[BatchUnit], data: st.DataObject
) -> None:
    """It comes from the network; nothing but ValueError may come out, and no byte twice."""
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


HEX = st.text("0123456789ABCDEFabcdef", min_size=32, max_size=32)
KEYS = st.one_of(
    HEX,
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=30, max_size=34),
    st.text(st.characters(exclude_characters="\x01\x02 ", codec="utf-8"), min_size=1, max_size=20),
)


# Of "T#" and this key the hash is -2**31, of which Java has no absolute value.
SMALLEST = "7F00000100002A139A551B0002G8A9=I"


@given(
    topic=st.text("ab中", max_size=3),
    unique_keys=st.lists(KEYS, min_size=1, max_size=3),
    keys=st.lists(KEYS, max_size=2),
    first=st.booleans(),
    terminated=st.booleans(),
)
@example(topic="T", unique_keys=[SMALLEST], keys=[SMALLEST], first=True, terminated=True)
@example(topic="T", unique_keys=["0" * 30 + "é"], keys=[], first=False, terminated=True)
def test_the_hasher_that_remembers_hashes_like_the_one_that_does_not(
    topic: str, unique_keys: list[str], keys: list[str], first: bool, terminated: bool
) -> None:
    """For every key of a record, however its properties stand."""
    hasher = KeyHasher()
    for unique_key in unique_keys:
        pairs = {"WAIT": "true", "MY_UNIQ_KEY": "n" * 32, "KEYS": " ".join(keys)}
        named = {"UNIQ_KEY": unique_key}
        properties = encode_properties(named | pairs if first else pairs | named)
        if not terminated:
            properties = properties.removesuffix(b"\x02")
        expected = [index_key_hash(index_key(topic, key)) for key in (unique_key, *keys)]

        hashed = hasher.hash_records([(topic, properties, 7, 8, 0)], after=6)
        assert hashed == hashed_keys(expected, [7] * len(expected), [8] * len(expected))
        assert [key.decode() for key in index_keys(properties)] == [unique_key, *keys]


CLIENTS = ("7F00000100002A139A551B00", "7F00000100002A139A551B01", "0" * 24)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "bc", "中"]),
            st.lists(
                st.one_of(
                    st.text(st.characters(max_codepoint=127), min_size=32, max_size=32),
                    st.builds(
                        str.__add__,
                        st.sampled_from(CLIENTS),
                        st.text("0123456789ABCDEF", min_size=8, max_size=8),
                    ),
                ),
                min_size=1,
                max_size=5,
            ),
            st.integers(0, 2**40),
        ),
        max_size=5,
    )
)
@example([("a", ["0" * 24 + f"{number:08X}" for number in range(1500)], 1)])
@example([("T", [SMALLEST], 1), ("T", ["0" * 32, SMALLEST], 2)])
def test_unique_keys_are_hashed_together_as_one_by_one(
    groups: list[tuple[str, list[str], int]],
) -> None:
    """Of one client or several, of several topics, more than fit into one number."""
    ends = accumulate(len(keys) for _, keys, _ in groups)
    offsets = [
        list(range(end - len(keys), end)) for end, (_, keys, _) in zip(ends, groups, strict=True)
    ]
    joined = [
        UniqueKeys(topic, "".join(keys).encode(), array("q", places), time)
        for (topic, keys, time), places in zip(groups, offsets, strict=True)
    ]

    hashed = KeyHasher().hash_unique_keys(joined)

    times = [time for _, keys, time in groups for _ in keys]
    one_by_one = hashed_keys(
        [index_key_hash(index_key(topic, key)) for topic, keys, _ in groups for key in keys],
        chain.from_iterable(offsets),
        times,
    )
    assert hashed == one_by_one
    singles = SingleKeys(
        [topic for topic, keys, _ in groups for _ in keys],
        "".join(key for _, keys, _ in groups for key in keys).encode(),
        [*chain.from_iterable(offsets)],
        times,
    )
    assert KeyHasher().hash_single_keys(singles) == one_by_one


@given(
    begin=st.integers(-1, 10**13),
    times=st.lists(st.integers(0, 10**13), min_size=1, max_size=20),
    span=st.integers(0, 20),
)
def test_the_seconds_of_items_are_those_of_each(begin: int, times: list[int], span: int) -> None:
    """Of all keys or of a part of them, whose bounds are those of the whole."""
    keys = hashed_keys([0] * len(times), range(len(times)), times).part(0, span)

    assert [*seconds_column(begin, keys)] == [seconds_after(begin, time) for time in times[:span]]


@given(st.lists(KEYS.map(str.encode)))
@example([b"0" * 31, b"0" * 33])
@example(["é".encode() + b"0" * 30])
def test_keys_are_joined_if_all_have_32_ascii_characters(keys: list[bytes]) -> None:
    """As those of clients with IPv4 addresses have."""
    joined = joined_if_usual(keys)

    usual = all(len(key) == 32 and key.isascii() for key in keys)
    assert joined == (b"".join(keys) if usual else None)


@given(
    address=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)),
    offsets=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
)
def test_ids_of_a_batch_are_those_of_its_messages(address: object, offsets: list[int]) -> None:
    """With commas between them."""
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
    """Host and offset, for both address families."""
    host = pack_host(str(address), port)
    message_id = offset_message_id(host, physical_offset)

    assert pack_host(*unpack_host(host)) == host
    assert message_id == message_id.upper()
    assert parse_offset_message_id(message_id) == OffsetMessageId(host, physical_offset)
