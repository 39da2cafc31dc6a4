"""What stands before the handlers of messages while the disk is scarce."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from halfmq.broker.connection import Connection, Handler
from halfmq.broker.router import Router
from halfmq.broker.send_gate import GATED, RECORD_BYTES, WAIT_S_MAX, WAITING_MAX, SendGate
from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply
from tests.support.broker_doubles import FakeConnection
from tests.support.windows import VirtualLoop


class Handlers:
    """Notes what gets through, in order."""

    def __init__(self) -> None:
        self.served: list[int] = []

    def send(self, command: RemotingCommand, _connection: Connection) -> bytes | None:
        self.served.append(command.opaque)
        return encode_reply(command)

    def table(self) -> dict[int, Handler]:
        codes = (*GATED, RequestCode.END_TRANSACTION, RequestCode.PULL_MESSAGE)
        return dict.fromkeys(map(int, codes), self.send)


class Gated:
    """A router with a gate, and a client."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.router = Router(self.handlers.table())
        self.gate = SendGate(self.router)
        self.connection = FakeConnection()

    async def later(self, milliseconds: int) -> None:
        """Let time pass, and what is due be done."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now_ms += milliseconds
        for _ in range(4):
            await asyncio.sleep(0)

    def ask(self, code: int, opaque: int, body: bytes = b"") -> int | None:
        """Send a request; return the code of an answer that comes at once."""
        command = RemotingCommand(code=code, opaque=opaque, body=body)
        reply = self.router.dispatch(command, self.connection)
        return None if reply is None else code_of(reply)

    @property
    def answered_later(self) -> list[tuple[int, int]]:
        """Opaque and code of the answers that came later."""
        replies = FrameDecoder().receive_data(b"".join(self.connection.written))
        return [(reply.opaque, reply.code) for reply in replies]


def code_of(reply: bytes) -> int:
    return FrameDecoder().receive_data(reply)[0].code


def timed(test: Callable[[Gated], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on a loop whose time it moves."""

    async def lived() -> None:
        await test(Gated())

    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(lived())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


SEND, END = RequestCode.SEND_MESSAGE_V2, RequestCode.END_TRANSACTION


@timed
async def test_an_open_gate_is_not_there(gated: Gated) -> None:
    """The router's table holds the handlers themselves, before and after."""
    own = dict(gated.router._handlers)
    gated.gate.open()
    assert gated.router._handlers == own
    gated.gate.close("full")
    assert gated.router._handlers != own
    gated.gate.slow(1)
    gated.gate.open()
    assert gated.router._handlers == own
    assert not gated.router._diverted


@timed
async def test_a_closed_gate_refuses_what_stores_messages(gated: Gated) -> None:
    """With a code on which all official clients try another broker; all else is served."""
    gated.gate.close("the disk is full, make room")

    for number, code in enumerate(GATED):
        assert gated.ask(code, number) == ResponseCode.SERVICE_NOT_AVAILABLE
    assert gated.handlers.served == []
    assert gated.ask(END, 100) == ResponseCode.SUCCESS
    assert gated.ask(RequestCode.PULL_MESSAGE, 101) == ResponseCode.SUCCESS
    assert gated.gate.refused == len(GATED)

    gated.gate.open()
    assert gated.ask(SEND, 102) == ResponseCode.SUCCESS


@timed
async def test_a_slow_gate_lets_pass_so_many_bytes_in_a_second(gated: Gated) -> None:
    """In order of arrival, while decisions of the same client overtake them."""
    gated.gate.slow(10_000)
    body = bytes(2_000 - RECORD_BYTES)  # a fifth of a second each

    assert gated.ask(SEND, 1, body) == ResponseCode.SUCCESS
    for number in range(2, 6):
        assert gated.ask(SEND, number, body) is None
    assert gated.ask(END, 100) == ResponseCode.SUCCESS
    assert gated.handlers.served == [1, 100]
    await gated.later(199)
    assert gated.handlers.served == [1, 100]
    await gated.later(2)
    assert gated.handlers.served == [1, 100, 2]
    await gated.later(600)
    assert gated.handlers.served == [1, 100, 2, 3, 4, 5]
    assert gated.answered_later == [(number, 0) for number in range(2, 6)]
    assert gated.gate.slowed == 4
    await gated.later(1_000)
    assert gated.ask(SEND, 6, body) == ResponseCode.SUCCESS  # who waits for nobody


@timed
async def test_nobody_waits_for_long(gated: Gated) -> None:
    """What would wait for more than a second is refused, so that its client can go elsewhere."""
    gated.gate.slow(10_000)
    body = bytes(2_000 - RECORD_BYTES)

    answers = [gated.ask(SEND, number, body) for number in range(10)]

    assert answers[:6] == [ResponseCode.SUCCESS, *[None] * 5]
    assert answers[6:] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 4
    assert WAIT_S_MAX == 1.0
    await gated.later(1_000)
    assert gated.handlers.served == [0, 1, 2, 3, 4, 5]


@timed
async def test_there_is_a_limit_to_how_many_wait(gated: Gated) -> None:
    """Tiny messages at a high speed must not fill the memory."""
    gated.gate.slow(1 << 40)
    gated.gate._next = asyncio.get_running_loop().time() + 0.5

    answers = [gated.ask(SEND, number) for number in range(WAITING_MAX + 1)]

    assert answers[:-1] == [None] * WAITING_MAX
    assert answers[-1] == ResponseCode.SERVICE_NOT_AVAILABLE


@timed
async def test_closing_and_opening_settles_what_waits(gated: Gated) -> None:
    """It is refused when the disk is full, and served at once when there is room or a stop."""
    for settle, code in (
        (gated.gate.open, ResponseCode.SUCCESS),
        (lambda: gated.gate.close("full"), ResponseCode.SERVICE_NOT_AVAILABLE),
    ):
        gated.connection.written.clear()
        gated.gate.slow(1_000)
        assert gated.ask(SEND, 1) == ResponseCode.SUCCESS
        assert gated.ask(SEND, 2) is None
        settle()
        assert gated.answered_later == [(2, code)]
    gated.gate.slow(1_000)
    assert gated.ask(SEND, 3) == ResponseCode.SUCCESS
    assert gated.ask(SEND, 4) is None
    await gated.gate.stop()
    assert gated.handlers.served[-1] == 4


@timed
async def test_a_one_way_message_waits_and_is_not_answered(gated: Gated) -> None:
    """It is stored all the same."""
    gated.gate.slow(1_000)
    assert gated.ask(SEND, 1) == ResponseCode.SUCCESS
    command = RemotingCommand(code=SEND, opaque=2, flag=FLAG_ONE_WAY)
    assert gated.router.dispatch(command, gated.connection) is None
    await gated.later(500)

    assert gated.handlers.served == [1, 2]
    assert gated.connection.written == []
