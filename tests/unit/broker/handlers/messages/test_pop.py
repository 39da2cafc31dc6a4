"""Pop over the wire: each message to one member, again only if it is not acknowledged."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from halfmq.broker.limits.kept import POP_IN_FLIGHT, POP_LOCKS, POP_PAIRS, usage
from halfmq.broker.pop import engine, order, revive_log
from halfmq.remoting.admin_headers import TopicRequestHeader
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import (
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from halfmq.remoting.pop import (
    AckMessageRequestHeader,
    BatchAck,
    BatchAckBody,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationRequestHeader,
    NotificationResponseHeader,
    PeekMessageRequestHeader,
    PollingInfoRequestHeader,
    PollingInfoResponseHeader,
    PopHandle,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
    RequestMode,
    decode_batch_ack,
    decode_request_mode,
    kind_of,
    parse_handle,
    parse_offsets,
)
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import Record, decode_records
from halfmq.store.log.append_request import AppendRequest, AppendResult
from tests.support.peers import Peer, until
from tests.support.race_windows import Rig, windowed
from tests.support.stores import draft
from tests.support.usual_headers import pull_header

GROUP, TOPIC, RETRY = "pg", "orders", "%RETRY%pg_orders"
INVISIBLE_MS = 10_000


def encode_batch_ack(
    broker_name: str, group: str, topic: str, handles: Sequence[PopHandle]
) -> bytes:
    """Return the body for handles of one pop from one queue; ``topic`` is no retry topic."""
    first = handles[0]
    bits = sum(1 << handle.offset - first.start for handle in handles)
    packed = b64encode(bits.to_bytes(bits.bit_length() // 8 + 1, "little")).decode()
    ack = BatchAck(
        group,
        topic,
        first.kind,
        first.start,
        first.queue_id,
        first.revive_queue,
        first.pop_ms,
        first.invisible_ms,
        packed,
    )
    return msgspec.json.encode(BatchAckBody(broker_name, (ack,)))


def pop_header(**changed: Any) -> PopMessageRequestHeader:
    usual: dict[str, Any] = {
        "consumer_group": GROUP,
        "topic": TOPIC,
        "queue_id": -1,
        "max_msg_nums": 32,
        "invisible_time": INVISIBLE_MS,
        "poll_time": 0,
    }
    return PopMessageRequestHeader(**usual | changed)


class Message:
    """A popped message as a client sees it."""

    def __init__(self, record: Record, answer: PopMessageResponseHeader) -> None:
        self.record, self.body = record, record.body.decode()
        handle = get_property(record.properties, b"POP_CK")
        if handle is not None:
            self.handle = parse_handle(handle.decode(), int(handle.split()[7]))
            return
        (start,) = parse_offsets(answer.start_offset_info)["0", record.queue_id]
        self.handle = PopHandle(
            start,
            answer.pop_time,
            answer.invisible_time,
            answer.revive_qid,
            "0",
            "broker-a",
            record.queue_id,
            record.queue_offset,
        )

    @property
    def topic(self) -> str:
        return {"0": TOPIC, "1": RETRY, "2": RETRY.replace("_", "+")}[self.handle.kind]


def messages(answer: RemotingCommand) -> list[Message]:
    if answer.code == ResponseCode.POLLING_TIMEOUT:
        return []
    assert answer.code == 0, answer
    header = response_header(answer, PopMessageResponseHeader)
    found = [Message(record, header) for record in decode_records(answer.body)]
    told = parse_offsets(header.msg_offset_info)
    assert Counter((one.handle.kind, one.record.queue_id) for one in found) == {
        key: len(offsets) for key, offsets in told.items()
    }
    return found


async def pop(peer: Peer, **changed: Any) -> list[Message]:
    return messages(await peer.call(RequestCode.POP_MESSAGE, pop_header(**changed)))


async def bodies(peer: Peer, **changed: Any) -> list[str]:
    return sorted(one.body for one in await pop(peer, **changed))


def ack_header(message: Message, **changed: Any) -> AckMessageRequestHeader:
    handle = changed.pop("handle", message.handle)
    usual: dict[str, Any] = {
        "consumer_group": GROUP,
        "topic": message.topic,
        "queue_id": handle.queue_id,
        "extra_info": str(handle),
        "offset": handle.offset,
    }
    return AckMessageRequestHeader(**usual | changed)


async def ack(peer: Peer, message: Message, **changed: Any) -> int:
    answer = await peer.call(RequestCode.ACK_MESSAGE, ack_header(message, **changed))
    return answer.code


async def change(peer: Peer, message: Message, ms: int, **changed: Any) -> RemotingCommand:
    header = ack_header(message, **changed)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    return await peer.call(
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
        ChangeInvisibleTimeRequestHeader(**fields, invisible_time=ms),
    )


def changed_handle(message: Message, answer: RemotingCommand) -> PopHandle:
    assert answer.code == 0, answer.remark
    header = response_header(answer, ChangeInvisibleTimeResponseHeader)
    return message.handle._replace(
        start=message.handle.offset,
        pop_ms=header.pop_time,
        invisible_ms=header.invisible_time,
        revive_queue=header.revive_qid,
    )


async def send(rig: Rig, count: int, first: int = 0, **fields: Any) -> Peer:
    """Return a peer after messages m0, m1, … were sent, in turn to the queues of the topic."""
    peer = await rig.peer(GROUP)
    for number in range(first, first + count):
        answer = await peer.plain(
            f"K{number}", f"m{number}".encode(), queue_id=number % fields.get("queues", 4)
        )
        assert answer.code == 0
    return peer


@windowed()
async def test_each_message_goes_to_one_member(rig: Rig) -> None:
    """From all queues, as many as each asks for, and then no more."""
    peer = await send(rig, 10)
    first = await bodies(peer, max_msg_nums=4)
    second = await bodies(await rig.peer(GROUP))
    assert len(first) == 4
    assert sorted(first + second) == sorted(f"m{number}" for number in range(10))
    assert await bodies(peer) == []


@windowed()
async def test_only_what_was_not_acknowledged_comes_again(rig: Rig) -> None:
    """As its next delivery, with its properties, and then again with a handle that counts."""
    peer = await send(rig, 4)
    found = {one.body: one for one in await pop(peer)}
    assert [await ack(peer, found[name]) for name in ("m0", "m2")] == [0, 0]
    await rig.wait(INVISIBLE_MS - 1_000)
    assert await pop(peer) == []
    await rig.wait(1_500)

    again = {one.body: one for one in await pop(peer)}
    assert sorted(again) == ["m1", "m3"]
    for message in again.values():
        assert message.record.reconsume_times == 1
        assert message.record.topic == TOPIC
        assert (
            get_property(message.record.properties, b"UNIQ_KEY")
            == message.body.replace("m", "K").encode()
        )
        assert await ack(peer, message) == 0
    await rig.wait(3 * INVISIBLE_MS)
    assert await pop(peer) == []


@windowed()
async def test_a_message_that_becomes_visible_wakes_a_waiting_pop(rig: Rig) -> None:
    """At once, and not when the poll ends."""
    peer = await send(rig, 1)
    await pop(peer)
    waiting = peer.send(RequestCode.POP_MESSAGE, pop_header(poll_time=50_000))
    await rig.wait(INVISIBLE_MS - 500)
    assert not peer.answered(waiting)
    await rig.wait(600, step_ms=100)
    assert peer.answered(waiting)
    (message,) = messages(await peer.answer(waiting))
    assert message.body == "m0"


@windowed()
async def test_a_new_message_wakes_a_waiting_pop(rig: Rig) -> None:
    """Without the time moving at all."""
    peer = await send(rig, 1)
    await pop(peer)
    waiting = peer.send(RequestCode.POP_MESSAGE, pop_header(poll_time=50_000))
    await peer.sync()
    info = PollingInfoRequestHeader(consumer_group=GROUP, topic=TOPIC, queue_id=-1)
    answer = await peer.call(RequestCode.POLLING_INFO, info)
    assert response_header(answer, PollingInfoResponseHeader).polling_num == 1
    await send(rig, 1, first=1)
    (message,) = messages(await peer.answer(waiting))
    assert message.body == "m1"


@windowed()
async def test_a_pop_that_waits_in_vain_is_told_so(rig: Rig) -> None:
    """With RocketMQ's code, remark and fields."""
    peer = await send(rig, 1)
    await pop(peer)
    waiting = peer.send(RequestCode.POP_MESSAGE, pop_header(poll_time=3_000))
    await rig.wait(4_000)
    answer = await peer.answer(waiting)
    assert (answer.code, answer.remark) == (
        ResponseCode.POLLING_TIMEOUT,
        "NO_MESSAGE_IN_QUEUE",
    )
    assert response_header(answer, PopMessageResponseHeader).msg_offset_info == ""


