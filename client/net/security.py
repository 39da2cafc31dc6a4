"""How a client shows who it is, and checks whom it talks to: signatures and TLS.

Every request is signed with the credentials in force. If they come from a function, it is asked at
the start, and again when a request is refused because of who signed it; the request is repeated
once if the function has other credentials by then. Requests that are refused at the same time
share one call.

TLS checks the name of the server. A halfmq broker names itself in routes by the address it was
reached at, which certificates seldom have. So where a route names an address that a host name of
the user was resolved to, the certificate is checked for the host name.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl

from halfmq.remoting.signature import Identity, Signer

from ..config import ClientConfig
from ..credentials import Credentials, CredentialsSource
from ..errors import PEER_EXPECTED, ConfigurationError, ConnectError, TlsError

logger = logging.getLogger(__name__)

_HOW_TO_TRUST = "tls=ssl.create_default_context(cafile=...) trusts an authority of your own"
_CLIENT_CERTIFICATE = (
    "where the server wants a client certificate (tlsServerNeedClientAuth=require), pass an "
    "ssl.SSLContext with load_cert_chain"
)
_ONLY_PLAIN = (
    "the server ended the TLS handshake; it may not speak TLS (tlsServerMode=disabled): give it a "
    f"certificate by tlsServerCertPath, or leave out tls; {_CLIENT_CERTIFICATE}"
)
ONLY_TLS = f"it takes only TLS connections: pass tls=True; {PEER_EXPECTED}"
_UNHEARD = f"closed by the peer before any answer; {PEER_EXPECTED}; "
UNHEARD_PLAIN = f"{_UNHEARD}if it takes only TLS connections, pass tls=True"
UNHEARD_TLS = f"{_UNHEARD}{_CLIENT_CERTIFICATE}"
TLS_ALERT = b"\x15\x03"
"""What a TLS server sends that refuses a connection: content type alert, version 3.x."""


class Security:
    """The credentials and the TLS context of one session."""

    def __init__(self, config: ClientConfig) -> None:
        self.identity: Identity | None = None
        """Who signs requests; None: nobody."""
        self.tls: ssl.SSLContext | None = (
            ssl.create_default_context() if config.tls is True else config.tls or None
        )
        self._source: CredentialsSource | None = config.credentials
        self._credentials: Credentials | None = None
        self._asking: asyncio.Task[None] | None = None
        self._names: dict[str, str] = {}
        if config.access_key is not None and config.secret_key is not None:
            self._use(Credentials(config.access_key, config.secret_key))

    async def start(self) -> None:
        """Ask for credentials, if they come from a function; what it raises is raised here."""
        if self._source is not None:
            await self._ask(self._source)

    async def renew(self, refused: Identity) -> bool:
        """Ask for credentials again, and return whether others than the refused are in force."""
        if self._source is None:
            return False
        if self.identity is refused:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask_again(self._source))
            await asyncio.wait([self._asking])
        return self.identity is not refused

    def close(self) -> None:
        """Wait for credentials no longer."""
        if self._asking is not None:
            self._asking.cancel()

    def server_name(self, host: str, target: str) -> str | None:
        """Return what the certificate must name, for a host and the address it was resolved to."""
        if self.tls is None:
            return None
        if host != target:
            self._names[target] = host
        return self._names.get(host, host)

    async def _ask(self, source: CredentialsSource) -> None:
        if inspect.iscoroutinefunction(source):
            given = await source()
        else:
            given = await asyncio.to_thread(source)
            if inspect.isawaitable(given):
                given = await given
        if not isinstance(given, Credentials):
            kind = type(given).__name__  # not the value: it may hold a secret
            raise ConfigurationError("credentials", kind, "a function that returns Credentials")
        self._use(given)

    async def _ask_again(self, source: CredentialsSource) -> None:
        try:
            await self._ask(source)
        except Exception:
            logger.exception("event=user_function_failed function=%s", source)
        finally:
            self._asking = None

    def _use(self, given: Credentials) -> None:
        if given != self._credentials:
            self._credentials = given
            self.identity = Identity(given.access_key, Signer(given.secret_key))


def tls_error(address: str, error: OSError) -> ConnectError | None:
    """Return what a failure of a TLS handshake means; None if it is not one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        return TlsError(address, f"its certificate is not accepted: {reason}; {_HOW_TO_TRUST}")
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | ConnectionAbortedError):
        return TlsError(address, _ONLY_PLAIN, retriable=True)  # a broker that restarts does so too
    if isinstance(error, ssl.SSLError):
        refusal = alert_reason(error)
        reason = refusal or f"the server does not speak TLS ({error.reason}): leave out tls"
        return TlsError(address, reason)
    return None


def alert_reason(error: BaseException | None) -> str | None:
    """Return in words the alert by which a server refused this client; None if there was none."""
    reason = getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else None
    if not reason or "ALERT" not in reason:
        return None
    name = reason.split("ALERT_")[-1].replace("_", " ").lower()
    return f"the server refused this client in the TLS handshake ({name}); {_CLIENT_CERTIFICATE}"
