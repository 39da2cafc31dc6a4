"""Logs on other file systems, and without mapping files; neither Java nor Spark here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from pyarrow import fs

from halfmq.spark_jobs.errors import LogDirectoryError
from halfmq.spark_jobs.log import files
from halfmq.spark_jobs.log.follow import LogFollower
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.queue_entries import find_queue_files, read_entries
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from tests.support import golden_store
from tests.support.log_writer import LogWriter

SEGMENT = 1 << 16


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is reached as ``s3://bucket/``, through a file system of pyarrow's."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    system = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())

    def file_system_of(path: str) -> tuple[fs.FileSystem, str]:
        if not path.startswith("s3://bucket"):
            return fs.LocalFileSystem(), path
        return system, unquote(path.removeprefix("s3://bucket").strip("/").partition("?")[0])

    monkeypatch.setattr(files, "file_system_of", file_system_of)
    return folder


def read_all(path: str, *, memory_map: bool = True, step: int = 1 << 30) -> list[tuple[int, bytes]]:
    """Every record's offset and body."""
    extent = survey(path, memory_map=memory_map)
    found: list[tuple[int, bytes]] = []
    for segment in extent.segments:
        limit = extent.limit(segment)
        for start in range(0, limit, step):
            reader = SegmentReader(segment, limit, memory_map=memory_map)
            for item in reader.scan(start, start + step, batch_rows=20):
                if isinstance(item, Rows):
                    bodies = item.bodies().to_pylist()
                    found += zip(item.physical_offsets.tolist(), bodies, strict=True)
    return found


def large_log(folder: Path) -> LogWriter:
    log = LogWriter(folder, segment_size=SEGMENT)
    for number in range(500):
        log.append("t", bytes([number % 256]) * (number * 7 % 900), {"KEYS": "k"})
    log.close()
    return log


@pytest.mark.parametrize("window", [1 << 12, 1 << 24])
@pytest.mark.parametrize("step", [1_000, 1 << 30])
def test_a_log_reads_the_same_in_windows(
    window: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that lie across two windows, splits that begin anywhere."""
    monkeypatch.setattr(files, "WINDOW", window)
    monkeypatch.setattr("halfmq.spark_jobs.log.segment_reader.WINDOW", window)
    log = large_log(tmp_path)

    found = read_all(str(tmp_path), memory_map=False, step=step)

    assert found == [(record.offset, record.body) for record in log.written]


def test_damage_is_found_in_windows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next record may be several windows away."""
    monkeypatch.setattr(files, "WINDOW", 1 << 12)
    monkeypatch.setattr("halfmq.spark_jobs.log.segment_reader.WINDOW", 1 << 12)
    log = large_log(tmp_path)
    first, behind = log.written[3], log.written[40]
    path = tmp_path / f"{0:020}"
    content = bytearray(path.read_bytes())
    content[first.offset : behind.offset] = b"\xff" * (behind.offset - first.offset)
    path.write_bytes(content)

    found = read_all(str(tmp_path), memory_map=False)

    assert found == read_all(str(tmp_path))
    assert len(found) == len(log.written) - 37


def test_a_golden_store_in_a_bucket_reads_as_on_disk(bucket: Path, tmp_path: Path) -> None:
    """Its log and its queues, by the URI of its root."""
    store = golden_store.unpack("tx-midway-clean", tmp_path)
    shutil.copytree(store.root, bucket / "a store")
    uri = "s3://bucket/a%20store"

    assert read_all(uri) == read_all(str(store.root))
    remote, local = (
        [
            (batch.file.topic, batch.file.queue, batch.slots.tolist(), batch.content.tolist())
            for file in find_queue_files(root)
            for batch in read_entries(file)
        ]
        for root in (uri, str(store.root))
    )
    assert remote == local
    assert remote


def test_a_bucket_that_grows_is_followed(bucket: Path) -> None:
    """By the segments that appear in it."""
    log = LogWriter(bucket / "log", segment_size=SEGMENT)
    follower = LogFollower("s3://bucket/log")
    log.append("t", b"one")
    log.close()
    ends = [follower.extent().end_offset]
    while log.end < SEGMENT:
        log.append("t", bytes(999))
    log.close()
    ends.append(follower.extent().end_offset)

    assert ends == [log.written[0].size, log.end]


@pytest.mark.parametrize(
    ("path", "said"),
    [("s3://bucket/none", "no such directory"), ("s3://bucket/file", "is not a directory")],
)
def test_what_is_no_log_is_said_of_a_bucket_too(bucket: Path, path: str, said: str) -> None:
    """In the same words."""
    (bucket / "file").touch()

    with pytest.raises(LogDirectoryError, match=f"{path}: {said}"):
        survey(path)


def test_an_unknown_file_system_is_named() -> None:
    """With what pyarrow says of it."""
    with pytest.raises(LogDirectoryError, match=r"nosuchthing://host/log: .*nosuchthing"):
        survey("nosuchthing://host/log")


def test_a_file_that_is_deleted_while_its_folder_is_listed_was_not_there(tmp_path: Path) -> None:
    """A stream does not end because the broker deletes a segment by age; a broken link is told."""
    (tmp_path / "deleted").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with os.scandir(tmp_path) as found:
        deleted, link = sorted(found, key=lambda one: one.name)
    (tmp_path / "deleted").unlink()

    assert files.local_entry(deleted) is None
    with pytest.raises(FileNotFoundError):
        files.local_entry(link)


def test_a_uri_keeps_its_settings() -> None:
    """They belong to the file system, and go with every path in it."""
    inside = files.child("s3://bucket/a%20store/?region=eu-west-1", "commitlog")

    assert inside == "s3://bucket/a%20store/commitlog?region=eu-west-1"
    assert files.parent(inside) == "s3://bucket/a%20store?region=eu-west-1"
    assert not files.is_remote("C:/log")
    assert pa.fs.FileSystem.from_uri(f"file://{Path.cwd()}")[1] == str(Path.cwd())
