"""The settings of access control and TLS."""

import json
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ..settings import FILE, SWITCH, choice, secret, setting


class KeyPair(NamedTuple):
    """The name and the secret of a user."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"Credentials({self.name!r}, ...)"


def _credentials(name_key: str, secret_key: str, text: str) -> KeyPair:
    try:
        fields = json.loads(text)
    except RecursionError as error:
        raise ValueError from error
    if not isinstance(fields, dict):
        raise ValueError  # noqa: TRY004 -- the callers of a parser expect this
    name, secret_text = fields.get(name_key), fields.get(secret_key)
    if not isinstance(name, str) or not isinstance(secret_text, str):
        raise ValueError  # noqa: TRY004
    if not name.strip() or not secret_text.strip():
        raise ValueError
    return KeyPair(name, secret_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may use the broker; without these settings everybody who reaches its port."""

    acl_enabled: bool = setting(
        "aclEnable",
        False,
        SWITCH,
        "Plain ACL, as in RocketMQ 4.4 to 5.2: requests must be signed, and plain_acl.yml has "
        "the accounts and their permissions.",
    )
    plain_acl_file: Path | None = setting(
        "plainAclFile",
        None,
        FILE,
        "File of the accounts, read again when it changes; *.yml files in a folder acl/ next to "
        "it are read too.",
    )
    authentication_enabled: bool = setting(
        "authenticationEnabled",
        False,
        SWITCH,
        "Authentication of users, as in RocketMQ 5.3: requests must be signed. Cannot be "
        "combined with aclEnable.",
    )
    authorization_enabled: bool = setting(
        "authorizationEnabled",
        False,
        SWITCH,
        "Authorization: the users' policies determine their permissions.",
    )
    initial_user: KeyPair | None = setting(
        "initAuthenticationUser",
        None,
        secret(
            partial(_credentials, "username", "password"),
            '{"username":"NAME","password":"SECRET"}, neither of them empty',
        ),
        "A super user, created at the start if there is no user with this name.",
    )
    inner_credentials: KeyPair | None = setting(
        "innerClientAuthenticationCredentials",
        None,
        secret(
            partial(_credentials, "accessKey", "secretKey"),
            '{"accessKey":"NAME","secretKey":"SECRET"}, neither of them empty',
        ),
        "The broker's own credentials, with which it registers with others; the same on all "
        "brokers. They permit nothing else.",
    )

    def contradiction(self) -> tuple[str, str] | None:
        """Return a key that contradicts the other settings, and what it should be; or None."""
        if self.acl_enabled and self.authentication_enabled:
            return "authenticationEnabled", "false while aclEnable=true: choose one of the two"
        initial, inner = self.initial_user, self.inner_credentials
        if initial is not None and inner is not None and initial.name == inner.name:
            return (
                "innerClientAuthenticationCredentials",
                "another name than that of initAuthenticationUser: they permit only to register",
            )
        if self.authorization_enabled and not self.authentication_enabled:
            return (
                "authorizationEnabled",
                "authenticationEnabled=true as well: who did not sign cannot be authorized",
            )
        return None


class TlsMode(Enum):
    """Whether clients may or must speak TLS."""

    DISABLED = "DISABLED"
    PERMISSIVE = "PERMISSIVE"
    ENFORCING = "ENFORCING"


class ClientAuth(Enum):
    """Whether clients must present a certificate."""

    NONE = "NONE"
    OPTIONAL = "OPTIONAL"
    REQUIRE = "REQUIRE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS, on the same ports."""

    configured_mode: TlsMode | None = setting(
        "tlsServerMode",
        None,
        choice(TlsMode),
        "Whether clients may (PERMISSIVE) or must (ENFORCING) use TLS.",
    )
    cert_path: Path | None = setting(
        "tlsServerCertPath",
        None,
        FILE,
        "The broker's certificate chain; read again when the file changes.",
    )
    key_path: Path | None = setting("tlsServerKeyPath", None, FILE, "The broker's private key.")
    key_password: str = setting(
        "tlsServerKeyPassword", "", secret(str, "a text"), "The password of the private key."
    )
    trust_cert_path: Path | None = setting(
        "tlsServerTrustCertPath", None, FILE, "Certificate authorities for certificates of clients."
    )
    client_auth: ClientAuth = setting(
        "tlsServerNeedClientAuth",
        ClientAuth.NONE,
        choice(ClientAuth),
        "Whether clients present a certificate.",
    )
    registration_enabled: bool = setting(
        "namesrvTlsEnable", False, SWITCH, "Register with name servers over TLS."
    )
    registration_trust_path: Path | None = setting(
        "namesrvTlsTrustCertPath",
        None,
        FILE,
        "Certificate authorities for certificates of name servers; empty: those of the system.",
    )
    config_file: Path | None = setting(
        "tlsConfigFile",
        None,
        FILE,
        "A tls.properties file of RocketMQ with the same settings; settings in this file take "
        "precedence.",
    )

    @property
    def mode(self) -> TlsMode:
        if self.configured_mode is not None:
            return self.configured_mode
        return TlsMode.DISABLED if self.cert_path is None else TlsMode.PERMISSIVE

    def contradiction(self) -> tuple[str, str] | None:
        """Return a key that contradicts the other settings, and what it should be; or None."""
        if self.mode is not TlsMode.DISABLED and self.cert_path is None:
            return "tlsServerMode", "tlsServerCertPath as well: there is no certificate"
        if self.client_auth is ClientAuth.NONE:
            return None
        if self.mode is TlsMode.DISABLED:
            return (
                "tlsServerNeedClientAuth",
                "none, or tlsServerCertPath as well: TLS is disabled",
            )
        if self.trust_cert_path is None:
            return (
                "tlsServerNeedClientAuth",
                "none, or tlsServerTrustCertPath as well: nothing vouches for clients",
            )
        return None


TLS_PROPERTIES: Final = {
    "tls.server.mode": "tlsServerMode",
    "tls.server.certPath": "tlsServerCertPath",
    "tls.server.keyPath": "tlsServerKeyPath",
    "tls.server.keyPassword": "tlsServerKeyPassword",
    "tls.server.trustCertPath": "tlsServerTrustCertPath",
    "tls.server.need.client.auth": "tlsServerNeedClientAuth",
}
"""Key of ``tls.properties`` → setting of the same meaning. Source: `TlsSystemConfig`."""
