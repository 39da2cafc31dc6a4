"""Operators: listing, decisions, resuming parked transactions, changed topics."""

from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.loop import slices
from halfmq.broker.tables.topic_config import TopicConfig
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.destination import CurrentQueues, Destinations
from halfmq.broker.transaction.errors import (
    DecidedOtherwiseError,
    HalfMismatchError,
    HalfNotFoundError,
)
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.remoting.codes import ResponseCode
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendResult
from tests.support.broker_doubles import START_MS
from tests.support.transactions import HOST, Broker, Connected, end_now, message


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path)


def park(broker: Broker, half: AppendResult) -> None:
    """Park a transaction, as after its last check."""
    assert broker.park(half)


# --- lists


def test_a_transaction_is_described_in_full(broker: Broker) -> None:
    """Age, owner and progress of checks: what an operator needs before a decision."""
    producer = broker.producers.join("pg", Connected("10.0.0.7:4000"))
    half = broker.prepare(producer, key="K1", KEYS="order-7 order-8")
    broker.clock.now += 2_000

    (info,) = broker.service.view.page(-1, 10).infos

    assert (info.offset, info.queue_offset) == (half.physical_offset, half.queue_offset)
    assert info.message_id == offset_message_id(HOST, half.physical_offset)
    assert (info.transaction_id, info.producer_group) == ("K1", "pg")
    assert (info.topic, info.keys, info.messages) == ("orders", "order-7 order-8", 1)
    assert (info.state, info.parked_reason) == ("prepared", None)
    assert (info.age_ms, info.store_timestamp) == (2_000, START_MS)
    assert info.owner == "10.0.0.7:4000"
    assert (info.checks_sent, info.checks_delivered, info.checks_answered) == (0, 0, 0)
    assert info.next_check_ms is not None
    assert 3_900 <= info.next_check_ms <= 4_100

    broker.wait(5_000)
    end_now(
        broker.service.decisions,
        DecisionRequest(
            half.physical_offset, half.queue_offset, "pg", TransactionEvent.UNKNOWN, True
        ),
    )
    (info,) = broker.service.view.page(-1, 10).infos
    assert (info.checks_sent, info.checks_delivered, info.checks_answered) == (1, 1, 1)
    producer.closed = True
    assert broker.service.view.page(-1, 10).infos[0].owner is None


def test_pages_follow_each_other_without_gap_or_repetition(broker: Broker) -> None:
    """Also if transactions of the previous page are decided meanwhile."""
    halves = [broker.prepare(group=f"pg{number % 2}") for number in range(10)]
    offsets = [half.physical_offset for half in halves]

    first = broker.service.view.page(-1, 4).infos
    broker.end(halves[3], TransactionEvent.COMMIT, group="pg1")
    second = broker.service.view.page(first[-1].offset, 100).infos

    assert [info.offset for info in first + second] == offsets
    assert broker.service.view.page(offsets[-1], 4).infos == []
    odd = broker.service.view.page(-1, 100, group="pg1").infos
    assert [info.offset for info in odd] == [*offsets[1:2], *offsets[5::2]]


def test_a_listing_can_be_restricted_to_one_state(broker: Broker) -> None:
    """Operators look for parked transactions."""
    halves = [broker.prepare() for _ in range(3)]
    park(broker, halves[1])

    (info,) = broker.service.view.page(-1, 100, state="parked").infos

    assert (info.offset, info.state) == (halves[1].physical_offset, "parked")
    assert (info.parked_reason, info.next_check_ms) == ("no-answer", None)
    assert len(broker.service.view.page(-1, 100, state="prepared").infos) == 2


def test_a_transaction_is_found_by_its_key_and_by_its_id(broker: Broker) -> None:
    """An application may log either."""
    half, other = broker.prepare(key=f"{7:032X}"), broker.prepare()

    for name in (f"{7:032X}", offset_message_id(HOST, half.physical_offset)):
        found = broker.service.view.find(name)
        assert found is not None
        assert found.offset == half.physical_offset
    broker.end(half, TransactionEvent.COMMIT)
    assert broker.service.view.find(f"{7:032X}") is None
    assert broker.service.view.find(offset_message_id(HOST, half.physical_offset)) is None
    assert broker.service.view.find("nothing") is None
    assert broker.service.metrics()["pending"] == 1
    assert broker.service.view.page(-1, 1).infos[0].offset == other.physical_offset


