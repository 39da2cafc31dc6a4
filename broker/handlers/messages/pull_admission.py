"""Admission of pulls: who may pull a queue, and which of its messages.

Refusals have the codes and remarks of RocketMQ's `PullMessageProcessor`.
"""

from collections.abc import Callable
from sys import intern
from typing import Final

from attrs import define
from msgspec.structs import replace

from halfmq.remoting.bodies import SUBSCRIBE_ALL, subscription_data
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import SubscriptionError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC

from ...errors import RequestRefusedError, invalid_parameter
from ...filters.filters_in_use import FiltersInUse
from ...net.long_polling import Wanted
from ...ports import Connection
from ...tables.client_registry import ClientRegistry
from ...tables.group_table import GroupTable
from ...tables.topic_table import TopicTable

SUBSCRIPTION_FLAG: Final = 4
CLASS_FILTER_FLAG: Final = 8
"""Bits of a pull's sysFlag. Source: `PullSysFlag`."""

UNDECIDED_TOPICS: Final = frozenset({HALF_TOPIC, OP_TOPIC})
"""Topics that cannot be pulled, because consumers must not see half messages. Operators list
undecided transactions instead."""

_TEXTS: Final = ("topic", "consumer_group", "subscription", "exp")  # of pulls and of pops

TAG_TYPES: Final = frozenset({None, "", "TAG"})
"""Expression types that mean tags. Source: `ExpressionType.isTagType`."""


@define(eq=False, repr=False)
class PullAdmission:
    """Decides which pulls are served, by the tables of topics, groups and clients."""

    _topics: TopicTable
    _groups: GroupTable
    _registry: ClientRegistry
    _filters: FiltersInUse
    # Raises if access control denies a pull.
    _may_pull: Callable[[RemotingCommand, Connection], None] | None = None

    def admit(self, header: PullMessageRequestHeader, connection: Connection) -> None:
        """Return if a group may pull this queue through this connection.

        Raises:
            RequestRefusedError: It may not, or topic, queue or group do not exist.
        """
        may_consume = self._groups.admit(header.consumer_group)
        if may_consume is None:
            raise RequestRefusedError(
                f"subscription group [{header.consumer_group}] does not exist, create it first",
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            )
        if not may_consume:
            raise RequestRefusedError(
                f"subscription group no permission, {header.consumer_group}",
                ResponseCode.NO_PERMISSION,
                {"forbiddenType": "2"},
            )
        refusal = self._registry.refusal(header.consumer_group, connection)
        if refusal is not None:
            raise RequestRefusedError(str(refusal), ResponseCode.NO_PERMISSION)
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestRefusedError(
                f"topic[{header.topic}] not exist, apply first please!",
                ResponseCode.TOPIC_NOT_EXIST,
            )
        if not topic.readable or header.topic in UNDECIDED_TOPICS:
            raise RequestRefusedError(
                f"the topic[{header.topic}] pulling message is forbidden",
                ResponseCode.NO_PERMISSION,
                {"forbiddenType": "3"},
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise invalid_parameter(
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] "
                f"consumer:[/{connection.name}]"
            )
        if not header.sys_flag & SUBSCRIPTION_FLAG:
            self._admit_group(header.consumer_group, header.topic)

    def _admit_group(self, group: str, name: str) -> None:
        if not self._groups.may_broadcast(group) and self._registry.is_broadcasting(group):
            raise RequestRefusedError(
                f"the consumer group[{group}] can not consume by broadcast way",
                ResponseCode.NO_PERMISSION,
                {"forbiddenType": "4"},
            )
        if not self._groups.may_read(group, name):
            raise RequestRefusedError(
                f"the consumer group[{group}] is forbidden for topic[{name}]",
                ResponseCode.NO_PERMISSION,
                {"forbiddenType": "5"},
            )

    def admit_again(
        self,
        request: RemotingCommand,
        connection: Connection,
        header: PullMessageRequestHeader | None = None,
    ) -> None:
        """Return if a pull that has waited may still be answered with messages.

        ``header`` stands for the request's own, if that is no pull.

        Raises:
            RequestRefusedError: Its topic, queue or group was changed or deleted meanwhile, or its
                sender has lost the right to it.
        """
        if self._may_pull is not None:
            self._may_pull(request, connection)
        as_pull = request.header if header is None else header
        assert isinstance(as_pull, PullMessageRequestHeader)
        self.admit(as_pull, connection)

    def to_keep(self, request: RemotingCommand) -> RemotingCommand:
        """Return what is kept of a pull while it waits; usual pulls share their texts.

        Only access control needs it as it was received: it checks the signature again.
        """
        header = request.header
        assert isinstance(header, Header)
        texts = {name: intern(text) for name in _TEXTS if (text := getattr(header, name, None))}
        header = replace(header, **texts)
        if self._may_pull is not None:
            return replace(request, header=header)
        return replace(request, header=header, body=b"", raw_header=b"", texts=None)

    def wanted(self, header: PullMessageRequestHeader, connection: Connection) -> Wanted:
        """Return what the consumer subscribes to, by this request or by its heartbeat.

        Raises:
            RequestRefusedError: The subscription is unknown, wrong or not permitted.
            NotYetError: Its SQL92 filter is not compiled yet.
        """
        if header.sys_flag & CLASS_FILTER_FLAG:
            raise RequestRefusedError(
                "The broker does not support consumer to filter message by class, only by SQL92"
            )
        if header.sys_flag & SUBSCRIPTION_FLAG:
            return self._wanted_by_request(header, connection)
        group, topic = header.consumer_group, header.topic
        subscription = self._registry.subscription_of(group, topic)
        if subscription is None:
            missing = "subscription" if self._registry.has_consumers(group) else "group info"
            raise RequestRefusedError(
                f"the consumer's {missing} not exist", ResponseCode.SUBSCRIPTION_NOT_EXIST
            )
        if subscription.sub_version < header.sub_version:
            raise RequestRefusedError(
                "the consumer's subscription not latest", ResponseCode.SUBSCRIPTION_NOT_LATEST
            )
        kind = subscription.expression_type
        if kind in TAG_TYPES:
            return subscription.codes
        return self._filters.compiled(
            kind, subscription.sub_string, ResponseCode.FILTER_DATA_NOT_EXIST, connection
        )

    def _wanted_by_request(
        self, header: PullMessageRequestHeader, connection: Connection
    ) -> Wanted:
        kind = header.expression_type
        if kind is not None and kind not in TAG_TYPES:
            return self._filters.compiled(
                kind, header.subscription or "", ResponseCode.SUBSCRIPTION_PARSE_FAILED, connection
            )
        if header.subscription == SUBSCRIBE_ALL:
            return None  # the usual case, without an object
        try:
            return subscription_data(header.topic, header.subscription).codes
        except SubscriptionError as error:
            raise RequestRefusedError(
                "parse the consumer's subscription failed", ResponseCode.SUBSCRIPTION_PARSE_FAILED
            ) from error
