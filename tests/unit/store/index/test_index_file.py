"""Look-up by key: RocketMQ's files byte for byte, and an index that survives what happens to it."""

import contextlib
import os
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
from halfmq.store.format.index import (
    HEADER_SIZE,
    ITEM_SIZE,
    SLOT,
    index_file_size,
    item_position,
    slot_position,
    unpack_header,
    unpack_item,
)
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
    found,
    opened,
    record,
    service,
)
from tests.support.patience import PATIENCE_S

# Their brokers were restarted, or their first index file expired, so that files and records
# no longer follow from each other.
NOT_FROM_ITS_RECORDS = {"stale-tail", "stale-cq", "retention", "plain-cq-none"}
# Their index belongs to a longer log than what is left of it.
CUT = {"plain-torn", "plain-badcrc", "plain-cq-ahead"}


def contents(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.iterdir())]


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


# ------------------------------------------------------------------ RocketMQ's bytes


def test_the_worked_example_is_byte_for_byte_what_rocketmq_writes(tmp_path: Path) -> None:
    """At the default sizes; the file has holes where nothing is."""
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
    """Byte for byte, headers of follow-up files and time differences included."""
    store = unpack(name, tmp_path)
    records = records_of(store)
    index = golden_service(store, tmp_path / "index")
    assert index.recover(clean=True, log_end=LOG_END, index_timestamp=0) == 0
    for start in range(0, len(records), group_size):
        index.put_group(records[start : start + group_size])
    index.close()

    assert contents(tmp_path / "index") == contents(store.root / "index")


@pytest.mark.parametrize("name", NAMES)
def test_look_ups_answer_what_the_broker_answered(name: str, tmp_path: Path) -> None:
    """Collisions, repeated keys, time windows and the order of hits included."""
    store = unpack(name, tmp_path)
    queries = store.truth.get("keyQueries", [])
    if not queries:
        pytest.skip("nobody asked this broker for keys")
    index = golden_service(store, store.root / "index")
    index.recover(clean=True, log_end=LOG_END, index_timestamp=0)
    log_start = int(min(store.segments())[0])

    for query in queries:
        hits = index.query(
            query["topic"], query["key"], query["maxNum"], query["begin"], query["end"]
        )
        assert [hit for hit in hits if hit >= log_start] == query["hits"]
        if query["hits"]:  # without any the broker answered without saying
            assert index.last_update == (
                query["indexLastUpdateTimestamp"],
                query["indexLastUpdatePhyoffset"],
            )
    index.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_index_is_complete_after_any_stop_of_a_golden_broker(name: str, tmp_path: Path) -> None:
    """Nothing that is in the log is lacking, nothing stands twice, nothing lies behind the end."""
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


# ------------------------------------------------------------------ putting


def test_a_record_is_found_by_its_unique_key_and_each_of_its_keys(tmp_path: Path) -> None:
    """Keys are separated by blanks, of which there may be several."""
    index = opened(tmp_path, records=[record(0, unique_key="U" * 32, keys=" a  b c ")])

    for key in ("U" * 32, "a", "b", "c"):
        assert found(index, key) == [0]
    assert found(index, "") == found(index, "d") == found(index, "a", "other") == []
    index.close()


@pytest.mark.parametrize("kind", TransactionType)
def test_only_a_rolled_back_record_is_not_found(tmp_path: Path, kind: TransactionType) -> None:
    """As in RocketMQ; a half message is found in the half topic."""
    index = opened(tmp_path, records=[record(0, keys="a", sys_flag=kind)])

    assert found(index, "a") == ([] if kind is TransactionType.ROLLBACK else [0])
    index.close()


def test_records_without_keys_leave_no_trace(tmp_path: Path) -> None:
    """Not even an empty file."""
    index = opened(tmp_path, records=[record(0), record(100)])

    assert list(tmp_path.iterdir()) == []
    assert index.last_update == (0, 0)
    assert index.flush() == 0
    index.close()


def test_what_is_put_again_is_not_indexed_again(tmp_path: Path) -> None:
    """Recovery puts more of the log than is missing."""
    records = [record(100 * n, keys="a") for n in range(5)]
    index = opened(tmp_path, records=records)
    before = contents(tmp_path)
    index.put_group(records)
    index.put_group([record(400, keys="a")])

    assert contents(tmp_path) == before
    index.put_group([records[-1], record(500, keys="a"), record(500, keys="a")])
    assert found(index, "a") == [0, 100, 200, 300, 400, 500]
    index.close()


