"""The commit-log parser of the Spark jobs; neither Java nor Spark is needed here."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.spark_jobs.errors import LogDirectoryError
from halfmq.spark_jobs.log.checksums import body_crcs, sound_records
from halfmq.spark_jobs.log.follow import LogFollower
from halfmq.spark_jobs.log.log_end import SETTLE_PAUSE, SETTLE_PAUSES, survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import (
    NOT_A_RECORD,
    UNWRITTEN,
    SegmentReader,
    SkippedRange,
)
from halfmq.spark_jobs.log.segments import LogExtent, find_segments
from halfmq.store.format.properties import decode_properties
from tests.support import golden_store
from tests.support.log_writer import HOST_V6, V1, LogWriter, Written, encode

SEGMENT = 1 << 12  # bytes; small, so that a few records fill several


def read_all(
    folder: Path, *, step: int | None = None, batch_rows: int = 1000
) -> tuple[list[Rows], list[tuple[int, SkippedRange]], LogExtent]:
    """Read a whole log, in splits of ``step`` bytes; holes come with their physical offset."""
    extent = survey(folder)
    chunks: list[Rows] = []
    holes: list[tuple[int, SkippedRange]] = []
    for segment in extent.segments:
        reader = SegmentReader(segment, extent.limit(segment))
        for start in range(0, segment.size, step or segment.size):
            for item in reader.scan(start, start + (step or segment.size), batch_rows=batch_rows):
                if isinstance(item, Rows):
                    chunks.append(item)
                else:
                    holes.append((segment.base + item.position, item))
    return chunks, holes, extent


def offsets(folder: Path, **how: int) -> list[int]:
    chunks, _, _ = read_all(folder, **how)
    return [int(offset) for rows in chunks for offset in rows.physical_offsets]


def damage(folder: Path, **how: int) -> list[tuple[int, int, str]]:
    _, holes, _ = read_all(folder, **how)
    return [(offset, hole.size, hole.reason) for offset, hole in holes if hole.reason is not None]


def overwrite(folder: Path, offset: int, content: bytes, *, segment_size: int = SEGMENT) -> None:
    path = folder / f"{offset - offset % segment_size:020}"
    with path.open("r+b") as file:
        file.seek(offset % segment_size)
        file.write(content)


def some_log(folder: Path, count: int = 60) -> list[Written]:
    log = LogWriter(folder, segment_size=SEGMENT)
    for number in range(count):
        log.append("orders", b"b" * (number % 90), {"KEYS": f"k{number}", "TAGS": "t"})
    log.close()
    return log.written


def described(rows: Rows) -> list[dict[str, Any]]:
    """Every record as the JSON beside a golden store describes it."""
    counts, names, values = rows.property_pairs()
    pairs = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
    bounds = np.concatenate([[0], np.cumsum(counts)])
    fields = {
        name: rows.field(field)
        for name, field in {
            "queueId": "queue_id",
            "queueOffset": "queue_offset",
            "flag": "flag",
            "sysFlag": "sys_flag",
            "bornTimestamp": "born_timestamp",
            "storeTimestamp": "store_timestamp",
            "reconsumeTimes": "reconsume_times",
            "preparedTransactionOffset": "prepared_transaction_offset",
            "bodyCRC": "body_crc",
        }.items()
    }
    content = rows.segment.view
    return [
        {
            **{name: int(values[index]) for name, values in fields.items()},
            "topic": rows.topic_names[rows.topic_codes[index]],
            "commitLogOffset": int(rows.physical_offsets[index]),
            "storeSize": int(rows.sizes[index]),
            "body": base64.b64encode(rows.body(index)).decode(),
            "recordCrc32": crc32(content[rows.starts[index] : rows.ends[index]].tobytes()),
            "properties": {
                name.decode(): value.decode()
                for name, value in pairs[bounds[index] : bounds[index + 1]]
            },
        }
        for index in range(len(rows))
    ]


@pytest.mark.parametrize("name", golden_store.NAMES)
def test_every_golden_store_is_read_without_loss(name: str, tmp_path: Path) -> None:
    """What a released broker wrote, in whatever state it stopped, is read field by field."""
    store = golden_store.unpack(name, tmp_path)

    chunks, holes, _ = read_all(store.root)

    found = {record["commitLogOffset"]: record for rows in chunks for record in described(rows)}
    if name == "plain-badcrc":  # its JSON tells what a cut at the damage keeps; we read on
        for offset in (225680, 226104, 226402, 226835):
            del found[offset]
    assert list(found) == [message["commitLogOffset"] for message in store.messages]
    for message in store.messages:
        record = found[message["commitLogOffset"]]
        assert record == {key: message[key] for key in record}
    assert all(hole.reason is None for _, hole in holes)


def test_a_flipped_bit_in_a_body_fails_its_crc_and_no_other(tmp_path: Path) -> None:
    """One damaged body is one bad CRC."""
    store = golden_store.unpack("plain-badcrc", tmp_path)

    chunks, _, _ = read_all(store.root)

    failed = [
        int(rows.physical_offsets[index])
        for rows in chunks
        for index in np.flatnonzero(body_crcs(rows) != rows.field("body_crc"))
    ]
    assert failed == [225680]


def test_a_crc_of_the_whole_record_is_checked_where_there_is_one(tmp_path: Path) -> None:
    """It covers what the body's does not: the topic, the properties, its own digits."""
    store = golden_store.unpack("propcrc", tmp_path)
    chunks, _, _ = read_all(store.root)
    assert all(sound_records(rows).all() for rows in chunks)
    rows = max(chunks, key=len)
    path = Path(store.root, "commitlog", f"{rows.segment.base:020}")
    content = bytearray(path.read_bytes())
    damaged = {1: int(rows.properties_starts[1]) - 3, 3: int(rows.ends[3]) - 4, 4: 0}
    damaged[4] = int(rows.starts[4]) + 16  # flag
    for position in damaged.values():
        content[position] ^= 1
    path.write_bytes(content)

    chunks, _, _ = read_all(store.root)

    failed = [np.flatnonzero(~sound_records(rows)).tolist() for rows in chunks]
    assert max(failed, key=len) == sorted(damaged)


