"""Times and time spans as people read them."""

from datetime import UTC, datetime
from typing import Final

SECOND: Final = 1_000  # ms
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
_TIME_MAX: Final = 253_402_300_799_999  # ms, the end of the year 9999
_UNITS: Final = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"))


def duration(ms: int) -> str:
    """Return a time span in the unit that a person would use."""
    for size, unit in _UNITS:
        if abs(ms) >= size:
            return f"{ms / size:.3g} {unit}" if abs(ms) < 1_000 * size else f"{ms // size:,} {unit}"
    return f"{ms} ms"


def moment(ms: int, width_ms: int = SECOND) -> str:
    """Return a time in UTC, as exactly as intervals of a width need."""
    then = _date(ms)
    if width_ms >= DAY:
        return f"{then:%Y-%m-%d}"
    if width_ms >= MINUTE:
        return f"{then:%m-%d %H:%M}"
    if width_ms >= SECOND:
        return f"{then:%H:%M:%S}"
    return f"{then:%H:%M:%S}.{ms % 1_000:03}"


def full_moment(ms: int) -> str:
    """Return a date and a time in UTC."""
    return f"{_date(ms):%Y-%m-%d %H:%M:%S} UTC"


def _date(ms: int) -> datetime:
    return datetime.fromtimestamp(min(max(ms, 0), _TIME_MAX) / 1_000, UTC)