def test_a_full_file_is_followed_by_the_next(tmp_path: Path) -> None:
    """At one item less than the setting says, because item 0 is never used."""
    records = [record(100 * n, keys="a", after_ms=5000 * n) for n in range(10)]
    index = opened(tmp_path, items=4, records=records)
    headers = [unpack_header(content) for content in contents(tmp_path)]

    assert [header.next_item for header in headers] == [4, 4, 4, 2]
    assert [header.begin_physical_offset for header in headers] == [0, 300, 600, 900]
    assert found(index, "a") == [100 * n for n in range(10)]
    index.close()


def test_the_first_item_of_a_follow_up_counts_from_the_end_of_the_file_before(
    tmp_path: Path,
) -> None:
    """RocketMQ's readers add it to the new begin all the same; so do we."""
    times = (0, 3000, 5000, 9000, 10_000)
    records = [record(100 * n, keys="a", after_ms=after) for n, after in enumerate(times)]
    opened(tmp_path, items=4, records=records).close()
    _, second = contents(tmp_path)

    assert unpack_header(second).begin_timestamp == START_MS + 9000
    assert unpack_item(second, item_position(1, 7)).seconds == 4
    assert unpack_item(second, item_position(2, 7)).seconds == 1


def test_only_the_first_item_of_a_follow_up_counts_so(tmp_path: Path) -> None:
    """Another one of the same millisecond counts from the new begin already."""
    records = [record(100 * n, keys="a", after_ms=8000 * (n > 2)) for n in range(5)]
    opened(tmp_path, items=4, records=records).close()
    _, second = contents(tmp_path)

    assert unpack_item(second, item_position(1, 7)).seconds == 8
    assert unpack_item(second, item_position(2, 7)).seconds == 0


def test_a_slot_that_points_nowhere_counts_as_empty(tmp_path: Path) -> None:
    """RocketMQ leaves such a slot when it is killed, and reads it so."""
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


def test_one_record_may_stand_in_several_files(tmp_path: Path) -> None:
    """And is still found once for each key."""
    index = opened(tmp_path, items=3, records=[record(0, keys="a b c d e f g")])

    assert len(list(tmp_path.iterdir())) == 4
    for key in "abcdefg":
        assert found(index, key) == [0]
    index.close()


def test_files_are_named_by_local_time_and_sort_by_age(tmp_path: Path) -> None:
    """Also when two are made within one millisecond, or when the clock steps back."""
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
    """RocketMQ stops reading at one."""
    records = [record(0, keys="a", after_ms=5000), record(100, keys="a", after_ms=-5000)]
    index = opened(tmp_path, records=records)

    assert unpack_item(contents(tmp_path)[0], item_position(2, 7)).seconds == 0
    assert found(index, "a") == [100] or found(index, "a") == [0, 100]
    index.close()


def test_keys_that_are_no_ascii_are_hashed_all_the_same(tmp_path: Path) -> None:
    """One with as many bytes as a unique key, too."""
    keys = ["größe", "中" * 10 + "ab", "\U0001f600"]
    index = opened(tmp_path, records=[record(0, unique_key=keys[1], keys=" ".join(keys))])

    assert found(index, keys[0]) == found(index, keys[2]) == [0]
    assert found(index, keys[1]) == [0, 0]
    index.close()


