"""Which header class each request and each answer has, and how ext fields become one.

The classes declare their request codes: see ``ext_fields.request_header``.

Source: RocketMQ ``remoting/protocol/header``.
"""

from typing import TypeVar

import msgspec

# Importing these declares their classes with ``request_header`` and ``answer_header``.
from . import access_bodies, admin_headers, headers, own_requests, pop  # noqa: F401
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import (
    ARRAY_MARKS,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    FieldError,
    Header,
    array_variant,
    parse_texts,
)

__all__ = ["REQUEST_HEADERS", "RESPONSE_HEADERS", "response_header", "typed_request_header"]

H = TypeVar("H", bound=Header)


def typed_request_header(code: int, texts: dict[str, str] | None) -> tuple[object, str | None]:
    """Return ``header`` and ``header_error`` of a request with these ext fields."""
    kind = REQUEST_HEADERS.get(code)
    if kind is None:
        return texts, None
    texts = texts or {}
    try:
        return parse_texts(kind, texts), None
    except FieldError as error:
        return texts, str(error)


def response_header(command: RemotingCommand, kind: type[H]) -> H:
    """Decode a response's ext fields as the class that its request requires.

    Raises:
        HeaderError: The peer left out a required field, or a value does not parse.
    """
    try:
        if isinstance(command.header, msgspec.Raw):
            return _from_msgpack(command.header, kind)
        texts = command.header or {}
        assert isinstance(texts, dict), "a response is not typed by its decoder"
        return parse_texts(kind, texts)
    except FieldError as error:
        raise HeaderError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeaderError(f"response header: {error}") from error


def _from_msgpack(raw: msgspec.Raw, kind: type[H]) -> H:
    if memoryview(raw)[0] in ARRAY_MARKS:
        header: H = msgspec.msgpack.decode(raw, type=array_variant(kind), strict=False)
        return header
    return parse_texts(kind, msgspec.msgpack.decode(raw, type=dict[str, str]))
