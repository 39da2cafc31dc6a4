"""What a recording of official peers tells: its steps in order, and the broker's past before it.

A recording begins in the middle of a broker's life. Which topics, groups and offsets its answers
presuppose is found here by reading ahead, and laid into the directory of the broker that is to
answer the same requests. Messages are put back later, see `left_out`.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from halfmq.broker.config import BrokerConfig
from halfmq.remoting import headers
from halfmq.remoting.admin_headers import CreateTopicRequestHeader
from halfmq.remoting.bodies import decode_heartbeat
from halfmq.remoting.codes import FLAG_ONE_WAY, FLAG_RESPONSE, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError, ProtocolError
from halfmq.remoting.fastjson import parse
from halfmq.remoting.framing import FrameDecoder
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import Record, decode_records
from tests.support.frames import recorded

SENDS: Final = {
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
}
PULLS: Final = {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE}
WITH_RECORDS: Final = PULLS | {RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.QUERY_MESSAGE}

QUEUES_OF_UNKNOWN_TOPIC: Final = 4
"""Of a topic that was there before the recording, which does not ask for its route."""


@dataclass
class Step:
    """One line: a request or garbage of a client, an answer to it, or a server's own request."""

    number: int
    connection: int
    frame: bytes
    is_from_client: bool
    command: RemotingCommand | None  # None: no valid frame, or one that ends the connection
    request: Step | None = None  # of an answer
    answer: Step | None = None  # of a request

    @property
    def is_answer(self) -> bool:
        return not self.is_from_client and self.request is not None


def steps_of(file: str) -> list[Step]:
    """Return the lines of a recording of clients and servers, answers paired with requests."""
    steps: list[Step] = []
    asked: dict[int, deque[Step]] = defaultdict(deque)
    for number, line in enumerate(recorded(file)):
        here, _, there = line.direction.partition("→")
        assert "client" in (here, there), f"{file} is a recording between servers"
        step = Step(number, line.connection, line.frame, here == "client", _command(line.frame))
        steps.append(step)
        is_response = bool((line.flag or 0) & FLAG_RESPONSE)
        if step.is_from_client and step.command is not None and not is_response:
            if not step.command.flag & FLAG_ONE_WAY:
                asked[line.connection].append(step)
        elif not step.is_from_client and is_response:
            request = _request_of(step, asked[line.connection])
            if request is not None:
                step.request, request.answer = request, step
    return steps


def _command(frame: bytes) -> RemotingCommand | None:
    try:
        commands = FrameDecoder().receive_data(frame)
    except ProtocolError:
        return None
    return commands[0] if len(commands) == 1 else None


def _request_of(answer: Step, waiting: deque[Step]) -> Step | None:
    """Find the request, for the official server of one without opaque by taking the oldest."""
    assert answer.command is not None
    for accepted in (answer.command.opaque, 0):
        for request in waiting:
            if request.command is not None and request.command.opaque == accepted:
                waiting.remove(request)
                return request
    return None


def records_of(step: Step) -> list[Record]:
    """Return the records that an answer carries."""
    if step.request is None or step.request.command is None or step.command is None:
        return []
    if step.request.command.code not in WITH_RECORDS or step.command.code != 0:
        return []
    return decode_records(step.command.body)


def answer_fields(step: Step) -> dict[str, str]:
    """Return the ext fields of an answer."""
    assert step.command is not None
    return step.command.header if isinstance(step.command.header, dict) else {}


def offsets_in_ids(msg_ids: str) -> list[int]:
    """Return the physical offsets in offset message ids joined by commas."""
    return [parse_offset_message_id(one)[1] for one in msg_ids.split(",")]


# --- the past


@dataclass
class Past:
    """What the broker must hold before the first request."""

    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    offsets: dict[str, dict[str, int]] = field(default_factory=dict)


