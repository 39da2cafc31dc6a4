"""Argument checks: errors name the argument, its value and the remedy.

Programs without type checks pass bytes for text, numbers for keys and None for anything. Checked
here, the error is clear; found later in an encoder, it would not be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from halfmq.store.format import properties as names
from halfmq.store.format.topics import TOPIC_LENGTH_MAX, validate_topic

from .errors import ConfigurationError, InvalidMessageError

if TYPE_CHECKING:
    from .message import Message

INT32: Final = range(-(1 << 31), 1 << 31)
"""The range of a 32-bit field."""
NOT_IN_TAGS: Final = r"|&!<>=(),;'\"`*?\x00-\x1f\x7f\ud800-\udfff"
"""Characters that a tag must not have, for a character class of ``re``: separators and operators of
filter languages, wildcards, quotes, and characters that cannot be encoded."""

OrderKeys: TypeAlias = str | Sequence[str | None] | None
"""The order key of all messages of a transaction, or one for each."""

is_tag = re.compile(rf"[^\s{NOT_IN_TAGS}]+").fullmatch
"""Match a valid tag: text without blanks, quotes and ``|&!<>=(),;*?``."""


def check_text(name: str, value: object, what: str = "text") -> None:
    """Raise ConfigurationError unless it is a ``str`` that can be encoded."""
    reason = invalid_text_reason(value)
    if reason is not None:
        raise ConfigurationError(name, value, f"{what}: {reason}")


def check_optional_text(name: str, value: object, what: str = "text") -> None:
    """Raise ConfigurationError unless it is None or a ``str`` that can be encoded."""
    if value is not None:
        check_text(name, value, f"{what}, or None")


def invalid_text_reason(value: object) -> str | None:
    """Return why a value cannot be used as text, and what to do; None if it can."""
    if isinstance(value, bytes | bytearray):
        return f"a str and not {type(value).__name__}, so decode it"
    if not isinstance(value, str):
        return f"a str and not {type(value).__name__}"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"valid Unicode ({error.reason})"
    return None


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Raise ConfigurationError unless it is a finite number above 0; with ``zero``, also 0."""
    what = "a number of seconds, 0 or more" if zero else "a number above 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(name, value, what)
    if value < 0 or (value == 0 and not zero):
        raise ConfigurationError(name, value, what)


def check_count(name: str, value: object, allowed: range) -> None:
    """Raise ConfigurationError unless it is a whole number in the range."""
    if not _is_count(value, allowed):
        expected = f"a whole number, {allowed.start} to {allowed.stop - 1}"
        raise ConfigurationError(name, value, expected)


def _is_count(value: object, allowed: range) -> bool:
    return type(value) is int and allowed.start <= value < allowed.stop


