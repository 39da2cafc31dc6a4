"""Large answers to pulls leave together, at the end of the pass of the loop that found them."""

from __future__ import annotations

import threading

import pytest

from halfmq.broker.handlers.messages.pull import STAGED_BYTES_MAX, PullHandler
from halfmq.broker.handlers.messages.pull_replies import BYTES_MAX
from halfmq.broker.net.connection import ClientConnection
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.files import disk, zero_copy
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.files.zero_copy import ANSWER_AGE_MAX, PageResidency
from halfmq.store.log.log_reader import SCRATCH_SIZE, LogReader
from tests.support.peers import Peer, until
from tests.support.race_windows import Rig, windowed
from tests.support.stores import draft
from tests.support.usual_headers import pull_header

LARGE = 40_000  # bytes of a body, more than is joined with other answers


def pulling(offset: int, count: int) -> PullMessageRequestHeader:
    return pull_header(queue_offset=offset, max_msg_nums=count, expression_type="TAG")


@windowed()
async def test_many_large_answers_arrive_complete(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read before the first is sent, as far as the buffer allows."""
    steps: list[str] = []
    staged: list[int] = []
    # The order of reads and sends, and the bytes between them, show in no answer.
    view, write, send = LogReader.view, ClientConnection.write, PullHandler._send_staged

    def viewed(reader: LogReader, *arguments: object, **more: object) -> memoryview | None:
        steps.append("read")
        return view(reader, *arguments, **more)  # type: ignore[arg-type]

    def written(connection: ClientConnection, data: bytes | memoryview) -> None:
        if len(data) > LARGE:
            steps.append("sent")
        write(connection, data)

    def sent(handler: PullHandler) -> None:
        staged.append(handler._staged_bytes)  # the bound on memory shows in no answer
        send(handler)

    monkeypatch.setattr(LogReader, "view", viewed)
    monkeypatch.setattr(ClientConnection, "write", written)
    monkeypatch.setattr(PullHandler, "_send_staged", sent)
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    bodies = [bytes([number]) * LARGE for number in range(30)]
    for body in bodies:  # between two of them lies one of another queue: they are many ranges
        rig.store.append([draft("orders", 0, body), draft("orders", 1, b"between")])
    await rig.wait(1_000)

    answers = await all_pulled(rig, consumer, bodies)

    assert steps[:5] == ["read", "read", "read", "read", "sent"], "what there is room for"
    assert steps.count("sent") == answers == 25
    assert STAGED_BYTES_MAX <= max(staged) < STAGED_BYTES_MAX + BYTES_MAX <= SCRATCH_SIZE


async def all_pulled(rig: Rig, consumer: Peer, bodies: list[bytes]) -> int:
    """Pull five from each place, all at once; return how many answers were right."""
    pulls = range(len(bodies) - 5)
    opaques = [consumer.send(RequestCode.PULL_MESSAGE, pulling(at, 5)) for at in pulls]
    answers = [await rig.patiently(consumer.answer(opaque)) for opaque in opaques]
    for at, answer in enumerate(answers):
        assert answer.code == ResponseCode.SUCCESS
        assert [answer.body.count(body) for body in bodies] == [
            int(at <= number < at + 5) for number in range(len(bodies))
        ]
    return len(answers)


@pytest.mark.skipif(disk.sendfile is None, reason="the system sends nothing from files")
@windowed()
async def test_contiguous_messages_are_sent_from_the_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads what is not in memory. The log has many files here."""
    sent: list[int] = []
    now = 0.0
    monkeypatch.setattr(zero_copy, "monotonic", lambda: now)
    sendfile = disk.sendfile
    assert sendfile is not None

    def sending(connected: int, fd: int, position: int, length: int) -> int:
        sent.append(sendfile(connected, fd, position, length))
        return sent[-1]

    monkeypatch.setattr(disk, "sendfile", sending)
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    bodies = [bytes([number]) * LARGE for number in range(30)]
    rig.store.append([draft("orders", 0, body) for body in bodies])
    await rig.wait(1_000)
    if not rig.store.reader.can_send_parts:
        pytest.skip("the kernel does not tell what is in memory (cachestat, Linux 6.5)")

    assert await all_pulled(rig, consumer, bodies) == 25
    assert max(sent) > 5 * LARGE
    cold: list[object] = []
    read_cold = LogReader.read_cold

    def reading(reader: LogReader, *arguments: object, **more: object) -> bytes:
        cold.append(arguments)
        return read_cold(reader, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LogReader, "read_cold", reading)
    monkeypatch.setattr(PageResidency, "lacks", lambda *_: True)
    now += ANSWER_AGE_MAX  # what the kernel said before is not believed any more
    sent.clear()
    assert await all_pulled(rig, consumer, bodies) == 25
    assert cold
    assert sent == []


@windowed()
async def test_a_replay_finds_the_next_messages_in_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads the part of the log after the answer, once for several pulls."""
    part = 1 << 16
    fetched: dict[Missing, int] = {}
    fetch = NotInMemoryError.fetch

    def fetching(missing: NotInMemoryError) -> None:
        fetch(missing)
        fetched.update(dict.fromkeys(missing.missing, threading.get_ident()))

    monkeypatch.setattr("halfmq.broker.handlers.messages.pull.READ_AHEAD", part)
    monkeypatch.setattr(NotInMemoryError, "fetch", fetching)
    monkeypatch.setattr(PageResidency, "lacks", lambda *_: True)
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    rig.store.append([draft("orders", 0, bytes(1_000)) for _ in range(200)])
    await rig.wait(1_000)
    assert rig.store.write_offset > 3 * part

    for offset in (0, 1, 2):
        opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(offset, 1))
        assert (await rig.patiently(consumer.answer(opaque))).code == ResponseCode.SUCCESS
    await rig.patiently(until(lambda: bool(fetched)))

    assert [(one.position, one.size) for one in fetched] == [(part, part)]
    assert threading.get_ident() not in fetched.values()


@windowed()
async def test_too_many_pulls_from_disk_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is noticed only at the end of a pass of the loop."""
    monkeypatch.setattr("halfmq.broker.handlers.messages.pull.COLD_READS_MAX", 0)
    monkeypatch.setattr(LogReader, "file_part", lambda *_: None)
    monkeypatch.setattr(LogReader, "view", lambda *_, **__: None)
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    rig.store.append([draft("orders", 0, bytes(LARGE))])
    await rig.wait(1_000)

    opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(0, 1))

    assert (await rig.patiently(consumer.answer(opaque))).code == ResponseCode.SYSTEM_BUSY
