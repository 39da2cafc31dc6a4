"""Large commit logs for benchmarks of the audit, written as fast as the disk takes them.

A log is one cycle of records again and again: a half and its commit, a half that is rolled back,
the op of both, and a plain message. All numbers in it have a fixed width, so that a segment is made
by repeating the bytes of a cycle and writing the numbers of all cycles at once.
"""

import shutil
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.crc import crc32
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import BLANK_SIZE, CRC_MASK, blank, encode_record, new_record
from halfmq.store.format.record_fields import FIELDS
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC

SEGMENT_SIZE: Final = 64 << 20  # bytes; so small that also a short run has full ones
RECORDS_PER_CYCLE: Final = 5
TRANSACTIONS_PER_CYCLE: Final = 2
BODY_SIZE: Final = 200
_HOST: Final = bytes([127, 0, 0, 1, 0, 0, 42, 159])
_START: Final = 1_700_000_000_000  # ms
_DIGITS: Final = 12

Numbers = npt.NDArray[np.int64]


class GeneratedLog(NamedTuple):
    """A log and what it holds."""

    root: Path
    segments: int
    records: int
    transactions: int
    size: int  # bytes of all records


def write_log(root: Path, records: int, body_size: int = BODY_SIZE) -> GeneratedLog:
    """Write about so many records, in whole cycles; what is there before is deleted."""
    shutil.rmtree(root, ignore_errors=True)
    folder = root / "commitlog"
    folder.mkdir(parents=True)
    cycle = _Cycle(body_size)
    per_segment = (SEGMENT_SIZE - BLANK_SIZE) // cycle.size
    left = -(-records // RECORDS_PER_CYCLE)
    first = segments = 0
    while left:
        count = min(left, per_segment)
        base = segments * SEGMENT_SIZE
        content = cycle.repeated(first, count, base)
        with (folder / f"{base:020}").open("wb") as file:
            content.tofile(file)
            if count == per_segment:
                file.write(blank(SEGMENT_SIZE - count * cycle.size)[:BLANK_SIZE])
            file.truncate(SEGMENT_SIZE)
        first, left, segments = first + count, left - count, segments + 1
    return GeneratedLog(
        root,
        segments,
        first * RECORDS_PER_CYCLE,
        first * TRANSACTIONS_PER_CYCLE,
        first * cycle.size,
    )


class _Cycle:
    """The bytes of a cycle, and where its numbers stand."""

    def __init__(self, body_size: int) -> None:
        body = b"x" * body_size
        entry = f"{0:0{_DIGITS}},"
        self._committed = _record(HALF_TOPIC, body, _properties("A"))
        final = _record("orders", body, _properties("A"), TransactionType.COMMIT)
        self._rolled_back = _record(HALF_TOPIC, body, _properties("B"))
        op = _record(OP_TOPIC, (entry * 2).encode(), {"TAGS": "d"})
        plain = _record("plain", body, {"UNIQ_KEY": "C" + "0" * 31, "KEYS": "k"})
        parts = [self._committed, final, self._rolled_back, op, plain]
        self._starts = np.cumsum([0, *map(len, parts)])[:-1].tolist()
        self._content = np.frombuffer(b"".join(parts), dtype=np.uint8)
        self.size = len(self._content)
        self._op_body = self._starts[3] + op.index(entry.encode())

    def repeated(self, first: int, count: int, base: int) -> npt.NDArray[np.uint8]:
        """Return ``count`` cycles, of which the first has this number, from an offset on."""
        made = np.tile(self._content, (count, 1))
        number = np.arange(first, first + count, dtype=np.int64)
        offset = base + np.arange(count, dtype=np.int64) * self.size
        slots = (2 * number, number, 2 * number + 1, number, number)
        for place, (start, slot) in enumerate(zip(self._starts, slots, strict=True)):
            _put(made, start, "queue_offset", slot)
            _put(made, start, "physical_offset", offset + start)
            _put(made, start, "born_timestamp", _START + number)
            _put(made, start, "store_timestamp", _START + number + place // 4)
        _put(made, self._starts[1], "prepared_transaction_offset", offset)
        # The key of half and final message of one, the half of the other, the plain one.
        for start in (*self._starts[:3], self._starts[4]):
            at = int(start) + _key_end(self._content, int(start))
            _put_digits(made, at - _DIGITS, number)
        _put_digits(made, self._op_body, slots[0])
        _put_digits(made, self._op_body + _DIGITS + 1, slots[2])
        bodies = made[:, self._op_body : self._op_body + 2 * (_DIGITS + 1)]
        crcs = np.fromiter(map(crc32, bodies.copy()), dtype=np.int64, count=count) & CRC_MASK
        _put(made, self._starts[3], "body_crc", crcs)
        return made.reshape(-1)


def _properties(kind: str) -> dict[str, str]:
    return {
        "TRAN_MSG": "true",
        "PGROUP": "benchmark",
        "UNIQ_KEY": kind + "0" * 31,
        "REAL_TOPIC": "orders",
        "REAL_QID": "0",
        "TAGS": "created",
    }


def _record(
    topic: str,
    body: bytes,
    properties: dict[str, str],
    kind: TransactionType = TransactionType.NONE,
) -> bytes:
    record = new_record(
        topic=topic,
        queue_id=0,
        body=body,
        properties=encode_properties(properties),
        sys_flag=int(kind),
        born_timestamp=_START,
        born_host=_HOST,
        store_timestamp=_START,
        store_host=_HOST,
    )
    return encode_record(record)


def _key_end(content: npt.NDArray[np.uint8], start: int) -> int:
    """Return where the value of UNIQ_KEY ends in the record that begins there."""
    record = content[start:].tobytes()
    return record.index(b"UNIQ_KEY\x01") + len(b"UNIQ_KEY\x01") + 32


def _put(made: npt.NDArray[np.uint8], start: int, name: str, values: Numbers) -> None:
    """Write a field of the record that begins at ``start`` into every row."""
    field = FIELDS[name]
    content = values.astype(field.dtype).view(np.uint8).reshape(-1, field.size)
    made[:, start + field.position : start + field.end] = content


def _put_digits(made: npt.NDArray[np.uint8], at: int, values: Numbers) -> None:
    """Write a decimal number into every row."""
    for place in range(_DIGITS):
        made[:, at + _DIGITS - 1 - place] = ord("0") + values // 10**place % 10
