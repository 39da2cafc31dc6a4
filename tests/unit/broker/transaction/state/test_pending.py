"""The table of undecided transactions, the state machine, and the cache of decisions."""

import copy
import tracemalloc
from itertools import product
from random import Random, randrange

import pytest

from halfmq.broker.transaction.state.caches import DecisionCache, RecordedDecision
from halfmq.broker.transaction.state.log_map import BLOCK_COUNT
from halfmq.broker.transaction.state.pending import (
    NOT_CHECKED,
    Copy,
    MemberHalf,
    Pending,
    PendingTable,
)
from halfmq.broker.transaction.state.state_machine import (
    ParkedReason,
    State,
    TransactionEvent,
    Verdict,
    outcome,
    parked_reason_of,
)

UNDECIDED = (State.PREPARED, State.PARKED)
DECIDED = (State.COMMITTED, State.ROLLED_BACK)
FOUND = tuple(event for event in TransactionEvent if event.name.endswith("_FOUND"))
REQUESTS = tuple(event for event in TransactionEvent if event not in FOUND)
COMMITS = (TransactionEvent.COMMIT, TransactionEvent.OPERATOR_COMMIT)
ROLLBACKS = (TransactionEvent.ROLLBACK, TransactionEvent.OPERATOR_ROLLBACK)


@pytest.mark.parametrize(("state", "event"), list(product(State, TransactionEvent)))
def test_every_state_has_a_rule_for_every_event(state: State, event: TransactionEvent) -> None:
    """For events of clients, operators, the checker and the log."""
    result = outcome(state, event)
    assert isinstance(result.state, State)
    assert isinstance(result.verdict, Verdict)


@pytest.mark.parametrize(("state", "event"), list(product(State, TransactionEvent)))
def test_the_state_changes_only_where_the_verdict_says_so(
    state: State, event: TransactionEvent
) -> None:
    """Code that acts on the verdict alone must not miss a change."""
    result = outcome(state, event)
    assert (result.state is not state) == (result.verdict in {Verdict.DECIDE, Verdict.TRANSITION})


@pytest.mark.parametrize(("state", "event"), list(product(DECIDED, REQUESTS)))
def test_no_request_changes_a_decision(state: State, event: TransactionEvent) -> None:
    """The first decision wins, for producers, operators and the checker."""
    result = outcome(state, event)
    assert result.state is state
    assert result.verdict in {Verdict.REPEAT, Verdict.REFUSE, Verdict.IGNORE}


@pytest.mark.parametrize("state", UNDECIDED)
def test_only_a_request_to_decide_is_decided(state: State) -> None:
    """No step of the checks decides."""
    decided = {
        event for event in TransactionEvent if outcome(state, event).verdict is Verdict.DECIDE
    }
    assert decided == {*COMMITS, *ROLLBACKS}


def test_only_a_prepared_transaction_is_checked() -> None:
    """A parked one waits for an operator; a decided one is final."""
    asked = {
        state for state in State if outcome(state, TransactionEvent.DUE).verdict is Verdict.CHECK
    }
    assert asked == {State.PREPARED}
    for event in (TransactionEvent.GIVE_UP, TransactionEvent.EXPIRED):
        assert outcome(State.PREPARED, event) == (State.PARKED, Verdict.TRANSITION)
        assert outcome(State.PARKED, event) == (State.PARKED, Verdict.IGNORE)


@pytest.mark.parametrize("event", [TransactionEvent.DELIVERED, TransactionEvent.ANSWERED])
def test_checks_are_counted_while_undecided(event: TransactionEvent) -> None:
    """Also a late acknowledgement about a parked transaction: operators see the count."""
    counted = {state for state in State if outcome(state, event).verdict is Verdict.COUNT}
    assert counted == set(UNDECIDED)


def test_a_resumed_transaction_is_checked_again() -> None:
    """For a decided one, the operator gets the decision."""
    for event in (TransactionEvent.RESUME, TransactionEvent.RESUMED_FOUND):
        assert outcome(State.PARKED, event) == (State.PREPARED, Verdict.TRANSITION)
        assert outcome(State.PREPARED, event) == (State.PREPARED, Verdict.IGNORE)
    assert all(
        outcome(state, TransactionEvent.RESUME).verdict is Verdict.REFUSE for state in DECIDED
    )


