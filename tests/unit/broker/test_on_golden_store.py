"""The broker's parts on store directories that Apache RocketMQ wrote, with our store below them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.delay.levels import DEFAULT_LEVELS, DelayLevels, parse_delay_levels
from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.queue_offsets import OffsetHandlers
from halfmq.broker.handlers.messages.queries import QueryHandlers
from halfmq.broker.handlers.messages.send_back import SendBackHandler
from halfmq.broker.tables.consumer_offsets import ConsumerOffsetTable
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.queue_locks import QueueLocks
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.format.record import decode_records
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import (
    Clock,
    FakeConnection,
    call,
    config_path,
    ext,
    identity,
    request,
)
from tests.support.delays import fetch_nothing
from tests.support.golden_store import GoldenStore, unpack
from tests.support.tables import load_table

LATER_MS = 1_795_264_000_000
"""After everything in the golden stores is due."""

Open = Callable[[str], tuple[GoldenStore, MessageStore]]


@pytest.fixture
def clock() -> Clock:
    return Clock(LATER_MS)


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Unpack a state and open our store on it, with the file sizes it was written with."""
    stores: list[MessageStore] = []

    def open_golden(name: str) -> tuple[GoldenStore, MessageStore]:
        golden = unpack(name, tmp_path)
        settings = golden.truth["broker_config"]
        config = StoreConfig(
            root=golden.root,
            commit_log_file_size=int(settings["mappedFileSizeCommitLog"]),
            consume_queue_file_size=int(settings["mappedFileSizeConsumeQueue"]),
            max_hash_slots=int(settings["maxHashSlotNum"]),
            max_index_items=int(settings["maxIndexNum"]),
            flush_mode=FlushMode.ASYNC_FLUSH,
            flush_interval_ms=10,
        )
        store = MessageStore(config, now_ms=clock)
        store.open()
        stores.append(store)
        return golden, store

    yield open_golden
    for store in stores:
        store.close()


def delays(store: MessageStore, root: Path, clock: Clock) -> DelayService:
    made = DelayService(
        store,
        DelayLevels(parse_delay_levels(DEFAULT_LEVELS)),
        root / "config",
        scan=store.reader.scan,
        now_ms=clock,
        monotonic_ms=clock.monotonic,
        fetch=fetch_nothing,
        queue_of=lambda _topic, queue_id: queue_id,
    )
    made.load()
    return made


def test_delayed_messages_of_a_rocketmq_store_are_delivered(opened: Open, clock: Clock) -> None:
    """Levels 16 to 18 were not delivered yet when the official broker stopped."""
    golden, store = opened("delay-retry-dlq")
    waiting = [
        message
        for message in golden.messages
        if message["topic"] == SCHEDULE_TOPIC and message["queueId"] in {15, 16, 17}
    ]
    service = delays(store, golden.root, clock)
    assert service.waiting == len(waiting) == 5
    start = store.write_offset
    while service.tick() == 0:
        pass

    copies = {one.property_map["KEYS"]: one for one in store.reader.scan(start)}
    assert len(copies) == 5
    for message in waiting:
        copy = copies[message["properties"]["KEYS"]]
        assert copy.topic == message["properties"]["REAL_TOPIC"]
        assert copy.queue_id == int(message["properties"]["REAL_QID"])
        assert copy.property_map == message["properties"]
        assert base64.b64encode(copy.body).decode() == message["body"]
        assert copy.reconsume_times == message["reconsumeTimes"]
        assert copy.born_timestamp == message["bornTimestamp"]
    assert service.waiting == 0
    assert delays(store, golden.root, clock).waiting == 0  # nothing was saved, the log tells


