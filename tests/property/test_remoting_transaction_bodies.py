"""Bodies of halfmq's own requests survive encoding; any other bytes are a BodyError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.remoting.codes import INT64_MAX, INT64_MIN
from halfmq.remoting.errors import BodyError
from halfmq.remoting.own_requests import (
    ENDS_MAX,
    GROUP_MESSAGES_MAX,
    TRANSACTIONS_MAX,
    EndEntry,
    EndResult,
    PreparedMessage,
    PreparedResult,
    TransactionEnd,
    TransactionInfo,
    decode_end_results,
    decode_ends,
    decode_prepared_messages,
    decode_prepared_results,
    decode_transactions,
    encode_entries,
)
from tests.support.frames import BODIES, INT32, TEXTS

INT64 = st.integers(min_value=INT64_MIN, max_value=INT64_MAX)

ENDS = st.builds(TransactionEnd, INT64, INT64, INT32, TEXTS, st.booleans())
END_RESULTS = st.builds(EndResult, INT32, st.none() | TEXTS, st.none() | TEXTS)
MESSAGES = st.builds(PreparedMessage, TEXTS, INT32, INT32, INT32, INT64, TEXTS, BODIES)
RESULTS = st.builds(PreparedResult, INT32, INT64, TEXTS)
INFOS = st.builds(
    TransactionInfo,
    *[INT64, INT64, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, INT64, INT64],
    st.none() | TEXTS,
    *[INT32, INT32, INT32],
    st.none() | INT64,
    st.none() | TEXTS,
    INT32,
)

Decode = Callable[[bytes], Sequence[EndEntry]]

BODIES_OF_OURS: list[tuple[Decode, st.SearchStrategy[Any], int, int]] = [
    (decode_ends, ENDS, 0, ENDS_MAX),
    (decode_end_results, END_RESULTS, 0, ENDS_MAX),
    (decode_prepared_messages, MESSAGES, 1, GROUP_MESSAGES_MAX),
    (decode_prepared_results, RESULTS, 1, GROUP_MESSAGES_MAX),
    (decode_transactions, INFOS, 0, TRANSACTIONS_MAX),
]
every_body = pytest.mark.parametrize(("decode", "entry", "least", "most"), BODIES_OF_OURS)


@every_body
@given(data=st.data())
def test_what_went_in_comes_out(
    decode: Decode, entry: st.SearchStrategy[EndEntry], least: int, most: int, data: st.DataObject
) -> None:
    """Broker and client have the same entries in the same order."""
    entries = data.draw(st.lists(entry, min_size=least, max_size=5))

    assert decode(encode_entries(entries)) == entries


@every_body
@given(garbage=st.binary(max_size=200))
def test_garbage_is_a_body_error(
    decode: Decode, entry: object, least: int, most: int, garbage: bytes
) -> None:
    """No bytes of a peer raise any other error."""
    with suppress(BodyError):
        decode(garbage)


@every_body
@given(data=st.data())
def test_a_damaged_body_is_a_body_error_or_other_entries(
    decode: Decode, entry: st.SearchStrategy[EndEntry], least: int, most: int, data: st.DataObject
) -> None:
    """Bytes that are nearly valid are the likeliest to be accepted."""
    body = bytearray(encode_entries(data.draw(st.lists(entry, min_size=1, max_size=3))))
    at = data.draw(st.integers(min_value=0, max_value=len(body) - 1))
    body[at] = data.draw(st.integers(min_value=0, max_value=255))
    del body[data.draw(st.integers(min_value=1, max_value=len(body))) :]
    with suppress(BodyError):
        decode(bytes(body))


@every_body
@given(data=st.data())
def test_more_entries_than_allowed_are_refused(
    decode: Decode, entry: st.SearchStrategy[EndEntry], least: int, most: int, data: st.DataObject
) -> None:
    """The limit is exact, and is checked before entries are built."""
    one = data.draw(entry)

    assert len(decode(encode_entries([one] * most))) == most
    with pytest.raises(BodyError):
        decode(encode_entries([one] * (most + 1)))
    with pytest.raises(BodyError):
        decode(b"\xdd\xff\xff\xff\xff")  # an array of 2^32 - 1 entries
    if least:
        with pytest.raises(BodyError):
            decode(encode_entries([]))


def test_deep_nesting_is_a_body_error() -> None:
    """An unknown field is skipped without recursion."""
    nested = b"\x91" * 100_000

    with pytest.raises(BodyError):
        decode_ends(b"\x91\x96\x01\x02\x08\xa0\xc2" + nested)


def test_numbers_beyond_java_are_a_body_error() -> None:
    """Records and files have fixed widths for offsets and codes."""
    for end in ([1 << 63, 0, 8], [0, 1 << 63, 8], [0, 0, 1 << 31]):
        with pytest.raises(BodyError):
            decode_ends(msgspec.msgpack.encode([end]))


def test_entries_may_be_longer_or_shorter_than_the_class() -> None:
    """A newer peer may send more fields, an older one fewer."""
    newer = msgspec.msgpack.encode([[1, 2, 8, "id", True, "a new field"]])
    older = msgspec.msgpack.encode([[1, 2, 8]])

    assert decode_ends(newer) == [TransactionEnd(1, 2, 8, "id", from_check=True)]
    assert decode_ends(older) == [TransactionEnd(1, 2, 8)]
