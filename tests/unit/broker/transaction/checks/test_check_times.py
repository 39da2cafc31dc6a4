"""When checks are due: immunity, pauses, restarts, and steps of the clocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.checks import checker
from halfmq.broker.transaction.checks.timetable import BUCKET_MS
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from tests.support.broker_doubles import START_MS
from tests.support.check_back import DAY_MS, INTERVAL_MS, PAUSES_MS, TIMEOUT_MS
from tests.support.transactions import Broker, Connected


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -900, 900, 10 * DAY_MS])
def test_a_step_of_the_wall_clock_moves_no_check(broker: Broker, step_ms: int) -> None:
    """Neither the first check of a half stored before or after the step, nor a later one."""
    producer = broker.producers.join("pg", Connected())
    before = broker.prepare().physical_offset
    broker.wait(3_000)
    broker.clock.step(step_ms)
    after = broker.prepare().physical_offset
    broker.wait(2_999)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [before]
    (info,) = [one for one in broker.service.view.page(-1, 9).infos if one.offset == after]
    assert 2_900 <= (info.next_check_ms or 0) <= 3_050
    broker.wait(3_000)
    assert producer.checked_offsets == [before, after]

    broker.wait(PAUSES_MS[0] - 3_000 - 1)
    assert len(producer.checks) == 2
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [before, after, before]


def test_op_messages_do_not_wait_for_a_clock_set_back(broker: Broker) -> None:
    """All housekeeping uses the monotonic clock."""
    broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.wait(30_000)
    before = broker.service.metrics()
    broker.clock.step(-3_600_000)
    broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.wait(3_000)
    broker.wait(3_000)
    assert broker.service.metrics()["ops_written"] == before["ops_written"] + 1


def test_checks_wait_for_the_grace_time_after_a_restart(broker: Broker) -> None:
    """Producers need time to reconnect, and some send the decision then; half a second is it."""
    assert checker.RESTART_GRACE_MS + BUCKET_MS <= 500
    half = broker.prepare()
    broker.log.flush()
    broker.clock.now += 3_600_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(checker.RESTART_GRACE_MS - 1)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert producer.checked_offsets == [half.physical_offset]


def test_a_restart_does_not_advance_the_check_of_a_young_half(broker: Broker) -> None:
    """Its age counts from its store timestamp."""
    broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    broker.log.flush()
    broker.clock.now += 20_000
    broker.restart()
    producer = broker.producers.join("pg", Connected())
    broker.wait(39_999)
    assert producer.checks == []
    broker.wait(1 + BUCKET_MS)
    assert len(producer.checks) == 1


def test_pauses_grow_and_have_jitter(tmp_path: Path) -> None:
    """By half each, up to ten minutes, with a tenth of jitter to spread checks due together."""
    seed = 20_240_607
    print(f"seed {seed}")
    broker = Broker(tmp_path, config=TransactionConfig(check_max=100))
    broker.jitter.seed(seed)
    broker.producers.join("pg", Connected())
    entries = [broker.prepare() for _ in range(50)]
    broker.log.flush()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for number in range(1, 100):
        middle_ms = min(INTERVAL_MS * 1.5 ** (number - 1), 600_000)
        waits = []
        for half in entries:
            entry = broker.table.get(half.physical_offset)
            assert entry is not None
            assert entry.checks == number
            waits.append(broker.checker.next_check_in_ms(entry) or 0)
        assert 0.9 * middle_ms - 1 <= min(waits) < max(waits) <= 1.1 * middle_ms + BUCKET_MS
        broker.clock.now += max(waits)
        broker.wait(0)


def test_an_interval_above_ten_minutes_is_not_shortened(tmp_path: Path) -> None:
    """An operator who configures fewer checks gets fewer."""
    config = TransactionConfig(check_interval_ms=3_600_000)
    broker = Broker(tmp_path, config=config)
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for number in (1, 2):
        assert len(producer.checks) == number
        broker.wait(3_240_000 - BUCKET_MS)
        assert len(producer.checks) == number
        broker.wait(720_000 + 2 * BUCKET_MS)


def test_the_time_of_the_next_check_is_known_while_it_is_scheduled(broker: Broker) -> None:
    """It is unknown while the group has no member, and if there will be none."""
    half = broker.prepare(group="pg")
    entry = broker.table.get(half.physical_offset)
    assert entry is not None
    told = broker.checker.next_check_in_ms
    assert told(entry) == TIMEOUT_MS
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert told(entry) is None

    producer = broker.producers.join("pg", Connected())
    broker.service.on_producer("pg", producer)
    broker.wait(0)
    assert INTERVAL_MS <= (told(entry) or 0) < INTERVAL_MS + BUCKET_MS
    for _ in range(3):
        broker.wait(4 * INTERVAL_MS)
    assert told(entry) is None


def test_the_time_for_the_last_answer_begins_again_after_a_restart(broker: Broker) -> None:
    """The broker cannot know when the last check was delivered."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    for _ in range(3):
        broker.wait(3 * INTERVAL_MS - (INTERVAL_MS if producer.checks else 0))
    assert len(producer.checks) == 3
    broker.restart(drained=True)
    entry = next(iter(broker.table))
    assert entry.checks == 3
    broker.wait(INTERVAL_MS - BUCKET_MS)
    assert broker.service.metrics()["pending_parked"] == 0
    broker.wait(checker.RESTART_GRACE_MS + 2 * BUCKET_MS)
    assert broker.service.metrics()["pending_parked"] == 1


LOCAL_SECONDS = (0.05, 0.5, 3, 5, 7, 12, 29, 33, 62, 95, 120)  # none at the time of a check


@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize("immunity_s", [0, 1, 60, 150, 600])
@pytest.mark.parametrize("local_s", LOCAL_SECONDS)
def test_a_local_transaction_of_any_length_is_delivered_once(
    broker: Broker, local_s: float, immunity_s: int, acknowledges: bool
) -> None:
    """With and without immunity; while it runs, the answer to every check is "not known yet".

    The producer commits when it is done, and says so again to every check that still comes: no
    second final message, no check before its time, and none after the decision.
    """
    broker.config = TransactionConfig(check_max=15)
    broker.restart()
    producer = broker.producers.join("pg", Connected(acknowledges=acknowledges))
    half = broker.prepare(producer, CHECK_IMMUNITY_TIME_IN_SECONDS=str(immunity_s or ""))
    step_ms, done_ms, done, answered = 200, round(local_s * 1_000), False, 0
    asked_at: list[int] = []
    while broker.clock.now - START_MS < 160_000:
        broker.wait(step_ms)
        producer.acknowledge()
        now_ms = broker.clock.now - START_MS
        asked_at += [now_ms] * (len(producer.checks) - len(asked_at))
        if now_ms >= done_ms and not done:
            done = True
            broker.end(half, TransactionEvent.COMMIT)
        for _ in producer.checks[answered:]:
            broker.end(half, TransactionEvent.COMMIT if done else TransactionEvent.UNKNOWN)
        answered = len(producer.checks)

    assert len(broker.finals_of(half)) == 1
    due_ms = [immunity_s * 1_000 or TIMEOUT_MS]
    for pause_ms in (30_000, 45_000, 67_500, 101_250):
        due_ms.append(due_ms[-1] + pause_ms)
    expected = [due for due in due_ms if due <= done_ms]
    assert len(asked_at) == len(expected)
    for asked, due in zip(asked_at, expected, strict=True):
        assert due <= asked <= due + 5 * (BUCKET_MS + step_ms)
