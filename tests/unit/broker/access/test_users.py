"""Users and policies: what they allow, how they change, and what is left after a restart."""

from __future__ import annotations

import asyncio
import ipaddress
import stat
from pathlib import Path
from unittest import mock

import pytest

from halfmq.broker.access.requirements import cluster, group, topic
from halfmq.broker.access.rules import Action
from halfmq.broker.access.users import ENTRIES_MAX, Users
from halfmq.broker.errors import RequestRefusedError
from halfmq.remoting.access_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from halfmq.remoting.codes import ResponseCode
from halfmq.store.errors import DamagedTableError
from halfmq.store.files import disk

HERE = ipaddress.ip_address("127.0.0.1")
PUB, SUB, GET, UPDATE = Action.PUB, Action.SUB, Action.GET, Action.UPDATE


def entry(resource: str, *actions: str, decision: str = "Allow", **more: object) -> PolicyEntryInfo:
    """Return one entry of a policy."""
    return PolicyEntryInfo(resource=resource, actions=actions, decision=decision, **more)  # type: ignore[arg-type]


def acl(*entries: PolicyEntryInfo, user: str = "alice", kind: str | None = None) -> AclInfo:
    """Return an ACL of one policy."""
    return AclInfo(
        subject=f"User:{user}", policies=(PolicyInfo(policy_type=kind, entries=entries),)
    )


@pytest.fixture
async def users(tmp_path: Path) -> Users:
    """A table with the user alice, who may do nothing yet."""
    table = Users(tmp_path / "halfmqAccess.json")
    table.load()
    await table.create_user(UserInfo(username="alice", password="alice12345"))
    return table


def allowed(users: Users, requirement: object, address: object = HERE) -> bool:
    """Whether alice may."""
    principal = users.find("alice")
    assert principal is not None
    return principal.refusal(requirement, address) is None  # type: ignore[arg-type]


async def test_a_user_without_policies_may_do_nothing(users: Users) -> None:
    """A new user is normal and enabled."""
    assert not allowed(users, topic("T", PUB))
    assert not allowed(users, cluster(GET))
    user = users.user("alice")
    assert user is not None
    assert (user.user_type, user.user_status) == ("Normal", "enable")


async def test_the_most_specific_entry_decides(users: Users) -> None:
    """A name before a prefix, a long prefix before a short one, a kind before everything."""
    await users.put_acl(
        acl(
            entry("*", "Pub"),
            entry("Topic:*", "Pub", decision="Deny"),
            entry("Topic:acl*", "Pub"),
            entry("Topic:acl_s*", "Pub", decision="Deny"),
            entry("Topic:acl_send", "Pub", "Sub"),
            entry("Group:g", "Sub"),
        )
    )

    assert allowed(users, topic("acl_send", PUB))
    assert not allowed(users, topic("acl_sxyz", PUB))
    assert allowed(users, topic("acl_other", PUB))
    assert not allowed(users, topic("other", PUB))
    assert allowed(users, group("anything", PUB))
    assert allowed(users, group("g", SUB))
    assert not allowed(users, group("h", SUB))
    assert allowed(users, topic("acl_other", SUB, PUB))  # one of the actions is enough
    assert not allowed(users, topic("acl_other", SUB))


async def test_default_entries_count_only_without_a_custom_one(users: Users) -> None:
    """A custom denial wins over every default."""
    await users.put_acl(acl(entry("Topic:*", "Pub", "Sub"), kind="Default"))
    await users.put_acl(acl(entry("Topic:secret", "All", decision="Deny")))

    assert allowed(users, topic("T", PUB))
    assert not allowed(users, topic("secret", PUB))


async def test_an_entry_may_be_bound_to_addresses(users: Users) -> None:
    """For other addresses the entry is ignored."""
    await users.put_acl(acl(entry("Topic:T", "Pub", source_ips=("10.0.0.0/8", "127.0.0.1"))))

    assert allowed(users, topic("T", PUB))
    assert allowed(users, topic("T", PUB), ipaddress.ip_address("10.9.9.9"))
    assert not allowed(users, topic("T", PUB), ipaddress.ip_address("192.168.0.1"))


async def test_an_update_replaces_the_entry_about_the_same_resource(
    users: Users,
) -> None:
    """As in RocketMQ, where createAcl and updateAcl are the same."""
    await users.put_acl(acl(entry("Topic:T", "Pub"), entry("Topic:U", "Pub")))
    await users.put_acl(acl(entry("Topic:T", "Sub")))

    assert not allowed(users, topic("T", PUB))
    assert allowed(users, topic("T", SUB))
    assert allowed(users, topic("U", PUB))


async def test_entries_are_deleted_by_resource_or_all_together(users: Users) -> None:
    """Deleting the last entry deletes the ACL."""
    await users.put_acl(acl(entry("Topic:T", "Pub"), entry("Topic:U", "Pub")))

    await users.delete_acl("User:alice", None, "Topic:T")
    assert not allowed(users, topic("T", PUB))
    assert allowed(users, topic("U", PUB))

    await users.delete_acl("User:alice", "Custom", "Topic:U")
    assert users.acl("User:alice") is None
    with pytest.raises(RequestRefusedError, match="The acl is not exist"):
        await users.delete_acl("User:alice", None, None)


