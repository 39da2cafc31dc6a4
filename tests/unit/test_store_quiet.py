"""Where the log is silent about transactions, it is not read again for them."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log_reader import LogReader
from halfmq.store.message_store import MessageStore
from halfmq.store.quiet import QuietStretches, is_about_transactions
from tests.support.stores import Clock, append_durably, crash, draft, small_config


def stretches(*blocks: tuple[int, int, bool]) -> QuietStretches:
    quiet = QuietStretches(bytes_min=100)
    for start, end, is_quiet in blocks:
        quiet.note(start, end, is_quiet=is_quiet)
    return quiet


def test_all_but_quiet_stretches_has_to_be_read() -> None:
    """What the scan has not seen, or seen something in, is given; the rest is not."""
    quiet = stretches((50, 150, True), (150, 300, True), (300, 400, False), (400, 600, True))

    assert list(quiet.between(0, 1000)) == [(0, 50), (300, 400), (600, 1000)]


def test_a_part_is_cut_where_it_begins_and_ends() -> None:
    """A snapshot may continue in the middle of a quiet stretch, and a log end there."""
    quiet = stretches((0, 500, True), (500, 600, False), (600, 900, True))

    assert list(quiet.between(200, 700)) == [(500, 600)]
    assert list(quiet.between(550, 560)) == [(550, 560)]
    assert list(quiet.between(200, 300)) == []


def test_a_hole_between_quiet_blocks_is_read() -> None:
    """The end of a file, or a damaged place whose records were given fillers."""
    quiet = stretches((0, 200, True), (260, 500, True))

    assert list(quiet.between(0, 500)) == [(200, 260)]


def test_short_stretches_are_not_left_out() -> None:
    """To open the log anew behind each would cost more than to read them."""
    quiet = stretches((0, 90, True), (90, 100, False), (100, 250, True), (250, 260, False))

    assert list(quiet.between(0, 300)) == [(0, 100), (250, 300)]


def test_nothing_noted_means_everything_is_read() -> None:
    """After a clean stop nothing is scanned."""
    assert list(QuietStretches().between(10, 20)) == [(10, 20)]


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


KINDS: list[dict[str, Any]] = [
    {},
    {"topic": HALF_TOPIC},
    {"topic": HALF_TOPIC, "sys_flag": 0xC},
    {"topic": OP_TOPIC},
    {"sys_flag": 0x8},
    {"sys_flag": 0x4},
    {"topic": TRANS_CHECK_MAX_TIME_TOPIC},
]


@pytest.mark.parametrize("seed", range(8))
def test_after_a_kill_every_record_of_a_transaction_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same ones as without the scan of the recovery, from wherever the reading begins."""
    chance = random.Random(seed)
    print(f"seed={seed}")
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    for _ in range(20):
        kind = chance.choice(KINDS) if chance.random() < 0.6 else {}
        append_durably(store, *(draft(**kind) for _ in range(chance.choice([1, 3, 90]))))
    crash(tmp_path / "live", tmp_path / "killed")
    store.close()
    monkeypatch.setattr(
        "halfmq.store.recovery.QuietStretches", partial(QuietStretches, bytes_min=1)
    )
    killed = MessageStore(small_config(tmp_path / "killed"), now_ms=Clock())
    killed.open()
    records = list(killed.scan(0))
    wanted = [one for one in records if is_about_transactions(one.topic, one.sys_flag)]

    assert wanted
    assert list(killed.scan_transactions(0)) == wanted
    for start in chance.sample(records, 5):
        offset = start.physical_offset
        assert list(killed.scan_transactions(offset)) == [
            one for one in wanted if one.physical_offset >= offset
        ]
    killed.close()


def test_what_recovery_saw_to_be_quiet_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log without transactions costs no second reading."""
    store = MessageStore(small_config(tmp_path / "live"), now_ms=Clock())
    store.open()
    append_durably(store, *(draft() for _ in range(500)))
    append_durably(store, draft(topic=HALF_TOPIC))
    append_durably(store, *(draft() for _ in range(500)))
    crash(tmp_path / "live", tmp_path / "killed")
    store.close()
    monkeypatch.setattr(
        "halfmq.store.recovery.QuietStretches", partial(QuietStretches, bytes_min=1)
    )
    killed = MessageStore(small_config(tmp_path / "killed"), now_ms=Clock())
    killed.open()
    read: list[int] = []
    whole = LogReader.scan_transactions

    def noted(self: LogReader, start: int, end: int) -> object:
        read.append(end - start)
        return whole(self, start, end)

    monkeypatch.setattr(LogReader, "scan_transactions", noted)

    assert [record.topic for record in killed.scan_transactions(0)] == [HALF_TOPIC]
    assert sum(read) < killed.write_offset / 4
    killed.close()
