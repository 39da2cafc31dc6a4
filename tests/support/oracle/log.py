"""What is known of a log as a whole."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from .records import COMMIT, HALF, PARKED, PREPARED, ROLLBACK, SCHEDULE, TIMER, Raw, read
from .words import Found, Kind, State

# What a final message, or its copy after a delay, may have otherwise than its half.
MAY_DIFFER = {
    *("REAL_TOPIC", "REAL_QID", "TRANSACTION_HALF_ID", "TRANSACTION_HALVES"),
    *("TRANSACTION_PRINCIPAL", "TRANSACTION_DELAY_MS", "TRANSACTION_DELIVER_MS", "DELAY"),
    *("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS"),
    *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "__CRC32#"),
    *("INNER_MULTI_QUEUE_OFFSET"),
}


@dataclass
class Audit:
    """What the audit of a log must say."""

    found: list[Found] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # by the half's offset

    def add(self, kind: Kind, *offsets: int) -> None:
        self.found.append((kind, tuple(sorted(offsets))))


class Log:
    """The records of a log, and what is known of it as a whole."""

    def __init__(self, root: Path) -> None:
        self.damage: list[tuple[int, int]] = []
        folder = root / "commitlog" if (root / "commitlog").is_dir() else root
        self.folder = folder
        self.records = list(read(folder, self.damage))
        self.first = self.records[0].offset
        self.last = self.records[-1]
        self.queues: dict[str, int] | None = None
        if folder is not root:
            table = json.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
            self.queues = {topic: one["writeQueueNums"] for topic, one in table.items()}
        self._marks = [mark for one in self.records for mark in _mark_of(one)]
        self._told_by_finals = any(ours and final for _, ours, final in self._marks)
        if not self._told_by_finals:
            self._marks = [mark for mark in self._marks if not mark[2]]

    def is_ours(self, offset: int) -> bool:
        """Tell whether halfmq wrote here: the marks before and after it are halfmq's."""
        places = [at for at, _, _ in self._marks]
        before, after = bisect_right(places, offset) - 1, bisect_left(places, offset)
        if not self._marks:
            return False
        ours_before = self._marks[before][1] if before >= 0 else self._told_by_finals
        return ours_before and (after == len(places) or self._marks[after][1])

    def hides(self, start: int, end: int | None = None) -> bool:
        """Tell whether something between two offsets cannot be read."""
        if start < self.first:
            return True
        return any(stop > start and (end is None or begin < end) for begin, stop in self.damage)

    def worked_ms(self, start: int, end: int) -> int:
        """How long a broker was at work: a pause of ten seconds or more counts for two."""
        worked = 0
        for before, after in pairwise([one.time for one in self.records]):
            within = min(after, end) - max(before, start)
            if within > 0 and after - before < 10_000:
                worked += within
            elif within > 0 and before >= start:
                worked += 2_000
        return worked

    def has_room(self, size: int, start: int, end: int) -> bool:
        return any(min(stop, end) - max(begin, start) >= size for begin, stop in self.damage)


def _mark_of(one: Raw) -> Iterable[tuple[int, bool, bool]]:
    """What only one of the brokers writes: where, whether halfmq, whether it is a final."""
    has_id = "TRANSACTION_HALF_ID" in one.properties
    if one.topic == HALF and one.bits in (ROLLBACK, PREPARED):
        yield one.offset, True, False
    elif one.topic == PARKED:
        yield one.offset, one.link > 0, False
    elif one.topic == HALF and "TRANSACTION_CHECK_TIMES" in one.properties:
        yield one.offset, False, False
    elif one.topic in (SCHEDULE, TIMER):
        if one.bits == COMMIT and one.link > 0 and has_id:
            yield one.offset, True, True
    elif one.bits == COMMIT and one.link > 0:
        yield one.offset, has_id, True
