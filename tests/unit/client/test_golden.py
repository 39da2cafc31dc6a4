"""What official servers sent to official clients, read by this client.

The frames were recorded from Apache RocketMQ 5.3.3 and 4.9.7; see ``tests/golden/frames``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from halfmq.client import MessageView, SendStatus, UnreadableBodyError
from halfmq.client.message import MessageQueue

# Answers as recorded, without a connection that would ask for them.
from halfmq.client.net.response_errors import records_of
from halfmq.client.net.routes import build_route
from halfmq.client.net.session import typed
from halfmq.client.producer import STATUSES, send_result
from halfmq.remoting.bodies import decode_route
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    PullMessageResponseHeader,
)
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import decode_record
from tests.support.frames import FILES, RecordedFrame, recorded


def decoded(frame: RecordedFrame) -> RemotingCommand:
    (command,) = FrameDecoder(responses_first=True).receive_data(frame.frame)
    return command


def answers(*codes: int, ok: frozenset[int] = frozenset({0})) -> Iterator[RemotingCommand]:
    """Every recorded answer to these requests that carries one of the codes ``ok``."""
    for file in FILES:
        asked: set[tuple[int, object]] = set()
        for frame in recorded(file):
            key = (frame.connection, frame.opaque)
            to_server = frame.direction.startswith("client")
            if to_server and frame.flag == 0 and frame.code in codes:
                asked.add(key)
            elif not to_server and key in asked and frame.code in ok and frame.flag:
                asked.discard(key)
                with contextlib.suppress(ProtocolError):  # garbage on purpose
                    yield decoded(frame)


def test_every_official_route_gives_queues_and_addresses() -> None:
    """Both versions, with bare and with quoted broker ids, are read."""
    routes = [
        build_route("t", decode_route(answer.body))
        for answer in answers(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    ]

    assert len(routes) > 50
    assert all(list(route.addresses) == ["broker-a"] for route in routes)
    closed = [route for route in routes if not (route.publish_queues and route.consume_queues)]
    assert len(closed) == 2  # a topic whose write permission was wiped, and one with neither
    addresses = {route.addresses["broker-a"] for route in routes}
    assert "127.0.0.1:29911" in addresses


def test_every_official_send_answer_becomes_a_result() -> None:
    """With and without a transaction id, and for batches."""
    queue = MessageQueue("t", "broker-a", 99)
    codes = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    results = [
        send_result(answer, STATUSES[answer.code], "ID", queue, "x")
        for answer in answers(*codes, ok=frozenset(STATUSES))
    ]

    assert len(results) > 100
    for result in results:
        assert result.status is SendStatus.SEND_OK
        assert result.queue.queue_id != 99
        first = result.offset_message_id.split(",")[0]
        if "," not in result.offset_message_id and first:
            assert parse_offset_message_id(first).physical_offset >= 0


def test_every_officially_stored_message_can_be_consumed() -> None:
    """Bodies, ids, topics and transactions are read from the records of pull answers."""
    views: list[MessageView] = []
    packed = 0
    for answer in answers(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
        assert typed(answer, PullMessageResponseHeader, "x").next_begin_offset >= 0
        views += [MessageView(record, "broker-a") for record in records_of(answer.body)]
    for view in views:
        try:
            assert view.body
        except UnreadableBodyError:  # LZ4 and ZSTD
            packed += 1
        assert view.message_id
        assert not view.topic.startswith("%RETRY%")
        assert view.born_timestamp.year > 2020

    assert len(views) > 100
    assert packed <= 10
    assert any(view.transaction_id for view in views)
    assert any(view.delivery_attempt > 1 for view in views)


def test_every_official_check_can_be_answered() -> None:
    """Header and record identify the half message and its group."""
    checks = [
        decoded(frame)
        for file in FILES
        for frame in recorded(file)
        if frame.code == RequestCode.CHECK_TRANSACTION_STATE and frame.flag == 2
    ]

    assert checks
    for check in checks:
        header = check.header
        assert isinstance(header, CheckTransactionStateRequestHeader)
        view = MessageView(decode_record(check.body), header.broker_name or "")
        assert view.properties["PGROUP"]
        assert header.transaction_id == view.message_id == view.transaction_id
        assert not view.topic.startswith("RMQ_SYS")