async def test_lists_are_filtered_by_parts_of_names(users: Users) -> None:
    """Subjects whose entries do not match are left out."""
    await users.create_user(UserInfo(username="bob", password="bob1234567"))
    await users.put_acl(acl(entry("Topic:T", "Pub"), entry("Topic:U", "Pub")))
    await users.put_acl(acl(entry("Group:g", "Sub"), user="bob"))

    assert [one.username for one in users.users("b")] == ["bob"]
    assert [one.subject for one in users.acls()] == ["User:alice", "User:bob"]
    assert [one.subject for one in users.acls("bob")] == ["User:bob"]
    (found,) = users.acls("", "Topic:U")
    assert [one.resource for one in found.policies[0].entries] == ["Topic:U"]


async def test_users_and_policies_survive_a_restart(users: Users, tmp_path: Path) -> None:
    """With secrets and states; other users of the machine cannot read them."""
    file = tmp_path / "halfmqAccess.json"
    await users.put_acl(acl(entry("Topic:T", "Pub", source_ips=("127.0.0.1",))))
    await users.update_user(UserInfo(username="alice", user_status="disable"))

    again = Users(file)
    again.load()

    principal = again.find("alice")
    assert principal is not None
    assert not principal.enabled
    assert allowed(again, topic("T", PUB))
    assert again.user("alice") == users.user("alice")
    for path in (file, file.with_name(file.name + ".bak")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_deleted_user_leaves_no_policies_behind(users: Users) -> None:
    """A new user of the same name begins with nothing."""
    await users.put_acl(acl(entry("Topic:T", "Pub")))
    await users.delete_user("alice")
    await users.delete_user("alice")  # a second time changes nothing
    await users.create_user(UserInfo(username="alice", password="another1"))

    assert not allowed(users, topic("T", PUB))


async def test_a_change_that_is_not_saved_has_no_effect(users: Users) -> None:
    """A restart would lose it; the refusal has the reason."""
    with (
        mock.patch.object(disk, "replace", side_effect=OSError(28, "No space left on device")),
        pytest.raises(RequestRefusedError, match="No space left"),
    ):
        await users.put_acl(acl(entry("Topic:T", "Pub")))

    assert not allowed(users, topic("T", PUB))
    await users.put_acl(acl(entry("Topic:T", "Pub")))
    assert allowed(users, topic("T", PUB))


async def test_concurrent_changes_are_all_kept(users: Users, tmp_path: Path) -> None:
    """Each change is applied to the result of the previous one."""
    await asyncio.gather(
        *(users.put_acl(acl(entry(f"Topic:T{number}", "Pub"))) for number in range(20))
    )

    again = Users(tmp_path / "halfmqAccess.json")
    again.load()
    assert all(allowed(again, topic(f"T{number}", PUB)) for number in range(20))


@pytest.mark.parametrize(
    ("wrong", "remark"),
    [
        (acl(), "The policy entries is empty"),
        (AclInfo(subject="User:alice"), "The policies is empty"),
        (acl(entry("Topic:T", "Pub"), user="nobody"), "The subject of User:nobody is not exist"),
        (acl(entry("Topic:T", "Pub"), kind="Other"), "policyType Other"),
        (acl(entry("Topic:T")), "The actions is empty"),
        (acl(entry("Topic:T", "Any")), "The actions Any is unknown"),
        (acl(entry("Topic:T", "Pub", decision="Maybe")), "The decision is null or illegal"),
        (acl(entry("Queue:T", "Pub")), "The resource Queue:T is unknown"),
        (acl(entry("Topic:", "Pub")), "The resource Topic: is unknown"),
        (acl(entry("T", "Pub")), "The resource T is unknown"),
        (acl(entry("Topic:T", "Pub", source_ips=("here",))), "The source ip is invalid"),
        (
            acl(*(entry(f"Topic:T{n}", "Pub") for n in range(ENTRIES_MAX + 1))),
            f"more than {ENTRIES_MAX} entries",
        ),
    ],
)
async def test_an_invalid_policy_is_refused_completely(
    users: Users, wrong: AclInfo, remark: str
) -> None:
    """With RocketMQ's code, and a remark that names the mistake."""
    with pytest.raises(RequestRefusedError) as caught:
        await users.put_acl(wrong)

    assert caught.value.code is ResponseCode.NO_PERMISSION
    assert remark in caught.value.remark
    assert users.acl("User:alice") is None


@pytest.mark.parametrize(
    ("wrong", "remark"),
    [
        (UserInfo(username=" ", password="12345678"), "username can not be blank"),
        (UserInfo(username="bob"), "password can not be blank"),
        (UserInfo(username="alice", password="12345678"), "The user is existed"),
        (UserInfo(username="bob", password="12345678", user_type="Root"), "userType Root"),
        (UserInfo(username="bob", password="12345678", user_status="off"), "userStatus off"),
        (UserInfo(username="b" * 256, password="12345678"), "more than 255 characters"),
        (UserInfo(username="b\nc", password="12345678"), "unprintable"),
    ],
)
async def test_a_wrong_user_is_refused(users: Users, wrong: UserInfo, remark: str) -> None:
    """With RocketMQ's code; nothing is created."""
    with pytest.raises(RequestRefusedError) as caught:
        await users.create_user(wrong)

    assert caught.value.code is ResponseCode.NO_PERMISSION
    assert remark in caught.value.remark
    assert [one.username for one in users.users()] == ["alice"]


def test_a_damaged_table_stops_the_start(tmp_path: Path) -> None:
    """An empty table would refuse every request, or create the first user again."""
    file = tmp_path / "halfmqAccess.json"
    file.write_text('{"users":{"alice":{"password":7}},"acls":{}}')

    with pytest.raises(DamagedTableError):
        Users(file).load()


def test_no_secret_is_shown() -> None:
    """A log line or a traceback may contain the object."""
    assert "alice12345" not in repr(UserInfo(username="alice", password="alice12345"))