@pytest.mark.parametrize("state", list(State))
def test_an_undecided_transaction_is_removed_with_its_deleted_half(state: State) -> None:
    """A decision made before the half was deleted stays known."""
    forgotten = outcome(state, TransactionEvent.DELETED_FOUND).verdict is Verdict.FORGET
    assert forgotten is (state in UNDECIDED)


@pytest.mark.parametrize("state", UNDECIDED)
def test_the_first_decision_is_accepted(state: State) -> None:
    """Also a late one about a parked transaction."""
    for event in COMMITS:
        assert outcome(state, event) == (State.COMMITTED, Verdict.DECIDE)
    for event in ROLLBACKS:
        assert outcome(state, event) == (State.ROLLED_BACK, Verdict.DECIDE)
    assert outcome(state, TransactionEvent.UNKNOWN) == (state, Verdict.IGNORE)


def test_the_same_decision_is_repeated_and_the_opposite_refused() -> None:
    """A client that missed the answer sends its decision again."""
    for event in COMMITS:
        assert outcome(State.COMMITTED, event).verdict is Verdict.REPEAT
        assert outcome(State.ROLLED_BACK, event).verdict is Verdict.REFUSE
    for event in ROLLBACKS:
        assert outcome(State.ROLLED_BACK, event).verdict is Verdict.REPEAT
        assert outcome(State.COMMITTED, event).verdict is Verdict.REFUSE


@pytest.mark.parametrize("state", list(State))
def test_a_final_message_in_the_log_commits_in_any_state(state: State) -> None:
    """Consumers may have it, whatever else was recorded."""
    assert outcome(state, TransactionEvent.FINAL_FOUND).state is State.COMMITTED


def test_a_decision_removes_the_transaction_from_the_table() -> None:
    """A transaction that is not in the table cannot be decided, so none is decided twice."""
    table = PendingTable()
    entry = table.add(4096, 7, 1_000, "pg", "t")
    assert (table.get(4096), len(table), 4096 in table) == (entry, 1, True)

    table.decide(entry, State.COMMITTED, 9000)

    assert (table.get(4096), len(table), 4096 in table) == (None, 0, False)
    assert table.decided.find(4096) == RecordedDecision(State.COMMITTED, 9000)


def test_parked_transactions_are_counted_and_can_be_resumed() -> None:
    """Parking ends the checks, not the transaction."""
    table = PendingTable()
    first, second = table.add(0, 0, 1, "pg", "t"), table.add(100, 1, 1, "pg", "t")
    first.sent, first.checks, first.answered = 17, 15, 2
    table.park(first, ParkedReason.UNKNOWN)
    table.park(second, ParkedReason.NO_ANSWER)
    assert (table.parked, first.parked_reason) == (2, ParkedReason.UNKNOWN)

    table.resume(first)
    table.decide(second, State.ROLLED_BACK, 200)

    assert (table.parked, first.state) == (0, State.PREPARED)
    assert first.progress == NOT_CHECKED


def test_a_check_copy_is_an_alias_of_its_transaction() -> None:
    """Op messages name every record of the transaction in the half topic."""
    table = PendingTable()
    entry = table.add(100, 1, 1, "pg", "t")
    other = table.add(200, 2, 1, "pg", "t")
    table.add_copy(300, 100, 3)
    table.add_copy(300, 100, 3)

    assert table.copies == {300: Copy(100, 3)}
    assert (table.transaction_of(300), table.transaction_of(200)) == (100, 200)
    assert (tuple(table.op_offsets_of(entry)), tuple(table.op_offsets_of(other))) == ((1, 3), (2,))


def test_deleted_halves_leave_the_table() -> None:
    """A half below the log's minimum can be neither read nor delivered."""
    table = PendingTable()
    old, kept = table.add(100, 1, 1, "pg", "t"), table.add(200, 2, 1, "pg", "t")
    table.park(old, ParkedReason.EXPIRED)

    assert table.drop_before(200) == [old]
    assert (list(table), table.oldest, table.parked) == ([kept], kept, 0)


