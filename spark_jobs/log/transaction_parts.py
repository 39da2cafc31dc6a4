"""Which part of a transaction a record is.

By topic, transaction bits and link, with the rules of ``broker/transaction/replay/log_replay.py``.
Beside the records by which brokers decide, there are those that deliver a message: after a delay,
or by mistake. They are known by the marks that a message keeps from its half, ``TRAN_MSG`` and
``TRANSACTION_HALF_ID``.
"""

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import (
    PROPERTY_DELAY,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRAN_MSG,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_UNIQ_KEY,
)
from halfmq.store.format.topics import (
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_PREFIX,
    TIMER_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)

from .arrays import Bools, Ints
from .hashes import hashed, hashes_of
from .rows import Rows


class Part(IntEnum):
    """Which part of a transaction a record is."""

    HALF = 1
    OP = 2
    COMMIT = 3
    ROLLBACK = 4
    DISCARD = 5
    RESUME = 6
    NAMED = 7  # no record: a decision at ``offset`` names one more half, at ``reference``
    DELIVERED = 8  # the message in an application's topic, by a record that is no final of it
    WAITING = 9  # a final, or a copy of it without a link, in a topic of delayed messages
    # Of messages that have nothing to do with a transaction, or no more:
    DELAYED = 10  # waits in a topic of delayed messages; a consumer's retry does so, too
    ARRIVED = 11  # what is delivered after that
    RECALLED = 12  # says that a waiting message is not to be delivered


SLOT_BITS: Final = 48  # of an offset in a half queue; above them is the queue's number, mostly 0
Parts = npt.NDArray[np.int8]

_OP_TAG: Final = ord("d")  # RocketMQ's TransactionalMessageUtil.REMOVE_TAG
_TRUE: Final = (np.uint64(int.from_bytes(b"true", "little")), np.uint64(0xFFFF_FFFF))
# Topics in which a record may be a final message:
_APPLICATION: Final = 100  # the users';
_WAITS: Final = 101  # where delayed messages wait;
_COPIES: Final = 102  # where consumers' retries are, and what they gave up.
_ROLES: Final[dict[str, int]] = {
    HALF_TOPIC: Part.HALF,
    OP_TOPIC: Part.OP,
    TRANS_CHECK_MAX_TIME_TOPIC: Part.DISCARD,
    SCHEDULE_TOPIC: _WAITS,
    TIMER_TOPIC: _WAITS,
}


def decision_parts(rows: Rows) -> Parts:
    """Return the ``Part`` of each record, up to RESUME; 0 for none."""
    bits = rows.field("sys_flag") & TRANSACTION_MASK
    parts = _roles(rows)
    decides = _decides(rows, (parts >= _APPLICATION) & (bits == TransactionType.COMMIT), parts)
    parts[decides] = Part.COMMIT
    parts[parts >= _APPLICATION] = 0
    parts[(parts == Part.HALF) & (bits == TransactionType.ROLLBACK)] = Part.ROLLBACK
    parts[(parts == Part.HALF) & (bits == TransactionType.PREPARED)] = Part.RESUME
    parts[_marks_nothing(rows, parts == Part.OP)] = 0
    return parts


def all_parts(rows: Rows) -> Parts:
    """Return the ``Part`` of each record, deliveries included; 0 for none.

    What waits to be consumed once more is none of them.
    """
    roles, parts = _roles(rows), decision_parts(rows)
    is_copy = _has_marks(rows)
    waits = (roles == _WAITS) & (is_copy | (parts == Part.COMMIT))
    if waits.any():
        retried = waits & _is_retry(rows, waits)
        parts[waits] = Part.WAITING
        parts[retried] = 0
    # A negative number names the timer message that a record delivers.
    linked = rows.field("prepared_transaction_offset") > 0
    parts[(roles == _APPLICATION) & (parts == 0) & (is_copy | linked)] = Part.DELIVERED
    _add_delays(rows, roles, parts)
    return parts


