"""Reading consume queues without Spark: what an entry is, and what is none."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from halfmq.spark_jobs.errors import LogDirectoryError
from halfmq.spark_jobs.log.queue_entries import (
    EntryBatch,
    EntryKind,
    find_queue_files,
    read_entries,
)
from tests.support import golden_store
from tests.support.log_writer import java_hash

ENTRY, PRE_BLANK, BLANK, NO_ENTRY, CUT_SHORT, NO_PLACE = EntryKind


def entry(at: int, size: int = 200, code: int = 0) -> bytes:
    return struct.pack(">qiq", at, size, code)


FILLER = struct.pack(">qiq", 0, 0x7FFF_FFFF, 0)
NOTHING = bytes(20)


def queue_of(root: Path, content: bytes, *, name: str = f"{0:020}") -> Path:
    folder = root / "consumequeue" / "orders" / "3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return root


def read(root: Path, **how: int) -> list[EntryBatch]:
    return [batch for file in find_queue_files(str(root)) for batch in read_entries(file, **how)]


def told(root: Path, **how: int) -> list[tuple[int, int, int]]:
    """Queue offset, physical offset and kind of each entry."""
    return [
        (int(slot), int(content["physical_offset"]), int(kind))
        for batch in read(root, **how)
        for slot, content, kind in zip(batch.slots, batch.content, batch.kinds, strict=True)
    ]


@pytest.mark.parametrize("name", ["plain-clean", "tx-midway-clean", "v4-tx"])
def test_the_queues_of_a_golden_store_list_its_messages(name: str, tmp_path: Path) -> None:
    """Each by its topic, queue and place, with its size and the hash of its tags."""
    store = golden_store.unpack(name, tmp_path)
    listed = {
        (batch.file.topic, batch.file.queue, int(slot)): tuple(content.tolist())
        for batch in read(store.root)
        for slot, content in zip(batch.slots, batch.content, strict=True)
    }

    for message in store.messages:
        if message["sysFlag"] & 0xC in {0x4, 0xC} or message["topic"].startswith("SCHEDULE"):
            continue
        place = message["topic"], message["queueId"], message["queueOffset"]
        tags = java_hash(message["properties"].get("TAGS", ""))
        assert listed[place] == (message["commitLogOffset"], message["storeSize"], tags)


def test_what_stands_in_the_place_of_an_entry_is_told(tmp_path: Path) -> None:
    """Fillers in front of the first message, gaps, and what cannot be; zeros at the end are not."""
    content = FILLER + FILLER + entry(100) + NOTHING + entry(300) + entry(-5) + entry(7, 3)
    queue_of(tmp_path, content + entry(500) + NOTHING * 9)

    assert told(tmp_path) == [
        (0, 0, PRE_BLANK),
        (1, 0, PRE_BLANK),
        (2, 100, ENTRY),
        (3, 0, BLANK),
        (4, 300, ENTRY),
        (5, -5, NO_ENTRY),
        (6, 7, NO_ENTRY),
        (7, 500, ENTRY),
    ]


def test_reserved_space_is_not_read(tmp_path: Path) -> None:
    """A file is reserved at its full size; ten terabytes of it would not fit in memory."""
    root = queue_of(tmp_path, entry(100) + entry(300))
    (file,) = find_queue_files(str(root))
    with Path(file.path).open("r+b") as reserved:
        reserved.truncate(10 << 40)

    assert told(root) == [(0, 100, ENTRY), (1, 300, ENTRY)]


def test_an_entry_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    """Of it the offset arrives before the size."""
    queue_of(tmp_path, entry(100) + struct.pack(">q", 300) + bytes(12) + NOTHING)

    assert told(tmp_path) == [(0, 100, ENTRY)]


def test_files_continue_each_other_by_their_names(tmp_path: Path) -> None:
    """The name is the place of the first entry, in bytes."""
    queue_of(tmp_path, entry(100) + entry(300))
    queue_of(tmp_path, entry(500) + NOTHING, name=f"{40:020}")

    assert told(tmp_path) == [(0, 100, ENTRY), (1, 300, ENTRY), (2, 500, ENTRY)]
    assert told(tmp_path, first=1, end=2) == [(1, 300, ENTRY)]


def test_a_file_that_was_cut_or_is_foreign_is_corrupt(tmp_path: Path) -> None:
    """What can be read of it is read."""
    queue_of(tmp_path, entry(100) + entry(300)[:11])
    queue_of(tmp_path, entry(900), name=f"{77:020}")

    assert told(tmp_path) == [(0, 100, ENTRY), (1, 0, CUT_SHORT), (-1, 0, NO_PLACE)]


def test_other_things_beside_the_queues_are_passed_over(tmp_path: Path) -> None:
    """Files among folders, folders among files, and names that are none of a queue."""
    root = queue_of(tmp_path, entry(100))
    queues = root / "consumequeue"
    (queues / "notes.txt").write_text("?")
    (queues / "orders" / "lost+found").mkdir()
    (queues / "orders" / "3" / f"{20:020}").mkdir()
    (queues / "orders" / "3" / "copy").write_bytes(entry(1))
    (queues / "orders" / "3" / f"{40:020}").touch()

    assert told(root) == [(0, 100, ENTRY)]
    assert told(queues) == [(0, 100, ENTRY)]


def test_what_holds_no_queue_is_said(tmp_path: Path) -> None:
    """In a sentence that names it."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("file", "is not a directory"),
        ("missing", "no such directory"),
        ("empty", "no consume queue"),
    ):
        with pytest.raises(LogDirectoryError, match=f"{name}: {said}"):
            find_queue_files(str(tmp_path / name))

    root = queue_of(tmp_path, entry(1))
    (root / "consumequeue" / "orders" / "3" / f"{20:020}").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LogDirectoryError, match=f"{20:020}: No such file"):
        find_queue_files(str(root))


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_rows(seed: int, tmp_path: Path) -> None:
    """One per place, never an exception."""
    print("seed", seed)
    choose = random.Random(seed)
    content = choose.randbytes(choose.randrange(1, 2_000))
    root = queue_of(tmp_path, content)

    rows = sum(len(batch.kinds) for batch in read(root))

    assert rows == -(-len(content) // 20)
