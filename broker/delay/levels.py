"""Delay levels: the delay that a message requests, and its form while it waits.

A delayed message is stored in ``SCHEDULE_TOPIC_XXXX``, in the queue of its level, with its real
topic and queue in two properties.

Source: RocketMQ ``ScheduleMessageService``, ``HookUtils.transformDelayLevelMessage``.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from halfmq.store.config import DELAY_LEVELS_MS
from halfmq.store.format.flags import TransactionType, with_transaction_type
from halfmq.store.format.properties import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    get_property,
    tags_code,
    without_properties,
)
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC, SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest

LEVELS_MAX: Final = 64
"""Levels that may be configured; each is a queue."""

DELAY_MS_MAX: Final = 40 * 86_400_000
"""Longest delay of a level, and of a commit, ms. Each three days a message that waits is stored
again, so a longer delay is a mistake."""

_LEVEL: Final = re.compile(r"[+-]?[0-9]{1,9}")
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def _shown(delay_ms: int) -> str:
    unit = max(
        (unit for unit in _UNITS_MS if delay_ms % _UNITS_MS[unit] == 0), key=_UNITS_MS.__getitem__
    )
    return f"{delay_ms // _UNITS_MS[unit]}{unit}"


DEFAULT_LEVELS: Final = " ".join(map(_shown, DELAY_LEVELS_MS))
"""The levels that the store assumes, as the text of `messageDelayLevel`."""


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delays in ms of the levels 1, 2, … from a text like `1s 5s 1m 2h`.

    Raises:
        ValueError: There is none or too many, or one is no number with a unit of s, m, h or d.
    """
    levels = tuple(_parse_delay(part, level) for level, part in enumerate(text.split(), 1))
    if not 0 < len(levels) <= LEVELS_MAX:
        raise ValueError(f"{len(levels)} delay levels, allowed are 1 to {LEVELS_MAX}")
    return levels


def _parse_delay(part: str, level: int) -> int:
    number, unit = part[:-1], part[-1]
    if unit not in _UNITS_MS or not (number.isascii() and number.isdigit()):
        raise ValueError(f"delay level {level} is {part!r}, expected a number with s, m, h or d")
    delay_ms = int(number) * _UNITS_MS[unit]
    if not 0 < delay_ms <= DELAY_MS_MAX:
        raise ValueError(f"delay level {level} is {part!r}, allowed is up to 40 days")
    return delay_ms


class DelayLevels:
    """The configured levels, and how messages are rewritten for the schedule topic."""

    def __init__(self, levels_ms: Sequence[int]) -> None:
        self.levels_ms = tuple(levels_ms)

    def delay_ms(self, level: int) -> int:
        """Return the delay of a level; a level beyond the last has that of the last."""
        return self.levels_ms[min(level, len(self.levels_ms)) - 1]

    def delayed(self, message: AppendRequest) -> AppendRequest:
        """Return the request to store a message in its delay level (property `DELAY`).

        Without a positive level it is returned unchanged. A level beyond the last becomes the last.
        """
        level = min(delay_level(message.properties), len(self.levels_ms))
        if level <= 0:
            return message
        return replace(
            message,
            topic=SCHEDULE_TOPIC,
            queue_id=level - 1,
            properties=with_properties(
                message.properties,
                (
                    (PROPERTY_DELAY, str(level)),
                    (PROPERTY_REAL_TOPIC, message.topic),
                    (PROPERTY_REAL_QID, str(message.queue_id)),
                ),
            ),
        )


def delay_level(properties: bytes) -> int:
    """Return the level that the properties request; 0 for none or an invalid number."""
    return level_of(get_property(properties, PROPERTY_DELAY.encode()))


def level_of(delay: bytes | None) -> int:
    """Return the level that the property DELAY names; 0 for none or an invalid number."""
    try:
        return int(delay or b"0")
    except ValueError:
        return 0


def is_level(delay: str) -> bool:
    """Return whether the property DELAY is a number: a level, or 0 or less for none."""
    return _LEVEL.fullmatch(delay) is not None


def with_properties(properties: bytes, changed: Iterable[tuple[str, str]]) -> bytes:
    """Return the property string with some properties set; the others keep order and bytes."""
    pairs = tuple(changed)
    kept = without_properties(properties, (name for name, _ in pairs))
    return kept + b"".join(f"{name}\x01{value}\x02".encode() for name, value in pairs)


def restored(record: Record) -> AppendRequest | None:
    """Return the request that delivers a delayed message; None if it has no destination.

    It keeps `DELAY` and the two properties, as RocketMQ does; a delivery is not delayed again.
    """
    topic = (get_property(record.properties, b"REAL_TOPIC") or b"").decode(errors="replace")
    queue_text = get_property(record.properties, b"REAL_QID") or b""
    if not topic or topic == HALF_TOPIC or not queue_text.isdigit():
        return None
    return copy_of(record, topic, int(queue_text))


def copy_of(record: Record, topic: str, queue_id: int) -> AppendRequest:
    """Return the request to store the message of a record again."""
    return AppendRequest(
        topic=topic,
        queue_id=queue_id,
        body=record.body,
        properties=record.properties,
        tags_code=tags_code(record.properties),
        flag=record.flag,
        # A committed message has decided its transaction where it was stored first. This is a
        # copy, and with these bits it would look like a second decision.
        sys_flag=with_transaction_type(record.sys_flag, TransactionType.NONE),
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
    )
