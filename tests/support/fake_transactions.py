"""Transactions of the fake broker: halves, duplicates, decisions and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
    SendMessageRequestHeader,
)
from halfmq.remoting.own_requests import (
    EndResult,
    FinalMessageResponseHeader,
    PreparedResult,
    TransactionsRequestHeader,
    decode_ends,
    decode_prepared_messages,
    encode_entries,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.record import Record, encode_record, new_record
from halfmq.store.format.topics import DEFAULT_TOPIC, HALF_TOPIC

if TYPE_CHECKING:
    from .fake_broker import Peer


@dataclass
class Half:
    """A half message and what became of it."""

    record: Record
    real_topic: str
    real_queue: int
    decisions: list[int] = field(default_factory=list)
    final_id: str | None = None
    others: list[Half] = field(default_factory=list)
    """The other halves of its transaction, which it decides about."""


class FakeTransactions:
    """What a fake broker does about transactions; the rest of it stores and connects."""

    halfmq: bool
    address: str
    broker_name: str
    now_ms: int

    def __init__(self) -> None:
        self.halves: dict[int, Half] = {}
        self.asked: dict[int, str] = {}
        """Transaction ids of the checks that are to be acknowledged, by opaque."""
        self.acknowledged: list[tuple[str, int, str | None]] = []
        """Transaction id, code and remark of each acknowledgement."""
        self.duplicates = True
        """Whether a half message that comes twice is recognised (by a halfmq broker)."""
        self.batches = True
        """Whether END_TRANSACTIONS is known here."""

    def store(self, record: Record) -> Record:
        raise NotImplementedError

    def create_topic(self, topic: str, queues: int = 4) -> None:
        raise NotImplementedError

    def producers(self, group: str) -> list[Peer]:
        raise NotImplementedError

    def transaction_handlers(self) -> dict[int, Callable[[RemotingCommand, Peer], bytes | None]]:
        return {
            RequestCode.END_TRANSACTION: self._end_transaction,
            RequestCode.END_TRANSACTIONS: self._end_transactions,
            RequestCode.PREPARE_TRANSACTION: self._prepare_transaction,
        }

    # -- for tests

    def half_of(self, transaction_id: str) -> Half:
        return next(
            half
            for half in self.halves.values()
            if half.record.property_map["UNIQ_KEY"] == transaction_id
        )

    def check(self, half: Half, *, group: str | None = None, asked: Peer | None = None) -> bool:
        """Ask a producer of the half's group, or this one; False when there is none."""
        properties = half.record.property_map
        live = self.producers(group or properties["PGROUP"])
        if asked is None and not live:
            return False
        peer = asked or live[0]
        shown = half.record._replace(topic=half.real_topic, queue_id=half.real_queue)
        header = CheckTransactionStateRequestHeader(
            topic=HALF_TOPIC,
            tran_state_table_offset=half.record.queue_offset,
            commit_log_offset=half.record.physical_offset,
            msg_id=properties["UNIQ_KEY"],
            transaction_id=properties["UNIQ_KEY"],
            offset_msg_id=half.record.msg_id,
            broker_name=self.broker_name,
        )
        opaque = None
        if self.halfmq and peer.header_type == HeaderType.MSGPACK:
            opaque = len(self.asked)
            self.asked[opaque] = properties["UNIQ_KEY"]
        peer.send(RequestCode.CHECK_TRANSACTION_STATE, header, encode_record(shown), opaque=opaque)
        return True

    # -- serving

    def store_one(self, header: SendMessageRequestHeader, body: bytes, raw: bytes) -> Record:
        properties = decode_properties(raw)
        half = properties.get("TRAN_MSG") == "true"
        if half and self.halfmq and (first := self._duplicate(properties["UNIQ_KEY"])) is not None:
            return first.record
        topic, queue_id = (HALF_TOPIC, 0) if half else (header.topic, header.queue_id)
        self.create_topic(topic, 1)
        host, _, port = self.address.rpartition(":")
        stored = self.store(
            new_record(
                topic=topic,
                queue_id=queue_id,
                body=body,
                properties=raw,
                born_timestamp=header.born_timestamp,
                born_host=pack_host("127.0.0.1", 1),
                store_timestamp=0,
                store_host=pack_host(host, int(port)),
                flag=header.flag,
                sys_flag=header.sys_flag & ~TRANSACTION_MASK,
            )
        )
        if half:
            self.halves[stored.physical_offset] = Half(stored, header.topic, header.queue_id)
        return stored

    def _duplicate(self, unique_key: str) -> Half | None:
        """The half that was stored for this message before, unless that was refused since."""
        if not self.duplicates:
            return None
        for half in self.halves.values():
            if half.record.property_map["UNIQ_KEY"] == unique_key:
                return None if TransactionType.ROLLBACK in half.decisions else half
        return None

    def _prepare_transaction(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("TransactionsRequestHeader", command.header)
        messages = decode_prepared_messages(command.body)
        stored = []
        for message in messages:
            self.create_topic(message.topic)
            single = SendMessageRequestHeader(
                producer_group=header.producer_group,
                topic=message.topic,
                default_topic=DEFAULT_TOPIC,
                default_topic_queue_nums=4,
                queue_id=message.queue_id,
                sys_flag=message.sys_flag,
                born_timestamp=message.born_timestamp,
                flag=message.flag,
            )
            stored.append(self.store_one(single, message.body, message.properties.encode()))
        halves = [self.halves[record.physical_offset] for record in stored]
        halves[0].others = halves[1:]
        results = [
            PreparedResult(message.queue_id, record.queue_offset, record.msg_id)
            for message, record in zip(messages, stored, strict=True)
        ]
        return encode_reply(command, body=encode_entries(results))

    def _end_transaction(self, command: RemotingCommand, _peer: Peer) -> bytes | None:
        header = cast("EndTransactionRequestHeader", command.header)
        result = self._end(
            header.commit_log_offset, header.producer_group, header.commit_or_rollback
        )
        if header.commit_or_rollback == 0 and not self.halfmq:
            return None  # as the official broker: not answered
        made = None
        if command.header_type == HeaderType.MSGPACK:
            made = FinalMessageResponseHeader(msg_id=result.message_id)
        return encode_reply(command, result.code, header=made, remark=result.remark)

    def _end_transactions(self, command: RemotingCommand, _peer: Peer) -> bytes | None:
        if not self.halfmq or not self.batches:
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            return encode_reply(command, code, remark=" request type 9001 not supported")
        header = cast("TransactionsRequestHeader", command.header)
        results = [
            self._end(end.commit_log_offset, header.producer_group, end.decision)
            for end in decode_ends(command.body)
        ]
        return encode_reply(command, body=encode_entries(results))

    def _end(self, offset: int, group: str, decision: int) -> EndResult:
        """Decide one half message, once; an official broker takes every decision."""
        half = self.halves.get(offset)
        if half is None or half.record.property_map["PGROUP"] != group:
            return EndResult(ResponseCode.SYSTEM_ERROR, "no such half message")
        final = [made for made in half.decisions if made]
        half.decisions.append(decision)
        if decision == 0:
            return EndResult(ResponseCode.SUCCESS)
        if self.halfmq and final:
            if final[0] == decision:
                return EndResult(ResponseCode.SUCCESS, None, half.final_id)
            return EndResult(ResponseCode.ILLEGAL_OPERATION, "decided before")
        if decision == TransactionType.COMMIT:
            for one in (half, *half.others):
                self._commit(one)
        return EndResult(ResponseCode.SUCCESS, None, half.final_id)

    def _commit(self, half: Half) -> None:
        stored = self.store(
            half.record._replace(
                topic=half.real_topic,
                queue_id=half.real_queue,
                total_size=half.record.total_size + len(half.real_topic) - len(HALF_TOPIC),
                sys_flag=half.record.sys_flag | TransactionType.COMMIT,
                prepared_transaction_offset=half.record.physical_offset,
            )
        )
        half.final_id = stored.msg_id
