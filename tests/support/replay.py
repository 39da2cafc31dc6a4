"""Recorded connections played again against a broker of ours, over real sockets.

The recording's order is kept: a request is sent when its turn comes, and its answer is awaited
where the recording has it. Two things are changed and no others:

* Where a request names a place in the log (a message to view or to send back, a half message),
  the recorded place is exchanged for ours, learned from the answers so far; and times, of which
  ours are others.
* Where the recording waited (a long poll, a delay level, a check of a transaction), the clock of
  the loop is moved on. Nothing here sleeps for as long as the official broker did.

What the recording leaves out is added, right before the line that needs it.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from halfmq.broker.config import BrokerConfig
from halfmq.broker.service import Broker
from halfmq.remoting import headers
from halfmq.remoting.admin_headers import ConsumeMessageDirectlyRequestHeader
from halfmq.remoting.codes import FLAG_ONE_WAY, INT64_MAX, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.store.format.properties import decode_properties, tags_code
from halfmq.store.format.record import Record, decode_records
from halfmq.store.log.append_request import AppendRequest
from tests.support.patience import PATIENCE_S
from tests.support.recording import (
    WITH_RECORDS,
    Addition,
    Half,
    Places,
    QueueKey,
    Step,
    answer_fields,
    command_in,
    lay_down,
    left_out_of,
    offsets_in_ids,
    records_of,
    steps_of,
)

from .broker_parts import store_of

SUSPEND_FLAG: Final = 2

QUIET_S: Final = 0.004
"""Seconds of true time without news after which the clock is moved on."""

LEAP_S: Final = 0.5
"""Seconds by which the clock is moved on at a time."""

LEAPS_MAX: Final = 240
"""Leaps until an answer counts as missing: two minutes, more than any recording waited."""

RELAYED: Final[dict[int, int]] = {
    RequestCode.GET_CONSUMER_RUNNING_INFO: RequestCode.GET_CONSUMER_RUNNING_INFO,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
    RequestCode.SEND_REPLY_MESSAGE: RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
    RequestCode.SEND_REPLY_MESSAGE_V2: RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
}
"""Requests that the broker answers when a client has answered the one that it sends then."""

PUSHES: Final[set[int]] = {
    RequestCode.CHECK_TRANSACTION_STATE,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
    *RELAYED.values(),
}
"""Requests of the broker to a client."""

LAST_OPAQUE: Final = 0x7EADBEEF
LAST_REQUEST: Final = encode_request(
    RequestCode.GET_MAX_OFFSET,
    opaque=LAST_OPAQUE,
    header=headers.GetMaxOffsetRequestHeader(topic="-", queue_id=0),
)
"""Sent behind others: when it is answered they were served."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be moved on."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self.ahead = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.ahead

    def now_ms(self) -> int:
        return int((time.time() + self.ahead) * 1_000)


