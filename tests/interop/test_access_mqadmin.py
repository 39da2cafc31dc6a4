"""The official operators' tool, mqadmin, against users, policies and a plain ACL.

What 5.3.3 prints here is what it prints with an official broker, which the recording
``acl2-mqadmin-5.3.3`` was made with. Its commands about users and policies need the requests 3001
to 3010 and, with ``-c CLUSTER``, 106: all of them are served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from halfmq.client.testing import broker_process
from tests.support.access import Account
from tests.support.access_files import (
    APPLICATION,
    OPERATOR,
    Policy,
    user_settings,
    write_plain_acl,
    write_users,
)
from tests.support.mqadmin import Mqadmin, mqadmin

pytestmark = pytest.mark.campaign


class Tool:
    """mqadmin, which reads the keys of an account for each command."""

    def __init__(self, tool: Mqadmin) -> None:
        self.broker, self._tool = tool.broker, tool

    def run(self, *arguments: str, keys: Account = OPERATOR) -> list[str]:
        """Have a command run; return the lines that it prints."""
        self._write(keys)
        return self._tool.run(*arguments)

    def failure(self, *arguments: str, keys: Account = OPERATOR) -> str:
        """Have a command run that does not succeed; return what it says."""
        self._write(keys)
        return self._tool.failure(*arguments)

    def _write(self, keys: Account) -> None:
        file = self._tool.home / "conf" / "tools.yml"
        file.write_text(f"accessKey: {keys.name}\nsecretKey: {keys.secret}\n")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    """A broker with users; mqadmin 5.3.3."""
    home = tmp_path_factory.mktemp("users")
    write_users(home / "broker" / "store", [(APPLICATION, [Policy("Topic:java-*", "Pub,Sub")])])
    with ExitStack() as stack:
        yield Tool(mqadmin(stack, "5.3.3", home, **user_settings()))


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    """A broker with a plain ACL; mqadmin 4.9.8."""
    home = tmp_path_factory.mktemp("accounts")
    file = write_plain_acl(home / "plain_acl.yml", [(OPERATOR, {"admin": True}), (APPLICATION, {})])
    with ExitStack() as stack:
        settings: dict[str, object] = {"aclEnable": "true", "plainAclFile": file}
        yield Tool(mqadmin(stack, "4.9.8", home, **settings))


USER_TABLE = "#UserName #Password #UserType #UserStatus"
ACL_TABLE = "#Subject #PolicyType #Resource #Actions #SourceIp #Decision"


def test_users_are_made_changed_shown_and_removed(users: Tool) -> None:
    """createUser, updateUser, getUser, listUser and deleteUser, at an address and in a cluster."""
    address = users.broker.address
    at, everywhere = ("-b", address), ("-c", "DefaultCluster")

    assert users.run("createUser", *at, "-u", "carol", "-p", "carol-1", "-t", "Normal") == [
        f"create user to {address} success."
    ]
    assert users.run("getUser", *at, "-u", "carol") == [
        USER_TABLE,
        "carol null Normal enable",
    ]
    again = users.failure("createUser", *at, "-u", "carol", "-p", "carol-1")
    assert "The user is existed" in again
    for change in (("-p", "carol-2"), ("-s", "disable")):
        assert users.run("updateUser", *everywhere, "-u", "carol", *change) == [
            f"update user to {address} success."
        ]
    assert users.run("listUser", *everywhere, "-f", "carol") == [
        USER_TABLE,
        "carol null Normal disable",
        f"get user from {address} success.",
    ]
    disabled = users.failure("getUser", *at, "-u", "carol", keys=Account("carol", "carol-2"))
    assert "CODE: 16 DESC: User:carol is disabled." in disabled
    assert users.run("deleteUser", *at, "-u", "carol") == [f"delete user to {address} success."]
    assert users.run("getUser", *at, "-u", "carol") == []


def test_policies_are_made_changed_shown_and_removed(users: Tool) -> None:
    """createAcl, updateAcl, getAcl, listAcl and deleteAcl, at an address and in a cluster."""
    address = users.broker.address
    at, everywhere = ("-b", address), ("-c", "DefaultCluster")
    users.run("createUser", *at, "-u", "dora", "-p", "dora-1")
    whose = ("-s", "User:dora")

    made = users.run(
        *("createAcl", *at, *whose, "-r", "Topic:orders*,Group:billing"),
        *("-a", "Pub,Sub", "-i", "127.0.0.1,10.0.0.0/8", "-d", "Allow"),
    )
    assert made == [f"create acl to {address} success."]
    sources = "[127.0.0.1, 10.0.0.0/8]"
    assert users.run("getAcl", *at, *whose) == [
        ACL_TABLE,
        f"User:dora Custom Topic:orders* [Pub, Sub] {sources} Allow",
        f"User:dora Custom Group:billing [Pub, Sub] {sources} Allow",
    ]
    changed = users.run(
        "updateAcl", *everywhere, *whose, "-r", "Group:billing", "-a", "Sub", "-d", "Deny"
    )
    assert changed == [f"update acl to {address} success."]
    assert users.run("listAcl", *everywhere, *whose, "-r", "billing") == [
        ACL_TABLE,
        "User:dora Custom Group:billing [Sub] null Deny",
    ]
    removed = users.run("deleteAcl", *at, *whose, "-r", "Group:billing")
    assert removed == [f"delete acl to {address} success."]
    assert len(users.run("getAcl", *at, *whose)) == 2
    users.run("deleteAcl", *everywhere, *whose)
    assert users.run("getAcl", *at, *whose) == []
    wrong = users.failure("createAcl", *at, *whose, "-r", "Orders", "-a", "Pub", "-d", "Allow")
    assert "The resource" in wrong


def test_users_and_policies_are_copied_to_another_broker(users: Tool, tmp_path: Path) -> None:
    """As copyUser and copyAcl do it, by reading here and writing there; without passwords."""
    with broker_process(tmp_path / "target", **user_settings()) as target:
        ways = ("-f", users.broker.address, "-t", target.address)

        way = f"from {users.broker.address} to {target.address} success."
        wanted = ("copyUser", *ways, "-u", APPLICATION.name)
        assert "password can not be blank" in users.failure(*wanted)
        keys = ("-u", APPLICATION.name, "-p", APPLICATION.secret)
        users.run("createUser", "-b", target.address, *keys)
        copied = users.run(*wanted)
        assert f"copy user of {APPLICATION.name} {way}" in copied
        copied = users.run("copyAcl", *ways, "-s", f"User:{APPLICATION.name}")
        assert f"copy acl of User:{APPLICATION.name} {way}" in copied
        for command in (
            ("getUser", "-u", APPLICATION.name),
            ("getAcl", "-s", f"User:{APPLICATION.name}"),
        ):
            there = users.run(command[0], "-b", target.address, *command[1:])
            assert there == users.run(command[0], "-b", users.broker.address, *command[1:])


@pytest.mark.parametrize(
    "command",
    [
        ("updateBrokerConfig", "-k", "brokerPermission", "-v", "4"),
        ("getBrokerConfig",),
        ("updateSubGroup", "-g", "mine-now"),
        ("updateTopic", "-t", "mine-now"),
        ("listUser",),
        ("createUser", "-u", "root", "-p", "root-1", "-t", "Super"),
        ("createAcl", "-s", f"User:{APPLICATION.name}", "-r", "*", "-a", "All", "-d", "Allow"),
    ],
    ids=lambda command: command[0],
)
def test_a_user_without_the_right_is_refused(users: Tool, command: tuple[str, ...]) -> None:
    """With RocketMQ 5.3.3 any user changes settings, creates groups and reads the configuration."""
    failure = users.failure(command[0], "-b", users.broker.address, *command[1:], keys=APPLICATION)

    assert f"CODE: 16 DESC: User:{APPLICATION.name} has no permission to" in failure


@pytest.mark.parametrize(
    "command",
    [
        ("updateAclConfig", "-a", "RocketMQ2", "-s", "12345678"),
        ("deleteAclConfig", "-a", APPLICATION.name),
        ("updateGlobalWhiteAddr", "-g", "10.10.10.10"),
    ],
    ids=lambda command: command[0],
)
def test_accounts_are_not_changed_by_requests(accounts: Tool, command: tuple[str, ...]) -> None:
    """The file is the only place to edit, which the answer says; 4.9.8 shows it."""
    failure = accounts.failure(command[0], "-b", accounts.broker.address, *command[1:])

    assert "accounts are not changed by requests: edit" in failure
    assert "plain_acl.yml" in failure


def test_the_version_of_accounts_is_shown(accounts: Tool) -> None:
    """There is a line for each file in the table of clusterAclConfigVersion."""
    lines = accounts.run("clusterAclConfigVersion", "-c", "DefaultCluster")

    assert lines[0].startswith("#Cluster Name #Broker Name #Broker Addr")
    assert lines[-1] == "get cluster's plain access config version success."
    cluster, broker, address, file, counter, *_when = lines[1].split()
    assert (cluster, broker, address) == ("DefaultCluster", "broker-a", accounts.broker.address)
    assert (Path(file).name, counter) == ("plain_acl.yml", "1")
    refused = accounts.failure("clusterAclConfigVersion", "-c", "DefaultCluster", keys=APPLICATION)
    assert f"accessKey:{APPLICATION.name} has no permission to Get Cluster" in refused
