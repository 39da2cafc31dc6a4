"""Headers of our own requests about transactions, under the rules of ``headers``.

Official peers never send these and never need them: a client of ours sends them to a broker that
has answered it in MSGPACK. What travels in their bodies is in ``transactions``; all of it is
listed in ``docs/wire.md``.
"""

from __future__ import annotations

from msgspec import field

from .ext_fields import Header, Int32, Int64


class EndTransactionResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 37 where the request came in MSGPACK; official brokers answer without fields."""

    msg_id: str | None = None  # offset id of the final message; None unless committed


class QueryTransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """9000: a page of undecided transactions, or the one with this id."""

    producer_group: str | None = None
    state: str | None = None  # "prepared" or "parked"
    transaction_id: str | None = None  # UNIQ_KEY, or offset id of the half
    after: Int64 = -1  # physical offset of the last transaction of the page before
    max_count: Int32 = 100  # at most transactions.TRANSACTIONS_MAX
    broker_name: str | None = field(default=None, name="bname")


class QueryTransactionsResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 9000: where the next page begins; the page itself may be shorter than allowed."""

    next_after: Int64 | None = None  # for the next request's ``after``; None: that was all


class EndTransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """9001: many decisions at once; they are in the body."""

    producer_group: str
    broker_name: str | None = field(default=None, name="bname")


class PrepareTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """9002: the half messages of one transaction; they are in the body, the leader first."""

    producer_group: str
    broker_name: str | None = field(default=None, name="bname")


class DecideTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """9003: what an operator decides about one transaction."""

    transaction_offset: Int64  # physical offset of the half record
    action: str  # "commit", "rollback" or "resume"
    reason: str | None = None  # for the broker's log
    broker_name: str | None = field(default=None, name="bname")


class DecideTransactionResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 9003."""

    msg_id: str | None = None  # offset id of the final message; None unless committed
