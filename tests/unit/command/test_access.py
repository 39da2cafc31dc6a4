"""The command ``halfmq`` at brokers with access control and TLS, and its nouns user and acl."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client import blocking
from halfmq.command.connection_options import FILE_VARIABLE, KEY_VARIABLE, SECRET_VARIABLE
from tests.support.guarded_broker import ADMIN, PUBLISHER, Certificates, GuardedBroker, Keys
from tests.unit.command.test_command import Outcome, Shell

SECRETS = re.compile("admin-secret|publisher-secret|subscriber-secret|new-secret")
READ_BY_ALL = pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedBroker]:
    """A broker with users."""
    broker = GuardedBroker(tmp_path, "users")
    yield broker
    broker.close()


@pytest.fixture
def halfmq(
    capsys: pytest.CaptureFixture[str], guarded: GuardedBroker, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """The command, as the administrator says who it is by the environment."""
    shell = Shell(capsys)
    shell.address = guarded.address
    monkeypatch.setenv(KEY_VARIABLE, ADMIN["access_key"])
    monkeypatch.setenv(SECRET_VARIABLE, ADMIN["secret_key"])
    return shell


def credentials_file(folder: Path, keys: Keys, mode: int = 0o600) -> str:
    """Write a file as mqadmin's tools.yml."""
    path = folder / "tools.yml"
    path.write_text(f"accessKey: {keys['access_key']}\nsecretKey: {keys['secret_key']}\n")
    path.chmod(mode)
    return str(path)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Give the next command this standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# -- who asks


@pytest.mark.parametrize("words", ["tx list", "broker metrics", "group list", "user list"])
def test_every_noun_signs(halfmq: Shell, words: str) -> None:
    """Requests are signed with the key of the environment."""
    done = halfmq(*words.split())

    assert (done.code, done.err) == (0, "")


