"""The slave's side of RocketMQ's HA protocol, message by message."""

from __future__ import annotations

import socket
from struct import Struct
from typing import Final, Self

from tests.support.patience import PATIENCE_S

REPORT: Final = Struct(">q")
HEAD: Final = Struct(">qi")


class ScriptedSlave:
    """One connection to the replication port of a master."""

    def __init__(self, port: int, *, received_max: int | None = None) -> None:
        """Connect; ``received_max`` limits what the system keeps until it is read."""
        self._socket = socket.socket()
        if received_max is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_max)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(("127.0.0.1", port))
        self.log = bytearray()
        """What it has copied, from the first byte that it was sent."""
        self.first = -1
        """The offset of that byte."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def report(self, offset: int) -> None:
        """Say where its log ends."""
        self._socket.sendall(REPORT.pack(offset))

    def receive(self) -> tuple[int, bytes]:
        """Return the offset and the bytes of the next piece; none if it is a sign of life."""
        offset, size = HEAD.unpack(self._exactly(HEAD.size))
        return offset, self._exactly(size)

    def copy(self, end: int, *, reports: bool = False) -> None:
        """Copy the log up to an offset, and confirm each piece or none.

        A master gives up a slave that says nothing for 20 seconds.
        """
        while self.first < 0 or self.first + len(self.log) < end:
            offset, piece = self.receive()
            if piece:
                self.first = offset if self.first < 0 else self.first
                assert offset == self.first + len(self.log), "a slave closes on a gap"
                self.log += piece
                if reports:
                    self.report(self.first + len(self.log))

    def is_closed(self) -> bool:
        """Return whether the master closes the connection; pieces that are on their way count."""
        try:
            while self._socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            if not part:
                raise ConnectionResetError("the master closed the connection")
            found += part
        return found