def test_a_key_whose_hash_has_no_positive_twin_is_found(tmp_path: Path) -> None:
    """Java's smallest int becomes 0."""
    rest = -(2**31) - java_string_hash(f"{TOPIC}#" + "F" * 25 + "!" * 7)
    digits = [rest % 2**32 // 31**n % 31 for n in reversed(range(7))]
    unique_key = "F" * 25 + "".join(chr(ord("!") + digit) for digit in digits)
    assert java_string_hash(f"{TOPIC}#{unique_key}") == -(2**31)

    index = opened(tmp_path, records=[record(0, unique_key=unique_key), record(1, keys="a")])
    assert found(index, unique_key) == [0]
    assert unpack_item(contents(tmp_path)[0], item_position(1, 7)).key_hash == 0
    index.close()


def test_what_only_looks_like_a_unique_key_is_none(tmp_path: Path) -> None:
    """A value, or the end of another name."""
    looks = b"WAIT\x01" + b"x" * 35 + b"\x02d"
    index = opened(tmp_path)
    index.put_group([(TOPIC, looks, 0, START_MS, 0)])

    assert list(tmp_path.iterdir()) == []
    index.close()


@pytest.mark.parametrize("failing_call", range(1, 7))
def test_a_full_disk_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Neither a part of the group nor an empty file; and it can be put again."""
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
        # Space that was reserved before would hide that there is none.
        patch.setattr(index_file, "_RESERVED_AHEAD", 0)
        with pytest.raises(DiskFullError):
            index.put_group(group)
    assert contents(tmp_path) == before
    assert found(index, "a") == [0]

    index.put_group(group)
    assert_finds_exactly(index, first + group)
    index.close()


def test_space_is_reserved_before_it_is_written(tmp_path: Path) -> None:
    """A page of the map without a block behind it would kill the process on a full disk."""
    index = opened(tmp_path, slots=100_000, items=10_000, records=[record(0, keys="a")])
    (path,) = tmp_path.iterdir()

    assert path.stat().st_blocks * 512 >= item_position(2, 100_000)
    index.close()


# ------------------------------------------------------------------ looking up


def test_a_look_up_prefers_the_newest_and_answers_in_log_order(tmp_path: Path) -> None:
    """At most what was asked for, and never more than 64."""
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


def test_a_look_up_visits_only_files_of_its_time(tmp_path: Path) -> None:
    """And stops behind the first that began before."""
    records = [record(n, keys="a", after_ms=10_000 * n) for n in range(12)]
    index = opened(tmp_path, items=4, records=records)

    # 3 is the first of its file: its stored time counts from the file before, so it is 10 s late.
    assert index.query(TOPIC, "a", 64, START_MS + 40_000, START_MS + 50_000) == [3, 4, 5]
    index.close()


def test_different_keys_may_share_a_hash(tmp_path: Path) -> None:
    """Only the record tells them apart; the caller reads it."""
    index = opened(tmp_path, records=[record(0, keys="Aa"), record(1, keys="BB")])

    assert found(index, "Aa") == found(index, "BB") == [0, 1]
    index.close()


def test_a_look_up_sees_each_group_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header before slots: no reader follows a slot to an item that is not counted."""
    index = opened(tmp_path, records=[record(0, keys="a")])
    # The moment between two writes of a group is reached only from inside.
    (file,) = index._files
    seen: list[list[int]] = []

    class SpiedSlots:
        def __init__(self, slots: Any) -> None:
            self.slots = slots

        def __getitem__(self, where: Any) -> Any:
            return self.slots[where]

        def __setitem__(self, where: Any, numbers: Any) -> None:
            seen.append(found(index, "a"))
            self.slots[where] = numbers
            seen.append(found(index, "a"))

    with monkeypatch.context() as patch:
        patch.setattr(file, "_slots", SpiedSlots(file._slots))  # see above
        index.put_group([record(n, keys="a") for n in range(1, 5)])

    assert seen == [[0], [0, 1, 2, 3, 4]]
    index.close()


def test_look_ups_and_flushes_may_run_beside_puts(tmp_path: Path) -> None:
    """Other threads see some state between two groups, over all rolls of the files."""
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
        assert end % group == 0 or end % 19 == 0  # a group that rolls shows up file by file
    assert found(index, "a")[-1] == group * groups - 1
    index.close()


# ------------------------------------------------------------------ starting again


def test_a_clean_stop_is_taken_up_where_it_was(tmp_path: Path) -> None:
    """The newest file is continued, and the log is put again behind its last record."""
    opened(tmp_path, records=[record(n, keys="a") for n in range(15)]).close()
    index = service(tmp_path)

    assert index.recover(clean=True, log_end=100, index_timestamp=0) == 15
    index.put_group([record(n, keys="a") for n in range(10, 20)])
    assert found(index, "a") == list(range(20))
    assert index.last_update == (START_MS, 19)
    index.close()


def test_nothing_there_is_put_from_the_beginning(tmp_path: Path) -> None:
    """A missing index is no reason to answer less."""
    index = service(tmp_path / "index")

    assert index.recover(clean=True, log_end=100, index_timestamp=0) == 0
    index.put_group([record(0, keys="a")])
    assert found(index, "a") == [0]
    index.close()


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("count", [1, 5, 9, 10, 14, 30])
def test_after_a_kill_the_rest_of_the_log_is_put_again(
    tmp_path: Path, count: int, flushed: bool
) -> None:
    """What was flushed before is kept; all is found, and once."""
    records = [record(n, keys="a b", after_ms=1000 * n) for n in range(count)]
    killed = opened(tmp_path, records=records)
    index_timestamp = killed.flush() if flushed else 0
    index = service(tmp_path)
    start = index.recover(clean=False, log_end=LOG_END, index_timestamp=index_timestamp)

    assert start == (max(count - 2, 0) if flushed else 0)
    index.put_group([one for one in records if one.physical_offset >= start])
    assert_finds_exactly(index, records)
    index.close()
    killed.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_start_after_a_kill_writes_only_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """Slots of common size are 20 MB: to have the disk take them all would hold up the start."""
    slots = 100_000
    records = [record(n, keys="a b", after_ms=1000 * n) for n in range(5)]
    killed = opened(tmp_path, slots=slots, records=records)
    index_timestamp = killed.flush() if flushed else 0
    written: list[int] = []
    pwrite = disk.pwrite

    def counting(fd: int, content: bytes, offset: int) -> int:
        written.append(len(content))
        return pwrite(fd, content, offset)

    monkeypatch.setattr(disk, "pwrite", counting)
    index = service(tmp_path, slots=slots)
    index.recover(clean=False, log_end=LOG_END, index_timestamp=index_timestamp)

    assert sum(written) < SLOT.size * slots / 10
    index.close()
    killed.close()


def test_a_record_split_between_files_is_put_again_whole(tmp_path: Path) -> None:
    """Its keys in the full file are there, those in the next one are not certain."""
    records = [record(0, keys="a b", after_ms=0), record(100, keys="a b c d", after_ms=60_000)]
    killed = opened(tmp_path, items=5, records=records)
    flushed_before_the_last = START_MS + 30_000
    index = service(tmp_path, items=5)
    start = index.recover(clean=False, log_end=LOG_END, index_timestamp=flushed_before_the_last)

    assert start == 0
    index.put_group(records)
    assert_finds_exactly(index, records)
    index.close()
    killed.close()


def test_a_slot_that_never_reached_the_disk_is_written_anew(tmp_path: Path) -> None:
    """After a power cut pages are old and new in any mixture."""
    records = [record(n, keys="a b", after_ms=60_000 * n) for n in range(4)]
    index = opened(tmp_path, slots=1, items=20, records=records)
    index_timestamp = index.flush()
    index.close()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    for slot_value in (0, 3, 19, -5):
        pack_into(">i", content, slot_position(0), slot_value)
        path.write_bytes(content)
        index = service(tmp_path, slots=1, items=20)
        start = index.recover(clean=False, log_end=LOG_END, index_timestamp=index_timestamp)
        index.put_group(records[start:])

        assert_finds_exactly(index, records)
        index.close()


def test_items_behind_the_end_of_the_log_are_dropped(tmp_path: Path) -> None:
    """The log was cut; what is appended at these offsets now is something else."""
    records = [record(10 * n, keys=f"a k{n}", after_ms=1000 * n) for n in range(20)]
    opened(tmp_path, items=12, records=records).close()
    index = service(tmp_path, items=12)
    start = index.recover(clean=True, log_end=75, index_timestamp=0)

    assert start == 71
    assert_finds_exactly(index, records[:8])
    assert all(found(index, f"k{n}") == [] for n in range(8, 20))
    others = [record(75 + n, keys="a b", after_ms=8000) for n in range(10)]
    index.put_group(others)
    assert_finds_exactly(index, records[:8] + others)
    index.close()


def test_a_cut_file_is_as_if_the_rest_had_never_been(tmp_path: Path) -> None:
    """Nothing stale stays behind its last item, where a later crash might bring it back."""
    records = [record(10 * n, keys=f"a k{n}", after_ms=1000 * n) for n in range(20)]
    opened(tmp_path / "cut", slots=90, items=60, records=records).close()
    index = service(tmp_path / "cut", slots=90, items=60)
    index.recover(clean=True, log_end=75, index_timestamp=0)
    index.close()
    opened(tmp_path / "short", slots=90, items=60, records=records[:8]).close()
    (cut,), (short,) = contents(tmp_path / "cut"), contents(tmp_path / "short")

    assert cut[HEADER_SIZE:] == short[HEADER_SIZE:]
    rounded = unpack_header(short)._replace(end_timestamp=START_MS + 7999)
    assert unpack_header(cut) == rounded


@pytest.mark.parametrize("log_end", [0, 1, 10, 11, 89, 90, 91, 300])
def test_the_log_may_end_anywhere(tmp_path: Path, log_end: int) -> None:
    """Before all, between files, behind all."""
    records = [record(10 * n, keys="a b") for n in range(20)]
    opened(tmp_path, items=7, records=records).close()
    index = service(tmp_path, items=7)
    index.recover(clean=True, log_end=log_end, index_timestamp=0)

    kept = [one for one in records if one.physical_offset < log_end]
    assert found(index, "a") == [one.physical_offset for one in kept]
    index.put_group(records)
    assert_finds_exactly(index, records)
    index.close()


def test_a_file_under_repair_counts_as_never_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may reach the disk in any order, so no part of it is certain until the end."""
    opened(tmp_path, records=[record(n, keys="a", after_ms=1000 * n) for n in range(5)]).close()
    headers: list[int] = []

    def spying_cut(file: index_file.IndexFile, number: int) -> None:
        headers.append(unpack_header(contents(tmp_path)[0]).end_timestamp)
        original(file, number)

    # What the header says meanwhile is seen only by who looks at that moment.
    original = index_file.IndexFile._cut
    monkeypatch.setattr(index_file.IndexFile, "_cut", spying_cut)
    index = service(tmp_path)
    index.recover(clean=False, log_end=4, index_timestamp=START_MS + 3500)

    assert headers == [FOREVER, FOREVER]
    assert unpack_header(contents(tmp_path)[0]).end_timestamp < START_MS + 4000
    index.close()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may catch it."""


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("die_at", range(1, 16))
def test_a_kill_during_recovery_is_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int, before: bool, clean: bool
) -> None:
    """Whatever was half done is found out and done again."""
    records = [record(10 * n, keys="a b", after_ms=1000 * n) for n in range(20)]
    first = opened(tmp_path, items=12, records=records)
    index_timestamp = first.flush()
    first.close()
    calls = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == die_at and before:
                raise Killed
            result = call(*args, **kwargs)
            if calls == die_at:
                raise Killed
            return result

        return run

    with monkeypatch.context() as patch:
        for name in ("pwrite", "ftruncate", "unlink", "fdatasync"):
            patch.setattr(disk, name, dying(getattr(disk, name)))
        with contextlib.suppress(Killed):
            service(tmp_path, items=12).recover(
                clean=clean, log_end=75, index_timestamp=index_timestamp
            )
    index = service(tmp_path, items=12)
    start = index.recover(clean=clean, log_end=75, index_timestamp=index_timestamp)
    index.put_group([one for one in records[:8] if one.physical_offset >= start])

    assert_finds_exactly(index, records[:8])
    assert max(found(index, "a")) == 70
    index.close()


