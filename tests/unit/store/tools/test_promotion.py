"""`halfmq ha promote`: which copies of a slave become the next master's store."""

import json
from pathlib import Path
from typing import Any

import pytest

from halfmq.command.main import main
from halfmq.store.errors import DirectoryInUseError, NotPromotableError
from halfmq.store.format.topics import CONFIRMED_KEY
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.promotion import promote
from tests.support.stores import BORN, Clock, append_durably, draft, small_config

FILE_SIZE = 16_384


def written(root: Path, count: int = 20) -> int:
    """Write a log over several files; return where it ends."""
    store = MessageStore(small_config(root, commit_log_file_size=FILE_SIZE), Clock(BORN))
    store.open()
    for _ in range(count):
        append_durably(store, draft(body=b"x" * 3_000))
    end = store.write_offset
    store.close()
    return end


def tables(root: Path, confirmed: int, epoch: int = 0) -> None:
    """Write what a slave has fetched from its master."""
    offsets = {"offsetTable": {CONFIRMED_KEY: {"0": confirmed, "1": epoch}, "T@readers": {"0": 3}}}
    topics = {"dataVersion": {"counter": 7, "stateVersion": 0}, "topicConfigTable": {"T": {}}}
    (root / "config").mkdir(exist_ok=True)
    (root / "config/consumerOffset.json").write_text(json.dumps(offsets), encoding="utf-8")
    (root / "config/topics.json").write_text(json.dumps(topics), encoding="utf-8")


def table(root: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "config" / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("short", [0, 1, 3_500, FILE_SIZE])
def test_a_complete_copy_is_promoted_with_the_next_epoch(tmp_path: Path, short: int) -> None:
    """The tables may be a minute older than the log."""
    end = written(tmp_path)
    tables(tmp_path, end - short, epoch=4)

    done = promote(tmp_path)

    assert done == (5, end, end - short)
    topics = table(tmp_path, "topics.json")
    assert topics["dataVersion"] == {"counter": 7, "stateVersion": 5}
    assert topics["topicConfigTable"] == {"T": {}}
    assert table(tmp_path, "consumerOffset.json")["offsetTable"] == {"T@readers": {"0": 3}}
    with pytest.raises(NotPromotableError, match="a master's already, of epoch 5"):
        promote(tmp_path)


def test_a_copy_that_lacks_what_was_acknowledged_is_refused(tmp_path: Path) -> None:
    """A slave that had lost its disk was still copying when the master died."""
    end = written(tmp_path)
    tables(tmp_path, end + 1)

    with pytest.raises(NotPromotableError, match="1 bytes of acknowledged messages are missing"):
        promote(tmp_path)

    assert CONFIRMED_KEY in table(tmp_path, "consumerOffset.json")["offsetTable"]
    assert main(["ha", "promote", str(tmp_path)]) == 1


def test_a_copy_without_tables_is_refused(tmp_path: Path) -> None:
    """Nobody knows whether the slave had everything."""
    written(tmp_path)

    with pytest.raises(NotPromotableError, match="a minute after its start"):
        promote(tmp_path)


def test_a_copy_in_use_is_refused(tmp_path: Path) -> None:
    """The slave has to be stopped, or it would write beside the next master."""
    store = MessageStore(small_config(tmp_path), Clock(BORN))
    store.open()
    try:
        tables(tmp_path, 0)
        with pytest.raises(DirectoryInUseError):
            promote(tmp_path)
    finally:
        store.close()


def test_the_command_says_what_it_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people and for programs; a directory without a log is a usage error."""
    end = written(tmp_path)
    tables(tmp_path, end)

    assert main(["ha", "promote", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"epoch": 1, "log_end": end, "confirmed": end}
    assert main(["ha", "promote", str(tmp_path / "nowhere")]) == 2
