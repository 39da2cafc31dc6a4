"""Requests of the broker to a peer: each gets an answer, or None."""

from __future__ import annotations

import asyncio

import pytest

from halfmq.broker.limits.kept import PEER_REQUESTS
from halfmq.broker.net import peer_requests as asks_module
from halfmq.broker.ports import ACK_S, Connection
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply, encode_request
from tests.support.client_loops import on_both_loops
from tests.support.serving import ROUTE, SocketPeer, peer_of, serving


class Asked:
    """A connection of the broker to one peer, and the peer's answer to each request."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.answers: list[RemotingCommand | None] = []
        self.came = asyncio.Event()

    def remember(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        self.connection = connection
        return encode_reply(request)

    def ask(self, body: bytes = b"", seconds: float = ACK_S) -> bool:
        assert self.connection is not None
        code = RequestCode.CHECK_TRANSACTION_STATE
        return self.connection.ask(code, {"topic": "T"}, body, self._answered, seconds=seconds)

    def _answered(self, answer: RemotingCommand | None) -> None:
        self.answers.append(answer)
        self.came.set()

    async def wait_for(self, count: int) -> None:
        while len(self.answers) < count:
            self.came.clear()
            await self.came.wait()


async def _introduce(peer: SocketPeer, header_type: int = HeaderType.MSGPACK) -> None:
    peer.writer.write(encode_request(105, opaque=1, header=ROUTE, header_type=header_type))
    await peer.answer()


@on_both_loops
async def test_a_request_to_a_peer_gets_its_own_answer() -> None:
    """Answers arrive in any order; only the opaque assigns one to its request."""
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        await _introduce(peer)
        assert [asked.ask(b"%d" % number) for number in range(3)] == [True] * 3
        questions = [await peer.answer() for _ in range(3)]
        assert not any(question.is_one_way for question in questions)

        for question in reversed(questions):
            peer.writer.write(encode_reply(question, int(question.body)))
        await asked.wait_for(3)

        assert [one and one.code for one in asked.answers] == [2, 1, 0]


@pytest.mark.parametrize(
    ("header_type", "acknowledges"), [(HeaderType.JSON, False), (HeaderType.MSGPACK, True)]
)
async def test_only_halfmq_clients_are_known_to_answer(
    header_type: int, acknowledges: bool
) -> None:
    """Official clients never answer a check; a halfmq client is recognized by its header."""
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        await _introduce(peer, header_type)
        assert asked.connection is not None
        assert asked.connection.acknowledges is acknowledges


@on_both_loops
async def test_a_lost_connection_ends_every_request_to_its_peer() -> None:
    """The caller learns that no answer will come, and can ask another peer."""
    asked = Asked()
    async with serving(asked.remember) as (server, _):
        async with peer_of(server) as peer:
            await _introduce(peer)
            asked.ask()
            asked.ask()
        await asked.wait_for(2)

        assert asked.answers == [None, None]
        assert not asked.ask()


async def test_an_unanswered_request_to_a_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the connection stays open; a late answer is ignored."""
    monkeypatch.setattr(asks_module, "EXPIRE_SCAN_S", 0.01)
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        for round_number in (1, 2):  # the timer rests in between, and wakes again
            await _introduce(peer)
            asked.ask(seconds=0.0)
            question = await peer.answer()
            await asked.wait_for(round_number)
            peer.writer.write(encode_reply(question))

        await _introduce(peer)
        assert asked.answers == [None, None]


async def test_requests_to_one_peer_are_bounded() -> None:
    """A peer that does not answer cannot fill the memory; its answers make room again."""
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        await _introduce(peer)
        while asked.ask():
            pass
        questions = [await peer.answer() for _ in range(PEER_REQUESTS.of_connection)]
        peer.writer.write(encode_reply(questions[7]))
        await asked.wait_for(1)

        assert asked.ask()
        assert not asked.ask()


async def test_unexpected_answers_are_ignored() -> None:
    """Peers may answer one-way requests, answer twice, or answer without a request."""
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        nobody = RemotingCommand(code=105, opaque=-5, header_type=HeaderType.MSGPACK)
        peer.writer.write(encode_reply(nobody, 77))
        await _introduce(peer)
        asked.ask()
        question = await peer.answer()
        stranger = RemotingCommand(code=39, opaque=question.opaque + 1)
        for odd in (nobody, stranger, question, question):
            peer.writer.write(encode_reply(odd, -1, remark="?" * 1_000, body=bytes(1_000)))
        await _introduce(peer)

        assert [one and one.code for one in asked.answers] == [-1]


async def test_a_callback_that_fails_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged; the connection and the other callbacks continue."""
    asked = Asked()
    async with serving(asked.remember) as (server, _), peer_of(server) as peer:
        await _introduce(peer)
        assert asked.connection is not None

        def fail(_answer: RemotingCommand | None) -> None:
            raise ZeroDivisionError

        asked.connection.ask(39, None, b"", fail)
        asked.ask()
        for _ in range(2):
            peer.writer.write(encode_reply(await peer.answer()))
        await asked.wait_for(1)

        assert "event=answer_failed" in caplog.text
