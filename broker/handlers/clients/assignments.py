"""Queues that the broker assigns to a consumer: QUERY_ASSIGNMENT (400).

Consumers usually share out the queues of a topic themselves. A Java consumer of 5.x with
`setClientRebalance(false)` asks the broker instead, every 20 s and when the group changes.

Source: RocketMQ 5.3.3 `QueryAssignmentProcessor`, `AllocateMessageQueueAveragely`,
`AllocateMessageQueueAveragelyByCircle`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import define

from halfmq.remoting.bodies import (
    AssignmentQuery,
    MessageModel,
    QueueKey,
    decode_assignment_query,
    encode_assignments,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...ports import Connection, Handler
from ...tables.client_registry import ClientRegistry
from ...tables.registered_brokers import BrokerTable
from ...tables.topic_config import PERM_READ
from ...tables.topic_table import TopicTable

QUEUES_MAX: Final = 2_048
"""Queues of a topic on all brokers: more would take the event loop for longer than 2 ms."""


def averagely(count: int, members: int, index: int) -> range:
    """Return a contiguous share of `count` queues; the first members have one more."""
    size, rest = divmod(count, members)
    start = index * size + min(index, rest)
    return range(start, start + size + (index < rest))


def by_circle(count: int, members: int, index: int) -> range:
    """Return every `members`-th queue."""
    return range(index, count, members)


STRATEGIES: Final[Mapping[str, Callable[[int, int, int], range]]] = {
    "AVG": averagely,
    "AVG_BY_CIRCLE": by_circle,
}
"""By the name that a client gives its strategy."""


@define(eq=False, repr=False)
class AssignmentHandlers:
    """Shares out the queues of a topic among the members of a group."""

    _topics: TopicTable
    _brokers: BrokerTable
    _registry: ClientRegistry
    _broker_name: str

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.QUERY_ASSIGNMENT: self.assignment}

    def assignment(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer which queues the client is to pull from.

        Of a topic or a group that is not known here the client keeps what it has.
        """
        query = _decode(request)
        strategy = STRATEGIES.get(query.strategy_name)
        if strategy is None:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"the strategy is {query.strategy_name!r}, expected {' or '.join(STRATEGIES)}",
            )
        queues = self._queues(query.topic)
        if queues and query.message_model is MessageModel.CLUSTERING:
            queues = self._share(query, queues, strategy)
        return encode_reply(request, body=encode_assignments(queues))

    def _share(
        self,
        query: AssignmentQuery,
        queues: Sequence[QueueKey],
        strategy: Callable[[int, int, int], range],
    ) -> Sequence[QueueKey] | None:
        members = self._registry.consumer_ids(query.consumer_group)
        if not members:
            return None
        if not self._registry.is_consumer(query.consumer_group, query.client_id):
            return ()
        index = bisect_left(members, query.client_id)
        return [queues[number] for number in strategy(len(queues), len(members), index)]

    def _queues(self, topic: str) -> Sequence[QueueKey] | None:
        """Return the readable queues of all brokers, in the order in which they are shared out."""
        counts = {
            queues.broker_name: queues.read_queue_nums if queues.perm & PERM_READ else 0
            for _, queues in self._brokers.route(topic)
        }
        own = self._topics.offered(topic)
        if own is not None:
            counts[self._broker_name] = own.read_queue_nums if own.perm & PERM_READ else 0
        if not counts:
            return None
        if sum(counts.values()) > QUEUES_MAX:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"the topic {topic} has {sum(counts.values())} queues, of which the broker assigns"
                f" {QUEUES_MAX} at most; have the clients share them out: setClientRebalance(true)",
            )
        return [
            QueueKey(broker_name=name, queue_id=queue_id, topic=topic)
            for name in sorted(counts)
            for queue_id in range(counts[name])
        ]


def _decode(request: RemotingCommand) -> AssignmentQuery:
    if not request.body:
        raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, "the request has no body")
    try:
        return decode_assignment_query(request.body)
    except BodyError as error:
        raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, str(error)) from error
