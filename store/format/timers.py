"""When a timer message is due: a message that its sender wants delivered at a chosen time.

A waiting timer message lies in ``rmq_sys_wheel_timer`` with its real topic and queue in two
properties, as RocketMQ stores it. ``TIMER_OUT_MS`` is the due time, cut to a second below; the
sender's property has the exact one. Entries of that queue hold the due time instead of a tag, and
whether it is relative, so that a start reads the waiting messages from the queue alone.

Source: RocketMQ ``HookUtils.transformTimerMessage``, ``TimerMessageStore``, ``TimerCheckpoint``.
"""

from struct import Struct
from typing import Final, NamedTuple

from .properties import (
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    get_property,
)

PRECISION_MS: Final = 1_000  # of TIMER_OUT_MS. Source: `timerPrecisionMs`

TIMER_UNITS_MS: Final = {
    PROPERTY_TIMER_DELAY_SEC: 1_000,
    PROPERTY_TIMER_DELAY_MS: 1,
    PROPERTY_TIMER_DELIVER_MS: 1,
}
"""The properties that request a time of delivery, in order of precedence, with their units."""

_OUT: Final = PROPERTY_TIMER_OUT_MS.encode()
_UNITS: Final = tuple((name.encode(), unit) for name, unit in TIMER_UNITS_MS.items())
_DELIVER: Final = PROPERTY_TIMER_DELIVER_MS.encode()


_HASH_MAX: Final = (1 << 31) - 1


_RELATIVE: Final = 1 << 60  # added to the due time of a message that asks for a delay


class EntryTime(NamedTuple):
    """What the queue entry of a waiting timer message says."""

    due_ms: int
    is_relative: bool  # whether the message asks for a delay, not for a time by the clock


def entry_time(tags_code: int) -> EntryTime | None:
    """Return the due time in a queue entry; None if RocketMQ wrote it: that is a tag's hash."""
    if tags_code <= _HASH_MAX:
        return None
    return EntryTime(tags_code & ~_RELATIVE, tags_code >= _RELATIVE)


def entry_code(properties: bytes, store_timestamp: int) -> int | None:
    """Return what the queue entry of a timer message holds; None for any other message."""
    due_ms = timer_due_ms(properties, store_timestamp)
    if due_ms is None or timer_delay_ms(properties) is None:
        return due_ms
    return due_ms | _RELATIVE


def timer_out_ms(due_ms: int) -> int:
    """Return ``TIMER_OUT_MS`` for a due time; an exact second belongs to the one before."""
    return (due_ms - 1) // PRECISION_MS * PRECISION_MS


def timer_due_ms(properties: bytes, store_timestamp: int) -> int | None:
    """Return the due time in ms since 1970 of a waiting timer message; None for any other record.

    A relative delay counts from ``store_timestamp``. A record that RocketMQ has stored again, since
    it waits for days, keeps its first ``TIMER_OUT_MS``, and that decides.
    """
    out = get_property(properties, _OUT)
    if out is None or not out.isdigit():
        return None
    out_ms = int(out)
    for name, unit in _UNITS:
        value = get_property(properties, name)
        if value is not None and value.isdigit():
            due_ms = int(value) * unit + (0 if name == _DELIVER else store_timestamp)
            return min(max(due_ms, out_ms + 1), out_ms + PRECISION_MS)
    return out_ms + PRECISION_MS


def timer_delay_ms(properties: bytes) -> int | None:
    """Return the delay that a timer message asks for; None if it asks for a time by the clock."""
    for name, unit in _UNITS:
        value = get_property(properties, name)
        if value is not None and value.isdigit():
            return None if name == _DELIVER else int(value) * unit
    return None


# Time of the last slot that was read, end of the timer log, offset in the timer queue (twice), and
# the version of a table: state version, time, counter.
_CHECKPOINT: Final = Struct(">qqqqqqq")
_CHECKPOINT_SIZE: Final = 4_096


def delivered_ms(checkpoint: bytes) -> int:
    """Return the time up to which RocketMQ has delivered messages, from its ``timercheck`` file.

    A file that halfmq wrote, or a RocketMQ that has read nothing yet, has no end of a timer log.
    """
    if len(checkpoint) < _CHECKPOINT.size:
        return 0
    read_ms, log_end, *_ = _CHECKPOINT.unpack_from(checkpoint)
    return int(read_ms) if log_end else 0


def timer_checkpoint(now_ms: int, queue_offset: int) -> bytes:
    """Return the ``timercheck`` file that lets RocketMQ begin at an offset of the timer queue."""
    second_ms = now_ms // PRECISION_MS * PRECISION_MS
    fields = _CHECKPOINT.pack(second_ms, 0, queue_offset, queue_offset, 0, now_ms, 1)
    return fields.ljust(_CHECKPOINT_SIZE, b"\0")
