"""An in-memory broker and name server that speaks the wire protocol over a loopback socket.

It does what clients rely on and no more: no disk, no expiry, no limits. Misbehaviour is scripted:
``fail(code, fault)`` makes the next request of that code be refused, ignored, or cut off.

Why not the real broker behind a proxy that scripts faults: much of what the client is tested with
is no fault of ours but another server. It answers as RocketMQ does (``halfmq=False``), lacks
END_TRANSACTIONS or send-back, stores a half twice, or sends wrong bytes, which the real broker
never does. A proxy would have to answer those requests itself, hence keep most of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, cast

from halfmq.remoting.bodies import (
    BrokerData,
    ClusterInfo,
    HeartbeatData,
    QueueData,
    QueueKey,
    TopicRouteData,
    decode_heartbeat,
    decode_lock_batch,
    encode_cluster_info,
    encode_consumer_list,
    encode_locked_queues,
    encode_route,
    encode_topic_list,
)
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import (
    ConsumerGroupRequestHeader,
    ConsumerSendMsgBackRequestHeader,
    GetMaxOffsetRequestHeader,
    GetRouteInfoRequestHeader,
    HeartbeatResponseHeader,
    OffsetResponseHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
    UnregisterClientRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from halfmq.remoting.replies import encode_pull_reply, encode_reply, encode_request
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.properties import tags_code
from halfmq.store.format.record import Record, encode_record, new_record
from halfmq.store.format.topics import DEFAULT_TOPIC, RETRY_PREFIX, retry_topic
from tests.support.patience import PATIENCE_S

from .fake_transactions import FakeTransactions

READ_WRITE: Final = 6
INHERIT: Final = 7
PULL_MAX: Final = 32


@dataclass(frozen=True)
class Refuse:
    """Answer with this code."""

    code: int
    remark: str = "scripted"


@dataclass(frozen=True)
class Ignore:
    """Never answer; ``after_doing`` does the work all the same."""

    after_doing: bool = False


@dataclass(frozen=True)
class Cut:
    """Close the connection instead of answering; ``after_doing`` does the work all the same.

    ``for_good`` closes the listener too.
    """

    after_doing: bool = False
    for_good: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer 0 with this body, and do nothing."""

    body: bytes


Fault = Refuse | Ignore | Cut | Answer


