"""`kill -9` at random moments, and simulated power cuts: nothing acknowledged is lost.

The campaign runs for `HALFMQ_CAMPAIGN_SECONDS` (60) in each of its forms. The seed of each run is
printed and can be set by `HALFMQ_SEED`; it does not determine the moments of the kills.
"""

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

from halfmq.store.files.checkpoint import DurableMark, load_checkpoint
from halfmq.store.format.queue_entry import ENTRY_SIZE, unpack_entries
from halfmq.store.message_store import MessageStore
from tests.support.seeds import campaign_seconds, printed_seed
from tests.support.store_child import SteppingClock
from tests.support.stores import everything, small_config

REPOSITORY = Path(__file__).parents[2]
LINES_BEFORE_KILL = 150  # acknowledged records of one process, at most
PAGE = 4096


class Acknowledged:
    """The records that all child processes have acknowledged."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[str, int, int, int]] = {}  # by physical offset
        self.end = 0  # everything below is on disk

    def add(self, line: str) -> None:
        topic, queue_id, queue_offset, physical_offset, crc = line.split()
        key = int(physical_offset)
        self.records[key] = (topic, int(queue_id), int(queue_offset), int(crc))
        self.end = max(self.end, key + 1)


def run_and_kill(
    root: Path, seed: int, choose: random.Random, acknowledged: Acknowledged, keep: int | None
) -> None:
    """Let a child process append, and kill it at a random moment."""
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
            assert line, "the child process failed by itself"
            acknowledged.add(line)
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n"):  # the last line may be incomplete
            acknowledged.add(line)


def cut_power(root: Path, choose: random.Random, acknowledged: Acknowledged) -> None:
    """Change what no flush has covered, as a power cut may."""
    log_size = small_config(root).commit_log_file_size
    # The child may not have acknowledged what it flushed last.
    marked = DurableMark(root / "checkpoint").load()
    for path in (root / "commitlog").iterdir():
        base = int(path.name)
        durable = max(acknowledged.end - base, 0)
        # The last acknowledged record is on disk to its end.
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
            # Entries of deleted records were on disk before the deletion.
            is_old = entry.physical_offset < log_start
            if entry.is_valid and entry.physical_offset not in times and not is_old:
                damage(content, place * ENTRY_SIZE, choose)
                break
        path.write_bytes(content)


def stored_times(root: Path) -> dict[int, int]:
    """Return the store time of each record by physical offset, up to the first damage."""
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
    """Zero, garble or keep each page from ``start`` on; bytes before it stay."""
    position = start
    while position < len(content):
        end = min(position - position % PAGE + PAGE, len(content))
        kind = choose.choice(["keep", "zero", "zero", "garble"])
        if kind == "zero":
            content[position:end] = bytes(end - position)
        elif kind == "garble" and any(content[position:end]):
            content[position:end] = choose.randbytes(end - position)
        position = end


def check(root: Path, acknowledged: Acknowledged, keep: int | None) -> None:
    """Open the store as the next broker would; check that everything acknowledged is there."""
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
    for physical_offset, (topic, queue_id, queue_offset, crc) in acknowledged.records.items():
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
    choose = random.Random(seed)
    acknowledged = Acknowledged()
    root = tmp_path / "store"
    for number in range(rounds):
        run_and_kill(root, seed * 1000 + number, choose, acknowledged, keep)
        if power:
            cut_power(root, choose, acknowledged)
        if number % 2:
            check(root, acknowledged, keep)  # else the next child recovers
    check(root, acknowledged, keep)
    if keep is not None:
        assert min((root / "commitlog").iterdir()).name > f"{0:020d}"


@pytest.mark.parametrize("power", [False, True])
def test_a_kill_loses_nothing_acknowledged(tmp_path: Path, *, power: bool) -> None:
    """After repeated kills, in one form with damage to everything unflushed."""
    run(tmp_path, printed_seed(), 4, power=power)


@pytest.mark.parametrize("power", [False, True])
def test_a_kill_during_a_deletion_loses_nothing_that_is_kept(
    tmp_path: Path, *, power: bool
) -> None:
    """While old files are deleted: the rest is complete, and no recent file is missing."""
    run(tmp_path, printed_seed(), 6, power=power, keep=2)


@pytest.mark.campaign
@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("power", [False, True])
def test_many_kills_lose_nothing_acknowledged(
    tmp_path: Path, *, power: bool, keep: int | None
) -> None:
    """The same for longer, with further seeds until the campaign ends."""
    seed, rounds = printed_seed(), 20
    end = time.monotonic() + campaign_seconds()
    for turn in count():
        run(tmp_path / str(turn), seed + turn, rounds, power=power, keep=keep)
        shutil.rmtree(tmp_path / str(turn))
        if time.monotonic() >= end:
            print(f"kills={(turn + 1) * rounds}")
            return