@windowed()
async def test_a_changed_handle_counts_and_the_old_one_does_not(rig: Rig) -> None:
    """Whether the message is hidden for longer or comes again earlier."""
    peer = await send(rig, 2)
    one, two = await pop(peer)
    longer = changed_handle(one, await change(peer, one, 3 * INVISIBLE_MS))
    assert await ack(peer, one) == ResponseCode.NO_MESSAGE
    await change(peer, two, 1_000)
    await rig.wait(2_000)
    assert await bodies(peer) == [two.body]
    await rig.wait(INVISIBLE_MS * 2)
    assert await bodies(peer) == [two.body]  # not acknowledged; the first one stays hidden
    assert await ack(peer, one, handle=longer) == 0
    await rig.wait(4 * INVISIBLE_MS)
    assert await bodies(peer) == [two.body]


@windowed()
async def test_a_message_that_is_given_back_comes_at_once(rig: Rig) -> None:
    """An invisible time of 0 is a negative acknowledgement."""
    peer = await send(rig, 1)
    (one,) = await pop(peer)
    answer = await change(peer, one, 0)
    assert answer.code == 0
    await rig.wait(100, step_ms=50)
    assert await bodies(peer) == ["m0"]


@windowed()
async def test_invented_expired_and_changed_handles_are_refused(rig: Rig) -> None:
    """With 208, and nothing is acknowledged by them."""
    peer = await send(rig, 1)
    (one,) = await pop(peer)
    handle = one.handle
    invented = [
        handle._replace(pop_ms=handle.pop_ms + 1),
        handle._replace(start=handle.start + 1),
        handle._replace(invisible_ms=handle.invisible_ms + 1),
        handle._replace(revive_queue=handle.revive_queue + 1),
        handle._replace(revive_queue=999),
        handle._replace(broker_name="other"),
        handle._replace(offset=5),
    ]
    for other in invented:
        assert await ack(peer, one, handle=other) == ResponseCode.NO_MESSAGE, other
        assert (await change(peer, one, 1, handle=other)).code == ResponseCode.NO_MESSAGE
    assert await ack(peer, one, consumer_group="other") == ResponseCode.NO_MESSAGE
    assert await ack(peer, one, extra_info="x") == ResponseCode.SYSTEM_ERROR
    await rig.wait(INVISIBLE_MS + 500)
    assert await ack(peer, one) == ResponseCode.NO_MESSAGE
    (again,) = await pop(peer)
    assert again.body == "m0"
    assert await ack(peer, one) == ResponseCode.NO_MESSAGE
    assert [await ack(peer, again) for _ in range(2)] == [0, 0]  # the answer may be lost


