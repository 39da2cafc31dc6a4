"""Flow: pauses, positions and seeks of a running consumer."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Final, NamedTuple

from ..arguments import check_count
from ..errors import ConfigurationError
from ..message import MessageQueue
from ..net.base_client import BaseClient
from .assignment import Assignment
from .delivery import DeliveryBuffer
from .handover import Handover
from .offsets import StartFrom, initial_offset

OFFSETS: Final = range(1 << 63)
"""The range of an offset on the wire."""


class QueuePosition(NamedTuple):
    """How far a consumer is in one of its queues."""

    queue: MessageQueue
    offset: int
    """Queue offset of the first message that is not acknowledged; the next commit stores it."""
    end: int
    """Queue offset of the next message to be stored."""

    @property
    def lag(self) -> int:
        """Messages that are stored and not acknowledged, those that the filter leaves out too."""
        return max(0, self.end - self.offset)


class FlowCalls(BaseClient):
    """The part of ``Consumer`` that steers which messages it gets."""

    _share: str
    _assigned: Assignment
    _buffer: DeliveryBuffer | None
    handover: Handover | None

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that are assigned to this consumer now."""
        return sorted(self._assigned.pullers)

    async def pause(self, *where: str | MessageQueue) -> None:
        """Deliver no more messages of some topics or queues, or of all, until ``resume``.

        Messages in hand can be acknowledged. A queue stays paused if it is assigned anew. Messages
        that were retried come from ``%RETRY%group``, a topic of its own.

        Args:
            where: Topics and queues; none: all topics, that of the retries too.

        Raises:
            ConfigurationError: A topic is not subscribed to; says which.
            ClientClosedError: The consumer is not running.
        """
        buffer = self._running_buffer()
        places = self._check_places(where) or self._assigned.topics
        if self.handover is not None:
            self.handover.return_all()
        buffer.pause(places)

    async def resume(self, *where: str | MessageQueue) -> None:
        """Deliver the messages of paused topics and queues again, with none given of all.

        A queue is resumed by what paused it: its topic, or itself.

        Raises:
            ConfigurationError: A topic is not subscribed to; says which.
            ClientClosedError: The consumer is not running.
        """
        self._running_buffer().resume(self._check_places(where) or None)

    async def seek(self, where: str | MessageQueue, to: int | StartFrom) -> dict[MessageQueue, int]:
        """Continue a queue, or all assigned queues of a topic, elsewhere; return the new offsets.

        Acknowledgements of messages in hand count no more. The group's offset moves with the next
        commit, also if it moves back.

        Args:
            where: An assigned queue, or a topic.
            to: ``"first"``, ``"last"``, a datetime: the first message stored then or later; or the
                offset in one queue.

        Raises:
            ConfigurationError: An argument cannot be used, or the queue is not assigned, or members
                share messages; says why.
            ClientError: A broker does not answer, or refuses; no queue was moved.
        """
        self._running_buffer()
        self._check_share("Admin.reset_offsets")
        _check_target(where, to)
        self._check_places((where,))
        queues = [one for one in self.assignment if where in (one, one.topic)]
        if isinstance(where, MessageQueue) and not queues:
            raise ConfigurationError("where", where, "a queue of consumer.assignment")
        calls = (initial_offset(self._session, queue, to) for queue in queues)
        offsets = dict(zip(queues, await asyncio.gather(*calls), strict=True))
        for queue, offset in offsets.items():
            self._assigned.seek(queue, offset)
        return offsets

    async def positions(self) -> list[QueuePosition]:
        """Return how far this consumer is in each assigned queue, and where the queue ends now.

        Raises:
            ConfigurationError: Members share messages.
            ClientError: A broker does not answer, or refuses.
        """
        session = self._session
        self._check_share("Admin.offsets")
        if self.handover is not None:
            self.handover.collect()
        windows = self._assigned.windows
        calls = (
            initial_offset(session, window.queue, "last", of_retries=True) for window in windows
        )
        ends = await asyncio.gather(*calls)
        found = zip(windows, ends, strict=True)
        return sorted(QueuePosition(one.queue, one.commit_offset, end) for one, end in found)

    def _check_share(self, instead: str) -> None:
        if self._share != "queues":
            expected = f'"queues"; the broker alone knows the offsets of this group: {instead}'
            raise ConfigurationError("share", self._share, expected)

    def _running_buffer(self) -> DeliveryBuffer:
        assert self._session is not None  # raises if the consumer is not running
        assert self._buffer is not None
        return self._buffer

    def _check_places(
        self, where: tuple[str | MessageQueue, ...]
    ) -> tuple[str | MessageQueue, ...]:
        topics = self._assigned.topics
        for place in where:
            topic: object = place.topic if isinstance(place, MessageQueue) else place
            if topic not in topics:
                known = ", ".join(topics)
                raise ConfigurationError(
                    "where", place, f"a topic of {known}, or one of its queues"
                )
        return where


def _check_target(where: str | MessageQueue, to: object) -> None:
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise ConfigurationError("to", to, "a datetime with a time zone")
    elif isinstance(to, str):
        if to not in ("first", "last"):
            raise ConfigurationError("to", to, '"first", "last", a datetime or an offset')
    else:
        check_count("to", to, OFFSETS)
        if not isinstance(where, MessageQueue):
            raise ConfigurationError("where", where, "a queue, because an offset is of one queue")
