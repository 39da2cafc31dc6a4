"""Undecided transactions: list them, and decide them. Not served by brokers of Apache RocketMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import PageResponseHeader, ResumeCheckHalfMessageRequestHeader
from halfmq.remoting.own_requests import (
    DecideTransactionRequestHeader,
    FinalMessageResponseHeader,
    QueryTransactionsRequestHeader,
    TransactionInfo,
    decode_transactions,
)
from halfmq.store.format.ids import parse_offset_message_id

from ..arguments import check_count, check_kind, check_optional_text, check_text
from ..errors import (
    AccessDeniedError,
    ConfigurationError,
    DecisionConflictError,
    TransactionNotFoundError,
    UnsupportedRequestError,
)
from ..net.response_errors import answer_of, error_from_response, expect_success
from ..net.session import Session, typed
from .brokers import ClusterClient, call_broker

PAGE_SIZE: Final = 500
"""Transactions in one request, about 150 kB of answer."""

State: TypeAlias = Literal["prepared", "parked"]
Action: TypeAlias = Literal["commit", "rollback", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTransaction:
    """One undecided transaction, in the state at the time of the request."""

    half_message_id: str
    """The ``half_message_id`` of the (first) message that a commit delivers."""
    transaction_id: str
    """The id that producer, checker and ledger use; unique unless the producer reuses it."""
    group: str
    """The producer group, whose members answer checks."""
    topic: str
    """The topic to which a commit delivers."""
    keys: str
    state: str
    """``prepared``: it is checked; ``parked``: the checks have ended without a decision."""
    age: float
    """Seconds since it was stored, by the broker's clock."""
    prepared_at: datetime
    owner: str | None
    """``host:port`` of the producer that prepared it, while it is connected."""
    producers: int | None
    """Connected producers of its group, which can be asked; None: an older broker does not say."""
    checks_sent: int
    checks_delivered: int
    """Sent checks that reached a producer; only these count towards parking."""
    checks_answered: int
    next_check: float | None
    """Seconds until the next check; None: none is planned."""
    parked_reason: str | None
    messages: int
    """How many messages a commit delivers."""
    broker_name: str
    offset: int
    """Physical offset of the half in its broker's commit log."""


def _pending_from_info(info: TransactionInfo, broker_name: str) -> PendingTransaction:
    return PendingTransaction(
        half_message_id=info.message_id,
        transaction_id=info.transaction_id,
        group=info.producer_group,
        topic=info.topic,
        keys=info.keys,
        state=info.state,
        age=info.age_ms / 1000,
        prepared_at=datetime.fromtimestamp(info.store_timestamp / 1000, UTC),
        owner=info.owner,
        producers=info.producers,
        checks_sent=info.checks_sent,
        checks_delivered=info.checks_delivered,
        checks_answered=info.checks_answered,
        next_check=None if info.next_check_ms is None else info.next_check_ms / 1000,
        parked_reason=info.parked_reason,
        messages=info.messages,
        broker_name=broker_name,
        offset=info.offset,
    )


async def pending_pages(
    session: Session,
    *,
    group: str | None = None,
    state: State | None = None,
    after: PendingTransaction | None = None,
    limit: int | None = None,
) -> AsyncIterator[list[PendingTransaction]]:
    """Yield the undecided transactions of all brokers that a session knows, a page at a time.

    Sorted by broker name, then by age, the oldest first. A page may be empty.

    Raises:
        UnsupportedRequestError: A broker is not halfmq's.
        ClientError: A broker does not answer, or refuses.
    """
    check_optional_text("group", group)
    if state not in (None, "prepared", "parked"):  # no set: it may be unhashable
        raise ConfigurationError("state", state, "prepared or parked")
    if after is not None:
        check_kind("after", after, PendingTransaction)
    if limit is not None:
        check_count("limit", limit, range(1 << 31))
    left = limit
    for broker_name, address in sorted(session.routes.brokers.items()):
        position: int | None = -1
        if after is not None:
            if broker_name < after.broker_name:
                continue
            if broker_name == after.broker_name:
                position = after.offset
        while position is not None and left != 0:
            header = QueryTransactionsRequestHeader(
                producer_group=group,
                state=state,
                after=position,
                max_count=PAGE_SIZE if left is None else min(PAGE_SIZE, left),
                broker_name=broker_name,
            )
            infos, position = await _query(session, address, header)
            if left is not None:
                left -= len(infos)
            yield [_pending_from_info(info, broker_name) for info in infos]