@windowed()
async def test_a_batch_of_acknowledgements(rig: Rig) -> None:
    """As RocketMQ's proxy sends them; one bad handle does not keep back the others."""
    peer = await send(rig, 4, queues=1)
    found = await pop(peer)
    handles = [one.handle for one in found]
    body = encode_batch_ack("broker-a", GROUP, TOPIC, [*handles[:2], handles[3]])
    assert (await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, body)).code == 0
    beyond = [handles[2], handles[2]._replace(offset=60)]
    body = encode_batch_ack("broker-a", GROUP, TOPIC, beyond)
    answer = await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, body)
    assert answer.code == ResponseCode.NO_MESSAGE
    assert (await peer.call(RequestCode.BATCH_ACK_MESSAGE, None)).code == ResponseCode.NO_MESSAGE
    await rig.wait(2 * INVISIBLE_MS)
    assert await pop(peer) == []


@pytest.mark.parametrize("power_cut", [False, True])
@windowed()
async def test_after_a_kill_only_unacknowledged_messages_come_again(
    rig: Rig, power_cut: bool
) -> None:
    """Each once, and handles from before still count."""
    peer = await send(rig, 12)
    found = {one.body: one for one in await pop(peer)}
    for name in ("m0", "m5", "m7"):
        assert await ack(peer, found[name]) == 0
    longer = changed_handle(found["m8"], await change(peer, found["m8"], 6 * INVISIBLE_MS))
    await rig.kill(power_cut=power_cut)

    peer = await send(rig, 0)
    assert await pop(peer) == []
    assert await ack(peer, found["m1"]) == 0
    assert await ack(peer, found["m0"]) == ResponseCode.NO_MESSAGE
    await rig.wait(INVISIBLE_MS + 500)
    again = await bodies(peer, invisible_time=20 * INVISIBLE_MS)
    assert again == sorted(found.keys() - {"m0", "m1", "m5", "m7", "m8"})
    assert await ack(peer, found["m8"], handle=longer) == 0
    await rig.kill(power_cut=power_cut)
    await rig.wait(8 * INVISIBLE_MS)
    assert await pop(await rig.peer(GROUP)) == []


