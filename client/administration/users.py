"""Users and ACLs of all brokers: show and change them."""

from __future__ import annotations

from collections.abc import Sequence

from ..access import Acl, AclEntry, PolicyType, User, subject_of, user_to_info
from ..net.access_requests import AccessRequests
from .brokers import ClusterClient, check_address


class UserCalls(ClusterClient):
    """Administers users and ACLs."""

    async def users(self, name_contains: str = "") -> list[User]:
        """Return users sorted by name; with ``name_contains`` those whose name contains it.

        Users are read from the first broker by name, and changed on all brokers of the cluster in
        the order of their names: if one refuses, the brokers before it have been changed.

        Raises:
            UnsupportedRequestError: The broker keeps no users.
            AccessDeniedError: The signer is not an administrator.
            ClientError: A broker does not answer, or refuses.
        """
        return await self._first_broker().users(name_contains)

    async def user(self, name: str) -> User | None:
        """Return the user with this name, or None. Raises what ``users`` raises."""
        return await self._first_broker().user(name)

    async def create_user(
        self, name: str, password: str, *, is_super: bool = False, enabled: bool = True
    ) -> None:
        """Create a user. Raises what ``users`` raises; BrokerRefusedError if it exists."""
        user = User(name=name, password=password, is_super=is_super, enabled=enabled)
        for broker in self._all_brokers():
            await broker.create_user(user)

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
        for broker in self._all_brokers():
            await broker.update_user(info)

    async def delete_user(self, name: str) -> None:
        """Delete a user and its ACL, if it exists. Raises what ``users`` raises."""
        for broker in self._all_brokers():
            await broker.delete_user(name)

    async def acls(self, subject_contains: str = "", resource_contains: str = "") -> list[Acl]:
        """Return ACLs by subject; with ``resource_contains`` only entries of such resources.

        Raises what ``users`` raises, as do the other methods about ACLs.
        """
        return await self._first_broker().acls(subject_contains, resource_contains)

    async def acl(self, user: str) -> Acl | None:
        """Return the ACL of a user, ``User:NAME`` or ``NAME``; None if it has no entries."""
        return await self._first_broker().acl(subject_of(user))

    async def create_acl(self, user: str, *entries: AclEntry) -> None:
        """Add entries to the ACL of a user; replace those of the same resource."""
        for broker in self._all_brokers():
            await broker.create_acl(subject_of(user), entries)

    async def update_acl(self, user: str, *entries: AclEntry) -> None:
        """Update the ACL of a user, with RocketMQ's update request; like ``create_acl``."""
        for broker in self._all_brokers():
            await broker.update_acl(subject_of(user), entries)

    async def delete_acl(
        self, user: str, resource: str | None = None, policy_type: PolicyType | None = None
    ) -> None:
        """Delete the entry of a resource, or with None all entries of a user.

        Raises:
            BrokerRefusedError: There is no such user, or it has no entries.
        """
        for broker in self._all_brokers():
            await broker.delete_acl(subject_of(user), resource, policy_type)

    async def copy_acls(
        self, to: str, users: Sequence[str] = (), *, source: str | None = None
    ) -> list[str]:
        """Create or update ACLs of existing users on another broker; return the subjects.

        Args:
            to: ``host:port`` of a broker that accepts the same credentials.
            users: The users; empty: all. Unknown names are left out.
            source: ``host:port`` of the broker to read from; None: as ``users``.
        """
        from_broker, to_broker = self._first_broker(source), self._broker_at(to)
        wanted = [await from_broker.acl(subject_of(user)) for user in users]
        copied = []
        for acl in wanted or await from_broker.acls("", ""):
            if acl is not None:
                await to_broker.create_acl(acl.subject, acl.entries)
                copied.append(acl.subject)
        return copied

    def _first_broker(self, address: str | None = None) -> AccessRequests:
        if address is not None:
            return self._broker_at(address)
        session = self._session
        return AccessRequests(session, min(session.routes.brokers.items())[1])

    def _all_brokers(self) -> list[AccessRequests]:
        session = self._session
        return [AccessRequests(session, address) for _name, address in self._brokers()]

    def _broker_at(self, address: str) -> AccessRequests:
        check_address(address)
        return AccessRequests(self._session, address)
