"""Asking producers back: whom, when, how often, and what then."""

import logging
from pathlib import Path

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction import checker
from halfmq.broker.transaction.checker import BUCKET_MS, Timetable
from halfmq.broker.transaction.half import StoredHalf
from halfmq.broker.transaction.pending import Event
from halfmq.remoting.codes import RequestCode
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.transactions import HOST, START_MS, Broker, Connected

TIMEOUT_MS = 6_000
INTERVAL_MS = 30_000


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path, config=TransactionConfig(check_max=3))


def test_the_first_check_comes_when_the_half_is_old_enough(broker: Broker) -> None:
    """Neither a moment early nor a round late, and with what clients read in it."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    half = broker.prepare(producer, key="K" * 32)
    broker.end(broker.prepare(), Event.COMMIT)

    broker.wait(TIMEOUT_MS - 1)
    assert producer.asked == []
    broker.wait(1 + BUCKET_MS)

    code, header, body = producer.asked[1]
    assert len(producer.asked) == 2
    assert code == RequestCode.CHECK_TRANSACTION_STATE
    assert header.topic == HALF_TOPIC
    assert header.commit_log_offset == half.physical_offset
    assert header.tran_state_table_offset == half.queue_offset
    assert header.msg_id == header.transaction_id == "K" * 32
    assert header.offset_msg_id == offset_message_id(HOST, half.physical_offset)
    assert header.broker_name == "broker-a"
    assert decode_record(body).topic == "orders"


def test_age_counts_from_the_brokers_clock(broker: Broker) -> None:
    """A producer whose clock is a day off is asked like any other."""
    producer = broker.producers.join("pg", Connected())
    for skew_ms in (-86_400_000, 86_400_000):
        broker.prepare(born_ms=START_MS + skew_ms)
    broker.wait(TIMEOUT_MS - 1)
    assert producer.asked == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.asked) == 2


@pytest.mark.parametrize(("seconds", "first_ms"), [("120", 120_000), ("1", 1_000), ("no", 6_000)])
def test_immunity_sets_the_time_of_the_first_check(
    broker: Broker, seconds: str, first_ms: int
) -> None:
    """As the message says, be it longer or shorter than the broker's setting."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
    broker.wait(first_ms - 1)
    assert producer.asked == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.asked) == 1


def test_one_check_at_a_time(broker: Broker) -> None:
    """The next question comes an interval later, and tells how many there were."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for expected in (1, 1, 2):
        assert len(producer.asked) == expected
        broker.wait(INTERVAL_MS // 2 + BUCKET_MS)
    times = [
        decode_record(body).property_map["TRANSACTION_CHECK_TIMES"] for _, _, body in producer.asked
    ]
    assert times == ["1", "2"]


@pytest.mark.parametrize("event", [Event.COMMIT, Event.ROLLBACK])
def test_the_answer_to_a_check_ends_the_questions(broker: Broker, event: Event) -> None:
    """The producer answers with the offsets it was given."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    ((_, header, _),) = producer.asked

    broker.service.end(header.commit_log_offset, header.tran_state_table_offset, "pg", event)
    broker.wait(20 * INTERVAL_MS)

    assert len(producer.asked) == 1
    assert len(broker.finals_of(half)) == (event is Event.COMMIT)


def test_who_prepared_is_asked_first_and_then_the_others_in_turn(broker: Broker) -> None:
    """One member that never answers must not keep the others from being asked."""
    members = [broker.producers.join("pg", Connected(f"p{number}")) for number in range(3)]
    broker.prepare(members[1])
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert [len(member.asked) for member in members] == [0, 1, 0]

    for _ in range(2):
        broker.wait(INTERVAL_MS + BUCKET_MS)
    assert sum(len(member.asked) for member in members) == 3
    assert sorted(len(member.asked) for member in members) != [0, 0, 3]


