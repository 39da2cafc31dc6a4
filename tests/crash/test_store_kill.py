"""kill -9 at random moments, and power cuts made from it: nothing acknowledged is lost.

The campaign goes on for `HALFMQ_CAMPAIGN_SECONDS` (60) in each of its forms. The seed of each run
is printed, and can be set by `HALFMQ_SEED`; the moments of the kills differ all the same.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from itertools import count, pairwise
from pathlib import Path

import pytest

from halfmq.store.files.checkpoint import load_checkpoint
from halfmq.store.files.durable_mark import DurableMark
from halfmq.store.format.queue_entry import ENTRY_SIZE, unpack_entries
from halfmq.store.message_store import MessageStore
from tests.support.store_child import SteppingClock
from tests.support.stores import everything, small_config

REPOSITORY = Path(__file__).parents[2]
LINES_BEFORE_KILL = 150  # acknowledged records in one life, at most
PAGE = 4096


class Acknowledged:
    """What a child has told over all its lives."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[str, int, int, int]] = {}  # by physical offset
        self.end = 0  # everything below is on disk

    def add(self, line: str) -> None:
        topic, queue_id, queue_offset, physical_offset, crc = line.split()
        key = int(physical_offset)
        self.records[key] = (topic, int(queue_id), int(queue_offset), int(crc))
        self.end = max(self.end, key + 1)


def live_and_die(
    root: Path, seed: int, choose: random.Random, told: Acknowledged, keep: int | None
) -> None:
    """Let a child append, and kill it at a moment that it does not choose."""
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.store_child", str(root), str(seed)),
            *([] if keep is None else [str(keep)]),
        ],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert child.stdout is not None
    try:
        for _ in range(choose.randrange(1, LINES_BEFORE_KILL)):
            line = child.stdout.readline()
            assert line, "the child has failed by itself"
            told.add(line)
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n"):  # the last one may be cut, and was not told then
            told.add(line)


def cut_power(root: Path, choose: random.Random, told: Acknowledged) -> None:
    """Change what no flush has covered, as a disk may leave it."""
    log_size = small_config(root).commit_log_file_size
    # Of what was flushed last, the child may not have told any more.
    marked = DurableMark(root / "checkpoint").load()
    for path in (root / "commitlog").iterdir():
        base = int(path.name)
        durable = max(told.end - base, 0)
        # The record that the last acknowledgement names is on disk to its end.
        if durable < log_size:
            content = bytearray(path.read_bytes())
            if durable:
                durable += int.from_bytes(content[durable - 1 : durable + 3], "big") - 1
            durable = min(max(durable, marked - base), log_size)
            damage(content, durable, choose)
            path.write_bytes(content)
    log_start = min(int(path.name) for path in (root / "commitlog").iterdir())
    trusted = load_checkpoint(root / "checkpoint").queues_timestamp
    times = {record: time for record, time in stored_times(root).items() if time <= trusted}
    for path in root.glob("consumequeue/*/*/*"):
        content = bytearray(path.read_bytes())
        used = len(content) // ENTRY_SIZE * ENTRY_SIZE
        for place, entry in enumerate(unpack_entries(bytes(content[:used]))):
            # Entries of records that were deleted were on disk before that.
            is_old = entry.physical_offset < log_start
            if entry.is_valid and entry.physical_offset not in times and not is_old:
                damage(content, place * ENTRY_SIZE, choose)
                break
        path.write_bytes(content)


def stored_times(root: Path) -> dict[int, int]:
    """Return when each record was stored, by physical offset, as far as the log is whole."""
    times: dict[int, int] = {}
    for path in sorted((root / "commitlog").iterdir()):
        content, base, position = path.read_bytes(), int(path.name), 0
        while position + 8 <= len(content) and content[position + 4 : position + 8] in {
            b"\xda\xa3\x20\xa7",
            b"\xda\xa3\x20\xab",
        }:
            times[base + position] = int.from_bytes(content[position + 56 : position + 64], "big")
            position += int.from_bytes(content[position : position + 4], "big")
    return times


