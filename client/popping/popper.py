"""Pop the messages of one topic at one broker, one by one for those who wait for them.

The broker gives each message to one member of the group and hides it from the others for the ack
timeout. It learns the outcome at once: acknowledged, hidden for longer, or visible again
after a delay. A message is popped when a receiver waits for it, so that none lies in a busy member
while another is idle; until there is one, the broker holds a request that takes nothing.

Source: RocketMQ ``DefaultMQPushConsumerImpl.popMessage``, ``MQClientAPIImpl.processPopResponse``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from halfmq.remoting.bodies import SUBSCRIBE_ALL
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.pop import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationRequestHeader,
    NotificationResponseHeader,
    PopHandle,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
    parse_handle,
    parse_offsets,
    topic_of_kind,
)
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.properties import PROPERTY_POP_CK, get_property
from halfmq.store.format.record import Record

from ..consuming.delivery import CONSUMER_CLOSED, Delivery, DeliveryBuffer, log_late_ack
from ..consuming.in_flight import InFlightWindow
from ..consuming.offsets import broker_address
from ..consuming.pulling import ANSWER_GRACE, RETRY_SECONDS, QueuePuller
from ..consuming.send_back import send_back
from ..errors import BadAnswerError, BrokerRefusedError, ClientError, UnsupportedRequestError
from ..message import DEAD_LETTER_LEVEL, DELAY_SECONDS, MessageQueue
from ..net.response_errors import expect_success, records_of
from ..net.retry import backoff_seconds
from ..net.session import typed, wall_clock_ms

ANY_QUEUE: Final = -1
"""The queue id of a pop from all queues of a topic at a broker."""
POP_MAX: Final = 32
"""Messages of one pop; brokers refuse more."""
INVISIBLE_MAX: Final = 12 * 3_600.0
"""Seconds for which a message may be hidden at once; halfmq and RocketMQ's proxy refuse more."""
BASE_RETRY_LEVEL: Final = 2
"""Delay level before that of the first retry without a delay, as for pulled messages."""
EMPTY_POP_SECONDS: Final = 0.02
"""Pause after an empty pop of a broker that has messages, which others have popped meanwhile."""


class PopSettings:
    """What all poppers of one consumer share."""

    def __init__(
        self,
        ack_timeout: float,
        retries_max: int | None,
        on_return: Callable[[Delivery, int], None],
        *,
        ordered: bool,
    ) -> None:
        self.ack_timeout = ack_timeout
        self.retries_max = retries_max
        self.on_return = on_return
        """Called with each message that is retried, or with ``DEAD_LETTER_LEVEL`` rejected."""
        self.ordered = ordered
        self.turn = asyncio.Lock()
        """Held during a pop, so that no two topics answer one receiver."""


