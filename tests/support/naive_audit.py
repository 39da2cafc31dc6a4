"""A reader of logs and histories of its own, record by record: what an audit must agree with.

It shares with the audit the rules alone (``judge``), and none of what finds records, tells what
they are, and brings them together.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from halfmq.spark_jobs.audit.dialects import Mark, recorded_rollbacks
from halfmq.spark_jobs.audit.judge import judge
from halfmq.spark_jobs.audit.model import (
    AuditedState,
    Kind,
    LogBounds,
    LogEvent,
    MessageContent,
    Terms,
)
from halfmq.spark_jobs.source.parts import Part

HALF, OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
PARKED, SCHEDULE = "TRANS_CHECK_MAX_TIME_TOPIC", "SCHEDULE_TOPIC_XXXX"
TIMER = "rmq_sys_wheel_timer"
Found = tuple[Kind, tuple[int, ...]]


class Raw(NamedTuple):
    """One record of a log."""

    offset: int
    size: int
    topic: str
    queue: int
    place: int  # in its queue
    bits: int
    link: int
    retries: int
    time: int
    crc: int
    body: bytes
    properties: dict[str, str]

    @property
    def sound(self) -> bool:
        return crc32(self.body) & 0x7FFFFFFF == self.crc


def read(folder: Path, damage: list[tuple[int, int]]) -> Iterator[Raw]:
    """Read the segments of a folder; what is no record goes to ``damage``."""
    for path in sorted(path for path in folder.iterdir() if path.name.isdigit()):
        base, data, at, hole = int(path.name), path.read_bytes(), 0, None
        while at + 8 <= len(data):
            record = _record(data, at, base + at)
            if record is None:
                if struct.unpack_from(">I", data, at + 4)[0] == 0xCBD43194 or not any(data[at:]):
                    break
                hole = at if hole is None else hole
                at += 1
                continue
            if hole is not None:
                damage.append((base + hole, base + at))
                hole = None
            yield record
            at += record.size
        if hole is not None:
            damage.append((base + hole, base + at))


def _record(data: bytes, at: int, offset: int) -> Raw | None:
    size, magic = struct.unpack_from(">iI", data, at)
    if magic != 0xDAA320A7 or not 91 <= size <= len(data) - at:
        return None
    crc, queue, _, place, own, flags, _ = struct.unpack_from(">IiiqqIq", data, at + 8)
    if own != offset:
        return None
    time, retries, link, length = struct.unpack_from(">q8xiqi", data, at + 56)
    body_end = at + 88 + length
    name_end = body_end + 1 + data[body_end]
    text = data[name_end + 2 : at + size].decode()
    pairs = (pair.partition("\x01") for pair in text.split("\x02") if pair)
    return Raw(
        offset,
        size,
        data[body_end + 1 : name_end].decode(),
        queue,
        place,
        flags & 0xC,
        link,
        retries,
        time,
        crc,
        data[at + 88 : body_end],
        {name: value for name, _, value in pairs},
    )


@dataclass
class Naive:
    """What the audit of a log must say of its transactions."""

    found: list[Found] = field(default_factory=list)
    states: Counter[AuditedState] = field(default_factory=Counter)
    transactions: dict[int, AuditedState] = field(default_factory=dict)  # by the half's offset
    details: list[str] = field(default_factory=list)


def audit(root: Path, pending_age_ms: int) -> Naive:
    """Judge a store's log; records that fail their CRC, and gaps, are findings as well."""
    damage: list[tuple[int, int]] = []
    log = list(read(root / "commitlog", damage))
    last = log[-1].time
    families = _families(log)
    topics = json.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
    bounds = LogBounds(
        log[0].offset,
        tuple(damage),
        log[-1].offset,
        recorded_rollbacks(_marks(log)),
        {hash(name): one["writeQueueNums"] for name, one in topics.items()},
    )
    late = last - pending_age_ms
    terms = Terms(overdue_before_ms=late, newest_ms=last)
    naive = Naive()
    naive.found += [(Kind.CRC, (one.offset,)) for one in log if not one.sound]
    for start, end in damage:
        zeros = not any(_bytes(root / "commitlog", start, end))
        naive.found.append((Kind.GAP if zeros else Kind.CORRUPT_RECORD, (start, end)))
    for events in families.values():
        verdict = judge(events, bounds, terms)
        naive.found += [(one.kind, tuple(one.offsets)) for one in verdict.findings]
        naive.details += [one.detail for one in verdict.findings]
        naive.states.update(one.state for one in verdict.transactions)
        for one in verdict.transactions:
            if one.half is not None:
                naive.transactions[one.half] = one.state
    naive.found.sort()
    return naive