# ------------------------------------------------------------------ damage


def damaged_header(content: bytearray, position: int, value: bytes) -> bytes:
    content[position : position + len(value)] = value
    return bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda content: content[:39], id="without-header"),
        pytest.param(lambda content: content[:60], id="without-items"),
        pytest.param(lambda content: content[:-1], id="too-short"),
        pytest.param(lambda content: content + b"\0", id="too-long"),
        pytest.param(lambda content: damaged_header(content, 36, b"\x7f"), id="count"),
        pytest.param(lambda content: damaged_header(content, 16, b"\xff"), id="offset"),
        pytest.param(lambda content: damaged_header(content, 0, b"\x80"), id="time"),
    ],
)
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_file_is_set_aside_and_its_records_are_put_again(
    tmp_path: Path, number: int, damage: Callable[[bytearray], bytes], clean: bool
) -> None:
    """The start never fails for it, and no look-up lacks anything afterwards."""
    records = [record(10 * n, keys="a b", after_ms=60_000 * n) for n in range(12)]
    opened(tmp_path, records=records).close()
    path = sorted(tmp_path.iterdir())[number]
    path.write_bytes(damage(bytearray(path.read_bytes())))
    index = service(tmp_path)
    start = index.recover(clean=clean, log_end=LOG_END, index_timestamp=START_MS + 10_000_000)

    assert path.with_name(path.name + ".bad").exists()
    assert start < 120
    index.put_group([one for one in records if one.physical_offset >= start])
    assert_finds_exactly(index, records)
    index.close()


