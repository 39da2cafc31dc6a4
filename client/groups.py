"""Consumer groups with their connected members, and whether all subscribe to the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfmq.remoting.consumer_bodies import ConsumerInfo


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


class GroupCollector:
    """Collects groups from the entries of all brokers."""

    def __init__(self) -> None:
        self._models: dict[str, str] = {}
        self._members: dict[str, dict[str, dict[str, ConsumerInfo]]] = {}

    def add(self, info: ConsumerInfo) -> None:
        """Add one entry; for a member known to several brokers, a refusal takes precedence."""
        self._models[info.group] = info.message_model
        topics = self._members.setdefault(info.group, {}).setdefault(info.client_id, {})
        if info.topic not in topics or info.refused:
            topics[info.topic] = info

    def groups(self) -> list[ConsumerGroup]:
        """Return the groups sorted by name, their members by client id."""
        return [
            ConsumerGroup(
                name=name,
                message_model=self._models[name],
                members=tuple(
                    _member(client_id, members[client_id]) for client_id in sorted(members)
                ),
            )
            for name, members in sorted(self._members.items())
        ]


def _member(client_id: str, topics: Mapping[str, ConsumerInfo]) -> GroupMember:
    infos = list(topics.values())
    return GroupMember(
        client_id=client_id,
        address=infos[0].address,
        refused=any(info.refused for info in infos),
        filters={info.topic: info.filter for info in infos if info.topic},
    )
