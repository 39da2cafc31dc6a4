"""Listeners: addresses, limits, idle connections, and the stop."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from halfmq.broker.errors import AddressTakenError
from halfmq.broker.loop.fetches import Fetches
from halfmq.broker.net import connection as connection_module
from halfmq.broker.net import server as server_module
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.net.server import Server
from halfmq.broker.ports import Connection
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply, encode_request
from tests.support.broker_doubles import FakeConnection, as_store
from tests.support.client_loops import on_both_loops
from tests.support.loops import LOOPS, LoopFactory, run_on
from tests.support.serving import ROUTE, ManualLog, SocketPeer, echo, peer_of, serving

TLS_HELLO = bytes.fromhex("16030100f5010000f10303")


@on_both_loops
async def test_a_stop_sends_waiting_replies_first() -> None:
    """Stored messages are acknowledged, even if the stop comes between append and flush."""
    log = ManualLog()

    def stores(request: RemotingCommand, connection: Connection) -> bytes | None:
        log.write_offset = 10
        connection.respond(request, encode_reply(request), 10)
        return None

    async with serving(stores, log) as (server, release), peer_of(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
        while release.idle:  # noqa: ASYNC110  # the release has no event of its own
            await asyncio.sleep(0)

        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        log.durable_offset = 10
        release.release()

        assert (await peer.answer()).opaque == 1
        assert await peer.is_closed()
        await stopping


async def test_a_taken_port_is_named_with_its_setting() -> None:
    """The operator reads which address is taken and which setting changes it."""
    async with serving(echo) as (server, _):
        second = Server(
            Router(),
            ReplyRelease(as_store(ManualLog())),
            Fetches().begin,
            lambda _connection: None,
            host="127.0.0.1",
            listen_port=server.port,
            namesrv_port=0,
        )

        with pytest.raises(AddressTakenError, match=f"127.0.0.1:{server.port}.*listenPort"):
            await second.start()


@on_both_loops
async def test_a_lost_connection_is_reported_once() -> None:
    """The registry removes the clients of a lost connection."""
    lost: list[Connection] = []
    async with serving(echo, lost=lost) as (server, _):
        async with peer_of(server) as peer:
            peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
            await peer.answer()
        while not lost:  # noqa: ASYNC110  # the callback fills the list
            await asyncio.sleep(0)

        assert len(lost) == 1
        assert lost[0].closed


async def test_the_address_is_the_one_the_client_reached() -> None:
    """Routes name an address that is known to work for this client."""
    seen: list[tuple[str, bytes]] = []

    def look(request: RemotingCommand, connection: Connection) -> bytes | None:
        seen.append((connection.broker_address, connection.store_host))
        return encode_reply(request)

    async with serving(look) as (server, _), peer_of(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
        await peer.answer()

    assert seen == [(f"127.0.0.1:{server.port}", b"\x7f\0\0\x01" + server.port.to_bytes(4, "big"))]


async def test_a_silent_peer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection, whose peer was lost without a word, must not stay open."""
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server_module, "IDLE_SCAN_S", 0.01)
    lost: list[Connection] = []
    async with serving(echo, lost=lost) as (server, _), peer_of(server) as peer:
        assert await peer.is_closed()
        assert len(lost) == 1


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_connections_of_one_address_can_be_limited(loop_factory: LoopFactory) -> None:
    """One more is closed at once; after one is closed there is room again."""

    async def served(peer: SocketPeer) -> bool:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
        return (await peer.answer()).code == ResponseCode.SUCCESS

    async def main() -> None:
        async with serving(echo, connections_per_address=2) as (server, _), peer_of(server) as one:
            async with peer_of(server) as two, peer_of(server) as three:
                assert await served(one)
                assert await served(two)
                assert await three.is_closed()
            while server.open_connections > 1:  # noqa: ASYNC110 -- the server tells nobody
                await asyncio.sleep(0)
            async with peer_of(server) as four:
                assert await served(four)

    run_on(loop_factory, main())


async def test_another_protocol_is_logged_once_for_each_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gRPC client connects again and again, and the log says which clients can."""
    monkeypatch.setattr(connection_module, "OTHER_PROTOCOLS_MAX", 2)
    async with serving(echo) as (server, _):
        http2, http = b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n"
        for begin in (http2, http2, http, TLS_HELLO):
            async with peer_of(server) as peer:
                peer.writer.write(begin)
                assert await peer.is_closed()

    lines = [line for line in caplog.messages if "event=other_protocol" in line]
    assert [line.split()[2] for line in lines] == ["protocol=HTTP/2", "protocol=HTTP"]
    assert "remoting clients are: docs/compatibility.md" in lines[0]
    assert "protocol_error" not in caplog.text


def test_a_disk_that_cannot_be_read_is_one_line_and_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No traceback, and not "internal error": the consumer's operator must know what to mend."""

    def unreadable(_command: RemotingCommand, _connection: Connection) -> bytes | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    connection = FakeConnection()
    Router({11: unreadable}).dispatch(RemotingCommand(code=11), connection)

    (answer,) = FrameDecoder(responses_first=True).receive_data(connection.written[0])
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "cannot read its disk: [Errno 5]" in (answer.remark or "")
    (line,) = caplog.messages
    assert line.startswith("event=read_failed code=11")
    assert caplog.records[0].exc_info is None
