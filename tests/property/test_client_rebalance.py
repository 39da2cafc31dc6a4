"""The average strategy, compared with the formula of the official client."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from halfmq.client.consuming.rebalance import allocate_averagely

IDS = st.lists(st.text("abc@1", min_size=1, max_size=4), min_size=1, max_size=9, unique=True)


def official(queues: list[int], clients: list[str], own_id: str) -> list[int]:
    """Allocate as Java's ``AllocateMessageQueueAveragely``."""
    index, mod = clients.index(own_id), len(queues) % len(clients)
    if len(queues) <= len(clients):
        average = 1
    elif mod > 0 and index < mod:
        average = len(queues) // len(clients) + 1
    else:
        average = len(queues) // len(clients)
    start = index * average if mod > 0 and index < mod else index * average + mod
    return [queues[start + i] for i in range(min(average, len(queues) - start))]


@given(count=st.integers(0, 40), clients=IDS)
def test_every_member_computes_what_the_official_client_computes(
    count: int, clients: list[str]
) -> None:
    """A group may have Java clients too; each queue must have one owner."""
    queues = list(range(count))

    for own_id in clients:
        assert allocate_averagely(queues, clients, own_id) == official(
            queues, sorted(clients), own_id
        )


@given(count=st.integers(0, 40), clients=IDS)
def test_every_queue_has_exactly_one_owner(count: int, clients: list[str]) -> None:
    """A queue without an owner is never read, one with two is read twice."""
    queues = list(range(count))

    shares = [allocate_averagely(queues, clients, own_id) for own_id in sorted(clients)]

    assert [queue for share in shares for queue in share] == queues


@given(clients=IDS)
def test_a_stranger_gets_nothing(clients: list[str]) -> None:
    """Until the broker has its heartbeat, a member must not take queues of others."""
    assert allocate_averagely([1, 2, 3], clients, "stranger") == []
