"""Records that stand where they should not, and places in queues that lack theirs."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from .commit_log import NO_QUEUE_ENTRY
from .consume_queue import ConsumeQueue, is_directory_name
from .dispatch import entry_code
from .format.queue_entry import QueueEntry
from .format.topics import is_text
from .log_scan import Found

NO_END: Final = 1 << 63  # behind every record


class Odd(NamedTuple):
    """A record that is not the next of its queue, or that is more than one message."""

    topic: bytes
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    sys_flag: int
    topic_at: int  # position in the record
    messages: int  # queue offsets that it takes

    @property
    def end(self) -> int:
        """The physical offset just behind it."""
        return self.physical_offset + self.size

    @property
    def entry(self) -> QueueEntry:
        """The entry that leads to it, in the queue that it names."""
        return QueueEntry(self.physical_offset, self.size, self.tags_code)


class Gap(NamedTuple):
    """A place in a queue that no record was found for."""

    queue: ConsumeQueue
    queue_offset: int
    after: int  # physical offset behind the record before it
    before: int  # where the record behind it begins


def odd_from(
    chunk: bytes,
    chunk_offset: int,
    found: Found,
    *,
    delay_levels_ms: Sequence[int],
    batch_size: int = 1,
) -> Odd:
    """Describe a record of a chunk that begins at a physical offset."""
    position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at = found
    topic = chunk[topic_at : properties_at - 2]
    code = entry_code(
        chunk[position : position + size],
        properties_at - position,
        topic=topic,
        sys_flag=sys_flag,
        delay_levels_ms=delay_levels_ms,
    )
    return Odd(
        topic,
        queue_id,
        queue_offset,
        chunk_offset + position,
        size,
        code,
        sys_flag,
        topic_at - position,
        batch_size,
    )


def is_nameable(record: Odd) -> bool:
    """Tell whether there can be a queue as the one a record names."""
    return (
        record.queue_id >= 0 and is_text(record.topic) and is_directory_name(record.topic.decode())
    )


def is_one_bit_off(record: Odd, gap: Gap) -> bool:
    """Tell whether a record would belong into a gap if one bit of it were another."""
    queue = gap.queue
    if not gap.after <= record.physical_offset < gap.before:
        return False
    topic = queue.topic.encode()
    return len(topic) == len(record.topic) and sum(_differing_bits(record, gap)) == 1


def _differing_bits(record: Odd, gap: Gap) -> Iterator[int]:
    yield from (
        (a ^ b).bit_count() for a, b in zip(gap.queue.topic.encode(), record.topic, strict=True)
    )
    yield int(bool(record.sys_flag & NO_QUEUE_ENTRY))
    yield ((gap.queue.queue_id ^ record.queue_id) & 0xFFFF_FFFF).bit_count()
    yield ((gap.queue_offset ^ record.queue_offset) & 0xFFFF_FFFF_FFFF_FFFF).bit_count()
