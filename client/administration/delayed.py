"""Messages that wait for their delivery: list and cancel them. halfmq brokers only."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import (
    PageResponseHeader,
    QueryDelayedRequestHeader,
    RecallMessageRequestHeader,
)
from halfmq.remoting.own_requests import DELAYED_MAX, DelayedInfo, decode_delayed
from halfmq.remoting.recall_handle import parse_recall_handle

from ..arguments import check_count, check_optional_text, check_text
from ..errors import ConfigurationError, RouteNotFoundError
from ..net.response_errors import answer_of
from ..net.session import typed
from .brokers import ClusterClient

DELAYED_LIMIT: Final = 1_000
"""Messages that are listed by default."""


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits for its delivery."""

    topic: str
    """The topic to which it will be delivered; of a retry, ``%RETRY%`` and its group."""
    message_id: str
    keys: str
    deliver_at: datetime
    stored_at: datetime
    broker_name: str
    recall_handle: str
    """:meth:`Admin.cancel_delayed` and :meth:`Producer.recall` take it."""


class DelayedCalls(ClusterClient):
    """Lists and cancels messages that wait for their delivery."""

    async def delayed(
        self, topic: str | None = None, *, limit: int = DELAYED_LIMIT
    ) -> list[DelayedMessage]:
        """Return messages that wait for their delivery, the next ones first.

        Those with a time of delivery or a delay level, retries, and delayed commits.

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
            header = QueryDelayedRequestHeader(topic=topic, after=after, max_count=DELAYED_MAX)
            answer = await self._send(address, RequestCode.QUERY_DELAYED, header)
            with answer_of(address):
                infos = decode_delayed(answer.body)
            yield [_delayed(info, name) for info in infos]
            after = typed(answer, PageResponseHeader, address).next_after


def _delayed(info: DelayedInfo, broker_name: str) -> DelayedMessage:
    return DelayedMessage(
        info.topic,
        info.message_id,
        info.keys,
        _time(info.deliver_ms),
        _time(info.store_timestamp),
        broker_name,
        info.recall_handle,
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)