class PastReader:
    """Reads ahead in a recording and collects what must have been there before it."""

    def __init__(self, steps: list[Step], config: BrokerConfig) -> None:
        self.past = Past()
        self._settled_topics: set[str] = set()  # of which the first mention is behind us
        self._settled_groups: set[str] = set()
        self._committed: set[tuple[str, str, int]] = set()
        self._creates_topics = config.topics.auto_create
        self._creates_groups = config.topics.auto_create_groups
        self._routes = dict(_routes(steps))
        for step in steps:
            self._read(step)

    def _read(self, step: Step) -> None:
        request = step.command
        if not step.is_from_client or request is None or request.flag & FLAG_RESPONSE:
            return
        if step.answer is None:
            self._read_unanswered(request)
            return
        answer = step.answer
        assert answer.command is not None
        match request.header:
            case headers.SendMessageRequestHeader() as sent:
                self._read_send(sent, answer)
            case headers.PullMessageRequestHeader() as pull:
                self._read_pull(pull, answer)
            case headers.GetRouteInfoRequestHeader(topic=topic):
                self._topic(topic, exists=answer.command.code == 0)
            case headers.UpdateConsumerOffsetRequestHeader() as update:
                code = answer.command.code
                self._group(
                    update.consumer_group, exists=code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
                )
                if code in (0, ResponseCode.TOPIC_NOT_EXIST):
                    self._topic(update.topic, exists=code == 0)
                self._committed.add((update.consumer_group, update.topic, update.queue_id))
            case headers.QueryConsumerOffsetRequestHeader() as query if answer.command.code == 0:
                self._read_query(query, int(answer_fields(answer)["offset"]))
            case headers.ConsumerSendMsgBackRequestHeader(group=group):
                self._read_consumer(
                    group,
                    exists=answer.command.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                )
        if request.code == RequestCode.HEART_BEAT:
            self._read_heartbeat(request)
        elif answer.command.code == 0:
            self._read_admin(request)

    def _read_unanswered(self, request: RemotingCommand) -> None:
        match request.header:
            case headers.SendMessageRequestHeader(topic=topic):
                self._topic(topic, exists=False)
            case headers.UpdateConsumerOffsetRequestHeader() as update:
                self._committed.add((update.consumer_group, update.topic, update.queue_id))

    def _read_send(self, sent: headers.SendMessageRequestHeader, answer: Step) -> None:
        assert answer.command is not None
        fields = answer_fields(answer)
        if answer.command.code != 0:
            self._topic(sent.topic, exists=False)
            return
        self._topic(
            sent.topic,
            exists=not self._creates_topics and not sent.topic.startswith("%"),
            queues=int(fields["queueId"]) + 1,
        )

    def _read_pull(self, pull: headers.PullMessageRequestHeader, answer: Step) -> None:
        assert answer.command is not None
        code = answer.command.code
        if code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            self._topic(
                pull.topic,
                exists=code != ResponseCode.TOPIC_NOT_EXIST,
                queues=1 if code == ResponseCode.INVALID_PARAMETER else pull.queue_id + 1,
            )
        self._read_consumer(
            pull.consumer_group, exists=code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        )
        if pull.sys_flag & 1:
            self._committed.add((pull.consumer_group, pull.topic, pull.queue_id))

    def _read_query(self, query: headers.QueryConsumerOffsetRequestHeader, offset: int) -> None:
        key = query.consumer_group, query.topic, query.queue_id
        if key not in self._committed and offset > 0:
            queues = self.past.offsets.setdefault(f"{query.topic}@{query.consumer_group}", {})
            queues[str(query.queue_id)] = offset
        self._committed.add(key)

    def _read_heartbeat(self, request: RemotingCommand) -> None:
        try:
            beat = decode_heartbeat(request.body)
        except BodyError:
            return
        for consumer in beat.consumer_data_set:
            self._read_consumer(consumer.group_name, exists=False)
            self._settled_topics.add(f"%RETRY%{consumer.group_name}")

    def _read_consumer(self, group: str, *, exists: bool) -> None:
        """Note a group that its consumer creates where that is allowed."""
        self._group(group, exists=exists and not self._creates_groups)

    def _read_admin(self, request: RemotingCommand) -> None:
        """Take what tools set up as if it had been there from the start."""
        if isinstance(request.header, CreateTopicRequestHeader):
            made = request.header
            if made.topic not in self._settled_topics:
                self._topic(made.topic, exists=True)
                self.past.topics[made.topic] = {
                    "topicName": made.topic,
                    "readQueueNums": made.read_queue_nums,
                    "writeQueueNums": made.write_queue_nums,
                    "perm": made.perm,
                }
        elif request.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
            config = parse(request.body)
            if config["groupName"] not in self._settled_groups:
                self._settled_groups.add(config["groupName"])
                self.past.groups[config["groupName"]] = config

    def _topic(self, name: str, *, exists: bool, queues: int = QUEUES_OF_UNKNOWN_TOPIC) -> None:
        if name in self._settled_topics:
            return
        self._settled_topics.add(name)
        if exists:
            queues = max(queues, QUEUES_OF_UNKNOWN_TOPIC)
            self.past.topics[name] = {
                "topicName": name,
                "readQueueNums": queues,
                "writeQueueNums": queues,
                "perm": 6,
            } | self._routes.get(name, {})

    def _group(self, name: str, *, exists: bool) -> None:
        if name not in self._settled_groups:
            self._settled_groups.add(name)
            if exists:
                self.past.groups[name] = {"groupName": name}


def _routes(steps: list[Step]) -> Iterator[tuple[str, dict[str, Any]]]:
    for step in reversed(steps):
        answer = None if step.answer is None else step.answer.command
        if step.command is None or answer is None or answer.code != 0:
            continue
        if isinstance(step.command.header, headers.GetRouteInfoRequestHeader):
            (queues,) = parse(answer.body)["queueDatas"]
            yield step.command.header.topic, queues


def lay_down(past: Past, root: Path) -> None:
    """Write what is known of the past into the tables of a broker's directory."""
    tables = root / "config"
    tables.mkdir(parents=True)
    for name, content in (
        ("topics.json", {"topicConfigTable": past.topics}),
        ("subscriptionGroup.json", {"subscriptionGroupTable": past.groups}),
        ("consumerOffset.json", {"offsetTable": past.offsets}),
    ):
        (tables / name).write_text(json.dumps(content))
