"""Stand-ins for the broker's collaborators: a clock, a connection, a log and a store in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from halfmq.broker.config import TopicDefaults
from halfmq.broker.net.router import Router
from halfmq.broker.ports import ACK_S, Handler, OnAnswer
from halfmq.remoting.codes import FLAG_ONE_WAY, LanguageCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_request
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.files.zero_copy import FilePart
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.queue_entry import QueueEntry
from halfmq.store.format.record import Record, decode_record, encode_record, new_record
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.message_store import GetResult, GetStatus, MessageStore

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


def record_of(
    request: AppendRequest, physical_offset: int, queue_offset: int, store_timestamp: int
) -> Record:
    """Return the record that a log makes of a request."""
    return new_record(
        topic=request.topic,
        queue_id=request.queue_id,
        body=request.body,
        properties=request.properties,
        born_timestamp=request.born_timestamp,
        born_host=request.born_host,
        store_timestamp=store_timestamp,
        store_host=request.store_host,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        flag=request.flag,
        sys_flag=request.sys_flag,
        reconsume_times=request.reconsume_times,
        prepared_transaction_offset=request.prepared_transaction_offset,
    )


def as_store(double: object) -> MessageStore:
    """Return a double that has the part of the store that a test needs."""
    return cast("MessageStore", double)


class FakeLog:
    """A commit log with consume queues, in memory, everything durable unless told otherwise."""

    def __init__(self, clock: Clock, *, start: int = 0) -> None:
        self._clock = clock
        self.records: dict[int, Record] = {}
        self._keys: dict[tuple[str, str], list[int]] = {}
        self._queues: dict[tuple[str, int], list[int]] = {}
        self._first: dict[tuple[str, int], int] = {}
        self.write_offset = start
        self.held_durable: int | None = None
        self.failure: Exception | None = None
        self.damaged: set[int] = set()
        self.cold = False
        self.refused: set[int] = set()
        """Where records lie that the disk does not give."""
        self.cold_reads = 0
        self.on_append: Callable[[Sequence[AppendRequest]], object] = lambda _group: None

    @property
    def reader(self) -> FakeLog:
        return self

    @property
    def queues(self) -> FakeLog:
        return self

    @property
    def index(self) -> FakeLog:
        return self

    @property
    def durable_offset(self) -> int:
        return self.write_offset if self.held_durable is None else self.held_durable

    readable_offset = durable_offset

    @property
    def last_update(self) -> tuple[int, int]:
        last = max(self.records)
        return self.records[last].store_timestamp, last

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        del contiguous
        if self.failure is not None:
            raise self.failure
        appended = [self._append(draft) for draft in group]
        self.on_append(group)
        return appended

    def _append(self, draft: AppendRequest) -> AppendResult:
        queue = self._queues.setdefault((draft.topic, draft.queue_id), [])
        queue_offset = len(queue) + self._first.get((draft.topic, draft.queue_id), 0)
        record = record_of(draft, self.write_offset, queue_offset, self._next_timestamp())
        self.records[record.physical_offset] = record
        queue.append(record.physical_offset)
        self._add_keys(record)
        self.write_offset += record.total_size
        return AppendResult(
            record.physical_offset, record.total_size, queue_offset, record.store_timestamp
        )

    def _next_timestamp(self) -> int:
        newest = next(reversed(self.records.values()), None)
        return max(self._clock(), 0 if newest is None else newest.store_timestamp)

    def _add_keys(self, record: Record) -> None:
        properties = decode_properties(record.properties)
        keys = {*properties.get("KEYS", "").split(" "), properties.get("UNIQ_KEY", "")} - {""}
        for key in keys:
            self.add_key(record.topic, key, record.physical_offset)

    def add_key(self, topic: str, key: str, physical_offset: int) -> None:
        """Let a look-up of the key find a record."""
        self._keys.setdefault((topic, key), []).append(physical_offset)

    def start_queue_at(self, topic: str, queue_id: int, offset: int) -> None:
        """Pretend that everything before `offset` was deleted by age."""
        self._first[topic, queue_id] = offset

    def cut_queue(self, topic: str, queue_id: int, count: int) -> None:
        """Lose the latest messages of a queue, as in a power cut."""
        del self._queues[topic, queue_id][-count:]

    def queue(self, topic: str, queue_id: int) -> list[Record]:
        """What a consumer of the queue would get."""
        return [self.records[offset] for offset in self._queues.get((topic, queue_id), [])]

    def names(self) -> list[tuple[str, int]]:
        return list(self._queues)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        first = self._first.get((topic, queue_id), 0)
        return first, first + len(self._queues.get((topic, queue_id), ()))

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int = 32,
        max_bytes: int = 262_144,
    ) -> GetResult:
        first, end = self.bounds(topic, queue_id)
        if not first <= offset < end:
            following = first if offset < first else end
            return GetResult(GetStatus.NO_MESSAGE_IN_QUEUE, following, first, end, [], 0, 0)
        ranges: list[tuple[int, int]] = []
        size = 0
        for physical in self._queues[topic, queue_id][offset - first :][:max_count]:
            record_size = self.records[physical].total_size
            if ranges and size + record_size > max_bytes:
                break
            size += record_size
            ranges.append((physical, record_size))
        following = offset + len(ranges)
        return GetResult(GetStatus.FOUND, following, first, end, ranges, len(ranges), size)

    def read(self, ranges: Sequence[tuple[int, int]], *, prefix: bytes = b"") -> bytes | None:
        is_cold = self.cold or any(offset in self.refused for offset, _ in ranges)
        return None if is_cold else prefix + self._bytes(ranges)

    def lacking_ranges(self, ranges: Sequence[tuple[int, int]]) -> NotInMemoryError:
        return NotInMemoryError([Missing(Path("log"), *one) for one in ranges])

    def read_cold(self, ranges: Sequence[tuple[int, int]], *, ahead: int = 0) -> bytes:
        self.cold_reads += 1
        return self._bytes(ranges)

    def _bytes(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        return b"".join([self._record_bytes(offset) for offset, _ in ranges])

    def _record_bytes(self, offset: int) -> bytes:
        data = encode_record(self.records[offset])
        return b"\0" * len(data) if offset in self.damaged else data

    def record_bytes(self, physical_offset: int, end: int | None = None) -> bytes | None:
        record = self.records.get(physical_offset)
        if record is None or (end is not None and record.end > end):
            return None
        return encode_record(record)

    def named_record(self, physical_offset: int) -> bytes | None:
        return self.record_bytes(physical_offset)

    def record_at(self, physical_offset: int) -> Record | None:
        data = self.record_bytes(physical_offset)
        return None if data is None else decode_record(data)

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        hits = [
            offset
            for offset in reversed(self._keys.get((topic, key), []))
            if begin_ms <= self.records[offset].store_timestamp <= end_ms
        ]
        return hits[:max_count]

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp: int, *, upper: bool = False
    ) -> int:
        first, end = self.bounds(topic, queue_id)
        records = self.queue(topic, queue_id)
        later = [one.queue_offset for one in records if one.store_timestamp >= timestamp]
        if later:
            return later[0]
        return max(first, end - 1) if upper else end

    def entries(self, topic: str, queue_id: int, offset: int, count: int) -> list[QueueEntry]:
        records = self.queue(topic, queue_id)[offset : offset + count]
        return [QueueEntry(one.physical_offset, one.total_size, 0) for one in records]

    def store_time_at(self, topic: str, queue_id: int, offset: int) -> int:
        for record in self.queue(topic, queue_id):
            if record.queue_offset == offset:
                return record.store_timestamp
        return -1


def same_queue(_topic: str, queue_id: int) -> int:
    """Return the queue of a message whose topic has not changed."""
    return queue_id


def fetch_nothing(missing: NotInMemoryError, _on_fetched: Callable[[bool], None]) -> None:
    """For tests in which everything is in memory."""
    raise missing


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
