"""Validate messages to be prepared, and remove properties that only the broker may set.

The faults refused here would otherwise show up too late. A half that waits in the schedule topic is
lost to its transaction (RocketMQ does that). A half whose final message has no room for its
properties can be prepared and never committed. Each refusal says how to correct the message.
"""

from typing import Final, Protocol

from halfmq.remoting.codes import ResponseCode
from halfmq.store.format.properties import (
    PROPERTIES_SIZE_MAX,
    PROPERTY_TRAN_MSG,
    PROPERTY_TRANSACTION_GROUP,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_TRANSACTION_PARKED,
    PROPERTY_TRANSACTION_PRINCIPAL,
    get_property,
    without_properties,
)
from halfmq.store.format.record import record_size
from halfmq.store.format.timers import TIMER_UNITS_MS
from halfmq.store.format.topics import HALF_TOPIC, TIMER_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..config import TransactionConfig
from ..delay.levels import DELAY_MS_MAX, delay_level
from ..delay.timer_records import is_milliseconds
from ..errors import MessageRefusedError, RequestRefusedError

FINAL_RESERVE: Final = 512
"""Bytes of properties that a half leaves free for what decisions and checks add: ids, the time
of delivery, the reason for parking, the number of the check."""

GROUP_RESERVE: Final = 2_048
"""The same for a message of a group, whose final may name 63 other halves of 20 digits each."""

DECISION_RESERVE: Final = 192
"""Bytes that the stored half, which holds its topic and a second copy of its key, leaves free: for
the id of the half (77), the time of delivery (46), a CRC (20); or the parked reason."""

GROUP_DECISION_RESERVE: Final = DECISION_RESERVE + 1_408
"""The same for a message of a group: the offsets of 63 halves."""

RECORD_RESERVE: Final = 1_024
"""Bytes by which a final message or a half may exceed the body and properties that were sent: the
head (116), a topic of up to 255, and `FINAL_RESERVE`."""

BROKER_PROPERTIES: Final = (
    PROPERTY_TRANSACTION_GROUP,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_PARKED,
    PROPERTY_TRANSACTION_PRINCIPAL,
)
"""Properties that only the broker sets; consumers and the broker itself trust them."""

_OTHER_TOPIC_SIZE: Final = max(map(len, (HALF_TOPIC, TIMER_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC)))
"""Bytes of the longest topic, other than its own, under which a message is stored."""

_FIXED_SIZE: Final = record_size(0, 0, 0, born_host_size=0, store_host_size=0, version_2=True)
"""Bytes of a record without body, properties, topic and hosts."""

_SHOWN_MAX: Final = 40  # characters of a value in a refusal
_DELAY_REMEDY: Final = (
    "a transactional message is delayed from its commit on: set TRANSACTION_DELAY_MS "
    "(milliseconds after the commit) or TRANSACTION_DELIVER_MS (milliseconds since 1970) instead"
)


def without_broker_properties(properties: bytes) -> bytes:
    """Return properties that a client sent without those that only the broker sets.

    A consumed message that is sent again carries them, although they describe another message. A
    forged half message id would make an inbox skip the real message.
    """
    if b"TRANSACTION_" not in properties:
        return properties
    return without_properties(properties, BROKER_PROPERTIES)


def without_transaction(properties: bytes) -> bytes:
    """Return the properties of a message that is stored again, without the mark of a half."""
    return without_properties(properties, (PROPERTY_TRAN_MSG,))


def fault_in_batch(properties: bytes, where: str) -> str | None:
    """Return why these properties are not allowed in a batch; None if they are.

    A batch is delivered at once and without a transaction, so a message that requests a
    transaction, a delay or a time of delivery would be handled wrongly without notice. ``where``
    names the owner of the properties and begins the sentence.
    """
    why = None
    if (get_property(properties, b"TRAN_MSG") or b"").lower() == b"true":
        name, why = "TRAN_MSG", "the messages of a batch cannot be transactional"
    elif delay_level(properties) > 0:
        name, why = "DELAY", "the messages of a batch cannot be delayed"
    else:
        for name in TIMER_UNITS_MS:
            if get_property(properties, name.encode()) is not None:
                why = "the messages of a batch are delivered at once"
                break
    if why is None:
        return None
    value = (get_property(properties, name.encode()) or b"")[:_SHOWN_MAX].decode(errors="replace")
    return f"{where} has {name}={value}: {why}; send it by itself, not in a batch"


class RequestedDelays(Protocol):
    """The delays that the properties of a transactional message request; None for none."""

    @property
    def delay(self) -> str | None: ...

    @property
    def timer(self) -> str | None: ...

    @property
    def commit_delay(self) -> str | None: ...

    @property
    def deliver_at(self) -> str | None: ...


