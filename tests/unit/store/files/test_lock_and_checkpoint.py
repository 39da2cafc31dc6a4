"""One broker per store root, and the checkpoint file."""

import os
import subprocess
from pathlib import Path

import pytest

from halfmq.store.errors import DirectoryInUseError
from halfmq.store.files.checkpoint import load_checkpoint
from tests.support.python import python
from tests.support.stopped_stores import filled, mark_aborted, open_store, served
from tests.support.stores import append_durably, draft


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_second_store_of_this_process_is_refused(root: Path) -> None:
    """The first one keeps its lock."""
    store, _ = open_store(root)

    for _ in range(2):
        with pytest.raises(DirectoryInUseError, match=str(os.getpid())):
            open_store(root)

    assert other_process_opens(root).returncode == 3
    store.close()
    store, _ = open_store(root)
    store.close()


def other_process_opens(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from halfmq.store.errors import DirectoryInUseError\n"
        "from halfmq.store.files.directory_lock import DirectoryLock\n"
        "try:\n"
        "    DirectoryLock(Path(sys.argv[1])).acquire(0)\n"
        "except DirectoryInUseError as error:\n"
        "    print(error)\n"
        "    sys.exit(3)\n"
    )
    return python("-c", code, root)


def test_another_process_is_refused_with_the_holders_name(root: Path) -> None:
    """The error gives process id and start time."""
    store, _ = open_store(root)
    append_durably(store, draft())

    refused = other_process_opens(root)

    assert refused.returncode == 3
    assert f"pid {os.getpid()}, started 2023-11-14T22:13:20+00:00" in refused.stdout
    store.close()
    assert other_process_opens(root).returncode == 0


def test_the_lock_file_has_rocketmqs_form(root: Path) -> None:
    """It begins with the four letters that RocketMQ writes."""
    store, _ = open_store(root)

    assert (root / "lock").read_bytes().startswith(b"lock")
    store.close()


def test_a_checkpoint_has_rocketmqs_form(root: Path) -> None:
    """After a clean stop its times are those of the last record."""
    offsets = filled(root)
    store, _ = open_store(root)
    last = store.reader.record_at(offsets[-1])
    assert last is not None
    store.close()

    checkpoint = load_checkpoint(root / "checkpoint")

    assert (root / "checkpoint").stat().st_size == 4096
    assert checkpoint.log_timestamp == checkpoint.queues_timestamp == last.store_timestamp
    assert checkpoint.confirm_offset == offsets[-1]


def test_a_checkpoint_that_is_cut_short_is_ignored(root: Path) -> None:
    """The whole log is scanned."""
    offsets = filled(root)
    (root / "checkpoint").write_bytes(b"\xff" * 39)
    mark_aborted(root)

    store, report = open_store(root)

    assert (report.start_offset, served(store)) == (0, offsets)
    store.close()
