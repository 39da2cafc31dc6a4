"""Delay levels: the setting, the schedule topic, and delivery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from halfmq.broker.delay import delivery, levels
from halfmq.broker.delay.arrivals import RECORDS_MAX, Arrivals
from halfmq.broker.delay.delivery import PERSIST_INTERVAL_MS, RETRY_AFTER_ERROR_MS, DelayService
from halfmq.broker.delay.levels import DEFAULT_LEVELS, DELAY_MS_MAX, DelayLevels, parse_delay_levels
from halfmq.broker.loop import slices
from halfmq.broker.loop.fetches import Fetch
from halfmq.store.errors import DiskFullError, RecordTooLargeError
from halfmq.store.files.json_table import load_table
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import decode_properties, tag_hash
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeLog,
    config_path,
    draft,
    fetch_nothing,
)
from tests.support.golden_store import unpack

LEVELS = parse_delay_levels(DEFAULT_LEVELS)
DAY_MS = 86_400_000


def service(
    root: Path,
    log: FakeLog,
    clock: Clock,
    levels: tuple[int, ...] = LEVELS,
    *,
    fetch: Fetch = fetch_nothing,
    wake: Callable[[], None] = lambda: None,
) -> DelayService:
    made = DelayService(
        log,
        DelayLevels(levels, now_ms=clock),
        config_path(root, "delayOffset.json"),
        now_ms=clock,
        monotonic_ms=clock.monotonic,
        fetch=fetch,
        wake=wake,
    )
    made.load()
    log.on_append = noting(made)
    return made


def noting(delays: DelayService) -> Callable[[Sequence[AppendRequest]], None]:
    """Report each append to the service, as the broker does."""

    def note(group: Sequence[AppendRequest]) -> None:
        for one in group:
            if one.topic == SCHEDULE_TOPIC:
                delays.on_stored(one.queue_id)

    return note


def delayed(
    clock: Clock, level: str | int, topic: str = "orders", queue_id: int = 3
) -> AppendRequest:
    properties = f"TAGS\x01x\x02DELAY\x01{level}\x02KEYS\x01k\x02".encode()
    return DelayLevels(LEVELS, now_ms=clock).delayed(draft(topic, queue_id, b"late", properties))


# --- the setting


def test_the_default_levels_are_those_of_rocketmq() -> None:
    """Clients know level 3 as ten seconds."""
    assert len(LEVELS) == 18
    assert LEVELS[:4] == (1_000, 5_000, 10_000, 30_000)
    assert LEVELS[-2:] == (3_600_000, 7_200_000)
    assert parse_delay_levels("1d  2s\t3m") == (86_400_000, 2_000, 180_000)


@pytest.mark.parametrize("text", ["", "  ", "1", "s", "1x", "-1s", "0s", "1.5s", "1s,5s", "41d"])
def test_an_invalid_level_is_named_in_the_error(text: str) -> None:
    """A wrong setting stops the start."""
    with pytest.raises(ValueError, match="delay level"):
        parse_delay_levels(text)


def test_the_number_of_levels_is_limited() -> None:
    """Each is a queue that is read all the time."""
    assert len(parse_delay_levels("1s " * levels.LEVELS_MAX)) == levels.LEVELS_MAX
    with pytest.raises(ValueError, match="65 delay levels, allowed are 1 to 64"):
        parse_delay_levels("1s " * 65)


# --- into the schedule topic


def test_a_delayed_message_waits_in_the_queue_of_its_level() -> None:
    """Properties and due time are where Apache RocketMQ stores them."""
    clock = Clock()
    waiting = delayed(clock, 3)

    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, 2)
    assert waiting.tags_code == clock.now + 10_000
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "KEYS": "k",
        "DELAY": "3",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
    }


def test_a_level_beyond_the_last_becomes_the_last() -> None:
    """Also in the stored property."""
    waiting = delayed(Clock(), 25)

    assert waiting.queue_id == 17
    assert decode_properties(waiting.properties)["DELAY"] == "18"


@pytest.mark.parametrize("level", [0, -1, "x", ""])
def test_without_a_level_nothing_is_delayed(level: str | int) -> None:
    """The message stays what it is."""
    properties = f"DELAY\x01{level}\x02".encode()
    message = draft(properties=properties)

    assert DelayLevels(LEVELS, now_ms=Clock()).delayed(message) is message


def test_a_second_delay_keeps_the_latest_topic() -> None:
    """The message goes to the topic of its latest send."""
    clock = Clock()
    again = DelayLevels(LEVELS, now_ms=clock).delayed(
        draft("%RETRY%g", 0, properties=delayed(clock, 1).properties)
    )

    assert decode_properties(again.properties)["REAL_TOPIC"] == "%RETRY%g"
    assert again.properties.count(b"REAL_TOPIC") == 1


# --- delivery


def test_a_message_is_delivered_when_it_is_due_and_not_before(tmp_path: Path) -> None:
    """To its own topic and queue, complete."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 2)])
    assert delays.tick() == pytest.approx(1.0)  # other levels are empty
    assert delays.waiting == 1
    clock.now += 4_999
    assert delays.tick() == pytest.approx(delivery.TICK_S_MIN)
    assert log.queue("orders", 3) == []
    clock.now += 1
    delays.tick()

    (record,) = log.queue("orders", 3)
    assert record.body == b"late"
    assert record.born_timestamp == START_MS - 5
    assert record.property_map["DELAY"] == "2"
    assert record.property_map["REAL_TOPIC"] == "orders"
    assert delays.waiting == 0
    delays.tick()
    assert len(log.queue("orders", 3)) == 1


