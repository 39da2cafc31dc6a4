"""Requests relayed to connected consumers: running info (307), one message (309), offsets (223).

The broker sends the request on the connection of the consumer's heartbeats and passes the answer
on. The consumer may answer late, too much, or never. So the time and the bytes of each answer are
limited, and the number of waiting requests.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#callConsumer`, `Broker2Client`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.admin_headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, decode_consumer_status, encode_consumer_statuses
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import decode_record

from ...access.requirements import GET, SUB, topic
from ...config import TopicDefaults
from ...errors import RequestRefusedError
from ...limits.kept import RELAYS, Kept
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry
from ...tables.group_table import GroupTable
from ...tables.topic_table import TopicTable
from ..access_checks import require

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds for a consumer to answer 307 or 309. Source: `Broker2Client.callClient`."""

STATUS_S: Final = 5.0
"""Seconds for a consumer to answer 221. Source: `Broker2Client.getConsumeStatus`."""

ANSWER_BYTES_MAX: Final = 4 << 20
"""Bytes of an answer that is passed on: the stacks of several thousand threads."""

STATUS_BYTES_MAX: Final = 256 << 10
"""Bytes of an answer to 221 that is read: the offsets of some 3000 queues."""

STATUS_CLIENTS_MAX: Final = 64
"""Members of a group that are asked for one request 223; for a larger group, one must be named."""

VERSION_MIN: Final = 62
"""V3_1_8_SNAPSHOT: older Java clients cannot answer. Source: `MQVersion`."""

_CODE_MAX: Final = 0x7FFF  # a ROCKETMQ header has 16 bits for it


