"""The connected producers and consumers, and the subscriptions of consumers.

Clients register with every heartbeat under their client id; a client that reconnects replaces its
old registration. A registration ends with its connection, with UNREGISTER_CLIENT, or after
`EXPIRY_MS` without a heartbeat.

Subscriptions belong to the group: of two for one topic the newer version is used, and topics that
the latest heartbeat omits are dropped. Members that subscribe differently lose messages
(`group_members`). This is logged once per change and reported in the answer to each heartbeat; or,
if a setting says so, the later member is refused. Members of a group share its queues, so all of
them must be notified when the members or topics change: the methods here return the groups to
notify.

Two clients with one id take turns as one registration: each gets all queues, or the other's
replies. It shows when a registration returns to an open connection that it has left; a client that
has reconnected never does that. With access control the id of an open connection's client belongs
to the principal that registered it.

Source: RocketMQ `ConsumerManager`, `ConsumerGroupInfo`, `ProducerManager`.
"""

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Final

from attrs import define

from halfmq.remoting.bodies import ConsumerData, HeartbeatData, SubscriptionData
from halfmq.remoting.codes import ResponseCode

from ..errors import RequestRefusedError, invalid_parameter
from ..limits.kept import MEMBERS, Kept
from ..ports import Connection
from .group_members import Difference, GroupMembers, Member, filters_of

logger = logging.getLogger(__name__)

EXPIRY_MS: Final = 120_000
"""Milliseconds without a heartbeat after which a client is removed; clients send one every 30 s.
Source: `ConsumerManager.CHANNEL_EXPIRED_TIMEOUT`."""

SCAN_S: Final = 10.0
"""Seconds between two scans for such clients. Source: `ClientHousekeepingService`."""

JUMP_MS: Final = 90_000
"""Delay of a scan, in ms, that indicates a step of the clock or a suspended process. Heartbeats
sent meanwhile have not been read yet."""

LEFT_GROUPS_MAX: Final = 1_024
"""Producer groups that an open connection has left and that are remembered. With more of them, the
connection counts as having left every group."""

SUBSCRIPTIONS_MAX: Final = 4_096
"""Topics that one group may subscribe to; far more than a consumer can poll."""

CLIENT_IDS_MAX: Final = 16
"""Client ids of one connection that are kept for its principal, the latest; clients have one."""

REPLACED_MAX: Final = 8
"""Open connections of one client's earlier registrations that are remembered, the latest."""

ProducerHook = Callable[[str, Connection], None]
"""`(group, connection)`: a producer of the group has connected or reconnected."""


