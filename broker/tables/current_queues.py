"""The queue to which a message goes that was accepted for it some time ago.

Seconds or days may pass between a prepare and its commit, or before a delay is over. If an operator
has deleted the topic or some of its queues meanwhile, no consumer would read a message stored
there.
"""

from __future__ import annotations

import logging

from halfmq.store.format.topics import RETRY_PREFIX

from ..errors import RequestRefusedError
from .topic_table import TopicTable

logger = logging.getLogger(__name__)


class CurrentQueues:
    """Finds queues that consumers read."""

    def __init__(self, topics: TopicTable) -> None:
        self._topics = topics
        self._get = topics.get
        # All of these exist, or did.
        self._logged: set[str] = set()  # topics of which a queue was replaced
        self._lacking: set[str] = set()  # topics that could not be created

    def of(self, name: str, queue_id: int) -> int:
        """Return the queue for a message; another one if its topic does not have it any more.

        A topic that was deleted is created again, because the message was accepted.

        Raises:
            RequestRefusedError: The topic was deleted and cannot be created now; try later.
        """
        known = self._get(name)
        if known is not None and 0 <= queue_id < known.write_queue_nums:
            return queue_id
        if known is None:
            of_group = name.startswith(RETRY_PREFIX)
            known = self._topics.ensure(name, 1 if of_group else self._topics.default_queue_nums)
            self._logged.discard(name)
            self._lacking.discard(name)
        # A topic without write queues still has read queues for its consumers.
        queue = queue_id % (known.write_queue_nums or known.read_queue_nums or 1)
        if name not in self._logged:  # it is the same for many thousands of messages
            self._logged.add(name)
            logger.warning(
                "event=destination_changed topic=%s accepted_for_queue=%d queue=%d write_queues=%d",
                name,
                queue_id,
                queue,
                known.write_queue_nums,
            )
        return queue

    def find(self, name: str, queue_id: int) -> int | None:
        """Return the queue for a message; None if there is none now: try later.

        The reason is logged once for each topic, since each of its messages is tried for ever.
        """
        try:
            return self.of(name, queue_id)
        except RequestRefusedError as refusal:
            if name not in self._lacking:
                self._lacking.add(name)
                logger.warning("event=destination_lacking topic=%s reason=%s", name, refusal)
            return None