def test_a_key_that_looks_like_an_id_finds_its_own_transaction(broker: Broker) -> None:
    """Both are 32 hexadecimal digits; a half at that offset is another transaction."""
    broker.prepare()
    second = broker.prepare()
    third = broker.prepare(key=f"C0A80001{'0' * 8}{second.physical_offset:016X}")

    found = broker.service.view.find(f"C0A80001{'0' * 8}{second.physical_offset:016X}")

    assert found is not None
    assert found.offset == third.physical_offset


# --- decisions


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("action", ["commit", "rollback"])
def test_an_operator_decides_in_the_producers_place(
    broker: Broker, action: str, parked: bool
) -> None:
    """Once, like a producer; later requests get that decision."""
    half = broker.prepare()
    if parked:
        park(broker, half)

    ended = broker.service.operator.decide(half.physical_offset, action)

    committed = action == "commit"
    assert len(broker.finals_of(half)) == committed
    assert (ended.final_offset is not None) is committed
    assert broker.service.metrics()["decided_by_operators"] == 1
    end = broker.log.write_offset
    again = broker.service.operator.decide(half.physical_offset, action)
    assert again.final_offset == ended.final_offset
    opposite = TransactionEvent.ROLLBACK if committed else TransactionEvent.COMMIT
    with pytest.raises(DecidedOtherwiseError):
        broker.end(half, opposite)
    with pytest.raises(DecidedOtherwiseError):
        broker.service.operator.decide(half.physical_offset, "rollback" if committed else "commit")
    assert broker.log.write_offset == end


def test_an_operator_must_name_a_half(broker: Broker) -> None:
    """A decision about a final message would deliver it again."""
    half = broker.prepare()
    broker.end(half, TransactionEvent.COMMIT)
    (final,) = broker.finals_of(half)
    for offset, error in (
        (final.physical_offset, HalfMismatchError),
        (99_999, HalfNotFoundError),
        (-5, HalfNotFoundError),
    ):
        with pytest.raises(error):
            broker.service.operator.decide(offset, "commit")
        with pytest.raises(error):
            broker.service.operator.resume(offset)
    assert broker.log.write_offset == final.end


def test_a_damaged_half_can_still_be_rolled_back(broker: Broker) -> None:
    """It can never be delivered, and its checks must end."""
    half = broker.prepare()
    broker.log.flush()
    broker.restart()
    encoded = bytearray(broker.log.encoded[half.physical_offset])
    encoded[90] ^= 1
    broker.log.encoded[half.physical_offset] = bytes(encoded)

    with pytest.raises(HalfNotFoundError):
        broker.service.operator.decide(half.physical_offset, "commit")
    broker.service.operator.decide(half.physical_offset, "rollback")

    assert broker.service.metrics()["pending"] == 0
    (rollback,) = broker.log.scan(half.physical_offset + half.size)
    assert rollback.prepared_transaction_offset == half.physical_offset
    assert rollback.sys_flag & 0xC == 0xC


# --- parking and taking back


def test_the_parked_reason_shows_whether_checks_were_answered(broker: Broker) -> None:
    """Without answers, look at the producers; with UNKNOWN, at their checker."""
    silent = broker.producers.join("silent", Connected())
    unsure = broker.producers.join("unsure", Connected())
    broker.prepare(group="silent")
    half = broker.prepare(group="unsure")
    for _ in range(20):
        broker.wait(700_000)
        for _ in unsure.checks:
            end_now(
                broker.service.decisions,
                DecisionRequest(
                    half.physical_offset,
                    half.queue_offset,
                    "unsure",
                    TransactionEvent.UNKNOWN,
                    True,
                ),
            )
        unsure.checks.clear()

    assert len(silent.checks) == 15
    reasons = [
        record.property_map["TRANSACTION_PARKED"]
        for record in broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC)
    ]
    assert reasons == ["no-answer", "unknown"]
    metrics = broker.service.metrics()
    assert (metrics["parked_no_answer"], metrics["parked_unknown"]) == (1, 1)
    assert (metrics["parked"], metrics["pending_parked"], metrics["checks_answered"]) == (2, 2, 15)


def test_only_answers_to_checks_are_counted_as_such(broker: Broker) -> None:
    """An unrequested "unknown" does not answer a check."""
    half = broker.prepare()
    broker.end(half, TransactionEvent.UNKNOWN)
    (info,) = broker.service.view.page(-1, 1).infos
    assert info.checks_answered == 0


