"""Connections and listeners, seen from peers: usual ones, faulty ones, and the stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from halfmq.broker.errors import AddressTakenError, RequestRefusedError, UnfinishedError
from halfmq.broker.loop.fetches import Fetches
from halfmq.broker.net import connection as connections
from halfmq.broker.net import peer_requests as asks_module
from halfmq.broker.net import server as server_module
from halfmq.broker.net.connection import DIRECT_WRITE_MIN, ClientConnection, SharedState
from halfmq.broker.net.reply_release import UNFLUSHED_BYTES_MAX, ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.net.server import Server
from halfmq.broker.ports import ACK_S, Connection, Handler
from halfmq.remoting.codes import HeaderType, LanguageCode, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.errors import DiskFullError
from halfmq.store.files import disk
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.files.zero_copy import FilePart
from tests.support.loops import LOOPS, LoopFactory, run_on
from tests.support.patience import PATIENCE_S

UNKNOWN_CODE = 9_999
ROUTE = {"topic": "T"}


class Log:
    """A log that is on disk when the test says so."""

    durable_offset = 0
    readable_offset = 0
    write_offset = 0

    def request_flush(self) -> None:
        """Nothing: the test moves `durable_offset`."""


class Peer:
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
    return {RequestCode.GET_ROUTEINFO_BY_TOPIC: handler}


@asynccontextmanager
async def _serving(
    handler: Handler,
    log: Log | None = None,
    lost: list[Connection] | None = None,
    *,
    connections_per_address: int = 0,
) -> AsyncIterator[tuple[Server, ReplyRelease]]:
    release = ReplyRelease(log or Log())
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
async def _peer(server: Server) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _echo(request: RemotingCommand, _connection: Connection) -> bytes | None:
    return encode_reply(request, body=request.body)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_requests_are_answered_whatever_the_split(loop_factory: LoopFactory) -> None:
    """TCP may deliver half a frame, or three at once; each request gets its answer."""

    async def main() -> None:
        async with _serving(_echo) as (server, _), _peer(server) as peer:
            frames = b"".join(
                encode_request(105, opaque=number, header=ROUTE, body=b"%d" % number)
                for number in range(3)
            )
            peer.writer.write(frames[:7])
            await peer.writer.drain()
            peer.writer.write(frames[7:])

            answers = [await peer.answer() for _ in range(3)]

            assert [(one.opaque, one.body) for one in answers] == [
                (0, b"0"),
                (1, b"1"),
                (2, b"2"),
            ]

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_garbage_closes_one_connection_and_no_other(loop_factory: LoopFactory) -> None:
    """After a bad frame no boundary is known: that peer is cut off, the broker serves on."""

    async def main() -> None:
        async with _serving(_echo) as (server, _), _peer(server) as bad, _peer(server) as good:
            bad.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            good.writer.write(encode_request(105, opaque=7, header=ROUTE))

            assert await bad.is_closed()
            assert (await good.answer()).opaque == 7

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_an_unknown_code_is_answered(loop_factory: LoopFactory) -> None:
    """Clients wait their full time-out for an answer, so silence is never one."""

    async def main() -> None:
        async with _serving(_echo) as (server, _), _peer(server) as peer:
            peer.writer.write(encode_request(UNKNOWN_CODE, opaque=1))

            answer = await peer.answer()

            assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            assert answer.remark == " request type 9999 not supported"

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_one_way_request_gets_no_answer(loop_factory: LoopFactory) -> None:
    """Nothing waits for it: its sender would take the answer for that of another request."""

    async def main() -> None:
        async with _serving(_echo) as (server, _), _peer(server) as peer:
            peer.writer.write(encode_request(105, opaque=1, header=ROUTE, one_way=True))
            peer.writer.write(encode_request(UNKNOWN_CODE, opaque=2, one_way=True))
            peer.writer.write(encode_request(105, opaque=3, header=ROUTE))

            assert (await peer.answer()).opaque == 3

    run_on(loop_factory, main())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestRefusedError(ResponseCode.NO_PERMISSION, "no"), ResponseCode.NO_PERMISSION),
        (DiskFullError(Path("/disk"), "no space left"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (ZeroDivisionError("a defect"), ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_an_error_of_one_request_is_its_answer(error: Exception, code: int) -> None:
    """Whatever a handler raises, the peer gets an answer and the connection stays open."""

    def fails(request: RemotingCommand, _connection: Connection) -> bytes | None:
        if request.body == b"fail":
            raise error
        return encode_reply(request)

    async with _serving(fails) as (server, _), _peer(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE, body=b"fail"))
        peer.writer.write(encode_request(105, opaque=2, header=ROUTE))

        assert (await peer.answer()).code == code
        assert (await peer.answer()).code == ResponseCode.SUCCESS


async def test_a_missing_field_is_named_in_the_answer() -> None:
    """A client author reads what was wrong instead of guessing."""
    async with _serving(_echo) as (server, _), _peer(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header={}))

        answer = await peer.answer()

        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "topic" in (answer.remark or "")


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_stop_sends_waiting_replies_first(loop_factory: LoopFactory) -> None:
    """Stored messages are acknowledged, even if the stop comes between append and flush."""

    async def main() -> None:
        log = Log()

        def stores(request: RemotingCommand, connection: Connection) -> bytes | None:
            log.write_offset = 10
            connection.respond(request, encode_reply(request), 10)
            return None

        async with _serving(stores, log) as (server, release), _peer(server) as peer:
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

    run_on(loop_factory, main())


async def test_a_taken_port_is_named_with_its_setting() -> None:
    """The operator reads which address is taken and which setting changes it."""
    async with _serving(_echo) as (server, _):
        second = Server(
            Router(),
            ReplyRelease(Log()),
            Fetches().begin,
            lambda _connection: None,
            host="127.0.0.1",
            listen_port=server.port,
            namesrv_port=0,
        )

        with pytest.raises(AddressTakenError, match=f"127.0.0.1:{server.port}.*listenPort"):
            await second.start()


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_lost_connection_is_reported_once(loop_factory: LoopFactory) -> None:
    """The registry removes the clients of a lost connection."""

    async def main() -> None:
        lost: list[Connection] = []
        async with _serving(_echo, lost=lost) as (server, _):
            async with _peer(server) as peer:
                peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
                await peer.answer()
            while not lost:  # noqa: ASYNC110  # the callback fills the list
                await asyncio.sleep(0)

            assert len(lost) == 1
            assert lost[0].closed

    run_on(loop_factory, main())


async def test_the_address_is_the_one_the_client_reached() -> None:
    """Routes name an address that is known to work for this client."""
    seen: list[tuple[str, bytes]] = []

    def look(request: RemotingCommand, connection: Connection) -> bytes | None:
        seen.append((connection.broker_address, connection.store_host))
        return encode_reply(request)

    async with _serving(look) as (server, _), _peer(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
        await peer.answer()

    assert seen == [(f"127.0.0.1:{server.port}", b"\x7f\0\0\x01" + server.port.to_bytes(4, "big"))]


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("written", [False, True])
def test_requests_of_a_peer_that_does_not_read_wait(
    loop_factory: LoopFactory, written: bool
) -> None:
    """Its answers would fill the memory; it gets all of them when it reads, in order."""
    answer = bytes(1 << 20)
    requests = 200
    served: list[int] = []

    def large(request: RemotingCommand, connection: Connection) -> bytes | None:
        served.append(request.opaque)
        reply = encode_reply(request, body=answer)
        if not written:
            return reply
        connection.write(memoryview(reply))  # as the handler of pulls does
        return None

    async def main() -> None:
        async with _serving(large) as (server, _), _peer(server) as slow, _peer(server) as other:
            slow.writer.write(
                b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(requests))
            )
            await slow.writer.drain()
            while not served:  # noqa: ASYNC110  # the handler fills the list
                await asyncio.sleep(0)
            other.writer.write(encode_request(105, opaque=requests, header=ROUTE))
            await other.answer()
            unread = len(served)

            answers = [await slow.answer() for _ in range(requests)]

            assert unread < requests / 2
            assert [one.opaque for one in answers] == list(range(requests))

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("size", [1, 40_000, 3 << 20])
def test_views_are_written_completely_and_in_order(loop_factory: LoopFactory, size: int) -> None:
    """Directly to the socket or, while the peer is slow, through the transport."""
    answers = 40
    choose = random.Random(size)
    content = choose.randbytes(size + answers)
    scratch = bytearray(size + 1_000)

    async def main() -> None:
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

        async with _serving(part) as (server, _), _peer(server) as peer:
            peer.writer.write(
                b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(answers))
            )
            seen = [await peer.answer() for _ in range(answers)]

        assert [one.opaque for one in seen] == list(range(answers))
        for one in seen:
            assert one.body == content[one.opaque : one.opaque + size]

    run_on(loop_factory, main())


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
                connection.write_part(head_for(request, size), part)
                return None
            return encode_reply(request, body=content)

        async with _serving(serve) as (server, _), _peer(server) as peer:
            peer.writer.write(
                b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(answers))
            )
            seen = [await peer.answer() for _ in range(answers)]

        # What is returned goes out at the end of a read, what is written at once.
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
            connection.write_part(head, part)
            return None

        async with _serving(serve) as (server, _), _peer(server) as other:
            async with _peer(server) as peer:
                peer.writer.write(encode_request(105, opaque=0, header=ROUTE))
                with contextlib.suppress(ConnectionResetError):
                    cut_off = await peer.reader.read()
                    assert heads[0].startswith(cut_off)
            other.writer.write(encode_request(105, opaque=1, header=ROUTE))
            assert (await other.answer()).opaque == 1

    with disk.opened(tmp_path / "file") as fd:
        run_on(loop_factory, main(fd))
    assert len(heads) == 1


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_large_writes_bypass_an_idle_transport(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    async def main() -> None:
        async with _serving(part) as (server, _), _peer(server) as peer:
            for size in (DIRECT_WRITE_MIN // 2, DIRECT_WRITE_MIN):
                peer.writer.write(encode_request(105, opaque=size, header=ROUTE))
                assert (await peer.answer()).body == bytes(size)

    run_on(loop_factory, main())
    assert len(straight) == 1


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_nothing_is_written_to_a_peer_that_is_gone(loop_factory: LoopFactory) -> None:
    """Its descriptor may belong to another peer by then."""
    connections: list[Connection] = []

    def part(request: RemotingCommand, connection: Connection) -> bytes | None:
        connections.append(connection)
        connection.write(encode_reply(request, body=bytes(DIRECT_WRITE_MIN)))
        return None

    async def main() -> None:
        lost: list[Connection] = []
        async with _serving(part, lost=lost) as (server, _):
            async with _peer(server) as peer:
                peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
                assert (await peer.answer()).body == bytes(DIRECT_WRITE_MIN)
            while not lost:  # noqa: ASYNC110  # the server fills the list
                await asyncio.sleep(0)
            async with _peer(server) as other:
                connections[0].write(bytes(2 * DIRECT_WRITE_MIN))
                other.writer.write(encode_request(105, opaque=2, header=ROUTE))
                assert (await other.answer()).opaque == 2

    run_on(loop_factory, main())


def _storing(
    log: Log, served: list[int], size: int
) -> Callable[[RemotingCommand, Connection], bytes | None]:
    """Return a handler of requests that each add so many bytes to the log."""

    def store(request: RemotingCommand, connection: Connection) -> bytes | None:
        served.append(request.opaque)
        log.write_offset += size
        connection.respond(request, encode_reply(request), log.write_offset)
        return None

    return store


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_requests_of_one_read_wait_while_the_disk_is_too_slow(loop_factory: LoopFactory) -> None:
    """Hundreds of decisions about large messages would occupy the loop for seconds."""
    requests, size = 200, 4 << 20
    log = Log()
    served: list[int] = []
    store = _storing(log, served, size)

    async def main() -> None:
        async with _serving(store, log) as (server, release), _peer(server) as peer:
            peer.writer.write(
                b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(requests))
            )
            while not served:  # noqa: ASYNC110  # the handler fills the list
                await asyncio.sleep(0)
            assert len(served) == connections.REQUESTS_PER_DISK_TEST
            answers = 0
            while answers < requests:
                before = log.write_offset - log.durable_offset
                assert before <= UNFLUSHED_BYTES_MAX + size * connections.REQUESTS_PER_DISK_TEST
                log.durable_offset = log.write_offset
                durable = len(served)
                release.release()
                while answers < durable:
                    assert (await peer.answer()).opaque == answers
                    answers += 1
            assert served == list(range(requests))

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_small_requests_are_stopped_by_a_slow_disk_as_well(loop_factory: LoopFactory) -> None:
    """Not every read tests the limit, but a few do, however small."""
    size = 4 << 20
    log = Log()
    served: list[int] = []
    store = _storing(log, served, size)

    async def main() -> None:
        async with _serving(store, log) as (server, release), _peer(server) as peer:
            sent = 0
            # A peer notices that reading has stopped only by missing answers.
            while not release._stalled:
                peer.writer.write(encode_request(105, opaque=sent, header=ROUTE))
                sent += 1
                while len(served) < sent:  # noqa: ASYNC110  # the handler fills the list
                    await asyncio.sleep(0)
                behind = log.write_offset - log.durable_offset
                assert behind <= UNFLUSHED_BYTES_MAX + size * connections.REQUESTS_PER_DISK_TEST
            log.durable_offset = log.write_offset
            release.release()
            for opaque in range(sent):
                assert (await peer.answer()).opaque == opaque
            # A connection that stays in the list is visible in no answer.
            assert not release._stalled

    run_on(loop_factory, main())


class Chest:
    """Something to fetch that comes when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "chest"
        self.path.write_bytes(b"gold")
        self.may_open = threading.Event()
        self.fetches = 0

    def missing(self) -> NotInMemoryError:
        chest = self

        class LockedError(NotInMemoryError):
            def fetch(self) -> None:
                chest.fetches += 1
                assert chest.may_open.wait(PATIENCE_S)
                super().fetch()

        return LockedError([Missing(self.path, 0, 4)])


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_fetch_for_one_peer_delays_no_other(
    loop_factory: LoopFactory, at_once: bool, tmp_path: Path
) -> None:
    """The requests of that peer stay in order, even if something else resumes it."""
    chest = Chest(tmp_path)
    served: list[int] = []

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        assert isinstance(connection, ClientConnection)
        if request.body == b"cold" and not chest.may_open.is_set():
            raise chest.missing()
        served.append(request.opaque)
        return encode_reply(request)

    async def main() -> None:
        async with (
            _serving(handle) as (server, release),
            _peer(server) as one,
            _peer(server) as two,
        ):
            requests = [
                encode_request(105, opaque=n, header=ROUTE, body=b"cold" if n == 1 else b"")
                for n in range(4)
            ]
            if at_once:
                one.writer.write(b"".join(requests))
                assert (await one.answer()).opaque == 0
            else:
                one.writer.write(requests[0])
                assert (await one.answer()).opaque == 0
                one.writer.write(requests[1])
                while not chest.fetches:  # noqa: ASYNC110  # a thread counts
                    await asyncio.sleep(0)
                one.writer.write(b"".join(requests[2:]))
            two.writer.write(encode_request(105, opaque=9, header=ROUTE))
            assert (await two.answer()).opaque == 9
            # A peer cannot tell when its connection stalls and resumes, so the test causes both.
            for connection in server._shared.connections:
                connection._stall()
            release._resume_stalled()
            two.writer.write(encode_request(105, opaque=10, header=ROUTE))
            assert (await two.answer()).opaque == 10
            assert served == [0, 9, 10]
            chest.may_open.set()
            assert [(await one.answer()).opaque for _ in range(3)] == [1, 2, 3]
            assert chest.fetches == 1

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_request_of_many_turns_delays_only_its_connection(loop_factory: LoopFactory) -> None:
    """Only its own connection waits until it is done."""
    turns = 200
    served: list[int] = []

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        served.append(request.opaque)
        if request.body == b"long" and served.count(request.opaque) < turns:
            raise UnfinishedError
        return encode_reply(request)

    async def main() -> None:
        async with _serving(handle) as (server, _), _peer(server) as one, _peer(server) as two:
            one.writer.write(
                encode_request(105, opaque=1, header=ROUTE, body=b"long")
                + encode_request(105, opaque=2, header=ROUTE)
            )
            while not served:  # noqa: ASYNC110  # the handler fills the list
                await asyncio.sleep(0)
            two.writer.write(encode_request(105, opaque=9, header=ROUTE))
            assert (await two.answer()).opaque == 9
            assert served.count(1) < turns
            assert [(await one.answer()).opaque for _ in range(2)] == [1, 2]
            assert served.index(2) == len(served) - 1

    run_on(loop_factory, main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_peer_that_is_lost_during_a_fetch_is_not_served(
    loop_factory: LoopFactory, tmp_path: Path
) -> None:
    """Its waiting requests are dropped."""
    chest = Chest(tmp_path)
    tried: list[int] = []

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        tried.append(request.opaque)
        if request.body == b"cold" and not chest.may_open.is_set():
            raise chest.missing()
        return encode_reply(request)

    async def main() -> None:
        lost: list[Connection] = []
        async with _serving(handle, lost=lost) as (server, _), _peer(server) as other:
            async with _peer(server) as peer:
                peer.writer.write(encode_request(105, opaque=1, header=ROUTE, body=b"cold"))
                while not chest.fetches:  # noqa: ASYNC110  # a thread counts
                    await asyncio.sleep(0)
                # Which connection is waiting for a fetch is visible only inside of it.
                next(one for one in server._shared.connections if one._fetching).abort()
                while not lost:  # noqa: ASYNC110  # the server fills the list
                    await asyncio.sleep(0)
                chest.may_open.set()
            other.writer.write(encode_request(105, opaque=2, header=ROUTE, body=b"cold"))
            assert (await other.answer()).opaque == 2
        assert tried == [1, 2]

    run_on(loop_factory, main())


async def test_unfinished_frames_of_all_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that announce large frames and never finish them cannot fill the memory."""
    monkeypatch.setattr(connections, "UNFINISHED_BYTES_MAX", 100_000)
    frame = encode_request(105, opaque=1, header=ROUTE, body=bytes(80_000))
    async with _serving(_echo) as (server, _), _peer(server) as first, _peer(server) as second:
        first.writer.write(frame[:60_000])
        await first.writer.drain()
        while server.unfinished_bytes < 60_000:  # noqa: ASYNC110  # the kernel delivers in pieces
            await asyncio.sleep(0)
        second.writer.write(frame[:60_000])

        assert await second.is_closed()
        first.writer.write(frame[60_000:])
        assert (await first.answer()).body == bytes(80_000)
        assert server.unfinished_bytes == 0


async def test_a_silent_peer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection, whose peer was lost without a word, must not stay open."""
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server_module, "IDLE_SCAN_S", 0.01)
    lost: list[Connection] = []
    async with _serving(_echo, lost=lost) as (server, _), _peer(server) as peer:
        assert await peer.is_closed()
        assert len(lost) == 1


