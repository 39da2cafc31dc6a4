"""Headers of halfmq's requests about transactions, under the rules of ``headers``.

Official peers neither send nor need them. The halfmq client sends them to a broker that has
answered it in MSGPACK. Their bodies are in ``transaction_bodies``; ``docs/wire.md`` lists both.
"""

from __future__ import annotations

from msgspec import field

from .codes import RequestCode
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header


@answer_header(RequestCode.END_TRANSACTION)
class EndTransactionResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to END_TRANSACTION (37) in MSGPACK; official brokers answer without fields."""

    msg_id: str | None = None  # offset id of the final message; None unless committed


@request_header(RequestCode.QUERY_TRANSACTIONS)
class QueryTransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """QUERY_TRANSACTIONS (9000): a page of undecided transactions, or the one with this id."""

    producer_group: Name | None = None
    state: Name | None = None  # "prepared" or "parked"
    transaction_id: str | None = None  # UNIQ_KEY, or offset id of the half
    after: Int64 = -1  # physical offset of the last transaction of the previous page
    max_count: Int32 = 100  # at most transaction_bodies.TRANSACTIONS_MAX
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.QUERY_TRANSACTIONS)
class QueryTransactionsResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to QUERY_TRANSACTIONS (9000); the page may be shorter than ``max_count``."""

    next_after: Int64 | None = None  # the next request's ``after``; None: this is the last page


@request_header(RequestCode.END_TRANSACTIONS)
class EndTransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """END_TRANSACTIONS (9001): many decisions at once; they are in the body."""

    producer_group: Name
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.PREPARE_TRANSACTION)
class PrepareTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """PREPARE_TRANSACTION (9002): several half messages; the body has them, the leader first."""

    producer_group: Name
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.DECIDE_TRANSACTION)
class DecideTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """DECIDE_TRANSACTION (9003): an operator's decision about one transaction."""

    transaction_offset: Int64  # physical offset of the half record
    action: Name  # "commit", "rollback" or "resume"
    reason: str | None = None  # for the broker's log
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.DECIDE_TRANSACTION)
class DecideTransactionResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to DECIDE_TRANSACTION (9003)."""

    msg_id: str | None = None  # offset id of the final message; None unless committed
