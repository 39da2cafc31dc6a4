"""END_TRANSACTIONS, and decisions that are appended together with others."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError, UnfinishedError
from halfmq.broker.handlers.transactions import end_batch
from halfmq.broker.handlers.transactions.end import LARGE_BODY, TransactionHandler
from halfmq.broker.handlers.transactions.end_batch import EndBatches
from halfmq.broker.loop import slices
from halfmq.broker.net.group_append import GROUP_MAX, GroupAppend
from halfmq.broker.net.router import Router
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.remoting.own_requests import (
    EndResult,
    FinalMessageResponseHeader,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_end_results,
    encode_entries,
)
from halfmq.remoting.replies import encode_request
from halfmq.store.format.ids import offset_message_id
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import as_store
from tests.support.transactions import HOST, Broker, Connected, message

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.ILLEGAL_OPERATION
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0


class Front:
    """The handler, called as by the router; staged records are appended at the end of a pass."""

    def __init__(self, directory: Path, *, decided: int = 1_000) -> None:
        self.broker = Broker(directory, decided=decided)
        self.peer = Connected()
        self.reload()

    def reload(self) -> None:
        """Serve from the service as it is now."""
        self.later: list[Callable[[], None]] = []
        self.appends: list[int] = []
        self.turns = 0  # in which requests were served
        append = self.broker.log.append

        def counted(group: Sequence[object], *, contiguous: bool = False) -> list[AppendResult]:
            done = append(group, contiguous=contiguous)  # type: ignore[arg-type]
            self.appends.append(len(group))
            return done

        self.broker.log.append = counted  # type: ignore[method-assign]
        self.group = GroupAppend(as_store(self.broker.log), call_soon=self.later.append)
        self.router = Router(
            TransactionHandler(self.broker.service.decisions, self.group).handlers(),
            EndBatches(
                self.broker.service.decisions, self.group, self.broker.log.lacking
            ).handlers(),
        )

    def send(self, frame: bytes) -> None:
        """Receive one request, and serve it in as many turns as it takes."""
        (command,) = FrameDecoder().receive_data(frame)
        while True:
            self.turns += 1
            try:
                self.router.dispatch(command, self.peer)
            except UnfinishedError:
                self.pass_ends()
                continue
            break

    def pass_ends(self) -> None:
        """Let the event loop come round."""
        later, self.later[:] = self.later[:], []
        for work in later:
            work()

    def answers(self) -> list[RemotingCommand]:
        """Return what was answered, in order, as if the disk had caught up."""
        self.pass_ends()
        self.broker.log.flush()
        data = b"".join(reply for _, reply in self.peer.waiting)
        assert all(position <= self.broker.log.durable_offset for position, _ in self.peer.waiting)
        self.peer.waiting.clear()
        return FrameDecoder().receive_data(data)

    def batch(self, *ends: TransactionEnd, group: str = "pg", one_way: bool = False) -> None:
        """Send many decisions."""
        self.send(
            encode_request(
                RequestCode.END_TRANSACTIONS,
                opaque=9,
                header=TransactionsRequestHeader(producer_group=group),
                body=encode_entries(ends),
                header_type=HeaderType.MSGPACK,
                one_way=one_way,
            )
        )

    def results(self) -> list[EndResult]:
        """Return the results of the one batch that was sent."""
        (answer,) = self.answers()
        assert (answer.code, answer.opaque) == (OK, 9)
        return decode_end_results(answer.body)

    def end(self, half: AppendResult, decision: int, header_type: int = HeaderType.MSGPACK) -> None:
        """Send one decision."""
        header = EndTransactionRequestHeader(
            producer_group="pg",
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            commit_or_rollback=decision,
            msg_id="x",
        )
        self.send(
            encode_request(
                RequestCode.END_TRANSACTION, opaque=5, header=header, header_type=header_type
            )
        )

    def restarted(self, count: int, size: int = 5) -> list[AppendResult]:
        """Prepare transactions and restart, so that their messages are in the log only."""
        halves = []
        for number in range(count):
            key = f"K{number}"
            one = message(body=b"x" * size, key=key)
            halves += self.broker.service.prepares.prepare_group([(one, key)], "pg", self.peer)
        self.broker.log.flush()
        self.broker.restart()
        self.reload()
        return halves

    def finals(self, halves: Sequence[AppendResult]) -> list[int]:
        """Return how many final messages each of the halves has."""
        return [len(self.broker.finals_of(half)) for half in halves]

    def final_id(self, half: AppendResult) -> str:
        """Return the offset message id of a half's final message."""
        (final,) = self.broker.finals_of(half)
        return offset_message_id(HOST, final.physical_offset)


