"""Where a committed message goes when its topic has changed since it was prepared.

Between the two lie seconds or days. An operator may have deleted the topic, or taken queues from
it; a message stored there all the same would be read by nobody.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ..tables.topics import TopicConfig

logger = logging.getLogger(__name__)


class Topics(Protocol):
    """What this needs of the topic table."""

    def get(self, name: str) -> TopicConfig | None: ...

    def ensure(self, name: str, queues: int = 1) -> TopicConfig: ...


class DestinationResolver:
    """Finds a queue that consumers read."""

    def __init__(self, topics: Topics, *, default_queue_nums: int) -> None:
        self._topics = topics
        self._get = topics.get
        self._default_queue_nums = default_queue_nums

    def resolve(self, topic: str, queue_id: int) -> tuple[str, int]:
        """Return topic and queue for a message that was prepared for these.

        Raises:
            RequestRefusedError: The topic is gone and cannot be created again; later it may.
        """
        known = self._get(topic)
        if known is not None and 0 <= queue_id < known.write_queue_nums:
            return topic, queue_id
        return self._reassigned(known, topic, queue_id)

    def _reassigned(self, known: TopicConfig | None, topic: str, queue_id: int) -> tuple[str, int]:
        if known is None:
            known = self._topics.ensure(topic, self._default_queue_nums)
        # A topic that nobody may write to for now keeps what it has for consumers to read.
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
