"""Files of a broker with access control: accounts, users, certificates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import trustme
from cryptography.hazmat.primitives import serialization

from halfmq.broker.access.users import ALLOW, DENY, NORMAL, Users
from halfmq.remoting.access_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from tests.support.access import Account

OPERATOR: Final = Account("operator", "operator-secret")
"""May do everything."""

APPLICATION: Final = Account("application", "application-secret")
"""Has rights of its own, see the tests."""

OTHER: Final = Account("other-application", "other-secret")
STRANGER: Final = Account("stranger", "stranger-secret")
"""Nobody has told the broker of it."""
NOBODY: Final = Account("-", "-")
"""Does not sign."""


def write_plain_acl(file: Path, accounts: Iterable[tuple[Account, Mapping[str, Any]]]) -> Path:
    """Write accounts; JSON is YAML too."""
    listed = [
        {"accessKey": keys.name, "secretKey": keys.secret, **rights} for keys, rights in accounts
    ]
    beside = file.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_text(json.dumps({"accounts": listed}, indent=1))
    beside.replace(file)  # a broker that reads it meanwhile reads all of it
    return file


class Policy(NamedTuple):
    """One entry of a user's policies."""

    resource: str
    actions: str
    decision: str = ALLOW


def deny(resource: str, actions: str) -> Policy:
    """Return an entry that denies."""
    return Policy(resource, actions, DENY)


def write_users(store: Path, users: Iterable[tuple[Account, Iterable[Policy]]]) -> None:
    """Write normal users with their policies where a broker of this store looks for them."""
    table = Users(store / "config" / "halfmqAccess.json")
    table.load()

    async def fill() -> None:
        for keys, policies in users:
            await table.create_user(
                UserInfo(username=keys.name, password=keys.secret, user_type=NORMAL)
            )
            entries = tuple(
                PolicyEntryInfo(
                    resource=one.resource,
                    actions=tuple(one.actions.split(",")),
                    decision=one.decision,
                )
                for one in policies
            )
            if not entries:
                continue
            acl = AclInfo(subject=f"User:{keys.name}", policies=(PolicyInfo(entries=entries),))
            await table.put_acl(acl)

    table_folder = store / "config"
    table_folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(fill())


def user_settings(**settings: object) -> dict[str, object]:
    """Return the settings of a broker with users, of whom the operator is the first."""
    first = {"username": OPERATOR.name, "password": OPERATOR.secret}
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps(first),
        **settings,
    }


class Certificates:
    """An authority, the broker's certificate, and one for clients; all as files in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._authority = trustme.CA()
        self.authority = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.authority))
        self.broker = folder / "broker.pem"
        """Certificate and key in one file."""
        self.renew()
        client = self._authority.issue_cert("client@halfmq.example")
        self.client, self.client_key = folder / "client.pem", folder / "client.key"
        client.cert_chain_pems[0].write_to_path(str(self.client))
        key = serialization.load_pem_private_key(client.private_key_pem.bytes(), None)
        self.client_key.write_bytes(  # Java reads keys in this form only
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def renew(self) -> None:
        """Replace the broker's certificate by another one of the same authority."""
        beside = self.broker.with_suffix(".new")
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(str(beside))
        beside.replace(self.broker)

    def broker_settings(self, *, client_auth: str = "none") -> dict[str, object]:
        """Return settings of a broker that serves TLS only."""
        return {
            "tlsServerMode": "enforcing",
            "tlsServerCertPath": self.broker,
            "tlsServerTrustCertPath": self.authority,
            "tlsServerNeedClientAuth": client_auth,
        }

    @property
    def java_options(self) -> tuple[str, ...]:
        """Options of a JVM whose clients speak TLS, check the broker and show a certificate."""
        return (
            "-Dtls.enable=true",
            "-Dtls.test.mode.enable=false",
            "-Dtls.client.authServer=true",
            f"-Dtls.client.trustCertPath={self.authority}",
            f"-Dtls.client.certPath={self.client}",
            f"-Dtls.client.keyPath={self.client_key}",
        )
