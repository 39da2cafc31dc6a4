"""Rebalance: assign the queues of a topic to the members of a consumer group.

There is no coordinator. Each member requests the group's client ids from the broker, sorts ids and
queues, and computes its own assignment. All members compute the same, so every queue has exactly
one consumer. The formula is therefore part of the protocol: a member that rounds differently would
leave queues unread or read them twice. Source: RocketMQ ``AllocateMessageQueueAveragely``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Q = TypeVar("Q")


def allocate_averagely(queues: Sequence[Q], clients: Iterable[str], own_id: str) -> list[Q]:
    """Return the range of ``queues`` (sorted by the caller) that is assigned to ``own_id``.

    The first ``len(queues) % len(clients)`` clients get one queue more than the others. An id
    that is not among ``clients`` gets nothing: the broker does not know this member yet.
    """
    members = sorted(set(clients))
    if own_id not in members:
        return []
    index = members.index(own_id)
    size, larger = divmod(len(queues), len(members))
    start = index * size + min(index, larger)
    return list(queues[start : start + size + (index < larger)])