@windowed()
async def test_a_message_becomes_a_dead_letter_after_too_many_deliveries(rig: Rig) -> None:
    """After as many retries as its group has."""
    peer = await send(rig, 1)
    config = rig.tables.groups.ensure(GROUP)
    assert config is not None
    await rig.tables.groups.change(replace(config, retry_max_times=2))
    times = []
    for _ in range(5):
        times += [one.record.reconsume_times for one in await pop(peer)]
        await rig.wait(INVISIBLE_MS + 500)
    assert times == [0, 1, 2]
    (dead,) = rig.consumed(f"%DLQ%{GROUP}")
    assert dead.body == b"m0"
    assert get_property(dead.properties, b"RETRY_TOPIC") == TOPIC.encode()


@windowed()
async def test_messages_in_order_lock_their_queue(rig: Rig) -> None:
    """Until all are acknowledged; the same attempt gets the same messages."""
    peer = await send(rig, 4, queues=1)
    order: dict[str, Any] = {"order": True, "max_msg_nums": 2, "queue_id": 0}
    first = await pop(peer, attempt_id="a", **order)
    assert [one.body for one in first] == ["m0", "m1"]
    assert await pop(peer, attempt_id="b", **order) == []
    await rig.wait(100)
    repeated = await pop(peer, attempt_id="a", **order)
    assert [one.body for one in repeated] == ["m0", "m1"]
    assert await ack(peer, first[0]) == ResponseCode.NO_MESSAGE
    assert await ack(peer, repeated[1]) == 0
    assert await pop(peer, attempt_id="b", **order) == []
    waiting = peer.send(
        RequestCode.POP_MESSAGE, pop_header(poll_time=50_000, attempt_id="b", **order)
    )
    await ack(peer, repeated[0])
    assert [one.body for one in messages(await peer.answer(waiting))] == ["m2", "m3"]


@windowed()
async def test_an_order_lock_ends_with_its_time(rig: Rig) -> None:
    """Then a waiting member gets the messages at once, and knows how often they were delivered."""
    peer = await send(rig, 3, queues=1)
    order: dict[str, Any] = {"order": True, "max_msg_nums": 3, "queue_id": 0}
    first = await pop(peer, attempt_id="a", **order)
    assert await ack(peer, first[1]) == 0
    waiting = peer.send(
        RequestCode.POP_MESSAGE, pop_header(poll_time=50_000, attempt_id="b", **order)
    )
    await rig.wait(INVISIBLE_MS + 100, step_ms=100)
    answer = await peer.answer(waiting)
    assert [one.body for one in messages(answer)] == ["m0", "m2"]
    told = response_header(answer, PopMessageResponseHeader).order_count_info
    assert told == "0 qo0%0 1;0 qo0%2 1"
    assert await ack(peer, first[0]) == ResponseCode.NO_MESSAGE


@windowed()
async def test_a_pop_in_order_gets_no_later_messages_while_the_first_is_not_acknowledged(
    rig: Rig,
) -> None:
    """Otherwise a member that leaves it out would make the others search ever farther."""
    peer = await send(rig, 12, queues=1)
    order: dict[str, Any] = {"order": True, "queue_id": 0}
    for _ in range(3):
        found = await pop(peer, max_msg_nums=4, **order)
        assert {one.body for one in found} <= {"m0", "m1", "m2", "m3"}
        for one in found[1:]:
            assert await ack(peer, one) == 0
        await rig.wait(INVISIBLE_MS + 100, step_ms=1_000)
    (first,) = await pop(peer, max_msg_nums=1, **order)
    assert await ack(peer, first) == 0
    assert [one.body for one in await pop(peer, max_msg_nums=2, **order)] == ["m4", "m5"]


