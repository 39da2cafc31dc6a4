"""Requests that need what is not in memory: a thread fetches it, and the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from halfmq.broker.handlers.transactions import end_batch
from halfmq.broker.net import connection as connection_module
from halfmq.broker.transaction.half_reader import HalfReader
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import (
    QueryMessageRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    ViewMessageRequestHeader,
)
from halfmq.remoting.own_requests import (
    DecideTransactionRequestHeader,
    PreparedMessage,
    QueryTransactionsRequestHeader,
    TransactionEnd,
    TransactionsRequestHeader,
    decode_end_results,
    decode_prepared_results,
    decode_transactions,
    encode_entries,
)
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.broker_doubles import START_MS, ext
from tests.support.ice import Ice, frozen
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer, until
from tests.support.race_windows import TIMEOUT_MS, Rig, windowed
from tests.support.stores import BORN, draft

COUNT = 40
OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.ILLEGAL_OPERATION


async def filled(rig: Rig) -> tuple[Peer, list[int]]:
    """Store messages with one key; return a peer and where they lie."""
    peer = await rig.peer()
    await peer.prepare("0" * 32)  # creates the topic
    properties = b"KEYS\x01order\x02"
    drafts = [draft("orders", 0, b"%d" % n, properties=properties) for n in range(COUNT)]
    done = [rig.store.append([one])[0] for one in drafts]
    await rig.wait(1_000)
    return peer, [one.physical_offset for one in done]


async def stored(rig: Rig, count: int, *, size: int = 10) -> list[Half]:
    """Store halves and restart, so that they are only in the log and no producer is connected."""
    peer = await rig.peer(ours=True)
    halves = [await peer.prepare(f"{n:032X}", bytes([n + 1]) * size) for n in range(count)]
    await rig.restart()
    return halves


async def prepared(rig: Rig, count: int, *, size: int = 10) -> tuple[Peer, list[Half]]:
    """Do the same, and connect a producer."""
    halves = await stored(rig, count, size=size)
    return await rig.peer(ours=True), halves


async def prepare_several(peer: Peer) -> list[tuple[int, int]]:
    """Store a transaction of five messages; return where in the log and in the half queue."""
    messages = [
        PreparedMessage(
            topic="orders",
            queue_id=0,
            sys_flag=0,
            born_timestamp=START_MS,
            flag=0,
            properties=encode_properties({"UNIQ_KEY": f"{n:032X}"}).decode(),
            body=bytes([n + 1]) * 9_000,
        )
        for n in range(5)
    ]
    header = TransactionsRequestHeader(producer_group="pg")
    answer = await peer.call(RequestCode.PREPARE_TRANSACTION, header, encode_entries(messages))
    assert answer.code == OK, answer.remark
    return [
        (parse_offset_message_id(one.message_id).physical_offset, one.queue_offset)
        for one in decode_prepared_results(answer.body)
    ]


def an_end(half: Half, decision: int) -> TransactionEnd:
    return TransactionEnd(half.offset, half.queue_offset, decision)


def send_batch(peer: Peer, *ends: TransactionEnd) -> int:
    """Send many decisions; return the number of the answer."""
    header = TransactionsRequestHeader(producer_group="pg")
    return peer.send(RequestCode.END_TRANSACTIONS, header, encode_entries(ends))


def send_end(peer: Peer, half: Half, decision: int, *, from_check: bool = False) -> int:
    """Send one decision; return the number of the answer."""
    header = peer.end_request(half, decision, from_check=from_check)
    return peer.send(RequestCode.END_TRANSACTION, header)


async def codes(rig: Rig, peer: Peer, opaque: int) -> list[int]:
    """Wait for the answer to a batch; return its results' codes."""
    answer = await rig.patiently(peer.answer(opaque))
    assert answer.code == OK, answer.remark
    return [one.code for one in decode_end_results(answer.body)]


