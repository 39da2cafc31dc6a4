"""Large answers to pulls leave together, at the end of the pass of the loop that found them."""

from __future__ import annotations

import pytest

from halfmq.broker.handlers.pull import BYTES_MAX, STAGED_BYTES_MAX, PullHandler
from halfmq.broker.server import ClientConnection
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.log_reader import SCRATCH_SIZE
from halfmq.store.message_store import MessageStore
from tests.support.stores import draft
from tests.support.windows import Rig, windowed

LARGE = 40_000  # bytes of a body, more than is joined with other answers


def pulling(offset: int, count: int) -> PullMessageRequestHeader:
    return PullMessageRequestHeader(
        consumer_group="cg",
        topic="orders",
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
        expression_type="TAG",
    )


@windowed()
async def test_many_large_answers_are_all_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read before the first is sent, as far as there is memory set aside for them."""
    steps: list[str] = []
    staged: list[int] = []
    view, write, send = MessageStore.view, ClientConnection.write, PullHandler._send_staged

    def viewed(store: MessageStore, *arguments: object, **more: object) -> memoryview | None:
        steps.append("read")
        return view(store, *arguments, **more)  # type: ignore[arg-type]

    def written(connection: ClientConnection, data: bytes | memoryview) -> None:
        if len(data) > LARGE:
            steps.append("sent")
        write(connection, data)

    def sent(handler: PullHandler) -> None:
        staged.append(handler._staged_bytes)
        send(handler)

    monkeypatch.setattr(MessageStore, "view", viewed)
    monkeypatch.setattr(ClientConnection, "write", written)
    monkeypatch.setattr(PullHandler, "_send_staged", sent)
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    rig.store.append([draft("orders", 0, bytes([number]) * LARGE) for number in range(30)])
    await rig.wait(1_000)

    opaques = [consumer.send(RequestCode.PULL_MESSAGE, pulling(at, 5)) for at in range(25)]
    answers = [await rig.patiently(consumer.answer(opaque)) for opaque in opaques]

    assert steps[:5] == ["read", "read", "read", "read", "sent"], "what there is room for"
    assert steps.count("sent") == len(answers) == 25
    assert STAGED_BYTES_MAX <= max(staged) < STAGED_BYTES_MAX + BYTES_MAX <= SCRATCH_SIZE
    for at, answer in enumerate(answers):
        assert answer.code == ResponseCode.SUCCESS
        assert [answer.body.count(bytes([number]) * LARGE) for number in range(30)] == [
            int(at <= number < at + 5) for number in range(30)
        ]
