"""Dumping a log: one line per record or damaged range; nothing is written."""

import base64
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from halfmq.command.main import main
from halfmq.store.files import disk
from halfmq.store.format.flags import TransactionType
from halfmq.store.log.resync import Damage
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.dump import Dumped, dump
from tests.support.damage import fill, filled_store, flip, only
from tests.support.golden_store import NAMES, unpack
from tests.support.stores import Clock, append_durably, draft, small_config

RECORDS = 120


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store that was filled and closed cleanly."""
    return filled_store(tmp_path / "store", RECORDS)


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Run the command and return its lines."""
    assert main(["store", "dump", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def offsets(found: list[Dumped | Damage]) -> list[int]:
    return [one.record.physical_offset for one in found if isinstance(one, Dumped)]


@pytest.mark.parametrize("name", NAMES)
def test_the_dump_of_a_golden_log_matches_its_brokers_answers(name: str, tmp_path: Path) -> None:
    """Field by field, for every message that the broker served."""
    store = unpack(name, tmp_path)
    found = {
        one.record.physical_offset: one.as_json(body=True)
        for one in dump(store.root)
        if isinstance(one, Dumped) and one.crc_ok
    }

    for message in store.messages:
        line = found[message["commitLogOffset"]]
        for ours, theirs in (
            ("topic", "topic"),
            ("queue", "queueId"),
            ("queue_offset", "queueOffset"),
            ("size", "storeSize"),
            ("stored_ms", "storeTimestamp"),
            ("born_ms", "bornTimestamp"),
            ("flag", "flag"),
            ("sys_flag", "sysFlag"),
            ("reconsume_times", "reconsumeTimes"),
            ("transaction_link", "preparedTransactionOffset"),
            ("body", "body"),
        ):
            assert line[ours] == message[theirs], ours


def test_a_line_has_the_fields_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are stable; the body is printed only with ``--bodies``."""
    store = MessageStore(small_config(tmp_path, append_property_crc=True), now_ms=Clock())
    store.open()
    properties = {"KEYS": "a b", "TAGS": "t", "UNIQ_KEY": "u"}
    append_durably(
        store,
        draft("T", 3, b"\xff", properties=properties, sys_flag=int(TransactionType.COMMIT),
              prepared_transaction_offset=77),
    )  # fmt: skip
    store.close()
    (line,) = lines(capsys, str(tmp_path))

    assert (line["topic"], line["queue"], line["queue_offset"]) == ("T", 3, 0)
    assert (line["keys"], line["tags"], line["unique_key"]) == (["a", "b"], "t", "u")
    assert (line["transaction"], line["transaction_link"]) == ("commit", 77)
    assert (line["crc_ok"], line["property_crc_ok"], line["body_size"]) == (True, True, 1)
    assert line["store_host"] == "127.0.0.1:10911"
    assert "body" not in line
    (line,) = lines(capsys, str(tmp_path), "--bodies")
    assert base64.b64decode(line["body"]) == b"\xff"


def test_a_range_holds_the_records_that_begin_in_it(root: Path) -> None:
    """For offsets within records, across any number of files."""
    everything = offsets(list(dump(root)))
    assert len(everything) == RECORDS + 1

    for low in (3, 50, 100):
        for high in (low, low + 1, low + 40):
            start, end = everything[low] - 1, everything[min(high, RECORDS)]
            expected = [offset for offset in everything if start <= offset < end]
            assert offsets(list(dump(root, start=start, end=end))) == expected


def test_a_dump_can_be_limited_to_a_topic(root: Path) -> None:
    """Records of other topics are not decoded."""
    (found,) = dump(root, topic="events")

    assert isinstance(found, Dumped)
    assert found.record.body == b"last"
    assert list(dump(root, topic="event")) == []


def test_a_record_with_a_damaged_body_is_marked(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator may be looking for it."""
    flip(only(root / "commitlog"), 100)
    first, *others = lines(capsys, str(root))

    assert (first["offset"], first["topic"], first["crc_ok"]) == (0, "orders", False)
    assert len(others) == RECORDS
    assert all(line["crc_ok"] for line in others)
    assert main(["store", "dump", str(root)]) == 0
    assert "CRC WRONG" in capsys.readouterr().out.splitlines()[0]


def test_a_damaged_range_is_a_line_of_its_own(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With size and reason; the dump continues after it."""
    flip(only(root / "commitlog"), 0, bit=1)
    first, second, *_ = lines(capsys, str(root))

    assert set(first) == {"offset", "size", "damaged"}
    assert first["offset"] + first["size"] == second["offset"]
    assert main(["store", "dump", str(root)]) == 0
    assert "DAMAGED" in capsys.readouterr().out.splitlines()[0]


def test_a_lost_record_is_marked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A filler that a start wrote in place of a damaged record is not a message."""
    flip(only(root / "commitlog"), 100)
    flip(only(root / "commitlog"), 200)
    (root / "abort").write_text("1")
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))
    store.open()
    store.close()
    found = lines(capsys, str(root))

    assert next(line["offset"] for line in found if line["lost"]) == 0
    assert sum(not line["lost"] for line in found) == RECORDS


def test_a_store_in_use_is_dumped_without_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only log files are opened, for reading; other threads belong to the store."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    opened: list[tuple[Path, int]] = []
    this_thread, open_file = threading.get_ident(), disk.open_file

    def recorded(path: Path, flags: int, mode: int = disk.MODE) -> int:
        if threading.get_ident() == this_thread:
            opened.append((path, flags & os.O_ACCMODE))
        return open_file(path, flags, mode)

    monkeypatch.setattr(disk, "open_file", recorded)

    assert len(list(dump(tmp_path))) == RECORDS + 1
    assert opened
    assert {(path.parent.name, mode) for path, mode in opened} == {("commitlog", os.O_RDONLY)}
    monkeypatch.undo()
    store.close()


def test_text_of_senders_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key may contain any character."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, draft(properties={"KEYS": "\x1b[2J\n"}))
    store.close()
    assert main(["store", "dump", str(tmp_path)]) == 0

    shown = capsys.readouterr().out
    assert "keys=?[2J?" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("words", [["--from", "x"], ["--to", "-1"], ["--from", "1.5"]])
def test_an_invalid_offset_is_a_usage_error(root: Path, words: list[str]) -> None:
    assert main(["store", "dump", str(root), *words]) == 2
