"""Replies leave when the log is on disk, not before."""

from __future__ import annotations

import asyncio

import pytest

from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.broker.limits.kept import UNFLUSHED_BYTES
from halfmq.broker.net import reply_release as release_module
from halfmq.broker.net.reply_release import PEERS_PER_TURN, UNFLUSHED_DECISIONS_MAX, ReplyRelease
from halfmq.remoting.codes import FLAG_ONE_WAY, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply
from tests.support.broker_doubles import FakeConnection, as_store

REQUEST = RemotingCommand(code=10)


class Log:
    """A log whose durable position the test moves."""

    def __init__(self) -> None:
        self.durable_offset = 0
        self.readable_offset = 0
        self.write_offset = 0
        self.flushes = 0

    def request_flush(self) -> None:
        self.flushes += 1


class Peer(FakeConnection):
    """Takes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed = 0

    def resume(self) -> None:
        self.resumed += 1


def _release(log: Log, refusal: SendRefusal | None = None) -> ReplyRelease:
    release = ReplyRelease(as_store(log), refusal)
    release.attach(asyncio.get_running_loop())
    return release


async def _loop_pass() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_reply_waits_for_its_position() -> None:
    """Acknowledged means on disk: what lies above the durable position is not answered."""
    log, peer = Log(), Peer()
    release = _release(log)
    release.respond(peer, REQUEST, b"first", 100)
    release.respond(peer, REQUEST, b"second", 200)

    log.durable_offset = 199
    release.release()

    assert peer.written == [b"first"]
    assert not release.idle


async def test_a_reply_that_need_not_wait_is_written_after_the_pass() -> None:
    """The answer to a repeated request may name a position that was flushed long ago."""
    log, peer = Log(), Peer()
    log.durable_offset = 200
    release = _release(log)

    release.respond(peer, REQUEST, b"again", 100)
    assert release.idle
    assert peer.written == []
    await _loop_pass()

    assert peer.written == [b"again"]
    assert log.flushes == 0


async def test_replies_of_a_pass_leave_in_one_write_for_each_peer() -> None:
    """A write may cost the loop its processor, so all are written after the other work."""
    release = _release(Log())
    peers = [Peer(), Peer()]

    for number in range(4):
        release.respond(peers[number % 2], REQUEST, b"%d" % number)
    assert not any(peer.written for peer in peers)
    await _loop_pass()

    assert [peer.written for peer in peers] == [[b"02"], [b"13"]]


async def test_a_pass_ends_in_one_callback() -> None:
    """What the end of a pass appends is answered by the same callback."""
    peer = Peer()
    release = _release(Log())

    release.before_replies(lambda: release.respond(peer, REQUEST, b"stored"))
    assert peer.written == []
    await asyncio.sleep(0)  # of the callbacks scheduled so far

    assert peer.written == [b"stored"]


async def test_replies_kept_for_the_end_of_a_pass_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the limit they are written at once."""
    monkeypatch.setattr(release_module, "READY_BYTES_MAX", 300)
    release, peer = _release(Log()), Peer()

    kept = []
    for number in range(1, 11):
        release.respond(peer, REQUEST, bytes(100))
        kept.append(100 * number - sum(map(len, peer.written)))
    await _loop_pass()

    assert max(kept) <= 400
    assert sum(map(len, peer.written)) == 1_000


@pytest.mark.parametrize("durable_at", [0, 100])
async def test_a_one_way_request_gets_no_reply(durable_at: int) -> None:
    """Its sender would take it for that of another request; what it stored is flushed."""
    log, peer = Log(), Peer()
    release = _release(log)

    release.respond(peer, RemotingCommand(code=37, flag=FLAG_ONE_WAY), b"done", durable_at)
    await _loop_pass()
    log.durable_offset = 100
    release.release()

    assert peer.written == []
    assert release.idle
    assert log.flushes == (durable_at > 0)


async def test_a_closed_connection_keeps_no_reply() -> None:
    """Thousands of peers may be lost while their requests are served."""
    release, peer = _release(Log()), Peer()
    peer.closed = True

    release.respond(peer, REQUEST, b"late")
    await _loop_pass()

    assert peer.written == []


async def test_replies_of_one_peer_leave_in_one_write() -> None:
    """A group commit costs each connection one system call."""
    log, peer, other = Log(), Peer(), Peer()
    release = _release(log)
    for position, reply in ((10, b"a"), (20, b"b"), (30, b"c")):
        release.respond(peer, REQUEST, reply, position)
    release.respond(other, REQUEST, b"d", 40)

    log.durable_offset = 40
    release.release()

    assert peer.written == [b"abc"]
    assert other.written == [b"d"]
    assert release.idle


