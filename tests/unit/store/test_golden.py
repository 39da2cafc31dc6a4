"""Stores written by released RocketMQ brokers open completely and can be continued."""

import zlib
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import Record
from halfmq.store.message_store import GetStatus, MessageStore
from tests.support.golden_store import NAMES, GoldenStore, load_truth, messages_of, unpack
from tests.support.stores import (
    Clock,
    append_durably,
    bounds,
    crash,
    draft,
    everything,
    golden_config,
)

STATES = NAMES
NOW = 1_800_000_000_000  # ms; younger than all golden stores
DAMAGED = 225_680  # where in plain-badcrc a body byte is flipped
# RocketMQ cut the log of plain-badcrc at the damage. halfmq loses one message, and log and queues
# end where they do without any damage.
UNDAMAGED = {"plain-badcrc": "plain-cq-none"}


def open_golden(golden: GoldenStore) -> MessageStore:
    store = MessageStore(golden_config(golden), now_ms=Clock(NOW))
    store.open()
    return store


def best_of(golden: GoldenStore) -> dict[str, Any]:
    """Return the result of a recovery without losses."""
    truth = golden.truth
    if golden.name in UNDAMAGED:
        truth = load_truth(UNDAMAGED[golden.name])
    best: dict[str, Any] = truth.get("complete_recovery") or truth
    return best


def expected_bounds(golden: GoldenStore) -> dict[tuple[str, int], tuple[int, int]]:
    """Return minimum and maximum of each queue."""
    return {
        (topic, int(queue_id)): tuple(ends.values())[:2] if isinstance(ends, dict) else tuple(ends)
        for topic, by_id in best_of(golden)["queues"].items()
        for queue_id, ends in by_id.items()
    }


def expected_end(golden: GoldenStore) -> int:
    best = best_of(golden)
    return int(best.get("runtime", best)["commitLogMaxOffset"])


def expected_messages(golden: GoldenStore) -> list[dict[str, Any]]:
    if golden.name not in UNDAMAGED:
        return golden.messages
    messages = messages_of(load_truth(UNDAMAGED[golden.name]))
    return [message for message in messages if message["commitLogOffset"] != DAMAGED]


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
    """Offsets and messages are those of a recovery without losses, byte for byte."""
    golden = unpack(name, tmp_path)
    store = open_golden(golden)

    served = everything(store)

    assert store.write_offset == expected_end(golden)
    assert bounds(store) == expected_bounds(golden)
    messages = expected_messages(golden)
    assert [identity(record) for record in served] == [
        expected_identity(message) for message in messages
    ]
    for message in messages:
        encoded = store.reader.record_bytes(message["commitLogOffset"])
        assert encoded is not None
        assert zlib.crc32(encoded) == message["recordCrc32"]
    store.close()


@pytest.mark.parametrize("name", STATES)
def test_a_store_of_rocketmq_can_be_continued(name: str, tmp_path: Path) -> None:
    """Queue offsets continue, and neither a stop nor a kill loses old or new messages."""
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
        added = (store.reader.record_at(done.physical_offset) for done in appended)
        before = [*before, *filter(None, added)]
        root = crash(golden.root, tmp_path / f"crash-{turn}") if turn == 1 else golden.root
        store.close()
        golden = GoldenStore(golden.name, root, golden.truth)
        store = open_golden(golden)
        assert everything(store) == before
        assert {key: end for key, (_, end) in bounds(store).items()} == ends
    store.close()


# RocketMQ 4.9 and batch queues have other rules.
@pytest.mark.parametrize("name", [name for name in STATES if name not in {"v4-tx", "batchcq"}])
def test_searches_by_time_answer_as_rocketmq_did(name: str, tmp_path: Path) -> None:
    """For both bounds, at, between and around store times."""
    golden = unpack(name, tmp_path)
    queries = golden.truth.get("timeQueries", ())
    store = open_golden(golden)

    for query in queries:
        key = query["topic"], query["queueId"]
        at = query["timestamp"]
        found = (
            store.queues.offset_by_time(*key, at),
            store.queues.offset_by_time(*key, at, upper=True),
        )
        assert found == (query["lower"], query["upper"]), query
    store.close()


def test_a_message_is_found_by_the_id_that_rocketmq_gave_it(tmp_path: Path) -> None:
    """The id holds host and physical offset; an offset within a record finds nothing."""
    golden = unpack("plain-clean", tmp_path)
    store = open_golden(golden)
    first, second = golden.messages[3:5]

    record = store.reader.record_at(first["commitLogOffset"])

    assert record is not None
    assert offset_message_id(record.store_host, record.physical_offset) == first["msgId"]
    for offset in range(first["commitLogOffset"] + 1, second["commitLogOffset"]):
        assert store.reader.record_bytes(offset) is None
    store.close()


def test_a_damaged_record_is_reported_copied_and_skipped(tmp_path: Path) -> None:
    """With offset, length and reason; its positions in log and queue are not used again."""
    golden = unpack("plain-badcrc", tmp_path)
    before = dict(golden.segments())
    store = MessageStore(golden_config(golden), now_ms=Clock(NOW))

    report = store.open()

    size = 424
    assert report.damages == ((DAMAGED, size, "a body that does not match its CRC"),)
    base = DAMAGED - DAMAGED % golden.commit_log_file_size
    copy = golden.root / "damaged" / f"{DAMAGED:020d}"
    assert copy.read_bytes() == before[base][DAMAGED - base :][:size]
    assert report.truncated_bytes == 0
    found = store.queues.get("events", 0, 70)
    assert (found.status, found.next_offset) == (GetStatus.NO_MATCHED_MESSAGE, 71)
    store.close()


def test_a_batch_is_served_from_each_of_its_queue_offsets(tmp_path: Path) -> None:
    """As in RocketMQ, a consumer that stopped within a batch gets it again."""
    golden = unpack("batchcq", tmp_path)
    store = open_golden(golden)
    batches = [
        message
        for message in golden.messages
        if message["topic"] == "bcq" and "INNER_NUM" in message["properties"]
    ]
    assert batches
    for message in batches:
        first, count = message["queueOffset"], int(message["properties"]["INNER_NUM"])
        for offset in range(first, first + count):
            found = store.queues.get("bcq", message["queueId"], offset, max_count=count)
            assert found.ranges[0][0] == message["commitLogOffset"]
            assert found.next_offset >= first + count
    store.close()
