"""Large answers: written directly to the socket, or sent from a file, always complete."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from halfmq.broker.net.connection import DIRECT_WRITE_MIN, ClientConnection
from halfmq.broker.ports import Connection
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.files import disk
from halfmq.store.files.zero_copy import FilePart
from tests.support.client_loops import on_both_loops
from tests.support.loops import LOOPS, LoopFactory, run_on
from tests.support.serving import ROUTE, peer_of, serving


@on_both_loops
@pytest.mark.parametrize("size", [1, 40_000, 3 << 20])
async def test_views_are_written_completely_and_in_order(size: int) -> None:
    """Directly to the socket or, while the peer is slow, through the transport."""
    answers = 40
    choose = random.Random(size)
    content = choose.randbytes(size + answers)
    scratch = bytearray(size + 1_000)

    def part(request: RemotingCommand, connection: Connection) -> bytes | None:
        start = request.opaque
        answer = encode_reply(request, body=content[start : start + size])
        if start % 3:
            scratch[: len(answer)] = answer
            connection.write(memoryview(scratch)[: len(answer)])
            scratch[:] = bytes(len(scratch))
        else:
            connection.write(answer)
        return None

    async with serving(part) as (server, _), peer_of(server) as peer:
        peer.writer.write(
            b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(answers))
        )
        seen = [await peer.answer() for _ in range(answers)]

    assert [one.opaque for one in seen] == list(range(answers))
    for one in seen:
        assert one.body == content[one.opaque : one.opaque + size]


@dataclass
class Part:
    """What a frame ends with: the store's, of a file, or one that goes wrong."""

    fd: int
    length: int
    failure: OSError | None = None
    rest_is_lost: bool = False
    sent: list[int] = field(default_factory=list)  # by the system, at each call

    def send(self, connected: int, sent: int = 0) -> int:
        if self.failure is not None:
            raise self.failure
        self.sent.append(FilePart(self.fd, 0, self.length).send(connected, sent))
        return self.sent[-1]

    def rest(self, sent: int = 0) -> bytes:
        if self.rest_is_lost:
            raise OSError(errno.EIO, "unreadable")
        return FilePart(self.fd, 0, self.length).rest(sent)


def head_for(request: RemotingCommand, length: int) -> bytes:
    """Return an answer without its body of some length."""
    whole = encode_reply(request, body=bytes(length))
    return whole[: len(whole) - length]


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("size", [1, 40_000, 3 << 20])
@pytest.mark.parametrize(
    "failure", [None, BlockingIOError(), OSError(errno.EINVAL, "not from this file system")]
)
@pytest.mark.skipif(disk.sendfile is None, reason="the system sends nothing from files")
def test_parts_of_files_are_written_completely(
    loop_factory: LoopFactory, size: int, failure: OSError | None, tmp_path: Path
) -> None:
    """Between other answers, to a slow peer, and if the system refuses to send from the file."""
    answers = 40
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content + b"behind it")
    sent: list[int] = []

    async def main(fd: int) -> None:
        part = Part(fd, size, failure, sent=sent)

        def serve(request: RemotingCommand, connection: Connection) -> bytes | None:
            if request.opaque % 3:
                connection.write_part(head_for(request, size), cast("FilePart", part))
                return None
            return encode_reply(request, body=content)

        async with serving(serve) as (server, _), peer_of(server) as peer:
            peer.writer.write(
                b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(answers))
            )
            seen = [await peer.answer() for _ in range(answers)]

        # Returned replies are written at the end of the pass, others at once.
        assert sorted(one.opaque for one in seen) == list(range(answers))
        assert all(one.body == content for one in seen)

    with disk.opened(tmp_path / "file") as fd:
        run_on(loop_factory, main(fd))
    assert bool(sent) == (failure is None)


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("lost", ["unreadable", "cut short"])
def test_a_frame_whose_end_is_lost_ends_its_connection(
    loop_factory: LoopFactory, lost: str, tmp_path: Path
) -> None:
    """Its head may have been sent: what follows would be taken for the rest of it."""
    (tmp_path / "file").write_bytes(b"shorter")
    heads: list[bytes] = []

    async def main(fd: int) -> None:
        part = Part(fd, 100, BlockingIOError(), rest_is_lost=lost == "unreadable")

        def serve(request: RemotingCommand, connection: Connection) -> bytes | None:
            if request.opaque:
                return encode_reply(request)
            head = head_for(request, part.length)
            heads.append(head)
            connection.write_part(head, cast("FilePart", part))
            return None

        async with serving(serve) as (server, _), peer_of(server) as other:
            async with peer_of(server) as peer:
                peer.writer.write(encode_request(105, opaque=0, header=ROUTE))
                with contextlib.suppress(ConnectionResetError):
                    cut_off = await peer.reader.read()
                    assert heads[0].startswith(cut_off)
            other.writer.write(encode_request(105, opaque=1, header=ROUTE))
            assert (await other.answer()).opaque == 1

    with disk.opened(tmp_path / "file") as fd:
        run_on(loop_factory, main(fd))
    assert len(heads) == 1


@on_both_loops
async def test_large_writes_bypass_an_idle_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport would copy what the socket accepts at once."""
    straight: list[int] = []
    # Whether bytes bypass the transport is visible in nothing that arrives.
    real = ClientConnection._connected_socket

    class Socket:
        def __init__(self, connected: socket.socket) -> None:
            self._connected = connected

        def send(self, data: memoryview) -> int:
            straight.append(self._connected.send(data))
            return straight[-1]

        def detach(self) -> int:
            return self._connected.detach()

    def connected_socket(self: ClientConnection, transport: asyncio.Transport) -> object:
        connected = real(self, transport)
        assert connected is not None
        self._socket = cast("socket.socket", Socket(connected))
        return self._socket

    monkeypatch.setattr(ClientConnection, "_connected_socket", connected_socket)

    def part(request: RemotingCommand, connection: Connection) -> bytes | None:
        connection.write(encode_reply(request, body=bytes(request.opaque)))
        return None

    async with serving(part) as (server, _), peer_of(server) as peer:
        for size in (DIRECT_WRITE_MIN // 2, DIRECT_WRITE_MIN):
            peer.writer.write(encode_request(105, opaque=size, header=ROUTE))
            assert (await peer.answer()).body == bytes(size)
    assert len(straight) == 1


@on_both_loops
async def test_nothing_is_written_to_a_peer_that_is_gone() -> None:
    """Its descriptor may belong to another peer by then."""
    connections: list[Connection] = []

    def part(request: RemotingCommand, connection: Connection) -> bytes | None:
        connections.append(connection)
        connection.write(encode_reply(request, body=bytes(DIRECT_WRITE_MIN)))
        return None

    lost: list[Connection] = []
    async with serving(part, lost=lost) as (server, _):
        async with peer_of(server) as peer:
            peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
            assert (await peer.answer()).body == bytes(DIRECT_WRITE_MIN)
        while not lost:  # noqa: ASYNC110  # the server fills the list
            await asyncio.sleep(0)
        async with peer_of(server) as other:
            connections[0].write(bytes(2 * DIRECT_WRITE_MIN))
            other.writer.write(encode_request(105, opaque=2, header=ROUTE))
            assert (await other.answer()).opaque == 2
