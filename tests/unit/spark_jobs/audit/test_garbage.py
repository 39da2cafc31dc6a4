"""Garbage in: an audit of anything ends, with findings or a clear message; no Spark here."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.checks import Checks
from halfmq.spark_jobs.audit.rules.model import Kind
from halfmq.spark_jobs.errors import LogDirectoryError, SparkJobsError
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.lookup import LogLookup
from tests.support.auditing import audit_here
from tests.support.planted_log import PENDING_AGE, plant
from tests.support.seeds import run_seed

# HALFMQ_AUDIT_SEEDS=1000 makes a campaign of it; a seed that failed is in the name of its test.
SEEDS = 6 * int(os.environ.get("HALFMQ_AUDIT_SEEDS", "1"))
FIRST_SEED = run_seed()
SEGMENT = 1 << 15


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("garbage") / "store"
    plant(root, 5, 250, fault_every=9, segment_size=SEGMENT)
    return root


def overwritten(content: bytearray, choose: random.Random) -> None:
    start = choose.randrange(len(content) + 1)
    size = choose.choice([1, 4, 8, 100, 5_000])
    content[start : start + size] = choose.choice([bytes(size), choose.randbytes(size)])


def cut_short(content: bytearray, choose: random.Random) -> None:
    del content[choose.randrange(len(content) + 1) :]


def made_longer(content: bytearray, choose: random.Random) -> None:
    content += choose.randbytes(choose.randrange(5_000))


def shifted(content: bytearray, choose: random.Random) -> None:
    place = choose.randrange(len(content) + 1)
    content[place:place] = choose.randbytes(choose.randrange(100))


def sprinkled(content: bytearray, choose: random.Random) -> None:
    for _ in range(50 if content else 0):
        content[choose.randrange(len(content))] = choose.randrange(256)


def with_a_wrong_field(content: bytearray, choose: random.Random) -> None:
    """Of some record's head: sizes, flags, offsets, times, links."""
    magic = content.find(b"\xda\xa3\x20\xa7", choose.randrange(len(content) + 1))
    if magic >= 4:
        place = magic - 4 + choose.choice([0, 8, 12, 16, 20, 28, 36, 40, 56, 72, 76, 84])
        extremes = [b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\x80" + bytes(3), choose.randbytes(4)]
        content[place : place + 4] = choose.choice(extremes)


def replayed(content: bytearray, choose: random.Random) -> None:
    """A piece of the file lies at another place too."""
    source, target = (choose.randrange(len(content) + 1) for _ in range(2))
    piece = content[source : source + 2_000]
    content[target : target + len(piece)] = piece


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    overwritten,
    cut_short,
    made_longer,
    shifted,
    sprinkled,
    with_a_wrong_field,
    with_a_wrong_field,
    replayed,
]
FOREIGN = {
    "commitlog": ["99999999999999999999", "09223372036854775000", "00000000000000000007", "x.tmp"],
    "config": ["topics.json", "consumerOffset.json"],
    "consumequeue/orders/0": ["00000000000000000020", "99999999999999999999", "notes"],
}


def wreck(root: Path, choose: random.Random) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    segments = [path for path in files if path.parent.name == "commitlog"]
    for _ in range(choose.randrange(1, 8)):
        path = choose.choice(segments if choose.random() < 0.7 else files)
        if path.is_file():
            content = bytearray(path.read_bytes())
            choose.choice(DAMAGES)(content, choose)
            path.write_bytes(content)
            fate = choose.random()
            if fate < 0.1:
                path.unlink()
            if fate < 0.05:
                path.mkdir()
    for folder, names in FOREIGN.items():
        target = root / folder / choose.choice(names)
        if choose.random() < 0.2 and not target.is_dir():
            target.write_bytes(choose.choice([choose.randbytes(999), b"[" * 200_000, b"[]", b""]))


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_an_audit_of_anything_ends_and_says_what_it_saw(
    seed: int, store: Path, tmp_path: Path
) -> None:
    """Each finding is about bytes that are there, or none; nothing else is raised."""
    root = tmp_path / "store"
    shutil.copytree(store, root)
    choose = random.Random(seed)
    wreck(root, choose)
    found: list[tuple[Kind, tuple[int, ...]]] = []
    said = str(root)
    try:
        step = choose.choice([1 << 12, 1 << 20])
        found = audit_here(root, step=step, checks=Checks(pending_age=PENDING_AGE)).found
        segments = survey(root).segments
    except SparkJobsError as error:
        said, segments = str(error), ()

    assert said.startswith(str(root))
    lookup = LogLookup(segments)
    for _, offsets in found:
        for offset in offsets:
            place = lookup.place(offset)
            assert place is None or Path(place.file).stat().st_size > place.position
            lookup.names(offset)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """As a link to nowhere is; folders that are named like segments are passed over."""
    (tmp_path / f"{0:020}").mkdir()
    with pytest.raises(LogDirectoryError, match="no commit-log segment"):
        survey(tmp_path)

    (tmp_path / f"{SEGMENT:020}").symlink_to(tmp_path / "nowhere")

    with pytest.raises(LogDirectoryError, match=f"{SEGMENT:020}: No such file"):
        survey(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"\0" * 99, b"\xff" * 4_096, b"PK\x03\x04" * 999, b"\x00\x00\x00\x5b\xda\xa3\x20\xa7" * 500],
    ids=["short", "ones", "foreign", "magics"],
)
def test_what_is_no_log_is_empty_or_corrupt(content: bytes, tmp_path: Path) -> None:
    """Never a record, and never a loop without an end."""
    folder = tmp_path / "commitlog"
    folder.mkdir()
    (folder / f"{0:020}").write_bytes(content)

    outcome = audit_here(tmp_path)

    assert {kind for kind, _ in outcome.found} <= {Kind.CORRUPT_RECORD}
    assert not outcome.transactions
