"""What handlers ask about the sender of a request, where its resource is known late.

Without access control requests have no subject, and everybody may do everything.
"""

from __future__ import annotations

from functools import partial

from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.properties import get_property

from ..access.control import Subject
from ..access.requirements import PUB, topic
from ..access.rules import Requirement
from ..ports import Connection
from ..transaction.deciding import MayDecide
from ..transaction.half import StoredHalf, principal_of, with_principal


def require(request: RemotingCommand, requirement: Requirement) -> None:
    """Return if the sender may do this.

    Raises:
        AccessDeniedError: It may not.
    """
    if isinstance(request.subject, Subject):
        request.subject.require(requirement)


def prepared_by(properties: bytes, request: RemotingCommand) -> bytes:
    """Return a half's properties with its sender's name, by which its decision is bound to it."""
    subject = request.subject
    if isinstance(subject, Subject) and subject.name:
        return with_principal(properties, subject.name)
    return properties


def may_decide(request: RemotingCommand, *, from_check: bool) -> MayDecide | None:
    """Return a function that raises unless the sender may decide the half with these properties.

    A producer's own decision must come from the principal that prepared the half. The answer to a
    check may come from every principal with PUB on the real topic. (RocketMQ 5.3.3 requires a right
    on the half topic, which no producer has.) A decision marked as the answer to a check that was
    never sent counts as the producer's own.
    """
    subject = request.subject
    if not isinstance(subject, Subject) or subject.principal.is_super:
        return None
    return partial(_check_decision, subject, from_check)


def may_ask(producer: Connection, half: StoredHalf) -> bool:
    """Whether a producer may be asked about a half, whose message the question shows it."""
    subject = producer.subject
    return not isinstance(subject, Subject) or subject.may(_publishing(half.properties))


def _publishing(half: bytes) -> Requirement:
    return topic((get_property(half, b"REAL_TOPIC") or b"").decode(errors="replace"), PUB)


def _check_decision(subject: Subject, from_check: bool, half: bytes, asked: bool) -> None:
    requirement = _publishing(half)
    subject.require(requirement)
    if from_check and asked:
        return
    principal = principal_of(half)
    if principal is not None and principal != subject.name:
        raise subject.denied(requirement, "another principal has prepared this transaction.")
