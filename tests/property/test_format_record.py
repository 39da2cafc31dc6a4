"""Records and their fields: what is read is what was written, here and by RocketMQ brokers."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.flags import HOSTS_MASK
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import (
    HEADS,
    MAGIC_V2,
    Record,
    crc_tail_matches,
    decode_record,
    decode_records,
    encode_record,
    new_record,
    properties_at,
    seal_crc_tail,
    with_crc_tail,
    without_crc_tail,
)
from halfmq.store.format.record_fields import (
    FIELDS,
    HOST_BITS_AT,
    HOST_MIXES,
    LAYOUTS,
    PROPERTIES_LENGTH,
    TOPIC_LENGTH_V1,
    TOPIC_LENGTH_V2,
    struct_of,
)
from tests.support.golden_store import unpack
from tests.support.seeds import EXAMPLES

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
HOSTS = st.one_of(st.binary(min_size=8, max_size=8), st.binary(min_size=20, max_size=20))
TOPICS = st.one_of(
    st.text(max_size=20),
    st.text("%|-_aZ9", min_size=120, max_size=140),
    st.just("%RETRY%" + "g" * 248),
)
# The bits for the hosts follow from the hosts.
FLAGS = INT32.map(lambda flags: flags & ~HOSTS_MASK)

records = st.builds(
    new_record,
    topic=TOPICS.filter(lambda topic: len(topic.encode()) < 128 or len(topic) > 127),
    queue_id=INT32,
    body=st.binary(max_size=60),
    properties=st.binary(max_size=60),
    born_timestamp=INT64,
    born_host=HOSTS,
    store_timestamp=INT64,
    store_host=HOSTS,
    queue_offset=INT64,
    physical_offset=INT64,
    flag=INT32,
    sys_flag=FLAGS,
    reconsume_times=INT32,
    prepared_transaction_offset=INT64,
)


@given(record=records, before=st.binary(max_size=20), behind=st.binary(max_size=20))
def test_what_is_written_is_read_back(record: Record, before: bytes, behind: bytes) -> None:
    """In every version, with every mix of hosts, every value, at every position."""
    encoded = encode_record(record)

    assert len(encoded) == record.total_size
    assert decode_record(before + encoded + behind, len(before)) == record
    sizes = properties_at(before + encoded + behind, len(before))
    assert sizes == (record.total_size, record.queue_offset, record.properties)


@given(record=records, position=st.integers(0, 200), value=st.integers(0, 255))
def test_properties_are_found_within_the_record_or_not_at_all(
    record: Record, position: int, value: int
) -> None:
    """With any wrong byte, a filter gets no bytes of another record and no other error."""
    encoded = bytearray(encode_record(record))
    encoded[position % len(encoded)] = value
    try:
        size, _, properties = properties_at(bytes(encoded) + b"more", 0)
    except CorruptRecordError:
        return
    assert len(properties) < size <= len(encoded) + len(b"more")
    assert bytes(encoded)[:size].endswith(properties) or size > len(encoded)


@given(several=st.lists(records, max_size=5))
def test_records_in_a_row_are_read_back(several: list[Record]) -> None:
    """As in the answer to a pull."""
    assert decode_records(b"".join(map(encode_record, several))) == several


@given(record=records)
def test_the_crc_tail_matches_what_it_was_made_for(record: Record) -> None:
    """The properties before it stay the same."""
    tailed = record._replace(properties=with_crc_tail(record.properties))
    sealed = seal_crc_tail(encode_record(tailed))
    again = decode_record(sealed)

    assert crc_tail_matches(sealed) is True
    assert without_crc_tail(again.properties).startswith(without_crc_tail(record.properties))
    assert again._replace(properties=tailed.properties) == tailed._replace(
        total_size=again.total_size
    )


@given(record=records, data=st.data())
def test_a_flipped_bit_is_found_or_stays_in_its_field(record: Record, data: st.DataObject) -> None:
    """Body and length are never wrong, and at most one field differs."""
    encoded = bytearray(encode_record(record))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    try:
        damaged = decode_record(encoded)
    except CorruptRecordError:
        return

    assert encode_record(damaged) == encoded
    assert damaged.total_size == record.total_size
    if (damaged.sys_flag ^ record.sys_flag) & HOSTS_MASK:
        return  # all fields after the hosts moved, and by chance they are valid
    assert damaged.body == record.body
    differing = [name for name in Record._fields if getattr(damaged, name) != getattr(record, name)]
    assert len(differing) == 1
    assert not {"total_size", "magic", "body_crc", "body"} & set(differing)


@given(record=records, data=st.data())
def test_the_crc_tail_finds_every_flipped_bit(record: Record, data: st.DataObject) -> None:
    """In any field; the CRC of the body covers the body alone."""
    sealed = bytearray(
        seal_crc_tail(encode_record(record._replace(properties=with_crc_tail(record.properties))))
    )
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8

    assert crc_tail_matches(sealed) is not True


@given(record=records, cut=st.integers(0, 400))
def test_a_cut_record_is_refused(record: Record, cut: int) -> None:
    """The record may end at any byte."""
    encoded = encode_record(record)
    try:
        decode_record(encoded[: min(cut, len(encoded) - 1)])
    except CorruptRecordError:
        return
    raise AssertionError("half a record was taken for a whole one")


@settings(max_examples=3 * EXAMPLES)
@given(
    head=st.sampled_from(sorted(HEADS)),
    magic=st.sampled_from([0xDAA320A7, MAGIC_V2, 0xCBD43194, 0]),
    noise=st.binary(max_size=300),
    size=st.integers(-5, 320),
    check_crc=st.booleans(),
)
def test_noise_is_refused_or_read_but_never_anything_else(
    head: int, magic: int, noise: bytes, size: int, check_crc: bool
) -> None:
    """After a crash there are old and random bytes after the end of the log."""
    buffer = bytearray(noise)
    buffer[0:8] = size.to_bytes(4, "big", signed=True) + magic.to_bytes(4, "big")
    if len(buffer) >= 40:
        buffer[36:40] = head.to_bytes(4, "big")
    try:
        record = decode_record(buffer, check_crc=check_crc)
    except CorruptRecordError:
        return

    assert record.total_size == size


STORES: Final = ("ipv6", "plain-clean", "tx-midway-clean", "v4-tx")  # versions, hosts, releases
MAGICS: Final = {1: 0xDAA320A7, 2: 0xDAA320AB}

Reported = dict[str, Any]  # a message as RocketMQ's client decoded it


@cache
def messages() -> list[tuple[bytes, Reported]]:
    """Yield the bytes of each message in the files, with what RocketMQ's client decoded."""
    found: list[tuple[bytes, Reported]] = []
    for name in STORES:
        with TemporaryDirectory() as directory:
            store = unpack(name, Path(directory))
            files = dict(store.segments())
            for message in store.messages:
                start = message["commitLogOffset"]
                base = start - start % store.commit_log_file_size
                end = start - base + message["storeSize"]
                found.append((files[base][start - base : end], message))
    return found


