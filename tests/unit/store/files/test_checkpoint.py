"""The checkpoint file."""

from pathlib import Path

import pytest

from halfmq.store.files.checkpoint import load_checkpoint
from tests.support.stopped_stores import (
    filled,
    mark_aborted,
    open_store,
    served,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