def _add_delays(rows: Rows, roles: Parts, parts: Parts) -> None:
    """Add the parts of plain delays, of messages that have a unique key to be known by.

    RocketMQ leaves in a delivered record what it waited for and where it was to go; retries, which
    keep the properties of earlier deliveries, go elsewhere.
    """
    starts, ends, has_key = rows.property_places(PROPERTY_UNIQ_KEY)
    is_free = (parts == 0) & has_key
    waits = is_free & (roles == _WAITS)
    if waits.any():
        waits &= ~_starts_with(rows, PROPERTY_REAL_TOPIC, SYSTEM_PREFIX)  # records of pops
        parts[waits] = Part.DELAYED
        parts[waits & rows.property_places(PROPERTY_TIMER_DEL_UNIQKEY)[2]] = Part.RECALLED
    arrives = is_free & ((roles == _APPLICATION) | (roles == _COPIES))
    linked = arrives & (rows.field("prepared_transaction_offset") < 0)
    starts, _, delayed = rows.property_places(PROPERTY_DELAY)
    delayed = delayed & (rows.property_block.padded[starts] != ord("0"))
    arrives &= ~linked & (delayed | rows.property_places(PROPERTY_TIMER_OUT_MS)[2])
    if arrives.any():
        starts, ends, there = rows.property_places(PROPERTY_REAL_TOPIC)
        wanted = hashed(rows.property_block.words, starts, ends)
        arrives &= there & (wanted == hashes_of(rows.topics[0])[rows.topic_codes])
    arrived = arrives | linked
    if arrived.any():
        arrived &= ~_is_system(rows)
        parts[arrived] = Part.ARRIVED


def _is_system(rows: Rows) -> Bools:
    return rows.of_topics(
        np.array([name.startswith(SYSTEM_PREFIX) for name in rows.topic_names], dtype=np.bool_)
    )


def _starts_with(rows: Rows, name: str, prefix: str) -> Bools:
    """Tell which values of a property begin with some text of up to eight letters."""
    starts, ends, _ = rows.property_places(name)
    code, size = int.from_bytes(prefix.encode(), "little"), len(prefix)
    first = rows.property_block.words[starts] & np.uint64(2 ** (8 * size) - 1)
    found: Bools = (ends - starts >= size) & (first == np.uint64(code))
    return found


def _roles(rows: Rows) -> Parts:
    roles = [_ROLES.get(name, _role_of_other(name)) for name in rows.topic_names]
    return np.array(roles, dtype=np.int8)[rows.topic_codes]


def _role_of_other(topic: str) -> int:
    return _COPIES if topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) else _APPLICATION


def _decides(rows: Rows, has_bits: Bools, roles: Parts) -> Ints:
    """Find the final messages among the records with the transaction bits of one.

    Only a final message links to a half. RocketMQ keeps the bits, and not the link, in the copies
    that it makes for consumers' retries and when a delay is over. Without a link a record is either
    such a copy, or the final message of the half at offset 0.
    Source: RocketMQ ``AbstractSendMessageProcessor.consumerSendMsgBack``,
    ``ScheduleMessageService.messageTimeUp``.
    """
    linked = rows.field("prepared_transaction_offset") != 0
    places = np.flatnonzero(has_bits & (linked | (rows.field("reconsume_times") == 0)))
    unlinked = places[~linked[places]]
    if not len(unlinked):
        return places
    chosen = np.zeros(len(rows), dtype=np.bool_)
    chosen[unlinked] = True
    delayed = rows.select(chosen).property_values(PROPERTY_DELAY).is_valid().to_pylist()
    is_copy = (roles[unlinked] == _COPIES) | ((roles[unlinked] == _APPLICATION) & delayed)
    chosen[places] = True
    chosen[unlinked[is_copy]] = False
    return np.flatnonzero(chosen)


def _marks_nothing(rows: Rows, is_op: Bools) -> Ints:
    """Find the op records that do not have the tag which marks halves as done."""
    places = np.flatnonzero(is_op)
    ops = rows.select(is_op)
    starts, ends, _ = ops.property_places(PROPERTY_TAGS)
    is_tag = (ends - starts == 1) & (ops.property_block.padded[starts] == _OP_TAG)
    unmarked: Ints = places[~is_tag]
    return unmarked


def _has_marks(rows: Rows) -> Bools:
    """Tell which records carry a property that only transactional messages have."""
    starts, _, marked = rows.property_places(PROPERTY_TRAN_MSG)
    is_true = rows.property_block.words[starts] & _TRUE[1] == _TRUE[0]
    has_id = rows.property_places(PROPERTY_TRANSACTION_HALF_ID)[2]
    found: Bools = (marked & is_true) | has_id
    return found


def _is_retry(rows: Rows, wanted: Bools) -> Bools:
    """Tell which of the wanted records are meant for a consumer group's retries."""
    topics = rows.select(wanted).property_values(PROPERTY_REAL_TOPIC).dictionary_encode()
    prefix = RETRY_PREFIX.encode()
    retries = [topic.startswith(prefix) for topic in topics.dictionary.to_pylist()]
    found = np.zeros(len(rows), dtype=np.bool_)
    codes = topics.indices.to_pylist()
    found[np.flatnonzero(wanted)] = [code is not None and retries[code] for code in codes]
    return found
