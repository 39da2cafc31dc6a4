"""Rules about finals and deliveries: what consumers got of a message, and what they should get."""

from collections.abc import Iterable, Iterator
from typing import Final

from ..source.parts import Part
from ..times import duration, full_moment
from .histories import MessageHistory
from .model import Finding, Kind, LogBounds, LogEvent, MessageContent, Terms
from .rules_decisions import Outcome

_DELIVERED_WITHIN: Final = 5_000  # ms from when a delayed commit is due; brokers look each second
_FIELDS: Final = {
    "body": "body_crc",
    "length": "body_size",
    "topic": "topic",
    "keys": "keys",
    "tags": "tags",
}


def faulty_deliveries(outcome: Outcome, bounds: LogBounds, terms: Terms) -> Iterator[Finding]:
    """Find what was delivered otherwise than once, as its half says, by a proper record."""
    for message in outcome.history.messages.values():
        yield from _unmarked(message)
        yield from _altered(message, bounds)
        waits = [final for final in message.commits if final.part is Part.WAITING]
        if not waits and message.waiting and not message.commits:
            yield _unlinked(message, message.waiting[0])  # the first of them is the final
            waits = message.waiting[:1]
        if waits:
            yield from _waited(message, waits, bounds, terms)
        else:
            yield from _unlinked_deliveries(message, bounds)


def _unmarked(message: MessageHistory) -> Iterator[Finding]:
    for final in message.unmarked:
        detail = "it names its half message, but its flags lack the bits of a committed message"
        halves = [message.half.offset] if message.half else []
        yield Finding(Kind.UNMARKED_FINAL, [*halves, final.offset], detail)


def _unlinked(message: MessageHistory, record: LogEvent) -> Finding:
    detail = "the message was delivered by a record that is not its final message"
    halves = [message.half.offset] if message.half else []
    return Finding(Kind.UNLINKED_DELIVERY, [*halves, record.offset], detail)


def _unlinked_deliveries(message: MessageHistory, bounds: LogBounds) -> Iterator[Finding]:
    half = message.half
    if half is None or message.damaged:
        return
    for record in message.delivered:
        # A commit with a delay whose final cannot be read looks the same.
        if message.decided or not bounds.hides(half.offset, record.offset):
            yield _unlinked(message, record)


# --- the content


def _altered(message: MessageHistory, bounds: LogBounds) -> Iterator[Finding]:
    by_offset = {half.offset: half for half in message.halves}
    for final in (*message.commits, *message.unmarked, *_arrivals(message)):
        half = by_offset.get(final.reference, message.half)
        if half is None or not (half.sound and final.sound and half.content and final.content):
            continue
        differ = list(_differences(half.content, final, bounds))
        if differ:
            detail = f"it differs from its half message in {', '.join(differ)}"
            yield Finding(Kind.ALTERED_FINAL, [half.offset, final.offset], detail)


def _arrivals(message: MessageHistory) -> list[LogEvent]:
    waited = message.waiting or any(final.part is Part.WAITING for final in message.commits)
    return message.delivered if waited else []


def _differences(half: MessageContent, event: LogEvent, bounds: LogBounds) -> Iterator[str]:
    final = event.content
    assert final is not None
    for name, attribute in _FIELDS.items():
        if getattr(half, attribute) != getattr(final, attribute):
            yield name
    if half.queue != final.queue and not _was_moved(half, final.queue, event.offset, bounds):
        yield f"queue ({final.queue} instead of {half.queue})"


def _was_moved(half: MessageContent, queue: int, offset: int, bounds: LogBounds) -> bool:
    """Tell whether a message went elsewhere because its topic has lost the queue.

    halfmq puts it into the queue that is left of its number when divided by the queues there are,
    RocketMQ into the queue that is gone. Source: ``broker/transaction/destination.py``.
    """
    if not bounds.records_rollback(offset) or 2 * queue >= half.queue:
        return False  # so small is the rest for any number of queues that excludes its own
    present = (bounds.write_queues or {}).get(half.topic)
    return present is None or half.queue >= present


# --- delayed commits


def _waited(
    message: MessageHistory, waits: list[LogEvent], bounds: LogBounds, terms: Terms
) -> Iterable[Finding]:
    """Judge the delivery of a delayed commit: once, when it is due."""
    if len(message.delivered) > len(waits):
        detail = f"delivered {len(message.delivered)} times instead of {len(waits)}"
        offsets = [record.offset for record in message.delivered]
        yield Finding(Kind.DELIVERED_TWICE, offsets, detail)
    last = max((*waits, *message.waiting), key=lambda event: event.offset)
    if message.delivered or not 0 < last.due_ms < terms.newest_ms - _DELIVERED_WITHIN:
        return
    if not bounds.hides(last.offset):
        late = duration(terms.newest_ms - last.due_ms)
        detail = (
            f"was due at {full_moment(last.due_ms)}, not delivered by the end of the log"
            f" ({late} later)"
        )
        halves = [message.half.offset] if message.half else []
        yield Finding(Kind.OVERDUE_DELIVERY, [*halves, last.offset], detail)
