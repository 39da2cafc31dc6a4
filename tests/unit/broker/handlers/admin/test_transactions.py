"""What operators ask about transactions, and the table of the broker's state."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfmq.broker.handlers.admin.transactions import TransactionAdminHandlers
from halfmq.broker.net.group_append import GroupAppend
from halfmq.broker.net.router import Router
from halfmq.broker.runtime_info import RuntimeInfo
from halfmq.broker.tables.message_statistics import Statistics
from halfmq.broker.transaction.deciding import Ended
from halfmq.broker.transaction.errors import (
    DecidedOtherwiseError,
    HalfNotFoundError,
    TransactionError,
)
from halfmq.broker.transaction.operator_actions import OperatorActions
from halfmq.broker.transaction.pending_view import Page, PendingView
from halfmq.remoting.bodies import decode_table
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import PageResponseHeader, ResumeCheckHalfMessageRequestHeader
from halfmq.remoting.own_requests import (
    DecideTransactionRequestHeader,
    FinalMessageResponseHeader,
    QueryTransactionsRequestHeader,
    TransactionInfo,
    decode_transactions,
)
from halfmq.store.format.ids import offset_message_id, pack_host
from halfmq.store.format.record import RECORD_SIZE_MIN
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeConnection,
    as_store,
    draft,
    request,
    response,
)
from tests.support.frames import recorded
from tests.support.stores import append_durably, unflushed
from tests.support.transactions import MemoryLog

HOST = pack_host("127.0.0.1", 10911)


def info(offset: int, group: str = "pg", state: str = "prepared") -> TransactionInfo:
    return TransactionInfo(
        offset=offset,
        queue_offset=offset // 100,
        message_id=offset_message_id(HOST, offset),
        transaction_id=f"KEY-{offset}",
        producer_group=group,
        topic="orders",
        keys="o-1",
        state=state,
        age_ms=5_000,
        store_timestamp=START_MS,
        owner=None,
        checks_sent=0,
        checks_delivered=0,
        checks_answered=0,
        next_check_ms=None,
        parked_reason=None,
    )


class FakeView(PendingView):
    """A few transactions."""

    def __init__(self, *infos: TransactionInfo) -> None:
        self.infos = infos

    def page(
        self, after: int, max_count: int, group: str | None = None, state: str | None = None
    ) -> Page:
        found = [
            one
            for one in self.infos
            if one.offset > after
            and group in (None, one.producer_group)
            and state in (None, one.state)
        ]
        page = found[:max_count]
        return Page(page, page[-1].offset if len(found) > max_count else None)

    def find(self, transaction_id: str) -> TransactionInfo | None:
        return next((one for one in self.infos if one.transaction_id == transaction_id), None)


class FakeOperator(OperatorActions):
    """Notes what an operator does, or refuses it."""

    def __init__(self) -> None:
        self.error: TransactionError | None = None
        self.done: list[tuple[str, int]] = []

    def decide(self, offset: int, action: str) -> Ended:
        if self.error is not None:
            raise self.error
        self.done.append((action, offset))
        return Ended(700, 600 if action == "commit" else None, HOST)

    def resume(self, offset: int) -> Ended:
        if self.error is not None:
            raise self.error
        self.done.append(("resume", offset))
        return Ended(0)


class Front:
    """The handlers, called as by the router."""

    def __init__(self, *infos: TransactionInfo) -> None:
        self.operator = FakeOperator()
        self.log = MemoryLog(Clock())
        self.connection = FakeConnection()
        self.group = GroupAppend(as_store(self.log), call_soon=lambda work: None)
        self._router = Router(
            TransactionAdminHandlers(
                FakeView(*infos),
                self.operator,
                self.log.named_record,
                self.group,
            ).handlers()
        )

    def serve(self, command: RemotingCommand) -> RemotingCommand | None:
        written = self.connection.written
        before = len(written)
        self._router.dispatch(command, self.connection)
        return None if len(written) == before else response(written[-1])

    def ask(self, command: RemotingCommand) -> RemotingCommand:
        answer = self.serve(command)
        assert answer is not None
        return answer

    def query(
        self, header_type: int = HeaderType.MSGPACK, **fields: object
    ) -> tuple[list[int], int | None]:
        header = QueryTransactionsRequestHeader(**fields)  # type: ignore[arg-type]
        code = RequestCode.QUERY_TRANSACTIONS
        answer = self.ask(request(code, header, header_type=header_type))
        assert answer.code == 0, answer.remark
        following = response_header(answer, PageResponseHeader).next_after
        return [one.offset for one in decode_transactions(answer.body)], following

    def decide(self, offset: int, action: str, reason: str | None = None) -> RemotingCommand | None:
        header = DecideTransactionRequestHeader(
            transaction_offset=offset, action=action, reason=reason
        )
        code = RequestCode.DECIDE_TRANSACTION
        return self.serve(request(code, header, header_type=HeaderType.MSGPACK))

    def resume(self, message_id: str | None) -> RemotingCommand:
        header = ResumeCheckHalfMessageRequestHeader(msg_id=message_id, topic="orders")
        return self.ask(request(RequestCode.RESUME_CHECK_HALF_MESSAGE, header))


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_pages_list_every_transaction_once(header_type: HeaderType) -> None:
    """With each header type, a page has the start of the next one."""
    front = Front(*[info(offset) for offset in (100, 200, 300, 400)])

    first, following = front.query(header_type, max_count=3)
    assert (first, following) == ([100, 200, 300], 300)
    assert front.query(header_type, max_count=3, after=following) == ([400], None)
    assert front.query(header_type) == ([100, 200, 300, 400], None)


def test_a_query_has_filters() -> None:
    """By group, by state, or by the id of one transaction."""
    front = Front(info(100), info(200, "other"), info(300, state="parked"))

    assert front.query(producer_group="other")[0] == [200]
    assert front.query(state="parked")[0] == [300]
    assert front.query(transaction_id="KEY-200", producer_group="pg") == ([200], None)
    assert front.query(transaction_id="nobody") == ([], None)


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"max_count": 0}, "maxCount is 0, expected 1 to 1000"),
        ({"max_count": 1001}, "maxCount is 1001, expected 1 to 1000"),
        ({"state": "odd"}, "state is 'odd', expected one of prepared, parked"),
    ],
)
def test_an_invalid_query_is_refused(fields: dict[str, object], remark: str) -> None:
    """The remark says what was expected, instead of an empty list."""
    header = QueryTransactionsRequestHeader(**fields)  # type: ignore[arg-type]
    answer = Front().ask(request(RequestCode.QUERY_TRANSACTIONS, header))

    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, remark)


def test_an_operators_commit_is_answered_when_it_is_on_disk() -> None:
    """With the id of the final message; before, a power cut could take the decision back."""
    front = Front(info(100))
    front.connection.durable_offset = 699

    assert front.decide(100, "commit") is None
    ((position, reply),) = front.connection.held
    assert position == 700
    header = response_header(response(reply), FinalMessageResponseHeader)
    assert header.msg_id == offset_message_id(HOST, 600)


def test_an_operators_decision_that_is_on_disk_is_answered_at_once() -> None:
    """A repetition has nothing to wait for; a rollback has no final message."""
    front = Front(info(100))
    front.connection.durable_offset = 700

    answer = front.decide(100, "rollback")

    assert answer is not None
    assert response_header(answer, FinalMessageResponseHeader).msg_id is None
    assert front.operator.done == [("rollback", 100)]


def test_a_staged_decision_counts_before_an_operators() -> None:
    """A producer's decision that arrived earlier in the same pass wins."""
    front = Front(info(100))
    order: list[str] = []
    front.group.append_staged = lambda: order.append("staged")  # type: ignore[method-assign]
    front.connection.durable_offset = 700

    front.decide(100, "commit")

    assert order == ["staged"]


