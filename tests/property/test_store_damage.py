"""Damage to the log of a stopped store loses the records it hits, and no others."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.record import MAGIC_BLANK, PREFIX, Record, decode_record
from halfmq.store.message_store import MessageStore, RecoveryReport
from tests.support.stores import Clock, append_durably, bounds, draft, everything, small_config

FILE_SIZE = 16_384
NEVER = 3_600_000  # ms
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
NO_QUEUE = {TransactionType.PREPARED, TransactionType.ROLLBACK}
DERIVED = ("consumequeue", "index", "checkpoint", "digests")
COUNT = 80  # records of each store
EXAMPLES = int(os.environ.get("DAMAGE_EXAMPLES", "15"))  # .ci/run takes more
SEEDS = 6  # number of stores


class Damage(NamedTuple):
    """Bytes that overwrite others."""

    offset: int  # physical
    content: bytes


def open_store(root: Path) -> tuple[MessageStore, RecoveryReport]:
    config = small_config(root, flush_interval_consume_queue_ms=NEVER)
    store = MessageStore(config, now_ms=Clock())
    return store, store.open()


def write_log(root: Path, seed: int) -> list[Record]:
    """Create a stopped store with all kinds of records; return them in log order."""
    chance = random.Random(seed)
    store, _ = open_store(root)
    done = [one.physical_offset for one in store.append([draft(HALF)])]
    for number in range(COUNT):
        topic = chance.choice(["A", "B", "long-" + "t" * 140, SCHEDULE, HALF])
        inner = store.reader.record_bytes(chance.choice(done)) if done and number % 7 == 0 else None
        done += [
            one.physical_offset
            for one in store.append(
                [
                    draft(
                        topic,
                        chance.randrange(2) if topic != HALF else 0,
                        body=inner or chance.randbytes(chance.choice([0, 3, 300, 600, 2500])),
                        properties={
                            "UNIQ_KEY": f"u{number}",
                            "TAGS": chance.choice("xy"),
                            "DELAY": str(chance.randrange(1, 4)) if topic == SCHEDULE else "",
                        },
                        sys_flag=chance.choice([0, 0xC] if topic == HALF else [0, 0, 8]),
                    )
                ]
            )
        ]
    records = list(store.reader.scan(0))
    assert [record.physical_offset for record in records] == done
    store.close()
    return records


class Logs:
    """Stopped stores and their records; a class, so that a failure does not print them all."""

    def __init__(self, directory: Path) -> None:
        self._logs = [
            (root := directory / str(seed), write_log(root, seed)) for seed in range(SEEDS)
        ]

    def __getitem__(self, seed: int) -> tuple[Path, list[Record]]:
        return self._logs[seed]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    return Logs(tmp_path_factory.mktemp("logs"))


@contextmanager
def copied(original: Path) -> Iterator[Path]:
    """Yield a copy to damage."""
    directory = Path(tempfile.mkdtemp(prefix="store-damage-"))
    try:
        yield shutil.copytree(original, directory / "store")
    finally:
        shutil.rmtree(directory)


def write(root: Path, damage: Damage) -> None:
    base = damage.offset - damage.offset % FILE_SIZE
    with (root / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(damage.offset - base)
        file.write(damage.content)


def content_at(root: Path, offset: int, size: int) -> bytes:
    base = offset - offset % FILE_SIZE
    with (root / "commitlog" / f"{base:020d}").open("rb") as file:
        file.seek(offset - base)
        return file.read(size)


def touched(records: list[Record], damages: list[Damage]) -> set[int]:
    return {
        record.physical_offset
        for record in records
        for damage in damages
        if record.physical_offset < damage.offset + len(damage.content)
        and damage.offset < record.end
    }


def in_queues(records: list[Record]) -> list[Record]:
    return [record for record in records if record.sys_flag & TRANSACTION_MASK not in NO_QUEUE]


def scanned_by_rocketmq(root: Path, end: int) -> list[Record]:
    """Return what RocketMQ's recovery dispatches; it stops at the first bad record."""
    records: list[Record] = []
    offset = 0
    while offset < end:
        base = offset - offset % FILE_SIZE
        content = (root / "commitlog" / f"{base:020d}").read_bytes()
        size, magic = PREFIX.unpack_from(content, offset - base)
        if magic == MAGIC_BLANK:
            assert offset + size == base + FILE_SIZE
            offset += size
            continue
        record = decode_record(content, offset - base, base=base)
        assert record.physical_offset == offset
        records.append(record)
        offset = record.end
    return records


