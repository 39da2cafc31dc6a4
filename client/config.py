"""Settings of a client: addresses, timeouts and the limits of every buffer.

Times are in seconds. Settings that differ between the producers or consumers of one program
(group, subscriptions, checker) are arguments of their constructors.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # not on the first look-up, where a fork could interrupt it
import ipaddress
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias, TypedDict

from .arguments import check_count, check_optional_text, check_seconds, check_text
from .errors import ConfigurationError
from .net.compression import COMPRESSIONS, Compression

DEFAULT_NAMESRV: Final = "127.0.0.1:9876"
NAMESRV_PORT: Final = 9876
NAMESRV_VARIABLE: Final = "NAMESRV_ADDR"  # the environment variable RocketMQ's own clients read

NAMESRV_EXPECTED: Final = "host:port, several separated by ;"
COUNTS: Final = range(1, 1 << 31)
"""Range of whole numbers in a configuration; some of them are 32-bit fields on the wire."""

HeaderChoice = Literal["auto", "json", "msgpack"]


def default_namesrv() -> str:
    """Return the environment's ``NAMESRV_ADDR``, as RocketMQ's clients do, or 127.0.0.1:9876."""
    return os.environ.get(NAMESRV_VARIABLE) or DEFAULT_NAMESRV


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials with which a client signs requests; no error and no ``repr`` shows the secret.

    An access key and its secret; for users of RocketMQ 5.3, user name and password.

    Raises:
        ConfigurationError: One of them is empty or not text.
    """

    access_key: str
    secret_key: str = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("access_key", "secret_key"):
            value: object = getattr(self, name)
            if not isinstance(value, str) or not value:
                shown = value if name == "access_key" else f"({type(value).__name__}, not shown)"
                raise ConfigurationError(name, shown, "a text that is not empty")


CredentialsSource: TypeAlias = Callable[[], Credentials | Awaitable[Credentials]]
"""Returns the current credentials. A plain function runs in a worker thread, so it may block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of a client: how it connects to brokers, and its limits.

    Raises:
        ConfigurationError: A value is out of its range; says which, and what was expected.
    """

    namesrv: str | None = None
    """``host:port``, several separated by ``;`` or ``,``; the port may be left out (9876), and an
    IPv6 address has brackets: ``[::1]:9876``. None: ``NAMESRV_ADDR``, else 127.0.0.1:9876."""
    header_type: HeaderChoice = "auto"
    """``auto`` uses MSGPACK headers with a halfmq broker and JSON with every other."""
    instance_name: str | None = None
    """Last part of the client id ``address@instance``; None: process id and a random number. A name
    must be another one for each client: to a broker, clients with one id are one client."""

    access_key: str | None = None
    """The key that signs every request; with users of RocketMQ 5.3, the user's name. None: requests
    are not signed."""
    secret_key: str | None = field(default=None, repr=False)
    """The secret of ``access_key``; with users, the password."""
    credentials: CredentialsSource | None = None
    """A function that returns both, for secrets that change: called at the start, and again if a
    broker rejects the signature of a request, which is then retried once. A plain function runs in
    a worker thread."""
    tls: bool | ssl.SSLContext = False
    """Whether connections are encrypted; True trusts the system's certificate authorities."""

    connect_timeout: float = 3.0
    request_timeout: float = 3.0
    send_timeout: float = 3.0
    """Limit for all attempts of one send together, and for finding a name server at the start."""
    send_attempts_max: int | None = None
    """Attempts of one send; None: as many as ``send_timeout`` allows. With 1 no message is ever
    sent twice, and a send fails during a broker's restart."""
    reconnect_delay_min: float = 0.1
    """Delay after the first failed connect or send; doubles with each further failure."""
    reconnect_delay_max: float = 0.5
    """The longest such delay; each is shortened by up to half at random. Well below
    ``send_timeout``, so that a send succeeds soon after the broker has restarted."""
    heartbeat_interval: float = 30.0
    """Time between heartbeats; a broker unregisters a client after 120 s without one."""
    route_refresh_interval: float = 30.0
    rebalance_interval: float = 20.0
    offset_commit_interval: float = 5.0

    in_flight_max: int = 4096
    """Requests in flight per connection; further ones wait."""
    write_buffer_max: int = 1 << 20
    """Bytes in the write buffer of a connection; above it, requests wait."""
    message_size_max: int = 4_194_304
    """Bytes of a body or a batch: RocketMQ's ``maxMessageSize``."""
    compress_over: int | None = 4096
    """Bodies of at least this many bytes are compressed; None: never."""
    compression: Compression = "zlib"
    """How they are compressed. All clients read ``zlib``; ``lz4`` and ``zstd`` are faster, need
    ``halfmq[compression]`` on both sides, and in Java a client since 5.0."""
    linger: float | None = None
    """Seconds that a send waits for others with its topic and order key, to go to the broker in one
    request with them; 0.001 suffices for many tasks. None: each is sent at once, by itself."""
    default_topic_queues: int = 4
    """Queues of a topic that a send creates, if the broker allows as many."""

    pull_batch: int = 32
    """Messages requested in one pull; official brokers return at most 32."""
    pull_suspend: float = 15.0
    """How long a broker may hold a pull while there is no message."""
    cached_messages_max: int = 1000
    """Messages of one queue pulled and not yet acknowledged; at this number pulling pauses."""
    cached_span_max: int = 2000
    """Messages of one queue from the first unacknowledged one on, acknowledged or not; at this
    number pulling pauses. A crash may redeliver as many."""
    cached_bytes_max: int = 64 << 20
    """Bytes of all messages that a consumer has pulled and not yet acknowledged."""
    lagging_from: int = 10_000
    """Messages of one queue, stored and not acknowledged, from which on ``Lagging`` is an event."""
    retry_delay: float = 5.0
    """Delay before this client redelivers a message that no broker accepts back."""

    check_concurrency: int = 16
    """Concurrent calls of a transaction checker."""
    check_timeout: float = 30.0
    """Time limit of one call; then it counts as UNKNOWN, and the broker checks again."""
    own_check_timeout: float = 2.0
    """Time limit of the look into the database that ends a block, the wait for a connection
    included; then the broker checks. Short, because the program waits for it."""
    check_queue_max: int = 1000
    """Queued check requests; further ones are rejected, and the broker checks again."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type in {"int", "int | None"}:
                if value is not None:
                    check_count(item.name, value, COUNTS)
                elif "None" not in item.type:
                    raise ConfigurationError(item.name, value, "a number")
            elif item.type == "float":
                check_seconds(item.name, value)
        check_optional_text("instance_name", self.instance_name)
        if self.instance_name is not None and not self.instance_name.isprintable():
            raise ConfigurationError("instance_name", self.instance_name, "printable text")
        if self.header_type not in ("auto", "json", "msgpack"):  # no set: it may be unhashable
            raise ConfigurationError("header_type", self.header_type, "auto, json or msgpack")
        self._check_compression()
        if self.linger is not None:
            check_seconds("linger", self.linger)
        if self.reconnect_delay_max < self.reconnect_delay_min:
            raise ConfigurationError(
                "reconnect_delay_max", self.reconnect_delay_max, "at least reconnect_delay_min"
            )
        self._check_access()
        if self.namesrv is not None:
            parse_addresses(self.namesrv)

    def _check_compression(self) -> None:
        given: object = self.compression
        library = COMPRESSIONS.get(given) if isinstance(given, str) else None
        if library is None:
            raise ConfigurationError("compression", given, "zlib, lz4 or zstd")
        if find_spec(library) is None:
            remedy = "zlib, or another one after: pip install 'halfmq[compression]'"
            raise ConfigurationError("compression", given, remedy)

    def _check_access(self) -> None:
        key, secret = self.access_key, self.secret_key
        if (key is None) != (secret is None):
            name = "access_key" if key is None else "secret_key"
            raise ConfigurationError(name, None, "both access_key and secret_key, or neither")
        if key is not None and self.credentials is not None:
            raise ConfigurationError(
                "credentials", self.credentials, "None, because access_key is given"
            )
        if key is not None and secret is not None:
            Credentials(key, secret)
        if not isinstance(self.tls, bool | ssl.SSLContext):
            raise ConfigurationError("tls", self.tls, "True, False or an ssl.SSLContext")

    @property
    def namesrv_addresses(self) -> list[str]:
        """The name servers, one ``host:port`` each, in the order given."""
        return parse_addresses(self.namesrv or default_namesrv())


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments that all clients have. Each overrides the field of ``config``."""

    namesrv: str | None
    """``host:port``, several with ``;`` or ``,``."""
    access_key: str | None
    """Signs every request."""
    secret_key: str | None
    """The secret of ``access_key``."""
    credentials: CredentialsSource | None
    """A function that returns both, called again if a broker rejects them."""
    tls: bool | ssl.SSLContext | None
    """Whether connections are encrypted; or an ``ssl.SSLContext``."""
    config: ClientConfig | None
    """All other settings."""


