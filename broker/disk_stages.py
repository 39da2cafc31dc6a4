"""How scarce the disk is, what follows from it, and when it will be full.

A stage begins when less is left than its share of the disk *and* less than its number of bytes: a
tenth of a large disk is no reason for alarm, and two gigabytes may be all that a small one has.

| Stage | What happens |
|---|---|
| PLENTY | nothing |
| WARN | it is logged, with a forecast; old files are deleted at any hour; the reserve is held |
| SLOW | messages are taken only so fast that the rest lasts for ten minutes, again and again |
| REFUSE | messages and halves are refused; all else goes on |
| RESERVE | the disk is full: decisions alone are written, from the reserve |

Nothing here deletes messages that are young enough to be kept: RocketMQ does, from 85 % on.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final

from .config import DiskConfig

HYSTERESIS: Final = 0.05
"""Part of a stage's limit that must be left above it before it ends: stages do not flicker."""

RESERVE_PART_MAX: Final = 0.5
"""Part of what is left in the REFUSE stage that the reserve may have: a small disk has a small one.
"""

FORECAST_S: Final = 600.0
"""Seconds that a forecast looks back."""

FORECAST_STEP_S: Final = 10.0
"""Seconds between two numbers that it keeps."""

SLOW_LASTS_S: Final = 600.0
"""Seconds for which there is room until REFUSE, at the speed allowed in the SLOW stage. As the room
shrinks, so does the speed: operators get hours."""

SLOW_BYTES_MIN: Final = 64 << 10
"""Bytes in a second that are allowed in any case: below that, to refuse is more honest."""


class Stage(IntEnum):
    """How scarce the disk is."""

    PLENTY = 0
    WARN = 1
    SLOW = 2
    REFUSE = 3
    RESERVE = 4


class Limits:
    """Below how many bytes the stages begin, on a disk of some size."""

    def __init__(self, config: DiskConfig, size: int) -> None:
        shares = (
            (config.warn_ratio, config.warn_bytes),
            (config.slow_ratio, config.slow_bytes),
            (config.refuse_ratio, config.refuse_bytes),
        )
        warn, slow, self.refuse = (min(size * (100 - ratio) // 100, left) for ratio, left in shares)
        self.slow = max(slow, self.refuse)
        self.warn = max(warn, self.slow)
        self.reserve = min(config.reserve_bytes, int(self.refuse * RESERVE_PART_MAX))

    def stage(self, left: int, before: Stage) -> Stage:
        """Return the stage that so many bytes mean; one that ends needs some more than it began."""
        found = self._plain_stage(left)
        if found < before < Stage.RESERVE:
            return min(before, self._plain_stage(int(left / (1 + HYSTERESIS))))
        return found

    def _plain_stage(self, left: int) -> Stage:
        if left < self.refuse:
            return Stage.REFUSE
        if left < self.slow:
            return Stage.SLOW
        return Stage.WARN if left < self.warn else Stage.PLENTY

    def slow_rate(self, left: int) -> int:
        """Return how many bytes of messages are taken in a second of the SLOW stage."""
        return max(int((left - self.refuse) / SLOW_LASTS_S), SLOW_BYTES_MIN)


class Forecast:
    """When the disk will be full if it goes on as in the last ten minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # seconds, bytes left

    def note(self, now: float, left: int) -> None:
        """Take note of how many bytes are left, at a time in seconds."""
        seen = self._seen
        if len(seen) < 2 or now - seen[-2][0] >= FORECAST_STEP_S:
            seen.append((now, left))
        else:
            seen[-1] = (now, left)
        while now - seen[0][0] > FORECAST_S:
            seen.popleft()

    @property
    def rate(self) -> float:
        """Bytes in a second by which what is left has shrunk; negative if it grows."""
        if len(self._seen) < 2:
            return 0.0
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (before - after) / (last - first) if last > first else 0.0

    def seconds_until(self, limit: int) -> int | None:
        """Return in how many seconds only ``limit`` bytes will be left; None: not at this rate."""
        rate = self.rate
        if rate <= 0:
            return None
        return max(int((self._seen[-1][1] - limit) / rate), 0)
