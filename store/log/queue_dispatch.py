"""Compute the consume-queue entry of a record from the record alone.

The appender gets most of it from its caller; recovery has only the log.
Source: RocketMQ ``CommitLog.java`` (``checkMessageAndReturnSize``), ``DefaultMessageStore.java``.
"""

from collections.abc import Sequence
from typing import Final

from ..format.filler import FILLER_TAGS_CODE, is_filler
from ..format.properties import PROPERTY_INNER_BASE, PROPERTY_INNER_NUM, get_property, tags_code
from ..format.record import store_timestamp
from ..format.timers import entry_code as timer_entry_code
from ..format.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from .log_scan import Found

_NO_LEVEL_DELAY_MS: Final = 1000  # for a level that no longer exists
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()


def entry_code(chunk: bytes, found: Found, delay_levels_ms: Sequence[int]) -> int:
    """Return the tags code of the queue entry of a record that was found in a chunk."""
    position, size, sys_flag, _, _, topic_at, topic_end, properties_at = found
    if is_filler(chunk, position, sys_flag):
        return FILLER_TAGS_CODE
    properties = chunk[properties_at : position + size]
    topic = chunk[topic_at:topic_end]
    if topic == _SCHEDULE_TOPIC:
        stored = store_timestamp(chunk, position, sys_flag)
        return delivery_time(properties, stored, delay_levels_ms)
    if topic == _TIMER_TOPIC:
        return timer_code(properties, store_timestamp(chunk, position, sys_flag))
    return tags_code(properties)


def delivery_time(properties: bytes, store_timestamp: int, delay_levels_ms: Sequence[int]) -> int:
    """Return when a delayed record is due, in ms; without a delay level, its tags code."""
    raw = get_property(properties, b"DELAY")
    try:
        level = int(raw or b"0")
    except ValueError:
        level = 0
    if level <= 0:
        return tags_code(properties)
    level = min(level, len(delay_levels_ms))
    delay = delay_levels_ms[level - 1] if level else _NO_LEVEL_DELAY_MS
    return store_timestamp + delay


def timer_code(properties: bytes, store_timestamp: int) -> int:
    """Return the due time of a timer message; its tags code if the properties do not say."""
    code = timer_entry_code(properties, store_timestamp)
    return tags_code(properties) if code is None else code


def inner_batch_size(properties: bytes, queue_offset: int) -> int:
    """Return how many queue offsets a record of a batch queue takes; 1 if not given.

    Source: RocketMQ ``CommitLog.java`` (``getMessageNum``).
    """
    count = get_property(properties, PROPERTY_INNER_NUM.encode()) or b""
    base = get_property(properties, PROPERTY_INNER_BASE.encode())
    if base != b"%d" % queue_offset or not count.isdigit():
        return 1
    return max(int(count), 1)
