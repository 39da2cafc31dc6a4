"""Prepares that are sent again: recognised, answered with the ids of the first, stored once."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.transaction import deduplication, prepares
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.deduplication import RecentPrepares, deduplication_key
from halfmq.broker.transaction.half_reader import HalfReader
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.headers import SendMessageResponseHeader
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.broker_doubles import FakeConnection, as_store
from tests.support.prepares import Prepares, accepted
from tests.support.transactions import end_now


@pytest.fixture
def sends(tmp_path: Path) -> Prepares:
    """A broker without messages."""
    return Prepares(tmp_path)


def _decide(sends: Prepares, half: SendMessageResponseHeader, event: TransactionEvent) -> None:
    offset = parse_offset_message_id(half.msg_id).physical_offset
    end_now(sends.broker.service.decisions, DecisionRequest(offset, half.queue_offset, "pg", event))
    sends.broker.log.flush()


def _halves(sends: Prepares) -> int:
    return len([one for one in sends.broker.records_of(HALF_TOPIC) if not one.sys_flag & 0xC])


def test_duplicates_in_one_pass_of_the_loop_are_stored_once(sends: Prepares) -> None:
    """Also while the first is only staged, and if the duplicate is decoded on the slow path."""
    one, two = sends.request("K"), sends.request("K")
    long = sends.request("K", reconsume="1")
    answers = [accepted(answer) for answer in sends.arrive(one, sends.request("L"), two, long)]

    assert answers[0] == answers[2] == answers[3] != answers[1]
    assert _halves(sends) == 2


@pytest.mark.parametrize("large", [False, True])
def test_a_duplicate_of_a_committed_half_gets_its_ids(sends: Prepares, large: bool) -> None:
    """The message is delivered; a second one would be delivered twice."""
    body = b"x" * 9_000 if large else b"row 1"
    first = sends.prepare("K", body)
    _decide(sends, first, TransactionEvent.COMMIT)

    assert sends.prepare("K", body) == first
    assert len(sends.broker.records_of("orders")) == 1


def test_a_duplicate_of_a_parked_half_gets_its_ids(sends: Prepares) -> None:
    """The parked transaction can still be decided."""
    first = sends.prepare("K")
    (entry,) = sends.broker.table
    entry.state = State.PARKED

    assert sends.prepare("K") == first


@pytest.mark.parametrize("restarted", [False, True])
def test_checks_go_to_the_connection_of_a_duplicate_if_the_first_is_closed(
    sends: Prepares, restarted: bool
) -> None:
    """The producer has reconnected and knows the outcome of its transaction."""
    sends.prepare("K")
    first = sends.connection
    (entry,) = sends.broker.table
    assert entry.owner is first
    sends.connection = FakeConnection("127.0.0.1:50002")
    sends.prepare("K")
    assert entry.owner is first, "which lives, and may be running it"

    first.closed = True
    if restarted:
        sends.restart()
        (entry,) = sends.broker.table
    sends.prepare("K")

    assert entry.owner is sends.connection
    assert _halves(sends) == 1


def test_after_a_rollback_the_same_half_is_a_new_transaction(sends: Prepares) -> None:
    """Its producer has not run the local transaction yet, and its commit must count."""
    first = sends.prepare("K")
    _decide(sends, first, TransactionEvent.ROLLBACK)
    again = sends.prepare("K")
    third = sends.prepare("K")
    _decide(sends, again, TransactionEvent.COMMIT)

    assert again.msg_id != first.msg_id
    assert third == again  # the latest of that key is the one that counts
    assert len(sends.broker.records_of("orders")) == 1


def test_other_groups_and_other_contents_are_no_duplicates(sends: Prepares) -> None:
    """A key that is reused by mistake must not lose a message."""
    ids = {
        sends.prepare("K").msg_id,
        sends.prepare("K", group="pg2").msg_id,
        sends.prepare("K", b"row 2").msg_id,
        sends.prepare("K", topic="payments").msg_id,
    }

    assert len(ids) == 4


def test_keys_with_equal_hashes_are_no_duplicates(
    sends: Prepares, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only hashes of the keys are in memory; the stored half is compared."""
    for module in (prepares, deduplication):
        monkeypatch.setattr(module, "deduplication_key", lambda _group, _unique_key: 1)
    monkeypatch.setattr(
        deduplication.RecentPrepares, "reserve", lambda _self, _group, _unique_key: 0
    )
    ids = {sends.prepare(key, group=group).msg_id for key in "KL" for group in ("pg", "pg2")}

    assert len(ids) == 4


