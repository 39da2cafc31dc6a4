"""Codecs: make message bodies of values, and values of bodies.

::

    orders = json(Order)  # a msgspec.Struct, a dataclass, a TypedDict, ...

    async with Producer("orders-producer", codec=orders) as producer:
        await producer.send(producer.message("orders", Order("o-1", 3), keys="o-1"))

    async with Consumer("billing", {"orders": "*"}, codec=orders) as consumer:
        async for message in consumer:
            print(message.value.amount)  # an Order, for type checkers too
            await message.ack()

Any other format is a ``Codec`` of two functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic

import msgspec

from .message import V


@dataclass(frozen=True, slots=True)
class Codec(Generic[V]):
    """How values become the bodies of messages, and bodies values."""

    encode: Callable[[V], bytes]
    """Raises any exception for a value that it cannot encode."""
    decode: Callable[[bytes], V]
    """Raises any exception for a body that it cannot decode; its text is the reason."""


def json(kind: type[V]) -> Codec[V]:
    """Return the codec for JSON, by msgspec: structs, dataclasses, TypedDicts and plain types."""
    return Codec(msgspec.json.Encoder().encode, msgspec.json.Decoder(kind).decode)


def msgpack(kind: type[V]) -> Codec[V]:
    """Return the codec for MessagePack, for the same types as ``json``."""
    return Codec(msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(kind).decode)


def pydantic(kind: type[V]) -> Codec[V]:
    """Return the codec for JSON by Pydantic 2, for its models and all types that it validates.

    Raises:
        ModuleNotFoundError: Pydantic is not installed.
    """
    from pydantic import TypeAdapter  # noqa: PLC0415 -- only users of Pydantic have it

    adapter: Any = TypeAdapter(kind)
    return Codec(adapter.dump_json, adapter.validate_json)


raw: Final[Codec[bytes]] = Codec(bytes, bytes)
"""The codec of bytes as they are; clients without a codec work so."""