def test_an_operators_decision_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """So that it can be found later who decided instead of the producers, and why."""
    front = Front(info(100))
    with caplog.at_level("INFO"):
        front.decide(100, "resume", "the order exists")
        front.operator.error = HalfNotFoundError(100)
        front.decide(100, "commit")

    decided, refused = caplog.messages
    assert "action=resume peer=127.0.0.1:50001 reason='the order exists'" in decided
    assert "event=operator_refused half_offset=100 action=commit" in refused


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DecidedOtherwiseError(100, "rolled back", START_MS), ResponseCode.ILLEGAL_OPERATION),
        (HalfNotFoundError(100), ResponseCode.SYSTEM_ERROR),
    ],
)
@pytest.mark.parametrize("action", ["commit", "resume"])
def test_a_refused_decision_says_why(
    error: TransactionError, code: ResponseCode, action: str
) -> None:
    """The first decision and its time, or what else is wrong."""
    front = Front(info(100))
    front.operator.error = error

    answer = front.decide(100, action)

    assert answer is not None
    assert (answer.code, answer.remark) == (code, str(error))


def test_an_unknown_action_is_refused() -> None:
    """The broker does not guess."""
    answer = Front(info(100)).decide(100, "forget")

    assert answer is not None
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "action is 'forget', expected one of commit, rollback, resume"


