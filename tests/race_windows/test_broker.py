"""Race windows that a crash, a stop or a failing disk of the broker opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.config import FlushMode
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC
from tests.support.peers import COMMIT, ROLLBACK, Half, Peer, until
from tests.support.race_windows import HOUR_MS, INTERVAL_MS, TIMEOUT_MS, Rig, windowed
from tests.support.stores import crash

OP_DELAY_MS = 3_000


async def _halves(producer: Peer, count: int) -> list[Half]:
    return [await producer.prepare(f"{number:032X}", b"row %d" % number) for number in range(count)]


@pytest.mark.parametrize("power_cut", [False, True])
@windowed()
async def test_w01_a_crash_before_the_op_message_undoes_no_decision(
    rig: Rig, *, power_cut: bool
) -> None:
    """The final record is the decision: no check is sent again, nothing is delivered again."""
    producer = await rig.peer()
    committed, rolled_back, undecided = await _halves(producer, 3)
    assert (await producer.end(committed, COMMIT)).code == ResponseCode.SUCCESS
    assert (await producer.end(rolled_back, ROLLBACK)).code == ResponseCode.SUCCESS
    assert rig.op_offsets() == set()

    await rig.kill(power_cut=power_cut)
    producer = await rig.peer()
    await rig.wait(HOUR_MS)

    assert set(producer.asked) == {undecided.offset}
    assert rig.bodies() == [b"row 0"]
    assert rig.op_offsets() == {0, 1}  # written at the start, for Apache RocketMQ
    assert (await producer.end(committed, COMMIT)).code == ResponseCode.SUCCESS
    assert (await producer.end(rolled_back, COMMIT)).code == ResponseCode.ILLEGAL_OPERATION
    assert rig.bodies() == [b"row 0"]


@windowed()
async def test_w02_a_stop_writes_the_op_messages_of_its_last_moments(rig: Rig) -> None:
    """Decisions just before an ordered stop are on disk with their op messages."""
    producer = await rig.peer()
    committed, rolled_back, undecided = await _halves(producer, 3)
    await producer.end(committed, COMMIT)
    await producer.end(rolled_back, ROLLBACK)

    await rig.stop()
    log = (rig.root / "commitlog" / f"{0:020d}").read_bytes()
    await rig.start()

    assert b"0,1," in log  # the body of the op message, before a start could write it
    assert rig.op_offsets() == {0, 1}
    producer = await rig.peer()
    await rig.wait(HOUR_MS)
    assert set(producer.asked) == {undecided.offset}
    assert rig.bodies() == [b"row 0"]


@windowed()
async def test_w02_decisions_under_way_at_a_stop_are_taken_or_still_open(rig: Rig) -> None:
    """A confirmed decision is stored; the others can be made later."""
    producer = await rig.peer()
    halves = await _halves(producer, 20)
    frames = [
        producer.frame(RequestCode.END_TRANSACTION, producer.end_request(half, COMMIT))
        for half in halves
    ]
    producer.write(b"".join(frame for _, frame in frames))
    await rig.stop()
    answered = {
        half for half, (opaque, _) in zip(halves, frames, strict=True) if producer.answered(opaque)
    }
    await rig.start()

    assert {half for half in halves if rig.finals_of(half)} >= answered
    producer = await rig.peer()
    for half in halves:
        assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
        assert len(rig.finals_of(half)) == 1


@windowed()
async def test_w03_a_failing_op_message_costs_nothing(rig: Rig) -> None:
    """Decisions hold while op messages cannot be written; these are written later."""
    producer = await rig.peer()
    committed, rolled_back = await _halves(producer, 2)
    with rig.refusing(OP_TOPIC):
        assert (await producer.end(committed, COMMIT)).code == ResponseCode.SUCCESS
        assert (await producer.end(rolled_back, ROLLBACK)).code == ResponseCode.SUCCESS
        await rig.wait(HOUR_MS)
        assert rig.op_offsets() == set()
    await rig.wait(2 * OP_DELAY_MS)
    assert rig.op_offsets() == {0, 1}

    await rig.kill()
    producer_after = await rig.peer()
    await rig.wait(HOUR_MS)

    assert producer.checks == producer_after.checks == []
    assert rig.bodies() == [b"row 0"]


@windowed()
async def test_w04_files_beside_the_log_may_be_older_than_it(rig: Rig) -> None:
    """A crash leaves older offsets and snapshots: the log alone decides."""
    producer = await rig.peer()
    committed, rolled_back, undecided = await _halves(producer, 3)
    await rig.restart()  # saves all other files while all three are undecided
    before = rig.root.parent / "config-before"
    crash(rig.root / "config", before)
    producer = await rig.peer()
    await producer.end(committed, COMMIT)
    await producer.end(rolled_back, ROLLBACK)
    await rig.wait(10 * OP_DELAY_MS)
    assert rig.op_offsets() == {0, 1}

    def put_back(root: Path) -> None:
        shutil.rmtree(root / "config")
        shutil.copytree(before, root / "config")

    await rig.kill(tamper=put_back)
    producer = await rig.peer()
    await rig.wait(HOUR_MS)

    assert set(producer.asked) == {undecided.offset}
    assert rig.bodies() == [b"row 0"]


@windowed()
async def test_w04_checks_write_no_copies(rig: Rig) -> None:
    """However many checks are sent, the half is one record, also after crashes."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    for _ in range(3):
        await rig.wait(5 * INTERVAL_MS)
        await rig.kill()
        producer = await rig.peer()
    await rig.wait(INTERVAL_MS)

    assert set(producer.asked) == {half.offset}
    assert len(rig.records_of(HALF_TOPIC)) == 1
    await producer.end(half, COMMIT)
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w05_one_unreadable_half_disturbs_no_other_and_writes_nothing(rig: Rig) -> None:
    """The others get their checks, and nothing is appended to the log."""
    producer = await rig.peer()
    broken, *others = await _halves(producer, 5)
    path = rig.root / "commitlog" / f"{0:020d}"
    with path.open("r+b") as log:
        log.seek(broken.offset + 4)  # the magic code: the record is unreadable now
        log.write(b"\0\0\0\0")
    end = rig.store.write_offset

    await rig.wait(10 * INTERVAL_MS)

    assert set(producer.asked) == {half.offset for half in others}
    assert all(producer.asked.count(half.offset) >= 3 for half in others)
    assert rig.store.write_offset == end
    for half in others:
        assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert sorted(rig.bodies()) == [half.body for half in others]


