"""Requests of official clients, answered here as the official broker 5.3.3 answered them.

Every recorded request of our codes is decoded from its bytes and served by the true handlers. The
state it needs (a topic, an offset, a record) is taken from the recorded answer. Compared are the
code, the names of the ext fields, the remark of a refusal, and the body without what is of the day:
offsets, times, ids, addresses, order of keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from halfmq.broker.delay.levels import DEFAULT_LEVELS, DelayLevels, parse_delay_levels
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.filters.filters_in_use import FiltersInUse
from halfmq.broker.handlers.clients.clients import ClientHandlers
from halfmq.broker.handlers.clients.locks import LockHandlers
from halfmq.broker.handlers.clients.queue_offsets import OffsetHandlers
from halfmq.broker.handlers.clients.routes import RouteHandlers
from halfmq.broker.handlers.messages.queries import QueryHandlers
from halfmq.broker.handlers.messages.send_back import SendBackHandler
from halfmq.broker.net.router import Router
from halfmq.broker.tables.client_registry import ClientRegistry
from halfmq.broker.tables.consumer_offsets import ConsumerOffsetTable
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.queue_locks import QueueLocks
from halfmq.broker.tables.registered_brokers import BrokerTable
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting import headers
from halfmq.remoting.bodies import decode_lock_batch, decode_locked_queues
from halfmq.remoting.codes import FLAG_RESPONSE, HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.fastjson import parse
from halfmq.remoting.framing import FrameDecoder
from halfmq.store.format.record import decode_records
from tests.support.broker_doubles import (
    Clock,
    FakeConnection,
    FakeLog,
    config_path,
    draft,
    identity,
)
from tests.support.frames import FILES, recorded

OURS: Final = [
    name
    for name in FILES
    if not name.startswith(("acl2", "broker-", "raw-5.3.3-acl", "raw-5.3.3-unknown"))
]
"""Recordings of servers 5.3.3 without authentication. In `unknown` servers are asked what the other
kind of server knows; we are both."""

CODES: Final = {
    RequestCode.QUERY_MESSAGE,
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
    RequestCode.VIEW_MESSAGE_BY_ID,
    RequestCode.HEART_BEAT,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
}

SQL_REMARK: Final = "The broker does not support consumer to filter message by SQL92"


class Pair(NamedTuple):
    """A recorded request and its recorded answer."""

    request: RemotingCommand
    answer: RemotingCommand


def pairs(file: str) -> Iterator[Pair]:
    """Give the answered requests of our codes."""
    asked: dict[tuple[object, ...], RemotingCommand] = {}
    for line in recorded(file):
        here, _, there = line.direction.partition("→")
        is_answer = bool((line.flag or 0) & FLAG_RESPONSE)
        if not is_answer and here == "client" and line.code in CODES:
            asked.update(_readable((line.connection, line.opaque, here, there), line.frame))
        elif is_answer:
            request = asked.pop((line.connection, line.opaque, there, here), None)
            if request is not None:
                (answer,) = FrameDecoder().receive_data(line.frame)
                if not _is_of_another_broker(request, answer):
                    yield Pair(request, answer)


def _readable(key: tuple[object, ...], frame: bytes) -> dict[tuple[object, ...], RemotingCommand]:
    try:
        (command,) = FrameDecoder().receive_data(frame)
    except ProtocolError:  # among the hand-made ones; the connection is closed
        return {}
    return {key: command}


def _is_of_another_broker(request: RemotingCommand, answer: RemotingCommand) -> bool:
    """Whether the answer shows a setting or a feature that we do not have."""
    remark = answer.remark or ""
    return (
        "sending message is forbidden" in remark  # brokerPermission of the whole broker
        or "Offset has been previously reset" in remark  # server-side reset of offsets
        or (request.code == RequestCode.CHECK_CLIENT_CONFIG and remark != SQL_REMARK)
    )


class Broker:
    """Our handlers in the state in which the official broker gave its answer."""

    def __init__(self, root: Path, pair: Pair) -> None:
        answer = pair.answer
        clock = Clock()
        who = identity(auto_create="TBW102" not in (answer.remark or ""))
        self._topics_path = config_path(root, "topics.json")
        self.topics = TopicTable(self._topics_path, who, now_ms=clock)
        self.groups = GroupTable(
            config_path(root, "subscriptionGroup.json"),
            auto_create=answer.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            now_ms=clock,
        )
        self.log = FakeLog(clock)
        self.registry = ClientRegistry(now_ms=clock)
        self.locks = QueueLocks(now_ms=clock)
        self.offsets = ConsumerOffsetTable(config_path(root, "o.json"), now_ms=clock)
        levels = DelayLevels(parse_delay_levels(DEFAULT_LEVELS))
        parts = (
            ClientHandlers(
                self.registry,
                self.topics,
                self.groups,
                FiltersInUse(enabled=False),
                wake=lambda: None,
            ),
            LockHandlers(self.locks),
            OffsetHandlers(self.log, self.offsets, self.topics, self.groups),
            QueryHandlers(self.log),
            RouteHandlers(self.topics, BrokerTable(clock), who),
            SendBackHandler(
                self.log,
                self.topics,
                self.groups,
                levels,
                self.locks,
                SendRefusal(),
                require_room=lambda: None,
                sync_flush=False,
                now_ms=clock,
            ),
        )
        self._router = Router(*(part.handlers() for part in parts))
        self._prepare(pair)

    def serve(self, request: RemotingCommand) -> RemotingCommand:
        connection = FakeConnection(address="127.0.0.1:29911")
        self._router.dispatch(request, connection)
        (reply,) = connection.written
        (command,) = FrameDecoder().receive_data(reply)
        return command

    def _prepare(self, pair: Pair) -> None:
        """Bring about what the recorded answer presupposes."""
        request, answer = pair
        match request.header:
            case headers.GetRouteInfoRequestHeader(topic=topic) if answer.code == 0:
                (entry,) = parse(answer.body)["queueDatas"]
                self._topics_path.parent.mkdir(parents=True)
                self._topics_path.write_text(json.dumps({"topicConfigTable": {topic: entry}}))
                self.topics.load()
            case headers.UpdateConsumerOffsetRequestHeader(consumer_group=group, topic=topic):
                if answer.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    self.groups.ensure(group)
                if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                    self.topics.ensure(topic)
            case headers.QueryConsumerOffsetRequestHeader() as header if answer.code == 0:
                assert isinstance(answer.header, dict)
                self.offsets.commit(
                    header.consumer_group,
                    header.topic,
                    header.queue_id,
                    int(answer.header["offset"]),
                )
            case headers.GetConsumerListByGroupRequestHeader(consumer_group=group):
                for client_id in json.loads(answer.body or b"{}").get("consumerIdList", []):
                    beat = {"clientID": client_id, "consumerDataSet": [{"groupName": group}]}
                    self.serve(_heartbeat(json.dumps(beat).encode()))
            case headers.ConsumerSendMsgBackRequestHeader() as header if answer.code == 0:
                self.log.write_offset = header.offset
                self.log.append([draft()])
            case headers.ViewMessageRequestHeader() | headers.QueryMessageRequestHeader():
                self._store_answered(request, answer)
        if request.code == RequestCode.LOCK_BATCH_MQ and answer.code == 0:
            granted = decode_locked_queues(answer.body)
            body = decode_lock_batch(request.body)
            others = [queue for queue in body.mq_set if queue not in granted]
            self.locks.lock(body.consumer_group, "somebody else", others)

    def _store_answered(self, request: RemotingCommand, answer: RemotingCommand) -> None:
        for record in decode_records(answer.body):
            self.log.records[record.physical_offset] = record
            if isinstance(request.header, headers.QueryMessageRequestHeader):
                self.log.add_key(record.topic, request.header.key, record.physical_offset)
        self.log.start_times_at_zero()


def _heartbeat(body: bytes) -> RemotingCommand:
    return RemotingCommand(
        code=RequestCode.HEART_BEAT, header=headers.HeartbeatRequestHeader(), body=body
    )


def _comparable(request: RemotingCommand, body: bytes) -> Any:
    """Return what of a body must be equal."""
    if not body:
        return None
    if request.code in {RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.QUERY_MESSAGE}:
        return body
    value = parse(body)
    if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
        return list(value)  # which topics there are is of the day
    if request.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
        value["consumerIdList"].sort()
    if request.code == RequestCode.LOCK_BATCH_MQ:
        value["lockOKMQSet"].sort(key=str)
    text = json.dumps(value)
    return json.loads(text.replace("127.0.0.1:28911", "127.0.0.1:29911"))


def _remark_is_ours(pair: Pair) -> bool:
    """Whether the official remark is made for people, and not a Java exception."""
    remark = pair.answer.remark or ""
    return pair.answer.code != 0 and "Exception" not in remark


@pytest.mark.parametrize("file", OURS)
def test_requests_are_answered_as_the_official_broker_answered(file: str, tmp_path: Path) -> None:
    """Unmodified clients cannot tell the difference."""
    for number, pair in enumerate(pairs(file)):
        request, expected = pair
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC and request.header_error:
            continue  # without a topic: they answer 17 for "null", we say what is missing
        answer = Broker(tmp_path / str(number), pair).serve(request)

        where = f"{file} opaque {request.opaque} code {request.code}"
        assert answer.code == expected.code, where
        if "Exception" not in (expected.remark or ""):
            assert _names(answer, request) == _names(expected, request), where
        if _remark_is_ours(pair):
            if answer.code == ResponseCode.TOPIC_NOT_EXIST:  # ours adds what creates the topic
                assert (answer.remark or "").startswith(expected.remark or ""), where
            else:
                assert answer.remark == expected.remark, where
        assert _comparable(request, answer.body) == _comparable(request, expected.body), where


def _names(command: RemotingCommand, request: RemotingCommand) -> set[str] | None:
    """Return the names of the ext fields; None for no ext fields, where JSON can say so."""
    assert command.header is None or isinstance(command.header, dict)
    if command.header is None and request.header_type == HeaderType.JSON:
        return None
    return set(command.header or {})


def test_every_code_is_among_the_recordings() -> None:
    """The comparison above proves nothing about a code without a recording."""
    answered: dict[int, set[int]] = {}
    for file in OURS:
        for pair in pairs(file):
            answered.setdefault(pair.request.code, set()).add(pair.answer.code)

    assert answered.keys() == CODES
    assert answered[RequestCode.GET_ROUTEINFO_BY_TOPIC] == {0, 17}
    assert answered[RequestCode.UPDATE_CONSUMER_OFFSET] == {0, 17, 26}
    assert answered[RequestCode.CONSUMER_SEND_MSG_BACK] == {0, 1, 26}
