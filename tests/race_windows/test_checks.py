"""Race windows in which RocketMQ sends a check too early, twice, to the wrong client, or never."""

from __future__ import annotations

from typing import Final

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import ResumeCheckHalfMessageRequestHeader
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import TRANS_CHECK_MAX_TIME_TOPIC
from tests.support.broker_doubles import START_MS
from tests.support.peers import COMMIT, UNKNOWN, Half, Peer
from tests.support.race_windows import DAY_MS, HOUR_MS, INTERVAL_MS, TIMEOUT_MS, Rig, windowed

CHECK_MAX: Final = 3
UNTIL_PARKED_MS: Final = TIMEOUT_MS + 10 * INTERVAL_MS
"""Longer than three checks take, with back-off and jitter, and the wait for the last answer."""


@pytest.mark.parametrize("commit_after_s", [1, 61, 599, 601])
@windowed()
async def test_w10_a_commit_within_or_after_immunity_is_taken_once(
    rig: Rig, commit_after_s: int
) -> None:
    """Immunity only sets when the first check is due; the commit ends the checks."""
    producer = await rig.peer()
    half = await producer.prepare("K1", CHECK_IMMUNITY_TIME_IN_SECONDS="600")
    await rig.wait(min(commit_after_s, 599) * 1_000)
    assert producer.checks == []
    await rig.wait(max(commit_after_s - 599, 0) * 1_000)

    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    asked = len(producer.checks)
    await rig.wait(HOUR_MS)

    assert len(producer.checks) == asked == (commit_after_s > 600)
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w11_long_immunity_ends_in_a_check_and_not_in_the_dead_topic(rig: Rig) -> None:
    """An hour of immunity uses up no attempts: then the first check is sent and answered."""
    producer = await rig.peer()
    await producer.prepare("K1", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
    await rig.wait(HOUR_MS - 1_000)
    assert producer.checks == []

    await rig.wait(2_000)
    (check,) = producer.checks
    await producer.answer_check(check, COMMIT)

    assert decode_record(check.command.body).property_map["TRANSACTION_CHECK_TIMES"] == "1"
    assert rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []
    assert rig.bodies() == [b"row 1"]


@pytest.mark.parametrize("killed", [False, True])
@windowed()
async def test_w12_a_group_that_is_away_costs_no_attempts(rig: Rig, *, killed: bool) -> None:
    """A day without producers parks nothing; a new member gets the check within a second."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.lose(producer)
    await rig.wait(DAY_MS // 2)
    if killed:
        await rig.kill()
    await rig.wait(DAY_MS // 2)
    assert rig.metrics["pending_parked"] == 0
    assert rig.metrics["checks_sent"] == 0

    heir = await rig.peer()
    await rig.wait(1_000)
    (check,) = heir.checks
    await heir.answer_check(check, COMMIT)

    assert check.offset == half.offset
    assert rig.bodies() == [b"row 1"]


@windowed(check_max=CHECK_MAX)
async def test_w13_what_cannot_be_parked_stays_undecided(rig: Rig) -> None:
    """Without a durable parked copy it is not parked, neither now nor after a kill."""
    producer = await rig.peer()
    decided, parked = await producer.prepare("K1", b"decided"), await producer.prepare("K2")
    with rig.refusing(TRANS_CHECK_MAX_TIME_TOPIC):
        await rig.wait(UNTIL_PARKED_MS)
        assert rig.metrics["pending_parked"] == 0
        assert rig.service.metrics()["pending"] == 2
        assert (await producer.end(decided, COMMIT)).code == ResponseCode.SUCCESS
        await rig.kill()
    producer = await rig.peer()
    await rig.wait(2 * UNTIL_PARKED_MS)

    (copy,) = rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC)
    assert copy.prepared_transaction_offset == parked.offset
    assert rig.metrics["pending_parked"] == 1
    assert rig.bodies() == [b"decided"]


@windowed(check_max=CHECK_MAX)
async def test_w14_the_answer_to_the_last_check_still_counts(rig: Rig) -> None:
    """Nothing is parked before the time for the last answer is over."""
    producer = await rig.peer()
    await producer.prepare("K1")
    await rig.wait_for(lambda: len(producer.checks) == CHECK_MAX)
    await rig.wait(INTERVAL_MS // 2)
    assert rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []

    await producer.answer_check(producer.checks[-1], COMMIT)
    await rig.wait(UNTIL_PARKED_MS)

    assert rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC) == []
    assert rig.bodies() == [b"row 1"]


async def _resume(rig: Rig, producer: Peer, half: Half) -> int:
    (copy,) = rig.records_of(TRANS_CHECK_MAX_TIME_TOPIC)
    copy_id = offset_message_id(copy.store_host, copy.physical_offset)
    header = ResumeCheckHalfMessageRequestHeader(topic=TRANS_CHECK_MAX_TIME_TOPIC, msg_id=copy_id)
    return (await producer.call(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)).code


@windowed(check_max=CHECK_MAX)
async def test_w14_a_late_commit_of_a_parked_transaction_is_delivered_once(rig: Rig) -> None:
    """After the late decision it is not parked any more, and resuming it does nothing."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.wait(UNTIL_PARKED_MS)
    assert rig.metrics["pending_parked"] == 1
    await rig.kill()
    producer = await rig.peer()

    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.metrics["pending_parked"] == 0
    assert await _resume(rig, producer, half) != ResponseCode.SUCCESS
    await rig.wait(UNTIL_PARKED_MS)

    assert producer.checks == []
    assert rig.bodies() == [b"row 1"]


@windowed(check_max=CHECK_MAX)
async def test_w14_resuming_twice_is_asking_about_one_transaction(rig: Rig) -> None:
    """RESUME_CHECK_HALF_MESSAGE makes no copy: two of them still lead to one message."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await rig.wait(UNTIL_PARKED_MS)
    before = len(producer.checks)

    for _ in range(2):
        assert await _resume(rig, producer, half) == ResponseCode.SUCCESS
    await rig.wait(2_000)
    assert producer.asked[before:] == [half.offset]
    await producer.answer_check(producer.checks[-1], COMMIT)
    await rig.wait(UNTIL_PARKED_MS)

    assert len(producer.checks) == before + 1
    assert rig.bodies() == [b"row 1"]


@pytest.mark.parametrize("ack", [None, 1])
@windowed()
async def test_w22_a_check_that_nobody_took_goes_to_the_next_member(
    rig: Rig, ack: int | None
) -> None:
    """After three seconds without acknowledgement, or a refusal; only the last one counts."""
    deaf, well = await rig.peer(ours=True), await rig.peer(ours=True)
    deaf.acknowledge = lambda _check: ack
    half = await deaf.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100, step_ms=50)
    assert deaf.asked == [half.offset]
    await rig.wait(4_000 if ack is None else 100, step_ms=50)

    (check,) = well.checks
    assert check.offset == half.offset
    assert rig.metrics["checks_delivered"] == 1
    await well.answer_check(check, COMMIT)
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w22_a_check_lost_with_its_connection_goes_to_the_next_member(rig: Rig) -> None:
    """A check in flight to a producer that dies does not count."""
    dying, well = await rig.peer(ours=True), await rig.peer(ours=True)
    dying.acknowledge = lambda _check: None
    half = await dying.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100, step_ms=50)
    assert dying.asked == [half.offset]

    await rig.lose(dying)
    await rig.wait(200, step_ms=50)

    assert well.asked == [half.offset]


@windowed(check_max=CHECK_MAX)
async def test_w22_checks_that_nobody_takes_never_park(rig: Rig) -> None:
    """Only acknowledged checks count towards transactionCheckMax."""
    deaf = await rig.peer(ours=True)
    deaf.acknowledge = lambda _check: 1
    await deaf.prepare("K1")
    await rig.wait(2 * UNTIL_PARKED_MS)

    assert len(deaf.checks) > CHECK_MAX
    assert rig.metrics["pending_parked"] == 0


@windowed()
async def test_w23_a_check_under_way_is_not_repeated(rig: Rig) -> None:
    """While one member has three seconds to acknowledge, no other gets the check."""
    slow, other = await rig.peer(ours=True), await rig.peer(ours=True)
    slow.acknowledge = lambda _check: None
    half = await slow.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100, step_ms=50)

    await rig.wait(2_500, step_ms=50)

    assert slow.asked == [half.offset]
    assert other.asked == []


@windowed()
async def test_w24_the_connection_that_prepared_is_asked_first(rig: Rig) -> None:
    """If unrelated services share a group name, only the one that prepared gets the check."""
    peers = [await rig.peer() for _ in range(4)]
    owners = peers[::-1]  # so that going round the group would meet others
    halves = [await owner.prepare(f"K{number}") for number, owner in enumerate(owners)]
    await rig.wait(TIMEOUT_MS + 100)

    assert [owner.asked for owner in owners] == [[half.offset] for half in halves]


@windowed()
async def test_w24_a_member_that_does_not_know_decides_nothing(rig: Rig) -> None:
    """After an UNKNOWN the next member of the group gets the check."""
    owner, stranger, heir = [await rig.peer() for _ in range(3)]
    half = await owner.prepare("K1")
    await rig.lose(owner)
    await rig.wait_for(lambda: bool(stranger.checks or heir.checks))
    if stranger.checks:
        await stranger.answer_check(stranger.checks[0], UNKNOWN)
    await rig.wait_for(lambda: bool(heir.checks))
    await heir.answer_check(heir.checks[0], COMMIT)

    assert heir.asked == [half.offset]
    assert rig.bodies() == [b"row 1"]


@pytest.mark.parametrize("immunity", ["", "60"])
@windowed()
async def test_w30_a_producers_clock_plays_no_part(rig: Rig, immunity: str) -> None:
    """Ahead, right or behind: checks are due at the same moment, and commits are accepted."""
    producer = await rig.peer()
    properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": immunity} if immunity else {}
    halves = [
        await producer.prepare(f"K{skew}", b"%d" % skew, born_ms=START_MS + skew, **properties)
        for skew in (-4 * DAY_MS, -DAY_MS, 0, DAY_MS)
    ]
    first_check_ms = 60_000 if immunity else TIMEOUT_MS
    await rig.wait(first_check_ms - 100, step_ms=500)
    assert producer.checks == []

    await rig.wait(200, step_ms=50)

    assert producer.asked == [half.offset for half in halves]
    for half in halves:
        assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [half.body for half in halves]


@pytest.mark.parametrize("immunity", ["0", "60"])  # 0: the default
@pytest.mark.parametrize("end", ["stop", "kill", "none"])
@windowed()
async def test_w30_a_broker_whose_clock_was_ahead_asks_in_time(
    rig: Rig, end: str, immunity: str
) -> None:
    """Its store timestamps do not advance for ten days; the first check does not wait for that."""
    wait_ms = int(immunity) * 1_000 or TIMEOUT_MS
    rig.clock_ahead_ms = 10 * DAY_MS
    producer = await rig.peer()
    old = await producer.prepare("K1", CHECK_IMMUNITY_TIME_IN_SECONDS=immunity)
    rig.clock_ahead_ms = 0
    if end == "kill":
        await rig.kill()
    elif end == "stop":
        await rig.restart()
    producer = producer if end == "none" else await rig.peer()
    new = await producer.prepare("K2", CHECK_IMMUNITY_TIME_IN_SECONDS=immunity)
    await rig.wait(wait_ms - 100, step_ms=500)
    assert producer.checks == []

    await rig.wait(200, step_ms=50)

    assert sorted(producer.asked) == [old.offset, new.offset]


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -900, 900, 10 * DAY_MS])
@windowed()
async def test_w30_a_step_of_the_brokers_clock_moves_no_check(rig: Rig, step_ms: int) -> None:
    """Neither early nor late, whether the half was stored before or after the step."""
    producer = await rig.peer()
    before = await producer.prepare("K1")
    await rig.wait(3_000, step_ms=500)
    rig.clock_ahead_ms = step_ms
    after = await producer.prepare("K2")
    await rig.wait(2_900, step_ms=100)
    assert producer.asked == []
    await rig.wait(200, step_ms=50)
    assert producer.asked == [before.offset]
    await rig.wait(2_800, step_ms=100)
    assert producer.asked == [before.offset]

    await rig.wait(200, step_ms=50)

    assert producer.asked == [before.offset, after.offset]
