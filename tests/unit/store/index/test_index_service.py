"""The key index: RocketMQ's files byte for byte, putting and looking up."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import pack_into
from typing import Any

import pytest

from halfmq.store.errors import DiskFullError
from halfmq.store.files import disk
from halfmq.store.files.mapped_file import create_file, reserve
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.ids import java_string_hash
from halfmq.store.format.index import item_position, slot_position, unpack_item
from halfmq.store.format.record import decode_record
from halfmq.store.index import index_file, index_service
from halfmq.store.index.index_service import IndexService
from tests.support.golden_store import NAMES, GoldenStore, unpack
from tests.support.index_records import (
    FOREVER,
    LOG_END,
    START_MS,
    TOPIC,
    IndexedRecord,
    assert_finds_exactly,
    contents,
    found,
    opened,
    record,
    service,
)
from tests.support.patience import PATIENCE_S

# The brokers were restarted, or their first index file expired, so that the files do not follow
# from the records alone.
NOT_FROM_ITS_RECORDS = {"stale-tail", "stale-cq", "retention", "plain-cq-none"}
# The index belongs to a longer log than the one that is left.
CUT = {"plain-torn", "plain-badcrc", "plain-cq-ahead"}


def records_of(store: GoldenStore) -> list[IndexedRecord]:
    segments = dict(store.segments())
    size = store.commit_log_file_size
    records = []
    for message in store.messages:
        physical_offset = message["commitLogOffset"]
        base = physical_offset - physical_offset % size
        one = decode_record(segments[base], physical_offset - base)
        records.append(
            IndexedRecord(
                one.topic, one.properties, physical_offset, one.store_timestamp, one.sys_flag
            )
        )
    return records


def golden_service(store: GoldenStore, directory: Path) -> IndexService:
    slots, items = store.index_sizes
    return service(directory, slots=slots, items=items)


# -- RocketMQ's bytes ---------------------------------------------------------------------------


def test_the_worked_example_is_byte_for_byte_what_rocketmq_writes(tmp_path: Path) -> None:
    """With the default sizes; unused parts of the file are holes."""
    index = opened(tmp_path, slots=5_000_000, items=20_000_000)
    index.put_group([("T", b"KEYS\x01k1\x02", 4096, 1_700_000_000_123, 0)])
    (path,) = tmp_path.iterdir()

    def at(position: int, size: int) -> str:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(size).hex()

    assert path.stat().st_size == 420_000_040
    assert path.stat().st_blocks * 512 < 32 << 20
    assert at(10_157_820, 4) == "00000001"
    assert at(20_000_060, 20) == "0026bfb500000000000010000000000000000000"
    assert at(0, 40) == (
        "0000018bcfe5687b0000018bcfe5687b000000000000100000000000000010000000000100000002"
    )

    index.put_group([("T", b"KEYS\x01k1\x02", 4200, 1_700_000_000_123 + 7377, 0)])

    assert at(10_157_820, 4) == "00000002"
    assert at(20_000_080, 20) == "0026bfb500000000000010680000000700000001"
    assert at(32, 8) == "0000000100000003"
    index.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_FROM_ITS_RECORDS | CUT])
@pytest.mark.parametrize("group_size", [1, 7, 1000])
def test_the_same_records_give_the_same_files(name: str, group_size: int, tmp_path: Path) -> None:
    """Byte for byte, with the headers of later files and relative times."""
    store = unpack(name, tmp_path)
    records = records_of(store)
    index = golden_service(store, tmp_path / "index")
    assert index.recover(clean=True, log_end=LOG_END, index_timestamp=0) == 0
    for start in range(0, len(records), group_size):
        index.put_group(records[start : start + group_size])
    index.close()

    assert contents(tmp_path / "index") == contents(store.root / "index")


@pytest.mark.parametrize("name", NAMES)
def test_look_ups_match_the_answers_of_the_broker(name: str, tmp_path: Path) -> None:
    """With collisions, repeated keys, time ranges and the order of hits."""
    store = unpack(name, tmp_path)
    queries = store.truth.get("keyQueries", [])
    if not queries:
        pytest.skip("this broker got no queries by key")
    index = golden_service(store, store.root / "index")
    index.recover(clean=True, log_end=LOG_END, index_timestamp=0)
    log_start = int(min(store.segments())[0])

    for query in queries:
        hits = index.query(
            query["topic"], query["key"], query["maxNum"], query["begin"], query["end"]
        )
        assert [hit for hit in hits if hit >= log_start] == query["hits"]
        if query["hits"]:  # an answer without hits does not have it
            assert index.last_update == (
                query["indexLastUpdateTimestamp"],
                query["indexLastUpdatePhyoffset"],
            )
    index.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_index_is_complete_after_any_stop_of_a_golden_broker(name: str, tmp_path: Path) -> None:
    """Every record of the log is found once, and none after its end."""
    store = unpack(name, tmp_path)
    records = records_of(store)
    log_end = max(one.physical_offset for one in records) + 1
    checkpoint = store.root / "checkpoint"
    index_timestamp = (
        int.from_bytes(checkpoint.read_bytes()[16:24], "big") if checkpoint.exists() else 0
    )
    index = golden_service(store, store.root / "index")
    start = index.recover(clean=False, log_end=log_end, index_timestamp=index_timestamp)
    index.put_group([one for one in records if one.physical_offset >= start])

    assert_finds_exactly(index, records, log_start=records[0].physical_offset)
    for hits in (found(index, key, one.topic) for one in records for key in one.keys):
        assert max(hits) < log_end
    index.close()


# -- putting ------------------------------------------------------------------------------------


def test_a_record_is_found_by_its_unique_key_and_each_of_its_keys(tmp_path: Path) -> None:
    """Keys are separated by one or more blanks."""
    index = opened(tmp_path, records=[record(0, unique_key="U" * 32, keys=" a  b c ")])

    for key in ("U" * 32, "a", "b", "c"):
        assert found(index, key) == [0]
    assert found(index, "") == found(index, "d") == found(index, "a", "other") == []
    index.close()


@pytest.mark.parametrize("kind", TransactionType)
def test_only_a_rolled_back_record_is_not_found(tmp_path: Path, kind: TransactionType) -> None:
    """As in RocketMQ; a half message is found by its half topic."""
    index = opened(tmp_path, records=[record(0, keys="a", sys_flag=kind)])

    assert found(index, "a") == ([] if kind is TransactionType.ROLLBACK else [0])
    index.close()


def test_records_without_keys_write_nothing(tmp_path: Path) -> None:
    """Not even an empty file is created."""
    index = opened(tmp_path, records=[record(0), record(100)])

    assert list(tmp_path.iterdir()) == []
    assert index.last_update == (0, 0)
    assert index.flush() == 0
    index.close()


def test_records_that_are_put_again_are_not_indexed_again(tmp_path: Path) -> None:
    """Recovery puts more of the log than the index lacks."""
    records = [record(100 * n, keys="a") for n in range(5)]
    index = opened(tmp_path, records=records)
    before = contents(tmp_path)
    index.put_group(records)
    index.put_group([record(400, keys="a")])

    assert contents(tmp_path) == before
    index.put_group([records[-1], record(500, keys="a"), record(500, keys="a")])
    assert found(index, "a") == [0, 100, 200, 300, 400, 500]
    index.close()


def test_a_slot_with_an_invalid_number_counts_as_empty(tmp_path: Path) -> None:
    """RocketMQ leaves such slots when it is killed, and treats them so."""
    opened(tmp_path, slots=1, records=[record(0, keys="a")]).close()
    (path,) = tmp_path.iterdir()
    for value in (2, 9, -1):
        content = bytearray(path.read_bytes())
        pack_into(">i", content, slot_position(0), value)
        path.write_bytes(content)
        index = opened(tmp_path, slots=1)
        assert found(index, "a") == []
        index.put_group([record(100 + value, keys="a")])
        assert found(index, "a") == [100 + value]
        assert unpack_item(path.read_bytes(), item_position(2, 1)).previous == 0
        index.close()
        path.write_bytes(content)


def test_the_keys_of_a_record_may_be_in_several_files(tmp_path: Path) -> None:
    """The record is found once for each key."""
    index = opened(tmp_path, items=3, records=[record(0, keys="a b c d e f g")])

    assert len(list(tmp_path.iterdir())) == 4
    for key in "abcdefg":
        assert found(index, key) == [0]
    index.close()


def test_files_are_named_by_local_time_and_sort_by_age(tmp_path: Path) -> None:
    """Also if two are created within a millisecond, or the clock steps back."""
    now = START_MS + 7
    index = service(tmp_path, items=2, now_ms=lambda: now)
    index.recover(clean=True, log_end=LOG_END, index_timestamp=0)
    index.put_group([record(0, keys="a"), record(1, keys="a")])
    now -= 3_600_000
    index.put_group([record(2, keys="a")])
    first, *others = sorted(path.name for path in tmp_path.iterdir())

    assert first == time.strftime("%Y%m%d%H%M%S", time.localtime(START_MS // 1000)) + "007"
    assert others == [str(int(first) + 1), str(int(first) + 2)]
    assert found(index, "a") == [0, 1, 2]
    index.close()


def test_a_clock_that_steps_back_gives_no_negative_time(tmp_path: Path) -> None:
    """RocketMQ stops reading at a negative time."""
    records = [record(0, keys="a", after_ms=5000), record(100, keys="a", after_ms=-5000)]
    index = opened(tmp_path, records=records)

    assert unpack_item(contents(tmp_path)[0], item_position(2, 7)).seconds == 0
    assert found(index, "a") == [100] or found(index, "a") == [0, 100]
    index.close()


def test_keys_that_are_not_ascii_are_indexed(tmp_path: Path) -> None:
    """Also one with as many bytes as a unique key."""
    keys = ["größe", "中" * 10 + "ab", "\U0001f600"]
    index = opened(tmp_path, records=[record(0, unique_key=keys[1], keys=" ".join(keys))])

    assert found(index, keys[0]) == found(index, keys[2]) == [0]
    assert found(index, keys[1]) == [0, 0]
    index.close()


def test_a_key_with_the_smallest_hash_is_found(tmp_path: Path) -> None:
    """Java's smallest int has no absolute value; its hash is 0."""
    rest = -(2**31) - java_string_hash(f"{TOPIC}#" + "F" * 25 + "!" * 7)
    digits = [rest % 2**32 // 31**n % 31 for n in reversed(range(7))]
    unique_key = "F" * 25 + "".join(chr(ord("!") + digit) for digit in digits)
    assert java_string_hash(f"{TOPIC}#{unique_key}") == -(2**31)

    index = opened(tmp_path, records=[record(0, unique_key=unique_key), record(1, keys="a")])
    assert found(index, unique_key) == [0]
    assert unpack_item(contents(tmp_path)[0], item_position(1, 7)).key_hash == 0
    index.close()


@pytest.mark.parametrize("failing_call", range(1, 7))
def test_a_full_disk_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """No part of the group is indexed, no empty file is left, and it can be put again."""
    first = [record(0, keys="a")]
    group = [record(100 * n, keys="a b") for n in range(1, 8)]
    index = opened(tmp_path, items=6, records=first)
    before = contents(tmp_path)
    calls = 0

    def failing(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise DiskFullError(tmp_path, "no space")
            call(*args)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(index_file, "reserve", failing(reserve))
        patch.setattr(index_service, "create_file", failing(create_file))
        # Otherwise space reserved before would be used first.
        patch.setattr(index_file, "RESERVED_AHEAD", 0)
        with pytest.raises(DiskFullError):
            index.put_group(group)
    assert contents(tmp_path) == before
    assert found(index, "a") == [0]

    index.put_group(group)
    assert_finds_exactly(index, first + group)
    index.close()


def test_space_is_reserved_before_it_is_written(tmp_path: Path) -> None:
    """A write to a mapped page without a disk block would kill the process on a full disk."""
    index = opened(tmp_path, slots=100_000, items=10_000, records=[record(0, keys="a")])
    (path,) = tmp_path.iterdir()

    assert path.stat().st_blocks * 512 >= item_position(2, 100_000)
    index.close()


# -- looking up ---------------------------------------------------------------------------------


def test_a_look_up_prefers_the_newest_and_answers_in_log_order(tmp_path: Path) -> None:
    """At most the requested number, and never more than 64."""
    index = opened(tmp_path, items=30, records=[record(n, keys="a") for n in range(100)])

    assert index.query(TOPIC, "a", 3, 0, FOREVER) == [97, 98, 99]
    assert index.query(TOPIC, "a", 1000, 0, FOREVER) == list(range(36, 100))
    assert index.query(TOPIC, "a", 0, 0, FOREVER) == []
    index.close()


def test_a_look_up_is_limited_in_time_to_the_second(tmp_path: Path) -> None:
    """Times are seconds after the first item of the file."""
    records = [record(n, keys="a", after_ms=1000 * n + 500 * (n > 0)) for n in range(10)]
    index = opened(tmp_path, items=20, records=records)

    assert index.query(TOPIC, "a", 64, START_MS + 3000, START_MS + 5000) == [3, 4, 5]
    assert index.query(TOPIC, "a", 64, START_MS + 3001, START_MS + 4999) == [4]
    assert index.query(TOPIC, "a", 64, 0, START_MS - 1) == []
    assert index.query(TOPIC, "a", 64, START_MS + 9501, FOREVER) == []
    index.close()


def test_a_look_up_reads_only_files_of_its_time_range(tmp_path: Path) -> None:
    """It stops at the first file that began before the range."""
    records = [record(n, keys="a", after_ms=10_000 * n) for n in range(12)]
    index = opened(tmp_path, items=4, records=records)

    # 3 is the first of its file: its time counts from the previous file, so it is 10 s late.
    assert index.query(TOPIC, "a", 64, START_MS + 40_000, START_MS + 50_000) == [3, 4, 5]
    index.close()


def test_a_look_up_finds_a_group_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is written before the slots, so a slot never names an uncounted item."""
    index = opened(tmp_path, records=[record(0, keys="a")])
    # The moment between the two writes can be observed only through private attributes.
    (file,) = index._files
    seen: list[list[int]] = []

    class ObservedSlots:
        def __init__(self, slots: Any) -> None:
            self.slots = slots

        def __getitem__(self, where: Any) -> Any:
            return self.slots[where]

        def __setitem__(self, where: Any, numbers: Any) -> None:
            seen.append(found(index, "a"))
            self.slots[where] = numbers
            seen.append(found(index, "a"))

    with monkeypatch.context() as patch:
        patch.setattr(file, "_slots", ObservedSlots(file._slots))  # see above
        index.put_group([record(n, keys="a") for n in range(1, 5)])

    assert seen == [[0], [0, 1, 2, 3, 4]]
    index.close()


def test_look_ups_and_flushes_may_run_beside_puts(tmp_path: Path) -> None:
    """Other threads see the state between two groups, also when a new file begins."""
    index = opened(tmp_path, slots=3, items=20)
    group, groups = 5, 30
    answers: list[list[int]] = []
    done = threading.Event()

    def look_up() -> None:
        while not done.is_set():
            answers.append(found(index, "a"))

    def flush() -> None:
        while not done.is_set():
            index.flush()

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(look_up), threads.submit(flush)]
        try:
            for start in range(0, group * groups, group):
                index.put_group([record(start + n, keys="a") for n in range(group)])
        finally:
            done.set()
        for reader in readers:
            reader.result(timeout=PATIENCE_S)

    for answer in answers:
        end = answer[-1] + 1 if answer else 0
        assert answer == list(range(max(end - 64, 0), end))
        assert end % group == 0 or end % 19 == 0  # a group in two files appears file by file
    assert found(index, "a")[-1] == group * groups - 1
    index.close()


# -- flushing and expiry ------------------------------------------------------------------------


def test_a_flush_covers_what_was_stored_before_the_last_millisecond(tmp_path: Path) -> None:
    """More records may follow within that millisecond."""
    index = opened(tmp_path, records=[record(0, keys="a", after_ms=5)])

    assert index.flush() == START_MS + 4
    assert index.flush() == START_MS + 4
    index.close()


def test_a_failed_flush_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next flush does not assume that everything is on disk."""
    index = opened(tmp_path, records=[record(0, keys="a")])
    synced: list[int] = []

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output"):
            index.flush()
        patch.setattr(disk, "fdatasync", synced.append)
        index.flush()
        index.flush()

    assert len(synced) == 1
    index.close()


def test_files_whose_records_are_deleted_are_dropped(tmp_path: Path) -> None:
    """From the oldest on, never the newest; the caller deletes them."""
    index = opened(tmp_path, items=4, records=[record(10 * n, keys="a") for n in range(9)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3

    assert index.forget_before(20) == []
    assert found(index, "a") == [10 * n for n in range(9)]
    assert [file.path.name for file in index.forget_before(21)] == names[:1]
    assert found(index, "a") == [30, 40, 50, 60, 70, 80]
    assert [file.path.name for file in index.forget_before(1000)] == names[1:2]
    assert found(index, "a") == [60, 70, 80]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    index.close()


def test_a_service_refuses_a_file_without_room() -> None:
    """The settings are checked at once."""
    for slots, items in ((0, 10), (10, 1)):
        with pytest.raises(ValueError, match="at least"):
            service(Path("unused"), slots=slots, items=items)


def test_extents_end_with_the_first_file_that_is_not_flushed(tmp_path: Path) -> None:
    """After a power cut a digest of later files would report lost items as damage."""
    records = [record(10 * n, keys="a b", after_ms=1000 * n) for n in range(20)]
    index = opened(tmp_path, items=12, records=records)
    before = [path for path, _ in index.extents()]
    index.flush()
    flushed = [path for path, _ in index.extents()]
    index.close()

    assert len(flushed) == 4
    assert before == flushed[:1]


def test_a_file_is_mapped_without_read_ahead(tmp_path: Path) -> None:
    """Otherwise the event loop would wait while 8 MiB of pages are filled with zeros."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("needs /proc to see how a file is mapped")
    index = opened(tmp_path, records=[record(0, keys="a")])
    (path,) = tmp_path.iterdir()

    mapping = maps.read_text(encoding="ascii").partition(str(path))[2]

    flags = mapping.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "rr" in flags  # "random reads"
    index.close()
