"""The table that a log gives: stores of the official broker, and our own records."""

from pathlib import Path

import pytest

from halfmq.broker.transaction.errors import DecisionForgottenError
from halfmq.broker.transaction.replay.log_replay import ForeignRecordError, LogReplay
from halfmq.broker.transaction.state.caches import RecordedDecision
from halfmq.broker.transaction.state.pending import MemberHalf, PendingTable
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import START_MS
from tests.support.golden_store import GoldenStore, unpack
from tests.support.transactions import HOST, PEER, Broker, MemoryLog, golden_log

GOLDEN = ("tx-midway-killed", "tx-midway-clean", "v4-tx")


def replayed(log: MemoryLog, *, start: int = 0) -> tuple[PendingTable, LogReplay]:
    """Replay a log by key."""
    table = PendingTable()
    log_replay = LogReplay(table, by_key=True)
    for record in log.scan(start):
        log_replay.apply(record)
    return table, log_replay


@pytest.fixture(params=GOLDEN)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> GoldenStore:
    """A store with undecided transactions."""
    return unpack(request.param, tmp_path)


def test_every_transaction_has_the_state_that_the_log_shows(store: GoldenStore) -> None:
    """Decided ones are not checked again, no undecided one is lost, discarded ones are parked."""
    table, _ = replayed(golden_log(store))
    expected_pending = set()
    for transaction in store.truth["transactions"]:
        first = transaction["halves"][0]["commitLogOffset"]
        state = transaction["state_in_the_log"]
        entry, decision = table.get(first), table.decided.find(first)
        if state in {"UNDECIDED", "DISCARDED"}:
            expected_pending.add(first)
            assert entry is not None, transaction["what"]
            assert entry.state is (State.PREPARED if state == "UNDECIDED" else State.PARKED)
            assert entry.group == transaction["producerGroup"]
            assert entry.queue_offset == transaction["halves"][0]["queueOffset"]
            assert entry.checks == (transaction["halves"][-1]["checkTimes"] or 0)
        else:
            assert entry is None, transaction["what"]
            assert decision is not None
            rolled_back = state == "ROLLED_BACK"
            assert decision.state is (State.ROLLED_BACK if rolled_back else State.COMMITTED)
    assert {entry.offset for entry in table} == expected_pending
    assert table.parked == 2


def test_every_check_copy_resolves_to_its_transaction(store: GoldenStore) -> None:
    """The answer to a check of the official broker names a copy."""
    table, _ = replayed(golden_log(store))
    for transaction in store.truth["transactions"]:
        first, *copies = transaction["halves"]
        for copy in copies:
            assert table.transaction_of(copy["commitLogOffset"]) == first["commitLogOffset"]


def test_halves_that_the_official_broker_would_check_again_get_op_messages(
    store: GoldenStore,
) -> None:
    """They are written at the next start, so that a store given back is not checked again."""
    _, log_replay = replayed(golden_log(store))
    for transaction in store.truth["transactions"]:
        names = {half["queueOffset"] for half in transaction["halves"]}
        mirrored = {op["halfQueueOffset"] for op in transaction["ops"]}
        if transaction["state_in_the_log"] in {"UNDECIDED", "DISCARDED"}:
            assert names.isdisjoint(log_replay.without_op)
        else:
            assert names - mirrored <= set(log_replay.without_op), transaction["what"]
            assert mirrored.isdisjoint(log_replay.without_op), transaction["what"]


def test_replaying_records_again_changes_nothing(store: GoldenStore) -> None:
    """A start may replay records that a snapshot already covers."""
    log = golden_log(store)
    table, log_replay = replayed(log)
    before = (list(table), dict(table.copies), list(log_replay.without_op))
    for record in log.scan(0):
        log_replay.apply(record)

    assert (list(table), dict(table.copies), list(log_replay.without_op)) == before


def test_a_log_with_check_copies_requires_a_replay_by_key(store: GoldenStore) -> None:
    """Links alone do not show to which half a copy belongs."""
    log_replay = LogReplay(PendingTable())

    def read() -> None:
        for record in golden_log(store).scan(0):
            log_replay.apply(record)

    with pytest.raises(ForeignRecordError, match="by key"):
        read()


def test_the_oldest_copy_represents_a_half_that_was_deleted_by_age(store: GoldenStore) -> None:
    """It is then the identity of the transaction."""
    log = golden_log(store)
    undecided = next(
        transaction
        for transaction in store.truth["transactions"]
        if transaction["state_in_the_log"] == "UNDECIDED" and len(transaction["halves"]) == 3
    )
    original, copy, newest = undecided["halves"]
    log.delete_before(original["commitLogOffset"] + 1)

    table, _ = replayed(log)

    entry = table.get(copy["commitLogOffset"])
    assert entry is not None
    assert entry.group == undecided["producerGroup"]
    assert entry.queue_offset == copy["queueOffset"]
    assert table.transaction_of(newest["commitLogOffset"]) == entry.offset


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
def test_a_decision_is_known_after_its_half_was_deleted_by_age(
    tmp_path: Path, event: TransactionEvent
) -> None:
    """With the record that decided; a snapshot counts it among those that left the cache."""
    broker = Broker(tmp_path)
    _at_zero, half = broker.prepare(), broker.prepare()
    decision_at = broker.log.write_offset
    broker.end(half, event)
    broker.log.delete_before(half.physical_offset + 1)

    table, _ = replayed(broker.log)

    state = State.COMMITTED if event is TransactionEvent.COMMIT else State.ROLLED_BACK
    assert table.decided.find(half.physical_offset) == RecordedDecision(state, decision_at)
    assert table.decided.newest_final == (decision_at if event is TransactionEvent.COMMIT else 0)