def test_the_filter_code_of_a_delivered_message_is_its_tag(tmp_path: Path) -> None:
    """While it waited, the code was its due time."""
    clock = Clock()
    log = FakeLog(clock)
    appended: list[AppendRequest] = []
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 1)])
    clock.now += 1_000
    append = log.append

    def noted(group: Sequence[AppendRequest], *, contiguous: bool = False) -> list[AppendResult]:
        appended.extend(group)
        return append(group, contiguous=contiguous)

    log.append = noted  # type: ignore[method-assign]
    delays.tick()

    assert [one.tags_code for one in appended] == [tag_hash("x")]


def test_a_delivered_commit_decides_nothing(tmp_path: Path) -> None:
    """The record that was stored first is the commit; its copy must not look like another."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    waiting = delayed(clock, 1)
    waiting.sys_flag = 0x8 | 0x1
    log.append([waiting])
    clock.now += 1_000
    delays.tick()

    assert log.queue("orders", 3)[0].sys_flag == 0x1


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -900, 900, 10 * DAY_MS])
@pytest.mark.parametrize("looked", [False, True])
def test_a_step_of_the_wall_clock_moves_no_delay(
    tmp_path: Path, step_ms: int, looked: bool
) -> None:
    """Neither of waiting messages, nor of those stored while timestamps do not advance."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 3)])
    if looked:
        delays.tick()
    clock.now += 4_000
    clock.step(step_ms)
    log.append([delayed(clock, 3)])
    delivered = []
    for _ in range(12_000 // 50):
        clock.now += 50
        delays.tick()
        delivered.append(len(log.queue("orders", 3)))

    assert delivered == [0] * 119 + [1] * 80 + [2] * 41


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -3_000])
def test_a_clock_set_back_while_the_broker_was_down_makes_no_delay_longer(
    tmp_path: Path, step_ms: int, killed: bool
) -> None:
    """Messages are delivered by their store time, or after one more delay at the latest."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 3)])
    clock.now += 4_000
    if not killed:
        delays.persist()
    clock.step(step_ms)
    delays = service(tmp_path, log, clock)
    clock.now += min(10_000, 6_000 - step_ms) - 1
    delays.tick()
    assert log.queue("orders", 3) == []
    clock.now += 1
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


def test_a_clock_set_forward_while_the_broker_was_down_counts(tmp_path: Path) -> None:
    """The broker cannot distinguish it from passed time."""
    clock = Clock()
    log = FakeLog(clock)
    service(tmp_path, log, clock)
    log.append([delayed(clock, 18)])
    clock.step(7_200_000)
    service(tmp_path, log, clock).tick()

    assert len(log.queue("orders", 3)) == 1


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, 10 * DAY_MS])
def test_steps_of_the_wall_clock_repeat_no_delivery_after_a_kill(
    tmp_path: Path, step_ms: int
) -> None:
    """The delivered copies are found, whatever their timestamps."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    for number in range(3):
        waiting = delayed(clock, 3)
        waiting.properties += b"UNIQ_KEY\x01K%d\x02" % number
        log.append([waiting])
        clock.now += 500
    clock.step(step_ms)
    clock.now += 9_000
    delays.tick()
    assert len(log.queue("orders", 3)) == 2

    delays = service(tmp_path, log, clock)
    clock.now += 30_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 3


