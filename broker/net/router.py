"""Request code → handler; error → response code.

Every exception of a handler becomes an answer here, by one table, so that an error of one request
cannot affect another. Errors of the peer are answered; errors of the broker are also logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from halfmq.remoting.codes import FLAG_ONE_WAY, FLAG_RESPONSE, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.replies import encode_reply
from halfmq.store.errors import (
    DiskFullError,
    FlushFailedError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreClosedError,
    StoreError,
    WriteFailedError,
)
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait

from ..errors import NotYetError, RequestRefusedError, UnfinishedError
from ..ports import Connection, Handler

logger = logging.getLogger(__name__)

STORE_ERROR_CODES: Final[Mapping[type[StoreError], ResponseCode]] = {
    RecordTooLargeError: ResponseCode.MESSAGE_ILLEGAL,
    PropertiesTooLongError: ResponseCode.MESSAGE_ILLEGAL,
    DiskFullError: ResponseCode.SERVICE_NOT_AVAILABLE,
    WriteFailedError: ResponseCode.SERVICE_NOT_AVAILABLE,
    FlushFailedError: ResponseCode.SERVICE_NOT_AVAILABLE,
    StoreClosedError: ResponseCode.SERVICE_NOT_AVAILABLE,
}
"""Store error → answer, as RocketMQ's put statuses. Source: `SendMessageProcessor`."""


class Router:
    """Finds the handler of a request and turns its errors into answers."""

    def __init__(self, *tables: Mapping[int, Handler]) -> None:
        self._handlers: dict[int, Handler] = {}
        for table in tables:
            self.serve(table)

    def serve(self, table: Mapping[int, Handler]) -> None:
        """Add handlers for more request codes."""
        assert not self._handlers.keys() & table.keys()  # two handlers for one code
        self._handlers.update(table)

    @property
    def codes(self) -> frozenset[int]:
        """The request codes that have a handler."""
        return frozenset(self._handlers)

    def dispatch(self, command: RemotingCommand, connection: Connection) -> bytes | None:
        """Serve one command; return the reply to write now, if any.

        Raises:
            NotInMemoryError: Dispatch it again when the missing bytes are in memory.
            UnfinishedError: Dispatch it again in a later pass of the loop.
        """
        if command.flag & FLAG_RESPONSE:
            connection.answered(command)
            return None
        handler = self._handlers.get(command.code)
        if handler is None:
            reply: bytes | None = _not_supported(command)
        elif command.header_error is not None:
            reply = _refuse(command, ResponseCode.SYSTEM_ERROR, command.header_error)
        else:
            try:
                reply = handler(command, connection)
            except (NotInMemoryError, UnfinishedError):
                raise
            except Exception as error:  # noqa: BLE001  # every request must be answered
                reply = _answer_error(error, handler, command, connection)
        return None if command.flag & FLAG_ONE_WAY else reply


def answer(handler: Handler, command: RemotingCommand, connection: Connection) -> bytes | None:
    """Serve a command by its handler; an exception of the handler becomes the answer.

    For commands that are no longer in the server's backlog: they are served to the end, even if
    they have to wait for the disk.
    """
    try:
        try:
            return handler(command, connection)
        except NotInMemoryError:
            with allowed_to_wait(True):
                return handler(command, connection)
    except Exception as error:  # noqa: BLE001  # every request must be answered
        return _answer_error(error, handler, command, connection)


def _answer_error(
    error: Exception, handler: Handler, command: RemotingCommand, connection: Connection
) -> bytes | None:
    """Return the answer for an error of a handler; None if it is answered later."""
    match error:
        case NotYetError():
            error.wait(partial(_serve_later, handler, command, connection), len(command.body))
            return None
        case RequestRefusedError():
            error.answered(command, connection)
            return encode_reply(command, error.code, header=error.ext_fields, remark=error.remark)
        case RemotingError():  # a body or an expression that cannot be decoded
            return _refuse(command, ResponseCode.SYSTEM_ERROR, str(error))
        case StoreError():
            return _answer_store_error(command, connection, error)
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
    """Serve a deferred request, or refuse it with `refusal`; do nothing if its sender is gone."""
    if connection.closed:
        return
    reply = answer(handler if refusal is None else _refusing(refusal), command, connection)
    if reply is not None and not command.flag & FLAG_ONE_WAY:
        connection.write(reply)


def _refusing(refusal: RequestRefusedError) -> Handler:
    def refuse(_command: RemotingCommand, _connection: Connection) -> bytes | None:
        raise refusal

    return refuse


def _answer_store_error(
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


def _not_supported(command: RemotingCommand) -> bytes:
    # The leading blank is RocketMQ's. Source: NettyRemotingAbstract#processRequestCommand.
    remark = f" request type {command.code} not supported"
    return _refuse(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
