"""PREPARE_TRANSACTION (9002): the messages of one transaction, all stored as halves or none.

Each message is checked by the rules of a send, and nothing is stored before all have passed. Their
halves are one append, the leader's first; the answer waits for the disk in every flush mode. Only
clients of halfmq send this request; official ones send one half at a time, see `send`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.remoting.own_requests import (
    PreparedMessage,
    PreparedResult,
    TransactionsRequestHeader,
    decode_prepared_messages,
    encode_entries,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import get_property, terminated
from halfmq.store.format.topics import DEFAULT_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ...errors import MessageRefusedError
from ...ports import Connection, Handlers, serves
from ...transaction.admission import GROUP_RESERVE, RECORD_RESERVE
from ...transaction.deduplication import FirstHalf
from ...transaction.prepares import Prepares
from ..access_checks import prepared_by

NEW_TOPIC_QUEUES: Final = 1_024
"""Queues requested for a topic that is created; `defaultTopicQueueNums` limits them."""

_ALLOWED_BITS: Final = frozenset({int(TransactionType.NONE), int(TransactionType.PREPARED)})


Validate = Callable[[SendMessageRequestHeader, bytes, Connection], tuple[AppendRequest, str]]


@define(eq=False, repr=False)
class PrepareHandler(Handlers):
    """Stores transactions of several messages."""

    _prepares: Prepares
    _validate: Validate  # returns one message, checked like a send, as it is to be stored
    _append_staged: Callable[[], None]  # appends the records of earlier requests
    _refuse_sends: Callable[[], None]  # raises if the disk is too slow to accept more
    _log_file_size: int  # bytes; all halves of a transaction must fit into one file

    @serves(RequestCode.PREPARE_TRANSACTION)
    def prepare(self, request: RemotingCommand, connection: Connection) -> None:
        """Store the halves of one transaction, or return the ids of those that they repeat."""
        header = request.header_as(TransactionsRequestHeader)
        group = header.producer_group
        self._refuse_sends()
        if not group:
            raise MessageRefusedError(
                "producerGroup is empty: nobody could be asked about the transaction"
            )
        self._append_staged()  # keeps the order; a repeated half may be among them
        messages = [
            self._message(one, group, connection) for one in decode_prepared_messages(request.body)
        ]
        for message, _ in messages:
            message.properties = prepared_by(message.properties, request)
        self._check_together(messages)
        halves = self._prepares.find_duplicate(messages, group, connection)
        if halves is None:
            self._prepares.refuse_prepares(group, connection.broker_address)
            appended = self._prepares.prepare_group(messages, group, connection)
            halves = [
                FirstHalf(
                    one.physical_offset, one.queue_offset, message.queue_id, message.store_host
                )
                for (message, _), one in zip(messages, appended, strict=True)
            ]
        results = [
            PreparedResult(
                half.queue_id,
                half.queue_offset,
                offset_message_id(half.store_host, half.physical_offset),
            )
            for half in halves
        ]
        # A flush covers whole records: a record is durable if its first byte is.
        durable_at = halves[-1].physical_offset + 1
        connection.respond(request, encode_reply(request, body=encode_entries(results)), durable_at)

    def _message(
        self, message: PreparedMessage, group: str, connection: Connection
    ) -> tuple[AppendRequest, str]:
        if message.sys_flag & TRANSACTION_MASK not in _ALLOWED_BITS:
            raise MessageRefusedError(
                f"sysFlag {message.sys_flag:#x} says that the transaction is decided: clear the "
                "bits 0xC, or set 0x4 only"
            )
        header = SendMessageRequestHeader(
            producer_group=group,
            topic=message.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=NEW_TOPIC_QUEUES,
            queue_id=message.queue_id,
            sys_flag=message.sys_flag,
            born_timestamp=message.born_timestamp,
            flag=message.flag,
            properties=_marked(message.properties.encode(), group).decode(),
        )
        return self._validate(header, message.body, connection)

    def _check_together(self, messages: Sequence[tuple[AppendRequest, str]]) -> None:
        if len({unique_key for _, unique_key in messages}) != len(messages):
            raise MessageRefusedError(
                "two messages of one transaction have the same UNIQ_KEY: give each one"
            )
        size = GROUP_RESERVE + sum(
            len(message.body) + len(message.properties) + RECORD_RESERVE for message, _ in messages
        )
        if len(messages) > 1 and size > self._log_file_size:
            raise MessageRefusedError(
                f"the messages of one transaction need {size} bytes, and a file of the log has "
                f"{self._log_file_size}: send fewer or smaller ones, or raise "
                "mappedFileSizeCommitLog for a new store"
            )


def _marked(properties: bytes, group: str) -> bytes:
    """Return the properties with those of a half added; existing ones must be equal.

    Raises:
        RequestRefusedError: An existing property has another value.
    """
    added = b""
    for name, expected in ((b"TRAN_MSG", b"true"), (b"PGROUP", group.encode())):
        value = get_property(properties, name)
        if value is None:
            added += b"%b\x01%b\x02" % (name, expected)
        elif value != expected:
            raise MessageRefusedError(
                f"{name.decode()}={value[:128].decode(errors='replace')} in a transaction of the "
                f"group {group}: leave it out, or set it to {expected.decode()}"
            )
    return terminated(properties) + added
