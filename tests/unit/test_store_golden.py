"""Stores written by released RocketMQ brokers open completely, and go on."""

import zlib
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import Record
from halfmq.store.message_store import MessageStore
from tests.support.golden_store import GoldenStore, unpack
from tests.support.stores import (
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    everything,
    golden_config,
)

STATES = (
    "plain-clean",
    "plain-killed",
    "plain-torn",
    "plain-cq-none",
    "plain-cq-ahead",
    "plain-cq-short",
    "clean-cq-short",
    "stale-cq",
    "tx-midway-clean",
    "tx-midway-killed",
    "v4-tx",
    "ipv6",
    "propcrc",
    "retention",
    "delay-retry-dlq",
)
NOW = 1_800_000_000_000  # ms; younger than all golden stores


def open_golden(golden: GoldenStore) -> MessageStore:
    store = MessageStore(golden_config(golden), now_ms=Clock(NOW))
    store.open()
    return store


def promised_bounds(truth: dict[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return minimum and maximum of each queue, from whichever key says it best."""
    queues = truth.get("complete_recovery", truth)["queues"]
    return {
        (topic, int(queue_id)): (ends["min"], ends["max"]) if isinstance(ends, dict) else ends
        for topic, by_id in queues.items()
        for queue_id, ends in by_id.items()
    }


def promised_end(truth: dict[str, Any]) -> int:
    best = truth.get("complete_recovery") or truth["runtime"]
    return int(best["commitLogMaxOffset"])


def identity(record: Record) -> tuple[str, int, int, int, str]:
    return (
        record.topic,
        record.queue_id,
        record.queue_offset,
        record.physical_offset,
        record.msg_id,
    )


def expected_identity(message: dict[str, Any]) -> tuple[str, int, int, int, str]:
    return (
        message["topic"],
        message["queueId"],
        message["queueOffset"],
        message["commitLogOffset"],
        message["msgId"],
    )


@pytest.mark.parametrize("name", STATES)
def test_a_store_of_rocketmq_opens_with_every_message(name: str, tmp_path: Path) -> None:
    """Offsets and messages are those that a recovery without losses gives, byte for byte."""
    golden = unpack(name, tmp_path)
    store = open_golden(golden)

    served = everything(store)

    assert store.write_offset == promised_end(golden.truth)
    assert bounds(store) == {
        key: tuple(value) for key, value in promised_bounds(golden.truth).items()
    }
    assert [identity(record) for record in served] == [
        expected_identity(message) for message in golden.messages
    ]
    for message in golden.messages:
        encoded = store.record_bytes(message["commitLogOffset"])
        assert encoded is not None
        assert zlib.crc32(encoded) == message["recordCrc32"]
    store.close()


@pytest.mark.parametrize("name", STATES)
def test_a_store_of_rocketmq_goes_on(name: str, tmp_path: Path) -> None:
    """Queue offsets continue, and stops of either kind lose none of the old or new messages."""
    golden = unpack(name, tmp_path)
    store = open_golden(golden)
    before = everything(store)
    ends = {key: end for key, (_, end) in bounds(store).items()}
    for turn in range(3):
        group = [draft(*key, body=b"%d" % turn * 500) for key in ends]
        appended = append_durably(store, *group)
        for (key, end), done in zip(ends.items(), appended, strict=True):
            assert done.queue_offset == end
            ends[key] += 1
        before = [*before, *(store.record_at(done.physical_offset) for done in appended)]  # type: ignore[list-item]
        root = crash(golden.root, tmp_path / f"crash-{turn}") if turn == 1 else golden.root
        store.close()
        golden = GoldenStore(golden.name, root, golden.truth)
        store = open_golden(golden)
        assert everything(store) == before
        assert {key: end for key, (_, end) in bounds(store).items()} == ends
    store.close()


@pytest.mark.parametrize("name", [name for name in STATES if name != "v4-tx"])
def test_searches_by_time_answer_as_rocketmq_did(name: str, tmp_path: Path) -> None:
    """For both boundaries, on, between and around all store times that were asked."""
    golden = unpack(name, tmp_path)
    queries = golden.truth.get("timeQueries", ())
    store = open_golden(golden)

    for query in queries:
        key = query["topic"], query["queueId"]
        at = query["timestamp"]
        found = store.offset_by_time(*key, at), store.offset_by_time(*key, at, upper=True)
        assert found == (query["lower"], query["upper"]), query
    store.close()


@pytest.mark.parametrize("name", STATES)
def test_searches_by_key_find_what_rocketmq_found(name: str, tmp_path: Path) -> None:
    """After an ordered stop exactly that; after a kill nothing that is in the log is missing."""
    golden = unpack(name, tmp_path)
    store = open_golden(golden)

    for query in golden.truth.get("keyQueries", ()):
        hits = store.query_index(
            query["topic"], query["key"], query["maxNum"], query["begin"], query["end"]
        )
        assert hits == query["hits"], query
    messages = {message["commitLogOffset"]: message for message in golden.messages}
    for offset, message in list(messages.items())[-20:]:
        unique = message["properties"].get("UNIQ_KEY")
        if unique is not None:
            assert offset in store.query_index(message["topic"], unique, 64, 0, NOW)
    store.close()


def test_a_message_is_found_by_the_id_that_rocketmq_gave_it(tmp_path: Path) -> None:
    """The id is host and physical offset, and anything between two records is no message."""
    golden = unpack("plain-clean", tmp_path)
    store = open_golden(golden)
    first, second = golden.messages[3:5]

    record = store.record_at(first["commitLogOffset"])

    assert record is not None
    assert offset_message_id(record.store_host, record.physical_offset) == first["msgId"]
    for offset in range(first["commitLogOffset"] + 1, second["commitLogOffset"]):
        assert store.record_bytes(offset) is None
    store.close()
