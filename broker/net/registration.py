"""Register this broker with other name servers (`namesrvAddr`): RocketMQ's, or halfmq brokers.

halfmq answers route requests itself; this service only adds the broker to the routes of others. It
sends a full registration every 30 s and soon after a topic has changed, as RocketMQ does; an
unreachable name server is tried again each second and does not affect the broker. Brokers that each
name all of them in `namesrvAddr` all answer with the same routes.

Source: RocketMQ `BrokerOuterAPI#registerBrokerAll`, `RegisterBrokerBody`.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, Protocol, cast

from attrs import define, field

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import (
    RECOGNITION_FIELD,
    BrokerIdentityRequestHeader,
    RegisterBrokerRequestHeader,
)
from halfmq.remoting.registration_bodies import DataVersion, encode_registration
from halfmq.remoting.replies import encode_request
from halfmq.remoting.signature import Signer, signed_fields
from halfmq.store.format.crc import crc32

from ..access.config import KeyPair
from ..config import TopicDefaults
from ..tables.topic_config import PERM_WRITE
from ..tables.topic_table import TopicTable
from .connection import address_text

logger = logging.getLogger(__name__)

REGISTER_S: Final = 30.0
"""Seconds between two registrations; name servers remove a broker after 120 s."""

SCAN_S: Final = 1.0
"""Seconds between two checks whether a topic has changed or the connection is lost; in both cases
the broker registers again. It does so at once for a created topic, so that clients find it on all
brokers, but for a pause of ``PAUSE_S_PER_TOPIC`` after the previous registration."""

PAUSE_S_PER_TOPIC: Final = 0.000_1
"""Ten times as long as a registration takes: one contains all topics, and each takes 10 us."""

ANSWER_S: Final = 6.0
"""Seconds to connect to a name server and get its answer: a quarter of RocketMQ's
`registerBrokerTimeoutMills`."""

Sign = Callable[[Mapping[str, str], bytes], Mapping[str, str]]
"""`(ext fields, body)` of a request → the ext fields to send, perhaps with a signature."""


def _signing(credentials: KeyPair | None) -> Sign:
    if credentials is None:
        return lambda fields, _body: fields
    signer = Signer(credentials.secret)
    return lambda fields, body: signed_fields(fields, body, credentials.name, signer)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Return host and port of each address in `namesrvAddr`, separated by ``;`` or ``,``."""
    parts = text.replace(",", ";").split(";") if text else []
    split = (part.rpartition(":") for part in parts)
    return [(host.strip("[]"), int(port)) for host, _, port in split]


class Guard(Protocol):
    """Tells whether this master is replaced; see ``MasterGuard``."""

    async def replaced_by(
        self, ask: Callable[..., Awaitable[RemotingCommand]], own_address: str
    ) -> str: ...


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
        header: Header,
        body: bytes = b"",
    ) -> RemotingCommand:
        if self.transport is None:
            raise ConnectionResetError("not connected")
        self._opaque += 1
        answer: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        self._answers[self._opaque] = answer
        fields: Mapping[str, str] = {**(texts_of(header) or {}), RECOGNITION_FIELD: "1"}
        if code == RequestCode.REGISTER_BROKER:
            fields = self._sign(fields, body)
        self.transport.write(encode_request(code, opaque=self._opaque, header=fields, body=body))
        return await answer


