"""The brokers that a consumer pops from: all of each topic, whatever other members do.

Messages that the group has retried while it pulled are in the topic ``%RETRY%group``. As with
RocketMQ's clients that is pulled, by the member to which its queue is assigned.
"""

from __future__ import annotations

from itertools import product

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.pop import PollingInfoRequestHeader
from halfmq.store.format.topics import RETRY_PREFIX

from ..consuming.assignment import Assignment, gather_all
from ..consuming.in_flight import InFlightWindow
from ..consuming.pulling import QueuePuller
from ..errors import UnsupportedRequestError
from ..message import MessageQueue
from ..net.session import Session
from .popper import ANY_QUEUE, PopDelivery, Popper, PopSettings


class PopAssignment(Assignment):
    """A popper for each topic and broker; see the module's docstring."""

    settings: PopSettings
    _started: frozenset[MessageQueue] = frozenset()  # the group has an offset in these queues

    @property
    def windows(self) -> list[InFlightWindow]:
        """The windows of the queues that are pulled."""
        return [one for one in super().windows if one.queue.queue_id != ANY_QUEUE]

    async def stop_pulling(self) -> None:
        """Pop no more messages, and give those back that nobody has received."""
        if self._buffer is not None and self._handover is not None:
            async with self.settings.turn:  # not in the middle of a pop
                await super().stop_pulling()
            self._handover.return_all()
            for delivery in self._buffer.take_all():
                if isinstance(delivery, PopDelivery):
                    await delivery.give_back()

    async def close(self, session: Session | None) -> None:
        await self.stop_pulling()
        await super().close(session)

    async def check_brokers(self, session: Session) -> None:
        """Raise UnsupportedRequestError if a broker has no pop."""
        for topic, address in product(self.topics[:1], sorted(session.routes.addresses)):
            header = PollingInfoRequestHeader(
                consumer_group=self._group, topic=topic, queue_id=ANY_QUEUE
            )
            answer = await session.call(address, RequestCode.POLLING_INFO, header)
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise UnsupportedRequestError(address, RequestCode.POLLING_INFO)

    async def _assigned_queues(self, session: Session, topic: str) -> list[MessageQueue] | None:
        if topic.startswith(RETRY_PREFIX):
            return await super()._assigned_queues(session, topic)
        route = await session.routes.existing(topic)
        if route is None:
            return None
        new = [queue for queue in route.consume_queues if queue not in self._started]
        await gather_all(self._set_start(session, queue) for queue in new)
        self._started = self._started.union(new)
        brokers = {queue.broker_name for queue in route.consume_queues}
        return sorted(MessageQueue(topic, name, ANY_QUEUE) for name in brokers)

    async def _set_start(self, session: Session, queue: MessageQueue) -> None:
        """Commit where the group starts in a queue, unless it has an offset."""
        default = self._default_start(queue.topic)
        if default == "first":  # as a pop does by itself
            return
        start = await self._offsets.start_offset(session, queue, default)
        if start.stored is None:
            await self._offsets.commit(session, queue, start.offset)

    async def _assign(self, session: Session, queue: MessageQueue) -> None:
        if queue.queue_id != ANY_QUEUE:
            await super()._assign(session, queue)
            return
        self._begin(session, InFlightWindow(queue, 0, None), self._new_popper)

    def _new_popper(self, *parts: object) -> QueuePuller:
        popper = Popper(*parts)  # type: ignore[arg-type]
        popper.settings = self.settings
        return popper
