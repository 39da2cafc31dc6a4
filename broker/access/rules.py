"""The model of access control: a principal has rules, a request has requirements.

A requirement names a resource (``Topic:orders``) and actions, one of which must be allowed. A rule
allows or denies actions on a resource, on all with a common prefix (``Topic:orders*``), on all of a
kind (``Topic:*``), or on everything (``*``). Of the rules about an action on a resource the most
specific one decides; of two equally specific ones, the one that denies. Without such a rule the
default rules decide in the same way; without a default rule access is denied.

Both sources of principals, ``plain_acl`` and ``users``, use this model.
Source: RocketMQ 5.3 ``AclAuthorizationHandler``, ``PolicyEntry``, ``Resource``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.signature import Signer

from .addresses import Address, AddressPattern


class ResourceKind(StrEnum):
    """What a resource is."""

    __hash__ = str.__hash__  # that of an enum is Python code, ten times as slow

    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


class Action(StrEnum):
    """What is done with a resource."""

    __hash__ = str.__hash__

    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


ALL_ACTIONS: Final = frozenset(Action)


class Resource(NamedTuple):
    """One topic, group or cluster."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class Requirement(NamedTuple):
    """A permission that a request needs: one of these actions on this resource."""

    resource: Resource
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """Allows or denies actions on the resources it matches."""

    kind: ResourceKind | None
    """None: resources of every kind."""
    name: str | None
    """None: every name."""
    actions: frozenset[Action]
    allow: bool = True
    is_prefix: bool = False
    sources: tuple[AddressPattern, ...] = ()
    """From which addresses a request must come; empty: from any."""

    @property
    def precedence(self) -> tuple[int, int, bool]:
        """Sort key: the most specific rule first; of two equally specific, the one that denies."""
        if self.kind is None:
            return 3, 0, self.allow
        if self.name is None:
            return 2, 0, self.allow
        return (1, -len(self.name), self.allow) if self.is_prefix else (0, 0, self.allow)

    @property
    def is_literal(self) -> bool:
        return self.kind is not None and self.name is not None and not self.is_prefix

    def matches(self, resource: Resource) -> bool:
        if self.kind is not None and self.kind is not resource.kind:
            return False
        if self.name is None:
            return True
        if self.is_prefix:
            return resource.name.startswith(self.name)
        return resource.name == self.name

    def covers(self, action: Action, address: Address) -> bool:
        """Return whether the rule decides this action from this address."""
        return action in self.actions and (
            not self.sources or any(source(address) for source in self.sources)
        )


class RuleSet:
    """Rules by precedence; those of one resource are found by its name."""

    __slots__ = ("_literal", "_others", "rules")

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: rule.precedence))
        self._literal: dict[tuple[ResourceKind | None, str | None], list[Rule]] = {}
        for rule in self.rules:
            if rule.is_literal:
                self._literal.setdefault((rule.kind, rule.name), []).append(rule)
        self._others = tuple(rule for rule in self.rules if not rule.is_literal)

    def rule_for(self, resource: Resource, action: Action, address: Address) -> Rule | None:
        for rule in self._literal.get(resource, ()):
            if rule.covers(action, address):
                return rule
        for rule in self._others:
            if rule.matches(resource) and rule.covers(action, address):
                return rule
        return None


@dataclass(frozen=True, slots=True)
class Principal:
    """An account or user that signs requests."""

    name: str
    signer: Signer = field(repr=False)
    rules: RuleSet = field(default_factory=RuleSet)
    default_rules: RuleSet = field(default_factory=RuleSet)
    is_super: bool = False
    """Whether it may do everything."""
    enabled: bool = True
    trusted_from: tuple[AddressPattern, ...] = ()
    """From which addresses its requests need neither signature nor permission."""

    def refusal(self, requirement: Requirement, address: Address) -> str | None:
        """Return why the requirement is not met; None if it is."""
        if self.is_super:
            return None
        reason = NO_RULE
        for action in requirement.actions:
            rule = self.rules.rule_for(
                requirement.resource, action, address
            ) or self.default_rules.rule_for(requirement.resource, action, address)
            if rule is None:
                continue
            if rule.allow:
                return None
            reason = DENIED
        return reason


NO_RULE: Final = "no matched policies."
DENIED: Final = "the decision is deny."
"""Reasons of refusals. Source: RocketMQ ``AclAuthorizationHandler``."""


class Dialect(NamedTuple):
    """How the answers of a plain ACL and of the table of users differ."""

    subject_word: str
    """The word for a principal in remarks: ``User`` or ``accessKey``."""
    refusal_code: ResponseCode
    """The code of refusals."""
    no_key_remark: str
    """RocketMQ's remark to a request without access key."""
    trace_is_free: bool
    """Whether every principal may send to the trace topic."""


class Principals(Protocol):
    """The known senders: a plain ACL or the table of users."""

    @property
    def dialect(self) -> Dialect: ...

    def find(self, name: str) -> Principal | None: ...

    def trusts(self, address: Address) -> bool:
        """Return whether requests from this address need no signature."""
        ...
