"""Portions of records found one by one: which records they hold, and which they leave out."""

from itertools import pairwise
from typing import Any

import pytest

from halfmq.store import gathering
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.queue_entry import unpack_entries
from halfmq.store.format.record import encode_record, new_record
from halfmq.store.format.topics import HALF_TOPIC, SCHEDULE_TOPIC
from halfmq.store.gathering import LENGTH_MIN, Gathering
from halfmq.store.log_scan import find_records
from halfmq.store.portion import Portion
from tests.support.stores import BORN, HOST

ROW = LENGTH_MIN + 3  # records, enough for a portion


def record(offset: int, number: int, **fields: Any) -> bytes:
    usual: dict[str, Any] = {
        "topic": "T",
        "queue_id": number % 2,
        "queue_offset": number // 2,
        "body": b"b" * number,
        "properties": encode_properties({"TAGS": "A", "UNIQ_KEY": f"{number}"}),
        "store_timestamp": BORN + number,
    }
    return encode_record(
        new_record(
            physical_offset=offset,
            born_timestamp=BORN,
            born_host=HOST,
            store_host=HOST,
            **{**usual, **fields},
        )
    )


def log_of(rows: list[dict[str, Any]], start: int = 0) -> tuple[bytes, list[int]]:
    """Return records that follow each other, and where each begins."""
    content, offsets = b"", []
    for number, fields in enumerate(rows):
        offsets.append(start + len(content))
        content += record(offsets[-1], number, **fields)
    return content, offsets


def gathered(content: bytes, start: int = 0, *, at_once: int = 7) -> list[Portion]:
    """Return the portions of a log whose records come a few at a time."""
    portions: list[Portion] = []
    gathering = Gathering(portions.append)
    found = find_records(content, start, check_crc=True)
    for first in range(0, len(found), at_once):
        gathering.add(start, content, found[first : first + at_once])
    gathering.end()
    return portions


def test_a_portion_is_all_that_records_say() -> None:
    """But for the last record: nothing begins behind it yet."""
    content, offsets = log_of([{}] * 40, start=5000)

    (portion,) = gathered(content, 5000)

    assert (portion.start, portion.end, portion.last_record) == (5000, offsets[39], offsets[38])
    assert (portion.length, portion.sys_flags, portion.store_timestamp) == (39, 0, BORN + 38)
    assert [(key, first) for key, first, *_ in portion.shares] == [((b"T", 0), 0), ((b"T", 1), 0)]
    for number, (_, _, entries, end) in enumerate(portion.shares):
        its = [entry.physical_offset for entry in unpack_entries(entries)]
        assert its == offsets[number:39:2]
        assert end == offsets[39 - number]


@pytest.mark.parametrize(
    "odd",
    [
        {"topic": SCHEDULE_TOPIC},
        {"queue_offset": ROW + 5},
        {"sys_flag": 0x4, "queue_offset": 1},
        {"sys_flag": 0x80},
        {"sys_flag": 0x4000_0000},
        {"properties": b"A\x01" + bytes(4)},
        {"properties": b"A\x01" + bytes(4), "sys_flag": 0xC, "queue_offset": 0},
    ],
    ids=str,
)
def test_what_needs_a_closer_look_is_in_no_portion(odd: dict[str, Any]) -> None:
    """A delayed record, one out of order, a torn one; portions end before it and begin behind."""
    rows: list[dict[str, Any]] = [{"queue_id": 0, "queue_offset": n} for n in range(ROW)]
    rows += [{"queue_id": 0, **odd}]
    rows += [{"queue_id": 1, "queue_offset": n} for n in range(ROW + 1)]
    content, offsets = log_of(rows)

    portions = gathered(content)

    bounds = [(portion.start, portion.end, portion.length) for portion in portions]
    assert bounds == [
        (0, offsets[ROW], ROW),
        (offsets[ROW + 1], offsets[2 * ROW + 1], ROW),
    ]


def test_a_record_in_no_queue_is_passed_over() -> None:
    """A rolled-back one has no queue entry, and no queue offset."""
    rolled_back: dict[str, Any] = {"sys_flag": 0xC, "queue_id": 3, "queue_offset": 0}
    rows: list[dict[str, Any]] = [{"queue_id": 0, "queue_offset": n} for n in range(ROW)]
    content, offsets = log_of([*rows[:5], rolled_back, *rows[5:]])

    (portion,) = gathered(content)

    assert (portion.end, portion.length) == (offsets[-1], ROW)
    ((key, first, entries, end),) = portion.shares
    assert (key, first, len(entries), end) == ((b"T", 0), 0, 20 * (ROW - 1), offsets[-1])
    assert portion.is_about_transactions


def test_a_record_in_no_queue_whose_topic_is_no_text_is_in_no_portion() -> None:
    """A flipped bit did that; whoever looks closer gives the record up."""
    rows: list[dict[str, Any]] = [{"queue_id": 0, "queue_offset": n} for n in range(ROW)]
    damaged = {"topic": "NONE", "sys_flag": 0xC, "queue_offset": 0}
    content, offsets = log_of([*rows, damaged, *({**row, "queue_id": 1} for row in rows), {}])

    portions = gathered(content.replace(b"NONE", b"N\xcfNE"))

    assert [portion.end for portion in portions] == [offsets[ROW], offsets[-1]]
    assert portions[1].start == offsets[ROW + 1]


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, False), ({"topic": HALF_TOPIC}, True), ({"sys_flag": 8}, True)]
)
def test_a_portion_tells_of_transactions(fields: dict[str, Any], *, expected: bool) -> None:
    """Whoever makes the table of them reads such records once more."""
    content, _ = log_of([*([{}] * ROW), fields | {"queue_id": 9, "queue_offset": 0}, {}])

    (portion,) = gathered(content)

    assert portion.is_about_transactions is expected


def test_few_records_are_no_portion() -> None:
    """They are found in the time that it takes to tell of them."""
    content, _ = log_of([{}] * LENGTH_MIN)
    assert gathered(content) == []
    content, _ = log_of([{}] * (LENGTH_MIN + 1))
    assert [portion.length for portion in gathered(content)] == [LENGTH_MIN]


@pytest.mark.parametrize(("name", "limit"), [("LENGTH_MAX", 30), ("BYTES_MAX", 5000)])
def test_portions_are_bounded(monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    """However many records follow each other; none is lost between two portions."""
    monkeypatch.setattr(gathering, name, limit)
    monkeypatch.setattr(gathering, "LENGTH_MIN", 1)
    content, offsets = log_of([{}] * 200)

    portions = gathered(content)

    assert portions[0].start == 0
    assert portions[-1].end == offsets[-1]
    assert all(one.end == other.start for one, other in pairwise(portions))
    for portion in portions[:-1]:
        size = portion.length if name == "LENGTH_MAX" else portion.end - portion.start
        assert limit <= size < limit + 7 * (1 if name == "LENGTH_MAX" else 400)


def test_a_run_ends_the_portion_before_it() -> None:
    """It begins behind the last record, which so has one behind it."""
    content, offsets = log_of([{}] * 40)
    run = Portion(offsets[20], offsets[30], offsets[29], 10, 0, BORN, [])
    portions: list[Portion] = []
    gathering = Gathering(portions.append)

    gathering.add(0, content, find_records(content, 0, check_crc=True)[:20])
    gathering.add_portion(run)
    behind = find_records(content, 0, check_crc=True, start=offsets[30])
    gathering.add(0, content, [*behind, behind[-1]])
    gathering.end()

    assert portions[1] is run
    assert (portions[0].end, portions[0].length) == (offsets[20], 20)
