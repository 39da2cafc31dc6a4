"""What every producer and consumer stands on: identity, routes, connections and heartbeats.

A session is known to brokers by its client id and by what it announces in heartbeats: producer
groups, or a consumer group with its subscriptions. A broker binds these to the connection on which
the heartbeat came, and sends its own requests there (transaction checks, changes in a group). So a
heartbeat is the first thing on every new connection, one goes to every known broker each
``heartbeat_interval``, and a connection that breaks is opened again at once, not when it is next
needed: a transaction producer that has nothing to send must still be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from halfmq.remoting.bodies import HeartbeatData, encode_heartbeat
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import H, Header
from halfmq.remoting.headers import (
    HeartbeatRequestHeader,
    UnregisterClientRequestHeader,
    response_header,
)
from halfmq.store.format.ids import UniqueKeyFactory, pack_host
from halfmq.store.format.topics import DEFAULT_TOPIC

from ..config import ClientConfig
from ..errors import (
    AccessDeniedError,
    BadAnswerError,
    ClientError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    code_name,
)
from .connection import Connection, ConnectionPool, ServerRequestHandler
from .name_servers import NameServers
from .refusals import refusal
from .retry import may_try_again
from .routes import Route, RouteTable
from .security import Security

logger = logging.getLogger(__name__)

FAREWELL_SECONDS: Final = 1.0
"""How long closing waits for a broker to take note; it finds out by the closed socket anyway."""

_session_numbers: Final = itertools.count()


def wall_clock_ms() -> int:
    """Milliseconds since 1970, as messages carry them."""
    return time.time_ns() // 1_000_000


class Session:
    """One client as the brokers see it."""

    def __init__(
        self,
        config: ClientConfig,
        announce: Callable[[str], HeartbeatData],
        handlers: Mapping[int, ServerRequestHandler],
        farewell: Mapping[str, str],
        heard: Callable[[str, RemotingCommand], None] | None = None,
    ) -> None:
        """Prepare; nothing is connected before ``start``.

        ``announce`` makes the heartbeat for a client id; ``farewell`` names the group to leave, by
        the attributes of ``UnregisterClientRequestHeader``; ``heard`` gets each broker's address
        and answer to a heartbeat.
        """
        self._heard = heard
        self.config = config
        self.client_id = ""
        # Kept, because to ask for the running loop costs a system call up to Python 3.11.
        self.clock = asyncio.get_running_loop().time
        self._announce = announce
        self._farewell = farewell
        self._lost = asyncio.Event()
        self._security = Security(config)
        self._servers = NameServers(config, self._security)
        self.brokers = ConnectionPool(
            config,
            handlers,
            greet=self._greet,
            on_lost=lambda _address: self._lost.set(),
            security=self._security,
        )
        first_turn = random.SystemRandom().randrange(1 << 16)
        self.routes = RouteTable(config, self._servers, self.brokers, first_turn)
        self._keeper: asyncio.Task[None] | None = None
        self._unreachable: set[str] = set()
        self._denied: dict[str, AccessDeniedError] = {}  # by broker, how it refused the heartbeat
        self._keys: UniqueKeyFactory | None = None

    async def start(self, *, whole_cluster: bool = False, topics: tuple[str, ...] = ()) -> None:
        """Reach a name server and announce this client to every broker it tells of.

        Raises:
            ConnectError: No name server could be reached within ``send_timeout``.
            AccessDeniedError: A name server or a broker does not accept who signed.
            ClientError: None answers as it should.
        """
        await self._security.start()
        deadline = self.clock() + self.config.send_timeout
        await self._patiently(partial(self.routes.fetch, DEFAULT_TOPIC), deadline)
        address = self._servers.local_address or "127.0.0.1"
        instance = self.config.instance_name or f"{os.getpid()}#{next(_session_numbers)}"
        self.client_id = f"{address}@{instance}"
        self._keys = UniqueKeyFactory(
            pack_host(address, 0)[:-4],
            process_id=os.getpid(),
            token=os.urandom(4),
            now_ms=wall_clock_ms,
        )
        if whole_cluster:
            await self.routes.learn_cluster()
        for topic in topics:
            await self._patiently(partial(self.routes.existing, topic), deadline)
        await self._reach(self.routes.addresses)
        for error in self._denied.values():
            raise error
        self._keeper = asyncio.create_task(self._keep_in_touch(), name=f"keep {self.client_id}")

    async def _patiently(self, ask: Callable[[], Awaitable[object]], deadline: float) -> None:
        """Ask until there is an answer: who is asked may be restarting, or start with us."""
        failures: list[ClientError] = []
        while True:
            try:
                await ask()
            except ClientError as error:
                failures.append(error)
            else:
                return
            if not await may_try_again(failures, self.config, self.clock, deadline):
                raise failures[-1]
            logger.info("event=name_server_again reason=%s", failures[-1])

    async def route(self, topic: str, deadline: float, failures: Sequence[ClientError]) -> Route:
        """A route to send by, asked for until ``deadline`` by the session's clock.

        Raises:
            ConnectError: No name server has answered by then: nothing was sent. If there were
                ``failures`` before, the last of them, which tells more.
            ClientError: As :meth:`RouteTable.for_sending`.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await self.routes.for_sending(topic)
        except (ConnectionLostError, RequestTimeoutError) as error:
            raise ConnectError(error.address, f"no route of {topic}: {error}") from error
        except TimeoutError as error:
            if failures:
                raise failures[-1] from None
            address = self._servers.address
            raise ConnectError(address, f"no route of {topic} in time") from error

    async def close(self) -> None:
        """Take leave of the brokers and close all connections; cancelled, close them at once."""
        self._security.close()
        try:
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait([self._keeper])
            await asyncio.gather(*(self._leave(address) for address in self.routes.addresses))
            self.routes.close()
            await self.brokers.close()
            await self._servers.close()
        except BaseException:  # nobody can close them later
            self.routes.close()
            self.brokers.abort()
            self._servers.abort()
            raise

    def new_key(self) -> str:
        """An id no other message has."""
        assert self._keys is not None
        return self._keys.create()

    async def heartbeat(self, address: str) -> None:
        """Announce this client to one broker now.

        Raises:
            ClientError: It cannot be reached.
        """
        connection = await self.brokers.get(address, self.config.connect_timeout)
        await self._greet(connection)

    async def call(
        self,
        address: str,
        code: int,
        header: Header | None,
        body: bytes = b"",
        *,
        seconds: float | None = None,
    ) -> RemotingCommand:
        """Ask a broker and return its answer, whatever code it carries.

        Raises:
            ConnectError, ConnectionLostError, RequestTimeoutError: There is no answer.
        """
        seconds = self.config.request_timeout if seconds is None else seconds
        connection = self.brokers.live(address) or await self.brokers.get(address, seconds)
        return await connection.request(code, header, body, seconds=seconds)

    async def _greet(self, connection: Connection) -> None:
        answer = await connection.request(
            RequestCode.HEART_BEAT,
            HeartbeatRequestHeader(),
            encode_heartbeat(self._announce(self.client_id)),
            seconds=self.config.request_timeout,
        )
        if self._heard is not None:
            self._heard(connection.address, answer)
        self._denied.pop(connection.address, None)
        if answer.code != ResponseCode.SUCCESS:
            error = refusal(answer)
            if isinstance(error, AccessDeniedError):
                self._denied[connection.address] = error
            logger.warning(
                "event=heartbeat_refused broker=%s code=%s remark=%s",
                connection.address,
                code_name(answer.code),
                answer.remark,
            )

    async def _keep_in_touch(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self.config.heartbeat_interval
        while True:
            self._lost.clear()
            if loop.time() >= due:
                await self.routes.refresh()
                await self._reach(self.routes.addresses)
                due = loop.time() + self.config.heartbeat_interval
            missing = {a for a in self.routes.addresses if self.brokers.live(a) is None}
            if missing:
                await self._reach(missing)  # the pool spaces the attempts
                await asyncio.sleep(self.config.reconnect_delay_min)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._lost.wait()

    async def _reach(self, addresses: set[str]) -> None:
        """Heartbeat to each; who cannot be reached is logged once and tried again later."""
        await asyncio.gather(*(self._reach_one(address) for address in addresses))

    async def _reach_one(self, address: str) -> None:
        try:
            if self.brokers.live(address) is None:
                await self.brokers.get(address, 2 * self.config.connect_timeout)  # greets
            else:
                await self.heartbeat(address)
        except ClientError as error:
            level = logging.DEBUG if address in self._unreachable else logging.WARNING
            logger.log(level, "event=broker_not_reached address=%s reason=%s", address, error)
            self._unreachable.add(address)
        else:
            if address in self._unreachable:
                logger.info("event=broker_reached_again address=%s", address)
                self._unreachable.discard(address)

    async def _leave(self, address: str) -> None:
        connection = self.brokers.live(address)
        if connection is None:
            return
        header = UnregisterClientRequestHeader(client_id=self.client_id, **self._farewell)
        try:
            await connection.request(
                RequestCode.UNREGISTER_CLIENT, header, seconds=FAREWELL_SECONDS
            )
        except ClientError as error:
            logger.debug("event=no_farewell address=%s reason=%s", address, error)


def expect_success(answer: RemotingCommand) -> RemotingCommand:
    """The answer if its code is 0.

    Raises:
        BrokerRefusedError: It is not.
    """
    if answer.code != ResponseCode.SUCCESS:
        raise refusal(answer)
    return answer


def typed(answer: RemotingCommand, kind: type[H], address: str) -> H:
    """The fields of an answer.

    Raises:
        BadAnswerError: They are not what the protocol promises.
    """
    try:
        return response_header(answer, kind)
    except ProtocolError as error:
        raise BadAnswerError(address, str(error)) from error
