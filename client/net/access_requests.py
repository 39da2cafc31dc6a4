"""Requests about users and policies to one broker, as RocketMQ 5.3 defines them."""

from __future__ import annotations

from collections.abc import Sequence

from halfmq.remoting.access_bodies import (
    AclInfo,
    AclRequestHeader,
    DeleteAclRequestHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserInfo,
    UserRequestHeader,
    decode_acl,
    decode_acls,
    decode_user,
    decode_users,
    encode_access,
)
from halfmq.remoting.codes import RequestCode

from ..access import Acl, AclEntry, User, acl_from_info, acl_to_info, user_from_info, user_to_info
from .response_errors import answer_of
from .session import RequestFamily


class AccessRequests(RequestFamily):
    """Reads and changes the users and policies of a broker.

    A broker without users (``authenticationEnabled=false``) does not support these requests.
    """

    async def users(self, name_contains: str) -> list[User]:
        header = ListUsersRequestHeader(filter=name_contains or None)
        body = await self._request(RequestCode.AUTH_LIST_USER, header)
        with answer_of(self._address):
            return [user_from_info(info) for info in decode_users(body)]

    async def user(self, name: str) -> User | None:
        body = await self._request(RequestCode.AUTH_GET_USER, UserRequestHeader(username=name))
        with answer_of(self._address):
            return user_from_info(decode_user(body)) if body else None

    async def create_user(self, user: User) -> None:
        info = user_to_info(user.name, user.password, is_super=user.is_super, enabled=user.enabled)
        await self._send_user(RequestCode.AUTH_CREATE_USER, info)

    async def update_user(self, info: UserInfo) -> None:
        await self._send_user(RequestCode.AUTH_UPDATE_USER, info)

    async def delete_user(self, name: str) -> None:
        await self._request(RequestCode.AUTH_DELETE_USER, UserRequestHeader(username=name))

    async def acls(self, subject_contains: str, resource_contains: str) -> list[Acl]:
        header = ListAclsRequestHeader(
            subject_filter=subject_contains or None, resource_filter=resource_contains or None
        )
        body = await self._request(RequestCode.AUTH_LIST_ACL, header)
        with answer_of(self._address):
            return [acl_from_info(info) for info in decode_acls(body)]

    async def acl(self, subject: str) -> Acl | None:
        body = await self._request(RequestCode.AUTH_GET_ACL, AclRequestHeader(subject=subject))
        with answer_of(self._address):
            return acl_from_info(decode_acl(body)) if body else None

    async def create_acl(self, subject: str, entries: Sequence[AclEntry]) -> None:
        await self._send_acl(RequestCode.AUTH_CREATE_ACL, acl_to_info(subject, entries))

    async def update_acl(self, subject: str, entries: Sequence[AclEntry]) -> None:
        await self._send_acl(RequestCode.AUTH_UPDATE_ACL, acl_to_info(subject, entries))

    async def delete_acl(self, subject: str, resource: str | None, policy_type: str | None) -> None:
        header = DeleteAclRequestHeader(subject=subject, policy_type=policy_type, resource=resource)
        await self._request(RequestCode.AUTH_DELETE_ACL, header)

    async def _send_user(self, code: RequestCode, user: UserInfo) -> None:
        await self._request(code, UserRequestHeader(username=user.username), encode_access(user))

    async def _send_acl(self, code: RequestCode, acl: AclInfo) -> None:
        await self._request(code, AclRequestHeader(subject=acl.subject), encode_access(acl))
