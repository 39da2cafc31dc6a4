"""Messages that a consumer failed to consume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmq.broker.delay.levels import DEFAULT_LEVELS, DelayLevels, parse_delay_levels, restored
from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.messages.send_back import SendBackHandler
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.queue_locks import QueueLocks
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.bodies import QueueKey
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.store.format.record import Record
from halfmq.store.format.timers import timer_due_ms
from halfmq.store.format.topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeConnection,
    call,
    config_path,
    draft,
    identity,
    request,
    response,
)
from tests.support.stores import append_durably

MESSAGE = draft(
    "orders",
    2,
    b"failed",
    b"TAGS\x01x\x02UNIQ_KEY\x01U\x02WAIT\x01true\x02TRACE_ON\x01true\x02",
)


TIMER_MAX_MS = 3_456_000_000


class Parts:
    """The handler with real tables."""

    def __init__(
        self,
        root: Path,
        log: MessageStore,
        clock: Clock,
        *,
        auto_create: bool = True,
        sync_flush: bool = False,
    ) -> None:
        self.clock, self.log = clock, log
        self.topics = TopicTable(config_path(root, "topics.json"), identity(), now_ms=self.clock)
        self.topics.load()
        self.groups = GroupTable(
            config_path(root, "subscriptionGroup.json"),
            auto_create=auto_create,
            now_ms=self.clock,
        )
        self.groups.load()
        self.locks = QueueLocks(now_ms=self.clock)
        levels = DelayLevels(parse_delay_levels(DEFAULT_LEVELS))
        self.refusal = SendRefusal()
        self.handler = SendBackHandler(
            self.log,
            self.topics,
            self.groups,
            levels,
            TimerRule(TIMER_MAX_MS, now_ms=self.clock),
            self.locks,
            self.refusal,
            require_room=lambda: None,
            sync_flush=sync_flush,
            now_ms=self.clock,
        )
        self.connection = FakeConnection(address="192.0.2.7:10911")

    def send_back(
        self, offset: int, level: int = 0, version: int = 479, group: str = "g", **fields: str
    ) -> None:
        """Send a record back, and expect success."""
        header = {"offset": str(offset), "group": group, "delayLevel": str(level), **fields}
        command = request(RequestCode.CONSUMER_SEND_MSG_BACK, header, version=version)
        answer = call(self.handler.handlers(), command, self.connection)
        assert answer.code == 0
        assert answer.header is None

    def store(self, message: AppendRequest = MESSAGE) -> int:
        """Store a message; return its offset."""
        return append_durably(self.log, message)[0].physical_offset

    def newest(self) -> Record:
        return self.records[-1]

    @property
    def records(self) -> list[Record]:
        """The whole log."""
        return list(self.log.reader.scan(0))

    def newest_as_retry(self) -> int:
        """Deliver the newest record to the retry topic, as the delay service does."""
        delivered = restored(self.newest())
        assert delivered is not None
        assert delivered.topic == "%RETRY%g"
        return self.store(delivered)


@pytest.fixture
def parts(tmp_path: Path, store: MessageStore, clock: Clock) -> Parts:
    return Parts(tmp_path, store, clock)


def test_a_failed_message_waits_for_its_group(parts: Parts) -> None:
    """With the properties that Apache RocketMQ stores, as a golden store shows them."""
    offset = parts.store()
    parts.send_back(offset)
    record = parts.newest()

    assert (record.topic, record.queue_id) == (SCHEDULE_TOPIC, 2)
    assert record.reconsume_times == 1
    assert record.body == b"failed"
    assert (record.born_timestamp, record.born_host) == (START_MS - 5, MESSAGE.born_host)
    assert record.store_host == parts.connection.store_host
    assert record.property_map == {
        "TAGS": "x",
        "UNIQ_KEY": "U",
        "TRACE_ON": "true",
        "WAIT": "false",
        "DELAY": "3",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": parts.records[0].msg_id,
        "REAL_TOPIC": "%RETRY%g",
        "REAL_QID": "0",
    }
    assert parts.topics.get("%RETRY%g") is not None


def test_sending_back_is_refused_while_the_disk_is_full(parts: Parts) -> None:
    """The consumer keeps the message and consumes it again."""
    offset = parts.store()
    parts.refusal.begin("disk_full", ResponseCode.SERVICE_NOT_AVAILABLE, "full")
    with pytest.raises(RequestRefusedError, match="full"):
        parts.send_back(offset)
    parts.refusal.end("disk_full")

    parts.send_back(offset)


@pytest.mark.parametrize(("asked", "times", "given"), [(0, 4, 7), (5, 0, 5), (99, 0, 18)])
def test_the_delay_grows_unless_the_client_says_otherwise(
    parts: Parts, asked: int, times: int, given: int
) -> None:
    """Level 3 at first, one more for each retry, at most the last."""
    message = draft(properties=MESSAGE.properties, reconsume_times=times)
    parts.send_back(parts.store(message), asked)

    assert parts.newest().queue_id == given - 1
    assert parts.newest().reconsume_times == times + 1


def test_a_client_may_name_any_delay(parts: Parts) -> None:
    """It is kept to the millisecond; what the message's sender asked for counts no more."""
    message = draft(
        properties=MESSAGE.properties + b"TIMER_DELIVER_MS\x01999\x02TIMER_DELAY_SEC\x0150\x02"
    )
    parts.send_back(parts.store(message), 9, delayMs="333333")
    record = parts.newest()

    assert record.topic == TIMER_TOPIC
    assert timer_due_ms(record.properties, record.store_timestamp) == parts.clock() + 333_333
    assert record.property_map["REAL_TOPIC"] == "%RETRY%g"
    assert "DELAY" not in record.property_map
    assert record.reconsume_times == 1

    parts.send_back(parts.store(message), 1, delayMs="0")
    assert parts.newest().topic == "%RETRY%g"
    with pytest.raises(RequestRefusedError, match="timerMaxDelaySec"):
        parts.send_back(parts.store(message), 18, delayMs=str(TIMER_MAX_MS + 1))