class TransactionCalls(ClusterClient):
    """Lists and decides transactions."""

    def transactions(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[PendingTransaction]:
        """Iterate over undecided transactions, by broker name, then the oldest first.

        They are fetched page by page: one that is decided meanwhile may be included or not.

        Args:
            group: Only of this producer group; None: of all groups.
            state: ``prepared`` or ``parked``; None: both.
            after: Start after this one.
            limit: The maximum number; None: all.

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
        """
        pages = pending_pages(self._session, group=group, state=state, after=after, limit=limit)
        return (transaction async for page in pages for transaction in page)

    async def page(
        self,
        group: str | None = None,
        state: State | None = None,
        after: PendingTransaction | None = None,
        limit: int = PAGE_SIZE,
    ) -> list[PendingTransaction]:
        """Return up to ``limit`` results of ``transactions``; an empty list is the end."""
        transactions = self.transactions(group, state, after, limit)
        return [transaction async for transaction in transactions]

    async def transaction(self, transaction_id: str) -> PendingTransaction | None:
        """Return the undecided transaction with this id; None if there is none (any more).

        Raises:
            UnsupportedRequestError: A broker is not halfmq's.
        """
        session = self._session
        check_text("transaction_id", transaction_id)
        wanted = transaction_id.upper()
        for broker_name, address in self._brokers():
            header = QueryTransactionsRequestHeader(
                transaction_id=transaction_id, broker_name=broker_name
            )
            infos, _ = await _query(session, address, header)
            for info in infos:
                # The same offset may belong to another transaction on another broker.
                if wanted in {info.message_id.upper(), info.transaction_id.upper()}:
                    return _pending_from_info(info, broker_name)
        return None

    async def commit(self, transaction_id: str, *, reason: str | None = None) -> str | None:
        """Commit a transaction: its message is delivered. Return the offset id of that message.

        If it was committed before, the same id is returned again. ``reason`` is written to the
        broker's log.

        Raises:
            DecisionConflictError: It was rolled back before.
            TransactionNotFoundError: No broker knows it.
            UnsupportedRequestError: The broker is not halfmq's.
        """
        return await self._decide(transaction_id, "commit", reason)

    async def rollback(self, transaction_id: str, *, reason: str | None = None) -> None:
        """Roll back a transaction: its message is dropped. Raises what ``commit`` raises."""
        await self._decide(transaction_id, "rollback", reason)

    async def resume(self, transaction_id: str, *, reason: str | None = None) -> None:
        """Resume the checks of a parked transaction.

        An official broker accepts the offset id of a message in ``TRANS_CHECK_MAX_TIME_TOPIC``, any
        number of times. Raises what ``commit`` raises, except ``UnsupportedRequestError``.
        """
        try:
            await self._decide(transaction_id, "resume", reason)
        except (UnsupportedRequestError, TransactionNotFoundError):
            if self._address_in(transaction_id) is None:
                raise
            await self._resume_parked(transaction_id)

    async def _decide(self, transaction_id: str, action: Action, reason: str | None) -> str | None:
        check_optional_text("reason", reason)
        address, offset, listed = await self._locate(transaction_id)
        header = DecideTransactionRequestHeader(
            transaction_offset=offset, action=action, reason=reason
        )
        answer = await call_broker(self._session, address, RequestCode.DECIDE_TRANSACTION, header)
        if answer.code == ResponseCode.ILLEGAL_OPERATION:
            remark = answer.remark or ""
            raise DecisionConflictError(answer.code, remark, transaction_id, action.upper())
        if answer.code != ResponseCode.SUCCESS:
            error = error_from_response(answer)
            unknown = error.code == ResponseCode.SYSTEM_ERROR and not listed
            if unknown and not isinstance(error, AccessDeniedError):
                raise TransactionNotFoundError(transaction_id, error.remark)
            raise error
        return typed(answer, FinalMessageResponseHeader, address).msg_id

    async def _locate(self, transaction_id: str) -> tuple[str, int, bool]:
        """Return the broker's address, the half's physical offset, and whether it is undecided.

        For a decided transaction only the broker in the offset id is used: on another one the same
        offset may belong to another transaction.
        """
        found = await self.transaction(transaction_id)
        if found is not None:
            return self._session.routes.brokers[found.broker_name], found.offset, True
        address = self._address_in(transaction_id)
        if address is None:
            raise TransactionNotFoundError(transaction_id, "nothing undecided has this id")
        return address, parse_offset_message_id(transaction_id).physical_offset, False

    async def _resume_parked(self, message_id: str) -> None:
        """Resume by the offset id of the parked copy, as RocketMQ's tools do."""
        address = self._address_in(message_id)
        assert address is not None
        header = ResumeCheckHalfMessageRequestHeader(msg_id=message_id)
        code = RequestCode.RESUME_CHECK_HALF_MESSAGE
        answer = await call_broker(self._session, address, code, header)
        if answer.code != ResponseCode.SUCCESS:
            error = error_from_response(answer)
            if isinstance(error, AccessDeniedError):
                raise error
            raise TransactionNotFoundError(message_id, error.remark)


async def _query(
    session: Session, address: str, header: QueryTransactionsRequestHeader
) -> tuple[list[TransactionInfo], int | None]:
    """Return a page, and the ``after`` of the next page; None if this is the last one."""
    code = RequestCode.QUERY_TRANSACTIONS
    answer = expect_success(await call_broker(session, address, code, header))
    following = typed(answer, PageResponseHeader, address).next_after
    with answer_of(address):
        return decode_transactions(answer.body), following
