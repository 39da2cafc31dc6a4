"""Users and what they may do, as an operator sees and changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from halfmq.remoting.access_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo

PolicyType: TypeAlias = Literal["Custom", "Default"]

_SUPER: Final = "Super"
_DISABLED: Final = "disable"
_ALLOW: Final = "Allow"
_SUBJECT_PREFIX: Final = "User:"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who may sign requests."""

    name: str
    is_super: bool = False
    """Whether it may do everything, and change other super users."""
    enabled: bool = True
    password: str | None = field(default=None, repr=False)
    """Shown to super users only; to others, None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AclEntry:
    """What is allowed or denied on one resource."""

    resource: str
    """``Topic:orders``, ``Topic:orders*`` for all that begin so, ``Group:billing``,
    ``Cluster:DefaultCluster``, ``Topic:*`` for all of a kind, ``*`` for everything."""
    actions: Sequence[str]
    """Some of Pub, Sub, Create, Update, Delete, Get and List, or All."""
    allow: bool = True
    sources: Sequence[str] = ()
    """Addresses and networks from which it counts; empty: from anywhere."""
    policy_type: PolicyType = "Custom"
    """``Default`` entries are asked where no ``Custom`` one matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acl:
    """All entries of one subject."""

    subject: str
    """``User:NAME``."""
    entries: Sequence[AclEntry]


def subject_of(user: str) -> str:
    """Return ``User:NAME`` for a name, and a subject as it is."""
    return user if user.startswith(_SUBJECT_PREFIX) else _SUBJECT_PREFIX + user


def shown_user(info: UserInfo) -> User:
    """Return a user as operators see it."""
    return User(
        name=info.username,
        is_super=info.user_type == _SUPER,
        enabled=info.user_status != _DISABLED,
        password=info.password,
    )


def sent_user(
    name: str, password: str | None, *, is_super: bool | None, enabled: bool | None
) -> UserInfo:
    """Return a user as brokers take it; None leaves a field as it is."""
    return UserInfo(
        username=name,
        password=password,
        user_type=None if is_super is None else (_SUPER if is_super else "Normal"),
        user_status=None if enabled is None else ("enable" if enabled else _DISABLED),
    )


def shown_acl(info: AclInfo) -> Acl:
    """Return the entries of all policies of a subject."""
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


def sent_acl(subject: str, entries: Sequence[AclEntry]) -> AclInfo:
    """Return entries as brokers take them, those of a type together."""
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