def damage(content: bytearray, start: int, choose: random.Random) -> None:
    """Lose, garble or keep each page behind ``start``, apart from what precedes it in its page."""
    position = start
    while position < len(content):
        end = min(position - position % PAGE + PAGE, len(content))
        kind = choose.choice(["keep", "zero", "zero", "garble"])
        if kind == "zero":
            content[position:end] = bytes(end - position)
        elif kind == "garble" and any(content[position:end]):
            content[position:end] = choose.randbytes(end - position)
        position = end


def check(root: Path, told: Acknowledged, keep: int | None) -> None:
    """Open the store as the next broker would, and look for everything that is to be kept."""
    config = small_config(root)
    store = MessageStore(config, now_ms=SteppingClock())
    report = store.open()
    start = store.min_offset
    if keep is None:
        assert start == 0
    else:
        assert start <= max(store.write_offset - keep * config.commit_log_file_size, 0)
    served = everything(store)
    by_offset = {record.physical_offset: record for record in served}
    for physical_offset, (topic, queue_id, queue_offset, crc) in told.records.items():
        if physical_offset < start:
            continue
        record = by_offset.get(physical_offset)
        assert record is not None, f"lost: {topic}:{queue_id} at {physical_offset}, {report}"
        assert (record.topic, record.queue_id, record.queue_offset) == (
            topic,
            queue_id,
            queue_offset,
        )
        encoded = store.reader.record_bytes(physical_offset)
        assert encoded is not None
        assert zlib.crc32(encoded) == crc
    assert [record.physical_offset for record in store.reader.scan(0)] == sorted(by_offset)
    for key in store.queues.names():
        offsets = [
            record.queue_offset for record in served if (record.topic, record.queue_id) == key
        ]
        assert offsets == list(range(*store.queues.bounds(*key))), f"hole in {key}"
    for record in served[-50:]:
        unique = record.property_map["UNIQ_KEY"]
        assert record.physical_offset in store.index.query(record.topic, unique, 64, 0, 1 << 60)
    for before, after in pairwise(served):
        assert before.store_timestamp <= after.store_timestamp
    store.close()


def run(
    tmp_path: Path, seed: int, rounds: int, *, power: bool = False, keep: int | None = None
) -> None:
    print(f"seed={seed}")
    choose = random.Random(seed)
    told = Acknowledged()
    root = tmp_path / "store"
    for number in range(rounds):
        live_and_die(root, seed * 1000 + number, choose, told, keep)
        if power:
            cut_power(root, choose, told)
        if number % 2:
            check(root, told, keep)  # else the next child recovers
    check(root, told, keep)
    if keep is not None:
        assert min((root / "commitlog").iterdir()).name > f"{0:020d}"


def new_seed() -> int:
    return int(os.environ.get("HALFMQ_SEED") or random.randrange(1 << 30))


@pytest.mark.parametrize("power", [False, True])
def test_a_kill_loses_nothing_acknowledged(tmp_path: Path, *, power: bool) -> None:
    """A process is killed again and again; once also with everything unflushed damaged."""
    run(tmp_path, new_seed(), 4, power=power)


@pytest.mark.parametrize("power", [False, True])
def test_a_kill_during_a_deletion_loses_nothing_that_is_kept(
    tmp_path: Path, *, power: bool
) -> None:
    """Old files are deleted all the time: what is left is whole, and nothing young is gone."""
    run(tmp_path, new_seed(), 6, power=power, keep=2)


@pytest.mark.campaign
@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("power", [False, True])
def test_many_kills_lose_nothing_acknowledged(
    tmp_path: Path, *, power: bool, keep: int | None
) -> None:
    """The same, longer, and again with other seeds while there is time."""
    seed, rounds = new_seed(), 20
    end = time.monotonic() + float(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "60"))
    for turn in count():
        run(tmp_path / str(turn), seed + turn, rounds, power=power, keep=keep)
        shutil.rmtree(tmp_path / str(turn))
        if time.monotonic() >= end:
            print(f"kills={(turn + 1) * rounds}")
            return
