"""FrameDecoder: cuts the byte stream of one connection into commands.

It owns no socket: the caller passes in what the transport read and gets whole commands back. If
the previous read left nothing over, frames are sliced straight out of the given bytes. An
unfinished frame waits in a buffer that is not examined again until it holds the whole frame, so a
large frame that arrives in many small reads is copied twice in all, not once per read.

A server's decoder accepts each request up to the size of its code (``request_sizes``). Most frames
are below all of these sizes, so only larger ones are looked at again.
"""

from struct import Struct
from typing import Final

from .command import RemotingCommand
from .errors import FrameTooLargeError, HeaderError, OtherProtocolError, ProtocolError
from .request_sizes import FRAME_SIZE_MAX, HEADER_MAX, PEEKED, REQUEST_SIZES, SMALL, peek_size
from .serialization import (
    FRAME_HEAD,
    HEADER_SIZE_MAX,
    REQUEST_READERS,
    RESPONSE_READERS,
    encode_frame,
)

__all__ = ["FRAME_SIZE_MAX", "FrameDecoder", "encode_frame"]

_LENGTH: Final = Struct(">i")
_HTTP: Final = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"CONN", b"OPTI", b"TRAC", b"PATC")
_OTHER_PROTOCOLS: Final = (
    (b"PRI ", "HTTP/2"),
    *((begin, "HTTP") for begin in (*_HTTP, b"HTTP")),
    (b"\x16\x03", "TLS"),  # a handshake
    (b"\x15\x03", "TLS"),  # an alert
)
"""How other protocols begin; as lengths, these bytes are above every limit."""

_unpack_head: Final = FRAME_HEAD.unpack_from
_HEAD_SIZE: Final = FRAME_HEAD.size


class FrameDecoder:
    """Bytes in, commands out; one per connection.

    After an error the stream has no frame boundary any more: every later call raises it again.
    """

    def __init__(
        self, *, frame_size_max: int = FRAME_SIZE_MAX, responses_first: bool = False
    ) -> None:
        """Start at a frame boundary.

        Args:
            frame_size_max: Bytes of the largest frame taken, its 4 length bytes included.
            responses_first: The peer is a server, so decode JSON headers as responses first, and
                do not limit the sizes of requests by their codes.
        """
        self._frame_size_max = frame_size_max
        self._length_max = frame_size_max - _LENGTH.size
        self._readers = RESPONSE_READERS if responses_first else REQUEST_READERS
        self._unlimited = frame_size_max if responses_first else SMALL.body
        self._buffer = bytearray()
        self._needed = 0  # bytes that the buffer must hold before the frame can be decoded
        self._error: ProtocolError | None = None
        self.buffered = 0
        """Bytes of an unfinished frame; below ``frame_size_max`` between calls."""

    def receive_data(self, data: bytes) -> list[RemotingCommand]:
        """Decode what the transport read; return the commands that it completed, perhaps none.

        Raises:
            ProtocolError: The stream holds no valid frame at this position. ``error.commands`` has
                the commands completed before it; close the connection.
        """
        if self._needed:
            if self._error is not None:
                raise ProtocolError(f"more bytes after: {self._error}")
            if self.buffered + len(data) < self._needed:
                self._buffer += data
                self.buffered += len(data)
                return []
            data = b"".join((self._buffer, data))
            self._buffer = bytearray()
            self._needed = self.buffered = 0
        commands: list[RemotingCommand] = []
        size = len(data)
        start = 0
        readers, length_max = self._readers, self._length_max  # looked up once, not per frame
        unlimited = self._unlimited
        try:
            while size - start >= _HEAD_SIZE:
                length, word = _unpack_head(data, start)
                end = start + 4 + length
                if not 4 <= length <= length_max:
                    raise self._bad_length(data, start, length)
                if end > size:
                    break
                body_start = start + 8 + (word & HEADER_SIZE_MAX)
                if body_start > end:
                    raise HeaderError("header is longer than its frame")
                read = readers.get(word >> 24)
                if read is None:
                    raise HeaderError(f"header type {word >> 24}")
                if length > unlimited and body_start - start - 8 > HEADER_MAX:
                    raise FrameTooLargeError(4 + length, self._frame_size_max)
                command = read(data[start + 8 : body_start], data[body_start:end])
                if length > unlimited:
                    header_max, body_max = REQUEST_SIZES.get(command.code, SMALL)
                    if body_start - start - 8 > header_max or end - body_start > body_max:
                        raise FrameTooLargeError(4 + length, 8 + header_max + body_max)
                commands.append(command)
                start = end
            if start < size:
                self._needed = self._frame_size(data, start)
        except ProtocolError as error:
            error.commands = commands
            self._error, self._needed = error, 1
            raise
        if start < size:
            self._buffer += memoryview(data)[start:]
            self.buffered = size - start
        return commands

    def _bad_length(self, data: bytes, start: int, length: int) -> ProtocolError:
        for begin, protocol in _OTHER_PROTOCOLS:
            if data.startswith(begin, start):
                return OtherProtocolError(protocol)
        return FrameTooLargeError(4 + length, self._frame_size_max)

    def _frame_size(self, data: bytes, start: int) -> int:
        """Return how many bytes are needed to decode the unfinished frame, or to learn its size."""
        have = len(data) - start
        if have < _LENGTH.size:
            return _HEAD_SIZE
        (length,) = _LENGTH.unpack_from(data, start)
        if not 4 <= length <= self._length_max:
            raise self._bad_length(data, start, length)
        if length > self._unlimited:
            if have < _HEAD_SIZE + PEEKED:
                return _HEAD_SIZE + PEEKED
            _, word = _unpack_head(data, start)
            header = word & HEADER_SIZE_MAX
            allowed = peek_size(word >> 24, data[start + 8 : start + 8 + PEEKED])
            if header > allowed.header or length - 4 - header > allowed.body:
                raise FrameTooLargeError(4 + length, 8 + allowed.header + allowed.body)
        return 4 + int(length)
