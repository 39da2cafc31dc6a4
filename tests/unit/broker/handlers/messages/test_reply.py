"""Replies reach the client that waits for them, and their sender is told whether they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.handlers.messages.reply import ReplyHandler
from halfmq.broker.net.router import Router
from halfmq.broker.tables.client_registry import ClientRegistry
from halfmq.remoting.bodies import HeartbeatData, ProducerData
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import ReplyMessageRequestHeader, SendMessageResponseHeader
from halfmq.remoting.replies import encode_request
from halfmq.store.format.properties import decode_properties, encode_properties
from tests.support.broker_doubles import START_MS, FakeConnection, as_store
from tests.support.prepares import Prepares
from tests.support.usual_headers import send_header

TOPIC = "C_REPLY_TOPIC"
TAKEN = RemotingCommand(code=ResponseCode.SUCCESS)


class Replies:
    """A broker with one connected producer, which waits for replies."""

    def __init__(self, directory: Path, *, stores: bool = True) -> None:
        self.sends = Prepares(directory)
        self.registry = ClientRegistry(now_ms=lambda: START_MS)
        self.requester = FakeConnection("127.0.0.1:50009")
        self.replier = FakeConnection("127.0.0.1:50001")
        producers = tuple(ProducerData(group_name=name) for name in ("requesters", "others"))
        self.registry.heartbeat(
            HeartbeatData(client_id="requester@1", producer_data_set=producers), self.requester
        )
        self.log = self.sends.broker.log
        handler = ReplyHandler(
            as_store(self.log),
            self.registry,
            self.sends.handler.validated_reply,
            append_staged=self.sends.group.append_staged,
            refuse_sends=self.sends.handler.refuse,
            topic=TOPIC,
            stores=stores,
            sync_flush=True,
            now_ms=lambda: START_MS + 5,
        )
        self._router = Router(handler.handlers())

    def send(
        self,
        body: bytes = b"reply",
        *,
        topic: str = TOPIC,
        client_id: str = "requester@1",
        sys_flag: int = 0,
        **more: str,
    ) -> None:
        properties = {"MSG_TYPE": "reply", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": client_id}
        header = send_header(
            producer_group="repliers",
            topic=topic,
            sys_flag=sys_flag,
            flag=7,
            properties=encode_properties(properties | more).decode(),
        )
        code = RequestCode.SEND_REPLY_MESSAGE_V2
        frame = encode_request(code, opaque=1, header=header, body=body)
        (command,) = FrameDecoder().receive_data(frame)
        self._router.dispatch(command, self.replier)

    def answer(self) -> RemotingCommand:
        """Return the answer to the sender of the reply, after a flush."""
        frames = [reply for _, reply in self.replier.held] + self.replier.written
        (answer,) = FrameDecoder(responses_first=True).receive_data(b"".join(frames))
        return answer


def test_a_reply_is_pushed_and_then_acknowledged(tmp_path: Path) -> None:
    """With all that a client needs to match it; the sender waits for the client and the disk."""
    replies = Replies(tmp_path)

    replies.send(b"reply")

    ((code, pushed),) = replies.requester.requests
    assert code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    assert isinstance(pushed, ReplyMessageRequestHeader)
    assert (pushed.topic, pushed.flag, pushed.born_host) == (TOPIC, 7, "127.0.0.1:50001")
    assert pushed.store_timestamp == START_MS + 5
    properties = decode_properties((pushed.properties or "").encode())
    assert properties["CORRELATION_ID"] == "c"
    assert properties["PUSH_REPLY_TIME"] == str(START_MS + 5)
    assert properties["MSG_REGION"] == "DefaultRegion", "as in every message"
    assert not replies.replier.held, "the client has not taken it yet"
    (on_answer,) = replies.requester.asked
    on_answer(TAKEN)
    ((durable_at, _),) = replies.replier.held
    assert durable_at == replies.log.write_offset
    answer = replies.answer()
    assert answer.code == ResponseCode.SUCCESS
    stored = response_header(answer, SendMessageResponseHeader)
    assert len(stored.msg_id) == 32
    (record,) = replies.log.records()
    assert (record.topic, record.body) == (TOPIC, b"reply")


@pytest.mark.parametrize("answer", [None, RemotingCommand(code=ResponseCode.SYSTEM_ERROR)])
def test_the_sender_of_a_reply_learns_that_it_was_not_delivered(
    tmp_path: Path, answer: RemotingCommand | None
) -> None:
    """Because the client is lost, hangs, or answers with an error."""
    replies = Replies(tmp_path)
    replies.send()

    (on_answer,) = replies.requester.asked
    on_answer(answer)

    told = replies.answer()
    assert told.code == ResponseCode.SYSTEM_ERROR
    assert told.remark == "push reply message to requester@1fail."


def test_a_reply_to_a_client_that_does_not_read_fails_at_once(tmp_path: Path) -> None:
    """More replies would only fill the memory."""
    replies = Replies(tmp_path)
    replies.requester.writable = False

    replies.send()

    assert replies.answer().code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(
    ("how", "code", "remark"),
    [
        ({"client_id": "gone@1"}, ResponseCode.SYSTEM_ERROR, "channel of <gone@1> not found"),
        ({"client_id": ""}, ResponseCode.SYSTEM_ERROR, "REPLY_TO_CLIENT"),
        ({"topic": "orders"}, ResponseCode.NO_PERMISSION, f"goes to the topic {TOPIC}"),
        ({"sys_flag": 4}, ResponseCode.MESSAGE_ILLEGAL, "neither transactional nor delayed"),
        ({"TRAN_MSG": "true"}, ResponseCode.MESSAGE_ILLEGAL, "neither transactional nor delayed"),
        ({"DELAY": "3"}, ResponseCode.MESSAGE_ILLEGAL, "neither transactional nor delayed"),
        ({"body": bytes(10_001)}, ResponseCode.MESSAGE_ILLEGAL, "length limit"),
    ],
)
def test_an_invalid_reply_is_refused(
    tmp_path: Path, how: dict[str, Any], code: ResponseCode, remark: str
) -> None:
    """It is neither stored nor pushed."""
    replies = Replies(tmp_path)

    replies.send(**how)

    answer = replies.answer()
    assert answer.code == code
    assert remark in (answer.remark or "")
    assert not replies.log.records()
    assert not replies.requester.requests


def test_a_reply_without_a_body_is_passed_on(tmp_path: Path) -> None:
    """Go's ``CreateReplyMessage`` loses the body; its correlation id still answers the request."""
    replies = Replies(tmp_path)
    replies.send(b"")

    (on_answer,) = replies.requester.asked
    on_answer(TAKEN)

    assert replies.answer().code == ResponseCode.SUCCESS


def test_replies_need_not_be_stored(tmp_path: Path) -> None:
    """``storeReplyMessageEnable=false``: its message id is then "0", as RocketMQ's."""
    replies = Replies(tmp_path, stores=False)
    replies.send()

    (on_answer,) = replies.requester.asked
    on_answer(TAKEN)

    assert response_header(replies.answer(), SendMessageResponseHeader).msg_id == "0"
    assert not replies.log.records()


def test_a_client_is_found_while_it_is_a_producer_of_any_group(tmp_path: Path) -> None:
    """It may leave one group and stay in another."""
    registry = Replies(tmp_path).registry

    registry.unregister("requester@1", "requesters", None)
    assert registry.producer_by_id("requester@1") is not None
    registry.unregister("requester@1", "others", None)
    assert registry.producer_by_id("requester@1") is None
