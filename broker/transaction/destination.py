"""The destination of a committed message: its topic and queue, or the timer topic if it waits."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..delay.timer_records import COMMIT_DELAY_PREFIX
from ..tables.current_queues import CurrentQueues
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
