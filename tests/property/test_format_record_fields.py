"""The table of a record's fields agrees with the files of released RocketMQ brokers."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.store.format.flags import HOSTS_MASK
from halfmq.store.format.ids import pack_host
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