def test_items_that_contradict_their_header_are_checked_one_by_one(tmp_path: Path) -> None:
    """The end of a file never reached the disk, though the stop was clean."""
    records = [record(10 * n, keys="a b", after_ms=60_000 * n) for n in range(4)]
    opened(tmp_path, items=20, records=records).close()
    (path,) = tmp_path.iterdir()
    cut = item_position(6, 7) + 3
    path.write_bytes(path.read_bytes()[:cut].ljust(index_file_size(7, 20), b"\0"))
    index = service(tmp_path, items=20)

    assert index.recover(clean=True, log_end=LOG_END, index_timestamp=0) == 20
    index.put_group(records[2:])
    assert_finds_exactly(index, records)
    index.close()


@pytest.mark.parametrize(("slots", "items"), [(5, 50), (7, 11), (7, 9), (8, 10), (2, 11), (12, 9)])
def test_other_settings_make_the_index_anew(tmp_path: Path, slots: int, items: int) -> None:
    """Where a slot lies follows from the settings; nothing can be read with others."""
    records = [record(10 * n, keys="a b") for n in range(12)]
    opened(tmp_path, records=records).close()
    index = service(tmp_path, slots=slots, items=items)

    assert index.recover(clean=True, log_end=LOG_END, index_timestamp=0) == 0
    index.put_group(records)  # the two last settings give a file of the same size
    assert_finds_exactly(index, records)
    index.close()


