"""END_TRANSACTION as clients send it, against what the official broker answered."""

from pathlib import Path

import pytest

from halfmq.broker.handlers.transactions.end import TransactionHandler
from halfmq.broker.net.group_append import GroupAppend
from halfmq.broker.net.router import Router
from halfmq.broker.ports import Connection
from halfmq.broker.transaction.half import parse_half
from halfmq.broker.transaction.half_records import check_body
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from halfmq.remoting.replies import encode_request
from halfmq.store.format.properties import without_properties
from halfmq.store.format.record import Record, decode_record, encode_record, new_record
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.broker_doubles import START_MS, as_store
from tests.support.frames import RecordedFrame, recorded
from tests.support.transactions import HOST, PEER, Broker, Connected, message

TRANSACTION_FILES = (
    "java-5.3.3-json-transaction",
    "java-5.3.3-rocketmq-transaction",
    "java-4.9.8-transaction",
    "broker-4.9.7-java-4.9.8-tx",
    "go-2.1.2-transaction",
)


class Front:
    """The handler, called by the broker's router."""

    def __init__(self, directory: Path) -> None:
        self.broker = Broker(directory)
        self.connection = Connected()
        self.router = Router()
        self.reload()

    def reload(self) -> None:
        """Serve from the service as it is now."""
        self.router = Router(
            TransactionHandler(
                self.broker.service.decisions,
                GroupAppend(as_store(self.broker.log), call_soon=lambda work: work()),
            ).handlers()
        )

    def serve(self, frame: bytes) -> RemotingCommand | None:
        """Feed one frame; return the answer that was written at once."""
        (command,) = FrameDecoder().receive_data(frame)
        return self.dispatch(command)

    def dispatch(self, command: RemotingCommand) -> RemotingCommand | None:
        """Serve one request; return the answer if it need not wait."""
        waiting = self.connection.waiting
        before = len(waiting)
        self.router.dispatch(command, _connection(self.connection))
        if len(waiting) == before or waiting[-1][0] > self.broker.log.durable_offset:
            return None
        return response(waiting.pop()[1])

    def end(self, offset: int, queue_offset: int, bits: int, *, one_way: bool = False) -> object:
        """Send a decision of group pg."""
        return self.serve(_end_frame(offset, queue_offset, bits, one_way=one_way))


def _connection(connected: Connected) -> Connection:
    return connected


def _end_frame(offset: int, queue_offset: int, bits: int, *, one_way: bool) -> bytes:
    header = EndTransactionRequestHeader(
        producer_group="pg",
        tran_state_table_offset=queue_offset,
        commit_log_offset=offset,
        commit_or_rollback=bits,
        msg_id="x",
    )
    return encode_request(RequestCode.END_TRANSACTION, opaque=5, header=header, one_way=one_way)


def response(reply: bytes) -> RemotingCommand:
    """Decode the answer that ``reply`` holds."""
    (command,) = FrameDecoder().receive_data(reply)
    return command


def ends(file: str) -> list[tuple[RecordedFrame, RecordedFrame | None]]:
    """Return the decisions of a recording with their answers."""
    frames = recorded(file)
    answers = {
        (one.connection, one.opaque): one
        for one in frames
        if one.direction == "broker→client" and "response" in one.meaning
    }
    return [
        (one, answers.get((one.connection, one.opaque)))
        for one in frames
        if one.code == RequestCode.END_TRANSACTION and one.direction == "client→broker"
    ]


@pytest.fixture
def front(tmp_path: Path) -> Front:
    """A broker with an empty log."""
    return Front(tmp_path)


@pytest.mark.parametrize("file", TRANSACTION_FILES)
def test_decisions_of_official_clients_are_taken(file: str, front: Front) -> None:
    """Answered like the official broker where it answers, and with the message delivered."""
    requests = [(response(one.frame), answer) for one, answer in ends(file)]
    assert requests
    halves = {}
    for command, _ in requests:
        header = command.header
        assert isinstance(header, EndTransactionRequestHeader)
        halves[header.commit_log_offset] = _half_at(header)
    for _, half in sorted(halves.items()):
        front.broker.log.put(half)
    front.broker.log.flush()
    front.broker.restart()
    front.reload()
    for (one, _), (command, answer) in zip(ends(file), requests, strict=True):
        header = command.header
        assert isinstance(header, EndTransactionRequestHeader)
        before = front.broker.log.write_offset
        front.connection.waiting.clear()

        ours = front.serve(one.frame)

        written = front.broker.log.records()
        if header.commit_or_rollback == 0:
            assert front.broker.log.write_offset == before
        else:
            decision = written[-1]
            assert decision.physical_offset == before
            assert decision.sys_flag & 0xC == header.commit_or_rollback
            assert decision.prepared_transaction_offset == header.commit_log_offset
            if not command.is_one_way:
                ((position, reply),) = front.connection.waiting
                assert position == front.broker.log.write_offset
                ours = response(reply)
        if answer is not None:
            official = response(answer.frame)
            assert ours is not None
            assert (ours.code, ours.opaque) == (official.code, official.opaque)
            assert ours.header == official.header
            assert ours.header_type == official.header_type
        elif command.is_one_way:
            assert ours is None


def _half_at(header: EndTransactionRequestHeader) -> bytes:
    """Return a half as the client that sent this decision must have prepared it."""
    draft = message(group=header.producer_group, key=header.msg_id)
    return encode_record(
        new_record(
            topic=HALF_TOPIC,
            queue_id=0,
            body=b"b",
            properties=draft.properties + b"REAL_TOPIC\x01orders\x02REAL_QID\x011\x02",
            born_timestamp=START_MS,
            born_host=PEER,
            store_timestamp=START_MS,
            store_host=HOST,
            queue_offset=header.tran_state_table_offset,
            physical_offset=header.commit_log_offset,
        )
    )


