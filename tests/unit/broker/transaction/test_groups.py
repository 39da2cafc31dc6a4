"""Several messages in one transaction: all or none, also after a crash."""

from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.errors import DecidedOtherwiseError, HalfMismatchError
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.store.errors import StoreError
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC
from halfmq.store.log.append_request import AppendResult
from tests.support.transactions import HOST, Broker, Connected, end_now


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path)


def finals(broker: Broker, halves: list[AppendResult]) -> list[int]:
    """Return how many final messages each of the halves has."""
    return [len(broker.finals_of(half)) for half in halves]


def test_adjacent_halves_are_one_transaction(broker: Broker) -> None:
    """With one entry, one check and one line in the listing."""
    producer = broker.producers.join("pg", Connected())

    halves = broker.prepare_group(4, producer)

    assert [half.physical_offset for half in halves[1:]] == [
        half.physical_offset + half.size for half in halves[:-1]
    ]
    marks = [record.property_map["TRANSACTION_GROUP"] for record in broker.records_of(HALF_TOPIC)]
    leader_key = f"{1:032X}"
    assert marks == [f"{leader_key},{number},4" for number in range(4)]
    assert broker.service.metrics()["pending"] == 1
    broker.wait(7_000)
    assert producer.checked_offsets == [halves[0].physical_offset]
    (info,) = broker.service.view.page(-1, 10).infos
    assert (info.offset, info.messages, info.transaction_id) == (
        halves[0].physical_offset,
        4,
        leader_key,
    )
    assert broker.service.metrics()["groups"] == 1


def test_one_message_is_no_group(broker: Broker) -> None:
    """It is stored as any other half, so older versions of the broker read it."""
    (half,) = broker.prepare_group(1)

    (record,) = broker.records_of(HALF_TOPIC)
    assert "TRANSACTION_GROUP" not in record.property_map
    broker.end(half, TransactionEvent.COMMIT)
    assert finals(broker, [half]) == [1]


def test_a_commit_delivers_all_by_one_append(broker: Broker) -> None:
    """Each to its own topic, linked to its own half; the leader's is first and names the others."""
    halves = broker.prepare_group(4)
    start = broker.log.write_offset

    ended = broker.ended(halves[0], TransactionEvent.COMMIT)

    records = list(broker.log.scan(start))
    assert [record.prepared_transaction_offset for record in records] == [
        half.physical_offset for half in halves
    ]
    assert [(record.topic, record.body) for record in records] == [
        (f"topic{number % 3}", b"%d" % number) for number in range(4)
    ]
    assert records[0].property_map["TRANSACTION_HALVES"] == ",".join(
        str(half.physical_offset) for half in halves[1:]
    )
    assert [record.property_map["TRANSACTION_HALF_ID"] for record in records] == [
        offset_message_id(HOST, half.physical_offset) for half in halves
    ]
    assert ended.position == records[-1].end == broker.log.write_offset
    assert ended.final_offset == start
    assert broker.service.metrics()["pending"] == 0


def test_finals_are_the_same_from_memory_and_from_the_log(broker: Broker) -> None:
    """A late decision delivers the same messages as an early one."""
    early, late = broker.prepare_group(3), broker.prepare_group(3)
    broker.end(early[0], TransactionEvent.COMMIT)
    broker.forget_finals()
    broker.end(late[0], TransactionEvent.COMMIT)

    for first, second in zip(early, late, strict=True):
        (one,), (two,) = broker.finals_of(first), broker.finals_of(second)
        own = {"UNIQ_KEY", "__transactionId__", "TRANSACTION_HALF_ID", "TRANSACTION_HALVES"}
        own |= {"TRANSACTION_GROUP"}
        assert list(decode_properties(one.properties)) == list(decode_properties(two.properties))
        assert {k: v for k, v in one.property_map.items() if k not in own} == {
            k: v for k, v in two.property_map.items() if k not in own
        }
        assert (one.topic, one.queue_id, one.body, one.flag, one.sys_flag) == (
            two.topic,
            two.queue_id,
            two.body,
            two.flag,
            two.sys_flag,
        )


