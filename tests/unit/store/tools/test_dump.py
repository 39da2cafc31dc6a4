"""Dumping a log: every record a line, damage named, nothing written."""

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
    """A store that was filled and closed in order."""
    return filled_store(tmp_path / "store", RECORDS)


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Run the command and return its lines."""
    assert main(["store", "dump", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def offsets(found: list[Dumped | Damage]) -> list[int]:
    return [one.record.physical_offset for one in found if isinstance(one, Dumped)]


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_log_is_dumped_as_its_broker_tells_it(name: str, tmp_path: Path) -> None:
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


def test_a_line_has_what_the_record_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are a promise; a body only when asked for."""
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
    """From an offset inside a record to one before another; wherever files end."""
    everything = offsets(list(dump(root)))
    assert len(everything) == RECORDS + 1

    for low in (3, 50, 100):
        for high in (low, low + 1, low + 40):
            start, end = everything[low] - 1, everything[min(high, RECORDS)]
            expected = [offset for offset in everything if start <= offset < end]
            assert offsets(list(dump(root, start=start, end=end))) == expected


def test_a_topic_is_picked(root: Path) -> None:
    """The others are not even decoded."""
    (found,) = dump(root, topic="events")

    assert isinstance(found, Dumped)
    assert found.record.body == b"last"
    assert list(dump(root, topic="event")) == []


def test_a_record_whose_body_is_damaged_is_shown_as_such(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be what the operator is looking for."""
    flip(only(root / "commitlog"), 100)
    first, *others = lines(capsys, str(root))

    assert (first["offset"], first["topic"], first["crc_ok"]) == (0, "orders", False)
    assert len(others) == RECORDS
    assert all(line["crc_ok"] for line in others)
    assert main(["store", "dump", str(root)]) == 0
    assert "CRC WRONG" in capsys.readouterr().out.splitlines()[0]


def test_what_is_no_record_is_named_in_its_place(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its size and the reason, and the dump goes on behind it."""
    flip(only(root / "commitlog"), 0, bit=1)
    first, second, *_ = lines(capsys, str(root))

    assert set(first) == {"offset", "size", "damaged"}
    assert first["offset"] + first["size"] == second["offset"]
    assert main(["store", "dump", str(root)]) == 0
    assert "DAMAGED" in capsys.readouterr().out.splitlines()[0]


def test_a_lost_record_is_marked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a start puts in the place of a damaged record is no message of anybody."""
    flip(only(root / "commitlog"), 100)
    flip(only(root / "commitlog"), 200)
    (root / "abort").write_text("1")
    store = MessageStore(small_config(root), now_ms=Clock(1 << 41))
    store.open()
    store.close()
    found = lines(capsys, str(root))

    assert next(line["offset"] for line in found if line["lost"]) == 0
    assert sum(not line["lost"] for line in found) == RECORDS


def test_an_open_store_is_dumped_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its lock. What the store's own helper does to its files meanwhile does not count."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    fill(store, RECORDS)
    opened: list[tuple[Path, int]] = []
    this_thread, open_file = threading.get_ident(), disk.open_file

    def noted(path: Path, flags: int, mode: int = disk.MODE) -> int:
        if threading.get_ident() == this_thread:
            opened.append((path, flags & os.O_ACCMODE))
        return open_file(path, flags, mode)

    monkeypatch.setattr(disk, "open_file", noted)

    assert len(list(dump(tmp_path))) == RECORDS + 1
    assert opened
    assert {(path.parent.name, mode) for path, mode in opened} == {("commitlog", os.O_RDONLY)}
    monkeypatch.undo()
    store.close()


def test_what_senders_choose_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key may hold any character."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, draft(properties={"KEYS": "\x1b[2J\n"}))
    store.close()
    assert main(["store", "dump", str(tmp_path)]) == 0

    shown = capsys.readouterr().out
    assert "keys=?[2J?" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("words", [["--from", "x"], ["--to", "-1"], ["--from", "1.5"]])
def test_a_wrong_offset_is_a_wrong_use(root: Path, words: list[str]) -> None:
    """Exit code 2, as everywhere."""
    with pytest.raises(SystemExit) as stopped:
        main(["store", "dump", str(root), *words])

    assert stopped.value.code == 2
