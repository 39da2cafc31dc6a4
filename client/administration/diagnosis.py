"""What is wrong with a cluster, seen from a client: each finding with its remedy."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import AccessDeniedError, UnsupportedRequestError
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
        late = 0
        for name in await self.group_names():
            group, lag = connected.get(name), await self.lag(name)
            if group is not None and group.unequal_topics:
                text = (
                    f"its members subscribe to {', '.join(group.unequal_topics)} in different ways"
                )
                remedy = (
                    "give all members the same filters: meanwhile messages are lost to the group"
                )
                yield Diagnosis("problem", f"group {name}", text, remedy, "/groups")
            if lag.messages and group is None:
                text = f"{lag.messages} messages wait, and no consumer is connected"
                remedy = f"start a consumer, or delete the group: halfmq group delete {name}"
                yield Diagnosis("warning", f"group {name}", text, remedy, "/groups")
            elif lag.seconds > LAG_S_MAX:
                text = f"lags {lag.messages} messages, {lag.seconds:.0f} s"
                yield Diagnosis(
                    "warning",
                    f"group {name}",
                    text,
                    "add consumers, or make handlers faster",
                    "/groups",
                )
            else:
                continue
            late += 1
        if not late:
            yield Diagnosis("ok", "groups", "none lags")
        for name, count in (await self.dead_letter_groups()).items():
            remedy = f"halfmq dlq list {name} counts the causes"
            yield Diagnosis(
                "warning", f"group {name}", f"has {count} dead letters", remedy, "/dead-letters"
            )

    async def _stuck(self) -> AsyncGenerator[Diagnosis, None]:
        parked = alone = old = 0
        async for one in self.transactions(limit=TRANSACTIONS_MAX):
            parked += one.parked_reason is not None
            alone += one.producers == 0
            old += one.age > UNDECIDED_S_MAX
        for count, text, remedy in (
            (
                parked,
                "wait for an operator",
                "halfmq tx list --state parked, then commit or rollback",
            ),
            (alone, "have no producer to ask", "start a producer of their group: halfmq tx list"),
            (
                old,
                "are undecided for minutes",
                "look at the checker of their group: halfmq tx list",
            ),
        ):
            if count:
                yield Diagnosis(
                    "warning", "transactions", f"{count} {text}", remedy, "/transactions"
                )
        if not parked and not alone and not old:
            yield Diagnosis("ok", "transactions", "none is stuck")


def _reached(status: BrokerStatus) -> Diagnosis:
    subject = f"broker {status.name} at {status.address}"
    if status.error is None:
        return Diagnosis("ok", subject, f"answers after {status.seconds * 1000:.0f} ms")
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
        found.append(Diagnosis("warning", subject, text, remedy))
    used = int(status.metrics.get("halfmq.disk.used_percent", 0))
    if int(status.metrics.get("halfmq.disk.is_full", 0)):
        text = f"refuses messages: {used} % of its disk are in use"
        remedy = "free space, or lower fileReservedTime"
        found.append(Diagnosis("problem", subject, text, remedy, "/brokers"))
    elif used >= DISK_PERCENT:
        remedy = "free space before it refuses messages (diskSpaceWarningLevelRatio)"
        found.append(Diagnosis("warning", subject, f"{used} % of its disk are in use", remedy))
    return found
