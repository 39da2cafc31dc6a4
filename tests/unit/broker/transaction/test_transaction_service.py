"""Half messages, decisions and restarts, over a log in memory."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from halfmq.broker.config import TransactionConfig
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.limits.kept import FINAL_MESSAGE_BYTES
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.decision_lookup import INDEX_HITS_MAX
from halfmq.broker.transaction.errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
)
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.codes import ResponseCode
from halfmq.store.errors import StoreError
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendResult
from tests.support.golden_store import unpack
from tests.support.transactions import Broker, Connected, end_now, golden_log, gone, message


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path)


def test_a_half_is_hidden_until_it_is_committed(broker: Broker) -> None:
    """Consumers of the real topic get the message after the decision, once."""
    half = broker.prepare()
    assert broker.records_of("orders") == []
    assert len(broker.records_of(HALF_TOPIC)) == 1

    position = broker.end(half, TransactionEvent.COMMIT)

    (final,) = broker.records_of("orders")
    assert final.body == b"row 1"
    assert final.prepared_transaction_offset == half.physical_offset
    assert position == final.end == broker.log.write_offset


def test_a_rolled_back_message_is_never_delivered(broker: Broker) -> None:
    """The decision is a record in the half topic, and the answer waits for it."""
    half = broker.prepare()

    position = broker.end(half, TransactionEvent.ROLLBACK)

    assert broker.records_of("orders") == []
    assert position == broker.log.write_offset > half.physical_offset + half.size
    assert broker.service.metrics()["pending"] == 0


def test_a_decision_unknown_changes_nothing(broker: Broker) -> None:
    """Checks are sent at their time."""
    half = broker.prepare()
    before = broker.log.write_offset

    assert broker.end(half, TransactionEvent.UNKNOWN) == 0
    assert (broker.log.write_offset, broker.service.metrics()["pending"]) == (before, 1)


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
def test_the_same_decision_again_writes_nothing(broker: Broker, event: TransactionEvent) -> None:
    """A client that missed the answer gets it again, after the same record is durable."""
    half = broker.prepare()
    first = broker.end(half, event)
    broker.prepare()
    end = broker.log.write_offset

    again = broker.end(half, event)

    assert broker.log.write_offset == end
    (decision,) = [record for record in broker.log.records() if record.end == first]
    assert decision.physical_offset < again <= decision.end  # a flush covers whole records
    assert broker.service.metrics()["repeated"] == 1


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (TransactionEvent.COMMIT, TransactionEvent.ROLLBACK, "committed"),
        (TransactionEvent.ROLLBACK, TransactionEvent.COMMIT, "rolled back"),
    ],
)
def test_the_opposite_decision_is_refused(
    broker: Broker, first: TransactionEvent, second: TransactionEvent, name: str
) -> None:
    """The error names the decision that stands, and its time."""
    half = broker.prepare()
    broker.clock.now = 1_700_000_001_000
    broker.end(half, first)
    end = broker.log.write_offset

    with pytest.raises(DecidedOtherwiseError, match=f"{name} at 2023-11-14T22:13:21") as caught:
        broker.end(half, second)

    assert caught.value.offset == half.physical_offset
    assert broker.log.write_offset == end
    assert broker.service.metrics()["refused"] == 1
    assert broker.end(half, TransactionEvent.UNKNOWN) == 0


def test_a_request_must_name_group_and_offsets_of_the_half(broker: Broker) -> None:
    """The record must also be a half message."""
    half = broker.prepare()
    other = broker.prepare(group="pg2")
    broker.end(other, TransactionEvent.COMMIT, group="pg2")
    (final,) = broker.finals_of(other)
    end = broker.log.write_offset

    with pytest.raises(HalfNotFoundError, match=r"message failed: .* at commitLogOffset 99999999"):
        end_now(
            broker.service.decisions, DecisionRequest(99_999_999, 0, "pg", TransactionEvent.COMMIT)
        )
    with pytest.raises(HalfNotFoundError):
        end_now(
            broker.service.decisions,
            DecisionRequest(
                half.physical_offset + 1, half.queue_offset, "pg", TransactionEvent.COMMIT
            ),
        )
    with pytest.raises(HalfMismatchError, match=r"state table offset wrong: .* 0, .* says 1"):
        end_now(
            broker.service.decisions,
            DecisionRequest(
                half.physical_offset, half.queue_offset + 1, "pg", TransactionEvent.COMMIT
            ),
        )
    with pytest.raises(HalfMismatchError, match=r"group wrong: .* group 'pg', .* of 'pg2'"):
        broker.end(half, TransactionEvent.COMMIT, group="pg2")
    with pytest.raises(HalfMismatchError, match="not a half message"):
        end_now(
            broker.service.decisions,
            DecisionRequest(
                final.physical_offset, final.queue_offset, "pg2", TransactionEvent.COMMIT
            ),
        )
    with pytest.raises(HalfMismatchError, match=r"group wrong: .* group 'pg2', .* of 'pg'"):
        broker.end(other, TransactionEvent.COMMIT)
    with pytest.raises(HalfMismatchError, match="state table offset wrong"):
        end_now(
            broker.service.decisions,
            DecisionRequest(other.physical_offset, 77, "pg2", TransactionEvent.COMMIT),
        )
    assert broker.log.write_offset == end


def test_a_failed_append_leaves_the_transaction_undecided(broker: Broker) -> None:
    """The client may retry when the disk has room."""
    half = broker.prepare()
    broker.log.failing = True
    with pytest.raises(StoreError):
        broker.end(half, TransactionEvent.COMMIT)
    broker.log.failing = False

    broker.end(half, TransactionEvent.COMMIT)

    assert len(broker.finals_of(half)) == 1
    assert broker.service.metrics()["committed"] == 1


def test_a_decision_after_the_immunity_time_is_accepted(broker: Broker) -> None:
    """RocketMQ answers 604; with one identity per transaction a late commit does no harm."""
    half = broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="1")
    broker.clock.now += 3_600_000

    broker.end(half, TransactionEvent.COMMIT)

    assert len(broker.finals_of(half)) == 1


def test_prepares_can_be_refused_by_a_setting(tmp_path: Path) -> None:
    """With NO_PERMISSION."""
    broker = Broker(tmp_path, config=TransactionConfig(reject=True))

    with pytest.raises(RequestRefusedError, match="rejectTransactionMessage=true") as caught:
        broker.service.prepares.refuse_prepares("pg", "127.0.0.1:10911")

    assert caught.value.code is ResponseCode.NO_PERMISSION
    Broker(tmp_path).service.prepares.refuse_prepares("pg", "127.0.0.1:10911")


def test_undecided_transactions_of_one_group_can_be_limited(tmp_path: Path) -> None:
    """A group whose checker is broken must not fill the table for others."""
    broker = Broker(tmp_path, config=TransactionConfig(group_pending_max=2))
    first = broker.prepare()
    broker.prepare()

    broker.service.prepares.refuse_prepares("pg2", "127.0.0.1:10911")
    with pytest.raises(RequestRefusedError, match="transactionPendingMaxPerGroup=2") as caught:
        broker.service.prepares.refuse_prepares("pg", "127.0.0.1:10911")
    assert caught.value.code is ResponseCode.SYSTEM_BUSY

    broker.end(first, TransactionEvent.ROLLBACK)

    broker.service.prepares.refuse_prepares("pg", "127.0.0.1:10911")


# --- restarts


def test_an_undecided_half_survives_a_crash(broker: Broker) -> None:
    """It was acknowledged, so it was on disk; its producer gets a check."""
    half = broker.prepare()
    broker.log.flush()
    broker.restart()
    producer = broker.producers.join("pg", Connected())

    broker.wait(60_000)
    assert producer.checked_offsets[0] == half.physical_offset
    broker.end(half, TransactionEvent.COMMIT)

    assert len(broker.finals_of(half)) == 1


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
def test_no_check_is_sent_for_a_decided_half_after_a_crash(
    broker: Broker, event: TransactionEvent
) -> None:
    """The op message was not written yet; the decision itself is in the log."""
    half = broker.prepare()
    broker.end(half, event)
    broker.log.flush()
    broker.restart()
    producer = broker.producers.join("pg", Connected())

    broker.wait(3_600_000)

    assert producer.checks == []
    broker.end(half, event)  # the same answer as before the crash
    assert len(broker.finals_of(half)) == (event is TransactionEvent.COMMIT)


def test_a_decision_lost_in_a_crash_leaves_the_transaction_undecided(broker: Broker) -> None:
    """It was not confirmed, so the opposite decision is the first one."""
    half = broker.prepare()
    broker.log.flush()
    broker.end(half, TransactionEvent.COMMIT)
    broker.restart()

    broker.end(half, TransactionEvent.ROLLBACK)

    assert broker.finals_of(half) == []


def test_op_messages_lost_in_a_crash_are_written_again(broker: Broker) -> None:
    """RocketMQ would check every half without one."""
    halves = [broker.prepare() for _ in range(3)]
    broker.end(halves[0], TransactionEvent.COMMIT)
    broker.end(halves[2], TransactionEvent.ROLLBACK)
    broker.log.flush()
    broker.restart()
    broker.wait(3_000)

    (op,) = broker.records_of(OP_TOPIC)
    assert op.body == b"0,2,"

    broker.log.flush()
    broker.restart()
    broker.wait(3_000)
    assert len(broker.records_of(OP_TOPIC)) == 1


def test_an_ordered_stop_writes_op_messages_and_a_snapshot(broker: Broker) -> None:
    """The next start need not replay the log."""
    decided, open_half = broker.prepare(), broker.prepare()
    broker.end(decided, TransactionEvent.COMMIT)

    broker.restart(drained=True)

    assert [op.body for op in broker.records_of(OP_TOPIC)] == [b"0,"]
    assert broker.service.metrics()["pending"] == 1
    broker.end(open_half, TransactionEvent.COMMIT)
    assert len(broker.finals_of(open_half)) == 1


@pytest.mark.parametrize("drained", [True, False])
def test_a_decision_that_left_the_cache_is_found_in_the_log(tmp_path: Path, drained: bool) -> None:
    """A repeated request gets its answer, however late, and never a second final message."""
    broker = Broker(tmp_path, decided=2)
    committed, rolled_back = broker.prepare(), broker.prepare()
    broker.end(committed, TransactionEvent.COMMIT)
    broker.end(rolled_back, TransactionEvent.ROLLBACK)
    for _ in range(9):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.restart(drained=True) if drained else broker.log.flush()
    end = broker.log.write_offset

    (final,) = broker.finals_of(committed)
    assert broker.end(committed, TransactionEvent.COMMIT) == final.physical_offset + 1
    assert broker.end(rolled_back, TransactionEvent.ROLLBACK) == 0
    with pytest.raises(DecidedOtherwiseError, match="was committed"):
        broker.end(committed, TransactionEvent.ROLLBACK)
    with pytest.raises(DecidedOtherwiseError, match="was rolled back; the first"):
        broker.end(rolled_back, TransactionEvent.COMMIT)
    assert broker.log.write_offset == end


def test_without_an_index_an_old_decision_is_not_guessed(tmp_path: Path) -> None:
    """If a committed transaction were called rolled back, the client would repeat its work."""
    broker = Broker(tmp_path, decided=1)
    half = broker.prepare()
    broker.end(half, TransactionEvent.COMMIT)
    for _ in range(4):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.log.indexed = False

    for event in (TransactionEvent.COMMIT, TransactionEvent.ROLLBACK):
        with pytest.raises(DecisionForgottenError, match="decided before"):
            broker.end(half, event)
    assert len(broker.finals_of(half)) == 1


@pytest.mark.parametrize("delayed", [False, True])
def test_no_decision_is_concluded_if_too_many_records_have_the_key(
    tmp_path: Path, delayed: bool
) -> None:
    """Only some of them are read, and the final message may be another."""
    broker = Broker(tmp_path, decided=1)
    delay = "60000" if delayed else ""
    half = broker.prepare(key="K", TRANSACTION_DELAY_MS=delay)
    plain = replace(message(key="K"), sys_flag=0)
    if delayed:
        plain = replace(plain, topic=TIMER_TOPIC)
    broker.log.append([plain] * INDEX_HITS_MAX)
    broker.end(half, TransactionEvent.COMMIT)
    for _ in range(4):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.restart(drained=True)

    for event in (TransactionEvent.COMMIT, TransactionEvent.ROLLBACK):
        with pytest.raises(DecisionForgottenError):
            broker.end(half, event)


@pytest.mark.parametrize("drained", [True, False])
def test_no_decision_is_concluded_from_an_index_that_lags(tmp_path: Path, drained: bool) -> None:
    """After a kill it is filled again in log order, so it may hold a half without its final."""
    broker = Broker(tmp_path, decided=1)
    half = broker.prepare()
    broker.end(half, TransactionEvent.COMMIT)
    for _ in range(4):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.restart(drained=True) if drained else broker.log.flush()
    broker.log.indexed_until = half.physical_offset

    with pytest.raises(DecisionForgottenError):
        broker.end(half, TransactionEvent.COMMIT)

    broker.log.indexed_until = broker.log.write_offset
    assert broker.end(half, TransactionEvent.COMMIT) > 0


def test_halves_deleted_by_age_leave_the_table(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """They can no longer be decided; the loss is logged."""
    half, kept = broker.prepare(), broker.prepare()
    broker.log.delete_before(kept.physical_offset)
    broker.wait(0)

    assert broker.service.oldest_pending_offset == kept.physical_offset
    assert "event=transaction_expired half_offset=0 group=pg" in caplog.text
    with pytest.raises(HalfNotFoundError):
        broker.end(half, TransactionEvent.COMMIT)


# --- stores of the official broker


def test_a_store_of_rocketmq_is_continued(tmp_path: Path) -> None:
    """Undecided transactions are checked and committed once, by any of their records."""
    broker = Broker(tmp_path)
    store = unpack("tx-midway-killed", tmp_path)
    broker.log = golden_log(store)
    broker.restart()
    (copied,) = (
        transaction
        for transaction in store.truth["transactions"]
        if transaction["state_in_the_log"] == "UNDECIDED"
        and len(transaction["halves"]) == 3
        and transaction["realQueueId"] == 1
        and transaction["what"] == "undecided, checked some times"
    )
    original, first_copy, _ = copied["halves"]

    end_now(
        broker.service.decisions,
        DecisionRequest(
            first_copy["commitLogOffset"],
            first_copy["queueOffset"],
            "pg_tx",
            TransactionEvent.COMMIT,
        ),
    )
    end_now(
        broker.service.decisions,
        DecisionRequest(
            original["commitLogOffset"], original["queueOffset"], "pg_tx", TransactionEvent.COMMIT
        ),
    )
    broker.service.drain()

    half = AppendResult(original["commitLogOffset"], 0, original["queueOffset"], 0)
    assert len(broker.finals_of(half)) == 1
    ops = [
        int(number)
        for op in broker.records_of(OP_TOPIC)
        for number in op.body.decode().split(",")
        if number
    ]
    assert {half["queueOffset"] for half in copied["halves"]} <= set(ops)


def test_no_check_is_sent_for_transactions_that_rocketmq_would_check_again(tmp_path: Path) -> None:
    """After its kill the official broker checks four committed transactions again."""
    broker = Broker(tmp_path)
    store = unpack("tx-midway-killed", tmp_path)
    broker.log = golden_log(store)
    broker.clock.now = 1_795_260_600_000  # an hour later: one of them has that immunity
    broker.restart()
    producers = [broker.producers.join(group, Connected()) for group in ("pg_tx", "pg_other")]
    for _ in range(3):
        broker.wait(60_000)

    asked = {header.transaction_id for producer in producers for _, header, _ in producer.checks}
    assert asked == {
        transaction["uniqKey"]
        for transaction in store.truth["transactions"]
        if transaction["state_in_the_log"] == "UNDECIDED"
    }
    assert len(broker.records_of(TRANS_CHECK_MAX_TIME_TOPIC)) == 2


def test_properties_count_towards_the_limit_of_the_final_message_cache(broker: Broker) -> None:
    """A million small bodies with large properties must not fill the memory."""
    count = FINAL_MESSAGE_BYTES.most >> 14
    halves = [broker.prepare(PAD="x" * (29 << 10)) for _ in range(count)]

    kept = [broker.finals.pop(half.physical_offset) for half in halves]

    size = sum(len(final.properties) for final in kept if final is not None)
    assert FINAL_MESSAGE_BYTES.most // 2 < size <= FINAL_MESSAGE_BYTES.most


def test_the_final_message_cache_is_bounded(broker: Broker) -> None:
    """The final message of an evicted half is made from the log."""
    sizes = [1 << 18] * (FINAL_MESSAGE_BYTES.most >> 17) + [2 << 20]
    halves = []
    for number, size in enumerate(sizes):
        one = message(body=bytes([number]) * size, key=f"{number:032X}")
        halves += broker.service.prepares.prepare_group([(one, f"{number:032X}")], "pg", gone())
    kept = {half.physical_offset: broker.finals.pop(half.physical_offset) for half in halves}
    sizes_kept = [len(final.body) for final in kept.values() if final is not None]
    assert FINAL_MESSAGE_BYTES.most // 2 < sum(sizes_kept) <= FINAL_MESSAGE_BYTES.most
    for offset, taken in kept.items():
        if taken is not None:
            broker.finals.add(offset, taken)

    for number in (0, len(halves) - 2, len(halves) - 1):
        broker.end(halves[number], TransactionEvent.COMMIT)
        (final,) = broker.finals_of(halves[number])
        assert final.body == bytes([number]) * sizes[number]
