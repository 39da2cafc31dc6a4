"""The name-server port of several brokers on one machine: all accept on one socket.

A broker that has just started lacks the routes of the others until they register with it again,
within a second. Until then it leaves the port to them: routes without the others' queues would take
these away from consumers.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from attrs import define

from ..loop.services import Service
from ..tables.registered_brokers import BrokerTable

COMPLETE_S: Final = 3.0
"""Seconds for which it waits for the others: one that is down must not keep clients from the
rest."""

POLL_S: Final = 0.02
"""Seconds between two looks whether they have registered."""


@define(eq=False, repr=False)
class SharedPort(Service):
    """Begins to accept when all brokers that share the port have registered here."""

    _socket: socket.socket
    _accept: Callable[[socket.socket], Awaitable[object]]
    _brokers: BrokerTable
    _others: Iterable[str]

    async def start(self) -> None:
        """Return when this broker accepts on the port."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + COMPLETE_S
        while loop.time() < deadline:
            if all(map(self._brokers.get, self._others)):
                break
            await asyncio.sleep(POLL_S)
        await self._accept(self._socket)
