"""What released RocketMQ brokers wrote, record by record and entry by entry."""

import base64
from collections import defaultdict
from pathlib import Path
from struct import Struct
from typing import Any, Final
from zlib import crc32

import pytest

from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.flags import TransactionType, transaction_type
from halfmq.store.format.ids import pack_host, parse_offset_message_id, unpack_host
from halfmq.store.format.index import (
    FIRST_ITEM,
    IndexHeader,
    IndexItem,
    index_file_size,
    index_key,
    index_key_hash,
    index_keys,
    item_position,
    slot_position,
    unpack_header,
    unpack_item,
)
from halfmq.store.format.properties import decode_properties, encode_properties, tags_code
from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry, unpack_entries
from halfmq.store.format.record import (
    MAGIC_V2,
    Record,
    crc_tail_matches,
    decode_record,
    encode_record,
)
from halfmq.store.format.topics import SCHEDULE_TOPIC
from tests.support.golden_store import NAMES, GoldenStore, unpack

# Old whole records follow the end of the log here; the JSON has only those before it.
WITH_STALE_RECORDS: Final = {"stale-tail"}
# Restarted after a kill: RocketMQ indexed the last record of its index again.
REINDEXED: Final = {"stale-tail", "stale-cq"}
BATCH_QUEUE_ENTRY: Final = Struct(">qiq26x")