@define(eq=False, repr=False, slots=False)
class RelayHandlers(Handlers):
    """Relays requests of operators to connected consumers."""

    _registry: ClientRegistry
    _topics: TopicTable
    _groups: GroupTable
    _named_record: Callable[[int], bytes | None]
    _identity: TopicDefaults

    def __attrs_post_init__(self) -> None:
        self._broker_name = self._identity.broker_name
        self._waiting: set[asyncio.Task[None]] = set()

    @serves(RequestCode.GET_CONSUMER_RUNNING_INFO)
    def running_info(self, request: RemotingCommand, connection: Connection) -> None:
        """Answer with a consumer's settings, queues and rates, and its stacks if requested."""
        header = request.header_as(GetConsumerRunningInfoRequestHeader)
        self._relay(request, connection, header, b"")

    @serves(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    def consume_directly(self, request: RemotingCommand, connection: Connection) -> None:
        """Let a consumer process one stored message; answer with the result."""
        header = request.header_as(ConsumeMessageDirectlyRequestHeader)
        try:
            offset = parse_offset_message_id(header.msg_id or "").physical_offset
        except ValueError as error:
            raise RequestRefusedError(f"msgId: {error}") from error
        record = self._named_record(offset)
        if record is None:
            raise RequestRefusedError(f"can not find message by the offset, {offset}")
        if request.subject is not None:
            require(request, topic(decode_record(record).topic, SUB, GET))
        of_topic = self._topics.get(header.topic or "")
        of_group = self._groups.get(header.consumer_group)
        filled = replace(
            header,
            broker_name=self._broker_name,
            topic_sys_flag=header.topic_sys_flag if of_topic is None else of_topic.sys_flag,
            group_sys_flag=header.group_sys_flag if of_group is None else of_group.group_sys_flag,
        )
        self._relay(request, connection, filled, record)

    @serves(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS)
    def consumer_status(self, request: RemotingCommand, connection: Connection) -> None:
        """Answer with the offsets that one or all members of a group have in a topic."""
        header = request.header_as(GetConsumerStatusRequestHeader)
        group = self._registry.consumer_groups.get(header.group)
        if group is None:
            raise RequestRefusedError(
                f"No Any Consumer online in the consumer group: [{header.group}]"
            )
        wanted = (header.client_addr or "").strip()  # a client id, in spite of its name
        members = {
            client_id: member.connection
            for client_id, member in group.members.items()
            if wanted in ("", client_id)
        }
        for member in members.values():
            _check_version(member, member.name)
        if len(members) > STATUS_CLIENTS_MAX:
            raise RequestRefusedError(
                f"the group has {len(members)} consumers, at most {STATUS_CLIENTS_MAX} are asked: "
                f"name one"
            )
        question = replace(header, client_addr=None)
        self._start(self._statuses(request, question, members), request, connection)

    def _relay(
        self,
        request: RemotingCommand,
        connection: Connection,
        header: GetConsumerRunningInfoRequestHeader | ConsumeMessageDirectlyRequestHeader,
        body: bytes,
    ) -> None:
        name = f"<{header.consumer_group}> <{header.client_id}>"
        group = self._registry.consumer_groups.get(header.consumer_group)
        member = None if group is None else group.members.get(header.client_id or "")
        if member is None:
            raise RequestRefusedError(f"The Consumer {name} not online")
        _check_version(member.connection, name)
        answer = self._relayed(request, header, body, member.connection, name)
        self._start(answer, request, connection)

    async def _relayed(
        self, request: RemotingCommand, header: Header, body: bytes, asked: Connection, name: str
    ) -> bytes:
        answer = await _ask(asked, request.code, header, body, ANSWER_S)
        if answer is None:
            if asked.closed:
                raise RequestRefusedError(
                    f"invoke consumer {name} Exception: its connection is lost"
                )
            raise RequestRefusedError(
                f"consumer {name} Timeout: no answer in {ANSWER_S:.0f} seconds",
                ResponseCode.CONSUME_MSG_TIMEOUT,
            )
        size = len(answer.body) + len(answer.remark or "")
        if size > ANSWER_BYTES_MAX:
            raise RequestRefusedError(
                f"the answer of consumer {name} has {size} bytes, the limit is {ANSWER_BYTES_MAX}"
            )
        code = answer.code if 0 <= answer.code <= _CODE_MAX else ResponseCode.SYSTEM_ERROR
        return encode_reply(request, code, remark=answer.remark, body=answer.body)

    async def _statuses(
        self, request: RemotingCommand, header: Header, members: dict[str, Connection]
    ) -> bytes:
        code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        answers = await asyncio.gather(
            *(
                _ask(member, code, header, b"", STATUS_S, or_none=True)
                for member in members.values()
            )
        )
        bodies = {
            client_id: answer.body
            for client_id, answer in zip(members, answers, strict=True)
            if answer is not None and answer.code == ResponseCode.SUCCESS
        }
        # On a thread: decoding a thousand queues in fastjson's dialect takes 20 ms.
        return encode_reply(request, body=await asyncio.to_thread(_joined, bodies))

    def _start(
        self, answer: Coroutine[None, None, bytes], request: RemotingCommand, connection: Connection
    ) -> None:
        if len(self._waiting) >= RELAYS.most:
            answer.close()
            raise RequestRefusedError(
                f"{RELAYS.most} questions wait for consumers: try again", ResponseCode.SYSTEM_BUSY
            )
        task = asyncio.create_task(self._finish(answer, request, connection))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _finish(
        self, answer: Coroutine[None, None, bytes], request: RemotingCommand, connection: Connection
    ) -> None:
        try:
            reply = await answer
        except RequestRefusedError as error:
            reply = encode_reply(request, error.code, remark=error.remark)
        except Exception:
            logger.exception("event=relay_failed code=%d peer=%s", request.code, connection.name)
            reply = encode_reply(
                request, ResponseCode.SYSTEM_ERROR, remark="internal error, see the broker's log"
            )
        connection.respond(request, reply)

    def kept(self) -> Kept:
        return {RELAYS: len(self._waiting)}


def _check_version(connection: Connection, name: str) -> None:
    if connection.version < VERSION_MIN:
        raise RequestRefusedError(
            f"The Consumer {name} Version <{connection.version}> too low to finish, please upgrade "
            f"it to V3_1_8_SNAPSHOT"
        )


async def _ask(
    asked: Connection,
    code: int,
    header: Header,
    body: bytes,
    seconds: float,
    *,
    or_none: bool = False,
) -> RemotingCommand | None:
    """Return the consumer's answer; None if there is none in time.

    Raises:
        RequestRefusedError: The consumer does not read its requests; with ``or_none`` return None.
    """
    answered: asyncio.Future[RemotingCommand | None] = asyncio.get_running_loop().create_future()
    on_answer = partial(_set_result, answered)
    if asked.ask(code, header, body, on_answer, seconds=seconds):
        return await answered
    if or_none:
        return None
    raise RequestRefusedError(
        f"invoke consumer at {asked.name} Exception: it does not read its requests"
    )


def _set_result(
    answered: asyncio.Future[RemotingCommand | None], answer: RemotingCommand | None
) -> None:
    if not answered.done():  # the task may be cancelled
        answered.set_result(answer)


def _joined(bodies: dict[str, bytes]) -> bytes:
    found: dict[str, dict[QueueKey, int]] = {}
    for client_id, body in bodies.items():
        try:
            if body and len(body) <= STATUS_BYTES_MAX:
                found[client_id] = decode_consumer_status(body)
        except BodyError as error:
            logger.warning(
                "event=consumer_status_not_readable client=%s reason=%s", client_id, error
            )
    return encode_consumer_statuses(found)
