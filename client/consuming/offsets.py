"""Consumer offsets: where a consumer starts in a queue, and where its progress is stored.

A clustering group stores its offsets at the broker, one per queue. A broadcasting consumer stores
its own offsets in a local file, or only in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from halfmq.store.format.topics import RETRY_PREFIX

from ..errors import ConfigurationError, ConnectError
from ..message import MessageQueue
from ..net.response_errors import expect_success
from ..net.session import Session, typed

logger = logging.getLogger(__name__)

StartFrom: TypeAlias = Literal["last", "first"] | datetime
"""Where a group without a stored offset starts: at the end, at the beginning, or at a time."""


class Start(NamedTuple):
    """Where to start in a queue."""

    offset: int
    stored: int | None
    """The offset that the group has stored; None if ``offset`` follows from ``StartFrom``, or is 0:
    a broker answers 0 also for a group without an offset."""


class OffsetStore(Protocol):
    """Stores one offset per queue for a consumer."""

    async def start_offset(
        self, session: Session, queue: MessageQueue, default: StartFrom | int
    ) -> Start:
        """Return where to start: at the stored offset, or else by ``default``, or at this offset.

        Raises:
            ClientError: The broker does not answer, or refuses.
        """

    async def commit(self, session: Session, queue: MessageQueue, offset: int) -> None:
        """Store that everything below ``offset`` is consumed.

        Raises:
            ClientError: The broker does not answer, or refuses.
        """

    async def flush(self) -> None:
        """Make committed offsets durable."""


class BrokerOffsets:
    """The offsets of a clustering group, stored at the brokers."""

    def __init__(self, group: str, start_from: StartFrom) -> None:
        self._group = group
        self._by_time = isinstance(start_from, datetime)

    async def start_offset(
        self, session: Session, queue: MessageQueue, default: StartFrom | int
    ) -> Start:
        header = QueryConsumerOffsetRequestHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            # For a group without an offset, a broker answers 0 while the queue's first message is
            # young. That is right for "last" (a new topic is read whole) but not for a given time.
            set_zero_if_not_found=False if self._by_time else None,
        )
        address = broker_address(session, queue)
        answer = await session.call(address, RequestCode.QUERY_CONSUMER_OFFSET, header)
        if answer.code != ResponseCode.QUERY_NOT_FOUND:
            expect_success(answer)
            stored = typed(answer, OffsetResponseHeader, address).offset
            if stored >= 0:
                return Start(stored, stored or None)
        return Start(await initial_offset(session, queue, default), None)

    async def commit(self, session: Session, queue: MessageQueue, offset: int) -> None:
        header = UpdateConsumerOffsetRequestHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
        )
        address = broker_address(session, queue)
        expect_success(await session.call(address, RequestCode.UPDATE_CONSUMER_OFFSET, header))

    async def flush(self) -> None:
        """Do nothing: the broker makes offsets durable."""


class PopOffsets(BrokerOffsets):
    """The offsets of a group that pops: the broker moves them, members only set where it starts."""

    async def commit(self, session: Session, queue: MessageQueue, offset: int) -> None:
        if offset:  # a pop begins at 0 by itself; another member may have popped meanwhile
            await super().commit(session, queue, offset)


class LocalOffsets:
    """The offsets of one broadcasting consumer: a JSON file, or memory without one.

    The file maps ``topic@broker:queue`` to an offset and is replaced as a whole.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offsets = _load(path)
        self._dirty = False

    async def start_offset(
        self, session: Session, queue: MessageQueue, default: StartFrom | int
    ) -> Start:
        stored = self._offsets.get(str(queue))
        if stored is not None:
            return Start(stored, stored)
        return Start(await initial_offset(session, queue, default), None)

    async def commit(self, _session: Session, queue: MessageQueue, offset: int) -> None:
        self._offsets[str(queue)] = offset
        self._dirty = True

    async def flush(self) -> None:
        if self._path is not None and self._dirty:
            self._dirty = False
            text = json.dumps(self._offsets, indent=1, sort_keys=True)
            await asyncio.to_thread(_replace, self._path, text)


async def commit_end(session: Session, offsets: OffsetStore, queue: MessageQueue) -> None:
    """Commit the end of a queue, if no offset is stored: what is sent after this is consumed.

    The end is taken before the stored offset is asked for. So if several members do this, each
    message sent after the first has returned is consumed: a member that finds no stored offset has
    taken its end before any of them has returned.

    Raises:
        ClientError: The broker does not answer, or refuses.
    """
    end = await initial_offset(session, queue, "last")
    start = await offsets.start_offset(session, queue, end)
    if start.stored is None:
        await offsets.commit(session, queue, start.offset)


async def initial_offset(
    session: Session, queue: MessageQueue, start_from: StartFrom | int, *, of_retries: bool = False
) -> int:
    """Return where a group without a stored offset starts.

    It starts a retry topic at the beginning, unless ``of_retries``.

    Raises:
        ClientError: The broker does not answer, or refuses.
    """
    if isinstance(start_from, int):
        return start_from
    address = broker_address(session, queue)
    topic, queue_id = queue.topic, queue.queue_id
    is_retry = topic.startswith(RETRY_PREFIX) and not of_retries
    if is_retry or start_from == "first":
        minimum = QueueRequestHeader(topic=topic, queue_id=queue_id)
        answer = await session.call(address, RequestCode.GET_MIN_OFFSET, minimum)
        return typed(expect_success(answer), OffsetResponseHeader, address).offset
    if start_from == "last":
        maximum = GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id)
        answer = await session.call(address, RequestCode.GET_MAX_OFFSET, maximum)
        return typed(expect_success(answer), OffsetResponseHeader, address).offset
    timestamp_ms = int(start_from.timestamp() * 1000)
    search = SearchOffsetRequestHeader(topic=topic, queue_id=queue_id, timestamp=timestamp_ms)
    answer = await session.call(address, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)
    return typed(expect_success(answer), OffsetResponseHeader, address).offset


def broker_address(session: Session, queue: MessageQueue) -> str:
    """Return the address of the queue's broker.

    Raises:
        ConnectError: No route names this broker any more.
    """
    address = session.routes.address_of(queue.broker_name)
    if address is None:
        raise ConnectError(queue.broker_name, "no name server knows this broker any more")
    return address


def _load(path: Path | None) -> dict[str, int]:
    if path is None or not path.exists():
        return {}
    try:
        offsets = json.loads(path.read_text())
        return {str(queue): int(offset) for queue, offset in offsets.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError("offsets_file", str(path), "a JSON object of offsets") from error


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: a crash leaves the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