def test_another_member_answers_for_a_dead_one(broker: Broker) -> None:
    """A producer killed between its local commit and its decision leaves the rest to its group."""
    owner, other = Connected("owner"), broker.producers.join("pg", Connected("other"))
    half = broker.prepare(owner)
    owner.closed = True
    broker.wait(TIMEOUT_MS + BUCKET_MS)

    assert (owner.asked, other.asked_offsets) == ([], [half.physical_offset])


def test_who_prepared_is_asked_before_its_heartbeat_is_there(broker: Broker) -> None:
    """A producer sends its first message before it is registered as a member of its group."""
    owner = Connected()
    broker.prepare(owner)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(owner.asked) == 1


def test_a_group_that_is_away_is_neither_asked_nor_counted(broker: Broker) -> None:
    """However long it takes; when one of it connects it is asked at the next tick."""
    owner = Connected()
    half = broker.prepare(owner)
    owner.closed = True
    broker.wait(86_400_000)
    assert broker.service.metrics()["waiting_for_producers"] == 1
    assert broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []

    back = broker.producers.join("pg", Connected())
    broker.service.on_producer("pg", back)
    broker.wait(0)

    assert back.asked_offsets == [half.physical_offset]
    assert decode_record(back.asked[0][2]).property_map["TRANSACTION_CHECK_TIMES"] == "1"


def test_lost_news_of_a_producer_strand_nothing(broker: Broker) -> None:
    """Groups that are away are also looked for now and then."""
    broker.prepare(owner := Connected())
    owner.closed = True
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    back = broker.producers.join("pg", Connected())
    broker.wait(checker.ABSENT_SWEEP_MS)
    assert len(back.asked) == 1


def test_a_check_that_was_not_written_does_not_count(broker: Broker) -> None:
    """A producer that does not read is passed over; the only one is tried again soon."""
    stuck = broker.producers.join("pg", Connected(writable=False))
    broker.prepare(stuck)
    for _ in range(60):
        broker.wait(60_000)
    assert stuck.asked == []
    assert broker.service.metrics()["parked"] == 0

    stuck.writable = True
    broker.wait(checker.BUSY_RETRY_MS + BUCKET_MS)
    assert len(stuck.asked) == 1


def test_a_busy_member_is_passed_over(broker: Broker) -> None:
    """Another one of the group can say as well."""
    busy = broker.producers.join("pg", Connected(writable=False))
    other = broker.producers.join("pg", Connected())
    broker.prepare(busy)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert (len(busy.asked), len(other.asked)) == (0, 1)


