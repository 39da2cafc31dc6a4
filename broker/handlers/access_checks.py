"""Access checks in handlers, for requests whose resource is known only after a record is read.

Without access control requests have no subject, and every sender may do everything.
"""

from functools import partial

from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.properties import get_property

from ..access.control import Subject
from ..access.requirements import PUB, topic
from ..access.rules import Requirement
from ..ports import Connection
from ..transaction.deciding import Authorize
from ..transaction.half import StoredHalf, principal_of, with_principal


def require(request: RemotingCommand, requirement: Requirement) -> None:
    """Check that the sender of a request meets a requirement.

    Raises:
        RequestDeniedError: It does not.
    """
    if isinstance(request.subject, Subject):
        request.subject.require(requirement)


def principal_name(request: RemotingCommand) -> str | None:
    """Return the access key of a request's sender; None without access control."""
    subject = request.subject
    return subject.name if isinstance(subject, Subject) else None


def prepared_by(properties: bytes, request: RemotingCommand) -> bytes:
    """Return a half's properties with the name of its sender, who alone may decide it."""
    subject = request.subject
    if isinstance(subject, Subject) and subject.name:
        return with_principal(properties, subject.name)
    return properties


def may_decide(request: RemotingCommand, *, from_check: bool) -> Authorize | None:
    """Return a check whether the sender may decide a half; None if it may decide every half.

    A producer's own decision must come from the principal that prepared the half. The answer to a
    check may come from every principal with PUB on the real topic. (RocketMQ 5.3.3 requires a right
    on the half topic, which no producer has.) A decision marked as the answer to a check that was
    never sent counts as the producer's own.
    """
    subject = request.subject
    if not isinstance(subject, Subject) or subject.principal.is_super:
        return None
    return partial(_check_decision, subject, from_check)


def may_see(producer: Connection, half: StoredHalf) -> bool:
    """Return whether a producer may see the message of a half, which a check contains."""
    subject = producer.subject
    return not isinstance(subject, Subject) or subject.may(_publishing(half.properties))


def _publishing(half: bytes) -> Requirement:
    return topic((get_property(half, b"REAL_TOPIC") or b"").decode(errors="replace"), PUB)


def _check_decision(subject: Subject, from_check: bool, half: bytes, check_sent: bool) -> None:
    requirement = _publishing(half)
    subject.require(requirement)
    if from_check and check_sent:
        return
    principal = principal_of(half)
    if principal is not None and principal != subject.name:
        raise subject.denied(requirement, "another principal has prepared this transaction.")
