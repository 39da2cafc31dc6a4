"""Connected consumers: their state, and a request to consume one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from halfmq.remoting.admin_headers import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
)
from halfmq.remoting.bodies import QueueKey
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.running_info import (
    QueueProgress,
    decode_direct_result,
    decode_running_info,
)

from ..arguments import check_kind, check_text
from ..errors import BrokerRefusedError
from ..message import MessageQueue, ReceivedMessage
from ..net.response_errors import answer_of, expect_success
from .brokers import ClusterClient, call_broker, time_of

RELAY_SECONDS = 12.0
"""Time limit of an answer: brokers wait ten seconds for the consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedQueue:
    """One queue that a connected consumer pulls."""

    queue: MessageQueue
    offset: int
    """Where another consumer would resume."""
    cached: int
    """Messages that it has pulled and not consumed."""
    last_pull: datetime | None
    """None: never."""
    last_consumed: datetime | None
    """None: nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningConsumer:
    """The state of a connected consumer, as it reports it."""

    properties: Mapping[str, str]
    """Its settings; the names differ between clients."""
    filters: Mapping[str, str]
    """Topic to filter expression."""
    queues: tuple[ConsumedQueue, ...]
    stacks: str | None
    """Stacks of its threads or asyncio tasks; None if not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectConsumption:
    """The outcome of a message that a consumer was sent directly."""

    outcome: str
    """RocketMQ's name: ``CR_SUCCESS``, ``CR_LATER``, ``CR_THROW_EXCEPTION``, …"""
    remark: str | None
    seconds: float
    """How long it took."""

    @property
    def succeeded(self) -> bool:
        """Whether the consumer has acknowledged the message."""
        return self.outcome in {"CR_SUCCESS", "CR_COMMIT"}


class RunningConsumerCalls(ClusterClient):
    """Requests to connected consumers, which brokers pass on."""

    async def running_consumer(
        self, group: str, client_id: str, *, stacks: bool = False
    ) -> RunningConsumer:
        """Return the state that a connected consumer reports.

        ``groups`` lists the client ids. ``stacks`` includes the stacks of its threads or tasks.

        Raises:
            BrokerRefusedError: It is not connected, too old, or does not answer in ten seconds.
        """
        check_text("group", group)
        check_text("client_id", client_id)
        header = GetConsumerRunningInfoRequestHeader(
            consumer_group=group, client_id=client_id, jstack_enable=stacks
        )
        address, body = await self._relayed(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        with answer_of(address):
            info = decode_running_info(body)
        queues = [_consumed_queue(*one) for one in info.queues.items()]
        return RunningConsumer(
            properties=info.properties,
            filters={one.topic: one.sub_string for one in info.subscriptions},
            queues=tuple(sorted(queues, key=lambda one: one.queue)),
            stacks=info.stacks,
        )

    async def consume_directly(
        self, group: str, client_id: str, message: ReceivedMessage
    ) -> DirectConsumption:
        """Have a connected consumer consume one stored message now; return the outcome.

        No offset changes. ``message`` and ``messages_with_key`` find messages.

        Raises:
            BrokerRefusedError: It is not connected, too old, or does not answer in ten seconds.
        """
        check_text("group", group)
        check_text("client_id", client_id)
        check_kind("message", message, ReceivedMessage)
        header = ConsumeMessageDirectlyRequestHeader(
            consumer_group=group,
            client_id=client_id,
            msg_id=message.offset_message_id,
            topic=message.topic,
        )
        address, body = await self._relayed(
            RequestCode.CONSUME_MESSAGE_DIRECTLY, header, only=message.queue.broker_name
        )
        with answer_of(address):
            result = decode_direct_result(body)
        return DirectConsumption(
            outcome="" if result.consume_result is None else result.consume_result.value,
            remark=result.remark,
            seconds=result.spent_time_mills / 1000,
        )

    async def _relayed(
        self, code: RequestCode, header: Header, *, only: str | None = None
    ) -> tuple[str, bytes]:
        """Return address and answer of the first broker to which the consumer is connected."""
        refused: BrokerRefusedError | None = None
        for name, address in self._brokers():
            if only not in (None, name):
                continue
            try:
                answer = expect_success(
                    await call_broker(self._session, address, code, header, seconds=RELAY_SECONDS)
                )
            except BrokerRefusedError as error:
                if error.code != ResponseCode.SYSTEM_ERROR:
                    raise
                refused = error
            else:
                return address, answer.body
        raise refused or BrokerRefusedError(ResponseCode.SYSTEM_ERROR, f"no broker is named {only}")


def _consumed_queue(key: QueueKey, progress: QueueProgress) -> ConsumedQueue:
    return ConsumedQueue(
        queue=MessageQueue(key.topic, key.broker_name, key.queue_id),
        offset=progress.commit_offset,
        cached=progress.cached_msg_count,
        last_pull=time_of(progress.last_pull_timestamp),
        last_consumed=time_of(progress.last_consume_timestamp),
    )
