"""Consume queues: entries, gaps, cuts and flushes, over any number of files."""

from pathlib import Path

import pytest

from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry
from halfmq.store.queue.consume_queue import ConsumeQueue, MapPool


def new_queue(directory: Path, pool: MapPool) -> ConsumeQueue:
    return ConsumeQueue("T", 0, MappedFileQueue(directory, 200), pool)


def entries(numbers: range) -> bytes:
    return b"".join(QueueEntry(number * 100, 100, number).pack() for number in numbers)


@pytest.mark.parametrize("end", [0, 1, 9, 10, 11, 20, 35])
def test_a_queue_ends_where_it_was_cut(tmp_path: Path, end: int) -> None:
    """At any entry, within or at the end of a file; what followed is zeroed or deleted."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(35)), 3500)

    queue.cut(end)

    assert (queue.next_offset, queue.last_end) == (end, end * 100)
    queue.close()
    reloaded = new_queue(tmp_path, MapPool(4))
    reloaded.files.load()
    reloaded.load()
    assert (reloaded.next_offset, reloaded.last_end) == (end, end * 100)
    reloaded.extend(entries(range(end, 50)), 5000)
    assert reloaded.entries(0, 50) == entries(range(50))
    reloaded.close()
    content = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert content.rstrip(b"\0") == entries(range(50)).rstrip(b"\0")


def test_a_queue_finds_entries_by_physical_offset(tmp_path: Path) -> None:
    """The first one at or after it; the end of the queue if there is none."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(25)), 2500)

    found = [queue.find_physical(offset) for offset in (0, 1, 100, 2400, 2401, 9999)]

    assert found == [0, 1, 1, 24, 25, 25]
    queue.close()


@pytest.mark.parametrize("gap", [1, 5, 10, 11, 100])
def test_a_queue_skips_records_missing_in_the_log(tmp_path: Path, gap: int) -> None:
    """Later entries keep their queue offsets, for gaps within a file and across files."""
    queue = new_queue(tmp_path, MapPool(4))
    queue.extend(entries(range(3)), 300)

    queue.skip_to(3 + gap)
    queue.extend(entries(range(3 + gap, 6 + gap)), (6 + gap) * 100)

    queue.close()
    reloaded = new_queue(tmp_path, MapPool(4))
    reloaded.files.load()
    reloaded.load()
    assert reloaded.next_offset == 6 + gap
    assert reloaded.entries(3 + gap, 3) == entries(range(3 + gap, 6 + gap))
    reloaded.close()


def test_the_files_of_a_queue_can_be_closed_at_any_time(tmp_path: Path) -> None:
    """They are opened again by the next append or read, and the pool's limit holds."""
    pool = MapPool(1)
    first, second = new_queue(tmp_path / "1", pool), new_queue(tmp_path / "2", pool)
    for number in range(45):
        for queue in (first, second):
            queue.extend(entries(range(number, number + 1)), number * 100 + 100)
            assert queue.entry(number // 2).physical_offset == number // 2 * 100

    assert first.limit == 0  # the second queue has taken the only place
    assert first.entries(0, 45) == second.entries(0, 45) == entries(range(45))
    assert second.limit == 0  # the first queue was read
    for queue in (first, second):
        queue.close()


def test_a_flush_of_a_queue_covers_all_files_with_new_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last flushed entry on, each entry once."""
    queue = new_queue(tmp_path, MapPool(4))
    flushed: list[str] = []
    monkeypatch.setattr(
        "halfmq.store.files.disk.sync_data",
        lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name[-3:]),
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name descriptors")
    queue.extend(entries(range(25)), 2500)

    assert queue.sync()
    assert not queue.sync()
    queue.extend(entries(range(25, 30)), 3000)
    assert queue.sync()

    assert flushed == ["000", "200", "400", "400"]
    assert 25 * ENTRY_SIZE == 500
    queue.close()
