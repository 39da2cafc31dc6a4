"""The destination of a committed message whose topic has changed since the prepare.

Seconds or days may pass between prepare and commit. If an operator has deleted the topic or some of
its queues meanwhile, no consumer would read a message stored there.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ..tables.topics import TopicConfig

logger = logging.getLogger(__name__)


class Topics(Protocol):
    """The part of the topic table that a destination depends on."""

    def get(self, name: str) -> TopicConfig | None: ...

    def ensure(self, name: str, queues: int = 1) -> TopicConfig: ...


class DestinationResolver:
    """Finds queues that consumers read."""

    def __init__(self, topics: Topics, *, default_queue_nums: int) -> None:
        self._topics = topics
        self._get = topics.get
        self._default_queue_nums = default_queue_nums

    def resolve(self, topic: str, queue_id: int) -> tuple[str, int]:
        """Return where to store a message that was prepared for this topic and queue.

        Raises:
            RequestRefusedError: The topic was deleted and cannot be created now; try later.
        """
        known = self._get(topic)
        if known is not None and 0 <= queue_id < known.write_queue_nums:
            return topic, queue_id
        return self._reassigned(known, topic, queue_id)

    def _reassigned(self, known: TopicConfig | None, topic: str, queue_id: int) -> tuple[str, int]:
        if known is None:
            known = self._topics.ensure(topic, self._default_queue_nums)
        # A topic without write queues still has read queues for its consumers.
        queues = known.write_queue_nums or known.read_queue_nums or 1
        reassigned = queue_id % queues
        logger.warning(
            "event=message_placed_anew topic=%s prepared_for_queue=%d queue=%d write_queues=%d",
            topic,
            queue_id,
            reassigned,
            known.write_queue_nums,
        )
        return topic, reassigned