def test_a_repeated_answer_to_a_check_is_counted_once(broker: Broker) -> None:
    """Networks and clients repeat answers."""
    broker.producers.join("pg", Connected())
    half = broker.prepare()
    for checks in (0, 1, 2):
        for _ in range(5):
            end_now(
                broker.service.decisions,
                DecisionRequest(
                    half.physical_offset, half.queue_offset, "pg", TransactionEvent.UNKNOWN, True
                ),
            )
        (info,) = broker.service.view.page(-1, 1).infos
        assert (info.checks_sent, info.checks_answered) == (checks, checks)
        broker.wait(50_000)
    assert broker.service.metrics()["checks_answered"] == 2


@pytest.mark.parametrize("restart", ["no", "crash", "stop"])
def test_the_checks_of_a_resumed_transaction_begin_again(broker: Broker, restart: str) -> None:
    """At once, as many as the first time, and also after a restart."""
    producer = broker.producers.join("pg", Connected())
    half = broker.prepare()
    for _ in range(20):
        broker.wait(700_000)
    assert broker.service.metrics()["pending_parked"] == 1
    producer.checks.clear()

    assert broker.service.operator.resume(half.physical_offset).position == broker.log.write_offset
    assert broker.log.flush_requests
    broker.log.flush()
    if restart != "no":
        broker.restart(drained=restart == "stop")
    broker.wait(1_000)

    assert producer.checked_offsets == [half.physical_offset]
    entry = broker.table.get(half.physical_offset)
    assert entry is not None
    assert (entry.state, entry.checks) == (State.PREPARED, 1)
    for _ in range(20):
        broker.wait(700_000)
    assert len(producer.checks) == 15
    assert entry.state is State.PARKED or restart != "no"
    assert len(broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC)) == 2


def test_resuming_a_transaction_that_is_not_parked_does_nothing(broker: Broker) -> None:
    """For a decided one, the error names the decision."""
    half, decided = broker.prepare(), broker.prepare()
    broker.end(decided, TransactionEvent.ROLLBACK)
    end = broker.log.write_offset

    broker.service.operator.resume(half.physical_offset)
    with pytest.raises(DecidedOtherwiseError, match="was rolled back"):
        broker.service.operator.resume(decided.physical_offset)

    assert broker.log.write_offset == end


def test_a_transaction_is_not_resumed_if_that_cannot_be_recorded(broker: Broker) -> None:
    """Otherwise the next start would not know it."""
    half = broker.prepare()
    park(broker, half)
    broker.log.failing = True
    with pytest.raises(StoreError):
        broker.service.operator.resume(half.physical_offset)
    assert broker.service.metrics()["pending_parked"] == 1


# --- retention


