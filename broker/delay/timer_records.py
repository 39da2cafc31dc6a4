"""The records of messages with a time of delivery: waiting, stored again, and recalled.

Such are plain messages with RocketMQ's ``TIMER_*``, and commits with a delay of halfmq's. The final
message of a delayed commit waits as a timer message, and is the decision all the same.

Source: RocketMQ ``HookUtils.transformTimerMessage``, ``RecallMessageProcessor``.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from halfmq.store.format.properties import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    get_property,
    without_properties,
)
from halfmq.store.format.record import Record
from halfmq.store.format.timers import TIMER_UNITS_MS, timer_out_ms
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.log.append_request import AppendRequest

from .levels import DELAY_MS_MAX, copy_of, with_properties
from .waiting import TIMER_QUEUE

COMMIT_DELAY_PREFIX: Final = b"TRANSACTION_DEL"
"""How both properties begin by which a transactional message requests a delay from its commit on;
one quick search finds either."""

_COMMIT_DELAYS: Final = (PROPERTY_TRANSACTION_DELAY_MS, PROPERTY_TRANSACTION_DELIVER_MS)
_MS_DIGITS_MAX: Final = 18  # of a number in one of them; the largest has room in 64 bits
_SHOWN_MAX: Final = 40  # characters of a value in a refusal
_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_DIGITS_MAX: Final = 19  # of a 64-bit number, with its sign


class TimerError(Exception):
    """A message cannot wait, or cannot be recalled; the text says why."""


class Waiting(NamedTuple):
    """A message as it is stored until its time of delivery."""

    request: AppendRequest
    due_ms: int  # by the wall clock


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
        return Waiting(_in_timer_topic(message, message.properties, due_ms), due_ms)

    def retried(self, message: AppendRequest, delay_ms: int) -> AppendRequest:
        """Return a retry as it is stored to be delivered after a delay.

        What the first sender asked for counts no more.

        Raises:
            TimerError: The delay is above the limit.
        """
        kept = without_properties(message.properties, (*TIMER_UNITS_MS, PROPERTY_DELAY))
        asked = PROPERTY_TIMER_DELAY_MS, str(delay_ms)
        plain = replace(message, properties=with_properties(kept, (asked,)))
        waiting = self.waiting(plain, *asked)
        return plain if waiting is None else waiting.request

    def after_commit(self, final: AppendRequest) -> AppendRequest:
        """Return the final message of a transaction as a commit must store it now.

        An invalid number counts as none: this broker refuses prepares with it, so another broker
        wrote the half.
        """
        delay, deliver = (get_property(final.properties, one.encode()) for one in _COMMIT_DELAYS)
        properties = without_properties(final.properties, _COMMIT_DELAYS)
        now_ms = self._now_ms()
        if deliver is not None and is_milliseconds(deliver):
            name, value, due_ms = PROPERTY_TIMER_DELIVER_MS, int(deliver), int(deliver)
        elif deliver is None and delay is not None and is_milliseconds(delay):
            value = min(int(delay), DELAY_MS_MAX)
            name, due_ms = PROPERTY_TIMER_DELAY_MS, now_ms + value
        else:
            return replace(final, properties=properties)
        if due_ms <= now_ms:
            return replace(final, properties=properties)
        return _in_timer_topic(final, with_properties(properties, ((name, str(value)),)), due_ms)


def is_milliseconds(value: str | bytes) -> bool:
    """Return whether a commit's delay is a valid number of ms: decimal digits, not too many."""
    return len(value) <= _MS_DIGITS_MAX and value.isascii() and value.isdigit()


def _in_timer_topic(message: AppendRequest, properties: bytes, due_ms: int) -> AppendRequest:
    changed = (
        (PROPERTY_TIMER_OUT_MS, str(timer_out_ms(due_ms))),
        (PROPERTY_REAL_TOPIC, message.topic),
        (PROPERTY_REAL_QID, str(message.queue_id)),
    )
    return replace(
        message,
        topic=TIMER_TOPIC,
        queue_id=TIMER_QUEUE,
        properties=with_properties(properties, changed),
    )


def link_of(place: int) -> int:
    """Return field 14 of a record that delivers, or recalls, the message at a place.

    Negative, so that it is no link to a half message. Clients cannot set this field.
    """
    return -1 - place


def again(record: Record, place: int, due_ms: int) -> AppendRequest:
    """Return the request to store a waiting record again, for the same time of delivery.

    A relative delay would begin again, so it becomes a time.
    """
    timers = (
        (PROPERTY_TIMER_DELIVER_MS, str(due_ms)),
        (PROPERTY_TIMER_OUT_MS, str(timer_out_ms(due_ms))),
    )
    kept = without_properties(record.properties, (*TIMER_UNITS_MS, PROPERTY_DELAY))
    return replace(
        copy_of(record, TIMER_TOPIC, TIMER_QUEUE),
        properties=with_properties(kept, timers),
        prepared_transaction_offset=link_of(place),
    )


def recall_of(record: Record, place: int, due_ms: int) -> AppendRequest:
    """Return the record of the recall of a waiting record.

    RocketMQ understands it, too, unless the message waits in the queue of a delay level.
    """
    changed = (
        (PROPERTY_TAGS, "_RECALL_TAG_"),
        (PROPERTY_TIMER_DEL_UNIQKEY, recalled_key(record)),
        (PROPERTY_TIMER_DELIVER_MS, str(due_ms)),
        (
            PROPERTY_TIMER_OUT_MS,
            text_of(record, PROPERTY_TIMER_OUT_MS) or str(timer_out_ms(due_ms)),
        ),
    )
    kept = (PROPERTY_UNIQ_KEY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QID)
    properties = "".join(f"{name}\x01{text_of(record, name)}\x02" for name in kept)
    return replace(
        copy_of(record, TIMER_TOPIC, TIMER_QUEUE),
        body=b"0",
        properties=with_properties(properties.encode(), changed),
        prepared_transaction_offset=link_of(place),
    )


def recalled_key(record: Record) -> str:
    """Return how a recall names a waiting record.

    Source: RocketMQ 5.3.3 ``TimerMessageStore.buildDeleteKey``.
    """
    return f"{text_of(record, PROPERTY_REAL_TOPIC)}+{text_of(record, PROPERTY_UNIQ_KEY)}"


def is_recall(properties: bytes) -> bool:
    """Return whether a record of the timer topic with these properties recalls another."""
    return get_property(properties, PROPERTY_TIMER_DEL_UNIQKEY.encode()) is not None


def text_of(record: Record, name: str) -> str:
    """Return a property of a record; empty if it has none."""
    return (get_property(record.properties, name.encode()) or b"").decode(errors="replace")