class Popper(QueuePuller):
    """Pops one topic at one broker until its task is cancelled; made by ``PopAssignment``."""

    settings: PopSettings
    attempt_id = ""  # of the pop whose answer is outstanding; a repeated one gets the same messages

    async def _round(self) -> None:
        buffer = self._buffer
        await buffer.wait_for_capacity(self.window)  # not while the topic is paused
        await buffer.wait_for_demand()
        async with self.settings.turn:
            wanted = min(buffer.demand, POP_MAX)
            found = wanted > 0 and await self._pop(1 if self.settings.ordered else wanted)
        if wanted > 0 and not found:
            await self._wait_for_messages()

    async def _pop(self, wanted: int) -> bool:
        """Pop so many messages at most; return whether there were any."""
        settings, queue = self.settings, self.window.queue
        self.window.pulled_at = time.time()
        self.attempt_id = self.attempt_id or os.urandom(8).hex()
        header = PopMessageRequestHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=ANY_QUEUE,
            max_msg_nums=wanted,
            invisible_time=int(settings.ack_timeout * 1_000),
            poll_time=0,
            born_time=wall_clock_ms(),
            exp_type=self._subscription.expression_type,
            exp=self._subscription.sub_string or SUBSCRIBE_ALL,
            order=settings.ordered,
            attempt_id=self.attempt_id if settings.ordered else None,
            broker_name=queue.broker_name,
        )
        answer = await self.call(RequestCode.POP_MESSAGE, header)
        self.attempt_id = ""
        if answer.code == ResponseCode.POLLING_TIMEOUT:
            return False
        expect_success(answer)
        deliveries = list(self._deliveries(answer))
        self._buffer.add_popped([one for one in deliveries if self._matches_filter(one.record)])
        for one in deliveries:
            if not self._matches_filter(one.record):  # its tag has the hash of a wanted one
                await one.acknowledge()
        return True

    def _deliveries(self, answer: RemotingCommand) -> Iterator[PopDelivery]:
        broker_name = self.window.queue.broker_name
        address = broker_address(self._session, self.window.queue)
        header = typed(answer, PopMessageResponseHeader, address)
        try:
            starts = parse_offsets(header.start_offset_info)
            for record in records_of(answer.body):
                text = get_property(record.properties, PROPERTY_POP_CK.encode())
                if text is not None:
                    handle = parse_handle(text.decode(), int(text.split()[-1]))
                else:
                    handle = PopHandle(
                        starts["0", record.queue_id][0],
                        header.pop_time,
                        header.invisible_time,
                        header.revive_qid,
                        "0",
                        broker_name,
                        record.queue_id,
                        record.queue_offset,
                    )
                earlier = _earlier_deliveries(header.order_count_info, handle)
                yield PopDelivery(self._buffer, self, record, handle, earlier)
        except (ValueError, KeyError, CorruptRecordError) as error:
            raise BadAnswerError(address, f"popped messages: {error!r}") from error

    async def _wait_for_messages(self) -> None:
        """Wait until the broker has messages, or has waited long enough."""
        queue, seconds = self.window.queue, self._config.pull_suspend
        header = NotificationRequestHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=ANY_QUEUE,
            poll_time=int(seconds * 1_000),
            born_time=wall_clock_ms(),
            order=self.settings.ordered,
            exp_type=self._subscription.expression_type,
            exp=self._subscription.sub_string or SUBSCRIBE_ALL,
            broker_name=queue.broker_name,
        )
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        answer = await self.call(RequestCode.NOTIFICATION, header, seconds + ANSWER_GRACE)
        address = broker_address(self._session, queue)
        said = typed(expect_success(answer), NotificationResponseHeader, address)
        if clock() - asked_at < EMPTY_POP_SECONDS:
            # Others were faster, or the broker does not hold requests.
            await asyncio.sleep(EMPTY_POP_SECONDS if said.has_msg else RETRY_SECONDS)

    async def call(
        self, code: RequestCode, header: Header, seconds: float | None = None
    ) -> RemotingCommand:
        """Send a request to the broker and return its answer, whatever its code.

        Raises:
            UnsupportedRequestError: The broker has no pop.
            ClientError: There is no answer.
        """
        address = broker_address(self._session, self.window.queue)
        answer = await self._session.call(address, code, header, seconds=seconds)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedRequestError(address, code)
        return answer

    async def send_back(self, delivery: Delivery) -> bool:
        """Make a message a dead letter; return whether the broker has it."""
        return await send_back(self._session, self._group, delivery, DEAD_LETTER_LEVEL, None)

    def ack_header(self, handle: PopHandle) -> AckMessageRequestHeader:
        """Return the request that ends a delivery."""
        return AckMessageRequestHeader(
            consumer_group=self._group,
            topic=topic_of_kind(handle.kind, self.window.queue.topic, self._group),
            queue_id=handle.queue_id,
            extra_info=str(handle),
            offset=handle.offset,
            broker_name=handle.broker_name,
        )

    def change_header(self, handle: PopHandle, seconds: float) -> ChangeInvisibleTimeRequestHeader:
        """Return the request that hides a message for so long from now on."""
        own = self.ack_header(handle)
        fields = {name: getattr(own, name) for name in own.__struct_fields__}
        ms = int(min(seconds, INVISIBLE_MAX) * 1_000)
        return ChangeInvisibleTimeRequestHeader(**fields, invisible_time=ms)

    def changed(self, handle: PopHandle, answer: RemotingCommand) -> PopHandle:
        """Return the handle that replaces one after its message was hidden anew."""
        address = broker_address(self._session, self.window.queue)
        header = typed(answer, ChangeInvisibleTimeResponseHeader, address)
        return handle._replace(
            start=handle.offset,
            pop_ms=header.pop_time,
            invisible_ms=header.invisible_time,
            revive_queue=header.revive_qid,
        )

    def retry_seconds(self) -> float:
        """Return how long a request waits before it is sent again."""
        return backoff_seconds(1, self._config)