def parse_addresses(text: str) -> list[str]:
    """Split ``"a:9876;b"`` into ``["a:9876", "b:9876"]``; a comma separates as well.

    Raises:
        ConfigurationError: There is no address, or one is not valid.
    """
    check_text("namesrv", text, NAMESRV_EXPECTED)
    addresses = [part.strip() for part in re.split("[;,]", text) if part.strip()]
    if not addresses:
        raise ConfigurationError("namesrv", text, NAMESRV_EXPECTED)
    return [join_address(*split_address(address)) for address in addresses]


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, ``host`` or ``[v6]:port``; the port defaults to 9876.

    Raises:
        ConfigurationError: It is a URL, not a host, or the port is not in 1-65535.
    """
    scheme, is_url, rest = address.partition("://")
    if is_url:
        bare = rest.partition("/")[0] or "host:port"
        raise ConfigurationError("namesrv", address, f"no URL but {bare}, without {scheme}://")
    host, port_text = _host_and_port(address)
    port = int(port_text) if port_text.isascii() and port_text.isdecimal() else 0
    if not _is_host(host):
        raise ConfigurationError("namesrv", address, NAMESRV_EXPECTED)
    if not 0 < port < 65536:
        raise ConfigurationError("namesrv", address, "host:port with a port in 1-65535")
    return host, port


def _host_and_port(address: str) -> tuple[str, str]:
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return "", ""
        return host, rest.removeprefix(":") or str(NAMESRV_PORT)
    if address.count(":") > 1:  # a bare IPv6 address cannot carry a port
        return address, str(NAMESRV_PORT)
    host, colon, port = address.partition(":")
    return host, port if colon else str(NAMESRV_PORT)


def _is_host(host: str) -> bool:
    """Return whether it is an IP address or a host name with valid labels."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
        return True
    try:
        host.encode("idna")  # as a look-up does
    except UnicodeError:
        return False
    return bool(host) and not re.search(r"[^\w.-]", host)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
