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

from .loop.slices import PeriodicWork
from .tables.all_tables import Tables
from .tables.topic_table import group_of

UNUSED_MS: Final = 24 * 3_600_000
"""Milliseconds after which an unused name ends: consumers that run once a day keep theirs."""

SCAN_S: Final = 600.0
"""Seconds between two searches."""


@define(eq=False, repr=False, slots=False)
class UnusedNames:
    """Ends unused names; used on the event loop."""

    _tables: Tables
    _bounds: Callable[[str, int], tuple[int, int]]  # ``QueueReader.bounds``
    _now_ms: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        self.tick = PeriodicWork(SCAN_S, self.expire).tick

    def expire(self) -> Iterator[None]:
        """End what is unused for too long, in steps."""
        topics, groups, tables = self._tables.topics, self._tables.groups, self._tables
        end = self._now_ms() - UNUSED_MS
        committed: set[str] = set()
        for keys in tables.offsets.key_batches():
            committed.update(key.partition("@")[2] for key in keys)
            yield
        for name in groups.unused.created_before(end):
            if name in committed or any(map(self._had_messages, _own_topics(name))):
                groups.unused.used(name)
            elif groups.auto_create and not tables.registry.has_consumers(name):
                groups.expire(name)
            yield
        for name in topics.unused.created_before(end):
            if self._had_messages(name):
                topics.unused.used(name)
            elif topics.is_created_automatically and (group_of(name) or "") not in groups:
                topics.expire(name)
            yield

    def _had_messages(self, topic: str) -> bool:
        known = self._tables.topics.get(topic)
        count = max(known.read_queue_nums, known.write_queue_nums) if known else 0
        return any(self._bounds(topic, queue_id)[1] for queue_id in range(count))


def _own_topics(group: str) -> tuple[str, str]:
    return retry_topic(group), dead_letter_topic(group)
