"""Delivery of waiting messages of all kinds: on time, once, after stops and kills."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from halfmq.broker.delay import delivery, done_file
from halfmq.broker.delay.delivery import BATCH_COUNT_MAX, RETRY_AFTER_ERROR_MS
from halfmq.broker.delay.levels import DelayLevels
from halfmq.broker.delay.timer_records import TimerError
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.limits.kept import DELAYED
from halfmq.remoting.recall_handle import RecallHandle
from halfmq.store.errors import DiskFullError, RecordTooLargeError
from halfmq.store.format.properties import tag_hash
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import START_MS
from tests.support.delays import DAY_MS, Rig, after, at, delay_service, delayed
from tests.support.seeds import run_seed
from tests.support.stores import append_durably, draft, flush, unflushed
from tests.support.tables import load_table


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.stop()


def _positions(root: Path) -> object:
    saved = load_table(root / "config" / "delayOffset.json")
    return None if saved is None else saved["offsetTable"]


def test_a_message_is_delivered_when_its_level_is_over_and_not_before(rig: Rig) -> None:
    """To its own topic and queue, complete; filters see its tag, and no due time."""
    rig.delay("late", 2)
    assert rig.delays.tick() == pytest.approx(1.0)  # the longest pause
    rig.after(4_999)
    assert rig.delays.tick() == pytest.approx(0.001)
    assert rig.bodies() == []
    rig.after(1)

    (record,) = rig.records()
    assert (record.queue_id, record.body, record.born_timestamp) == (1, b"late", START_MS - 5)
    assert record.property_map == {
        "TAGS": "x",
        "DELAY": "2",
        "KEYS": "k",
        "REAL_TOPIC": "orders",
        "REAL_QID": "1",
    }
    (entry,) = rig.store.queues.entries("orders", 1, 0, 1)
    assert entry.tags_code == tag_hash("x")
    assert rig.delays.waiting == 0
    rig.run()
    assert rig.bodies() == ["late"]


def test_the_messages_of_a_level_keep_their_order(rig: Rig) -> None:
    """More than one batch of them, also after a start."""
    sent = [str(number) for number in range(2 * BATCH_COUNT_MAX + 3)]
    for body in sent:
        rig.delay(body, 1)
    assert rig.wakes == 1
    rig.clocks.advance(1_000)
    assert rig.delays.tick() == 0
    flush(rig.store)
    assert len(rig.bodies()) == BATCH_COUNT_MAX  # others are served in between
    rig.restart()
    rig.run()

    assert rig.bodies() == sent


def test_overdue_messages_come_in_the_order_of_their_times(rig: Rig) -> None:
    """After a stop, whatever their levels; those by one clock do not hold up the others."""
    for body, level in (("10 s", 3), ("1 s", 1), ("5 s", 2)):
        rig.delay(body, level)
    for number in range(4 * BATCH_COUNT_MAX):
        rig.send(f"timer {number}", *at(10))
    rig.stop()
    rig.clocks.advance(60_000)
    rig.start()
    rig.delays.tick()
    rig.delays.tick()
    flush(rig.store)
    of_levels = [body for body in rig.bodies() if "timer" not in body]
    rig.run()

    assert of_levels == ["1 s", "5 s", "10 s"]
    assert len(rig.bodies()) == 3 + 4 * BATCH_COUNT_MAX


def test_a_clock_set_forward_while_the_broker_was_down_counts(rig: Rig) -> None:
    """The broker cannot distinguish it from passed time."""
    rig.delay("late", 18)
    rig.clocks.wall += 7_200_000
    rig.restart()
    rig.run()

    assert rig.bodies() == ["late"]


@pytest.mark.parametrize("queues", [4, 1])
@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, 0, 10 * DAY_MS])
def test_a_kill_repeats_no_delivery(rig: Rig, step_ms: int, queues: int) -> None:
    """Of a level, a retry, a commit, a time: equal ones, after steps, to a queue that replaced."""
    rig.queues = queues
    for number in range(3):
        rig.delay("level", 3, queue_id=3)
        rig.delay(f"retry {number}", 3, "%RETRY%a", 0)
        rig.delay(f"retry {number}", 3, "%RETRY%b", 0)
        rig.commit(f"commit {number}", "TRANSACTION_DELAY_MS", 10_000)
        rig.send(f"timer {number}", *after(10_000))
        rig.clocks.advance(500)
    rig.clocks.wall += step_ms
    rig.after(9_000)
    assert Counter(rig.bodies())["level"] == 2
    rig.kill()
    rig.after(30_000)
    rig.kill()
    rig.after(30_000)

    numbered = {f"{kind} {number}": 1 for kind in ("commit", "timer") for number in range(3)}
    assert Counter(rig.bodies()) == {"level": 3, **numbered}
    for topic in "%RETRY%a", "%RETRY%b":
        assert rig.bodies(topic) == ["retry 0", "retry 1", "retry 2"]
    assert rig.delays.waiting == 0


def test_a_restart_continues_at_the_saved_position(rig: Rig) -> None:
    """RocketMQ's file says where."""
    rig.delay("first", 1)
    rig.after(1_000)
    rig.stop()
    assert _positions(rig.root) == {"1": 1}
    rig.start()
    rig.delay("second", 1)
    rig.after(1_000)

    assert rig.bodies() == ["first", "second"]


