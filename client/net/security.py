"""Client credentials and TLS: sign requests, verify servers.

Every request is signed with the current credentials. If they come from a function, it is called at
the start and again after a broker rejects a signature. If it then returns different credentials,
the request is retried once. Requests that are rejected at the same time share one call.

TLS verifies the name of the server. In routes, a halfmq broker names itself by the address at which
it was reached, which certificates seldom contain. So if a route names an address to which a host
name of the user was resolved, the certificate is verified against the host name.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl

from halfmq.remoting.signature import Identity, Signer

from ..config import ClientConfig, Credentials, CredentialsSource
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
_NO_ANSWER = f"closed by the peer before any answer; {PEER_EXPECTED}; "
NO_ANSWER_PLAIN = f"{_NO_ANSWER}if it takes only TLS connections, pass tls=True"
NO_ANSWER_TLS = f"{_NO_ANSWER}{_CLIENT_CERTIFICATE}"
TLS_ALERT = b"\x15\x03"
"""First bytes from a TLS server that rejects a connection: content type alert, version 3.x."""


class Security:
    """The credentials and the TLS context of one session."""

    def __init__(self, config: ClientConfig) -> None:
        self.identity: Identity | None = None
        """The signer of requests; None: requests are not signed."""
        self.tls: ssl.SSLContext | None = (
            ssl.create_default_context() if config.tls is True else config.tls or None
        )
        self._source: CredentialsSource | None = config.credentials
        self._credentials: Credentials | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._names: dict[str, str] = {}
        if config.access_key is not None and config.secret_key is not None:
            self._use(Credentials(config.access_key, config.secret_key))

    async def start(self) -> None:
        """Fetch credentials, if they come from a function; propagate its exceptions."""
        if self._source is not None:
            await self._fetch(self._source)

    async def renew(self, refused: Identity) -> bool:
        """Fetch credentials again; return whether they differ from the rejected ones."""
        if self._source is None:
            return False
        if self.identity is refused:
            if self._renewal is None:
                self._renewal = asyncio.create_task(self._fetch_again(self._source))
            await asyncio.wait([self._renewal])
        return self.identity is not refused

    def close(self) -> None:
        """Cancel a pending fetch of credentials."""
        if self._renewal is not None:
            self._renewal.cancel()

    def server_name(self, host: str, target: str) -> str | None:
        """Return the name that the certificate must have; ``target`` is the resolved address."""
        if self.tls is None:
            return None
        if host != target:
            self._names[target] = host
        return self._names.get(host, host)

    async def _fetch(self, source: CredentialsSource) -> None:
        if inspect.iscoroutinefunction(source):
            fetched = await source()
        else:
            fetched = await asyncio.to_thread(source)
            if inspect.isawaitable(fetched):
                fetched = await fetched
        if not isinstance(fetched, Credentials):
            kind = type(fetched).__name__  # not the value: it may hold a secret
            raise ConfigurationError("credentials", kind, "a function that returns Credentials")
        self._use(fetched)

    async def _fetch_again(self, source: CredentialsSource) -> None:
        try:
            await self._fetch(source)
        except Exception:
            logger.exception("event=user_function_failed function=%r", str(source))
        finally:
            self._renewal = None

    def _use(self, fetched: Credentials) -> None:
        if fetched != self._credentials:
            self._credentials = fetched
            self.identity = Identity(fetched.access_key, Signer(fetched.secret_key))


def tls_error(address: str, error: OSError) -> ConnectError | None:
    """Translate a failed TLS handshake into an error; return None for any other failure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        return TlsError(address, f"its certificate is not accepted: {reason}; {_HOW_TO_TRUST}")
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | ConnectionAbortedError):
        return TlsError(address, _ONLY_PLAIN, retriable=True)  # also seen while a broker restarts
    if isinstance(error, ssl.SSLError):
        alert = alert_reason(error)
        reason = alert or f"the server does not speak TLS ({error.reason}): leave out tls"
        return TlsError(address, reason)
    return None


def alert_reason(error: BaseException | None) -> str | None:
    """Describe the TLS alert with which a server rejected this client; None if there was none."""
    reason = getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else None
    if not reason or "ALERT" not in reason:
        return None
    name = reason.split("ALERT_")[-1].replace("_", " ").lower()
    return f"the server refused this client in the TLS handshake ({name}); {_CLIENT_CERTIFICATE}"
