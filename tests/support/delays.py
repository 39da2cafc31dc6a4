"""A delay service over a log in memory, and delayed messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.delay.levels import DEFAULT_LEVELS, DelayLevels, parse_delay_levels
from halfmq.broker.loop.fetches import Fetch
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest
from tests.support.broker_doubles import (
    Clock,
    FakeLog,
    config_path,
    draft,
    fetch_nothing,
    same_queue,
)

LEVELS = parse_delay_levels(DEFAULT_LEVELS)
DAY_MS = 86_400_000
HALF_ID = "7F00000100002A9F000000000000004D"


def service(
    root: Path,
    log: FakeLog,
    clock: Clock,
    levels: tuple[int, ...] = LEVELS,
    *,
    fetch: Fetch = fetch_nothing,
    queue_of: Callable[[str, int], int | None] = same_queue,
    wake: Callable[[], None] = lambda: None,
) -> DelayService:
    made = DelayService(
        log,
        DelayLevels(levels, now_ms=clock),
        config_path(root, "delayOffset.json"),
        now_ms=clock,
        monotonic_ms=clock.monotonic,
        fetch=fetch,
        queue_of=queue_of,
        wake=wake,
    )
    made.load()
    log.on_append = noting(made)
    return made


def noting(delays: DelayService) -> Callable[[Sequence[AppendRequest]], None]:
    """Report each append to the service, as the broker does."""

    def note(group: Sequence[AppendRequest]) -> None:
        for one in group:
            if one.topic == SCHEDULE_TOPIC:
                delays.on_stored(one.queue_id)

    return note


def delayed(
    clock: Clock, level: str | int, topic: str = "orders", queue_id: int = 3
) -> AppendRequest:
    properties = f"TAGS\x01x\x02DELAY\x01{level}\x02KEYS\x01k\x02".encode()
    return DelayLevels(LEVELS, now_ms=clock).delayed(draft(topic, queue_id, b"late", properties))


def final(delay: str, properties: str = "") -> AppendRequest:
    """Return the final message of a half at offset 77 that requests a delay."""
    properties = f"TAGS\x01x\x02{delay}\x02TRANSACTION_HALF_ID\x01{HALF_ID}\x02{properties}"
    made = draft("orders", 3, b"late", properties.encode(), sys_flag=0x8)
    made.prepared_transaction_offset = 77
    return made


def next_due_ms(delays: DelayService) -> int:
    """Return when the first waiting message is due; 0 if some level must be read to know it.

    Tests advance the clock to it: the service itself wakes up every second, for hours.
    """
    waiting = [one for one in delays._queues if delays._end(one) > one.next_offset]
    return min((one.head_due_ms or 0 for one in waiting), default=0)
