"""The MSGPACK bodies of halfmq's requests about transactions, as structs.

A body is one array of entries, an entry an array of its fields in the declared order. An entry may
stop early if only fields with a default would follow, and a reader ignores fields it does not know,
so **new fields go to the end** of their class and have a default.

Decoders validate their input. The number of entries is checked before any is built, and malformed
bytes raise ``BodyError``, a kind of ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec

from .errors import BodyError
from .ext_fields import Int32, Int64

ENDS_MAX: Final = 1024
"""Decisions in one request: about 64 kB, and one group of appends that other sends wait for."""

GROUP_MESSAGES_MAX: Final = 64
"""Messages of one transaction: their finals are one contiguous append, and the list of their
offsets must fit a property."""

TRANSACTIONS_MAX: Final = 1000
"""Transactions in one page: a few milliseconds of the broker's event loop."""

E = TypeVar("E", bound="EndEntry")


class EndEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of the entries of these bodies."""


class TransactionEnd(EndEntry, frozen=True):
    """One decision in an END_TRANSACTIONS request (9001); the fields of END_TRANSACTION."""

    commit_log_offset: Int64  # physical offset of the half record
    tran_state_table_offset: Int64  # its queue offset in the half topic
    decision: Int32  # 8 commit, 12 rollback, 0 not known yet
    transaction_id: str = ""  # UNIQ_KEY
    from_check: bool = False


class EndResult(EndEntry, frozen=True):
    """The outcome of one decision: what the answer to END_TRANSACTION contains."""

    code: Int32  # a ResponseCode
    remark: str | None = None
    message_id: str | None = None  # offset id of the final message; None unless committed


class PreparedMessage(EndEntry, frozen=True):
    """One half message of a PREPARE_TRANSACTION request (9002), with fields of SEND_MESSAGE."""

    topic: str
    queue_id: Int32
    flag: Int32
    sys_flag: Int32
    born_timestamp: Int64  # ms
    properties: str
    body: bytes


class PreparedResult(EndEntry, frozen=True):
    """Where one half message of a PREPARE_TRANSACTION request (9002) was stored."""

    queue_id: Int32  # of the real topic
    queue_offset: Int64  # in the half topic
    message_id: str  # offset id of the half


class TransactionInfo(EndEntry, frozen=True):
    """One undecided transaction from the broker's table."""

    offset: Int64  # physical offset of the half record: what DECIDE_TRANSACTION names
    queue_offset: Int64  # in the half topic
    message_id: str  # offset id of the half: the transaction id that consumers see
    transaction_id: str  # UNIQ_KEY
    producer_group: str
    topic: str
    keys: str
    state: str  # "prepared" or "parked"
    age_ms: Int64  # since it was stored, by the broker's clock
    store_timestamp: Int64  # ms
    owner: str | None  # peer name of the connection that prepared it, while that lives
    checks_sent: Int32
    checks_delivered: Int32
    checks_answered: Int32
    next_check_ms: Int64 | None  # from now; None: none is planned
    parked_reason: str | None
    messages: Int32 = 1  # of its group
    producers: Int32 | None = None  # connected now, of its group; None: the broker does not say


def encode_entries(entries: Sequence[EndEntry]) -> bytes:
    """Encode entries, in order, as a body."""
    return _encode(entries)


def _decoder(declared: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(declared).decode


_encode: Final = msgspec.msgpack.Encoder().encode
_ends: Final = _decoder(Annotated[list[TransactionEnd], msgspec.Meta(max_length=ENDS_MAX)])
_end_results: Final = _decoder(Annotated[list[EndResult], msgspec.Meta(max_length=ENDS_MAX)])
_messages: Final = _decoder(
    Annotated[list[PreparedMessage], msgspec.Meta(min_length=1, max_length=GROUP_MESSAGES_MAX)]
)
_results: Final = _decoder(
    Annotated[list[PreparedResult], msgspec.Meta(min_length=1, max_length=GROUP_MESSAGES_MAX)]
)
_infos: Final = _decoder(
    Annotated[list[TransactionInfo], msgspec.Meta(max_length=TRANSACTIONS_MAX)]
)


def decode_ends(body: bytes) -> list[TransactionEnd]:
    """Read the body of END_TRANSACTIONS.

    Raises:
        BodyError: Not an array of at most ``ENDS_MAX`` such entries.
    """
    return _decode(_ends, body)


def decode_end_results(body: bytes) -> list[EndResult]:
    """Read the answer to END_TRANSACTIONS. Raises ``BodyError`` like ``decode_ends``."""
    return _decode(_end_results, body)


def decode_prepared_messages(body: bytes) -> list[PreparedMessage]:
    """Read the body of PREPARE_TRANSACTION.

    Raises:
        BodyError: Not an array of 1 to ``GROUP_MESSAGES_MAX`` such entries.
    """
    return _decode(_messages, body)


def decode_prepared_results(body: bytes) -> list[PreparedResult]:
    """Read the answer to PREPARE_TRANSACTION. Raises ``BodyError`` like its request's reader."""
    return _decode(_results, body)


def decode_transactions(body: bytes) -> list[TransactionInfo]:
    """Read the answer to QUERY_TRANSACTIONS.

    Raises:
        BodyError: Not an array of at most ``TRANSACTIONS_MAX`` such entries.
    """
    return _decode(_infos, body)


def _decode(decode: Callable[[bytes], Any], body: bytes) -> list[E]:
    try:
        return cast("list[E]", decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"MSGPACK body: {error}") from error
