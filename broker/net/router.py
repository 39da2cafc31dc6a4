"""Request code → handler; error → response code.

Every exception of a handler becomes an answer here, by one table, so that an error of one request
cannot affect another. Errors of the peer are answered; errors of the broker are also logged.

``docs/architecture.md`` says how a request is added.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from halfmq.remoting.codes import FLAG_RESPONSE, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.replies import encode_reply
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait

from ..errors import STORE_ERROR_CODES, NotYetError, RequestRefusedError, UnfinishedError
from ..ports import Connection, Handler
from .refused_codes import remark_of

logger = logging.getLogger(__name__)

Admit = Callable[[RemotingCommand, Connection], None]
"""Raises RequestRefusedError unless the sender may make a request."""


class Router:
    """Finds the handler of a request and turns its errors into answers."""

    def __init__(self, *tables: Mapping[int, Handler], admit: Admit | None = None) -> None:
        """Serve the codes of `tables`; `admit` is called first, None without access control."""
        self._admit = admit
        self._handlers: dict[int, Handler] = {}
        for table in tables:
            self.serve(table)

    def serve(self, table: Mapping[int, Handler]) -> None:
        """Add handlers for more request codes."""
        assert not self._handlers.keys() & table.keys()  # two handlers for one code
        self._handlers.update(table)

    @property
    def codes(self) -> frozenset[int]:
        return frozenset(self._handlers)

    def dispatch(self, command: RemotingCommand, connection: Connection) -> None:
        """Serve one command, and answer it if its handler returns a reply or raises an error.

        Raises:
            NotInMemoryError: Dispatch it again when the missing bytes are in memory.
            UnfinishedError: Dispatch it again in a later pass of the loop.
        """
        if command.flag & FLAG_RESPONSE:
            connection.answered(command)
            return
        handler = self._handlers.get(command.code, _not_supported)
        if command.header_error is not None and handler is not _not_supported:
            handler = _bad_header
        try:
            if self._admit is not None:
                self._admit(command, connection)
            reply = handler(command, connection)
        except (NotInMemoryError, UnfinishedError):
            raise
        except Exception as error:  # noqa: BLE001  # every request must be answered
            reply = _error_reply(error, handler, command, connection)
        if reply is not None:
            connection.respond(command, reply)


def serve(handler: Handler, command: RemotingCommand, connection: Connection) -> None:
    """Serve a command that is no longer in the server's backlog.

    It is served to the end, even if it has to wait for the disk; otherwise like `Router.dispatch`.
    """
    try:
        try:
            reply = handler(command, connection)
        except UnfinishedError as reason:  # it has had its turn by waiting
            if reason.until is not None:
                reason.until(partial(serve, handler, command, connection))
                return
            reply = handler(command, connection)
        except NotInMemoryError:
            with allowed_to_wait(True):
                reply = handler(command, connection)
    except Exception as error:  # noqa: BLE001  # every request must be answered
        reply = _error_reply(error, handler, command, connection)
    if reply is not None:
        connection.respond(command, reply)


def refusal_reply(
    refusal: RequestRefusedError, command: RemotingCommand, connection: Connection
) -> bytes:
    """Return the answer for a refusal, which is counted."""
    refusal.answered(command, connection)
    return encode_reply(command, refusal.code, header=refusal.ext_fields, remark=refusal.remark)


def _error_reply(
    error: Exception, handler: Handler, command: RemotingCommand, connection: Connection
) -> bytes | None:
    """Return the answer for an error of a handler; None if it is answered later."""
    match error:
        case NotYetError():
            size = len(command.body) + len(command.raw_header)
            error.wait(partial(_serve_later, handler, command, connection), size)
            return None
        case RequestRefusedError():
            return refusal_reply(error, command, connection)
        case RemotingError():  # a body or an expression that cannot be decoded
            return _refuse(command, ResponseCode.SYSTEM_ERROR, str(error))
        case StoreError():
            return _store_error_reply(command, connection, error)
        case OSError() if error.errno is not None:  # writes raise a ``StoreError``
            reason = f"the broker cannot read its disk: {error}"
            logger.error(
                "event=read_failed code=%d peer=%s error=%r",
                command.code,
                connection.name,
                str(error),
            )
            return _refuse(command, ResponseCode.SYSTEM_ERROR, reason)
    logger.error(
        "event=request_failed code=%d peer=%s opaque=%d",
        command.code,
        connection.name,
        command.opaque,
        exc_info=error,
    )
    return _refuse(command, ResponseCode.SYSTEM_ERROR, "internal error, see the broker's log")


def _serve_later(
    handler: Handler,
    command: RemotingCommand,
    connection: Connection,
    refusal: RequestRefusedError | None,
) -> None:
    """Serve or refuse a deferred request; do nothing if its connection is closed."""
    if not connection.closed:
        serve(handler if refusal is None else _refusing(refusal), command, connection)


def _refusing(refusal: RequestRefusedError) -> Handler:
    def refuse(_command: RemotingCommand, _connection: Connection) -> bytes | None:
        raise refusal

    return refuse


def _store_error_reply(
    command: RemotingCommand, connection: Connection, error: StoreError
) -> bytes:
    code = STORE_ERROR_CODES.get(type(error), ResponseCode.SYSTEM_ERROR)
    if code is not ResponseCode.MESSAGE_ILLEGAL:
        logger.error(
            "event=store_refused code=%d peer=%s error=%r",
            command.code,
            connection.name,
            str(error),
        )
    return _refuse(command, code, str(error))


def _refuse(command: RemotingCommand, code: ResponseCode, remark: str) -> bytes:
    return encode_reply(command, code, remark=remark)


def _bad_header(command: RemotingCommand, _connection: Connection) -> bytes:
    return _refuse(command, ResponseCode.SYSTEM_ERROR, command.header_error or "")


def _not_supported(command: RemotingCommand, _connection: Connection) -> bytes:
    return _refuse(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark_of(command.code))