def _connected(**transport: Mock) -> ClientConnection:
    """Return a connection whose transport answers as the test says."""
    addresses = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
    connection = ClientConnection(
        SharedState(Router(), ReplyRelease(Log()), Fetches().begin, lambda _lost: None)
    )
    connection.connection_made(Mock(get_extra_info=addresses.get, **transport))
    return connection


async def test_a_peer_that_reads_slowly_is_not_silent() -> None:
    """While it reads its answers its requests are not read; it must not be closed for that."""
    connection = _connected(get_write_buffer_size=Mock(side_effect=[900, 800, 800]))
    idle = []
    for _ in range(3):
        connection.last_seen = asyncio.get_running_loop().time() - 10
        idle.append(connection.is_idle(connection.last_seen + 5))

    assert idle == [False, False, True]


@pytest.mark.parametrize(
    ("frame", "reads"),
    [
        (encode_request(105, opaque=1, header=ROUTE), 1),
        (encode_request(105, opaque=1, header=ROUTE)[:20], 1),
        (encode_request(UNKNOWN_CODE, opaque=1, one_way=True), 0),
        (encode_reply(RemotingCommand(code=RequestCode.CHECK_TRANSACTION_STATE, opaque=1)), 0),
    ],
)
async def test_only_peers_that_wait_for_an_answer_are_traffic(frame: bytes, reads: int) -> None:
    """Acknowledged and answered checks must not slow down the checks themselves."""
    shared = SharedState(Router(), ReplyRelease(Log()), Fetches().begin, lambda _lost: None)
    connection = ClientConnection(shared)
    connection.data_received(frame)

    assert shared.reads == reads