def never_waited(ice: Ice) -> bool:
    """Whether threads have fetched, and the event loop's thread has not."""
    return bool(ice.fetched_by) and not ice.waited and threading.get_ident() not in ice.fetched_by


def requests(offsets: list[int]) -> dict[int, Header | None]:
    """One request of each kind that reads messages."""
    return {
        RequestCode.VIEW_MESSAGE_BY_ID: ViewMessageRequestHeader(offset=offsets[3]),
        RequestCode.QUERY_MESSAGE: QueryMessageRequestHeader(
            topic="orders", key="order", max_num=32, begin_timestamp=0, end_timestamp=1 << 62
        ),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: SearchOffsetRequestHeader(
            topic="orders", queue_id=0, timestamp=BORN
        ),
        RequestCode.GET_EARLIEST_MSG_STORETIME: QueueRequestHeader(topic="orders", queue_id=0),
        RequestCode.GET_BROKER_RUNTIME_INFO: None,
    }


def told(answer: RemotingCommand) -> tuple[object, ...]:
    """What must be the same; the runtime's numbers go on, but for where the log begins."""
    if answer.code == OK and b"earliestMessageTimeStamp" in answer.body:
        return (answer.body.split(b"earliestMessageTimeStamp")[1][:20],)
    return (answer.code, ext(answer), answer.body)


# --- looking for messages


@windowed()
async def test_what_is_not_in_memory_is_fetched_by_threads(rig: Rig) -> None:
    """Each request gets the answer that it gets when everything is there."""
    peer, offsets = await filled(rig)
    for code, header in requests(offsets).items():
        warm = await rig.patiently(peer.call(code, header))
        with frozen() as ice:
            cold = await rig.patiently(peer.call(code, header))

        assert warm.code == OK, code
        assert told(cold) == told(warm), code
        assert never_waited(ice), code


@windowed()
async def test_a_failed_fetch_is_answered_by_the_attempt_that_waits(rig: Rig) -> None:
    """The fetch itself is no answer; the file may just have been deleted."""
    peer, offsets = await filled(rig)
    code = RequestCode.VIEW_MESSAGE_BY_ID
    with frozen() as ice:
        ice.failure = FileNotFoundError("gone")
        answer = await rig.patiently(peer.call(code, requests(offsets)[code]))

    assert answer.code == OK  # the file is there in fact
    assert len(ice.fetched_by) == 1