def test_what_two_segments_hold_is_read_once(tmp_path: Path) -> None:
    """A file longer than it should be ends where the next begins."""
    written = some_log(tmp_path)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes() + second.read_bytes())

    assert offsets(tmp_path) == [record.offset for record in written]


@pytest.mark.parametrize("step", [1, 7, 100, 1000, SEGMENT - 1, SEGMENT, 1 << 20])
def test_any_split_gives_every_record_once(step: int, tmp_path: Path) -> None:
    """A record belongs to the split it starts in, wherever the cuts fall."""
    written = some_log(tmp_path)

    assert offsets(tmp_path, step=step, batch_rows=3) == [record.offset for record in written]
    whole = read_all(tmp_path)[1]
    assert read_all(tmp_path, step=step)[1] == whole
    assert [hole.reason for _, hole in whole] == [None] * (len(find_segments(tmp_path)) - 1)


def test_records_of_both_versions_and_all_hosts_are_told_apart(tmp_path: Path) -> None:
    """IPv6 hosts and long topics shift fields; each record is read by its own layout."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    mixes: list[dict[str, Any]] = [{}, {"born_host": HOST_V6}, {"store_host": HOST_V6}]
    mixes.append({"born_host": HOST_V6, "store_host": HOST_V6})
    for topic in ("short", "%RETRY%" + "g" * 200):
        for hosts in mixes:
            log.append(topic, b"body", {"UNIQ_KEY": topic[:4]}, flag=7, prepared=99, **hosts)
    log.close()

    chunks, _, _ = read_all(tmp_path)

    (rows,) = chunks
    assert len(rows) == 8
    assert [rows.topic_names[code] for code in rows.topic_codes] == [
        record.topic for record in log.written
    ]
    assert rows.bodies().to_pylist() == [b"body"] * 8
    assert rows.field("prepared_transaction_offset").tolist() == [99] * 8
    assert rows.property_values("UNIQ_KEY").to_pylist() == [b"shor"] * 4 + [b"%RET"] * 4
    assert [len(host) for host in rows.hosts("born_host").to_pylist()] == [8, 20, 8, 20] * 2
    assert [len(host) for host in rows.hosts("store_host").to_pylist()] == [8, 8, 20, 20] * 2


properties_block = st.lists(
    st.sampled_from([b"A", b"AB", b"KEYS", b"\x01", b"\x02", b"v", b"KEYS\x01v\x02", b""]),
    max_size=12,
).map(b"".join)


@given(blocks=st.lists(properties_block, min_size=1, max_size=6))
def test_properties_are_read_as_the_store_reads_them(
    blocks: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Repeated names, empty values, stray separators: the rules of one reader."""
    folder = tmp_path_factory.mktemp("log")
    content = b""
    for block in blocks:
        content += encode("t", b"", block, offset=len(content))
    (folder / f"{0:020}").write_bytes(content.ljust(SEGMENT, b"\0"))

    (rows,) = read_all(folder)[0]

    expected = [decode_properties(block) for block in blocks]
    for name in ("A", "AB", "KEYS"):
        found = rows.property_values(name).to_pylist()
        assert found == [
            value.encode() if (value := properties.get(name)) is not None else None
            for properties in expected
        ]


