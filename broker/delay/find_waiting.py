"""Find the messages that wait, at a start: from the entries of their queues and from the log."""

from collections.abc import Callable, Iterable
from typing import Final

from halfmq.store.format.filler import FILLER_TAGS_CODE
from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.properties import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
)
from halfmq.store.format.queue_entry import PRE_BLANK, QueueEntry
from halfmq.store.format.record import Record
from halfmq.store.format.timers import entry_time, timer_delay_ms, timer_due_ms
from halfmq.store.format.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from halfmq.store.message_store import MessageStore

from .done_file import DoneFile
from .levels import DelayLevels
from .timer_records import is_recall, link_of, text_of
from .waiting import (
    DELIVERED,
    OFFSET_BITS,
    PENDING,
    QUEUES_MAX,
    RECALLED,
    TIMER_QUEUE,
    DueTimes,
    WaitingQueue,
    place_of,
    queue_offset_of,
)

_ENTRIES_STEP: Final = 4_096  # queue entries read at once


def waiting_messages(
    store: MessageStore,
    done: DoneFile,
    levels: DelayLevels,
    scan: Callable[[int], Iterable[Record]],
    now_ms: int,
    due: DueTimes,
) -> list[WaitingQueue]:
    """Return the queues, and add the messages that wait in them to the due times."""
    # Messages in the queues of levels that were removed from the setting are delivered, too.
    used = [queue + 1 for topic, queue in store.queues.names() if topic == SCHEDULE_TOPIC]
    count = 1 + max(len(levels.levels_ms), *(one for one in used if one < QUEUES_MAX), 0)
    queues, log_offset = done.load(count)
    _read_log(queues, scan(log_offset))
    _read_timers(store, queues[TIMER_QUEUE], due, done.delivered_by_rocketmq_ms(), now_ms)
    for queue in queues[TIMER_QUEUE + 1 :]:
        delay_ms = levels.delay_ms(queue.number)
        for queue_offset, entry in _pending(store, queue):
            wait_ms = _limited(entry.tags_code - now_ms, delay_ms)
            due.add_after(wait_ms, place_of(queue.number, queue_offset))
    return queues


def _limited(wait_ms: int, delay_ms: int) -> int:
    """Return how long a message still waits; the clock may have been set back meanwhile."""
    return min(wait_ms, delay_ms)


def _read_log(queues: list[WaitingQueue], records: Iterable[Record]) -> None:
    """Find the deliveries and recalls that the file does not have."""
    for record in records:
        link = record.prepared_transaction_offset
        if link >= 0 or record.sys_flag & TRANSACTION_MASK:
            continue
        place = link_of(link)  # its own inverse
        if place == record.physical_offset:  # a filler, which names its own place in the log
            continue
        recalls = record.topic == TIMER_TOPIC and is_recall(record.properties)
        number = place >> OFFSET_BITS
        if number < len(queues):
            state = RECALLED if recalls else DELIVERED
            queues[number].mark(queue_offset_of(place), state, durable=True)
        if recalls:
            queues[TIMER_QUEUE].mark(record.queue_offset, DELIVERED, durable=True)


def _pending(store: MessageStore, queue: WaitingQueue) -> Iterable[tuple[int, QueueEntry]]:
    """Yield the messages of a queue that wait, with their queue offsets."""
    for start in range(queue.base, queue.end, _ENTRIES_STEP):
        entries = store.queues.entries(queue.topic, queue.queue_id, start, _ENTRIES_STEP)
        for queue_offset, entry in enumerate(entries, start):
            if queue.state(queue_offset) != PENDING:
                continue
            if entry.size == PRE_BLANK.size or entry.tags_code == FILLER_TAGS_CODE:
                queue.mark(queue_offset, DELIVERED, durable=True)  # its record is lost
            else:
                yield queue_offset, entry


def _read_timers(
    store: MessageStore, queue: WaitingQueue, due: DueTimes, delivered_ms: int, now_ms: int
) -> None:
    foreign: list[Record] = []
    newest_ms = store.queues.store_time_at(queue.topic, queue.queue_id, queue.end - 1)
    is_set_back = newest_ms > now_ms
    for queue_offset, entry in _pending(store, queue):
        time, place = entry_time(entry.tags_code), place_of(TIMER_QUEUE, queue_offset)
        if time is None:
            record = store.reader.record_at(entry.physical_offset)
            queue.mark(queue_offset, DELIVERED, durable=True)
            foreign += [] if record is None else [record]
        elif time.due_ms <= delivered_ms:  # by a RocketMQ that had taken the store over
            queue.mark(queue_offset, DELIVERED, durable=True)
        elif time.is_relative:
            wait_ms = time.due_ms - now_ms
            delay_ms = _delay_ms(store, entry) if is_set_back else wait_ms
            due.add_after(_limited(wait_ms, delay_ms), place)
        else:
            due.add_at(time.due_ms, place)
    if foreign:
        _add_foreign(queue, foreign, delivered_ms, due)


def _delay_ms(store: MessageStore, entry: QueueEntry) -> int:
    """Return the delay that a waiting message asks for."""
    record = store.reader.record_at(entry.physical_offset)
    return 0 if record is None else timer_delay_ms(record.properties) or 0


def _add_foreign(
    queue: WaitingQueue, records: Iterable[Record], delivered_ms: int, due: DueTimes
) -> None:
    """Add the messages of an Apache RocketMQ, whose queue entries do not tell their times."""
    waiting: dict[tuple[str, str], tuple[int, int]] = {}
    for record in records:
        topic = text_of(record, PROPERTY_REAL_TOPIC)
        due_ms = timer_due_ms(record.properties, record.store_timestamp) or 0
        if is_recall(record.properties):
            # Old ones have only the message's key.
            key = text_of(record, PROPERTY_TIMER_DEL_UNIQKEY).removeprefix(f"{topic}+")
            waiting.pop((topic, key), None)
        elif due_ms > delivered_ms:
            waiting[topic, text_of(record, PROPERTY_UNIQ_KEY)] = due_ms, record.queue_offset
    for due_ms, queue_offset in waiting.values():
        queue.mark(queue_offset, PENDING, durable=True)
        due.add_at(due_ms, place_of(TIMER_QUEUE, queue_offset))
