"""Registration of clients: heartbeat (34), unregister (35), group members (38, 9004), filters (46).

If the members or topics of a consumer group change, every member is notified (40), and then
requests the list of members. All changes of one pass of the loop are one notice. A large group is
notified in slices, and changes meanwhile lead to one more round: a thousand consumers that start
together cost a few thousand notices, not a million. A topic that is created is such a change for
the groups that subscribe to it: their consumers need not look for it to get its first messages.

The answer to a heartbeat reports whether another member of the group subscribes differently; with
`refuseUnequalSubscriptions` it is then a refusal, and nothing of that consumer is registered. The
remark of the answer reports a client id that two clients share.

Source: RocketMQ `ClientManageProcessor`, `ConsumerManageProcessor`,
`DefaultConsumerIdsChangeListener`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.bodies import (
    TAG,
    HeartbeatData,
    decode_heartbeat,
    decode_lock_batch,
    decode_subscription,
    encode_consumer_list,
    encode_locked_queues,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    ConsumerGroupRequestHeader,
    HeartbeatResponseHeader,
    QueryConsumersRequestHeader,
    QueryConsumersResponseHeader,
    UnregisterClientRequestHeader,
)
from halfmq.remoting.own_requests import CONSUMERS_MAX, ConsumerInfo, encode_entries
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...filters.filters_in_use import FiltersInUse
from ...limits.long_answers import take_turn
from ...loop.slices import Slice
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry
from ...tables.group_members import GroupMembers
from ...tables.group_table import GroupTable
from ...tables.queue_locks import QueueLocks
from ...tables.topic_table import TopicTable, group_of
from ..access_checks import principal_name

logger = logging.getLogger(__name__)

HEARTBEAT_GROUPS_MAX: Final = 512
"""Groups of one client in a heartbeat; creating as many occupies the loop for some 30 ms."""

LARGE_GROUP: Final = 1_000
"""Members whose list takes more than a tenth of a millisecond."""

IDLE_S: Final = 60.0
"""Seconds until the next slice while nothing changes; a change does not wait for it."""


@define(eq=False, repr=False, slots=False)
class ClientHandlers(Handlers):
    """Maintains the registry of clients and notifies consumers of changes."""

    _registry: ClientRegistry
    _topics: TopicTable
    _groups: GroupTable
    _filters: FiltersInUse
    _wake: Callable[[], None]  # called when there is work for ``tick``

    def __attrs_post_init__(self) -> None:
        self._lost: deque[Connection] = deque()  # their clients are still registered
        self._changed: dict[str, None] = {}  # groups whose members are to be notified
        self._created: set[str] = set()  # topics whose groups are to be found
        self._topics.on_created(self._topic_created)
        self._round: Iterator[None] | None = None

    @serves(RequestCode.HEART_BEAT)
    def heartbeat(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Register the client's producers and consumers."""
        data = self._admitted(_decode_heartbeat(request))
        # Clients ignore it in the answer to a heartbeat of version 1; RocketMQ answers true.
        is_sub_change = data.heartbeat_fingerprint == 0 or (
            data.without_sub and not self._registry.knows_fingerprint(data)
        )
        owner = principal_name(request)
        self._notify_members(self._registry.heartbeat(data, connection, owner))
        found = self._registry.difference(data)
        if found is None:
            header = HeartbeatResponseHeader(
                is_support_heart_beat_v2=True, is_sub_change=is_sub_change
            )
            return encode_reply(request, header=header, remark=self._registry.shared_id(data))
        header = HeartbeatResponseHeader(
            is_support_heart_beat_v2=True,
            is_sub_change=is_sub_change,
            unequal_topic=found.topic,
            unequal_client_id=found.other_client_id,
            unequal_filter=found.other_expression,
        )
        if found.refused:
            return encode_reply(
                request, ResponseCode.NO_PERMISSION, header=header, remark=str(found)
            )
        return encode_reply(request, header=header, remark=self._registry.shared_id(data))

    @serves(RequestCode.UNREGISTER_CLIENT)
    def unregister(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Remove a client from its groups; an unknown client is no error."""
        header = request.header_as(UnregisterClientRequestHeader)
        self._notify_members(
            self._registry.unregister(
                header.client_id, header.producer_group, header.consumer_group
            )
        )
        return encode_reply(request)

    @serves(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def consumer_list(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the client ids of a group's consumers."""
        header = request.header_as(ConsumerGroupRequestHeader)
        client_ids = self._registry.consumer_ids(header.consumer_group)
        if not client_ids:
            raise RequestRefusedError(f"no consumer for this group, {header.consumer_group}")
        if len(client_ids) > LARGE_GROUP:
            take_turn(request, connection)
        return encode_reply(request, body=encode_consumer_list(client_ids))

    @serves(RequestCode.QUERY_CONSUMERS)
    def query_consumers(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with a page of the members of one or all groups."""
        header = request.header_as(QueryConsumersRequestHeader)
        if not 1 <= header.max_count <= CONSUMERS_MAX:
            raise RequestRefusedError(
                f"maxCount is {header.max_count}, expected 1 to {CONSUMERS_MAX}"
            )
        entries: list[ConsumerInfo] = []
        following = QueryConsumersResponseHeader()
        listing = self._registry.listing(
            header.consumer_group, header.after_group, header.after_client
        )
        for group, client_id in listing:
            entries += _member_entries(group, client_id)
            if len(entries) >= header.max_count:
                following = QueryConsumersResponseHeader(
                    next_group=group.name, next_client=client_id
                )
                break
        return encode_reply(request, header=following, body=encode_entries(entries))

    @serves(RequestCode.CHECK_CLIENT_CONFIG)
    def check_client_config(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Refuse an invalid filter when a consumer starts, before its pulls are refused."""
        if request.body:
            _, _, subscription = decode_subscription(request.body)
            if subscription.expression_type != TAG:
                self._filters.compiled(
                    subscription.expression_type,
                    subscription.sub_string,
                    ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                    connection,
                )
        return encode_reply(request)

    def connection_lost(self, connection: Connection) -> None:
        """Remove the clients of a lost connection and notify the other members of their groups."""
        self._lost.append(connection)
        self._wake()

    def tick(self) -> float:
        """Run a slice of what `wake` was called for; return the seconds until the next one."""
        if self._round is None:
            self._round = self._settle()
        if not Slice().advance(self._round):
            return 0.0
        self._round = None
        return IDLE_S

    def expire(self) -> Iterator[None]:
        """Remove clients without heartbeat, in steps, every `client_registry.SCAN_S` seconds."""
        for group in self._registry.expire():
            if group is not None:
                self._notify_members((group,))
            yield

    def _admitted(self, data: HeartbeatData) -> HeartbeatData:
        """Return the heartbeat without consumers whose groups do not exist and cannot be created.

        Create the groups and retry topics of the others. The heartbeat succeeds in any case, as in
        RocketMQ; the pulls of the other consumers are refused with the reason.
        """
        if not data.client_id:
            return data
        consumers = data.consumer_data_set
        configs = [self._groups.ensure(consumer.group_name) for consumer in consumers]
        self._topics.ensure_retries(
            {config.name: config.retry_queue_nums for config in configs if config is not None}
        )
        admitted = tuple(
            consumer
            for consumer, config in zip(consumers, configs, strict=True)
            if config is not None
        )
        if len(admitted) < len(data.consumer_data_set):
            logger.warning("event=consumer_without_group client=%s", data.client_id)
        return replace(data, consumer_data_set=admitted)

    def _notify_members(self, groups: Iterable[str]) -> None:
        """Notify the members of these groups in the next slice."""
        self._changed |= dict.fromkeys(groups)
        if self._changed:
            self._wake()

    def _topic_created(self, name: str) -> None:
        if group_of(name) is None and self._registry.consumer_groups:
            self._created.add(name)
            self._wake()

    def _settle(self) -> Iterator[None]:
        """Remove clients of lost connections, then notify the members of changed groups."""
        while self._lost or self._changed or self._created:
            if self._lost:
                for group in self._registry.forget(self._lost.popleft()):
                    if group is not None:
                        self._changed[group] = None
                    yield
            elif self._changed:
                name = next(iter(self._changed))
                del self._changed[name]
                header = ConsumerGroupRequestHeader(consumer_group=name)
                # One notice is enough for all members on one connection.
                for connection in dict.fromkeys(self._to_notify(name)):
                    connection.send_request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)
                    yield
            else:  # all topics at once, so that many of them cost one walk through the groups
                created, self._created = self._created, set()
                for members in list(self._registry.consumer_groups.values()):
                    if not created.isdisjoint(members.subscriptions):
                        self._changed[members.name] = None
                    yield

    def _to_notify(self, name: str) -> Sequence[Connection]:
        group = self._registry.consumer_groups.get(name)
        config = self._groups.get(name)
        if group is None or group.is_broadcasting:
            return ()
        if config is not None and not config.notify_consumer_ids_changed_enable:
            return ()
        return self._registry.consumers_of(name)


def _member_entries(group: GroupMembers, client_id: str) -> list[ConsumerInfo]:
    address = group.connection_of(client_id).name
    model, refused = group.data.message_model.value, client_id in group.refused
    filters = sorted(group.filters_of(client_id)) or [("", "")]
    return [
        ConsumerInfo(group.name, client_id, address, model, refused, topic, expression)
        for topic, expression in filters
    ]


def _decode_heartbeat(request: RemotingCommand) -> HeartbeatData:
    data = decode_heartbeat(request.body)
    groups = len(data.consumer_data_set) + len(data.producer_data_set)
    if groups > HEARTBEAT_GROUPS_MAX:
        raise RequestRefusedError(
            f"the heartbeat names {groups} groups, the limit is {HEARTBEAT_GROUPS_MAX}"
        )
    return data


class LockHandlers(Handlers):
    """Locks queues for one consumer of a group at a time, which consumes in order (41, 42).

    Source: RocketMQ `AdminBrokerProcessor.lockBatchMQ`, `unlockBatchMQ`.
    """

    def __init__(self, locks: QueueLocks) -> None:
        self._locks = locks

    @serves(RequestCode.LOCK_BATCH_MQ)
    def lock(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Lock queues or renew their locks; answer with those that the client holds now."""
        body = decode_lock_batch(request.body)
        owned = self._locks.lock(body.consumer_group, body.client_id, body.mq_set)
        return encode_reply(request, body=encode_locked_queues(owned))

    @serves(RequestCode.UNLOCK_BATCH_MQ)
    def unlock(self, request: RemotingCommand, _connection: Connection) -> bytes:
        body = decode_lock_batch(request.body)
        self._locks.unlock(body.consumer_group, body.client_id, body.mq_set)
        return encode_reply(request)
