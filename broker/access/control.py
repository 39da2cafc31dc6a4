"""Access control, which the router calls for each request, if it is configured.

Requests from a trusted address are always served. Otherwise the access key must name an enabled
principal and the signature must be valid, before anything else of the request is evaluated. Then
each requirement of the request code must be met.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

from attrs import define

from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.msgpack_header import split_signature
from halfmq.remoting.serialization import ext_fields
from halfmq.remoting.shown_text import shown
from halfmq.remoting.signature import ACCESS_KEY, SIGNATURE, UNIQUE_KEY_QUERY, Signer, signed_text
from halfmq.store.format.topics import TRACE_TOPIC

from ..errors import RequestRefusedError
from ..ports import Connection
from .addresses import Address, address_of
from .config import KeyPair
from .requirements import ANY_CLUSTER, CLIENT_IDS, PUB, cluster, requirements_of, topic
from .rules import Action, Principal, Principals, Requirement, Resource, ResourceKind

logger = logging.getLogger(__name__)

LINES_PER_SECOND_MAX: Final = 10
"""Refusals logged per second; the next line has the number of omitted ones. A refused peer may send
ten thousand requests per second."""

BelongsToOther: TypeAlias = Callable[[str, str, Connection], bool]
"""`(client id, principal, its connection)`: whether the id is that of another principal; see
`ClientRegistry.belongs_to_other`."""

_MSGPACK: Final = int(HeaderType.MSGPACK)
_TRACING: Final = topic(TRACE_TOPIC, PUB)


class RequestDeniedError(RequestRefusedError):
    """The sender may not make this request; the answer names subject, action and resource."""

    def __init__(
        self,
        code: ResponseCode,
        remark: str,
        subject: str = "",
        requirement: Requirement | None = None,
        *,
        kind: str = "authentication",
        log: _RefusalLog | None = None,
    ) -> None:
        """`kind` is the name under which it is counted."""
        fields = {"subject": shown(subject)} if subject else {}
        if requirement is not None:
            fields["action"] = " or ".join(requirement.actions)
            fields["resource"] = shown(str(requirement.resource))
            kind = "authorization"
        super().__init__(remark, code, fields or None)
        self.subject, self.requirement = subject, requirement
        self.kind, self._log = kind, log

    def answered(self, command: RemotingCommand, connection: Connection) -> None:
        """Count and log the refusal."""
        if self._log is not None:
            self._log.note(self, command, connection)


@define(eq=False, repr=False)
class Subject:
    """The sender of one request, for handlers that learn the resource only from a record."""

    principal: Principal
    _address: Address
    _control: AccessControl

    @property
    def name(self) -> str:
        """The access key of the sender; empty for a request from a trusted address."""
        return self.principal.name

    def may(self, requirement: Requirement) -> bool:
        """Return whether the sender meets a requirement."""
        return self._control.unmet(self.principal, requirement, self._address) is None

    def denied(self, requirement: Requirement, reason: str) -> RequestDeniedError:
        """Return the refusal for a reason other than a rule."""
        return self._control.forbidden(self.principal, requirement, reason, self._address)

    def require(self, requirement: Requirement) -> None:
        """Check that the sender meets a requirement.

        Raises:
            RequestDeniedError: It does not.
        """
        reason = self._control.unmet(self.principal, requirement, self._address)
        if reason is not None:
            raise self.denied(requirement, reason)


@define(eq=False, repr=False, slots=False)
class AccessControl:
    """Authenticates and authorizes requests."""

    _principals: Principals  # the known senders, from a plain ACL or the table of users
    _cluster_name: str  # the name of this broker as a resource of rules
    _belongs_to_other: BelongsToOther  # tests the client ids of requests; see ``CLIENT_IDS``
    # Credentials of brokers that register here; they permit nothing else.
    _inner: KeyPair | None = None
    _authorizes: bool = True  # whether rules count; otherwise a valid signature is enough
    _clock: Callable[[], float] = time.monotonic  # seconds, for the rate of log lines

    def __attrs_post_init__(self) -> None:
        self._cluster = Resource(ResourceKind.CLUSTER, self._cluster_name)
        self._dialect = self._principals.dialect
        self._refusals = _RefusalLog(self._clock)
        self._anybody = Principal("", Signer(""), is_super=True)
        self._broker = (
            None if self._inner is None else Principal(self._inner.name, Signer(self._inner.secret))
        )

    @property
    def refused(self) -> Counter[str]:
        """The number of refused requests since the start, by reason."""
        return self._refusals.counts

    def admit(self, command: RemotingCommand, connection: Connection) -> None:
        """Set the sender of a request in the request and in its connection.

        Raises:
            RequestRefusedError: The sender is unknown, or may not make this request.
        """
        subject = self._admit(command, connection)
        if command.code in CLIENT_IDS and command.header_error is None:
            self._check_client_id(command, connection, subject)
        command.subject = connection.subject = subject

    def may_read_metrics(self, name: str, password: str, address: str) -> bool:
        """Return whether a user who tells its password may read what the broker tells of itself."""
        peer = ipaddress.ip_address(address)
        principal = self._principals.find(name)
        if self._principals.trusts(peer):
            return True
        if principal is None or not principal.enabled:
            return False
        known = principal.signer.verify(Signer(password).digest(b""), b"")
        return known and self.unmet(principal, cluster(Action.GET), peer) is None

    def unmet(self, principal: Principal, requirement: Requirement, address: Address) -> str | None:
        """Return why a requirement is not met; None if it is."""
        if not self._authorizes or principal.is_super:
            return None
        return principal.refusal(self._of_this_cluster(requirement), address)

    def forbidden(
        self, principal: Principal, requirement: Requirement, reason: str, address: Address
    ) -> RequestDeniedError:
        """Return the refusal of an action of a principal."""
        subject = self._subject(principal.name)
        requirement = self._of_this_cluster(requirement)
        remark = (
            f"{subject} has no permission to {' or '.join(requirement.actions)} "
            f"{requirement.resource} from {address}, {reason}"
        )
        return RequestDeniedError(
            self._dialect.refusal_code, remark, subject, requirement, log=self._refusals
        )

    def _unknown(self, remark: str, name: str = "") -> RequestDeniedError:
        subject = self._subject(name) if name else ""
        return RequestDeniedError(self._dialect.refusal_code, remark, subject, log=self._refusals)

    def _subject(self, name: str) -> str:
        return f"{self._dialect.subject_word}:{name}"

    def _of_this_cluster(self, requirement: Requirement) -> Requirement:
        if (
            requirement.resource[1] == ANY_CLUSTER
            and requirement.resource.kind is ResourceKind.CLUSTER
        ):
            return requirement._replace(resource=self._cluster)
        return requirement

    def _admit(self, command: RemotingCommand, connection: Connection) -> Subject:
        address = address_of(connection.remote_host[:-4])
        if self._principals.trusts(address):
            return Subject(self._anybody, address, self)
        principal, trusted = self._authenticate(command, address)
        subject = Subject(self._anybody if trusted else principal, address, self)
        if principal is self._broker:
            # It is sent in plain text perhaps, and the signature does not cover the code: whoever
            # has read it could send it as another request.
            if command.code != RequestCode.REGISTER_BROKER:
                raise self._unknown(f"{self._subject(principal.name)} may only register.")
            return subject
        if command.header_error is None and not subject.principal.is_super and self._authorizes:
            self._authorize(command, subject, address)
        return subject

    def _authenticate(self, command: RemotingCommand, address: Address) -> tuple[Principal, bool]:
        """Return the principal of a command, and whether its address makes a signature needless."""
        signature: str | bytes
        old_text = None
        if command.header_type == _MSGPACK:
            name, signature, text = split_signature(command.raw_header)
        else:
            fields = ext_fields(command)
            name, signature = fields.get(ACCESS_KEY, ""), fields.get(SIGNATURE, "")
            text = signed_text(fields)
            if UNIQUE_KEY_QUERY in fields:  # some clients add it after signing, some before
                old_text = signed_text(fields, without_unique_key_query=True)
        if not name:
            raise self._unknown(self._dialect.no_key_remark)
        broker = self._broker
        is_broker = broker is not None and name == broker.name
        principal = broker if is_broker else self._principals.find(name)
        known = principal is not None
        if principal is None:  # the answer, and its time, do not tell which names exist
            principal = self._anybody
        trusted = principal.trusted_from
        if trusted and principal.enabled and any(matches(address) for matches in trusted):
            return principal, True
        verify = principal.signer.verify
        is_valid = verify(signature, text, command.body) or (
            old_text is not None and verify(signature, old_text, command.body)
        )
        if not is_valid or not known:
            raise self._unknown(f"{self._subject(name)}: check signature failed.", name)
        if not principal.enabled:
            raise self._unknown(f"{self._subject(name)} is disabled.", name)
        return principal, False

    def _check_client_id(
        self, command: RemotingCommand, connection: Connection, subject: Subject
    ) -> None:
        """Refuse a request in the name of another principal's client.

        It would get that client's replies, checks and queues, or end its registration.
        """
        try:
            client_id = CLIENT_IDS[command.code](command.header, command.body)
        except RemotingError as error:
            raise RequestRefusedError(str(error)) from error
        if self._belongs_to_other(client_id, subject.name, connection):
            raise RequestDeniedError(
                self._dialect.refusal_code,
                f"the client id {client_id} belongs to another principal while a connection of its "
                "client is open: use an id of your own",
                kind="client_id",
                log=self._refusals,
            )

    def _authorize(self, command: RemotingCommand, subject: Subject, address: Address) -> None:
        try:
            requirements = requirements_of(command.code, command.header, command.body)
        except RemotingError as error:
            raise RequestRefusedError(str(error)) from error
        if requirements is None:
            return  # not a `RequestCode`, so the router has no handler for it; a test checks that
        principal = subject.principal
        for requirement in requirements:
            if self.unmet(principal, requirement, address) is not None and not (
                requirement == _TRACING and self._dialect.trace_is_free
            ):
                subject.require(requirement)


class _RefusalLog:
    """Counts refusals, and logs them at a bounded rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._second = -1
        self._lines = 0
        self._omitted = 0

    def note(
        self, denied: RequestDeniedError, command: RemotingCommand, connection: Connection
    ) -> None:
        """Count a refusal, and log it unless there were too many in this second."""
        self.counts[denied.kind] += 1
        second = int(self._clock())
        if second != self._second:
            self._second, self._lines = second, 0
        if self._lines >= LINES_PER_SECOND_MAX:
            self._omitted += 1
            return
        self._lines += 1
        logger.warning(
            "event=access_denied peer=%s code=%d reason=%r not_logged=%d",
            connection.name,
            command.code,
            denied.remark,
            self._omitted,
        )
        self._omitted = 0
