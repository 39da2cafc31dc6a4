"""Compare the subscriptions of the members of a consumer group.

They must be equal. The queues of each topic are divided among all members, so a message goes to one
member only. The group loses it if that member has another filter or does not subscribe to the
topic. The broker also keeps only one filter per group and topic, the newest. Broadcasting members
share no queues, but they share that filter.

Filters are compared by topic and meaning: ``a||b`` equals ``b || a``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from halfmq.remoting.bodies import SUBSCRIBE_ALL, TAG, SubscriptionData
from halfmq.store.format.topics import RETRY_PREFIX

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
        """Remove a member."""
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
