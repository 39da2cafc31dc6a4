"""Events of a consumer, which it passes to its ``on_event`` and logs; and the health of a client.

``str(event)`` is a readable sentence, and ``level`` the level at which it is logged. They tell what
changes outside the loop or handler: connections, queues, and conditions under which messages are
not delivered.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias

from .message import MessageQueue

if TYPE_CHECKING:
    from .consuming.in_flight import InFlightWindow


@dataclass(frozen=True, slots=True)
class _Event:
    name: ClassVar[str]
    level: ClassVar[int]

    group: str


@dataclass(frozen=True, slots=True)
class Connected(_Event):
    """A broker is connected, at the start or again after an outage."""

    name = "connected"
    level = logging.DEBUG  # the session logs it, for all clients

    address: str

    def __str__(self) -> str:
        return f"connected to {self.address}"


@dataclass(frozen=True, slots=True)
class ConnectionLost(_Event):
    """A broker does not answer any more. It is connected to again by itself."""

    name = "connection_lost"
    level = logging.DEBUG

    address: str
    reason: str

    def __str__(self) -> str:
        return f"lost the connection to {self.address}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Assigned(_Event):
    """Queues of a topic are assigned to this consumer, which begins to pull them."""

    name = "assigned"
    level = logging.INFO

    topic: str
    queues: tuple[MessageQueue, ...]

    def __str__(self) -> str:
        numbers = ", ".join(f"{one.broker_name}:{one.queue_id}" for one in self.queues)
        return f"topic {self.topic}: {self.name} {numbers}"


class Revoked(Assigned):
    """Queues of a topic are assigned to it no more; their messages go to other members."""

    __slots__ = ()
    name = "revoked"


@dataclass(frozen=True, slots=True)
class Lagging(_Event):
    """A queue has ``lagging_from`` messages or more that are not acknowledged.

    Reported once, and again after the lag was below half of that.
    """

    name = "lagging"
    level = logging.WARNING

    queue: MessageQueue
    lag: int
    """Messages from the first one that is not acknowledged to the end of the queue."""

    def __str__(self) -> str:
        return f"{self.lag} messages of {self.queue} are not acknowledged"


@dataclass(frozen=True, slots=True)
class Retried(_Event):
    """A message failed, or was not acknowledged in time; the group gets it again later."""

    name = "retried"
    level = logging.DEBUG

    queue: MessageQueue
    queue_offset: int
    message_id: str
    attempt: int
    """The delivery that failed; the first is 1."""
    reason: str
    """As given to ``retry`` or ``reject``; empty if unknown."""

    def __str__(self) -> str:
        where = f"message {self.message_id} of {self.queue}"
        return f"{where} was {self.name} after attempt {self.attempt}: {self.reason or 'no reason'}"


class Rejected(Retried):
    """A message was rejected, so it becomes a dead letter."""

    __slots__ = ()
    name = "rejected"
    level = logging.INFO


@dataclass(frozen=True, slots=True)
class DeliveryRefused(_Event):
    """A broker refuses to deliver messages, such as when rights are withdrawn.

    ``receive`` raises the same error while it lasts.
    """

    name = "refused"
    level = logging.WARNING

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class TopicMissing(_Event):
    """No broker has ``topic``. It is consumed once it is created. Reported once per topic."""

    name = "topic_missing"
    level = logging.WARNING

    topic: str
    nearest: tuple[str, ...]
    """Topics with similar names, the most similar first; at most three."""

    def __str__(self) -> str:
        hint = f"; similar topics: {', '.join(self.nearest)}" if self.nearest else ""
        return f"topic {self.topic} does not exist; it is consumed once it is created{hint}"


@dataclass(frozen=True, slots=True)
class UnequalSubscriptions(_Event):
    """Another member of the group has a different filter for ``topic``, so messages are lost.

    Reported once a minute while it lasts, as during a deployment that changes a subscription. A
    filter is None if its client does not subscribe to the topic.
    """

    name = "unequal_subscriptions"
    level = logging.WARNING

    topic: str
    client_id: str
    """This consumer."""
    filter: str | None
    other_client_id: str
    other_filter: str | None

    def __str__(self) -> str:
        return (
            f"of topic {self.topic}, {self.client_id} (this consumer) wants {_shown(self.filter)} "
            f"and {self.other_client_id} wants {_shown(self.other_filter)}; messages that go to "
            f"the wrong one are lost to the group: all its members must subscribe to the same"
        )


def _shown(expression: str | None) -> str:
    return "nothing" if expression is None else repr(expression)


ConsumerEvent: TypeAlias = (
    Connected
    | ConnectionLost
    | Assigned
    | Revoked
    | Lagging
    | Retried
    | Rejected
    | DeliveryRefused
    | TopicMissing
    | UnequalSubscriptions
)
"""What ``on_event`` gets."""


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
