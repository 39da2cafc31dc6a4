"""halfmq's own requests: their headers, and their bodies in MSGPACK.

Official peers neither send nor need them. The halfmq client sends them to a broker that has
answered it in MSGPACK. ``docs/wire.md`` lists them. Headers follow the rules of ``headers``.

A body is one array of entries, an entry an array of its fields in the declared order. An entry may
stop early if only fields with a default would follow, and a reader ignores fields it does not know,
so **new fields go to the end** of their class and have a default.

Decoders validate their input. The number of entries is checked before any is built, and malformed
bytes raise ``BodyError``, a kind of ``ProtocolError``.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import field

from .codes import RequestCode
from .errors import BodyError
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header

ENDS_MAX: Final = 1024
"""Decisions in one request: about 64 kB, and one group of appends that other sends wait for."""

GROUP_MESSAGES_MAX: Final = 64
"""Messages of one transaction: their finals are one contiguous append, and the list of their
offsets must fit a property."""

TRANSACTIONS_MAX: Final = 1000
"""Transactions in one page: a few milliseconds of the broker's event loop."""

CONSUMERS_MAX: Final = 1000
"""Entries that may be requested for one page: a few milliseconds of the broker's event loop."""

MEMBER_TOPICS_MAX: Final = 4096
"""Topics of one member, and so entries by which a page may exceed the requested number: it lists
whole members."""

DELAYED_MAX: Final = 1000
"""Delayed messages that one page looks at: some milliseconds of the broker's event loop."""

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


class ConsumerInfo(EndEntry, frozen=True):
    """The subscription of one member of a consumer group to one topic."""

    group: str
    client_id: str
    address: str  # of the member's connection, "host:port"
    message_model: str  # CLUSTERING or BROADCASTING
    refused: bool  # because it subscribes differently from its group
    topic: str  # empty: it subscribes to nothing
    filter: str  # in normal form: tags in order


class DelayedInfo(EndEntry, frozen=True):
    """One message that waits for its delivery."""

    topic: str  # to which it will be delivered; of a retry, the retry topic of its group
    message_id: str  # UNIQ_KEY; empty if its sender set none
    keys: str
    deliver_ms: Int64
    store_timestamp: Int64  # ms
    recall_handle: str


def encode_entries(entries: Sequence[EndEntry]) -> bytes:
    """Encode entries, in order, as a body."""
    return _encode(entries)


_encode: Final = msgspec.msgpack.Encoder().encode


def _reader(entry: type[E], most: int, *, least: int = 0) -> Callable[[bytes], list[E]]:
    """Return the reader of an array of such entries; it raises BodyError for other bodies."""
    array = Annotated[list[entry], msgspec.Meta(min_length=least, max_length=most)]  # type: ignore[valid-type]
    decode = msgspec.msgpack.Decoder(cast("Any", array)).decode

    def read(body: bytes) -> list[E]:
        try:
            return cast("list[E]", decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyError(f"MSGPACK body: {error}") from error

    return read


decode_ends: Final = _reader(TransactionEnd, ENDS_MAX)
"""Reads the body of END_TRANSACTIONS."""
decode_end_results: Final = _reader(EndResult, ENDS_MAX)
"""Reads the answer to END_TRANSACTIONS."""
decode_prepared_messages: Final = _reader(PreparedMessage, GROUP_MESSAGES_MAX, least=1)
"""Reads the body of PREPARE_TRANSACTION."""
decode_prepared_results: Final = _reader(PreparedResult, GROUP_MESSAGES_MAX, least=1)
"""Reads the answer to PREPARE_TRANSACTION."""
decode_transactions: Final = _reader(TransactionInfo, TRANSACTIONS_MAX)
"""Reads the answer to QUERY_TRANSACTIONS."""
decode_consumers: Final = _reader(ConsumerInfo, CONSUMERS_MAX + MEMBER_TOPICS_MAX)
"""Reads the answer to QUERY_CONSUMERS."""
decode_delayed: Final = _reader(DelayedInfo, DELAYED_MAX)
"""Reads the answer to QUERY_DELAYED."""


@request_header(RequestCode.QUERY_TRANSACTIONS)
class QueryTransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """QUERY_TRANSACTIONS (9000): a page of undecided transactions, or the one with this id."""

    producer_group: Name | None = None
    state: Name | None = None  # "prepared" or "parked"
    transaction_id: str | None = None  # UNIQ_KEY, or offset id of the half
    after: Int64 = -1  # physical offset of the last transaction of the previous page
    max_count: Int32 = 100  # at most TRANSACTIONS_MAX
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.END_TRANSACTIONS, RequestCode.PREPARE_TRANSACTION)
class TransactionsRequestHeader(Header, frozen=True, kw_only=True):
    """END_TRANSACTIONS (9001), many decisions; PREPARE_TRANSACTION (9002), several half messages.

    They are in the body; of half messages, the leader is the first.
    """

    producer_group: Name
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.END_TRANSACTION, RequestCode.DECIDE_TRANSACTION)
class FinalMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 37, in MSGPACK only (official brokers answer without fields), and to 9003."""

    msg_id: str | None = None  # offset id of the final message; None unless committed


@request_header(RequestCode.DECIDE_TRANSACTION)
class DecideTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """DECIDE_TRANSACTION (9003): an operator's decision about one transaction."""

    transaction_offset: Int64  # physical offset of the half record
    action: Name  # "commit", "rollback" or "resume"
    reason: str | None = None  # for the broker's log
    broker_name: Name | None = field(default=None, name="bname")
