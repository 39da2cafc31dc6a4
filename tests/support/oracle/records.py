"""Reads the records of a log one by one, from RocketMQ's field tables alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

HALF, OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
PARKED = "TRANS_CHECK_MAX_TIME_TOPIC"
SCHEDULE, TIMER = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
BITS = 0xC
_MAGIC, _BLANK = 0xDAA320A7, 0xCBD43194
_SIZE_MIN = 91


class Raw(NamedTuple):
    """One record of a log."""

    offset: int
    size: int
    topic: str
    queue: int
    place: int  # in its queue
    sys_flag: int
    link: int
    time: int
    crc: int
    body: bytes
    properties: dict[str, str]
    head: tuple[int, int, bytes, bytes, int]  # flag, born, born host, store host, reconsume times

    @property
    def bits(self) -> int:
        return self.sys_flag & BITS

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
                if struct.unpack_from(">I", data, at + 4)[0] == _BLANK or not any(data[at:]):
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
    if magic != _MAGIC or not _SIZE_MIN <= size <= len(data) - at:
        return None
    crc, queue, flag, place, own, sys_flag, born = struct.unpack_from(">IiiqqIq", data, at + 8)
    if own != offset:
        return None
    at_host, hosts = at + 48, []
    for bit in (0x10, 0x20):  # the host of the producer, then that of the broker
        width = 20 if sys_flag & bit else 8
        hosts.append(data[at_host : at_host + width])
        at_host += width + (8 if bit == 0x10 else 0)  # the store time is between them
    (time,) = struct.unpack_from(">q", data, at + 48 + len(hosts[0]))
    retries, link, length = struct.unpack_from(">iqi", data, at_host)
    body_at = at_host + 16
    body_end = body_at + length
    name_end = body_end + 1 + data[body_end]
    text = data[name_end + 2 : at + size].decode()
    pairs = (pair.partition("\x01") for pair in text.split("\x02") if pair)
    return Raw(
        offset,
        size,
        data[body_end + 1 : name_end].decode(),
        queue,
        place,
        sys_flag,
        link,
        time,
        crc,
        data[body_at:body_end],
        {name: value for name, _, value in pairs},
        (flag, born, *hosts, retries),
    )
