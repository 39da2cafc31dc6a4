"""Users and their policies, as in RocketMQ 5.3: stored by the broker, changed by requests.

They are in one table, ``config/halfmqAccess.json``, which only its owner may read, because HMAC
needs the secrets themselves. (RocketMQ keeps them in RocksDB, so there is no file to share.) A
change takes effect and is answered after it is on disk.
Source: RocketMQ 5.3 ``AuthenticationMetadataManagerImpl``, ``AuthorizationMetadataManagerImpl``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from halfmq.remoting.access_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.signature import Signer
from halfmq.store.errors import DamagedTableError
from halfmq.store.files.json_table import read_table, save_table

from ..errors import RequestRefusedError
from .addresses import Address, AddressPatternError, parse_address_pattern
from .rules import ALL_ACTIONS, Action, Dialect, Principal, ResourceKind, Rule, RuleSet

logger = logging.getLogger(__name__)

USERS_MAX: Final = 10_000
"""Users; each takes two kilobytes of memory, and each change writes all of them."""

ENTRIES_MAX: Final = 1_000
"""Entries of one user's policies; those with a prefix are tested for each request."""

TEXT_MAX: Final = 255
"""Characters of a name, a secret or a resource."""

SUPER, NORMAL = "Super", "Normal"
ENABLE, DISABLE = "enable", "disable"
ALLOW, DENY = "Allow", "Deny"
CUSTOM, DEFAULT = "Custom", "Default"
SUBJECT_PREFIX: Final = "User:"

_USERS: Final = "users"
_ACLS: Final = "acls"
_EVERYTHING: Final = "*"
_ACTIONS: Final = MappingProxyType({action.lower(): frozenset({action}) for action in Action}) | {
    "all": ALL_ACTIONS
}
_KINDS: Final = MappingProxyType({kind.lower(): kind for kind in ResourceKind})


def refused(remark: str) -> RequestRefusedError:
    """Return the refusal of an invalid change, with RocketMQ's code for it."""
    return RequestRefusedError(remark, ResponseCode.NO_PERMISSION)