class Peer(asyncio.Protocol):
    """One connected client."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self._decoder = FrameDecoder()
        self.header_type: int = HeaderType.JSON
        self.heartbeat = HeartbeatData()
        self.answers: list[RemotingCommand] = []  # to requests of tests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._broker.peers.append(self)

    def data_received(self, data: bytes) -> None:
        try:
            commands = self._decoder.receive_data(data)
        except ProtocolError:
            self.transport.abort()
            return
        for command in commands:
            self._broker.receive(command, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._broker.peers.remove(self)
        for group in self.consumer_groups:
            self._broker.notify_members(group)

    @property
    def consumer_groups(self) -> list[str]:
        return [data.group_name for data in self.heartbeat.consumer_data_set]

    @property
    def producer_groups(self) -> list[str]:
        return [data.group_name for data in self.heartbeat.producer_data_set]

    def send(
        self, code: int, header: object, body: bytes = b"", *, opaque: int | None = None
    ) -> None:
        """Send a request; one-way without an ``opaque``."""
        self.transport.write(
            encode_request(
                code,
                opaque=9999 if opaque is None else opaque,
                header=header,  # type: ignore[arg-type]
                body=body,
                one_way=opaque is None,
                header_type=self.header_type,
            )
        )


class FakeBroker(FakeTransactions):
    """Listens on a free port of 127.0.0.1; use :func:`fake_broker`."""

    def __init__(self, *, halfmq: bool = True, auto_create: bool = True, queues: int = 8) -> None:
        super().__init__()
        self.halfmq = halfmq
        self.auto_create = auto_create
        self.default_queues = queues
        self.send_back_supported = True
        self.pull_max = PULL_MAX
        self.young = True
        """Whether a group without an offset is sent to the first message of a queue."""
        self.send_status: int = ResponseCode.SUCCESS
        self.unequal: HeartbeatResponseHeader | None = None
        self.refuses_unequal = False
        self.broker_name = "broker-a"
        self.address = ""
        self.peers: list[Peer] = []
        self.requests: list[RemotingCommand] = []
        self.queues: dict[str, list[list[Record]]] = {}
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.locks: dict[QueueKey, str] = {}
        self.now_ms = 1_700_000_000_000
        self._log_end = 0
        self._faults: dict[int, deque[Fault]] = defaultdict(deque)
        self._held: list[Callable[[], None]] = []
        self._server: asyncio.Server | None = None
        self.handlers: dict[int, Callable[[RemotingCommand, Peer], bytes | None]] = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topic_list,
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.SEND_MESSAGE: self._send,
            RequestCode.SEND_MESSAGE_V2: self._send,
            RequestCode.SEND_BATCH_MESSAGE: self._send,
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._members,
            RequestCode.QUERY_CONSUMER_OFFSET: self._query_offset,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update_offset,
            RequestCode.GET_MAX_OFFSET: self._max_offset,
            RequestCode.GET_MIN_OFFSET: self._min_offset,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
            RequestCode.CONSUMER_SEND_MSG_BACK: self._send_back,
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._unlock,
            **self.transaction_handlers(),
        }

    # -- for tests

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", port)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Close the listener and every connection, as a killed broker does."""
        assert self._server is not None
        self._server.close()
        self.cut_connections()
        await self._server.wait_closed()

    async def restart(self) -> None:
        """Listen again on the same port; messages and offsets are still there."""
        await self.start(int(self.address.rpartition(":")[2]))

    def cut_connections(self) -> None:
        for peer in list(self.peers):
            peer.transport.abort()

    def fail(self, code: int, *faults: Fault) -> None:
        """Treat the next requests of this code so, one after the other."""
        self._faults[code].extend(faults)

    def forgive(self) -> None:
        """Treat all further requests as usual."""
        self._faults.clear()

    def create_topic(self, topic: str, queues: int = 4) -> None:
        self.queues.setdefault(topic, [[] for _ in range(queues)])

    def requests_of(self, code: int) -> list[RemotingCommand]:
        return [request for request in self.requests if request.code == code]

    def messages(self, topic: str) -> list[Record]:
        """All stored messages of a topic in log order."""
        records = [record for queue in self.queues.get(topic, []) for record in queue]
        return sorted(records, key=lambda record: record.physical_offset)

    def producers(self, group: str) -> list[Peer]:
        return [peer for peer in self.peers if group in peer.producer_groups]

    def notify_members(self, group: str) -> None:
        header = ConsumerGroupRequestHeader(consumer_group=group)
        for peer in self.peers:
            if group in peer.consumer_groups:
                peer.send(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)

    # -- serving

    def receive(self, command: RemotingCommand, peer: Peer) -> None:
        if command.is_response and command.opaque in self.asked:
            asked = self.asked[command.opaque]
            self.acknowledged.append((asked, command.code, command.remark))
            return
        if command.is_response:
            peer.answers.append(command)
            return
        self.requests.append(command)
        peer.header_type = command.header_type
        fault = self._faults[command.code].popleft() if self._faults[command.code] else None
        if isinstance(fault, Refuse):
            peer.transport.write(encode_reply(command, fault.code, remark=fault.remark))
            return
        if isinstance(fault, Answer):
            peer.transport.write(encode_reply(command, body=fault.body))
            return
        reply: bytes | None = None
        if fault is None or fault.after_doing:
            handler = self.handlers.get(command.code)
            if handler is not None:
                reply = handler(command, peer)
            else:
                code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                reply = encode_reply(command, code, remark=f" request type {command.code}")
        if isinstance(fault, Cut):
            if fault.for_good and self._server is not None:
                self._server.close()
            peer.transport.abort()
        elif fault is None and reply is not None and not command.is_one_way:
            peer.transport.write(reply)

    def _route(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("GetRouteInfoRequestHeader", command.header)
        known = self.halfmq and b'"halfmq"' in command.raw_header
        fields = {"halfmq": "1"} if known else None
        topic = header.topic
        perm, count = READ_WRITE, len(self.queues.get(topic, ()))
        if topic == DEFAULT_TOPIC and self.auto_create:
            perm, count = INHERIT, self.default_queues
        if not count:
            code = ResponseCode.TOPIC_NOT_EXIST
            return encode_reply(
                command, code, header=fields, remark=f"No topic route info: {topic}"
            )
        queues = QueueData(
            broker_name=self.broker_name, perm=perm, read_queue_nums=count, write_queue_nums=count
        )
        route = TopicRouteData(broker_datas=(self._broker_data(),), queue_datas=(queues,))
        return encode_reply(command, header=fields, body=encode_route(route))

    def _cluster(self, command: RemotingCommand, _peer: Peer) -> bytes:
        info = ClusterInfo(
            broker_addr_table={self.broker_name: self._broker_data()},
            cluster_addr_table={"DefaultCluster": [self.broker_name]},
        )
        return encode_reply(command, body=encode_cluster_info(info))

    def _topic_list(self, command: RemotingCommand, _peer: Peer) -> bytes:
        return encode_reply(command, body=encode_topic_list([DEFAULT_TOPIC, *self.queues]))

    def _broker_data(self) -> BrokerData:
        return BrokerData(
            broker_addrs={0: self.address}, broker_name=self.broker_name, cluster="DefaultCluster"
        )

    def _heartbeat(self, command: RemotingCommand, peer: Peer) -> bytes:
        if self.unequal is not None and self.refuses_unequal:
            return encode_reply(
                command, ResponseCode.NO_PERMISSION, header=self.unequal, remark="they differ"
            )
        before = set(peer.consumer_groups)
        peer.heartbeat = decode_heartbeat(command.body)
        for group in peer.consumer_groups:
            self.create_topic(retry_topic(group), 1)
            if group not in before:
                self.notify_members(group)
        return encode_reply(command, header=self.unequal)

    def _unregister(self, command: RemotingCommand, peer: Peer) -> bytes:
        header = cast("UnregisterClientRequestHeader", command.header)
        peer.heartbeat = HeartbeatData()
        if header.consumer_group:
            self.notify_members(header.consumer_group)
        return encode_reply(command)

    def _members(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("ConsumerGroupRequestHeader", command.header)
        members = [
            peer.heartbeat.client_id
            for peer in self.peers
            if header.consumer_group in peer.consumer_groups
        ]
        if not members:
            return encode_reply(command, ResponseCode.SYSTEM_ERROR, remark="no consumer")
        return encode_reply(command, body=encode_consumer_list(members))

    def _lock(self, command: RemotingCommand, _peer: Peer) -> bytes:
        body = decode_lock_batch(command.body)
        held = [
            queue
            for queue in body.mq_set
            if self.locks.setdefault(queue, body.client_id) == body.client_id
        ]
        return encode_reply(command, body=encode_locked_queues(held))

    def _unlock(self, command: RemotingCommand, _peer: Peer) -> bytes:
        body = decode_lock_batch(command.body)
        for queue in body.mq_set:
            if self.locks.get(queue) == body.client_id:
                del self.locks[queue]
        return encode_reply(command)

    # -- storing

    def store(self, record: Record) -> Record:
        """Append a record to its queue at the end of the log."""
        queue = self.queues[record.topic][record.queue_id]
        self.now_ms += 1
        stored = record._replace(
            physical_offset=self._log_end, queue_offset=len(queue), store_timestamp=self.now_ms
        )
        self._log_end += stored.total_size
        queue.append(stored)
        held, self._held = self._held, []
        for look_again in held:
            look_again()
        return stored

    def _send(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("SendMessageRequestHeader", command.header)
        if header.topic not in self.queues:
            if not self.auto_create:
                return encode_reply(command, ResponseCode.TOPIC_NOT_EXIST, remark=header.topic)
            self.create_topic(header.topic, header.default_topic_queue_nums)
        if not header.batch:
            stored = [self.store_one(header, command.body, (header.properties or "").encode())]
        else:
            stored = [
                self.store_one(header, unit.body, unit.properties)
                for unit in decode_batch(command.body)
            ]
        first = stored[0]
        return encode_reply(
            command,
            self.send_status,
            header=SendMessageResponseHeader(
                msg_id=",".join(record.msg_id for record in stored),
                queue_id=header.queue_id,
                queue_offset=first.queue_offset,
                transaction_id=first.property_map.get("UNIQ_KEY"),
                msg_region="DefaultRegion",
                trace_on="true",
            ),
        )

    def _send_back(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("ConsumerSendMsgBackRequestHeader", command.header)
        if not self.send_back_supported:
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            return encode_reply(command, code, remark=" request type 36 not supported")
        record = next(
            r for t in self.queues for r in self.messages(t) if r.physical_offset == header.offset
        )
        if header.delay_level < 0:
            return encode_reply(command)  # a dead letter, which no consumer gets
        properties = record.properties
        if not record.topic.startswith(RETRY_PREFIX):
            properties += b"RETRY_TOPIC\x01" + record.topic.encode() + b"\x02"
        self.store(
            new_record(
                topic=retry_topic(header.group),
                queue_id=0,
                body=record.body,
                properties=properties,
                born_timestamp=record.born_timestamp,
                born_host=record.born_host,
                store_timestamp=0,
                store_host=record.store_host,
                sys_flag=record.sys_flag,
                reconsume_times=record.reconsume_times + 1,
            )
        )
        return encode_reply(command)

    # -- pulling

    def _pull(self, command: RemotingCommand, peer: Peer) -> bytes | None:
        header = cast("PullMessageRequestHeader", command.header)
        subscribed = [
            subscription
            for data in peer.heartbeat.consumer_data_set
            for subscription in data.subscription_data_set
            if data.group_name == header.consumer_group and subscription.topic == header.topic
        ]
        if not subscribed:
            return encode_reply(command, ResponseCode.SUBSCRIPTION_NOT_EXIST, remark="heartbeat?")
        queue = self.queues.get(header.topic, [[]])[header.queue_id]
        offset, end = header.queue_offset, len(queue)
        if offset > end or offset < 0:
            moved = end if offset > end else 0
            return self.pulled(command, ResponseCode.PULL_OFFSET_MOVED, moved, end, b"")
        if offset == end:
            self._hold(command, peer, header.suspend_timeout_millis / 1000)
            return None
        codes = subscribed[0].codes
        read = queue[offset : offset + self.pull_max]
        passed = [r for r in read if codes is None or tags_code(r.properties) in codes]
        body = b"".join(encode_record(record) for record in passed)
        code = ResponseCode.SUCCESS if passed else ResponseCode.PULL_RETRY_IMMEDIATELY
        return self.pulled(command, code, offset + len(read), end, body)

    def pulled(
        self, command: RemotingCommand, code: int, next_: int, end: int, body: bytes
    ) -> bytes:
        head = encode_pull_reply(
            command,
            code,
            next_begin_offset=next_,
            min_offset=0,
            max_offset=end,
            remark="FOUND" if body else "NO_MESSAGE",
            body_size=len(body),
        )
        return head + body

    def _hold(self, command: RemotingCommand, peer: Peer, seconds: float) -> None:
        """Answer when a message is stored, or with 19 after the time the client gave."""
        header = cast("PullMessageRequestHeader", command.header)

        def expire() -> None:
            if look_again in self._held:
                self._held.remove(look_again)
                offset, code = header.queue_offset, ResponseCode.PULL_NOT_FOUND
                peer.transport.write(self.pulled(command, code, offset, offset, b""))

        def look_again() -> None:
            if len(self.queues[header.topic][header.queue_id]) == header.queue_offset:
                self._held.append(look_again)
                return
            timer.cancel()
            reply = self._pull(command, peer)
            if reply is not None and not peer.transport.is_closing():
                peer.transport.write(reply)

        self._held.append(look_again)
        timer = asyncio.get_running_loop().call_later(seconds, expire)

    # -- offsets

    def _query_offset(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("QueryConsumerOffsetRequestHeader", command.header)
        stored = self.offsets.get((header.consumer_group, header.topic, header.queue_id))
        if stored is None and self.young and header.set_zero_if_not_found is not False:
            queues = self.queues.get(header.topic)
            stored = 0 if queues and queues[header.queue_id] else None
        if stored is None:
            return encode_reply(command, ResponseCode.QUERY_NOT_FOUND, remark="Not found")
        return encode_reply(command, header=OffsetResponseHeader(offset=stored))

    def _update_offset(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("UpdateConsumerOffsetRequestHeader", command.header)
        key = (header.consumer_group, header.topic, header.queue_id)
        self.offsets[key] = header.commit_offset
        return encode_reply(command)

    def _max_offset(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("GetMaxOffsetRequestHeader", command.header)
        end = len(self.queues[header.topic][header.queue_id])
        return encode_reply(command, header=OffsetResponseHeader(offset=end))

    def _min_offset(self, command: RemotingCommand, _peer: Peer) -> bytes:
        assert isinstance(command.header, QueueRequestHeader)
        return encode_reply(command, header=OffsetResponseHeader(offset=0))

    def _search_offset(self, command: RemotingCommand, _peer: Peer) -> bytes:
        header = cast("SearchOffsetRequestHeader", command.header)
        queue = self.queues[header.topic][header.queue_id]
        offset = sum(record.store_timestamp < header.timestamp for record in queue)
        return encode_reply(command, header=OffsetResponseHeader(offset=offset))


@contextlib.asynccontextmanager
async def fake_broker(
    *, halfmq: bool = True, auto_create: bool = True, queues: int = 8, orders: int = 0
) -> AsyncIterator[FakeBroker]:
    """A running broker for the length of the block; topic ``orders`` has so many queues."""
    broker = FakeBroker(halfmq=halfmq, auto_create=auto_create, queues=queues)
    if orders:
        broker.create_topic("orders", orders)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds; fail the test when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- the condition is about plain objects
            await asyncio.sleep(0.005)
