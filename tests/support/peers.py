"""A client's connection to a broker, frame by frame; what it sends, and when, the test says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    MessageModel,
    ProducerData,
    encode_heartbeat,
    subscription_data,
)
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    GetMaxOffsetRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import encode_properties
from tests.support.broker_doubles import START_MS
from tests.support.patience import PATIENCE_S
from tests.support.usual_headers import send_header

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0  # commitOrRollback


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the flush thread work until it is so; time does not move."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        await asyncio.sleep(0)
        time.sleep(0.0001)  # noqa: ASYNC251  # the flush thread wants the interpreter


@dataclass(frozen=True)
class Half:
    """What the answer to a prepare says."""

    offset: int
    queue_offset: int
    message_id: str  # offset id of the half
    transaction_id: str
    group: str
    body: bytes


@dataclass(frozen=True)
class Check:
    """A check request of the broker."""

    header: CheckTransactionStateRequestHeader
    command: RemotingCommand

    @property
    def offset(self) -> int:
        return self.header.commit_log_offset


class Peer(asyncio.Protocol):
    """A client's connection, frame by frame: what it sends and when is the test's to say.

    With JSON headers it is what an official client is to the broker; with MSGPACK one of ours.
    """

    def __init__(self, group: str, header_type: HeaderType, name: str) -> None:
        self.group, self.client_id = group, name
        self.name = ""
        self.member = False
        self.closed = False
        self.checks: list[Check] = []
        self.requests: list[RemotingCommand] = []
        """All other requests of the broker, which the test answers."""
        self.acknowledge: Callable[[Check], int | None] = lambda _check: 0
        """The code with which a check that wants an answer is answered; None: not at all."""
        self.header_type = header_type
        self._decoder = FrameDecoder(responses_first=True)
        self._answers: dict[int, RemotingCommand] = {}
        self._opaques = itertools.count(1)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        host, port = transport.get_extra_info("sockname")
        self.name = f"{host}:{port}"

    def data_received(self, data: bytes) -> None:
        for command in self._decoder.receive_data(data):
            if command.is_response:
                self._answers[command.opaque] = command
            elif command.code == RequestCode.CHECK_TRANSACTION_STATE:
                self._checked(command)
            else:
                self.requests.append(command)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def _checked(self, command: RemotingCommand) -> None:
        assert isinstance(command.header, CheckTransactionStateRequestHeader)
        check = Check(command.header, command)
        self.checks.append(check)
        code = self.acknowledge(check)
        if not command.is_one_way and code is not None:
            self.write(encode_reply(command, code))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def frame(
        self, code: int, header: Header | None, body: bytes = b"", *, one_way: bool = False
    ) -> tuple[int, bytes]:
        """A request, and the number its answer will have."""
        opaque = next(self._opaques)
        return opaque, encode_request(
            code,
            opaque=opaque,
            header=header,
            body=body,
            one_way=one_way,
            header_type=self.header_type,
        )

    def send(self, code: int, header: Header | None, body: bytes = b"") -> int:
        """Send a request; return the number its answer will have."""
        opaque, frame = self.frame(code, header, body)
        self.write(frame)
        return opaque

    def answered(self, opaque: int) -> bool:
        return opaque in self._answers

    async def answer(self, opaque: int) -> RemotingCommand:
        await until(lambda: self.closed or opaque in self._answers)
        return self._answers.pop(opaque)

    async def call(self, code: int, header: Header | None, body: bytes = b"") -> RemotingCommand:
        """Send a request and wait for its answer."""
        return await self.answer(self.send(code, header, body))

    async def sync(self) -> None:
        """Return when everything sent before has been served, and its answers are here."""
        if not self.closed:
            question = GetMaxOffsetRequestHeader(topic="orders", queue_id=0)
            opaque = self.send(RequestCode.GET_MAX_OFFSET, question)
            await until(lambda: self.closed or opaque in self._answers)
            self._answers.pop(opaque, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what producers send

    async def heartbeat(self) -> None:
        """Become a member of the producer group."""
        data = HeartbeatData(
            client_id=self.client_id, producer_data_set=(ProducerData(group_name=self.group),)
        )
        answer = await self.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))
        assert answer.code == 0, answer.remark
        self.member = True

    async def consume(self, *topics: str, broadcasting: bool = False) -> None:
        """Become a member of the consumer group of the same name as the producer group."""
        model = MessageModel.BROADCASTING if broadcasting else MessageModel.CLUSTERING
        group = ConsumerData(
            group_name=self.group,
            message_model=model,
            subscription_data_set=tuple(subscription_data(name, "*") for name in topics),
        )
        data = HeartbeatData(client_id=self.client_id, consumer_data_set=(group,))
        answer = await self.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))
        assert answer.code == 0, answer.remark

    async def asked_for(self, code: int) -> RemotingCommand:
        """Wait for the next request of the broker with this code."""
        await until(lambda: any(one.code == code for one in self.requests))
        found = next(one for one in self.requests if one.code == code)
        self.requests.remove(found)
        return found

    def half_request(
        self,
        key: str,
        body: bytes = b"row 1",
        *,
        topic: str = "orders",
        queue_id: int = 0,
        born_ms: int = START_MS,
        sys_flag: int = 0x4,
        **properties: str,
    ) -> tuple[SendMessageRequestHeaderV2, bytes]:
        """Header and body of a prepare."""
        all_properties = {"TRAN_MSG": "true", "PGROUP": self.group, "UNIQ_KEY": key, "WAIT": "true"}
        header = send_header(
            producer_group=self.group,
            topic=topic,
            queue_id=queue_id,
            sys_flag=sys_flag,
            born_timestamp=born_ms,
            properties=encode_properties(all_properties | properties).decode(),
        )
        return header, body

    async def plain(
        self,
        key: str,
        body: bytes = b"plain",
        *,
        topic: str = "orders",
        queue_id: int = 0,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        batch: bool = False,
        **properties: str,
    ) -> RemotingCommand:
        """Send a message that is no half, or the body of a batch; return the answer."""
        header = send_header(
            producer_group=self.group,
            topic=topic,
            queue_id=queue_id,
            sys_flag=sys_flag,
            reconsume_times=reconsume_times,
            batch=batch,
            properties=encode_properties({"UNIQ_KEY": key} | properties).decode(),
        )
        return await self.call(RequestCode.SEND_MESSAGE_V2, header, body)

    async def send_back(self, offset: int, group: str, delay_level: int = 1) -> RemotingCommand:
        """Have a consumed record delivered to its group again."""
        header = ConsumerSendMsgBackRequestHeader(
            offset=offset, group=group, delay_level=delay_level, max_reconsume_times=16
        )
        return await self.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)

    async def prepare(self, key: str, body: bytes = b"row 1", **kwargs: Any) -> Half:
        """Store a half message; it is on disk when this returns."""
        header, body = self.half_request(key, body, **kwargs)
        answer = await self.call(RequestCode.SEND_MESSAGE_V2, header, body)
        assert answer.code == 0, answer.remark
        return self.half_of(answer, body)

    def half_of(self, answer: RemotingCommand, body: bytes = b"row 1") -> Half:
        """What a prepare's answer says."""
        stored = response_header(answer, SendMessageResponseHeader)
        return Half(
            offset=parse_offset_message_id(stored.msg_id).physical_offset,
            queue_offset=stored.queue_offset,
            message_id=stored.msg_id,
            transaction_id=stored.transaction_id or "",
            group=self.group,
            body=body,
        )

    def end_request(
        self, half: Half, decision: int, *, from_check: bool = False
    ) -> EndTransactionRequestHeader:
        """Header of a decision."""
        return EndTransactionRequestHeader(
            producer_group=half.group,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.offset,
            commit_or_rollback=decision,
            msg_id=half.transaction_id,
            transaction_id=half.transaction_id,
            from_transaction_check=from_check,
            topic="orders",
        )

    async def end(self, half: Half, decision: int, *, from_check: bool = False) -> RemotingCommand:
        """Decide, and return the answer."""
        header = self.end_request(half, decision, from_check=from_check)
        return await self.call(RequestCode.END_TRANSACTION, header)

    def end_one_way(self, half: Half, decision: int) -> None:
        """Decide as official clients do, who never hear of the outcome."""
        header = self.end_request(half, decision)
        self.write(self.frame(RequestCode.END_TRANSACTION, header, one_way=True)[1])

    async def answer_check(self, check: Check, decision: int) -> RemotingCommand:
        """Answer a check with the offsets it came with."""
        header = EndTransactionRequestHeader(
            producer_group=self.group,
            tran_state_table_offset=check.header.tran_state_table_offset,
            commit_log_offset=check.header.commit_log_offset,
            commit_or_rollback=decision,
            msg_id=check.header.msg_id or "",
            transaction_id=check.header.transaction_id,
            from_transaction_check=True,
            topic="orders",
        )
        return await self.call(RequestCode.END_TRANSACTION, header)

    @property
    def asked(self) -> list[int]:
        """Physical offsets of the halves that the broker asked about, in order."""
        return [check.offset for check in self.checks]
