"""The members of a consumer group, and a comparison of their subscriptions.

The subscriptions must be equal. The queues of each topic are divided among all members, so a
message goes to one member only. The group loses it if that member has another filter or does not
subscribe to the topic. The broker also keeps only one filter per group and topic, the newest.
Broadcasting members share no queues, but they share that filter.

Filters are compared by topic and meaning: ``a||b`` equals ``b || a``.
"""

import hashlib
import logging
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from halfmq.remoting.bodies import SUBSCRIBE_ALL, TAG, ConsumerData, MessageModel, SubscriptionData
from halfmq.store.format.topics import RETRY_PREFIX

from ..ports import Connection

logger = logging.getLogger(__name__)

REFUSED_MAX: Final = 64
"""Latest refused members of one group that are remembered."""

TEXT_MAX: Final = 256
"""Characters of a topic or filter that are kept; the end of a longer one is replaced by a hash."""

VARIANTS_MAX: Final = 16
"""Different sets of filters kept for one group, each of at most 4096 topics."""

Filters: TypeAlias = frozenset[tuple[str, str]]
"""Topic and filter of everything that a member subscribes to, in normal form."""

MANY: Final[Filters] = frozenset({("?", f"not kept: more than {VARIANTS_MAX} different ones")})
"""Stands for the filters of members beyond ``VARIANTS_MAX``."""


class Difference(NamedTuple):
    """A topic to which two members of a group subscribe differently."""

    group: str
    topic: str
    client_id: str
    expression: str | None  # of the filter in normal form; None: it does not subscribe
    other_client_id: str
    other_expression: str | None
    refused: bool = False  # whether the first client is refused because of it

    def __str__(self) -> str:
        own = _in_words(self.client_id, self.expression)
        other = _in_words(self.other_client_id, self.other_expression)
        return (
            f"the members of group {self.group} subscribe differently to topic {self.topic}: "
            f"{own}, {other}; all members of a group must subscribe to the same"
        )


@dataclass(slots=True)
class _Variant:
    filters: Filters
    subscriptions: Collection[SubscriptionData]  # as the first of its clients sent them
    clients: dict[str, None] = field(default_factory=dict)  # the oldest first


class Variants:
    """The different sets of filters within one group, the oldest first, and their clients."""

    def __init__(self) -> None:
        self._variants: dict[Filters, _Variant] = {}
        self._by_client: dict[str, _Variant] = {}

    def __len__(self) -> int:
        return len(self._variants)

    @property
    def only(self) -> Collection[SubscriptionData] | None:
        """The subscriptions of all members; None if they differ or are unknown."""
        if len(self._variants) != 1 or MANY in self._variants:
            return None
        return next(iter(self._variants.values())).subscriptions

    def set_filters(
        self, client_id: str, filters: Filters, subscriptions: Collection[SubscriptionData]
    ) -> bool:
        """Set the filters of a member; return whether no other member has the same."""
        if filters not in self._variants and len(self._variants) >= VARIANTS_MAX:
            filters = MANY
        old = self._by_client.get(client_id)
        if old is not None and old.filters == filters:
            return False
        variant = self._variants.setdefault(filters, _Variant(filters, subscriptions))
        variant.clients[client_id] = None
        self._by_client[client_id] = variant
        if old is not None:
            self._leave(client_id, old)
        return len(variant.clients) == 1

    def remove(self, client_id: str) -> None:
        variant = self._by_client.pop(client_id, None)
        if variant is not None:
            self._leave(client_id, variant)

    def of(self, client_id: str) -> Filters:
        """Return the filters of a member; empty if it has sent none."""
        variant = self._by_client.get(client_id)
        return frozenset() if variant is None else variant.filters

    def difference(self, group: str, client_id: str, filters: Filters) -> Difference | None:
        """Return how another member differs from these filters; None if none does."""
        for variant in self._variants.values():
            others = [one for one in islice(variant.clients, 2) if one != client_id]
            if not others or variant.filters in (filters, MANY):
                continue
            own, other = dict(filters), dict(variant.filters)
            topic = min(topic for topic, _ in filters ^ variant.filters)
            return Difference(group, topic, client_id, own.get(topic), others[0], other.get(topic))
        return None

    def _leave(self, client_id: str, variant: _Variant) -> None:
        del variant.clients[client_id]
        if not variant.clients:
            del self._variants[variant.filters]


def filters_of(subscriptions: Iterable[SubscriptionData]) -> Filters:
    """Return the filters of a heartbeat in normal form, without retry topics."""
    return frozenset(
        (_short(one.topic), _short(_meaning(one)))
        for one in subscriptions
        if not one.topic.startswith(RETRY_PREFIX)  # each group has its own, whether listed or not
    )


