"""What the cache of an audit gives back, and what it does not believe; no Spark here."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from halfmq.spark_jobs.audit import audit_cache
from halfmq.spark_jobs.audit.audit_cache import AuditCache, Part
from halfmq.spark_jobs.audit.digest import Seen, Watch
from halfmq.spark_jobs.audit.digest_source import NAMES
from halfmq.spark_jobs.errors import CacheError
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segments import SegmentReader, find_segments
from tests.support.planted_log import plant

SEGMENT = 1 << 15
NO_NAMES = NAMES.empty_table()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted") / "store"
    plant(root, 7, 120, fault_every=5, segment_size=SEGMENT)
    return root


@pytest.fixture
def root(planted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(planted, tmp_path / "store"))


@pytest.fixture
def part(root: Path) -> Part:
    segment = find_segments(root)[1]
    return Part(segment, 0, segment.size, segment.size)


def seen_of(part: Part) -> Seen:
    watch = Watch(part.segment, verify_crc=True, with_tags=True)
    for item in SegmentReader(part.segment, part.limit).scan(part.start, part.stop):
        watch.take(item) if isinstance(item, Rows) else watch.take_hole(item)
    return watch.seen()


def assert_same(one: Seen, other: Seen) -> None:
    for name in ("events", "bare", "op_entries", "unread_ops"):
        np.testing.assert_array_equal(getattr(one.told, name), getattr(other.told, name))
    assert one.told.labels == other.told.labels
    np.testing.assert_array_equal(one.queued.slots, other.queued.slots)
    assert one.queued.topics == other.queued.topics
    np.testing.assert_array_equal(one.unsound, other.unsound)
    plain = [field for field in Seen._fields if field not in {"told", "queued", "unsound"}]
    assert [getattr(one, name) for name in plain] == [getattr(other, name) for name in plain]


def test_what_was_seen_comes_back(root: Path, tmp_path: Path) -> None:
    """Every number of it, holes and failed CRCs too."""
    cache = AuditCache(str(tmp_path / "cache"))
    damage = Counter[str]()
    for segment in find_segments(root):
        part = Part(segment, 0, segment.size, segment.size)
        seen = seen_of(part)
        stored = cache.store(part, seen, NO_NAMES, verify_crc=True)

        cached = cache.load(part, verify_crc=True)

        assert cached is not None
        assert cached.names == stored.names
        assert_same(cached.seen, seen)
        damage.update(holes=len(seen.holes), unsound=len(seen.unsound))
    assert damage["holes"]
    assert damage["unsound"]


def test_what_is_empty_comes_back_too(part: Part, tmp_path: Path) -> None:
    """A split without any record of a transaction."""
    cache = AuditCache(str(tmp_path / "cache"))
    nothing = Watch(part.segment, verify_crc=True, with_tags=True).seen()
    cache.store(part, nothing, NO_NAMES, verify_crc=True)

    cached = cache.load(part, verify_crc=True)

    assert cached is not None
    assert_same(cached.seen, nothing)


def test_a_copy_of_the_segment_is_as_good(part: Part, tmp_path: Path) -> None:
    """Times of files and their place prove nothing, so they do not count."""
    cache = AuditCache(str(tmp_path / "cache"))
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)
    copied = tmp_path / "copied" / Path(part.segment.path).name
    copied.parent.mkdir()
    shutil.copy(part.segment.path, copied)

    moved = part._replace(segment=part.segment._replace(path=str(copied)))

    assert cache.load(moved, verify_crc=True) is not None


@pytest.mark.parametrize("place", [0, 1, SEGMENT // 2, SEGMENT - 1])
def test_a_segment_that_is_another_is_noticed(part: Part, tmp_path: Path, place: int) -> None:
    """Though its file has the same name, size and time."""
    cache = AuditCache(str(tmp_path / "cache"))
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)
    path = Path(part.segment.path)
    dated = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(dated, dated))

    assert cache.load(part, verify_crc=True) is None


def test_a_mended_range_is_noticed(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker puts fillers in what it cannot read; that lies between the usual samples."""
    monkeypatch.setattr(audit_cache, "_SAMPLE_SIZE", 1)
    cache = AuditCache(str(tmp_path / "cache"))
    hole = part.segment.base + 1_001
    seen = seen_of(part)._replace(holes=[(hole, hole + 5, "bytes that are no record")])
    cache.store(part, seen, NO_NAMES, verify_crc=True)
    content = bytearray(Path(part.segment.path).read_bytes())
    content[1_002] ^= 1  # no sample
    Path(part.segment.path).write_bytes(content)
    unnoticed = cache.load(part, verify_crc=True)
    content[1_001] ^= 1

    Path(part.segment.path).write_bytes(content)

    assert unnoticed is not None
    assert cache.load(part, verify_crc=True) is None


def test_another_digest_of_the_broker_is_noticed(part: Part, root: Path, tmp_path: Path) -> None:
    """One that was not there before is not: brokers make them a little later."""
    cache = AuditCache(str(tmp_path / "cache"))
    digest = root / "digests" / "commitlog" / Path(part.segment.path).name
    digest.parent.mkdir(parents=True)
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)
    digest.write_bytes(b"one")
    assert cache.load(part, verify_crc=True) is not None
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)

    digest.write_bytes(b"another")

    assert cache.load(part, verify_crc=True) is None


def test_what_was_read_without_crcs_does_not_do_for_an_audit_with_them(
    part: Part, tmp_path: Path
) -> None:
    """The other way round it does."""
    cache = AuditCache(str(tmp_path / "cache"))
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=False)

    assert cache.load(part, verify_crc=True) is None
    assert cache.load(part, verify_crc=False) is not None


def test_every_damaged_byte_of_an_entry_is_noticed(part: Part, tmp_path: Path) -> None:
    """And what was made anew replaces it."""
    cache = AuditCache(str(tmp_path / "cache"))
    names = pa.Table.from_pylist([], schema=NAMES)
    seen = seen_of(part)
    cache.store(part, seen, names, verify_crc=True)
    for path in sorted((tmp_path / "cache").iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 50)):
            for damaged in (
                content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :],
                content[:place],
            ):
                path.write_bytes(damaged)
                assert cache.load(part, verify_crc=True) is None, (path.name, place)
        path.unlink()
        assert cache.load(part, verify_crc=True) is None
        path.write_bytes(damaged)

        cache.store(part, seen, names, verify_crc=True)

        assert cache.load(part, verify_crc=True) is not None
        assert len(list((tmp_path / "cache").iterdir())) == 2


def test_entries_of_deleted_segments_are_forgotten(part: Part, tmp_path: Path) -> None:
    """The cache does not outgrow the log; what is not of the cache stays."""
    folder = tmp_path / "cache"
    cache = AuditCache(str(folder))
    cache.forget_before(10)
    cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)
    (folder / f"{0:020}-notes.txt").touch()

    cache.forget_before(part.segment.base)
    kept = len(list(folder.iterdir()))
    cache.forget_before(part.segment.base + 1)

    assert kept == 3
    assert [path.name for path in folder.iterdir()] == [f"{0:020}-notes.txt"]


def test_a_cache_that_cannot_be_written_is_named(part: Part, tmp_path: Path) -> None:
    """As where a file is in its place."""
    (tmp_path / "cache").touch()
    cache = AuditCache(str(tmp_path / "cache"))

    assert cache.load(part, verify_crc=True) is None
    with pytest.raises(CacheError, match=r"cache .*/cache: "):
        cache.store(part, seen_of(part), NO_NAMES, verify_crc=True)
