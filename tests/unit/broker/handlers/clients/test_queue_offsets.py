"""Consumer offsets and questions about queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.queue_offsets import OffsetHandlers
from halfmq.broker.tables.consumer_offsets import ConsumerOffsetTable
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeConnection,
    call,
    config_path,
    draft,
    ext,
    identity,
    request,
)
from tests.support.stores import append_durably

YOUNG_BYTES = 10_000


class Parts:
    """The handlers, and a log with three messages in queue 0 of the topic `orders`."""

    def __init__(self, root: Path, store: MessageStore, clock: Clock) -> None:
        self.clock, self.store = clock, store
        for _ in range(3):
            append_durably(store, draft("orders", 0))
            self.clock.now += 1_000
        topics = TopicTable(config_path(root, "topics.json"), identity(), now_ms=self.clock)
        topics.ensure("orders", 4)
        groups = GroupTable(
            config_path(root, "subscriptionGroup.json"), auto_create=True, now_ms=self.clock
        )
        groups.ensure("known")
        offsets = ConsumerOffsetTable(config_path(root, "o.json"), now_ms=self.clock)
        self.handlers = OffsetHandlers(
            store, offsets, topics, groups, young_bytes=YOUNG_BYTES
        ).handlers()

    def query(self, group: str, queue_id: int, topic: str = "orders", **fields: str) -> str:
        """Ask where the group goes on."""
        header = {"consumerGroup": group, "topic": topic, "queueId": str(queue_id), **fields}
        command = request(RequestCode.QUERY_CONSUMER_OFFSET, header)
        return ext(call(self.handlers, command))["offset"]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Say where the group goes on."""
        header = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue_id),
            "commitOffset": str(offset),
        }
        answer = call(self.handlers, request(RequestCode.UPDATE_CONSUMER_OFFSET, header))
        assert answer.code == 0

    def ask(self, code: RequestCode, queue_id: int, topic: str = "orders", **fields: str) -> int:
        """Ask about a queue."""
        header = {"topic": topic, "queueId": str(queue_id), **fields}
        (value,) = ext(call(self.handlers, request(code, header))).values()
        return int(value)


@pytest.fixture
def parts(tmp_path: Path, store: MessageStore, clock: Clock) -> Parts:
    return Parts(tmp_path, store, clock)


def test_a_new_group_begins_at_zero_in_a_young_queue(parts: Parts) -> None:
    """Otherwise it would miss messages sent before its first consumer started."""
    assert parts.query("new", 0) == "0"


@pytest.mark.parametrize(("topic", "queue_id"), [("orders", 3), ("orders", 99), ("none", 0)])
def test_an_empty_queue_has_no_offset_for_a_new_group(
    parts: Parts, topic: str, queue_id: int
) -> None:
    """The client then begins where its configuration says."""
    with pytest.raises(RequestRefusedError) as refusal:
        parts.query("new", queue_id, topic)

    assert refusal.value.code is ResponseCode.QUERY_NOT_FOUND
    assert refusal.value.remark == "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"


def test_a_queue_that_is_no_longer_young_has_no_offset_for_a_new_group(parts: Parts) -> None:
    """A group that wants to begin at the end must not read days of old messages."""
    append_durably(parts.store, draft("other", body=b"x" * YOUNG_BYTES))

    with pytest.raises(RequestRefusedError):
        parts.query("new", 0)


def test_a_client_can_query_only_committed_offsets(parts: Parts) -> None:
    """It wants to know whether the group has ever committed."""
    with pytest.raises(RequestRefusedError) as refusal:
        parts.query("new", 0, setZeroIfNotFound="false")

    assert refusal.value.code is ResponseCode.QUERY_NOT_FOUND
    assert refusal.value.remark == "Not found, do not set to zero, maybe this group boot first"


def test_a_commit_is_found_again(parts: Parts) -> None:
    """It may go back, as a client relies on that consumes again."""
    parts.commit("known", "orders", 0, 3)
    assert parts.query("known", 0) == "3"
    parts.commit("known", "orders", 0, 1)
    assert parts.query("known", 0) == "1"
    parts.commit("known", "orders", 3, 0)
    assert parts.query("known", 3) == "0"


