"""Deduplication of prepares: a producer that got no answer sends the same message again.

Official clients do this on their own, up to three times within some seconds. Without deduplication
the second half would be another transaction, which the producer does not end because it knows the
ids of one only. The broker would check it, the producer would find its local transaction committed,
and the message would be delivered twice.

A duplicate has the group and unique key of an earlier half. The log positions of the latest halves
are kept by these; the state of the first half is in the table of transactions. The answer is that
of the first half: ``handlers/messages/send.py``, and ``handlers/transactions/prepare.py`` for 9002.

A staged half is not in the table yet. Its key is added without a position, so that a duplicate in
the same pass of the event loop is recognised as well.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from attrs import define

from halfmq.store.format.properties import get_property
from halfmq.store.log.append_request import AppendRequest

from .half import GroupMembership, StoredHalf, group_membership, real_topic, unique_key
from .half_reader import HalfReader, ReadHalf
from .state.caches import Generations
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

_ID_MARK: Final = b"__transactionId__\x01"
_STAGED: Final = -1  # instead of a position: the half is not appended yet


class FirstHalf(NamedTuple):
    """The half that a duplicate repeats; the answer names it instead of the duplicate."""

    physical_offset: int
    queue_offset: int  # in the half topic
    queue_id: int  # of the real topic
    store_host: bytes


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

    def reserve(self, group: str, unique_key: str) -> int:
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

    def release(self, key: int) -> None:
        """Undo `reserve`, because the half could not be appended."""
        for known in self._latest.maps:
            if known.get(key) == _STAGED:
                del known[key]

    def find(self, key: int) -> int | None:
        """Return the physical offset of the latest half with this key; None if there is none."""
        position = self._latest.get(key)
        return None if position == _STAGED else position

    def refill(
        self,
        halves: HalfReader,
        *,
        count_max: int = REFILL_COUNT_MAX,
        bytes_max: int = REFILL_BYTES_MAX,
    ) -> None:
        """Add the newest halves of the log at a start, as many as the limits allow.

        A client that got no answer because the broker was killed sends again after the restart.
        """
        found: list[tuple[int, int]] = []  # newest first
        for half in halves.newest(count_max, bytes_max):
            group = get_property(half.properties, b"PGROUP")
            key = unique_key(half)
            if group is not None and key is not None:
                name = group.decode(errors="replace")
                found.append((deduplication_key(name, key), half.physical_offset))
        for hashed, position in reversed(found):
            self.add(hashed, position)


@define(eq=False, repr=False)
class DuplicateFinder:
    """Finds the halves that a prepare repeats.

    ``state_of`` returns the state of the transaction of a half.
    """

    _read_half: ReadHalf
    _memory: RecentPrepares
    _state_of: Callable[[int, StoredHalf], State]

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
        for number, (message, key) in enumerate(messages):
            half = self._read_half(offset)
            if half is None or (not found and self._state_of(offset, half) is State.ROLLED_BACK):
                return None
            membership = (
                GroupMembership(leader_key.encode(), number, len(messages))
                if len(messages) > 1
                else None
            )
            if not _repeats(half, message, group, key, membership):
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
            offset += half.size  # the halves of a transaction are adjacent in the log
        return found


def _repeats(
    half: StoredHalf,
    message: AppendRequest,
    group: str,
    key: str,
    membership: GroupMembership | None,
) -> bool:
    """Return whether a message repeats a stored half; its key alone may be reused by mistake."""
    return (
        get_property(half.properties, b"UNIQ_KEY") == key.encode()
        and get_property(half.properties, b"PGROUP") == group.encode()
        and real_topic(half) == message.topic
        and half.body == message.body
        # A consumed message that is sent again with its properties repeats no prepare: it has the
        # property that the first half got from the broker.
        and half.properties.count(_ID_MARK) == message.properties.count(_ID_MARK) + 1
        and group_membership(half.properties) == membership
    )
