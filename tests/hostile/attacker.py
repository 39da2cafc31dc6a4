"""What attacks send with: connections that are all closed at the end of the attack."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, Final, NamedTuple

from halfmq.remoting.ext_fields import Header
from halfmq.remoting.replies import encode_request
from tests.support.rocketmq_broker import Wire

SEND_S: Final = 5.0
"""Seconds after which the rest of a flood is given up: the broker no longer reads it."""


class Attacker:
    """Speaks the protocol correctly, and does not mind being cut off."""

    def __init__(self, address: str, random: Random) -> None:
        self.address, self.random = address, random
        self._opened = contextlib.ExitStack()

    def close(self) -> None:
        """Close every connection."""
        self._opened.close()

    def wire(self) -> Wire:
        """Return a new connection, for requests whose answers are read."""
        return self._opened.enter_context(Wire(self.address))

    def connect(self, port: int = 0) -> socket.socket:
        """Return a new connection of which nothing is read; 0 is the port of clients."""
        host, _, usual = self.address.rpartition(":")
        peer = host, port or int(usual)
        return self._opened.enter_context(socket.create_connection(peer, SEND_S))

    def flood(
        self, *data: bytes | memoryview, connected: socket.socket | None = None, port: int = 0
    ) -> bool:
        """Send bytes on a connection, a new one by default; return whether all were taken."""
        try:
            connected = connected or self.connect(port)
            for one in data:
                connected.sendall(one)
        except OSError:
            return False
        return True

    def ask(
        self, code: int, header: Header | Mapping[str, str] | None = None, body: bytes = b""
    ) -> int | None:
        """Make one request on a connection of its own; return its code, None if it was cut off."""
        try:
            with Wire(self.address) as wire:
                return wire.ask(code, header, body).code
        except (OSError, AssertionError):
            return None


class Attack(NamedTuple):
    """A row of the table."""

    act: Callable[[Attacker], None]
    once: str = ""
    """What it did before the broker was bounded: the longest wait of others, or its memory."""
    settings: Mapping[str, Any] = {}
    peak_max_mb: int = 250
    """Resident memory of the broker, mapped files included, never exceeds this."""
    descriptors: int = 0
    """Of the broker's process; 0: as many as usual."""
    kept_max_mb: int = 20
    """Of its own memory, what the broker may have more of afterwards: pools of the allocator, which
    the next attack would use again."""


def frame(
    code: int,
    header: Header | Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    opaque: int = 1,
    one_way: bool = False,
) -> bytes:
    """Return the bytes of a request with a JSON header."""
    return encode_request(code, opaque=opaque, header=header, body=body, one_way=one_way)


def pages(count: int, make: Callable[[int], bytes], size: int = 500) -> Iterable[bytes]:
    """Join many frames into larger writes."""
    for start in range(0, count, size):
        yield b"".join(make(number) for number in range(start, min(start + size, count)))