def check(root: Path, records: list[Record], lost: set[int], *, ends_known: bool) -> None:
    """Open the store twice; compare its records with the original ones."""
    kept = [record for record in records if record.physical_offset not in lost]
    ends = {(one.topic, one.queue_id): one.queue_offset + 1 for one in in_queues(records)}
    last = max(record.end for record in kept)
    # The first message of a queue may seem to belong to another queue: nothing contradicts that.
    headless = {
        (one.topic, one.queue_id)
        for one in records
        if one.physical_offset in lost and not one.queue_offset
    }
    for turn in range(2):
        store, report = open_store(root)
        served = everything(store)
        left = [one for one in served if one.physical_offset not in lost]
        assert left == in_queues(kept)
        assert len(served) <= len(in_queues(records))
        assert turn == 0 or not report.damages, "repaired once and for all"
        assert store.write_offset >= last
        for key, (_, end) in bounds(store).items():
            if key in ends:
                assert end <= ends[key]
                assert end == ends[key] or not ends_known or store.write_offset == last
        dispatched = scanned_by_rocketmq(root, store.write_offset)
        assert [one for one in dispatched if one in kept] == kept
        for key in set(ends) - headless:
            offsets = [
                one.queue_offset
                for one in in_queues(dispatched)
                if (one.topic, one.queue_id) == key
            ]
            assert offsets == list(range(len(offsets))), "RocketMQ's queue would drift"
        if turn:
            send_to_all(store)
        store.close()
        (root / "abort").write_text("1")


def check_without_digest(root: Path, records: list[Record], lied: int) -> None:
    """Open the store twice: except for one wrong record, at most one message has lost its place.

    Where a record belongs is protected by digests alone, so it may take another one's place.
    """
    kept = [record for record in in_queues(records) if record.physical_offset != lied]
    for turn in range(2):
        store, report = open_store(root)
        served = everything(store)
        assert sum(one not in served for one in kept) <= 1
        assert {one.physical_offset for one in served} <= {one.physical_offset for one in records}
        assert turn == 0 or not report.damages
        assert store.write_offset == records[-1].end
        if turn:
            send_to_all(store)
        store.close()
        (root / "abort").write_text("1")


def send_to_all(store: MessageStore) -> None:
    """Append another message to each queue."""
    keys = list(bounds(store))
    done = append_durably(store, *(draft(*key) for key in keys))
    assert [one.queue_offset for one in done] == [bounds(store)[key][1] - 1 for key in keys]


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, SEEDS - 1),
    number=st.integers(0, COUNT - 1),
    at=st.integers(0, 4000),
    bit=st.integers(0, 7),
    without=st.sets(st.sampled_from(DERIVED)),
)
# A queue offset one too high, like that of the next message, and one below zero.
@example(seed=0, number=0, at=27, bit=0, without={"digests"})
@example(seed=0, number=7, at=27, bit=0, without={"digests"})
@example(seed=0, number=0, at=20, bit=7, without={"digests"})
# Queue ids like that of another record, and queue offsets that fit the ends of two queues.
@example(seed=0, number=3, at=15, bit=0, without={"digests"})
@example(seed=0, number=8, at=15, bit=0, without={"consumequeue", "digests"})
@example(seed=1, number=46, at=15, bit=0, without={"consumequeue", "digests"})
@example(seed=5, number=64, at=27, bit=0, without={"consumequeue", "digests"})
@example(seed=0, number=65, at=27, bit=1, without={"digests"})
@example(seed=0, number=78, at=27, bit=2, without={"digests"})
# The topic of a record in no queue is not valid UTF-8 any more.
@example(seed=4, number=9, at=92, bit=7, without={"digests"})
def test_a_flipped_bit_costs_no_message_where_a_digest_reaches(
    logs: Logs, seed: int, number: int, at: int, bit: int, without: set[str]
) -> None:
    """With any of queues, index and checkpoint present; otherwise one message is lost.

    Two, if it says where the message belongs, and there is no digest.
    """
    original, records = logs[seed]
    with copied(original) as root:
        record = records[number]
        at = record.physical_offset + at % record.total_size
        (old,) = content_at(root, at, 1)
        write(root, Damage(at, bytes([old ^ 1 << bit])))
        remove(root, without)

        if "digests" not in without:
            check(root, records, set(), ends_known=True)
            assert content_at(root, at, 1) == bytes([old])
        elif says_where(record, at - record.physical_offset):
            check_without_digest(root, records, record.physical_offset)
        else:
            queues_left = "consumequeue" not in without
            check(root, records, {record.physical_offset}, ends_known=queues_left)


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, SEEDS - 1),
    places=st.sets(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
    size=st.sampled_from([512, 4096]),
    garbled=st.booleans(),
    without=st.sets(st.sampled_from(DERIVED)),
)
def test_lost_sectors_cost_what_lay_in_them(
    logs: Logs, seed: int, places: set[float], size: int, garbled: bool, without: set[str]
) -> None:
    """Zeros or garbage, at several places, also at the ends of files."""
    original, records = logs[seed]
    sectors = records[-2].physical_offset // size  # before the last record
    chance = random.Random(seed)
    damages = [
        Damage(sector * size, chance.randbytes(size) if garbled else bytes(size))
        for sector in {int(place * sectors) for place in places}
    ]
    with copied(original) as root:
        for damage in damages:
            write(root, damage)
        remove(root, without)

        check(root, records, touched(records, damages), ends_known=False)


def says_where(record: Record, position: int) -> bool:
    """Return whether a byte of a record belongs to its topic, queue id or queue offset."""
    topic_at = record.total_size - len(record.properties) - 2 - len(record.topic)
    return (
        12 <= position < 16
        or 20 <= position < 28
        or topic_at <= position < topic_at + len(record.topic)
    )


def remove(root: Path, names: set[str]) -> None:
    (root / "abort").write_text("1")
    for name in names:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
