"""Damaged records are replaced, and their positions in log and queue are kept."""

import shutil
from pathlib import Path

import pytest

from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry
from tests.support.stopped_stores import (
    filled,
    forget_digests,
    log_patch,
    log_path,
    mark_aborted,
    open_store,
    patch,
    served,
)
from tests.support.stores import draft, everything


@pytest.mark.parametrize("sys_flag", [0, 0x80, 0xC], ids=["plain", "inner batch", "rolled back"])
def test_a_record_whose_topic_is_not_utf8_is_replaced(sys_flag: int, root: Path) -> None:
    """It is reported as damage, and queue and log continue after it."""
    store, _ = open_store(root)
    drafts = [draft(body=b"1"), draft(body=b"2", sys_flag=sys_flag), draft(body=b"3")]
    offsets = [appended.physical_offset for one in drafts for appended in store.append([one])]
    store.close()
    with log_path(root, 0).open("rb") as file:
        file.seek(offsets[1])
        content = file.read(offsets[2] - offsets[1])
    log_patch(root, offsets[1] + content.index(b"\x01T") + 1, b"\xff")
    mark_aborted(root)

    store, report = open_store(root)

    assert [damage.offset for damage in report.damages] == [offsets[1]]
    assert served(store) == [offsets[0], offsets[2]]
    scanned = [record.physical_offset for record in store.reader.scan(0)]
    assert scanned == offsets, "a filler has its offset"
    store.close()


def test_the_copies_of_damaged_ranges_are_limited(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken disk must not fill another one; the log is repaired as well."""
    offsets = filled(root)
    for offset in (offsets[3], offsets[30], offsets[60]):
        log_patch(root, offset + 100, b"\xff" * 8)
    mark_aborted(root)
    monkeypatch.setattr("halfmq.store.recovery.fillers_for_lost_records.COPIES_SIZE_MAX", 1500)

    store, report = open_store(root)

    assert len(report.damages) == 3
    kept = list((root / "damaged").iterdir())
    assert len(kept) == 2
    assert sum(path.stat().st_size for path in kept) <= 1500
    assert len(served(store)) == len(offsets) - 3
    store.close()


def test_fillers_stay_hidden_after_rocketmq_used_the_store(root: Path) -> None:
    """RocketMQ's queue entries do not mark fillers, so the next start rebuilds the queues."""
    offsets = filled(root)
    log_patch(root, offsets[30] + 100, b"\xff" * 8)
    mark_aborted(root)
    store, _ = open_store(root)
    lost = store.reader.record_at(offsets[30])
    assert lost is not None
    expected = served(store)
    store.close()
    path = min((root / "consumequeue" / lost.topic / str(lost.queue_id)).iterdir())
    entry = QueueEntry(lost.physical_offset, lost.total_size, 0).pack()
    patch(path, lost.queue_offset * ENTRY_SIZE, entry)
    patch(root / "checkpoint", 0, b"\0\1")

    for _ in range(2):
        store, _ = open_store(root)
        assert served(store) == expected
        store.close()


def test_a_start_without_damage_reports_none(root: Path) -> None:
    """``store.recovery`` shows the progress meanwhile."""
    filled(root)
    mark_aborted(root)
    forget_digests(root)

    store, report = open_store(root)

    assert report.damages == ()
    assert store.recovery.records == report.records == 195
    assert store.recovery.done == report.end_offset <= store.recovery.total
    assert not (root / "damaged").exists()
    store.close()


@pytest.mark.parametrize("number", [0, 1, 100, 193, 194])
@pytest.mark.parametrize("bit", [0, 1, 5, 9, 20, 45, 63])
def test_a_wrong_queue_offset_hides_no_other_message(root: Path, number: int, bit: int) -> None:
    """Without digests: the record may seem to be far ahead in its queue, or before its end."""
    offsets = filled(root)
    shutil.rmtree(root / "digests")
    record = offsets[number]
    store, _ = open_store(root)
    encoded = store.reader.record_bytes(record)
    messages = everything(store)
    store.close()
    assert encoded is not None
    wrong = int.from_bytes(encoded[20:28], "big") ^ 1 << bit
    shutil.rmtree(root / "digests")
    log_patch(root, record + 20, wrong.to_bytes(8, "big"))
    mark_aborted(root)

    for _ in range(2):
        store, _ = open_store(root)
        served = everything(store)
        others = [one for one in messages if one.physical_offset != record]
        assert sum(one not in served for one in others) <= 1, "the one whose queue offset it takes"
        store.close()
        mark_aborted(root)
