"""Messages that wait for their delivery: recall (370) and list them (9005).

QUERY_DELAYED is halfmq's own, see ``docs/wire.md``.

Source: RocketMQ ``RecallMessageProcessor``.
"""

import logging
from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    PageResponseHeader,
    QueryDelayedRequestHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
)
from halfmq.remoting.own_requests import DELAYED_MAX, DelayedInfo, encode_entries
from halfmq.remoting.recall_handle import RecallHandle, parse_recall_handle
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.properties import PROPERTY_KEYS, PROPERTY_REAL_TOPIC, PROPERTY_UNIQ_KEY

from ...delay.delivery import DelayService, WaitingMessage
from ...delay.timer_records import TimerError, text_of
from ...errors import RequestRefusedError, invalid_parameter
from ...logs import EACH
from ...ports import Connection, Handlers, serves
from ...tables.topic_config import TopicConfig

logger = logging.getLogger(__name__)

PAGE_BYTES_MAX: Final = 4 << 20
"""Bytes of records that are read for a page: some milliseconds of the broker's event loop."""


@define(eq=False, repr=False)
class DelayHandlers(Handlers):
    """Serves requests about messages that wait for their delivery."""

    _delays: DelayService
    _get_topic: Callable[[str], TopicConfig | None]
    _broker_name: str

    @serves(RequestCode.RECALL_MESSAGE)
    def recall(self, request: RemotingCommand, connection: Connection) -> None:
        """Recall a message; the answer means that nobody gets it, so it waits for the disk."""
        header = request.header_as(RecallMessageRequestHeader)
        if self._get_topic(header.topic) is None:
            raise RequestRefusedError(
                f"recall failed, the topic[{header.topic}] not exist", ResponseCode.TOPIC_NOT_EXIST
            )
        try:
            recalled = self._delays.recall(self._named(header))
        except TimerError as error:
            raise RequestRefusedError(str(error), ResponseCode.ILLEGAL_OPERATION) from error
        logger.info(
            "event=message_recalled topic=%s message=%s peer=%s",
            header.topic,
            recalled.unique_key,
            connection.name,
            extra=EACH,
        )
        answer = RecallMessageResponseHeader(msg_id=recalled.unique_key, msg_region="DefaultRegion")
        connection.respond(request, encode_reply(request, header=answer), recalled.durable_at)

    def _named(self, header: RecallMessageRequestHeader) -> RecallHandle:
        try:
            handle = parse_recall_handle(header.recall_handle)
        except ValueError:
            raise TimerError(
                "recall handle is invalid: expected the recallHandle of the answer to a send"
            ) from None
        if handle.topic != header.topic:
            raise TimerError("recall failed, topic not match: the handle is of another topic")
        if handle.broker_name != self._broker_name:
            raise TimerError("recall failed, the handle is of another broker")
        return handle

    @serves(RequestCode.QUERY_DELAYED)
    def query(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with a page of the messages that wait."""
        header = request.header_as(QueryDelayedRequestHeader)
        if not 1 <= header.max_count <= DELAYED_MAX:
            raise invalid_parameter(f"maxCount is {header.max_count}, expected 1 to {DELAYED_MAX}")
        page = self._delays.page(header.after, header.max_count, PAGE_BYTES_MAX)
        infos = [self._info(one) for one in page.messages]
        found = [one for one in infos if header.topic in (None, one.topic)]
        answer = PageResponseHeader(next_after=page.next_after)
        return encode_reply(request, header=answer, body=encode_entries(found))

    def _info(self, waiting: WaitingMessage) -> DelayedInfo:
        record, place, due_ms = waiting
        topic, key, keys = (
            text_of(record, name)
            for name in (PROPERTY_REAL_TOPIC, PROPERTY_UNIQ_KEY, PROPERTY_KEYS)
        )
        handle = RecallHandle(topic, self._broker_name, due_ms, key, place).encode()
        return DelayedInfo(topic, key, keys, due_ms, record.store_timestamp, handle)
