"""Stored messages of a topic by their place in its queues.

No consumer group takes part, and nothing is consumed. All brokers of RocketMQ serve this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Final, TypeAlias

from halfmq.remoting.admin_bodies import decode_queue_places
from halfmq.remoting.admin_headers import QueryConsumeQueueRequestHeader
from halfmq.remoting.codes import INT64_MAX, RequestCode
from halfmq.remoting.headers import OffsetResponseHeader, SearchOffsetRequestHeader

from ..message import MessageQueue, ReceivedMessage
from ..net.session import typed
from .brokers import milliseconds
from .group_offsets import Position
from .messages import MessageCalls
from .topics import TopicCalls

PAGE_SIZE: Final = 16
"""Messages that are fetched at one time; of the largest size they take 64 MB."""

FOLLOW_S: Final = 0.5
"""Seconds between two looks at a topic that is followed."""

Page: TypeAlias = tuple[int, list[ReceivedMessage]]


class BrowseCalls(TopicCalls, MessageCalls):
    """Reads the messages of a topic."""

    async def browse(
        self,
        topic: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        latest: int | None = None,
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """Iterate over the stored messages of a topic, queue by queue, the oldest first.

        Ends with the last one that is stored when it begins. Under access control, the right GET on
        the topic suffices.

        Args:
            topic: The topic.
            since: Only those stored at this time, with its time zone, or later.
            until: Only those stored before this time.
            latest: Only the last messages of each queue, this many.

        Raises:
            ConfigurationError: An argument cannot be used.
            BrokerRefusedError: No broker has the topic.
        """
        begin_ms = 0 if since is None else milliseconds("since", since)
        end_ms = INT64_MAX if until is None else milliseconds("until", until)
        for stored in await self.queues(topic):
            index = stored.first if latest is None else max(stored.first, stored.end - latest)
            if since is not None and index < stored.end:
                index = max(index, await self._offset_at(stored.queue, begin_ms))
            while index < stored.end:
                count = min(PAGE_SIZE, stored.end - index)
                index, found = await self._page(stored.queue, index, count)
                for message in found:
                    if begin_ms <= message.record.store_timestamp < end_ms:
                        yield message

    async def follow(self, topic: str) -> AsyncGenerator[ReceivedMessage, None]:
        """Iterate over the messages that are stored in a topic from now on; it never ends.

        Brokers are asked twice a second, so that no consumer group is needed.

        Raises:
            BrokerRefusedError: No broker has the topic.
        """
        seen = {one.queue: one.end for one in await self.queues(topic)}
        while True:
            await asyncio.sleep(FOLLOW_S)
            for stored in await self.queues(topic):
                index = max(seen.get(stored.queue, 0), stored.first)
                while index < stored.end:
                    count = min(PAGE_SIZE, stored.end - index)
                    index, found = await self._page(stored.queue, index, count)
                    for message in found:
                        yield message
                seen[stored.queue] = index

    async def offsets_at(self, topic: str, to: Position) -> dict[MessageQueue, int]:
        """Return the queue offsets of a position in a topic, as ``reset_offsets`` would set them.

        Raises what ``queues`` raises.
        """
        ranges = await self.queues(topic)
        if to == "first":
            return {one.queue: one.first for one in ranges}
        if to == "last":
            return {one.queue: one.end for one in ranges}
        time_ms = milliseconds("to", to)
        return {one.queue: await self._offset_at(one.queue, time_ms) for one in ranges}

    async def _offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        address = self._address_of(queue.broker_name)
        header = SearchOffsetRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms
        )
        answer = await self._send(address, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
        return typed(answer, OffsetResponseHeader, address).offset

    async def _page(self, queue: MessageQueue, index: int, count: int) -> Page:
        """Return the messages from a queue offset on, and the offset after them."""
        address = self._address_of(queue.broker_name)
        header = QueryConsumeQueueRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, index=index, count=count
        )
        code = RequestCode.QUERY_CONSUME_QUEUE
        first, places = await self._ask(address, decode_queue_places, code, header)
        if not places:  # expired meanwhile
            return max(first, index + count), []
        found = await asyncio.gather(*(self._at_offset(address, one) for one in places[:count]))
        return index + len(found), [one for one in found if one is not None]
