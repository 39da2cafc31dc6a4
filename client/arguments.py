"""Argument checks: errors name the argument, its value and the remedy.

Programs without type checks pass bytes for text, numbers for keys and None for anything. Checked
here, the error is clear; found later in an encoder, it would not be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from .errors import ConfigurationError

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
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not allowed.start <= value < allowed.stop
    ):
        raise ConfigurationError(
            name, value, f"a whole number, {allowed.start} to {allowed.stop - 1}"
        )


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
