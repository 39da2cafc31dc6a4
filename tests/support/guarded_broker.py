"""A real broker with access control or TLS, on the loop of a thread of this process."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, TypeVar

import trustme

from halfmq.broker.config_file import load_config
from halfmq.broker.service import Broker
from halfmq.client import AclEntry, blocking

FrontEnd = Literal["acl", "users"]


class Keys(TypedDict):
    """Arguments of a client."""

    access_key: str
    secret_key: str


ADMIN: Final[Keys] = {"access_key": "admin-key", "secret_key": "admin-secret"}
PUBLISHER: Final[Keys] = {"access_key": "publisher", "secret_key": "publisher-secret"}
SUBSCRIBER: Final[Keys] = {"access_key": "subscriber", "secret_key": "subscriber-secret"}
"""May send to ``orders``; may consume ``orders`` for the group ``billing``."""

T = TypeVar("T")

ACCOUNTS: Final = """
accounts:
- {accessKey: admin-key, secretKey: admin-secret, admin: true}
- {accessKey: publisher, secretKey: publisher-secret, topicPerms: [orders=PUB]}
- {accessKey: subscriber, secretKey: subscriber-secret, topicPerms: [orders=SUB],
   groupPerms: [billing=SUB]}
"""


class GuardedBroker:
    """Runs until it is closed; has a topic ``orders`` if it has access control."""

    def __init__(self, directory: Path, front_end: FrontEnd | None = None, **settings: str) -> None:
        self.file = directory / "plain_acl.yml"
        if front_end == "acl":
            self.file.write_text(ACCOUNTS)
            settings |= {"aclEnable": "true", "plainAclFile": str(self.file)}
        elif front_end == "users":
            settings |= {
                "authenticationEnabled": "true",
                "authorizationEnabled": "true",
                "initAuthenticationUser": '{"username":"admin-key","password":"admin-secret"}',
            }
        settings = {
            "storePathRootDir": str(directory / "store"),
            "mappedFileSizeCommitLog": str(16 << 20),
            "listenPort": "0",
            "namesrvListenPort": "0",
            "transactionTimeOut": "100",
            **settings,
        }
        config = load_config(None, [f"{key}={value}" for key, value in settings.items()]).config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.broker = self.run(_make(config))
        self.run(self.broker.start())
        if front_end == "users":
            self._add_users()
        if front_end is not None:
            with blocking.Producer("setup", namesrv=self.address, **ADMIN) as producer:
                producer.send(blocking.Message("orders", b"first"))

    @property
    def address(self) -> str:
        return self.broker.address

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        self.run(self.broker.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _add_users(self) -> None:
        with blocking.Admin(namesrv=self.address, **ADMIN) as admin:
            for user in (PUBLISHER, SUBSCRIBER):
                admin.create_user(user["access_key"], user["secret_key"])
            admin.create_acl("publisher", AclEntry(resource="Topic:orders", actions=["Pub"]))
            admin.create_acl(
                "subscriber",
                AclEntry(resource="Topic:orders", actions=["Sub"]),
                AclEntry(resource="Group:billing", actions=["Sub"]),
            )


class Certificates:
    """An authority, and a certificate of a broker in files."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.authority = trustme.CA()
        self.trust = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.trust))
        issued = self.authority.issue_cert(*(names or ("127.0.0.1",)))
        issued.private_key_pem.write_to_path(str(folder / "key.pem"))
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        (folder / "cert.pem").write_bytes(chain)
        self.settings = {
            "tlsServerCertPath": str(folder / "cert.pem"),
            "tlsServerKeyPath": str(folder / "key.pem"),
        }

    def context(self) -> ssl.SSLContext:
        """Trust the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


async def _make(config: Any) -> Broker:
    return Broker(config)
