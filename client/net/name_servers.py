"""Requests to the name servers of a cluster, with failover: the last one that answered is first."""

from __future__ import annotations

from collections.abc import Mapping

from halfmq.remoting.command import RemotingCommand

from ..config import ClientConfig
from ..errors import BadAnswerError, ConnectError, ConnectionLostError, RequestTimeoutError
from .connection_pool import ConnectionPool
from .security import Security

_UNANSWERED = (BadAnswerError, ConnectError, ConnectionLostError, RequestTimeoutError)


class NameServers:
    """Sends a request to one name server after the other until one answers."""

    def __init__(self, config: ClientConfig, security: Security | None = None) -> None:
        self._config = config
        self._addresses = config.namesrv_addresses  # the last one that answered comes first
        self._pool = ConnectionPool(config, {}, security=security)

    @property
    def address(self) -> str:
        """The name server that answered last, or is tried next."""
        return self._addresses[0]

    @property
    def local_address(self) -> str | None:
        """This machine's address as the name server sees it; None while not connected."""
        connection = self._pool.get_open(self.address)
        return None if connection is None else connection.local_address

    async def request(self, code: int, fields: Mapping[str, str] | None = None) -> RemotingCommand:
        """Send a request and return the answer, whatever its code; try each name server once.

        Raises:
            ConnectError: No name server can be reached, or none of several answers.
            ConnectionLostError: The only name server closed the connection.
            RequestTimeoutError: The only name server did not answer in time.
            BadAnswerError: The only name server does not speak RocketMQ's protocol.
        """
        failures: list[
            BadAnswerError | ConnectError | ConnectionLostError | RequestTimeoutError
        ] = []
        for address in list(self._addresses):
            try:
                connection = await self._pool.get(address, self._config.connect_timeout)
                return await connection.request(code, fields, seconds=self._config.request_timeout)
            except _UNANSWERED as error:
                failures.append(error)
                self._move_to_end(address)
        if len(failures) == 1:
            raise failures[0]
        raise ConnectError(
            ";".join(failure.address for failure in failures),
            "; ".join(str(failure) for failure in failures),
        )

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        await self._pool.close()

    def abort(self) -> None:
        """Close the connections at once."""
        self._pool.abort()

    def _move_to_end(self, address: str) -> None:
        if self._addresses[0] == address:
            self._addresses.append(self._addresses.pop(0))