@windowed()
async def test_a_request_whose_fetched_bytes_are_evicted_is_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if memory is so short that fetched bytes are evicted before they are used."""
    monkeypatch.setattr(connection_module, "FETCHES_MAX", 5)
    peer, offsets = await filled(rig)
    code = RequestCode.QUERY_MESSAGE
    with frozen() as ice:
        ice.melts = False
        first = peer.send(code, requests(offsets)[code])
        second = peer.send(code, requests(offsets)[code])
        answers = [await rig.patiently(peer.answer(opaque)) for opaque in (first, second)]

    assert [answer.code for answer in answers] == [OK, OK]
    assert len(ice.fetched_by) == 10, "the second one has its own tries"


@windowed()
async def test_a_message_sent_back_is_fetched(rig: Rig) -> None:
    """What a consumer failed to consume may lie far back in the log."""
    peer, offsets = await filled(rig)
    with frozen() as ice:
        answer = await rig.patiently(peer.send_back(offsets[0], "consumers"))

    assert answer.code == OK
    assert never_waited(ice)


# --- decisions


@windowed()
async def test_decisions_of_one_connection_are_taken_in_their_order(rig: Rig) -> None:
    """A later one about what is in memory does not overtake the one that waits."""
    peer, (cold, warm) = await prepared(rig, 2, size=10_000)
    with frozen() as ice:
        HalfReader(rig.store).read(warm.offset)  # waits for the disk, and so brings it into memory
        ice.waited = 0
        ice.may_read.clear()
        single = [send_end(peer, cold, COMMIT), send_end(peer, cold, ROLLBACK)]
        single.append(send_end(peer, warm, ROLLBACK))
        batch = send_batch(peer, an_end(warm, COMMIT), an_end(cold, COMMIT))
        await until(lambda: bool(ice.fetched_by))
        await rig.exchange()
        assert rig.service.metrics()["pending"] == 2
        ice.may_read.set()
        answers = [await rig.patiently(peer.answer(opaque)) for opaque in single]
        results = await codes(rig, peer, batch)

    assert [answer.code for answer in answers] == [OK, REFUSED, OK]
    assert results == [REFUSED, OK]
    assert len(rig.finals_of(cold)) == 1
    assert not rig.finals_of(warm)
    assert never_waited(ice)


@windowed()
async def test_other_connections_are_served_while_one_waits(rig: Rig) -> None:
    """They may even decide the same transaction first."""
    peer, (first, second) = await prepared(rig, 2, size=10_000)
    other = await rig.peer(ours=True)
    with frozen() as ice:
        HalfReader(rig.store).read(second.offset)
        ice.may_read.clear()
        waits = send_end(peer, first, COMMIT)
        await until(lambda: bool(ice.fetched_by))
        served = await rig.patiently(other.end(second, COMMIT))
        assert not peer.answered(waits)
        decided = send_end(other, first, ROLLBACK)
        ice.may_read.set()
        codes_of = {
            (await rig.patiently(one.answer(opaque))).code
            for one, opaque in ((peer, waits), (other, decided))
        }

    assert served.code == OK
    assert codes_of == {OK, REFUSED}, "one of them is the first"
    assert len(rig.finals_of(second)) == 1


@windowed()
async def test_many_decisions_about_cold_halves_get_one_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is taken once; what is needed next is fetched with what is needed now."""
    monkeypatch.setattr(end_batch, "TURN_BYTES", 30_000)
    peer, halves = await prepared(rig, COUNT, size=8_000)
    ends = [an_end(half, ROLLBACK if n % 3 else COMMIT) for n, half in enumerate(halves)]
    ends += [an_end(halves[0], COMMIT), an_end(halves[0], ROLLBACK), TransactionEnd(7, 7, COMMIT)]
    expected = [OK] * (COUNT + 1) + [REFUSED, ResponseCode.SYSTEM_ERROR]
    fetches = 0
    for _ in range(2):  # the answer to the first was lost
        with frozen() as ice:
            assert await codes(rig, peer, send_batch(peer, *ends)) == expected
        assert never_waited(ice)
        fetches += ice.fetches

    assert fetches < COUNT / 2
    assert [len(rig.finals_of(half)) for half in halves] == [int(n % 3 == 0) for n in range(COUNT)]


@windowed()
async def test_the_halves_of_several_messages_are_fetched_together(rig: Rig) -> None:
    """A transaction is decided at once, and that needs all of them."""
    peer = await rig.peer(ours=True)
    halves = await prepare_several(peer)
    await rig.restart()
    peer = await rig.peer(ours=True)
    end = TransactionEnd(*halves[0], COMMIT)
    with frozen() as ice:
        assert await codes(rig, peer, send_batch(peer, end)) == [OK]

    assert never_waited(ice)
    assert ice.fetches == 1
    assert len(rig.bodies()) == len(halves)


@windowed()
async def test_operators_see_and_decide_what_is_cold(rig: Rig) -> None:
    """A page of undecided transactions is fetched at once, not one by one."""
    _, halves = await prepared(rig, COUNT, size=5_000)
    operator = await rig.peer(ours=True, member=False)
    with frozen() as ice:
        listed = await rig.patiently(
            operator.call(
                RequestCode.QUERY_TRANSACTIONS, QueryTransactionsRequestHeader(max_count=COUNT)
            )
        )
    assert [one.offset for one in decode_transactions(listed.body)] == [
        half.offset for half in halves
    ]
    assert ice.fetches == 1
    assert never_waited(ice)
    with frozen() as ice:
        header = DecideTransactionRequestHeader(
            transaction_offset=halves[1].offset, action="commit"
        )
        decided = await rig.patiently(operator.call(RequestCode.DECIDE_TRANSACTION, header))
    assert decided.code == OK
    assert never_waited(ice)
    assert len(rig.finals_of(halves[1])) == 1


