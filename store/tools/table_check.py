"""Check the tables in ``config/`` and the snapshot of undecided transactions.

Tables have no checksum. A table is sound if it is valid JSON with the objects that its name implies
and values in their ranges.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ..files import disk
from ..files.json_table import decode_table
from ..format.crc import crc32
from ..format.transaction_snapshot import CRC_SIZE, FILE_NAME, FOOTER, SnapshotFooter
from .findings import Findings
from .state import StoreState

_TABLE_NAME: Final = re.compile(r"\w+\.json(\.bak)?")
_PERMISSIONS_MAX: Final = 15  # bits of RocketMQ's PermName
_PIECE: Final = 1 << 20  # bytes read at once

QueueEnd = Callable[[str, int], int | None]
"""Topic and queue id → the queue offset after its last message; None if unknown."""


def check_tables(root: Path, findings: Findings, state: StoreState, queue_end: QueueEnd) -> int:
    """Read every table and its backup; return how many there are."""
    directory = root / "config"
    if not disk.is_directory(directory):
        return 0
    count = 0
    for path in disk.entries(directory):
        if not _TABLE_NAME.fullmatch(path.name) or not disk.is_file(path):
            continue
        count += 1
        main = path.with_suffix("")
        if path.suffix == ".bak" and not disk.exists(main):
            findings.add("table_missing", main, "only its .bak is there", harmless=True)
        _check_table(path, findings, state, queue_end)
    return count


def _check_table(path: Path, findings: Findings, state: StoreState, queue_end: QueueEnd) -> None:
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return  # it is being saved
    try:
        table = decode_table(content)
    except ValueError as error:
        findings.add("table_unreadable", path, str(error))
        return
    check = _CHECKS.get(path.name.removesuffix(".bak"))
    for problem in check(table) if check is not None else ():
        findings.add("table_wrong", path, problem)
    if path.name == "consumerOffset.json" and state is not StoreState.OPEN:
        _check_offsets(path, table, findings, queue_end, harmless=state is StoreState.NOT_CLOSED)


def _check_offsets(
    path: Path, table: Mapping[str, Any], findings: Findings, queue_end: QueueEnd, *, harmless: bool
) -> None:
    """Report offsets after the end of their queue: new messages there are not consumed."""
    for key, queues in _object(table.get("offsetTable")).items():
        topic = key.partition("@")[0]
        for queue_id, offset in _object(queues).items():
            end = queue_end(topic, int(queue_id)) if queue_id.isdecimal() else None
            if end is not None and isinstance(offset, int) and offset > end:
                findings.add(
                    "offset_ahead",
                    path,
                    f"{key} queue {queue_id} is at {offset}, the queue ends at {end}",
                    harmless=harmless,
                )


def _check_topics(table: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for name, topic in _object(table.get("topicConfigTable")).items():
        numbers = [_object(topic).get(key, 0) for key in ("readQueueNums", "writeQueueNums")]
        permissions = _object(topic).get("perm", 0)
        if not isinstance(topic, dict):
            problems.append(f"topic {name!r} is no object")
        elif not all(_is_count(number) for number in numbers):
            problems.append(f"topic {name!r} has {numbers} queues")
        elif not _is_count(permissions) or permissions > _PERMISSIONS_MAX:
            problems.append(f"topic {name!r} has the permissions {permissions!r}")
    return problems + _lacking(table, "topicConfigTable")


def _check_groups(table: Mapping[str, Any]) -> list[str]:
    problems = [
        f"group {name!r} is no object"
        for name, group in _object(table.get("subscriptionGroupTable")).items()
        if not isinstance(group, dict)
    ]
    return problems + _lacking(table, "subscriptionGroupTable")


def _check_consumer_offsets(table: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for key, queues in _object(table.get("offsetTable")).items():
        if "@" not in key or not isinstance(queues, dict):
            problems.append(f"{key!r} is no topic and group with their queues")
            continue
        problems += [
            f"{key} queue {queue_id} is at {offset!r}"
            for queue_id, offset in queues.items()
            if not queue_id.isdecimal() or not isinstance(offset, int)
        ]
    return problems + _lacking(table, "offsetTable")


def _check_delay_offsets(table: Mapping[str, Any]) -> list[str]:
    return [
        f"level {level} is at {offset!r}"
        for level, offset in _object(table.get("offsetTable")).items()
        if not level.isdecimal() or not _is_count(offset)
    ] + _lacking(table, "offsetTable")


_CHECKS: Final[dict[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "topics.json": _check_topics,
    "subscriptionGroup.json": _check_groups,
    "consumerOffset.json": _check_consumer_offsets,
    "delayOffset.json": _check_delay_offsets,
}


def _lacking(table: Mapping[str, Any], key: str) -> list[str]:
    return [] if isinstance(table.get(key), dict) else [f"there is no {key}"]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_snapshot(
    root: Path,
    findings: Findings,
    state: StoreState,
    log_end: int,
    record_crc: Callable[[int], int | None],
) -> bool:
    """Check the snapshot of undecided transactions: its checksum, and that it is of this log.

    ``record_crc`` returns the CRC-32 of the record at an offset, or None if there is none to read.
    Returns False if there is no snapshot.
    """
    path = root / "config" / FILE_NAME
    try:
        footer, crc = _read_snapshot(path)
    except FileNotFoundError:
        return False
    if footer is None or footer.crc != crc:
        findings.add("snapshot_wrong", path, "is cut short, or its checksum is wrong")
    elif footer.log_end > log_end and state is not StoreState.OPEN:
        findings.add(
            "snapshot_ahead",
            path,
            f"was taken when the log ended at {footer.log_end}, it ends at {log_end}",
            harmless=state is StoreState.NOT_CLOSED,
        )
    elif footer.anchor_offset >= 0:
        found = record_crc(footer.anchor_offset)
        if found is not None and found != footer.anchor_crc:
            findings.add(
                "snapshot_of_other_log", path, f"there is another record at {footer.anchor_offset}"
            )
    return True


def _read_snapshot(path: Path) -> tuple[SnapshotFooter | None, int]:
    """Return the footer, None if the file is too short, and the CRC-32 of all bytes before it."""
    crc = 0
    with disk.read_stream(path) as file:
        left = file.seek(0, 2) - CRC_SIZE
        if left < FOOTER.size - CRC_SIZE:
            return None, 0
        file.seek(left + CRC_SIZE - FOOTER.size)
        footer = SnapshotFooter._make(FOOTER.unpack(file.read(FOOTER.size)))
        file.seek(0)
        while left > 0:
            piece = file.read(min(left, _PIECE))
            if not piece:
                return None, 0
            crc = crc32(piece, crc)
            left -= len(piece)
    return footer, crc