class Peer:
    """One client connection: what came in on it, answers apart from the broker's own requests."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, news: asyncio.Event
    ) -> None:
        self.writer = writer
        self.answers: list[RemotingCommand] = []
        self.pushes: list[RemotingCommand] = []
        self.closed = False
        self._reader = reader
        self._news = news
        self._decoder = FrameDecoder(responses_first=True)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(1 << 20):
                for command in self._decoder.receive_data(data):
                    (self.answers if command.is_response else self.pushes).append(command)
                self._news.set()
        except ConnectionError:
            pass
        finally:
            self.closed = True
            self._news.set()

    def take_answer(self, opaque: int) -> RemotingCommand | None:
        """Remove and return the first answer with this number."""
        return _take(self.answers, lambda answer: answer.opaque == opaque)

    async def close(self) -> None:
        self.writer.close()
        await self._task


def _take(
    commands: list[RemotingCommand], fits: Callable[[RemotingCommand], bool]
) -> RemotingCommand | None:
    for number, command in enumerate(commands):
        if fits(command):
            return commands.pop(number)
    return None


class Observer:
    """What a replay tells; the methods of this one do nothing."""

    def answered(self, step: Step, ours: RemotingCommand | None) -> None:
        """`step` is the recorded answer, `ours` what came instead; None when nothing came."""

    def pushed(self, step: Step, ours: RemotingCommand | None) -> None:
        """`step` is a request of the official server to the client, `ours` the like of it."""

    def left_over(self, peer: Peer, unanswered: list[Step]) -> None:
        """Everything was sent; these requests have no recorded answer."""


class Replay:
    """Plays one recording."""

    def __init__(self, file: str, config: BrokerConfig, observer: Observer) -> None:
        self._steps = steps_of(file)
        self._config = config
        self._observer = observer
        self._peers: dict[int, Peer] = {}
        self._unanswered: dict[int, list[Step]] = defaultdict(list)
        self._places = Places()
        self._relayed: list[int] = []  # codes of requests that wait for a client's answer
        self._pushes: dict[tuple[int, int], RemotingCommand] = {}  # ours, by the recorded number
        self._tables, self._additions = left_out_of(file)

    def run(self) -> None:
        """Play it on a loop of its own."""
        loop = SteppedLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._run(loop))

    async def _run(self, loop: SteppedLoop) -> None:
        self._loop = loop
        self._news = asyncio.Event()
        lay_down(self._tables, self._config.store.root)
        self._broker = broker = Broker(self._config, now_ms=loop.now_ms, monotonic_ms=loop.now_ms)
        await broker.start()
        self._address = broker.address
        try:
            for step in self._steps:
                if step.is_from_client:
                    await self._send(step)
                elif step.is_answer:
                    await self._receive(step)
                else:
                    await self._receive_push(step)
            await self._settle()
        finally:
            for peer in self._peers.values():
                await peer.close()
            await broker.stop()

    async def _peer(self, number: int) -> Peer:
        peer = self._peers.get(number)
        if peer is None:
            host, _, port = self._address.rpartition(":")
            peer = Peer(*await asyncio.open_connection(host, int(port)), self._news)
            self._peers[number] = peer
        return peer

    async def _send(self, step: Step) -> None:
        peer = await self._peer(step.connection)
        if step.answer is None:
            self._unanswered[step.connection].append(step)
        if peer.closed:
            return
        command = step.command
        if command is not None and not command.is_response:
            await self._add_left_out(step, peer)
            if command.code == RequestCode.QUERY_MESSAGE:
                self._index_all()
            _choose_queue(step)
        peer.writer.write(self._translated(step))
        if command is not None and not command.is_response and command.code in RELAYED:
            self._relayed.append(RELAYED[command.code])
        if command is not None and command.flag & FLAG_ONE_WAY:
            await self._served(peer)
            await self._flushed()
        elif step.answer is not None and not _may_be_held(step):
            await self._until(lambda: peer.closed or _has(peer.answers, step), may_leap=False)

    async def _served(self, peer: Peer) -> None:
        """Return when everything sent on the connection has been served, or it is closed."""
        if peer.closed:
            return
        peer.writer.write(LAST_REQUEST)
        await self._until(
            lambda: peer.closed or any(answer.opaque == LAST_OPAQUE for answer in peer.answers),
            may_leap=False,
        )
        peer.take_answer(LAST_OPAQUE)

    def _is_flushed(self) -> bool:
        store = store_of(self._broker)
        return store.durable_offset >= store.write_offset

    async def _flushed(self) -> None:
        store_of(self._broker).request_flush()
        while not self._is_flushed():  # noqa: ASYNC110  # the store tells the broker only
            await asyncio.sleep(0.0005)

    def _index_all(self) -> None:
        while store_of(self._broker).tick():
            pass

    # --- what is left out

    async def _add_left_out(self, step: Step, peer: Peer) -> None:
        for addition in self._additions.pop(step.number, ()):
            if addition.frame:
                await self._ask(addition.frame, peer)
            else:
                await self._put(addition)

    async def _ask(self, frame: bytes, peer: Peer) -> None:
        request = command_in(frame)
        assert request is not None
        opaque = request.opaque
        peer.writer.write(frame)
        await self._until(
            lambda: any(answer.opaque == opaque for answer in peer.answers), may_leap=False
        )
        answer = peer.take_answer(opaque)
        assert answer is not None
        assert answer.code == ResponseCode.SUCCESS, answer
        unique_key = _unique_key_of_half(request)
        if unique_key is not None:
            assert isinstance(answer.header, dict)
            (place,) = offsets_in_ids(answer.header["msgId"])
            half = Half(place, int(answer.header["queueOffset"]))
            self._places.halves_by_key[unique_key] = half

    async def _put(self, addition: Addition) -> None:
        """Put messages into a queue, when the broker has put in what comes before them."""
        store, queue = store_of(self._broker), addition.queue
        await self._until(lambda: store.queues.bounds(*queue)[1] >= addition.at, may_leap=True)
        end = store.queues.bounds(*queue)[1]
        assert end == addition.at, f"{queue} ends at {end}, not at {addition.at}"
        if not addition.records:
            return
        appended = store.append([_draft(record) for record in addition.records])
        for record, place in zip(addition.records, appended, strict=True):
            self._places.physical[record.physical_offset] = place.physical_offset
        await self._flushed()

    # --- places

    def _translated(self, step: Step) -> bytes:
        """Return the request with our places in the log instead of the recorded ones."""
        command = step.command
        if command is None:
            return step.frame
        push = self._pushes.pop((step.connection, command.opaque), None)
        if command.is_response and push is not None:
            return encode_reply(
                push,
                command.code,
                header=texts_of(command.header),
                remark=command.remark,
                body=command.body,
            )
        changed: dict[str, int | str] = {}
        match command.header:
            case headers.ViewMessageRequestHeader(offset=offset):
                changed = {"offset": self._places.physical.get(offset, offset)}
            case headers.ConsumerSendMsgBackRequestHeader(offset=offset):
                changed = {"offset": self._places.physical.get(offset, offset)}
            case headers.PullMessageRequestHeader() as pull:
                shift = self._places.shift((pull.topic, pull.queue_id), pull.queue_offset)
                if shift:
                    changed = {"queueOffset": pull.queue_offset + shift}
            case ConsumeMessageDirectlyRequestHeader(msg_id=msg_id) if msg_id:
                place = self._places.physical.get(int(msg_id[-16:], 16))
                if place is not None:
                    changed = {"msgId": msg_id[:-16] + f"{place:016X}"}
            case headers.QueryMessageRequestHeader() if step.answer and not _code(step.answer):
                changed = {"beginTimestamp": 0, "endTimestamp": INT64_MAX}
            case headers.EndTransactionRequestHeader(commit_log_offset=offset, msg_id=unique_key):
                places = self._places
                half = places.halves.get(offset) or places.halves_by_key.get(unique_key)
                if half is not None:
                    changed = {
                        "commitLogOffset": half.physical_offset,
                        "tranStateTableOffset": half.queue_offset,
                    }
        if not changed:
            return step.frame
        texts = texts_of(command.header) or {}
        return encode_request(
            command.code,
            opaque=command.opaque,
            header=texts | {name: str(value) for name, value in changed.items()},
            body=command.body,
            one_way=command.is_one_way,
            header_type=command.header_type,
            remark=command.remark,
            version=command.version,
            language=command.language,
        )

    def _learn(self, step: Step, ours: RemotingCommand) -> None:
        """Note where the messages of an answer lie, recorded and here."""
        theirs_fields = answer_fields(step)
        ours_fields = ours.header if isinstance(ours.header, dict) else {}
        if theirs_fields.get("msgId") and ours_fields.get("msgId"):
            theirs = offsets_in_ids(theirs_fields["msgId"])
            here = offsets_in_ids(ours_fields["msgId"])
            self._places.physical.update(zip(theirs, here, strict=False))
            assert step.request is not None
            assert step.request.command is not None
            unique_key = _unique_key_of_half(step.request.command)
            queue = _queue_of_plain(step, theirs_fields)
            if queue is not None:
                self._places.note_shift(
                    queue, int(theirs_fields["queueOffset"]), int(ours_fields["queueOffset"])
                )
            if unique_key is not None:
                half = Half(here[0], int(ours_fields["queueOffset"]))
                self._places.halves[theirs[0]] = half
                self._places.halves_by_key[unique_key] = half
        for their, our in zip(records_of(step), records_in(step, ours), strict=False):
            self._places.physical[their.physical_offset] = our.physical_offset

    # --- receiving

    async def _receive(self, step: Step) -> None:
        peer = await self._peer(step.connection)
        request = step.request
        assert request is not None
        assert request.command is not None
        held = _may_be_held(request)

        def came() -> bool:
            return peer.closed or _has(peer.answers, request)

        await self._add_left_out(step, peer)
        await self._until(came, may_leap=held)
        if request.command.code in RELAYED:
            self._relayed.remove(RELAYED[request.command.code])
        ours = peer.take_answer(request.command.opaque)
        if held and _code_of(ours) == ResponseCode.PULL_NOT_FOUND != _code(step):
            # It timed out while the clock was moved on for something else; the client asks again.
            peer.writer.write(self._translated(request))
            await self._until(came, may_leap=held)
            ours = peer.take_answer(request.command.opaque)
        if ours is not None and ours.code == 0 and request.command.code not in RELAYED:
            self._learn(step, ours)
        self._observer.answered(step, ours)

    async def _receive_push(self, step: Step) -> None:
        peer = await self._peer(step.connection)
        push = step.command
        if push is None or push.code not in PUSHES:
            return
        if push.code in RELAYED.values() and push.code not in self._relayed:
            return  # who asked for it is in another recording

        def fits(command: RemotingCommand) -> bool:
            return command.code == push.code and _about(command) == _about(push)

        if not any(map(fits, peer.pushes)) and push.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            await self._end_connections(step)
        await self._until(lambda: any(map(fits, peer.pushes)), may_leap=True)
        ours = _take(peer.pushes, fits)
        if ours is not None:
            self._pushes[step.connection, push.opaque] = ours
        if ours is not None and push.code == RequestCode.CHECK_TRANSACTION_STATE:
            self._places.halves[_number(push, "commitLogOffset")] = Half(
                _number(ours, "commitLogOffset"), _number(ours, "tranStateTableOffset")
            )
        self._observer.pushed(step, ours)

    async def _end_connections(self, step: Step) -> None:
        """Close connections that the recording does not use any more: that is what it shows."""
        used = {later.connection for later in self._steps[step.number :]}
        for number, peer in self._peers.items():
            if number not in used:
                await peer.close()

    async def _settle(self) -> None:
        """Have everything that was sent served: a request behind it on each connection is."""
        for number, peer in self._peers.items():
            unanswered = self._unanswered[number]
            await self._served(peer)
            self._observer.left_over(peer, unanswered)

    async def _until(self, happened: Callable[[], bool], *, may_leap: bool) -> None:
        """Return when it happened, or when it will not any more."""
        leaps = 0
        given_up = time.monotonic() + PATIENCE_S
        while not happened() and leaps < LEAPS_MAX and time.monotonic() < given_up:
            self._news.clear()
            try:
                async with asyncio.timeout(QUIET_S if may_leap else PATIENCE_S):
                    await self._news.wait()
            except TimeoutError:
                if may_leap and self._is_flushed():
                    self._loop.ahead += LEAP_S
                    leaps += 1


def _has(answers: list[RemotingCommand], request: Step) -> bool:
    assert request.command is not None
    return any(answer.opaque == request.command.opaque for answer in answers)


def _queue_of_plain(step: Step, fields: dict[str, str]) -> QueueKey | None:
    """Return the queue in which the message lies that was sent; None if it had to wait first."""
    assert step.request is not None
    assert step.request.command is not None
    header = step.request.command.header
    assert isinstance(header, headers.SendMessageRequestHeader)
    names = decode_properties(header.properties or "").keys()
    if names & {"TRAN_MSG", "DELAY"} or any(name.startswith("TIMER_") for name in names):
        return None
    return header.topic, int(fields["queueId"])


def _choose_queue(step: Step) -> None:
    """Have the broker's next random choice of a queue be the recorded one."""
    header = None if step.command is None else step.command.header
    if (
        not isinstance(header, headers.SendMessageRequestHeader)
        or header.queue_id >= 0
        or step.answer is None
        or _code(step.answer) != ResponseCode.SUCCESS
    ):
        return
    recorded = int(answer_fields(step.answer)["queueId"])
    for seed in range(1_000):
        random.seed(seed)
        if random.randrange(header.default_topic_queue_nums) == recorded:
            random.seed(seed)
            return
    raise AssertionError(f"no seed chooses queue {recorded}")


