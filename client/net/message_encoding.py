"""Encode a user's message for a send request: properties, flags and compressed body."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from halfmq.store.format import properties as names
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.properties import PROPERTIES_SIZE_MAX

from ..arguments import join_keys
from ..config import ClientConfig
from ..errors import InvalidMessageError, MessageTooLargeError
from ..message import Message
from .compression import compress_body

_WIDEST_CHARACTER: Final = 4  # bytes of UTF-8
_MILLISECOND: Final = timedelta(milliseconds=1)
_TIMERS: Final = names.PROPERTY_TIMER_DELAY_MS, names.PROPERTY_TIMER_DELIVER_MS
_AFTER_COMMIT: Final = names.PROPERTY_TRANSACTION_DELAY_MS, names.PROPERTY_TRANSACTION_DELIVER_MS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class EncodedMessage(NamedTuple):
    """A message, encoded once for all attempts to send it."""

    message: Message
    unique_key: str
    properties: str
    sys_flag: int
    body: bytes


def encode_message(message: Message, unique_key: str, config: ClientConfig) -> EncodedMessage:
    """Encode one ordinary message.

    Raises:
        MessageTooLargeError: Body or properties are above their limit.
    """
    properties = _property_text(message, unique_key) + _delivery_text(message, *_TIMERS)
    _check_sizes(message.body, properties, config)
    body, sys_flag = compress_body(message.body, config.compress_over, config.compression)
    return EncodedMessage(message, unique_key, properties, sys_flag, body)


def encode_half_message(
    message: Message, unique_key: str, group: str, config: ClientConfig
) -> EncodedMessage:
    """Encode a half message of the producer group.

    The broker recognises it by the property TRAN_MSG; the flag alone would store a message that no
    consumer ever gets.

    Raises:
        InvalidMessageError: It has a delay level, which would delay the half and not the message.
        MessageTooLargeError: Body or properties are above their limit.
    """
    if message.delay_level:
        raise InvalidMessageError(
            "a message of a transaction cannot have a delay level: deliver_after counts from its "
            "commit"
        )
    properties = (
        f"{_property_text(message, unique_key)}{_delivery_text(message, *_AFTER_COMMIT)}"
        f"{names.PROPERTY_TRAN_MSG}\x01true\x02{names.PROPERTY_PGROUP}\x01{group}\x02"
    )
    _check_sizes(message.body, properties, config)
    body, sys_flag = compress_body(message.body, config.compress_over, config.compression)
    return EncodedMessage(
        message, unique_key, properties, sys_flag | TransactionType.PREPARED, body
    )


def _delivery_text(message: Message, after: str, at: str) -> str:
    """Return the property with the delivery time of a message, of one of two names; or nothing."""
    if message.deliver_after is not None:
        ms = -(-message.deliver_after // _MILLISECOND)  # rounded up, so never early
        return f"{after}\x01{ms}\x02"
    if message.deliver_at is not None:
        # A time before 1970 counts as past; the property cannot be negative.
        ms = max(1, -((_EPOCH - message.deliver_at) // _MILLISECOND))
        return f"{at}\x01{ms}\x02"
    return ""


def encode_message_batch(
    messages: Sequence[Message], unique_keys: Sequence[str], config: ClientConfig
) -> EncodedMessage:
    """Encode messages of one topic as one batch, without compression.

    Raises:
        InvalidMessageError: No message, several topics, mixed ``wait_durable``, or a delay.
        MessageTooLargeError: The batch, or the properties of a message, are above their limit.
    """
    first = _check_batch(messages)
    pairs = zip(messages, unique_keys, strict=True)
    encoded = join_units(first, unique_keys, [encode_unit(*pair, config) for pair in pairs])
    body = encoded.body
    if len(body) > config.message_size_max:
        raise MessageTooLargeError("batch", len(body), config.message_size_max)
    return encoded


def encode_unit(message: Message, unique_key: str, config: ClientConfig) -> BatchUnit:
    """Encode a message for a batch.

    Raises:
        MessageTooLargeError: Body or properties are above their limit.
    """
    properties = _property_text(message, unique_key)
    _check_sizes(message.body, properties, config)
    return BatchUnit(message.flag, message.body, properties.encode())


def join_units(
    first: Message, unique_keys: Sequence[str], units: Sequence[BatchUnit]
) -> EncodedMessage:
    """Return the batch of these units, the first of which is that of ``first``."""
    # No UNIQ_KEY in the request's own properties: an official broker would add it to every unit
    # and so give all of them one id.
    properties = f"{names.PROPERTY_WAIT}\x01{'true' if first.wait_durable else 'false'}\x02"
    return EncodedMessage(first, ",".join(unique_keys), properties, 0, encode_batch(units))


def _check_batch(messages: Sequence[Message]) -> Message:
    if not messages:
        raise InvalidMessageError("a batch needs at least one message")
    first = messages[0]
    for message in messages:
        if message.topic != first.topic:
            raise InvalidMessageError(
                f"a batch goes to one topic, not to {first.topic} and {message.topic}"
            )
        if message.delay_level or message.deliver_after or message.deliver_at:
            raise InvalidMessageError("a message in a batch cannot be delayed: send it by itself")
        if message.wait_durable != first.wait_durable:
            raise InvalidMessageError("wait_durable must be the same for a whole batch")
    return first


def _property_text(message: Message, unique_key: str) -> str:
    """Return the message's properties and id; its constructor has checked names and values."""
    parts = [f"{names.PROPERTY_UNIQ_KEY}\x01{unique_key}\x02"]
    if message.tags:
        parts.append(f"{names.PROPERTY_TAGS}\x01{message.tags}\x02")
    if message.keys:
        parts.append(f"{names.PROPERTY_KEYS}\x01{join_keys(message.keys)}\x02")
    if not message.wait_durable:
        parts.append(f"{names.PROPERTY_WAIT}\x01false\x02")
    if message.delay_level:
        parts.append(f"{names.PROPERTY_DELAY}\x01{message.delay_level}\x02")
    if message.properties:
        parts += [f"{name}\x01{value}\x02" for name, value in message.properties.items()]
    return "".join(parts)


def _check_sizes(body: bytes, properties: str, config: ClientConfig) -> None:
    if len(body) > config.message_size_max:
        raise MessageTooLargeError("body", len(body), config.message_size_max)
    if len(properties) * _WIDEST_CHARACTER > PROPERTIES_SIZE_MAX:
        size = len(properties.encode())
        if size > PROPERTIES_SIZE_MAX:
            raise MessageTooLargeError("properties", size, PROPERTIES_SIZE_MAX)