def reported_fields(message: Reported) -> Reported:
    """Return the fields of the head of this message, in the form in which they are read."""
    return {
        "total_size": message["storeSize"],
        "magic": MAGICS[message["version"]],
        "body_crc": message["bodyCRC"],
        "queue_id": message["queueId"],
        "flag": message["flag"],
        "queue_offset": message["queueOffset"],
        "physical_offset": message["commitLogOffset"],
        "sys_flag": message["sysFlag"],
        "born_timestamp": message["bornTimestamp"],
        "born_host": packed(message["bornHost"]),
        "store_timestamp": message["storeTimestamp"],
        "store_host": packed(message["storeHost"]),
        "reconsume_times": message["reconsumeTimes"],
        "prepared_transaction_offset": message["preparedTransactionOffset"],
        "body_size": len(message["body"]) // 4 * 3 - message["body"][-2:].count("="),  # base64
    }


def packed(host: str) -> bytes:
    address, _, port = host.partition("|")
    return pack_host(address, int(port))


def test_the_stores_hold_every_layout() -> None:
    """So the tests below cover all of them."""
    found = messages()

    assert {message["version"] for _, message in found} == {1, 2}
    assert {message["sysFlag"] & HOSTS_MASK for _, message in found} == set(HOST_MIXES)


@given(data=st.data(), names=st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
def test_any_fields_are_read_as_rocketmq_reported_them(
    data: st.DataObject, names: set[str]
) -> None:
    """Any selection of fields, at any position of the record."""
    record, message = data.draw(st.sampled_from(messages()))
    before = data.draw(st.binary(max_size=9))
    hosts = record[HOST_BITS_AT] & HOSTS_MASK
    in_order = [name for name in FIELDS if name in names]
    expected = reported_fields(message)

    read = struct_of(*in_order, hosts=hosts).unpack_from(before + record, len(before))

    assert read == tuple(expected[name] for name in in_order)


def test_every_field_of_every_record_is_read_through_numpy() -> None:
    """In order, with the types of the table."""
    for record, message in messages():
        fields = LAYOUTS[message["sysFlag"] & HOSTS_MASK].values()
        kind = np.dtype([(field.name, field.dtype) for field in fields])
        head = np.frombuffer(record, kind, 1)[0]

        for name, expected in reported_fields(message).items():
            value = head[name]
            assert (value.tobytes() if isinstance(expected, bytes) else int(value)) == expected


def test_topic_and_properties_stand_after_the_body() -> None:
    """Each follows its length, up to the end of the record."""
    for record, message in messages():
        reported = reported_fields(message)
        head_size = LAYOUTS[message["sysFlag"] & HOSTS_MASK]["body_size"].end
        length = {1: TOPIC_LENGTH_V1, 2: TOPIC_LENGTH_V2}[message["version"]]
        at = head_size + reported["body_size"]
        topic_at = at + length.size
        topic_end = topic_at + length.unpack_from(record, at)[0]
        (properties_size,) = PROPERTIES_LENGTH.unpack_from(record, topic_end)

        assert record[topic_at:topic_end].decode() == message["topic"]
        assert topic_end + PROPERTIES_LENGTH.size + properties_size == len(record)


def test_fields_out_of_order_are_refused() -> None:
    """A struct reads forward only."""
    with pytest.raises(ValueError, match="magic"):
        struct_of("sys_flag", "magic")
