"""Verifying a store: intact files pass, and damage is reported with its position."""

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmq.command.main import main
from halfmq.store.errors import UnusableFileError
from halfmq.store.files.directory_lock import DirectoryLock, is_held
from halfmq.store.files.json_table import save_table
from halfmq.store.format.index import FIRST_ITEM, HEADER_SIZE, item_position, unpack_header
from halfmq.store.format.record_fields import FIELDS
from halfmq.store.format.transaction_snapshot import FILE_NAME, FOOTER
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.state import StoreState
from halfmq.store.tools.verify import VerifyReport, verify
from tests.support.damage import content_of, extend, fill, filled_store, flip, only
from tests.support.golden_store import NAMES, unpack
from tests.support.python import python
from tests.support.stores import Clock, append_durably, crash, draft, golden_config, small_config

RECORDS = 200
SLOTS = 100

DAMAGED_STATES = {
    # name → damage found in it; without notes
    "clean-cq-short": {"entry_missing": 5},
    "plain-badcrc": {"record_damaged": 1},
    "plain-cq-short": {"entry_missing": 18},  # those after the checkpoint are notes
    "stale-cq": {"entry_without_record": 7},  # RocketMQ restored them
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store that was filled and closed cleanly."""
    return filled_store(tmp_path / "store", RECORDS)


def kinds(report: VerifyReport) -> dict[str, int]:
    return dict(report.findings.damage_counts)


# -- sound stores --------------------------------------------------------------------------------


def test_a_cleanly_closed_store_is_sound(root: Path) -> None:
    """Everything is counted, and there are no findings, not even notes."""
    report = verify(root)

    assert (report.sound, report.state) == (True, StoreState.CLOSED)
    assert report.findings.notes == []
    assert (report.records, report.queue_entries) == (RECORDS + 1, RECORDS + 1)
    assert report.index_items == RECORDS + 2 * RECORDS // 4 + 1
    assert report.log_files > 3
    assert report.index_files > 0


@pytest.mark.parametrize("name", NAMES)
def test_damage_of_golden_stores_is_found(name: str, tmp_path: Path) -> None:
    """Stores that RocketMQ closed are sound; damage by hand or by RocketMQ is reported."""
    report = verify(unpack(name, tmp_path).root)

    assert kinds(report) == DAMAGED_STATES.get(name, {})


@pytest.mark.parametrize("name", NAMES)
def test_golden_stores_are_sound_after_halfmq_has_opened_them(name: str, tmp_path: Path) -> None:
    """For every state in which RocketMQ left them; records lost before are notes."""
    golden = unpack(name, tmp_path)
    newest = max(int(message["storeTimestamp"]) for message in golden.messages)
    store = MessageStore(golden_config(golden), now_ms=Clock(newest))
    store.open()
    append_durably(store, draft("again", body=b"more", properties={"KEYS": "k"}))
    store.close()
    report = verify(golden.root)

    assert kinds(report) == {}
    assert report.state is StoreState.CLOSED
    assert set(report.findings.note_counts) <= {"record_lost"}


def test_nothing_is_written(root: Path) -> None:
    """No byte and no date changes, and no lock file is created."""
    (root / "lock").unlink()
    before = content_of(root)
    verify(root)

    assert content_of(root) == before


@pytest.mark.parametrize("records", [1, 20, RECORDS])
def test_a_store_in_use_can_be_verified(records: int, tmp_path: Path) -> None:
    """The broker keeps its lock and continues; what it is writing is not damage.

    With few records, the last one, which may get more keys, is in the first chunk.
    """
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, records)
    while store.tick():
        pass  # until all keys are in the index
    report = verify(tmp_path / "store")

    assert (report.sound, report.state) == (True, StoreState.OPEN), report.findings.damage
    assert report.records == records + 1
    append_durably(store, draft())
    store.close()
    assert verify(tmp_path / "store").records == records + 2


def test_the_lock_is_tested_and_not_taken(tmp_path: Path) -> None:
    """Neither by the process that holds it, which would release it, nor by another."""
    assert not is_held(tmp_path)
    lock = DirectoryLock(tmp_path)
    lock.acquire(0)
    assert is_held(tmp_path)
    assert is_held_by_other_process(tmp_path)
    assert is_held_by_other_process(tmp_path), "the first test did not release it"
    lock.release()
    assert not is_held(tmp_path)
    assert not is_held_by_other_process(tmp_path)


def is_held_by_other_process(root: Path) -> bool:
    """Return ``is_held`` as another process sees it."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from halfmq.store.files.directory_lock import is_held\n"
        "print(is_held(Path(sys.argv[1])))\n"
    )
    done = python("-c", code, root, check=True)
    return done.stdout == "True\n"


