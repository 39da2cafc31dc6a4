"""Requests of operators to a running consumer, which brokers pass on.

* 307: report subscriptions, queues and offsets, on request with the stacks of its asyncio tasks
* 221: report its offsets in a topic
* 220: continue at other offsets
* 309: consume one message, in the user's loop like any other, but without an offset to commit

Source: RocketMQ 5.3.3 ``ClientRemotingProcessor``, ``DefaultMQPushConsumerImpl``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final

from halfmq.remoting.admin_headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)
from halfmq.remoting.bodies import (
    QueueKey,
    SubscriptionData,
    decode_offset_table,
    encode_consumer_status,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.running_info import (
    DirectOutcome,
    DirectResult,
    QueueProgress,
    RunningInfo,
    encode_direct_result,
    encode_running_info,
)
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.record import decode_record

from ..message import MessageQueue
from ..net.connection import BrokerConnection, ServerRequestHandler
from .delivery import DeliveryBuffer
from .in_flight import InFlightWindow

logger = logging.getLogger(__name__)

DIRECT_SECONDS: Final = 9.0
"""Time limit for a message of request 309; brokers wait ten seconds."""
DIRECT_MAX: Final = 16
"""Concurrent messages of request 309; further ones are refused. Brokers pass on every request."""
STACKS_MAX: Final = 1_000
"""Tasks whose stacks are reported, about 500 bytes each."""


class OperatorRequests:
    """Answers the requests of operators to one consumer."""

    def __init__(
        self,
        group: str,
        properties: Mapping[str, str],
        subscriptions: Mapping[str, SubscriptionData],
        windows: Callable[[], Collection[InFlightWindow]],
        buffer: Callable[[], DeliveryBuffer | None],
        seek: Callable[[MessageQueue, int], None],
    ) -> None:
        """Wire the parts; ``seek`` moves a queue to an offset, and ignores those not assigned."""
        self._group = group
        self._properties = properties
        self._subscriptions = subscriptions
        self._windows = windows
        self._buffer = buffer
        self._seek = seek
        self._directly: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[int, ServerRequestHandler]:
        """The handlers by request code."""
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: partial(self._serve, self._running_info),
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: partial(self._serve, self._offsets),
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: partial(self._serve, self._reset),
            RequestCode.CONSUME_MESSAGE_DIRECTLY: partial(self._serve, self._consume),
        }

    def stop(self) -> None:
        """Cancel the answers to requests 309 that are not complete."""
        for task in self._directly:
            task.cancel()

    def _serve(
        self,
        serve: Callable[[RemotingCommand, BrokerConnection], bytes | None],
        request: RemotingCommand,
        connection: BrokerConnection,
    ) -> None:
        try:
            body = serve(request, connection)
        except (ProtocolError, CorruptRecordError, _NotServedError) as error:
            logger.warning("event=request_refused code=%d reason=%r", request.code, str(error))
            if not request.is_one_way:
                connection.reply(request, ResponseCode.SYSTEM_ERROR, str(error))
        else:
            if body is not None and not request.is_one_way:
                connection.reply(request, body=body)

    def _check_group(self, group: str) -> None:
        if group != self._group:
            raise _NotServedError(f"The Consumer Group <{group}> not exist in this consumer")

    # -- reports

    def _running_info(self, request: RemotingCommand, _connection: BrokerConnection) -> bytes:
        header = request.header_as(GetConsumerRunningInfoRequestHeader)
        from importlib.metadata import version  # noqa: PLC0415 -- 7 ms that only this needs

        self._check_group(header.consumer_group)
        return encode_running_info(
            RunningInfo(
                properties={**self._properties, "halfmqVersion": version("halfmq")},
                subscriptions=tuple(self._subscriptions.values()),
                queues={_key(window.queue): _progress(window) for window in self._windows()},
                stacks=_stacks() if header.jstack_enable else None,
            )
        )

    def _offsets(self, request: RemotingCommand, _connection: BrokerConnection) -> bytes:
        header = request.header_as(GetConsumerStatusRequestHeader)
        self._check_group(header.group)
        return encode_consumer_status(
            {
                _key(window.queue): window.commit_offset
                for window in self._windows()
                if window.queue.topic == header.topic
            }
        )

    # -- actions

    def _reset(self, request: RemotingCommand, _connection: BrokerConnection) -> None:
        header = request.header_as(ResetOffsetRequestHeader)
        self._check_group(header.group)
        for key, offset in decode_offset_table(request.body).items():
            if key.topic == header.topic and offset >= 0:
                self._seek(MessageQueue(key.topic, key.broker_name, key.queue_id), offset)

    def _consume(self, request: RemotingCommand, connection: BrokerConnection) -> None:
        header = request.header_as(ConsumeMessageDirectlyRequestHeader)
        self._check_group(header.consumer_group)
        record = decode_record(request.body, check_crc=False)
        buffer = self._buffer()
        if buffer is None or len(self._directly) >= DIRECT_MAX:
            raise _NotServedError(f"at most {DIRECT_MAX} messages are consumed directly: try again")
        queue = MessageQueue(record.topic, header.broker_name or "", record.queue_id)
        outcome = buffer.add_directly(queue, record)
        task = asyncio.create_task(_answer(request, connection, outcome))
        self._directly.add(task)
        task.add_done_callback(self._directly.discard)


class _NotServedError(Exception):
    """The request cannot be carried out; says why."""


async def _answer(
    request: RemotingCommand, connection: BrokerConnection, outcome: asyncio.Future[bool]
) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    result, remark = DirectOutcome.RETURN_NULL, None
    try:
        async with asyncio.timeout(DIRECT_SECONDS):
            result = DirectOutcome.SUCCESS if await outcome else DirectOutcome.LATER
    except TimeoutError:  # which has cancelled the outcome: it is not delivered any more
        remark = f"not acknowledged in {DIRECT_SECONDS:.0f} seconds"
    spent_ms = int((clock() - began) * 1_000)
    answer = DirectResult(consume_result=result, remark=remark, spent_time_mills=spent_ms)
    connection.reply(request, body=encode_direct_result(answer))


def _key(queue: MessageQueue) -> QueueKey:
    return QueueKey(topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id)


def _progress(window: InFlightWindow) -> QueueProgress:
    return QueueProgress(
        commit_offset=window.commit_offset,
        cached_msg_min_offset=window.commit_offset if len(window) else 0,
        cached_msg_max_offset=window.next_offset - 1 if len(window) else 0,
        cached_msg_count=len(window),
        cached_msg_size_in_mi_b=window.bytes >> 20,
        droped=not window.active,
        last_pull_timestamp=int(window.pulled_at * 1_000),
        last_consume_timestamp=int(window.acknowledged_at * 1_000),
    )


def _stacks() -> str:
    """Return where each asyncio task of this loop waits, the innermost call last."""
    tasks = asyncio.all_tasks()
    lines = [f"{len(tasks)} asyncio tasks"]
    for task in sorted(tasks, key=asyncio.Task.get_name)[:STACKS_MAX]:
        lines.append(f"\n{task.get_name()}")
        lines += [
            f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            for frame in _frames(task.get_coro())
        ]
    return "\n".join(lines) + "\n"


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of what it awaits; ``Task.get_stack`` has one only."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                break
        else:
            return
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
