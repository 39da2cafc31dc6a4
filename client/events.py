"""Events of a consumer: conditions under which messages are not delivered.

Each event is logged as a warning and passed to the consumer's ``on_event``; ``str(event)`` is a
readable sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TopicMissing:
    """No broker has ``topic``. It is consumed once it is created. Reported once per topic."""

    name: ClassVar[str] = "topic_missing"

    group: str
    topic: str
    nearest: tuple[str, ...]
    """Topics with similar names, the most similar first; at most three."""

    def __str__(self) -> str:
        hint = f"; similar topics: {', '.join(self.nearest)}" if self.nearest else ""
        return f"topic {self.topic} does not exist; it is consumed once it is created{hint}"


@dataclass(frozen=True, slots=True)
class UnequalSubscriptions:
    """Another member of the group has a different filter for ``topic``, so messages are lost.

    Reported once a minute while it lasts, as during a deployment that changes a subscription. A
    filter is None if its client does not subscribe to the topic.
    """

    name: ClassVar[str] = "unequal_subscriptions"

    group: str
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


ConsumerEvent: TypeAlias = TopicMissing | UnequalSubscriptions
