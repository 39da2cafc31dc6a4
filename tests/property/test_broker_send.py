"""Sends: what is stored and answered depends on the message alone, not on those before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.messages.send import SendHandler
from halfmq.broker.handlers.messages.sent_properties import SentProperties, read_properties
from halfmq.broker.net.group_append import GroupAppend
from halfmq.broker.net.router import serve
from halfmq.broker.ports import Connection
from halfmq.broker.tables.topic_config import TopicConfig
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.broker.transaction.admission import RequestedDelays, without_broker_properties
from halfmq.broker.transaction.deduplication import FirstHalf, RecentPrepares, deduplication_key
from halfmq.broker.transaction.half import half_request
from halfmq.broker.transaction.prepares import Prepares
from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.store.errors import RecordTooLargeError
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.ids import UniqueKeyFactory
from halfmq.store.format.properties import decode_properties, get_property, tags_code, terminated
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.broker_doubles import FakeConnection, as_store
from tests.support.usual_headers import send_header

TOPIC = TopicConfig(name="T", read_queue_nums=4, write_queue_nums=4)


class Log:
    """A store's log in memory; it refuses groups that contain the body ``refused``."""

    def __init__(self) -> None:
        self.drafts: list[AppendRequest] = []
        self.refused = b""
        self.failure: Exception | None = None

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        if self.failure is not None:
            raise self.failure
        if any(draft.body == self.refused for draft in group):
            raise RecordTooLargeError("a record", 1, 0)
        start = len(self.drafts)
        self.drafts += group
        return [AppendResult(100 * n, 100, n, 1) for n in range(start, len(self.drafts))]


class Topics(TopicTable):
    """A table with one topic."""

    def __init__(self) -> None:
        """Skip the table's file."""

    def get(self, name: str) -> TopicConfig | None:
        return TOPIC if name == TOPIC.name else None

    def create_on_send(
        self, topic: str, default_topic: str, queue_nums: int, remote: str
    ) -> TopicConfig | None:
        return None


class Halves(Prepares):
    """Transactions that are only prepared; ``entered`` has the entries for their table."""

    unflushed_topics: frozenset[str] = frozenset()

    def refuse_prepares(self, group: str, broker_address: str) -> None:
        """Accept all."""

    def __init__(self, log: Log) -> None:
        self._memory = log
        self.entered: list[tuple[AppendRequest, AppendRequest, int, str]] = []
        self.recent_prepares = RecentPrepares()

    def find_duplicate(
        self,
        messages: Sequence[tuple[AppendRequest, str]],
        producer_group: str,
        connection: Connection,
    ) -> list[FirstHalf] | None:
        ((message, unique_key),) = messages
        offset = self.recent_prepares.find(deduplication_key(producer_group, unique_key))
        return None if offset is None else [FirstHalf(offset, 0, 1, message.store_host)]

    def refuse_delays(self, sent: RequestedDelays) -> None:
        """Accept all."""

    def half_of(
        self, message: AppendRequest, unique_key: str, *, reserve: int = 0
    ) -> AppendRequest:
        return half_request(message, unique_key)

    def committed_message(self, half_message_id: str) -> AppendRequest | None:
        """Return None: no half has been committed."""

    def prepared(
        self,
        message: AppendRequest,
        half: AppendRequest,
        appended: AppendResult,
        producer_group: str,
        key: int,
        connection: Connection,
    ) -> None:
        self.recent_prepares.add(key, appended.physical_offset)
        self.entered.append((message, half, appended.physical_offset, producer_group))


def _handler(
    log: Log, transactions: Halves | None = None, *, sync_flush: bool = False
) -> SendHandler:
    return SendHandler(
        as_store(log),
        GroupAppend(
            as_store(log), call_soon=lambda work: asyncio.get_running_loop().call_soon(work)
        ),
        Topics(),
        Halves(log) if transactions is None else transactions,
        SendRefusal(),
        delayed=lambda draft: draft,
        retried=lambda _header, draft, _version: draft,
        timer_rule=TimerRule(40 * 86_400_000, now_ms=lambda: 1_700_000_000_000),
        require_room=lambda: None,
        broker_name="broker-a",
        cluster_name="C",
        max_message_size=10_000,
        sync_flush=sync_flush,
        unique_keys=UniqueKeyFactory(
            bytes(4), process_id=1, token=bytes(4), now_ms=lambda: 1_700_000_000_000
        ),
    )


def _request(
    properties: str | None, *, body: bytes = b"body", flag: int = 0, opaque: int = 0
) -> RemotingCommand:
    header = send_header(
        producer_group="g", topic="T", queue_id=1, born_timestamp=5, flag=7, properties=properties
    )
    return RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque, flag, header=header, body=body)


