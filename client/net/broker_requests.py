"""Requests about one broker as a whole, as RocketMQ defines them: settings and statistics."""

from __future__ import annotations

from typing import NamedTuple

from halfmq.remoting.admin_bodies import BrokerStatsItem, decode_stats_data
from halfmq.remoting.admin_headers import ViewBrokerStatsDataRequestHeader
from halfmq.remoting.codes import RequestCode, ResponseCode

from ..errors import BadAnswerError, BrokerRefusedError
from .response_errors import answer_of
from .session import RequestFamily


class BrokerSetting(NamedTuple):
    """A setting of a broker."""

    value: str
    change: str | None
    """``live`` or ``restart``: when a change takes effect; None: a broker of Apache RocketMQ."""
    source: str | None
    """``default``, ``--set`` or a file, with the line that a start has read; None likewise."""


class BrokerRequests(RequestFamily):
    """Reads and changes the settings of a broker, and reads its statistics."""

    async def settings(self) -> dict[str, BrokerSetting]:
        body = await self._request(RequestCode.GET_BROKER_CONFIG, None)
        try:
            lines = body.decode().splitlines()
        except UnicodeDecodeError as error:
            raise BadAnswerError(self._address, str(error)) from error
        pairs = dict(line.split("=", 1) for line in lines if "=" in line)
        found = {}
        for key, value in pairs.items():
            if not key.startswith("#"):
                change, _, source = pairs.get(f"#{key}", "").partition(" ")
                found[key] = BrokerSetting(value, change or None, source or None)
        return found

    async def change_setting(self, key: str, value: str) -> None:
        body = f"{key}={value}\n".encode()
        await self._request(RequestCode.UPDATE_BROKER_CONFIG, None, body)

    async def counted(self, name: str, key: str) -> dict[str, BrokerStatsItem] | None:
        """Return statistics by period, such as ``statsMinute``; None if nothing is counted.

        Brokers answer an unknown key with an error that has no code of its own.
        """
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        try:
            body = await self._request(RequestCode.VIEW_BROKER_STATS_DATA, header)
        except BrokerRefusedError as error:
            if error.code == ResponseCode.SYSTEM_ERROR and error.remark.endswith("not exist"):
                return None
            raise
        with answer_of(self._address):
            return decode_stats_data(body)
