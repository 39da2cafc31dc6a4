"""Processes that look at the log ahead change how long a recovery takes, and nothing else."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from halfmq.store import disk, scouts
from halfmq.store.commit_log import NO_QUEUE_ENTRY
from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.format.queue_entry import ENTRY_SIZE, LAYOUT
from halfmq.store.format.record import blank, encode_record, new_record
from halfmq.store.format.topics import HALF_TOPIC, SCHEDULE_TOPIC
from halfmq.store.log_scan import SCAN_CHUNK, Found, LogScan, Trust, find_records
from halfmq.store.mapped_file_queue import MappedFileQueue
from halfmq.store.message_store import MessageStore
from halfmq.store.portion import Portion, Share
from halfmq.store.residence import Residence
from halfmq.store.scouts import Scouts, _Outbox, scouting
from tests.support.stores import (
    BORN,
    HOST,
    HOST_V6,
    Clock,
    bounds,
    crash,
    draft,
    everything,
    small_config,
    wait_until,
)

FILE_SIZE = 1 << 17  # of 400 small records, so that there are runs
WITHIN_S = 30.0


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have logs of any size scouted, on any machine."""
    monkeypatch.setattr(scouts, "SCOUTED_BYTES_MIN", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


ODD: Sequence[dict[str, Any]] = (
    {"topic": "other"},
    {"topic": SCHEDULE_TOPIC},
    {"sys_flag": 0xC, "queue_offset": 0},
    {"sys_flag": 0x4, "queue_offset": 7},
    {"sys_flag": 0x8},
    {"properties": b"A\x01" + bytes(3)},
    {"properties": encode_properties({"LONG": "x" * 700, "TAGS": "B"})},
    {"born_host": HOST_V6},
)
"""What makes a record different from the others; the first one may be of another size as well."""


def record(
    offset: int,
    number: int,
    choose: random.Random,
    *,
    odds: float = 0.005,
    body_size: int = 120,
    same_size: bool = True,
    topic: str = "T",
) -> bytes:
    """Encode one of many like it, or, now and then, another."""
    odd = choose.choice(ODD) if choose.random() < odds else {}
    varies = not same_size or "topic" in odd
    fields: dict[str, Any] = {
        "topic": topic,
        "queue_id": number % 3,
        "queue_offset": number // 3,
        "body": b"%06d" % number * ((choose.randrange(60) if varies else 20) * body_size // 120),
        "properties": encode_properties({"UNIQ_KEY": f"u{number:06d}", "TAGS": "A"}),
        "born_host": HOST,
        "store_timestamp": BORN + number,
    }
    return encode_record(
        new_record(
            physical_offset=offset, born_timestamp=BORN, store_host=HOST, **{**fields, **odd}
        )
    )


def written(
    directory: Path, seed: int, files: int, damages: int, *, file_size: int = FILE_SIZE, **kind: Any
) -> MappedFileQueue:
    """Write a log of so many files, and damage it here and there."""
    choose = random.Random(seed)
    content, number = bytearray(), 0
    while True:
        encoded = record(len(content), number, choose, **kind)
        left = file_size - len(content) % file_size
        if len(encoded) + 8 > left:
            content += blank(left).ljust(left, b"\0")
            if len(content) == files * file_size:
                break
            continue
        content += encoded
        number += 1
    for _ in range(damages):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    log = MappedFileQueue(directory, file_size)
    log.bases = list(range(0, len(content), file_size))
    directory.mkdir()
    for base in log.bases:
        log.path(base).write_bytes(content[base : base + file_size])
    return log


Walked = tuple[list[tuple[int, ...]], int, int, int, list[tuple[int, int]]]


def walked(scan: LogScan, log: MappedFileQueue) -> Walked:
    """Return all that a walk says, record by record; what it says of a portion must be true."""
    rows: list[tuple[int, ...]] = []
    for offset, _, block in scan.blocks():
        at, found = offset, block
        if isinstance(block, Portion):
            at = block.start
            content = bytes_at(log, block.start, block.end)
            found = find_records(content, at, check_crc=True)
            assert len(found) == block.length
            assert block.shares == shares(content, at, found)
        assert isinstance(found, list)
        for position, *fields, topic_at, properties_at in found:
            rows.append((at + position, *fields, topic_at - position, properties_at - position))
    assert scan.records == len(rows)
    damages = [(damage.offset, damage.end) for damage in scan.damages]
    return rows, scan.end_offset, scan.last_record, scan.last_timestamp, damages


def bytes_at(log: MappedFileQueue, start: int, end: int) -> bytes:
    base = log.base_of(start)
    with log.path(base).open("rb") as file:
        file.seek(start - base)
        return file.read(end - start)


def shares(content: bytes, offset: int, found: list[Found]) -> list[Share]:
    """Return what each queue has of records, as one of them after the other tells."""
    growing: dict[tuple[bytes, int], tuple[int, bytes, int]] = {}
    for position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at in found:
        if sys_flag & NO_QUEUE_ENTRY:
            continue
        key = (content[topic_at : properties_at - 2], queue_id)
        first, entries, _ = growing.get(key, (queue_offset, b"", 0))
        assert queue_offset == first + len(entries) // ENTRY_SIZE
        code = tags_code(content[properties_at : position + size])
        entries += LAYOUT.pack(offset + position, size, code)
        growing[key] = first, entries, offset + position + size
    return [(key, *share) for key, share in growing.items()]


class Counted:
    """Scouts of whose portions it is noted how many bytes were taken."""

    def __init__(self, ahead: Scouts | None) -> None:
        assert ahead is not None
        self._ahead = ahead
        self.known: dict[int, int] = {}  # bytes by where they begin

    @property
    def bytes(self) -> int:
        return sum(self.known.values())

    def next_from(self, offset: int) -> Portion | None:
        portion = self._ahead.next_from(offset)
        if portion is not None and portion.start == offset:
            self.known[offset] = portion.end - portion.start
        return portion


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("damages", [0, 1, 7])
@pytest.mark.parametrize("same_size", [True, False])
def test_a_walk_finds_the_same_with_scouts(
    tmp_path: Path, damages: int, *, same_size: bool
) -> None:
    """Runs, odd records, damaged ones and the ends of files; the seed is printed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed={seed}")
    log = written(tmp_path / "log", seed, 7, damages, same_size=same_size)
    alone = walked(LogScan(log, 0), log)

    with scouting(log, 0, check_crc=True) as ahead:
        counted = Counted(ahead)
        assert walked(LogScan(log, 0, ahead=counted), log) == alone

    assert len(alone[0]) > 1_200
    whole = FILE_SIZE * (7 - damages)  # behind a damaged place, scouts tell nothing of a file
    assert counted.bytes > 0.95 * whole, "what scouts have found is used"


@pytest.mark.usefixtures("always")
def test_a_walk_that_begins_late_has_scouts_from_there_on(tmp_path: Path) -> None:
    """In the middle of a file, where theirs began at its beginning."""
    log = written(tmp_path / "log", 3, 7, 0)
    rows, *_ = walked(LogScan(log, 0), log)
    start = next(row[0] for row in rows if row[0] > FILE_SIZE * 3 // 2)

    with scouting(log, start, check_crc=True) as ahead:
        counted = Counted(ahead)
        assert walked(LogScan(log, start, ahead=counted), log) == walked(LogScan(log, start), log)

    assert counted.bytes > 5 * FILE_SIZE


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("part", ["body", "properties"])
def test_what_counts_is_for_the_recovery_to_say(
    tmp_path: Path, share: float, part: str, *, same_size: bool
) -> None:
    """A damaged record behind what was on disk ends the log, whatever scouts see in and behind it.

    No checksum covers properties. They were written in part if they make no sense in a sector.
    """
    log = written(tmp_path / "log", 5, 6, 0, same_size=same_size)
    rows, *_ = walked(LogScan(log, 0), log)
    durable = rows[int(len(rows) * share)][0]
    spoiled, at, end = next(
        (row[0], row[0] + row[6], row[0] + row[1])
        for row in rows
        if row[0] > durable + 20_000 and (row[0] + row[6]) // 512 < (row[0] + row[1] - 10) // 512
    )
    base = log.base_of(spoiled)
    with log.path(base).open("r+b") as file:
        sector = (end - 10) // 512 * 512
        file.seek((spoiled + 100 if part == "body" else max(sector, at)) - base)
        file.write(b"?" if part == "body" else (b"?\x02" * 40)[: end - max(sector, at)])
    trust = Trust(durable_offset=durable)
    alone = walked(LogScan(log, 0, trust=trust), log)

    with scouting(log, 0, check_crc=True) as ahead:
        assert walked(LogScan(log, 0, trust=trust, ahead=ahead), log) == alone

    assert alone[1] == spoiled


@pytest.mark.usefixtures("always")
def test_a_scout_that_is_lost_costs_time_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be killed when memory is short; what it has not told is looked for again."""
    log = written(tmp_path / "log", 7, 6, 2)
    alone = walked(LogScan(log, 0), log)

    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is not None
        for scout in ahead._scouts:
            scout._process.send_signal(signal.SIGKILL)
            scout._process.wait(WITHIN_S)
        assert walked(LogScan(log, 0, ahead=ahead), log) == alone

    lost = [line.getMessage() for line in caplog.records]
    assert lost == [f"event=scout_lost code={-signal.SIGKILL}"] * 2


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("left", [b"", b"\x64", b"\x64\0\0\0", b"\x64\0\0\0(...."])
def test_a_scout_may_be_killed_amid_a_frame(
    tmp_path: Path, left: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent of it is nothing."""
    log = written(tmp_path / "log", 7, 4, 0)
    alone = walked(LogScan(log, 0), log)
    real = subprocess.Popen
    program = f"import sys; sys.stdout.buffer.write({left!r})"

    def cut_off(_command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", cut_off)
    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is not None
        assert walked(LogScan(log, 0, ahead=ahead), log) == alone


@pytest.mark.usefixtures("always")
def test_a_machine_without_room_for_processes_has_no_scouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery goes on alone, and the one that could be started is not left behind."""
    log = written(tmp_path / "log", 7, 4, 0)
    real = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def only_one(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(real(*command, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", only_one)
    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is None

    assert "event=scouts_not_started" in caplog.text
    assert started[0].poll() is not None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("unwritten", [False, True])
def test_scouts_search_nothing(tmp_path: Path, *, unwritten: bool) -> None:
    """An ordinary start would wait until one has searched a gigabyte of zeros at the log's end."""
    log = written(tmp_path / "log", 7, 4, 0)
    rows, *_ = walked(LogScan(log, 0), log)
    base = log.bases[-1]
    first, end = (next(row[0] for row in rows if row[0] > base + at) for at in (60_000, 61_000))
    with log.path(base).open("r+b") as file:
        file.seek(first - base)
        file.write(bytes((FILE_SIZE + base if unwritten else end) - first))

    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is not None
        scout = ahead._scout_of[base]
        seen = base
        while (portion := scout.next_from(seen)) is not None:
            seen = portion.end

    assert base < seen <= first


def test_a_small_log_has_no_scouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To start them would take longer than they save; its last two files may be all but empty."""
    log = written(tmp_path / "log", 7, 3, 0)
    monkeypatch.setattr(scouts, "SCOUTED_BYTES_MIN", 2 * FILE_SIZE)

    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is None


@pytest.mark.usefixtures("always")
def test_scouts_end_with_the_recovery(tmp_path: Path) -> None:
    """Also one that has failed, and whose scouts are still at work."""
    log = written(tmp_path / "log", 7, 4, 0)

    def fail() -> None:
        with scouting(log, 0, check_crc=True) as ahead:
            assert ahead is not None
            processes.extend(scout._process for scout in ahead._scouts)
            raise KeyError

    processes: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError):
        fail()

    assert [process.poll() is None for process in processes] == [False, False]


@pytest.mark.usefixtures("always")
def test_a_scout_of_a_recovery_that_was_killed_ends_quietly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads what it finds any more."""
    log = written(tmp_path / "log", 7, 40, 0)
    with scouting(log, 0, check_crc=True) as ahead:
        assert ahead is not None
        process = ahead._scouts[0]._process
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(WITHIN_S) == 1

    assert capfd.readouterr().err == ""


def cached(log: MappedFileQueue) -> list[int]:
    """Return how many bytes of each file are in memory."""
    kernel = Residence()
    sizes: list[int] = []
    for base in log.bases:
        with disk.opened(log.path(base)) as fd:
            size = kernel.cached(fd, 0, log.file_size)
        if size is None:
            pytest.skip("the kernel does not tell what is cached: cachestat needs Linux 6.5")
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("kind", "is_read"),
    [
        ({"odds": 0}, False),
        ({"odds": 0, "same_size": False}, False),
        ({"odds": 0.5}, True),
        ({"odds": 0, "topic": HALF_TOPIC}, True),
    ],
    ids=["a run", "any size", "unusual", "transactions"],
)
def test_scouts_leave_memory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], *, is_read: bool
) -> None:
    """But for what the recovery reads itself, and for the files in which the log ends.

    What is kept is told by what nobody gave away: a machine that is short of memory takes pages.
    """
    monkeypatch.setattr(scouts, "FORGOTTEN_AT_ONCE", 1 << 20)
    need_no_more = disk.need_no_more
    given_away: Counter[int] = Counter()  # bytes by the number of the file

    def gives_away(fd: int, position: int, length: int) -> None:
        given_away[os.fstat(fd).st_ino] += length
        need_no_more(fd, position, length)

    size = 3 << 20
    log = written(tmp_path / "log", 7, 4, 0, file_size=size, body_size=4200, **kind)
    for base in log.bases:
        with disk.opened(log.path(base), disk.WRITE) as fd:
            os.fsync(fd)
            if base:
                disk.need_no_more(fd, 0, size)
    assert cached(log)[1:] == [0, 0, 0]
    monkeypatch.setattr(disk, "need_no_more", gives_away)
    job = {
        "directory": str(log.directory),
        "file_size": size,
        "bases": log.bases,
        "kept_from": log.bases[2],
        "check_crc": True,
    }

    with (tmp_path / "frames").open("wb") as frames:
        monkeypatch.setattr(sys, "stdout", frames)
        scouts.main(json.dumps(job))

    warm, cold, *kept = [given_away[log.path(base).stat().st_ino] for base in log.bases]
    assert [warm, *kept] == [0] * 3
    if is_read:
        assert cold == 0, "all of it is read again"
    else:
        assert cold >= size - 2 * SCAN_CHUNK, "less than is forgotten at once, and the last chunk"
        assert cached(log)[1] <= 2 * SCAN_CHUNK


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_what_nobody_takes_is_bounded(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above that a scout waits; then it sends all, in order."""
    monkeypatch.setattr(scouts, "UNSENT_BYTES_MAX", 200_000)
    reader, writer = pipe
    outbox = _Outbox(writer)
    sizes: list[int] = []

    def send() -> None:
        for number in range(100):
            share = (b"T", 0), number, bytes(10_000), 0
            outbox.add(Portion(0, 0, 0, 0, 0, 0, [share]))
            sizes.append(outbox._size)
        outbox.send(leave=0)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: outbox._size > 200_000)
    assert len(sizes) < 100
    received = b""
    while len(received) < 1_000_000:
        received += os.read(reader, 10_000)
    thread.join(WITHIN_S)

    assert 190_000 < max(sizes) <= 200_000
    positions = [received.find(b"\xe9" + number.to_bytes(4, "little")) for number in range(100)]
    assert positions == sorted({*positions} - {-1})


@pytest.mark.usefixtures("always")
def test_a_store_starts_the_same_with_scouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill: messages, queues and what was reported."""
    sizes = {"commit_log_file_size": FILE_SIZE, "consume_queue_file_size": 20_000}
    late = {"flush_interval_consume_queue_ms": 3_600_000}
    killed = MessageStore(small_config(tmp_path / "killed", **sizes, **late), now_ms=Clock())
    killed.open()
    for number in range(1_500):
        properties = {"UNIQ_KEY": f"u{number:06d}", "TAGS": "AB"[number % 2]}
        topic = "U" if number % 100 == 99 else "T"
        killed.append([draft(topic, number % 2, b"%05d" % number * 50, properties=properties)])
    roots = [crash(tmp_path / "killed", tmp_path / name) for name in ("scouted", "alone")]
    killed.close()

    scouted, alone = (MessageStore(small_config(root, **sizes), now_ms=Clock()) for root in roots)
    report = scouted.open()
    monkeypatch.setattr(scouts, "SCOUTED_BYTES_MIN", 1 << 40)
    expected = alone.open()

    assert report.records == expected.records == 1_500
    assert (report.end_offset, report.damages) == (expected.end_offset, expected.damages)
    assert everything(scouted) == everything(alone)
    assert bounds(scouted) == bounds(alone)
    scouted.close()
    alone.close()
