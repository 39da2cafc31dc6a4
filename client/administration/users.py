"""Users and ACLs of all brokers: show and change them, by the requests of RocketMQ 5.3."""

from __future__ import annotations

from collections.abc import Sequence

from halfmq.remoting.access_bodies import (
    AclRequestHeader,
    DeleteAclRequestHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserInfo,
    UserRequestHeader,
    decode_acl,
    decode_acls,
    decode_user,
    decode_users,
    encode_access,
)
from halfmq.remoting.codes import RequestCode

from ..access import (
    Acl,
    AclEntry,
    PolicyType,
    User,
    acl_from_info,
    acl_to_info,
    subject_of,
    user_from_info,
    user_to_info,
)
from ..errors import ConfigurationError
from .brokers import ClusterClient


class UserCalls(ClusterClient):
    """Administers users and ACLs."""

    async def users(self, name_contains: str = "") -> list[User]:
        """Return users sorted by name; with ``name_contains`` those whose name contains it.

        Users are read from the first broker by name, and changed on all brokers of the cluster in
        the order of their names: if one refuses, the brokers before it have been changed.

        Raises:
            UnsupportedRequestError: The broker keeps no users.
            AccessDeniedError: The signer is not an administrator.
        """
        header = ListUsersRequestHeader(filter=name_contains or None)
        address = self._first_broker()
        infos = await self._ask(address, decode_users, RequestCode.AUTH_LIST_USER, header)
        return [user_from_info(info) for info in infos]

    async def user(self, name: str) -> User | None:
        """Return the user with this name, or None. Raises what ``users`` raises."""
        address, header = self._first_broker(), UserRequestHeader(username=name)
        return await self._ask(address, _user, RequestCode.AUTH_GET_USER, header)

    async def create_user(
        self, name: str, password: str, *, is_super: bool = False, enabled: bool = True
    ) -> None:
        """Create a user. Raises what ``users`` raises; BrokerRefusedError if it exists."""
        info = user_to_info(name, password, is_super=is_super, enabled=enabled)
        await self._send_user(RequestCode.AUTH_CREATE_USER, info)

    async def update_user(
        self,
        name: str,
        *,
        password: str | None = None,
        is_super: bool | None = None,
        enabled: bool | None = None,
    ) -> None:
        """Update a user; None leaves a field unchanged.

        Raises what ``users`` raises; BrokerRefusedError if there is no such user.
        """
        info = user_to_info(name, password, is_super=is_super, enabled=enabled)
        await self._send_user(RequestCode.AUTH_UPDATE_USER, info)

    async def delete_user(self, name: str) -> None:
        """Delete a user and its ACL, if it exists. Raises what ``users`` raises."""
        await self._send_each(RequestCode.AUTH_DELETE_USER, UserRequestHeader(username=name))

    async def acls(self, subject_contains: str = "", resource_contains: str = "") -> list[Acl]:
        """Return ACLs by subject; with ``resource_contains`` only entries of such resources.

        Raises what ``users`` raises, as do the other methods about ACLs.
        """
        return await self._acls(self._first_broker(), subject_contains, resource_contains)

    async def acl(self, user: str) -> Acl | None:
        """Return the ACL of a user, ``User:NAME`` or ``NAME``; None if it has no entries."""
        return await self._acl(self._first_broker(), subject_of(user))

    async def create_acl(self, user: str, *entries: AclEntry) -> None:
        """Add entries to the ACL of a user; replace those of the same resource."""
        await self._send_each(RequestCode.AUTH_CREATE_ACL, *_acl_request(user, entries))

    async def update_acl(self, user: str, *entries: AclEntry) -> None:
        """Update the ACL of a user, with RocketMQ's update request; like ``create_acl``."""
        await self._send_each(RequestCode.AUTH_UPDATE_ACL, *_acl_request(user, entries))

    async def delete_acl(
        self, user: str, resource: str | None = None, policy_type: PolicyType | None = None
    ) -> None:
        """Delete the entry of a resource, or with None all entries of a user.

        Raises:
            BrokerRefusedError: There is no such user, or it has no entries.
        """
        header = DeleteAclRequestHeader(
            subject=subject_of(user), policy_type=policy_type, resource=resource
        )
        await self._send_each(RequestCode.AUTH_DELETE_ACL, header)

    async def copy_acls(
        self, to: str, users: Sequence[str] = (), *, source: str | None = None
    ) -> list[str]:
        """Create or update ACLs of existing users on another broker; return the subjects.

        Args:
            to: ``host:port`` of a broker that accepts the same credentials.
            users: The users; empty: all. Unknown names are left out.
            source: ``host:port`` of the broker to read from; None: as ``users``.
        """
        _check_address(to)
        if source is not None:
            _check_address(source)
        source = source or self._first_broker()
        wanted = [await self._acl(source, subject_of(user)) for user in users]
        copied = []
        for acl in wanted or await self._acls(source, "", ""):
            if acl is not None:
                request = _acl_request(acl.subject, acl.entries)
                await self._send(to, RequestCode.AUTH_CREATE_ACL, *request)
                copied.append(acl.subject)
        return copied

    def _first_broker(self) -> str:
        return self._brokers()[0][1]

    async def _send_user(self, code: RequestCode, info: UserInfo) -> None:
        header = UserRequestHeader(username=info.username)
        await self._send_each(code, header, encode_access(info))

    async def _acl(self, address: str, subject: str) -> Acl | None:
        header = AclRequestHeader(subject=subject)
        return await self._ask(address, _acl, RequestCode.AUTH_GET_ACL, header)

    async def _acls(self, address: str, subject: str, resource: str) -> list[Acl]:
        header = ListAclsRequestHeader(
            subject_filter=subject or None, resource_filter=resource or None
        )
        infos = await self._ask(address, decode_acls, RequestCode.AUTH_LIST_ACL, header)
        return [acl_from_info(info) for info in infos]


def _user(body: bytes) -> User | None:
    return user_from_info(decode_user(body)) if body else None


def _acl(body: bytes) -> Acl | None:
    return acl_from_info(decode_acl(body)) if body else None


def _acl_request(user: str, entries: Sequence[AclEntry]) -> tuple[AclRequestHeader, bytes]:
    subject = subject_of(user)
    return AclRequestHeader(subject=subject), encode_access(acl_to_info(subject, entries))


def _check_address(address: str) -> None:
    """Raise ConfigurationError unless this is ``host:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError("address", address, "host:port of a broker")