def test_credentials_come_from_a_file(
    halfmq: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option or a variable names the file, which overrides the key variables."""
    monkeypatch.setenv(KEY_VARIABLE, "nobody")
    file = credentials_file(tmp_path, ADMIN)
    assert halfmq("user", "list").code == 1

    assert halfmq("user", "list", "--credentials", file).code == 0
    monkeypatch.setenv(FILE_VARIABLE, file)
    assert halfmq("user", "list").code == 0
    missing = halfmq("user", "list", "--credentials", str(tmp_path / "none.yml"))
    assert missing.code == 2
    assert "--credentials" in missing.err
    assert "No such file" in missing.err


def test_a_secret_of_digits_is_a_text(halfmq: Shell, tmp_path: Path) -> None:
    """RocketMQ's examples have such secrets."""
    file = tmp_path / "tools.yml"
    file.write_text("accessKey: 007\nsecretKey: 0123\n")
    file.chmod(0o600)

    refused = halfmq("user", "list", "--credentials", str(file))

    assert "User:007: check signature failed" in refused.err


@READ_BY_ALL
def test_a_file_that_others_can_read_is_not_used(halfmq: Shell, tmp_path: Path) -> None:
    """The error says how to fix it."""
    file = credentials_file(tmp_path, ADMIN, mode=0o640)

    refused = halfmq("user", "list", "--credentials", file)

    assert refused.code == 2
    assert f"its mode is 640: chmod 600 {file}" in refused.err


@pytest.mark.parametrize(
    "text", ["", "accessKey: a\n", "- admin-secret\n", "accessKey: [admin-secret", "a: &a [*a]"]
)
def test_a_file_that_is_something_else_is_not_shown(
    halfmq: Shell, tmp_path: Path, text: str
) -> None:
    """The error says what was expected, and contains nothing of the file."""
    file = tmp_path / "tools.yml"
    file.write_text(text)
    file.chmod(0o600)

    refused = halfmq("user", "list", "--credentials", str(file))

    assert refused.code == 2
    assert "accessKey: NAME and secretKey: SECRET" in refused.err
    assert not SECRETS.search(refused.err)


def test_half_of_the_credentials_is_an_error(
    halfmq: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)

    refused = halfmq("tx", "list")

    assert refused.code == 2
    assert refused.err.startswith(f"halfmq: {SECRET_VARIABLE} is None")


def test_a_refusal_says_who_may_not_do_what(halfmq: Shell, tmp_path: Path) -> None:
    """The exit code is 1, as for every refusal."""
    file = credentials_file(tmp_path, PUBLISHER)

    refused = halfmq("tx", "list", "--credentials", file)

    assert (refused.code, refused.out) == (1, "")
    assert "User:publisher has no permission to Get Cluster:DefaultCluster" in refused.err


def test_tls_and_an_authority(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--ca`` trusts a file, ``--tls`` the system; an enforcing broker needs one of them."""
    certificates = Certificates(tmp_path)
    broker = GuardedBroker(tmp_path, None, tlsServerMode="enforcing", **certificates.settings)
    try:
        shell = Shell(capsys)
        shell.address = broker.address
        assert shell("tx", "list", "--ca", str(certificates.trust)).code == 0
        plain = shell("tx", "list")
        assert plain.code == 1
        assert "pass tls=True" in plain.err
        assert plain.err.endswith("of this command: --tls, or --ca FILE\n")
        assert "certificate is not accepted" in shell("tx", "list", "--tls").err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates.trust))
        assert shell("tx", "list", "--tls").code == 0
        assert shell("tx", "list", "--ca", str(tmp_path / "none.pem")).code == 2
    finally:
        broker.close()


# -- users


def test_users_are_listed_and_shown(halfmq: Shell) -> None:
    """A table, or JSON for programs; without secrets."""
    table = halfmq("user", "list")
    assert table.out.splitlines() == [
        "NAME        TYPE    STATUS",
        "admin-key   super   enable",
        "publisher   normal  enable",
        "subscriber  normal  enable",
    ]
    one = {"name": "publisher", "is_super": False, "enabled": True}
    assert halfmq("user", "list", "--filter", "publ", "--json").json == [one]
    assert halfmq("user", "show", "publisher", "--json").json == one
    assert halfmq("user", "list", "--filter", "zzz").out == "no user has such a name\n"
    for words in (["list"], ["show", "publisher"]):
        for more in ([], ["--json"]):
            assert not SECRETS.search(halfmq("user", *words, *more).out)
    missing = halfmq("user", "show", "nobody")
    assert (missing.code, missing.err) == (1, "halfmq: there is no user nobody\n")


def test_a_user_is_created_changed_and_deleted(
    halfmq: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Passwords come from standard input or a file; omitted options change nothing."""
    type_in(monkeypatch, "new-secret\n")
    created = halfmq("user", "create", "bob", "--super", "--password-file", "-", "--json")
    assert (created.code, created.json) == (0, {"name": "bob", "action": "create"})
    again = _with_input(halfmq, monkeypatch, "user", "create", "bob", "--password-file", "-")
    assert again.code == 1
    assert "The user is existed" in again.err

    file = tmp_path / "password"
    file.write_text("new-secret-2", encoding="utf-8-sig")  # as Windows editors write it
    file.chmod(0o600)
    updated = halfmq("user", "update", "bob", "--type", "normal", "--password-file", str(file))
    assert (updated.code, updated.out) == (0, "updated user bob\n")
    shown = halfmq("user", "show", "bob", "--json").json
    assert shown == {"name": "bob", "is_super": False, "enabled": True}
    signed = credentials_file(tmp_path, {"access_key": "bob", "secret_key": "new-secret-2"})
    assert "no permission" in halfmq("user", "list", "--credentials", signed).err
    assert halfmq("user", "update", "bob", "--status", "disable").code == 0
    assert not halfmq("user", "show", "bob", "--json").json["enabled"]

    assert halfmq("user", "delete", "bob").out == "deleted user bob\n"
    assert halfmq("user", "delete", "bob").code == 1
    assert halfmq("user", "update", "bob", "--status", "enable").code == 1
    nothing = halfmq("user", "update", "publisher")
    assert (nothing.code, "nothing to change" in nothing.err) == (2, True)


def test_a_password_is_asked_for_twice_and_not_echoed(
    halfmq: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This needs a terminal; without one it is an error."""
    answers = iter(["new-secret", "new-secret", "new-secret", "another"])
    asked: list[str] = []

    def prompt(text: str) -> str:
        asked.append(text)
        return next(answers)

    no_terminal = _with_input(halfmq, monkeypatch, "user", "create", "bob")
    assert no_terminal.code == 2
    assert "no terminal" in no_terminal.err

    monkeypatch.setattr("getpass.getpass", prompt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert halfmq("user", "create", "bob").code == 0
    assert asked == ["password of bob: ", "password of bob, again: "]
    signed = credentials_file(tmp_path, {"access_key": "bob", "secret_key": "new-secret"})
    assert "no permission" in halfmq("user", "list", "--credentials", signed).err
    differs = halfmq("user", "update", "bob", "--password")
    assert differs.code == 2
    assert "the same text twice" in differs.err
    assert "another" not in differs.err


@pytest.mark.parametrize("words", ["user create bob --password p", "user create bob -p p"])
def test_no_password_is_taken_from_the_command_line(halfmq: Shell, words: str) -> None:
    """Every user of the machine could read it there."""
    assert halfmq(*words.split()).code == 2


# -- policies


def test_policies_are_created_changed_and_deleted(halfmq: Shell) -> None:
    """An entry for each resource; one about the same resource is replaced."""
    words = ["--resource", "Topic:pay*,Group:g", "--actions", "Pub,Sub"]
    created = halfmq("acl", "create", "publisher", *words, "--source", "10.0.0.0/8,127.0.0.1")
    assert (created.code, created.out) == (0, "created entries of publisher\n")
    update = ["--resource", "Topic:pay*", "--actions", "All", "--decision", "deny"]
    assert halfmq("acl", "update", "User:publisher", *update).code == 0

    assert halfmq("acl", "show", "publisher").out.splitlines() == [
        "SUBJECT         POLICY  RESOURCE      ACTIONS  DECISION  FROM",
        "User:publisher  Custom  Topic:orders  Pub      allow     anywhere",
        "User:publisher  Custom  Topic:pay*    All      deny      anywhere",
        "User:publisher  Custom  Group:g       Pub,Sub  allow     10.0.0.0/8,127.0.0.1",
    ]
    (listed,) = halfmq("acl", "list", "--subject", "publ", "--resource", "Group", "--json").json
    assert listed == {
        "subject": "User:publisher",
        "entries": [
            {
                "resource": "Group:g",
                "actions": ["Pub", "Sub"],
                "allow": True,
                "sources": ["10.0.0.0/8", "127.0.0.1"],
                "policy_type": "Custom",
            }
        ],
    }
    assert halfmq("acl", "delete", "publisher", "--resource", "Group:g").code == 0
    assert "Group:g" not in halfmq("acl", "list").out
    assert halfmq("acl", "delete", "publisher").code == 0
    none = halfmq("acl", "show", "publisher")
    assert (none.code, none.err) == (1, "halfmq: publisher has no entries\n")
    assert halfmq("acl", "delete", "publisher").code == 1
    unknown = halfmq("acl", "show", "nobody")
    assert (unknown.code, "not exist" in unknown.err) == (1, True)


def test_wrong_entries_are_refused_by_the_broker(halfmq: Shell) -> None:
    """The error has its reason; errors that argparse detects are usage errors."""
    wrong = halfmq("acl", "create", "publisher", "--resource", "Queue:q", "--actions", "Pub")
    assert (wrong.code, "Queue:q" in wrong.err) == (1, True)
    assert halfmq("acl", "create", "publisher", "--resource", "Topic:t").code == 2
    assert halfmq("acl", "create", "publisher", "--resource", ",", "--actions", "Pub").code == 2


# -- copies


def test_policies_are_copied_to_another_broker(halfmq: Shell, tmp_path: Path) -> None:
    """All of them, or the named ones; the users must exist there."""
    (tmp_path / "other").mkdir()
    other = GuardedBroker(tmp_path / "other", "users")
    try:
        with blocking.Admin(namesrv=other.address, **ADMIN) as there:
            there.delete_acl("publisher")
            some = halfmq("acl", "copy", "publisher", "nobody", "--to", other.address)
            assert some.code == 1
            acls = halfmq("acl", "copy", "publisher", "--to", other.address)
            assert (acls.code, acls.out) == (
                0,
                f"copied to {other.address}: User:publisher\n",
            )
            copied = there.acl("publisher")
            assert copied is not None
            assert [entry.resource for entry in copied.entries] == ["Topic:orders"]
        back = halfmq(
            "acl", "copy", "--from", other.address, "--to", halfmq.address or "", "--json"
        )
        assert back.json["copied"] == ["User:publisher", "User:subscriber"]
        assert halfmq("acl", "copy", "--to", "nowhere").code == 2
        assert halfmq("acl", "copy", "--to", "127.0.0.1:1").code == 1
    finally:
        other.close()


def test_a_broker_without_users_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error says which setting is missing."""
    broker = GuardedBroker(tmp_path)
    try:
        shell = Shell(capsys)
        shell.address = broker.address
        refused = shell("user", "list")
        assert (refused.code, "authenticationEnabled=true" in refused.err) == (1, True)
    finally:
        broker.close()


def _with_input(
    halfmq: Shell, monkeypatch: pytest.MonkeyPatch, *words: str, text: str = "new-secret\n"
) -> Outcome:
    type_in(monkeypatch, text)
    return halfmq(*words)


def test_what_is_printed_is_json(halfmq: Shell) -> None:
    for words in ("user list", "user show publisher", "acl list", "acl show publisher"):
        json.loads(halfmq(*words.split(), "--json").out)