@windowed()
async def test_locks_and_popped_topics_are_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended makes room, and a topic without messages takes none."""
    monkeypatch.setattr(order, "POP_LOCKS", POP_LOCKS._replace(most=2))
    monkeypatch.setattr(engine, "POP_PAIRS", POP_PAIRS._replace(most=1))
    peer = await send(rig, 4)
    wanted: dict[str, Any] = {"order": True, "max_msg_nums": 1}
    for queue_id in (0, 1):
        assert len(await pop(peer, queue_id=queue_id, **wanted)) == 1
    full = await peer.call(RequestCode.POP_MESSAGE, pop_header(queue_id=2, **wanted))
    assert full.code == ResponseCode.POLLING_FULL
    other = await peer.call(RequestCode.POP_MESSAGE, pop_header(consumer_group="other"))
    assert (other.code, "which is the limit" in (other.remark or "")) == (209, True)

    await rig.wait(INVISIBLE_MS + 100, step_ms=1_000)
    assert len(await pop(peer, queue_id=2, **wanted)) == 1
    kept = usage(rig.broker.keepers)
    assert (kept["pop_locks"]["used"], kept["pop_pairs"]["used"]) == (2, 1)


@windowed()
async def test_what_a_reset_ends_is_stored_in_slices(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may have a hundred thousand pops in flight."""
    count = 3 * engine.BATCH_MAX
    peer = await send(rig, count, queues=1)
    for _ in range(count):
        await pop(peer, max_msg_nums=1)
    rig.tables.offsets.reset(GROUP, TOPIC, 0, 0)
    stored: list[int] = []
    append = rig.store.append

    def counted(group: Sequence[AppendRequest]) -> Sequence[AppendResult]:
        stored.append(len(group))
        return append(group)

    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "append", counted)
        assert len(await bodies(peer)) == count
        await until(lambda: usage(rig.broker.keepers)["pop_in_flight"]["used"] == count)
    assert sum(stored) == count + 2  # the position, and the new pop
    assert max(stored) == engine.BATCH_MAX
    await rig.kill()
    peer = await rig.peer(GROUP)
    await rig.wait(INVISIBLE_MS + 500)
    assert len(await bodies(peer)) == count


@pytest.mark.parametrize("decode", [decode_batch_ack, decode_request_mode])
def test_deeply_nested_bodies_are_refused(decode: Callable[[bytes], object]) -> None:
    """As any other garbage, and not as an error of the broker."""
    nested = b"[" * 60_000 + b"]" * 60_000
    with pytest.raises(BodyError):
        decode(b'{"acks":%b,"consumerGroup":%b}' % (nested, nested))


@windowed()
async def test_an_order_lock_outlives_a_kill_but_not_its_time(rig: Rig) -> None:
    """What a member holds goes to no other one; what it has acknowledged does not come again."""
    peer = await send(rig, 4, queues=1)
    order: dict[str, Any] = {"order": True, "queue_id": 0}
    first = await pop(peer, max_msg_nums=3, attempt_id="a", **order)
    assert await ack(peer, first[1]) == 0
    await rig.wait(INVISIBLE_MS - 2_000)
    await rig.kill()
    peer = await rig.peer(GROUP)
    assert await pop(peer, attempt_id="b", **order) == []
    assert await ack(peer, first[0]) == 0
    waiting = peer.send(
        RequestCode.POP_MESSAGE, pop_header(poll_time=50_000, attempt_id="b", **order)
    )
    await rig.wait(1_500, step_ms=100)
    assert not peer.answered(waiting)
    await rig.wait(600, step_ms=100)
    answer = await peer.answer(waiting)
    assert [one.body for one in messages(answer)] == ["m2", "m3"]
    told = response_header(answer, PopMessageResponseHeader).order_count_info
    assert told == "0 qo0%2 1;0 qo0%3 0"
    await rig.kill()
    assert await ack(await rig.peer(GROUP), first[2]) == ResponseCode.NO_MESSAGE


@windowed()
async def test_after_a_kill_messages_in_order_continue_where_all_are_acknowledged(
    rig: Rig,
) -> None:
    """Without waiting: the lock has ended. A handle that was changed counts, the old one not."""
    peer = await send(rig, 3, queues=1)
    order: dict[str, Any] = {"order": True, "queue_id": 0}
    (first,) = await pop(peer, max_msg_nums=1, **order)
    changed = changed_handle(first, await change(peer, first, 3 * INVISIBLE_MS))
    await rig.kill()
    peer = await rig.peer(GROUP)
    await rig.wait(2 * INVISIBLE_MS, step_ms=1_000)
    assert await pop(peer, **order) == []
    assert await ack(peer, first) == ResponseCode.NO_MESSAGE
    assert await ack(peer, first, handle=changed) == 0
    await rig.kill()
    peer = await rig.peer(GROUP)
    assert [one.body for one in await pop(peer, **order)] == ["m1", "m2"]