def test_what_the_next_start_repairs_is_not_damage(tmp_path: Path) -> None:
    """After a kill queues may lack entries, which are derived from the log."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()
    queue = only(copy / "consumequeue" / "orders" / "0")
    queue.write_bytes(queue.read_bytes()[:20].ljust(queue.stat().st_size, b"\0"))
    report = verify(copy)

    assert (report.sound, report.state) == (True, StoreState.NOT_CLOSED)
    assert report.findings.note_counts["entry_missing"] > 0


def test_a_log_alone_is_sound(root: Path) -> None:
    """As in a copy: a start derives queues and index from it."""
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "index")
    report = verify(root)

    assert report.sound
    assert set(report.findings.note_counts) == {"entry_missing", "index_missing"}


# -- damaged stores ------------------------------------------------------------------------------


def test_a_damaged_body_is_reported_and_the_rest_is_checked(root: Path) -> None:
    """One record is damaged; later ones are checked as well."""
    path = only(root / "commitlog")
    flip(path, 100)
    report = verify(root)

    assert kinds(report) == {"record_damaged": 1}
    (finding,) = report.findings.damage
    assert (finding.file, finding.position, finding.offset) == (f"commitlog/{path.name}", 0, 0)
    assert "CRC" in finding.detail
    assert report.records == RECORDS
    # Its queue entry is not a second damage.
    assert set(report.findings.note_counts) == {"entry_of_damaged_record"}


@pytest.mark.parametrize(
    ("position", "what"), [(0, "size"), (4, "magic"), (28, "physical offset"), (87, "body length")]
)
def test_a_damaged_head_loses_one_record(root: Path, position: int, what: str) -> None:
    """The begin of the next record is found without the size."""
    flip(only(root / "commitlog"), position, bit=1)
    report = verify(root)

    assert kinds(report) == {"record_damaged": 1}, what
    assert report.records == RECORDS


@pytest.mark.parametrize("bit", [0, 9, 17, 33, 45, 60, 61, 62, 63])
def test_every_flipped_bit_of_a_queue_offset_is_found(root: Path, bit: int) -> None:
    """Also one that makes it too high for the queue to be read up to there."""
    path, position = only(root / "commitlog"), 0
    content = path.read_bytes()
    for _ in range(20):
        position += int.from_bytes(content[position : position + 4], "big")
    flip(path, position + FIELDS["queue_offset"].end - 1 - bit // 8, bit % 8)

    report = verify(root)

    assert "bytes_changed" in kinds(report), "by the digest"
    assert {"record_wrong", "entry_without_record"} <= {*kinds(report)}, "and by its queue"
    assert report.records == RECORDS + 1


def test_a_record_that_a_start_replaced_with_a_filler_is_a_note(root: Path) -> None:
    """The filler keeps its position; the record is lost."""
    flip(only(root / "commitlog"), 100)
    flip(only(root / "commitlog"), 200)
    (root / "abort").write_text("1")
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))
    store.open()
    store.close()
    report = verify(root)

    assert report.sound
    assert report.findings.note_counts["record_lost"] > 0
    assert report.queue_entries == RECORDS + 1


def test_a_lost_end_of_a_closed_store_is_damage(root: Path) -> None:
    """A clean stop stores the end of the log; the rest of the log does not show the loss."""
    end = verify(root).log_end
    last = only(root / "commitlog", -1)
    content = last.read_bytes()
    cut = content.rindex(b"last") - 88
    last.write_bytes(content[:cut].ljust(len(content), b"\0"))
    report = verify(root)

    assert report.log_end == end
    assert kinds(report) == {"record_damaged": 1}


def test_a_missing_log_file_is_reported(root: Path) -> None:
    """Queue entries of its records are not further damage."""
    path = only(root / "commitlog", 1)
    path.unlink()
    report = verify(root)

    assert kinds(report) == {"file_missing": 1}
    assert report.findings.damage[0].file == f"commitlog/{path.name}"


def test_a_damaged_blank_is_damage(root: Path) -> None:
    """Halfmq loses no record by it, but RocketMQ would end the log there."""
    path = only(root / "commitlog")
    content = path.read_bytes()
    flip(path, content.rindex(bytes.fromhex("cbd43194")), bit=3)

    assert kinds(verify(root)) == {"record_damaged": 1}


def test_an_unknown_file_in_the_log_directory_is_reported(root: Path) -> None:
    """A broker would not start."""
    (root / "commitlog" / "notes.txt").write_text("x")

    assert kinds(verify(root)) == {"file_unusable": 1}


def test_a_wrong_entry_is_reported_with_its_queue_offset(root: Path) -> None:
    """With the entry found and the entry expected."""
    path = only(root / "consumequeue" / "orders" / "1")
    flip(path, 3 * 20 + 7)
    report = verify(root)

    assert kinds(report) == {"entry_wrong": 1}
    (finding,) = report.findings.damage
    assert (finding.file, finding.position) == (f"consumequeue/orders/1/{path.name}", 60)
    assert finding.detail.startswith("queue offset 3: ")


@pytest.mark.parametrize("bit", range(64))
def test_every_flipped_bit_of_a_tags_code_is_found(root: Path, bit: int) -> None:
    """With its sign flipped it looks like an address in RocketMQ's extension."""
    path = only(root / "consumequeue" / "orders" / "1")
    flip(path, 3 * 20 + 19 - bit // 8, bit % 8)

    assert kinds(verify(root)) == {"entry_wrong": 1}


def test_a_tags_code_may_be_in_an_extension(root: Path) -> None:
    """With RocketMQ's ``enableConsumeQueueExt``; the code there must be right."""
    path = only(root / "consumequeue" / "orders" / "1")
    extend(root, path, 3)
    assert kinds(verify(root)).keys() <= {"bytes_changed"}  # it was closed without one

    flip(only(root / "consumequeue_ext" / "orders" / "1"), 20 + 9)
    assert kinds(verify(root))["entry_wrong"] == 1


def test_consecutive_missing_entries_are_one_finding(root: Path) -> None:
    """A missing file is not reported entry by entry."""
    only(root / "consumequeue" / "orders" / "1").unlink()
    report = verify(root)

    assert kinds(report) == {"entry_missing": 50}  # 1000 bytes
    (finding,) = report.findings.damage
    assert (finding.position, finding.count) == (0, 50)


def test_an_entry_without_a_record_is_reported(root: Path) -> None:
    """RocketMQ would serve the record that it refers to."""
    queue = only(root / "consumequeue" / "events" / "0")
    content = queue.read_bytes()
    queue.write_bytes((content[:20] * 2).ljust(len(content), b"\0"))

    assert kinds(verify(root)) == {"entry_without_record": 1}


def test_a_wrong_due_time_is_found_for_any_delay_levels(tmp_path: Path) -> None:
    """A due time is the store time plus whole seconds, which no flipped bit keeps."""
    levels = (7000, 11_000)
    config = small_config(tmp_path, delay_levels_ms=levels)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    append_durably(
        store,
        *(draft("SCHEDULE_TOPIC_XXXX", 1, properties={"DELAY": "2"}) for _ in range(3)),
    )
    store.close()
    assert verify(tmp_path).sound

    queue = only(tmp_path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "1")
    sound = queue.read_bytes()
    for bit in range(64):
        flip(queue, 20 + 12 + 7 - bit // 8, bit % 8)
        assert kinds(verify(tmp_path)) == {"entry_wrong": 1}, bit
        queue.write_bytes(sound)


def index_damage(root: Path) -> list[tuple[str, str, int | None]]:
    """Return kind, file and position of the damage in the index."""
    found = verify(root).findings.damage
    return [(one.kind, one.file, one.position) for one in found if one.file.startswith("index/")]


def test_every_flipped_bit_of_an_index_is_found(root: Path) -> None:
    """In header, slots and used items; the digest identifies the bit."""
    path = only(root / "index")
    sound = path.read_bytes()
    used = item_position(unpack_header(sound).next_item, SLOTS)
    chance = random.Random(1)
    items = range(item_position(FIRST_ITEM, SLOTS), used)
    for position in (*range(HEADER_SIZE + 20), used - 1, *chance.sample(items, 30)):
        flip(path, position, chance.randrange(8))
        assert index_damage(root) == [("bytes_changed", f"index/{path.name}", position)]
        path.write_bytes(sound)


def test_several_flipped_bits_of_an_index_are_reported_with_their_block(root: Path) -> None:
    """A digest identifies a single bit only."""
    path = only(root / "index")
    flip(path, 41)
    flip(path, 57)

    assert index_damage(root) == [("bytes_changed", f"index/{path.name}", 0)]


def test_an_index_without_digests_is_not_verified(root: Path) -> None:
    """RocketMQ writes no digests; a deleted index is rebuilt by the next start."""
    size = verify(root).index_digested
    shutil.rmtree(root / "digests" / "index")
    flip(only(root / "index"), 45)
    report = verify(root)

    assert size > 0
    assert (report.sound, report.index_digested) == (True, 0)
    assert report.index_items > 0


def test_an_index_that_another_broker_has_written_is_not_verified(root: Path) -> None:
    """RocketMQ continues the newest file and does not update digests."""
    with (root / "checkpoint").open("r+b") as file:
        file.write((5).to_bytes(8, "big"))  # RocketMQ writes other times
    flip(only(root / "index"), 45)

    assert index_damage(root) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\0" * 50])
@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json.bak"])
def test_a_table_that_cannot_be_read_is_damage(root: Path, name: str, content: bytes) -> None:
    """Also a backup, because a start may need it."""
    (root / "config").mkdir()
    save_table(root / "config" / name.removesuffix(".bak"), {"offsetTable": {}})
    (root / "config" / name).write_bytes(content)

    assert kinds(verify(root))["table_unreadable"] == 1


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("topics.json", {"topicConfigTable": {"T": {"perm": 6, "readQueueNums": -1}}}),
        ("topics.json", {"topicConfigTable": {"T": {"perm": 1 << 20}}}),
        ("topics.json", {"dataVersion": {}}),
        ("subscriptionGroup.json", {"subscriptionGroupTable": {"g": 5}}),
        ("consumerOffset.json", {"offsetTable": {"T@g": {"0": "many"}}}),
        ("consumerOffset.json", {"offsetTable": {"Tg": {"0": 1}}}),
        ("delayOffset.json", {"offsetTable": {"1": -4}}),
    ],
)
def test_a_table_with_impossible_values_is_damage(
    root: Path, name: str, table: dict[str, Any]
) -> None:
    """It can be read, but no broker writes such values."""
    (root / "config").mkdir()
    save_table(root / "config" / name, table)

    assert kinds(verify(root)) == {"table_wrong": 1}