def test_the_retry_of_another_group_is_no_copy(tmp_path: Path) -> None:
    """After a kill each group gets its own retry, even if the messages differ in nothing else."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    retries = [delayed(clock, 3, topic, 0) for topic in ("%RETRY%a", "%RETRY%a", "%RETRY%b")]
    for retry, key in zip(retries, (b"1", b"2", b"1"), strict=True):
        retry.properties += b"UNIQ_KEY\x01%b\x02" % key
        log.append([retry])
        clock.now += 400
    clock.now += 9_200
    delays.tick()
    assert log.names() == [(SCHEDULE_TOPIC, 2), ("%RETRY%a", 0)]
    clock.now += 10_000

    service(tmp_path, log, clock).tick()

    assert (len(log.queue("%RETRY%a", 0)), len(log.queue("%RETRY%b", 0))) == (2, 1)


def test_the_times_of_very_many_messages_take_bounded_memory() -> None:
    """Messages seem younger by a small part of their delay at most, and never older."""
    delay_ms = 2 * RECORDS_MAX
    arrivals = Arrivals(0, delay_ms, now_ms=START_MS, monotonic_ms=7)
    for offset in range(4 * delay_ms):
        arrivals.add(offset + 1, offset + 7)
        # Nothing public shows how many records are kept.
        assert len(arrivals._times) <= 2 * RECORDS_MAX + 8
    for offset in range(3 * delay_ms, 4 * delay_ms, 977):
        assert offset + 7 <= arrivals.stored_ms(offset, START_MS) < offset + 7 + 2
    assert arrivals.stored_ms(0, START_MS) <= 3 * delay_ms + 7


def test_a_restart_continues_at_the_saved_position(tmp_path: Path) -> None:
    """After an orderly stop nothing is delivered twice or omitted."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 1)])
    clock.now += 1_000
    delays.tick()
    delays.persist()
    log.append([delayed(clock, 1)])
    clock.now += 1_000
    service(tmp_path, log, clock).tick()

    assert len(log.queue("orders", 3)) == 2
    saved = load_table(config_path(tmp_path, "delayOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"1": 1}


def test_positions_are_saved_only_as_far_as_copies_are_durable(tmp_path: Path) -> None:
    """Otherwise a power cut would lose a copy whose original counts as delivered."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 1)])
    log.held_durable = log.write_offset
    clock.now += 1_000
    delays.tick()
    delays.persist()
    assert load_table(config_path(tmp_path, "delayOffset.json")) is None
    log.held_durable = None
    delays.persist()

    saved = load_table(config_path(tmp_path, "delayOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"1": 1}


def test_positions_are_written_at_most_every_interval(tmp_path: Path) -> None:
    """A busy schedule does not write the file for each message."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock, (1,))
    path = config_path(tmp_path, "delayOffset.json")
    log.append([delayed(clock, 1)])
    clock.now += PERSIST_INTERVAL_MS - 1
    delays.tick()
    assert delays.persist_job() is None
    clock.now += 1
    job = delays.persist_job()
    assert job is not None
    job()
    assert path.exists()


def test_delivery_is_retried_after_the_store_refused(tmp_path: Path) -> None:
    """A full disk delays delivery and loses nothing."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([delayed(clock, 1)])
    clock.now += 1_000
    log.failure = DiskFullError(tmp_path, "full")
    assert delays.tick() > 0
    log.failure = None
    clock.now += RETRY_AFTER_ERROR_MS - 1
    assert delays.tick() == pytest.approx(0.001)
    clock.now += 1
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


def test_a_message_that_no_longer_fits_delays_no_other(tmp_path: Path) -> None:
    """A limit lowered between two starts loses that message, with an error in the log."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    big, small = delayed(clock, 1), delayed(clock, 1)
    big.body = b"x" * 100
    log.append([small, big, small])
    clock.now += 1_000
    append = log.append

    def bounded(group: Sequence[AppendRequest], *, contiguous: bool = False) -> list[AppendResult]:
        if any(len(one.body) > 50 for one in group):
            raise RecordTooLargeError("body", 100, 50)
        return append(group, contiguous=contiguous)

    log.append = bounded  # type: ignore[method-assign]
    delays.tick()

    assert [one.body for one in log.queue("orders", 3)] == [b"late", b"late"]
    assert delays.waiting == 0


@pytest.mark.parametrize(
    "properties",
    [b"", b"REAL_TOPIC\x01T\x02", b"REAL_TOPIC\x01T\x02REAL_QID\x01x\x02",
     b"REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010\x02"],
)  # fmt: skip
def test_a_message_without_a_destination_is_skipped(tmp_path: Path, properties: bytes) -> None:
    """The schedule topic gives no access to the half topic either."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    log.append([draft(SCHEDULE_TOPIC, 0, properties=properties), delayed(clock, 1)])
    clock.now += 1_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 1
    assert log.names() == [(SCHEDULE_TOPIC, 0), ("orders", 3)]


def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    """The messages after it are delivered."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    first, second = log.append([delayed(clock, 1), delayed(clock, 1)])
    log.damaged.add(first.physical_offset)
    clock.now += 1_000
    delays.tick()
    delays.tick()

    assert len(log.queue("orders", 3)) == 1
    assert second.queue_offset == 1


def test_messages_deleted_by_age_are_skipped(tmp_path: Path) -> None:
    """A queue may begin after the saved position."""
    clock = Clock()
    log = FakeLog(clock)
    log.start_queue_at(SCHEDULE_TOPIC, 0, 5)
    log.append([delayed(clock, 1)])
    delays = service(tmp_path, log, clock)
    clock.now += 1_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


def test_messages_of_a_removed_level_are_delivered(tmp_path: Path) -> None:
    """After the delay of the last level."""
    clock = Clock()
    log = FakeLog(clock)
    log.append([delayed(clock, 18)])
    delays = service(tmp_path, log, clock, (1_000, 5_000))
    clock.now += 5_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


class Threads:
    """Fetching threads that wait for the test; counts how often they wake the delivery."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log
        self.fetches: list[tuple[NotInMemoryError, Callable[[bool], None]]] = []
        self.wakes = 0

    def fetch(self, missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
        self.fetches.append((missing, on_fetched))

    def wake(self) -> None:
        self.wakes += 1

    def end(self) -> None:
        """End all fetches; those that the disk refuses have failed."""
        fetches, self.fetches = self.fetches, []
        for missing, on_fetched in fetches:
            on_fetched(not self._log.refused & {one.position for one in missing.missing})

    def deliver(self, delays: DelayService) -> None:
        """Deliver everything that can be delivered at this time."""
        while delays.tick() == 0 or self.fetches:
            self.end()


def numbered(clock: Clock, level: int, number: int) -> AppendRequest:
    return replace(delayed(clock, level), body=b"%d" % number)


def bodies(log: FakeLog) -> list[bytes]:
    return [record.body for record in log.queue("orders", 3)]


def test_the_loop_does_not_wait_for_messages_that_are_not_in_memory(tmp_path: Path) -> None:
    """They are delivered in order after a fetch; other levels continue meanwhile."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch, wake=threads.wake)
    log.append([numbered(clock, 2, n) for n in range(3)])
    clock.now += 4_000
    log.append([numbered(clock, 1, n) for n in range(3, 5)])
    clock.now += 1_000
    log.refused = {record.physical_offset for record in log.queue(SCHEDULE_TOPIC, 1)}
    before = log.cold_reads
    delays.tick()
    delays.tick()
    assert bodies(log) == [b"3", b"4"]
    assert len(threads.fetches) == 1
    assert threads.wakes == 0

    log.refused = set()
    threads.end()
    assert threads.wakes == 1
    log.append([numbered(clock, 2, 5)])
    delays.tick()
    clock.now += 5_000
    delays.tick()

    assert bodies(log) == [b"3", b"4", b"0", b"1", b"2", b"5"]
    assert log.cold_reads == before


def test_messages_that_are_evicted_after_each_fetch_are_read_from_the_disk(tmp_path: Path) -> None:
    """With very little memory a level must not wait forever."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([delayed(clock, 1)])
    before = log.cold_reads
    clock.now += 1_000
    log.cold = True
    for _ in range(delivery.FETCHES_MAX):
        delays.tick()
        assert len(threads.fetches) == 1
        threads.end()
    assert log.cold_reads == before
    delays.tick()

    assert len(log.queue("orders", 3)) == 1
    assert log.cold_reads == before + 1
    assert not threads.fetches


@pytest.mark.parametrize("stops", [False, True])
def test_an_unreadable_message_delays_no_other_and_is_not_lost(tmp_path: Path, stops: bool) -> None:
    """It is retried until it can be read, also after a stop."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([numbered(clock, 1, n) for n in range(5)])
    clock.now += 1_000
    bad = log.queue(SCHEDULE_TOPIC, 0)[2].physical_offset
    log.refused = {bad}
    threads.deliver(delays)
    assert bodies(log) == [b"0", b"1", b"3", b"4"]
    log.append([numbered(clock, 1, 5)])
    clock.now += RETRY_AFTER_ERROR_MS
    threads.deliver(delays)
    assert bodies(log) == [b"0", b"1", b"3", b"4", b"5"]
    assert delays.waiting == 1
    oldest = delays.oldest_waiting_offset()
    assert oldest is not None
    assert oldest <= bad

    log.refused = set()
    if stops:
        delays.persist()
        delays = service(tmp_path, log, clock, fetch=threads.fetch)
    clock.now += RETRY_AFTER_ERROR_MS
    threads.deliver(delays)

    assert set(bodies(log)) == {b"0", b"1", b"2", b"3", b"4", b"5"}
    assert bodies(log).count(b"2") == 1
    assert len(bodies(log)) == 6 or stops
    assert delays.waiting == 0
    assert delays.oldest_waiting_offset() is None


def test_the_number_of_deferred_messages_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more the level waits; all are delivered when the disk can be read again."""
    monkeypatch.setattr(delivery, "DEFERRED_MAX", 4)
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([numbered(clock, 1, n) for n in range(10)])
    clock.now += 1_000
    log.refused = {record.physical_offset for record in log.queue(SCHEDULE_TOPIC, 0)}
    for _ in range(5):
        threads.deliver(delays)
        clock.now += RETRY_AFTER_ERROR_MS
    assert bodies(log) == []
    # Nothing public shows how many messages are deferred.
    assert len(delays._queues[0].deferred) == 4
    log.refused = set()
    threads.deliver(delays)

    assert sorted(bodies(log)) == [b"%d" % n for n in range(10)]


def test_a_long_queue_is_delivered_in_batches(tmp_path: Path) -> None:
    """Other work is served in between, and the next call is requested at once."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    count = delivery.BATCH_COUNT_MAX + 1
    log.append([delayed(clock, 1) for _ in range(count)])
    clock.now += 1_000
    assert delays.tick() == 0
    assert len(log.queue("orders", 3)) == delivery.BATCH_COUNT_MAX
    delays.tick()

    assert len(log.queue("orders", 3)) == count


def test_levels_take_turns_slice_by_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop all levels may be overdue, with very many messages each."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    for level in (1, 2):
        log.append([delayed(clock, level) for _ in range(2 * delivery.BATCH_COUNT_MAX)])
    clock.now += 10_000
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # one batch each
    sizes = []
    while delays.waiting:
        assert delays.tick() == 0
        sizes.append(len(log.queue("orders", 3)))
    assert {later - before for before, later in pairwise([0, *sizes])} <= {
        0,
        delivery.BATCH_COUNT_MAX,
    }
    assert sizes[-1] == 4 * delivery.BATCH_COUNT_MAX


# --- delays that count from a commit


def next_due_ms(delays: DelayService) -> int:
    """Return when the first waiting message is due; 0 if some level must be read to know it.

    Tests advance the clock to it: the service itself wakes up every second, for hours.
    """
    waiting = [one for one in delays._queues if delays._end(one) > one.next_offset]
    return min((one.head_due_ms or 0 for one in waiting), default=0)


HALF_ID = "7F00000100002A9F000000000000004D"


def final(delay: str, properties: str = "") -> AppendRequest:
    """Return the final message of a half at offset 77 that requests a delay."""
    properties = f"TAGS\x01x\x02{delay}\x02TRANSACTION_HALF_ID\x01{HALF_ID}\x02{properties}"
    made = draft("orders", 3, b"late", properties.encode(), sys_flag=0x8)
    made.prepared_transaction_offset = 77
    return made


@pytest.mark.parametrize(
    ("delay_ms", "level"),
    [(1, 1), (999, 1), (1_000, 1), (4_999, 1), (5_000, 2), (3_600_000, 17), (DELAY_MS_MAX, 18)],
)
def test_a_commit_waits_in_the_longest_level_that_is_not_too_long(
    delay_ms: int, level: int
) -> None:
    """Or in the shortest one; it stays the deciding record, and holds the time left."""
    clock = Clock()
    levels = DelayLevels(LEVELS, now_ms=clock)
    waiting = levels.after_commit(final(f"TRANSACTION_DELAY_MS\x01{delay_ms}"), clock.now)

    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, level - 1)
    assert (waiting.sys_flag, waiting.prepared_transaction_offset) == (0x8, 77)
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "DELAY": str(level),
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "TRANSACTION_DELAY_MS": str(delay_ms),
        "TRANSACTION_HALF_ID": HALF_ID,
    }


