"""Register this broker with external name servers, for teams that run some (`namesrvAddr`).

halfmq answers route requests itself; this service only adds the broker to the routes of other name
servers. It sends a full registration every 30 s and soon after a topic has changed, as RocketMQ
does; an unreachable name server is retried each time and does not affect the broker.

Source: `BrokerOuterAPI#registerBrokerAll`, `RegisterBrokerBody`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import BrokerIdentityRequestHeader, RegisterBrokerRequestHeader
from halfmq.remoting.replies import encode_request
from halfmq.remoting.signature import Signer, signed_fields
from halfmq.store.format.crc import crc32

from ..access.config import Credentials
from ..tables.topics import TopicTable

logger = logging.getLogger(__name__)

REGISTER_S: Final = 30.0
"""Seconds between two registrations; name servers remove a broker after 120 s."""

CHANGE_SCAN_S: Final = 1.0
"""Seconds after which a new topic is registered at the latest."""

ANSWER_S: Final = 6.0
"""Seconds for a name server to connect and answer, RocketMQ's `registerBrokerTimeoutMills` / 4."""

MASTER_ID: Final = 0


Sign = Callable[[Mapping[str, str], bytes], Mapping[str, str]]
"""Returns the ext fields of a request with this body as they are sent."""


def _signing(credentials: Credentials | None) -> Sign:
    if credentials is None:
        return lambda fields, _body: fields
    signer = Signer(credentials.secret)
    return lambda fields, body: signed_fields(fields, body, credentials.name, signer)


class _NameServerLink(asyncio.Protocol):
    """One connection to a name server, which unregisters the broker when it is closed."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign
        self._decoder = FrameDecoder(responses_first=True)
        self._answers: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._opaque = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            commands = self._decoder.receive_data(data)
        except ProtocolError:
            self.close()
            return
        for command in commands:
            answer = self._answers.pop(command.opaque, None)
            if answer is not None and not answer.done():
                answer.set_result(command)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(exc or ConnectionResetError("closed by the name server"))
        self._answers.clear()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    async def ask(
        self,
        code: int,
        header: RegisterBrokerRequestHeader | BrokerIdentityRequestHeader,
        body: bytes = b"",
    ) -> RemotingCommand:
        if self.transport is None:
            raise ConnectionResetError("not connected")
        self._opaque += 1
        answer: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        self._answers[self._opaque] = answer
        fields = self._sign(texts_of(header) or {}, body)
        self.transport.write(encode_request(code, opaque=self._opaque, header=fields, body=body))
        return await answer


class NameServerRegistration:
    """Keeps this broker registered with every name server of `addresses`."""

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        topics: TopicTable,
        *,
        broker_name: str,
        cluster_name: str,
        port: Callable[[], int],
        now_ms: Callable[[], int],
        credentials: Credentials | None = None,
    ) -> None:
        self._sign = _signing(credentials)
        self._links: dict[tuple[str, int], _NameServerLink | None] = dict.fromkeys(addresses)
        self._topics = topics
        self._broker_name, self._cluster_name = broker_name, cluster_name
        self._port = port
        self._now_ms = now_ms
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start registering; return before the first registration is answered."""
        if self._links:
            self._task = asyncio.create_task(self._keep_registered())

    async def stop(self) -> None:
        """Unregister from every name server."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(self._leave(address) for address in self._links))

    async def _keep_registered(self) -> None:
        while True:
            version = self._topics.version
            await asyncio.gather(*(self._register(address) for address in self._links))
            waited = 0.0
            while waited < REGISTER_S and self._topics.version == version:
                await asyncio.sleep(CHANGE_SCAN_S)
                waited += CHANGE_SCAN_S

    async def _register(self, address: tuple[str, int]) -> None:
        body = self._body()
        try:
            async with asyncio.timeout(ANSWER_S):
                link = await self._connected(address)
                header = RegisterBrokerRequestHeader(
                    broker_name=self._broker_name,
                    broker_addr=self._own_address(link),
                    cluster_name=self._cluster_name,
                    ha_server_addr=self._own_address(link),
                    broker_id=MASTER_ID,
                    body_crc32=crc32(body) & 0x7FFFFFFF,
                )
                answer = await link.ask(RequestCode.REGISTER_BROKER, header, body)
        except (OSError, TimeoutError) as error:
            logger.warning("event=registration_failed namesrv=%s:%d error=%r", *address, error)
            return
        if answer.code != 0:
            logger.warning(
                "event=registration_refused namesrv=%s:%d code=%d remark=%r",
                *address,
                answer.code,
                answer.remark,
            )

    async def _leave(self, address: tuple[str, int]) -> None:
        link = self._links[address]
        if link is None or link.transport is None:
            return
        header = BrokerIdentityRequestHeader(
            broker_name=self._broker_name,
            broker_addr=self._own_address(link),
            cluster_name=self._cluster_name,
            broker_id=MASTER_ID,
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                await link.ask(RequestCode.UNREGISTER_BROKER, header)
        except (OSError, TimeoutError) as error:
            logger.warning("event=unregistration_failed namesrv=%s:%d error=%r", *address, error)
        link.close()

    async def _connected(self, address: tuple[str, int]) -> _NameServerLink:
        link = self._links[address]
        if link is None or link.transport is None:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(lambda: _NameServerLink(self._sign), *address)
            self._links[address] = link
            logger.info("event=name_server_connected namesrv=%s:%d", *address)
        return link

    def _own_address(self, link: _NameServerLink) -> str:
        """Return the local address of the connection to the name server, which clients use too."""
        assert link.transport is not None
        host = link.transport.get_extra_info("sockname")[0]
        return f"{host}:{self._port()}"

    def _body(self) -> bytes:
        version = {
            "counter": self._topics.version,
            "stateVersion": 0,
            "timestamp": self._now_ms(),
        }
        table = {topic.name: topic.to_json() for topic in self._topics}
        wrapper = {"dataVersion": version, "topicConfigTable": table}
        content = {"filterServerList": [], "topicConfigSerializeWrapper": wrapper}
        return json.dumps(content, separators=(",", ":")).encode()
