"""The destination of a committed message: its topic and queue, or the schedule if it is delayed.

Seconds or days may pass between prepare and commit. If an operator has deleted the topic or some of
its queues meanwhile, no consumer would read a message stored there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..delay.levels import COMMIT_DELAY_PREFIX
from ..tables.topic_config import TopicConfig
from ..tables.topic_table import TopicTable

logger = logging.getLogger(__name__)


class Destinations:
    """Finds queues that consumers read, for decisions and parking."""

    def __init__(
        self,
        topics: TopicTable,
        delayed: Callable[[AppendRequest, int], AppendRequest],
        *,
        now_ms: Callable[[], int],
    ) -> None:
        """Wire it; ``delayed`` returns what a commit at a time stores for a delayed message."""
        self._topics = topics
        self._get = topics.get
        self._delayed = delayed
        self._now_ms = now_ms

    def resolve(self, final: AppendRequest) -> AppendRequest:
        """Return a final message as its commit must store it now.

        Raises:
            RequestRefusedError: The topic was deleted and cannot be created now; try later.
        """
        known = self._get(final.topic)
        if known is None or not 0 <= final.queue_id < known.write_queue_nums:
            final.topic, final.queue_id = self._reassigned(known, final.topic, final.queue_id)
        if final.properties.rfind(COMMIT_DELAY_PREFIX) < 0:
            return final
        return self._delayed(final, self._now_ms())

    def ensure_parked_topic(self) -> None:
        """Create the topic of parked messages if it does not exist."""
        self._topics.ensure(TRANS_CHECK_MAX_TIME_TOPIC)

    def _reassigned(self, known: TopicConfig | None, topic: str, queue_id: int) -> tuple[str, int]:
        if known is None:
            known = self._topics.ensure(topic, self._topics.default_queue_nums)
        # A topic without write queues still has read queues for its consumers.
        queues = known.write_queue_nums or known.read_queue_nums or 1
        reassigned = queue_id % queues
        logger.warning(
            "event=destination_changed topic=%s prepared_for_queue=%d queue=%d write_queues=%d",
            topic,
            queue_id,
            reassigned,
            known.write_queue_nums,
        )
        return topic, reassigned
