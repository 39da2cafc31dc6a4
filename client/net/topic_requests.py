"""Requests about topics and consumer groups to one broker, as RocketMQ defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfmq.remoting.admin_bodies import decode_topic_table, encode_entry
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import Header

from ..errors import BadAnswerError, UnsupportedRequestError
from .session import Session, expect_success


class TopicRequests:
    """Reads and changes topics and groups of the broker at one address.

    Every method raises ClientError if the broker does not answer or refuses.
    """

    def __init__(self, session: Session, address: str) -> None:
        self._session = session
        self._address = address

    async def topics(self) -> dict[str, Mapping[str, Any]]:
        """Return the entries of all topics by name, with the fields of ``topics.json``."""
        body = await self._request(RequestCode.GET_ALL_TOPIC_CONFIG, None)
        try:
            return decode_topic_table(body)
        except ProtocolError as error:
            raise BadAnswerError(self._address, str(error)) from error

    async def create_topic(self, header: CreateTopicRequestHeader) -> None:
        await self._request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    async def delete_topic(self, name: str) -> None:
        await self._request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic=name))

    async def delete_route(self, name: str) -> None:
        """Have a name server at this address forget the topic."""
        header = DeleteTopicFromNamesrvRequestHeader(topic=name)
        await self._request(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)

    async def create_group(self, entry: Mapping[str, object]) -> None:
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._request(code, None, encode_entry(entry))

    async def delete_group(self, name: str, *, offsets: bool) -> None:
        header = DeleteSubscriptionGroupRequestHeader(group_name=name, clean_offset=offsets)
        await self._request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def _request(self, code: RequestCode, header: Header | None, body: bytes = b"") -> bytes:
        answer = await self._session.call(self._address, code, header, body)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedRequestError(self._address, code)
        return expect_success(answer).body
