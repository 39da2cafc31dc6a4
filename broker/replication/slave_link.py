"""One connection of a slave: RocketMQ's HA protocol, from the side of the master.

The slave sends the offset at which its log ends as int64: the first time to say from where it wants
the log, and then after each append and every five seconds. The master sends pieces of the log, each
after its offset and size; a piece without bytes is a sign of life. A piece lies within one file,
because the slave appends it to one. There is no handshake and no identity, so every number of a
slave is compared with what was sent to it.

Only what is on this disk is sent: a slave that is ahead of its master could never follow it again.

Source: RocketMQ 5.3.3 ``DefaultHAConnection``, ``DefaultHAClient``.
"""

import asyncio
from collections.abc import Callable
from struct import Struct
from typing import Final, Protocol, cast

from attrs import define

from halfmq.store.message_store import MessageStore

from ..loop.fetches import Fetch

_REPORT: Final = Struct(">q")  # where the slave's log ends
_HEAD: Final = Struct(">qi")  # physical offset and size of the piece that follows
assert _HEAD.size == 12  # RocketMQ's TRANSFER_HEADER_SIZE

PIECE_MAX: Final = 64 << 10
"""Bytes of one piece. RocketMQ sends 32 KiB; a slave takes up to 4 MiB."""

PIECES_PER_TURN: Final = 16
"""Pieces sent before the loop serves others: a millisecond of work."""

BUFFERED_MAX: Final = 256 << 10
"""Bytes that wait in this process for a slave to read them; then no more are read from the log."""


class Slaves(Protocol):
    """What a link tells about its slave."""

    def connected(self, link: "SlaveLink") -> str:
        """Return why a peer is refused that has just connected; empty if it is not."""
        ...

    def accept(self, link: "SlaveLink") -> str:
        """Return why a slave is refused that has said where its log ends; empty if it is not."""
        ...

    def confirmed(self, link: "SlaveLink") -> None:
        """Note that the slave has the log up to ``link.acked_offset``."""
        ...

    def lost(self, link: "SlaveLink", reason: str) -> None:
        """Forget the link."""
        ...


@define(eq=False, repr=False, slots=False)
class SlaveLink(asyncio.Protocol):
    """Sends the log to one slave."""

    _store: MessageStore
    _file_size: int  # bytes of a file of the log
    _slaves: Slaves
    _fetch: Fetch
    _now_s: Callable[[], float]  # monotonic

    def __attrs_post_init__(self) -> None:
        self.host, self.name = "", ""
        self.sent_offset = -1  # physical offset of the next piece; -1: the slave has asked for none
        self.acked_offset = 0  # where the slave's log ends
        self.heard_s = self.sent_s = self._now_s()  # when there was something last
        self._reason = "it has closed the connection"
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._is_paused = self._is_fetching = self._is_scheduled = False

    # --- from the slave

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFERED_MAX)
        self.host, port = transport.get_extra_info("peername")[:2]
        self.name = f"{self.host}:{port}"
        refusal = self._slaves.connected(self)
        if refusal:
            self.close(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._slaves.lost(self, str(exc) if exc else self._reason)

    def close(self, reason: str) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._now_s()
        received = self._received + data
        whole = len(received) - len(received) % _REPORT.size
        self._received = received[whole:]
        for (offset,) in _REPORT.iter_unpack(received[:whole]):
            refusal = self._begin(offset) if self.sent_offset < 0 else self._acknowledge(offset)
            if refusal:
                self.close(refusal)
                return
        if whole:
            self._slaves.confirmed(self)
            self.send()

    def _begin(self, offset: int) -> str:
        """Begin where the slave's log ends, or at the first file for an empty one."""
        first, end = self._store.min_offset, self._store.flushed_offset
        if offset > end or offset < 0:
            return (
                f"its log ends at {offset} and this one at {end}: it holds another log, or what "
                "this one has lost; compare both before you use either"
            )
        if 0 < offset < first:
            return (
                f"its log ends at {offset}, and the log from there to {first} was deleted: empty "
                "its directory, and it copies everything again"
            )
        self.acked_offset = offset
        refusal = self._slaves.accept(self)
        if not refusal:
            self.sent_offset = offset or first
        return refusal

    def _acknowledge(self, offset: int) -> str:
        # A slave repeats where it ends as a sign of life; one that was empty may say 0 until then.
        if not self.acked_offset <= offset <= self.sent_offset:
            return (
                f"it says that its log ends at {offset}: it has confirmed {self.acked_offset}, "
                f"and was sent the log up to {self.sent_offset}"
            )
        self.acked_offset = offset
        return ""

    # --- to the slave

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.send()

    def send(self) -> None:
        """Send what is on disk, as much as the slave takes now."""
        if self.sent_offset < 0 or self._is_fetching or self._is_scheduled:
            return
        for _ in range(PIECES_PER_TURN):
            size = min(
                self._store.flushed_offset - self.sent_offset,
                self._file_size - self.sent_offset % self._file_size,
                PIECE_MAX,
            )
            if size <= 0 or self._is_paused or self._transport is None:
                return
            part = self.sent_offset, size
            try:
                piece = self._store.reader.read([part])
            except OSError as error:  # retention has deleted it, or the disk refuses
                self.close(f"the log at {self.sent_offset} cannot be read: {error}")
                return
            if piece is None:
                self._is_fetching = True
                self._fetch(self._store.reader.lacking_ranges([part]), self._fetched)
                return
            self._write(piece)
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._continue)

    def send_sign_of_life(self) -> None:
        """Show a slave that waits for the log that this master is there."""
        if self.sent_offset >= 0 and not self._is_paused:
            self._write(b"")

    def _write(self, piece: bytes) -> None:
        if self._transport is not None:
            self._transport.write(_HEAD.pack(self.sent_offset, len(piece)) + piece)
            self.sent_offset += len(piece)
            self.sent_s = self._now_s()

    def _continue(self) -> None:
        self._is_scheduled = False
        self.send()

    def _fetched(self, is_there: bool) -> None:
        self._is_fetching = False
        if is_there:
            self.send()
        else:
            self.close(f"the log at {self.sent_offset} cannot be read")