@windowed()
async def test_the_answer_to_a_check_is_counted_once_however_often_it_is_tried(rig: Rig) -> None:
    """What a try counts before it finds something missing, the next one would count again."""
    peer, (half,) = await prepared(rig, 1, size=5_000)
    await rig.wait(10 * TIMEOUT_MS)
    while len(peer.checks) < 2:
        await rig.wait(TIMEOUT_MS)
    with frozen() as ice:
        opaque = send_end(peer, half, COMMIT, from_check=True)
        answer = await rig.patiently(peer.answer(opaque))

    assert answer.code == OK
    assert never_waited(ice)
    assert rig.metrics["checks_answered"] == 1


@windowed()
async def test_a_half_whose_file_was_deleted_is_refused(rig: Rig) -> None:
    """It was deleted while its decision waited for the fetch; others are decided."""
    peer, halves = await prepared(rig, 40, size=20_000)
    last = halves[-1]
    gone = rig.root / "commitlog" / f"{0:020d}"
    rig.store.reader.close()
    with frozen() as ice:
        ice.may_read.clear()
        opaque = send_batch(peer, an_end(halves[0], COMMIT), an_end(last, COMMIT))
        await until(lambda: bool(ice.fetched_by))
        kept = gone.read_bytes()
        gone.unlink()
        rig.store.reader.close()
        ice.may_read.set()
        results = await codes(rig, peer, opaque)
    gone.write_bytes(kept)

    assert results == [ResponseCode.SYSTEM_ERROR, OK]
    assert len(rig.finals_of(last)) == 1


@windowed()
async def test_an_invented_offset_is_refused(rig: Rig) -> None:
    """Although it cannot be read; other requests are not delayed."""
    peer, (half,) = await prepared(rig, 1)
    with frozen() as ice:
        for offset in (-7, 1 << 62, half.offset + 1):
            nowhere = Half(offset, 0, "", "", "pg", b"")
            answer = await rig.patiently(peer.end(nowhere, COMMIT))
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert await codes(rig, peer, send_batch(peer, an_end(nowhere, COMMIT))) == [1]
    assert not ice.waited
    assert rig.service.metrics()["pending"] == 1


@windowed()
async def test_a_decision_that_cannot_be_appended_stays_open(rig: Rig) -> None:
    """The transaction is as it was, and its producer free to try again."""
    peer, halves = await prepared(rig, 2, size=5_000)
    with frozen(), rig.refusing("orders"):
        answer = await rig.patiently(peer.end(halves[0], COMMIT))
        results = await codes(rig, peer, send_batch(peer, *(an_end(one, COMMIT) for one in halves)))

    assert answer.code != OK
    assert OK not in results
    assert rig.service.metrics()["pending"] == 2
    assert await codes(rig, peer, send_batch(peer, *(an_end(one, COMMIT) for one in halves))) == [
        OK,
        OK,
    ]


@windowed()
async def test_decisions_about_evicted_halves_are_taken(rig: Rig) -> None:
    """The system has let go of their pages; whatever it does, each half is decided once."""
    peer, halves = await prepared(rig, 60, size=20_000)
    for path in sorted((rig.root / "commitlog").iterdir())[:-1]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    batch = send_batch(peer, *(an_end(half, COMMIT) for half in halves[10:]))
    single = [send_end(peer, half, COMMIT) for half in halves[:20]]

    assert await codes(rig, peer, batch) == [OK] * 50
    answers = [await rig.patiently(peer.answer(opaque)) for opaque in single]
    assert {answer.code for answer in answers} == {OK}
    assert [len(rig.finals_of(half)) for half in halves] == [1] * 60


