"""What the benchmarks of pauses, cold reads and recovery make of what they have measured."""

import argparse
from pathlib import Path

import pytest

from benchmarks import cold, pauses, recovery
from benchmarks.generator import Counters, Latency, Result, build_generator
from benchmarks.observed import BEAT_S, Observed, Pause, Span, Tracer
from benchmarks.recovery_steps import KINDS, messages
from benchmarks.stills import Still, Stills
from benchmarks.watched import Phase, row_of

NOTHING = Counters(sent=0, ok=0, failed=0, ended=0, messages=0, bytes=0, failed_by_code={})


def observed(*found: Pause, spans: tuple[Span, ...] = ()) -> Observed:
    return Observed(beats=0, pauses=list(found), spans=list(spans), missing=[])


def result(p99: float) -> Result:
    return Result(
        scenario="send",
        message="lean",
        header="json",
        connections=16,
        window=1,
        topics=1,
        queues=8,
        body_size=1024,
        units=1,
        frame_size=1300,
        rate_due=0.0,
        total=NOTHING,
        measured=Counters(
            sent=100, ok=100, failed=0, ended=0, messages=100, bytes=0, failed_by_code={}
        ),
        lost=0,
        unmatched=0,
        server_requests=0,
        one_way_answers=0,
        first_refusal="",
        seconds=1.0,
        own_cpu_seconds=0.0,
        watched_cpu_seconds=0.0,
        machine_cpu_seconds=0.0,
        latency_us=Latency(p50=p99 / 2, p99=p99, max=p99),
    )


def test_a_phase_has_the_pauses_that_ended_in_it() -> None:
    """What happened before and behind a load is none of its."""
    found = observed(
        Pause(9.9, 0.5, 0.0, 0.0), Pause(10.5, 0.030, 0.001, 0.0), Pause(12.1, 0.5, 0.0, 0.0)
    )

    row = row_of(Phase("rolls", "small", 10.0, 12.0, 1.0), found)

    assert (row.over_5_ms, row.over_20_ms) == (1, 1)
    assert row.longest_ms == pytest.approx(30)
    assert row.missed


def test_waiting_for_a_processor_does_not_count_against_the_limit() -> None:
    """On a machine that others use, the limit is still about the broker."""
    found = observed(Pause(1.0, 0.050, 0.001, 0.045))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found)

    assert row.longest_ms == pytest.approx(50)
    assert row.longest_without_queue_ms == pytest.approx(5)
    assert not row.missed


def seen(*stills: Still) -> Stills:
    return Stills(refused="", stills=list(stills))


def test_a_machine_that_stood_still_does_not_count_against_the_limit() -> None:
    """Its host took the core away: nobody computed, nobody waited in a queue."""
    found = observed(Pause(1.0, 0.050, 0.0002, 0.0, 0.0, (0,)))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, seen(Still(0, 0.952, 1.2)))

    assert row.longest_ms == row.longest_without_queue_ms == pytest.approx(50)
    assert row.still_ms == pytest.approx(48)
    assert row.longest_without_machine_ms == pytest.approx(2)
    assert not row.missed


def test_a_still_of_another_core_is_taken_off_too() -> None:
    """The thread that the loop waited for was there; both at once are no more than one."""
    found = observed(Pause(1.0, 0.050, 0.0, 0.0, 0.0, (0,)))
    stills = seen(Still(0, 0.95, 0.97), Still(1, 0.96, 0.98))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, stills)

    assert row.counted_ms == pytest.approx(20)
    assert (row.worst[0].still_ms, row.worst[0].own_still_ms) == pytest.approx((30, 20))


def test_what_the_loop_computed_counts_whatever_stood_still_beside_it() -> None:
    """Thirty milliseconds of work are ours, though the other core did not run meanwhile."""
    found = observed(Pause(1.0, 0.030, 0.030 + BEAT_S, 0.0, 0.0, (0,)))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, seen(Still(1, 0.9, 1.1)))

    assert row.counted_ms == pytest.approx(30)
    assert row.missed


def test_a_thread_cannot_have_computed_while_its_core_stood_still() -> None:
    """Its clock may say so, where the host does not admit what it took."""
    found = observed(Pause(1.0, 0.030, 0.030 + BEAT_S, 0.0, 0.0, (0,)))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, seen(Still(0, 0.97, 0.99)))

    assert row.counted_ms == pytest.approx(10)


def test_what_was_computed_while_memory_was_slow_is_waiting_for_the_host() -> None:
    """Between two slow steps of the witness too; behind the last one it is ours again."""
    found = observed(Pause(1.0, 0.050, 0.050 + BEAT_S, 0.0, 0.0, (0,)))
    stills = Stills(refused="", slow=[(0.950, 0.955), (0.970, 0.975)])

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, stills)

    assert row.counted_ms == pytest.approx(25)
    assert "all creeping 25.0; 25.0 count" in str(row.worst[0])


def test_queue_and_stills_are_not_both_taken_off() -> None:
    """A thread that queues for a core that stands still waits once."""
    found = observed(Pause(1.0, 0.060, 0.0, 0.020, 0.010, (0,)))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, seen(Still(0, 0.95, 0.99)))

    assert row.longest_without_queue_ms == pytest.approx(30)
    assert row.counted_ms == pytest.approx(20)