def corrupt_size(record: Written) -> tuple[int, bytes]:
    return record.offset, struct.pack(">i", 12)


def corrupt_magic(record: Written) -> tuple[int, bytes]:
    return record.offset + 4, b"\xda\xa3\x20\xa8"


def corrupt_body_length(record: Written) -> tuple[int, bytes]:
    return record.offset + 84, struct.pack(">i", -5)


def corrupt_topic_length(record: Written) -> tuple[int, bytes]:
    return record.offset + 88 + len(record.body), b"\x7f"


def corrupt_place(record: Written) -> tuple[int, bytes]:
    return record.offset + 28, struct.pack(">q", record.offset + 1)


def corrupt_hosts(record: Written) -> tuple[int, bytes]:
    return record.offset + 36, struct.pack(">i", 0x30)


def too_large(record: Written) -> tuple[int, bytes]:
    return record.offset, struct.pack(">i", 1 << 30)


def negative_size(record: Written) -> tuple[int, bytes]:
    return record.offset, struct.pack(">i", -1)


DAMAGES = [
    corrupt_size,
    corrupt_magic,
    corrupt_body_length,
    corrupt_topic_length,
    corrupt_place,
    corrupt_hosts,
    too_large,
    negative_size,
]


@pytest.mark.parametrize("break_it", DAMAGES)
@pytest.mark.parametrize("step", [50, SEGMENT])
def test_a_damaged_record_costs_itself_alone(
    break_it: Callable[[Written], tuple[int, bytes]], step: int, tmp_path: Path
) -> None:
    """Reading goes on at the next record, and the gap is one range exactly as wide."""
    written = some_log(tmp_path)
    victims = [written[0], written[20], written[21], written[40]]
    for victim in victims:
        overwrite(tmp_path, *break_it(victim))

    kept = [record.offset for record in written if record not in victims]
    first, both, _, last = victims
    assert offsets(tmp_path, step=step) == kept
    assert damage(tmp_path, step=step) == [
        (first.offset, first.size, NOT_A_RECORD),
        (both.offset, both.size + written[21].size, NOT_A_RECORD),
        (last.offset, last.size, NOT_A_RECORD),
    ]


def test_an_unwritten_stretch_before_more_records_is_a_gap(tmp_path: Path) -> None:
    """A block that never reached the disk reads as zeros."""
    written = some_log(tmp_path)
    lost = written[5:8]
    overwrite(tmp_path, lost[0].offset, bytes(sum(record.size for record in lost)))

    assert damage(tmp_path) == [(lost[0].offset, sum(r.size for r in lost), UNWRITTEN)]