@pytest.mark.parametrize("drained", [False, True])
def test_a_duplicate_is_recognised_after_a_restart(sends: Prepares, drained: bool) -> None:
    """The broker may be killed after the half and before its answer."""
    undecided, decided, refused = (sends.prepare(key) for key in ("K1", "K2", "K3"))
    _decide(sends, decided, TransactionEvent.COMMIT)
    _decide(sends, refused, TransactionEvent.ROLLBACK)
    sends.restart(drained=drained)

    assert sends.prepare("K1") == undecided
    assert sends.prepare("K2") == decided
    assert sends.prepare("K3") != refused


def test_a_duplicate_of_a_half_whose_decision_left_the_cache_is_recognised(tmp_path: Path) -> None:
    """The index finds the decision."""
    sends = Prepares(tmp_path, decided=1)
    committed, rolled_back = sends.prepare("K1"), sends.prepare("K2")
    _decide(sends, committed, TransactionEvent.COMMIT)
    _decide(sends, rolled_back, TransactionEvent.ROLLBACK)
    for key in "abcd":
        _decide(sends, sends.prepare(key), TransactionEvent.COMMIT)

    assert sends.prepare("K1") == committed
    assert sends.prepare("K2") != rolled_back


def test_a_half_that_could_not_be_appended_has_no_duplicate(sends: Prepares) -> None:
    """Sent again when the disk has room, it is a new half."""
    sends.broker.log.failing = True
    (answer,) = sends.arrive(sends.request("K"))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    sends.broker.log.failing = False

    assert sends.prepare("K").queue_offset == 0
    assert sends.broker.service.metrics()["prepares_repeated"] == 0


def test_a_first_half_that_retention_has_deleted_has_no_duplicate(sends: Prepares) -> None:
    """A half that cannot be read cannot be compared."""
    first = sends.prepare("K")
    _decide(sends, first, TransactionEvent.COMMIT)
    sends.broker.log.delete_before(sends.broker.log.write_offset)

    assert sends.prepare("K") != first


def test_the_memory_of_recent_prepares_is_bounded() -> None:
    """The latest are known; those before the latest two generations are not."""
    memory = RecentPrepares(limit=10)
    for number in range(35):
        memory.add(memory.reserve("pg", str(number)), number)

    assert len(memory) <= 20
    assert memory.find(deduplication_key("pg", "34")) == 34
    assert memory.find(deduplication_key("pg", "20")) == 20
    assert memory.find(deduplication_key("pg", "19")) is None


def test_a_start_reads_the_newest_halves_within_its_limits(sends: Prepares) -> None:
    """Neither many nor large halves make a start slow."""
    for number in range(600):
        sends.prepare(f"K{number}", b"x" * 10)
    log, halves = sends.broker.log, HalfReader(as_store(sends.broker.log))
    size = log.records()[-1].total_size

    by_count, by_bytes, all_of_them = RecentPrepares(), RecentPrepares(), RecentPrepares()
    by_count.refill(halves, count_max=300)
    by_bytes.refill(halves, bytes_max=300 * size)
    all_of_them.refill(halves)

    assert (len(by_count), len(by_bytes), len(all_of_them)) == (300, 300, 600)
    assert by_bytes.find(deduplication_key("pg", "K599")) == log.records()[-1].physical_offset
    assert by_bytes.find(deduplication_key("pg", "K300")) is not None


@pytest.mark.parametrize("bytes_max", [0, 1, 4_000, 9_000, 30_000, 100_000, 1_000_000])
def test_a_start_knows_exactly_the_newest_halves_that_fit(sends: Prepares, bytes_max: int) -> None:
    """At least one, without gaps, whatever their sizes."""
    for number in range(40):
        sends.prepare(f"K{number}", b"x" * (100 if number % 3 else 9_000))
    log = sends.broker.log
    expected, left = 0, bytes_max
    for record in reversed(log.records()):
        left -= record.total_size
        if left < 0 and expected:
            break
        expected += 1
    memory = RecentPrepares()
    memory.refill(HalfReader(as_store(log)), bytes_max=bytes_max)

    known = [memory.find(deduplication_key("pg", f"K{number}")) is not None for number in range(40)]
    assert known == [False] * (40 - expected) + [True] * expected