@define(eq=False, repr=False, slots=False)
class ClientRegistry:
    """All connected clients by group and client id."""

    _now_ms: Callable[[], int]
    _registrations_max: int = MEMBERS.most
    refuse_unequal: bool = False

    def __attrs_post_init__(self) -> None:
        """Whether a consumer is refused that subscribes differently from its group."""
        self._consumers: dict[str, GroupMembers] = {}
        self._group_names: list[str] = []  # of `_consumers`, sorted
        self._producers: dict[str, dict[str, Member]] = {}
        self._groups_of_producer: dict[str, set[str]] = {}  # by client id
        self._by_connection: dict[Connection, set[tuple[bool, str, str]]] = {}
        self._left: dict[object, set[str]] = {}  # by connection, the groups it no longer produces
        self._principals: dict[str, dict[Connection, str]] = {}  # by client id; with access control
        self._ids: dict[Connection, dict[str, None]] = {}  # the client ids there, the oldest first
        self._producer_hooks: list[ProducerHook] = []
        self._count = 0
        self._scanned_ms = 0  # time of the last scan for silent clients

    def on_producer(self, hook: ProducerHook) -> None:
        """Call `hook` whenever a producer registers that was not registered on its connection."""
        self._producer_hooks.append(hook)

    def heartbeat(
        self, data: HeartbeatData, connection: Connection, principal: str | None = None
    ) -> list[str]:
        """Register the clients of a heartbeat; return the consumer groups that changed.

        Args:
            data: The heartbeat.
            connection: On which it came.
            principal: Who has signed it; None without access control.

        Raises:
            RequestRefusedError: There are too many registrations.
        """
        if not data.client_id:  # it would not identify the client
            return []
        if principal is not None:
            self._claim(data.client_id, connection, principal)
        for producer in data.producer_data_set:
            if producer.group_name:
                self._add_producer(producer.group_name, data.client_id, connection)
        return [
            consumer.group_name
            for consumer in data.consumer_data_set
            if self._add_consumer(consumer, data, connection)
        ]

    def belongs_to_other(self, client_id: str, principal: str, connection: Connection) -> bool:
        """Return whether another principal has registered a client id on another open connection.

        A client keeps its id if it changes its key on the same connection.
        """
        claims = self._principals.get(client_id, {})
        return any(
            one is not connection and not one.closed and of != principal
            for one, of in claims.items()
        )

    def _claim(self, client_id: str, connection: Connection, principal: str) -> None:
        self._principals.setdefault(client_id, {})[connection] = principal
        ids = self._ids.setdefault(connection, {})
        ids[client_id] = None
        if len(ids) > CLIENT_IDS_MAX:
            self._unclaim(next(iter(ids)), connection)

    def _unclaim(self, client_id: str, connection: Connection) -> None:
        del self._ids[connection][client_id]
        claims = self._principals[client_id]
        del claims[connection]
        if not claims:
            del self._principals[client_id]

    def shared_id(self, data: HeartbeatData) -> str | None:
        """Return the warning that two clients share the id of a heartbeat; None if they do not."""
        for member in self._members(data):
            other = member.other
            if other is not None and not other.closed:
                return (
                    f"two clients have the client id {data.client_id}, on connections from "
                    f"{member.connection.name} and {other.name}: both get the same queues and each "
                    "other's replies, give each an id of its own (instanceName, client_id)"
                )
        return None

    def _members(self, data: HeartbeatData) -> Iterator[Member]:
        """Yield the registrations of a heartbeat's client in the groups that it names."""
        for producer in data.producer_data_set:
            member = self._producers.get(producer.group_name, {}).get(data.client_id)
            if member is not None:
                yield member
        for consumer in data.consumer_data_set:
            group = self._consumers.get(consumer.group_name)
            member = None if group is None else group.members.get(data.client_id)
            if member is not None:
                yield member

    def knows_fingerprint(self, data: HeartbeatData) -> bool:
        """Return whether a version 2 heartbeat without subscriptions refers to known ones.

        After a restart or a reconnect it does not: the client must send all of them again.
        """
        return all(
            (group := self._consumers.get(consumer.group_name)) is not None
            and (member := group.members.get(data.client_id)) is not None
            and member.fingerprint == data.heartbeat_fingerprint
            for consumer in data.consumer_data_set
        )

    def unregister(
        self, client_id: str, producer_group: str | None, consumer_group: str | None
    ) -> list[str]:
        """End a client's registration; return the consumer group if it changed."""
        if producer_group:
            self._remove_producer(producer_group, client_id)
        group = self._consumers.get(consumer_group or "")
        if group is None:
            return []
        group.refused.pop(client_id, None)
        return [group.name] if self._lose_consumer(group.name, client_id) else []

    def forget(self, connection: Connection) -> Iterator[str | None]:
        """End the registrations of a lost connection, one by one.

        Yields after each one: its consumer group if that has changed, else None.
        """
        self._left.pop(connection, None)
        for client_id in list(self._ids.get(connection, ())):
            self._unclaim(client_id, connection)
        self._ids.pop(connection, None)
        while registrations := self._by_connection.get(connection):
            is_consumer, group, client_id = next(iter(registrations))
            if not is_consumer:
                self._remove_producer(group, client_id)
            yield group if is_consumer and self._lose_consumer(group, client_id) else None

    def expire(self) -> Iterator[str | None]:
        """End registrations without a heartbeat for too long, member by member.

        Yields after each member: a consumer group after its last member if it has changed, else
        None.
        """
        now_ms = self._now_ms()
        jump_ms = now_ms - self._scanned_ms - round(SCAN_S * 1_000)
        is_first, self._scanned_ms = not self._scanned_ms, now_ms
        if jump_ms <= JUMP_MS or is_first:
            jump_ms = 0
        else:
            logger.warning("event=clock_jumped milliseconds=%d", jump_ms)

        def is_silent(member: Member) -> bool:
            if jump_ms:
                member.seen_ms = min(member.seen_ms + jump_ms, now_ms)
            return member.seen_ms < now_ms - EXPIRY_MS

        for name in list(self._producers):
            for client_id, member in list(self._producers.get(name, {}).items()):
                if is_silent(member) and self._is_producer(name, member):
                    logger.info("event=producer_expired group=%s client=%s", name, client_id)
                    self._remove_producer(name, client_id)
                yield None
        for name in list(self._consumers):
            yield from self._expire_consumers(name, is_silent)

    def _is_producer(self, group: str, member: Member) -> bool:
        return self._producers.get(group, {}).get(member.client_id) is member

    def _expire_consumers(
        self, name: str, is_silent: Callable[[Member], bool]
    ) -> Iterator[str | None]:
        group = self._consumers.get(name)
        if group is None:
            return
        has_changed = False
        for client_id, member in list(group.members.items()):
            if is_silent(member) and member is group.members.get(client_id):
                logger.info("event=consumer_expired group=%s client=%s", name, client_id)
                self._lose_consumer(name, client_id)
                has_changed = True
            yield None
        if has_changed:
            yield name

    @property
    def consumer_groups(self) -> Mapping[str, GroupMembers]:
        return self._consumers

    @property
    def producer_groups(self) -> Mapping[str, Mapping[str, Member]]:
        return self._producers

    def has_consumers(self, group: str) -> bool:
        return group in self._consumers

    def is_consumer(self, group: str, client_id: str) -> bool:
        known = self._consumers.get(group)
        return known is not None and client_id in known.members

    def is_broadcasting(self, group: str) -> bool:
        """Return whether the group's consumers connected in broadcasting mode."""
        known = self._consumers.get(group)
        return known is not None and known.is_broadcasting

    def consumer_ids(self, group: str) -> Sequence[str]:
        """Return the client ids of the group's consumers, sorted; empty if there are none."""
        known = self._consumers.get(group)
        return [] if known is None else known.client_ids

    def subscription_of(self, group: str, topic: str) -> SubscriptionData | None:
        """Return the group's subscription to the topic; None if it has none."""
        known = self._consumers.get(group)
        return None if known is None else known.subscriptions.get(topic)

    def difference(self, data: HeartbeatData) -> Difference | None:
        """Return the first difference between the sender of a heartbeat and its groups."""
        for consumer in data.consumer_data_set:
            group = self._consumers.get(consumer.group_name)
            if group is None:
                continue
            if (refused := group.refused.get(data.client_id)) is not None:
                return refused.difference
            if len(group.variants) < 2:
                continue
            filters = (
                group.variants.of(data.client_id)
                if data.without_sub
                else filters_of(consumer.subscription_data_set)
            )
            found = group.variants.difference(group.name, data.client_id, filters)
            if found is not None:
                return found
        return None

    def refusal(self, group: str, connection: Connection) -> Difference | None:
        """Return why a client on this connection must not consume for the group; None if it may."""
        known = self._consumers.get(group)
        if known is None or not known.refused:
            return None
        return next(
            (one.difference for one in known.refused.values() if one.connection is connection), None
        )

    def listing(
        self, group: str | None, after_group: str = "", after_client: str = ""
    ) -> Iterator[tuple[GroupMembers, str]]:
        """Yield `(group, client_id)` of members and refused clients in order, after a given one.

        The registry must not change meanwhile.
        """
        names = self._group_names if group is None else [group]
        for name in islice(names, bisect_left(names, after_group), None):
            known = self._consumers.get(name)
            if known is None:
                continue
            after = after_client if name == after_group else ""
            members = islice(known.client_ids, bisect_right(known.client_ids, after), None)
            refused = sorted(one for one in known.refused if one > after)
            for client_id in merge(members, refused):
                yield known, client_id

    def subscription_metrics(self) -> dict[str, int]:
        """Return the numbers of groups, members, unequal groups and refused members."""
        groups = self._consumers.values()
        return {
            "groups": len(groups),
            "members": sum(len(group.members) for group in groups),
            "groups_unequal": sum(len(group.variants) > 1 for group in groups),
            "members_refused": sum(len(group.refused) for group in groups),
        }

    def consumers_of(self, group: str) -> list[Connection]:
        """Return the connections of the group's consumers."""
        known = self._consumers.get(group)
        return [] if known is None else [member.connection for member in known.members.values()]

    def producers_of(self, group: str) -> list[Connection]:
        """Return the connections of the group's producers that are open."""
        return [connection for _, connection in self.producer_clients(group)]

    def producer_clients(self, group: str) -> list[tuple[str, Connection]]:
        """Return client id and connection of the group's producers that are open."""
        return [
            (client_id, member.connection)
            for client_id, member in self._producers.get(group, {}).items()
            if not member.connection.closed
        ]

    def has_left(self, group: str, connection: object) -> bool:
        """Return whether an open connection was a producer of the group and has left it.

        A connection that never was one may have prepared a message before its first heartbeat.
        """
        left = self._left.get(connection)
        return left is not None and (group in left or len(left) >= LEFT_GROUPS_MAX)

    def producer(self, group: str, client_id: str) -> Connection | None:
        member = self._producers.get(group, {}).get(client_id)
        return None if member is None or member.connection.closed else member.connection

    def producer_by_id(self, client_id: str) -> Connection | None:
        """Return the connection of a producer of any group; None if it is not open."""
        for group in self._groups_of_producer.get(client_id, ()):
            connection = self.producer(group, client_id)
            if connection is not None:
                return connection
        return None

    def __iter__(self) -> Iterator[tuple[str, str, Member]]:
        """Yield `("consumer" | "producer", group, member)` for every registration."""
        for name, group in self._consumers.items():
            for member in group.members.values():
                yield "consumer", name, member
        for name, members in self._producers.items():
            for member in members.values():
                yield "producer", name, member

    def _add_producer(self, group: str, client_id: str, connection: Connection) -> None:
        members = self._producers.get(group, {})
        known = members.get(client_id)
        if known is not None and known.connection is connection:
            known.seen_ms, known.other = self._now_ms(), None
            return
        self._check_room()
        self._remove_producer(group, client_id)
        member = self._new_member(client_id, connection, known, group)
        self._producers.setdefault(group, {})[client_id] = member
        self._groups_of_producer.setdefault(client_id, set()).add(group)
        self._link(connection, (False, group, client_id))
        if connection in self._left:
            self._left[connection].discard(group)
        logger.info("event=producer_up group=%s client=%s", group, client_id)
        for hook in self._producer_hooks:
            hook(group, connection)

    def _add_consumer(
        self, consumer: ConsumerData, data: HeartbeatData, connection: Connection
    ) -> bool:
        """Register one consumer; return whether its group changed."""
        if len(consumer.subscription_data_set) > SUBSCRIPTIONS_MAX:
            raise invalid_parameter(
                f"group {consumer.group_name} subscribes to {len(consumer.subscription_data_set)} "
                f"topics, the limit is {SUBSCRIPTIONS_MAX}"
            )
        filters = None if data.without_sub else filters_of(consumer.subscription_data_set)
        group = self._consumers.get(consumer.group_name)
        if group is not None:
            compared = filters if self.refuse_unequal else None
            if compared is not None and group.refuses(data.client_id, compared, connection):
                return self._lose_consumer(group.name, data.client_id)
            group.refused.pop(data.client_id, None)
        member = None if group is None else group.members.get(data.client_id)
        is_new = member is None or member.connection is not connection
        if is_new:
            self._check_room()
            self._remove_consumer(consumer.group_name, data.client_id, keep_filters=True)
            # A group whose last member has just been replaced keeps its subscriptions.
            group = group or GroupMembers(consumer.group_name, consumer)
            if group.name not in self._consumers:
                self._consumers[group.name] = group
                insort(self._group_names, group.name)
            member = self._new_member(data.client_id, connection, member, group.name)
            group.add(member)
            self._link(connection, (True, consumer.group_name, data.client_id))
            logger.info("event=consumer_up group=%s client=%s", group.name, data.client_id)
        assert group is not None
        assert member is not None
        if not is_new:
            member.other = None
        group.data = consumer
        member.seen_ms = self._now_ms()
        if filters is None:  # an earlier heartbeat has sent them
            return is_new
        member.fingerprint = data.heartbeat_fingerprint
        changed = group.update_subscriptions(consumer.subscription_data_set)
        group.set_filters(data.client_id, filters, consumer.subscription_data_set)
        return changed or is_new

    def _new_member(
        self, client_id: str, connection: Connection, before: Member | None, group: str
    ) -> Member:
        """Return a registration that takes the place of an earlier one, if there is one."""
        member = Member(client_id, connection, self._now_ms())
        if before is None:
            return member
        left = [one for one in (*before.replaced, before.connection) if not one.closed]
        member.is_reported = before.is_reported
        if connection in left and before.connection is not connection:
            left.remove(connection)
            member.other = before.connection
            if not member.is_reported:
                member.is_reported = True
                logger.warning(
                    "event=client_id_shared client=%s group=%s peer=%s other_peer=%s "
                    "note='two clients have one id: both get the same queues and replies'",
                    client_id,
                    group,
                    connection.name,
                    before.connection.name,
                )
        member.replaced = tuple(left[-REPLACED_MAX:])
        return member

    def _lose_consumer(self, name: str, client_id: str) -> bool:
        """End the registration of a consumer; return whether it had one."""
        group = self._consumers.get(name)
        if group is None:
            return False
        before = len(group.variants)
        was_member = self._remove_consumer(name, client_id)
        if before > 1:
            group.use_common_subscriptions()
        return was_member

    def _remove_producer(self, group: str, client_id: str) -> None:
        members = self._producers.get(group)
        member = None if members is None else members.pop(client_id, None)
        if members is None or member is None:
            return
        if not members:
            del self._producers[group]
        groups = self._groups_of_producer[client_id]
        groups.discard(group)
        if not groups:
            del self._groups_of_producer[client_id]
        self._unlink(member.connection, (False, group, client_id))
        self._remember_left(group, member.connection)

    def _remember_left(self, group: str, connection: Connection) -> None:
        """Remember that an open connection has left a group; a closed one gets no checks."""
        registrations = self._by_connection.get(connection, ())
        if connection.closed or any(one[:2] == (False, group) for one in registrations):
            return
        left = self._left.setdefault(connection, set())
        if len(left) < LEFT_GROUPS_MAX:
            left.add(group)

    def _remove_consumer(self, name: str, client_id: str, *, keep_filters: bool = False) -> bool:
        """Remove a registration; return whether it existed. A replaced client keeps its filters."""
        group = self._consumers.get(name)
        member = None if group is None else group.remove(client_id)
        if group is None or member is None:
            return False
        if not keep_filters:
            group.variants.remove(client_id)
        if not group.members:
            del self._consumers[name]
            del self._group_names[bisect_left(self._group_names, name)]
        self._unlink(member.connection, (True, name, client_id))
        return True

    def _check_room(self) -> None:
        if self._count >= self._registrations_max:
            raise RequestRefusedError(
                f"{self._count} clients are registered, the limit is {self._registrations_max}",
                ResponseCode.SYSTEM_BUSY,
            )

    def _link(self, connection: Connection, registration: tuple[bool, str, str]) -> None:
        self._by_connection.setdefault(connection, set()).add(registration)
        self._count += 1

    def _unlink(self, connection: Connection, registration: tuple[bool, str, str]) -> None:
        self._count -= 1
        registrations = self._by_connection.get(connection)
        if registrations is not None:
            registrations.discard(registration)
            if not registrations:
                del self._by_connection[connection]

    def kept(self) -> Kept:
        return {MEMBERS: self._count}