@pytest.mark.parametrize(
    "delay",
    [
        "TRANSACTION_DELAY_MS\x010",
        f"TRANSACTION_DELIVER_MS\x01{START_MS}",
        "TRANSACTION_DELIVER_MS\x0112",
        "TRANSACTION_DELAY_MS\x01soon",
        "TRANSACTION_DELAY_MS\x01" + "9" * 5_000,
        "OTHER\x01x",
    ],
)
def test_a_commit_whose_time_has_come_is_delivered_at_once(delay: str) -> None:
    """So is one with an invalid time, which no prepare of halfmq accepts."""
    message = final(delay)

    committed = DelayLevels(LEVELS, now_ms=Clock()).after_commit(message, START_MS)

    assert (committed.topic, committed.queue_id) == ("orders", 3)
    assert b"TRANSACTION_DEL" not in committed.properties  # its retries must not wait for it


def test_levels_need_not_ascend() -> None:
    """The setting may name them in any order."""
    levels = DelayLevels((60_000, 1_000, 5_000), now_ms=Clock())

    assert levels.waiting(draft(), 7_000).queue_id == 2
    assert levels.waiting(draft(), 10).queue_id == 1


@given(
    delays_ms=st.lists(
        st.one_of(st.integers(1, 20_000), st.integers(1, 50_000_000)), min_size=1, max_size=4
    ),
    restart_every=st.integers(1, 40),
    killed=st.booleans(),
)
def test_a_commit_is_delivered_once_never_early_and_at_most_the_shortest_level_late(
    delays_ms: list[int], restart_every: int, killed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any delay, with stops and kills; its copies link to no half."""
    root = tmp_path_factory.mktemp("commit")
    clock = Clock()
    log = FakeLog(clock)
    delays = service(root, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    due = {}
    for number, delay_ms in enumerate(delays_ms):
        message = final(f"TRANSACTION_DELAY_MS\x01{delay_ms}")
        message.body = b"%d" % number
        due[message.body] = clock.now + delay_ms
        log.append([levels.after_commit(message, clock.now)])
    steps = 0
    while clock.now <= max(due.values()) + LEVELS[0]:
        steps += 1
        assert steps < 5_000, "the message goes round and round"
        if steps % restart_every == 0:
            if not killed:
                delays.persist()
            delays = service(root, log, clock)
        clock.now += int(delays.tick() * 1_000)
        clock.now = max(clock.now, next_due_ms(delays))

    arrived = log.queue("orders", 3)
    assert sorted(one.body for one in arrived) == sorted(due)
    for record in arrived:
        late_ms = record.store_timestamp - due[record.body]
        assert 0 <= late_ms <= LEVELS[0] + 1_000 * delivery.TICK_S_MIN
        assert (record.sys_flag, record.prepared_transaction_offset) == (0, 0)
    linked = [one for one in log.records.values() if one.prepared_transaction_offset]
    assert len(linked) == len(due)


def test_after_a_kill_only_messages_without_a_copy_are_delivered(tmp_path: Path) -> None:
    """As many equal messages as are missing, also those that a power cut removed."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    for _ in range(3):
        log.append([delayed(clock, 1), delayed(clock, 1, "payments")])
        clock.now += 400
    clock.now += 200
    delays.tick()
    clock.now += 1_000
    assert (len(log.queue("orders", 3)), len(log.queue("payments", 3))) == (2, 2)
    log.cut_queue("payments", 3, 1)

    delays = service(tmp_path, log, clock)
    assert delays.waiting == 3
    delays.tick()

    # The first message that had lost its copy is delivered again, and all after it.
    assert (len(log.queue("orders", 3)), len(log.queue("payments", 3))) == (3, 3)
    delays.persist()
    assert service(tmp_path, log, clock).waiting == 0


def test_positions_found_in_the_log_are_saved(tmp_path: Path) -> None:
    """The next start has less to read."""
    clock = Clock()
    log = FakeLog(clock)
    log.append([delayed(clock, 1)])
    clock.now += 1_000
    service(tmp_path, log, clock).tick()
    service(tmp_path, log, clock).persist()

    saved = load_table(config_path(tmp_path, "delayOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"1": 1}


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -900, 900, 10 * DAY_MS])
def test_a_long_delay_is_stored_again_once_for_each_level(tmp_path: Path, step_ms: int) -> None:
    """Also if the wall clock steps: 18 s are waits of 10, 5, 1, 1 and 1 s."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    log.append([levels.after_commit(final("TRANSACTION_DELAY_MS\x0118000"), clock.now)])
    clock.now += 2_000
    clock.step(step_ms)
    while clock.monotonic() < START_MS + 18_000:
        assert log.queue("orders", 3) == []
        clock.now += 50
        delays.tick()

    (record,) = log.queue("orders", 3)
    assert b"TRANSACTION_DELAY_MS" not in record.properties
    waits = [one.queue_id for one in log.records.values() if one.topic == SCHEDULE_TOPIC]
    assert waits == [2, 1, 0, 0, 0]


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -5_000])
def test_a_delay_begins_again_at_most_after_a_restart(tmp_path: Path, step_ms: int) -> None:
    """If the clock was set back meanwhile, the limit is the time left when it was stored."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    log.append([levels.after_commit(final("TRANSACTION_DELAY_MS\x0118000"), clock.now)])
    clock.now += 10_000
    delays.tick()  # 8 s are left, and the next wait begins
    clock.now += 1_000
    clock.step(step_ms)
    delays = service(tmp_path, log, clock)
    begun = clock.monotonic()
    while not log.queue("orders", 3):
        clock.now += 50
        delays.tick()

    assert 8_000 <= clock.monotonic() - begun <= 8_000 + LEVELS[0]


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -5_000, 5_000, 7_000, 10 * DAY_MS])
def test_a_time_of_delivery_follows_the_wall_clock(tmp_path: Path, step_ms: int) -> None:
    """It is not early if the clock is set back, nor late if it is set forward."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    at_ms = START_MS + 8_000
    log.append([levels.after_commit(final(f"TRANSACTION_DELIVER_MS\x01{at_ms}"), clock.now)])
    delays.tick()
    clock.now += 2_000
    clock.step(step_ms)
    while clock.now < max(at_ms, START_MS + 2_000 + step_ms):
        assert log.queue("orders", 3) == []
        wait_ms = int(delays.tick() * 1_000)
        clock.now += max(wait_ms, next_due_ms(delays) - clock.monotonic())
    clock.now += 1_000  # within which a step is noticed
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


def test_the_retry_of_a_delayed_message_waits_for_its_level(tmp_path: Path) -> None:
    """It does not wait for the time of the first delivery, even if the clock is set back."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    at_ms = START_MS + 1_000
    log.append([levels.after_commit(final(f"TRANSACTION_DELIVER_MS\x01{at_ms}"), clock.now)])
    clock.now += 1_000
    delays.tick()
    (record,) = log.queue("orders", 3)
    clock.step(-10 * DAY_MS)
    properties = record.properties + b"DELAY\x013\x02"
    log.append([levels.delayed(draft("%RETRY%g", 0, b"late", properties))])
    clock.now += 9_999
    delays.tick()
    assert log.queue("%RETRY%g", 0) == []
    clock.now += 1
    delays.tick()

    assert len(log.queue("%RETRY%g", 0)) == 1


