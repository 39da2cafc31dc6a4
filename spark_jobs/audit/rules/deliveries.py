"""Rules about messages that wait for their delivery: plain ones, retries, and delayed commits.

A message waits in ``SCHEDULE_TOPIC_XXXX`` or ``rmq_sys_wheel_timer`` and is stored again in its
topic when it is due. halfmq says in the delivered record where the message waited; of RocketMQ's
the unique key and the number of retries tell. What waits for long is stored again once or more.

How late something is counts only while the log shows a broker at work: what is due while a broker
is down is delivered after its start.

Source: RocketMQ ``ScheduleMessageService``, ``TimerMessageStore``; ``broker/delay/``.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...log.transaction_parts import Part
from ...times import duration, full_moment
from .model import Finding, Kind, LogBounds, LogEvent, MessageContent, TimeLimits

OVERDUE_MIN: Final = 5_000  # ms after a message was due; brokers look each second
LATE_MIN: Final = 60_000  # ms after it was due that something is delivered
EARLY_MIN: Final = 1_000  # ms before; clocks are corrected, and timers are cut to seconds


def judge_delays(
    events: Iterable[LogEvent], bounds: LogBounds, limits: TimeLimits
) -> list[Finding]:
    """Find what is wrong with the delivery of one plain message, given all records of its delays.

    ``reference`` of these events is the link of a delivered record, and of a waiting one the link
    that a record delivering it has. ``number`` is 1 if the waiting record was stored again.
    """
    events = sorted(events, key=_place)
    waits = [event for event in events if event.part is Part.DELAYED]
    arrivals = [event for event in events if event.part is Part.ARRIVED]
    if not waits:
        return []
    pairs, unmatched = _paired(waits, arrivals)
    found = [finding for pair in pairs for finding in mistimed(*pair, limits)]
    found += [finding for pair in pairs for finding in _changed(*pair, bounds)]
    found += _repeated(waits, pairs, unmatched, bounds)
    if not any(event.part is Part.RECALLED for event in events):
        found += _missing(waits, pairs, bounds, limits)
    return found


def _paired(
    waits: Sequence[LogEvent], arrivals: Sequence[LogEvent]
) -> tuple[list[tuple[LogEvent, LogEvent]], list[LogEvent]]:
    """Give each delivered record the waiting one that it delivers; and those that deliver none."""
    left = {wait.offset: wait for wait in waits}
    pairs: list[tuple[LogEvent, LogEvent]] = []
    unmatched: list[LogEvent] = []
    for arrival in sorted(arrivals, key=lambda one: (one.reference >= 0, one.offset)):
        is_linked = arrival.reference < 0
        fits = [
            wait
            for wait in left.values()
            if wait.offset < arrival.offset
            and (not is_linked or wait.reference == arrival.reference)
        ]
        same = [wait for wait in fits if _target(wait) == _target(arrival)]
        if not fits:
            unmatched.append(arrival)
            continue
        wait = (same or fits)[0]
        pairs.append((wait, arrival))
        del left[wait.offset]
    return pairs, sorted(unmatched, key=_place)


def _changed(wait: LogEvent, arrival: LogEvent, bounds: LogBounds) -> Iterator[Finding]:
    before, after = wait.content, arrival.content
    if not (wait.sound and arrival.sound and before and after):
        return
    if differ(before, after, arrival.offset, bounds):
        detail = "it differs from the message that waited"
        yield Finding(Kind.ALTERED_DELIVERY, [wait.offset, arrival.offset], detail)


def mistimed(wait: LogEvent, arrival: LogEvent, limits: TimeLimits) -> Iterator[Finding]:
    """Find a delivery at another time than that for which the message waited."""
    offsets, due, time = [wait.offset, arrival.offset], wait.due_ms, arrival.time_ms
    if not due or any(wait.offset < step <= arrival.offset for step in limits.clock_steps):
        return
    if time < due - EARLY_MIN:
        detail = f"was due at {full_moment(due)}, delivered {duration(due - time)} earlier"
        yield Finding(Kind.EARLY_DELIVERY, offsets, detail)
    elif limits.worked_ms(due, time) > LATE_MIN:
        detail = f"was due at {full_moment(due)}, delivered {duration(time - due)} later"
        yield Finding(Kind.LATE_DELIVERY, offsets, detail)


def overdue(wait: LogEvent, bounds: LogBounds, limits: TimeLimits) -> str | None:
    """Say how long a message that was not delivered is overdue; None if it is not."""
    is_due = wait.due_ms and limits.worked_ms(wait.due_ms, limits.newest_ms) > OVERDUE_MIN
    if not is_due or bounds.hides(wait.offset):
        return None
    late = duration(limits.newest_ms - wait.due_ms)
    return (
        f"was due at {full_moment(wait.due_ms)}, not delivered by the end of the log ({late} later)"
    )


def differ(before: MessageContent, after: MessageContent, offset: int, bounds: LogBounds) -> bool:
    """Tell whether a message was changed on its way to the record at ``offset``."""
    if (before.topic, before.rest) != (after.topic, after.rest):
        return True
    return before.queue != after.queue and not _was_moved(before, after, offset, bounds)


def _was_moved(
    before: MessageContent, after: MessageContent, offset: int, bounds: LogBounds
) -> bool:
    """Tell whether a message went elsewhere because its topic has lost the queue.

    halfmq puts it into the queue that is left of its number when divided by the queues there are,
    RocketMQ into the queue that is gone. Source: ``broker/transaction/destination.py``.
    """
    if not bounds.records_rollback(offset) or 2 * after.queue >= before.queue:
        return False  # so small is the rest for any number of queues that excludes its own
    return not bounds.has_queue(before.topic, before.queue, offset)


def _repeated(
    waits: Sequence[LogEvent],
    pairs: Sequence[tuple[LogEvent, LogEvent]],
    unmatched: Sequence[LogEvent],
    bounds: LogBounds,
) -> Iterator[Finding]:
    """Find deliveries of one waiting record that are more than one."""
    places = {wait.reference for wait in waits}
    targets = {_target(wait) for wait in waits}
    again = [
        one
        for one in unmatched
        if (one.reference in places if one.reference < 0 else _target(one) in targets)
        # Another one may have waited where nothing can be read.
        and (one.reference < 0 or not bounds.hides(waits[0].offset, one.offset))
    ]
    if again:
        count = len(pairs) + len(again)
        originals = max(1, sum(not wait.number for wait in waits))
        detail = f"delivered {count} times instead of {originals}"
        offsets = sorted([*(one.offset for _, one in pairs), *(one.offset for one in again)])
        yield Finding(Kind.DELIVERED_TWICE, offsets, detail)


def _missing(
    waits: Sequence[LogEvent],
    pairs: Sequence[tuple[LogEvent, LogEvent]],
    bounds: LogBounds,
    limits: TimeLimits,
) -> Iterator[Finding]:
    originals = max(1, sum(not wait.number for wait in waits))
    delivered = {wait.offset for wait, _ in pairs}
    left = [wait for wait in waits if wait.offset not in delivered]
    for wait in left[max(0, len(left) - max(0, originals - len(pairs))) :]:
        if (detail := overdue(wait, bounds, limits)) is not None:
            yield Finding(Kind.OVERDUE_DELIVERY, [wait.offset], detail)


def _place(event: LogEvent) -> int:
    return event.offset


def _target(event: LogEvent) -> int | None:
    return event.content.topic if event.content else None
