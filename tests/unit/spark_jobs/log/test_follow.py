"""Following a log that is being written, without Spark: how far it goes by now."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.spark_jobs.errors import DataLossError
from halfmq.spark_jobs.log.follow import LogFollower
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from halfmq.spark_jobs.log.segments import find_segments
from halfmq.store.message_store import MessageStore
from tests.support.log_writer import START, LogWriter, encode
from tests.support.stores import Clock, append_durably, draft, small_config

SEGMENT = 1 << 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    opened.open()
    yield opened
    opened.close()


def written(folder: Path, count: int = 60) -> LogWriter:
    log = LogWriter(folder, segment_size=SEGMENT)
    for number in range(count):
        log.append("orders", b"b" * (number % 90), {"KEYS": f"k{number}"})
    log.close()
    return log


def records_between(folder: Path, start: int, end: int) -> list[int]:
    """Read as a batch of a stream does."""
    extent = survey(folder).part(start, end)
    found: list[int] = []
    for segment in extent.segments:
        reader = SegmentReader(segment, extent.limit(segment))
        begin = max(start - segment.base, 0)
        for item in reader.scan(begin, segment.size, aligned=True):
            if isinstance(item, Rows):
                found += item.physical_offsets.tolist()
    return found


def test_what_a_broker_adds_is_found(store: MessageStore, tmp_path: Path) -> None:
    """From append to append, over the ends of segments, by one follower."""
    follower = LogFollower(str(tmp_path / "store"))
    ends = []
    for number in range(40):
        append_durably(store, *(draft(body=b"x" * 300 * (number % 5)) for _ in range(3)))
        extent = follower.extent()
        ends.append(extent.end_offset)
        assert extent == survey(tmp_path / "store")

    assert ends == sorted(set(ends))
    assert len(extent.segments) > 2


def test_where_nothing_was_written_nothing_is_read(
    store: MessageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark asks a hundred times a second."""
    append_durably(store, draft())
    follower = LogFollower(str(tmp_path / "store"))
    before = follower.extent()
    monkeypatch.setattr("halfmq.spark_jobs.log.follow.find_end", None)

    assert follower.extent() == before


@pytest.mark.parametrize("bytes_max", [1, 100, 250, 400, 1_000, SEGMENT, 3 * SEGMENT + 5, 1 << 30])
def test_limited_batches_have_every_record_once(bytes_max: int, tmp_path: Path) -> None:
    """Also where a record is larger than the limit, and at the blanks between segments."""
    log = written(tmp_path)
    largest = max(record.size for record in log.written)
    follower = LogFollower(str(tmp_path))
    found: list[int] = []
    start, end = 0, follower.end(0, bytes_max)
    while end > start:
        assert end - start < bytes_max + largest
        found += records_between(tmp_path, start, end)
        start, end = end, follower.end(end, bytes_max)

    assert found == [record.offset for record in log.written]
    assert start == survey(tmp_path).end_offset


def test_a_batch_begins_at_a_record(tmp_path: Path) -> None:
    """Whatever number a user begins with."""
    log = written(tmp_path)
    follower = LogFollower(str(tmp_path))
    first, second = log.written[3:5]

    assert follower.border(first.offset) == first.offset
    assert follower.border(first.offset + 1) == second.offset
    assert follower.border(log.end + 999) == log.end + 999


def test_damage_between_two_batches_is_not_passed_over(tmp_path: Path) -> None:
    """The hole belongs to the batch that begins with it."""
    log = written(tmp_path, 20)
    victim = log.written[5]
    with (tmp_path / f"{0:020}").open("r+b") as file:
        file.seek(victim.offset + 4)
        file.write(b"????")
    extent = survey(tmp_path).part(victim.offset, log.end)
    reader = SegmentReader(extent.segments[0], extent.limit(extent.segments[0]))

    hole, *_ = reader.scan(victim.offset, SEGMENT, aligned=True)

    assert not isinstance(hole, Rows)
    assert (hole.position, hole.size) == (victim.offset, victim.size)


