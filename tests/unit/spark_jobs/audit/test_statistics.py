"""How the time of a log is divided for counting; neither Java nor Spark is needed here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmq.spark_jobs.audit.statistics import BINS_MAX, scale


@given(begin=st.integers(0, 10**14), span=st.integers(0, 10**14))
def test_any_time_is_divided_into_few_intervals(begin: int, span: int) -> None:
    """The first and the last record are in them, and widths are those that people count in."""
    found = scale(begin, begin + span, begin + span)

    assert 1 <= found.bins <= BINS_MAX
    assert found.start_ms <= begin < found.start_ms + found.width_ms
    end = found.start_ms + found.bins * found.width_ms
    assert end - found.width_ms <= begin + span < end
    assert found.start_ms % found.width_ms == 0