def test_a_segment_without_its_blank_is_a_gap_to_its_end(tmp_path: Path) -> None:
    """Only the last segment may end without a blank."""
    written = some_log(tmp_path)
    last = [record for record in written if record.offset < SEGMENT][-1]
    end = last.offset + last.size
    overwrite(tmp_path, end, bytes(8))

    assert damage(tmp_path) == [(end, SEGMENT - end, UNWRITTEN)]


def test_a_copy_may_be_trimmed_behind_the_blank(tmp_path: Path) -> None:
    """The blank's size still names the full segment."""
    written = some_log(tmp_path)
    last = [record for record in written if record.offset < SEGMENT][-1]
    os.truncate(tmp_path / f"{0:020}", last.offset + last.size + 8)

    assert damage(tmp_path) == []
    assert offsets(tmp_path) == [record.offset for record in written]


def test_a_blank_is_found_where_the_file_ends_with_it(tmp_path: Path) -> None:
    """Its magic is the last thing in the file, behind a record that is damaged."""
    written = some_log(tmp_path)
    last = [record for record in written if record.offset < SEGMENT][-1]
    os.truncate(tmp_path / f"{0:020}", last.offset + last.size + 8)
    overwrite(tmp_path, last.offset, b"\xff" * 8)

    assert damage(tmp_path) == [(last.offset, last.size, NOT_A_RECORD)]


def test_a_record_cut_off_in_an_earlier_segment_is_damage(tmp_path: Path) -> None:
    """A truncated file in the middle of the log loses what it loses, and says so."""
    written = some_log(tmp_path)
    last = [record for record in written if record.offset < SEGMENT][-1]
    os.truncate(tmp_path / f"{0:020}", last.offset + 50)

    assert offsets(tmp_path) == [record.offset for record in written if record is not last]
    assert damage(tmp_path) == [(last.offset, 50, NOT_A_RECORD)]


def test_a_record_half_written_at_any_byte_is_not_there_yet(tmp_path: Path) -> None:
    """A broker is writing: its last record is whole or is not part of the log."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for _ in range(5):
        log.append("orders", b"before", {"KEYS": "k"})
    last = log.append("orders", b"being written", {"KEYS": "k"})
    log.close()
    path = tmp_path / f"{0:020}"
    content = path.read_bytes()

    for written in range(last.size - 1):  # the last byte ends the last property; it may lack
        path.write_bytes(content[: last.offset + written].ljust(SEGMENT, b"\0"))
        extent = survey(tmp_path)
        assert (extent.end_offset, damage(tmp_path)) == (last.offset, []), written
        assert (extent.tail is None) == (written < 4)  # the size's first bytes are zero


@pytest.fixture
def unsettled(tmp_path: Path) -> tuple[Path, list[Written], bytes]:
    """A log whose record 7 of 10 has not arrived though the next ones have, and its bytes."""
    folder = tmp_path / "commitlog"
    written = some_log(folder, 10)
    late = written[7]
    with (folder / f"{0:020}").open("rb") as file:
        content = file.read()[late.offset : late.offset + late.size]
    overwrite(folder, late.offset, bytes(late.size))
    return tmp_path, written, content


def test_a_record_whose_head_arrives_last_is_waited_for(
    unsettled: tuple[Path, list[Written], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker copies several records at once, and memcpy may write the first bytes last."""
    root, written, content = unsettled
    (root / "abort").touch()  # the store is open
    monkeypatch.setattr(
        "halfmq.spark_jobs.log.log_end.time.sleep",
        lambda _: overwrite(root / "commitlog", written[7].offset, content),
    )

    assert damage(root) == []
    assert len(offsets(root)) == 10


