"""Assignment: the queues of one member of a group, from their assignment to their revocation.

Queues are assigned again when the group's members change, and every ``rebalance_interval``. Each
assigned queue has a puller. Its offset is committed every ``offset_commit_interval``, and when the
queue is revoked. A topic that does not exist yet is looked for again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias, TypeVar

from halfmq.remoting.bodies import SubscriptionData, decode_consumer_list
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import ConsumerGroupRequestHeader
from halfmq.store.format.topics import RETRY_PREFIX

from ..config import ClientConfig
from ..errors import AccessDeniedError, ClientError
from ..events import Assigned, ConsumerEvent, Lagging, Revoked, TopicMissing
from ..message import MessageQueue
from ..net.response_errors import answer_of, expect_success
from ..net.routes import nearest_topics
from ..net.session import Session
from .delivery import DeliveryBuffer
from .handover import Handover
from .in_flight import InFlightWindow
from .locks import LOCK_RENEWAL, HeldLocks
from .offsets import OffsetStore, StartFrom, broker_address, commit_end
from .pulling import QueuePuller
from .refusals import Refusals

logger = logging.getLogger(__name__)

Q = TypeVar("Q")

REBALANCE_RETRY: Final = 1.0
"""Seconds until the next attempt after a rebalance has failed."""
HAND_OVER_SECONDS: Final = 10.0
"""How long an ordered message in hand may delay that its queue moves to another member."""
MISSING_TOPIC_INTERVAL: Final = 0.5
"""Seconds between two look-ups of a missing topic, so that its first message is not late."""
MISSING_TOPIC_RATE: Final = 20
"""Maximum look-ups of missing topics per second; more than ten such topics wait longer."""


NewPuller: TypeAlias = Callable[
    [
        Session,
        str,
        SubscriptionData,
        InFlightWindow,
        DeliveryBuffer,
        Refusals,
        Callable[[], None],
    ],
    QueuePuller,
]
"""Makes the puller of a queue."""


class Assignment:
    """The assigned queues of one consumer; see the module's docstring."""

    def __init__(
        self,
        group: str,
        config: ClientConfig,
        subscriptions: Mapping[str, SubscriptionData],
        start_from: StartFrom,
        offsets: OffsetStore,
        refusals: Refusals,
        emit: Callable[[ConsumerEvent], None],
        *,
        broadcasting: bool,
        ordered: bool,
    ) -> None:
        self._group = group
        self._config = config
        self._subscriptions = subscriptions
        self._start_from = start_from
        self._offsets = offsets
        self._refusals = refusals
        self._emit = emit
        self._broadcasting = broadcasting
        self._locks = HeldLocks(group, self._lose) if ordered and not broadcasting else None
        self.pullers: dict[MessageQueue, tuple[QueuePuller, asyncio.Task[None]]] = {}
        self.rebalance_wanted = asyncio.Event()
        self.missing_topics: set[str] = set()
        """Subscribed topics without a route."""
        self._buffer: DeliveryBuffer | None = None
        self._handover: Handover | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._known_topics: set[str] = set()  # had a route, or were reported missing
        self._created_topics: set[str] = set()  # did not exist at the first look-up
        self._started_at = datetime.now(UTC)
        self._gone_topics: set[str] = set()  # were deleted, says a broker
        self._lagging: set[MessageQueue] = set()

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics that are consumed, that of the retries too."""
        return tuple(self._subscriptions)

    @property
    def windows(self) -> list[InFlightWindow]:
        """The windows of the assigned queues, with all that threads have acknowledged."""
        if self._handover is not None:
            self._handover.collect()
        return [puller.window for puller, _ in self.pullers.values()]

    def start(self, session: Session, buffer: DeliveryBuffer, handover: Handover) -> None:
        """Begin to pull the assigned queues into the buffer."""
        self._buffer, self._handover = buffer, handover
        self._tasks = [
            asyncio.create_task(self._rebalance_forever(session), name=f"rebalance {self._group}"),
            asyncio.create_task(self._commit_forever(session), name=f"commit {self._group}"),
        ]

    async def stop_pulling(self) -> None:
        """Pull no more messages; the queues stay assigned."""
        self._stopping = True
        await cancel([task for _, task in self.pullers.values()])

    async def close(self, session: Session | None) -> None:
        """Revoke all queues, and commit their offsets."""
        await cancel(self._tasks)
        if session is not None:
            await self.revoke(session, list(self.pullers))
            await self._offsets.flush()

    def abort(self) -> None:
        """Cancel what still runs."""
        if self._locks is not None:
            self._locks.close()
        for task in (*self._tasks, *(task for _, task in self.pullers.values())):
            task.cancel()

    async def commit_ends(self, session: Session) -> None:
        """Make sure that the group consumes what is sent from now on, to queues of any member."""
        self._started_at = datetime.now(UTC)
        routes = (session.routes.cached(topic) for topic in self._subscriptions)
        queues = [queue for route in routes if route is not None for queue in route.consume_queues]
        commits = (commit_end(session, self._offsets, queue) for queue in queues)
        for error in await asyncio.gather(*commits, return_exceptions=True):
            if not isinstance(error, ClientError | None):
                raise error
            if error is not None:  # the rebalance meets the same error, and reports it
                logger.debug("event=end_not_committed group=%s reason=%r", self._group, str(error))

    # -- rebalancing

    async def _rebalance_forever(self, session: Session) -> None:
        while True:
            self.rebalance_wanted.clear()
            settled = True
            for topic in self._subscriptions:
                settled = await self._rebalance(session, topic) and settled
            for topic in sorted(self.missing_topics - self._known_topics):
                await self._report_missing(session, topic)
            interval = self._config.rebalance_interval
            if self._locks is not None:
                interval = min(interval, LOCK_RENEWAL)
            await self._wait(session, interval if settled else REBALANCE_RETRY)

    async def _wait(self, session: Session, seconds: float) -> None:
        """Wait until the next rebalance is due; look up missing topics meanwhile."""
        clock = asyncio.get_running_loop().time
        due = clock() + seconds
        while (left := due - clock()) > 0:
            if self.missing_topics:
                left = min(left, missing_topic_interval(len(self.missing_topics)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.rebalance_wanted.wait()
                    return
            for topic in list(self.missing_topics):
                if not await self._rebalance(session, topic):
                    due = min(due, clock() + REBALANCE_RETRY)

    async def _rebalance(self, session: Session, topic: str) -> bool:
        """Update the queues of a topic, if it exists; return False if it must be retried soon."""
        if topic in self._gone_topics:
            await self._forget_queues(session, topic)
        held = {queue for queue in self.pullers if queue.topic == topic}
        try:
            assigned = await self._assigned_queues(session, topic)
            if assigned is None:  # a topic with assigned queues is unknown if its broker is down
                if not held and not topic.startswith(RETRY_PREFIX):
                    self.missing_topics.add(topic)
                self._refusals.record_access(topic, None)
                return True
            self.missing_topics.discard(topic)
            self._known_topics.add(topic)
            await self.revoke(session, sorted(held.difference(assigned)))
            mine = set(assigned)
            if self._locks is not None:
                mine = await self._locks.lock(session, assigned)
                await self.revoke(session, sorted(held.intersection(assigned) - mine))
            await gather_all(self._assign(session, one) for one in sorted(mine - held))
        except ClientError as error:
            self._refusals.log_failure("rebalance_failed", "", topic, error)
            self._refusals.record_access(
                topic, error if isinstance(error, AccessDeniedError) else None
            )
            return False
        self._refusals.record_access(topic, None)
        if new := tuple(sorted(mine - held)):
            self._emit(Assigned(self._group, topic, new))
        return mine == set(assigned)  # otherwise another member has still to unlock a queue

    async def _forget_queues(self, session: Session, topic: str) -> None:
        """Give up the queues of a deleted topic: their offsets mean nothing in a new one."""
        self._gone_topics.discard(topic)
        session.routes.forget(topic)
        self._known_topics.discard(topic)
        self._created_topics.add(topic)
        queues = [queue for queue in self.pullers if queue.topic == topic]
        self._lose(*queues)
        if self._broadcasting:
            for queue in queues:
                await self._offsets.commit(session, queue, 0)

    def _topic_gone(self, topic: str) -> None:
        self._gone_topics.add(topic)
        self.rebalance_wanted.set()

    async def _report_missing(self, session: Session, topic: str) -> None:
        names = await session.routes.topic_names()
        if topic in names:  # it was created meanwhile
            return
        if names:  # otherwise the name server has just started, and the topic may be an old one
            self._created_topics.add(topic)
        nearest = await asyncio.to_thread(nearest_topics, topic, names)
        self._known_topics.add(topic)
        self._emit(TopicMissing(self._group, topic, nearest))

    async def _assigned_queues(self, session: Session, topic: str) -> list[MessageQueue] | None:
        """Return the queues of a topic that are assigned to this consumer; None without a topic."""
        route = await session.routes.existing(topic)
        if route is None:
            return None
        if self._broadcasting or not route.consume_queues:
            return list(route.consume_queues)
        address = broker_address(session, route.consume_queues[0])
        header = ConsumerGroupRequestHeader(consumer_group=self._group)
        answer = await session.call(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        with answer_of(address):
            members = decode_consumer_list(expect_success(answer).body)
        return allocate_averagely(route.consume_queues, members, session.client_id)

    async def _assign(self, session: Session, queue: MessageQueue) -> None:
        """Start to pull a queue from the group's offset."""
        default = self._default_start(queue.topic)
        start = await self._offsets.start_offset(session, queue, default)
        self._begin(session, InFlightWindow(queue, start.offset, start.stored), QueuePuller)

    def _default_start(self, topic: str) -> StartFrom:
        """Return where to start in a queue that has no offset."""
        if self._start_from != "last":
            return self._start_from
        # The queue is new, or its broker did not answer at the start.
        return "first" if topic in self._created_topics else self._started_at

    def _begin(self, session: Session, window: InFlightWindow, new_puller: NewPuller) -> None:
        if self._stopping:
            return
        queue = window.queue
        assert self._buffer is not None
        subscription = self._subscriptions[queue.topic]
        puller = new_puller(
            session,
            self._group,
            subscription,
            window,
            self._buffer,
            self._refusals,
            partial(self._topic_gone, queue.topic),
        )
        self.pullers[queue] = puller, self._pull(puller)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue a queue at another offset, if it is assigned."""
        if queue not in self.pullers:
            return
        puller, task = self.pullers[queue]
        logger.info(
            "event=offset_reset queue=%s from=%d to=%d", queue, puller.window.next_offset, offset
        )
        task.cancel()
        puller.seek(offset)
        if not self._stopping:
            self.pullers[queue] = puller, self._pull(puller)

    def _pull(self, puller: QueuePuller) -> asyncio.Task[None]:
        return asyncio.create_task(puller.run(), name=f"pull {puller.window.queue}")

    async def revoke(self, session: Session, queues: list[MessageQueue]) -> None:
        """Stop pulling queues and commit their offsets; ordered ones when nothing is in hand."""
        queues = [queue for queue in queues if queue in self.pullers]
        lost = [self.pullers.pop(queue) for queue in queues]
        await cancel([task for _, task in lost])
        if self._locks is not None and self._buffer is not None:
            seconds = 0.0 if self._buffer.closed else HAND_OVER_SECONDS
            settling = [self._buffer.settle(puller.window, seconds) for puller, _ in lost]
            await asyncio.gather(*settling)
        self._report_revoked(queues)
        for queue in queues:
            self._refusals.record_access(queue, None)
        errors = await asyncio.gather(
            *(self._release(session, puller.window) for puller, _ in lost)
        )
        if self._locks is not None:
            await self._locks.unlock(session, queues)
        for queue, error in zip(queues, errors, strict=True):
            if error is not None:
                self._refusals.log_failure("offset_not_written", queue.broker_name, queue, error)

    def _lose(self, *queues: MessageQueue) -> None:
        """Give up queues at once: without their locks, or those of a deleted topic."""
        held = [queue for queue in queues if queue in self.pullers]
        for queue in held:
            puller, task = self.pullers.pop(queue)
            task.cancel()
            assert self._buffer is not None
            self._buffer.drop(puller.window)
            self._refusals.record_access(queue, None)
        self._report_revoked(held)
        self.rebalance_wanted.set()

    def _report_revoked(self, queues: list[MessageQueue]) -> None:
        for topic, of_topic in itertools.groupby(sorted(queues), lambda queue: queue.topic):
            self._emit(Revoked(self._group, topic, tuple(of_topic)))

    async def _release(self, session: Session, window: InFlightWindow) -> ClientError | None:
        if self._handover is not None:  # what threads have acknowledged so far counts
            self._handover.collect()
        if self._buffer is not None:  # first, or what is acknowledged meanwhile would not count
            self._buffer.drop(window)
        try:
            await self._commit_window(session, window)
        except ClientError as error:
            return error
        return None

    # -- offsets

    async def _commit_forever(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self._config.offset_commit_interval)
            try:
                await self.commit(session)
            except (ClientError, OSError) as error:  # OSError: the file of a broadcasting consumer
                self._refusals.log_failure("offsets_not_written", "", "all queues", error)
            self._report_lag()

    def _report_lag(self) -> None:
        most = self._config.lagging_from
        for window in self.windows:
            if window.lag >= most and window.queue not in self._lagging:
                self._lagging.add(window.queue)
                self._emit(Lagging(self._group, window.queue, window.lag))
            elif window.lag < most / 2:
                self._lagging.discard(window.queue)

    async def _commit_window(self, session: Session, window: InFlightWindow) -> None:
        if self._handover is not None:
            self._handover.collect()
        offset = window.commit_offset
        if offset != window.committed:
            await self._offsets.commit(session, window.queue, offset)
            window.committed = offset

    async def commit(self, session: Session) -> None:
        """Commit the offsets of acknowledged messages.

        Raises:
            ClientError: A broker did not accept an offset; the others were committed.
        """
        try:
            await gather_all(self._commit_window(session, window) for window in self.windows)
        finally:
            await self._offsets.flush()


def allocate_averagely(queues: Sequence[Q], clients: Iterable[str], own_id: str) -> list[Q]:
    """Return the range of ``queues`` (sorted by the caller) that is assigned to ``own_id``.

    There is no coordinator: each member computes its own part, and all of them compute the same.
    The formula is therefore part of the protocol: a member that rounds differently would leave
    queues unread or read them twice. Source: RocketMQ ``AllocateMessageQueueAveragely``.

    The first ``len(queues) % len(clients)`` clients get one queue more than the others. An id
    that is not among ``clients`` gets nothing: the broker does not know this member yet.
    """
    members = sorted(set(clients))
    if own_id not in members:
        return []
    index = members.index(own_id)
    size, larger = divmod(len(queues), len(members))
    start = index * size + min(index, larger)
    return list(queues[start : start + size + (index < larger)])


def missing_topic_interval(missing: int) -> float:
    """Return the seconds between two look-ups of that many missing topics."""
    return max(MISSING_TOPIC_INTERVAL, missing / MISSING_TOPIC_RATE)


async def gather_all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Await all coroutines, and only then raise the first error, so that none keeps running."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    running = [task for task in tasks if task.cancel()]  # others may be of a loop that is closed
    if running:
        await asyncio.wait(running)
