"""Single messages: by offset id (33) and by key (12).

Source: RocketMQ `QueryMessageProcessor`, `DefaultMessageStore.queryMessage`.
"""

from typing import Final

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import KEY_SEPARATOR, PROPERTY_KEYS, PROPERTY_UNIQ_KEY
from halfmq.store.format.record import Record, decode_record
from halfmq.store.message_store import MessageStore

from ...access.requirements import GET, SUB, topic
from ...errors import RequestRefusedError
from ...limits.long_answers import Work, complete
from ...ports import Connection, Handlers, serves
from ..access_checks import require

MESSAGES_MAX: Final = 64
"""Messages of one answer. Source: `maxMsgsNumBatch`."""

UNIQUE_KEY_MESSAGES_MAX: Final = 32
"""Messages that a query by unique key gets, whatever number it requests.
Source: `defaultQueryMaxNum`."""

ANSWER_BYTES_MAX: Final = 8 << 20
"""Bytes read for one answer, half the largest frame, unless one message alone is larger."""


class QueryHandlers(Handlers):
    """Finds stored messages for tools and clients."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    @serves(RequestCode.VIEW_MESSAGE_BY_ID)
    def view_message(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the record at a physical offset."""
        header = request.header_as(ViewMessageRequestHeader)
        record = self._store.named_record(header.offset)
        if record is None or header.offset + len(record) > self._store.readable_offset:
            raise RequestRefusedError(f"can not find message by the offset, {header.offset}")
        if request.subject is not None:
            require(request, topic(decode_record(record).topic, SUB, GET))
        return encode_reply(request, body=record)

    @serves(RequestCode.QUERY_MESSAGE)
    def query_message(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the newest messages of a key, in the order of their offsets."""
        header = request.header_as(QueryMessageRequestHeader)
        found = complete(request, connection, lambda: self._find(header))
        if not found:
            return encode_reply(
                request,
                ResponseCode.QUERY_NOT_FOUND,
                header=QueryMessageResponseHeader(
                    index_last_update_timestamp=0, index_last_update_phyoffset=0
                ),
                remark="can not find message, maybe time range not correct",
            )
        timestamp, physical_offset = self._store.index.last_update
        return encode_reply(
            request,
            header=QueryMessageResponseHeader(
                index_last_update_timestamp=timestamp, index_last_update_phyoffset=physical_offset
            ),
            body=b"".join(found),
        )

    def _find(self, header: QueryMessageRequestHeader) -> Work[list[bytes]]:
        """Return records: at most as many as requested, and as fit into an answer."""
        wanted = UNIQUE_KEY_MESSAGES_MAX if header.unique_key_query else header.max_num
        wanted = min(wanted, MESSAGES_MAX)
        hits = yield from self._hits(header)
        found: list[bytes] = []
        size = 0  # of what is read: others whose key has the same hash may be large
        for physical_offset in sorted(hits, reverse=True):
            if len(found) >= wanted:
                break
            data = yield from self._record(physical_offset)
            if data is None:
                continue
            size += len(data)
            if size > max(ANSWER_BYTES_MAX, len(data)):
                break
            if _has_key(decode_record(data, check_crc=False), header.topic, header.key):
                found.append(data)
        found.reverse()
        return found

    def _hits(self, header: QueryMessageRequestHeader) -> Work[set[int]]:
        """Return the offsets of messages whose key has the same hash; a step is an index item."""
        found: set[int] = set()
        place = header.topic, header.key, header.begin_timestamp, header.end_timestamp
        while True:
            try:
                for hit in self._store.index.search(*place):
                    if hit is not None:
                        found.add(hit)
                    yield None
            except NotInMemoryError as missing:
                yield missing
            else:
                return found

    def _record(self, physical_offset: int) -> Work[bytes | None]:
        """Return a record, in a turn of its own: it may have megabytes."""
        while True:
            yield None
            try:
                return self._store.reader.record_bytes(physical_offset, self._store.readable_offset)
            except NotInMemoryError as missing:
                yield missing


def _has_key(record: Record, topic: str, key: str) -> bool:
    """Return whether the record has this key, and not only one with an equal hash."""
    if record.topic != topic:
        return False
    properties = record.property_map
    return properties.get(PROPERTY_UNIQ_KEY) == key or key in properties.get(
        PROPERTY_KEYS, ""
    ).split(KEY_SEPARATOR)
