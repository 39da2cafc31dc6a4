"""One flipped bit in a used part of a stopped store is found; in queue or index it is repaired."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from halfmq.store.format.index import HEADER_SIZE, SLOT_SIZE, item_position, unpack_header
from halfmq.store.format.record import BLANK_SIZE, Record
from halfmq.store.message_store import MessageStore
from halfmq.store.tools.dump import Dumped, dump
from halfmq.store.tools.verify import verify
from tests.support.damage import flip
from tests.support.stores import Clock, draft, everything, flush, small_config

EXAMPLES = int(os.environ.get("DAMAGE_EXAMPLES", "20"))  # .ci/run takes more
SEEDS = 4  # number of stores
COUNT = 120  # groups appended to each
SLOTS, ITEMS = 50, 200  # of an index file
TOPICS = ("A", "B", "long-" + "t" * 140, "SCHEDULE_TOPIC_XXXX")


@dataclass(frozen=True, repr=False)
class Store:
    """A stopped store and its messages; a class, so that a failure does not print them all."""

    root: Path
    used: dict[Path, list[range]]  # file → bytes in use
    records: list[Record]


def settings_of(root: Path) -> MessageStore:
    config = small_config(root, max_hash_slots=SLOTS, max_index_items=ITEMS)
    return MessageStore(config, now_ms=Clock())


def fill(root: Path, seed: int) -> list[Record]:
    """Create a stopped store with several files of each kind; return its messages."""
    chance = random.Random(seed)
    store = settings_of(root)
    store.open()
    for number in range(COUNT):
        topic = chance.choice(TOPICS)
        store.append(
            [
                draft(
                    topic,
                    chance.randrange(2),
                    chance.randbytes(chance.choice([0, 3, 300, 900, 2500])),
                    properties={
                        "UNIQ_KEY": f"u{number}",
                        "KEYS": " ".join(f"k{chance.randrange(9)}" for _ in range(number % 4)),
                        "TAGS": chance.choice("xy"),
                        "DELAY": str(chance.randrange(1, 4)) if "SCHEDULE" in topic else "",
                    },
                    sys_flag=chance.choice([0, 0, 8]),
                )
            ]
        )
    flush(store)
    found = everything(store)
    store.close()
    return found


def used_parts(root: Path) -> dict[Path, list[range]]:
    """Return the bytes in use of each file.

    Not: what follows the blank of a full log file, item 0 of an index file, and all that no
    record, entry or item was written to yet.
    """
    used: dict[Path, list[range]] = {}
    files = sorted((root / "commitlog").iterdir())
    records = [one.record for one in dump(root) if isinstance(one, Dumped)]
    for path in files:
        size = path.stat().st_size
        base = int(path.name)
        end = max(one.end for one in records if base <= one.physical_offset < base + size)
        blank = BLANK_SIZE if path != files[-1] else 0
        used[path.relative_to(root)] = [range(end - base + blank)]
    for path in sorted((root / "consumequeue").rglob("0*")):
        if path.is_file():
            used[path.relative_to(root)] = [range(len(path.read_bytes().rstrip(b"\0")))]
    for path in sorted((root / "index").iterdir()):
        next_item = unpack_header(path.read_bytes()[:HEADER_SIZE]).next_item
        used[path.relative_to(root)] = [
            range(HEADER_SIZE + SLOTS * SLOT_SIZE),
            range(item_position(1, SLOTS), item_position(next_item, SLOTS)),
        ]
    return used


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    """Yield some stopped stores."""
    made: list[Store] = []
    for seed in range(SEEDS):
        root = tmp_path_factory.mktemp("verified") / "store"
        records = fill(root, seed)
        assert verify(root).sound
        made.append(Store(root, used_parts(root), records))
    return made


@contextmanager
def damaged(original: Store, path: Path, position: int, bit: int) -> Iterator[Path]:
    """Yield a copy with one flipped bit."""
    directory = Path(tempfile.mkdtemp(prefix="store-verify-"))
    try:
        root = shutil.copytree(original.root, directory / "store")
        flip(root / path, position, bit)
        yield root
    finally:
        shutil.rmtree(directory)


def a_bit(choice: int, store: Store, folder: str) -> tuple[Path, int, int]:
    """Choose a file, a used byte and a bit."""
    choose = random.Random(choice)
    path = choose.choice([one for one in store.used if one.parts[0] == folder])
    return path, choose.choice(choose.choice(store.used[path])), choose.randrange(8)


def is_indexed(store: MessageStore, record: Record) -> bool:
    key = record.property_map["UNIQ_KEY"]
    return record.physical_offset in store.index.query(record.topic, key, 64, 0, 1 << 60)


common = settings(max_examples=EXAMPLES)


@common
@given(
    seed=st.integers(0, SEEDS - 1),
    folder=st.sampled_from(["commitlog", "consumequeue", "index"]),
    choice=st.integers(0, 2**32 - 1),
)
def test_a_flipped_bit_is_found(stores: list[Store], seed: int, folder: str, choice: int) -> None:
    """The finding gives its file, and in the log its exact place or its record."""
    store = stores[seed]
    path, position, bit = a_bit(choice, store, folder)
    with damaged(store, path, position, bit) as root:
        report = verify(root)

    assert not report.sound, (path, position, bit)
    files = {finding.file.split("/")[0] for finding in report.findings.damage}
    assert folder in files, (path, position, bit, report.findings.damage)
    for finding in report.findings.damage:
        if finding.kind == "bytes_changed":
            assert (finding.file, finding.position) == (str(path), position)


@common
@given(
    seed=st.integers(0, SEEDS - 1),
    folder=st.sampled_from(["consumequeue", "index"]),
    choice=st.integers(0, 2**32 - 1),
)
def test_a_flipped_bit_of_queue_or_index_is_mended_by_the_next_start(
    stores: list[Store], seed: int, folder: str, choice: int
) -> None:
    """Every message is unchanged and found by its key."""
    store = stores[seed]
    path, position, bit = a_bit(choice, store, folder)
    with damaged(store, path, position, bit) as root:
        opened = settings_of(root)
        opened.open()
        served = everything(opened)
        lost = [record for record in store.records if not is_indexed(opened, record)]
        opened.close()
        report = verify(root)

    assert served == store.records, (path, position, bit)
    assert lost == [], (path, position, bit)
    assert report.sound, (path, position, bit, report.findings.damage)
