"""Batches: each unit is read like a single message."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from halfmq.broker.handlers.messages.batch_units import read_units
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.properties import tags_code, without_properties

WAIT = b"WAIT\x01true\x02"
SUFFIX = b"CLUSTER\x01c\x02"
DROPPED = ("TRANSACTION_HALF_ID", "TRANSACTION_PARKED", "__CRC32#")

properties = st.lists(
    st.sampled_from(
        [
            b"UNIQ_KEY\x01" + b"0" * 32,
            b"UNIQ_KEY\x01" + b"1" * 32,
            b"UNIQ_KEY\x01short",
            b"UNIQ_KEY\x01",
            b"MY_UNIQ_KEY\x01" + b"2" * 32,
            b"KEYS\x01a b",
            b"TAGS\x01x",
            b"TAGS\x01y",
            b"WAIT\x01false",
            b"TRAN_MSG\x01false",
            b"DELAY\x010",
            b"MY_TIMER_DELAY_MS\x011",
            b"TRANSACTION_HALF_ID\x01forged",
            b"TRANSACTION_PARKED\x01forged",
            b"__CRC32#\x010123456789",
            b"",
        ]
    ),
    max_size=4,
).map(b"\x02".join)
units = st.lists(
    st.builds(
        BatchUnit,
        flag=st.integers(0, 3),
        body=st.binary(max_size=3),
        properties=st.one_of(properties, properties.map(lambda raw: raw + b"\x02")),
    ),
    max_size=6,
)


KEYED = b"UNIQ_KEY\x01%b\x02TAGS\x01t\x02"


def plain(*all_properties: bytes) -> list[BatchUnit]:
    """Return units with these properties."""
    return [BatchUnit(0, b"b", one) for one in all_properties]


@given(units, st.sampled_from([SUFFIX, b"TAGS\x01of-the-batch\x02" + SUFFIX]))
@example(plain(KEYED % (b"a" * 32), KEYED % (b"b" * 10 + b"\x02" + b"c" * 21)), SUFFIX)
@example(plain(KEYED % (b"a" * 32) + b"KEYS\x01k", KEYED % (b"b" * 32) + b"KEYS\x01k"), SUFFIX)
@example(plain(KEYED % ("é" * 16).encode(), KEYED % ("ü" * 16).encode()), SUFFIX)
@example(
    plain(b"TAGS\x01x\x02" + KEYED % (b"a" * 32), b"TAGS\x01y\x02" + KEYED % (b"b" * 32)), SUFFIX
)
def test_units_mean_the_same_together_as_each_alone(batch: list[BatchUnit], suffix: bytes) -> None:
    """Stored properties and tag codes do not depend on the units before.

    Without what only the broker sets, and otherwise as they were sent.
    """
    read = read_units(encode_batch(batch), missing_wait=WAIT, suffix=suffix)

    assert list(zip(read.flags, read.bodies, strict=True)) == [unit[:2] for unit in batch]
    for unit, stored, code in zip(batch, read.properties, read.tags_codes, strict=True):
        raw = unit.properties
        if b"TRANSACTION_" in raw or b"__CRC32#" in raw:
            raw = without_properties(raw, DROPPED)
        closing = b"" if not raw or raw.endswith(b"\x02") else b"\x02"
        assert stored == raw + closing + (b"" if b"WAIT\x01" in raw else WAIT) + suffix
        assert code == tags_code(stored)


@pytest.mark.parametrize(
    ("at", "length"),
    [(16, -1), (16, -(2**31)), (16, 2**31 - 1), (16, 3)],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_body_of_impossible_length_is_refused(at: int, length: int, count: int) -> None:
    """Bytes from the network raise no other error."""
    batch = bytearray(encode_batch([BatchUnit(0, b"b", KEYED % (b"a" * 32))] * count))
    batch[at : at + 4] = length.to_bytes(4, "big", signed=True)

    with pytest.raises(ValueError, match="batch unit at byte"):
        read_units(bytes(batch), missing_wait=WAIT, suffix=SUFFIX)


@pytest.mark.parametrize("length", [-1, -22, -23, -(2**15), 2**15 - 1])
def test_properties_of_impossible_length_are_refused(length: int) -> None:
    """Also if its length gives a unit without any bytes."""
    batch = bytearray(encode_batch([BatchUnit(0, b"b", b"P\x01v\x02")]))
    batch[21:23] = length.to_bytes(2, "big", signed=True)

    with pytest.raises(ValueError, match="batch unit at byte 0"):
        read_units(bytes(batch), missing_wait=WAIT, suffix=SUFFIX)
