"""Decisions about halves that are not in memory, or of too many bytes for one turn of the loop."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from halfmq.broker.handlers import end_batch, later
from halfmq.broker.handlers.later import Later
from halfmq.broker.handlers.transaction import LARGE_BODY, TransactionHandler
from halfmq.broker.router import Router
from halfmq.broker.transaction.cold_halves import OnRead
from halfmq.remoting.codes import HeaderType, ResponseCode
from halfmq.remoting.transactions import EndResult, TransactionEnd, decode_end_results
from halfmq.store.draft import Appended
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.transactions import message
from tests.unit.test_transaction_batches import COMMIT, OK, REFUSED, ROLLBACK, Front, an_end


class ColdFront(Front):
    """The handler over a log of which some is on the disk only."""

    def reload(self) -> None:
        super().reload()
        self.cold: set[int] = set()
        self.reading: list[tuple[int, OnRead]] = []
        log = self.broker.log
        whole = log.read_cold

        def read(ranges: Iterable[tuple[int, int]]) -> bytes | None:
            return None if {start for start, _ in ranges} & self.cold else whole(ranges)

        log.read = read  # type: ignore[method-assign]
        self.broker.service._read = read
        self.router = Router(
            TransactionHandler(
                self.broker.service,
                log,
                self.group,
                lambda: None,
                Later(
                    lambda offset, on_read: self.reading.append((offset, on_read)),
                    call_soon=self.later.append,
                ),
            ).handlers()
        )

    def restarted(self, count: int, size: int = 5) -> list[Appended]:
        """Prepare transactions and restart, so that their messages are in the log only."""
        halves = []
        for number in range(count):
            key = f"K{number}"
            one = message(body=b"x" * size, key=key)
            halves += self.broker.service.prepare_group([(one, key)], "pg", self.peer)
        self.broker.log.flush()
        self.broker.restart()
        self.reload()
        return halves

    def freeze(self, *halves: Appended) -> None:
        """Have these on the disk only."""
        self.cold.update(half.physical_offset for half in halves)

    def read_all(self) -> list[int]:
        """Have everything read that was asked for; return what that was."""
        reading, self.reading[:] = self.reading[:], []
        for offset, on_read in reading:
            self.cold.discard(offset)
            on_read(None)
        return [offset for offset, _ in reading]

    def end_to_end(self) -> None:
        """Let the loop come round, and the disk be read, until nothing is left to do."""
        while self.later or self.reading:
            self.pass_ends()
            self.read_all()


@pytest.fixture
def front(tmp_path: Path) -> ColdFront:
    """A broker without messages."""
    return ColdFront(tmp_path)


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
def test_a_decision_waits_until_its_half_has_been_read(front: ColdFront, decision: int) -> None:
    """And the event loop does not wait for that."""
    cold, warm = front.restarted(2)
    front.freeze(cold)
    front.end(cold, decision)
    assert front.appends == []
    front.pass_ends()
    assert front.answers() == []
    assert front.read_all() == [cold.physical_offset]

    (answer,) = front.answers()

    assert answer.code == OK
    assert front.finals([cold, warm]) == [int(decision == COMMIT), 0]
    front.end(warm, decision)
    (answer,) = front.answers()
    assert answer.code == OK
    assert not front.reading


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_what_a_connection_decides_later_waits_behind(
    front: ColdFront, header_type: HeaderType
) -> None:
    """The first decision that was sent is the first that is taken."""
    cold, warm = front.restarted(2)
    front.freeze(cold)
    front.end(cold, COMMIT, header_type)
    front.end(cold, ROLLBACK, header_type)
    front.end(warm, ROLLBACK, header_type)
    front.batch(an_end(warm, COMMIT), an_end(cold, COMMIT))
    front.pass_ends()
    assert front.broker.service.pending == 2
    front.end_to_end()

    *single, batch = front.answers()

    assert [one.code for one in single] == [OK, REFUSED, OK]
    assert [one.code for one in decode_end_results(batch.body)] == [REFUSED, OK]
    assert front.finals([cold, warm]) == [1, 0]


def test_a_connection_waits_behind_no_other(front: ColdFront) -> None:
    """Its decision about the same transaction may even be the first."""
    (cold,) = front.restarted(1)
    front.freeze(cold)
    front.end(cold, COMMIT)
    front.peer, first = type(front.peer)(), front.peer
    front.cold.clear()  # it has been read, and nobody has been told yet
    front.end(cold, ROLLBACK)
    (answer,) = front.answers()
    assert answer.code == OK
    front.peer = first
    front.end_to_end()
    (answer,) = front.answers()
    assert answer.code == REFUSED
    assert front.finals([cold]) == [0]


def test_a_decision_repeated_late_waits_as_well(front: ColdFront) -> None:
    """To answer it, the half is looked at."""
    (half,) = front.restarted(1)
    front.end(half, COMMIT)
    front.answers()
    front.freeze(half)
    front.end(half, COMMIT)
    front.batch(an_end(half, COMMIT))
    assert front.read_all() == [half.physical_offset]
    front.end_to_end()
    single, batch = front.answers()
    assert single.code == OK
    assert [one.code for one in decode_end_results(batch.body)] == [OK]


def test_the_halves_of_several_messages_are_read_together(front: ColdFront) -> None:
    """One of them cold is enough for the others to be as well."""
    halves = front.broker.prepare_group(5)
    front.broker.log.flush()
    front.broker.restart()
    front.reload()
    front.freeze(*halves[2:])
    front.end(halves[0], COMMIT)
    assert front.read_all() == [half.physical_offset for half in halves]
    assert [one.code for one in front.answers()] == [OK]
    assert front.finals(halves) == [1] * 5


def test_what_is_no_half_is_refused_though_it_cannot_be_read(front: ColdFront) -> None:
    """An offset made up leads nowhere, and holds up nobody."""
    (half,) = front.restarted(1)
    for offset in (-7, 1 << 62, half.physical_offset + 1):
        front.freeze(nowhere := Appended(offset, 0, 0, 0))
        front.end(nowhere, COMMIT)
        front.end_to_end()
        (answer,) = front.answers()
        assert answer.code == ResponseCode.SYSTEM_ERROR
    assert front.broker.service.pending == 1


def _results(front: ColdFront) -> list[EndResult]:
    front.end_to_end()
    return front.results()


def test_a_large_batch_is_done_in_slices(front: ColdFront, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them others have their turn; it is answered as one, and once."""
    monkeypatch.setattr(end_batch, "SLICE_BYTES", 1_000)
    halves = front.restarted(30, size=400)
    other = front.broker.prepare()
    ends = [an_end(half, ROLLBACK if number % 3 else COMMIT) for number, half in enumerate(halves)]
    ends += [an_end(halves[0], COMMIT), an_end(halves[0], ROLLBACK), an_end(halves[1], COMMIT)]
    ends.append(TransactionEnd(7, 7, COMMIT))
    ends.append(TransactionEnd(7, 7, 5))
    front.appends.clear()

    front.batch(*ends)
    assert front.broker.service.pending == 31 - 3
    front.peer, first = type(front.peer)(), front.peer
    front.end(other, COMMIT)
    front.pass_ends()
    assert [one.code for one in front.answers()] == [OK], "it need not wait behind the batch"
    front.peer = first
    assert front.broker.service.pending > 0

    codes = [one.code for one in _results(front)]

    assert codes == [OK] * 31 + [REFUSED] * 2 + [ResponseCode.SYSTEM_ERROR] * 2
    assert front.finals(halves) == [int(number % 3 == 0) for number in range(30)]
    assert max(front.appends) <= 3
    front.batch(*ends)
    assert [one.code for one in _results(front)] == codes


