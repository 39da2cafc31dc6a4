"""Restoring a store from its archive: all of it, up to a time, and never a damaged one."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from halfmq.command.main import main
from halfmq.store.errors import ArchiveFailedError, UnusableFileError
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.copying import copy_log
from halfmq.store.tools.restoring import restore
from halfmq.store.tools.verify import verify
from tests.support.damage import content_of, filled_store
from tests.support.stores import everything, small_config, wait_until

RECORDS = 200
FILE_SIZE = 16_384


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return the archive of the store ``tmp_path/store``; the newest file is not in it."""
    root = filled_store(tmp_path / "store", RECORDS)
    archive = tmp_path / "archive"
    store = MessageStore(small_config(root, archive_url=f"file://{archive}"), lambda: 0)
    store.open()
    archiver = store.archiver
    assert archiver is not None
    wait_until(lambda: archiver.end + FILE_SIZE > store.durable_offset)
    store.close()
    return archive


def url(archive: Path) -> str:
    return f"file://{archive}"


def test_all_files_are_restored(archive: Path, tmp_path: Path) -> None:
    """With the messages of the files; the archive does not change."""
    before = content_of(archive)
    restored = restore(url(archive), tmp_path / "restored")

    log = tmp_path / "restored" / "commitlog"
    assert restored.files == len(list(log.iterdir())) > 2
    assert restored.end_offset == restored.files * FILE_SIZE
    for path in log.iterdir():
        assert path.read_bytes() == (tmp_path / "store" / "commitlog" / path.name).read_bytes()
    assert verify(tmp_path / "restored").sound
    assert content_of(archive) == before
    store = MessageStore(small_config(tmp_path / "restored"), lambda: 0)
    store.open()
    assert len(everything(store)) == verify(tmp_path / "restored").records > RECORDS / 2
    store.close()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_it_ends_with_the_last_record_of_a_time(archive: Path, tmp_path: Path, part: float) -> None:
    """As a copy of the store's own files up to this time does."""
    store = MessageStore(small_config(tmp_path / "store"), lambda: 0)
    store.open()
    archived = [one for one in everything(store) if one.physical_offset < 2 * FILE_SIZE]
    store.close()
    time_ms = archived[int(part * len(archived))].store_timestamp
    end = datetime.fromtimestamp(time_ms / 1000, UTC)
    restored = restore(url(archive), tmp_path / "restored", end=end)
    copied = copy_log(tmp_path / "store", tmp_path / "copy", end=end)

    assert restored == copied
    for path in (tmp_path / "copy" / "commitlog").iterdir():
        assert path.read_bytes() == (tmp_path / "restored" / "commitlog" / path.name).read_bytes()
    assert verify(tmp_path / "restored").sound


def test_a_damaged_archive_is_not_restored(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte, or a file that is missing in between; nothing is left."""
    paths = sorted((archive / "commitlog").iterdir())
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[:99] + b"?" + content[100:])
    assert main(["store", "restore", url(archive), str(tmp_path / "restored")]) == 2
    assert "differs from its digest" in capsys.readouterr().err
    paths[0].write_bytes(content)
    paths[1].unlink()
    with pytest.raises(ArchiveFailedError, match="missing"):
        restore(url(archive), tmp_path / "restored")

    assert not list(tmp_path.glob("restored*"))


def test_what_is_not_there_is_not_restored(archive: Path, tmp_path: Path) -> None:
    """An empty archive, a time before the first record, and an existing directory."""
    with pytest.raises(UnusableFileError, match="no log file"):
        restore(url(tmp_path / "nothing"), tmp_path / "restored")
    with pytest.raises(UnusableFileError, match="no log file"):
        restore(url(archive), tmp_path / "restored", end=datetime(2000, 1, 1, tzinfo=UTC))
    with pytest.raises(UnusableFileError, match="is there already"):
        restore(url(archive), tmp_path)
    assert main(["store", "restore", url(archive), str(tmp_path / "x"), "--to", "17"]) == 2
