"""Who of a group consumes which queue: the average strategy, as every official client computes it.

Nobody assigns queues. Each member asks the broker for the group's client ids, sorts ids and
queues, and takes its own share; since all members compute the same, the shares fit together. So
the formula is part of the protocol: a member that rounds differently would leave queues unread or
read them twice. Source: RocketMQ ``AllocateMessageQueueAveragely``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Q = TypeVar("Q")


def average_share(queues: Sequence[Q], clients: Iterable[str], own_id: str) -> list[Q]:
    """The run of ``queues`` (sorted by the caller) that ``own_id`` consumes.

    The first ``len(queues) % len(clients)`` clients take one queue more than the others. An id
    that is not among ``clients`` gets nothing: the broker does not know this member yet.
    """
    members = sorted(set(clients))
    if own_id not in members:
        return []
    index = members.index(own_id)
    size, larger = divmod(len(queues), len(members))
    start = index * size + min(index, larger)
    return list(queues[start : start + size + (index < larger)])