def test_positions_are_saved_only_as_far_as_deliveries_are_durable(rig: Rig) -> None:
    """Otherwise a power cut would lose a message that counts as delivered."""
    rig.delay("late", 1)
    rig.clocks.advance(1_000)
    with unflushed(rig.store):
        rig.delays.tick()
        rig.delays.persist()
        assert _positions(rig.root) == {"1": 0}
        assert rig.delays.oldest_waiting_offset() == 0
    flush(rig.store)
    rig.clocks.advance(done_file.SAVE_INTERVAL_MS)
    rig.delay("other", 2)
    rig.after(5_000)
    job = rig.delays.persist_job()
    assert job is not None
    job()

    assert _positions(rig.root) == {"1": 1, "2": 1}


def test_positions_are_written_at_most_every_interval(rig: Rig) -> None:
    """A busy schedule does not write the files for each message."""
    rig.delay("late", 1)
    rig.after(1_000)
    rig.clocks.advance(done_file.SAVE_INTERVAL_MS - 1_001)
    assert rig.delays.persist_job() is None
    rig.clocks.advance(1)
    assert rig.delays.persist_job() is not None


def test_what_is_done_is_forgotten_under_steady_load(rig: Rig) -> None:
    """Also if some delivery always waits for the disk."""
    for number in range(50):
        rig.delay(str(number), 1)
        rig.after(1_000)
    with unflushed(rig.store):
        rig.store.append([rig.levels.delayed(delayed("last", 1))])
        positions, _ = rig.delays.positions()

    assert positions == {"1": 50}


def test_a_store_that_refuses_delays_delivery_and_loses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk; the order stays."""
    sent = [str(number) for number in range(BATCH_COUNT_MAX + 3)]
    for body in sent:
        rig.delay(body, 1)
    rig.clocks.advance(1_000)
    with monkeypatch.context() as patch:

        def full(*_args: object, **_named: object) -> None:
            raise DiskFullError(rig.root, "no space")

        patch.setattr(rig.store, "append", full)
        rig.delays.tick()
        assert rig.delays.tick() > 0
    rig.clocks.advance(RETRY_AFTER_ERROR_MS - 1)
    assert rig.delays.tick() == pytest.approx(0.001)
    rig.after(1)

    assert rig.bodies() == sent


def test_a_message_that_no_longer_fits_delays_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit lowered between two starts loses that message, with an error in the log."""
    for body in ("small", "big" * 40, "other"):
        rig.delay(body, 1)
    rig.clocks.advance(1_000)
    append = rig.store.append

    def bounded(group: Sequence[AppendRequest], *, contiguous: bool = False) -> list[AppendResult]:
        if any(len(one.body) > 50 for one in group):
            raise RecordTooLargeError("body", 100, 50)
        return append(group, contiguous=contiguous)

    monkeypatch.setattr(rig.store, "append", bounded)
    rig.run()

    assert rig.bodies() == ["small", "other"]
    assert rig.delays.waiting == 0


@pytest.mark.parametrize(
    "properties",
    [b"", b"REAL_TOPIC\x01T\x02", b"REAL_TOPIC\x01T\x02REAL_QID\x01x\x02",
     b"REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010\x02"],
)  # fmt: skip
def test_a_message_without_a_destination_is_skipped(rig: Rig, properties: bytes) -> None:
    """The schedule topic gives no access to the half topic either."""
    append_durably(rig.store, draft(SCHEDULE_TOPIC, 0, properties=properties))
    append_durably(rig.store, draft(SCHEDULE_TOPIC, 999, properties=properties))
    rig.delay("late", 1)
    rig.after(1_000)

    assert rig.bodies() == ["late"]
    assert rig.delays.metrics() == {"waiting": 0, "put_off": 0, "undeliverable": 1}


def test_a_message_whose_topic_cannot_be_created_waits_and_delays_no_other(rig: Rig) -> None:
    """It is counted until then, also after a kill, and delivered when its topic can be created."""
    rig.gone = {"deleted"}
    for topic in ("orders", "deleted", "orders"):
        rig.delay(topic, 1, topic)
    rig.after(1_000)
    assert rig.bodies() == ["orders", "orders"]
    held = {"waiting": 1, "put_off": 1, "undeliverable": 0}
    assert rig.delays.metrics() == held
    rig.kill()
    rig.after(1_000)
    assert rig.delays.metrics() == held
    assert rig.delays.oldest_waiting_offset() is not None

    rig.after(RETRY_AFTER_ERROR_MS)
    rig.gone.clear()
    assert rig.delays.metrics()["put_off"] == 1
    rig.after(RETRY_AFTER_ERROR_MS)
    assert rig.bodies("deleted") == ["deleted"]
    assert rig.delays.metrics() == {"waiting": 0, "put_off": 0, "undeliverable": 0}


