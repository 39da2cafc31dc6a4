"""Requests about users, policies and plain-ACL files.

A change is answered when it is on disk. Only a super user may change users and policies; secrets
are shown to nobody.
Source: RocketMQ 5.3 ``AdminBrokerProcessor``; 4.9.8 for the codes 50 to 53.
"""

import json
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from halfmq.remoting.access_bodies import (
    AclRequestHeader,
    DeleteAclRequestHeader,
    GetBrokerAclConfigResponseHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserInfo,
    UserRequestHeader,
    decode_acl,
    decode_user,
    encode_access,
)
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...access.control import Subject
from ...access.plain_acl import PlainAcl
from ...access.users import Users, refused
from ...errors import RequestRefusedError, invalid_parameter
from ...ports import Connection, Handlers, serves
from .change_queue import ChangeQueue, P


class UserHandlers(Handlers):
    """Reads and changes users and their policies."""

    def __init__(self, users: Users, changes: ChangeQueue) -> None:
        self._users = users
        self._changes = changes

    @serves(RequestCode.AUTH_CREATE_USER)
    def create_user(self, request: RemotingCommand, connection: Connection) -> None:
        user = _named_user(request)
        what = f"user {user.username}"
        self._make(request, connection, what, self._users.create_user, user)

    @serves(RequestCode.AUTH_UPDATE_USER)
    def update_user(self, request: RemotingCommand, connection: Connection) -> None:
        """Change those fields of a user that are set."""
        user = _named_user(request)
        what = f"user {user.username}"
        self._make(request, connection, what, self._users.update_user, user)

    @serves(RequestCode.AUTH_DELETE_USER)
    def delete_user(self, request: RemotingCommand, connection: Connection) -> None:
        """Remove a user and its policies."""
        name = _username(request)
        self._make(request, connection, f"deleted user {name}", self._users.delete_user, name)

    @serves(RequestCode.AUTH_GET_USER)
    def get_user(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with a user; without a body if there is none of this name."""
        user = self._users.user(_username(request))
        return encode_reply(request, body=encode_access(_shown(user)) if user else b"")

    @serves(RequestCode.AUTH_LIST_USER)
    def list_users(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with users by name; without a body if there is none."""
        header = request.header_as(ListUsersRequestHeader)
        users = [_shown(user) for user in self._users.users(header.filter or "")]
        return encode_reply(request, body=encode_access(users) if users else b"")

    @serves(RequestCode.AUTH_CREATE_ACL, RequestCode.AUTH_UPDATE_ACL)
    def put_acl(self, request: RemotingCommand, connection: Connection) -> None:
        """Add entries to a subject's policies, or change them."""
        header = request.header_as(AclRequestHeader)
        acl = decode_acl(request.body)
        acl = replace(acl, subject=acl.subject or header.subject or "")
        self._make(request, connection, f"acl {acl.subject}", self._users.put_acl, acl)

    @serves(RequestCode.AUTH_DELETE_ACL)
    def delete_acl(self, request: RemotingCommand, connection: Connection) -> None:
        """Remove a subject's entries about a resource, or all of its policies."""
        header = request.header_as(DeleteAclRequestHeader)
        subject = header.subject or ""
        acl = subject, header.policy_type, header.resource
        self._make(request, connection, f"deleted acl {subject}", self._users.delete_acl, *acl)

    @serves(RequestCode.AUTH_GET_ACL)
    def get_acl(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the policies of a subject; without a body if it has none."""
        header = request.header_as(AclRequestHeader)
        acl = self._users.acl(header.subject or "")
        return encode_reply(request, body=encode_access(acl) if acl else b"")

    @serves(RequestCode.AUTH_LIST_ACL)
    def list_acls(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with policies by subject; without a body if there is none."""
        header = request.header_as(ListAclsRequestHeader)
        acls = self._users.acls(header.subject_filter or "", header.resource_filter or "")
        return encode_reply(request, body=encode_access(acls) if acls else b"")

    def _make(
        self,
        request: RemotingCommand,
        connection: Connection,
        what: str,
        change: Callable[P, Awaitable[None]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Make a change for a super user; others could grant themselves every right."""
        if not _is_super(request):
            raise refused("only a super user may change users and policies")
        self._changes.make(request, connection, what, change, *arguments, **named)


class PlainAclHandlers(Handlers):
    """Serves the version of the plain-ACL files, and refuses to change them by requests."""

    def __init__(self, accounts: PlainAcl, broker_name: str, cluster_name: str) -> None:
        self._accounts = accounts
        self._broker_name = broker_name
        self._cluster_name = cluster_name

    @serves(
        RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
        RequestCode.DELETE_ACL_CONFIG,
        RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
    )
    def refuse(self, _request: RemotingCommand, _connection: Connection) -> bytes:
        """Refuse with a remark that names the file to edit."""
        raise RequestRefusedError(
            f"accounts are not changed by requests: edit {self._accounts.files[0]} on the broker's "
            "machine, it is read again within seconds"
        )

    @serves(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
    def version(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the version of the accounts that are in force."""
        version = self._accounts.version
        header = GetBrokerAclConfigResponseHeader(
            version=json.dumps(version),
            all_acl_file_version=json.dumps({str(file): version for file in self._accounts.files}),
            broker_name=self._broker_name,
            broker_addr=connection.broker_address,
            cluster_name=self._cluster_name,
        )
        return encode_reply(request, header=header)


def _named_user(request: RemotingCommand) -> UserInfo:
    name = _username(request)
    return replace(decode_user(request.body), username=name)


def _username(request: RemotingCommand) -> str:
    header = request.header_as(UserRequestHeader)
    if not (header.username or "").strip():
        raise invalid_parameter("The username is blank")
    return header.username or ""


def _is_super(request: RemotingCommand) -> bool:
    subject = request.subject
    return isinstance(subject, Subject) and subject.principal.is_super


def _shown(user: UserInfo) -> UserInfo:
    return replace(user, password=None)  # a text in its place would be copied by tools
