"""Check-back: which producer gets a check, when, how often, and what follows."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.loop import slices
from halfmq.broker.loop.slices import Slice
from halfmq.broker.transaction.checks import checker, group_queues
from halfmq.broker.transaction.checks import timetable as timetable_module
from halfmq.broker.transaction.checks.timetable import BUCKET_MS, Timetable
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.state.state_machine import Event
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError, waiting
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.transactions import HOST, START_MS, Broker, Connected, end_now

DAY_MS = 86_400_000
TIMEOUT_MS = 6_000
INTERVAL_MS = 30_000
PAUSES_MS = (30_000, 45_000, 67_500)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A broker without messages, whose checks have no jitter."""
    monkeypatch.setattr(checker, "JITTER", 0.0)
    return Broker(tmp_path, config=TransactionConfig(check_max=3))


def test_the_first_check_is_sent_after_the_timeout(broker: Broker) -> None:
    """Neither early nor late, with the fields that clients read."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    half = broker.prepare(producer, key="K" * 32)
    broker.end(broker.prepare(), Event.COMMIT)

    broker.wait(TIMEOUT_MS - 1)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)

    (code, header, body) = next(one for one in producer.checks if one[1].msg_id == "K" * 32)
    assert len(producer.checks) == 2
    assert code == RequestCode.CHECK_TRANSACTION_STATE
    assert header.topic == HALF_TOPIC
    assert header.commit_log_offset == half.physical_offset
    assert header.tran_state_table_offset == half.queue_offset
    assert header.msg_id == header.transaction_id == "K" * 32
    assert header.offset_msg_id == offset_message_id(HOST, half.physical_offset)
    assert header.broker_name == "broker-a"
    assert decode_record(body).topic == "orders"


def test_age_counts_from_the_brokers_clock(broker: Broker) -> None:
    """A producer whose clock is a day off gets its checks at the usual time."""
    producer = broker.producers.join("pg", Connected())
    for skew_ms in (-86_400_000, 86_400_000):
        broker.prepare(born_ms=START_MS + skew_ms)
    broker.wait(TIMEOUT_MS - 1)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.checks) == 2


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -900, 900, 10 * DAY_MS])
def test_a_step_of_the_wall_clock_moves_no_check(broker: Broker, step_ms: int) -> None:
    """Neither the first check of a half stored before or after the step, nor a later one."""
    producer = broker.producers.join("pg", Connected())
    before = broker.prepare().physical_offset
    broker.wait(3_000)
    broker.clock.step(step_ms)
    after = broker.prepare().physical_offset
    broker.wait(2_999)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [before]
    (info,) = [one for one in broker.service.view.page(-1, 9).infos if one.offset == after]
    assert 2_900 <= (info.next_check_ms or 0) <= 3_050
    broker.wait(3_000)
    assert producer.checked_offsets == [before, after]

    broker.wait(PAUSES_MS[0] - 3_000 - 1)
    assert len(producer.checks) == 2
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [before, after, before]


@pytest.mark.parametrize("immunity", ["0", "60"])  # 0: the default
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("later_ms", [0, 3_000])
def test_a_clock_that_was_ahead_once_delays_no_check_after_a_restart(
    broker: Broker, later_ms: int, killed: bool, immunity: str
) -> None:
    """Store timestamps do not advance for ten days then, also those of later halves."""
    wait_ms = int(immunity) * 1_000 or TIMEOUT_MS
    broker.clock.step(10 * DAY_MS)
    old = broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS=immunity)
    broker.clock.step(-10 * DAY_MS)
    broker.log.flush()
    broker.restart(drained=not killed)
    producer = broker.producers.join("pg", Connected())
    broker.wait(later_ms)
    new = broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS=immunity)
    assert new.store_timestamp == old.store_timestamp > broker.clock()
    broker.wait(wait_ms - later_ms + BUCKET_MS)
    assert old.physical_offset in producer.checked_offsets
    broker.wait(later_ms)

    assert set(producer.checked_offsets) == {old.physical_offset, new.physical_offset}


def test_a_clock_set_back_while_the_broker_was_down_delays_no_check(broker: Broker) -> None:
    """The store timestamp of a half may then be in the future."""
    broker.prepare()
    broker.log.flush()
    broker.clock.step(-3_600_000)
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(producer.checks) == 1


def test_op_messages_do_not_wait_for_a_clock_set_back(broker: Broker) -> None:
    """All housekeeping uses the monotonic clock."""
    broker.end(broker.prepare(), Event.COMMIT)
    broker.wait(30_000)
    before = broker.service.metrics()
    broker.clock.step(-3_600_000)
    broker.end(broker.prepare(), Event.COMMIT)
    broker.wait(3_000)
    broker.wait(3_000)
    assert broker.service.metrics()["ops_written"] == before["ops_written"] + 1


@pytest.mark.parametrize(("seconds", "first_ms"), [("120", 120_000), ("1", 1_000), ("no", 6_000)])
def test_immunity_sets_the_time_of_the_first_check(
    broker: Broker, seconds: str, first_ms: int
) -> None:
    """Longer or shorter than the broker's setting."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
    broker.wait(first_ms - 1)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.checks) == 1


