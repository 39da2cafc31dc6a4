"""Stand-ins for the broker's collaborators: a clock, a connection, a log and a store in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final, cast

from halfmq.broker.config import TopicDefaults
from halfmq.broker.limits.long_answers import LongAnswers
from halfmq.broker.net.router import Router
from halfmq.broker.ports import ACK_S, Handler, OnAnswer
from halfmq.remoting.codes import FLAG_ONE_WAY, LanguageCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_request
from halfmq.store.files.zero_copy import FilePart
from halfmq.store.format.ids import pack_host
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

START_MS: Final = 1_700_000_000_000
"""Where the clocks of tests begin."""


class Clock:
    """A wall clock that moves only when told, and a monotonic one that knows no steps."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now = now_ms
        self._stepped_ms = 0

    def __call__(self) -> int:
        return self.now

    def monotonic(self) -> int:
        return self.now - self._stepped_ms

    def step(self, milliseconds: int) -> None:
        """Set the wall clock forward or back; no time passes."""
        self.now += milliseconds
        self._stepped_ms += milliseconds


class FakeConnection:
    """A client's connection that writes down what it is sent."""

    def __init__(
        self, name: str = "127.0.0.1:50001", *, address: str = "127.0.0.1:10911", version: int = 479
    ) -> None:
        host, _, port = address.rpartition(":")
        peer_host, _, peer_port = name.rpartition(":")
        self.name = name
        self.address = peer_host
        self.remote_host = pack_host(peer_host, int(peer_port))
        self.store_host = pack_host(host, int(port))
        self.broker_address = address
        self.language = int(LanguageCode.JAVA)
        self.version = version
        self.closed = False
        self.writable = True
        self.acknowledges = False
        self.subject: object = None
        self.unfinished: object = None
        self.long_answers = LongAnswers()
        self.requests: list[tuple[int, object]] = []
        self.asked: list[OnAnswer] = []
        self.answers: list[RemotingCommand] = []
        self.written: list[bytes] = []
        self.held: list[tuple[int, bytes]] = []
        self.unanswered: list[int] = []
        """What replies to one-way requests would wait for."""
        self.durable_offset = 0
        """Replies that wait for more are held."""

    def abort(self) -> None:
        self.closed = True

    def send_request(self, code: int, header: object, body: bytes = b"") -> bool:
        del body
        if self.closed or not self.writable:
            return False
        self.requests.append((code, header))
        return True

    def ask(
        self,
        code: int,
        header: object,
        body: bytes,
        on_answer: OnAnswer,
        *,
        seconds: float = ACK_S,
    ) -> bool:
        del seconds
        if not self.send_request(code, header, body):
            return False
        self.asked.append(on_answer)
        return True

    def answered(self, answer: RemotingCommand) -> None:
        self.answers.append(answer)

    def write(self, data: bytes | memoryview) -> None:
        self.written.append(bytes(data))

    def write_part(self, head: bytes, part: FilePart) -> None:
        self.written.append(head + part.rest())

    def respond(self, request: RemotingCommand, reply: bytes, durable_at: int = 0) -> None:
        if request.flag & FLAG_ONE_WAY:
            self.unanswered.append(durable_at)
        elif durable_at > self.durable_offset:
            self.held.append((durable_at, reply))
        else:
            self.written.append(reply)


def as_store(double: object) -> MessageStore:
    """Return a double that has the part of the store that a test needs."""
    return cast("MessageStore", double)


def draft(
    topic: str = "orders",
    queue_id: int = 0,
    body: bytes = b"body",
    properties: bytes = b"",
    *,
    reconsume_times: int = 0,
    sys_flag: int = 0,
) -> AppendRequest:
    """A message as a handler would append it."""
    return AppendRequest(
        topic=topic,
        queue_id=queue_id,
        body=body,
        properties=properties,
        born_timestamp=START_MS - 5,
        born_host=pack_host("127.0.0.1", 50001),
        store_host=pack_host("127.0.0.1", 10911),
        reconsume_times=reconsume_times,
        sys_flag=sys_flag,
    )


_opaques = itertools.count(1)


def request(
    code: int,
    header: object = None,
    body: bytes = b"",
    *,
    version: int = 479,
    header_type: int = 0,
    one_way: bool = False,
) -> RemotingCommand:
    """A request as the server hands it to a handler: encoded and decoded once."""
    frame = encode_request(
        code,
        opaque=next(_opaques),
        header=header,  # type: ignore[arg-type]
        body=body,
        version=version,
        header_type=header_type,
        one_way=one_way,
    )
    (command,) = FrameDecoder().receive_data(frame)
    assert command.header_error is None
    return command


def response(reply: bytes | None) -> RemotingCommand:
    """The one answer that `reply` holds."""
    assert reply is not None
    (command,) = FrameDecoder().receive_data(reply)
    assert command.is_response
    return command


def ext(command: RemotingCommand) -> dict[str, str]:
    """The ext fields of an answer."""
    assert command.header is None or isinstance(command.header, dict)
    return command.header or {}


def call(
    handlers: dict[int, Handler],
    command: RemotingCommand,
    connection: FakeConnection | None = None,
) -> RemotingCommand:
    """Serve one request that is answered at once."""
    connection = connection or FakeConnection()
    reply = handlers[command.code](command, connection)
    return response(connection.written.pop() if reply is None else reply)


def routed(handlers: dict[int, Handler], command: RemotingCommand) -> RemotingCommand:
    """The answer to one request, also if its handler raises an error."""
    connection = FakeConnection()
    Router(handlers).dispatch(command, connection)
    return response(connection.written.pop())


def identity(*, auto_create: bool = True) -> TopicDefaults:
    """Who the broker under test is."""
    return TopicDefaults(auto_create=auto_create)


def config_path(root: Path, name: str) -> Path:
    """Where a table lies below a store root."""
    return root / "config" / name
