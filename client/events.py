"""What a consumer tells its program beside messages: conditions under which messages stay away.

Each event is a warning in the log and a call of the consumer's ``on_event``; ``str(event)`` is a
sentence for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class TopicMissing:
    """No broker has ``topic``. It is consumed as soon as it is created; told once per topic."""

    name: ClassVar[str] = "topic_missing"

    group: str
    topic: str
    nearest: tuple[str, ...]
    """Topics with similar names, the most similar first; at most three."""

    def __str__(self) -> str:
        hint = f"; similar topics: {', '.join(self.nearest)}" if self.nearest else ""
        return f"topic {self.topic} does not exist; it is consumed once it is created{hint}"


ConsumerEvent: TypeAlias = TopicMissing