def test_a_rollback_is_one_record(broker: Broker) -> None:
    """It names all halves, and none of them is delivered."""
    halves = broker.prepare_group(3)
    start = broker.log.write_offset

    broker.end(halves[0], TransactionEvent.ROLLBACK)

    (record,) = broker.log.scan(start)
    assert record.property_map["TRANSACTION_HALVES"] == ",".join(
        str(half.physical_offset) for half in halves[1:]
    )
    assert finals(broker, halves) == [0, 0, 0]


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
@pytest.mark.parametrize("named", [0, 1, 2])
def test_a_request_that_names_any_half_decides_the_whole_transaction(
    broker: Broker, event: TransactionEvent, named: int
) -> None:
    """Once, whichever half a repeated request names."""
    halves = broker.prepare_group(3)
    opposite = (
        TransactionEvent.ROLLBACK if event is TransactionEvent.COMMIT else TransactionEvent.COMMIT
    )

    first = broker.ended(halves[named], event)
    end = broker.log.write_offset

    for half in halves:
        again = broker.ended(half, event)
        assert again.final_offset == first.final_offset
        with pytest.raises(DecidedOtherwiseError):
            broker.end(half, opposite)
    assert broker.log.write_offset == end
    assert finals(broker, halves) == [int(event is TransactionEvent.COMMIT)] * 3


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
@pytest.mark.parametrize("drained", [True, False])
def test_a_decision_about_a_group_is_found_after_it_left_the_cache(
    tmp_path: Path, event: TransactionEvent, drained: bool
) -> None:
    """By any of its halves, with the id of the leader's final message."""
    broker = Broker(tmp_path, decided=2)
    halves = broker.prepare_group(3)
    first = broker.ended(halves[0], event)
    for _ in range(9):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.restart(drained=True) if drained else broker.log.flush()
    end = broker.log.write_offset

    for half in halves:
        assert broker.ended(half, event).final_offset == first.final_offset
    assert broker.log.write_offset == end


def test_a_further_half_is_verified_like_the_first(broker: Broker) -> None:
    """A wrong queue offset or group is refused, and nothing changes."""
    halves = broker.prepare_group(2)
    end = broker.log.write_offset
    with pytest.raises(HalfMismatchError, match="state table offset wrong"):
        end_now(
            broker.service.decisions,
            DecisionRequest(
                halves[1].physical_offset, halves[0].queue_offset, "pg", TransactionEvent.COMMIT
            ),
        )
    with pytest.raises(HalfMismatchError, match="group wrong"):
        broker.end(halves[1], TransactionEvent.COMMIT, group="other")
    assert broker.log.write_offset == end


def test_op_messages_name_every_half(broker: Broker) -> None:
    """Apache RocketMQ would check each half without one."""
    broker.end(broker.prepare_group(3)[0], TransactionEvent.COMMIT)
    broker.end(broker.prepare_group(2)[0], TransactionEvent.ROLLBACK)

    broker.service.drain()

    (op,) = broker.records_of(OP_TOPIC)
    assert op.body == b"0,1,2,3,4,"


def test_a_failed_append_leaves_the_group_undecided(broker: Broker) -> None:
    """After a retry everything is delivered."""
    halves = broker.prepare_group(3)
    broker.log.failing = True
    with pytest.raises(StoreError):
        broker.end(halves[0], TransactionEvent.COMMIT)
    broker.log.failing = False

    assert finals(broker, halves) == [0, 0, 0]
    broker.end(halves[0], TransactionEvent.COMMIT)
    assert finals(broker, halves) == [1, 1, 1]


@pytest.mark.parametrize("survivors", range(5))
def test_a_group_whose_append_was_cut_off_is_rolled_back(broker: Broker, survivors: int) -> None:
    """Its sender got no answer; a part of it must not be delivered."""
    broker.prepare()
    broker.log.flush()
    halves = broker.prepare_group(4)

    broker.restart(survivors=survivors)

    table = broker.table
    whole = survivors == 4
    assert (halves[0].physical_offset in table) is whole
    assert len(table) == 1 + whole
    rollbacks = [one for one in broker.log.records() if one.sys_flag & 0xC == 0xC]
    assert len(rollbacks) == (0 < survivors < 4)
    if rollbacks:
        assert broker.log.flush_requests
        with pytest.raises(DecidedOtherwiseError):
            broker.end(halves[0], TransactionEvent.COMMIT)
    broker.log.flush()
    broker.restart()
    assert len(broker.table) == 1 + whole
    assert sum(one.sys_flag & 0xC == 0xC for one in broker.log.records()) == len(rollbacks)