def _draft(record: Record) -> AppendRequest:
    return AppendRequest(
        topic=record.topic,
        queue_id=record.queue_id,
        body=record.body,
        properties=record.properties,
        tags_code=tags_code(record.properties),
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
    )


def _unique_key_of_half(request: RemotingCommand) -> str | None:
    """Return the id of a half message that is sent; None for any other request."""
    header = request.header
    if not isinstance(header, headers.SendMessageRequestHeader):
        return None
    properties = decode_properties(header.properties or "")
    return properties.get("UNIQ_KEY") if properties.get("TRAN_MSG") == "true" else None


def _code(step: Step) -> int | None:
    return _code_of(step.command)


def _code_of(command: RemotingCommand | None) -> int | None:
    return None if command is None else command.code


def _may_be_held(step: Step) -> bool:
    """Whether the official broker may have kept the request waiting."""
    assert step.command is not None
    header = step.command.header
    if step.command.code in RELAYED:
        return True
    return isinstance(header, headers.PullMessageRequestHeader) and bool(
        header.sys_flag & SUSPEND_FLAG
    )


def records_in(step: Step, ours: RemotingCommand) -> list[Record]:
    """Return the records in our answer to a request whose recorded answer has records."""
    assert step.request is not None
    assert step.request.command is not None
    if step.request.command.code not in WITH_RECORDS or ours.code != 0:
        return []
    return decode_records(ours.body)


def _about(command: RemotingCommand) -> object:
    """Return which group or transaction a request of the broker is about."""
    fields = texts_of(command.header) or {}
    return fields.get("consumerGroup") or fields.get("group") or fields.get("msgId")


def _number(command: RemotingCommand, name: str) -> int:
    return int((texts_of(command.header) or {})[name])