class Users:
    """Users by name and their policies; a `Principals`."""

    dialect: Final = Dialect(
        subject_word="User",
        refusal_code=ResponseCode.NO_PERMISSION,
        no_key_remark="username cannot be null.",
        trace_is_free=False,
    )

    def __init__(self, path: Path) -> None:
        """Store the table at a path; it is empty before ``load``."""
        self._path = path
        self._users: dict[str, UserInfo] = {}
        self._acls: dict[str, tuple[PolicyInfo, ...]] = {}
        self._principals: dict[str, Principal] = {}
        self._changing = asyncio.Lock()

    def load(self) -> None:
        """Read the table, which is empty if there is no file.

        Raises:
            StoreError: The file cannot be read, or has an invalid entry.
        """
        content = read_table(self._path, _USERS).content
        try:
            self._users = msgspec.convert(content.get(_USERS, {}), dict[str, UserInfo])
            self._acls = msgspec.convert(content.get(_ACLS, {}), dict[str, tuple[PolicyInfo, ...]])
            for user in self._users.values():
                _check_stored(user)
            self._principals = {name: self._principal(name) for name in self._users}
        except (msgspec.ValidationError, RequestRefusedError) as error:
            raise DamagedTableError(self._path, str(error)) from error

    def find(self, name: str) -> Principal | None:
        return self._principals.get(name)

    def trusts(self, _address: Address) -> bool:
        """Return False: users have no list of trusted addresses."""
        return False

    def user(self, name: str) -> UserInfo | None:
        """Return a user with its secret, or None."""
        return self._users.get(name)

    def users(self, name_contains: str = "") -> list[UserInfo]:
        return [self._users[name] for name in sorted(self._users) if name_contains in name]

    def acl(self, subject: str) -> AclInfo | None:
        """Return the policies of a subject; None if it has none.

        Raises:
            RequestRefusedError: There is no such user.
        """
        name = self._name_of(subject, "The subject is not exist.")
        policies = self._acls.get(name)
        return AclInfo(subject=subject, policies=policies) if policies else None

    def acls(self, subject_contains: str = "", resource_contains: str = "") -> list[AclInfo]:
        """Return policies sorted by subject, with only the entries about matching resources."""
        found = []
        for name in sorted(self._acls):
            subject = SUBJECT_PREFIX + name
            policies = tuple(
                PolicyInfo(policy_type=policy.policy_type, entries=entries)
                for policy in self._acls[name]
                if (
                    entries := tuple(
                        entry for entry in policy.entries if resource_contains in entry.resource
                    )
                )
            )
            if subject_contains in subject and policies:
                found.append(AclInfo(subject=subject, policies=policies))
        return found

    async def create_user(self, user: UserInfo) -> None:
        """Add a user.

        Raises:
            RequestRefusedError: The name is taken, or a field is missing or invalid.
        """
        _check_user(user)
        if not user.password:
            raise refused("password can not be blank")

        def change(users: dict[str, UserInfo], _acls: dict[str, tuple[PolicyInfo, ...]]) -> None:
            if user.username in users:
                raise refused("The user is existed")
            if len(users) >= USERS_MAX:
                raise refused(f"there are {USERS_MAX} users already")
            users[user.username] = UserInfo(
                username=user.username,
                password=user.password,
                user_type=user.user_type or NORMAL,
                user_status=user.user_status or ENABLE,
            )

        await self._change(change)

    async def update_user(self, user: UserInfo) -> None:
        """Change those fields of a user that are set.

        Raises:
            RequestRefusedError: There is no user of this name, or a field is invalid.
        """
        _check_user(user)

        def change(users: dict[str, UserInfo], _acls: dict[str, tuple[PolicyInfo, ...]]) -> None:
            old = users.get(user.username)
            if old is None:
                raise refused("The user is not exist")
            users[user.username] = UserInfo(
                username=user.username,
                password=user.password or old.password,
                user_type=user.user_type or old.user_type,
                user_status=user.user_status or old.user_status,
            )

        await self._change(change)

    async def delete_user(self, name: str) -> None:
        """Remove a user and its policies; do nothing if there is no such user."""

        def change(users: dict[str, UserInfo], acls: dict[str, tuple[PolicyInfo, ...]]) -> None:
            users.pop(name, None)
            acls.pop(name, None)

        if name in self._users:
            await self._change(change)

    async def put_acl(self, acl: AclInfo) -> None:
        """Add entries to a subject's policies, or replace those about the same resource.

        Raises:
            RequestRefusedError: There is no such user, or an entry is invalid.
        """
        if not acl.policies:
            raise refused("The policies is empty.")
        for policy in acl.policies:
            _check_policy(policy)
        name = self._name_of(acl.subject, f"The subject of {acl.subject} is not exist.")

        def change(users: dict[str, UserInfo], acls: dict[str, tuple[PolicyInfo, ...]]) -> None:
            if name not in users:
                raise refused(f"The subject of {acl.subject} is not exist.")
            merged = _merged(acls.get(name, ()), acl.policies)
            if sum(len(policy.entries) for policy in merged) > ENTRIES_MAX:
                raise refused(f"more than {ENTRIES_MAX} entries for {acl.subject}")
            acls[name] = merged

        await self._change(change)

    async def delete_acl(self, subject: str, policy_type: str | None, resource: str | None) -> None:
        """Remove a subject's entries about a resource, or all of its policies.

        Raises:
            RequestRefusedError: There is no such user, or it has no policies.
        """
        name = self._name_of(subject, "The subject is not exist.")

        def change(_users: dict[str, UserInfo], acls: dict[str, tuple[PolicyInfo, ...]]) -> None:
            if name not in acls:
                raise refused("The acl is not exist.")
            left: tuple[PolicyInfo, ...] = ()
            if resource:
                kind = policy_type or CUSTOM
                left = tuple(
                    PolicyInfo(policy_type=policy.policy_type, entries=entries)
                    for policy in acls[name]
                    if (
                        entries := tuple(
                            entry
                            for entry in policy.entries
                            if entry.resource != resource or _type_of(policy) != kind
                        )
                    )
                )
            if left:
                acls[name] = left
            else:
                del acls[name]

        await self._change(change)

    @property
    def is_empty(self) -> bool:
        """Whether there are no users, so that no request can be signed."""
        return not self._users

    async def add_missing(self, name: str, password: str) -> None:
        """Create a super user unless there is a user of this name.

        Raises:
            RequestRefusedError: The user cannot be created.
        """
        if name not in self._users:
            await self.create_user(UserInfo(username=name, password=password, user_type=SUPER))
            logger.info("event=user_created user=%s type=%s", name, SUPER)

    async def _change(
        self, change: Callable[[dict[str, UserInfo], dict[str, tuple[PolicyInfo, ...]]], None]
    ) -> None:
        """Apply a change to copies of the tables, write them to disk, then use them."""
        async with self._changing:
            users, acls = dict(self._users), dict(self._acls)
            change(users, acls)
            content = {_USERS: msgspec.to_builtins(users), _ACLS: msgspec.to_builtins(acls)}
            try:
                await asyncio.to_thread(save_table, self._path, content, private=True)
            except OSError as error:
                logger.exception("event=access_not_saved path=%s", self._path)
                raise RequestRefusedError(f"it could not be saved: {error.strerror}") from error
            self._users, self._acls = users, acls
            self._principals = {name: self._principal(name) for name in users}

    def _name_of(self, subject: str, remark: str) -> str:
        name = subject.removeprefix(SUBJECT_PREFIX)
        if not subject.startswith(SUBJECT_PREFIX) or name not in self._users:
            raise refused(remark)
        return name

    def _principal(self, name: str) -> Principal:
        user = self._users[name]
        policies = self._acls.get(name, ())
        return Principal(
            name,
            Signer(user.password or ""),
            RuleSet(_rules(policies, CUSTOM)),
            RuleSet(_rules(policies, DEFAULT)),
            is_super=user.user_type == SUPER,
            enabled=user.user_status != DISABLE,
        )


