"""TLS on the ports of the broker: the certificate, its reload, and who must speak TLS.

The keys are RocketMQ's, as settings or in the file ``tls.properties``. Unlike RocketMQ there is no
test mode with a certificate that no client can verify: without one, TLS is off.
Source: RocketMQ ``TlsSystemConfig``, ``TlsHelper``, ``TlsMode``.
"""

import logging
import ssl
from pathlib import Path
from typing import Final

from ..errors import BrokerConfigError
from .config import ClientAuth, TlsConfig, TlsMode

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0
"""Seconds a peer has for the handshake."""


class TlsContext:
    """The certificate in force, as an SSL context."""

    def __init__(self, config: TlsConfig) -> None:
        """Read certificate, key and trusted certificates.

        Raises:
            ConfigurationError: One of them is missing or unreadable, or they do not match.
        """
        self._config = config
        self._stamps = self._stamp()
        self.current = self._context()

    @property
    def mode(self) -> TlsMode:
        return self._config.mode

    def reload(self) -> bool:
        """Read the files again if one has changed; return whether another certificate is in force.

        Open connections keep their certificate. Reading blocks: call it on a thread.
        """
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.current = self._context()
        except BrokerConfigError as error:
            logger.error(  # noqa: TRY400 -- the reason is enough
                "event=certificate_not_reloaded error=%s in_force='the previous one'", error
            )
            return False
        logger.info("event=certificate_reloaded file=%s", self._config.cert_path)
        return True

    def _files(self) -> list[Path]:
        config = self._config
        return [
            path
            for path in (config.cert_path, config.key_path, config.trust_cert_path)
            if path is not None
        ]

    def _stamp(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files():
            try:
                status = path.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return stamps

    def _context(self) -> ssl.SSLContext:
        config = self._config
        assert config.cert_path is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for key, path in (
            ("tlsServerCertPath", config.cert_path),
            ("tlsServerKeyPath", config.key_path),
            ("tlsServerTrustCertPath", config.trust_cert_path),
        ):
            if path is not None:
                _check_readable(key, path)
        _load_own(context, config)
        if config.trust_cert_path is not None:
            try:
                context.load_verify_locations(config.trust_cert_path)
            except (ssl.SSLError, OSError) as error:
                raise BrokerConfigError(
                    "TLS",
                    "tlsServerTrustCertPath",
                    str(config.trust_cert_path),
                    f"certificates in PEM ({_reason(error)})",
                ) from error
        context.verify_mode = {
            ClientAuth.NONE: ssl.CERT_NONE,
            ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
            ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
        }[config.client_auth]
        return context


def _load_own(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Use the broker's own certificate."""
    assert config.cert_path is not None
    try:
        context.load_cert_chain(
            config.cert_path, config.key_path, password=lambda: config.key_password
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise BrokerConfigError(
            "TLS",
            "tlsServerCertPath",
            str(config.cert_path),
            f"a certificate in PEM whose key is in tlsServerKeyPath ({_reason(error)})",
        ) from None


def _check_readable(key: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise BrokerConfigError(
            "TLS", key, str(path), f"a readable file ({error.strerror})"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or type(error).__name__


def tls_context(config: TlsConfig) -> TlsContext | None:
    """Return the configured certificate; None if TLS is disabled.

    Raises:
        ConfigurationError: The certificate cannot be used.
    """
    if config.mode is TlsMode.DISABLED:
        return None
    return TlsContext(config)


def registration_context(config: TlsConfig) -> ssl.SSLContext | None:
    """Return what connections to name servers need; None if they are plain.

    It has the broker's own certificate, for name servers that require one.

    Raises:
        ConfigurationError: A certificate cannot be used.
    """
    if not config.registration_enabled:
        return None
    path = config.registration_trust_path
    try:
        context = ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise BrokerConfigError(
            "TLS", "namesrvTlsTrustCertPath", str(path), f"certificates in PEM ({_reason(error)})"
        ) from error
    if config.cert_path is not None:
        _load_own(context, config)
    return context
