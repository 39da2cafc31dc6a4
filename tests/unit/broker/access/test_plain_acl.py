"""The accounts of a plain ACL: what a file grants, what is wrong with it, and its reload."""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path

import pytest

from halfmq.broker.access.plain_acl import PlainAcl, PlainAclError
from halfmq.broker.access.requirements import cluster, group, topic
from halfmq.broker.access.rules import Action, Principal, Requirement

HERE = ipaddress.ip_address("127.0.0.1")
PUB, SUB, GET, CREATE = Action.PUB, Action.SUB, Action.GET, Action.CREATE

RESTRICTED = """
globalWhiteRemoteAddresses:
- 10.10.103.*
- ""
- 192.168.0.{7,8}
accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  whiteRemoteAddress: 10.9.0.1
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  - groupA=DENY
  - groupB=PUB|SUB
- accessKey: operator
  secretKey: "87654321"
  admin: true
- accessKey: gatekeeper
  secretKey: "87654321"
  admin: true
  topicPerms: [topicA=DENY]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A plain ACL of three accounts."""
    path = tmp_path / "plain_acl.yml"
    path.write_text(RESTRICTED)
    return path


def _account(acl: PlainAcl, name: str) -> Principal:
    found = acl.find(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("requirement", "allowed"),
    [
        (topic("topicA", PUB), False),
        (topic("topicA", SUB), False),
        (topic("topicB", PUB), True),
        (topic("topicB", SUB), True),
        (topic("topicC", PUB), False),
        (topic("topicC", SUB), True),
        (topic("other", SUB), False),
        (topic("%RETRY%other", SUB), True),
        (topic("%RETRY%groupA", SUB), False),
        (group("groupA", SUB), False),
        (group("groupB", SUB), True),
        (group("other", SUB), True),
        (topic("topicC", PUB, SUB, GET), True),
        (topic("topicB", CREATE), False),
        (group("groupB", CREATE), False),
        (cluster(GET), False),
    ],
)
def test_permissions_of_an_account_count_before_its_defaults(
    file: Path, requirement: Requirement, allowed: bool
) -> None:
    """Named resources first, then the defaults; only admins may administrate."""
    account = _account(PlainAcl(file), "RocketMQ")

    assert (account.refusal(requirement, HERE) is None) is allowed


def test_only_an_admin_without_permissions_may_do_everything(
    file: Path,
) -> None:
    """As in RocketMQ 4.9: `topicPerms` limit an `admin` too."""
    acl = PlainAcl(file)
    operator, gatekeeper = _account(acl, "operator"), _account(acl, "gatekeeper")

    assert operator.refusal(topic("topicA", PUB), HERE) is None
    assert gatekeeper.refusal(topic("topicA", CREATE), HERE) is None
    assert gatekeeper.refusal(cluster(GET), HERE) is None
    assert gatekeeper.refusal(topic("topicA", PUB), HERE) is not None
    assert gatekeeper.refusal(topic("other", SUB), HERE) is not None


def test_addresses_are_trusted_for_all_or_for_one_account(file: Path) -> None:
    """The white list of the file needs no key at all; that of an account needs its key."""
    acl = PlainAcl(file)

    assert acl.trusts(ipaddress.ip_address("10.10.103.9"))
    assert acl.trusts(ipaddress.ip_address("192.168.0.8"))
    assert not acl.trusts(ipaddress.ip_address("10.9.0.1"))
    assert [
        p(ipaddress.ip_address("10.9.0.1")) for p in _account(acl, "RocketMQ").trusted_from
    ] == [True]


