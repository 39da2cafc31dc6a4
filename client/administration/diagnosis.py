"""What is wrong with a cluster, seen from a client: each finding with its remedy."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlencode

from halfmq.store.format.topics import dead_letter_topic

from ..errors import AccessDeniedError, UnsupportedRequestError
from .dead_letters import DeadLetter
from .progress import ProgressCalls
from .settings import BrokerCalls, BrokerStatus
from .transactions import TransactionCalls

CLOCK_S_MAX: Final = 2.0
"""Seconds between the clocks of this machine and a broker that are worth a word; a second of it is
the precision of what brokers tell."""
DISK_PERCENT: Final = 75
"""Part of a disk in use from which on it is scarce; the default of diskMaxUsedSpaceRatio."""
LAG_S_MAX: Final = 300.0
UNDECIDED_S_MAX: Final = 300.0
TRANSACTIONS_MAX: Final = 1_000
"""Undecided transactions that are looked at, the oldest."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a check found."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    remedy: str = ""
    page: str = ""
    """Path of the console's page about it."""


class DiagnosisCalls(ProgressCalls, TransactionCalls, BrokerCalls):
    """Finds what is wrong."""

    async def diagnose(self) -> AsyncGenerator[Diagnosis, None]:
        """Check brokers, clocks, disks, groups, dead letters and transactions.

        Raises:
            ClientError: A broker refuses, or is lost meanwhile.
        """
        for status in await self.broker_statuses():
            yield _reached(status)
            if status.error is None:
                for finding in _clock_delays_and_disk(status):
                    yield finding
        for part in (self._lagging, self._stuck):
            try:
                async for finding in part():
                    yield finding
            except UnsupportedRequestError:
                pass  # a broker of Apache RocketMQ
            except AccessDeniedError as error:
                yield _denied("permissions", error)

    async def _lagging(self) -> AsyncGenerator[Diagnosis, None]:
        connected = await self.connected_groups()
        late, slowest = 0, (0.0, "")
        for name in await self.group_names():
            group, lag = connected.get(name), await self.lag(name)
            if group is not None and group.unequal_topics:
                text = (
                    f"its members subscribe to {', '.join(group.unequal_topics)} in different ways"
                )
                remedy = (
                    "give all members the same filters: meanwhile messages are lost to the group"
                )
                yield Diagnosis("problem", f"group {name}", text, remedy, _page("/groups", q=name))
            lag_text = f"lags {lag.messages} messages, {lag.seconds:.0f} s"
            if lag.messages and group is None:
                text = f"{lag_text}: no consumer is connected"
                remedy = f"start a consumer, or delete the group: halfmq group delete {name}"
            elif lag.seconds > LAG_S_MAX:
                text, remedy = lag_text, "add consumers, or make handlers faster"
            else:
                slowest = max(slowest, (lag.seconds, f"{name} {lag_text}"))
                continue
            late += 1
            yield Diagnosis("warning", f"group {name}", text, remedy, _page("/groups", q=name))
        seconds, most = slowest
        if seconds or not late:
            text = f"{most}; the others less" if seconds else "none lags"
            yield Diagnosis("ok", "groups", text, page=_page("/groups", sort="-Lag in s"))
        for name, count in (await self.dead_letter_groups()).items():
            found = [one async for one in self.browse(dead_letter_topic(name), latest=1)]
            last = max(found, key=lambda one: one.store_timestamp)
            cause = DeadLetter(last.record, last.queue.broker_name, name).cause
            text = f"has {count} dead letters, the last one: {cause}"
            remedy = f"halfmq dlq list {name} counts the causes"
            page = _page("/dead-letters", q=name)
            yield Diagnosis("warning", f"group {name}", text, remedy, page)

    async def _stuck(self) -> AsyncGenerator[Diagnosis, None]:
        parked = alone = old = count = 0
        oldest_s = 0.0
        async for one in self.transactions(limit=TRANSACTIONS_MAX):
            count, oldest_s = count + 1, max(oldest_s, one.age)
            parked += one.parked_reason is not None
            alone += one.producers == 0
            old += one.age > UNDECIDED_S_MAX
        for stuck, text, remedy, page in (
            (
                parked,
                "wait for an operator",
                "halfmq tx list --state parked, then commit or rollback",
                _page("/transactions", q="parked"),
            ),
            (
                alone,
                "have no producer to ask",
                "start a producer of their group: halfmq tx list",
                _page("/transactions", sort="Producers"),
            ),
            (
                old,
                "are undecided for minutes",
                "look at the checker of their group: halfmq tx list",
                _page("/transactions", sort="-Age in s"),
            ),
        ):
            if stuck:
                yield Diagnosis("warning", "transactions", f"{stuck} {text}", remedy, page)
        number = f"{count}{' or more' * (count == TRANSACTIONS_MAX)}"
        undecided = f"{number} undecided, the oldest for {oldest_s:.0f} s"
        if not parked and not alone and not old:
            undecided = f"none is stuck: {undecided}" if count else "none is undecided"
        yield Diagnosis("ok", "transactions", undecided, page="/transactions")


def _page(path: str, **query: str) -> str:
    return f"{path}?{urlencode(query)}"


def _reached(status: BrokerStatus) -> Diagnosis:
    subject = f"broker {status.name} at {status.address}"
    if status.error is None:
        answers = f"answers after {status.seconds * 1000:.0f} ms"
        reason = status.metrics.get("halfmq.refuses_messages")  # of halfmq brokers only
        if reason:
            text, remedy = f"refuses messages: {reason}", "free space, or lower fileReservedTime"
            return Diagnosis("problem", subject, text, remedy, "/brokers")
        takes = "" if reason is None else "takes messages, "
        return Diagnosis("ok", subject, takes + answers, page="/brokers")
    if isinstance(status.error, AccessDeniedError):
        return _denied(subject, status.error)
    remedy = (
        "the name server sends clients to this address: if it is not the broker's, set brokerIP1 "
        "there; otherwise start the broker, or open the port"
    )
    return Diagnosis("problem", subject, str(status.error), remedy, "/brokers")


def _denied(subject: str, error: AccessDeniedError) -> Diagnosis:
    remedy = "sign as a user that may: --credentials FILE, or halfmq acl create for this one"
    return Diagnosis("problem", subject, str(error), remedy, "/access")


def _clock_delays_and_disk(status: BrokerStatus) -> list[Diagnosis]:
    found = []
    subject = f"broker {status.name}"
    if status.clock is not None:
        ahead_s = status.clock - time.time()
        if abs(ahead_s) > CLOCK_S_MAX + status.seconds:
            text = f"its clock is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'slow'}"
            found.append(Diagnosis("warning", subject, text, "synchronise the clocks (NTP)"))
    put_off = int(status.metrics.get("halfmq.delays.put_off", 0))
    if put_off:
        text = f"{put_off} messages are due and cannot be delivered yet"
        remedy = (
            "its log says why (destination_lacking, delayed_message_put_off): create their topic, "
            "or delete topics that nobody uses"
        )
        found.append(Diagnosis("warning", subject, text, remedy, "/delayed"))
    used = int(status.metrics.get("halfmq.disk.used_percent", 0))
    if used >= DISK_PERCENT:
        text = f"{used} % of its disk are in use"
        remedy = (
            "free space, or lower fileReservedTime, before it refuses messages "
            "(diskSpaceWarningLevelRatio)"
        )
        page = _page("/brokers", q="halfmq.disk")
        found.append(Diagnosis("warning", subject, text, remedy, page))
    return found
