"""Walking a log that is whole, damaged, torn or stale."""

from pathlib import Path

import pytest

from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import (
    blank,
    encode_record,
    new_record,
    seal_crc_tail,
    with_crc_tail,
)
from halfmq.store.log.log_scan import LogScan, Trust
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


def test_checksums_are_not_checked_where_digests_have_been(log: Log) -> None:
    """A record that reaches behind that place is."""
    log.fill(60)
    for number in (3, 50):
        log.spoil(log.offsets[number] + 100, b"?")

    _, found = log.scan(sound_end=FILE_SIZE)

    assert found == [offset for offset in log.offsets if offset != log.offsets[50]]