def test_the_cache_of_decisions_is_bounded_and_keeps_the_latest() -> None:
    """It holds at most two generations, and always the newest one."""
    memory = DecisionCache(limit=10)
    for number in range(95):
        memory.add(number, State.COMMITTED, 1_000 + number)
        assert memory.find(number) == RecordedDecision(State.COMMITTED, 1_000 + number)
        for recent in range(max(number - 9, 0), number):
            assert recent in memory

    remembered = [number for number in range(95) if number in memory]
    assert remembered == list(range(80, 95))
    assert memory.find(79) is None
    assert memory.forgotten_final == 1_079


def test_a_later_finding_replaces_the_cached_decision() -> None:
    """A final message after an op message makes the transaction committed."""
    memory = DecisionCache(limit=2)
    memory.add(1, State.ROLLED_BACK, 10)
    memory.add(2, State.ROLLED_BACK, 20)
    memory.add(1, State.COMMITTED, 30)

    assert memory.find(1) == RecordedDecision(State.COMMITTED, 30)


def test_each_half_of_a_group_resolves_to_its_leader() -> None:
    """A member has no entry of its own."""
    table = PendingTable()
    leader, other = table.add(100, 1, 1, "pg", "t"), table.add(500, 9, 1, "pg", "t")
    table.add_member(100, MemberHalf(200, 2))
    table.add_member(100, MemberHalf(300, 3))
    table.add_copy(400, 200, 4)

    assert (table.get(200), len(table)) == (None, 2)
    assert [table.transaction_of(offset) for offset in (100, 200, 300, 400, 500)] == [100] * 4 + [
        500
    ]
    assert list(table.op_offsets_of(leader)) == [1, 2, 4, 3]
    assert list(table.op_offsets_of(other)) == [9]


def test_a_decision_applies_to_the_whole_group() -> None:
    """A repeated request gets the same answer, whichever half it names."""
    table = PendingTable()
    leader = table.add(100, 1, 1, "pg", "t")
    table.add_member(100, MemberHalf(200, 2))

    table.decide(leader, State.COMMITTED, 900)

    assert table.groups == {}
    assert (
        table.decided.find(200) == table.decided.find(100) == RecordedDecision(State.COMMITTED, 900)
    )


def test_a_member_that_rocketmq_decided_leaves_its_group() -> None:
    """Apache RocketMQ has no groups; its delivered message is not delivered again."""
    table = PendingTable()
    leader = table.add(100, 1, 1, "pg", "t")
    table.add_member(100, MemberHalf(200, 2))
    table.add_member(100, MemberHalf(300, 3))

    assert table.decide_member(200, State.COMMITTED, 700) == MemberHalf(200, 2)

    assert table.groups == {100: (MemberHalf(300, 3),)}
    assert table.decide_member(200, State.COMMITTED, 700) is None
    table.decide(leader, State.ROLLED_BACK, 900)
    assert table.decided.find(200) == RecordedDecision(State.COMMITTED, 700)


@pytest.mark.parametrize("text", ["no-answer", "unknown", "expired"])
def test_the_parked_reason_can_be_parsed(text: str) -> None:
    """It is a property of the parked copy."""
    assert parked_reason_of(text.encode()).text == text


def test_a_copy_parked_by_rocketmq_has_no_reason() -> None:
    """RocketMQ records none."""
    assert parked_reason_of(None).text is None
    assert parked_reason_of(b"something else") is ParkedReason.NOT_RECORDED