@pytest.mark.parametrize("is_open", [True, False])
def test_a_hole_that_nobody_fills_is_damage(
    is_open: bool, unsettled: tuple[Path, list[Written], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a closed store at once, in an open one after all pauses, however long a read takes."""
    root, written, _ = unsettled
    slept: list[float] = []
    monkeypatch.setattr("halfmq.spark_jobs.log.log_end.time.sleep", slept.append)
    if is_open:
        (root / "abort").touch()

    assert damage(root) == [(written[7].offset, written[7].size, UNWRITTEN)]
    assert slept == ([SETTLE_PAUSE] * SETTLE_PAUSES if is_open else [])


@pytest.mark.parametrize("begun", [0, 1, 4, 8, 60])
def test_a_next_segment_that_holds_no_whole_record_is_left_out(begun: int, tmp_path: Path) -> None:
    """Brokers allocate the next file ahead, and may just have begun it."""
    written = some_log(tmp_path)
    segments = find_segments(tmp_path)
    following = segments[-1].base + SEGMENT
    record = encode("orders", b"body", b"", offset=following)
    (tmp_path / f"{following:020}").write_bytes(record[:begun].ljust(SEGMENT, b"\0"))

    extent = survey(tmp_path)

    assert list(extent.segments) == segments
    assert extent.end_offset == written[-1].offset + written[-1].size


def test_a_log_without_a_message_is_an_empty_log(tmp_path: Path) -> None:
    """A broker that has just started for the first time has one file of zeros."""
    LogWriter(tmp_path / "commitlog", segment_size=SEGMENT).close()

    assert survey(tmp_path) == LogExtent((), 0, None)


@pytest.mark.parametrize("content", [b"", bytes(SEGMENT)])
def test_segments_without_a_record_are_no_log(content: bytes, tmp_path: Path) -> None:
    """A copy that failed must not pass for a log in which all is well."""
    (tmp_path / f"{0:020}").write_bytes(content)

    with pytest.raises(LogDirectoryError, match="hold no record"):
        survey(tmp_path)


def test_a_last_segment_of_something_else_is_damage(tmp_path: Path) -> None:
    """Garbage does not pass for a segment that has not been begun."""
    written = some_log(tmp_path)
    following = find_segments(tmp_path)[-1].base + SEGMENT
    (tmp_path / f"{following:020}").write_bytes(b"garbage!" * (SEGMENT // 8))

    assert offsets(tmp_path) == [record.offset for record in written]
    # The segment before it must now end in a blank, which it does not.
    assert damage(tmp_path)[-1] == (following, SEGMENT, NOT_A_RECORD)


@pytest.mark.parametrize("count", [2, 20])
def test_a_last_segment_of_another_log_is_damage(count: int, tmp_path: Path) -> None:
    """Its records say that they are elsewhere; it must not pass for one that is reserved."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for _ in range(30):
        log.append("topic", b"x" * 100)
    log.close()
    last = log.end - log.end % SEGMENT + SEGMENT
    other = b"".join(encode("topic", b"y", b"", offset=7 * n + 1) for n in range(count))
    (tmp_path / f"{last:020}").write_bytes(other.ljust(SEGMENT, b"\0"))

    assert (last, SEGMENT, NOT_A_RECORD) in damage(tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_are_read_to_an_end(seed: int, tmp_path: Path) -> None:
    """Random bytes and magics everywhere neither raise nor loop."""
    random = np.random.default_rng(seed)
    magic = np.frombuffer(struct.pack(">II", V1, 0xCBD43194), dtype=np.uint8)
    noise = random.integers(0, 256, SEGMENT, dtype=np.uint8)
    for place in random.integers(0, SEGMENT - 8, 200):
        noise[place : place + 8] = magic
    (tmp_path / f"{0:020}").write_bytes(noise.tobytes())

    chunks, holes, _ = read_all(tmp_path)

    assert sum(len(rows) for rows in chunks) == 0
    assert sum(hole.size for _, hole in holes) == SEGMENT


def test_a_body_that_holds_a_record_is_not_searched_for_records(tmp_path: Path) -> None:
    """A split that begins inside a body does not take its content for records."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    inner = encode("inner", b"x" * 30, b"", offset=123)
    for _ in range(8):
        log.append("orders", inner * 2, {})
    log.close()

    assert offsets(tmp_path, step=10) == [record.offset for record in log.written]


@pytest.mark.parametrize(
    ("body", "queue_id"),
    [
        (b"longer: half over the next", 0),
        (b"same", 1),
        (b"same", 0),
    ],
)
def test_older_records_behind_the_end_are_not_read(
    body: bytes, queue_id: int, tmp_path: Path
) -> None:
    """RocketMQ cuts a log without zeroing; what was cut does not come back.

    Behind the new record there is the rest of an old one, or its queue has an offset again, or the
    old ones go on from the last record before the pause.
    """
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for number in range(10):
        log.append("orders", b"same", {}, queue_id=number % 2)
    log.close()
    at, later = log.written[6], log.now + 5_000
    place: dict[str, Any] = {"queue_id": queue_id, "queue_offset": 3}
    record = encode("orders", body, b"", offset=at.offset, born=later, stored=later, **place)
    overwrite(tmp_path, at.offset, record)

    extent = survey(tmp_path)

    assert extent.end_offset == at.offset + len(record)
    assert extent.tail is not None
    assert len(offsets(tmp_path)) == 7


@pytest.mark.parametrize("step", [5_000, 30_000, 3_600_000])
@pytest.mark.parametrize("behind", [1, 200])
def test_a_clock_set_back_loses_no_record(step: int, behind: int, tmp_path: Path) -> None:
    """Neither the broker's clock alone nor together with the producers': the queues go on."""
    log = LogWriter(tmp_path, segment_size=1 << 17)
    for number in range(500):
        if number == 500 - behind:
            log.now -= step
        log.now += 100
        log.append("orders" if number % 3 else "bills", b"", {}, queue_id=number % 4)
    log.close()

    assert len(offsets(tmp_path)) == 500
    assert LogFollower(str(tmp_path)).extent() == survey(tmp_path)


def test_the_brokers_clock_may_be_set_back_alone(tmp_path: Path) -> None:
    """Where producers run on other machines, they go on in time."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for number in range(10):
        now = 1_700_000_000_000 + number * 1_000
        log.append("orders", b"", {}, born=now, stored=now - (60_000 if number > 5 else 0))
    log.close()

    assert len(offsets(tmp_path)) == 10


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda _: None, "no such directory"),
        (lambda path: path.write_text("a file"), "is not a directory"),
        (lambda path: path.mkdir(), "no commit-log segment"),
        (lambda path: (path / "commitlog").mkdir(parents=True), "no commit-log segment"),
    ],
)
def test_what_holds_no_log_is_refused_in_a_sentence(
    prepare: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    """The path and the reason, and nothing else."""
    path = tmp_path / "log"
    prepare(path)

    with pytest.raises(LogDirectoryError, match=said) as caught:
        survey(path)
    assert str(path) in str(caught.value)


def test_other_files_beside_segments_are_ignored(tmp_path: Path) -> None:
    """A dump may lie beside its checksums."""
    written = some_log(tmp_path / "commitlog")
    (tmp_path / "commitlog" / "SHA256SUMS").write_text("…")
    (tmp_path / "commitlog" / "sub").mkdir()
    (tmp_path / "commitlog" / f"{1 << 40:020}").touch()

    assert offsets(tmp_path) == [record.offset for record in written]


def test_the_walk_does_not_depend_on_the_size_of_its_batches(tmp_path: Path) -> None:
    """A batch ends anywhere; the next goes on there."""
    written = some_log(tmp_path)
    expected: Sequence[int] = [record.offset for record in written]

    for batch_rows in (1, 2, 7, 1000):
        assert offsets(tmp_path, batch_rows=batch_rows) == expected
