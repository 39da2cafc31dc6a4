"""The brokers of a cluster, as all calls of ``Admin`` reach them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.store.format.ids import parse_offset_message_id, unpack_host

from ..config import join_address
from ..errors import ConfigurationError, ConnectError, UnsupportedRequestError
from ..net.base_client import BaseClient
from ..net.response_errors import answer_of, error_from_response, expect_success
from ..net.session import Session

T = TypeVar("T")


class ClusterClient(BaseClient):
    """A client that sends requests to each broker of a cluster."""

    def _brokers(self) -> list[tuple[str, str]]:
        """Return name and address of each broker, by name."""
        return sorted(self._session.routes.brokers.items())

    async def _send(
        self, address: str, code: RequestCode, header: Header | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Send a request to a broker and return its answer.

        Raises:
            ClientError: It does not answer, or refuses.
        """
        return expect_success(await call_broker(self._session, address, code, header, body))

    async def _send_each(
        self, code: RequestCode, header: Header | None = None, body: bytes = b""
    ) -> None:
        """Send a request to each broker.

        Raises:
            ClientError: A broker does not answer, or refuses; those before it have done it.
        """
        for _name, address in self._brokers():
            await self._send(address, code, header, body)

    async def _ask(
        self, address: str, decode: Callable[[bytes], T], code: RequestCode, header: Header | None
    ) -> T:
        """Send a request to a broker and return the content of its answer."""
        answer = await self._send(address, code, header)
        with answer_of(address):
            return decode(answer.body)

    async def _ask_each(
        self,
        decode: Callable[[bytes], T],
        code: RequestCode,
        header: Header | None = None,
        *,
        absent: ResponseCode | None = None,
    ) -> dict[str, T]:
        """Return the contents of the brokers' answers by name, without those that say ``absent``.

        Raises:
            BrokerRefusedError: A broker refuses, or all say ``absent``.
            ClientError: A broker does not answer.
        """
        found: dict[str, T] = {}
        refused: RemotingCommand | None = None
        for name, address in self._brokers():
            answer = await call_broker(self._session, address, code, header)
            if answer.code == absent:
                refused = answer
                continue
            with answer_of(address):
                found[name] = decode(expect_success(answer).body)
        if refused is not None and not found:
            raise error_from_response(refused)
        return found

    def _address_of(self, broker_name: str) -> str:
        address = self._session.routes.address_of(broker_name)
        if address is None:
            raise ConnectError(broker_name, "no name server knows this broker")
        return address

    def _address_in(self, offset_id: str) -> str | None:
        """Return the address of the broker in an offset id; None if it is not a known broker's."""
        try:
            host, port = unpack_host(parse_offset_message_id(offset_id).store_host)
        except ValueError:
            return None
        address = join_address(host, port)
        return address if address in self._session.routes.addresses else None


async def call_broker(
    session: Session,
    address: str,
    code: RequestCode,
    header: Header | None = None,
    body: bytes = b"",
    *,
    seconds: float | None = None,
) -> RemotingCommand:
    """Send a request to a broker and return its answer, which may be a refusal.

    Raises:
        UnsupportedRequestError: It does not serve such requests.
        ClientError: It does not answer.
    """
    answer = await session.call(address, code, header, body, seconds=seconds)
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