def test_resume_takes_the_id_of_the_half_or_of_its_parked_copy() -> None:
    """RocketMQ's tools see only the parked copy, by its offset id."""
    front = Front(info(100))
    parked = draft(TRANS_CHECK_MAX_TIME_TOPIC)
    parked.prepared_transaction_offset = 100
    (copy,) = front.log.append([parked])

    assert front.resume(offset_message_id(HOST, copy.physical_offset)).code == 0
    assert front.resume(offset_message_id(HOST, 4_000)).code == 0
    assert front.operator.done == [("resume", 100), ("resume", 4_000)]


def test_resume_finds_the_half_of_a_copy_that_has_no_link() -> None:
    """Apache RocketMQ ties its copies to their half by the unique key alone."""
    front = Front(info(900))
    properties = b"UNIQ_KEY\x01KEY-900\x02"
    known, unknown = front.log.append(
        [
            draft(TRANS_CHECK_MAX_TIME_TOPIC, properties=properties),
            draft(TRANS_CHECK_MAX_TIME_TOPIC, properties=b"UNIQ_KEY\x01other\x02"),
        ]
    )

    assert front.resume(offset_message_id(HOST, known.physical_offset)).code == 0
    refused = front.resume(offset_message_id(HOST, unknown.physical_offset))
    assert front.operator.done == [("resume", 900)]
    assert refused.remark == "the transaction of this message is not undecided"


@pytest.mark.parametrize("message_id", [None, "x", "7F" * 16 + "00"])
def test_resume_without_an_id_is_refused(message_id: str | None) -> None:
    """With code 1, as by the official broker."""
    assert Front().resume(message_id).code == ResponseCode.SYSTEM_ERROR


def test_a_refused_resume_has_the_official_code() -> None:
    """RocketMQ's tools know 0 and 1 here."""
    front = Front(info(100))
    front.operator.error = DecidedOtherwiseError(100, "committed", START_MS)

    answer = front.resume(offset_message_id(HOST, 100))

    assert (answer.code, answer.remark) == (1, str(front.operator.error))


def runtime_table(store: MessageStore, clock: Clock, root: Path) -> dict[str, str]:
    metrics: dict[str, object] = {"pending": 3, "parked": {"no-answer": 1}}
    make = RuntimeInfo(
        store,
        Statistics(
            store.queues.take_appended,
            cluster_name="",
            is_system=bool,
            now_ms=clock,
            monotonic_ms=clock.monotonic,
        ),
        lambda: {"connections": 7, "transactions": metrics},
        root=root,
        now_ms=clock,
    )
    clock.now += 90_061_000
    return make()


def test_the_runtime_table_has_every_key_that_tools_read(
    tmp_path: Path, store: MessageStore, clock: Clock
) -> None:
    """Some tools stop printing at the first key that is missing."""
    frames = recorded("mqadmin-5.3.3-cluster-config")
    asked = next(one for one in frames if one.code == 28 and one.flag == 0)
    answer = next(
        one
        for one in frames
        if one.opaque == asked.opaque and one.connection == asked.connection and one.flag == 1
    )
    table = runtime_table(store, clock, tmp_path)

    of_the_day = re.compile("commitLogDiskRatio_|scheduleMessageOffset_")
    theirs = {key for key in decode_table(answer.body) if not of_the_day.match(key)}
    not_measured = {"putLatency99", "putLatency999", "putMessageFailedTimes"}
    assert theirs - table.keys() == not_measured


def test_the_disk_is_used_as_far_as_df_says(
    tmp_path: Path, store: MessageStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reserved for root is neither used nor free; RocketMQ rounds up."""
    usage = SimpleNamespace(total=1000 << 30, used=161 << 30, free=639 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    table = runtime_table(store, clock, tmp_path)

    assert table["commitLogDiskRatio"] == "0.21"
    assert table["commitLogDirCapacity"] == "Total : 1000.0 GiB, Free : 839.0 GiB."


def test_the_runtime_table_tells_offsets_and_transactions(
    tmp_path: Path, store: MessageStore, clock: Clock
) -> None:
    """What an operator watches: the log's ends, connections, and undecided transactions."""
    assert runtime_table(store, clock, tmp_path)["earliestMessageTimeStamp"] == "-1"
    clock.now = START_MS
    append_durably(store, draft())
    with unflushed(store):
        (waiting,) = store.append([draft(body=bytes(2_048 - RECORD_SIZE_MIN - len("orders")))])

        table = runtime_table(store, clock, tmp_path)

    assert table["commitLogMaxOffset"] == str(store.write_offset)
    assert table["halfmq.store.durable_offset"] == str(waiting.physical_offset)
    assert table["remainHowManyDataToFlush"] == "2.0 KiB"
    assert table["earliestMessageTimeStamp"] == str(START_MS)
    assert table["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert table["halfmq.connections"] == "7"
    assert table["halfmq.transactions.pending"] == "3"
    assert table["halfmq.transactions.parked.no-answer"] == "1"
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