def _check_user(user: UserInfo) -> None:
    if not user.username.strip():
        raise refused("username can not be blank")
    for text in (user.username, user.password or ""):
        if len(text) > TEXT_MAX or not text.isprintable():
            raise refused(f"a name or password of more than {TEXT_MAX} characters, or unprintable")
    if user.user_type not in {None, SUPER, NORMAL}:
        raise refused(f"userType {user.user_type}: expected {SUPER} or {NORMAL}")
    if user.user_status not in {None, ENABLE, DISABLE}:
        raise refused(f"userStatus {user.user_status}: expected {ENABLE} or {DISABLE}")


def _check_stored(user: UserInfo) -> None:
    """Refuse an invalid user in the file, which an operator may have edited."""
    _check_user(user)
    if not user.password:
        raise refused(f"user {user.username} has no password")


def _check_policy(policy: PolicyInfo) -> None:
    if _type_of(policy) not in {CUSTOM, DEFAULT}:
        raise refused(f"policyType {policy.policy_type}: expected {CUSTOM} or {DEFAULT}")
    if not policy.entries:
        raise refused("The policy entries is empty.")
    for entry in policy.entries:
        _rule(entry)


def _type_of(policy: PolicyInfo) -> str:
    return policy.policy_type or CUSTOM


def _rules(policies: Iterable[PolicyInfo], policy_type: str) -> list[Rule]:
    return [
        _rule(entry)
        for policy in policies
        if _type_of(policy) == policy_type
        for entry in policy.entries
    ]


def _rule(entry: PolicyEntryInfo) -> Rule:
    """Return the rule of an entry.

    Raises:
        RequestRefusedError: The entry is invalid.
    """
    kind, name, is_prefix = _resource(entry.resource)
    actions: set[Action] = set()
    for text in entry.actions:
        if text.lower() not in _ACTIONS:
            known = ", ".join([*Action, "All"])
            raise refused(f"The actions {text} is unknown: expected some of {known}")
        actions |= _ACTIONS[text.lower()]
    if not actions:
        raise refused("The actions is empty.")
    if entry.decision not in {ALLOW, DENY}:
        raise refused("The decision is null or illegal.")
    try:
        sources = tuple(parse_address_pattern(text) for text in entry.source_ips or ())
    except AddressPatternError as error:
        raise refused(f"The source ip is invalid: {error}") from error
    return Rule(kind, name, frozenset(actions), entry.decision == ALLOW, is_prefix, sources)


def _resource(text: str) -> tuple[ResourceKind | None, str | None, bool]:
    if text == _EVERYTHING:
        return None, None, False
    kind_text, _, name = text.partition(":")
    kind = _KINDS.get(kind_text.lower())
    if kind is None or not name or len(text) > TEXT_MAX:
        raise refused(f"The resource {text} is unknown: expected *, or a type, : and a name")
    if name == _EVERYTHING:
        return kind, None, False
    if name.endswith(_EVERYTHING):
        return kind, name[:-1], True
    return kind, name, False


def _merged(old: tuple[PolicyInfo, ...], new: tuple[PolicyInfo, ...]) -> tuple[PolicyInfo, ...]:
    merged = {_type_of(policy): list(policy.entries) for policy in old}
    for policy in new:
        entries = merged.setdefault(_type_of(policy), [])
        for entry in policy.entries:
            same = [i for i, one in enumerate(entries) if one.resource == entry.resource]
            if same:
                entries[same[0]] = entry
            else:
                entries.append(entry)
    return tuple(
        PolicyInfo(policy_type=policy_type, entries=tuple(entries))
        for policy_type, entries in merged.items()
    )
