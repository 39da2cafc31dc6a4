"""The key index, compared with a list of all records, over stops, kills and power cuts."""

import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from halfmq.store.format.flags import TransactionType, transaction_type
from halfmq.store.format.index import (
    HEADER,
    ITEM,
    SLOT,
    IndexItem,
    index_file_size,
    index_key,
    index_key_hash,
    index_keys,
    item_position,
    slot_position,
)
from halfmq.store.index.index_service import IndexService
from tests.support.index_records import (
    FOREVER,
    START_MS,
    IndexedRecord,
    assert_finds_exactly,
    found,
    opened,
    record,
    service,
)

PAGE: Final = 64  # bytes that this disk writes at once; small, so that a file has many pages
RECORD_SIZE: Final = 100
KEY_NAMES: Final = [f"k{n}" for n in range(6)]
KEYS = st.lists(st.sampled_from(KEY_NAMES), max_size=4).map(" ".join)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


class IndexMachine(RuleBasedStateMachine):
    """Each key is found exactly once, after any sequence of events."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.log: list[IndexedRecord] = []
        self.log_end = 0
        self.now_ms = START_MS
        self.index_timestamp = 0
        self.flushed: dict[str, bytes] = {}

    @initialize(slots=st.integers(1, 20), items=st.integers(2, 30))
    def start(self, slots: int, items: int) -> None:
        self.slots, self.items = slots, items
        self.index = self.new_service()
        assert self.index.recover(clean=True, log_end=0, index_timestamp=0) == 0

    def new_service(self) -> IndexService:
        return service(
            self.directory, slots=self.slots, items=self.items, now_ms=lambda: self.now_ms
        )

    @rule(several=st.lists(st.tuples(KEYS, st.integers(0, 3000)), min_size=1, max_size=8))
    def append(self, several: list[tuple[str, int]]) -> None:
        """Append records to the log and put them."""
        group = []
        for keys, later in several:
            self.now_ms += later
            unique_key = f"{self.log_end:032X}"
            group.append(
                record(
                    self.log_end,
                    unique_key=unique_key,
                    keys=keys,
                    after_ms=self.now_ms - START_MS,
                )
            )
            self.log_end += RECORD_SIZE
        self.log += group
        self.index.put_group(group)

    @rule(back=st.integers(0, 5))
    def put_again(self, back: int) -> None:
        """Put records of the log."""
        self.index.put_group(self.log[-back:])

    @rule()
    def flush(self) -> None:
        """Flush, and store the time that the checkpoint would get."""
        self.index_timestamp = self.index.flush()
        self.flushed = snapshot(self.directory)

    @rule(lost=st.integers(0, 4))
    def stop(self, lost: int) -> None:
        """Stop cleanly; the log may lose its end before the next start."""
        self.index.close()
        self.lose(lost)
        self.recover(clean=True)

    @rule(lost=st.integers(0, 4))
    def kill(self, lost: int) -> None:
        """Kill the process; the page cache survives."""
        self.index.close()  # writes nothing that is not in the cache already
        self.lose(lost)
        self.recover(clean=False)

    @rule(lost=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
    def power_cut(self, lost: int, seed: int) -> None:
        """Cut the power: of the unflushed pages any part is on disk."""
        written = snapshot(self.directory)
        self.index.close()
        rng = random.Random(seed)
        for name, new in written.items():
            if name in self.flushed:
                survived = mixed(self.flushed[name], new, rng.choice)
            elif rng.random() < 0.7:
                survived = mixed(bytes(len(new)), new, rng.choice)
            else:
                survived = b""
            (self.directory / name).write_bytes(survived)
        self.lose(lost)
        self.recover(clean=False)

    def lose(self, count: int) -> None:
        if count:
            self.log = self.log[:-count]
            self.log_end = self.log[-1].physical_offset + RECORD_SIZE if self.log else 0
            self.now_ms += 60_000  # later records have later times than the lost ones

    def recover(self, *, clean: bool) -> None:
        self.index = self.new_service()
        start = self.index.recover(
            clean=clean, log_end=self.log_end, index_timestamp=self.index_timestamp
        )
        self.index.put_group([one for one in self.log if one.physical_offset >= start])
        assert_finds_exactly(self.index, self.log)
        for key in KEY_NAMES:
            assert all(hit < self.log_end for hit in found(self.index, key))
        # The checkpoint must not cover more than is on disk now.
        self.flush()

    def teardown(self) -> None:
        if hasattr(self, "index"):
            assert_finds_exactly(self.index, self.log)
            self.index.close()
        shutil.rmtree(self.directory)


def mixed(old: bytes, new: bytes, choose: Callable[[tuple[bytes, bytes]], bytes]) -> bytes:
    """Take each page from one of two states of a file."""
    assert len(old) == len(new)
    pages = range(0, len(new), PAGE)
    return b"".join(choose((old[at : at + PAGE], new[at : at + PAGE])) for at in pages)


def one_by_one(groups: list[list[IndexedRecord]], slots: int, items: int) -> list[bytes]:
    """Build the files of these records by RocketMQ's rules, key after key."""
    files: list[bytearray] = []
    header = (0, 0, 0, 0, 0, 1)
    for one in chain.from_iterable(groups):
        if transaction_type(one.sys_flag) is TransactionType.ROLLBACK:
            continue
        for key in index_keys(one.properties):
            begin, end, begin_offset, end_offset, taken, number = header
            if not files or number == items:
                files.append(bytearray(index_file_size(slots, items)))
                begin, begin_offset, taken, number = end, end_offset, 0, 1
            key_hash = index_key_hash(index_key(one.topic, key.decode(errors="replace")))
            slot_at = slot_position(key_hash % slots)
            (previous,) = SLOT.unpack_from(files[-1], slot_at)
            seconds = max((one.store_timestamp - begin) // 1000, 0) if begin > 0 else 0
            item = IndexItem(key_hash, one.physical_offset, seconds, previous)
            ITEM.pack_into(files[-1], item_position(number, slots), *item)
            SLOT.pack_into(files[-1], slot_at, number)
            if number == 1:
                begin, begin_offset = one.store_timestamp, one.physical_offset
            end, end_offset = one.store_timestamp, one.physical_offset
            header = (begin, end, begin_offset, end_offset, taken + (previous == 0), number + 1)
            HEADER.pack_into(files[-1], 0, *header)
    return [bytes(file) for file in files]


@given(
    slots=st.integers(1, 20),
    items=st.integers(2, 30),
    several=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["orders", "中"]),
                st.sampled_from(["", "U" * 32, "ü"]),
                KEYS,
                st.integers(-500, 3000),
                st.sampled_from([0, 0, 4, 8, 12]),
            ),
            min_size=1,
            max_size=12,
        ),
        max_size=4,
    ),
)
def test_files_are_byte_for_byte_those_of_one_key_after_the_other(
    slots: int, items: int, several: list[list[tuple[str, str, str, int, int]]]
) -> None:
    """Chains, times and headers, with hash collisions, new files and records without keys."""
    offset, after_ms = 0, 0
    groups: list[list[IndexedRecord]] = []
    for group in several:
        groups.append([])
        for topic, unique_key, keys, later, sys_flag in group:
            after_ms += later
            groups[-1].append(
                record(
                    offset,
                    unique_key=unique_key,
                    keys=keys,
                    topic=topic,
                    after_ms=after_ms,
                    sys_flag=sys_flag,
                )
            )
            offset += RECORD_SIZE
    with tempfile.TemporaryDirectory() as name:
        index = opened(Path(name), slots=slots, items=items)
        for records in groups:
            index.put_group(records)
        index.close()

        assert [*map(Path.read_bytes, sorted(Path(name).iterdir()))] == one_by_one(
            groups, slots, items
        )


IndexMachine.TestCase.settings = settings(stateful_step_count=15)
TestIndexMachine = IndexMachine.TestCase


@given(
    damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=30),
    clean=st.booleans(),
)
def test_no_damage_stops_the_start_or_hangs_a_look_up(
    damage: list[tuple[int, int]], clean: bool
) -> None:
    """A query may then return too few or too many records, but never fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        records = [record(RECORD_SIZE * n, keys="k0 k1", after_ms=1000 * n) for n in range(20)]
        opened(directory, items=15, records=records).close()
        for path in directory.iterdir():
            content = bytearray(path.read_bytes())
            for position, value in damage:
                content[position % len(content)] = value
            path.write_bytes(content)

        index = service(directory, items=15)
        start = index.recover(clean=clean, log_end=2000, index_timestamp=START_MS + 15_000)
        index.put_group([one for one in records if one.physical_offset >= start])
        index.put_group([record(2000, keys="k2")])
        for key in ("k0", "k1"):
            index.query("orders", key, 64, 0, FOREVER)
        index.close()
