"""The records of timer messages: waiting, stored again, and recalled.

Source: RocketMQ ``HookUtils.transformTimerMessage``, ``RecallMessageProcessor``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from halfmq.store.format.properties import (
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    get_property,
    without_properties,
)
from halfmq.store.format.record import Record
from halfmq.store.format.timers import TIMER_UNITS_MS, timer_due_ms, timer_out_ms
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.log.append_request import AppendRequest

from .levels import copy_of, with_properties

QUEUE: Final = 0  # of the timer topic; RocketMQ uses this one alone

_SHOWN_MAX: Final = 40  # characters of a value in a refusal
_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_DIGITS_MAX: Final = 19  # of a 64-bit number, with its sign


class TimerError(Exception):
    """A message cannot wait, or cannot be recalled; the text says why."""


class Waiting(NamedTuple):
    """A message as it is stored until its time of delivery."""

    request: AppendRequest
    due_ms: int  # by the wall clock
    wait_ms: int | None  # of a relative delay


class TimerRule:
    """Decides how long messages wait."""

    def __init__(self, max_delay_ms: int, *, now_ms: Callable[[], int]) -> None:
        self._max_delay_ms = max_delay_ms
        self._now_ms = now_ms

    def waiting(self, message: AppendRequest, name: str, value: str) -> Waiting | None:
        """Return how a message with a time of delivery is stored; None: as it is, to be delivered.

        Args:
            message: As its sender wants it delivered.
            name: The property that requests the time, of `TIMER_UNITS_MS`.
            value: Its value.

        Raises:
            TimerError: The value is no number, or above the limit.
        """
        limit = f"at most {self._max_delay_ms // 1_000} seconds from now (timerMaxDelaySec)"
        if not _NUMBER.fullmatch(value):
            raise TimerError(f"{name}={value[:_SHOWN_MAX]}: expected a whole number, {limit}")
        number = int(value[: _DIGITS_MAX + 1])
        now_ms = self._now_ms()
        is_relative = name != PROPERTY_TIMER_DELIVER_MS
        wait_ms = number * TIMER_UNITS_MS[name] - (0 if is_relative else now_ms)
        if wait_ms > self._max_delay_ms:
            raise TimerError(f"{name}={value[:_SHOWN_MAX]}: allowed is {limit}")
        if wait_ms <= 0:
            return None
        due_ms = now_ms + wait_ms
        changed = (
            (PROPERTY_TIMER_OUT_MS, str(timer_out_ms(due_ms))),
            (PROPERTY_REAL_TOPIC, message.topic),
            (PROPERTY_REAL_QID, str(message.queue_id)),
        )
        request = replace(
            message,
            topic=TIMER_TOPIC,
            queue_id=QUEUE,
            properties=with_properties(message.properties, changed),
        )
        return Waiting(request, due_ms, wait_ms if is_relative else None)


def due_ms_of(record: Record) -> int:
    """Return when a waiting record is due; 0 if it does not say."""
    return timer_due_ms(record.properties, record.store_timestamp) or 0


def link_of(queue_offset: int) -> int:
    """Return field 14 of a record that delivers, or recalls, the message at a timer queue offset.

    Negative, so that it is no link to a half message. Clients cannot set this field.
    """
    return -1 - queue_offset


def again(record: Record) -> AppendRequest:
    """Return the request to store a waiting record again, for the same time of delivery.

    A relative delay would begin again, so it becomes a time.
    """
    timers = ((PROPERTY_TIMER_DELIVER_MS, str(due_ms_of(record))),)
    return replace(
        copy_of(record, TIMER_TOPIC, QUEUE),
        properties=with_properties(without_properties(record.properties, TIMER_UNITS_MS), timers),
        prepared_transaction_offset=link_of(record.queue_offset),
    )


def recall_of(record: Record) -> AppendRequest:
    """Return the record of the recall of a waiting record; RocketMQ understands it, too."""
    changed = (
        (PROPERTY_TAGS, "_RECALL_TAG_"),
        (PROPERTY_TIMER_DEL_UNIQKEY, text_of(record, PROPERTY_UNIQ_KEY)),
        (PROPERTY_TIMER_DELIVER_MS, str(due_ms_of(record))),
    )
    kept = (PROPERTY_UNIQ_KEY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QID, PROPERTY_TIMER_OUT_MS)
    properties = "".join(f"{name}\x01{text_of(record, name)}\x02" for name in kept)
    return replace(
        copy_of(record, TIMER_TOPIC, QUEUE),
        body=b"0",
        properties=with_properties(properties.encode(), changed),
        prepared_transaction_offset=link_of(record.queue_offset),
    )


def is_recall(record: Record) -> bool:
    """Return whether a record of the timer topic recalls another."""
    return get_property(record.properties, PROPERTY_TIMER_DEL_UNIQKEY.encode()) is not None


def text_of(record: Record, name: str) -> str:
    """Return a property of a record; empty if it has none."""
    return (get_property(record.properties, name.encode()) or b"").decode(errors="replace")
