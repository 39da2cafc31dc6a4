"""Scans of a log that is intact, damaged, torn or followed by stale records."""

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
    """Files of records that may be damaged before they are scanned."""

    def __init__(self, directory: Path) -> None:
        self.files = MappedFileQueue(directory, FILE_SIZE)
        self.content = bytearray()
        self.offsets: list[int] = []

    def add(self, encoded: bytes | None = None, **fields: object) -> int:
        """Append a record, after a blank if it does not fit; return its offset."""
        at = len(self.content)
        encoded_record = encoded or record(at, len(self.offsets), **fields)  # type: ignore[arg-type]
        left = FILE_SIZE - at % FILE_SIZE
        if len(encoded_record) + 8 > left:
            self.content += blank(left).ljust(left, b"\0")
            return self.add(encoded, **fields)
        self.content += encoded_record
        self.offsets.append(at)
        return at

    def fill(self, count: int) -> None:
        for _ in range(count):
            self.add()

    def overwrite(self, offset: int, content: bytes) -> None:
        self.content[offset : offset + len(content)] = content

    def scan(self, **options: object) -> tuple[LogScan, list[int]]:
        """Scan; return the scan and the offsets of the records that it found."""
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


def test_a_scan_continues_after_every_damaged_record(log: Log) -> None:
    """Also if the record begins or ends a file, or its size is wrong."""
    log.fill(150)
    rolls = [number for number in range(1, 150) if log.offsets[number] % FILE_SIZE == 0]
    assert len(rolls) == 3
    for number in (0, 1, 70, rolls[0], rolls[0] - 1, rolls[1] - 1, rolls[1]):
        damaged = Log(log.files.directory)
        damaged.content = log.content.copy()
        offset = log.offsets[number]
        damaged.overwrite(offset, bytes([0, 0, number, 1]) if number % 2 else b"\xff" * 40)

        scan, found = damaged.scan()

        assert found == [other for other in log.offsets if other != offset]
        assert [(one.offset, one.end) for one in scan.damages] == [
            (offset, log.offsets[number + 1])
        ]
        assert scan.damages[0].reason


def test_a_damaged_end_of_a_file_hides_no_other_file(log: Log) -> None:
    """If the blank is damaged, the scan continues with the next file."""
    log.fill(60)
    last = max(offset for offset in log.offsets if offset < FILE_SIZE)
    end = last + len(record(last, log.offsets.index(last)))
    log.overwrite(end, b"\0" * 8)

    scan, found = log.scan()

    assert found == log.offsets
    assert [(one.offset, one.end) for one in scan.damages] == [(end, FILE_SIZE)]


def test_the_log_ends_after_the_last_valid_record(log: Log) -> None:
    """Bytes after it are not reported as damage, and the search for a record ends."""
    log.fill(5)
    end = len(log.content)
    log.content += record(end)[:200] + b"\xda\xa3\x20\xa7" * 500

    scan, found = log.scan()

    assert (found, scan.end_offset, scan.damages) == (log.offsets, end, [])


@pytest.mark.parametrize("topic", ["T", "long-" + "t" * 140])
@pytest.mark.parametrize("host", [HOST, HOST_V6])
@pytest.mark.parametrize("records", [1, 2, 3])
def test_a_size_that_leads_to_the_end_of_a_later_record_loses_one_record(
    log: Log, records: int, host: bytes, topic: str
) -> None:
    """A flipped bit may make a size the sum of several; the lengths give the end of the first."""
    for _ in range(9):
        log.add(topic=topic, born_host=host)
    damaged, end = log.offsets[4], log.offsets[4 + records]
    log.overwrite(damaged, (end - damaged).to_bytes(4, "big"))
    log.overwrite(damaged + 8, b"\x12\x34")  # its CRC, so that it is damaged with any size

    scan, found = log.scan()

    assert found == [offset for offset in log.offsets if offset != damaged]
    assert [(one.offset, one.end) for one in scan.damages] == [(damaged, log.offsets[5])]


def test_records_within_a_damaged_body_are_not_accepted(log: Log) -> None:
    """A copy holds another offset, and a body before a valid end is not searched."""
    log.fill(3)
    at = log.add(body=record(0) + record(log.offsets[2]))
    second = log.add(body=b"")
    forged = len(log.content)
    log.add(body=record(forged + 88, 9, b"forged"))
    log.fill(2)
    for broken in (at, forged):
        log.overwrite(broken + 8, b"\x12\x34")

    scan, found = log.scan()

    assert second in found
    assert found == [offset for offset in log.offsets if offset not in {at, forged}]
    assert [one.offset for one in scan.damages] == [at, forged]


def test_a_crc_over_the_properties_is_checked(log: Log) -> None:
    """In a record that has one, every flipped bit is detected."""
    for number in range(4):
        at = len(log.content)
        properties = with_crc_tail(encode_properties({"UNIQ_KEY": f"u{number}", "TAGS": "A"}))
        log.add(seal_crc_tail(record(at, number, properties=properties)))
    size = log.offsets[1]
    whole = log.content.copy()
    for position in (*range(size - 20), *range(size - 11, size)):  # without the name of the CRC
        for bit in (0, 5):
            log.content = whole.copy()
            log.content[size + position] ^= 1 << bit
            _, found = log.scan()
            assert found == [0, *log.offsets[2:]], (position, bit)


@pytest.mark.parametrize("left", [bytes(512), b"\x55" * 512, b"\x55"])
@pytest.mark.parametrize("durable", [0, 3, 8, 10])
def test_the_log_ends_at_an_invalid_record_above_the_durable_offset(
    log: Log, durable: int, left: bytes
) -> None:
    """Neither it nor later records were acknowledged; below that offset later records are kept."""
    log.fill(8)
    log.add(body=b"y" * 2000)
    log.fill(8)
    lost = log.offsets[8]
    sector = -(-(lost + 100) // 512) * 512
    log.overwrite(sector, left)
    mark = log.offsets[durable]

    scan, found = log.scan(trust=Trust(durable_offset=mark))

    if durable <= 8:
        assert (found, scan.end_offset) == (log.offsets[:8], lost)
        assert not scan.damages
    else:
        assert found == [offset for offset in log.offsets if offset != lost]
        assert [one.offset for one in scan.damages] == [lost]


def test_records_that_were_cut_off_do_not_reappear(log: Log) -> None:
    """They are valid and hold their offset, but are older than what was written since."""
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


def test_one_old_record_among_new_ones_was_not_cut_off(log: Log) -> None:
    """Its time is wrong, which loses no record."""
    for number in range(6):
        log.add(store_timestamp=OLD if number == 3 else BORN)

    _, found = log.scan(trust=Trust(fresh_offset=log.offsets[1], fresh_timestamp=BORN))

    assert found == log.offsets


def test_checksums_are_not_checked_below_sound_end(log: Log) -> None:
    """Digests have verified that range; a record that ends after it is checked."""
    log.fill(60)
    for number in (3, 50):
        log.overwrite(log.offsets[number] + 100, b"?")

    _, found = log.scan(sound_end=FILE_SIZE)

    assert found == [offset for offset in log.offsets if offset != log.offsets[50]]