@pytest.mark.parametrize("mode", list(FlushMode))
@windowed()
async def test_w15_a_half_is_answered_when_it_is_on_disk(rig: Rig, mode: FlushMode) -> None:
    """In every flush mode a power cut loses it only before the answer."""
    await rig.restart(flush_mode=mode)
    producer = await rig.peer()
    kept = await producer.prepare("K1", b"kept")
    rig.disk.held = True
    header, body = producer.half_request("K2", b"lost")
    opaque = producer.send(RequestCode.SEND_MESSAGE_V2, header, body)
    await producer.sync()
    assert len(rig.records_of(HALF_TOPIC)) == 2
    assert not producer.answered(opaque)

    await rig.kill(power_cut=True)
    producer = await rig.peer()
    await rig.wait(TIMEOUT_MS + 1_000)

    assert producer.asked == [kept.offset]
    assert (await producer.end(kept, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [b"kept"]


@pytest.mark.parametrize("mode", list(FlushMode))
@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@windowed()
async def test_w15_a_decision_is_answered_when_it_is_on_disk(
    rig: Rig, mode: FlushMode, decision: int
) -> None:
    """A power cut may undo a decision only before its answer."""
    await rig.restart(flush_mode=mode)
    producer = await rig.peer()
    answered = await producer.prepare("K1", b"answered")
    open_one = await producer.prepare("K2", b"open")
    assert (await producer.end(answered, decision)).code == ResponseCode.SUCCESS
    rig.disk.held = True
    opaque = producer.send(RequestCode.END_TRANSACTION, producer.end_request(open_one, decision))
    await until(lambda: rig.service.metrics()["pending"] == 0)
    await producer.sync()
    assert not producer.answered(opaque)

    await rig.kill(power_cut=True)
    producer = await rig.peer()
    await rig.wait(TIMEOUT_MS + 1_000)

    assert producer.asked == [open_one.offset]
    opposite = ROLLBACK if decision == COMMIT else COMMIT
    refused = await producer.end(answered, opposite)
    assert refused.code == ResponseCode.ILLEGAL_OPERATION
    assert (await producer.end(open_one, opposite)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [b"answered" if decision == COMMIT else b"open"]


@pytest.mark.parametrize("mode", list(FlushMode))
@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@windowed()
async def test_w15_a_topic_may_opt_out_of_the_wait_for_the_disk(
    rig: Rig, mode: FlushMode, decision: int
) -> None:
    """Its halves and decisions are answered at once, those of other topics are not."""
    await rig.restart(flush_mode=mode, unflushed_topics=frozenset({"orders"}))
    producer = await rig.peer()
    producer.send(RequestCode.SEND_MESSAGE_V2, *producer.half_request("K0", topic="bills"))
    await producer.sync()
    rig.disk.held = True
    halves = [await producer.prepare(key, key.encode()) for key in ("K1", "K2")]
    for half in halves:
        assert (await producer.end(half, decision)).code == ResponseCode.SUCCESS
    other = producer.send(RequestCode.SEND_MESSAGE_V2, *producer.half_request("K3", topic="bills"))
    await producer.sync()

    assert not producer.answered(other)
    assert rig.store.durable_offset <= halves[0].offset
    rig.disk.held = False
    await until(lambda: producer.answered(other))
    assert rig.bodies() == ([b"K1", b"K2"] if decision == COMMIT else [])


@windowed()
async def test_w16_files_beside_the_log_may_be_newer_than_it(rig: Rig) -> None:
    """A power cut shortens the log and leaves a snapshot and offsets of the lost part."""
    producer = await rig.peer()
    first = await producer.prepare("K1", b"first")
    rig.disk.held = True
    producer.send(RequestCode.END_TRANSACTION, producer.end_request(first, ROLLBACK))
    header, body = producer.half_request("K2", b"lost")
    producer.send(RequestCode.SEND_MESSAGE_V2, header, body)
    await until(lambda: len(rig.records_of(HALF_TOPIC)) == 3)
    rig.service.drain()  # op messages and a snapshot, as at the end of an orderly stop

    def offsets_of_the_tail(root: Path) -> None:
        """Write positions beyond the end of the log, as Apache RocketMQ would have."""
        table = {
            "offsetTable": {
                f"{topic}@CID_RMQ_SYS_TRANS": {"0": 900} for topic in (HALF_TOPIC, OP_TOPIC)
            }
        }
        (root / "config" / "consumerOffset.json").write_text(json.dumps(table))

    await rig.kill(power_cut=True, tamper=offsets_of_the_tail)
    producer = await rig.peer()
    after = await producer.prepare("K3", b"after")
    await rig.wait(TIMEOUT_MS + 1_000)

    assert set(producer.asked) == {first.offset, after.offset}
    for half in (first, after):
        assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [b"first", b"after"]


@windowed()
async def test_w28_without_the_op_topic_nobody_is_asked_again(rig: Rig) -> None:
    """Op messages are for other brokers: their queue may be deleted, their offset be wrong."""
    producer = await rig.peer()
    committed, rolled_back, undecided = await _halves(producer, 3)
    await producer.end(committed, COMMIT)
    await producer.end(rolled_back, ROLLBACK)
    await rig.wait(2 * OP_DELAY_MS)
    assert rig.op_offsets() == {0, 1}

    def delete_op_topic(root: Path) -> None:
        shutil.rmtree(root / "consumequeue" / OP_TOPIC)
        table = {"offsetTable": {f"{OP_TOPIC}@CID_RMQ_SYS_TRANS": {"0": 77_777}}}
        (root / "config" / "consumerOffset.json").write_text(json.dumps(table))

    await rig.kill(tamper=delete_op_topic)
    producer = await rig.peer()
    await rig.wait(HOUR_MS)

    assert set(producer.asked) == {undecided.offset}
    assert rig.bodies() == [b"row 0"]