def test_where_nobody_watched_the_machine_the_limit_is_for_what_is_without_queue() -> None:
    """And the report says so, with the reason."""
    found = observed(Pause(1.0, 0.050, 0.0, 0.010))

    row = row_of(Phase("rolls", "small", 0.0, 2.0, 1.0), found, Stills(refused="not allowed"))

    assert row.counted_ms == row.longest_without_queue_ms == pytest.approx(40)
    assert row.missed
    assert row.cells[-3:] == ("-", "-", "20")
    text = pauses.as_text([row])
    assert "Nobody watched the machine (not allowed)." in text
    assert "standing still" not in text


def test_the_longest_pause_is_told_even_if_it_was_all_the_machines() -> None:
    """Whoever reads the report sees what was taken off, and why."""
    ours = [Pause(1.0 + n, 0.010 + n / 1_000, 0.0, 0.0, 0.0, (0,)) for n in range(5)]
    found = observed(Pause(0.5, 0.170, 0.0, 0.0, 0.0, (0,)), *ours)

    row = row_of(Phase("rolls", "small", 0.0, 9.0, 1.0), found, seen(Still(0, 0.3, 0.5)))

    assert [round(moment.ms) for moment in row.worst] == [14, 13, 12, 170]
    assert row.still_ms == pytest.approx(170)
    assert "a core standing still 170.0, the loop's own 170.0, all creeping 0.0; 0.0 count" in str(
        row.worst[-1]
    )


def test_a_long_pause_is_told_with_what_went_on() -> None:
    """First what the loop itself was in, then what threads did beside it."""
    spans = (
        Span(0.90, 0.99, "Flusher._flush", in_loop=False),
        Span(0.97, 0.99, "CommitLog._roll", in_loop=True),
        Span(1.50, 1.60, "later", in_loop=True),
    )

    row = row_of(
        Phase("rolls", "small", 0.0, 2.0, 1.0), observed(Pause(1.0, 0.04, 0.0, 0.0), spans=spans)
    )

    assert row.worst[0].meanwhile == [
        "CommitLog._roll 20.0 ms",
        "Flusher._flush 90.0 ms beside it",
    ]


def test_beats_that_came_in_time_count_for_the_share() -> None:
    """One late beat of a thousand is the rest, two are not."""
    phase = Phase("rolls", "small", 0.0, 1_000 * BEAT_S + 0.02, 1.0)

    one = row_of(phase, observed(Pause(0.5, 0.02, 0.0, 0.0)))
    two = row_of(phase, observed(Pause(0.5, 0.01, 0.0, 0.0), Pause(0.6, 0.01, 0.0, 0.0)))

    assert one.share_999_ms == 0.0
    assert two.share_999_ms == pytest.approx(10)


def test_everything_that_is_to_be_timed_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that got another name would silently no more be told as a cause."""
    monkeypatch.setattr(Tracer, "_timed", lambda _self, _name, function: function)
    tracer = Tracer()

    tracer.install()

    assert tracer.missing == []


def test_the_ratio_of_a_replay_is_taken_within_a_round() -> None:
    """A machine that slows down between two rounds does not bend it."""
    rounds = [
        cold.Round("send", 1, result(1_000), result(1_500), 0.0, 0.0),
        cold.Round("send", 2, result(10_000), result(15_000), 0.0, 0.0),
        cold.Round("send", 3, result(1_000), result(9_000), 0.0, 0.0),
    ]

    assert cold.ratios(rounds) == {"send": 1.5}


def test_a_start_misses_only_if_scan_and_time_are_both_too_slow() -> None:
    """Ten GiB within fifteen seconds, or 0.8 GB/s of the scan."""

    def start(seconds: float, scan: float) -> recovery.Start:
        return recovery.Start(
            kind="1 KiB",
            cached=True,
            log_bytes=1 << 30,
            scanned_bytes=1 << 30,
            records=1,
            seconds=seconds,
            processor_seconds=seconds,
            parts={"scan": scan},
            scan_processor_seconds=scan,
        )

    assert not start(seconds=1.4, scan=1.3).missed
    assert start(seconds=1.4, scan=1.3).ten_gib_s == pytest.approx(14)
    assert not start(seconds=5, scan=1.3).missed
    assert start(seconds=5, scan=1.4).missed


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_log_is_what_it_says(kind: str) -> None:
    """Unique keys differ, queues are used in turn, and mixed means mixed."""
    source = messages(kind)
    drafts = [next(source) for _ in range(200)]
    sizes, topics = KINDS[kind]

    assert {len(draft.body) for draft in drafts} == set(sizes)
    assert len({draft.topic for draft in drafts}) == topics
    assert len({draft.properties for draft in drafts}) == len(drafts)


@pytest.mark.campaign
def test_pauses_cold_reads_and_recovery_are_measured(tmp_path: Path) -> None:
    """Each program runs from its first process to its last table, in small."""
    generator = build_generator()
    small = argparse.Namespace(
        seconds=1.0, gib=0.02, offsets=1_000, stacks=False, rounds=1, set=[], kind=["mixed"]
    )

    rows = pauses.measure(small, tmp_path, generator)
    rounds, loops = cold.measure(small, tmp_path, generator)
    limits, starts = recovery.measure(small, tmp_path)

    assert len(rows) == 12
    assert [row.phase.name for row in rows if row.phase.is_limited] == [
        *("rolls", "retention", "tables", "rolls", "flush storm", "retention")
    ]
    assert "longest pauses" in pauses.as_text(rows)
    assert len(loops) == 2 * len(rounds) == 4
    assert "p99" in cold.as_text(rounds, loops)
    assert limits["crc_gb_s"] > 0
    assert [start.cached for start in starts] == [True, False]
    assert all(start.records > 10_000 and start.parts["scan"] > 0 for start in starts)
