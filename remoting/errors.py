"""What can go wrong between the bytes of a connection and a command.

    RemotingError
    ├── ProtocolError            the peer sent bytes that are no valid frame: close the connection
    │   ├── FrameTooLargeError       it announced a size below the minimum or above the limit
    │   ├── HeaderError              the header does not fit its length, type or encoding
    │   └── BodyError                the body is not what its request or answer promises
    ├── SubscriptionError        a filter expression that names no tag
    └── TooManyRequestsError     our caller has too many requests waiting on one connection

A required ext field that is missing is none of these: the request is known and can be answered,
so ``RemotingCommand.header_error`` says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .command import RemotingCommand


class RemotingError(Exception):
    """Root of everything this package raises."""


class ProtocolError(RemotingError):
    """The peer's fault, and not one that an answer could mend.

    Attributes:
        reason: What was wrong, for the log.
        commands: Whole commands that stood before the bad frame in the same read; a server may
            still serve them before it closes the connection.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.commands: list[RemotingCommand] = []

    def __str__(self) -> str:
        return self.reason


class FrameTooLargeError(ProtocolError):
    """The announced frame is outside the limits; its bytes are neither read nor kept."""

    def __init__(self, size: int, size_max: int) -> None:
        super().__init__(f"frame of {size} bytes, allowed are 8 to {size_max}")
        self.args = (size, size_max)
        self.size, self.size_max = size, size_max


class HeaderError(ProtocolError):
    """The header contradicts its length, its type or its encoding."""


class BodyError(ProtocolError):
    """A body that its reader cannot understand. The frame around it was fine."""


class SubscriptionError(RemotingError):
    """A filter expression from which no subscription can be made."""

    def __init__(self, expression: str) -> None:
        super().__init__(expression)
        self.expression = expression

    def __str__(self) -> str:
        return f"no tag in the expression {self.expression!r}"


class TooManyRequestsError(RemotingError):
    """As many requests are waiting for an answer as the connection allows."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.limit} requests are already waiting for an answer"
