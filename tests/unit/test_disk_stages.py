"""How scarce a disk is, and when it will be full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.broker.config import DiskConfig
from halfmq.broker.disk_stages import SLOW_BYTES_MIN, SLOW_LASTS_S, Forecast, Limits, Stage

GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "left", "expected"),
    [
        (1000 * GIB, 300 * GIB, Stage.PLENTY),
        (1000 * GIB, 65 * GIB, Stage.PLENTY),  # 93.5 % in use, and yet a lot
        (1000 * GIB, 63 * GIB, Stage.WARN),
        (1000 * GIB, 7 * GIB, Stage.SLOW),
        (1000 * GIB, GIB, Stage.REFUSE),
        (10 * GIB, 3 * GIB, Stage.PLENTY),  # a small disk, used up to 70 %
        (10 * GIB, 2 * GIB, Stage.WARN),
        (10 * GIB, int(1.2 * GIB), Stage.SLOW),
        (10 * GIB, GIB - 1, Stage.REFUSE),
        (10 * GIB, -GIB, Stage.REFUSE),  # others have taken what the reserve lacks
    ],
)
def test_a_stage_begins_by_share_and_by_number(size: int, left: int, expected: Stage) -> None:
    """Large disks go by bytes, small ones by percent, with the same defaults."""
    assert Limits(DiskConfig(), size).stage(left, Stage.PLENTY) is expected


def test_a_later_stage_brings_the_earlier_along() -> None:
    """A configuration of RocketMQ may name one ratio alone."""
    limits = Limits(DiskConfig(warn_ratio=88, refuse_ratio=80), 100 * GIB)

    assert (limits.warn, limits.slow, limits.refuse) == (12 * GIB, 8 * GIB, 2 * GIB)
    small = Limits(DiskConfig(warn_ratio=88, refuse_ratio=80), GIB)
    assert small.warn == small.slow == small.refuse == GIB // 5


def test_stages_can_be_switched_off() -> None:
    """Then only the disk itself refuses."""
    limits = Limits(DiskConfig(warn_ratio=100, slow_bytes=0, refuse_ratio=100), 10 * GIB)

    assert limits.stage(0, Stage.PLENTY) is Stage.PLENTY
    assert limits.reserve == 0


@given(size=st.integers(1 << 20, 1 << 50))
def test_the_reserve_fits_into_what_is_left(size: int) -> None:
    """Holding it must not by itself leave decisions without room."""
    limits = Limits(DiskConfig(), size)

    assert 0 <= limits.reserve <= 256 << 20
    assert limits.reserve <= limits.refuse // 2 + 1
    assert limits.refuse <= limits.slow <= limits.warn


def test_a_stage_ends_a_little_above_where_it_began() -> None:
    """What is deleted and written around a limit makes no stream of news."""
    limits = Limits(DiskConfig(), 1000 * GIB)

    assert limits.stage(2 * GIB + 1, Stage.REFUSE) is Stage.REFUSE
    assert limits.stage(3 * GIB, Stage.REFUSE) is Stage.SLOW
    assert limits.stage(65 * GIB, Stage.REFUSE) is Stage.WARN
    assert limits.stage(300 * GIB, Stage.REFUSE) is Stage.PLENTY
    assert limits.stage(GIB, Stage.WARN) is Stage.REFUSE  # what begins, begins at once


def test_the_speed_allowed_makes_the_rest_last() -> None:
    """At no time less than ten minutes, until it is not worth while any more."""
    limits = Limits(DiskConfig(), 1000 * GIB)

    assert limits.slow_rate(8 * GIB) == int(6 * GIB / SLOW_LASTS_S)
    assert limits.slow_rate(5 * GIB) == int(3 * GIB / SLOW_LASTS_S)
    assert limits.slow_rate(2 * GIB) == SLOW_BYTES_MIN


def test_a_forecast_goes_by_the_last_ten_minutes() -> None:
    """A burst an hour ago says nothing about the rest of the day."""
    forecast = Forecast()
    left = 1_000_000
    for second in range(100):
        left -= 5_000 if second < 50 else 0
        forecast.note(float(second), left)
    assert forecast.seconds_until(0) is not None
    for second in range(100, 2_000):
        left -= 10
        forecast.note(float(second), left)

    assert forecast.rate == pytest.approx(10, rel=0.01)
    assert forecast.seconds_until(left - 3_600) == pytest.approx(360, abs=4)
    assert len(forecast._seen) < 100


def test_without_shrinking_there_is_no_end() -> None:
    """Also with too little to go by."""
    forecast = Forecast()
    assert forecast.seconds_until(0) is None
    forecast.note(0.0, 100)
    assert forecast.seconds_until(0) is None
    forecast.note(20.0, 100)
    assert forecast.seconds_until(0) is None
    forecast.note(40.0, 200)
    assert forecast.seconds_until(0) is None
