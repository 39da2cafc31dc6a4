"""Access control: users and ACLs, as an operator views and changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from halfmq.remoting.access_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo

PolicyType: TypeAlias = Literal["Custom", "Default"]
"""``Default`` entries apply if no ``Custom`` entry matches."""

_SUPER: Final = "Super"
_DISABLED: Final = "disable"
_ALLOW: Final = "Allow"
_SUBJECT_PREFIX: Final = "User:"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user account, with which requests are signed."""

    name: str
    is_super: bool = False
    """Whether it has all permissions and may change other super users."""
    enabled: bool = True
    password: str | None = field(default=None, repr=False)
    """Visible to super users only; None for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AclEntry:
    """The actions that are allowed or denied on one resource."""

    resource: str
    """``Topic:orders``, ``Topic:orders*`` for a prefix, ``Group:billing``,
    ``Cluster:DefaultCluster``, ``Topic:*`` for all of a kind, ``*`` for everything."""
    actions: Sequence[str]
    """Some of Pub, Sub, Create, Update, Delete, Get and List, or All."""
    allow: bool = True
    sources: Sequence[str] = ()
    """Addresses and networks for which the entry applies; empty: all."""
    policy_type: PolicyType = "Custom"
    """``Default`` entries apply if no ``Custom`` entry matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acl:
    """All access entries of one subject."""

    subject: str
    """``User:NAME``."""
    entries: Sequence[AclEntry]


def subject_of(user: str) -> str:
    """Return ``User:NAME`` for a name; return a subject unchanged."""
    return user if user.startswith(_SUBJECT_PREFIX) else _SUBJECT_PREFIX + user


def user_from_info(info: UserInfo) -> User:
    """Convert a user from the wire format."""
    return User(
        name=info.username,
        is_super=info.user_type == _SUPER,
        enabled=info.user_status != _DISABLED,
        password=info.password,
    )


def user_to_info(
    name: str, password: str | None, *, is_super: bool | None, enabled: bool | None
) -> UserInfo:
    """Convert a user to the wire format; an update leaves fields that are None unchanged."""
    return UserInfo(
        username=name,
        password=password,
        user_type=None if is_super is None else (_SUPER if is_super else "Normal"),
        user_status=None if enabled is None else ("enable" if enabled else _DISABLED),
    )


def acl_from_info(info: AclInfo) -> Acl:
    """Convert the policies of a subject from the wire format."""
    entries = [
        AclEntry(
            resource=entry.resource,
            actions=entry.actions,
            allow=entry.decision == _ALLOW,
            sources=entry.source_ips or (),
            policy_type="Default" if policy.policy_type == "Default" else "Custom",
        )
        for policy in info.policies
        for entry in policy.entries
    ]
    return Acl(subject=info.subject, entries=tuple(entries))


def acl_to_info(subject: str, entries: Sequence[AclEntry]) -> AclInfo:
    """Convert entries to the wire format, grouped by policy type."""
    by_type: dict[str, list[PolicyEntryInfo]] = {}
    for entry in entries:
        sent = PolicyEntryInfo(
            resource=entry.resource,
            actions=tuple(entry.actions),
            decision=_ALLOW if entry.allow else "Deny",
            source_ips=tuple(entry.sources) or None,
        )
        by_type.setdefault(entry.policy_type, []).append(sent)
    policies = tuple(
        PolicyInfo(policy_type=kind, entries=tuple(those)) for kind, those in by_type.items()
    )
    return AclInfo(subject=subject, policies=policies)
