"""Check-back: which producer gets a check, and what follows without an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.loop import slices
from halfmq.broker.loop.slices import Slice
from halfmq.broker.transaction.checks import checker, group_queues
from halfmq.broker.transaction.checks.timetable import BUCKET_MS
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.codes import RequestCode
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError, waiting
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.check_back import INTERVAL_MS, PAUSES_MS, TIMEOUT_MS, counts
from tests.support.transactions import HOST, Broker, Connected


def test_the_first_check_is_sent_after_the_timeout(broker: Broker) -> None:
    """Neither early nor late, with the fields that clients read."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    half = broker.prepare(producer, key="K" * 32)
    broker.end(broker.prepare(), TransactionEvent.COMMIT)

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


def test_a_producer_gets_checks_before_its_first_heartbeat(broker: Broker) -> None:
    """It sends its first message before it is registered as a member of its group."""
    owner = Connected()
    broker.prepare(owner)
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(owner.checks) == 1


def test_a_group_without_members_is_reported_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The listing says it of each transaction, the log once for all: nobody can be asked."""
    for _ in range(3):
        broker.prepare(owner := Connected())
        owner.closed = True
        broker.wait(3_600_000)

    assert [one.producers for one in broker.service.view.page(-1, 9).infos] == [0, 0, 0]
    lines = [line for line in caplog.messages if "group_without_members" in line]
    assert lines == ["event=group_without_members group=pg half_offset=0 undecided=1"]
    broker.producers.join("pg", Connected())
    assert [one.producers for one in broker.service.view.page(-1, 9).infos] == [1, 1, 1]


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
    broker.clock.now += TIMEOUT_MS + BUCKET_MS
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
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.clock.now += TIMEOUT_MS + BUCKET_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    assert broker.checker.tick(broker.clock.now, Slice()) == 0
    assert broker.checker.tick(broker.clock.now, Slice()) is None
    assert producer.checks == []


def test_groups_take_turns(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group with very many due checks does not delay another."""
    busy = broker.producers.join("busy", Connected())
    other = broker.producers.join("other", Connected())
    for _ in range(1_000):
        broker.prepare(group="busy")
    broker.prepare(group="other")
    broker.log.flush()
    broker.clock.now += TIMEOUT_MS + BUCKET_MS
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
        broker.checker.tick(broker.clock.now, Slice())
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
    broker.clock.now += 2 * group_queues.NO_MEMBER_RETRY_MS
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    counts = []
    for _ in range(6):
        broker.checker.tick(broker.clock.now, Slice())
        counts.append(len(looks))

    assert counts == [1, 2, 3, 4, 5, 5]


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
            broker.end(halves.pop(), TransactionEvent.ROLLBACK)
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
        broker.end(half, TransactionEvent.COMMIT)
    broker.wait(2 * group_queues.NO_MEMBER_RETRY_MS)
    assert broker.checker.waiting_for_producers == 1


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
    broker.end(half, TransactionEvent.ROLLBACK)
    cold.end_fetches()
    assert producer.checks == []
    assert broker.checker._fetched == set()  # nothing public shows a set that only grows