@windowed()
async def test_decisions_of_a_group_that_failed_are_tried_alone_without_their_halves(
    rig: Rig,
) -> None:
    """What was planned is at hand, though its half may have left memory meanwhile."""
    peer = await rig.peer(ours=True)
    halves = [await peer.prepare(f"{n:032X}", bytes([n + 1]) * 5_000) for n in range(4)]
    with frozen() as ice, rig.refusing("orders"):
        single = [send_end(peer, half, COMMIT) for half in halves[:2]]
        batch = send_batch(peer, *(an_end(half, COMMIT) for half in halves[2:]))
        answers = [await rig.patiently(peer.answer(opaque)) for opaque in single]
        results = await codes(rig, peer, batch)

    assert OK not in {*results, *(answer.code for answer in answers)}
    assert not ice.waited
    assert not ice.fetches
    assert rig.service.metrics()["pending"] == 4


# --- prepares that are repeated


@windowed()
async def test_a_repeated_prepare_fetches_the_first(rig: Rig) -> None:
    """Its half may have been evicted; the producer gets its ids nevertheless."""
    peer, halves = await prepared(rig, 2, size=10_000)
    with frozen() as ice:
        header, body = peer.half_request(halves[0].transaction_id, halves[0].body)
        answer = await rig.patiently(peer.call(RequestCode.SEND_MESSAGE_V2, header, body))

    assert peer.half_of(answer, body) == halves[0]
    assert never_waited(ice)
    assert rig.metrics["prepares_repeated"] == 1
    assert rig.service.metrics()["pending"] == 2


@windowed()
async def test_a_repeated_prepare_of_several_messages_fetches_them(rig: Rig) -> None:
    """All are compared with what is stored."""
    peer = await rig.peer(ours=True)
    first = await prepare_several(peer)
    await rig.restart()
    peer = await rig.peer(ours=True)
    with frozen() as ice:
        repeated = await rig.patiently(prepare_several(peer))

    assert repeated == first
    assert never_waited(ice)
    assert rig.metrics["prepares_repeated"] == 1
    assert rig.service.metrics()["pending"] == 1


# --- what happens by itself


@windowed()
async def test_halves_to_check_are_fetched(rig: Rig) -> None:
    """They left memory after hours without a decision; each is checked once."""
    halves = await stored(rig, COUNT, size=5_000)
    with frozen() as ice:
        peer = await rig.peer(ours=True)
        await rig.wait_for(lambda: len(peer.asked) >= COUNT)

    assert sorted(peer.asked) == [half.offset for half in halves]
    assert never_waited(ice)


@windowed(check_max=1)
async def test_halves_to_park_are_fetched(rig: Rig) -> None:
    """A copy of the message is stored for operators."""
    await stored(rig, 3, size=5_000)
    with frozen() as ice:
        await rig.peer(ours=True)
        await rig.wait_for(lambda: rig.metrics["pending_parked"] == 3)

    assert never_waited(ice)
    assert len(rig.bodies(TRANS_CHECK_MAX_TIME_TOPIC)) == 3


@windowed()
async def test_halves_that_are_too_old_are_fetched_and_parked(rig: Rig) -> None:
    """They keep the log from being deleted, and are least likely to be in memory."""
    halves = await stored(rig, COUNT, size=5_000)
    with frozen() as ice:
        rig.service.on_retention_blocked(halves[-1].offset)
        await rig.wait_for(lambda: rig.metrics["parked_expired"] == COUNT - 1)
    await rig.settle()

    assert never_waited(ice)
    bodies = [half.body for half in halves[:-1]]
    assert sorted(rig.bodies(TRANS_CHECK_MAX_TIME_TOPIC)) == sorted(bodies)


