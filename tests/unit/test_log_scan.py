"""Walking a log that is whole, damaged, torn or stale, and records in columns."""

import random
import sys
from pathlib import Path

import pytest

from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.format.queue_entry import unpack_entries
from halfmq.store.format.record import (
    blank,
    encode_record,
    new_record,
    seal_crc_tail,
    with_crc_tail,
)
from halfmq.store.log_run import RUN_LENGTH_MAX, RUN_LENGTH_MIN, Runs
from halfmq.store.log_scan import LogScan, Trust, find_records
from halfmq.store.mapped_file_queue import MappedFileQueue
from halfmq.store.portion import Portion
from tests.support.stores import BORN, HOST, HOST_V6

FILE_SIZE = 16_384
OLD = BORN - 3_600_000  # ms


def record(offset: int, number: int = 0, body: bytes = b"x" * 300, **fields: object) -> bytes:
    settings: dict[str, object] = {
        "topic": "T",
        "queue_id": number % 2,
        "queue_offset": number // 2,
        "properties": encode_properties({"UNIQ_KEY": f"u{number:06d}", "TAGS": "A"}),
        "born_timestamp": BORN,
        "born_host": HOST,
        "store_timestamp": BORN + number,
        "store_host": HOST,
    }
    return encode_record(
        new_record(body=body, physical_offset=offset, **(settings | fields))  # type: ignore[arg-type]
    )


