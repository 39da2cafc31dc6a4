"""Messages that wait for their delivery, healthy and at fault, in both dialects.

As ``planted_faults``, of which this is a part: each function plants one thing, and notes what an
audit must find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .log_writer import SCHEDULE, Apache, Ours, Written
from .oracle.records import TIMER
from .oracle.words import Kind, State
from .planted_log import Planted, plain

Fault = Callable[[Planted, Apache], None]


class Waiting(NamedTuple):
    """A message that waits, and where it is to go."""

    record: Written
    topic: str
    queue: int
    due: int  # ms


def put(planted: Planted, dialect: Apache, *, way: int | None = None) -> Waiting:
    """Have a message wait a second or some: by a level, by a time, or for a consumer's retry."""
    log, key = planted.log, dialect.key()
    way = planted.next() % 3 if way is None else way
    properties = {"UNIQ_KEY": key, "KEYS": "late", "REAL_TOPIC": "orders", "REAL_QID": "2"}
    if way == 1:
        due = log.now + 1_500
        properties |= {"TIMER_DELIVER_MS": str(due), "TIMER_OUT_MS": str((due - 1) // 1000 * 1000)}
        record = log.append(TIMER, b"later", properties)
        return Waiting(record, "orders", 2, due)
    level, topic, retries = (1, "orders", 0) if way == 0 else (3, "%RETRY%cg", 1)
    if way == 2:
        properties |= {"REAL_TOPIC": topic, "REAL_QID": "0", "RETRY_TOPIC": "orders"}
    properties["DELAY"] = str(level)
    record = log.append(SCHEDULE, b"later", properties, queue_id=level - 1, reconsume_times=retries)
    return Waiting(record, topic, int(properties["REAL_QID"]), log.now + [1_000, 0, 10_000][way])


def deliver(planted: Planted, dialect: Apache, one: Waiting, **changed: object) -> Written:
    """Append what consumers get; ``changed`` are fields that are not as they should be."""
    wait = one.record
    number = 0 if wait.topic == TIMER else wait.queue_id + 1
    fields = {
        "queue_id": one.queue,
        "reconsume_times": int(one.topic != "orders"),
        "born": wait.born,
        "prepared": -1 - (number << 40 | wait.queue_offset) if isinstance(dialect, Ours) else 0,
        **changed,
    }
    topic, body = fields.pop("topic", one.topic), fields.pop("body", wait.body)
    assert isinstance(topic, str)
    assert isinstance(body, bytes)
    return planted.log.append(topic, body, wait.properties, **fields)  # type: ignore[arg-type]


def _wait_for(planted: Planted, one: Waiting) -> None:
    planted.log.now = max(planted.log.now, one.due)


def delivered_in_time(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect)
    _wait_for(planted, one)
    deliver(planted, dialect, one)


def delivered_after_a_stop(planted: Planted, dialect: Apache) -> None:
    """The broker was down when it was due, and for more than a minute."""
    one = put(planted, dialect)
    planted.log.now += 80_000
    deliver(planted, dialect, one)


def sent_twice_and_delayed(planted: Planted, dialect: Apache) -> None:
    """Its producer did not get the answer: both are delivered. They wait in one segment."""
    while planted.log.end % planted.log.segment_size > planted.log.segment_size - 2_000:
        plain(planted, dialect)
    one = put(planted, dialect, way=0)
    again = planted.log.append(
        SCHEDULE, one.record.body, one.record.properties, born=one.record.born
    )
    _wait_for(planted, one)
    for wait in (one, one._replace(record=again._replace(born=one.record.born))):
        planted.log.now = max(planted.log.now, one.due + 2)
        deliver(planted, dialect, wait)


def recalled(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect, way=1)
    properties = {**one.record.properties, "TAGS": "_RECALL_TAG_"}
    properties["TIMER_DEL_UNIQKEY"] = properties["UNIQ_KEY"]
    planted.log.append(TIMER, b"0", properties)


def early(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect, way=2)
    arrival = deliver(planted, dialect, one)
    planted.wrong(Kind.EARLY_DELIVERY, one.record.offset, arrival.offset)


def late(planted: Planted, dialect: Apache) -> None:
    """More than a minute, in which the broker was at work."""
    one = put(planted, dialect)
    _busy(planted, dialect, 80)
    arrival = deliver(planted, dialect, one)
    planted.wrong(Kind.LATE_DELIVERY, one.record.offset, arrival.offset)


def never(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect, way=planted.random.randrange(2))
    planted.wrong(Kind.OVERDUE_DELIVERY, one.record.offset)


def twice(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect)
    _wait_for(planted, one)
    arrivals = [deliver(planted, dialect, one) for _ in range(2)]
    planted.wrong(Kind.DELIVERED_TWICE, *(arrival.offset for arrival in arrivals))


def changed(planted: Planted, dialect: Apache) -> None:
    one = put(planted, dialect)
    _wait_for(planted, one)
    ways: list[tuple[str, object]] = [("body", b"other"), ("flag", 3)]
    ways += [("queue_id", 3)] if one.topic == "orders" else []
    name, value = planted.random.choice(ways)
    arrival = deliver(planted, dialect, one, **{name: value})
    planted.wrong(Kind.ALTERED_DELIVERY, one.record.offset, arrival.offset)


def elsewhere(planted: Planted, dialect: Apache) -> None:
    """In another topic: halfmq's record says what it delivers."""
    one = put(planted, dialect)
    _wait_for(planted, one)
    arrival = deliver(planted, dialect, one, topic="plain2", queue_id=1)
    planted.wrong(Kind.ALTERED_DELIVERY, one.record.offset, arrival.offset)


def commit_delivered_early(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    wait = dialect.wait(half, planted.log.now + 60_000)
    arrival = dialect.arrive(half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.EARLY_DELIVERY, wait.offset, arrival.offset)


def commit_delivered_late(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    wait = dialect.wait(half, planted.log.now + 1_000)
    _busy(planted, dialect, 80)
    arrival = dialect.arrive(half)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.LATE_DELIVERY, wait.offset, arrival.offset)


def commit_delivered_elsewhere(planted: Planted, dialect: Apache) -> None:
    assert isinstance(dialect, Ours)
    half = dialect.half(dialect.key())
    dialect.wait(half, planted.log.now + 5)
    properties = {**half.properties, "REAL_QID": "5"}
    arrival = dialect.arrive(half._replace(properties=properties))
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.ALTERED_FINAL, half.offset, arrival.offset)


def commit_by_level_never_delivered(planted: Planted, dialect: Apache) -> None:
    """It says no time of delivery; its level does."""
    half = dialect.half(dialect.key())
    final = dialect.commit_at_level(half, 1)
    planted.decide(half, State.COMMITTED)
    planted.wrong(Kind.OVERDUE_DELIVERY, half.offset, final.offset)


def _busy(planted: Planted, dialect: Apache, seconds: int) -> None:
    for _ in range(seconds // 8):
        planted.log.now += 8_000
        plain(planted, dialect)


HEALTHY_DELAYS: list[Fault] = [
    delivered_in_time,
    delivered_in_time,
    delivered_after_a_stop,
    sent_twice_and_delayed,
    recalled,
]
DELAYS_OF_BOTH: list[Fault] = [
    *(early, late, never, twice, changed),
    commit_by_level_never_delivered,
]
DELAYS_OF_OURS: list[Fault] = [
    elsewhere,
    commit_delivered_early,
    commit_delivered_late,
    commit_delivered_elsewhere,
]
