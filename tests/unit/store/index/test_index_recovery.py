"""Recovery of the key index after any stop, and damaged files."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from struct import pack_into
from typing import Any

import pytest

from halfmq.store.files import disk
from halfmq.store.format.index import (
    HEADER_SIZE,
    ITEM_SIZE,
    SLOT,
    index_file_size,
    item_position,
    slot_position,
    unpack_header,
)
from tests.support.index_records import (
    FOREVER,
    LOG_END,
    START_MS,
    assert_finds_exactly,
    contents,
    found,
    opened,
    record,
    service,
)


def test_after_a_clean_stop_the_index_is_continued(tmp_path: Path) -> None:
    """The newest file is continued; records after its last one must be put."""
    opened(tmp_path, records=[record(n, keys="a") for n in range(15)]).close()
    index = service(tmp_path)

    assert index.recover(clean=True, log_end=100, index_timestamp=0) == 15
    index.put_group([record(n, keys="a") for n in range(10, 20)])
    assert found(index, "a") == list(range(20))
    assert index.last_update == (START_MS, 19)
    index.close()


def test_a_missing_index_is_filled_from_the_first_record(tmp_path: Path) -> None:
    """``recover`` returns 0, and all records are found afterwards."""
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
    """Flushed items are kept, and every record is found once."""
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
def test_a_start_after_a_kill_writes_only_changed_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """By default the slots have 20 MB, and writing all of them would delay the start."""
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


def test_a_record_with_keys_in_two_files_is_put_again(tmp_path: Path) -> None:
    """Its keys in the full file are certain, those in the next one are not."""
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


def test_a_slot_that_was_not_written_to_disk_is_rewritten(tmp_path: Path) -> None:
    """After a power cut each page may be the old or the new one."""
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


def test_items_after_the_end_of_the_log_are_dropped(tmp_path: Path) -> None:
    """The log was cut, and other records will get these offsets."""
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


def test_a_cut_file_equals_one_without_the_dropped_items(tmp_path: Path) -> None:
    """No old items follow the last one, where they could reappear after a crash."""
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
    """Before all items, between files, and after all."""
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
    """Its pages may be written in any order, so no item is certain until the repair is done."""
    opened(tmp_path, records=[record(n, keys="a", after_ms=1000 * n) for n in range(5)]).close()
    headers: list[int] = []

    ftruncate = disk.ftruncate

    def truncate(fd: int, size: int) -> None:
        headers.append(unpack_header(contents(tmp_path)[0]).end_timestamp)
        ftruncate(fd, size)

    monkeypatch.setattr(disk, "ftruncate", truncate)
    index = service(tmp_path)
    index.recover(clean=False, log_end=4, index_timestamp=START_MS + 3500)

    assert set(headers) == {FOREVER}
    assert unpack_header(contents(tmp_path)[0]).end_timestamp < START_MS + 4000
    index.close()


class Killed(BaseException):
    """Simulates SIGKILL: no handler of the code under test may catch it."""


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("die_at", range(1, 16))
def test_a_killed_recovery_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int, before: bool, clean: bool
) -> None:
    """At any system call; the next recovery completes it."""
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
    """The start succeeds, and afterwards all look-ups are complete."""
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


def test_if_header_and_items_are_inconsistent_each_item_is_checked(tmp_path: Path) -> None:
    """The end of the file was not written to disk, although the stop was clean."""
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
def test_with_other_settings_the_index_is_rebuilt(tmp_path: Path, slots: int, items: int) -> None:
    """The layout of a file depends on the settings."""
    records = [record(10 * n, keys="a b") for n in range(12)]
    opened(tmp_path, records=records).close()
    index = service(tmp_path, slots=slots, items=items)

    assert index.recover(clean=True, log_end=LOG_END, index_timestamp=0) == 0
    index.put_group(records)  # the last two settings give files of the same size
    assert_finds_exactly(index, records)
    index.close()


def test_files_with_other_names_are_ignored(tmp_path: Path) -> None:
    """RocketMQ ignores them too."""
    (tmp_path / "20260101000000000.bad").write_bytes(b"x")
    (tmp_path / "notes").write_bytes(b"x")
    (tmp_path / "123").write_bytes(b"x")
    (tmp_path / "20260101000000001").mkdir()
    index = opened(tmp_path, records=[record(0, keys="a")])

    assert found(index, "a") == [0]
    assert len(list(tmp_path.iterdir())) == 5
    index.close()


def test_a_circular_chain_of_items_ends_a_look_up(tmp_path: Path) -> None:
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


def test_a_file_that_another_program_truncates_finds_nothing(tmp_path: Path) -> None:
    """Reading it must not kill the process."""
    index = opened(tmp_path, items=4, records=[record(n, keys="a") for n in range(6)])
    path = min(tmp_path.iterdir())
    os.truncate(path, 0)

    assert found(index, "a") == [3, 4, 5]
    index.close()
