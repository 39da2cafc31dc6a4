"""The next delivery of a popped message: a copy in the retry topic of its group and topic.

After too many deliveries it is a dead letter instead.
"""

import logging
from collections.abc import Callable, Sequence

from attrs import define, field

from halfmq.remoting.codes import INT32_MAX
from halfmq.remoting.pop import pop_retry_topic
from halfmq.store.format.properties import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_FROM, get_property
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import RETRY_PREFIX, dead_letter_topic
from halfmq.store.log.append_request import AppendRequest

from ..delay.levels import with_properties
from ..tables.group_table import GroupTable
from ..tables.topic_table import TopicTable
from .in_flight import Lapsed, PopQueue

logger = logging.getLogger(__name__)


@define(eq=False, repr=False)
class Retries:
    """Makes the copies, and knows the retry topics."""

    _topics: TopicTable
    _groups: GroupTable  # for the limits of deliveries
    # Returns the copy of a record that is its next delivery, with a delay level.
    _retry_copy: Callable[[Record, int, bytes], AppendRequest]
    _version_2: bool  # whether new retry topics have names of version 2
    _base_of: dict[str, str] = field(init=False, factory=dict)  # retry topic → topic

    def queues(self, group: str, topic: str) -> list[PopQueue]:
        """Return the queues with retries of a group and a topic."""
        names = (pop_retry_topic(topic, group, version_2=one) for one in (False, True))
        found = [name for name in names if name in self._topics]
        self._base_of |= dict.fromkeys(found, topic)
        return [PopQueue(group, name, 0) for name in found]

    def topic_of(self, topic: str) -> str:
        """Return the topic whose pops get the messages of a topic, perhaps a retry topic."""
        return self._base_of.get(topic, topic)

    def copy(self, due: Lapsed, record: Record, *, pulls: bool) -> AppendRequest:
        """Return what to store for a message; ``pulls``: its group pulls the topic now."""
        group, name = due.queue.group, due.queue.topic
        if record.reconsume_times >= self.limit(group):
            return _with_source(self._dead_letter(due.queue, record), due, record.queue_offset)
        copy = self._retry_copy(record, 0, record.store_host)
        if pulls:
            copy.topic = self._topics.ensure_retry(group).name
        else:
            base = base_topic(group, name)
            if not name.startswith(RETRY_PREFIX):
                name = pop_retry_topic(base, group, version_2=self._version_2)
            copy.topic = self._topics.ensure_retry(name.removeprefix(RETRY_PREFIX)).name
            self._base_of.setdefault(name, base)
        copy.queue_id = 0
        return _with_source(copy, due, record.queue_offset)

    def limit(self, group: str) -> int:
        """Return after how many deliveries a message of a group is a dead letter."""
        config = self._groups.get(group)
        return INT32_MAX if config is None else config.retry_max_times

    def dead_letters(self, queue: PopQueue, records: Sequence[bytes]) -> list[AppendRequest]:
        """Return what to store for messages that were delivered too often."""
        self._topics.ensure(dead_letter_topic(queue.group))
        return [self._dead_letter(queue, decode_record(one, check_crc=False)) for one in records]

    def _dead_letter(self, queue: PopQueue, record: Record) -> AppendRequest:
        copy = self._retry_copy(record, 0, record.store_host)
        logger.warning(
            "event=dead_letter group=%s from=%s reconsume_times=%d",
            queue.group,
            queue.topic,
            copy.reconsume_times,
        )
        copy.topic, copy.queue_id = self._topics.ensure_dead_letter(queue.group).name, 0
        return copy


def base_topic(group: str, topic: str) -> str:
    """Return the topic of which a topic has messages, or retries of a group."""
    for separator in "_+":
        prefix = f"{RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return topic


def _with_source(copy: AppendRequest, due: Lapsed, offset: int) -> AppendRequest:
    """Return a retry with what a start must know: the delivery that it follows."""
    (handle,) = due._replace(offsets=[offset]).handles()
    added = [(PROPERTY_POP_FROM, str(handle))]
    if get_property(copy.properties, PROPERTY_FIRST_POP_TIME.encode()) is None:
        added.append((PROPERTY_FIRST_POP_TIME, str(due.checkpoint.pop_ms)))
    copy.properties = with_properties(copy.properties, added)
    return copy


def was_popped(record: bytes) -> bool:
    """Return whether a record of a retry topic was stored by pop."""
    decoded = decode_record(record, check_crc=False)
    return get_property(decoded.properties, PROPERTY_FIRST_POP_TIME.encode()) is not None
