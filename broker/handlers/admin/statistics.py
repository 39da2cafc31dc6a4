"""Statistics of the last minute, hour and day (315).

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#ViewBrokerStatsData`.
"""

from __future__ import annotations

from halfmq.remoting.admin_bodies import BrokerStatsItem, encode_stats_data
from halfmq.remoting.admin_headers import ViewBrokerStatsDataRequestHeader
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...ports import Connection, Handler
from ...tables.message_statistics import Statistics


class StatisticsHandlers:
    """Serves rates and counts."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {RequestCode.VIEW_BROKER_STATS_DATA: self.view}

    def view(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the counts and rates of one topic, group or broker."""
        header = request.header
        assert isinstance(header, ViewBrokerStatsDataRequestHeader)
        found = self._statistics.find(header.stats_name, header.stats_key)
        if found is None:
            raise RequestRefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"The stats <{header.stats_name}> <{header.stats_key}> not exist",
            )
        minute, hour, day = (
            BrokerStatsItem(sum=one.total, tps=one.per_second, avgpt=one.average) for one in found
        )
        return encode_reply(request, body=encode_stats_data(minute, hour, day))
