"""Rules about finals and deliveries: what consumers got of a message, and what they should get."""

from collections.abc import Iterable, Iterator
from typing import Final

from ...log.transaction_parts import Part
from ...times import duration
from .decisions import Outcome
from .deliveries import differ, mistimed, overdue
from .histories import MessageHistory
from .model import Finding, Kind, LogBounds, LogEvent, TimeLimits

CLOCK_STEP_MIN: Final = 1_000  # ms; clocks are corrected by less all the time


def faulty_deliveries(outcome: Outcome, bounds: LogBounds, limits: TimeLimits) -> Iterator[Finding]:
    """Find what was delivered otherwise than once, as its half says, by a proper record."""
    for message in outcome.history.messages.values():
        yield from _unmarked(message)
        yield from _altered(message, bounds)
        yield from _before_the_half(message, limits)
        waits = [final for final in message.commits if final.part is Part.WAITING]
        if not waits and message.waiting and not message.commits:
            first = message.waiting[0]  # it must be the final, unless that is lost
            if message.half is None or not bounds.hides(message.half.offset, first.offset):
                yield _unlinked(message, first)
            waits = [first]
        if waits:
            yield from _waited(message, waits, bounds, limits)
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
        own = [half.offset] if final.reference in by_offset else by_offset
        names_another = final.half_id is not None and final.half_id not in own
        if names_another or differ(half.content, final.content, final.offset, bounds):
            detail = "it differs from its half message"  # in what is looked up for the report
            yield Finding(Kind.ALTERED_FINAL, [half.offset, final.offset], detail)


def _arrivals(message: MessageHistory) -> list[LogEvent]:
    waited = message.waiting or any(final.part is Part.WAITING for final in message.commits)
    return message.delivered if waited else []


def _before_the_half(message: MessageHistory, limits: TimeLimits) -> Iterator[Finding]:
    """Find finals that were stored before their half, though they lie after it."""
    by_offset = {half.offset: half for half in message.halves}
    for final in message.commits:
        half = by_offset.get(final.reference)
        if half is None or half.time_ms - final.time_ms <= CLOCK_STEP_MIN:
            continue
        if not any(half.offset < step <= final.offset for step in limits.clock_steps):
            early = duration(half.time_ms - final.time_ms)
            detail = f"its final message was stored {early} before it, by the broker's clock"
            yield Finding(Kind.HALF_AFTER_FINAL, [half.offset, final.offset], detail)


# --- delayed commits


def _waited(
    message: MessageHistory, waits: list[LogEvent], bounds: LogBounds, limits: TimeLimits
) -> Iterable[Finding]:
    """Judge the delivery of a delayed commit: once, when it is due."""
    if len(message.delivered) > len(waits):
        detail = f"delivered {len(message.delivered)} times instead of {len(waits)}"
        offsets = [record.offset for record in message.delivered]
        yield Finding(Kind.DELIVERED_TWICE, offsets, detail)
    for wait, arrival in zip(waits, message.delivered, strict=False):
        own = [one for one in message.waiting if one.offset < arrival.offset]
        yield from mistimed(own[-1] if len(waits) == 1 and own else wait, arrival, limits)
    last = max((*waits, *message.waiting), key=lambda event: event.offset)
    if not message.delivered and (late := overdue(last, bounds, limits)) is not None:
        halves = [message.half.offset] if message.half else []
        yield Finding(Kind.OVERDUE_DELIVERY, [*halves, last.offset], late)