def _meaning(subscription: SubscriptionData) -> str:
    kind = subscription.expression_type
    if kind != TAG:
        return f"{kind} {subscription.sub_string.strip()}"
    return " || ".join(sorted(subscription.tags_set)) or SUBSCRIBE_ALL


def _short(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    digest = hashlib.blake2s(text.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{text[: TEXT_MAX - len(digest) - 1]}…{digest}"


def _in_words(client_id: str, expression: str | None) -> str:
    return f"{client_id} to {'nothing' if expression is None else repr(expression)}"


@dataclass(slots=True)
class Member:
    """One client in one group."""

    client_id: str
    connection: Connection
    seen_ms: int
    fingerprint: int = 0  # of the last whole heartbeat in version 2
    replaced: tuple[Connection, ...] = ()  # earlier ones of this client that are open, newest last
    other: Connection | None = None  # from which a client with the same id has just registered
    is_reported: bool = False  # whether it is in the broker's log that two clients share the id


@dataclass(frozen=True, slots=True)
class Refused:
    """A client that must not consume for a group, because it subscribes differently."""

    connection: Connection
    filters: Filters
    difference: Difference


@dataclass(slots=True)
class GroupMembers:
    """The connected consumers of one group, and the subscriptions of the group."""

    name: str
    data: ConsumerData  # as the latest heartbeat describes the group
    members: dict[str, Member] = field(default_factory=dict)
    client_ids: list[str] = field(default_factory=list)  # of the members, sorted
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    variants: Variants = field(default_factory=Variants)
    refused: dict[str, Refused] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        """Add a member, which must not be one yet."""
        self.members[member.client_id] = member
        insort(self.client_ids, member.client_id)

    def remove(self, client_id: str) -> Member | None:
        """Remove and return a member; None if there is none of this id."""
        member = self.members.pop(client_id, None)
        if member is not None:
            del self.client_ids[bisect_left(self.client_ids, client_id)]
        return member

    def use_common_subscriptions(self) -> None:
        """Use the common subscriptions of all members, if they have become equal.

        Otherwise the newest filter would stay even if the only member with it has left.
        """
        if (wanted := self.variants.only) is None:
            return
        before, self.subscriptions = self.subscriptions, {}
        for one in wanted:
            old = before.get(one.topic, one)  # keep its version, or earlier pulls are refused
            version = max(one.sub_version, old.sub_version)
            self.subscriptions[one.topic] = replace(one, sub_version=version)
        logger.info("event=subscriptions_equal group=%s", self.name)

    def connection_of(self, client_id: str) -> Connection:
        """Return the connection of a member or of a refused client."""
        refused = self.refused.get(client_id)
        return self.members[client_id].connection if refused is None else refused.connection

    def filters_of(self, client_id: str) -> Filters:
        """Return the filters of a member or of a refused client."""
        refused = self.refused.get(client_id)
        return self.variants.of(client_id) if refused is None else refused.filters

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member gets every message, so that queues are not divided."""
        return self.data.message_model == MessageModel.BROADCASTING

    def update_subscriptions(self, subscriptions: Collection[SubscriptionData]) -> bool:
        """Apply the subscriptions of a heartbeat; return whether the set of topics changed."""
        before = self.subscriptions.keys()
        latest: dict[str, SubscriptionData] = {}
        for new in subscriptions:
            old = self.subscriptions.get(new.topic)
            latest[new.topic] = new if old is None or new.sub_version > old.sub_version else old
        changed = before != latest.keys()
        self.subscriptions = latest
        return changed

    def refuses(self, client_id: str, filters: Filters, connection: Connection) -> bool:
        """Refuse a consumer that subscribes differently; return whether it does."""
        difference = self.variants.difference(self.name, client_id, filters)
        if difference is None:
            return False
        known = self.refused.pop(client_id, None)
        if known is None or known.filters != filters:
            _log_difference(difference, "consumer_refused")
        for one in [one for one, refused in self.refused.items() if refused.connection.closed]:
            del self.refused[one]
        if len(self.refused) >= REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        self.refused[client_id] = Refused(connection, filters, difference._replace(refused=True))
        return True

    def set_filters(
        self, client_id: str, filters: Filters, subscriptions: Collection[SubscriptionData]
    ) -> None:
        """Set the filters of a member; log if the group becomes unequal or equal."""
        before = len(self.variants)
        is_new = self.variants.set_filters(client_id, filters, subscriptions)
        if is_new and len(self.variants) > 1:
            difference = self.variants.difference(self.name, client_id, filters)
            if difference is not None:
                _log_difference(difference, "unequal_subscriptions")
        elif before > 1:
            self.use_common_subscriptions()


def _log_difference(found: Difference, event: str) -> None:
    logger.warning(
        "event=%s group=%s topic=%s client=%s filter=%r other_client=%s other_filter=%r",
        event,
        found.group,
        found.topic,
        found.client_id,
        found.expression,
        found.other_client_id,
        found.other_expression,
    )