def test_a_plain_message_cannot_request_a_time_of_delivery(tmp_path: Path) -> None:
    """The property is not validated there, and could keep the log forever."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    waiting = delayed(clock, 1)
    waiting.properties += b"TRANSACTION_DELIVER_MS\x01999999999999999\x02"
    log.append([waiting])
    clock.now += 1_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


@given(
    steps=st.lists(
        st.one_of(
            st.integers(1, 4).map(lambda level: ("send", level)),
            st.integers(0, 3_000).map(lambda elapsed: ("wait", elapsed)),
            st.just(("restart", 0)),
            st.just(("kill", 0)),
        ),
        max_size=30,
    )
)
def test_every_message_arrives_on_time_and_once(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any sequence of sends, stops and kills."""
    root = tmp_path_factory.mktemp("delay")
    clock = Clock()
    log = FakeLog(clock)
    levels = (1_000, 2_000, 5_000)
    delays = service(root, log, clock, levels)
    due: list[tuple[int, bytes]] = []
    for number, (kind, value) in enumerate(steps):
        if kind == "send":
            message = draft(body=b"%d" % number, properties=b"DELAY\x01%d\x02" % value)
            log.append([DelayLevels(levels, now_ms=clock).delayed(message)])
            due.append((clock.now + levels[min(value, 3) - 1], message.body))
        elif kind == "wait":
            clock.now += value
        else:
            if kind == "restart":
                delays.persist()
            delays = service(root, log, clock, levels)
        delays.tick()
        arrived = [one.body for one in log.queue("orders", 0)]
        assert sorted(arrived) == sorted(body for at, body in due if at <= clock.now)


def test_the_positions_of_a_real_broker_are_read(tmp_path: Path) -> None:
    """Its file has integer keys: level 16 waits from the start, level 1 continues at 6."""
    golden = unpack("delay-retry-dlq", tmp_path)
    clock = Clock()
    log = FakeLog(clock)
    for level, offset in golden.truth["delayOffsets"].items():
        log.start_queue_at(SCHEDULE_TOPIC, int(level) - 1, offset)
    log.append([delayed(clock, 1), delayed(clock, 16)])
    delays = service(golden.root, log, clock)

    assert delays.waiting == 2
    clock.now += 1_000
    delays.tick()
    delays.persist()
    saved = load_table(config_path(golden.root, "delayOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"1": 7, "2": 1, "3": 2, "16": 0}
