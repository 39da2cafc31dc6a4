"""What the broker counts: runtime info (28), and the last minute, hour and day of a topic (315).

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#getBrokerRuntimeInfo`, `#ViewBrokerStatsData`.
"""

from collections.abc import Callable, Mapping

from attrs import define

from halfmq.remoting.admin_bodies import BrokerStatsItem, encode_stats_data
from halfmq.remoting.admin_headers import ViewBrokerStatsDataRequestHeader
from halfmq.remoting.bodies import encode_table
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...limits.long_answers import complete
from ...ports import Connection, Handlers, serves
from ...tables.message_statistics import Statistics


@define(eq=False, repr=False)
class StatisticsHandlers(Handlers):
    """Serves metrics, rates and counts."""

    _statistics: Statistics
    _runtime_info: Callable[[], Mapping[str, str]]  # the values of ``broker/runtime_info.py``

    @serves(RequestCode.GET_BROKER_RUNTIME_INFO)
    def runtime_info(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the runtime info; all values are text."""
        complete(request, connection, self._statistics.count_new)
        return encode_reply(request, body=encode_table(self._runtime_info()))

    @serves(RequestCode.VIEW_BROKER_STATS_DATA)
    def view(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the counts and rates of one topic, group or broker."""
        header = request.header_as(ViewBrokerStatsDataRequestHeader)
        complete(request, connection, self._statistics.count_new)
        found = self._statistics.find(header.stats_name, header.stats_key)
        if found is None:
            raise RequestRefusedError(
                f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            )
        minute, hour, day = (
            BrokerStatsItem(sum=one.total, tps=one.per_second, avgpt=one.average) for one in found
        )
        return encode_reply(request, body=encode_stats_data(minute, hour, day))
