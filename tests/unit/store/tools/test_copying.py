"""Copying a log: file names and sizes are the same, and only whole records are copied."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from halfmq.command.main import main
from halfmq.store.errors import UnusableFileError
from halfmq.store.files import disk
from halfmq.store.files.json_table import save_table
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.copying import copy_log
from halfmq.store.tools.dump import Dumped, dump
from halfmq.store.tools.verify import verify
from tests.support.damage import content_of, fill, filled_store, flip, only
from tests.support.stores import Clock, append_durably, crash, draft, everything, small_config

RECORDS = 200
FILE_SIZE = 16_384


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store that was filled and closed cleanly."""
    return filled_store(tmp_path / "store", RECORDS)


def records(root: Path) -> list[bytes]:
    """Return the bytes of all records in a log."""
    found: list[bytes] = []
    for one in dump(root):
        assert isinstance(one, Dumped)
        offset, size = one.record.physical_offset, one.record.total_size
        path = root / "commitlog" / f"{offset // FILE_SIZE * FILE_SIZE:020}"
        found.append(path.read_bytes()[offset % FILE_SIZE :][:size])
    return found


def starts(root: Path) -> list[int]:
    return [one.record.physical_offset for one in dump(root) if isinstance(one, Dumped)]


def test_a_full_copy_equals_the_log(root: Path, tmp_path: Path) -> None:
    """Every byte of every file; the source does not change."""
    before = content_of(root)
    copied = copy_log(root, tmp_path / "copy")

    names = sorted(path.name for path in (root / "commitlog").iterdir())
    assert sorted(path.name for path in (tmp_path / "copy" / "commitlog").iterdir()) == names
    for name in names:
        source, copy = (path / "commitlog" / name for path in (root, tmp_path / "copy"))
        assert source.read_bytes() == copy.read_bytes()
    assert (copied.files, copied.end_offset) == (len(names), verify(root).log_end)
    assert content_of(root) == before
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["commitlog"]


def test_full_files_are_copied_unchanged(root: Path, tmp_path: Path) -> None:
    """With the blank at the end of the last one, even if more of the log follows."""
    first, second, *_ = sorted((root / "commitlog").iterdir())
    copy_log(root, tmp_path / "copy", end=int(second.name))

    assert only(tmp_path / "copy" / "commitlog").read_bytes() == first.read_bytes()


def test_a_copy_is_sound_and_can_be_opened(root: Path, tmp_path: Path) -> None:
    """A broker rebuilds queues and index, and continues."""
    copy_log(root, tmp_path / "copy")
    store = MessageStore(small_config(tmp_path / "copy"), now_ms=Clock(1 << 41))
    store.open()
    assert len(everything(store)) == RECORDS + 1
    append_durably(store, draft())
    store.close()

    assert verify(tmp_path / "copy").sound


@pytest.mark.parametrize("number", [1, 30, 77, 150, RECORDS])
def test_a_copy_ends_with_the_last_record_before_an_offset(
    root: Path, tmp_path: Path, number: int
) -> None:
    """For any offset within a record or file; zeros follow."""
    begins = starts(root)
    for end in (begins[number] - 1, begins[number], begins[number] + 1):
        target = tmp_path / f"copy-{end}"
        copied = copy_log(root, target, end=end)
        wanted = [start for start in begins if start < end]

        assert starts(target) == wanted
        assert records(target) == records(root)[: len(wanted)]
        last = only(target / "commitlog", -1)
        assert last.stat().st_size == FILE_SIZE
        rest = last.read_bytes()[copied.end_offset - int(last.name) :]
        assert not any(rest[8:]), "at most the blank of a full file"


def test_a_copy_begins_with_the_file_of_an_offset(root: Path, tmp_path: Path) -> None:
    """Readers begin with the first record of a file, so the start of a file is not cut."""
    copied = copy_log(root, tmp_path / "copy", start=2 * FILE_SIZE + 5, end=4 * FILE_SIZE)

    assert copied.first_offset == 2 * FILE_SIZE
    assert starts(tmp_path / "copy") == [
        start for start in starts(root) if 2 * FILE_SIZE <= start < 4 * FILE_SIZE
    ]
    assert copied.files == 2


def test_the_range_of_a_copy_can_be_given_by_time(root: Path, tmp_path: Path) -> None:
    """From the file with the first record of that time to the last record stored by then."""
    times = {
        one.record.physical_offset: one.record.store_timestamp
        for one in dump(root)
        if isinstance(one, Dumped)
    }
    begins = sorted(times)
    low, high = (datetime.fromtimestamp(times[begins[n]] / 1000, UTC) for n in (90, 140))
    copied = copy_log(root, tmp_path / "copy", start=low, end=high)

    assert copied.first_offset == begins[90] // FILE_SIZE * FILE_SIZE
    assert starts(tmp_path / "copy")[-1] == begins[140]