@windowed()
async def test_a_start_reads_the_lock_of_a_queue_that_is_idle_while_others_are_busy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is stored again before a start would read too much, and not left behind."""
    monkeypatch.setattr(revive_log, "CHUNK", 4)
    monkeypatch.setattr(revive_log, "OLD_CHUNKS", 2)
    peer = await send(rig, 40)
    wanted: dict[str, Any] = {"order": True, "max_msg_nums": 1}
    (held,) = await pop(peer, queue_id=0, attempt_id="a", invisible_time=300_000, **wanted)
    for _ in range(9):
        (one,) = await pop(peer, queue_id=1, **wanted)
        assert await ack(peer, one) == 0
        await rig.wait(engine.PROGRESS_MS + 100, step_ms=1_000)
    await rig.kill()
    peer = await rig.peer(GROUP)
    assert await pop(peer, queue_id=0, attempt_id="b", **wanted) == []
    assert await ack(peer, held) == 0


@windowed()
async def test_a_group_that_pulls_has_no_locks(rig: Rig) -> None:
    """An acknowledgement of before would set the group back."""
    peer = await send(rig, 3, queues=1)
    order: dict[str, Any] = {"order": True, "queue_id": 0}
    first = await pop(peer, **order)
    assert (await peer.call(RequestCode.PULL_MESSAGE, pull_header(consumer_group=GROUP))).code == 0
    assert await ack(peer, first[0]) == ResponseCode.NO_MESSAGE
    await rig.kill()
    peer = await rig.peer(GROUP)
    assert await ack(peer, first[0]) == ResponseCode.NO_MESSAGE


@windowed()
async def test_a_filter_selects(rig: Rig) -> None:
    """By tags and by SQL92; what is excluded is never popped."""
    rig.store.append([draft(TOPIC, 0, tag.encode(), properties={"TAGS": tag}) for tag in "AABAB"])
    peer = await send(rig, 0)
    await rig.settle()
    await peer.plain("K", b"last")
    assert await bodies(peer, exp="B", exp_type="TAG") == ["B", "B"]
    found = await rig.patiently(
        peer.call(
            RequestCode.POP_MESSAGE,
            pop_header(consumer_group="other", exp="TAGS = 'A'", exp_type="SQL92"),
        )
    )
    assert [one.body for one in messages(found)] == ["A", "A", "A"]


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "negative time": ({"invisible_time": -1}, 29, "invisibleTime=-1, expected 1 to 43200000"),
    "long time": ({"invisible_time": 1 << 40}, 29, "invisibleTime=1099511627776"),
    "many messages": ({"max_msg_nums": 33}, 29, "maxMsgNums=33, expected 1 to 32"),
    "queue": ({"queue_id": 9}, 29, "queueId[9] is illegal"),
    "topic": ({"topic": "none"}, 17, "topic[none] not exist"),
    "filter": ({"exp": "a || ", "exp_type": "SQL92"}, 23, "is wrong at character 3"),
    "half messages": ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, 16, "forbidden"),
}


@pytest.mark.parametrize("case", BAD)
@windowed()
async def test_bad_input_is_refused(rig: Rig, case: str) -> None:
    """With RocketMQ's code, and a remark that names the field, its value and the limit."""
    peer = await send(rig, 1)
    fields, code, remark = BAD[case]
    answer = await rig.patiently(peer.call(RequestCode.POP_MESSAGE, pop_header(**fields)))
    assert (answer.code, remark in (answer.remark or "")) == (code, True), answer.remark


@windowed()
async def test_bad_acknowledgements_are_refused(rig: Rig) -> None:
    peer = await send(rig, 1)
    (one,) = await pop(peer)
    assert await ack(peer, one, queue_id=77) == ResponseCode.MESSAGE_ILLEGAL
    assert await ack(peer, one, topic="none") == ResponseCode.TOPIC_NOT_EXIST
    answer = await change(peer, one, -1)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark == "invisibleTime=-1, expected 0 to 43200000"


@windowed()
async def test_a_notification_takes_nothing(rig: Rig) -> None:
    """It waits for messages that a pop then gets."""
    peer = await send(rig, 1)
    await pop(peer)
    wait = NotificationRequestHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=-1, poll_time=20_000
    )
    waiting = peer.send(RequestCode.NOTIFICATION, wait)
    await peer.sync()
    await send(rig, 1, first=1)
    answer = await peer.answer(waiting)
    assert response_header(answer, NotificationResponseHeader).has_msg
    assert await bodies(peer) == ["m1"]