def _answers(connection: FakeConnection) -> list[RemotingCommand]:
    return FrameDecoder(responses_first=True).receive_data(b"".join(connection.written))


OF_BROKER = "MSG_REGION\x01R\x02CLUSTER\x01C\x02"
USUAL_KEY = "7F0000010001" + "0" * 20

_names = st.sampled_from(
    [
        *("UNIQ_KEY", "TAGS", "KEYS", "WAIT", "CLUSTER", "X_UNIQ_KEY", "TAGSX", "", "MSG_REGION"),
        *("TRAN_MSG", "PGROUP", "TRANSACTION_CHECK_TIMES", "TRANSACTION_HALF_ID"),
        *("DELAY", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "MY_TIMER_DELAY_MS"),
        *("TRANSACTION_DELAY_MS", "TRANSACTION_DELIVER_MS"),
    ]
)
_values = st.one_of(
    st.sampled_from(
        ["true", "false", "True", "A", "3", "a\x01b", "", "7F0000010001", USUAL_KEY, "é" * 32]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=5),
)
_strings = st.lists(st.tuples(_names, _values), max_size=6).flatmap(
    lambda pairs: st.sampled_from(
        [
            "".join(f"{name}\x01{value}\x02" for name, value in pairs),
            "\x02".join(f"{name}\x01{value}" for name, value in pairs),
        ]
    )
)


def _meaning(sent: str, new_key: str) -> SentProperties:
    """Read properties with the functions of the format, one after the other."""
    raw = without_broker_properties(terminated(sent.encode()))
    unique_key = get_property(raw, b"UNIQ_KEY")
    added = b"" if unique_key else b"UNIQ_KEY\x01%b\x02" % new_key.encode()
    stored = raw + added + (b"" if b"CLUSTER\x01" in raw else OF_BROKER.encode())
    found = decode_properties(raw)
    is_transactional = found.get("TRAN_MSG", "").lower() == "true"
    timers = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
    timer = next((name for name in timers if name in found), None)
    return SentProperties(
        stored,
        new_key if unique_key is None else unique_key.decode(),
        tags_code(raw),
        waits=found.get("WAIT") != "false",
        is_plain=False,
        is_transactional=is_transactional,
        producer_group=found.get("PGROUP") if is_transactional else None,
        commit_delay=found.get("TRANSACTION_DELAY_MS") if is_transactional else None,
        deliver_at=found.get("TRANSACTION_DELIVER_MS") if is_transactional else None,
        delay=found.get("DELAY"),
        timer=timer,
        timer_value=found.get(timer, "") if timer is not None else "",
    )


@given(sent=_strings)
@example(sent="")
@example(sent="TRAN_MSG\x01true\x02PGROUP\x01g\x02TRAN_MSG\x01false\x02UNIQ_KEY\x01K\x02")
@example(sent="PGROUP\x01g\x02UNIQ_KEY\x01K\x02TRAN_MSG\x01True")
@example(sent="UNIQ_KEY\x01a\x01b\x02WAIT\x01false\x02WAIT\x01\x02TAGS\x01\x02TAGS\x01t")
@example(sent="PGROUP\x01g\x02DELAY\x013\x02TRAN_MSG\x01no\x02")
@example(sent="TRANSACTION_DELAY_MS\x013\x02TRAN_MSG\x01true\x02TRANSACTION_DELIVER_MS\x01x")
@example(sent="WAIT\x01false\x02WAIT\x01true\x02DELAY\x013\x02TIMER_DELAY_MS\x01")
@example(sent="KEYS\x01UNIQ_KEY\x01k\x02TAGS\x02TRANSACTION_HALF_ID\x01forged\x02TAGS\x01t")
def test_properties_are_read_by_the_rules_of_the_format(sent: str) -> None:
    """With empty values, repeated names, common endings of names, and no last separator."""
    read = read_properties(sent, OF_BROKER, lambda: "new")

    meaning = _meaning(sent, "new")
    if read.is_plain:
        assert (meaning.is_transactional, meaning.delay_level, meaning.timer) == (False, 0, None)
        meaning.is_plain = True
    assert read == meaning