def test_a_second_retry_keeps_topic_and_id_of_the_original(parts: Parts) -> None:
    """Listeners see the topic and the id of the message that the producer sent."""
    parts.send_back(parts.store())
    first = parts.newest().property_map
    parts.send_back(parts.newest_as_retry())
    second = parts.newest().property_map

    assert second["RETRY_TOPIC"] == "orders"
    assert second["ORIGIN_MESSAGE_ID"] == first["ORIGIN_MESSAGE_ID"]


@pytest.mark.parametrize("level", [1, -1], ids=["retry", "dead letter"])
def test_the_copy_tells_why_and_when_the_message_failed(parts: Parts, level: int) -> None:
    """An operator reads it there; a later failure without a reason does not keep the old one."""
    offset = parts.store()
    parts.send_back(offset, level, reason="no stock\x02TRANSACTION_HALF_ID\x01X\x02")
    properties = parts.newest().property_map
    told = {name: value for name, value in properties.items() if name.startswith("FAILURE_")}

    assert told == {
        "FAILURE_REASON": "no stock TRANSACTION_HALF_ID X ",
        "FAILURE_TIME": str(parts.clock.now),
        "FAILURE_QUEUE": "2",
    }
    assert (properties["RETRY_TOPIC"], parts.newest().reconsume_times) == ("orders", 1)
    assert "TRANSACTION_HALF_ID" not in properties

    if level > 0:
        parts.send_back(parts.newest_as_retry())
        properties = parts.newest().property_map
        assert "FAILURE_REASON" not in properties
        assert "FAILURE_TIME" not in properties
        assert properties["FAILURE_QUEUE"] == "2"


def test_a_reason_that_has_no_room_is_left_out(parts: Parts) -> None:
    """The message is more important, and its properties have a limit."""
    long = b"a\x01" + b"x" * (32_767 - 1100) + b"\x02"
    parts.send_back(parts.store(draft(properties=long)), 1, reason="r" * 255)

    assert "FAILURE_REASON" not in parts.newest().property_map


@pytest.mark.parametrize(
    ("level", "times", "version", "fields", "dead"),
    [
        (-1, 0, 479, {}, True),
        (0, 15, 479, {}, False),
        (0, 16, 479, {}, True),
        (0, 1, 479, {"maxReconsumeTimes": "1"}, True),
        (0, 1, 120, {"maxReconsumeTimes": "1"}, False),
        (0, 20, 479, {"maxReconsumeTimes": "30"}, False),
        (0, 0, 479, {"maxReconsumeTimes": "0"}, True),
        (0, 15, 479, {"maxReconsumeTimes": "-1"}, False),
        (0, 16, 479, {"maxReconsumeTimes": "-1"}, True),
    ],
)
def test_a_message_becomes_a_dead_letter_after_too_many_retries(
    parts: Parts, level: int, times: int, version: int, fields: dict[str, str], *, dead: bool
) -> None:
    """By the limit of the group, or of the client if its version has one."""
    message = draft(properties=MESSAGE.properties, reconsume_times=times)
    parts.send_back(parts.store(message), level, version, **fields)
    record = parts.newest()

    assert (record.topic == "%DLQ%g") is dead
    if dead:
        assert record.queue_id == 0
        assert record.property_map["DELAY"] == "0"
        assert record.property_map["RETRY_TOPIC"] == "orders"
        assert record.reconsume_times == times + 1
        topic = parts.topics.get("%DLQ%g")
        assert topic is not None
        assert topic.perm == 6


def test_a_copy_of_a_commit_decides_nothing(parts: Parts) -> None:
    """The consumed message may have been a commit; its copy must not look like another."""
    parts.send_back(parts.store(draft(sys_flag=0x8)))
    assert parts.newest().sys_flag == 0
    parts.send_back(parts.store(draft(sys_flag=0x8 | 0x1)), -1)
    assert parts.newest().sys_flag == 0x1