def check_callable(name: str, value: object) -> None:
    """Raise ConfigurationError unless it can be called."""
    if not callable(value):
        raise ConfigurationError(name, value, "a function")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigurationError unless it is an instance of the class."""
    if not isinstance(value, kind):
        raise ConfigurationError(name, value, f"a {kind.__name__}, not {type(value).__name__}")


def check_order_keys(order_key: OrderKeys, messages: int) -> tuple[str | None, ...]:
    """Return the order key of each message.

    Raises:
        ConfigurationError: A key is not a text, or a list has not one per message.
    """
    if order_key is None or isinstance(order_key, str):
        keys: tuple[str | None, ...] = (order_key,) * messages
    else:
        given: object = order_key  # a program without type checks may pass anything
        if not isinstance(given, Sequence) or len(given) != messages:
            raise ConfigurationError(
                "order_key", order_key, f"text, or a list of {messages}, one for each message"
            )
        keys = tuple(order_key)
    for key in keys:
        check_optional_text("order_key", key)
    return keys


# -- messages

BODY_REMEDIES: Final = {
    "str": "encode() makes bytes of it",
    "bytearray": "bytes() makes bytes of it",
    "memoryview": "bytes() makes bytes of it",
}
DELIVER_AFTER_MAX: Final = timedelta(days=40)
"""The longest delay that a broker accepts; it looks at each delayed message at least that often."""

# Names that brokers and clients interpret; the official client rejects them too. Not those of
# requests and replies, which programs of other clients set by themselves. (CHECK_IMMUNITY_TIME… and
# the sharding key are for users to set, and have no constant.)
# Source: MessageConst.STRING_HASH_SET.
RESERVED_NAMES: Final = frozenset(
    value for name, value in vars(names).items() if name.startswith("PROPERTY_")
) - {
    names.PROPERTY_CORRELATION_ID,
    names.PROPERTY_REPLY_TO_CLIENT,
    names.PROPERTY_TTL,
    names.PROPERTY_TYPE,
}


def body_error(body: object) -> str:
    """Return what is wrong with a body that is not bytes."""
    kind = type(body).__name__
    remedy = BODY_REMEDIES.get(kind, "serialize it, for example as JSON")
    return f"the body is {kind}, expected bytes: {remedy}"


def is_topic(name: object) -> bool:
    """Return whether this is a valid name of a topic."""
    return isinstance(name, str) and invalid_topic_reason(name) is None


def topic_error(topic: object) -> str:
    """Return what is wrong with the name of a topic, with a valid example."""
    reason = invalid_text_reason(topic)
    if reason is not None or not isinstance(topic, str):
        return f"topic is {topic!r:.200}, expected text: {reason}"
    if len(topic) > TOPIC_LENGTH_MAX:
        return f"topic has {len(topic)} characters, at most {TOPIC_LENGTH_MAX} are allowed: {topic}"
    remedy = re.sub(r"[^%|a-zA-Z0-9_-]", "_", topic) if topic.strip() else "orders"
    return (
        f"topic is {topic!r}, expected letters, digits and % | - _ only, as RocketMQ's brokers do: "
        f"{remedy}, for example"
    )


def not_text_error(what: str, value: object) -> InvalidMessageError:
    """Return the error of a value that is not text."""
    return InvalidMessageError(
        f"{what} is {value!r:.200}, expected {invalid_text_reason(value) or 'text'}"
    )


def check_number(what: str, value: object, allowed: range) -> None:
    """Raise InvalidMessageError unless the value is a whole number of the range."""
    if not _is_count(value, allowed):
        raise InvalidMessageError(
            f"{what} is {value!r:.200}, expected {allowed.start} to {allowed.stop - 1}"
        )


invalid_topic_reason: Callable[[str], str | None] = lru_cache(maxsize=1024)(validate_topic)
"""Return why a topic name is not valid, or None; cached, because senders repeat their topics."""


def check_delivery(message: Message) -> None:
    """Raise InvalidMessageError unless ``deliver_after`` or ``deliver_at`` is valid."""
    after, at = message.deliver_after, message.deliver_at
    if message.delay_level or (after is not None and at is not None):
        raise InvalidMessageError("one of delay_level, deliver_after and deliver_at, not two")
    for name, value, kind in (("deliver_after", after, timedelta), ("deliver_at", at, datetime)):
        if value is not None and not isinstance(value, kind):
            raise InvalidMessageError(f"{name} is {value!r}, expected a {kind.__name__}")
    if after is not None and not timedelta() < after <= DELIVER_AFTER_MAX:
        days = DELIVER_AFTER_MAX.days
        raise InvalidMessageError(f"deliver_after is {after}, expected up to {days} days, above 0")
    if at is not None and at.tzinfo is None:
        raise InvalidMessageError(f"deliver_at is {at}, without a time zone: give it one")


@lru_cache(maxsize=1024)
def check_tag(tag: str) -> None:
    """Raise InvalidMessageError unless a subscription can name this tag."""
    if not is_tag(tag):
        raise InvalidMessageError(
            f"tags is {tag!r}, expected one tag: text without blanks, quotes and |&!<>=(),;*?"
        )


def join_keys(keys: str | Sequence[str]) -> str:
    """Return the KEYS property for these keys.

    Raises:
        InvalidMessageError: A key of a list is empty or contains a blank, which separates keys.
    """
    if isinstance(keys, str):
        _check_value("keys", keys)
        return keys
    given: object = keys
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise InvalidMessageError(
            f"keys is {keys!r:.200}, expected text or a list of texts: {_key_remedy(keys)}"
        )
    for key in keys:
        if not isinstance(key, str):
            raise InvalidMessageError(f"keys has {key!r:.200}, expected text: {_key_remedy(key)}")
        if not key or " " in key:
            raise InvalidMessageError(f"key {key!r} is empty or contains a blank")
        _check_value("keys", key)
    return " ".join(keys)


def _key_remedy(key: object) -> str:
    return "decode it" if isinstance(key, bytes | bytearray) else "str() makes it one"


def check_properties(properties: Mapping[str, str]) -> None:
    """Raise InvalidMessageError for a reserved name, or text that cannot be decoded again."""
    if not isinstance(properties, Mapping):
        raise InvalidMessageError(
            f"properties is {properties!r:.200}, expected a mapping of names to text"
        )
    for name, value in properties.items():
        if not isinstance(name, str):
            raise not_text_error("name of a property", name)
        if not isinstance(value, str):
            raise InvalidMessageError(
                f"property {name} is {value!r:.200}, expected text: {_key_remedy(value)}"
            )
        if name in RESERVED_NAMES:
            raise InvalidMessageError(f"property {name} is reserved for clients and brokers")
        if not name or "\x01" in name or "\x02" in name:
            raise InvalidMessageError(f"property name {name!r} is empty or contains 0x01 or 0x02")
        _check_value("a property name", name)
        if not value:
            raise InvalidMessageError(f"property {name} is empty; readers would drop it")
        _check_value(f"property {name}", value)


def _check_value(what: str, value: str) -> None:
    if "\x01" in value or "\x02" in value:
        raise InvalidMessageError(f"{what} contains 0x01 or 0x02, which separate properties")
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessageError(f"{what} is not valid Unicode: {error.reason}") from error