@pytest.mark.parametrize(
    "bound", [{"end": 0}, {"start": 1 << 40}, {"end": datetime.fromtimestamp(0, UTC)},
               {"start": datetime.fromtimestamp(1 << 33, UTC)}]
)  # fmt: skip
def test_a_range_without_records_is_an_error(
    root: Path, tmp_path: Path, bound: dict[str, int | datetime]
) -> None:
    """An audit of an empty copy would find no anomalies."""
    with pytest.raises(UnusableFileError, match="no record in this range"):
        copy_log(root, tmp_path / "copy", **bound)  # type: ignore[arg-type]

    assert not (tmp_path / "copy").exists()


def test_incomplete_records_are_not_copied(tmp_path: Path) -> None:
    """Neither of a store in use nor of one after a power cut."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    end = store.write_offset
    torn = crash(tmp_path / "store", tmp_path / "torn")
    with (torn / "commitlog" / f"{end // FILE_SIZE * FILE_SIZE:020}").open("r+b") as file:
        file.seek(end % FILE_SIZE)
        file.write(bytes.fromhex("00000400 daa320a7 12345678"))

    live = copy_log(tmp_path / "store", tmp_path / "live")
    cut = copy_log(torn, tmp_path / "cut")
    store.close()

    assert (live.end_offset, cut.end_offset) == (end, end)
    assert records(tmp_path / "live") == records(tmp_path / "cut")
    assert verify(tmp_path / "cut").sound


def test_the_source_is_flushed_first(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not remove records from the source that the copy has."""
    flushed: list[str] = []

    def record(fd: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(disk, "sync_data", record)
    copy_log(root, tmp_path / "copy")

    assert sorted(flushed) == sorted(str(path) for path in (root / "commitlog").iterdir())


def test_damage_is_copied_and_counted(root: Path, tmp_path: Path) -> None:
    """A copy serves as evidence."""
    last = only(root / "commitlog", -1)
    flip(last, 100)
    copied = copy_log(root, tmp_path / "copy")

    assert copied.damaged == 1
    assert only(tmp_path / "copy" / "commitlog", -1).read_bytes() == last.read_bytes()


@pytest.mark.parametrize("name", ["copy", "copy.part"])
def test_an_existing_target_is_not_changed(root: Path, tmp_path: Path, name: str) -> None:
    """Neither a copy nor the remains of an interrupted one."""
    (tmp_path / name).mkdir()
    with pytest.raises(UnusableFileError, match="there already"):
        copy_log(root, tmp_path / "copy")

    assert list((tmp_path / name).iterdir()) == []


def test_a_failed_copy_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete copy must not be mistaken for a short log."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        copy_log(root, tmp_path / "copy")

    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_deleted_during_the_copy_is_an_error(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may delete files while they are copied."""
    first = only(root / "commitlog")

    def retention(done: int, _: int) -> None:
        if not done:
            first.unlink()

    with pytest.raises(UnusableFileError, match="deleted by age"):
        copy_log(root, tmp_path / "copy", progress=retention)

    assert not (tmp_path / "copy").exists()


def test_queues_and_tables_can_be_copied(root: Path, tmp_path: Path) -> None:
    """The queues end with the copied log, so nothing has to be rebuilt."""
    (root / "config").mkdir()
    save_table(root / "config" / "topics.json", {"topicConfigTable": {}})
    end = starts(root)[150]
    copy_log(root, tmp_path / "copy", end=end, with_config=True, with_queues=True)
    report = verify(tmp_path / "copy")

    assert report.sound
    assert (report.records, report.queue_entries, report.tables) == (150, 150, 1)


def test_queue_files_before_the_copied_log_are_not_copied(root: Path, tmp_path: Path) -> None:
    """The copy equals a store whose older files were deleted by age."""
    copy_log(root, tmp_path / "copy", start=5 * FILE_SIZE, with_queues=True)
    queue = Path("consumequeue") / "orders" / "0"
    report = verify(tmp_path / "copy")

    assert report.sound
    assert report.log_start == 5 * FILE_SIZE
    assert len(list((tmp_path / "copy" / queue).iterdir())) < len(list((root / queue).iterdir()))


def test_the_command_prints_what_was_copied(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text and as JSON; a refusal has exit code 2."""
    words = ["store", "copy", str(root)]
    assert main([*words, str(tmp_path / "a"), "--from", "0", "--to", "2100-01-01T00:00"]) == 0
    assert "copied" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_offset"] == 0
    assert main([*words, str(tmp_path / "b")]) == 2
    assert "there already" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "c"), "--from", "yesterday"]) == 2
