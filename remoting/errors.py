"""Errors of encoding and decoding frames.

    RemotingError
    ├── ProtocolError            the peer sent bytes that are no valid frame: close the connection
    │   ├── FrameTooLargeError       it announced a size below the minimum or above the limit
    │   ├── OtherProtocolError       it speaks HTTP/2, HTTP or TLS
    │   ├── HeaderError              the header does not fit its length, type or encoding
    │   └── BodyError                the body does not fit its request or response
    ├── SubscriptionError        a filter expression that names no tag
    └── TooManyRequestsError     the caller has too many requests in flight on one connection

A missing required ext field raises none of these: the request is known and can be answered, so it
is reported in ``RemotingCommand.header_error``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .command import RemotingCommand


class RemotingError(Exception):
    """Root of everything this package raises."""


class ProtocolError(RemotingError):
    """The peer sent bytes that are not a valid frame, so the connection must be closed.

    Attributes:
        reason: What was wrong, for the log.
        commands: Whole commands that preceded the bad frame in the same read; a server may still
            process them before it closes the connection.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.commands: list[RemotingCommand] = []

    def __str__(self) -> str:
        return self.reason


class FrameTooLargeError(ProtocolError):
    """The announced size is outside the limits of frames, or of the request; it is not parsed."""

    def __init__(self, size: int, size_max: int) -> None:
        super().__init__(f"frame of {size} bytes, allowed are 8 to {size_max}")
        self.args = (size, size_max)
        self.size, self.size_max = size, size_max


class OtherProtocolError(ProtocolError):
    """The peer speaks ``protocol``: ``HTTP/2`` (gRPC begins so), ``HTTP`` or ``TLS``."""

    def __init__(self, protocol: str) -> None:
        super().__init__(f"the peer speaks {protocol} and not RocketMQ's remoting protocol")
        self.args = (protocol,)
        self.protocol = protocol


class HeaderError(ProtocolError):
    """The header contradicts its length, its type or its encoding."""


class BodyError(ProtocolError):
    """The body cannot be decoded, although the frame around it is valid."""


class SubscriptionError(RemotingError):
    """A filter expression names no tag, so it is not a subscription."""

    def __init__(self, expression: str) -> None:
        super().__init__(expression)
        self.expression = expression

    def __str__(self) -> str:
        return f"no tag in the expression {self.expression!r}"


class TooManyRequestsError(RemotingError):
    """The connection has as many requests in flight as it allows."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.limit} requests are already waiting for an answer"
