"""Topics and groups that were created automatically and that nobody has used end after a day.

A client that names topics and groups until it is refused would use them up for good otherwise. A
name is used when it gets a message or a commit, and configured when an operator changes it; neither
ends. A group with members does not end either, and its retry topic and dead letters stay as long as
the group. Whoever comes back gets the name again, with the same settings.
"""

from collections.abc import Callable, Iterator
from typing import Final

from attrs import define

from halfmq.store.format.topics import dead_letter_topic, retry_topic

from .tables.client_registry import ClientRegistry
from .tables.consumer_offsets import ConsumerOffsetTable
from .tables.group_table import GroupTable
from .tables.topic_table import TopicTable, group_of

UNUSED_MS: Final = 24 * 3_600_000
"""Milliseconds after which an unused name ends: consumers that run once a day keep theirs."""

SCAN_S: Final = 600.0
"""Seconds between two searches."""


@define(eq=False, repr=False)
class UnusedNames:
    """Ends unused names; used on the event loop."""

    _topics: TopicTable
    _groups: GroupTable
    _offsets: ConsumerOffsetTable
    _registry: ClientRegistry
    _has_messages: Callable[[str], bool]  # whether a topic ever had a message
    _now_ms: Callable[[], int]

    def expire(self) -> Iterator[None]:
        """End what is unused for too long, in steps."""
        end = self._now_ms() - UNUSED_MS
        committed: set[str] = set()
        for keys in self._offsets.key_batches():
            committed.update(key.partition("@")[2] for key in keys)
            yield
        for name in self._groups.unused.created_before(end):
            if name in committed or any(map(self._has_messages, _own_topics(name))):
                self._groups.unused.used(name)
            elif self._groups.auto_create and not self._registry.has_consumers(name):
                self._groups.expire(name)
            yield
        for name in self._topics.unused.created_before(end):
            if self._has_messages(name):
                self._topics.unused.used(name)
            elif (
                self._topics.is_created_automatically and (group_of(name) or "") not in self._groups
            ):
                self._topics.expire(name)
            yield


def _own_topics(group: str) -> tuple[str, str]:
    return retry_topic(group), dead_letter_topic(group)
