"""The brokers of a cluster, as all calls of ``Admin`` reach them."""

from __future__ import annotations

from datetime import UTC, datetime

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.store.format.ids import parse_offset_message_id, unpack_host

from ..config import join_address
from ..errors import ConfigurationError, UnsupportedRequestError
from ..net.base_client import BaseClient
from ..net.broker_requests import TopicRequests
from ..net.response_errors import error_from_response
from ..net.session import Session, expect_success


class ClusterClient(BaseClient):
    """A client that sends requests to each broker of a cluster."""

    def _brokers(self) -> list[tuple[str, str]]:
        """Return name and address of each broker, by name."""
        return sorted(self._session.routes.brokers.items())

    async def _ask_each(
        self, code: RequestCode, header: Header, *, absent: ResponseCode | None = None
    ) -> list[tuple[str, RemotingCommand]]:
        """Return the answers of the brokers by address; those that say ``absent`` are left out.

        Raises:
            BrokerRefusedError: A broker refuses, or all say ``absent``.
            ClientError: A broker does not answer.
        """
        answers: list[tuple[str, RemotingCommand]] = []
        refused: RemotingCommand | None = None
        for _name, address in self._brokers():
            answer = await call_broker(self._session, address, code, header)
            if answer.code == absent:
                refused = answer
            else:
                answers.append((address, expect_success(answer)))
        if refused is not None and not answers:
            raise error_from_response(refused)
        return answers

    def _address_in(self, offset_id: str) -> str | None:
        """Return the address of the broker in an offset id; None if it is not a known broker's."""
        try:
            host, port = unpack_host(parse_offset_message_id(offset_id).store_host)
        except ValueError:
            return None
        address = join_address(host, port)
        return address if address in self._session.routes.addresses else None

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
    *,
    seconds: float | None = None,
) -> RemotingCommand:
    """Send a request to a broker and return its answer, which may be a refusal.

    Raises:
        UnsupportedRequestError: It does not serve such requests.
        ClientError: It does not answer.
    """
    answer = await session.call(address, code, header, seconds=seconds)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise UnsupportedRequestError(address, code)
    return answer


def time_of(time_ms: int) -> datetime | None:
    """Return a time of the wire, in milliseconds; None for 0 or less, which means none."""
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms > 0 else None


def milliseconds(name: str, time: object) -> int:
    """Return a time for the wire; raise ConfigurationError unless it is one with a time zone."""
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise ConfigurationError(name, time, "a datetime with a time zone")
    return int(time.timestamp() * 1000)
