"""Interfaces that several folders share.

`net/connection.py` implements `Connection`. Handlers and services see only the Protocol, so that
they can be tested without a socket.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.store.files.zero_copy import FilePart

if TYPE_CHECKING:
    from .limits.long_answers import LongAnswers

ACK_S: Final = 3.0
"""Seconds after which a request to a client counts as not received. A client acknowledges it at
once, unless it hangs or is overloaded. RocketMQ's clients wait as long for an answer."""

OnAnswer = Callable[[RemotingCommand | None], None]
"""Takes the answer, or None if there will be none."""


class Connection(Protocol):
    """One client's TCP connection, as handlers use it."""

    name: str  # the peer, "127.0.0.1:54321"
    remote_host: bytes  # packed address and int32 port of the peer (8 or 20 bytes): a bornHost
    store_host: bytes  # packed address that the client reached, with the broker's listenPort
    broker_address: str  # the same as text, "127.0.0.1:10911", for routes
    language: int  # LanguageCode of the peer's latest request
    version: int  # MQVersion ordinal of the peer's latest request
    subject: object  # access.control.Subject of the latest request; None without access control
    unfinished: object  # progress of a request that takes several turns of the loop
    long_answers: LongAnswers  # those of all connections
    acknowledges: bool  # whether the peer answers checks, as clients of halfmq do

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        ...

    @property
    def address(self) -> str:
        """The address of the peer, without its port."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...

    @property
    def writable(self) -> bool:
        """Whether the peer reads its replies: its write buffer is below the limit."""
        ...

    def send_request(
        self, code: int, header: Header | Mapping[str, str] | None, body: bytes = b""
    ) -> bool:
        """Send a one-way request to the client; return False if it was not written."""
        ...

    def ask(
        self,
        code: int,
        header: Header | Mapping[str, str] | None,
        body: bytes,
        on_answer: OnAnswer,
        *,
        seconds: float = ...,
    ) -> bool:
        """Send a request that the client answers; return False if it was not written.

        Otherwise ``on_answer`` is called once, after this call has returned: with the answer, or
        with None after ``seconds`` (``ACK_S``) or if the connection is lost.
        """
        ...

    def answered(self, answer: RemotingCommand) -> None:
        """Pass an answer of the peer to the caller of `ask`; ignore an unexpected one."""
        ...

    def respond(self, request: RemotingCommand, reply: bytes, durable_at: int = 0) -> None:
        """Answer a request when the commit log is on disk up to the position `durable_at`.

        If it already is, the reply is written at the end of this pass of the event loop, together
        with the others. Send nothing if the connection is closed or the request is one-way; the log
        is flushed up to `durable_at` in any case.
        """
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Write whole frames now; do nothing if the connection is closed.

        The memory of a view may be reused afterwards.
        """
        ...

    def write_part(self, head: bytes, part: FilePart) -> None:
        """Write one frame now, `head` followed by a part of a file.

        The part must not be used afterwards.
        """
        ...


Handler = Callable[[RemotingCommand, Connection], bytes | None]
"""Serves one request; returns the reply, or None if `Connection.respond` is called for it.

A plain function, never a coroutine: a task per message costs as much as the whole handler.
"""

_Method = TypeVar("_Method", bound=Callable[..., bytes | None])


def serves(*codes: RequestCode) -> Callable[[_Method], _Method]:
    """Make a method of `Handlers` the `Handler` of requests with these codes."""

    def mark(method: _Method) -> _Method:
        vars(method)["serves"] = codes
        return method

    return mark


class Handlers:
    """A family of requests, served by its methods with `serves`."""

    __slots__ = ()

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            code: getattr(self, name)
            for name, method in inspect.getmembers_static(type(self))
            for code in getattr(method, "serves", ())
        }