def test_positions_follow_the_flush(opened: Open, clock: Clock) -> None:
    """After the flush a restart delivers nothing again."""
    golden, store = opened("delay-retry-dlq")
    service = delays(store, golden.root, clock)
    service.tick()
    store.close()  # flushes everything
    service.persist()

    saved = load_table(config_path(golden.root, "delayOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"1": 6, "2": 1, "3": 2, "16": 1, "17": 2, "18": 2}


def test_keys_find_what_the_official_broker_found(opened: Open) -> None:
    """Without duplicates, and without messages whose keys only have equal hashes."""
    golden, store = opened("plain-clean")
    by_offset = {message["commitLogOffset"]: message for message in golden.messages}
    handlers = QueryHandlers(store).handlers()
    for expected in golden.truth["keyQueries"]:
        header = {
            "topic": expected["topic"],
            "key": expected["key"],
            "maxNum": str(expected["maxNum"]),
            "beginTimestamp": str(expected["begin"]),
            "endTimestamp": str(expected["end"]),
        }
        answer = call(handlers, request(RequestCode.QUERY_MESSAGE, header))
        true_hits = {
            offset
            for offset in expected["hits"]
            if expected["key"] in by_offset[offset]["properties"].get("KEYS", "").split(" ")
            or expected["key"] == by_offset[offset]["properties"].get("UNIQ_KEY")
        }
        found = [record.physical_offset for record in decode_records(answer.body)]
        assert found == sorted(true_hits), expected
        if true_hits:
            assert ext(answer) == {
                "indexLastUpdateTimestamp": str(expected["indexLastUpdateTimestamp"]),
                "indexLastUpdatePhyoffset": str(expected["indexLastUpdatePhyoffset"]),
            }


def test_offsets_are_what_the_official_broker_reported(opened: Open, clock: Clock) -> None:
    """Bounds, offsets by time and committed offsets of a real store."""
    golden, store = opened("plain-clean")
    topics = TopicTable(config_path(golden.root, "topics.json"), identity(), now_ms=clock)
    offsets = ConsumerOffsetTable(config_path(golden.root, "consumerOffset.json"), now_ms=clock)
    offsets.load()
    groups = GroupTable(config_path(golden.root, "g.json"), auto_create=True, now_ms=clock)
    handlers = OffsetHandlers(store, offsets, topics, groups).handlers()

    def ask(code: RequestCode, topic: str, queue_id: int, **fields: str) -> int:
        header = {"topic": topic, "queueId": str(queue_id), **fields}
        (value,) = ext(call(handlers, request(code, header))).values()
        return int(value)

    for topic, queues in golden.truth["queues"].items():
        for text, queue in queues.items():
            assert ask(RequestCode.GET_MIN_OFFSET, topic, int(text)) == queue["min"]
            assert ask(RequestCode.GET_MAX_OFFSET, topic, int(text)) == queue["max"]
    for query in golden.truth["timeQueries"]:
        where = query["topic"], query["queueId"]
        search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        timestamp = str(query["timestamp"])
        assert ask(search, *where, timestamp=timestamp) == query["lower"], query
        assert ask(search, *where, timestamp=timestamp, boundaryType="UPPER") == query["upper"]
    first = golden.messages[0]
    first_time = ask(RequestCode.GET_EARLIEST_MSG_STORETIME, first["topic"], first["queueId"])
    assert first_time == first["storeTimestamp"]
    header = {"consumerGroup": "new", "topic": first["topic"], "queueId": str(first["queueId"])}
    command = request(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert ext(call(handlers, command)) == {"offset": "0"}


def sent_back(offset: int) -> RemotingCommand:
    header = {"offset": str(offset), "group": "g", "delayLevel": "1"}
    return request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def test_messages_of_a_real_store_are_viewed_and_sent_back(opened: Open, clock: Clock) -> None:
    """By the offset inside their id, and only where a record begins."""
    golden, store = opened("plain-clean")
    viewing = QueryHandlers(store).handlers()
    for message in golden.messages[::50]:
        header = {"offset": str(message["commitLogOffset"])}
        answer = call(viewing, request(RequestCode.VIEW_MESSAGE_BY_ID, header))
        (record,) = decode_records(answer.body)
        assert record.msg_id == message["msgId"]
        assert base64.b64encode(record.body).decode() == message["body"]

    topics = TopicTable(config_path(golden.root, "topics.json"), identity(), now_ms=clock)
    groups = GroupTable(config_path(golden.root, "g.json"), auto_create=True, now_ms=clock)
    levels = DelayLevels(parse_delay_levels(DEFAULT_LEVELS))
    locks = QueueLocks(now_ms=clock)
    back = SendBackHandler(
        store,
        topics,
        groups,
        levels,
        TimerRule(1_000, now_ms=clock),
        locks,
        SendRefusal(),
        require_room=lambda: None,
        sync_flush=False,
        now_ms=clock,
    )
    offset = golden.messages[0]["commitLogOffset"]
    for wrong in (offset + 1, store.write_offset, store.write_offset + 10_000, 1 << 60):
        with pytest.raises(RequestRefusedError, match="look message by offset failed"):
            back.send_back(sent_back(wrong), FakeConnection())
    call(back.handlers(), sent_back(offset))
    assert store.queues.bounds(SCHEDULE_TOPIC, 0)[1] > 0
