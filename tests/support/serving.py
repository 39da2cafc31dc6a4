"""A server of one handler with real sockets, and peers that speak frames to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from halfmq.broker.loop.fetches import Fetches
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.net.server import Server
from halfmq.broker.ports import Connection, Handler
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply
from tests.support.broker_doubles import as_store

UNKNOWN_CODE = 9_999
ROUTE = {"topic": "T"}


class ManualLog:
    """A log that is on disk when the test says so."""

    durable_offset = 0
    readable_offset = 0
    write_offset = 0

    def request_flush(self) -> None:
        """Nothing: the test moves `durable_offset`."""


class SocketPeer:
    """A client that speaks frames over a real socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder(responses_first=True)
        self._commands: list[RemotingCommand] = []

    async def answer(self) -> RemotingCommand:
        while not self._commands:
            data = await self.reader.read(65_536)
            assert data, "the broker closed the connection"
            self._commands += self._decoder.receive_data(data)
        return self._commands.pop(0)

    async def is_closed(self) -> bool:
        return await self.reader.read(65_536) == b""


def _table(handler: Handler) -> dict[int, Handler]:
    return {RequestCode.GET_ROUTEINFO_BY_TOPIC: handler, RequestCode.SEND_MESSAGE_V2: handler}


@asynccontextmanager
async def serving(
    handler: Handler,
    log: ManualLog | None = None,
    lost: list[Connection] | None = None,
    *,
    connections_per_address: int = 0,
) -> AsyncIterator[tuple[Server, ReplyRelease]]:
    release = ReplyRelease(as_store(log or ManualLog()))
    fetches = Fetches()
    gone: list[Connection] = [] if lost is None else lost
    server = Server(
        Router(_table(handler)),
        release,
        fetches.begin,
        gone.append,
        host="127.0.0.1",
        listen_port=0,
        namesrv_port=0,
        connections_per_address=connections_per_address,
    )
    await server.start()
    try:
        yield server, release
    finally:
        await server.stop()
        await fetches.stop()


@asynccontextmanager
async def peer_of(server: Server) -> AsyncIterator[SocketPeer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield SocketPeer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def echo(request: RemotingCommand, _connection: Connection) -> bytes | None:
    return encode_reply(request, body=request.body)
