"""A start walks the log once: the table of transactions is filled from places that it noted."""

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
def test_what_is_about_a_transaction(topic: str, sys_flag: int, is_one: bool) -> None:
    """Each of the six kinds of record that the table is made from."""
    assert is_about_transactions(topic, sys_flag) is is_one


@pytest.mark.parametrize("places_max", [10_000, 40, 1])
def test_after_a_kill_every_record_of_a_transaction_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places_max: int
) -> None:
    """From wherever the reading begins, and however many places can be noted."""
    monkeypatch.setattr(transaction_ranges, "RANGES_MAX", places_max)
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
        assert list(killed.reader.scan_transactions(0)) == wanted, "a second reading is a full one"
        killed.close()
    store.close()


def test_a_start_reads_no_message_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a log with a single half message the table needs that one, and the walk has met it."""
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

    def noted(fd: int, size: int, position: int) -> bytes:
        read.append(size)
        return pread(fd, size, position)

    monkeypatch.setattr(disk, "pread", noted)

    assert [record.topic for record in killed.reader.scan_transactions(0)] == [HALF_TOPIC]
    assert sum(read) < 4096
    killed.close()


def test_a_damaged_record_of_a_transaction_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a start does not check bodies, the table does not believe them either."""
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    spoilt, sound = append_durably(store, draft(topic=HALF_TOPIC), draft(topic=HALF_TOPIC))
    root = crash(tmp_path / "live", tmp_path / "killed")
    store.close()
    path = next((root / "commitlog").iterdir())
    with path.open("r+b") as file:
        file.seek(spoilt.physical_offset + 90)
        file.write(b"?")
    killed = MessageStore(small_config(root, check_crc_on_recover=False), now_ms=Clock())
    killed.open()

    given = [record.physical_offset for record in killed.reader.scan_transactions(0)]

    assert given == [sound.physical_offset]
    assert f"event=log_damaged offset={spoilt.physical_offset}" in caplog.text
    killed.close()
