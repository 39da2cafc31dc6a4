"""Stored messages, by their ids and keys."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from halfmq.remoting.codes import INT64_MAX, RequestCode, ResponseCode
from halfmq.remoting.headers import QueryMessageRequestHeader, ViewMessageRequestHeader
from halfmq.store.format.ids import parse_offset_message_id

from ..arguments import check_count, check_optional_text, check_text
from ..errors import BrokerRefusedError
from ..message import ReceivedMessage
from ..net.response_errors import answer_of, expect_success, records_of
from .brokers import ClusterClient, call_broker, milliseconds

MESSAGES_MAX: Final = 64
"""Messages of one answer; brokers give no more."""


class MessageCalls(ClusterClient):
    """Finds stored messages."""

    async def message(self, message_id: str, topic: str | None = None) -> ReceivedMessage | None:
        """Return a stored message by its id; None if no broker has it (any more).

        Args:
            message_id: Its ``offset_message_id``, or with ``topic`` also its ``message_id``.
            topic: The topic to which it was sent.
        """
        check_text("message_id", message_id)
        check_optional_text("topic", topic)
        address = self._address_in(message_id)
        if address is not None:
            offset = parse_offset_message_id(message_id).physical_offset
            found = await self._at_offset(address, offset)
            if found is not None:
                return found
        if topic is None:
            return None
        sent = await self._query(topic, message_id, 1, 0, INT64_MAX, is_unique_key=True)
        return sent[0] if sent else None

    async def messages_with_key(
        self,
        topic: str,
        key: str,
        *,
        limit: int = MESSAGES_MAX,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[ReceivedMessage]:
        """Return stored messages of a topic that have a key, in the order of their storage.

        Args:
            topic: The topic to which they were sent.
            key: One of their keys.
            limit: The most that each broker returns, the newest of them.
            since: Only messages stored at this time, with its time zone, or later.
            until: Only messages stored at this time, with its time zone, or before.

        Raises:
            ConfigurationError: A time has no time zone, or the limit is too large.
        """
        check_text("topic", topic)
        check_text("key", key)
        check_count("limit", limit, range(1, MESSAGES_MAX + 1))
        begin_ms = 0 if since is None else milliseconds("since", since)
        end_ms = INT64_MAX if until is None else milliseconds("until", until)
        found = await self._query(topic, key, limit, begin_ms, end_ms, is_unique_key=False)
        return sorted(found, key=lambda one: one.store_timestamp)

    async def _at_offset(self, address: str, offset: int) -> ReceivedMessage | None:
        header = ViewMessageRequestHeader(offset=offset)
        code = RequestCode.VIEW_MESSAGE_BY_ID
        try:
            answer = await self._send(address, code, header)
        except BrokerRefusedError as error:
            if error.code == ResponseCode.SYSTEM_ERROR:  # there is no record at the offset
                return None
            raise
        with answer_of(address):
            record = next(records_of(answer.body), None)
        return None if record is None else ReceivedMessage(record, self._name_of(address))

    async def _query(
        self, topic: str, key: str, limit: int, begin_ms: int, end_ms: int, *, is_unique_key: bool
    ) -> list[ReceivedMessage]:
        header = QueryMessageRequestHeader(
            topic=topic,
            key=key,
            max_num=limit,
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            unique_key_query=is_unique_key,
        )
        found: list[ReceivedMessage] = []
        for name, address in self._brokers():
            answer = await call_broker(self._session, address, RequestCode.QUERY_MESSAGE, header)
            if answer.code != ResponseCode.QUERY_NOT_FOUND:
                with answer_of(address):
                    records = list(records_of(expect_success(answer).body))
                found += [ReceivedMessage(record, name) for record in records]
        # The index has hashes: another key may have the same.
        return [
            one
            for one in found
            if (one.message_id == key if is_unique_key else key in one.keys.split())
        ]

    def _name_of(self, address: str) -> str:
        return next((name for name, at in self._brokers() if at == address), "")