def test_the_more_messages_are_put_off_the_rarer_are_the_attempts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of them must not take all of the processor."""
    monkeypatch.setattr(delivery, "DEFERRED_PER_WAIT", 2)
    rig.gone = {"deleted"}
    for _ in range(6):
        rig.delay("late", 1, "deleted")
    rig.after(1_000)
    rig.gone.clear()
    arrived = []
    for _ in range(4):
        rig.after(RETRY_AFTER_ERROR_MS)
        arrived.append(len(rig.bodies("deleted")))

    assert arrived == [1, 3, 5, 6]


def test_a_damaged_record_is_skipped(rig: Rig) -> None:
    """The messages after it are delivered."""
    rig.delay("damaged", 1)
    rig.delay("whole", 1)
    rig.kill(damaged=range(90, 120))
    rig.after(1_000)

    assert rig.bodies() == ["whole"]
    assert rig.delays.waiting == 0


def test_messages_of_a_removed_level_are_delivered(tmp_path: Path) -> None:
    """After the delay of the last level."""
    rig = Rig(tmp_path / "store")
    rig.delay("late", 18)
    rig.levels = DelayLevels((1_000, 5_000))
    rig.restart()
    rig.after(5_000)

    assert rig.bodies() == ["late"]
    rig.stop()


def test_waiting_messages_are_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the memory that they take; a commit is never refused."""
    monkeypatch.setattr(delivery, "DELAYED", DELAYED._replace(most=2))
    rig.delay("one", 1)
    rig.delays.require_room()
    rig.commit("two", "TRANSACTION_DELAY_MS", 1_000)
    with pytest.raises(RequestRefusedError, match="2 messages wait"):
        rig.delays.require_room()
    rig.after(1_000)

    rig.delays.require_room()


def test_a_waiting_message_takes_at_most_100_bytes_also_while_a_start_finds_it(rig: Rig) -> None:
    """Delays and times of delivery; what takes memory for a moment counts."""
    count, group = 40_000, 500
    for start in range(0, count, group):
        messages = []
        for number in range(start, start + group):
            name, ms = after(DAY_MS + number) if number % 2 else at(DAY_MS - number)
            message = draft("orders", 1, b"", properties={"UNIQ_KEY": str(number), name: str(ms)})
            waiting = rig.rule.waiting(message, name, str(ms))
            assert waiting is not None
            messages.append(waiting.request)
        append_durably(rig.store, *messages)
    rig.restart()
    made = delay_service(rig.store, rig.root, rig.clocks, rig.levels)
    tracemalloc.start()
    try:
        made.load()
        taken, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert made.waiting == count
    assert taken / count <= 75
    assert most / count <= 100


def test_no_stop_kill_or_clock_step_loses_or_repeats_a_message(tmp_path: Path) -> None:
    """Random runs against a model: what was due is delivered once, what was recalled never."""
    seed = run_seed()
    print(f"seed={seed}")
    for number in range(4):
        _random_run(tmp_path / str(number), random.Random(f"{seed} {number}"))


def _random_run(root: Path, chance: random.Random) -> None:
    rig = Rig(root / "store", levels=(1_000, 2_000, 5_000))
    handles: dict[str, RecallHandle] = {}
    since: dict[str, int] = {}  # by the monotonic clock
    recalled: set[str] = set()

    def new(ms: int) -> str:
        body = str(len(since))
        since[body] = rig.clocks.monotonic + ms
        return body

    def send() -> None:
        ms = chance.randrange(1, 5_000)
        body = new(ms)
        times = [("TIMER_DELAY_MS", ms), ("TIMER_DELIVER_MS", rig.clocks.wall + ms)]
        handle = rig.send(body, *chance.choice(times))
        assert handle is not None
        handles[body] = handle

    def delay() -> None:
        level = chance.randrange(1, 4)
        rig.delay(new(rig.levels.delay_ms(level)), level)

    def commit() -> None:
        ms = chance.randrange(1, 5_000)
        rig.commit(new(ms), "TRANSACTION_DELAY_MS", ms)

    def recall() -> None:
        body = chance.choice([*since, "x"])
        if body in handles:
            try:
                rig.delays.recall(handles[body])
                recalled.add(body)
            except TimerError:
                assert body in recalled or body in rig.delivered()

    def pass_time() -> None:
        rig.after(chance.randrange(3_000))
        early = [body for body in rig.delivered() if since[body] > rig.clocks.monotonic]
        assert not early

    def persist() -> None:
        rig.clocks.advance(done_file.SAVE_INTERVAL_MS)
        job = rig.delays.persist_job()
        if job is not None:
            job()

    def copy() -> None:
        rig.copy_forward(chance.randrange(rig.store.write_offset + 1))

    actions: list[Callable[[], object]] = [
        *(send, send, delay, delay, commit, pass_time, pass_time),
        *(recall, persist, copy, rig.restart, rig.kill),
    ]
    for _ in range(60):
        chance.choice(actions)()
        flush(rig.store)
    rig.after(10_000)
    delivered = rig.delivered()
    assert rig.delays.waiting == 0
    assert rig.delays.oldest_waiting_offset() is None
    rig.stop()

    assert delivered.keys() == since.keys() - recalled