def test_after_the_last_unanswered_check_the_transaction_is_parked(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """With one more interval for the last answer; then a record, a log line and a count."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare(TAGS="TagA")
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for _ in range(2):
        broker.wait(INTERVAL_MS + BUCKET_MS)
    assert len(producer.asked) == 3
    broker.wait(INTERVAL_MS - BUCKET_MS)
    assert broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []

    broker.wait(2 * BUCKET_MS)
    broker.wait(100 * INTERVAL_MS)

    (parked,) = broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC)
    assert parked.prepared_transaction_offset == half.physical_offset
    assert parked.property_map["TAGS"] == "TagA"
    assert "event=transaction_parked half_offset=0 group=pg" in caplog.text
    assert len(producer.asked) == 3
    assert broker.service.metrics()["parked"] == broker.service.metrics()["pending_parked"] == 1


def test_a_parked_transaction_can_still_be_decided_and_stays_parked_after_a_crash(
    broker: Broker,
) -> None:
    """A late decision is the first one; until it comes nobody is asked again."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    for _ in range(9):
        broker.wait(INTERVAL_MS + BUCKET_MS)
    broker.log.flush()
    broker.restart()
    producer.asked.clear()
    broker.wait(100 * INTERVAL_MS)
    assert producer.asked == []
    assert broker.service.metrics()["pending_parked"] == 1

    broker.end(half, Event.COMMIT)

    assert len(broker.finals_of(half)) == 1
    assert broker.service.metrics()["pending_parked"] == 0


def test_parking_that_cannot_be_recorded_is_tried_again(broker: Broker) -> None:
    """A transaction must not be given up without a durable trace."""
    broker.producers.join("pg", Connected())
    broker.prepare()
    for _ in range(3):
        broker.wait(INTERVAL_MS + BUCKET_MS)
    broker.log.failing = True
    broker.wait(INTERVAL_MS + BUCKET_MS)
    assert broker.service.metrics()["parked"] == 0
    broker.log.failing = False
    broker.wait(INTERVAL_MS + BUCKET_MS)
    assert broker.service.metrics()["parked"] == 1


def test_an_unreadable_half_does_not_harm_the_others(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction's trouble is its own, and is told."""
    producer = broker.producers.join("pg", Connected())
    broken, sound = broker.prepare(), broker.prepare()
    read = broker.service._half_at

    def fail_for_one(offset: int) -> StoredHalf | None:
        if offset == broken.physical_offset:
            raise StoreError("a bad sector")
        return read(offset)

    monkeypatch.setattr(broker.service._checker, "_read_half", fail_for_one)
    with caplog.at_level(logging.ERROR):
        broker.wait(TIMEOUT_MS + BUCKET_MS)

    assert producer.asked_offsets == [sound.physical_offset]
    assert "event=half_unreadable half_offset=0" in caplog.text


def test_many_due_at_once_go_out_in_slices(broker: Broker) -> None:
    """Sends are served between the slices."""
    producer = broker.producers.join("pg", Connected())
    halves = [broker.prepare() for _ in range(3 * checker.CHECKS_PER_TICK + 1)]
    broker.clock.now_ms += TIMEOUT_MS + BUCKET_MS
    sizes: list[int] = []
    while broker.service.tick() == 0:
        sizes.append(len(producer.asked) - sum(sizes))

    assert sizes == [checker.CHECKS_PER_TICK] * 3
    assert producer.asked_offsets == [half.physical_offset for half in halves]


def test_decided_transactions_cost_a_look_and_no_more(broker: Broker) -> None:
    """Nearly all are decided when their first check is due."""
    for _ in range(checker.LOOKS_PER_TICK + 10):
        broker.end(broker.prepare(), Event.COMMIT)
    broker.clock.now_ms += TIMEOUT_MS + BUCKET_MS
    while broker.service.tick() == 0:
        pass
    assert broker.service._checker._ready == broker.service._checker._ready.__class__()
    assert broker.service._checker._timetable.next_due_ms is None


def test_after_a_restart_checks_wait_a_moment(broker: Broker) -> None:
    """Producers need time to come back, and some bring the decision."""
    half = broker.prepare()
    broker.log.flush()
    broker.clock.now_ms += 3_600_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(checker.RESTART_GRACE_MS - 1)
    assert producer.asked == []
    broker.wait(1 + BUCKET_MS)
    assert producer.asked_offsets == [half.physical_offset]


def test_half_a_second_after_a_restart_what_is_due_is_asked(broker: Broker) -> None:
    """Nobody waits for a decision longer than a producer needs to come back."""
    half = broker.prepare()
    broker.log.flush()
    broker.clock.now_ms += 3_600_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(500)
    assert producer.asked_offsets == [half.physical_offset]


def test_a_young_half_is_not_asked_early_by_a_restart(broker: Broker) -> None:
    """Its time counts from when it was stored."""
    broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    broker.log.flush()
    broker.clock.now_ms += 20_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(39_999)
    assert producer.asked == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.asked) == 1


def test_a_timetable_returns_everything_once_and_never_early() -> None:
    """Due times come in any order and may lie in the past."""
    timetable = Timetable()
    due = {offset: START_MS + (offset * 7_919) % 1_000 for offset in range(500)}
    for offset, due_ms in due.items():
        timetable.add(due_ms, offset)
    seen: list[int] = []
    for now_ms in range(START_MS, START_MS + 1_000 + BUCKET_MS + 1):
        for offset in timetable.take_due(now_ms):
            assert due[offset] <= now_ms <= due[offset] + BUCKET_MS
            seen.append(offset)
    assert sorted(seen) == sorted(due)
    assert timetable.next_due_ms is None
