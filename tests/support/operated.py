"""What operators ask, answered by a fake broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from halfmq.remoting.bodies import encode_table
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PageResponseHeader, ResumeCheckHalfMessageRequestHeader
from halfmq.remoting.own_requests import (
    DecideTransactionRequestHeader,
    FinalMessageResponseHeader,
    QueryTransactionsRequestHeader,
    TransactionInfo,
    encode_entries,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.ids import offset_message_id, pack_host

from .fake_broker import FakeBroker, Peer

QUERY = RequestCode.QUERY_TRANSACTIONS
DECIDE = RequestCode.DECIDE_TRANSACTION


class Operated:
    """Has a fake broker serve operators."""

    def __init__(self, broker: FakeBroker, *offsets: int) -> None:
        self.broker = broker
        self.infos = [self.info(offset) for offset in offsets]
        self.page_max = 2  # a broker may end a page whenever it likes
        self.refusal: tuple[int, str] | None = None
        self.decided: list[tuple[int, str, str | None]] = []
        self.resumed: list[str | None] = []
        handlers: dict[int, Callable[[RemotingCommand, Peer], bytes | None]] = broker.handlers
        handlers[QUERY] = self._query
        handlers[DECIDE] = self._decide
        handlers[RequestCode.RESUME_CHECK_HALF_MESSAGE] = self._resume
        handlers[RequestCode.GET_BROKER_RUNTIME_INFO] = lambda command, _: encode_reply(
            command, body=encode_table({"brokerVersion": "479"})
        )

    def id_of(self, offset: int) -> str:
        host, _, port = self.broker.address.rpartition(":")
        return offset_message_id(pack_host(host, int(port)), offset)

    def info(self, offset: int) -> TransactionInfo:
        return TransactionInfo(
            offset=offset,
            queue_offset=offset,
            message_id=self.id_of(offset),
            transaction_id=f"Key{offset}",
            producer_group="pg",
            topic="orders",
            keys="o-1",
            state="prepared",
            age_ms=1_500,
            store_timestamp=1_700_000_000_000,
            owner=None,
            checks_sent=3,
            checks_delivered=2,
            checks_answered=1,
            next_check_ms=2_500,
            parked_reason=None,
        )

    def _query(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("QueryTransactionsRequestHeader", command.header)
        if header.transaction_id is not None:
            ids = {header.transaction_id, header.transaction_id.upper()}
            found = [i for i in self.infos if i.message_id in ids or i.transaction_id in ids]
            return encode_reply(command, body=encode_entries(found))
        rest = [info for info in self.infos if info.offset > header.after]
        page = rest[: min(self.page_max, header.max_count)]
        following = page[-1].offset if page and len(page) < len(rest) else None
        return encode_reply(
            command,
            header=PageResponseHeader(next_after=following),
            body=encode_entries(page),
        )

    def _decide(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("DecideTransactionRequestHeader", command.header)
        if self.refusal is not None:
            return encode_reply(command, self.refusal[0], remark=self.refusal[1])
        self.decided.append((header.transaction_offset, header.action, header.reason))
        final = "FINAL" if header.action == "commit" else None
        return encode_reply(command, header=FinalMessageResponseHeader(msg_id=final))

    def _resume(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("ResumeCheckHalfMessageRequestHeader", command.header)
        if self.refusal is not None:
            return encode_reply(command, self.refusal[0], remark=self.refusal[1])
        self.resumed.append(header.msg_id)
        return encode_reply(command)
