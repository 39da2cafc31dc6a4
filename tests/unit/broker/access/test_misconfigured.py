"""Protection that was asked for and cannot be in force stops the start, and says why.

Each case is the real command: exit code 2, the cause in one line, and no secret in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from halfmq.broker.cli import ExitCode
from tests.support.access import certificate
from tests.support.patience import PATIENCE_S

SECRET: Final = "marked-secret-7f3a"
ACCOUNT: Final = f"{{accessKey: someone, secretKey: {SECRET}}}"
NOBODY: Final = 65_534
"""A uid that owns nothing, so that a test which runs as root meets files it may not read."""

Settings = Mapping[str, str]


class Case(NamedTuple):
    """Settings, made in a folder, and words that must be in the one line."""

    name: str
    settings: Callable[[Path], Settings]
    cause: tuple[str, ...]


def _acl(content: str | bytes) -> Callable[[Path], Settings]:
    def settings(folder: Path) -> Settings:
        data = content.encode() if isinstance(content, str) else content
        (folder / "plain_acl.yml").write_bytes(data)
        return {"aclEnable": "true", "plainAclFile": str(folder / "plain_acl.yml")}

    return settings


def _account(fields: str) -> Callable[[Path], Settings]:
    return _acl(f"accounts: [{{accessKey: someone, secretKey: {SECRET}, {fields}}}]")


def _unreadable_acl(folder: Path) -> Settings:
    settings = _acl(f"accounts: [{ACCOUNT}]")(folder)
    (folder / "plain_acl.yml").chmod(0o000)
    return settings


def _acl_beside(folder: Path) -> Settings:
    """One good file, and in the folder `acl` another with the same account."""
    (folder / "acl").mkdir()
    (folder / "acl" / "more.yml").write_text(f"accounts: [{ACCOUNT}]")
    return _acl(f"accounts: [{ACCOUNT}]")(folder)


def _acl_folder(folder: Path) -> Settings:
    (folder / "plain_acl.yml").mkdir()
    return {"aclEnable": "true", "plainAclFile": str(folder / "plain_acl.yml")}


def _users(**settings: str) -> Callable[[Path], Settings]:
    return lambda _folder: {"authenticationEnabled": "true"} | settings


def _first_user(**fields: str) -> Callable[[Path], Settings]:
    return _users(initAuthenticationUser=json.dumps(fields))


def _user_table(content: object) -> Callable[[Path], Settings]:
    def settings(folder: Path) -> Settings:
        table = folder / "store" / "config" / "halfmqAccess.json"
        table.parent.mkdir(parents=True)
        table.write_text(content if isinstance(content, str) else json.dumps(content))
        return {"authenticationEnabled": "true"}

    return settings


def _tls(
    change: Callable[[Path], object] = lambda _folder: None, **settings: str
) -> Callable[[Path], Settings]:
    def made(folder: Path) -> Settings:
        made_settings = dict(certificate(folder))
        change(folder)
        values = {key: value.format(folder=folder) for key, value in settings.items()}
        return {key: value for key, value in (made_settings | values).items() if value}

    return made


def _other_key(folder: Path) -> None:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(folder / "key.pem"))


def _encrypt_key(folder: Path) -> None:
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    encryption = BestAvailableEncryption(b"another-password")
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    (folder / "key.pem").write_bytes(data)


CASES: Final = [
    # plain ACL
    Case(
        "no file",
        lambda folder: {"aclEnable": "true", "plainAclFile": str(folder / "nothing.yml")},
        ("aclEnable", "nothing.yml", "there is no such file"),
    ),
    Case(
        "no file by default",
        lambda _folder: {"aclEnable": "true"},
        ("aclEnable", "store/config/plain_acl.yml", "there is no such file"),
    ),
    Case("a directory", _acl_folder, ("plain_acl.yml", "no such file")),
    Case("may not be read", _unreadable_acl, ("plain_acl.yml", "cannot be read", "denied")),
    Case("not YAML", _acl(f"accounts: [{{secretKey: {SECRET}\n a: b"), ("not YAML", "line 2")),
    Case("not text", _acl(b"\x80\x81" + SECRET.encode()), ("not YAML",)),
    Case("no map", _acl("- a\n- b\n"), ("expected the keys",)),
    Case("unknown key of the file", _acl("acounts: []"), ("unknown key 'acounts'",)),
    Case("unknown key of an account", _account("topicPerm: []"), ("unknown key 'topicPerm'",)),
    Case("unknown permission", _account("topicPerms: [orders=PUBLISH]"), ("'PUBLISH'", "PUB|SUB")),
    Case("unknown default", _account("defaultGroupPerm: ALL"), ("defaultGroupPerm", "'ALL'")),
    Case("permission without =", _account("topicPerms: [orders]"), ("'orders'", "permission")),
    Case(
        "a short key",
        _acl(f"accounts: [{{accessKey: abc, secretKey: {SECRET}}}]"),
        ("account 1", "accessKey has fewer than 7 characters"),
    ),
    Case(
        "a short secret",
        _acl("accounts: [{accessKey: someone, secretKey: s-7f3a}]"),
        ("account 1", "secretKey has fewer than 7 characters"),
    ),
    Case("no secret", _acl("accounts: [{accessKey: someone}]"), ("secretKey is missing",)),
    Case("twice in two files", _acl_beside, ("more.yml", "someone is used twice")),
    Case("no address", _account("whiteRemoteAddress: 10.0.0.300"), ("10.0.0.300",)),
    Case("no global address", _acl("globalWhiteRemoteAddresses: [everywhere]"), ("everywhere",)),
    # users
    Case(
        "both front ends",
        lambda folder: {**_acl("accounts: []")(folder), "authenticationEnabled": "true"},
        ("authenticationEnabled", "aclEnable=true", "choose one"),
    ),
    Case(
        "rights of nobody",
        lambda _folder: {"authorizationEnabled": "true"},
        ("authorizationEnabled", "authenticationEnabled=true as well"),
    ),
    Case("no first user", _users(), ("initAuthenticationUser", "a first user")),
    Case(
        "a first user that is no JSON",
        _users(initAuthenticationUser=f"admin:{SECRET}"),
        ("initAuthenticationUser", '{"username":"NAME","password":"SECRET"}'),
    ),
    Case("a first user without name", _first_user(password=SECRET), ("initAuthenticationUser",)),
    Case(
        "a first user with a name too long",
        _first_user(username="n" * 300, password=SECRET),
        ("usable user", "255 characters"),
    ),
    Case(
        "own credentials that are none",
        _users(innerClientAuthenticationCredentials=f'{{"accessKey":"{SECRET}"}}'),
        ("innerClientAuthenticationCredentials", "secretKey"),
    ),
    Case(
        "a table of users that is no JSON",
        _user_table(SECRET),
        ("authenticationEnabled", "Access.json"),
    ),
    Case(
        "a user of an unknown type",
        _user_table({"users": {"u": {"username": "u", "password": SECRET, "userType": "Root"}}}),
        ("Access.json", "Root", "expected Super or Normal"),
    ),
    Case(
        "a user without a password",
        _user_table({"users": {"u": {"username": "u", "userType": "Super"}}}),
        ("Access.json", "password"),
    ),
    # TLS
    Case(
        "no certificate",
        lambda _folder: {"tlsServerMode": "enforcing"},
        ("tlsServerMode", "no certificate"),
    ),
    Case(
        "a certificate that is not there",
        _tls(lambda folder: (folder / "cert.pem").unlink()),
        ("tlsServerCertPath", "cert.pem", "No such file"),
    ),
    Case(
        "a key that is not there",
        _tls(lambda folder: (folder / "key.pem").unlink()),
        ("tlsServerKeyPath", "key.pem", "No such file"),
    ),
    Case(
        "a key that may not be read",
        _tls(lambda folder: (folder / "key.pem").chmod(0o000)),
        ("tlsServerKeyPath", "key.pem", "denied"),
    ),
    Case("a key of another", _tls(_other_key), ("tlsServerCertPath", "whose key")),
    Case(
        "a certificate that is none",
        _tls(lambda folder: (folder / "cert.pem").write_text(SECRET)),
        ("tlsServerCertPath", "PEM"),
    ),
    Case(
        "a wrong password of the key",
        _tls(_encrypt_key, tlsServerKeyPassword=SECRET),
        ("tlsServerCertPath", "key"),
    ),
    Case("no password of the key", _tls(_encrypt_key), ("tlsServerCertPath", "key")),
    Case(
        "clients that nobody vouches for",
        _tls(tlsServerNeedClientAuth="require"),
        ("tlsServerNeedClientAuth", "tlsServerTrustCertPath"),
    ),
    Case(
        "no trusted certificates",
        _tls(tlsServerNeedClientAuth="require", tlsServerTrustCertPath="{folder}/none.pem"),
        ("tlsServerTrustCertPath", "none.pem", "No such file"),
    ),
    Case(
        "trusted certificates that are none",
        _tls(
            lambda folder: (folder / "ca.pem").write_text(SECRET),
            tlsServerNeedClientAuth="optional",
            tlsServerTrustCertPath="{folder}/ca.pem",
        ),
        ("tlsServerTrustCertPath", "PEM"),
    ),
    Case("an unknown mode", _tls(tlsServerMode="on"), ("tlsServerMode", "PERMISSIVE")),
    Case(
        "no tls.properties",
        lambda folder: {"tlsConfigFile": str(folder / "tls.properties")},
        ("tls.properties", "No such file"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_protection_that_cannot_work_stops_the_start(case: Case, tmp_path: Path) -> None:
    """Exit code 2 and the cause in one line; a broker without the protection never serves."""
    settings = dict(case.settings(tmp_path))
    settings |= {"storePathRootDir": str(tmp_path / "store")}
    settings |= {"listenPort": "0", "namesrvListenPort": "0"}
    settings |= {"mappedFileSizeCommitLog": "1048576"}
    command = [sys.executable, "-m", "halfmq.broker"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    as_nobody = os.getuid() == 0 and "may not be read" in case.name
    done = subprocess.run(
        command,
        preexec_fn=_without_privileges if as_nobody else None,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    said = done.stdout + done.stderr
    assert done.returncode == ExitCode.CONFIGURATION, said
    (line,) = (line for line in said.splitlines() if "event=" not in line or "failed" in line)
    for words in case.cause:
        assert words in line, line
    assert SECRET not in said
    assert "another-password" not in said
    assert "Traceback" not in said


def _without_privileges() -> None:
    """Keep the uid, and lose what lets root read every file."""
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    pr_capbset_drop, dac_override, dac_read_search = 24, 1, 2
    for capability in (dac_override, dac_read_search):
        libc.prctl(pr_capbset_drop, capability, 0, 0, 0)
