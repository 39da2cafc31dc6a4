"""The MSGPACK body of QUERY_CONSUMERS (9004), a halfmq request about consumers.

It follows the rules of ``transaction_bodies``. A page lists whole members, so it may have more
entries than requested.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from .errors import BodyError
from .transaction_bodies import EndEntry

CONSUMERS_MAX: Final = 1000
"""Entries that may be requested for one page: a few milliseconds of the broker's event loop."""

MEMBER_TOPICS_MAX: Final = 4096
"""Topics of one member, and so entries by which a page may exceed the requested number."""


class ConsumerInfo(EndEntry, frozen=True):
    """The subscription of one member of a consumer group to one topic."""

    group: str
    client_id: str
    address: str  # of the member's connection, "host:port"
    message_model: str  # CLUSTERING or BROADCASTING
    refused: bool  # because it subscribes differently from its group
    topic: str  # empty: it subscribes to nothing
    filter: str  # in normal form: tags in order


_decode: Final = msgspec.msgpack.Decoder(
    cast(
        "Any",
        Annotated[list[ConsumerInfo], msgspec.Meta(max_length=CONSUMERS_MAX + MEMBER_TOPICS_MAX)],
    )
).decode


def decode_consumers(body: bytes) -> list[ConsumerInfo]:
    """Read the answer to QUERY_CONSUMERS.

    Raises:
        BodyError: Not an array of at most ``CONSUMERS_MAX + MEMBER_TOPICS_MAX`` such entries.
    """
    try:
        return cast("list[ConsumerInfo]", _decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"MSGPACK body: {error}") from error