def test_what_is_no_index_file_is_left_alone(tmp_path: Path) -> None:
    """RocketMQ skips such names, too."""
    (tmp_path / "20260101000000000.bad").write_bytes(b"x")
    (tmp_path / "notes").write_bytes(b"x")
    (tmp_path / "123").write_bytes(b"x")
    (tmp_path / "20260101000000001").mkdir()
    index = opened(tmp_path, records=[record(0, keys="a")])

    assert found(index, "a") == [0]
    assert len(list(tmp_path.iterdir())) == 5
    index.close()


def test_a_chain_that_leads_in_circles_ends(tmp_path: Path) -> None:
    """A flipped bit must not hang the broker."""
    opened(tmp_path, slots=1, records=[record(n, keys="a") for n in range(5)]).close()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    pack_into(">i", content, item_position(2, 1) + ITEM_SIZE - 4, 5)
    path.write_bytes(content)
    index = service(tmp_path, slots=1)
    index.recover(clean=True, log_end=LOG_END, index_timestamp=0)

    assert found(index, "a") == [1, 2, 3, 4]
    index.close()


def test_a_file_that_shrinks_while_it_is_open_answers_nothing(tmp_path: Path) -> None:
    """Only another program can do that; reading must not kill the process."""
    index = opened(tmp_path, items=4, records=[record(n, keys="a") for n in range(6)])
    path = min(tmp_path.iterdir())
    os.truncate(path, 0)

    assert found(index, "a") == [3, 4, 5]
    index.close()


# ------------------------------------------------------------------ flushing and expiry


def test_a_flush_covers_what_was_stored_before_the_last_millisecond(tmp_path: Path) -> None:
    """More records may follow within it."""
    index = opened(tmp_path, records=[record(0, keys="a", after_ms=5)])

    assert index.flush() == START_MS + 4
    assert index.flush() == START_MS + 4
    index.close()


def test_a_failed_flush_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one tries again instead of taking all for flushed."""
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


def test_files_whose_records_are_gone_are_dropped(tmp_path: Path) -> None:
    """Never the newest, and only from the oldest on; whoever asked deletes them."""
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
    """A mistake in the settings shows at once."""
    for slots, items in ((0, 10), (10, 1)):
        with pytest.raises(ValueError, match="at least"):
            service(Path("unused"), slots=slots, items=items)


def test_a_file_counts_as_full_when_it_is_on_disk(tmp_path: Path) -> None:
    """A digest of it would call it changed after a power cut that took its last items."""
    records = [record(10 * n, keys="a b", after_ms=1000 * n) for n in range(20)]
    index = opened(tmp_path, items=12, records=records)
    before = [path for path, _ in index.extents()]
    index.flush()
    behind = [path for path, _ in index.extents()]
    index.close()

    assert len(behind) == 4
    assert before == behind[:1]


def test_the_first_touch_of_a_page_brings_in_no_other(tmp_path: Path) -> None:
    """Of 8 MiB of read-ahead each page would be filled with zeros while the loop stands still."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("needs /proc to see how a file is mapped")
    index = opened(tmp_path, records=[record(0, keys="a")])
    (path,) = tmp_path.iterdir()

    mapping = maps.read_text(encoding="ascii").partition(str(path))[2]

    flags = mapping.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "rr" in flags  # "random reads"
    index.close()
