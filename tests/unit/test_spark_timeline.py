"""Transactions counted over time; neither Java nor Spark is needed here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.spark_jobs.audit.judge import State
from halfmq.spark_jobs.audit.overview import Checks
from halfmq.spark_jobs.audit.timeline import BINS_MAX, SHOWN, Scale, counted, merged, scale
from tests.support import golden_store
from tests.support.auditing import audit_here
from tests.support.log_writer import START, LogWriter, Ours

HOUR = 3_600_000  # ms
STATES = list(State)


@given(begin=st.integers(0, 10**14), span=st.integers(0, 10**14))
def test_any_time_is_divided_into_few_intervals(begin: int, span: int) -> None:
    """The first and the last record are in them, and widths are those that people count in."""
    found = scale(begin, begin + span, begin + span)

    assert 1 <= found.bins <= BINS_MAX
    assert found.start_ms <= begin < found.start_ms + found.width_ms
    end = found.start_ms + found.bins * found.width_ms
    assert end - found.width_ms <= begin + span < end
    assert found.start_ms % found.width_ms == 0


@given(
    transactions=st.lists(
        st.tuples(st.sampled_from(STATES), st.integers(-1, 9_999), st.integers(-1, 9_999)),
        max_size=30,
    ),
    cut=st.integers(0, 30),
)
def test_counts_add_up(transactions: list[tuple[State, int, int]], cut: int) -> None:
    """Whatever the buckets were: each transaction with a half counts once, at its time."""
    on = Scale(start_ms=0, width_ms=1_000, bins=10, now_ms=9_999)

    timeline, ages = merged([packed(transactions[:cut], on), packed(transactions[cut:], on)], on)

    known = [one for one in transactions if one[1] >= 0]
    for state in SHOWN:
        times = Counter(prepared // 1_000 for what, prepared, _ in known if what is state)
        assert timeline.prepared[state] == [times[place] for place in range(10)]
    times = Counter(decided // 1_000 for _, _, decided in known if decided >= 0)
    assert timeline.decided == [times[place] for place in range(10)]
    waiting = [what for what, _, _ in known if what in {State.PENDING, State.PARKED}]
    assert {state: sum(counts) for state, counts in ages.counts.items()} == {
        State.PENDING: waiting.count(State.PENDING),
        State.PARKED: waiting.count(State.PARKED),
    }


def packed(transactions: list[tuple[State, int, int]], on: Scale) -> bytes:
    rows = np.array(
        [(STATES.index(state), *times) for state, *times in transactions], dtype=np.int64
    ).reshape(-1, 3)
    return counted(rows[:, 0], rows[:, 1], rows[:, 2], on)


def test_a_wrong_clock_moves_a_transaction_to_the_edge() -> None:
    """It is not lost, and the chart is not stretched to a time that never was."""
    on = Scale(start_ms=5_000, width_ms=1_000, bins=3, now_ms=8_000)

    timeline, ages = merged([packed([(State.PENDING, 1, -1), (State.PENDING, 10**14, -1)], on)], on)

    assert timeline.prepared[State.PENDING] == [1, 0, 1]
    assert sum(ages.counts[State.PENDING]) == 2


@pytest.mark.parametrize("wrong", [1, START - 10**9])
def test_one_wrong_clock_does_not_stretch_the_chart(wrong: int, tmp_path: Path) -> None:
    """No checksum covers the time of a record."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    for place in range(20):
        right = log.now
        log.now = wrong if place == 7 else right
        half = transactions.half(f"KEY-{place}")
        log.now = right + 1
        transactions.commit(half)
    log.close()

    timeline = audit_here(tmp_path).timeline

    end = timeline.start_ms + timeline.width_ms * len(timeline.decided)
    assert START <= timeline.start_ms < end <= log.now + 60
    assert sum(timeline.prepared[State.COMMITTED]) == 20


def test_ages_count_to_where_the_audit_stands(tmp_path: Path) -> None:
    """A half that waits for two hours is among those of one to six."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    transactions.half("KEY-1")
    transactions.commit(transactions.half("KEY-2"))
    log.now += 2 * HOUR
    transactions.half("KEY-3")
    transactions.commit(transactions.half("KEY-4"))
    log.close()

    found = audit_here(tmp_path)

    assert found.open_ages.counts[State.PENDING] == [1, 0, 0, 1, 0, 0, 0]
    assert sum(found.timeline.prepared[State.COMMITTED]) == 2
    assert found.timeline.undecided[0] == 1
    assert found.timeline.undecided[-1] == 2
    later = audit_here(tmp_path, checks=Checks(as_of_ms=log.now + 240 * HOUR))
    assert later.open_ages.counts[State.PENDING] == [0, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("name", ["tx-midway-clean", "tx-midway-killed", "v4-tx"])
def test_every_transaction_of_a_broker_is_counted(name: str, tmp_path: Path) -> None:
    """The numbers over time sum up to the states, and what is open to the pending and parked."""
    found = audit_here(golden_store.unpack(name, tmp_path).root)

    assert {state: sum(row) for state, row in found.timeline.prepared.items()} == {
        state: found.states[state] for state in SHOWN
    }
    still_open = found.states[State.PENDING] + found.states[State.PARKED]
    assert found.timeline.undecided[-1] == still_open
    assert len(found.timeline.decided) <= BINS_MAX
