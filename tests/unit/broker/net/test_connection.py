"""Connections, seen from peers: usual ones and faulty ones."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from halfmq.broker.errors import RequestRefusedError, UnfinishedError
from halfmq.broker.limits import kept
from halfmq.broker.loop.fetches import Fetches
from halfmq.broker.net import connection as connections
from halfmq.broker.net import shared_state
from halfmq.broker.net.connection import LARGE_READ_MIN, ClientConnection
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.net.shared_state import SharedState
from halfmq.broker.ports import Connection
from halfmq.remoting.codes import HeaderType, LanguageCode, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.errors import DiskFullError
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from tests.support.broker_doubles import as_store
from tests.support.client_loops import on_both_loops
from tests.support.loops import LOOPS, LoopFactory, run_on
from tests.support.patience import PATIENCE_S
from tests.support.serving import ROUTE, UNKNOWN_CODE, ManualLog, echo, peer_of, serving
from tests.support.usual_headers import send_header


@on_both_loops
async def test_requests_are_answered_whatever_the_split() -> None:
    """TCP may deliver half a frame, or three at once; each request gets its answer."""
    async with serving(echo) as (server, _), peer_of(server) as peer:
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


@on_both_loops
async def test_garbage_closes_one_connection_and_no_other() -> None:
    """After a bad frame no boundary is known: that peer is cut off, the broker serves on."""
    async with serving(echo) as (server, _), peer_of(server) as bad, peer_of(server) as good:
        bad.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        good.writer.write(encode_request(105, opaque=7, header=ROUTE))

        assert await bad.is_closed()
        assert (await good.answer()).opaque == 7


@on_both_loops
async def test_an_unknown_code_is_answered() -> None:
    """Clients wait their full time-out for an answer, so silence is never one."""
    async with serving(echo) as (server, _), peer_of(server) as peer:
        peer.writer.write(encode_request(UNKNOWN_CODE, opaque=1))

        answer = await peer.answer()

        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert answer.remark == " request type 9999 not supported"


@on_both_loops
async def test_a_one_way_request_gets_no_answer() -> None:
    """Nothing waits for it: its sender would take the answer for that of another request."""
    async with serving(echo) as (server, _), peer_of(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE, one_way=True))
        peer.writer.write(encode_request(UNKNOWN_CODE, opaque=2, one_way=True))
        peer.writer.write(encode_request(105, opaque=3, header=ROUTE))

        assert (await peer.answer()).opaque == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestRefusedError("no", ResponseCode.NO_PERMISSION), ResponseCode.NO_PERMISSION),
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

    async with serving(fails) as (server, _), peer_of(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header=ROUTE, body=b"fail"))
        peer.writer.write(encode_request(105, opaque=2, header=ROUTE))

        assert (await peer.answer()).code == code
        assert (await peer.answer()).code == ResponseCode.SUCCESS


async def test_a_missing_field_is_named_in_the_answer() -> None:
    """A client author reads what was wrong instead of guessing."""
    async with serving(echo) as (server, _), peer_of(server) as peer:
        peer.writer.write(encode_request(105, opaque=1, header={}))

        answer = await peer.answer()

        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "topic" in (answer.remark or "")


@on_both_loops
@pytest.mark.parametrize("written", [False, True])
async def test_requests_of_a_peer_that_does_not_read_wait(written: bool) -> None:
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

    async with serving(large) as (server, _), peer_of(server) as slow, peer_of(server) as other:
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


def _storing(
    log: ManualLog, served: list[int], size: int
) -> Callable[[RemotingCommand, Connection], bytes | None]:
    """Return a handler of requests that each add so many bytes to the log."""

    def store(request: RemotingCommand, connection: Connection) -> bytes | None:
        served.append(request.opaque)
        log.write_offset += size
        connection.respond(request, encode_reply(request), log.write_offset)
        return None

    return store


@on_both_loops
async def test_requests_of_one_read_wait_while_the_disk_is_too_slow() -> None:
    """Hundreds of decisions about large messages would occupy the loop for seconds."""
    requests, size = 200, 4 << 20
    log = ManualLog()
    served: list[int] = []
    store = _storing(log, served, size)
    async with serving(store, log) as (server, release), peer_of(server) as peer:
        peer.writer.write(
            b"".join(encode_request(105, opaque=n, header=ROUTE) for n in range(requests))
        )
        while not served:  # noqa: ASYNC110  # the handler fills the list
            await asyncio.sleep(0)
        assert len(served) == connections.REQUESTS_PER_DISK_TEST
        answers = 0
        while answers < requests:
            before = log.write_offset - log.durable_offset
            assert before <= kept.UNFLUSHED_BYTES.most + size * connections.REQUESTS_PER_DISK_TEST
            log.durable_offset = log.write_offset
            durable = len(served)
            release.release()
            while answers < durable:
                assert (await peer.answer()).opaque == answers
                answers += 1
        assert served == list(range(requests))


@on_both_loops
async def test_small_requests_are_stopped_by_a_slow_disk_as_well() -> None:
    """Not every read tests the limit, but a few do, however small."""
    size = 4 << 20
    log = ManualLog()
    served: list[int] = []
    store = _storing(log, served, size)
    async with serving(store, log) as (server, release), peer_of(server) as peer:
        sent = 0
        # A peer notices that reading has stopped only by missing answers.
        while not release._stalled:
            peer.writer.write(encode_request(105, opaque=sent, header=ROUTE))
            sent += 1
            while len(served) < sent:  # noqa: ASYNC110  # the handler fills the list
                await asyncio.sleep(0)
            behind = log.write_offset - log.durable_offset
            assert behind <= kept.UNFLUSHED_BYTES.most + size * connections.REQUESTS_PER_DISK_TEST
        log.durable_offset = log.write_offset
        release.release()
        for opaque in range(sent):
            assert (await peer.answer()).opaque == opaque
        # A connection that stays in the list is visible in no answer.
        assert not release._stalled


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


@on_both_loops
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_fetch_for_one_peer_delays_no_other(at_once: bool, tmp_path: Path) -> None:
    """The requests of that peer stay in order, even if something else resumes it."""
    chest = Chest(tmp_path)
    served: list[int] = []
    connected: set[ClientConnection] = set()

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        assert isinstance(connection, ClientConnection)
        connected.add(connection)
        if request.body == b"cold" and not chest.may_open.is_set():
            raise chest.missing()
        served.append(request.opaque)
        return encode_reply(request)

    async with (
        serving(handle) as (server, release),
        peer_of(server) as one,
        peer_of(server) as two,
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
        for connection in connected:
            connection._stall()
        release._resume_stalled()
        two.writer.write(encode_request(105, opaque=10, header=ROUTE))
        assert (await two.answer()).opaque == 10
        assert served == [0, 9, 10]
        chest.may_open.set()
        assert [(await one.answer()).opaque for _ in range(3)] == [1, 2, 3]
        assert chest.fetches == 1


@on_both_loops
async def test_a_request_of_many_turns_delays_only_its_connection() -> None:
    """Only its own connection waits until it is done."""
    needed = 200
    served: list[int] = []

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        served.append(request.opaque)
        if request.body == b"long" and served.count(request.opaque) < needed:
            raise UnfinishedError
        return encode_reply(request)

    async with serving(handle) as (server, _), peer_of(server) as one, peer_of(server) as two:
        one.writer.write(
            encode_request(105, opaque=1, header=ROUTE, body=b"long")
            + encode_request(105, opaque=2, header=ROUTE)
        )
        while not served:  # noqa: ASYNC110  # the handler fills the list
            await asyncio.sleep(0)
        two.writer.write(encode_request(105, opaque=9, header=ROUTE))
        assert (await two.answer()).opaque == 9
        assert served.count(1) < needed
        assert [(await one.answer()).opaque for _ in range(2)] == [1, 2]
        assert served.index(2) == len(served) - 1


@on_both_loops
async def test_many_requests_in_one_read_delay_only_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass of the loop serves some of them, in order, and all other connections."""
    turn_s, passed = 0.005, [0.0]
    count = 500
    served: list[int] = []

    def handle(request: RemotingCommand, _connection: Connection) -> bytes | None:
        served.append(request.opaque)
        passed[0] += turn_s / 10
        return encode_reply(request)

    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    monkeypatch.setattr(shared_state, "TURN_S", turn_s)
    async with (
        serving(handle) as (server, _),
        peer_of(server) as one,
        peer_of(server) as two,
        peer_of(server) as third,
    ):
        for peer, first in ((one, 0), (two, count)):
            frames = [
                encode_request(105, opaque=first + number, header=ROUTE) for number in range(count)
            ]
            peer.writer.write(b"".join(frames))
        while not served:  # noqa: ASYNC110  # the handler fills the list
            await asyncio.sleep(0)
        third.writer.write(encode_request(105, opaque=2 * count, header=ROUTE))
        await third.answer()
        assert len(served) < count
        for peer in (one, two):
            assert len([await peer.answer() for _ in range(count)]) == count
        for first in (0, count):
            mine = [opaque for opaque in served if first <= opaque < first + count]
            assert mine == list(range(first, first + count))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_large_reads_of_many_connections_share_a_pass(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of connections, each with a read that takes a turn, are served in many passes."""
    passed, passes = [0.0], [0]
    served: list[int] = []

    def handle(request: RemotingCommand, _connection: Connection) -> bytes | None:
        served.append(passes[0])
        passed[0] += shared_state.TURN_S
        return encode_reply(request)

    async def count_passes() -> None:
        while True:
            await asyncio.sleep(0)
            passes[0] += 1

    async def main() -> None:
        async with contextlib.AsyncExitStack() as opened:
            server, _ = await opened.enter_async_context(serving(handle))
            peers = [await opened.enter_async_context(peer_of(server)) for _ in range(20)]
            counting = asyncio.create_task(count_passes())
            for number, peer in enumerate(peers):
                body = bytes(LARGE_READ_MIN)
                peer.writer.write(encode_request(105, opaque=number, header=ROUTE, body=body))
            assert [(await peer.answer()).opaque for peer in peers] == [*range(20)]
            counting.cancel()
        assert max(Counter(served).values()) <= 3

    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    run_on(loop_factory, main())


@on_both_loops
async def test_a_peer_that_is_lost_during_a_fetch_is_not_served(tmp_path: Path) -> None:
    """Its waiting requests are dropped."""
    chest = Chest(tmp_path)
    tried: list[int] = []
    waiting: list[ClientConnection] = []

    def handle(request: RemotingCommand, connection: Connection) -> bytes | None:
        assert isinstance(connection, ClientConnection)
        tried.append(request.opaque)
        if request.body == b"cold" and not chest.may_open.is_set():
            waiting.append(connection)
            raise chest.missing()
        return encode_reply(request)

    lost: list[Connection] = []
    async with serving(handle, lost=lost) as (server, _), peer_of(server) as other:
        async with peer_of(server) as peer:
            peer.writer.write(encode_request(105, opaque=1, header=ROUTE, body=b"cold"))
            while not chest.fetches:  # noqa: ASYNC110  # a thread counts
                await asyncio.sleep(0)
            waiting[0].abort()
            while not lost:  # noqa: ASYNC110  # the server fills the list
                await asyncio.sleep(0)
            chest.may_open.set()
        other.writer.write(encode_request(105, opaque=2, header=ROUTE, body=b"cold"))
        assert (await other.answer()).opaque == 2
    assert tried == [1, 2]


async def test_unfinished_frames_of_all_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that announce large frames and never finish them cannot fill the memory.

    The largest of them ends first, whoever comes last.
    """
    limit = kept.UNFINISHED_BYTES._replace(most=100_000)
    monkeypatch.setattr(shared_state, "UNFINISHED_BYTES", limit)
    frame = encode_request(310, opaque=1, header=send_header(), body=bytes(80_000))
    async with serving(echo) as (server, _), peer_of(server) as first, peer_of(server) as second:
        first.writer.write(frame[:60_000])
        await first.writer.drain()
        while server.kept()[kept.UNFINISHED_BYTES] < 60_000:  # noqa: ASYNC110  # the kernel delivers in pieces
            await asyncio.sleep(0)
        second.writer.write(frame[:50_000])

        assert await first.is_closed()
        second.writer.write(frame[50_000:])
        assert (await second.answer()).body == bytes(80_000)
        assert server.kept()[kept.UNFINISHED_BYTES] == 0


async def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several peers that read nothing one ends, and others are served."""
    limit = kept.UNSENT_BYTES._replace(most=16 << 20)
    monkeypatch.setattr(shared_state, "UNSENT_BYTES", limit)
    frame = encode_request(310, opaque=1, header=send_header(), body=bytes(15 << 20))
    async with serving(echo) as (server, _), contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer_of(server)) for _ in range(4)]
        while server.open_connections < len(peers):  # noqa: ASYNC110  # accepted one by one
            await asyncio.sleep(0)
        for peer in peers[:3]:
            peer.writer.write(frame)
        while server.open_connections == len(peers):  # noqa: ASYNC110  # written in pieces
            await asyncio.sleep(0)
        assert server.kept()[kept.UNSENT_BYTES] <= limit.most
        peers[3].writer.write(encode_request(310, opaque=2, header=send_header(), body=b"small"))

        assert (await peers[3].answer()).body == b"small"


@on_both_loops
async def test_the_address_with_most_connections_makes_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One machine cannot keep all others out by opening as many as there may be."""
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (8, resource.RLIM_INFINITY))
    async with serving(echo) as (server, _), contextlib.AsyncExitStack() as opened:
        for _ in range(4):
            peer = socket.create_connection(
                ("127.0.0.1", server.port), PATIENCE_S, source_address=("127.0.0.2", 0)
            )
            opened.callback(peer.close)
        while server.open_connections < 4:  # noqa: ASYNC110  # the broker accepts them soon
            await asyncio.sleep(0)
        for _ in range(2):
            peer_of_another = await opened.enter_async_context(peer_of(server))
            peer_of_another.writer.write(encode_request(105, opaque=7, header=ROUTE))
            assert (await peer_of_another.answer()).opaque == 7
        while server.open_connections > 4:  # noqa: ASYNC110  # those that gave way are closed soon
            await asyncio.sleep(0)
        monkeypatch.setattr(shared_state, "LARGEST_SHARE", 1)
        async with peer_of(server) as refused:  # nobody has so many that it has to give one up
            assert await refused.is_closed()