def test_no_check_is_sent_for_a_half_that_is_not_on_disk(broker: Broker) -> None:
    """After a power cut another half may have its offset, and would get the decision."""
    producer = broker.producers.join("pg", Connected())
    broker.flushes = False
    broker.prepare()
    for _ in range(10):
        broker.wait(TIMEOUT_MS)
    assert producer.checks == []
    broker.log.flush()
    broker.wait(checker.DURABLE_WAIT_MS + BUCKET_MS)
    assert len(producer.checks) == 1


def test_one_check_at_a_time(broker: Broker) -> None:
    """The next check is sent when the time for the answer is over, with its number."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for expected in (1, 1, 2):
        assert len(producer.checks) == expected
        broker.wait(INTERVAL_MS // 2 + BUCKET_MS)
    assert len(producer.checks) == 2
    times = [
        decode_record(body).property_map["TRANSACTION_CHECK_TIMES"]
        for _, _, body in producer.checks
    ]
    assert times == ["1", "2"]


@pytest.mark.parametrize("event", [Event.COMMIT, Event.ROLLBACK])
def test_the_answer_to_a_check_ends_the_checks(broker: Broker, event: Event) -> None:
    """The producer answers with the offsets from the check."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    ((_, header, _),) = producer.checks

    end_now(
        broker.service.decisions,
        DecisionRequest(header.commit_log_offset, header.tran_state_table_offset, "pg", event),
    )
    broker.wait(20 * INTERVAL_MS)

    assert len(producer.checks) == 1
    assert len(broker.finals_of(half)) == (event is Event.COMMIT)


def test_the_producer_that_prepared_gets_the_first_check_and_then_the_others_in_turn(
    broker: Broker,
) -> None:
    """A member that never answers must not prevent checks to the others."""
    members = [broker.producers.join("pg", Connected(f"p{number}")) for number in range(3)]
    broker.prepare(members[1])
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert [len(member.checks) for member in members] == [0, 1, 0]

    for _ in range(2):
        broker.wait(2 * INTERVAL_MS)
    assert sum(len(member.checks) for member in members) == 3
    assert sorted(len(member.checks) for member in members) != [0, 0, 3]


def test_every_member_gets_a_check_in_the_end(broker: Broker) -> None:
    """Whichever member knows the outcome."""
    owner = broker.producers.join("pg", Connected("owner"))
    members = [broker.producers.join("pg", Connected(f"p{number}")) for number in range(2)]
    broker.config = TransactionConfig(check_max=10)
    broker.restart()
    broker.prepare(owner)
    for _ in range(4):
        broker.wait(4 * INTERVAL_MS)
    assert len(owner.checks) == 2
    assert [len(member.checks) for member in members] == [1, 1]


def test_no_check_is_sent_to_a_connection_that_left_the_group(broker: Broker) -> None:
    """The connection serves other producers; a check sent there would be lost."""
    owner = Connected()
    half = broker.prepare(owner)
    broker.producers.left.add(("pg", owner))
    for _ in range(100):
        broker.wait(INTERVAL_MS)
    assert owner.checks == []
    assert broker.service.metrics()["waiting_for_producers"] == 1

    back = broker.producers.join("pg", Connected())
    broker.service.on_producer("pg", back)
    broker.wait(0)

    assert back.checked_offsets == [half.physical_offset]


def test_another_member_gets_the_check_of_a_dead_producer(broker: Broker) -> None:
    """A producer may be killed between its local commit and its decision."""
    owner, other = Connected("owner"), broker.producers.join("pg", Connected("other"))
    half = broker.prepare(owner)
    owner.closed = True
    broker.wait(TIMEOUT_MS + BUCKET_MS)

    assert (owner.checks, other.checked_offsets) == ([], [half.physical_offset])


def test_a_producer_gets_checks_before_its_first_heartbeat(broker: Broker) -> None:
    """It sends its first message before it is registered as a member of its group."""
    owner = Connected()
    broker.prepare(owner)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(owner.checks) == 1


def test_no_check_is_counted_while_a_group_has_no_member(broker: Broker) -> None:
    """For however long; a member that connects gets the check at the next tick."""
    owner = Connected()
    half = broker.prepare(owner)
    owner.closed = True
    broker.wait(86_400_000)
    assert broker.service.metrics()["waiting_for_producers"] == 1
    assert broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []

    back = broker.producers.join("pg", Connected())
    broker.service.on_producer("pg", back)
    broker.wait(0)

    assert back.checked_offsets == [half.physical_offset]
    assert decode_record(back.checks[0][2]).property_map["TRANSACTION_CHECK_TIMES"] == "1"