@windowed()
async def test_a_notification_does_not_stop_at_what_a_filter_excludes(rig: Rig) -> None:
    """After more entries than one search reads, a pop moves past them when it is repeated."""
    peer = await send(rig, 1, queues=1)
    excluded = [draft(TOPIC, 0, b"a", properties={"TAGS": "A"}) for _ in range(800)]
    for _ in range(17):
        rig.store.append(excluded)
    rig.store.append([draft(TOPIC, 0, b"b", properties={"TAGS": "B"})])
    await rig.settle()
    await peer.plain("K", b"last")
    wanted: dict[str, Any] = {"exp": "B", "exp_type": "TAG"}
    found: list[str] = []
    for _ in range(3):
        header = NotificationRequestHeader(
            consumer_group=GROUP, topic=TOPIC, queue_id=-1, poll_time=20_000, **wanted
        )
        answer = await peer.call(RequestCode.NOTIFICATION, header)
        assert response_header(answer, NotificationResponseHeader).has_msg
        found += await bodies(peer, **wanted)
        if found:
            break
    assert found == ["b"]


@windowed()
async def test_a_changed_handle_of_a_message_in_order_counts_alone(rig: Rig) -> None:
    """Also if the message is hidden for as long as before."""
    peer = await send(rig, 1, queues=1)
    order: dict[str, Any] = {"order": True, "queue_id": 0}
    (one,) = await pop(peer, **order)
    changed = changed_handle(one, await change(peer, one, INVISIBLE_MS))
    assert await ack(peer, one) == ResponseCode.NO_MESSAGE
    assert (await change(peer, one, 1)).code == ResponseCode.NO_MESSAGE
    assert await ack(peer, one, handle=changed) == 0


@windowed()
async def test_a_peek_takes_nothing(rig: Rig) -> None:
    """It answers with what a pop would get; without messages with 19, as a pull."""
    peer = await send(rig, 3)
    header = PeekMessageRequestHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=-1, max_msg_nums=2
    )
    for _ in range(2):
        answer = await peer.call(RequestCode.PEEK_MESSAGE, header)
        assert answer.code == 0
        assert len(list(decode_records(answer.body))) == 2
    assert await bodies(peer) == ["m0", "m1", "m2"]
    answer = await peer.call(RequestCode.PEEK_MESSAGE, header)
    assert (answer.code, answer.body) == (ResponseCode.PULL_NOT_FOUND, b"")
    bad = PeekMessageRequestHeader(consumer_group=GROUP, topic=TOPIC, queue_id=9, max_msg_nums=33)
    assert (await peer.call(RequestCode.PEEK_MESSAGE, bad)).code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("whose", ["group", "all"])
@windowed()
async def test_pops_are_refused_while_too_many_messages_are_in_flight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """With 209 and a remark with both limits; an acknowledgement makes room."""
    peer = await send(rig, 4, queues=1)
    if whose == "group":
        monkeypatch.setattr(engine, "GROUP_MAX", 2)
    else:
        monkeypatch.setattr(engine, "POP_IN_FLIGHT", POP_IN_FLIGHT._replace(most=2))
    found = await pop(peer, max_msg_nums=2)
    answer = await peer.call(RequestCode.POP_MESSAGE, pop_header())
    assert answer.code == ResponseCode.POLLING_FULL
    assert "2 messages of group pg are in flight" in (answer.remark or "")
    other = await peer.call(RequestCode.POP_MESSAGE, pop_header(consumer_group="other"))
    assert (other.code == ResponseCode.POLLING_FULL) is (whose == "all")
    assert await ack(peer, found[0]) == 0
    assert await bodies(peer, max_msg_nums=1) == ["m2"]


@windowed()
async def test_a_group_that_changes_between_pull_and_pop_keeps_its_progress(rig: Rig) -> None:
    """Its offset is the same for both, and is saved; also after a kill."""
    peer = await send(rig, 6, queues=1)
    await peer.consume(TOPIC)
    commit = UpdateConsumerOffsetRequestHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=2
    )
    assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    first = await pop(peer, max_msg_nums=2)
    assert [one.body for one in first] == ["m2", "m3"]
    assert [await ack(peer, one) for one in first] == [0, 0]
    await rig.kill()
    peer = await rig.peer(GROUP)
    await rig.wait(INVISIBLE_MS + 500)
    query = QueryConsumerOffsetRequestHeader(consumer_group=GROUP, topic=TOPIC, queue_id=0)
    answer = await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, query)
    assert response_header(answer, OffsetResponseHeader).offset == 4
    pulled = await peer.call(
        RequestCode.PULL_MESSAGE, pull_header(consumer_group=GROUP, queue_offset=4)
    )
    assert [one.body for one in decode_records(pulled.body)] == [b"m4", b"m5"]
    commit = UpdateConsumerOffsetRequestHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=5
    )
    assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
    assert await bodies(peer) == ["m5"]