def test_several_halves_are_one_transaction(tmp_path: Path) -> None:
    """The leader has the entry; each half resolves to it, and op messages name all of them."""
    broker = Broker(tmp_path)
    single, group, other = broker.prepare(), broker.prepare_group(4), broker.prepare_group(2)

    table, log_replay = replayed(broker.log)

    assert [entry.offset for entry in table] == [
        half.physical_offset for half in (single, group[0], other[0])
    ]
    assert table.groups == broker.table.groups
    assert {table.transaction_of(half.physical_offset) for half in group} == {
        group[0].physical_offset
    }
    assert (log_replay.incomplete, log_replay.unfinished) == ({}, {})


@pytest.mark.parametrize("survivors", range(1, 5))
def test_missing_halves_are_counted_after_a_crash(tmp_path: Path, survivors: int) -> None:
    """No client got an answer about such a transaction."""
    broker = Broker(tmp_path)
    broker.prepare()
    broker.log.flush()
    group = broker.prepare_group(4)

    _, log_replay = replayed(broker.log.crash(survivors))

    missing = 4 - survivors
    assert log_replay.incomplete == ({group[0].physical_offset: missing} if missing else {})


@pytest.mark.parametrize("survivors", range(1, 5))
def test_missing_final_messages_are_found_after_a_crash(tmp_path: Path, survivors: int) -> None:
    """The leader's final message has decided for all; consumers must get the others."""
    broker = Broker(tmp_path)
    group = broker.prepare_group(4)
    broker.log.flush()
    broker.end(group[0], TransactionEvent.COMMIT)

    table, log_replay = replayed(broker.log.crash(survivors))

    assert len(table) == 0
    assert list(log_replay.unfinished) == [half.physical_offset for half in group[survivors:]]
    assert list(log_replay.without_op) == [half.queue_offset for half in group]


def _commit_as_rocketmq(broker: Broker, half: AppendResult, topic: str) -> None:
    """Append the final message of one half, which tells of no group."""
    record = broker.log.record_at(half.physical_offset)
    assert record is not None
    final = AppendRequest(
        topic=topic,
        queue_id=1,
        body=record.body,
        properties=record.properties,
        sys_flag=0x8,
        born_timestamp=START_MS,
        born_host=PEER,
        store_host=HOST,
        prepared_transaction_offset=half.physical_offset,
    )
    broker.log.append([final])
    broker.log.flush()


def test_a_final_message_of_rocketmq_decides_its_half_alone(tmp_path: Path) -> None:
    """Apache RocketMQ has no groups; the other halves are still undecided."""
    broker = Broker(tmp_path)
    leader, member, last = broker.prepare_group(3)
    _commit_as_rocketmq(broker, member, "topic1")

    broker.restart()

    table = broker.table
    assert table.groups == {leader.physical_offset: (MemberHalf(last.physical_offset, 2),)}
    assert broker.ops.waiting == [member.queue_offset]
    assert broker.ended(member, TransactionEvent.COMMIT).final_offset is not None
    broker.table.decided.clear()  # forgotten
    with pytest.raises(DecisionForgottenError):
        broker.end(member, TransactionEvent.ROLLBACK)
    broker.end(leader, TransactionEvent.COMMIT)
    assert [len(broker.finals_of(one)) for one in (leader, member, last)] == [1, 1, 1]


def test_a_leader_that_rocketmq_committed_commits_the_other_halves(tmp_path: Path) -> None:
    """One of the messages is delivered, so all must be."""
    broker = Broker(tmp_path)
    leader, *members = broker.prepare_group(3)
    _commit_as_rocketmq(broker, leader, "topic0")

    broker.restart()

    assert [len(broker.finals_of(one)) for one in (leader, *members)] == [1, 1, 1]
    assert broker.service.metrics()["pending"] == 0


def test_a_resumed_record_makes_a_parked_transaction_prepared(tmp_path: Path) -> None:
    """As often as it is parked; a decision in between stands."""
    broker = Broker(tmp_path)
    half = broker.prepare()
    table = broker.table
    entry = table.get(half.physical_offset)
    assert entry is not None
    for reason in ("no-answer", "no-answer"):
        assert broker.park(half)
        parked, _ = replayed(broker.log)
        assert [(one.state, one.parked_reason.text) for one in parked] == [(State.PARKED, reason)]
        broker.service.operator.resume(half.physical_offset)
        resumed, _ = replayed(broker.log)
        assert [one.state for one in resumed] == [State.PREPARED]

    broker.end(half, TransactionEvent.ROLLBACK)
    assert len(replayed(broker.log)[0]) == 0


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_consumers_retry_does_not_decide_the_half_at_zero(tmp_path: Path, snapshot: bool) -> None:
    """A retry keeps the bits of its committed message and has no link, so field 14 is 0."""
    broker = Broker(tmp_path)
    first = broker.prepare()
    assert first.physical_offset == 0
    second = broker.prepare()
    broker.end(second, TransactionEvent.COMMIT)
    (final,) = broker.finals_of(second)
    if snapshot:
        broker.restart(drained=True)
    broker.log.append(
        [
            AppendRequest(
                topic="%RETRY%billing",
                queue_id=0,
                body=final.body,
                properties=final.properties,
                sys_flag=final.sys_flag,
                born_timestamp=START_MS,
                born_host=PEER,
                store_host=HOST,
            )
        ]
    )
    broker.log.flush()

    broker.restart()
    assert [entry.offset for entry in broker.table] == [0]

    broker.end(first, TransactionEvent.COMMIT)
    broker.log.flush()
    broker.restart()
    assert broker.service.metrics()["pending"] == 0