def test_a_consumer_offset_after_the_end_of_its_queue_is_damage(root: Path) -> None:
    """The next messages would not be consumed."""
    (root / "config").mkdir()
    save_table(
        root / "config" / "consumerOffset.json",
        {"offsetTable": {"orders@g": {"0": RECORDS // 2, "1": RECORDS // 2 + 1}}},
    )

    assert kinds(verify(root)) == {"offset_ahead": 1}


def test_a_table_with_only_a_backup_is_a_note(root: Path) -> None:
    """The next start uses the backup."""
    (root / "config").mkdir()
    save_table(root / "config" / "topics.json", {"topicConfigTable": {}})
    (root / "config" / "topics.json").rename(root / "config" / "topics.json.bak")
    report = verify(root)

    assert (report.sound, report.findings.note_counts["table_missing"]) == (True, 1)


def snapshot(root: Path, log_end: int, anchor: int, anchor_crc: int) -> Path:
    """Write a snapshot of undecided transactions with no rows."""
    path = root / "config" / FILE_NAME
    path.parent.mkdir(exist_ok=True)
    content = b"rows" + FOOTER.pack(log_end, anchor, anchor_crc, 0, 0)[:-4]
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "big"))
    return path


def test_a_snapshot_is_checked(root: Path) -> None:
    """Its checksum, the end of the log and one record of the log must match."""
    with (root / "commitlog" / f"{0:020}").open("rb") as file:
        size = int.from_bytes(file.read(4), "big")
        file.seek(0)
        crc = zlib.crc32(file.read(size))
    end = verify(root).log_end
    path = snapshot(root, end, 0, crc)
    report = verify(root)
    assert (report.sound, report.snapshot) == (True, True)

    flip(path, 2)
    assert kinds(verify(root)) == {"snapshot_wrong": 1}
    snapshot(root, end + 1, 0, crc)
    assert kinds(verify(root)) == {"snapshot_ahead": 1}
    snapshot(root, end, 0, crc + 1)
    assert kinds(verify(root)) == {"snapshot_of_other_log": 1}
    path.write_bytes(b"x")
    assert kinds(verify(root)) == {"snapshot_wrong": 1}


def damage_note(root: Path) -> None:
    flip(root / "checkpoint", 70)


def set_timestamp(root: Path) -> None:
    with (root / "checkpoint").open("r+b") as file:
        file.write((1 << 50).to_bytes(8, "big"))


def cut(root: Path) -> None:
    (root / "checkpoint").write_bytes(b"\0" * 100)


@pytest.mark.parametrize("damage", [damage_note, set_timestamp, cut])
def test_a_wrong_checkpoint_is_damage(root: Path, damage: Callable[[Path], None]) -> None:
    """A recovery begins at an offset that the checkpoint gives."""
    damage(root)

    assert "checkpoint_wrong" in kinds(verify(root))


# -- the command ---------------------------------------------------------------------------------


def test_the_exit_code_gives_the_result(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 sound, 1 damaged, 2 not readable; each finding is one line."""
    assert main(["store", "verify", str(root)]) == 0
    assert "sound" in capsys.readouterr().out

    flip(only(root / "commitlog"), 100)
    assert main(["store", "verify", str(root)]) == 1
    shown = capsys.readouterr()
    assert "record_damaged" in shown.out
    assert shown.err == ""

    assert main(["store", "verify", str(root / "nothing")]) == 2
    assert "no store" in capsys.readouterr().err


def test_the_json_report_has_kinds_positions_and_counts(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are stable."""
    flip(only(root / "commitlog"), 100)
    assert main(["store", "verify", str(root), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)

    assert report["state"] == "closed"
    assert report["sound"] is False
    assert report["log"]["records"] == RECORDS
    assert report["damage"]["counts"] == {"record_damaged": 1}
    assert set(report["damage"]["findings"][0]) == {
        *("kind", "file", "position", "detail", "count", "offset")
    }


def test_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    """An empty directory is not a sound store."""
    with pytest.raises(UnusableFileError, match="no store"):
        verify(tmp_path)
