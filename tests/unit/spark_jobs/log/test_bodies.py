"""Compressed bodies, unpacked; neither Java nor Spark here."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from halfmq.spark_jobs.source import bodies
from halfmq.spark_jobs.source.bodies import TooMuchError, unpack, unpacked
from tests.support.log_writer import LogWriter

TEXT = b"a message that repeats itself, " * 200
# By RocketMQ's MessageSysFlag: bit 0 says compressed, bits 8 to 10 with what.
OLD_ZLIB, LZ4, ZSTD, ZLIB = 0x001, 0x101, 0x201, 0x301


def packed(codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(TEXT)
    return bytes(sink.getvalue())


PACKED = {OLD_ZLIB: zlib.compress(TEXT), ZLIB: zlib.compress(TEXT), LZ4: packed("lz4")}
PACKED[ZSTD] = packed("zstd")


def rows_of(folder: Path, records: list[tuple[str, bytes, int]]) -> Rows:
    log = LogWriter(folder)
    for topic, body, flags in records:
        log.append(topic, body, sys_flag=flags)
    log.close()
    extent = survey(folder)
    (rows,) = (
        item
        for item in SegmentReader(extent.segments[0], extent.limit(extent.segments[0])).scan(
            0, extent.end_offset
        )
        if isinstance(item, Rows)
    )
    return rows


@pytest.mark.parametrize("flags", PACKED)
def test_what_clients_compress_is_unpacked(flags: int) -> None:
    """With each compression that RocketMQ knows; without a name it is zlib."""
    assert len(PACKED[flags]) < len(TEXT) / 5
    assert unpack(PACKED[flags], flags) == TEXT


def test_java_s_lz4_frames_are_understood() -> None:
    """As lz4-java writes them: with blocks of 4 MiB that stand for themselves, and no sizes."""
    frame = bytes.fromhex("04224d18 6070 73 05000080 68656c6c6f 00000000")

    assert unpack(frame, LZ4) == b"hello"


def test_compressed_and_plain_bodies_stay_in_their_order(tmp_path: Path) -> None:
    """Each in the row of its record, empty ones too."""
    rows = rows_of(
        tmp_path,
        [("a", b"plain", 0), ("a", PACKED[LZ4], LZ4), ("b", b"", 0), ("b", PACKED[ZLIB], ZLIB)],
    )

    assert unpacked(rows, None).values.to_pylist() == [b"plain", TEXT, b"", TEXT]
    of_b = unpacked(rows, frozenset({"b"}))
    assert of_b.values.to_pylist() == [None, None, b"", TEXT]


@pytest.mark.parametrize("flags", PACKED)
@pytest.mark.parametrize("body", [b"", b"no such format", None])
def test_what_cannot_be_unpacked_is_null_and_says_why(
    flags: int, body: bytes | None, tmp_path: Path
) -> None:
    """Foreign bytes, or bytes that end too early; the others are not touched."""
    broken = PACKED[flags][:-20] if body is None else body
    rows = rows_of(tmp_path, [("a", broken, flags), ("a", PACKED[ZSTD], ZSTD), ("a", b"p", 0)])

    found = unpacked(rows, None)

    assert found.values.to_pylist() == [None, TEXT, b"p"]
    assert list(found.errors) == [0]
    assert found.errors[0].startswith("the body is not")


def test_an_unknown_compression_is_an_error_of_its_record(tmp_path: Path) -> None:
    """Bits that no client sets."""
    rows = rows_of(tmp_path, [("a", b"?", 0x701)])

    assert list(unpacked(rows, None).errors) == [0]


def test_a_bomb_does_not_take_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unpacked no further than to the limit."""
    monkeypatch.setattr(bodies, "BODY_MAX", 1_000)

    for flags, body in PACKED.items():
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            unpack(body, flags)


def test_more_than_fits_at_once_is_asked_for_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record always fits."""
    monkeypatch.setattr(bodies, "BATCH_MAX", len(TEXT) + 1)
    rows = rows_of(tmp_path, [("a", PACKED[LZ4], LZ4)] * 2)

    with pytest.raises(TooMuchError):
        unpacked(rows, None)
    assert unpacked(rows.at(np.arange(1)), None).values.to_pylist() == [TEXT]