def test_old_records_behind_the_end_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    """RocketMQ cuts a log without zeroing; also when the follower stood at the very place."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for number in range(8):
        log.append("t", b"old", {"KEYS": f"{number}"})
    old = (log.close() / f"{0:020}").read_bytes()
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    log.now = START + 60_000
    path = tmp_path / f"{0:020}"
    follower = LogFollower(str(tmp_path))
    for number in range(4):
        log.append("t", b"longer", {"KEYS": f"{number}"})
        end = log.end
        path.write_bytes((log.close() / path.name).read_bytes()[:end] + old[end:])

        assert follower.extent().end_offset == end
        assert follower.extent().end_offset == end, "what follows was looked at by itself"


def test_a_group_that_is_being_copied_is_waited_for(tmp_path: Path) -> None:
    """Of a group the first bytes may arrive last; until then the end is in front of it."""
    log = written(tmp_path, 12)
    path = tmp_path / f"{0:020}"
    whole = path.read_bytes()
    hidden = log.written[-1]
    path.write_bytes(whole[: hidden.offset] + bytes(SEGMENT - hidden.offset))
    follower = LogFollower(str(tmp_path))
    before = follower.extent().end_offset
    path.write_bytes(whole)

    assert (before, follower.extent().end_offset) == (hidden.offset, log.end)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    """Deleted by age, lost in between, or cut off."""
    log = written(tmp_path, 150)
    segments = find_segments(tmp_path)
    follower = LogFollower(str(tmp_path))
    follower.demand(0)
    follower.demand(100, log.end)

    with pytest.raises(DataLossError, match=f"the log ends at {log.end}"):
        follower.demand(log.end + 1)
    with pytest.raises(DataLossError, match=f"the log ends at {log.end}"):
        follower.demand(0, log.end + 1)
    Path(segments[0].path).unlink()
    with pytest.raises(DataLossError, match=f"begins at {SEGMENT}: older segments"):
        follower.demand(SEGMENT - 1)
    follower.demand(SEGMENT)
    Path(segments[2].path).unlink()
    with pytest.raises(DataLossError, match=f"bytes from {2 * SEGMENT} to {3 * SEGMENT}"):
        follower.demand(SEGMENT)
    follower.demand(SEGMENT, 2 * SEGMENT)
    assert follower.end(2 * SEGMENT, 200) > 3 * SEGMENT


def test_a_log_that_was_cut_and_written_anew_is_noticed(tmp_path: Path) -> None:
    """A checkpoint from before names a place inside a record."""
    log = written(tmp_path, 20)
    follower = LogFollower(str(tmp_path))
    for record in log.written:
        follower.demand_border(record.offset)
    follower.demand_border(log.end)

    with pytest.raises(DataLossError, match="the log was cut there and written anew"):
        follower.demand_border(log.written[7].offset + 5)


def test_an_empty_log_begins_where_its_first_file_does(tmp_path: Path) -> None:
    """So that a stream that waits for it misses nothing."""
    folder = tmp_path / "commitlog"
    folder.mkdir()
    (folder / f"{SEGMENT * 3:020}").write_bytes(bytes(SEGMENT))
    follower = LogFollower(str(tmp_path))

    extent = follower.extent()

    assert (extent.first_offset, extent.end_offset) == (SEGMENT * 3, SEGMENT * 3)
    assert survey(tmp_path) == extent
    record = encode("t", b"", b"", offset=SEGMENT * 3)
    (folder / f"{SEGMENT * 3:020}").write_bytes(record.ljust(SEGMENT, b"\0"))
    assert follower.end(extent.end_offset) == SEGMENT * 3 + len(record)


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_says_what_a_survey_says(seed: int, tmp_path: Path) -> None:
    """However much is written between two looks, and however the limits fall."""
    print("seed", seed)
    choose = random.Random(seed)
    log = LogWriter(tmp_path / "commitlog", segment_size=SEGMENT)
    follower = LogFollower(str(tmp_path))
    position = 0
    found: list[int] = []
    for _ in range(15):
        for _ in range(choose.randrange(9)):
            log.append("t", choose.randbytes(choose.randrange(600)))
        log.close()
        assert follower.extent() == survey(tmp_path)
        end = follower.end(position, choose.choice([None, 1, 700, 9_000]))
        found += records_between(tmp_path, position, end)
        position = end
    found += records_between(tmp_path, position, follower.end(position))

    assert found == [record.offset for record in log.written]
