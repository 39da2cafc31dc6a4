"""The MSGPACK body of our own request about consumers (9004), under the rules of ``transactions``.

A page lists whole members, so it may have more entries than were asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from .errors import BodyError
from .transactions import Entry

CONSUMERS_MAX: Final = 1000
"""Entries that one page may be asked for: some milliseconds of the broker's loop."""

MEMBER_TOPICS_MAX: Final = 4096
"""Topics of one member, and so entries by which a page may exceed what was asked for."""


class ConsumerInfo(Entry, frozen=True):
    """What one member of a consumer group wants of one topic."""

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
        BodyError: Not an array of so many such entries at most.
    """
    try:
        return cast("list[ConsumerInfo]", _decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"MSGPACK body: {error}") from error