def an_end(half: AppendResult, decision: int, *, from_check: bool = False) -> TransactionEnd:
    """Return one decision of a batch."""
    return TransactionEnd(
        commit_log_offset=half.physical_offset,
        tran_state_table_offset=half.queue_offset,
        decision=decision,
        from_check=from_check,
    )


@pytest.fixture
def front(tmp_path: Path) -> Front:
    """A broker without messages."""
    return Front(tmp_path)


# --- the id of the final message


@pytest.mark.parametrize("how", ["at once", "again", "after a restart", "from the index"])
def test_a_halfmq_client_gets_the_id_of_the_final_message(tmp_path: Path, how: str) -> None:
    """Each time the same, wherever the broker finds it."""
    front = Front(tmp_path, decided=2)
    half = front.broker.prepare()
    front.end(half, COMMIT)
    if how == "at once":
        front.pass_ends()
    else:
        front.answers()
    if how == "from the index":
        for _ in range(9):
            front.broker.end(front.broker.prepare(), TransactionEvent.COMMIT)
        front.broker.restart(drained=True)
        front.reload()
    elif how == "after a restart":
        front.broker.restart()
        front.reload()
    if how != "at once":
        front.end(half, COMMIT)

    (answer,) = front.answers()

    assert answer.code == OK
    assert response_header(answer, FinalMessageResponseHeader).msg_id == front.final_id(half)


@pytest.mark.parametrize("decision", [ROLLBACK, UNKNOWN])
def test_without_a_final_message_there_is_no_id(front: Front, decision: int) -> None:
    """The answer has no fields then."""
    front.end(front.broker.prepare(), decision)
    (answer,) = front.answers()
    assert answer.code == OK
    assert response_header(answer, FinalMessageResponseHeader).msg_id is None


@pytest.mark.parametrize("header_type", [HeaderType.JSON, HeaderType.ROCKETMQ])
def test_official_clients_get_the_official_answer(front: Front, header_type: int) -> None:
    """Without fields, as they know it."""
    half = front.broker.prepare()
    for _ in range(2):
        front.end(half, COMMIT, header_type)
    for answer in front.answers():
        assert answer.code == OK
        assert not answer.header


def test_a_group_is_appended_with_what_else_is_staged(front: Front) -> None:
    """Single decisions before and after the batch keep their order, and all are answered."""
    broker = front.broker
    first, group, last = broker.prepare(), broker.prepare_group(3), broker.prepare()
    front.appends.clear()
    front.end(first, COMMIT)
    front.end(group[0], COMMIT)
    front.end(last, ROLLBACK)

    answers = front.answers()

    assert front.appends == [5]
    assert [answer.code for answer in answers] == [OK, OK, OK]
    ids = [response_header(answer, FinalMessageResponseHeader).msg_id for answer in answers]
    assert ids == [front.final_id(first), front.final_id(group[0]), None]
    assert front.finals([first, *group, last]) == [1, 1, 1, 1, 0]


# --- many decisions


def test_many_decisions_are_one_append_and_one_answer(front: Front) -> None:
    """Each has its own result, in order."""
    halves = [front.broker.prepare() for _ in range(4)]
    group = front.broker.prepare_group(3)
    front.appends.clear()
    decisions = [COMMIT, ROLLBACK, COMMIT, UNKNOWN]

    front.batch(
        *(an_end(half, decision) for half, decision in zip(halves, decisions, strict=True)),
        an_end(group[0], COMMIT),
    )

    assert front.results() == [
        EndResult(code=OK, message_id=front.final_id(halves[0])),
        EndResult(code=OK),
        EndResult(code=OK, message_id=front.final_id(halves[2])),
        EndResult(code=OK),
        EndResult(code=OK, message_id=front.final_id(group[0])),
    ]
    assert front.appends == [6]
    assert front.finals([*halves, *group]) == [1, 0, 1, 0, 1, 1, 1]


def test_a_batch_is_answered_when_all_of_it_is_on_disk(front: Front) -> None:
    """A client may forget the transaction after "committed"."""
    halves = [front.broker.prepare() for _ in range(3)]
    front.batch(*(an_end(half, COMMIT) for half in halves))
    front.pass_ends()
    ((position, _),) = front.peer.waiting
    assert position == front.broker.log.write_offset

    front.peer.waiting.clear()
    front.batch(*(an_end(half, COMMIT) for half in halves))  # sent again before it was on disk
    front.pass_ends()
    ((again, _),) = front.peer.waiting
    assert front.broker.finals_of(halves[2])[0].physical_offset < again <= position