def test_an_undecided_half_blocks_retention_with_a_warning(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per blocking half; all halves that are too old are parked for operators."""
    halves = [broker.prepare() for _ in range(20)]
    wanted = halves[-1].physical_offset
    assert broker.service.oldest_pending_offset == halves[0].physical_offset

    for _ in range(3):
        broker.service.on_retention_blocked(wanted)
    broker.wait(0)

    assert caplog.text.count("event=retention_blocked") == 1
    metrics = broker.service.metrics()
    assert metrics["retention_blocked"] == 1
    assert metrics["parked_expired"] == metrics["pending_parked"] == len(halves) - 1
    assert broker.service.oldest_pending_offset == halves[0].physical_offset
    broker.service.operator.decide(halves[0].physical_offset, "rollback")
    broker.service.on_retention_blocked(wanted)
    assert caplog.text.count("event=retention_blocked") == 2
    broker.end(halves[1], TransactionEvent.COMMIT)  # none of them is lost
    assert len(broker.finals_of(halves[1])) == 1


def test_halves_that_are_too_old_are_parked_in_slices(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million; each slice continues after the previous one."""
    halves = [broker.prepare() for _ in range(4)]
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # one step each
    parking, parked = broker.parking, []

    broker.service.on_retention_blocked(halves[3].physical_offset)
    for _ in range(5):
        waits = parking.tick(slices.Slice())
        parked.append((broker.service.metrics()["parked_expired"], waits))

    assert parked == [(1, 0), (2, 0), (3, 0), (3, None), (3, None)]


def test_all_kinds_of_work_share_one_slice(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks, parking and a snapshot may be due at the same time."""
    halves = [broker.prepare() for _ in range(4)]
    broker.service.on_retention_blocked(halves[3].physical_offset)
    begun: list[float] = []
    began = slices.Slice.__init__

    def begin(self: slices.Slice) -> None:
        began(self)
        begun.append(0.0)

    monkeypatch.setattr(slices.Slice, "__init__", begin)
    broker.service.tick()

    assert len(begun) == 1
    assert broker.service.metrics()["parked_expired"] == 3


def test_later_halves_are_parked_when_they_are_too_old(broker: Broker) -> None:
    """Each at its own time, and not again after an operator has resumed it."""
    first, second, third = (broker.prepare() for _ in range(3))

    broker.service.on_retention_blocked(second.physical_offset)
    broker.wait(0)
    assert broker.service.metrics()["parked_expired"] == 1
    broker.service.operator.resume(first.physical_offset)
    for _ in range(2):
        broker.service.on_retention_blocked(third.physical_offset)
        broker.wait(0)
    assert broker.service.metrics()["parked_expired"] == 2
    assert broker.service.metrics()["pending_parked"] == 1
    assert broker.service.metrics()["retention_blocked"] == 1


def test_retention_that_nothing_blocks_is_not_spoken_of(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty table, or one whose halves are all younger."""
    broker.service.on_retention_blocked(1_000)
    half = broker.prepare()
    broker.service.on_retention_blocked(half.physical_offset)
    assert "retention_blocked" not in caplog.text
    assert broker.service.metrics()["retention_blocked"] == 0


# --- topics that changed between prepare and commit


def test_a_commit_without_a_destination_is_refused_and_can_be_repeated(broker: Broker) -> None:
    """The message is kept until the topic can be created."""
    half = broker.prepare()
    broker.destination.error = RequestRefusedError("no room", ResponseCode.NO_PERMISSION)
    with pytest.raises(RequestRefusedError):
        broker.end(half, TransactionEvent.COMMIT)
    broker.destination.error = None

    broker.end(half, TransactionEvent.COMMIT)

    assert len(broker.finals_of(half)) == 1


class Topics(TopicTable):
    """A table of topics in memory."""

    def __init__(self, **write_queues: int) -> None:
        self.default_queue_nums = 3
        self.topics = {
            name: TopicConfig(name=name, read_queue_nums=8, write_queue_nums=count)
            for name, count in write_queues.items()
        }

    def get(self, name: str) -> TopicConfig | None:
        return self.topics.get(name)

    def ensure(self, name: str, queues: int = 1, perm: int = 6) -> TopicConfig:
        topic = TopicConfig(name=name, read_queue_nums=queues, write_queue_nums=queues)
        return self.topics.setdefault(name, topic)


def _resolved(topics: Topics, topic: str, queue_id: int) -> tuple[str, int]:
    destinations = Destinations(topics, lambda final: final)
    final = destinations.resolve(message(topic, queue_id=queue_id))
    return final.topic, final.queue_id


def test_a_missing_queue_is_replaced_by_queue_id_modulo_queues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So messages of one queue stay in one queue; it is logged once for each topic."""
    topics = Topics(orders=4, closed=0)
    queue_of = CurrentQueues(topics).of

    assert [queue_of("orders", queue) for queue in (0, 3)] == [0, 3]
    assert caplog.text == ""
    assert [queue_of("orders", queue) for queue in (4, 7)] == [0, 3]
    assert caplog.text.count("event=destination_changed topic=orders") == 1
    assert _resolved(topics, "closed", 5) == ("closed", 5)  # it still has eight queues to read from


def test_a_deleted_topic_is_created_again(caplog: pytest.LogCaptureFixture) -> None:
    """With the default number of queues, where its consumers find the message."""
    topics = Topics()

    assert _resolved(topics, "gone", 7) == ("gone", 1)

    assert topics.topics["gone"].write_queue_nums == 3
    assert "event=destination_changed topic=gone accepted_for_queue=7 queue=1" in caplog.text


def test_a_topic_that_cannot_be_created_again_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A delayed message waits until then; one line says so, and not one for each attempt."""
    topics = Topics()

    def refuse(name: str, queues: int = 1, perm: int = 6) -> TopicConfig:
        raise RequestRefusedError(f"no room for {name}", ResponseCode.NO_PERMISSION)

    topics.ensure = refuse  # type: ignore[method-assign]
    queues = CurrentQueues(topics)
    assert [queues.find("gone", queue) for queue in (7, 7, 6)] == [None] * 3
    assert caplog.text.count("event=destination_lacking topic=gone") == 1

    del topics.ensure
    assert queues.find("gone", 7) == 1