def test_wrong_decisions_are_refused_like_by_the_official_broker(front: Front) -> None:
    """Equal code and, unless it is a Java stack trace, equal remark; then what was expected."""
    front.broker.log.put(encode_record(_plain_record()))
    checked = 0
    for one, answer in ends("raw-5.3.3-offsets"):
        if answer is None:
            continue
        official, ours = response(answer.frame), front.serve(one.frame)
        assert ours is not None
        assert (ours.code, ours.header) == (official.code, official.header)
        if "Exception" not in (official.remark or ""):
            said, _, expected = (ours.remark or "").partition(": ")
            assert said == official.remark
            assert "expected" in expected
        checked += 1
    assert checked == 3


def _plain_record() -> Record:
    return new_record(
        topic="orders",
        queue_id=0,
        body=b"b",
        properties=b"",
        born_timestamp=START_MS,
        born_host=PEER,
        store_timestamp=START_MS,
        store_host=HOST,
    )


def test_a_repeated_decision_waits_for_the_same_record(front: Front) -> None:
    """It must not be answered before the decision that it repeats."""
    half = front.broker.prepare()
    for _ in range(3):
        assert front.end(half.physical_offset, half.queue_offset, 8) is None
    first, *repeats = (position for position, _ in front.connection.waiting)
    (final,) = front.broker.finals_of(half)
    assert first == final.end
    assert all(final.physical_offset < position <= first for position in repeats)

    front.broker.log.flush()
    again = front.end(half.physical_offset, half.queue_offset, 8)
    assert isinstance(again, RemotingCommand)
    assert again.code == ResponseCode.SUCCESS


def test_a_one_way_decision_requests_a_flush(front: Front) -> None:
    """No answer waits for the disk, but consumers do."""
    half = front.broker.prepare()
    assert front.end(half.physical_offset, half.queue_offset, 8, one_way=True) is None
    (final,) = front.broker.finals_of(half)
    assert (front.connection.unanswered, front.connection.waiting) == ([final.end], [])


def test_the_opposite_decision_is_an_illegal_operation(front: Front) -> None:
    """Code 604, and the remark says what stands; a one-way sender gets nothing."""
    half = front.broker.prepare()
    front.end(half.physical_offset, half.queue_offset, 12)

    assert front.end(half.physical_offset, half.queue_offset, 8) is None

    (first, _), (position, reply) = front.connection.waiting
    assert first - 300 < position <= first  # it is true when that decision is on disk
    refused = response(reply)
    assert refused.code == ResponseCode.ILLEGAL_OPERATION
    assert "was rolled back at 2023-11-14T22:13:20" in str(refused.remark)
    assert front.end(half.physical_offset, half.queue_offset, 8, one_way=True) is None
    assert front.broker.finals_of(half) == []


def test_an_unknown_decision_is_answered(front: Front) -> None:
    """The official broker sends no answer, on which Go clients wait."""
    half = front.broker.prepare()
    answer = front.end(half.physical_offset, half.queue_offset, 0)
    assert isinstance(answer, RemotingCommand)
    assert answer.code == ResponseCode.SUCCESS


def test_a_refusal_is_logged(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """Official clients send one-way: the log is where it can be seen."""
    front.end(4_711, 0, 8, one_way=True)
    assert "event=decision_refused half_offset=4711 decision=COMMIT" in caplog.text


def test_the_broker_does_not_answer_checks(front: Front) -> None:
    """A check goes from broker to producer only."""
    check = next(
        one
        for one in recorded("java-5.3.3-json-transaction")
        if one.code == RequestCode.CHECK_TRANSACTION_STATE
    )
    (command,) = FrameDecoder().receive_data(check.frame)
    command.flag = 0
    answer = front.dispatch(command)
    assert answer is not None
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.parametrize("file", [file for file in TRANSACTION_FILES if "4.9.7" not in file])
def test_checks_are_those_of_the_official_broker(file: str, tmp_path: Path) -> None:
    """Same header fields, and a body that decodes to the same message."""
    checks = [one for one in recorded(file) if one.code == RequestCode.CHECK_TRANSACTION_STATE]
    assert checks
    for number, check in enumerate(checks):
        official = response(check.frame)
        header = official.header
        assert isinstance(header, CheckTransactionStateRequestHeader)
        theirs = decode_record(official.body)
        times = int(theirs.property_map["TRANSACTION_CHECK_TIMES"])
        half = encode_record(
            theirs._replace(
                topic=HALF_TOPIC,
                queue_id=0,
                properties=without_properties(theirs.properties, ["TRANSACTION_CHECK_TIMES"]),
            )
        )

        parsed = parse_half(half, theirs.physical_offset)
        assert parsed is not None
        ours = decode_record(check_body(parsed, times))

        assert ours.property_map == theirs.property_map
        assert ours._replace(properties=b"", total_size=0) == theirs._replace(
            properties=b"", total_size=0
        )
        broker = Broker(tmp_path / str(number))
        broker.log.put(half)
        broker.log.flush()
        producer = broker.producers.join(theirs.property_map["PGROUP"], Connected())
        broker.clock.now = theirs.store_timestamp
        broker.restart()
        broker.wait(60_000)
        assert producer.checks[0][1] == header