@on_both_loops
async def test_connections_leave_descriptors_to_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Further ones are closed, with one line in the log until one is accepted again."""
    limits = (2, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    async with serving(echo) as (server, _):
        async with peer_of(server):
            for _ in range(3):
                async with peer_of(server) as refused:
                    assert await refused.is_closed()
        while server.open_connections:  # noqa: ASYNC110  # the broker knows soon
            await asyncio.sleep(0)
        async with peer_of(server) as peer:
            peer.writer.write(encode_request(105, opaque=7, header=ROUTE))
            assert (await peer.answer()).opaque == 7

    events = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert events == ["event=connection_refused", "event=connections_accepted_again"]


def _connected(**transport: Mock) -> ClientConnection:
    """Return a connection whose transport answers as the test says."""
    addresses = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
    connection = ClientConnection(
        SharedState(
            Router(), ReplyRelease(as_store(ManualLog())), Fetches().begin, lambda _lost: None
        )
    )
    connection.connection_made(Mock(get_extra_info=addresses.get, **transport))
    return connection


async def test_a_request_that_is_never_completed_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often another byte of it arrives."""
    connection = _connected(get_write_buffer_size=Mock(return_value=0))
    frame = encode_request(310, opaque=1, header=send_header(), body=bytes(80_000))
    connection.data_received(frame[:60_000])
    connection.data_received(frame[60_000:60_001])
    since = connection.last_seen - 5
    assert not connection.is_idle(since)
    monkeypatch.setattr(connections, "FRAME_S", -1.0)

    assert connection.is_idle(since)
    connection.data_received(frame[60_001:])
    assert not connection.is_idle(since)


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
    shared = SharedState(
        Router(), ReplyRelease(as_store(ManualLog())), Fetches().begin, lambda _lost: None
    )
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
        SharedState(
            Router(), ReplyRelease(as_store(ManualLog())), Fetches().begin, lambda _lost: None
        )
    )
    first: dict[str, Any] = {"version": 401, "language": LanguageCode.PYTHON}
    for settings in (first, first | change):
        connection.data_received(encode_request(1, opaque=1, one_way=True, **settings))

    assert (connection.version, connection.language, connection.acknowledges) == known