@define(eq=False, repr=False, slots=False)
class NameServerRegistration:
    """Keeps this broker registered with name servers."""

    _addresses: Iterable[tuple[str, int]]
    _topics: TopicTable
    _identity: TopicDefaults
    # Empty: each name server gets the local address of the connection to it.
    _advertised_host: str = field(kw_only=True)
    _port: Callable[[], int] = field(kw_only=True)
    _ha_port: Callable[[], int] = field(kw_only=True)
    # Looks before each registration whether this master is replaced.
    _guard: Guard | None = field(kw_only=True, default=None)
    _now_ms: Callable[[], int] = field(kw_only=True)
    # They sign registrations and nothing else: a signature that can be read on its way serves for
    # no other request.
    _credentials: KeyPair | None = field(kw_only=True, default=None)
    _tls: ssl.SSLContext | None = field(kw_only=True, default=None)

    def __attrs_post_init__(self) -> None:
        self._signs = self._credentials is not None
        self._sign = _signing(self._credentials)
        self._links: dict[tuple[str, int], _NameServerLink | None] = dict.fromkeys(self._addresses)
        self._created = {address: asyncio.Event() for address in self._links}
        self._topics.on_created(self._topic_created)
        self._changed_ms = self._now_ms()
        self._is_writable = True
        self._tasks: list[asyncio.Task[None]] = []

    def withdraw(self) -> None:
        """Register all topics without the permission to write."""
        self._is_writable, self._changed_ms = False, self._now_ms()

    async def start(self) -> None:
        """Start registering; return before the first registration is answered."""
        self._tasks = [
            asyncio.create_task(self._keep_registered(address)) for address in self._links
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._unregister(address) for address in self._links))

    async def _keep_registered(self, address: tuple[str, int]) -> None:
        failure = ""  # of the latest registration
        while True:
            version = self._topics.version, self._changed_ms
            previous, failure = failure, await self._register(address)
            if failure and failure != previous:
                logger.warning(
                    "event=registration_failed namesrv=%s:%d error=%r", *address, failure
                )
            await asyncio.sleep(min(PAUSE_S_PER_TOPIC * len(self._topics), SCAN_S))
            waited, created = 0.0, self._created[address]
            while waited < REGISTER_S and (self._topics.version, self._changed_ms) == version:
                created.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(created.wait(), SCAN_S)
                waited += SCAN_S
                link = self._links[address]
                if link is None or link.transport is None:
                    break  # a name server forgets a broker whose connection is lost

    def _topic_created(self, _name: str) -> None:
        for created in self._created.values():
            created.set()

    async def _register(self, address: tuple[str, int]) -> str:
        """Register once; return why the name server did not accept it, empty if it did."""
        body = self._body()
        try:
            async with asyncio.timeout(ANSWER_S):
                link = await self._connected(address)
                own_address = self._own_address(link, self._port())
                if self._guard is not None and (
                    other := await self._guard.replaced_by(link.ask, own_address)
                ):
                    return f"{other} is the master now"
                header = RegisterBrokerRequestHeader(
                    broker_name=self._identity.broker_name,
                    broker_addr=own_address,
                    cluster_name=self._identity.cluster_name,
                    ha_server_addr=self._own_address(link, self._ha_port()),
                    broker_id=self._identity.broker_id,
                    body_crc32=crc32(body) & 0x7FFFFFFF,
                )
                answer = await link.ask(RequestCode.REGISTER_BROKER, header, body)
        except TimeoutError:
            return f"no answer within {ANSWER_S:.0f} s"
        except OSError as error:
            return str(error)
        return f"code {answer.code}: {answer.remark}" if answer.code else ""

    async def _unregister(self, address: tuple[str, int]) -> None:
        link = self._links[address]
        if link is None or link.transport is None:
            return
        if self._signs:  # a name server forgets a broker whose connection is closed
            link.close()
            return
        header = BrokerIdentityRequestHeader(
            broker_name=self._identity.broker_name,
            broker_addr=self._own_address(link, self._port()),
            cluster_name=self._identity.cluster_name,
            broker_id=self._identity.broker_id,
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
            _, link = await loop.create_connection(
                lambda: _NameServerLink(self._sign), *address, ssl=self._tls
            )
            self._links[address] = link
            logger.info("event=name_server_connected namesrv=%s:%d", *address)
        return link

    def _own_address(self, link: _NameServerLink, port: int) -> str:
        """Return `brokerIP1`, or the local address of the connection to the name server."""
        assert link.transport is not None
        host = self._advertised_host or link.transport.get_extra_info("sockname")[0]
        return address_text(host, port)

    def _body(self) -> bytes:
        # The timestamp stays the same, so that only the topics change the version.
        version = DataVersion(
            counter=self._topics.version,
            state_version=self._topics.data_version["stateVersion"],
            timestamp=self._changed_ms,
        )
        perms = -1 if self._is_writable else ~PERM_WRITE
        topics = ((one.name, {**one.to_json(), "perm": one.perm & perms}) for one in self._topics)
        return encode_registration(topics, version)