async def test_a_peer_that_writes_is_not_silent() -> None:
    """An incomplete frame counts as well."""
    connection = _connected(get_write_buffer_size=Mock(return_value=0))
    idle = []
    for piece in (b"\0", b"", b"\0"):
        if piece:
            connection.data_received(piece)
        connection.last_seen -= 10
        idle.append(connection.is_idle(asyncio.get_running_loop().time() - 5))

    assert idle == [False, True, False]


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"version": 400}, (400, LanguageCode.PYTHON, False)),
        ({"language": LanguageCode.GO}, (401, LanguageCode.GO, False)),
        ({"header_type": HeaderType.MSGPACK}, (401, LanguageCode.PYTHON, True)),
    ],
)
async def test_attributes_of_a_peer_follow_its_latest_request(
    change: dict[str, int], known: tuple[int, LanguageCode, bool]
) -> None:
    """Version, language, and whether it is a halfmq client; each may change alone."""
    connection = ClientConnection(
        SharedState(Router(), ReplyRelease(Log()), Fetches().begin, lambda _lost: None)
    )
    first: dict[str, Any] = {"version": 401, "language": LanguageCode.PYTHON}
    for settings in (first, first | change):
        connection.data_received(encode_request(1, opaque=1, one_way=True, **settings))

    assert (connection.version, connection.language, connection.acknowledges) == known