@windowed()
async def test_a_group_that_pulls_gets_what_it_has_popped(rig: Rig) -> None:
    """Unacknowledged messages go to the retry topic that it pulls, and it pulls on from there."""
    peer = await send(rig, 4, queues=1)
    found = await pop(peer, max_msg_nums=2)
    await rig.wait(INVISIBLE_MS + 500)
    assert [one.body.decode() for one in rig.consumed(RETRY)] == ["m0", "m1"]
    third = await pop(peer, max_msg_nums=1, queue_id=0)
    assert [one.body for one in third] == ["m0"] or third
    assert found
    offset = rig.tables.offsets.query(GROUP, TOPIC, 0)
    pulled = await peer.call(
        RequestCode.PULL_MESSAGE, pull_header(consumer_group=GROUP, queue_offset=offset)
    )
    rest = [one.body.decode() for one in decode_records(pulled.body)]
    await rig.wait(INVISIBLE_MS + 500)
    again = [one.body.decode() for one in rig.consumed(f"%RETRY%{GROUP}")]
    assert sorted([*rest, *again]) == ["m0", "m1", "m2", "m3"]


@windowed()
async def test_a_reset_group_pops_from_there(rig: Rig) -> None:
    """With nothing in flight, also after a kill."""
    peer = await send(rig, 4, queues=1)
    await pop(peer)
    rig.tables.offsets.reset(GROUP, TOPIC, 0, 2)
    assert await bodies(peer) == ["m2", "m3"]
    await rig.kill()
    peer = await rig.peer(GROUP)
    await rig.wait(INVISIBLE_MS + 500)
    assert await bodies(peer) == ["m2", "m3"]


@windowed()
async def test_a_topic_that_is_created_again_is_popped_from_its_begin(rig: Rig) -> None:
    """Handles of the old one do not count, also after a kill."""
    peer = await send(rig, 3, queues=1)
    old = await pop(peer)
    delete = TopicRequestHeader(topic=TOPIC)
    deleting = peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, delete)
    assert (await rig.patiently(deleting)).code == 0
    peer = await send(rig, 2, first=5)
    assert await ack(peer, old[0]) == ResponseCode.NO_MESSAGE
    await rig.kill()
    peer = await rig.peer(GROUP)
    assert await bodies(peer) == ["m5", "m6"]


@windowed()
async def test_the_mode_of_a_group_is_kept(rig: Rig) -> None:
    """The broker tells it to members that ask, and operators see it."""
    peer = await send(rig, 1)
    await peer.consume(TOPIC)
    mode = RequestMode(GROUP, TOPIC, "POP", 0)
    answer = await peer.call(RequestCode.SET_MESSAGE_REQUEST_MODE, None, msgspec.json.encode(mode))
    assert answer.code == 0, answer.remark
    await rig.kill()
    peer = await rig.peer(GROUP)
    await peer.consume(TOPIC)
    listed = await peer.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, None)
    assert msgspec.json.decode(listed.body)["messageRequestModeMap"] == {
        TOPIC: {GROUP: msgspec.to_builtins(mode)}
    }
    query = {
        "clientId": peer.client_id,
        "consumerGroup": GROUP,
        "messageModel": "CLUSTERING",
        "strategyName": "AVG",
        "topic": TOPIC,
    }
    answer = await peer.call(RequestCode.QUERY_ASSIGNMENT, None, msgspec.json.encode(query))
    assert msgspec.json.decode(answer.body) == {
        "messageQueueAssignments": [
            {
                "messageQueue": {"brokerName": "broker-a", "queueId": -1, "topic": TOPIC},
                "mode": "POP",
            }
        ]
    }


def test_kinds_of_topics() -> None:
    """The flag in a handle says where the message was popped."""
    assert [kind_of(name) for name in (TOPIC, RETRY, "%RETRY%pg+orders")] == ["0", "1", "2"]
