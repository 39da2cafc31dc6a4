"""Requests to one broker, as RocketMQ defines them: settings, statistics, topics and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from halfmq.remoting.admin_bodies import (
    BrokerStatsItem,
    decode_group_table,
    decode_stats_data,
    decode_topic_table,
    encode_entry,
)
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from halfmq.remoting.codes import RequestCode, ResponseCode

from ..errors import BadAnswerError, BrokerRefusedError
from .response_errors import answer_of
from .session import RequestFamily


class BrokerSetting(NamedTuple):
    """A setting of a broker."""

    value: str
    change: str | None
    """``live`` or ``restart``: when a change takes effect; None: a broker of Apache RocketMQ."""
    source: str | None
    """``default``, ``--set`` or a file, with the line that a start has read; None likewise."""


class BrokerRequests(RequestFamily):
    """Reads and changes the settings of a broker, and reads its statistics."""

    async def settings(self) -> dict[str, BrokerSetting]:
        body = await self._request(RequestCode.GET_BROKER_CONFIG, None)
        try:
            lines = body.decode().splitlines()
        except UnicodeDecodeError as error:
            raise BadAnswerError(self._address, str(error)) from error
        pairs = dict(line.split("=", 1) for line in lines if "=" in line)
        found = {}
        for key, value in pairs.items():
            if not key.startswith("#"):
                change, _, source = pairs.get(f"#{key}", "").partition(" ")
                found[key] = BrokerSetting(value, change or None, source or None)
        return found

    async def change_setting(self, key: str, value: str) -> None:
        body = f"{key}={value}\n".encode()
        await self._request(RequestCode.UPDATE_BROKER_CONFIG, None, body)

    async def counted(self, name: str, key: str) -> dict[str, BrokerStatsItem] | None:
        """Return statistics by period, such as ``statsMinute``; None if nothing is counted.

        Brokers answer an unknown key with an error that has no code of its own.
        """
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        try:
            body = await self._request(RequestCode.VIEW_BROKER_STATS_DATA, header)
        except BrokerRefusedError as error:
            if error.code == ResponseCode.SYSTEM_ERROR and error.remark.endswith("not exist"):
                return None
            raise
        with answer_of(self._address):
            return decode_stats_data(body)


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