@given(before=st.lists(_strings, max_size=3), properties=_strings)
def test_a_message_is_stored_the_same_whatever_came_before(
    before: list[str], properties: str
) -> None:
    """No state of earlier messages is used."""

    async def last_stored(*sent: str) -> tuple[list[AppendRequest], bool]:
        log = Log()
        handler = _handler(log)
        requests = [_request(f"{one}\x02UNIQ_KEY\x01K") for one in sent]
        connections = [FakeConnection() for _ in requests]
        for request, connection in zip(requests, connections, strict=True):
            serve(handler.send, request, connection)
        refused = bool(connections[-1].written)
        await asyncio.sleep(0)  # staged messages are appended at the end of the loop's pass
        return log.drafts[-1:], refused

    half = "TRAN_MSG\x01" in properties
    alone, refused = asyncio.run(last_stored(properties))
    if not (refused or half):  # a repeated half is not stored again
        assert asyncio.run(last_stored(*before, properties))[0] == alone


def _batch(units: Sequence[str], *, opaque: int = 0) -> RemotingCommand:
    header = send_header(
        producer_group="g",
        topic="T",
        queue_id=1,
        born_timestamp=5,
        batch=True,
        properties="WAIT\x01true\x02TAGS\x01of-the-batch\x02",
    )
    body = encode_batch([BatchUnit(0, b"body", unit.encode()) for unit in units])
    return RemotingCommand(RequestCode.SEND_BATCH_MESSAGE, opaque, header=header, body=body)


@given(units=st.lists(_strings, min_size=1, max_size=4))
@example(units=["A\x01b\x02UNIQ_KEY\x01k\x02", "A\x01b\x02UNIQ_KEY\x01k"])
@example(units=["UNIQ_KEY\x01k", "UNIQ_KEY\x01l\x02DELAY\x011", "UNIQ_KEY\x01m\x02DELAY\x011"])
def test_a_unit_is_stored_the_same_in_every_batch(units: list[str]) -> None:
    """If one unit is refused, the whole batch is."""
    together, alone = Log(), Log()
    connection = FakeConnection()
    refused: list[int] = []

    for number, unit in enumerate(units):
        try:
            _handler(alone, sync_flush=True).send(_batch([unit]), connection)
        except RequestRefusedError:
            refused.append(number)
    if refused:
        with pytest.raises(RequestRefusedError, match=f"unit {refused[0]} of the batch"):
            _handler(together, sync_flush=True).send(_batch(units), connection)
        assert together.drafts == []
    else:
        _handler(together, sync_flush=True).send(_batch(units), connection)
        assert together.drafts == alone.drafts


async def test_messages_of_one_pass_are_one_group_in_order() -> None:
    """Also if a batch is between them, which is appended at once."""
    log = Log()
    handler = _handler(log)
    connection = FakeConnection()
    for number, body in enumerate([b"1", b"2", b"batch", b"4"]):
        request = _request(None, body=body, opaque=number)
        handler.send(_batch([""]) if body == b"batch" else request, connection)
    await asyncio.sleep(0)

    assert [draft.body for draft in log.drafts] == [b"1", b"2", b"body", b"4"]


async def test_one_refused_message_does_not_fail_its_group() -> None:
    """Each message of a group that the log refuses is appended alone and has its own answer."""
    log = Log()
    log.refused = b"bad"
    handler = _handler(log)
    connection = FakeConnection()
    for number, body in enumerate([b"good", b"bad", b"good too"]):
        handler.send(_request(f"UNIQ_KEY\x01K{number}\x02", body=body, opaque=number), connection)

    await asyncio.sleep(0)

    assert [draft.body for draft in log.drafts] == [b"good", b"good too"]
    answers = {one.opaque: one.code for one in _answers(connection)}
    assert answers == {0: 0, 1: 13, 2: 0}


async def test_a_one_way_message_is_stored_and_not_answered() -> None:
    """The client would take an answer for that of another request."""
    log = Log()
    handler = _handler(log)
    connection = FakeConnection()

    handler.send(_request("UNIQ_KEY\x01K\x02", flag=FLAG_ONE_WAY), connection)
    await asyncio.sleep(0)

    assert len(log.drafts) == 1
    assert not _answers(connection)


async def test_an_unexpected_error_of_a_group_is_answered_too() -> None:
    """Each sender gets an answer, after any error."""
    log, connection = Log(), FakeConnection()
    log.failure = OSError(24, "too many open files")
    handler = _handler(log)
    for opaque in range(2):
        handler.send(_request("UNIQ_KEY\x01A\x02", opaque=opaque), connection)
    await asyncio.sleep(0)

    assert [(one.opaque, one.code) for one in _answers(connection)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("level", ["²", "--5", "9" * 5_000, "x", " "])
async def test_a_delay_level_that_is_no_number_is_refused(level: str) -> None:
    """The message would be delivered at once."""
    log = Log()
    with pytest.raises(RequestRefusedError, match="expected the number of a delay level"):
        _handler(log).send(_request(f"DELAY\x01{level}\x02"), FakeConnection())

    assert log.drafts == []