def test_files_of_the_folder_beside_it_are_read_too(file: Path) -> None:
    """RocketMQ 4.9.3 and later: `acl/*.yml`, each with accounts and addresses of its own."""
    folder = file.parent / "acl"
    folder.mkdir()
    (folder / "team.yml").write_text(
        "globalWhiteRemoteAddresses: ['::1']\n"
        "accounts: [{accessKey: team-key, secretKey: team-secret, defaultTopicPerm: PUB}]\n"
    )
    (folder / "notes.txt").write_text("not an account")

    acl = PlainAcl(file)

    assert _account(acl, "team-key").refusal(topic("T", PUB), HERE) is None
    assert acl.trusts(ipaddress.ip_address("::1"))
    assert acl.find("RocketMQ") is not None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("accounts: [", "not YAML"),
        ("accounts: [{secretKey: '12345678', accessKey: [}]", "not YAML: line 1"),
        ("accounts: !!python/object/apply:os.system ['true']", "not YAML"),
        ("- accessKey: RocketMQ", "expected the keys"),
        ("accounts: {accessKey: RocketMQ}", "accounts: expected a list"),
        ("account: []", "unknown key 'account'"),
        ("accounts: [RocketMQ]", "account 1: expected keys like accessKey"),
        ("accounts: [{secretKey: '12345678'}]", "account 1: accessKey is missing"),
        ("accounts: [{accessKey: RocketMQ}]", "account 1: secretKey is missing"),
        ("accounts: [{accessKey: short, secretKey: '12345678'}]", "fewer than 7 characters"),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', topicPerms: [T=READ]}]",
            "topicPerms: 'READ': expected one of DENY, PUB",
        ),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', groupPerms: [g]}]",
            "groupPerms: 'g': expected a name, = and a permission",
        ),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', defaultTopicPerm: ALL}]",
            "defaultTopicPerm: 'ALL': expected one of",
        ),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', admin: maybe}]",
            "admin: expected true or false",
        ),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', whiteRemoteAddress: here}]",
            "'here' is not an address",
        ),
        (
            "accounts: [{accessKey: RocketMQ, secretKey: '12345678', topicPermissions: []}]",
            "unknown key 'topicPermissions'",
        ),
        ("globalWhiteRemoteAddresses: [10.0.0.300]", "'10.0.0.300' is not an address"),
        (
            "accounts: [&a {accessKey: RocketMQ, secretKey: '12345678'}, *a]",
            "accessKey RocketMQ is used twice",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(
    tmp_path: Path, text: str, complaint: str
) -> None:
    """RocketMQ reads most mistakes as DENY or drops the account; a typo must not do that."""
    path = tmp_path / "plain_acl.yml"
    path.write_text(text)

    with pytest.raises(PlainAclError) as caught:
        PlainAcl(path)

    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """RocketMQ silently creates an empty one, which refuses every request."""
    with pytest.raises(PlainAclError, match="there is no such file"):
        PlainAcl(tmp_path / "plain_acl.yml")


def test_no_secret_is_shown(file: Path) -> None:
    """A log line or a traceback may contain the object."""
    acl = PlainAcl(file)

    assert "12345678" not in repr(acl.find("RocketMQ")) + repr(acl.accounts)


def test_a_changed_file_is_in_force_after_a_reload(file: Path) -> None:
    """Keys can be replaced without a restart."""
    acl = PlainAcl(file)
    assert not acl.reload()

    file.write_text(RESTRICTED.replace("RocketMQ", "NewAccount"))

    assert acl.reload()
    assert acl.find("RocketMQ") is None
    assert acl.find("NewAccount") is not None


def test_a_replaced_file_is_read_even_with_equal_time_and_size(file: Path) -> None:
    """Editors and secret mounts replace files and may preserve their times."""
    acl = PlainAcl(file)
    status = file.stat()
    other = file.with_suffix(".new")
    other.write_text(RESTRICTED.replace("RocketMQ", "RocketXX"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))

    other.replace(file)

    assert acl.reload()
    assert acl.find("RocketXX") is not None


@pytest.mark.parametrize("broken", ["accounts: [", None])
def test_accounts_stay_if_the_changed_file_is_invalid(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written or deleted file changes nobody's access; it is logged once."""
    acl = PlainAcl(file)
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)

    with caplog.at_level(logging.ERROR):
        assert not acl.reload()
        assert not acl.reload()

    assert acl.find("RocketMQ") is not None
    assert len([one for one in caplog.records if "plain_acl_not_reloaded" in one.message]) == 1

    file.write_text(RESTRICTED)

    assert acl.reload()
