"""Requests about topics and consumer groups to one broker, as RocketMQ defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfmq.remoting.admin_bodies import decode_group_table, decode_topic_table, encode_entry
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.codes import RequestCode

from .response_errors import answer_of
from .session import RequestFamily


class TopicRequests(RequestFamily):
    """Reads and changes the topics and groups of a broker."""

    async def topics(self) -> dict[str, Mapping[str, Any]]:
        """Return the entries of all topics by name, with the fields of ``topics.json``."""
        body = await self._request(RequestCode.GET_ALL_TOPIC_CONFIG, None)
        with answer_of(self._address):
            return decode_topic_table(body)

    async def groups(self) -> set[str]:
        """Return the names of all consumer groups."""
        body = await self._request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, None)
        with answer_of(self._address):
            return set(decode_group_table(body))

    async def create_topic(self, header: CreateTopicRequestHeader) -> None:
        await self._request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    async def delete_topic(self, name: str) -> None:
        await self._request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic=name))

    async def delete_route(self, name: str) -> None:
        """Delete the route of a topic, if a name server is at the address."""
        header = DeleteTopicFromNamesrvRequestHeader(topic=name)
        await self._request(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)

    async def create_group(self, entry: Mapping[str, object]) -> None:
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._request(code, None, encode_entry(entry))

    async def delete_group(self, name: str, *, offsets: bool) -> None:
        header = DeleteSubscriptionGroupRequestHeader(group_name=name, clean_offset=offsets)
        await self._request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