class Asked:
    """A connection of the broker to one peer, and the peer's answer to each request."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.answers: list[RemotingCommand | None] = []
        self.came = asyncio.Event()

    def remember(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        self.connection = connection
        return encode_reply(request)

    def ask(self, body: bytes = b"", seconds: float = ACK_S) -> bool:
        assert self.connection is not None
        code = RequestCode.CHECK_TRANSACTION_STATE
        return self.connection.ask(code, {"topic": "T"}, body, self._answered, seconds=seconds)

    def _answered(self, answer: RemotingCommand | None) -> None:
        self.answers.append(answer)
        self.came.set()

    async def wait_for(self, count: int) -> None:
        while len(self.answers) < count:
            self.came.clear()
            await self.came.wait()


async def _introduce(peer: Peer, header_type: int = HeaderType.MSGPACK) -> None:
    peer.writer.write(encode_request(105, opaque=1, header=ROUTE, header_type=header_type))
    await peer.answer()


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_request_to_a_peer_gets_its_own_answer(loop_factory: LoopFactory) -> None:
    """Answers arrive in any order; only the opaque assigns one to its request."""

    async def main() -> None:
        asked = Asked()
        async with _serving(asked.remember) as (server, _), _peer(server) as peer:
            await _introduce(peer)
            assert [asked.ask(b"%d" % number) for number in range(3)] == [True] * 3
            questions = [await peer.answer() for _ in range(3)]
            assert not any(question.is_one_way for question in questions)

            for question in reversed(questions):
                peer.writer.write(encode_reply(question, int(question.body)))
            await asked.wait_for(3)

            assert [one and one.code for one in asked.answers] == [2, 1, 0]

    run_on(loop_factory, main())


@pytest.mark.parametrize(
    ("header_type", "acknowledges"), [(HeaderType.JSON, False), (HeaderType.MSGPACK, True)]
)
async def test_only_halfmq_clients_are_known_to_answer(
    header_type: int, acknowledges: bool
) -> None:
    """Official clients never answer a check; a halfmq client is recognized by its header."""
    asked = Asked()
    async with _serving(asked.remember) as (server, _), _peer(server) as peer:
        await _introduce(peer, header_type)
        assert asked.connection is not None
        assert asked.connection.acknowledges is acknowledges


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_lost_connection_ends_every_request_to_its_peer(loop_factory: LoopFactory) -> None:
    """The caller learns that no answer will come, and can ask another peer."""

    async def main() -> None:
        asked = Asked()
        async with _serving(asked.remember) as (server, _):
            async with _peer(server) as peer:
                await _introduce(peer)
                asked.ask()
                asked.ask()
            await asked.wait_for(2)

            assert asked.answers == [None, None]
            assert not asked.ask()

    run_on(loop_factory, main())


async def test_an_unanswered_request_to_a_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the connection stays open; a late answer is ignored."""
    monkeypatch.setattr(asks_module, "EXPIRE_SCAN_S", 0.01)
    asked = Asked()
    async with _serving(asked.remember) as (server, _), _peer(server) as peer:
        for round_number in (1, 2):  # the timer rests in between, and wakes again
            await _introduce(peer)
            asked.ask(seconds=0.0)
            question = await peer.answer()
            await asked.wait_for(round_number)
            peer.writer.write(encode_reply(question))

        await _introduce(peer)
        assert asked.answers == [None, None]


