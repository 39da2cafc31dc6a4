"""The entries of a consume queue as they are on disk (321), for diagnosis.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#queryConsumeQueue`.
"""

from __future__ import annotations

from typing import Final

from halfmq.remoting.admin_bodies import Entry, encode_consume_queue
from halfmq.remoting.admin_headers import QueryConsumeQueueRequestHeader
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.queue_entry import QueueEntry

from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, Store, serves
from ...tables.client_registry import ClientRegistry

ENTRIES_MAX: Final = 1_000
"""Entries of one answer, about 100 bytes each."""

_EXTENSION_MAX: Final = -(2**31) - 1  # tags codes up to this are addresses of extensions


class ConsumeQueueHandlers(Handlers):
    """Serves entries of consume queues."""

    def __init__(self, registry: ClientRegistry, store: Store) -> None:
        self._registry = registry
        self._store = store

    @serves(RequestCode.QUERY_CONSUME_QUEUE)
    def query(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with entries from an index on, and with a group's subscription to the topic."""
        header = request.header_as(QueryConsumeQueueRequestHeader)
        topic, queue_id = header.topic, header.queue_id
        first, end = self._store.queues.bounds(topic, queue_id)
        if not end:
            raise RequestRefusedError(f"{queue_id}@{topic} is not exist!")
        filter_data = subscription = None
        if header.consumer_group is not None:
            subscription = self._registry.subscription_of(header.consumer_group, topic)
            # RocketMQ's answer for a filter by tags, which has no compiled form.
            filter_data = "null"
            if subscription is None:
                filter_data = f"{header.consumer_group}@{topic} is not online!"
        if not first <= header.index < end:
            body = encode_consume_queue(first, end, None, filter_data, subscription)
            remark = f"Index {header.index} of {queue_id}@{topic} is not exist!"
            return encode_reply(request, body=body, remark=remark)
        count = min(max(header.count, 0), ENTRIES_MAX)
        entries = self._store.queues.entries(topic, queue_id, header.index, count)
        body = encode_consume_queue(
            first, end, [_entry(one) for one in entries], filter_data, subscription
        )
        return encode_reply(request, body=body)


def _entry(entry: QueueEntry) -> Entry:
    fields: dict[str, object] = {
        "eval": False,
        "physicOffset": entry.physical_offset,
        "physicSize": entry.size,
        "tagsCode": entry.tags_code,
    }
    if entry.tags_code <= _EXTENSION_MAX:
        fields["msg"] = f"Cq extend not exist!addr: {entry.tags_code}"
    return fields
