"""Well-formed requests that ask for what is not their sender's, against a broker with sockets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any, Final

import pytest

from halfmq.broker.access.config import KeyPair
from halfmq.broker.access.requirements import CLIENT_IDS
from halfmq.broker.logs import LINE_MAX, LineFormatter
from halfmq.broker.net.long_polling import LongPolling
from halfmq.client import ClientConfig, blocking
from halfmq.remoting.admin_headers import ConsumeMessageDirectlyRequestHeader
from halfmq.remoting.bodies import (
    HeartbeatData,
    LockBatchBody,
    ProducerData,
    TopicRouteData,
    encode_heartbeat,
    encode_lock_batch,
    encode_route,
    encode_subscription_check,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import (
    GetMaxOffsetRequestHeader,
    RegisterBrokerRequestHeader,
    UnregisterClientRequestHeader,
    ViewMessageRequestHeader,
)
from halfmq.remoting.registration_bodies import DataVersion, encode_registration
from halfmq.remoting.replies import encode_request
from halfmq.remoting.shown_text import REMARK_MAX
from halfmq.store.format.crc import crc32
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.access import PUBLISHER, STRANGER, Account, SignedPeer, signed_frame
from tests.support.broker_parts import access_of, store_of
from tests.support.guarded_broker import ADMIN, SUBSCRIBER, GuardedBroker
from tests.support.guarded_broker import PUBLISHER as PUBLISHING
from tests.support.guarded_rig import REFUSED, Guarded, guarded, names_the_missing_right
from tests.support.patience import wait_until
from tests.support.peers import COMMIT, Half
from tests.support.race_windows import Rig, windowed
from tests.support.rocketmq_broker import Wire
from tests.support.usual_headers import pull_header, send_header

SECRET: Final = b"a message of somebody else"
REACH: Final = 1_000
"""Bytes after the forged record that its properties claim."""

# -- offsets inside of a message's body


async def _forge(guarded: Guarded, sender: SignedPeer, topic: str, properties: bytes) -> int:
    """Send a body that is a record whose properties reach into the next message; return where."""
    at = guarded.rig.store.write_offset + 88  # a record's head
    name = topic.encode()
    size = 88 + 1 + 1 + len(name) + 2 + len(properties) + REACH
    fake = pack(">iIiiiqqiq", size, 0xDAA320A7, crc32(b"m") & 0x7FFFFFFF, 0, 0, 0, at, 0, 0)
    fake += pack(">IiqIiiqi", 0, 0, 0, 0, 0, 0, 0, 1) + b"m" + bytes([len(name)]) + name
    fake += pack(">h", len(properties) + REACH) + properties
    assert (await sender.plain("K", fake, topic="payments")).code == 0
    return at


def _half(offset: int, group: str) -> Half:
    host = pack(">4Bi", 0, 0, 0, 0, 0)
    return Half(offset, 0, offset_message_id(host, offset), "K9", group, b"m")


@pytest.mark.parametrize("topic", ["payments", "%RETRY%theirs", HALF_TOPIC])
@guarded()
async def test_only_offsets_at_which_a_record_begins_are_served(
    guarded: Guarded, topic: str
) -> None:
    """Whichever request names one: a body that looks like a record is none."""
    stranger, publisher = [await guarded.peer(one) for one in (STRANGER, PUBLISHER)]
    properties = (
        b"REAL_TOPIC\x01payments\x02REAL_QID\x010\x02PGROUP\x01theirs\x02UNIQ_KEY\x01K9\x02"
        b"TRANSACTION_CHECK_TIMES\x011\x02TRAN_PREPARED_QUEUE_OFFSET\x010\x02SPY\x01"
    )
    at = await _forge(guarded, stranger, topic, properties)
    assert (await publisher.plain("K1", SECRET + b"." * REACH)).code == 0
    forged = guarded.rig.store.reader.record_bytes(at)
    assert forged is not None
    assert SECRET in decode_record(forged).properties
    half = _half(at, "theirs")

    view = ViewMessageRequestHeader(offset=at)
    directly = ConsumeMessageDirectlyRequestHeader(
        consumer_group="theirs", client_id=stranger.client_id, msg_id=half.message_id
    )
    before = guarded.rig.store.write_offset
    answers = [
        await stranger.call(RequestCode.VIEW_MESSAGE_BY_ID, view),
        await stranger.send_back(at, "theirs"),
        await stranger.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, directly),
        await stranger.end(half, COMMIT),
        await stranger.end(half, COMMIT, from_check=True),
    ]
    named: dict[str, Any] = {"TRANSACTION_HALF_ID": half.message_id, "RETRY_TOPIC": "payments"}
    for one in answers:
        assert (one.code != 0, one.body) == (True, b"")
        assert re.match("can not find|look message|Find prepared", one.remark or "")
    assert guarded.rig.store.write_offset == before
    retry = await stranger.plain("K9", b"?", topic="%RETRY%theirs", reconsume_times=1, **named)
    assert retry.code == 0
    assert guarded.rig.records_of("%RETRY%theirs")[-1].body == b"?"


# -- client ids of others


def _beat(client_id: str) -> bytes:
    data = HeartbeatData(
        client_id=client_id, producer_data_set=(ProducerData(group_name="producers"),)
    )
    return encode_heartbeat(data)


def _in_the_name_of(client_id: str) -> Iterator[tuple[int, Header | None, bytes]]:
    """Return every request that is made in the name of a client."""
    queues = LockBatchBody(client_id=client_id, consumer_group="theirs")
    query = {
        "clientId": client_id,
        "consumerGroup": "theirs",
        "strategyName": "AVG",
        "topic": "payments",
    }
    unregister = UnregisterClientRequestHeader(client_id=client_id, producer_group="producers")
    subscription = subscription_data("payments", "*")
    yield RequestCode.HEART_BEAT, None, _beat(client_id)
    yield RequestCode.UNREGISTER_CLIENT, unregister, b""
    yield RequestCode.LOCK_BATCH_MQ, None, encode_lock_batch(queues)
    yield RequestCode.UNLOCK_BATCH_MQ, None, encode_lock_batch(queues)
    yield RequestCode.QUERY_ASSIGNMENT, None, json.dumps(query).encode()
    check = encode_subscription_check(client_id, "theirs", subscription)
    yield RequestCode.CHECK_CLIENT_CONFIG, None, check


@guarded()
async def test_nobody_acts_in_the_name_of_another_principals_client(guarded: Guarded) -> None:
    """Its replies, checks and queues are its own until its last connection is closed."""
    victim = await guarded.peer(PUBLISHER, member=True)
    twin = await guarded.peer(PUBLISHER, member=True)
    assert twin.client_id == victim.client_id
    stranger = await guarded.peer(STRANGER)
    assert {code for code, *_ in _in_the_name_of("?")} == set(CLIENT_IDS)

    for closed in (None, twin):
        if closed is not None:
            await guarded.rig.lose(closed)
        for code, header, body in _in_the_name_of(victim.client_id):
            answer = await stranger.call(code, header, body)
            assert answer.code == REFUSED, code
            assert "belongs to another principal" in (answer.remark or "")
        assert (await victim.call(RequestCode.HEART_BEAT, None, _beat(victim.client_id))).code == 0
    assert access_of(guarded.rig.broker).metrics()["refused_client_id"] == 12

    await guarded.rig.lose(victim)
    for code, header, body in _in_the_name_of(victim.client_id):
        assert "another principal" not in ((await stranger.call(code, header, body)).remark or "")


@guarded()
async def test_a_reply_needs_the_right_to_send_to_the_topic_of_replies(guarded: Guarded) -> None:
    """Whoever may sign could fill the disk otherwise."""
    requester, stranger = await guarded.peer(PUBLISHER, member=True), await guarded.peer(STRANGER)
    before = guarded.rig.store.write_offset
    header = send_header(
        topic="DefaultCluster_REPLY_TOPIC",
        properties=encode_properties({"REPLY_TO_CLIENT": requester.client_id}).decode(),
    )
    for _ in range(25):
        answer = await stranger.call(RequestCode.SEND_REPLY_MESSAGE_V2, header, bytes(4 << 20))
        assert names_the_missing_right(answer, "Pub Topic:DefaultCluster_REPLY_TOPIC")
    assert guarded.rig.store.write_offset == before


def test_a_held_pull_of_a_disabled_user_gets_no_message(tmp_path: Path) -> None:
    """It was admitted before; the message comes after."""
    broker = GuardedBroker(tmp_path, "users")
    try:
        account = Account(SUBSCRIBER["access_key"], SUBSCRIBER["secret_key"])
        with ExitStack() as opened:
            admin = opened.enter_context(blocking.Admin(namesrv=broker.address, **ADMIN))
            sender = opened.enter_context(
                blocking.Producer("shop", namesrv=broker.address, **PUBLISHING)
            )
            wires = [opened.enter_context(Wire(broker.address)) for _ in range(4)]
            for queue_id, wire in enumerate(wires):
                held = pull_header(
                    consumer_group="billing",
                    queue_id=queue_id,
                    queue_offset=store_of(broker.broker).queues.bounds("orders", queue_id)[1],
                    sys_flag=6,  # to be held, with a subscription
                    suspend_timeout_millis=15_000,
                )
                wire.send(signed_frame(account, RequestCode.PULL_MESSAGE, held))

            pulls = [one for one in broker.broker.keepers if isinstance(one, LongPolling)]
            wait_until(lambda: sum(one.count for one in pulls) == len(wires), "the pulls wait")
            admin.update_user(account.name, enabled=False)
            sent = sender.send(blocking.Message("orders", SECRET))
            (answer,) = wires[sent.queue.queue_id].receive()
        assert answer.code == ResponseCode.NO_PERMISSION
        assert SECRET not in answer.body
    finally:
        broker.close()


def test_two_clients_with_one_id_are_both_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without access control too: containers often have the same address and process id."""
    broker = GuardedBroker(tmp_path)
    config = ClientConfig(instance_name="1", heartbeat_interval=0.05)
    try:
        with ExitStack() as producers:
            for _ in range(2):
                one = blocking.Producer("shop", namesrv=broker.address, config=config)
                producers.enter_context(one)

            def warned(event: str) -> list[str]:
                lines = [one.getMessage() for one in caplog.records]
                return [line for line in lines if line.startswith(f"event={event} ")]

            wait_until(lambda: len(warned("broker_warning")) >= 2, "both are warned")
            (line,) = warned("client_id_shared")
            assert "other_peer=127.0.0.1:" in line
    finally:
        broker.close()