def test_a_batch_goes_on_as_its_halves_are_read(
    front: ColdFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is at hand is decided at once; of what is not, some are read together."""
    monkeypatch.setattr(end_batch, "READ_AHEAD", 4)
    halves = front.restarted(20)
    front.freeze(*halves[3:])
    front.batch(*(an_end(half, COMMIT) for half in halves))
    assert front.broker.service.pending == 17
    assert front.read_all() == [half.physical_offset for half in halves[3:7]]
    assert [one.code for one in _results(front)] == [OK] * 20
    assert front.finals(halves) == [1] * 20


def test_a_slice_that_cannot_be_appended_is_served_one_by_one(
    front: ColdFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decision gets the answer it deserves, and what came before stays decided."""
    monkeypatch.setattr(end_batch, "SLICE_BYTES", 1_000)
    halves = front.restarted(9, size=400)
    front.batch(*(an_end(half, COMMIT) for half in halves))
    front.broker.log.failing = True
    front.end_to_end()
    front.broker.log.failing = False
    results = front.results()
    assert [one.code for one in results] == [OK] * 3 + [ResponseCode.SYSTEM_ERROR] * 6
    assert front.finals(halves) == [1] * 3 + [0] * 6
    front.batch(*(an_end(half, COMMIT) for half in halves))
    assert [one.code for one in _results(front)] == [OK] * 9


def test_too_many_that_wait_are_served_without_a_pause(
    front: ColdFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No decision is refused because others are slow; in the end the loop waits for the disk."""
    monkeypatch.setattr(later, "WAITING_MAX", 5)
    halves = front.restarted(8)
    front.freeze(*halves)
    for half in halves[:4]:
        front.end(half, COMMIT)
    front.batch(*(an_end(half, COMMIT) for half in halves))
    assert front.broker.service.pending == 8
    front.end(halves[7], ROLLBACK)
    assert front.broker.service.pending == 0
    assert "event=decisions_pile_up" in caplog.text
    front.end_to_end()
    answers = front.answers()
    assert sorted(one.code for one in answers) == [OK] * 5 + [REFUSED]
    assert front.finals(halves) == [1] * 8


def test_one_that_fails_holds_up_no_other(
    front: ColdFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in a step, those behind it are served."""
    first, second = front.restarted(2)
    front.freeze(first)
    front.batch(an_end(first, COMMIT))
    front.end(second, COMMIT)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the test says no")

    monkeypatch.setattr(end_batch, "encode_entries", fail)
    front.end_to_end()
    assert [one.code for one in front.answers()] == [OK]
    assert front.finals([first, second]) == [1, 1]


def test_large_messages_are_not_gathered(front: ColdFront) -> None:
    """Hundreds of decisions may come by one read, and all their messages would be in memory."""
    halves = front.restarted(3, size=LARGE_BODY + 1)
    for half in halves:
        front.end(half, COMMIT)
    assert front.appends == [1, 1, 1]
    assert len(front.answers()) == 3


def test_a_group_append_that_fails_leaves_a_cold_decision_open(front: ColdFront) -> None:
    """The transaction is as it was, and its producer free to try again."""
    (half,) = front.restarted(1)
    front.freeze(half)
    front.end(half, COMMIT)
    front.broker.log.failing = True
    front.read_all()
    front.broker.log.failing = False
    (answer,) = front.answers()
    assert answer.code != OK
    assert front.broker.service.pending == 1
    assert len(front.broker.records_of(HALF_TOPIC)) == 1
