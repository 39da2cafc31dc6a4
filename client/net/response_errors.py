"""Map error responses to exceptions: ``BrokerRefusedError`` and its subclasses.

If access is denied, a halfmq broker names subject, action and resource in the ext fields of its
answer. Official brokers, and the results of single decisions, only have a remark, which is parsed.
Source: RocketMQ 5.3 ``DefaultAuthenticationHandler``, ``AclAuthorizationHandler``; 4.9.8
``PlainPermissionManager``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.serialization import ext_fields
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.record import Record, decode_record

from ..errors import AccessDeniedError, AuthenticationError, BadAnswerError, BrokerRefusedError

ACCESS_ERROR_CODES: Final = frozenset({ResponseCode.SYSTEM_ERROR, ResponseCode.NO_PERMISSION})
"""Response codes of denied access, with plain ACL and with users. Both also have other meanings,
which are retriable."""

_UNAUTHENTICATED: Final = re.compile(
    r"(?P<user>(?:User|accessKey):.+?) (?:is )?(?:not found|disabled)\."
    r"|(?P<signer>(?:User|accessKey):.+?): check signature failed\."
    r"|check signature failed\.|username cannot be null\.|Authentication failed\."
    r"|authentication \w+ .*is incorrect"
    r"|(?:\S+AclException: )?(?:No accessKey is configured"
    r"|(?:No acl config for |No PlainAccessResource for accessKey="
    r"|Check signature failed for accessKey=)(?P<key>[^\s,]+))"
)
_DENIED: Final = re.compile(
    r"(?P<subject>.+?) has no permission to (?P<action>\S+(?: or \S+)*) (?P<resource>\S+) from "
    r"|Authorization failed\."
    r"|(?:\S+AclException: )?(?:No default permission for (?P<kind>topic|group):(?P<name>[^\s,]+)"
    r"|Need admin permission for request code=\d+, but accessKey=(?P<key>\S+) is not)"
)
_ANY_ACTION: Final = "access"  # in official remarks, whatever the action


@contextmanager
def answer_of(address: str) -> Iterator[None]:
    """Decode an answer of this address in the block.

    Raises:
        BadAnswerError: The answer does not follow the protocol.
    """
    try:
        yield
    except (ProtocolError, CorruptRecordError) as error:
        raise BadAnswerError(address, str(error)) from error


def records_of(body: bytes) -> Iterator[Record]:
    """Decode the records of an answer. As in official clients, the CRC is not checked.

    Raises:
        CorruptRecordError: The remaining bytes are not a record.
    """
    position = 0
    while position < len(body):
        record = decode_record(body, position, check_crc=False)
        yield record
        position += record.total_size


def expect_success(answer: RemotingCommand) -> RemotingCommand:
    """Return the answer if its code is SUCCESS.

    Raises:
        BrokerRefusedError: It has another code.
    """
    if answer.code != ResponseCode.SUCCESS:
        raise error_from_response(answer)
    return answer


def error_from_response(answer: RemotingCommand) -> BrokerRefusedError:
    """Return the exception for an error response."""
    if answer.code not in ACCESS_ERROR_CODES:
        return BrokerRefusedError(answer.code, answer.remark or "")
    try:
        fields = ext_fields(answer)
    except ProtocolError:  # the remark still says why
        fields = {}
    return error_from_code(answer.code, answer.remark or "", fields)


def error_from_code(
    code: int, remark: str, fields: Mapping[str, str] | None = None
) -> BrokerRefusedError:
    """Return the exception for a response code, its remark and the ext fields, if any."""
    if code not in ACCESS_ERROR_CODES:
        return BrokerRefusedError(code, remark)
    fields = fields or {}
    subject, action = fields.get("subject", ""), fields.get("action", "")
    if action:
        return AccessDeniedError(code, remark, subject, action, fields.get("resource", ""))
    if subject:
        return AuthenticationError(code, remark, subject)
    match = _UNAUTHENTICATED.match(remark)
    if match is not None:
        key = match["key"]
        subject = match["user"] or match["signer"] or (f"accessKey:{key}" if key else "")
        return AuthenticationError(code, remark, subject)
    match = _DENIED.match(remark)
    if match is not None:
        subject = match["subject"] or (f"accessKey:{match['key']}" if match["key"] else "")
        resource = match["resource"] or (
            f"{match['kind'].capitalize()}:{match['name']}" if match["kind"] else ""
        )
        action = match["action"] or ""
        return AccessDeniedError(
            code, remark, subject, "" if action == _ANY_ACTION else action, resource
        )
    return BrokerRefusedError(code, remark)