@pytest.mark.parametrize("melts", [True, False])
@windowed()
async def test_a_half_that_cannot_be_fetched_delays_no_other(rig: Rig, melts: bool) -> None:
    """The disk refuses it, or it is evicted at once."""
    halves = await stored(rig, 3, size=5_000)
    with frozen() as ice:
        peer = await rig.peer(ours=True)
        ice.melts = melts
        ice.failure = OSError(5, "I/O error") if melts else None
        rig.service.on_retention_blocked(halves[-1].offset)
        await rig.wait(10 * TIMEOUT_MS)
        assert set(peer.asked) == (set() if melts else {halves[-1].offset})
        assert rig.metrics["parked_expired"] == (0 if melts else 2)
        ice.melts, ice.failure = True, None
        await rig.wait_for(lambda: bool(peer.asked))


async def committed_to_wait(rig: Rig, count: int) -> list[bytes]:
    """Commit messages that wait once, in the level of five seconds; return their bodies."""
    peer = await rig.peer()
    bodies = [bytes([n + 1]) * 5_000 for n in range(count)]
    for n, body in enumerate(bodies):
        half = await peer.prepare(f"{n:032X}", body, TRANSACTION_DELAY_MS="5000")
        assert (await peer.end(half, COMMIT)).code == OK
    return bodies


@windowed()
async def test_delayed_messages_that_are_due_are_fetched(rig: Rig) -> None:
    """Each is delivered once, in the order of its level."""
    bodies = await committed_to_wait(rig, COUNT)
    with frozen() as ice:
        await rig.wait_for(lambda: not rig.delays.waiting)
    await rig.settle()

    assert rig.bodies() == bodies
    assert never_waited(ice)


@pytest.mark.parametrize("melts", [True, False])
@windowed()
async def test_a_due_message_that_cannot_be_fetched_is_delivered_later(
    rig: Rig, melts: bool
) -> None:
    """The disk refuses it, or it is evicted at once."""
    bodies = await committed_to_wait(rig, COUNT)
    with frozen() as ice:
        ice.melts = melts
        ice.failure = OSError(5, "I/O error") if melts else None
        await rig.wait(20_000)
        assert rig.delays.waiting == (COUNT if melts else 0)
        assert ice.waited == 0 if melts else ice.waited > 0
        ice.melts, ice.failure = True, None
        await rig.wait_for(lambda: not rig.delays.waiting)
    await rig.settle()

    assert sorted(rig.bodies()) == bodies


# --- the end of a connection, and of the broker


@windowed()
async def test_a_lost_connection_drops_its_waiting_decisions(rig: Rig) -> None:
    """The decisions were not taken; the producer is asked about them."""
    peer, halves = await prepared(rig, 2)
    with frozen() as ice:
        ice.may_read.clear()
        send_end(peer, halves[0], COMMIT)
        send_end(peer, halves[1], COMMIT)
        await until(lambda: bool(ice.fetched_by))
        for connection in rig.connections:
            connection.abort()
        await until(lambda: not rig.connections)
        ice.may_read.set()
        other = await rig.peer(ours=True)
        await rig.patiently(other.sync())

    assert rig.service.metrics()["pending"] == 2
    assert not rig.finals_of(halves[0])


@pytest.mark.parametrize("header_type", [HeaderType.JSON, HeaderType.MSGPACK])
@windowed()
async def test_a_stop_waits_for_what_is_being_fetched(rig: Rig, header_type: HeaderType) -> None:
    """A thread may be in the middle of it; what waited is undecided at the next start."""
    peer, halves = await prepared(rig, 2)
    peer.header_type = header_type
    with frozen() as ice:
        ice.may_read.clear()
        send_end(peer, halves[0], COMMIT)
        await until(lambda: bool(ice.fetched_by))
        stopping = asyncio.ensure_future(rig.broker.stop())
        await asyncio.sleep(0)
        ice.may_read.set()
        await rig.patiently(_done(stopping))
        assert not any(one.name.startswith("fetch") for one in threading.enumerate())
    rig.peers.clear()
    await rig.start()

    assert rig.service.metrics()["pending"] == 2


async def _done(task: asyncio.Future[None]) -> None:
    await task
