"""The brokers of a cluster, as all calls of ``Admin`` reach them."""

from __future__ import annotations

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header

from ..errors import ConfigurationError, UnsupportedRequestError
from ..net.base_client import BaseClient
from ..net.session import Session
from ..net.topic_requests import TopicRequests


class ClusterClient(BaseClient):
    """A client that sends requests to each broker of a cluster."""

    def _brokers(self) -> list[tuple[str, str]]:
        """Return name and address of each broker, by name."""
        return sorted(self._session.routes.brokers.items())

    def _topic_requests(self) -> list[TopicRequests]:
        return [TopicRequests(self._session, address) for _name, address in self._brokers()]


def check_address(address: str) -> None:
    """Raise ConfigurationError unless this is ``host:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError("address", address, "host:port of a broker")


async def call_broker(
    session: Session,
    address: str,
    code: RequestCode,
    header: Header | None = None,
    body: bytes = b"",
) -> RemotingCommand:
    """Send a request to a broker and return its answer, which may be a refusal.

    Raises:
        UnsupportedRequestError: It does not serve such requests.
        ClientError: It does not answer.
    """
    answer = await session.call(address, code, header, body)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise UnsupportedRequestError(address, code)
    return answer
