"""Deduplication of prepares: a producer that got no answer sends the same message again.

Official clients do this on their own, up to three times within some seconds. Without deduplication
the second half would be another transaction, which the producer does not end because it knows the
ids of one only. The broker would check it, the producer would find its local transaction committed,
and the message would be delivered twice.

A duplicate has the group and unique key of an earlier half. The log positions of the latest halves
are kept by these; the state of the first half is in the table of transactions.

A staged half is not in the table yet. Its key is added without a position, so that a duplicate in
the same pass of the event loop is recognised as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from halfmq.store.errors import CorruptRecordError
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC
from halfmq.store.log.append_request import AppendRequest

from .half import GroupMembership, StoredHalf, group_membership, parse_half, real_topic
from .state.generations import Generations
from .state.state_machine import State

logger = logging.getLogger(__name__)

PREPARES_REMEMBERED: Final = 100_000
"""Prepares kept, about 150 bytes each. Official clients repeat a send for at most 9 s (3 attempts
of 3 s)."""

REFILL_COUNT_MAX: Final = 20_000
"""Halves read when the broker starts: those of the last seconds of its previous run."""

REFILL_BYTES_MAX: Final = 64 << 20
"""Bytes of halves read when the broker starts: half a second of a slow disk. The newest half is
read regardless of its size."""

_REFILL_STEP: Final = 256  # halves read at once, if that many fit
_STAGED: Final = -1  # instead of a position: the half is not appended yet


class FirstHalf(NamedTuple):
    """The half that a duplicate repeats; the answer names it instead of the duplicate."""

    physical_offset: int
    queue_offset: int  # in the half topic
    queue_id: int  # of the real topic
    store_host: bytes


class Found(Protocol):
    """What `HalfLog.get` returns, as far as deduplication uses it."""

    @property
    def ranges(self) -> list[tuple[int, int]]: ...

    @property
    def size(self) -> int: ...


class HalfLog(Protocol):
    """The part of the store from which `RecentPrepares` is refilled at a start."""

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def get(
        self, topic: str, queue_id: int, offset: int, *, max_count: int = ..., max_bytes: int = ...
    ) -> Found: ...

    def read_cold(self, ranges: Iterable[tuple[int, int]]) -> bytes: ...


def deduplication_key(group: str, unique_key: str) -> int:
    """Return a hash that is the same for two halves if one repeats the other.

    It needs half the memory of the texts. `DuplicateFinder` compares the stored halves, so a hash
    collision (once in 10¹⁸) does no harm.
    """
    return hash(group) ^ hash(unique_key)


class RecentPrepares:
    """The latest halves by `deduplication_key`."""

    def __init__(self, limit: int = PREPARES_REMEMBERED) -> None:
        self._latest = Generations(limit)

    def __len__(self) -> int:
        return len(self._latest)

    def expect(self, group: str, unique_key: str) -> int:
        """Reserve the key of a half to be appended next; return it, or 0 if it is already known."""
        key = hash(group) ^ hash(unique_key)  # `deduplication_key`, without another call
        generations = self._latest.maps
        for known in generations:
            if key in known:
                return 0
        generations[0][key] = _STAGED
        return key

    def add(self, key: int, position: int) -> None:
        """Add a half that has been appended."""
        self._latest.put(key, position)

    def forget(self, key: int) -> None:
        """Undo `expect`, because the half could not be appended."""
        for known in self._latest.maps:
            if known.get(key) == _STAGED:
                del known[key]

    def find(self, key: int) -> int | None:
        """Return the physical offset of the latest half with this key; None if there is none."""
        position = self._latest.get(key)
        return None if position == _STAGED else position

    def refill(
        self,
        log: HalfLog,
        *,
        count_max: int = REFILL_COUNT_MAX,
        bytes_max: int = REFILL_BYTES_MAX,
    ) -> None:
        """Add the newest halves of the log at a start, as many as the limits allow.

        A client that got no answer because the broker was killed sends again after the restart.
        """
        found: list[tuple[int, int]] = []  # newest first
        first, end = log.queue_bounds(HALF_TOPIC, 0)
        newest, first = end, max(first, end - count_max)
        step = _REFILL_STEP
        while end > first:
            start = max(first, end - step)
            halves = log.get(HALF_TOPIC, 0, start, max_count=end - start, max_bytes=1 << 62)
            if halves.size > bytes_max and end - start > 1:
                step = (end - start) // 2  # only the newer ones may fit
                continue
            if halves.size > bytes_max and end < newest:
                break
            try:
                found += _newest_first(log, halves)
            except OSError:
                logger.exception("event=halves_unreadable queue_offset=%d", start)
                break
            bytes_max -= halves.size
            end = start
        for key, position in reversed(found):
            self.add(key, position)


class DuplicateFinder:
    """Finds the halves that a prepare repeats."""

    def __init__(
        self,
        read_record: Callable[[int], bytes | None],
        memory: RecentPrepares,
        state_of: Callable[[int, StoredHalf], State],
    ) -> None:
        """``state_of`` returns the state of the transaction of a half."""
        self._read_record = read_record
        self._memory = memory
        self._state_of = state_of

    def find(
        self, messages: Sequence[tuple[AppendRequest, str]], group: str
    ) -> list[FirstHalf] | None:
        """Return the halves that these messages repeat; None if they begin a new transaction.

        They begin a new one if the first was rolled back: the producer has not run its local
        transaction yet, and ids of a decided half would be refused later. They also do if the
        decision about the first is unknown: a duplicate is better than a lost message.

        Args:
            messages: All of one transaction, the leader first, each with its unique key.
            group: The producer group.

        Raises:
            NotInMemoryError: A half must be read from disk first; nothing has changed.
        """
        leader_key = messages[0][1]
        offset = self._memory.find(deduplication_key(group, leader_key))
        if offset is None:
            return None
        found: list[FirstHalf] = []
        for number, (message, unique_key) in enumerate(messages):
            record = self._read_record(offset)
            half = None if record is None else parse_half(record, offset)
            if (
                record is None
                or half is None
                or (not found and self._state_of(offset, half) is State.ROLLED_BACK)
            ):
                return None
            membership = (
                GroupMembership(leader_key.encode(), number, len(messages))
                if len(messages) > 1
                else None
            )
            if not _repeats(half, message, group, unique_key, membership):
                logger.warning(
                    "event=unique_key_reused half_offset=%d group=%s unique_key=%s topic=%s",
                    offset,
                    group,
                    leader_key,
                    message.topic,
                )
                return None
            queue_id = get_property(half.properties, b"REAL_QID") or b"0"
            found.append(FirstHalf(offset, half.queue_offset, int(queue_id), half.store_host))
            offset += len(record)  # the halves of a transaction are adjacent in the log
        return found


def _repeats(
    half: StoredHalf,
    message: AppendRequest,
    group: str,
    unique_key: str,
    membership: GroupMembership | None,
) -> bool:
    """Return whether a message repeats a stored half; its key alone may be reused by mistake."""
    return (
        get_property(half.properties, b"UNIQ_KEY") == unique_key.encode()
        and get_property(half.properties, b"PGROUP") == group.encode()
        and real_topic(half) == message.topic
        and half.body == message.body
        and group_membership(half.properties) == membership
    )


def _newest_first(log: HalfLog, halves: Found) -> list[tuple[int, int]]:
    """Return key and position of each half, the newest first."""
    found: list[tuple[int, int]] = []
    for one in halves.ranges:  # one by one: damage in one range must not hide the next
        found += _halves_of(log.read_cold([one]))
    found.reverse()
    return found


def _halves_of(data: bytes) -> list[tuple[int, int]]:
    """Return key and position of each half in `data`, up to the first damage."""
    found: list[tuple[int, int]] = []
    position = 0
    while position < len(data):
        try:
            record = decode_record(data, position)
        except CorruptRecordError as error:
            logger.warning("event=half_unreadable offset=%d reason=%r", error.offset, error.reason)
            break
        group = get_property(record.properties, b"PGROUP")
        unique_key = get_property(record.properties, b"UNIQ_KEY")
        if group is not None and unique_key is not None:
            key = deduplication_key(
                group.decode(errors="replace"), unique_key.decode(errors="replace")
            )
            found.append((key, record.physical_offset))
        position += record.total_size
    return found