def test_a_batch_sent_again_gets_the_same_results(front: Front) -> None:
    """Its answer was lost; nothing is appended."""
    halves = [front.broker.prepare() for _ in range(3)]
    ends = [
        an_end(half, decision)
        for half, decision in zip(halves, (COMMIT, ROLLBACK, COMMIT), strict=True)
    ]
    front.batch(*ends)
    first = front.results()
    end = front.broker.log.write_offset

    front.batch(*ends)

    assert front.results() == first
    assert front.broker.log.write_offset == end


def test_a_refused_decision_of_a_batch_affects_no_other(front: Front) -> None:
    """Each gets the code that it would get alone."""
    good, decided, foreign = (
        front.broker.prepare(),
        front.broker.prepare(),
        front.broker.prepare(group="other"),
    )
    front.broker.end(decided, TransactionEvent.ROLLBACK)
    nowhere = AppendResult(1 << 40, 0, 0, 0)

    front.batch(
        an_end(decided, COMMIT),
        an_end(good, COMMIT),
        an_end(nowhere, COMMIT),
        an_end(foreign, COMMIT),
        an_end(good, 5),
    )

    results = front.results()
    assert [result.code for result in results] == [REFUSED, OK, 1, 1, 1]
    assert "was rolled back at 2023-11-14T22:13:20.000+00:00" in str(results[0].remark)
    assert "group wrong" in str(results[3].remark)
    assert "commitOrRollback" in str(results[4].remark)
    assert front.finals([good, decided, foreign]) == [1, 0, 0]


def test_one_transaction_twice_in_a_batch_is_decided_once(front: Front) -> None:
    """The first of the decisions wins, by whatever name the transaction is called."""
    half, group = front.broker.prepare(), front.broker.prepare_group(2)

    front.batch(
        an_end(half, COMMIT),
        an_end(group[1], ROLLBACK),
        an_end(half, ROLLBACK),
        an_end(half, COMMIT),
        an_end(group[0], COMMIT),
    )

    assert [result.code for result in front.results()] == [OK, OK, REFUSED, OK, REFUSED]
    assert front.finals([half, *group]) == [1, 0, 0]


def test_batches_and_single_decisions_about_one_transaction_meet(front: Front) -> None:
    """The decision that was staged first in a pass of the loop wins."""
    halves = [front.broker.prepare() for _ in range(2)]
    group = front.broker.prepare_group(2)
    front.end(halves[0], COMMIT)
    front.batch(an_end(halves[0], ROLLBACK), an_end(halves[1], COMMIT), an_end(group[1], COMMIT))
    front.end(halves[1], ROLLBACK)
    front.end(group[0], ROLLBACK)

    answers = front.answers()

    by_opaque = [answer for answer in answers if answer.opaque == 9]
    (batch,) = by_opaque
    assert [result.code for result in decode_end_results(batch.body)] == [REFUSED, OK, OK]
    assert [answer.code for answer in answers if answer.opaque == 5] == [OK, REFUSED, REFUSED]
    assert front.finals([*halves, *group]) == [1, 1, 1, 1]


def test_a_batch_that_cannot_be_appended_leaves_everything_undecided(front: Front) -> None:
    """Each result says so, and the batch may be sent again."""
    halves = [front.broker.prepare() for _ in range(2)]
    group = front.broker.prepare_group(2)
    ends = [an_end(half, COMMIT) for half in (*halves, group[0])]
    front.broker.log.failing = True
    front.batch(*ends)
    results = front.results()
    assert {result.code for result in results} == {ResponseCode.SYSTEM_ERROR}
    assert front.broker.service.metrics()["pending"] == 3
    front.broker.log.failing = False

    front.batch(*ends)

    assert {result.code for result in front.results()} == {OK}
    assert front.finals([*halves, *group]) == [1, 1, 1, 1]


def test_a_message_whose_topic_cannot_be_created_affects_no_other(front: Front) -> None:
    """Only messages of that topic wait."""
    half, group = front.broker.prepare(), front.broker.prepare_group(2)
    front.broker.destination.error = RequestRefusedError("no room", ResponseCode.NO_PERMISSION)

    front.batch(an_end(half, ROLLBACK), an_end(group[0], COMMIT))

    assert front.results() == [
        EndResult(code=OK),
        EndResult(code=ResponseCode.NO_PERMISSION, remark="no room"),
    ]
    assert front.broker.service.metrics()["pending"] == 1


