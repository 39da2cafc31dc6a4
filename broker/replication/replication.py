"""A second copy of the log: an Apache RocketMQ slave copies it, and answers wait for that copy.

With `minInSyncReplicas=2` the store releases what a slave has confirmed (`MessageStore.confirm`):
replies, what consumers see, and checks of producers all go by that offset. The log is a sequence,
and each release is a prefix of it, so whatever the slave lacks was neither acknowledged nor seen.

**One slave at a time counts.** With several, what one has confirmed the other might lack, and only
one of them may take over.

**Without a slave that keeps up**, messages are refused after `slaveTimeout`. Decisions are stored
and answered when it is back, as are messages sent just before.
"""

import asyncio
import errno
import ipaddress
import logging
from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.store.message_store import MessageStore

from ..access.addresses import address_of, any_of, parse_address_pattern
from ..config import ReplicationConfig, TopicDefaults
from ..disk.send_refusal import SendRefusal
from ..errors import AddressTakenError
from ..limits.kept import SLAVE_CONNECTIONS, Kept
from ..loop.fetches import Fetch
from ..loop.ticker import Ticker
from ..ports import Connection
from .master_guard import MasterGuard
from .slave_link import SlaveLink

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""Seconds between two checks whether the slave keeps up."""

LIFE_S: Final = 5.0
"""Seconds without a piece after which a sign of life is sent. Source: `haSendHeartbeatInterval`."""

SILENCE_S: Final = 20.0
"""Seconds without a report after which a slave is given up. Source: `haHousekeepingInterval`."""

CAUSE: Final = "no_slave"


@define(eq=False, repr=False, slots=False)
class Replication:
    """Listens for a slave, and releases what it has confirmed."""

    _store: MessageStore
    _config: ReplicationConfig
    _refusal: SendRefusal
    _fetch: Fetch
    _release: Callable[[], None]  # writes the replies that are confirmed
    _now_s: Callable[[], float]  # monotonic
    _host: str  # address to bind
    _file_size: int  # bytes of a file of the log
    _epoch: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        text = self._config.slave_addresses
        self._may_copy = parse_address_pattern(text) if text else any_of(())
        self.confirms = self._config.min_in_sync_replicas > 1
        self._links: set[SlaveLink] = set()
        self._slave: SlaveLink | None = None
        self._server: asyncio.Server | None = None
        self.port = self._config.ha_listen_port
        self._ticker = Ticker("slaves", self._tick)
        self._target = 0  # offset that the slave has to confirm to count as keeping up
        self._kept_up_s = 0.0  # when it did so last
        self._is_refusing = False

    async def start(self) -> None:
        """Listen, and from now on release nothing that is not confirmed.

        Raises:
            AddressTakenError: The port cannot be bound.
        """
        if not self._config.slave_addresses:
            return
        if self.confirms:
            self._store.begin_confirmation()
        self._target, self._kept_up_s = self._store.flushed_offset, self._now_s()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._link, self._host, self._config.ha_listen_port, backlog=SLAVE_CONNECTIONS.most
            )
        except OSError as error:
            reason = "the address is in use" if error.errno == errno.EADDRINUSE else str(error)
            address = f"{self._host}:{self._config.ha_listen_port}"
            raise AddressTakenError(address, "haListenPort", reason) from error
        self.port = self._server.sockets[0].getsockname()[1]
        await self._ticker.start()

    async def stop(self) -> None:
        """Close the port and the connections."""
        await self._ticker.stop()
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.close("the master stops")

    def send(self) -> None:
        """Send to the slave what has come to the disk."""
        if self._slave is not None:
            self._slave.send()

    def told_to_slaves(self) -> dict[str, int] | None:
        """Return what `halfmq ha promote` needs to know; None if no slave has to confirm."""
        if not self.confirms:
            return None
        return {"0": self._store.confirmed_offset, "1": self._epoch()}

    def address_for(self, connection: Connection) -> str | None:
        """Return the address from which a peer of clients' port may copy the log; None if none."""
        if not self._may_copy(address_of(connection.remote_host[:-4])):
            return None
        host, _, _ = connection.broker_address.rpartition(":")
        return f"{host}:{self.port}"

    def guard(self, identity: TopicDefaults, end: Callable[[], None]) -> MasterGuard | None:
        """Return the guard of a master that has a slave, or was one."""
        if not self._config.slave_addresses:
            return None
        return MasterGuard(identity, self._epoch, self._refusal, end)

    # --- what links tell

    def _link(self) -> SlaveLink:
        link = SlaveLink(self._store, self._file_size, self, self._fetch, self._now_s)
        self._links.add(link)
        return link

    def connected(self, link: SlaveLink) -> str:
        """Return why a peer is refused that has just connected; empty if it is not."""
        if not self._may_copy(address_of(ipaddress.ip_address(link.host).packed)):
            return "its address is not in slaveAddresses"
        if len(self._links) > SLAVE_CONNECTIONS.most:
            return f"there are {SLAVE_CONNECTIONS.most} connections on haListenPort already"
        return ""

    def accept(self, link: SlaveLink) -> str:
        """Return why a slave is refused that has said where its log ends; empty if it is not."""
        if self._slave is not None:
            return f"{self._slave.name} copies the log already; one slave at a time counts"
        self._slave = link
        logger.info("event=slave_connected slave=%s offset=%d", link.name, link.acked_offset)
        return ""

    def confirmed(self, link: SlaveLink) -> None:
        """Release what the slave has confirmed."""
        if self.confirms and link.acked_offset > self._store.confirmed_offset:
            self._store.confirm(link.acked_offset)
            self._release()

    def lost(self, link: SlaveLink, reason: str) -> None:
        """Forget a connection that is closed."""
        self._links.discard(link)
        if link is self._slave:
            self._slave = None
        logger.warning(
            "event=slave_lost slave=%s offset=%d reason=%r", link.name, link.acked_offset, reason
        )

    # --- whether it keeps up

    def _tick(self) -> float:
        now = self._now_s()
        for link in list(self._links):
            if now - link.heard_s > SILENCE_S:
                link.close(f"it was silent for {SILENCE_S:g} s")
            elif now - link.sent_s >= LIFE_S:
                link.send_sign_of_life()
        if self._slave is not None and self._slave.acked_offset >= self._target:
            self._target, self._kept_up_s = self._store.flushed_offset, now
            if self._is_refusing:
                self._is_refusing = False
                self._refusal.end(CAUSE)
                logger.warning("event=slave_keeps_up slave=%s", self._slave.name)
        elif self.confirms and now - self._kept_up_s > self._config.slave_timeout_ms / 1_000:
            self._refuse()
        return TICK_S

    def _refuse(self) -> None:
        if self._slave is None:
            state = "no slave is connected to haListenPort"
        else:
            behind = self._store.flushed_offset - self._slave.acked_offset
            state = f"the slave {self._slave.name} lacks {behind} bytes of the log"
        reason = f"minInSyncReplicas={self._config.min_in_sync_replicas}, and {state}"
        if not self._is_refusing:
            self._is_refusing = True
            logger.warning("event=messages_refused reason=%r", reason)
        # Clients take SLAVE_NOT_AVAILABLE for a message that was stored; on this code they try
        # another broker.
        self._refusal.begin(CAUSE, ResponseCode.SERVICE_NOT_AVAILABLE, reason)

    def metrics(self) -> dict[str, object]:
        """Return numbers about the second copy; empty without ``slaveAddresses``."""
        if not self._config.slave_addresses:
            return {}
        slave = self._slave
        end = self._store.flushed_offset
        return {
            "epoch": self._epoch(),
            "required": int(self.confirms),
            "connected": int(slave is not None),
            "slave": "" if slave is None else slave.name,
            "slave_offset": 0 if slave is None else slave.acked_offset,
            "lag_bytes": end if slave is None else end - slave.acked_offset,
            "refusing": int(self._is_refusing),
            "unconfirmed_bytes": max(end - self._store.confirmed_offset, 0),
        }

    def kept(self) -> Kept:
        """Return how much of what it keeps for peers is used."""
        return {SLAVE_CONNECTIONS: len(self._links)}
