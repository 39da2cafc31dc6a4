"""Brokers as a whole: their settings, metrics, and how many messages pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from halfmq.remoting.admin_bodies import BrokerStatsItem, decode_producers, decode_stats_data
from halfmq.remoting.admin_headers import (
    DrainBrokerRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from halfmq.remoting.bodies import decode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.errors import ProtocolError

from ..arguments import check_optional_text, check_text
from ..errors import BrokerRefusedError, ClientError, ConfigurationError
from .brokers import ClusterClient

DRAIN_S: Final = 35.0
"""Producers look at routes every 30 s."""
GONE_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Messages of a period."""

    messages: int
    per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How many messages were stored in a topic, or delivered to a group."""

    minute: Counted
    """The last minute; at most ten seconds old, as are the others."""
    hour: Counted
    day: Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """Whether a broker answers at the address that the name server has of it."""

    name: str
    address: str
    seconds: float
    """Until its answer came."""
    metrics: Mapping[str, str]
    """As of ``Admin.metrics``; empty if it does not answer."""
    error: ClientError | None
    """Why it does not answer; None if it does."""

    @property
    def clock(self) -> float | None:
        """Its clock in seconds since 1970, up to a second too low; None: not known."""
        uptime = [int(number) for number in re.findall(r"\d+", self.metrics.get("runtime", ""))]
        if len(uptime) != 4:
            return None
        days, hours, minutes, seconds = uptime
        passed = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        return int(self.metrics.get("bootTimestamp", 0)) / 1000 + passed


class BrokerSetting(NamedTuple):
    """A setting of a broker."""

    value: str
    change: str | None
    """``live`` or ``restart``: when a change takes effect; None: a broker of Apache RocketMQ."""
    source: str | None
    """``default``, ``--set`` or a file, with the line that a start has read; None likewise."""


class ConnectedProducer(NamedTuple):
    """A connection of a producer."""

    group: str
    client_id: str
    address: str
    broker_name: str


class BrokerCalls(ClusterClient):
    """Shows and changes brokers."""

    async def metrics(self) -> dict[str, dict[str, str]]:
        """Return the metrics of each broker, by broker name: RocketMQ's keys and halfmq's."""
        return await self._ask_each(decode_table, RequestCode.GET_BROKER_RUNTIME_INFO)

    async def broker_statuses(self) -> list[BrokerStatus]:
        """Return for each broker whether it answers, by name; an error is part of the result."""
        found = []
        for name, address in self._brokers():
            error: ClientError | None = None
            metrics: dict[str, str] = {}
            begun = self._session.clock()
            try:
                code = RequestCode.GET_BROKER_RUNTIME_INFO
                metrics = await self._ask(address, decode_table, code, None)
            except ClientError as problem:
                error = problem
            seconds = self._session.clock() - begun
            found.append(
                BrokerStatus(
                    name=name, address=address, seconds=seconds, metrics=metrics, error=error
                )
            )
        return found

    async def producers(self) -> list[ConnectedProducer]:
        """Return the connected producers by broker, group and client id."""
        found = []
        tables = await self._ask_each(decode_producers, RequestCode.GET_ALL_PRODUCER_INFO)
        for name, groups in tables.items():
            found += sorted(
                ConnectedProducer(
                    group,
                    str(one.get("clientId")),
                    str(one.get("remoteIP")).removeprefix("/"),
                    name,
                )
                for group, clients in groups.items()
                for one in clients
            )
        return found

    async def settings(self) -> dict[str, dict[str, str]]:
        """Return the settings of each broker, by broker name; secrets are hidden."""
        return {
            name: {key: one.value for key, one in table.items()}
            for name, table in (await self.described_settings()).items()
        }

    async def described_settings(self) -> dict[str, dict[str, BrokerSetting]]:
        """Return the settings of each broker with their sources, and when a change takes effect."""
        return await self._ask_each(_settings, RequestCode.GET_BROKER_CONFIG)

    async def change_setting(self, key: str, value: str) -> None:
        """Change a setting of every broker while it runs, and in its configuration file.

        Raises:
            BrokerRefusedError: The setting takes effect at a start only, the value is wrong, or the
                broker has no file; says which. The brokers before it, by name, have changed.
        """
        check_text("key", key)
        check_text("value", value)
        await self._send_each(RequestCode.UPDATE_BROKER_CONFIG, None, f"{key}={value}\n".encode())

    async def drain(self, broker_name: str, *, wait: float = DRAIN_S) -> None:
        """Stop a broker so that no send fails while others have its topics; return when it is gone.

        Its routes lose the permission to write; after ``wait`` seconds, in which producers look at
        the routes again, it refuses messages, and stops. Undecided transactions stay.

        Raises:
            ConfigurationError: There is no such broker.
            UnsupportedRequestError: It is a broker of Apache RocketMQ.
            ClientError: It does not answer, or refuses.
        """
        addresses = dict(self._brokers())
        address = addresses.get(broker_name)
        if address is None:
            raise ConfigurationError("broker_name", broker_name, f"one of {sorted(addresses)}")
        header = DrainBrokerRequestHeader(wait_millis=int(wait * 1_000))
        await self._send(address, RequestCode.DRAIN_BROKER, header)
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            while True:
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                await asyncio.sleep(GONE_POLL_S)

    async def traffic(self, topic: str, group: str | None = None) -> Traffic:
        """Return how many messages all brokers stored in a topic lately.

        With ``group``, how many of them were delivered to that consumer group. An unknown topic or
        group has none.
        """
        check_text("topic", topic)
        check_optional_text("group", group)
        name, key = "TOPIC_PUT_NUMS", topic
        if group is not None:
            name, key = "GROUP_GET_NUMS", f"{topic}@{group}"
        each = [await self._counted(address, name, key) for _, address in self._brokers()]

        def total(period: str) -> Counted:
            items = [counted[period] for counted in each if period in counted]
            return Counted(
                messages=sum(item.sum for item in items), per_second=sum(item.tps for item in items)
            )

        return Traffic(minute=total("statsMinute"), hour=total("statsHour"), day=total("statsDay"))

    async def _counted(self, address: str, name: str, key: str) -> dict[str, BrokerStatsItem]:
        """Return a broker's statistics by period, such as ``statsMinute``."""
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        code = RequestCode.VIEW_BROKER_STATS_DATA
        try:
            return await self._ask(address, decode_stats_data, code, header)
        except BrokerRefusedError as error:
            # An unknown key is an error that has no code of its own.
            if error.code == ResponseCode.SYSTEM_ERROR and error.remark.endswith("not exist"):
                return {}
            raise


def _settings(body: bytes) -> dict[str, BrokerSetting]:
    try:
        lines = body.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ProtocolError(str(error)) from error
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    found = {}
    for key, value in pairs.items():
        if not key.startswith("#"):
            change, _, source = pairs.get(f"#{key}", "").partition(" ")
            found[key] = BrokerSetting(value, change or None, source or None)
    return found
