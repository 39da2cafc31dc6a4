"""The state machine, and the memory of decisions."""

import sys
from itertools import product

import pytest

from halfmq.broker.transaction.pending import (
    Copy,
    DecidedMemory,
    Decision,
    Event,
    PendingTable,
    State,
    Verdict,
    outcome,
)

DECIDED = (State.COMMITTED, State.ROLLED_BACK)
REQUESTS = (Event.COMMIT, Event.ROLLBACK, Event.UNKNOWN, Event.GIVE_UP, Event.RESUME)


def test_every_state_has_a_rule_for_every_event() -> None:
    """Nothing a client, the checker or the log can bring is undefined."""
    for state, event in product(State, Event):
        result = outcome(state, event)
        assert isinstance(result.state, State)
        assert isinstance(result.verdict, Verdict)


@pytest.mark.parametrize(("state", "event"), list(product(DECIDED, REQUESTS)))
def test_no_request_changes_a_decision(state: State, event: Event) -> None:
    """First decision wins."""
    result = outcome(state, event)
    assert result.state is state
    assert result.verdict not in {Verdict.DECIDE, Verdict.NOTE}


@pytest.mark.parametrize("state", [State.PREPARED, State.PARKED])
def test_the_first_decision_is_taken(state: State) -> None:
    """However late it comes: a parked transaction is decided like any other."""
    assert outcome(state, Event.COMMIT) == (State.COMMITTED, Verdict.DECIDE)
    assert outcome(state, Event.ROLLBACK) == (State.ROLLED_BACK, Verdict.DECIDE)
    assert outcome(state, Event.UNKNOWN) == (state, Verdict.IGNORE)


def test_the_same_again_is_repeated_and_the_opposite_refused() -> None:
    """A client that did not get its answer asks again, and gets it."""
    assert outcome(State.COMMITTED, Event.COMMIT).verdict is Verdict.REPEAT
    assert outcome(State.ROLLED_BACK, Event.ROLLBACK).verdict is Verdict.REPEAT
    assert outcome(State.COMMITTED, Event.ROLLBACK).verdict is Verdict.REFUSE
    assert outcome(State.ROLLED_BACK, Event.COMMIT).verdict is Verdict.REFUSE


@pytest.mark.parametrize("state", list(State))
def test_a_final_message_in_the_log_is_the_truth(state: State) -> None:
    """Its consumers may have it, whatever else was recorded."""
    assert outcome(state, Event.FINAL_FOUND).state is State.COMMITTED


def test_a_decision_takes_a_transaction_off_the_table() -> None:
    """What is not in the table cannot be decided; that is why nothing is decided twice."""
    table = PendingTable()
    entry = table.add(4096, 7, 1_000, "pg")
    assert (table.get(4096), len(table), 4096 in table) == (entry, 1, True)

    table.decide(entry, State.COMMITTED, 9000)

    assert (table.get(4096), len(table), 4096 in table) == (None, 0, False)
    assert table.decided.find(4096) == Decision(State.COMMITTED, 9000)


def test_parked_transactions_are_counted_and_can_be_resumed() -> None:
    """Parking ends the questions, not the transaction."""
    table = PendingTable()
    first, second = table.add(0, 0, 1, "pg"), table.add(100, 1, 1, "pg")
    first.checks = 15
    table.park(first)
    table.park(second)
    assert table.parked == 2

    table.resume(first)
    table.decide(second, State.ROLLED_BACK, 200)

    assert (table.parked, first.state, first.checks) == (0, State.PREPARED, 0)


def test_a_copy_is_another_name() -> None:
    """Op messages have to name every record of the transaction in the half topic."""
    table = PendingTable()
    entry = table.add(100, 1, 1, "pg")
    other = table.add(200, 2, 1, "pg")
    table.add_copy(300, 100, 3)
    table.add_copy(300, 100, 3)

    assert table.copies == {300: Copy(100, 3)}
    assert (table.first_of(300), table.first_of(200)) == (100, 200)
    assert (tuple(table.names_of(entry)), tuple(table.names_of(other))) == ((1, 3), (2,))


def test_deleted_halves_leave_the_table() -> None:
    """A half below the log's minimum can be neither read nor delivered."""
    table = PendingTable()
    old, kept = table.add(100, 1, 1, "pg"), table.add(200, 2, 1, "pg")
    table.park(old)

    assert table.drop_before(200) == [old]
    assert (list(table), table.oldest, table.parked) == ([kept], kept, 0)


def test_the_memory_of_decisions_is_bounded_and_keeps_the_latest() -> None:
    """It never holds more than two generations, and always the newest one."""
    memory = DecidedMemory(limit=10)
    for number in range(95):
        memory.remember(number, State.COMMITTED, 1_000 + number)
        assert memory.find(number) == Decision(State.COMMITTED, 1_000 + number)
        for recent in range(max(number - 9, 0), number):
            assert recent in memory

    remembered = [number for number in range(95) if number in memory]
    assert remembered == list(range(80, 95))
    assert memory.find(79) is None
    assert memory.forgotten_final == 1_079


def test_a_correction_replaces_what_was_remembered() -> None:
    """A final message found behind an op message makes the transaction a committed one."""
    memory = DecidedMemory(limit=2)
    memory.remember(1, State.ROLLED_BACK, 10)
    memory.remember(2, State.ROLLED_BACK, 20)
    memory.remember(1, State.COMMITTED, 30)

    assert memory.find(1) == Decision(State.COMMITTED, 30)


def test_an_undecided_transaction_takes_little_memory() -> None:
    """A million of them must fit beside a broker's other work."""
    table = PendingTable()
    count = 10_000
    base = 1 << 40  # offsets of a large log are not small integers
    for number in range(count):
        table.add(base + 1_000 * number, (1 << 31) + number, 1_700_000_000_000 + number, "pg")
    entries = sum(
        sys.getsizeof(entry)
        + sys.getsizeof(entry.offset)
        + sys.getsizeof(entry.queue_offset)
        + sys.getsizeof(entry.store_timestamp)
        for entry in table
    )

    assert (entries + sys.getsizeof(table._pending)) / count < 250