class Log:
    """Files of records that may be damaged before they are walked."""

    def __init__(self, directory: Path) -> None:
        self.files = MappedFileQueue(directory, FILE_SIZE)
        self.content = bytearray()
        self.offsets: list[int] = []

    def add(self, encoded: bytes | None = None, **fields: object) -> int:
        """Append a record, behind a blank if it does not fit; return where it lies."""
        at = len(self.content)
        made = encoded or record(at, len(self.offsets), **fields)  # type: ignore[arg-type]
        left = FILE_SIZE - at % FILE_SIZE
        if len(made) + 8 > left:
            self.content += blank(left).ljust(left, b"\0")
            return self.add(encoded, **fields)
        self.content += made
        self.offsets.append(at)
        return at

    def fill(self, count: int) -> None:
        for _ in range(count):
            self.add()

    def spoil(self, offset: int, content: bytes) -> None:
        self.content[offset : offset + len(content)] = content

    def scan(self, **options: object) -> tuple[LogScan, list[int]]:
        """Walk; return the walk and where the records lie that it found."""
        whole = bytes(self.content).ljust(-(-len(self.content) // FILE_SIZE) * FILE_SIZE, b"\0")
        self.files.bases = list(range(0, len(whole), FILE_SIZE))
        for base in self.files.bases:
            self.files.path(base).write_bytes(whole[base : base + FILE_SIZE])
        scan = LogScan(self.files, 0, **options)  # type: ignore[arg-type]
        found = [offset + one[0] for offset, _, found in scan for one in found]
        return scan, found


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_a_walk_goes_on_behind_every_damaged_record(log: Log) -> None:
    """Also where the record begins or ends a file, and where its size is wrong."""
    log.fill(150)
    rolls = [number for number in range(1, 150) if log.offsets[number] % FILE_SIZE == 0]
    assert len(rolls) == 3
    for number in (0, 1, 70, rolls[0], rolls[0] - 1, rolls[1] - 1, rolls[1]):
        damaged = Log(log.files.directory)
        damaged.content = log.content.copy()
        offset = log.offsets[number]
        damaged.spoil(offset, bytes([0, 0, number, 1]) if number % 2 else b"\xff" * 40)

        scan, found = damaged.scan()

        assert found == [other for other in log.offsets if other != offset]
        assert [(one.offset, one.end) for one in scan.damages] == [
            (offset, log.offsets[number + 1])
        ]
        assert scan.damages[0].reason


def test_a_damaged_end_of_a_file_hides_no_other_file(log: Log) -> None:
    """Behind a blank that is none the next file goes on."""
    log.fill(60)
    last = max(offset for offset in log.offsets if offset < FILE_SIZE)
    end = last + len(record(last, log.offsets.index(last)))
    log.spoil(end, b"\0" * 8)

    scan, found = log.scan()

    assert found == log.offsets
    assert [(one.offset, one.end) for one in scan.damages] == [(end, FILE_SIZE)]


def test_what_follows_the_last_true_record_is_the_end(log: Log) -> None:
    """No damage is told, and nothing is searched for ever."""
    log.fill(5)
    end = len(log.content)
    log.content += record(end)[:200] + b"\xda\xa3\x20\xa7" * 500

    scan, found = log.scan()

    assert (found, scan.end_offset, scan.damages) == (log.offsets, end, [])


@pytest.mark.parametrize("topic", ["T", "long-" + "t" * 140])
@pytest.mark.parametrize("host", [HOST, HOST_V6])
@pytest.mark.parametrize("records", [1, 2, 3])
def test_a_size_that_leads_to_the_end_of_a_later_record_costs_no_more(
    log: Log, records: int, host: bytes, topic: str
) -> None:
    """A flipped bit may make a size the sum of several; the lengths say where the first ends."""
    for _ in range(9):
        log.add(topic=topic, born_host=host)
    damaged, end = log.offsets[4], log.offsets[4 + records]
    log.spoil(damaged, (end - damaged).to_bytes(4, "big"))
    log.spoil(damaged + 8, b"\x12\x34")  # its CRC, so that also a true size does not save it

    scan, found = log.scan()

    assert found == [offset for offset in log.offsets if offset != damaged]
    assert [(one.offset, one.end) for one in scan.damages] == [(damaged, log.offsets[5])]


def test_records_within_a_damaged_body_are_not_believed(log: Log) -> None:
    """A copy does not lie where it says, and a made one is not looked for behind a true size."""
    log.fill(3)
    at = log.add(body=record(0) + record(log.offsets[2]))
    second = log.add(body=b"")
    forged = len(log.content)
    log.add(body=record(forged + 88, 9, b"forged"))
    log.fill(2)
    for spoilt in (at, forged):
        log.spoil(spoilt + 8, b"\x12\x34")

    scan, found = log.scan()

    assert second in found
    assert found == [offset for offset in log.offsets if offset not in {at, forged}]
    assert [one.offset for one in scan.damages] == [at, forged]


def test_a_crc_over_the_properties_is_checked(log: Log) -> None:
    """Where a record carries one, no bit of it changes unnoticed."""
    for number in range(4):
        at = len(log.content)
        properties = with_crc_tail(encode_properties({"UNIQ_KEY": f"u{number}", "TAGS": "A"}))
        log.add(seal_crc_tail(record(at, number, properties=properties)))
    size = log.offsets[1]
    whole = log.content.copy()
    for position in (*range(size - 20), *range(size - 11, size)):  # but for the name of the CRC
        for bit in (0, 5):
            log.content = whole.copy()
            log.content[size + position] ^= 1 << bit
            _, found = log.scan()
            assert found == [0, *log.offsets[2:]], (position, bit)


@pytest.mark.parametrize("left", [bytes(512), b"\x55" * 512, b"\x55"])
@pytest.mark.parametrize("durable", [0, 3, 8, 10])
def test_a_log_ends_at_a_bad_record_that_may_not_have_been_on_disk(
    log: Log, durable: int, left: bytes
) -> None:
    """Nobody was told of it, or of what follows; before that place, what follows is kept."""
    log.fill(8)
    log.add(body=b"y" * 2000)
    log.fill(8)
    lost = log.offsets[8]
    sector = -(-(lost + 100) // 512) * 512
    log.spoil(sector, left)
    mark = log.offsets[durable]

    scan, found = log.scan(trust=Trust(durable_offset=mark))

    if durable <= 8:
        assert (found, scan.end_offset) == (log.offsets[:8], lost)
        assert not scan.damages
    else:
        assert found == [offset for offset in log.offsets if offset != lost]
        assert [one.offset for one in scan.damages] == [lost]


def test_records_that_were_cut_off_stay_gone(log: Log) -> None:
    """They are whole and lie where they say, but are older than what was written since."""
    log.fill(10)
    for number in range(4, 7):
        at = log.offsets[number]
        log.content[at:] = (
            record(at, number, store_timestamp=BORN + 99_999)
            + log.content[log.offsets[number + 1] :]
        )
    trust = Trust(fresh_offset=log.offsets[4], fresh_timestamp=BORN + 99_999)

    scan, found = log.scan(trust=trust)

    assert (found, scan.end_offset) == (log.offsets[:7], log.offsets[7])
    assert not scan.damages
    assert log.scan()[1] == log.offsets


def test_one_old_record_among_fresh_ones_is_none_that_was_cut_off(log: Log) -> None:
    """Its time is wrong, and that costs nobody anything."""
    for number in range(6):
        log.add(store_timestamp=OLD if number == 3 else BORN)

    _, found = log.scan(trust=Trust(fresh_offset=log.offsets[1], fresh_timestamp=BORN))

    assert found == log.offsets


# Runs -------------------------------------------------------------------------------------------


def row(count: int, **fields: object) -> bytes:
    content = b""
    for number in range(count):
        content += record(len(content), number, b"%06d" % number * 20, **fields)
    return content


def first_run(chunk: bytes, *, offset: int = 0, end: int = sys.maxsize) -> Portion | None:
    return Runs(check_crc=True).at(chunk, 0, offset, end)


def columns(
    chunk: bytes, start: int = 0, count: int = RUN_LENGTH_MIN
) -> list[tuple[bytes, int, int, int]]:
    """Return what ``find_records`` says of records of a chunk."""
    found = find_records(chunk, 0, check_crc=True, start=start, count_max=count)
    return [
        (
            chunk[topic_at : properties_at - 2],
            queue_id,
            queue_offset,
            tags_code(chunk[properties_at : position + size]),
        )
        for position, size, _, queue_id, queue_offset, topic_at, properties_at in found
    ]


def columns_of(run: Portion) -> list[tuple[bytes, int, int, int]]:
    rows: dict[int, tuple[bytes, int, int, int]] = {}
    size = (run.end - run.start) // run.length
    for (topic, queue_id), first, packed, end in run.shares:
        for queue_offset, entry in enumerate(unpack_entries(packed), first):
            rows[entry.physical_offset] = (topic, queue_id, queue_offset, entry.tags_code)
            assert entry.size == size
        assert end == entry.physical_offset + size
    assert len(rows) == run.length
    assert run.last_record == max(rows) == run.end - size
    return [rows[offset] for offset in sorted(rows)]


@pytest.mark.parametrize(
    "properties",
    [
        {"UNIQ_KEY": "u", "TAGS": "A", "WAIT": "true"},
        {"TAGS": "A", "UNIQ_KEY": "u"},
        {"UNIQ_KEY": "u", "TAGS": "A"},
        {"UNIQ_KEY": "u"},
        {},
    ],
)
@pytest.mark.parametrize("topic", ["T", "long-" + "t" * 140])
def test_a_run_is_what_the_walk_from_record_to_record_finds(
    properties: dict[str, str], topic: str
) -> None:
    """Wherever the tags stand among the properties, and with either version of a record."""
    chunk = row(RUN_LENGTH_MIN + 1, topic=topic, properties=encode_properties(properties))

    run = first_run(chunk)

    assert run is not None
    assert columns_of(run) == columns(chunk)
    assert first_run(chunk, offset=1) is None, "they do not lie where they say"
    end = run.end
    assert first_run(chunk[: end + 80]) is None, "no record follows"
    assert first_run(chunk, end=end) == run
    for bound in (end - 1, 0, -1):
        assert first_run(chunk, end=bound) is None, "it would be longer than may be"


def test_a_change_of_any_byte_makes_no_difference_between_the_two() -> None:
    """What is unusual is left to the walk; the rest is the same. Seed 7, every byte of two."""
    chance = random.Random(7)
    chunk = row(RUN_LENGTH_MIN + 1)
    size = len(record(0, 0, b"%06d" % 0 * 20))
    for position in (*range(size), *range(40 * size, 41 * size)):
        changed = bytearray(chunk)
        changed[position] ^= 1 << chance.randrange(8)

        run = first_run(bytes(changed))

        assert run is None or columns_of(run) == columns(bytes(changed)), position


@pytest.mark.parametrize(
    "fields",
    [
        {"born_host": HOST_V6},
        {"sys_flag": 0xC},
        {"sys_flag": 0x4},
        {"sys_flag": 0xC0},
        {"sys_flag": 0x4000_0000},
        {"properties": with_crc_tail(b"")},
        {"properties": b"A\x01" + bytes(5)},
        {"properties": encode_properties({"LONG": "x" * 600})},
        {"properties": b"TAGS\x01A\x02X\x01y\x02TAGS\x01B\x02Z\x01z"},
    ],
    ids=str,
)
def test_unusual_records_are_no_run(fields: dict[str, object]) -> None:
    """They need a closer look, or their tags do; a run says nothing of them, or the truth."""
    chunk = row(RUN_LENGTH_MIN + 1, **fields)

    run = first_run(chunk)

    assert run is None or columns_of(run) == columns(chunk)
    if "properties" not in fields:
        assert run is None


def test_runs_get_longer_while_they_are_found() -> None:
    """Each is what the walk finds there; where they end, a shorter one may fit."""
    chunk = row(2 * RUN_LENGTH_MAX)
    runs, at, lengths = Runs(check_crc=True), 0, []

    while (run := runs.at(chunk, at, at, sys.maxsize)) is not None:
        assert columns_of(run) == columns(chunk, at, run.length)
        lengths.append(run.length)
        at = run.end

    assert lengths == [64, 128, 256, 512, 1024, RUN_LENGTH_MAX]


def test_a_damaged_record_is_met_by_runs_of_any_length() -> None:
    """Where a long run would hold it there is none, and the next to be tried is a short one."""
    chunk = bytearray(row(2 * RUN_LENGTH_MAX))
    size = len(record(0, 0, b"%06d" % 0 * 20))
    chunk[700 * size + 100] ^= 1  # in the body, so that only the CRC tells
    content = bytes(chunk)
    runs, at = Runs(check_crc=True), 0
    while (run := runs.at(content, at, at, sys.maxsize)) is not None:
        at = run.end

    assert at == (64 + 128 + 256) * size, "the next one would have had it"
    short = runs.at(content, at, at, sys.maxsize)
    assert short is not None
    assert short.length == RUN_LENGTH_MIN
