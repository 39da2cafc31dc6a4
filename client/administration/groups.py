"""Consumer groups: with their connected members, and whether all subscribe to the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from halfmq.remoting.admin_bodies import encode_entry
from halfmq.remoting.admin_headers import DeleteSubscriptionGroupRequestHeader
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import QueryConsumersRequestHeader, QueryConsumersResponseHeader
from halfmq.remoting.own_requests import ConsumerInfo, decode_consumers

from ..arguments import check_optional_text, check_text
from ..net.response_errors import answer_of
from ..net.session import typed
from .brokers import ClusterClient

PAGE_SIZE: Final = 500
"""Members in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One connected consumer of a group."""

    client_id: str
    address: str
    """``host:port`` of its connection to a broker."""
    refused: bool
    """Whether a broker refuses it, because it subscribes differently from its group."""
    filters: Mapping[str, str]
    """Topic to filter expression, with sorted tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroup:
    """A consumer group with at least one connected consumer."""

    name: str
    message_model: str
    """``CLUSTERING`` or ``BROADCASTING``."""
    members: tuple[GroupMember, ...]

    @property
    def unequal_topics(self) -> tuple[str, ...]:
        """Topics for which members have different filters, so that messages are lost.

        Members that are refused get no messages and are left out.
        """
        filters = [member.filters for member in self.members if not member.refused]
        topics = sorted({topic for one in filters for topic in one})
        return tuple(topic for topic in topics if len({one.get(topic) for one in filters}) > 1)


def _member(client_id: str, topics: Mapping[str, ConsumerInfo]) -> GroupMember:
    infos = list(topics.values())
    return GroupMember(
        client_id=client_id,
        address=infos[0].address,
        refused=any(info.refused for info in infos),
        filters={info.topic: info.filter for info in infos if info.topic},
    )


class GroupCalls(ClusterClient):
    """Administers consumer groups."""

    async def groups(self, group: str | None = None) -> list[ConsumerGroup]:
        """Return the connected consumer groups, sorted by name; with ``group`` only that one.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
        """
        check_optional_text("group", group)
        found: list[ConsumerInfo] = []
        for broker_name, address in self._brokers():
            position: tuple[str, str] | None = ("", "")
            while position is not None:
                header = QueryConsumersRequestHeader(
                    consumer_group=group,
                    after_group=position[0],
                    after_client=position[1],
                    max_count=PAGE_SIZE,
                    broker_name=broker_name,
                )
                answer = await self._send(address, RequestCode.QUERY_CONSUMERS, header)
                with answer_of(address):
                    found += decode_consumers(answer.body)
                following = typed(answer, QueryConsumersResponseHeader, address)
                position = None
                if following.next_group is not None:
                    position = following.next_group, following.next_client or ""
        return _grouped(found)

    async def create_group(
        self,
        name: str,
        *,
        max_retries: int = 16,
        retry_queues: int = 1,
        enabled: bool = True,
        broadcasting: bool = True,
    ) -> None:
        """Create a consumer group on every broker, or replace its settings; it is on disk then.

        Args:
            name: The group.
            max_retries: Deliveries of a message that fails, until it is a dead letter.
            retry_queues: Queues of its retry topic, when that is created.
            enabled: Whether its members may consume.
            broadcasting: Whether they may all get every message.

        Raises:
            BrokerRefusedError: The name is no group name.
        """
        check_text("name", name)
        entry = {
            "consumeBroadcastEnable": broadcasting,
            "consumeEnable": enabled,
            "groupName": name,
            "retryMaxTimes": max_retries,
            "retryQueueNums": retry_queues,
        }
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._send_each(code, None, encode_entry(entry))

    async def delete_group(self, name: str, *, offsets: bool = False) -> None:
        """Delete a consumer group, with ``offsets`` also its offsets; an unknown group is no error.

        Raises what ``delete_topic`` raises.
        """
        check_text("name", name)
        header = DeleteSubscriptionGroupRequestHeader(group_name=name, clean_offset=offsets)
        await self._send_each(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)


def _grouped(infos: Iterable[ConsumerInfo]) -> list[ConsumerGroup]:
    """Return the groups sorted by name, their members by client id.

    A member may be known to several brokers: a refusal takes precedence.
    """
    models: dict[str, str] = {}
    members: dict[str, dict[str, dict[str, ConsumerInfo]]] = {}
    for info in infos:
        models[info.group] = info.message_model
        topics = members.setdefault(info.group, {}).setdefault(info.client_id, {})
        if info.topic not in topics or info.refused:
            topics[info.topic] = info
    return [
        ConsumerGroup(
            name=name,
            message_model=models[name],
            members=tuple(_member(*one) for one in sorted(of_group.items())),
        )
        for name, of_group in sorted(members.items())
    ]