def test_a_commit_beyond_the_end_is_not_kept(parts: Parts) -> None:
    """The lag would be negative, and messages to come would be skipped; it is answered 0."""
    parts.commit("known", "orders", 0, 2)
    for offset in (4, 99_999):
        parts.commit("known", "orders", 0, offset)
        assert parts.query("known", 0) == "2"
    parts.commit("known", "orders", 3, 1)
    with pytest.raises(RequestRefusedError, match="Not found"):
        parts.query("known", 3, setZeroIfNotFound="false")


def test_only_known_groups_and_topics_are_committed(parts: Parts) -> None:
    """A typing error must not leave an entry for ever."""
    with pytest.raises(RequestRefusedError, match="Group unknown not exist!") as refusal:
        parts.commit("unknown", "orders", 0, 3)
    assert refusal.value.code is ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    with pytest.raises(RequestRefusedError, match="Topic none not exist!") as refusal:
        parts.commit("known", "none", 0, 3)
    assert refusal.value.code is ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize("queue_id", [-1, 4, 1 << 30])
def test_no_offset_is_kept_for_a_queue_that_does_not_exist(parts: Parts, queue_id: int) -> None:
    """A peer cannot fill the table with queues that it invents; a removed one is still known."""
    append_durably(parts.store, draft("orders", 5))
    parts.commit("known", "orders", 3, 0)
    parts.commit("known", "orders", 5, 0)
    parts.commit("known", "orders", queue_id, 0)
    with pytest.raises(RequestRefusedError, match="Not found"):
        parts.query("known", queue_id, setZeroIfNotFound="false")


def test_bounds_and_first_time_of_a_queue(parts: Parts) -> None:
    """A queue that does not exist is an empty one."""
    assert parts.ask(RequestCode.GET_MAX_OFFSET, 0) == 3
    assert parts.ask(RequestCode.GET_MIN_OFFSET, 0) == 0
    assert parts.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, 0) == START_MS
    assert parts.ask(RequestCode.GET_MAX_OFFSET, 0, "none") == 0
    assert parts.ask(RequestCode.GET_MIN_OFFSET, 0, "none") == 0
    assert parts.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, 0, "none") == -1


@pytest.mark.parametrize(
    ("elapsed", "lower", "upper"), [(-1, 0, 0), (1, 1, 0), (2_000, 2, 2), (2_001, 3, 2)]
)
def test_offsets_are_found_by_time(parts: Parts, elapsed: int, lower: int, upper: int) -> None:
    """LOWER, the default, is the first message from then on; UPPER the last one until then."""
    timestamp = str(START_MS + elapsed)
    search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP

    assert parts.ask(search, 0, timestamp=timestamp) == lower
    assert parts.ask(search, 0, timestamp=timestamp, boundaryType="LOWER") == lower
    assert parts.ask(search, 0, timestamp=timestamp, boundaryType="UPPER") == upper
    assert parts.ask(search, 0, "none", timestamp=timestamp) == 0


def test_the_size_of_the_young_log_depends_on_the_memory(parts: Parts, tmp_path: Path) -> None:
    """By default four tenths of it, so that the young part can be read from memory."""
    topics = TopicTable(config_path(tmp_path, "t.json"), identity(), now_ms=parts.clock)
    offsets = ConsumerOffsetTable(config_path(tmp_path, "o.json"), now_ms=parts.clock)
    groups = GroupTable(config_path(tmp_path, "g.json"), auto_create=True, now_ms=parts.clock)
    handlers = OffsetHandlers(parts.store, offsets, topics, groups).handlers()
    header = {"consumerGroup": "new", "topic": "orders", "queueId": "0"}
    command = request(RequestCode.QUERY_CONSUMER_OFFSET, header)

    assert ext(call(handlers, command, FakeConnection())) == {"offset": "0"}
