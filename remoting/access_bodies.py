"""Bodies and headers of requests about users and policies (3001 to 3010), and of 50 to 53.

Source: RocketMQ 5.3 ``UserInfo``, ``AclInfo``; 4.9.8 ``header`` classes; frames of mqadmin 5.3.3.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from .codes import RequestCode
from .ext_fields import Header, Name, answer_header, request_header
from .fastjson import json_reader


class _Body(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False
):
    """Base of the structs that are one JSON object on the wire."""


class UserInfo(_Body, frozen=True, kw_only=True):
    """A user account. In an update, fields that are None stay unchanged."""

    password: str | None = None
    user_status: str | None = None  # "enable", "disable"
    user_type: str | None = None  # "Super", "Normal"
    username: str = ""

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r}, {self.user_type}, {self.user_status})"


class PolicyEntryInfo(_Body, frozen=True, kw_only=True):
    """The actions that are allowed or denied on one resource."""

    actions: tuple[str, ...] = ()  # "Pub", "Sub", "Create", "Update", "Delete", "Get", "List"
    decision: str | None = None  # "Allow", "Deny"
    resource: str = ""  # "*", "Topic:*", "Topic:orders*", "Group:g", "Cluster:c"
    source_ips: tuple[str, ...] | None = None  # addresses and networks; None: from anywhere


class PolicyInfo(_Body, frozen=True, kw_only=True):
    """Entries of one type; those of type "Default" apply if no "Custom" entry matches."""

    entries: tuple[PolicyEntryInfo, ...] = ()
    policy_type: str | None = None


class AclInfo(_Body, frozen=True, kw_only=True):
    """The access policies of one subject."""

    policies: tuple[PolicyInfo, ...] = ()
    subject: str = ""  # "User:NAME"


@request_header(
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_GET_USER,
)
class UserRequestHeader(Header, frozen=True, kw_only=True):
    """Requests 3001 to 3004: create, update, delete or get a user."""

    username: Name | None = None


@request_header(RequestCode.AUTH_LIST_USER)
class ListUsersRequestHeader(Header, frozen=True, kw_only=True):
    filter: Name | None = None  # part of a name


@request_header(RequestCode.AUTH_CREATE_ACL, RequestCode.AUTH_UPDATE_ACL, RequestCode.AUTH_GET_ACL)
class AclRequestHeader(Header, frozen=True, kw_only=True):
    """Requests 3006, 3007 and 3009: create, update or get an ACL."""

    subject: Name | None = None


@request_header(RequestCode.AUTH_DELETE_ACL)
class DeleteAclRequestHeader(Header, frozen=True, kw_only=True):
    subject: Name | None = None
    policy_type: Name | None = None
    resource: Name | None = None  # None: all


@request_header(RequestCode.AUTH_LIST_ACL)
class ListAclsRequestHeader(Header, frozen=True, kw_only=True):
    subject_filter: Name | None = None
    resource_filter: Name | None = None


@answer_header(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
class GetBrokerAclConfigResponseHeader(Header, frozen=True, kw_only=True):
    version: str  # data version as JSON text
    broker_name: str
    broker_addr: str
    cluster_name: str
    all_acl_file_version: str | None = None  # map of file to data version as JSON text


def encode_access(value: UserInfo | AclInfo | Sequence[UserInfo] | Sequence[AclInfo]) -> bytes:
    """Encode one user or ACL, or a list of them."""
    return _encode(value)


_encode = msgspec.json.Encoder().encode


decode_user: Final = json_reader(UserInfo, "a user")
"""Decodes the user in a request."""
decode_users: Final = json_reader(list[UserInfo], "a list of users", empty=b"[]")
"""Decodes the users in an answer."""
decode_acl: Final = json_reader(AclInfo, "an ACL")
"""Decodes the policies in a request."""
decode_acls: Final = json_reader(list[AclInfo], "a list of ACLs", empty=b"[]")
"""Decodes the policies in an answer."""