async def test_requests_to_one_peer_are_bounded() -> None:
    """A peer that does not answer cannot fill the memory; its answers make room again."""
    asked = Asked()
    async with _serving(asked.remember) as (server, _), _peer(server) as peer:
        await _introduce(peer)
        while asked.ask():
            pass
        questions = [await peer.answer() for _ in range(asks_module.PEER_REQUESTS_MAX)]
        peer.writer.write(encode_reply(questions[7]))
        await asked.wait_for(1)

        assert asked.ask()
        assert not asked.ask()


async def test_unexpected_answers_are_ignored() -> None:
    """Peers may answer one-way requests, answer twice, or answer without a request."""
    asked = Asked()
    async with _serving(asked.remember) as (server, _), _peer(server) as peer:
        nobody = RemotingCommand(code=105, opaque=-5, header_type=HeaderType.MSGPACK)
        peer.writer.write(encode_reply(nobody, 77))
        await _introduce(peer)
        asked.ask()
        question = await peer.answer()
        stranger = RemotingCommand(code=39, opaque=question.opaque + 1)
        for odd in (nobody, stranger, question, question):
            peer.writer.write(encode_reply(odd, -1, remark="?" * 1_000, body=bytes(1_000)))
        await _introduce(peer)

        assert [one and one.code for one in asked.answers] == [-1]


