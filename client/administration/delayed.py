"""Messages that wait for their time of delivery: list and cancel them. halfmq brokers only."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import (
    PageResponseHeader,
    QueryTimersRequestHeader,
    RecallMessageRequestHeader,
)
from halfmq.remoting.recall_handle import RecallHandle, parse_recall_handle
from halfmq.store.format.record import Record
from halfmq.store.format.timers import timer_due_ms

from ..arguments import check_count, check_optional_text, check_text
from ..errors import ConfigurationError, RouteNotFoundError
from ..net.response_errors import answer_of, records_of
from ..net.session import typed
from .brokers import ClusterClient

DELAYED_LIMIT: Final = 1_000
"""Messages that are listed by default."""

_PAGE: Final = 1_000  # as many as a broker looks at for one answer


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits for its time of delivery."""

    topic: str
    """The topic to which it will be delivered."""
    message_id: str
    keys: str
    deliver_at: datetime
    stored_at: datetime
    broker_name: str
    recall_handle: str
    """:meth:`Admin.cancel_delayed` and :meth:`Producer.recall` take it."""


class DelayedCalls(ClusterClient):
    """Lists and cancels messages that were sent with ``deliver_after`` or ``deliver_at``."""

    async def delayed(
        self, topic: str | None = None, *, limit: int = DELAYED_LIMIT
    ) -> list[DelayedMessage]:
        """Return messages that wait for their time of delivery, the next ones first.

        Messages with a delay level, and those of transactions, are not among them.

        Args:
            topic: Only those of this topic.
            limit: The most to return.
        """
        check_optional_text("topic", topic)
        check_count("limit", limit, range(1, 1_000_001))
        found: list[DelayedMessage] = []
        for name, address in self._brokers():
            async for page in self._pages(name, address, topic):
                found = heapq.nsmallest(limit, [*found, *page], key=lambda one: one.deliver_at)
        return found

    async def cancel_delayed(self, recall_handle: str) -> None:
        """Keep a message from being delivered; afterwards nobody gets it.

        Raises:
            BrokerRefusedError: ILLEGAL_OPERATION (604): it does not wait any more.
        """
        check_text("recall_handle", recall_handle)
        try:
            named = parse_recall_handle(recall_handle)
        except ValueError as error:
            reason = "the recall_handle of a delayed message"
            raise ConfigurationError("recall_handle", recall_handle, reason) from error
        header = RecallMessageRequestHeader(topic=named.topic, recall_handle=recall_handle)
        for name, address in self._brokers():
            if name == named.broker_name:
                await self._send(address, RequestCode.RECALL_MESSAGE, header)
                return
        raise RouteNotFoundError(named.topic)

    async def _pages(
        self, name: str, address: str, topic: str | None
    ) -> AsyncIterator[list[DelayedMessage]]:
        after: int | None = -1
        while after is not None:
            header = QueryTimersRequestHeader(topic=topic, after=after, max_count=_PAGE)
            answer = await self._send(address, RequestCode.QUERY_TIMERS, header)
            with answer_of(address):
                records = list(records_of(answer.body))
            yield [_delayed(record, name) for record in records]
            after = typed(answer, PageResponseHeader, address).next_after


def _delayed(record: Record, broker_name: str) -> DelayedMessage:
    properties = record.property_map
    topic, key = properties.get("REAL_TOPIC", ""), properties.get("UNIQ_KEY", "")
    due_ms = timer_due_ms(record.properties, record.store_timestamp) or 0
    handle = RecallHandle(topic, broker_name, due_ms, key, record.queue_offset)
    return DelayedMessage(
        topic,
        key,
        properties.get("KEYS", ""),
        _time(due_ms),
        _time(record.store_timestamp),
        broker_name,
        handle.encode(),
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)
