"""Build access control from the settings."""

import logging
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.errors import StoreError

from ..errors import BrokerConfigError, RequestRefusedError
from ..loop.services import Periodic, Service
from ..ports import Connection, Handler
from .addresses import address_of
from .config import AccessConfig
from .control import AccessControl, BelongsToOther
from .plain_acl import PlainAcl, PlainAclError
from .requirements import LOCAL_ONLY
from .rules import Principals
from .users import Users

logger = logging.getLogger(__name__)

RELOAD_S: Final = 1.0
"""Seconds between two checks whether a file of accounts or a certificate has changed."""


def plain_acl(config: AccessConfig) -> PlainAcl:
    """Return the accounts of the configured file.

    Raises:
        ConfigurationError: A file is missing, unreadable or invalid.
    """
    file = config.plain_acl_file
    assert file is not None  # loading the configuration has chosen one
    try:
        accounts = PlainAcl(file)
    except PlainAclError as error:
        raise BrokerConfigError(
            str(error.file), "aclEnable", "true", f"a usable plain ACL: {error.reason}"
        ) from error
    for path in accounts.files:
        warn_of_readers(path)
    return accounts


def warn_of_readers(path: Path) -> None:
    """Log a warning if users other than the owner may read a file with secrets."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning(
            "event=secrets_readable file=%s mode=%o remedy='chmod 600'", path, stat.S_IMODE(mode)
        )


def warn_of_inner(config: AccessConfig, principals: Principals) -> None:
    """Log a warning if the broker's own credentials are also those of an account."""
    inner = config.inner_credentials
    if inner is not None and principals.find(inner.name) is not None:
        logger.warning(
            "event=inner_account_without_rights name=%s note='innerClientAuthenticationCredentials "
            "permit only to register: give the account of this name another one'",
            inner.name,
        )


class AccessSetup:
    """Access control as configured: by a plain ACL, by users, or none."""

    def __init__(
        self,
        config: AccessConfig,
        *,
        users_file: Path,
        cluster_name: str,
        belongs_to_other: BelongsToOther,
    ) -> None:
        """Create access control, if it is configured.

        Raises:
            ConfigurationError: The configured access control cannot be used.
        """
        self._control: AccessControl | None = None
        self.services: list[Service] = []
        """Services to start after the store and before the first request is served."""
        self.accounts: PlainAcl | None = None
        self.users: Users | None = None
        if config.acl_enabled:
            self.accounts = plain_acl(config)
            self._control = AccessControl(
                self.accounts,
                cluster_name=cluster_name,
                belongs_to_other=belongs_to_other,
                inner=config.inner_credentials,
            )
            warn_of_inner(config, self.accounts)
            self.services.append(reloading(self.accounts.reload))
        elif config.authentication_enabled:
            self.users = Users(users_file)
            self._control = AccessControl(
                self.users,
                cluster_name=cluster_name,
                belongs_to_other=belongs_to_other,
                inner=config.inner_credentials,
                authorizes=config.authorization_enabled,
            )
            self.services.append(UserTable(self.users, config))
        self.admit = None if self._control is None else self._control.admit
        """Raises RequestRefusedError unless a sender may make a request; None: every sender may."""
        self.may_read_metrics = None if self._control is None else self._control.may_read_metrics
        """``(user, password, address)``: whether it may read metrics; None: everybody may."""

    def guarded(self, table: Mapping[int, Handler]) -> Mapping[int, Handler]:
        """Return handlers that serve ``LOCAL_ONLY`` requests locally only, if everybody may send.

        With access control the same handlers.
        """
        if self._control is not None:
            return table
        return {
            code: partial(_serve_locally, handler) if code in LOCAL_ONLY else handler
            for code, handler in table.items()
        }

    def metrics(self) -> dict[str, int]:
        """Return the number of refused requests since the start, by reason."""
        if self._control is None:
            return {}
        return {f"refused_{reason}": count for reason, count in self._control.refused.items()}


def _serve_locally(
    handler: Handler, request: RemotingCommand, connection: Connection
) -> bytes | None:
    if not address_of(connection.remote_host[:-4]).is_loopback:
        raise RequestRefusedError(
            "without access control this is only for clients on the broker's own machine: connect "
            "to 127.0.0.1 there, or turn access control on (docs/security.md)",
            ResponseCode.NO_PERMISSION,
        )
    return handler(request, connection)


class UserTable(Service):
    """Reads the users at the start, and creates those that are configured."""

    def __init__(self, users: Users, config: AccessConfig) -> None:
        self._users = users
        self._config = config

    async def start(self) -> None:
        """Read the users, and create the configured one if it is missing.

        Raises:
            ConfigurationError: There is no user, so no request could be signed; or the table cannot
                be read.
        """
        config = self._config
        try:
            self._users.load()
        except StoreError as error:
            raise BrokerConfigError(
                "users", "authenticationEnabled", "true", f"a usable table of users: {error}"
            ) from error
        if config.initial_user is not None:
            name, secret = config.initial_user
            try:
                await self._users.add_missing(name, secret)
            except RequestRefusedError as error:
                raise BrokerConfigError(
                    "authenticationEnabled", "user", name, f"a usable user: {error.remark}"
                ) from error
        warn_of_inner(config, self._users)
        if self._users.is_empty:
            raise BrokerConfigError(
                "authenticationEnabled",
                "initAuthenticationUser",
                "",
                "a first user, because there is none yet who could sign a request",
            )


def reloading(reload: Callable[[], object]) -> Periodic:
    """Return the service that lets `reload` read files again if they have changed, on a thread."""
    return Periodic(RELOAD_S, [lambda: reload])