class PopDelivery(Delivery):
    """A popped message, whose outcome is sent to its broker at once.

    Requests about one message follow each other, because a change of its time changes the handle
    that the next one must name. One without an answer is sent again until the message's time is
    over.
    """

    __slots__ = ("_deadline", "_handle", "_popper", "_requests", "_settled")
    has_deadline = False  # the broker has it

    def __init__(
        self,
        buffer: DeliveryBuffer,
        popper: Popper,
        record: Record,
        handle: PopHandle,
        earlier: int,
    ) -> None:
        queue = MessageQueue(record.topic, handle.broker_name, record.queue_id)
        super().__init__(buffer, InFlightWindow(queue, 0, None), record)
        self._popper, self._handle = popper, handle
        self.attempts = earlier
        self._settled = False
        self._deadline = time.monotonic() + popper.settings.ack_timeout
        self._requests = asyncio.Lock()

    @property
    def pending(self) -> bool:
        """Whether this consumer still has it."""
        return not self._settled and time.monotonic() < self._deadline

    async def acknowledge(self) -> bool:
        self._buffer.binding.check()
        async with self._requests:
            return await self._acknowledge()

    async def redeliver(self, delay_level: int, reason: str, seconds: float | None = None) -> None:
        self._buffer.binding.check()
        self.reason = reason
        settings = self._popper.settings
        times = self.record.reconsume_times + self.attempts
        if settings.retries_max is not None and times > settings.retries_max:
            delay_level = DEAD_LETTER_LEVEL
        async with self._requests:
            if not self.pending:
                return  # the broker redelivers it
            settings.on_return(self, delay_level)
            if delay_level == DEAD_LETTER_LEVEL:
                if await self._popper.send_back(self):
                    await self._acknowledge()
                    return
                delay_level = 0
            if seconds is None:
                level = delay_level or BASE_RETRY_LEVEL + times
                seconds = DELAY_SECONDS[min(level, len(DELAY_SECONDS)) - 1]
            await self._hide(seconds)
            self._settled = True

    async def extend(self, seconds: float) -> bool:
        self._buffer.binding.check()
        async with self._requests:
            if self.pending and time.monotonic() + seconds <= self._deadline:
                return True
            return await self._hide(seconds)

    async def give_back(self) -> None:
        """Make the message visible to the group: nobody has received it."""
        header = self._popper.change_header(self._handle, 0)
        with contextlib.suppress(ClientError):  # then it comes again after its ack_timeout
            await self._popper.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        self._settled = True

    async def _acknowledge(self) -> bool:
        if self._settled:
            return False
        header = self._popper.ack_header(self._handle)
        answer = await self._ask(RequestCode.ACK_MESSAGE, header)
        # RocketMQ answers 0 to a late one, too.
        counts = answer is not None and self.pending
        self._settled = True
        return counts

    async def _hide(self, seconds: float) -> bool:
        header = self._popper.change_header(self._handle, seconds)
        answer = await self._ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        if answer is None:
            return False
        self._handle = self._popper.changed(self._handle, answer)
        self._deadline = time.monotonic() + seconds
        return True

    async def _ask(self, code: RequestCode, header: Header) -> RemotingCommand | None:
        """Return the answer to a request; None if it is refused, or comes too late."""
        reason = "its ack_timeout is over, so it is redelivered"
        while self.pending:
            if self._buffer.closed:
                reason = CONSUMER_CLOSED
                break
            try:
                return expect_success(await self._popper.call(code, header))
            except BrokerRefusedError as error:
                reason = str(error)
                break
            except ClientError as error:
                reason = f"the broker has not answered in time: {error}"
                await asyncio.sleep(self._popper.retry_seconds())
        if not self._settled:
            log_late_ack(self.window.queue, self.record.queue_offset, reason)
        return None


def _earlier_deliveries(info: str | None, handle: PopHandle) -> int:
    """Return how often a message popped in order was delivered before.

    The text has ``kind qo<queue>%<offset> count`` for each message. Source: RocketMQ
    ``ExtraInfoUtil``.
    """
    name = f"qo{handle.queue_id}%{handle.offset}"
    for part in (info or "").split(";"):
        fields = part.split(" ")
        if fields[1:2] == [name]:
            return int(fields[2])
    return 0