async def test_replies_of_many_peers_leave_in_several_turns_of_the_loop() -> None:
    """Twenty thousand replies after one flush must not stop other requests."""
    log, peers = Log(), [Peer() for _ in range(2 * PEERS_PER_TURN + 1)]
    release = _release(log)
    for position, peer in enumerate(peers):
        release.respond(peer, REQUEST, b"stored", position)
    log.durable_offset = len(peers)
    counts = []

    release.release()
    release.release()  # another flush is over before the next turn
    while not release.idle:
        counts.append(sum(len(peer.written) for peer in peers))
        await asyncio.sleep(0)

    assert counts[0] == PEERS_PER_TURN
    assert set(counts) <= {PEERS_PER_TURN, 2 * PEERS_PER_TURN}
    assert [peer.written for peer in peers] == [[b"stored"]] * len(peers)


async def test_one_flush_is_requested_per_pass() -> None:
    """All sockets that were readable share one fdatasync."""
    log, peer = Log(), Peer()
    release = _release(log)

    for position in range(10):
        release.respond(peer, REQUEST, b"x", position + 1)
    await _loop_pass()

    assert log.flushes == 1


async def test_appends_during_a_flush_request_the_next_one() -> None:
    """A reply for which the running flush was too early is not forgotten."""
    log, peer = Log(), Peer()
    release = _release(log)
    release.respond(peer, REQUEST, b"a", 10)
    await _loop_pass()
    release.respond(peer, REQUEST, b"b", 20)
    await _loop_pass()
    log.durable_offset = 10

    release.release()
    await _loop_pass()

    assert log.flushes == 3


async def test_a_slow_disk_stops_the_network() -> None:
    """Memory stays bounded: above the limit peers are not read until the disk has caught up."""
    log, peer = Log(), Peer()
    release = _release(log)
    log.write_offset = UNFLUSHED_BYTES.most + 1
    assert release.over_limit()
    release.stall(peer.resume)

    release.release()
    assert peer.resumed == 0
    log.durable_offset = log.write_offset
    release.release()

    assert peer.resumed == 1


async def test_messages_are_refused_while_the_disk_stays_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers are read again, so that decisions are served; nothing is dropped."""
    monkeypatch.setattr(release_module, "STALLED_S_MAX", 0.0)
    log, first, second, refusal = Log(), Peer(), Peer(), SendRefusal()
    release = _release(log, refusal)
    log.write_offset = UNFLUSHED_BYTES.most + 1
    release.stall(first.resume)
    release.stall(second.resume)
    await _loop_pass()

    assert release.refusing
    assert (first.resumed, second.resumed) == (1, 1)
    assert f"{UNFLUSHED_BYTES.most + 1} bytes wait for the disk" in refusal.refusal().remark
    assert not release.over_limit()  # there is room for decisions

    log.write_offset = UNFLUSHED_DECISIONS_MAX + 1
    assert release.over_limit()
    release.stall(first.resume)
    await _loop_pass()
    assert first.resumed == 1  # now nothing is read until the disk has caught up


async def test_messages_are_accepted_again_when_half_of_the_limit_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the limit itself, the next message would start the refusal again."""
    monkeypatch.setattr(release_module, "STALLED_S_MAX", 0.0)
    log = Log()
    release = _release(log)
    log.write_offset = UNFLUSHED_DECISIONS_MAX + 1
    release.stall(Peer().resume)
    await _loop_pass()
    behind = Peer()
    release.stall(behind.resume)

    log.durable_offset = log.write_offset - UNFLUSHED_BYTES.most // 2 - 1
    release.release()
    assert release.refusing
    assert behind.resumed == 1
    log.durable_offset += 1
    release.release()

    assert not release.refusing


async def test_a_burst_that_the_disk_writes_in_time_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers are only not read for a moment."""
    monkeypatch.setattr(release_module, "STALLED_S_MAX", 0.0)
    log, peer = Log(), Peer()
    release = _release(log)
    log.write_offset = UNFLUSHED_BYTES.most + 1
    release.stall(peer.resume)
    log.durable_offset = log.write_offset
    release.release()
    log.write_offset += UNFLUSHED_BYTES.most + 1  # the next one
    await _loop_pass()

    assert not release.refusing
    assert peer.resumed == 1


async def test_a_flush_that_ends_after_the_loop_raises_nothing() -> None:
    """Its thread may be late when the broker stops."""
    release = ReplyRelease(as_store(Log()))

    release.durable_from_thread()

    assert release.idle


async def test_what_waits_for_a_failed_disk_is_refused() -> None:
    """Also what comes to wait later; what was on disk before gets its answer."""
    log, peer = Log(), Peer()
    release = _release(log)
    replies = [encode_reply(RemotingCommand(code=10, opaque=number)) for number in range(3)]
    release.respond(peer, REQUEST, replies[0], 100)
    release.respond(peer, REQUEST, replies[1], 200)
    log.durable_offset = 100

    release.fail_from_thread("the disk failed")
    await _loop_pass()
    release.respond(peer, REQUEST, replies[2], 300)
    await _loop_pass()

    assert release.idle
    assert peer.written[0] == replies[0]
    answers = FrameDecoder(responses_first=True).receive_data(b"".join(peer.written))
    assert [answer.opaque for answer in answers] == [0, 1, 2]
    assert [answer.code for answer in answers] == [0, *[ResponseCode.SERVICE_NOT_AVAILABLE] * 2]
    assert answers[1].remark == answers[2].remark == "the disk failed"
