"""Puts back what a recording leaves out: earlier messages, repeated sends, heartbeats and commits.

Recordings keep one of several requests of the same shape, and begin after messages were stored. The
answers that were kept tell of the rest: how far a queue reached, which records lay in it, which
half message a producer was asked about. What is missing is put back right before the request whose
answer presupposes it. Nothing is put back that the broker itself has to bring about: a retry, a
delayed message, the message of a commit. Those are waited for, and only if the recording leaves
out what caused them they are put back as well.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from halfmq.remoting import headers
from halfmq.remoting.bodies import (
    HeartbeatData,
    decode_consumer_list,
    decode_heartbeat,
    encode_heartbeat,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.store.draft import Draft
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import decode_properties, encode_properties, tags_code
from halfmq.store.format.record import Record, decode_records
from halfmq.store.message_store import MessageStore
from tests.support.recording import PULLS, Step, answer_fields, offsets_in_ids, records_of

SUSPEND_FLAG: Final = 2
SUBSCRIPTION_FLAG: Final = 4
FILLED_MAX: Final = 5_000
"""Messages of one queue that a recording may presuppose; more would be a wrong conclusion."""

LEAPS_FOR_OWN: Final = 30
"""Leaps of the clock in which the broker must bring about what it can: a first retry takes 10 s."""

_OF_SERVER: Final = frozenset(
    {
        "CLUSTER",
        "MSG_REGION",
        "REAL_QID",
        "REAL_TOPIC",
        "TRACE_ON",
        "TRANSACTION_CHECK_TIMES",
        "WAIT",  # set to false by a check
        "__transactionId__",
    }
)
"""Properties that the broker adds to a half message, or changes."""

_OF_RETRY: Final = frozenset(
    {"DELAY", "ORIGIN_MESSAGE_ID", "REAL_QID", "REAL_TOPIC", "RETRY_TOPIC", "WAIT"}
)
"""Properties that the broker adds to a message that is sent back, or changes."""

QueueKey = tuple[str, int]


class Half(NamedTuple):
    """Where a half message lies here."""

    physical_offset: int
    queue_offset: int


class Places:
    """Recorded places in the log, and ours."""

    def __init__(self) -> None:
        self.physical: dict[int, int] = {}
        self.halves: dict[int, Half] = {}  # by recorded physical offset
        self.halves_by_key: dict[str, Half] = {}
        self._shifts: dict[QueueKey, list[tuple[int, int]]] = defaultdict(list)

    def note_shift(self, queue: QueueKey, recorded: int, ours: int) -> None:
        """Note which queue offset of ours is the like of a recorded one."""
        self._shifts[queue].append((recorded, ours - recorded))

    def shift(self, queue: QueueKey, recorded: int) -> int:
        """Return what to add to a recorded queue offset."""
        known = [shift for start, shift in self._shifts[queue] if start <= recorded]
        return known[-1] if known else 0


class Line(Protocol):
    """A client connection of the replay."""

    async def ask(
        self, code: int, header: Header | Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand: ...


class LeftOut:
    """Knows the whole recording, and what the broker holds now."""

    def __init__(
        self,
        steps: list[Step],
        store: MessageStore,
        places: Places,
        flushed: Callable[[], Awaitable[None]],
        leap_until: Callable[[Callable[[], bool], int], Awaitable[None]],
    ) -> None:
        self.owed: list[Record] = []  # what the broker should have put into queues, and did not
        self._store = store
        self._places = places
        self._flushed = flushed
        self._leap_until = leap_until
        self._records: dict[QueueKey, dict[int, Record]] = defaultdict(dict)
        self._by_place: dict[int, Record] = {}
        self._retries: dict[str, Record] = {}  # by UNIQ_KEY
        self._checked: dict[str, Record] = {}  # half messages asked about, by UNIQ_KEY
        self._half_template: dict[str, Step] = {}  # by producer group
        self._beats: dict[tuple[int, str], HeartbeatData] = {}  # by connection and group
        self._committed: set[tuple[str, str, int]] = set()
        self._causes = 0  # requests so far after which the broker puts messages into queues itself
        self._waited_in_vain: dict[QueueKey, int] = {}
        for step in steps:
            self._collect(step)

    def _collect(self, step: Step) -> None:
        for record in records_of(step):
            self._records[record.topic, record.queue_id][record.queue_offset] = record
            self._by_place[record.physical_offset] = record
            if record.reconsume_times == 1:
                self._retries[record.property_map.get("UNIQ_KEY", "")] = record
        command = step.command
        if command is None:
            return
        header = command.header
        if isinstance(header, headers.CheckTransactionStateRequestHeader) and header.msg_id:
            (record,) = decode_records(command.body)
            self._checked[header.msg_id] = record
        if isinstance(header, headers.SendMessageRequestHeader) and "TRAN_MSG\x01true" in (
            header.properties or ""
        ):
            self._half_template.setdefault(header.producer_group, step)

    # --- before a request

    async def before(self, step: Step, line: Line) -> None:
        """Bring about what the recorded answer to this request presupposes."""
        request = step.command
        assert request is not None
        if request.code == RequestCode.HEART_BEAT and request.body:
            self._note_beat(step, request.body)
        if _has_consequences(request):
            self._causes += 1
        answer = step.answer
        match request.header:
            case headers.EndTransactionRequestHeader() as end:
                await self._before_decision(step, end, line)
            case headers.UpdateConsumerOffsetRequestHeader() as update:
                self._committed.add((update.consumer_group, update.topic, update.queue_id))
            case headers.PullMessageRequestHeader() as pull:
                await self._before_pull(step, pull, line)
            case headers.ConsumerSendMsgBackRequestHeader() as back if _code(answer) == 0:
                await self._before_send_back(back)
            case headers.QueryConsumerOffsetRequestHeader() as query if _code(answer) == 0:
                key = query.consumer_group, query.topic, query.queue_id
                assert answer is not None
                if key not in self._committed and answer_fields(answer)["offset"] == "0":
                    await self._fill((query.topic, query.queue_id), 1)
            case headers.GetConsumerListByGroupRequestHeader() if _code(answer) == 0:
                assert answer is not None
                await self._before_consumer_list(step, answer, line)
            case headers.GetMaxOffsetRequestHeader() as asked if _code(answer) == 0:
                assert answer is not None
                queue = asked.topic, asked.queue_id
                await self._fill(queue, int(answer_fields(answer)["offset"]))
            case headers.SendMessageRequestHeader() as sent if _code(answer) == 0:
                assert answer is not None
                await self._before_send(sent, answer)
        if answer is not None and request.code not in PULLS:
            for record in records_of(answer):
                if record.physical_offset not in self._places.physical:
                    await self._fill((record.topic, record.queue_id), record.queue_offset + 1)

    async def while_held(self, answer: Step) -> None:
        """Bring about what ended a pull that the official broker held."""
        assert answer.request is not None
        assert answer.request.command is not None
        pull = answer.request.command.header
        assert isinstance(pull, headers.PullMessageRequestHeader)
        end = answer_fields(answer).get("maxOffset")
        if end is not None:
            await self._fill((pull.topic, pull.queue_id), int(end))

    # --- messages

    async def _before_send(self, sent: headers.SendMessageRequestHeader, answer: Step) -> None:
        fields = answer_fields(answer)
        if not is_put_off(sent.properties):
            await self._fill((sent.topic, int(fields["queueId"])), int(fields["queueOffset"]))
        if sent.queue_id < 0:
            _choose(int(fields["queueId"]), sent.default_topic_queue_nums)

    async def _before_pull(
        self, step: Step, pull: headers.PullMessageRequestHeader, line: Line
    ) -> None:
        if pull.sys_flag & 1:
            self._committed.add((pull.consumer_group, pull.topic, pull.queue_id))
        code = _code(step.answer)
        if not pull.sys_flag & SUBSCRIPTION_FLAG and code not in (
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ):
            await self._beat_again(step, pull, line)
        answer = step.answer
        if answer is None:
            await self._fill((pull.topic, pull.queue_id), pull.queue_offset)
            return
        end = answer_fields(answer).get("maxOffset")
        if end is None:
            return
        queue = pull.topic, pull.queue_id
        if not pull.sys_flag & SUSPEND_FLAG or answer.number == step.number + 1:
            await self._fill(queue, int(end))
            return
        await self._fill(queue, min(pull.queue_offset, int(end)))
        if self._end(queue) > pull.queue_offset:  # it is not held: let it find everything
            await self._fill(queue, int(end))

    async def _before_send_back(self, back: headers.ConsumerSendMsgBackRequestHeader) -> None:
        if back.offset in self._places.physical:
            return
        record = self._by_place.get(back.offset)
        if record is not None:
            await self._fill((record.topic, record.queue_id), record.queue_offset + 1)
            return
        # Nothing shows its queue: it lies where no request of the recording looks.
        retry = self._retries.get(back.origin_msg_id or "")
        if retry is not None:
            kept = retry.property_map.keys() - _OF_RETRY
            properties = {name: retry.property_map[name] for name in kept}
            record = retry._replace(
                properties=encode_properties(properties), reconsume_times=0, sys_flag=0
            )
        draft = _draft((back.origin_topic or "left-out", 1_000), record)
        (appended,) = self._store.append([draft])
        self._places.physical[back.offset] = appended.physical_offset
        await self._flushed()

    async def _fill(self, queue: QueueKey, recorded_end: int) -> None:
        """Have the queue reach this end, with the records that the recording shows."""
        end = recorded_end + self._places.shift(queue, recorded_end)
        records = self._records.get(queue, {})
        while (now := self._end(queue)) < end:
            assert end - now <= FILLED_MAX, queue
            if _is_made_by_server(queue, records.get(now)) and await self._comes_by_itself(queue):
                continue
            group = [records.get(now)]
            for offset in range(now + 1, end):
                if _is_made_by_server(queue, records.get(offset)):
                    break
                group.append(records.get(offset))
            await self._put_back(queue, group)

    async def _comes_by_itself(self, queue: QueueKey) -> bool:
        """Wait for what the broker has to put into the queue; False when nothing comes."""
        if self._waited_in_vain.get(queue) == self._causes:
            return False
        now = self._end(queue)
        await self._leap_until(lambda: self._end(queue) > now, LEAPS_FOR_OWN)
        if self._end(queue) > now:
            return True
        self._waited_in_vain[queue] = self._causes
        return False

    async def _put_back(self, queue: QueueKey, records: list[Record | None]) -> None:
        appended = self._store.append([_draft(queue, record) for record in records])
        for record, place in zip(records, appended, strict=True):
            if record is not None:
                self._places.physical[record.physical_offset] = place.physical_offset
                if self._causes and _is_made_by_server(queue, record):
                    self.owed.append(record)
        await self._flushed()

    def _end(self, queue: QueueKey) -> int:
        return self._store.queue_bounds(*queue)[1]

    # --- heartbeats

    def _note_beat(self, step: Step, body: bytes) -> None:
        try:
            data = decode_heartbeat(body)
        except BodyError:
            return
        for consumer in data.consumer_data_set:
            if consumer.subscription_data_set:
                self._beats[step.connection, consumer.group_name] = data

    async def _beat_again(
        self, step: Step, pull: headers.PullMessageRequestHeader, line: Line
    ) -> None:
        """Send a heartbeat with the newer version of the subscription that the pull names."""
        data = self._beats.get((step.connection, pull.consumer_group)) or next(
            (beat for (_, group), beat in self._beats.items() if group == pull.consumer_group), None
        )
        if data is None:
            return
        newer = replace(
            data,
            consumer_data_set=tuple(
                replace(
                    consumer,
                    subscription_data_set=tuple(
                        replace(one, sub_version=max(one.sub_version, pull.sub_version))
                        for one in consumer.subscription_data_set
                    ),
                )
                for consumer in data.consumer_data_set
            ),
        )
        if newer != data:
            self._beats[step.connection, pull.consumer_group] = newer
            await line.ask(RequestCode.HEART_BEAT, body=encode_heartbeat(newer))

    async def _before_consumer_list(self, step: Step, answer: Step, line: Line) -> None:
        """Have the members beat of whom the recording shows no heartbeat, or not the latest."""
        request, recorded = step.command, answer.command
        assert request is not None
        assert recorded is not None
        group = (texts_of(request.header) or {})["consumerGroup"]
        ours = await line.ask(request.code, {"consumerGroup": group})
        here = decode_consumer_list(ours.body) if ours.code == 0 else []
        for client_id in decode_consumer_list(recorded.body):
            if client_id not in here:
                beat = {"clientID": client_id, "consumerDataSet": [{"groupName": group}]}
                await line.ask(RequestCode.HEART_BEAT, body=json.dumps(beat).encode())

    # --- half messages

    async def _before_decision(
        self, step: Step, end: headers.EndTransactionRequestHeader, line: Line
    ) -> None:
        """Send the half message that the decision is about, unless it was sent."""
        known = self._places
        if end.commit_log_offset in known.halves:
            return
        if end.msg_id not in known.halves_by_key:
            shown = (
                end.producer_group in self._half_template or end.msg_id in self._checked
            ) and _code(step.answer) in (None, 0)
            if not shown:
                return
            await self._send_half(end, line)
        known.halves[end.commit_log_offset] = known.halves_by_key[end.msg_id]

    async def _send_half(self, end: headers.EndTransactionRequestHeader, line: Line) -> None:
        """Send the half message as the check for it shows it, or like another one of the group."""
        template = self._half_template.get(end.producer_group)
        record = self._checked.get(end.msg_id)
        properties = {"WAIT": "true"}
        topic, queue_id, body = end.topic or "", 0, b"half"
        if template is not None and template.command is not None:
            header = template.command.header
            assert isinstance(header, headers.SendMessageRequestHeader)
            topic, queue_id, body = header.topic, header.queue_id, template.command.body
            properties |= decode_properties(header.properties or "")
        if record is not None:
            topic, queue_id, body = record.topic, record.queue_id, record.body
            shown = record.property_map
            properties |= {name: shown[name] for name in shown.keys() - _OF_SERVER}
        if template is None:  # the producer's heartbeat is left out with it
            beat = {"clientID": "left out", "producerDataSet": [{"groupName": end.producer_group}]}
            await line.ask(RequestCode.HEART_BEAT, body=json.dumps(beat).encode())
        answer = await line.ask(
            RequestCode.SEND_MESSAGE_V2,
            headers.SendMessageRequestHeaderV2(
                producer_group=end.producer_group,
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue_id,
                sys_flag=4,
                born_timestamp=1,
                flag=0,
                properties=encode_properties(properties | {"UNIQ_KEY": end.msg_id}).decode(),
            ),
            body,
        )
        assert answer.code == 0
        assert isinstance(answer.header, dict)
        (place,) = offsets_in_ids(answer.header["msgId"])
        self._places.halves_by_key[end.msg_id] = Half(place, int(answer.header["queueOffset"]))


def _code(answer: Step | None) -> int | None:
    return None if answer is None or answer.command is None else answer.command.code


def is_put_off(properties: str | None) -> bool:
    """Whether a message with these properties does not go into its own queue when it is sent."""
    names = decode_properties(properties or "").keys()
    return bool(names & {"TRAN_MSG", "DELAY"}) or any(name.startswith("TIMER_") for name in names)


def _has_consequences(request: RemotingCommand) -> bool:
    """Whether the broker puts a message into a queue later because of this request."""
    match request.header:
        case headers.SendMessageRequestHeader(properties=properties):
            return is_put_off(properties)
        case headers.ConsumerSendMsgBackRequestHeader() | headers.EndTransactionRequestHeader():
            return True
    return False


def _is_made_by_server(queue: QueueKey, record: Record | None) -> bool:
    if queue[0].startswith("%"):  # retries and dead letters
        return True
    return record is not None and bool(
        record.property_map.keys() & {"DELAY", "REAL_TOPIC", "TRAN_MSG"}
    )


def _choose(queue_id: int, queues: int) -> None:
    """Have the broker's next random choice among the queues be this one."""
    for seed in range(1_000):
        random.seed(seed)
        if random.randrange(queues) == queue_id:
            random.seed(seed)
            return
    raise AssertionError(f"no seed chooses queue {queue_id} of {queues}")


def _draft(queue: QueueKey, record: Record | None) -> Draft:
    host = pack_host("127.0.0.1", 29911)
    if record is None:
        return Draft(
            topic=queue[0],
            queue_id=queue[1],
            body=b"left out",
            properties=b"",
            born_timestamp=1,
            born_host=host,
            store_host=host,
        )
    return Draft(
        topic=queue[0],
        queue_id=queue[1],
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
