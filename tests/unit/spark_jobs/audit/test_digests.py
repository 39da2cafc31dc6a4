"""What no checksum of a record covers, by the digests of a store; without Spark."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from halfmq.spark_jobs.audit.checks import Check, checks_of
from halfmq.spark_jobs.audit.digests import changes
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from halfmq.spark_jobs.log.segments import LogExtent
from halfmq.spark_jobs.log.store_files import StoreFiles
from tests.support.damage import filled_store, flip


def rows_of(extent: LogExtent) -> list[tuple[Path, Rows]]:
    return [
        (Path(segment.path), item)
        for segment in extent.segments
        for item in SegmentReader(segment, extent.limit(segment)).scan(0, segment.size)
        if isinstance(item, Rows)
    ]


def changed(extent: LogExtent) -> list[tuple[str, list[int]]]:
    return [
        (kind, offsets)
        for segment in extent.segments
        for kind, offsets, _, _ in changes(segment, extent.limit(segment))
    ]


def test_a_flipped_bit_in_properties_names_its_record(tmp_path: Path) -> None:
    """Also one in a topic; one in a body is told by the body's CRC, and not twice."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    choose = random.Random(seed)
    extent = survey(filled_store(tmp_path / "store", 60))
    assert changed(extent) == []
    path, rows = choose.choice(rows_of(extent))
    place = choose.randrange(len(rows))
    at = int(rows.starts[place])
    properties, end = int(rows.properties_starts[place]), int(rows.ends[place])
    body = int(rows.body_bounds[0][place])

    flipped = choose.randrange(properties, end), choose.randrange(8)
    flip(path, *flipped)
    assert changed(extent) == [("crc", [rows.segment.base + at])]

    flip(path, *flipped)
    flip(path, body)
    assert changed(extent) == []


def test_several_flipped_bits_name_their_block(tmp_path: Path) -> None:
    """Which bits they are cannot be told."""
    extent = survey(filled_store(tmp_path / "store", 60))
    path, rows = rows_of(extent)[0]
    for place in (3, 5):
        flip(path, int(rows.ends[place]) - 4, 2)

    ((kind, offsets),) = changed(extent)

    assert offsets[0] <= int(rows.physical_offsets[3]) < offsets[1]
    assert kind == "corrupt_record"


def test_what_was_not_compared_is_said_with_its_reason(tmp_path: Path) -> None:
    """Of a store all is; of a folder of segments only what stands in the log itself."""
    root = filled_store(tmp_path / "store", 5)
    said = checks_of(survey(root), StoreFiles(root), crc=True, queues=True)
    assert said == [Check(what, True) for what in ("crc", "queues", "digests", "tail")]

    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "digests")
    said = checks_of(survey(root), StoreFiles(root), crc=False, queues=True)
    assert [(check.what, check.checked) for check in said] == [
        ("crc", False),
        ("queues", False),
        ("digests", False),
        ("tail", True),
    ]
    assert "consumequeue" in str(said[1].why)