def test_undecided_transactions_are_counted_by_group_and_topic() -> None:
    """However one leaves the table: decided, discarded, or cleared with all others."""
    table = PendingTable()
    entries = [table.add(1_000 * number, number, 0, "pg", "t") for number in range(4)]
    table.add(9_000, 9, 0, "other", "t")
    table.add(9_100, 9, 0, "other", "t2")

    table.decide(entries[0], State.COMMITTED, 10_000)
    table.discard(entries[1])
    counted = [table.count_of("pg"), table.count_of("other"), table.count_of("nobody")]
    again = PendingTable()
    again.restore(map(copy.copy, table))

    assert counted == [2, 2, 0]
    for one in (table, again):
        found = [(origin.group, origin.topic, origin.count) for origin in one.origins()]
        assert found == [("pg", "t", 2), ("other", "t", 1), ("other", "t2", 1)]
    table.clear()
    assert (table.count_of("pg"), table.origins()) == (0, [])


def test_the_table_can_be_iterated_in_parts_while_it_changes() -> None:
    """In log order; a transaction that is undecided from begin to end is returned."""
    table = PendingTable()
    entries = [table.add(number, number, 0, "pg", "t") for number in range(5 * BLOCK_COUNT)]
    for entry in entries[: 2 * BLOCK_COUNT]:
        table.decide(entry, State.COMMITTED, 1_000_000)
    seen: list[int] = []
    pieces = 0
    while part := table.after(seen[-1] if seen else -1):
        assert len(part) <= BLOCK_COUNT
        seen.extend(entry.offset for entry in part)
        pieces += 1
        if pieces < 5:
            table.decide(entries[-pieces], State.ROLLED_BACK, 2_000_000)
            first = (5 + pieces) * BLOCK_COUNT
            for number in range(first, first + BLOCK_COUNT):
                table.add(number, number, 0, "pg", "t")

    assert seen == sorted(set(seen))
    assert {entry.offset for entry in table} <= set(seen)


def _undecided_in_parts(table: PendingTable, count: int) -> list[int]:
    offsets: list[int] = []
    while part := table.after(offsets[-1] if offsets else -1, count):
        assert len(part) <= count
        offsets.extend(entry.offset for entry in part)
    return offsets


def test_the_table_is_in_log_order_whatever_is_decided() -> None:
    """Lookup and iteration see the same table."""
    seed = randrange(1 << 32)
    print(f"seed {seed}")
    random = Random(seed)
    table = PendingTable()
    undecided: dict[int, Pending] = {}
    offset = 0
    for share in (0.3, 0.9, 1.0, 0.5, 1.0):  # of those that are decided, of so many new ones
        for _ in range(4 * BLOCK_COUNT):
            offset += random.randrange(1, 8)
            undecided[offset] = table.add(offset, 0, 0, "pg", "t")
        chosen = list(undecided)
        random.choice((random.shuffle, list.sort, list.reverse))(chosen)
        for one in chosen[: int(share * len(chosen))]:
            table.decide(undecided.pop(one), State.COMMITTED, 1 << 40)
        chosen = list(undecided)

        assert [entry.offset for entry in table] == chosen
        assert _undecided_in_parts(table, 100) == _undecided_in_parts(table, 10**6) == chosen
        assert len(table) == len(chosen)
        assert table.oldest is next(iter(undecided.values()), None)
        assert all(table.get(one) is entry for one, entry in undecided.items())
        assert not any(one in table for one in range(offset) if one not in undecided)


def test_no_prepare_waits_while_a_large_table_grows() -> None:
    """One dictionary of a million would be copied as a whole, in 80 ms, when it grows."""
    table = PendingTable()
    largest = 0
    tracemalloc.start()
    try:
        for number in range(20 * BLOCK_COUNT):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            table.add(number, number, 0, "pg", "t")
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()

    assert largest < 256 << 10


@pytest.mark.parametrize("asked", [False, True])
def test_an_undecided_transaction_takes_little_memory(asked: bool) -> None:
    """A million of them must fit in memory with the broker's other data."""
    table = PendingTable()
    count = 20_000
    base = 1 << 40  # offsets of a large log are not small integers
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            entry = table.add(
                base + 1_000 * number, (1 << 31) + number, 1_700_000_000_000 + number, "pg", "t"
            )
            if asked:
                entry.sent, entry.checks, entry.answered = number % 17, number % 15, number % 3
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(table) == count
    assert (after - before) / count <= 255