@pytest.mark.parametrize("offset", [-1, 1, 10_000])
def test_sending_back_without_a_record_is_refused(parts: Parts, offset: int) -> None:
    """The client then sends the message itself."""
    parts.store()
    with pytest.raises(RequestRefusedError, match="look message by offset failed") as refusal:
        parts.send_back(offset)

    assert refusal.value.code is ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("topic", [HALF_TOPIC, SCHEDULE_TOPIC])
def test_records_that_no_consumer_reads_cannot_be_sent_back(parts: Parts, topic: str) -> None:
    """Otherwise a half message could be consumed this way."""
    with pytest.raises(RequestRefusedError, match="look message by offset failed"):
        parts.send_back(parts.store(draft(topic)))


def test_a_missing_group_is_refused(tmp_path: Path, store: MessageStore, clock: Clock) -> None:
    """Where groups are not created by themselves."""
    parts = Parts(tmp_path, store, clock, auto_create=False)
    with pytest.raises(RequestRefusedError, match="subscription group not exist, g ") as refusal:
        parts.send_back(parts.store())

    assert refusal.value.code is ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_group_without_retry_queues_retries_nothing(
    tmp_path: Path, store: MessageStore, clock: Clock
) -> None:
    """That is how an operator switches retries off."""
    path = config_path(tmp_path, "subscriptionGroup.json")
    path.parent.mkdir()
    path.write_text(json.dumps({"subscriptionGroupTable": {"g": {"retryQueueNums": 0}}}))
    parts = Parts(tmp_path, store, clock)
    parts.send_back(parts.store())

    assert len(parts.records) == 1


@pytest.mark.parametrize(("level", "topic"), [(1, "%RETRY%g"), (-1, "%DLQ%g")])
def test_a_topic_without_write_right_takes_nothing(
    tmp_path: Path, store: MessageStore, clock: Clock, level: int, topic: str
) -> None:
    """The client gets a refusal, and keeps the message."""
    path = config_path(tmp_path, "topics.json")
    path.parent.mkdir()
    path.write_text(json.dumps({"topicConfigTable": {topic: {"perm": 4}}}))
    parts = Parts(tmp_path, store, clock)
    with pytest.raises(RequestRefusedError) as refusal:
        parts.send_back(parts.store(), level)

    assert refusal.value.code is ResponseCode.NO_PERMISSION
    assert len(parts.records) == 1


def test_the_answer_waits_for_the_disk(tmp_path: Path, store: MessageStore, clock: Clock) -> None:
    """The client forgets the message when it has the answer."""
    parts = Parts(tmp_path, store, clock, sync_flush=True)
    header = {"offset": str(parts.store()), "group": "g", "delayLevel": "0"}
    command = request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert parts.handler.send_back(command, parts.connection) is None
    ((position, reply),) = parts.connection.held

    assert position == parts.log.write_offset
    assert response(reply).code == 0


# --- retries that clients send


def retry_header(maximum: int | None = None) -> SendMessageRequestHeader:
    return SendMessageRequestHeader(
        producer_group="CLIENT_INNER_PRODUCER",
        topic="%RETRY%g",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=START_MS,
        flag=0,
        max_reconsume_times=maximum,
    )


@pytest.mark.parametrize(
    ("times", "maximum", "version", "dead"),
    [(16, None, 479, False), (17, None, 479, True), (2, 1, 479, True), (2, 1, 63, False)],
)
def test_a_retry_from_a_client_becomes_a_dead_letter_by_the_same_rules(
    parts: Parts, times: int, maximum: int | None, version: int, *, dead: bool
) -> None:
    """The client has counted this retry already, so the limit itself still passes."""
    sent = draft("%RETRY%g", properties=b"DELAY\x015\x02", reconsume_times=times)
    stored = parts.handler.retried(retry_header(maximum), sent, version)

    assert stored.topic == ("%DLQ%g" if dead else "%RETRY%g")
    assert (b"DELAY\x010\x02" in stored.properties) is dead


def test_a_retry_of_an_orderly_group_goes_to_the_dead_letters(parts: Parts) -> None:
    """While a consumer holds its queues: later messages would overtake the retry."""
    queue = QueueKey(topic="orders", broker_name="broker-a", queue_id=0)
    parts.locks.lock("g", "a", [queue])

    assert parts.handler.retried(retry_header(), draft("%RETRY%g")).topic == "%DLQ%g"


def test_a_retry_for_a_missing_group_is_refused(
    tmp_path: Path, store: MessageStore, clock: Clock
) -> None:
    """Nobody could consume it."""
    parts = Parts(tmp_path, store, clock, auto_create=False)
    with pytest.raises(RequestRefusedError) as refusal:
        parts.handler.retried(retry_header(), draft("%RETRY%g"))

    assert refusal.value.code is ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
