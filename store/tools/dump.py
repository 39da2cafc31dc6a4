"""``halfmq store dump``: print the records of a log, also while a broker writes it."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import CorruptRecordError
from ..files.mapped_file_queue import MappedFileQueue
from ..format.filler import is_filler
from ..format.flags import transaction_type
from ..format.ids import unpack_host
from ..format.record import Record, crc_tail_matches, decode_record
from ..log.resync import Damage
from .data_files import find_log
from .findings import Findings
from .log_walk import Chunk, LogWalk
from .state import StoreState, read_condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One record, and whether its checksums match."""

    record: Record
    crc_ok: bool  # of the body
    property_crc_ok: bool | None  # of the whole record; None if it has none
    lost: bool = False  # a filler, which replaces a damaged record

    def as_json(self, *, body: bool) -> dict[str, Any]:
        """Return the record for JSON output; with ``body`` its stored body in base64."""
        record = self.record
        properties = record.property_map
        fields: dict[str, Any] = {
            "offset": record.physical_offset,
            "size": record.total_size,
            "topic": record.topic,
            "queue": record.queue_id,
            "queue_offset": record.queue_offset,
            "stored_ms": record.store_timestamp,
            "born_ms": record.born_timestamp,
            "store_host": _host(record.store_host),
            "born_host": _host(record.born_host),
            "unique_key": properties.get("UNIQ_KEY"),
            "keys": properties.get("KEYS", "").split(),
            "tags": properties.get("TAGS"),
            "transaction": transaction_type(record.sys_flag).name.lower(),
            "transaction_link": record.prepared_transaction_offset,
            "flag": record.flag,
            "sys_flag": record.sys_flag,
            "reconsume_times": record.reconsume_times,
            "body_size": len(record.body),
            "crc_ok": self.crc_ok,
            "property_crc_ok": self.property_crc_ok,
            "lost": self.lost,
            "properties": properties,
        }
        if body:
            fields["body"] = base64.b64encode(record.body).decode()
        return fields

    def as_text(self, *, body: bool) -> str:
        """Return the record as one line for people."""
        record = self.record
        properties = record.property_map
        stored = datetime.fromtimestamp(record.store_timestamp / 1000, UTC)
        parts = [
            f"{record.physical_offset:>12}",
            stored.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            f"{record.topic}:{record.queue_id}@{record.queue_offset}",
            f"{record.total_size} B, body {len(record.body)}",
        ]
        if kind := transaction_type(record.sys_flag):
            parts.append(f"{kind.name.lower()} of {record.prepared_transaction_offset}")
        parts += [
            f"{name.lower()}={properties[name]}"
            for name in ("UNIQ_KEY", "KEYS", "TAGS")
            if name in properties
        ]
        if self.lost:
            parts.append("LOST, only its place is kept")
        if not self.crc_ok or self.property_crc_ok is False:
            parts.append("CRC WRONG")
        if body:
            parts.append(f"body={record.body!r}")
        return "  ".join(parts)


def dump(
    root: Path,
    *,
    commit_log: Path | None = None,
    topic: str | None = None,
    start: int | None = None,
    end: int | None = None,
) -> Iterator[Dumped | Damage]:
    """Yield the records that begin from ``start`` to before ``end``, and damaged ranges there.

    With ``topic``, only its records, and only damage that may have been one of them.

    Raises:
        UnusableFileError: There is no log.
        OSError: It cannot be read.
    """
    files = find_log(root, commit_log).files
    state = read_condition(root, Findings(root)).state
    wanted = None if topic is None else topic.encode()
    walk = LogWalk(files, start=_first(files, start), live=state is StoreState.OPEN)
    low = walk.start if start is None else start
    for part in walk:
        if part.offset >= (end or 1 << 63):
            return
        if isinstance(part, Chunk):
            yield from _records(part, wanted, low, end)
        elif part.end > low:
            damaged = _damaged(walk, part)
            if damaged is None or wanted is None or damaged.record.topic == topic:
                yield damaged or part


def _first(files: MappedFileQueue, start: int | None) -> int | None:
    """Return the begin of the file that holds ``start``, because a record begins there."""
    if start is None or not files.bases:
        return None
    return max((base for base in files.bases if base <= start), default=files.bases[0])


def _records(chunk: Chunk, topic: bytes | None, start: int, end: int | None) -> Iterator[Dumped]:
    content = chunk.content
    for position, size, sys_flag, _, _, topic_at, topic_end, _ in chunk.found:
        offset = chunk.offset + position
        if offset < start or (topic is not None and content[topic_at:topic_end] != topic):
            continue
        if end is not None and offset >= end:
            return
        record = decode_record(content, position, check_crc=False)
        tail_ok = crc_tail_matches(content[position : position + size])
        lost = is_filler(content, position, sys_flag)
        yield Dumped(record=record, crc_ok=True, property_crc_ok=tail_ok, lost=lost)


def _damaged(walk: LogWalk, damaged: Damage) -> Dumped | None:
    """Return the record that fills a damaged range except for its CRC; else None."""
    content = walk.read(damaged.offset, damaged.length)
    try:
        record = decode_record(content, check_crc=False)
    except CorruptRecordError:
        return None
    if record.total_size != len(content):
        return None
    try:
        decode_record(content)
    except CorruptRecordError:
        return Dumped(record=record, crc_ok=False, property_crc_ok=crc_tail_matches(content))
    return Dumped(record=record, crc_ok=True, property_crc_ok=crc_tail_matches(content))


def _host(packed: bytes) -> str:
    address, port = unpack_host(packed)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
