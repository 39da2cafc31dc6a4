"""One script of a client's requests: RocketMQ 5.3.3 and halfmq answer, ask and store the same.

Both run live. Every answer, every request of the broker and every stored record is compared field
by field; addresses, times, physical offsets and generated ids are replaced by words. Differences
that are meant are listed with their reason, and one that no longer occurs fails.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from halfmq.client.testing import broker_process
from halfmq.remoting import headers as h
from halfmq.remoting.admin_headers import CreateTopicRequestHeader
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    LockBatchBody,
    ProducerData,
    QueueKey,
    encode_heartbeat,
    encode_lock_batch,
    subscription_data,
)
from halfmq.remoting.codes import INT64_MAX, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_request
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.topics import OP_TOPIC
from tests.support.compared_client import ComparedClient, Seen, record_fields, stored_records
from tests.support.rocketmq_broker import rocketmq_broker

pytestmark = pytest.mark.campaign

SETTINGS: Final = {
    "mappedFileSizeCommitLog": 32 << 20,
    "transactionTimeOut": 2_000,
    "transactionCheckInterval": 2_000,
    "transactionOpBatchInterval": 200,
    "messageDelayLevel": "1s 2s 3s",
    "enablePropertyFilter": "true",
    "flushDiskType": "ASYNC_FLUSH",
}
MIB: Final = 1 << 20
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
SUBSCRIBES, WAITS = 4, 2  # bits of a pull's sysFlag


NOTHING: Final[dict[str, Any]] = {"records": []}  # stored in a topic


class Difference(NamedTuple):
    """What may differ in the steps whose names match: the place in what was seen, and why."""

    steps: str  # a pattern
    place: str  # a pattern of the path to the value
    why: str


DIFFERENCES: Final = (
    Difference(
        "send with a level that is no number|batch of none|batch of more than 4 MiB",
        "/code|/fields/(MSG_REGION|TRACE_ON)",
        "RocketMQ fails with an exception (1); here the message is illegal (13)",
    ),
    Difference(
        "pull by (a tag|SQL|its subscription)",
        "/fields/nextBeginOffset",
        "at RocketMQ a filter does not pass a large message that it does not select",
    ),
    Difference(
        "pull by (wrong SQL|an unknown kind)",
        "/code|/has remark|/records|/fields/[a-zA-Z]+",
        "RocketMQ gives the consumer every message; here the pull is refused",
    ),
    Difference(
        "offset then of shop 5",
        "/code|/has remark|/fields/offset",
        "an offset beyond the end of a queue is not kept; at RocketMQ the lag is negative",
    ),
    Difference(
        "committed|committed late|by unique key, at most one|stored in shop",
        "/records/[0-9]+/properties/TRANSACTION_HALF_ID",
        "a committed message names its half, by which consumers recognise it",
    ),
    Difference(
        "prepare D1",
        "/code|/has remark|/fields/(msgId|queueId|queueOffset|transactionId)",
        "RocketMQ delays the half and loses the transaction",
    ),
    Difference("stored in SCHEDULE_TOPIC_XXXX", "/records/b'D1'", "the half that is lost"),
    Difference(
        "checked",
        "/fields/tranStateTableOffset|/records/0/(offset|properties/WAIT)",
        "RocketMQ appends a copy of the half for each check, and sends that",
    ),
    Difference("stored in RMQ_SYS_TRANS_HALF_TOPIC", "/records/b'U1'", "these copies"),
    Difference("stored in RMQ_SYS_TRANS_HALF_TOPIC", "/records/b''", "a rollback is a record here"),
    Difference(
        "pushed reply|pushed reply of these",
        "/fields/properties/CLUSTER",
        "a reply gets the properties that every message gets",
    ),
    Difference(
        "reply (to nobody|without a client)|stored in DefaultCluster_REPLY_TOPIC",
        "/fields/(msgId|queueId|queueOffset)|/records/b'answer'",
        "RocketMQ also stores a reply that it cannot deliver",
    ),
    Difference(
        "recall",
        "/code|/fields/MSG_REGION",
        "there is no timer wheel, so there is nothing to recall",
    ),
)


def script(client: ComparedClient) -> None:
    """Send what producers and consumers send, in the order of their lives."""
    sends(client)
    batches(client)
    queues_and_offsets(client)
    members(client)
    pulls(client)
    retries(client)
    transactions(client)
    request_reply(client)
    look_ups(client)
    client.step("no such request", 9_999_999)


_KEYS: Final = itertools.count()  # both brokers get new ones: they are replaced by a word


def _send(topic: str = "shop", **fields: Any) -> h.SendMessageRequestHeaderV2:
    properties = encode_properties(
        {"UNIQ_KEY": f"{next(_KEYS):032X}"} | fields.pop("properties", {})
    )
    values: dict[str, Any] = {
        "producer_group": "writers",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": time.time_ns() // 1_000_000,  # RocketMQ checks no old halves
        "flag": 0,
        "properties": properties.decode(),
    }
    return h.SendMessageRequestHeaderV2(**values | fields)


def _topic(name: str, queues: int = 2, perm: int = 6) -> CreateTopicRequestHeader:
    return CreateTopicRequestHeader(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=perm,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
    )


def sends(client: ComparedClient) -> None:
    """Single messages: accepted, changed, refused."""
    send = RequestCode.SEND_MESSAGE_V2
    client.step("create a topic", RequestCode.UPDATE_AND_CREATE_TOPIC, _topic("shop"))
    client.step("create one to read", RequestCode.UPDATE_AND_CREATE_TOPIC, _topic("read", perm=4))
    client.step("create one to write", RequestCode.UPDATE_AND_CREATE_TOPIC, _topic("write", perm=2))
    usual = {"TAGS": "paid", "KEYS": "k1 k2", "colour": "red", "WAIT": "true"}
    client.step("send", send, _send(properties=usual), b"one")
    client.step("send with the first names", RequestCode.SEND_MESSAGE, _old(_send()), b"two")
    client.step("send to the second queue", send, _send(queue_id=1, flag=7), b"three")
    client.step("send without a queue", send, _send("one-queue", default_topic_queue_nums=1), b"x")
    client.step("send to a queue too far", send, _send(queue_id=2), b"x")
    client.step("send to a new topic", send, _send("new", queue_id=3), b"created")
    client.step("send to a new topic of one queue", send, _send("new-1"), b"created")
    client.step("send from no topic", send, _send("nowhere", default_topic="unknown"), b"x")
    client.step("send without a body", send, _send(), b"")
    client.step("send compressed", send, _send(sys_flag=1), b"x\x9cnot looked at")
    client.step("send with a CRC of its own", send, _send(properties={"__CRC32#": "1"}), b"x")
    client.step("send to a topic to read", send, _send("read"), b"x")
    client.step("send to a topic to write", send, _send("write"), b"x")
    for name in ("a b", "", "x" * 128, "%RETRY%readers", "SCHEDULE_TOPIC_XXXX", "TBW102", "ü"):
        client.step(f"send to {name[:20]!r}", send, _send(name), b"x")
    # These come at any time from now on, each to a queue in which nothing else is stored any more.
    later = _send(queue_id=1, properties={"DELAY": "1"})
    client.step("send with a level", send, later, b"later")
    later = _send("one-queue", properties={"DELAY": "99"})
    client.step("send with a level too high", send, later, b"later")
    client.step("send with a level below 0", send, _send(properties={"DELAY": "-1"}), b"later")
    no_level = _send("odd", properties={"DELAY": "x"})
    client.step("send with a level that is no number", send, no_level, b"x")
    client.step("send 4 MiB", send, _send(), bytes(4 * MIB))
    client.step("send more than 4 MiB", send, _send(), bytes(4 * MIB + 1))
    many = {"a": "x" * 32_600}
    client.step("send many properties", send, _send(properties=many), b"x")
    client.step("send too many properties", send, _send(properties=many | {"b": "x" * 200}), b"x")
    client.step("send with wrong numbers", send, _send(reconsume_times=3, unit_mode=True), b"x")
    client.step("send with a region", send, _send(properties={"MSG_REGION": "mine"}), b"x")
    client.step("send what is to be inner", send, _send(sys_flag=0x80), b"x")
    one_way = encode_request(send, opaque=0, header=_send(), body=b"one-way", one_way=True)
    client.send(one_way)


def _old(header: h.SendMessageRequestHeaderV2) -> h.SendMessageRequestHeader:
    names = h.SendMessageRequestHeader.__struct_fields__
    return h.SendMessageRequestHeader(**{name: getattr(header, name) for name in names})


def batches(client: ComparedClient) -> None:
    """Several messages in one request."""
    batch = RequestCode.SEND_BATCH_MESSAGE
    units = [
        BatchUnit(
            number, f"part {number}".encode(), encode_properties({"UNIQ_KEY": f"{number:032}"})
        )
        for number in range(3)
    ]
    header = _send(batch=True)
    client.step("batch", batch, header, encode_batch(units))
    client.step("batch of one", batch, header, encode_batch(units[:1]))
    client.step("batch of none", batch, header, b"")
    client.step(
        "batch to a queue too far", batch, _send(batch=True, queue_id=9), encode_batch(units)
    )
    client.step("batch to a retry topic", batch, _send("%RETRY%a", batch=True), encode_batch(units))
    large = [BatchUnit(0, bytes(MIB), b"") for _ in range(5)]
    client.step("batch of more than 4 MiB", batch, header, encode_batch(large))
    client.step("batch cut short", batch, header, encode_batch(units)[:-3])


def queues_and_offsets(client: ComparedClient) -> None:
    """Where queues begin and end, and where a group is in them."""
    for topic, queue in (("shop", 0), ("shop", 5), ("unknown", 0)):
        where: dict[str, Any] = {"topic": topic, "queue_id": queue}
        name = f"of {topic} {queue}"
        client.step(f"end {name}", RequestCode.GET_MAX_OFFSET, h.GetMaxOffsetRequestHeader(**where))
        client.step(f"begin {name}", RequestCode.GET_MIN_OFFSET, h.QueueRequestHeader(**where))
        first = h.QueueRequestHeader(**where)
        client.step(f"first time {name}", RequestCode.GET_EARLIEST_MSG_STORETIME, first)
        for moment in (0, INT64_MAX >> 10):
            search = h.SearchOffsetRequestHeader(**where, timestamp=moment)
            client.step(f"by time {moment} {name}", RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)
        of_group = where | {"consumer_group": "readers"}
        for zero in (None, True, False):
            query = h.QueryConsumerOffsetRequestHeader(**of_group, set_zero_if_not_found=zero)
            step = f"offset {name}, zero if there is none: {zero}"
            client.step(step, RequestCode.QUERY_CONSUMER_OFFSET, query)
        update = h.UpdateConsumerOffsetRequestHeader(**of_group, commit_offset=1)
        client.step(f"commit {name}", RequestCode.UPDATE_CONSUMER_OFFSET, update)
        query = h.QueryConsumerOffsetRequestHeader(**of_group)
        client.step(f"offset then {name}", RequestCode.QUERY_CONSUMER_OFFSET, query)


def members(client: ComparedClient) -> None:
    """Heartbeats, lists of members, locks."""
    consumer = ConsumerData(
        group_name="readers",
        subscription_data_set=(
            subscription_data("shop", "paid || sent"),
            subscription_data("%RETRY%readers", "*"),
        ),
    )
    producers = (ProducerData(group_name="writers"), ProducerData(group_name="tx"))
    beat = HeartbeatData(client_id="c1", consumer_data_set=(consumer,), producer_data_set=producers)
    client.step(
        "heartbeat", RequestCode.HEART_BEAT, h.HeartbeatRequestHeader(), encode_heartbeat(beat)
    )
    client.asked("the members changed", RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    for group in ("readers", "unknown"):
        members_of = h.ConsumerGroupRequestHeader(consumer_group=group)
        client.step(f"members of {group}", RequestCode.GET_CONSUMER_LIST_BY_GROUP, members_of)
    queues = tuple(QueueKey(broker_name="broker-a", queue_id=n, topic="shop") for n in range(2))
    for owner, wanted in (("c1", queues), ("c2", queues[:1]), ("c1", queues[:1])):
        lock = LockBatchBody(client_id=owner, consumer_group="readers", mq_set=wanted)
        body = encode_lock_batch(lock)
        client.step(f"lock {len(wanted)} by {owner}", RequestCode.LOCK_BATCH_MQ, None, body)
    for owner in ("c2", "c1"):
        lock = LockBatchBody(client_id=owner, consumer_group="readers", mq_set=queues)
        body = encode_lock_batch(lock)
        client.step(f"unlock by {owner}", RequestCode.UNLOCK_BATCH_MQ, None, body)


def _pull(**fields: Any) -> h.PullMessageRequestHeader:
    values: dict[str, Any] = {
        "consumer_group": "readers",
        "topic": "shop",
        "queue_id": 0,
        "queue_offset": 0,
        "max_msg_nums": 3,
        "sys_flag": SUBSCRIBES,
        "commit_offset": 0,
        "suspend_timeout_millis": 1_000,
        "sub_version": 0,
        "subscription": "*",
        "expression_type": "TAG",
    }
    return h.PullMessageRequestHeader(**values | fields)


def pulls(client: ComparedClient) -> None:
    """Every answer that a pull can get."""
    pull = RequestCode.PULL_MESSAGE
    end = client.ask(
        RequestCode.GET_MAX_OFFSET, h.GetMaxOffsetRequestHeader(topic="shop", queue_id=0)
    )
    assert isinstance(end.header, dict)
    last = int(end.header["offset"])
    client.step("pull", pull, _pull())
    client.step("pull the rest", pull, _pull(queue_offset=3, max_msg_nums=32))
    client.step("pull one", pull, _pull(queue_offset=1, max_msg_nums=1))
    client.step("pull none", pull, _pull(max_msg_nums=0))
    client.step("pull few bytes", pull, _pull(max_msg_nums=9, max_msg_bytes=300))
    client.step("pull by a tag", pull, _pull(subscription="paid", max_msg_nums=32))
    client.step("pull by no tag", pull, _pull(subscription="lost"))
    client.step("pull by SQL", pull, _pull(subscription="colour = 'red'", expression_type="SQL92"))
    client.step("pull by wrong SQL", pull, _pull(subscription="colour = ", expression_type="SQL92"))
    client.step("pull by an unknown kind", pull, _pull(expression_type="XPATH"))
    client.step("pull by its subscription", pull, _pull(sys_flag=0, subscription=None))
    client.step("pull of another's", pull, _pull(sys_flag=0, topic="new", subscription=None))
    client.step("pull of no member", pull, _pull(sys_flag=0, consumer_group="nobody"))
    client.step("pull of a new version", pull, _pull(sys_flag=0, sub_version=1 << 60))
    for name, offset in {
        "long before": -1,
        "at": last,
        "just after": last + 1,
        "far after": 999,
    }.items():
        client.step(f"pull {name} the queue's end", pull, _pull(queue_offset=offset))
    client.step("pull at the end, waiting", pull, _pull(queue_offset=last, sys_flag=6))
    client.step("pull of a queue too far", pull, _pull(queue_id=2))
    client.step("pull of an empty queue", pull, _pull(topic="write", queue_id=1))
    client.step("pull of an unknown topic", pull, _pull(topic="unknown"))
    client.step("pull of a topic to write", pull, _pull(topic="write"))
    client.step("pull and commit", pull, _pull(sys_flag=SUBSCRIBES | 1, commit_offset=2))
    query = h.QueryConsumerOffsetRequestHeader(consumer_group="readers", topic="shop", queue_id=0)
    client.step("offset after it", RequestCode.QUERY_CONSUMER_OFFSET, query)
    client.step("lite pull", RequestCode.LITE_PULL_MESSAGE, _pull(sys_flag=SUBSCRIBES | 16))


def _place(answer: RemotingCommand) -> int:
    assert isinstance(answer.header, dict)
    return parse_offset_message_id(answer.header["msgId"]).physical_offset


def retries(client: ComparedClient) -> None:
    """Messages that a consumer sends back."""
    back = RequestCode.CONSUMER_SEND_MSG_BACK
    sent = client.step(
        "send to be retried",
        RequestCode.SEND_MESSAGE_V2,
        _send(properties={"TAGS": "paid", "KEYS": "r1"}),
        b"again",
    )
    values: dict[str, Any] = {
        "offset": _place(sent),
        "group": "readers",
        "delay_level": 0,
        "origin_msg_id": "ORIGIN",
        "origin_topic": "shop",
        "max_reconsume_times": 16,
    }
    cases: dict[str, dict[str, Any]] = {
        "send back": {},
        "send back with a level": {"delay_level": 1},
        "send back for good": {"delay_level": -1},
        "send back too often": {"max_reconsume_times": 0},
        "send back of an unknown group": {"group": "nobody"},
        "send back of nothing": {"offset": 1 << 40},
        "send back of what is no record": {"offset": _place(sent) + 1},
    }
    for name, changes in cases.items():
        client.step(name, back, h.ConsumerSendMsgBackRequestHeader(**values | changes))
    retry = _pull(topic="%RETRY%readers", sub_version=0)
    client.until("pull the retry", lambda answer: not answer.code, RequestCode.PULL_MESSAGE, retry)
    client.step("pull dead letters", RequestCode.PULL_MESSAGE, _pull(topic="%DLQ%readers"))
    by_client = {"RETRY_TOPIC": "shop", "ORIGIN_MESSAGE_ID": "O", "RECONSUME_TIME": "1"}
    by_client |= {"DELAY": "1", "MAX_RECONSUME_TIMES": "3"}
    client.step(
        "send to the retry topic as a client does",
        RequestCode.SEND_MESSAGE_V2,
        _send("%RETRY%readers", reconsume_times=1, max_reconsume_times=3, properties=by_client),
        b"again",
    )
    client.step(
        "send to the retry topic too often",
        RequestCode.SEND_MESSAGE_V2,
        _send("%RETRY%readers", reconsume_times=3, max_reconsume_times=3, properties=by_client),
        b"again",
    )


def _prepare(client: ComparedClient, name: str, **fields: Any) -> dict[str, Any]:
    properties = {"TRAN_MSG": "true", "PGROUP": "tx", "UNIQ_KEY": f"{name:0>32}"}
    properties |= {"TAGS": "paid"} | fields.pop("properties", {})
    header = _send(producer_group="tx", sys_flag=4, properties=properties, **fields)
    answer = client.step(f"prepare {name}", RequestCode.SEND_MESSAGE_V2, header, name.encode())
    if answer.code:
        return {}
    assert isinstance(answer.header, dict)
    return {
        "producer_group": "tx",
        "tran_state_table_offset": int(answer.header["queueOffset"]),
        "commit_log_offset": _place(answer),
        "msg_id": f"{name:0>32}",
    }


def transactions(client: ComparedClient) -> None:
    """Half messages, their decisions and the check of one that stays undecided."""

    def end(half: dict[str, Any], decision: int, **changes: Any) -> None:
        header = h.EndTransactionRequestHeader(**half, commit_or_rollback=decision, **changes)
        request = encode_request(RequestCode.END_TRANSACTION, opaque=0, header=header, one_way=True)
        client.send(request)

    end(_prepare(client, "C1"), COMMIT)
    client.until("committed", _has_records, RequestCode.QUERY_MESSAGE, _by_key("C1"))
    end(_prepare(client, "B1"), ROLLBACK)
    _prepare(client, "D1", properties={"DELAY": "1"})
    half = _prepare(client, "U1")
    end(half, UNKNOWN)
    client.asked("checked", RequestCode.CHECK_TRANSACTION_STATE, body=b"U1")
    wrong = half | {"tran_state_table_offset": 1 << 30}
    for name, header in {
        "end of a wrong half": wrong,
        "end of another group": half | {"producer_group": "others"},
        "end of nothing": half | {"commit_log_offset": 1 << 40},
    }.items():
        client.step(
            name,
            RequestCode.END_TRANSACTION,
            h.EndTransactionRequestHeader(**header, commit_or_rollback=COMMIT),
        )
    client.step(
        "end in answer to the check",
        RequestCode.END_TRANSACTION,
        h.EndTransactionRequestHeader(
            **half, commit_or_rollback=COMMIT, from_transaction_check=True
        ),
    )
    client.until("committed late", _has_records, RequestCode.QUERY_MESSAGE, _by_key("U1"))


def _ends_at(offset: int) -> Callable[[RemotingCommand], bool]:
    return lambda answer: isinstance(answer.header, dict) and answer.header["offset"] == str(offset)


def _has_records(answer: RemotingCommand) -> bool:
    return not answer.code


def _by_key(name: str, topic: str = "shop", **fields: Any) -> h.QueryMessageRequestHeader:
    values: dict[str, Any] = {
        "topic": topic,
        "key": f"{name:0>32}",
        "max_num": 32,
        "begin_timestamp": 0,
        "end_timestamp": INT64_MAX,
        "unique_key_query": True,
    }
    return h.QueryMessageRequestHeader(**values | fields)


def request_reply(client: ComparedClient) -> None:
    """A request is a usual message; its reply goes to the client that waits."""
    reply = RequestCode.SEND_REPLY_MESSAGE_V2
    to = {
        "CORRELATION_ID": "r1",
        "REPLY_TO_CLIENT": "c1",
        "MSG_TYPE": "reply",
    }
    topic = "DefaultCluster_REPLY_TOPIC"
    client.step("reply", reply, _send(topic, properties=to), b"answer")
    client.asked("pushed reply", RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    names = _old(_send(topic, properties=to))
    client.step("reply with the first names", RequestCode.SEND_REPLY_MESSAGE, names, b"answer")
    client.asked("pushed reply of these", RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    gone = to | {"REPLY_TO_CLIENT": "nobody"}
    client.step("reply to nobody", reply, _send(topic, properties=gone), b"answer")
    client.step("reply without a client", reply, _send(topic), b"answer")
    recall = h.RecallMessageRequestHeader(topic="shop", recall_handle="nothing")
    client.step("recall", RequestCode.RECALL_MESSAGE, recall)


def look_ups(client: ComparedClient) -> None:
    """Messages by key, unique key and place."""
    query = RequestCode.QUERY_MESSAGE
    client.until("by key", _has_records, query, _by_key("", key="r1", unique_key_query=False))
    for name, header in {
        "by a second key": _by_key("", key="k2", unique_key_query=False),
        "by no key": _by_key("", key="k9", unique_key_query=False),
        "by key of another topic": _by_key("", "new", key="r1", unique_key_query=False),
        "by key of an unknown topic": _by_key("", "unknown", key="r1", unique_key_query=False),
        "by key and time": _by_key("", key="r1", end_timestamp=1, unique_key_query=False),
        "by unique key, at most one": _by_key("C1", max_num=1),
    }.items():
        client.step(name, query, header)
    sent = client.step("send to look at", RequestCode.SEND_MESSAGE_V2, _send(), b"look")
    for name, offset in {
        "view": _place(sent),
        "view what is no record": _place(sent) + 1,
        "view after the end": 1 << 40,
    }.items():
        client.step(name, RequestCode.VIEW_MESSAGE_BY_ID, h.ViewMessageRequestHeader(offset=offset))
    ends = {"%RETRY%readers": 5, "%RETRY%nobody": 1}
    for topic, count in ends.items():  # what waits has been delivered by then
        end = h.GetMaxOffsetRequestHeader(topic=topic, queue_id=0)
        client.until(f"end of {topic}", _ends_at(count), RequestCode.GET_MAX_OFFSET, end)
    gone = h.UnregisterClientRequestHeader(
        client_id="c1", producer_group="writers", consumer_group="readers"
    )
    client.step("unregister", RequestCode.UNREGISTER_CLIENT, gone)
    members_of = h.ConsumerGroupRequestHeader(consumer_group="readers")
    client.step("members after it", RequestCode.GET_CONSUMER_LIST_BY_GROUP, members_of)


def stored(root: Path) -> list[Seen]:
    """Return what the log holds, queue by queue, but for op messages: they are batched by time."""
    by_topic: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in sorted(stored_records(root / "commitlog"), key=lambda record: record.queue_id):
        if record.topic != OP_TOPIC:
            by_topic[record.topic].append(record_fields(record))
    return [Seen(f"stored in {topic}", {"records": by_topic[topic]}) for topic in sorted(by_topic)]


def unlike(theirs: object, ours: object, place: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the places of two values that differ, with what is there."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}, key=str):
            yield from unlike(theirs.get(name, "-"), ours.get(name, "-"), f"{place}/{name}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) == len(ours):
            for number, pair in enumerate(zip(theirs, ours, strict=True)):
                yield from unlike(*pair, f"{place}/{number}")
            return
        for one in theirs:
            if one not in ours:
                yield f"{place}/{one.get('body', one)!r}", one, "-"
        for one in ours:
            if one not in theirs:
                yield f"{place}/{one.get('body', one)!r}", "-", one
    elif theirs != ours:
        yield place, theirs, ours


def test_a_client_sees_at_halfmq_what_it_sees_at_rocketmq(tmp_path: Path) -> None:
    """Answers, requests of the broker and stored records."""
    seen: list[list[Seen]] = []
    with rocketmq_broker(tmp_path / "theirs", tmp_path / "home", **SETTINGS) as broker:
        seen.append(_seen_at(broker.address))
    with broker_process(tmp_path / "ours", **SETTINGS) as our_broker:
        seen.append(_seen_at(our_broker.address))
    seen[0] += stored(tmp_path / "theirs")
    seen[1] += stored(tmp_path / "ours" / "store")

    theirs, ours = map(dict[str, dict[str, Any]], seen)
    unexplained, occurred = [], set()
    for step in theirs | ours:
        sides = theirs.get(step, NOTHING), ours.get(step, NOTHING)
        for place, their, our in unlike(*sides):
            row = next((row for row in DIFFERENCES if _is_about(row, step, place)), None)
            if row is None:
                unexplained.append(f"{step}{place}: {their!r} / {our!r}")
            else:
                occurred.add(row)
    assert not unexplained, "\n".join(unexplained)
    assert [row for row in DIFFERENCES if row not in occurred] == []


def _seen_at(address: str) -> list[Seen]:
    with ComparedClient(address) as client:
        script(client)
        return client.seen


def _is_about(row: Difference, step: str, place: str) -> bool:
    return bool(re.fullmatch(row.steps, step) and re.fullmatch(row.place, place))
