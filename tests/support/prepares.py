"""The send handler over a transaction service in memory: prepares as clients send them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.handlers.messages.send import SendHandler
from halfmq.broker.handlers.transactions.prepare import PrepareHandler
from halfmq.broker.net.group_append import GroupAppend
from halfmq.broker.net.router import Router
from halfmq.broker.tables.topic_config import TopicConfig
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import SendMessageResponseHeader
from halfmq.remoting.own_requests import (
    PreparedMessage,
    PreparedResult,
    TransactionsRequestHeader,
    decode_prepared_results,
    encode_entries,
)
from halfmq.remoting.replies import encode_request
from halfmq.store.format.ids import UniqueKeyFactory
from halfmq.store.format.properties import encode_properties
from tests.support.broker_doubles import START_MS, FakeConnection, as_store
from tests.support.transactions import Broker
from tests.support.usual_headers import send_header

BODY_MAX = 10_000
LOG_FILE_SIZE = 100_000


class Topics(TopicTable):
    """Topics of four queues each, made when they are asked for."""

    def __init__(self, *missing: str) -> None:  # without a file
        self._missing = missing

    def get(self, name: str) -> TopicConfig | None:
        if name in self._missing:
            return None
        return TopicConfig(name=name, read_queue_nums=4, write_queue_nums=4)

    def create_on_send(
        self, topic: str, default_topic: str, queue_nums: int, remote: str
    ) -> TopicConfig | None:
        return None


class Prepares:
    """A broker's sending side, pass by pass of its event loop."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.broker = Broker(directory, **settings)
        self._opaques = itertools.count(1)
        self.overload = SendRefusal()
        self._wire()

    def _wire(self) -> None:
        log = self.broker.log
        self._due: list[Callable[[], None]] = []
        self.group = GroupAppend(as_store(log), call_soon=self._due.append)
        self.connection = FakeConnection()
        self.handler = SendHandler(
            as_store(log),
            self.group,
            Topics("absent"),
            self.broker.service.prepares,
            self.overload,
            delayed=lambda draft: draft,
            retried=lambda _header, draft, _version: draft,
            timer_rule=TimerRule(40 * 86_400_000, now_ms=lambda: START_MS),
            require_room=lambda: None,
            broker_name="broker-a",
            cluster_name="C",
            max_message_size=BODY_MAX,
            sync_flush=True,
            unique_keys=UniqueKeyFactory(
                bytes(4), process_id=1, token=bytes(4), now_ms=lambda: START_MS
            ),
        )
        self.preparer = PrepareHandler(
            self.broker.service.prepares,
            self.handler.validated,
            append_staged=self.group.append_staged,
            refuse_sends=self.handler.refuse,
            log_file_size=LOG_FILE_SIZE,
        )
        self._router = Router(self.handler.handlers(), self.preparer.handlers())

    def restart(self, *, survivors: int = 0, drained: bool = False) -> None:
        """Stop in order, or crash; then start again."""
        self.broker.restart(survivors=survivors, drained=drained)
        self._wire()

    def request(
        self,
        key: str,
        body: bytes = b"row 1",
        *,
        group: str = "pg",
        topic: str = "orders",
        queue_id: int = 1,
        sys_flag: int = 4,
        batch: bool = False,
        **properties: str,
    ) -> RemotingCommand:
        """Return the request that prepares a transaction; an empty property is left out."""
        marks = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": key}
        header = send_header(
            producer_group=group or "pg",
            topic=topic,
            queue_id=queue_id,
            sys_flag=sys_flag,
            batch=batch,
            properties=encode_properties(marks | properties).decode(),
        )
        frame = encode_request(
            RequestCode.SEND_MESSAGE_V2, opaque=next(self._opaques), header=header, body=body
        )
        (command,) = FrameDecoder().receive_data(frame)
        return command

    def several(
        self, *messages: PreparedMessage, group: str = "pg", header_type: int = HeaderType.MSGPACK
    ) -> RemotingCommand:
        """Return the request that prepares one transaction of these messages."""
        frame = encode_request(
            RequestCode.PREPARE_TRANSACTION,
            opaque=next(self._opaques),
            header=TransactionsRequestHeader(producer_group=group),
            body=encode_entries(messages),
            header_type=header_type,
        )
        (command,) = FrameDecoder().receive_data(frame)
        return command

    def prepare_several(self, *messages: PreparedMessage, **how: Any) -> list[PreparedResult]:
        """Prepare one transaction of these messages; return where their halves are."""
        (answer,) = self.arrive(self.several(*messages, **how))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return decode_prepared_results(answer.body)

    def arrive(self, *requests: RemotingCommand) -> list[RemotingCommand]:
        """Serve requests that come in one pass of the loop; return the answers, in order."""
        connection = self.connection
        for request in requests:
            self._router.dispatch(request, connection)
        while self._due:
            self._due.pop()()
        self.broker.log.flush()
        frames = [reply for _, reply in connection.held] + connection.written
        connection.held.clear()
        connection.written.clear()
        answers = FrameDecoder(responses_first=True).receive_data(b"".join(frames))
        by_opaque = {answer.opaque: answer for answer in answers}
        assert len(by_opaque) == len(answers) == len(requests)
        return [by_opaque[request.opaque] for request in requests]

    def prepare(self, key: str, body: bytes = b"row 1", **how: Any) -> SendMessageResponseHeader:
        """Prepare one transaction; return what its producer is told."""
        (answer,) = self.arrive(self.request(key, body, **how))
        return accepted(answer)

    def refusal(self, key: str = "K", body: bytes = b"row 1", **how: Any) -> tuple[int, str]:
        """Send what is refused; return code and remark."""
        return self.refused(self.request(key, body, **how))

    def refused(self, request: RemotingCommand) -> tuple[int, str]:
        """Serve a request that is refused; return code and remark."""
        before = self.broker.log.write_offset
        (answer,) = self.arrive(request)
        assert answer.code != ResponseCode.SUCCESS
        assert self.broker.log.write_offset == before, "what is refused is not stored"
        return answer.code, answer.remark or ""


def part(
    key: str, body: bytes = b"row 1", *, topic: str = "orders", queue_id: int = 1, **properties: str
) -> PreparedMessage:
    """Return one message of a transaction; `sys_flag` is its only property that is none."""
    sys_flag = int(properties.pop("sys_flag", "4"))
    raw = encode_properties({"UNIQ_KEY": key} | properties).decode()
    return PreparedMessage(topic, queue_id, 7, sys_flag, START_MS, raw, body)


def accepted(answer: RemotingCommand) -> SendMessageResponseHeader:
    """Return what the answer to a stored message says."""
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return response_header(answer, SendMessageResponseHeader)