def _bytes(folder: Path, start: int, end: int) -> bytes:
    base = max(int(path.name) for path in folder.iterdir() if int(path.name) <= start)
    return (folder / f"{base:020}").read_bytes()[start - base : end - base]


def _families(log: list[Raw]) -> dict[str, list[LogEvent]]:
    families: dict[str, list[LogEvent]] = defaultdict(list)
    by_offset: dict[int, str] = {}
    by_place: dict[int, tuple[str, int]] = {}
    for one in log:
        part = _part(one)
        key = _key(one) or by_offset.get(one.link, "") or f"at {one.offset}"
        if part is Part.OP and one.sound:
            for place in one.body.decode().split(","):
                if place and int(place) in by_place:
                    family, half = by_place[int(place)]
                    families[family].append(LogEvent(Part.OP, one.offset, half, time_ms=one.time))
        elif part is not None and part is not Part.OP:
            event = _event(one, part)
            families[key].append(event)
            if part is Part.HALF:
                by_offset[one.offset], by_place[one.place] = key, (key, one.offset)
            beside = one.properties.get("TRANSACTION_HALVES")
            if beside and part in (Part.COMMIT, Part.ROLLBACK, Part.WAITING):
                families[key] += [
                    event._replace(part=Part.NAMED, reference=int(half))
                    for half in beside.split(",")
                ]
    return families


def _part(one: Raw) -> Part | None:
    if one.topic == HALF:
        return {0: Part.HALF, 0xC: Part.ROLLBACK, 4: Part.RESUME}.get(one.bits)
    if one.topic in (OP, PARKED):
        return Part.OP if one.topic == OP else Part.DISCARD
    if one.topic.startswith(("%RETRY%", "%DLQ%")):
        return None
    is_ours = one.properties.get("TRAN_MSG") == "true" or "TRANSACTION_HALF_ID" in one.properties
    if one.topic in (SCHEDULE, TIMER):
        waits = is_ours and not one.properties["REAL_TOPIC"].startswith("%RETRY%")
        return Part.WAITING if waits else None
    if one.bits == 8 and (one.link or "DELAY" not in one.properties):
        return Part.COMMIT
    return Part.DELIVERED if is_ours or one.link > 0 else None  # below 0: of a timer message


def _key(one: Raw) -> str | None:
    leader = one.properties.get("TRANSACTION_GROUP")
    key = leader.rsplit(",", 2)[0] if leader else one.properties.get("UNIQ_KEY")
    return key and f"{one.properties.get('PGROUP')} {key}"


def _event(one: Raw, part: Part) -> LogEvent:
    checks = one.properties.get("TRANSACTION_CHECK_TIMES")
    _, number, total = one.properties.get("TRANSACTION_GROUP", "x,0,1").rsplit(",", 2)
    return LogEvent(
        part,
        one.offset,
        one.place if part is Part.HALF else one.link,
        int(checks) if checks is not None and part is Part.HALF else None,
        int(number),
        int(total),
        one.time,
        _content(one, part),
        _due(one) if part is Part.WAITING else 0,
        one.sound,
    )


def _content(one: Raw, part: Part) -> MessageContent | None:
    if part not in (Part.HALF, Part.COMMIT, Part.DELIVERED, Part.WAITING):
        return None
    topic, queue = one.topic, one.queue
    if part in (Part.HALF, Part.WAITING):
        topic, queue = one.properties["REAL_TOPIC"], int(one.properties["REAL_QID"])
    tags, keys = (hash(one.properties.get(name, "")) for name in ("TAGS", "KEYS"))
    return MessageContent(hash(topic), queue, tags, keys, one.crc, len(one.body))


def _due(one: Raw) -> int:
    for name in ("TIMER_OUT_MS", "TRANSACTION_DELIVER_MS"):
        if name in one.properties:
            return int(one.properties[name])
    wait = one.properties.get("TRANSACTION_DELAY_MS")
    return one.time + int(wait) if wait else 0


def _marks(log: list[Raw]) -> Iterator[Mark]:
    """Give the records that only one of the brokers writes."""
    for one in log:
        part = _part(one)
        if part in (Part.ROLLBACK, Part.RESUME):
            yield Mark(one.offset, is_ours=True)
        elif part is Part.DISCARD:
            yield Mark(one.offset, is_ours=one.link > 0)
        elif part is Part.COMMIT:
            has_id = "TRANSACTION_HALF_ID" in one.properties
            yield Mark(one.offset, is_ours=has_id, is_final=True)
        elif part is Part.WAITING and one.link and "TRANSACTION_HALF_ID" in one.properties:
            yield Mark(one.offset, is_ours=True, is_final=True)
        elif part is Part.HALF and "TRANSACTION_CHECK_TIMES" in one.properties:
            yield Mark(one.offset, is_ours=False)