def refuse_delays(sent: RequestedDelays, now_ms: int) -> None:
    """Raise if a message with these delays must not be prepared.

    Raises:
        RequestRefusedError: One of the delays is not supported for halves, or not valid.
    """
    # RocketMQ delays the half, and loses it. Source: HookUtils#handleScheduleMessage.
    if sent.delay not in {None, "0"}:
        raise MessageRefusedError(f"DELAY: {_DELAY_REMEDY}")
    if sent.timer is not None:
        raise MessageRefusedError(f"{sent.timer}: {_DELAY_REMEDY}")
    delay, deliver = sent.commit_delay, sent.deliver_at
    if delay is not None and deliver is not None:
        raise MessageRefusedError(
            "TRANSACTION_DELAY_MS and TRANSACTION_DELIVER_MS: set one of them"
        )
    if delay is not None and not (is_milliseconds(delay) and int(delay) <= DELAY_MS_MAX):
        raise MessageRefusedError(
            f"TRANSACTION_DELAY_MS={delay[:_SHOWN_MAX]}: expected whole milliseconds after the "
            f"commit, at most {DELAY_MS_MAX} (40 days)"
        )
    if deliver is not None and not (
        is_milliseconds(deliver) and int(deliver) <= now_ms + DELAY_MS_MAX
    ):
        raise MessageRefusedError(
            f"TRANSACTION_DELIVER_MS={deliver[:_SHOWN_MAX]}: expected whole milliseconds since "
            "1970, at most 40 days from now"
        )


def require_few_properties(properties: bytes, *, reserve: int = FINAL_RESERVE) -> None:
    """Raise if a message has too many bytes of properties to be prepared.

    Raises:
        RequestRefusedError: The properties leave no room for what the commit adds.
    """
    if len(properties) > PROPERTIES_SIZE_MAX - reserve:
        raise MessageRefusedError(
            f"properties of {len(properties)} bytes exceed {PROPERTIES_SIZE_MAX - reserve}, the "
            "limit for a transactional message, whose commit needs room for some more: send fewer"
        )


def require_room(
    half: AppendRequest, topic: str, *, record_size_max: int, reserve: int = DECISION_RESERVE
) -> None:
    """Raise if a half leaves no room for the records made from it.

    These are its final message, delayed or not, and its parked copy. None of them may exceed the
    limits for the properties or the size of a record.

    Args:
        half: The record of the half.
        topic: Topic of the final message.
        record_size_max: Bytes of the largest record that the log takes.
        reserve: Bytes by which the properties may grow.

    Raises:
        RequestRefusedError: The half could be prepared, but never committed or parked.
    """
    properties_size = len(half.properties)
    if properties_size > PROPERTIES_SIZE_MAX - reserve:
        raise MessageRefusedError(
            f"properties of {properties_size} bytes, with the topic and the UNIQ_KEY once more, "
            f"exceed {PROPERTIES_SIZE_MAX - reserve}, the limit for a half message, whose commit "
            "needs room for some more: send fewer, or a shorter UNIQ_KEY"
        )
    hosts_size = len(half.born_host) + len(half.store_host)
    size = _FIXED_SIZE + hosts_size + len(half.body) + properties_size + reserve
    size += max(len(topic.encode()), _OTHER_TOPIC_SIZE)
    if size > record_size_max:
        raise MessageRefusedError(
            f"a transactional message of {len(half.body)} bytes and properties takes up to {size} "
            f"bytes of the log when it is decided, and a record may have {record_size_max}: send a "
            "smaller one, or raise mappedFileSizeCommitLog for a new store"
        )


def group_limit_refusal(group: str, limit: int) -> RequestRefusedError:
    """Return the refusal of a half whose producer group has too many undecided transactions."""
    return MessageRefusedError(
        f"[OVERLOAD]{limit} transactions of the producer group {group} are undecided, and "
        f"transactionPendingMaxPerGroup={limit}: decide them, repair its checker, or raise the "
        "limit; then try again",
        ResponseCode.SYSTEM_BUSY,
    )


def prepare_refusal(
    config: TransactionConfig, halves: int, broker_address: str
) -> RequestRefusedError:
    """Return the refusal of any half: forbidden, or too many (``halves``) are undecided."""
    if config.reject:
        return MessageRefusedError(
            f"the broker[{broker_address.rpartition(':')[0]}] sending transaction message is "
            "forbidden (rejectTransactionMessage=true)",
            ResponseCode.NO_PERMISSION,
        )
    return MessageRefusedError(
        f"[OVERLOAD]{halves} half messages are undecided, and transactionPendingMax="
        f"{config.pending_max}: decide them, start a producer of their group to be asked, or raise "
        "the limit; then try again",
        ResponseCode.SYSTEM_BUSY,
    )
