"""Errors of the broker.

`BrokerError`
├── `RequestRefusedError`: the request is refused, with this code and remark as its answer
│   └── `MessageRefusedError`: the same for a message
├── `NotYetError`: the request is served later, after something else is done
├── `UnfinishedError`: the request and those after it wait, for a turn of the loop or for room
├── `FilterSyntaxError`, `EvaluationError`: an SQL92 filter is wrong, or fails on a message
├── `BrokerConfigError`: a setting is wrong; the broker does not start (exit code 2)
└── `AddressTakenError`: another process listens on the address (exit code 5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfmq.remoting.codes import ResponseCode
from halfmq.store.errors import (
    DiskFullError,
    FlushFailedError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreClosedError,
    StoreError,
    WriteFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfmq.remoting.command import RemotingCommand

    from .ports import Connection

REFUSAL_FIELDS: Final[Mapping[str, str]] = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
"""Ext fields of every refusal of a message. Source: RocketMQ ``SendMessageProcessor``."""

STORE_ERROR_CODES: Final[Mapping[type[StoreError], ResponseCode]] = {
    RecordTooLargeError: ResponseCode.MESSAGE_ILLEGAL,
    PropertiesTooLongError: ResponseCode.MESSAGE_ILLEGAL,
    DiskFullError: ResponseCode.SERVICE_NOT_AVAILABLE,
    WriteFailedError: ResponseCode.SERVICE_NOT_AVAILABLE,
    FlushFailedError: ResponseCode.SERVICE_NOT_AVAILABLE,
    StoreClosedError: ResponseCode.SERVICE_NOT_AVAILABLE,
}
"""Store error → answer, as RocketMQ's put statuses. Source: `SendMessageProcessor`."""


class BrokerError(Exception):
    """Root of the broker's own errors."""


class RequestRefusedError(BrokerError):
    """A request is answered with `code` and `remark` instead of being served."""

    def __init__(
        self,
        remark: str,
        code: ResponseCode = ResponseCode.SYSTEM_ERROR,
        ext_fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(remark, code, ext_fields)
        self.remark, self.code, self.ext_fields = remark, code, ext_fields

    def __str__(self) -> str:
        return f"{self.code.name}: {self.remark}"

    def answered(self, command: RemotingCommand, connection: Connection) -> None:
        """Called when this error becomes the answer to a command; subclasses count or log it."""


class MessageRefusedError(RequestRefusedError):
    """A message is refused; the answer has the ext fields that RocketMQ gives it."""

    def __init__(self, remark: str, code: ResponseCode = ResponseCode.MESSAGE_ILLEGAL) -> None:
        super().__init__(remark, code, REFUSAL_FIELDS)


def invalid_parameter(remark: str) -> RequestRefusedError:
    """Return the refusal of an operator's request that asks for something invalid."""
    return RequestRefusedError(remark, ResponseCode.INVALID_PARAMETER)


class NotYetError(BrokerError):
    """The request must be served again later; nothing was changed for it yet."""

    def __init__(
        self, wait: Callable[[Callable[[RequestRefusedError | None], None], int], None]
    ) -> None:
        """``wait`` takes a function that serves or refuses the request, and the request's size.

        It calls the function once: with None to serve the request, or with its refusal.
        """
        super().__init__(wait)
        self.wait = wait


class UnfinishedError(BrokerError):
    """The request is continued later, before the next ones of its peer, who is not read until then.

    The connection keeps its progress in ``unfinished``.
    """

    def __init__(self, until: Callable[[Callable[[], None]], None] | None = None) -> None:
        """``until`` takes a function and calls it when to continue; None: in the next turn."""
        super().__init__(until)
        self.until = until


class BrokerConfigError(BrokerError):
    """A setting has an invalid value."""

    def __init__(self, source: str, key: str, value: str, expected: str) -> None:
        super().__init__(source, key, value, expected)
        self.source, self.key, self.value, self.expected = source, key, value, expected

    def __str__(self) -> str:
        setting = f"{self.key}={self.value}: " if self.key else ""
        return f"{self.source}: {setting}expected {self.expected}"


class AddressTakenError(BrokerError):
    """The address of a listener is in use, or is not an address of this machine."""

    def __init__(self, address: str, key: str, reason: str) -> None:
        super().__init__(address, key, reason)
        self.address, self.key, self.reason = address, key, reason

    def __str__(self) -> str:
        remedy = f"end the other process or set {self.key}"
        return f"cannot listen on {self.address}: {self.reason}; {remedy}"


class FilterSyntaxError(BrokerError):
    """An SQL92 expression is wrong at ``position``, in characters from its start."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position, self.reason = position, reason

    def __str__(self) -> str:
        return f"SQL92 filter is wrong at character {self.position + 1}: {self.reason}"


class EvaluationError(BrokerError):
    """The values of a message cannot be compared as the expression requires."""