def test_a_missed_connection_event_only_delays_a_check(broker: Broker) -> None:
    """Groups without members are also looked up now and then."""
    broker.prepare(owner := Connected())
    owner.closed = True
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    back = broker.producers.join("pg", Connected())
    broker.wait(group_queues.NO_MEMBER_RETRY_MS)
    assert len(back.checks) == 1


def test_a_check_that_was_not_written_does_not_count(broker: Broker) -> None:
    """A producer that does not read is skipped; if it is the only one, it is retried soon."""
    stuck = broker.producers.join("pg", Connected(writable=False))
    broker.prepare(stuck)
    for _ in range(60):
        broker.wait(60_000)
    assert stuck.checks == []
    assert broker.service.metrics()["parked"] == 0

    stuck.writable = True
    broker.wait(group_queues.BUSY_RETRY_MS + BUCKET_MS)
    assert len(stuck.checks) == 1


def test_a_member_that_does_not_read_is_skipped(broker: Broker) -> None:
    """Another member of the group gets the check."""
    busy = broker.producers.join("pg", Connected(writable=False))
    other = broker.producers.join("pg", Connected())
    broker.prepare(busy)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert (len(busy.checks), len(other.checks)) == (0, 1)


def test_after_the_last_unanswered_check_the_transaction_is_parked(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """After the whole time for the last answer; with a record, a log line and a count."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare(TAGS="TagA")
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for pause_ms in PAUSES_MS[:2]:
        broker.wait(pause_ms + BUCKET_MS)
    assert len(producer.checks) == 3
    broker.wait(PAUSES_MS[2] - 2 * BUCKET_MS)
    assert broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []

    broker.wait(3 * BUCKET_MS)
    broker.wait(100 * INTERVAL_MS)

    (parked,) = broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC)
    assert parked.prepared_transaction_offset == half.physical_offset
    assert parked.property_map["TAGS"] == "TagA"
    assert "event=transaction_parked half_offset=0 group=pg" in caplog.text
    assert len(producer.checks) == 3
    assert broker.service.metrics()["parked"] == broker.service.metrics()["pending_parked"] == 1


def test_a_parked_transaction_can_still_be_decided_and_stays_parked_after_a_crash(
    broker: Broker,
) -> None:
    """A late decision is the first one; until then no check is sent."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    for _ in range(9):
        broker.wait(4 * INTERVAL_MS)
    broker.log.flush()
    broker.restart()
    producer.checks.clear()
    broker.wait(100 * INTERVAL_MS)
    assert producer.checks == []
    assert broker.service.metrics()["pending_parked"] == 1

    broker.end(half, Event.COMMIT)

    assert len(broker.finals_of(half)) == 1
    assert broker.service.metrics()["pending_parked"] == 0


def test_parking_that_cannot_be_recorded_is_tried_again(broker: Broker) -> None:
    """A transaction must not be parked without a durable record."""
    broker.producers.join("pg", Connected())
    broker.prepare()
    for _ in range(3):
        broker.wait(3 * INTERVAL_MS)
    broker.log.failing = True
    for _ in range(3):
        broker.wait(3 * INTERVAL_MS)
    assert broker.service.metrics()["parked"] == 0
    broker.log.failing = False
    broker.wait(INTERVAL_MS + BUCKET_MS)
    assert broker.service.metrics()["parked"] == 1


@pytest.mark.parametrize("error", [StoreError("a bad sector"), OSError(5, "I/O"), IndexError()])
def test_an_unreadable_half_delays_no_other_check(
    broker: Broker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The fault is logged, and the check is sent when the half can be read again."""
    producer = broker.producers.join("pg", Connected())
    broken, sound = broker.prepare(), broker.prepare()
    read = broker.log.unchecked_bytes

    def fail_for_one(offset: int) -> bytes | None:
        if offset == broken.physical_offset:
            raise error
        return read(offset)

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(broker.log, "unchecked_bytes", fail_for_one)
        broker.wait(TIMEOUT_MS + BUCKET_MS)

    assert producer.checked_offsets == [sound.physical_offset]
    assert "event=check_failed half_offset=0" in caplog.text
    broker.wait(INTERVAL_MS + BUCKET_MS)
    assert producer.checked_offsets.count(broken.physical_offset) == 1


def test_many_due_checks_are_sent_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends are served between the slices, whatever the size of the messages."""
    producer = broker.producers.join("pg", Connected())
    halves = [broker.prepare() for _ in range(100)]
    broker.log.flush()
    broker.clock.now_ms += TIMEOUT_MS + BUCKET_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    sizes: list[int] = []
    while broker.service.tick() == 0:
        sizes.append(len(producer.checks) - sum(sizes))

    assert max(sizes) == 1
    assert sorted(producer.checked_offsets) == [half.physical_offset for half in halves]


def test_a_decided_transaction_costs_only_a_lookup_when_its_check_is_due(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all are decided before their first check is due."""
    producer = broker.producers.join("pg", Connected())
    for _ in range(2 * checker.ENTRIES_PER_STEP - 10):
        broker.end(broker.prepare(), Event.COMMIT)
    broker.clock.now_ms += TIMEOUT_MS + BUCKET_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    assert broker.checker.tick(broker.clock.now_ms, Slice()) == 0
    assert broker.checker.tick(broker.clock.now_ms, Slice()) is None
    assert producer.checks == []


def test_groups_take_turns(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group with very many due checks does not delay another."""
    busy = broker.producers.join("busy", Connected())
    other = broker.producers.join("other", Connected())
    for _ in range(1_000):
        broker.prepare(group="busy")
    broker.prepare(group="other")
    broker.log.flush()
    broker.clock.now_ms += TIMEOUT_MS + BUCKET_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    while not other.checks:
        assert broker.service.tick() == 0
    assert len(busy.checks) <= 100


def test_results_of_very_many_checks_are_processed_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members of a group may be lost at once, each with its checks in flight."""
    producer = broker.producers.join("pg", Connected(acknowledges=True))
    halves = [broker.prepare(producer) for _ in range(5)]
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(producer.checks) == len(halves)
    producer.acknowledge(None)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    taken = []
    for _ in halves:
        broker.checker.tick(broker.clock.now_ms, Slice())
        taken.append(broker.checker.not_accepted)

    assert taken == [1, 2, 3, 4, 5]


def test_groups_without_members_are_looked_up_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of them, each with thousands of transactions."""
    for number in range(5):
        broker.prepare(group=f"away-{number}")
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    looks: list[str] = []

    def no_producers(group: str) -> tuple[()]:
        looks.append(group)
        return ()

    monkeypatch.setattr(broker.producers, "producers_of", no_producers)
    broker.clock.now_ms += 2 * group_queues.NO_MEMBER_RETRY_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    counts = []
    for _ in range(6):
        broker.checker.tick(broker.clock.now_ms, Slice())
        counts.append(len(looks))

    assert counts == [1, 2, 3, 4, 5, 5]


def test_checks_wait_for_the_grace_time_after_a_restart(broker: Broker) -> None:
    """Producers need time to reconnect, and some send the decision then."""
    half = broker.prepare()
    broker.log.flush()
    broker.clock.now_ms += 3_600_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(checker.RESTART_GRACE_MS - 1)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [half.physical_offset]


def test_due_checks_are_sent_within_half_a_second_after_a_restart(broker: Broker) -> None:
    """Decisions do not wait longer than producers need to reconnect."""
    half = broker.prepare()
    broker.log.flush()
    broker.clock.now_ms += 3_600_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(500)
    assert producer.checked_offsets == [half.physical_offset]


def test_a_restart_does_not_advance_the_check_of_a_young_half(broker: Broker) -> None:
    """Its age counts from its store timestamp."""
    broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    broker.log.flush()
    broker.clock.now_ms += 20_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(39_999)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.checks) == 1


def test_a_timetable_returns_everything_once_and_never_early() -> None:
    """Due times come in any order, also in the past."""
    timetable = Timetable()
    due = {offset: START_MS + (offset * 7_919) % 1_000 for offset in range(500)}
    for offset, due_ms in due.items():
        timetable.add(due_ms, offset)
    seen: list[int] = []
    for now_ms in range(START_MS, START_MS + 1_000 + BUCKET_MS + 1):
        while found := timetable.pop_due(now_ms):
            number, offsets = found
            for offset in offsets:
                assert due[offset] <= number * BUCKET_MS <= now_ms <= due[offset] + BUCKET_MS
            seen += offsets
    assert sorted(seen) == sorted(due)
    assert timetable.next_due_ms is None


def test_garbage_collection_does_not_visit_the_timetable() -> None:
    """With a million undecided it would repeatedly stop the broker for 20 ms or more."""
    timetable = Timetable()
    for offset in range(10_000):
        timetable.add(START_MS + offset % 3 * BUCKET_MS, offset)

    walked: list[object] = [timetable]
    for found in walked:
        walked += gc.get_referents(found) if not isinstance(found, type) else []
    assert len(walked) < 100


def test_a_sweep_drops_stale_entries_and_no_others() -> None:
    """In steps, between which time passes and entries are added."""
    timetable = Timetable()
    planned: dict[int, int] = {}
    for offset in range(3_000):
        planned[offset] = timetable.add(START_MS + (offset * 7_919) % 5_000, offset)
    meant = set(range(0, 3_000, 7))

    def is_meant(offset: int, number: int) -> bool:
        return offset in meant and planned[offset] == number

    seen: list[int] = []
    sweep = timetable.sweep(is_meant)
    for now_ms in range(START_MS, START_MS + 6_000, 100):
        for _ in range(3):
            next(sweep, None)
        while found := timetable.pop_due(now_ms):
            seen += [offset for offset in found[1] if is_meant(offset, found[0])]
        if now_ms % 300 == 0:
            meant.add(now_ms)
            planned[now_ms] = timetable.add(now_ms + 60, now_ms)
    assert sorted(seen) == sorted(meant)
    assert (timetable.size, timetable.next_due_ms) == (0, None)


def test_a_step_of_a_sweep_is_short_however_many_are_due_at_once() -> None:
    """After a restart all undecided transactions may be due at the same time."""
    timetable = Timetable()
    count = 10 * timetable_module.ENTRIES_PER_STEP
    for offset in range(count):
        number = timetable.add(START_MS, offset)
    looked: list[int] = []

    def is_meant(offset: int, _number: int) -> bool:
        looked.append(offset)
        return offset % 2 == 0

    steps = timetable.sweep(is_meant)
    for _ in range(10):
        before = len(looked)
        next(steps)
        assert len(looked) - before <= timetable_module.ENTRIES_PER_STEP
    assert timetable.add(START_MS, count) == number  # added during the sweep
    for _ in steps:
        pass

    assert timetable.size == count // 2 + 1
    left = timetable.pop_due(START_MS + BUCKET_MS)
    assert left is not None
    assert (left.number, list(left.offsets)) == (number, list(range(0, count + 1, 2)))


def test_entries_of_decided_transactions_do_not_accumulate(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may request days without a check, and any number may be decided in a day."""
    monkeypatch.setattr(checker, "STALE_MAX", 100)
    producer = broker.producers.join("pg", Connected())
    # Only private names show how much memory stale entries take.
    timetable = broker.checker._timetable
    halves = []
    for number in range(2_000):
        seconds = str(3_600 + number % 50)
        halves.append(broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds))
        if number % 10:
            broker.end(halves.pop(), Event.ROLLBACK)
        if number % 5 == 0:
            broker.wait(10)
            broker.wait(checker.SWEEP_PAUSE_MS)
        assert timetable.size <= 2 * len(halves) + 200
        assert len(timetable._order) <= 2 * len(timetable._buckets) + 100

    broker.wait(4_000_000)
    assert sorted(producer.checked_offsets) == [half.physical_offset for half in halves]


def test_decided_transactions_of_a_group_without_members_are_dropped(broker: Broker) -> None:
    """Also after one that stays undecided."""
    broker.prepare()
    for _ in range(50):
        half = broker.prepare()
        broker.wait(TIMEOUT_MS + BUCKET_MS)
        broker.end(half, Event.COMMIT)
    broker.wait(2 * group_queues.NO_MEMBER_RETRY_MS)
    assert broker.checker.waiting_for_producers == 1


# --- pauses


def test_pauses_grow_and_have_jitter(tmp_path: Path) -> None:
    """By half each, up to ten minutes, with a tenth of jitter to spread checks due together."""
    seed = 20_240_607
    print(f"seed {seed}")
    broker = Broker(tmp_path, config=TransactionConfig(check_max=100))
    broker.jitter.seed(seed)
    broker.producers.join("pg", Connected())
    entries = [broker.prepare() for _ in range(50)]
    broker.log.flush()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for number in range(1, 100):
        middle_ms = min(INTERVAL_MS * 1.5 ** (number - 1), 600_000)
        waits = []
        for half in entries:
            entry = broker.table.get(half.physical_offset)
            assert entry is not None
            assert entry.checks == number
            waits.append(broker.checker.next_check_in_ms(entry) or 0)
        assert 0.9 * middle_ms - 1 <= min(waits) < max(waits) <= 1.1 * middle_ms + BUCKET_MS
        broker.clock.now_ms += max(waits)
        broker.wait(0)


def test_an_interval_above_ten_minutes_is_not_shortened(tmp_path: Path) -> None:
    """An operator who configures fewer checks gets fewer."""
    config = TransactionConfig(check_interval_ms=3_600_000)
    broker = Broker(tmp_path, config=config)
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for number in (1, 2):
        assert len(producer.checks) == number
        broker.wait(3_240_000 - BUCKET_MS)
        assert len(producer.checks) == number
        broker.wait(720_000 + 2 * BUCKET_MS)


def test_the_time_of_the_next_check_is_known_while_it_is_scheduled(broker: Broker) -> None:
    """It is unknown while the group has no member, and if there will be none."""
    half = broker.prepare(group="pg")
    entry = broker.table.get(half.physical_offset)
    assert entry is not None
    told = broker.checker.next_check_in_ms
    assert told(entry) == TIMEOUT_MS
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert told(entry) is None

    producer = broker.producers.join("pg", Connected())
    broker.service.on_producer("pg", producer)
    broker.wait(0)
    assert INTERVAL_MS <= (told(entry) or 0) < INTERVAL_MS + BUCKET_MS
    for _ in range(3):
        broker.wait(4 * INTERVAL_MS)
    assert told(entry) is None


# --- producers that acknowledge


def member(broker: Broker, name: str = "p") -> Connected:
    """Connect a halfmq client, which acknowledges checks."""
    return broker.producers.join("pg", Connected(name, acknowledges=True))


def test_only_an_acknowledged_check_counts(broker: Broker) -> None:
    """The time for the answer begins with the acknowledgement; no check is sent meanwhile."""
    producer = member(broker)
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    broker.wait(2_000)
    assert len(producer.checks) == 1
    assert counts(broker) == (1, 0, 0)

    producer.acknowledge()
    broker.wait(0)
    assert counts(broker) == (1, 1, 0)
    broker.wait(INTERVAL_MS - BUCKET_MS)
    assert len(producer.checks) == 1
    broker.wait(2 * BUCKET_MS)
    assert len(producer.checks) == 2


@pytest.mark.parametrize("code", [None, 1, -7])
def test_a_check_that_a_member_does_not_accept_goes_to_the_next_at_once(
    broker: Broker, code: int | None
) -> None:
    """Lost, late, refused or invalid: each member gets it once, the one that prepared first."""
    members = [member(broker, f"p{number}") for number in range(3)]
    broker.prepare(members[2])
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    asked = [members[2]]
    for number in (1, 2, 3):
        assert [one for one in members if one.checks] == [one for one in members if one in asked]
        assert sum(len(one.checks) for one in members) == number
        (open_one,) = [one for one in members if one.unacknowledged]
        open_one.acknowledge(code)
        broker.wait(0)
        asked += [one for one in members if one.unacknowledged]
    broker.wait(group_queues.BUSY_RETRY_MS - BUCKET_MS)
    assert sum(len(one.checks) for one in members) == 3
    assert counts(broker) == (3, 0, 3)

    broker.wait(2 * BUCKET_MS)
    assert len(members[2].checks) == 2
    members[2].acknowledge()
    broker.wait(0)
    assert counts(broker) == (4, 1, 3)


def test_a_group_that_accepts_no_check_gets_them_less_and_less_often(broker: Broker) -> None:
    """It may have no checker; no check is counted, and none is sent in a tight loop."""
    producer = member(broker)
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for _ in range(3_600):
        producer.acknowledge(1)
        broker.wait(1_000)
    assert 100 <= len(producer.checks) <= 140
    assert counts(broker)[1] == 0
    assert broker.service.metrics()["parked"] == 0

    other = member(broker)
    broker.service.on_producer("pg", other)
    producer.acknowledge(1)
    broker.wait(0)
    producer.acknowledge(1)
    broker.wait(0)
    assert len(other.checks) == 1


def test_the_checks_of_a_refusing_group_wait_until_one_is_accepted(broker: Broker) -> None:
    """After some refusals in a row the rest waits; it continues with the first acceptance."""
    producer = member(broker)
    for _ in range(40 * group_queues.REFUSALS_MAX):
        broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    while producer.unacknowledged:
        producer.acknowledge(1)
        broker.wait(0)
    first = len(producer.checks)
    for _ in range(60):
        broker.wait(1_000)
        producer.acknowledge(1)
        broker.wait(0)
        producer.acknowledge(1)
    assert len(producer.checks) < 7 * first

    waited_s = 0
    while counts(broker)[1] < 40 * group_queues.REFUSALS_MAX:
        waited_s += 1
        broker.wait(1_000)
        producer.acknowledge()
        broker.wait(0)
    assert waited_s <= group_queues.REFUSED_RETRY_MS_MAX // 1_000 + 1


def test_a_late_refusal_does_not_end_the_pause_of_a_group(broker: Broker) -> None:
    """The check was in flight when the group was blocked, and its transaction was decided."""
    producer = member(broker)
    halves = [broker.prepare() for _ in range(group_queues.REFUSALS_MAX + 1)]
    broker.clock.now_ms += group_queues.BUSY_RETRY_MS // 2
    young = broker.prepare()
    broker.wait(TIMEOUT_MS - group_queues.BUSY_RETRY_MS // 2 + BUCKET_MS)
    assert set(producer.checked_offsets) == {half.physical_offset for half in halves}
    *refused, late = producer.unacknowledged
    for on_answer in refused:
        on_answer(RemotingCommand(code=1))
    broker.wait(group_queues.BUSY_RETRY_MS // 2)
    assert young.physical_offset not in producer.checked_offsets

    broker.end(halves[-1], Event.COMMIT)
    late(RemotingCommand(code=1))
    broker.wait(0)
    assert young.physical_offset not in producer.checked_offsets

    broker.wait(group_queues.BUSY_RETRY_MS)
    assert young.physical_offset in producer.checked_offsets


def test_a_member_that_accepts_few_checks_at_a_time_gets_the_rest_soon(broker: Broker) -> None:
    """The number of checks that a client accepts at once is limited."""
    producer = member(broker)
    at_a_time, total = 50, 600
    for _ in range(total):
        broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    waited_ms = 0
    while counts(broker)[1] < total * 9 // 10:
        left = at_a_time
        while producer.unacknowledged:
            waiting, producer.unacknowledged = producer.unacknowledged, []
            for on_answer in waiting:
                on_answer(RemotingCommand(code=int(left <= 0)))
                left -= 1
            broker.wait(0)
        waited_ms += BUCKET_MS
        broker.wait(BUCKET_MS)
    assert waited_ms < 2 * total // at_a_time * group_queues.FULL_RETRY_MS


def test_one_check_that_no_member_accepts_stops_no_other(broker: Broker) -> None:
    """A client may be unable to decode one message."""
    producer = member(broker)
    poison = broker.prepare()
    for _ in range(20):
        broker.prepare()
        broker.wait(5_000)
        while producer.unacknowledged:
            offsets = producer.checked_offsets[-len(producer.unacknowledged) :]
            waiting, producer.unacknowledged = producer.unacknowledged, []
            for offset, on_answer in zip(offsets, waiting, strict=True):
                code = 1 if offset == poison.physical_offset else 0
                on_answer(RemotingCommand(code=code))
            broker.wait(0)
    asked = producer.checked_offsets
    assert set(asked) >= {entry.offset for entry in broker.table.after(-1, 19)}
    assert asked.count(poison.physical_offset) < 12


def test_a_member_without_room_gets_the_next_check_after_an_acknowledgement(broker: Broker) -> None:
    """The number of checks in flight to a connection is bounded."""
    producer = member(broker)
    producer.room = 3
    halves = [broker.prepare() for _ in range(10)]
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(producer.checks) == 3
    for _ in range(9):
        producer.acknowledge()
        broker.wait(0)
    assert sorted(producer.checked_offsets) == [half.physical_offset for half in halves]
    assert counts(broker) == (10, 10, 0)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_an_acknowledgement_after_the_decision_is_only_counted(
    broker: Broker, code: int | None
) -> None:
    """The producer may decide by itself while the check is in flight."""
    producer = member(broker)
    half = broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    broker.end(half, Event.COMMIT)
    producer.acknowledge(code)
    broker.wait(0)
    for _ in range(10):
        broker.wait(INTERVAL_MS)
    assert len(producer.checks) == 1
    assert counts(broker) == (1, code == 0, code != 0)


def test_an_acknowledgement_wakes_the_checker(tmp_path: Path) -> None:
    """The next member gets the check at once, not with the next tick."""
    broker = Broker(tmp_path)
    woken: list[bool] = []
    broker.wake = lambda: woken.append(True)
    producer = member(broker)
    broker.prepare()
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    woken.clear()
    producer.acknowledge(1)
    assert woken == [True]


def test_a_transaction_with_several_timetable_entries_gets_one_check(broker: Broker) -> None:
    """One that is parked early leaves an entry in the timetable when it is resumed."""
    producer = broker.producers.join("pg", Connected())
    entry = broker.table.get(broker.prepare().physical_offset)
    assert entry is not None
    for _ in range(3):
        broker.checker.schedule_again(entry, 0, grace_ms=20_000)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert producer.checks == []
    for _ in range(10):
        broker.wait(2_000)
    assert len(producer.checks) == 1


def test_the_time_for_the_last_answer_begins_again_after_a_restart(broker: Broker) -> None:
    """The broker cannot know when the last check was delivered."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    for _ in range(3):
        broker.wait(3 * INTERVAL_MS - (INTERVAL_MS if producer.checks else 0))
    assert len(producer.checks) == 3
    broker.restart(drained=True)
    entry = next(iter(broker.table))
    assert entry.checks == 3
    broker.wait(INTERVAL_MS - BUCKET_MS)
    assert broker.service.metrics()["pending_parked"] == 0
    broker.wait(checker.RESTART_GRACE_MS + 2 * BUCKET_MS)
    assert broker.service.metrics()["pending_parked"] == 1


# --- halves on the disk


class Cold:
    """A slow disk: fetches wait until the test ends them."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = broker
        self.fetches: list[Callable[[bool], None]] = []
        self._read = broker.log.unchecked_bytes
        monkeypatch.setattr(broker.log, "unchecked_bytes", self._read_if_allowed)
        broker.fetch = self._fetch

    def _read_if_allowed(self, offset: int) -> bytes | None:
        if not waiting.is_allowed:
            raise NotInMemoryError([])
        return self._read(offset)

    def _fetch(self, _missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
        self.fetches.append(on_fetched)

    def end_fetches(self, *, failing: bool = False) -> None:
        fetches, self.fetches = self.fetches, []
        for on_fetched in fetches:
            on_fetched(not failing)
        self.broker.wait(0)


def test_halves_that_are_not_in_memory_are_fetched_some_at_a_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop never waits for the disk; each half gets one check after its fetch."""
    producer = broker.producers.join("pg", Connected())
    halves = [broker.prepare() for _ in range(2 * checker.COLD_READS_MAX + 5)]
    cold = Cold(broker, monkeypatch)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    sizes = []
    while cold.fetches:
        sizes.append(len(cold.fetches))
        cold.end_fetches()
    assert sizes == [checker.COLD_READS_MAX] * 2 + [5]
    assert sorted(producer.checked_offsets) == [half.physical_offset for half in halves]


def test_a_half_that_cannot_be_read_is_tried_again_later(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be delivered without its half, so it is kept."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    cold = Cold(broker, monkeypatch)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    cold.end_fetches(failing=True)
    assert "event=half_unreadable half_offset=0" in caplog.text
    broker.wait(INTERVAL_MS + BUCKET_MS)
    cold.end_fetches()
    assert len(producer.checks) == 1
    assert counts(broker) == (1, 1, 0)


def test_a_decision_during_the_fetch_of_its_half_ends_the_checks(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetched half is dropped."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    cold = Cold(broker, monkeypatch)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    broker.end(half, Event.ROLLBACK)
    cold.end_fetches()
    assert producer.checks == []
    assert broker.checker._fetched == set()  # nothing public shows a set that only grows


def counts(broker: Broker) -> tuple[int, int, int]:
    """Return the numbers of checks sent, delivered and not accepted."""
    checks = broker.checker
    return checks.sent, checks.delivered, checks.not_accepted


# --- clocks and durations


@pytest.mark.parametrize("skew_ms", [-86_400_000, 0, 86_400_000])
@pytest.mark.parametrize(("immunity", "first_ms"), [("", 6_000), ("60", 60_000)])
def test_a_clients_clock_changes_no_check(
    broker: Broker, skew_ms: int, immunity: str, first_ms: int
) -> None:
    """Ahead or behind by a day: every check is sent at the same time of the broker."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare(born_ms=START_MS + skew_ms, CHECK_IMMUNITY_TIME_IN_SECONDS=immunity)
    asked_at: list[int] = []
    for _ in range(400):
        broker.wait(1_000)
        asked_at += [broker.clock.now_ms - START_MS] * (len(producer.checks) - len(asked_at))
    assert asked_at == [first_ms, first_ms + 30_000, first_ms + 75_000]
    assert broker.service.metrics()["parked"] == 1


LOCAL_SECONDS = (0.05, 0.5, 3, 5, 7, 12, 29, 33, 62, 95, 120)  # none at the time of a check


@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize("immunity_s", [0, 1, 60, 150, 600])
@pytest.mark.parametrize("local_s", LOCAL_SECONDS)
def test_a_local_transaction_of_any_length_is_delivered_once(
    broker: Broker, local_s: float, immunity_s: int, acknowledges: bool
) -> None:
    """With and without immunity; while it runs, the answer to every check is "not known yet".

    The producer commits when it is done, and says so again to every check that still comes: no
    second final message, no check before its time, and none after the decision.
    """
    broker.config = TransactionConfig(check_max=15)
    broker.restart()
    producer = broker.producers.join("pg", Connected(acknowledges=acknowledges))
    half = broker.prepare(producer, CHECK_IMMUNITY_TIME_IN_SECONDS=str(immunity_s or ""))
    step_ms, done_ms, done, answered = 200, round(local_s * 1_000), False, 0
    asked_at: list[int] = []
    while broker.clock.now_ms - START_MS < 160_000:
        broker.wait(step_ms)
        producer.acknowledge()
        now_ms = broker.clock.now_ms - START_MS
        asked_at += [now_ms] * (len(producer.checks) - len(asked_at))
        if now_ms >= done_ms and not done:
            done = True
            broker.end(half, Event.COMMIT)
        for _ in producer.checks[answered:]:
            broker.end(half, Event.COMMIT if done else Event.UNKNOWN)
        answered = len(producer.checks)

    assert len(broker.finals_of(half)) == 1
    due_ms = [immunity_s * 1_000 or TIMEOUT_MS]
    for pause_ms in (30_000, 45_000, 67_500, 101_250):
        due_ms.append(due_ms[-1] + pause_ms)
    expected = [due for due in due_ms if due <= done_ms]
    assert len(asked_at) == len(expected)
    for asked, due in zip(asked_at, expected, strict=True):
        assert due <= asked <= due + 5 * (BUCKET_MS + step_ms)