def test_an_empty_batch_and_a_one_way_batch(front: Front) -> None:
    """The one is answered with nothing, the other is carried out and not answered."""
    front.batch()
    assert front.results() == []
    half = front.broker.prepare()
    front.batch(an_end(half, COMMIT), an_end(half, COMMIT), one_way=True)
    assert front.answers() == []
    assert front.finals([half]) == [1]


def test_an_invalid_body_is_refused(front: Front) -> None:
    """Nothing is decided."""
    too_many = encode_entries([an_end(AppendResult(0, 0, 0, 0), COMMIT)] * 2_000)
    for body in (b"", b"\xc1", b"\x93\x01", too_many):
        front.send(
            encode_request(
                RequestCode.END_TRANSACTIONS,
                opaque=9,
                header=TransactionsRequestHeader(producer_group="pg"),
                body=body,
                header_type=HeaderType.MSGPACK,
            )
        )
        (answer,) = front.answers()
        assert answer.code == ResponseCode.SYSTEM_ERROR


def test_large_batches_are_appended_in_parts(front: Front) -> None:
    """Staged records are appended before they are too many for one turn."""
    halves = [front.broker.prepare() for _ in range(GROUP_MAX + 10)]
    front.appends.clear()
    front.batch(*(an_end(half, COMMIT) for half in halves[: GROUP_MAX - 20]))
    front.batch(*(an_end(half, COMMIT) for half in halves[GROUP_MAX - 20 :]))
    assert front.appends == [GROUP_MAX]
    assert len(front.answers()) == 2
    assert front.appends == [GROUP_MAX, 10]


def test_a_batch_of_many_bytes_takes_several_turns(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them others have theirs; it is answered as one, and once."""
    monkeypatch.setattr(end_batch, "TURN_BYTES", 1_000)
    monkeypatch.setattr(slices, "SLICE_S", 0)
    halves = front.restarted(30, size=400)
    ends = [an_end(half, ROLLBACK if number % 3 else COMMIT) for number, half in enumerate(halves)]
    ends += [an_end(halves[0], COMMIT), an_end(halves[0], ROLLBACK), an_end(halves[1], COMMIT)]
    ends += [TransactionEnd(7, 7, COMMIT), TransactionEnd(7, 7, 5)]
    front.appends.clear()

    front.batch(*ends)

    codes = [one.code for one in front.results()]
    assert codes == [OK] * 31 + [REFUSED] * 2 + [ResponseCode.SYSTEM_ERROR] * 2
    assert front.finals(halves) == [int(number % 3 == 0) for number in range(30)]
    assert max(front.appends) <= 3
    turns, front.turns = front.turns, 0
    assert turns >= 10
    front.batch(*ends)
    assert [one.code for one in front.results()] == codes
    assert front.turns >= len(ends)
    assert front.peer.unfinished is None


def test_a_part_that_cannot_be_appended_is_served_one_by_one(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decision gets its own answer, and earlier parts stay decided."""
    monkeypatch.setattr(end_batch, "TURN_BYTES", 1_000)
    halves = front.restarted(9, size=400)
    append = front.broker.log.append

    def failing(group: Sequence[AppendRequest], *, contiguous: bool = False) -> list[AppendResult]:
        front.broker.log.failing = bool(front.appends)
        return append(group, contiguous=contiguous)

    # Appends after the first one fail: the group took the log's method when it was made.
    monkeypatch.setattr(front.group, "_append", failing)
    front.batch(*(an_end(half, COMMIT) for half in halves))
    results = front.results()
    front.broker.log.failing = False
    assert [one.code for one in results] == [OK] * 3 + [ResponseCode.SYSTEM_ERROR] * 6
    assert front.finals(halves) == [1] * 3 + [0] * 6
    monkeypatch.undo()
    front.reload()
    front.batch(*(an_end(half, COMMIT) for half in halves))
    assert [one.code for one in front.results()] == [OK] * 9


def test_decisions_about_large_messages_are_appended_at_once(front: Front) -> None:
    """One read may contain hundreds of decisions, and all their messages would be in memory."""
    halves = front.restarted(3, size=LARGE_BODY + 1)
    for half in halves:
        front.end(half, COMMIT)
    assert front.appends == [1, 1, 1]
    assert len(front.answers()) == 3


def test_answers_to_checks_are_counted(front: Front) -> None:
    """In a batch as well as alone."""
    front.broker.producers.join("pg", Connected())
    halves = [front.broker.prepare() for _ in range(2)]
    front.broker.wait(7_000)
    front.batch(
        an_end(halves[0], COMMIT, from_check=True), an_end(halves[1], UNKNOWN, from_check=True)
    )
    assert [result.code for result in front.results()] == [OK, OK]
    assert front.broker.service.metrics()["checks_answered"] == 2