@pytest.fixture(scope="module", params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    """Return each golden store; tests here only read it."""
    return unpack(request.param, tmp_path_factory.mktemp(request.param))


def records_of(store: GoldenStore) -> dict[int, tuple[Record, bytes]]:
    """Return the records of all files; each file ends at a blank, unwritten space or damage."""
    records: dict[int, tuple[Record, bytes]] = {}
    for base, content in store.segments():
        position = 0
        while True:
            try:
                record = decode_record(content, position, base=base)
            except CorruptRecordError:
                break
            end = position + record.total_size
            records[base + position] = record, content[position:end]
            position = end
    return records


def as_json(record: Record, encoded: bytes) -> dict[str, Any]:
    """Return a record in the form of the golden JSON."""
    return {
        "topic": record.topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "commitLogOffset": record.physical_offset,
        "storeSize": record.total_size,
        "bodyCRC": record.body_crc,
        "flag": record.flag,
        "sysFlag": record.sys_flag,
        "bornTimestamp": record.born_timestamp,
        "bornHost": unpack_host(record.born_host),
        "storeTimestamp": record.store_timestamp,
        "storeHost": unpack_host(record.store_host),
        "reconsumeTimes": record.reconsume_times,
        "preparedTransactionOffset": record.prepared_transaction_offset,
        "msgId": record.msg_id,
        "version": 2 if record.magic == MAGIC_V2 else 1,
        "properties": record.property_map,
        "body": base64.b64encode(record.body).decode(),
        "recordCrc32": crc32(encoded),
    }


def test_every_record_has_the_fields_that_the_broker_reported(store: GoldenStore) -> None:
    """Field by field; no record is missing, and none is extra."""
    records = records_of(store)
    messages = store.messages

    for message in messages:
        expected = {k: v for k, v in message.items() if k not in {"tagsCode", "bodyDecompressed"}}
        for host in ("bornHost", "storeHost"):  # Java prints IPv6 in full
            address, _, port = expected[host].partition("|")
            expected[host] = unpack_host(pack_host(address, int(port)))
        assert as_json(*records.pop(message["commitLogOffset"])) == expected
    assert messages
    assert bool(records) == (store.name in WITH_STALE_RECORDS)


def test_every_record_encodes_to_the_bytes_it_was_decoded_from(store: GoldenStore) -> None:
    """What halfmq writes has RocketMQ's form."""
    for physical_offset, (record, encoded) in records_of(store).items():
        assert record.physical_offset == physical_offset
        assert encode_record(record) == encoded
        assert parse_offset_message_id(record.msg_id) == (record.store_host, physical_offset)
        again = encode_properties(record.property_map)
        assert decode_properties(again) == record.property_map


def test_the_crc_over_the_whole_record_matches_where_there_is_one(store: GoldenStore) -> None:
    """One golden broker had ``enabledAppendPropCRC``."""
    expected = True if store.name == "propcrc" else None

    assert {crc_tail_matches(encoded) for _, encoded in records_of(store).values()} == {expected}


def test_every_queue_entry_points_at_its_record(store: GoldenStore) -> None:
    """Offset, size and tags code are those of the message with this queue offset."""
    if store.name == "stale-cq":
        pytest.skip("holds entries that point into other records, for the recovery tests")
    records = records_of(store)
    messages = {message["commitLogOffset"]: message for message in store.messages}
    checked = 0
    for directory in sorted((store.root / "consumequeue").glob("*/*")):
        topic, queue_id = directory.parent.name, int(directory.name)
        for entry, queue_offset in queue_entries(directory):
            if entry.physical_offset not in messages:
                continue  # after the end of a log that was cut, or before its beginning
            record, _ = records[entry.physical_offset]
            assert (record.topic, record.queue_id) == (topic, queue_id)
            if store.name != "clean-cq-short":  # the official broker shifted one queue there
                assert record.queue_offset == queue_offset
            assert entry.size == record.total_size
            assert entry.tags_code == messages[entry.physical_offset].get("tagsCode", 0)
            if topic != SCHEDULE_TOPIC:
                assert entry.tags_code == tags_code(record.properties)
            checked += 1
    assert checked or store.name == "plain-cq-none"


def queue_entries(directory: Path) -> list[tuple[QueueEntry, int]]:
    """Return the valid entries of one queue with their queue offsets."""
    return [
        (entry, (int(path.name) + position * ENTRY_SIZE) // ENTRY_SIZE)
        for path in sorted(directory.iterdir())
        for position, entry in enumerate(unpack_entries(path.read_bytes()))
        if entry.is_valid
    ]


def test_every_entry_of_a_batch_queue_has_the_tags_code_of_its_record(tmp_path: Path) -> None:
    """Its first 20 bytes are those of an ordinary entry."""
    store = unpack("batchcq", tmp_path)
    records = records_of(store)
    entries = [
        QueueEntry._make(fields)
        for path in sorted((store.root / "batchconsumequeue").glob("*/*/*"))
        for fields in BATCH_QUEUE_ENTRY.iter_unpack(path.read_bytes())
    ]
    valid = [entry for entry in entries if entry.is_valid]

    assert valid
    for entry in valid:
        record, _ = records[entry.physical_offset]
        assert (entry.size, entry.tags_code) == (record.total_size, tags_code(record.properties))


def index_files(store: GoldenStore) -> list[bytes]:
    return [path.read_bytes() for path in sorted((store.root / "index").glob("*"))]


def items_of(content: bytes, header: IndexHeader, slots: int) -> dict[int, IndexItem]:
    return {
        number: unpack_item(content, item_position(number, slots))
        for number in range(FIRST_ITEM, header.next_item)
    }


def test_every_slot_of_an_index_file_leads_through_its_items(store: GoldenStore) -> None:
    """From newest to oldest, and every item is reachable from its slot."""
    slots, items_max = store.index_sizes
    for content in index_files(store):
        assert len(content) == index_file_size(slots, items_max)
        header = unpack_header(content)
        items = items_of(content, header, slots)
        used = 0
        for slot in range(slots):
            number = int.from_bytes(content[slot_position(slot) :][:4], "big")
            used += number > 0
            while number:
                item = items.pop(number)
                assert item.key_hash % slots == slot
                assert item.previous < number
                number = item.previous
        assert not items
        assert used == header.slot_count


def test_every_index_item_has_the_hash_of_a_key_of_its_record(store: GoldenStore) -> None:
    """All keys of each record, in the order in which RocketMQ indexes them."""
    slots, items_max = store.index_sizes
    records = records_of(store)
    messages = {message["commitLogOffset"] for message in store.messages}
    hashes: defaultdict[int, list[int]] = defaultdict(list)
    for content in index_files(store):
        header = unpack_header(content)
        items = items_of(content, header, slots)
        assert header.next_item <= items_max
        if items:
            first, last = items[FIRST_ITEM], items[header.next_item - 1]
            assert first.physical_offset == header.begin_physical_offset
            assert last.physical_offset == header.end_physical_offset
        for item in items.values():
            if item.physical_offset in messages:
                hashes[item.physical_offset].append(item.key_hash)

    for physical_offset, found in hashes.items():
        record, _ = records[physical_offset]
        is_indexed = transaction_type(record.sys_flag) is not TransactionType.ROLLBACK
        keys = index_keys(record.properties) if is_indexed else []
        expected = [index_key_hash(index_key(record.topic, key.decode())) for key in keys]
        if store.name in REINDEXED:
            assert set(found) == set(expected)
        else:
            assert found == expected
    if store.name != "plain-cq-none":
        assert hashes


def test_the_times_of_index_items_are_seconds_after_the_begin(store: GoldenStore) -> None:
    """Only the first item of a later file counts from the end of the previous file."""
    slots, _ = store.index_sizes
    records = records_of(store)
    end_timestamp = 0
    for content in index_files(store):
        header = unpack_header(content)
        for number, item in items_of(content, header, slots).items():
            if item.physical_offset not in records:
                continue
            begin = header.begin_timestamp if number > FIRST_ITEM else end_timestamp
            record, _ = records[item.physical_offset]
            elapsed = record.store_timestamp - begin if begin else 0
            assert item.seconds == elapsed // 1000
        end_timestamp = header.end_timestamp
