"""A start scans the log once: it collects the ranges of transaction records."""

import random
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.files import disk
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log import transaction_ranges
from halfmq.store.log.transaction_ranges import is_about_transactions
from halfmq.store.message_store import MessageStore
from tests.support.seeds import run_seed
from tests.support.stores import Clock, append_durably, crash, draft, small_config

KINDS: list[dict[str, Any]] = [
    {},
    {"topic": HALF_TOPIC},
    {"topic": HALF_TOPIC, "sys_flag": 0xC},
    {"topic": OP_TOPIC},
    {"sys_flag": 0x8},
    {"sys_flag": 0x4},
    {"topic": TRANS_CHECK_MAX_TIME_TOPIC},
]


@pytest.mark.parametrize(
    ("topic", "sys_flag", "is_one"),
    [
        ("orders", 0x0, False),
        ("orders", 0x1, False),
        ("orders", 0x8, True),
        ("orders", 0x4, True),
        ("orders", 0xC, True),
        (HALF_TOPIC, 0x0, True),
        (OP_TOPIC, 0x0, True),
        (TRANS_CHECK_MAX_TIME_TOPIC, 0x0, True),
    ],
)
def test_which_records_may_belong_to_a_transaction(topic: str, sys_flag: int, is_one: bool) -> None:
    """The six kinds of records from which the table of transactions is filled."""
    assert is_about_transactions(topic, sys_flag) is is_one


@pytest.mark.parametrize("ranges_max", [10_000, 40, 1])
def test_after_a_kill_every_transaction_record_is_yielded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges_max: int
) -> None:
    """From any start, and for any limit of the number of ranges."""
    monkeypatch.setattr(transaction_ranges, "RANGES_MAX", ranges_max)
    seed = run_seed()
    print(f"seed={seed}")
    chance = random.Random(seed)
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    append_durably(store, draft(topic=HALF_TOPIC))
    for _ in range(20):
        kind = chance.choice(KINDS) if chance.random() < 0.6 else {}
        append_durably(store, *(draft(**kind) for _ in range(chance.choice([1, 3, 90]))))
    records = list(store.reader.scan(0))
    wanted = [one for one in records if is_about_transactions(one.topic, one.sys_flag)]

    for number, first in enumerate([records[0], *chance.sample(records, 5)]):
        start = first.physical_offset
        killed = MessageStore(
            small_config(crash(tmp_path / "live", tmp_path / str(number))), now_ms=Clock()
        )
        killed.open()
        expected = [one for one in wanted if one.physical_offset >= start]
        assert list(killed.reader.scan_transactions(start)) == expected
        assert list(killed.reader.scan_transactions(0)) == wanted, "later scans read the whole log"
        killed.close()
    store.close()


def test_a_start_does_not_read_messages_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a log with one half message, only that is read again."""
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    append_durably(store, *(draft() for _ in range(500)))
    append_durably(store, draft(topic=HALF_TOPIC))
    append_durably(store, *(draft() for _ in range(500)))
    crash(tmp_path / "live", tmp_path / "killed")
    store.close()
    killed = MessageStore(small_config(tmp_path / "killed"), now_ms=Clock())
    killed.open()
    read: list[int] = []
    pread = disk.pread

    def recorded(fd: int, size: int, position: int) -> bytes:
        read.append(size)
        return pread(fd, size, position)

    monkeypatch.setattr(disk, "pread", recorded)

    assert [record.topic for record in killed.reader.scan_transactions(0)] == [HALF_TOPIC]
    assert sum(read) < 4096
    killed.close()


def test_a_damaged_transaction_record_is_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a start does not check bodies."""
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    damaged, sound = append_durably(store, draft(topic=HALF_TOPIC), draft(topic=HALF_TOPIC))
    root = crash(tmp_path / "live", tmp_path / "killed")
    store.close()
    path = next((root / "commitlog").iterdir())
    with path.open("r+b") as file:
        file.seek(damaged.physical_offset + 90)
        file.write(b"?")
    killed = MessageStore(small_config(root, check_crc_on_recover=False), now_ms=Clock())
    killed.open()

    given = [record.physical_offset for record in killed.reader.scan_transactions(0)]

    assert given == [sound.physical_offset]
    assert f"event=log_damaged offset={damaged.physical_offset}" in caplog.text
    killed.close()
