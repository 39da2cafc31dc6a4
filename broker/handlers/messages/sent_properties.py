"""The properties of a sent message, read once by the rules of `store.format.properties`.

The text is searched for the few names that matter here. So other properties cost only their length,
and no cache makes the cost of a message depend on earlier ones.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from halfmq.store.format.properties import decode_properties, tag_hash
from halfmq.store.format.timers import TIMER_UNITS_MS

from ...delay.levels import level_of
from ...transaction.admission import without_broker_properties

# Each with the separators that make it the whole name of a property.
_UNIQUE_KEY: Final = "\x02UNIQ_KEY\x01"
_TAGS: Final = "\x02TAGS\x01"
_WAIT: Final = "\x02WAIT\x01"
_WAIT_FALSE: Final = "\x02WAIT\x01false\x02"
_CLUSTER: Final = "\x02CLUSTER\x01"
_OF_TRANSACTIONS: Final = "\x02TRAN"
_TRANSACTIONAL: Final = "\x02TRAN_MSG\x01"
_PRODUCER_GROUP: Final = "\x02PGROUP\x01"
_OF_STORED_HALF: Final = "\x02__transactionId__\x01"
_DELAY: Final = "\x02DELAY\x01"
_TIMER: Final = "\x02TIMER_"
_TIMERS: Final = tuple(f"\x02{name}\x01" for name in TIMER_UNITS_MS)
_TRANSACTION_PREFIX: Final = "\x02TRANSACTION_"
_COMMIT_DELAY: Final = "\x02TRANSACTION_DELAY_MS\x01"
_DELIVER_AT: Final = "\x02TRANSACTION_DELIVER_MS\x01"


class SentProperties(msgspec.Struct, gc=False):
    """The properties of one message."""

    stored: bytes
    unique_key: str
    tags_code: int
    waits: bool  # for the disk, unless the broker flushes by itself
    is_plain: bool  # none of the following is set
    is_transactional: bool = False
    delay: str | None = None  # DELAY, a delay level
    timer: str | None = None  # the property that requests a time of delivery
    timer_value: str = ""
    # Of a transactional message:
    producer_group: str | None = None
    was_stored: bool = False  # a half was made of this message, and now a consumer sends it again
    commit_delay: str | None = None  # TRANSACTION_DELAY_MS
    deliver_at: str | None = None  # TRANSACTION_DELIVER_MS

    def is_prepare_of(self, group: str) -> bool:
        """Return whether this message prepares a transaction of its sender, a producer group.

        A client library that prepares sets ``PGROUP`` to its own group. A tool that sends a
        committed message again with all its properties leaves it as it was.
        """
        return self.is_transactional and not (self.was_stored and self.producer_group != group)

    @property
    def delay_level(self) -> int:
        """The delay level; 0 for none, or if it is no number."""
        return 0 if self.delay is None else level_of(self.delay.encode())


def read_properties(
    sent: str | None, broker_properties: str, new_key: Callable[[], str]
) -> SentProperties:
    """Return the properties of a message, parsed and as they are stored.

    Args:
        sent: The properties as the producer sent them.
        broker_properties: Added, unless a broker has already added its own.
        new_key: Creates the unique key of a message that has none.
    """
    text = "\x02" + sent if sent else "\x02"
    if text[-1] != "\x02":
        text += "\x02"
    of_transactions, delayed, timed = _OF_TRANSACTIONS in text, _DELAY in text, _TIMER in text
    if of_transactions and _TRANSACTION_PREFIX in text:
        text = "\x02" + without_broker_properties(text[1:].encode()).decode()
    unique_key = last_value(text, _UNIQUE_KEY)
    tags = last_value(text, _TAGS)
    added = "" if _CLUSTER in text else broker_properties
    if unique_key is None:
        unique_key = new_key()
        added = f"UNIQ_KEY\x01{unique_key}\x02{added}"
    read = SentProperties(
        (text[1:] + added).encode(),
        unique_key,
        0 if tags is None else tag_hash(tags),
        _WAIT_FALSE not in text or last_value(text, _WAIT) != "false",
        not (of_transactions or delayed or timed),
    )
    if of_transactions and (last_value(text, _TRANSACTIONAL) or "").lower() == "true":
        read.is_transactional = True
        read.producer_group = last_value(text, _PRODUCER_GROUP)
        read.was_stored = _OF_STORED_HALF in text
        if _TRANSACTION_PREFIX in text:
            read.commit_delay = last_value(text, _COMMIT_DELAY)
            read.deliver_at = last_value(text, _DELIVER_AT)
    if delayed:
        read.delay = last_value(text, _DELAY)
    if timed:
        for name in _TIMERS:  # the first one counts
            if value := last_value(text, name):
                read.timer, read.timer_value = name[1:-1], value
                break
    return read


def last_value(text: str, name: str) -> str | None:
    """Return the value of a property as `get_property` does; None if it is absent.

    Args:
        text: Properties, with a separator (0x02) before and after each.
        name: The name of the property, with 0x02 before it and 0x01 after it.
    """
    _, found, rest = text.rpartition(name)  # half the time of a search by position
    if not found:
        return None
    # An empty value does not hide an earlier one.
    return rest.partition("\x02")[0] or decode_properties(text).get(name[1:-1])
