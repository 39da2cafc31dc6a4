"""Delivery of delayed messages: on time, once, after stops and kills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.broker.delay import delivery
from halfmq.broker.delay.arrivals import RECORDS_MAX, Arrivals
from halfmq.broker.delay.delivery import PERSIST_INTERVAL_MS, RETRY_AFTER_ERROR_MS
from halfmq.broker.delay.levels import DelayLevels
from halfmq.broker.loop import slices
from halfmq.store.errors import DiskFullError, RecordTooLargeError
from halfmq.store.format.properties import tag_hash
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeLog,
    config_path,
    draft,
)
from tests.support.delays import (
    DAY_MS,
    delayed,
    service,
)
from tests.support.golden_store import unpack
from tests.support.tables import load_table


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


def test_a_message_whose_topic_cannot_be_created_waits_and_delays_no_other(
    tmp_path: Path,
) -> None:
    """It is counted until then, and delivered as soon as its topic can be created."""
    clock, full = Clock(), True

    def queue_of(topic: str, queue_id: int) -> int | None:
        return None if full and topic == "deleted" else queue_id % 2

    log = FakeLog(clock)
    delays = service(tmp_path, log, clock, queue_of=queue_of)
    log.append([delayed(clock, 1, topic) for topic in ("orders", "deleted", "orders")])
    clock.now += 1_000
    for _ in range(3):
        delays.tick()
    assert len(log.queue("orders", 1)) == 2
    assert delays.metrics() == {"waiting": 1, "put_off": 1}
    assert delays.oldest_waiting_offset() is not None

    clock.now += RETRY_AFTER_ERROR_MS
    delays.tick()
    full = False
    assert delays.metrics()["put_off"] == 1
    clock.now += RETRY_AFTER_ERROR_MS
    delays.tick()
    assert len(log.queue("deleted", 1)) == 1
    assert delays.metrics() == {"waiting": 0, "put_off": 0}


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
