"""What became of messages that wait for their delivery, record by record."""

from __future__ import annotations

from collections import defaultdict

from .log import MAY_DIFFER, Audit, Log
from .records import BITS, SCHEDULE, TIMER, Raw
from .words import Kind

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
LEVELS = [
    *(n * SECOND for n in (1, 5, 10, 30)),
    *(n * MINUTE for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(n * HOUR for n in (1, 2)),
]


def due(one: Raw) -> int:
    """When a waiting record is to be delivered, ms; 0 if it does not say."""
    properties = one.properties
    for name in ("TIMER_OUT_MS", "TRANSACTION_DELIVER_MS"):
        if name in properties:
            return int(properties[name])
    if "TRANSACTION_DELAY_MS" in properties:
        return one.time + int(properties["TRANSACTION_DELAY_MS"])
    return one.time + LEVELS[one.queue] if one.topic == SCHEDULE else 0


def is_overdue(log: Log, wait: Raw) -> bool:
    since = due(wait)
    worked = log.worked_ms(since, log.last.time) if since else 0
    return worked > 5 * SECOND and not log.hides(wait.offset)


def mistimed(told: Audit, log: Log, wait: Raw, arrival: Raw) -> None:
    """Compare the time of a delivery with that for which the message waited."""
    since = due(wait)
    if since and arrival.time < since - SECOND:
        told.add(Kind.EARLY_DELIVERY, wait.offset, arrival.offset)
    elif since and log.worked_ms(since, arrival.time) > MINUTE:
        told.add(Kind.LATE_DELIVERY, wait.offset, arrival.offset)


def plain_delays(told: Audit, log: Log) -> None:
    """Judge the delays of messages that are not, or no more, about a transaction."""
    known: dict[tuple[str, int], list[Raw]] = defaultdict(list)
    for one in log.records:
        if "UNIQ_KEY" in one.properties and (_waits(one) or _arrives(one)):
            known[one.properties["UNIQ_KEY"], one.head[-1]].append(one)
    for records in known.values():
        _judge(told, log, records)


def _is_of_transaction(one: Raw) -> bool:
    marked = one.properties.get("TRAN_MSG") == "true" or "TRANSACTION_HALF_ID" in one.properties
    to = one.properties["REAL_TOPIC"] if one.topic in (SCHEDULE, TIMER) else one.topic
    return marked and not to.startswith(("%RETRY%", "%DLQ%"))


def _waits(one: Raw) -> bool:
    return one.topic in (SCHEDULE, TIMER) and not _is_of_transaction(one)


def _arrives(one: Raw) -> bool:
    if one.topic in (SCHEDULE, TIMER) or one.topic.startswith("RMQ_SYS_"):
        return False
    has_waited = "TIMER_OUT_MS" in one.properties or one.properties.get("DELAY", "0") != "0"
    is_here = one.properties.get("REAL_TOPIC") == one.topic
    return not _is_of_transaction(one) and (one.link < 0 or (has_waited and is_here))


def _judge(told: Audit, log: Log, records: list[Raw]) -> None:
    waits = [one for one in records if one.topic in (SCHEDULE, TIMER)]
    if any("TIMER_DEL_UNIQKEY" in one.properties for one in waits):
        return
    arrivals = [one for one in records if one not in waits]
    left = list(waits)
    extra: list[Raw] = []
    for arrival in arrivals:
        fits = [one for one in left if arrival.link >= 0 or _link_to(one) == arrival.link]
        if not fits:
            extra.append(arrival)
            continue
        wait = fits[0]
        left.remove(wait)
        mistimed(told, log, wait, arrival)
        if wait.sound and arrival.sound and _differs(wait, arrival):
            told.add(Kind.ALTERED_DELIVERY, wait.offset, arrival.offset)
    if extra and waits:
        told.add(Kind.DELIVERED_TWICE, *(one.offset for one in arrivals))
    for wait in left:
        if not arrivals and is_overdue(log, wait):
            told.add(Kind.OVERDUE_DELIVERY, wait.offset)


def _link_to(wait: Raw) -> int:
    number = 0 if wait.topic == TIMER else wait.queue + 1
    return -1 - (number << 40 | wait.place)


def _differs(wait: Raw, arrival: Raw) -> bool:
    kept, come = (
        {name: value for name, value in one.properties.items() if name not in MAY_DIFFER}
        for one in (wait, arrival)
    )
    target = wait.properties["REAL_TOPIC"], int(wait.properties["REAL_QID"])
    return (
        target != (arrival.topic, arrival.queue)
        or kept != come
        or (wait.body, wait.crc, wait.head) != (arrival.body, arrival.crc, arrival.head)
        or wait.sys_flag & ~BITS != arrival.sys_flag & ~BITS
    )
