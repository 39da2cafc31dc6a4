"""The destination of a committed message: its topic and queue, or the timer topic if it waits."""

import logging
from collections.abc import Callable

from attrs import define

from halfmq.store.format.topics import RETRY_PREFIX, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..delay.timer_records import COMMIT_DELAY_PREFIX
from ..errors import RequestRefusedError
from ..tables.topic_table import TopicTable


@define(eq=False, repr=False, slots=False)
class Destinations:
    """Finds queues that consumers read, for decisions and parking."""

    _topics: TopicTable
    # Returns what a commit stores now for a delayed message.
    _delayed: Callable[[AppendRequest], AppendRequest]

    def __attrs_post_init__(self) -> None:
        self._queue_of = CurrentQueues(self._topics).of

    def resolve(self, final: AppendRequest) -> AppendRequest:
        """Return a final message as its commit must store it now.

        Raises:
            RequestRefusedError: The topic was deleted and cannot be created now; try later.
        """
        final.queue_id = self._queue_of(final.topic, final.queue_id)
        if final.properties.rfind(COMMIT_DELAY_PREFIX) < 0:
            return final
        return self._delayed(final)

    def ensure_parked_topic(self) -> None:
        """Create the topic of parked messages if it does not exist."""
        self._topics.ensure(TRANS_CHECK_MAX_TIME_TOPIC)


logger = logging.getLogger(__name__)


class CurrentQueues:
    """Finds a queue that consumers read for a message that was accepted some time ago.

    Seconds or days may pass between a prepare and its commit, or before a delay is over. If an
    operator has deleted the topic or some of its queues meanwhile, no consumer would read a message
    stored there.
    """

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
