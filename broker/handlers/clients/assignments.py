"""Queues that the broker assigns to a consumer: QUERY_ASSIGNMENT (400).

Consumers usually share out the queues of a topic themselves. A Java consumer of 5.x with
`setClientRebalance(false)` asks the broker instead, every 20 s and when the group changes. The
broker also tells it whether to pull these queues or to pop them.

Source: RocketMQ 5.3.3 `QueryAssignmentProcessor`, `AllocateMessageQueueAveragely`,
`AllocateMessageQueueAveragelyByCircle`.
"""

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
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...pop.request_modes import RequestModes
from ...ports import Connection, Handlers, serves
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
class AssignmentHandlers(Handlers):
    """Shares out the queues of a topic among the members of a group."""

    _topics: TopicTable
    _brokers: BrokerTable
    _registry: ClientRegistry
    _broker_name: str
    _modes: RequestModes

    @serves(RequestCode.QUERY_ASSIGNMENT)
    def assignment(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer which queues the client is to pull from.

        Of a topic or a group that is not known here the client keeps what it has.
        """
        query = decode_assignment_query(request.body)
        strategy = STRATEGIES.get(query.strategy_name)
        if strategy is None:
            raise RequestRefusedError(
                f"the strategy is {query.strategy_name!r}, expected {' or '.join(STRATEGIES)}"
            )
        queues = self._queues(query.topic)
        if queues and query.message_model is MessageModel.CLUSTERING:
            mode = self._modes.get(query.topic, query.consumer_group)
            if mode.mode == "POP":
                popped = self._share_pops(query, queues, strategy, mode.pop_share_queue_num)
                return encode_reply(request, body=encode_assignments(popped, "POP"))
            queues = self._share(query, queues, strategy)
        return encode_reply(request, body=encode_assignments(queues))

    def _share_pops(
        self,
        query: AssignmentQuery,
        queues: Sequence[QueueKey],
        strategy: Callable[[int, int, int], range],
        share: int,
    ) -> Sequence[QueueKey] | None:
        """Return what a member pops: all, or its queues and those of the next `share` members."""
        members = self._registry.consumer_ids(query.consumer_group)
        if not members:
            return None
        if share <= 0 or share >= len(members) - 1:
            names = dict.fromkeys(queue.broker_name for queue in queues)
            return [QueueKey(broker_name=name, queue_id=-1, topic=query.topic) for name in names]
        if not self._registry.is_consumer(query.consumer_group, query.client_id):
            return ()
        index = bisect_left(members, query.client_id)
        if len(members) > len(queues):
            return [queues[index % len(queues)]]
        numbers = {
            number
            for following in range(share + 1)
            for number in strategy(len(queues), len(members), (index + following) % len(members))
        }
        return [queues[number] for number in sorted(numbers)]

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
                f"the topic {topic} has {sum(counts.values())} queues, of which the broker assigns"
                f" {QUEUES_MAX} at most; have the clients share them out: setClientRebalance(true)"
            )
        return [
            QueueKey(broker_name=name, queue_id=queue_id, topic=topic)
            for name in sorted(counts)
            for queue_id in range(counts[name])
        ]