@pytest.mark.parametrize("survivors", range(5))
@pytest.mark.parametrize("snapshot", [True, False])
def test_a_commit_whose_append_was_cut_off_is_completed(
    broker: Broker, survivors: int, snapshot: bool
) -> None:
    """The leader's final message has decided: the others are appended before any request."""
    halves = broker.prepare_group(4)
    broker.log.flush()
    if snapshot:
        broker.restart(drained=True)
    broker.end(halves[0], TransactionEvent.COMMIT)

    broker.restart(survivors=survivors)

    assert finals(broker, halves) == [int(survivors > 0)] * 4
    for half in halves:
        for final in broker.finals_of(half):
            assert final.property_map["TRANSACTION_HALF_ID"] == offset_message_id(
                HOST, half.physical_offset
            )
    broker.log.flush()
    broker.restart()
    assert finals(broker, halves) == [int(survivors > 0)] * 4
    assert broker.service.metrics()["pending"] == int(survivors == 0)


def test_a_failed_completion_does_not_prevent_the_start(broker: Broker) -> None:
    """One message is damaged, and the topics of the others cannot be created."""
    halves = broker.prepare_group(4)
    broker.log.flush()
    broker.end(halves[0], TransactionEvent.COMMIT)
    records, damaged = broker.log.encoded, halves[2].physical_offset
    records[damaged] = records[damaged].replace(b"REAL_TOPIC", b"LOST_TOPIC")
    broker.destination.error = RequestRefusedError("the table is full")

    broker.restart(survivors=1)

    assert finals(broker, halves) == [1, 1, 0, 1]


def test_a_completion_that_was_cut_off_is_completed_too(broker: Broker) -> None:
    """However often the power fails, each message is stored once."""
    halves = broker.prepare_group(5)
    broker.log.flush()
    broker.end(halves[0], TransactionEvent.COMMIT)

    for _ in range(5):
        broker.restart(survivors=1)

    assert finals(broker, halves) == [1] * 5


def test_a_snapshot_keeps_groups(broker: Broker) -> None:
    """With all halves, whichever a request names."""
    broker.prepare()
    halves = broker.prepare_group(3)

    broker.restart(drained=True)

    assert broker.table.groups == {
        halves[0].physical_offset: tuple(
            (half.physical_offset, half.queue_offset) for half in halves[1:]
        )
    }
    broker.end(halves[2], TransactionEvent.COMMIT)
    assert finals(broker, halves) == [1, 1, 1]


def test_a_group_with_a_damaged_half_is_not_delivered_in_part(broker: Broker) -> None:
    """Its commit is refused while one message cannot be read; an operator may roll back."""
    halves = broker.prepare_group(3)
    broker.log.flush()
    broker.restart()
    del broker.log.encoded[halves[1].physical_offset]
    end = broker.log.write_offset

    with pytest.raises(Exception, match="Find prepared transaction message failed"):
        broker.end(halves[0], TransactionEvent.COMMIT)
    assert broker.log.write_offset == end

    broker.service.operator.decide(halves[0].physical_offset, "rollback")
    assert finals(broker, [halves[0], halves[2]]) == [0, 0]


def test_a_group_is_parked_and_decided_by_its_leader(broker: Broker) -> None:
    """There is one parked copy, and one decision for all messages."""
    broker.producers.join("pg", Connected())
    halves = broker.prepare_group(3)
    for _ in range(20):
        broker.wait(700_000)
    (entry,) = broker.table
    assert (entry.state, entry.offset) == (State.PARKED, halves[0].physical_offset)

    ended = broker.service.operator.decide(halves[1].physical_offset, "commit")

    assert finals(broker, halves) == [1, 1, 1]
    assert ended.final_offset == broker.finals_of(halves[0])[0].physical_offset


@pytest.mark.parametrize("restart", [True, False])
def test_every_message_of_a_group_may_be_delayed(broker: Broker, restart: bool) -> None:
    """The deciding records are in the timer topic, and a start completes them there too."""
    halves = broker.prepare_group(3, TRANSACTION_DELAY_MS="5000")
    broker.log.flush()
    broker.end(halves[0], TransactionEvent.COMMIT)
    if restart:
        broker.restart(survivors=1)

    waiting = broker.records_of(TIMER_TOPIC)

    assert [one.prepared_transaction_offset for one in waiting] == [
        half.physical_offset for half in halves
    ]
    assert finals(broker, halves) == [1, 1, 1]
    assert [one.property_map["REAL_TOPIC"] for one in waiting] == ["topic0", "topic1", "topic2"]
    assert broker.service.metrics()["pending"] == 0
