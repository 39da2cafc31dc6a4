"""Health of a client: whether it is connected, how far its queues are, and what it waits for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Self

from .message import MessageQueue

if TYPE_CHECKING:
    from .consuming.in_flight import InFlightWindow


class QueueHealth(NamedTuple):
    """How far a consumer is in one of its queues."""

    queue: MessageQueue
    pulled_at: datetime | None
    """When it last asked for messages. While there are none, a broker holds that request for
    ``pull_suspend`` (15 s); None: not yet."""
    acknowledged_at: datetime | None
    """When a message was last acknowledged; None: not yet."""
    unacknowledged: int
    """Messages that it has and that are not acknowledged."""
    lag: int
    """Messages up to the end of the queue, as of the last pull, that are not acknowledged."""

    @classmethod
    def of(cls, window: InFlightWindow) -> Self:
        """Return the health of a queue with this window."""
        times = (_time(window.pulled_at), _time(window.acknowledged_at))
        return cls(window.queue, *times, len(window), window.lag)


class Health(NamedTuple):
    """The state of a client, for probes and dashboards."""

    connected: bool
    """Whether it runs and is connected to all brokers that it knows."""
    waiting_for: tuple[str, ...] = ()
    """What keeps it from its work, in words; empty: nothing."""
    queues: tuple[QueueHealth, ...] = ()
    """The assigned queues of a consumer."""


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