async def test_a_callback_that_fails_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged; the connection and the other callbacks continue."""
    asked = Asked()
    async with _serving(asked.remember) as (server, _), _peer(server) as peer:
        await _introduce(peer)
        assert asked.connection is not None

        def fail(_answer: RemotingCommand | None) -> None:
            raise ZeroDivisionError

        asked.connection.ask(39, None, b"", fail)
        asked.ask()
        for _ in range(2):
            peer.writer.write(encode_reply(await peer.answer()))
        await asked.wait_for(1)

        assert "event=answer_failed" in caplog.text


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_connections_of_one_address_can_be_limited(loop_factory: LoopFactory) -> None:
    """One more is closed at once; after one is closed there is room again."""

    async def served(peer: Peer) -> bool:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE))
        return (await peer.answer()).code == ResponseCode.SUCCESS

    async def main() -> None:
        async with _serving(_echo, connections_per_address=2) as (server, _), _peer(server) as one:
            async with _peer(server) as two, _peer(server) as three:
                assert await served(one)
                assert await served(two)
                assert await three.is_closed()
            while server.open_connections > 1:  # noqa: ASYNC110 -- the server tells nobody
                await asyncio.sleep(0)
            async with _peer(server) as four:
                assert await served(four)

    run_on(loop_factory, main())
