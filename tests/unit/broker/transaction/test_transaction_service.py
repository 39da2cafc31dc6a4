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
from halfmq.store.format.topics import TIMER_TOPIC
from tests.support.transactions import Broker, end_now, gone, message


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path)


def test_a_decision_unknown_changes_nothing(broker: Broker) -> None:
    """Checks are sent at their time."""
    half = broker.prepare()
    before = broker.log.write_offset

    assert broker.end(half, TransactionEvent.UNKNOWN) == 0
    assert (broker.log.write_offset, broker.service.metrics()["pending"]) == (before, 1)


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