# -- the broker's own credentials

INNER: Final = Account("inner", "secret-of-brokers")


@guarded()
async def test_the_signature_of_a_registration_serves_for_nothing_else(guarded: Guarded) -> None:
    """It covers neither the code nor the names of fields, and is sent every 30 s."""
    rig = guarded.rig
    rig.access = replace(rig.access, inner_credentials=KeyPair(*INNER))
    await rig.restart()
    peer = await guarded.peer(INNER, ours=False)
    register = RegisterBrokerRequestHeader(
        broker_name="broker-b",
        broker_addr="10.0.0.9:10911",
        cluster_name="C",
        ha_server_addr="",
        broker_id=0,
    )
    for code in sorted(RequestCode):
        answer = await peer.call(code, register)
        if code == RequestCode.REGISTER_BROKER:  # refused by its address, see below
            assert "may not register here" in (answer.remark or "")
        else:
            assert (answer.code, answer.body) == (REFUSED, b"")
            assert "accessKey:inner may only register" in (answer.remark or ""), code


# -- brokers that nobody has named


@windowed()
async def test_no_broker_registers_unless_its_address_is_configured(rig: Rig) -> None:
    """Clients would send to it, and consume from it."""
    peer = await rig.peer()
    identity = {
        "brokerName": "broker-b",
        "brokerAddr": "10.0.0.9:10911",
        "clusterName": "C",
        "haServerAddr": "",
        "brokerId": "0",
        "topic": "orders",
    }
    route = encode_route(TopicRouteData())
    for code, body in (
        (RequestCode.REGISTER_BROKER, encode_registration([], DataVersion())),
        (RequestCode.UNREGISTER_BROKER, b""),
        (RequestCode.REGISTER_TOPIC_IN_NAMESRV, route),
        (RequestCode.QUERY_DATA_VERSION, b""),
        (RequestCode.BROKER_HEARTBEAT, b""),
    ):
        opaque = 10_000 + code  # of none of the peer's own requests
        peer.write(encode_request(code, opaque=opaque, header=identity, body=body))
        answer = await peer.answer(opaque)
        assert answer.code == ResponseCode.NO_PERMISSION, (code, answer.remark)
        assert "registrationAddresses" in (answer.remark or "")
    cluster = await peer.call(RequestCode.GET_BROKER_CLUSTER_INFO, None)
    assert b"broker-b" not in cluster.body


# -- long names


@guarded()
async def test_a_refusal_quotes_no_long_name(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the answer nor in the log, whoever signs."""
    name = "x" * 60_000  # more is not read
    stranger = await guarded.peer(STRANGER, ours=False)
    unknown = await guarded.peer(Account(name, "secret"), ours=False)
    offset = GetMaxOffsetRequestHeader(topic=name, queue_id=0)
    unregister = UnregisterClientRequestHeader(client_id="c", consumer_group=name)
    for peer, code, header in (
        (stranger, RequestCode.GET_MAX_OFFSET, offset),
        (stranger, RequestCode.UNREGISTER_CLIENT, unregister),
        (unknown, RequestCode.GET_MAX_OFFSET, None),
    ):
        answer = await peer.call(code, header)
        assert answer.code != 0
        assert len(answer.raw_header) < 4 * REMARK_MAX, code
    lines = [LineFormatter().format(record) for record in caplog.records]
    assert any("event=access_denied" in line for line in lines)
    assert max(map(len, lines)) < 2 * LINE_MAX
