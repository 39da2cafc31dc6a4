"""Secrets stay where they were put: no log line, answer, metric, dump or repr shows one."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.broker.access.build import AccessSetup
from halfmq.broker.access.config import AccessConfig, KeyPair, TlsConfig
from halfmq.broker.access.plain_acl import PlainAcl
from halfmq.broker.config_file import load_config
from halfmq.client.testing import broker_process
from halfmq.remoting.access_bodies import (
    AclInfo,
    AclRequestHeader,
    ListUsersRequestHeader,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
    UserRequestHeader,
    encode_access,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.files import disk
from tests.support.access import Account, SignedPeer
from tests.support.python import python
from tests.support.race_windows import Rig, windowed

MARK: Final = "marked-secret"
ROOT: Final = Account("root", f"{MARK}-of-root")
AUDITOR: Final = Account("auditor", f"{MARK}-of-auditor")
"""May read everything about the broker, and is no super user."""


def _run(*command: str, **environment: str) -> str:
    done = python("-m", *command, env={**os.environ, **environment})
    return done.stdout + done.stderr


class _Listening:
    """The answers to a client's requests."""

    def __init__(self, peer: SignedPeer) -> None:
        self._peer = peer
        self.told: list[str] = []

    async def call(self, code: int, header: Any = None, body: bytes = b"") -> RemotingCommand:
        answer = await self._peer.call(code, header, body)
        self.told.append(f"{answer} {answer.header} {answer.remark} {answer.body!r}")
        return answer


async def _connect(rig: Rig, account: Account) -> _Listening:
    peer = SignedPeer(account)
    await rig.connect(peer)
    return _Listening(peer)


async def _users(rig: Rig) -> None:
    rig.access = AccessConfig(
        authentication_enabled=True,
        authorization_enabled=True,
        initial_user=KeyPair(*ROOT),
        inner_credentials=KeyPair("inner", f"{MARK}-inner"),
    )
    await rig.restart()


@windowed()
async def test_no_log_line_and_no_answer_shows_a_secret(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At DEBUG, with refusals, garbage that holds secrets, and a disk that fails."""
    caplog.set_level(logging.DEBUG)
    await _users(rig)
    root = await _connect(rig, ROOT)
    user = UserInfo(username=AUDITOR.name, password=AUDITOR.secret)
    named = UserRequestHeader(username=AUDITOR.name)
    created = await root.call(RequestCode.AUTH_CREATE_USER, named, encode_access(user))
    assert created.code == 0
    entry = PolicyEntryInfo(
        actions=("Get", "Update"), decision="Allow", resource="Cluster:DefaultCluster"
    )
    acl = AclInfo(subject=f"User:{AUDITOR.name}", policies=(PolicyInfo(entries=(entry,)),))
    header = AclRequestHeader(subject=acl.subject)
    assert (await root.call(RequestCode.AUTH_CREATE_ACL, header, encode_access(acl))).code == 0
    told = root.told

    auditor = await _connect(rig, AUDITOR)
    for code, question in (
        (RequestCode.AUTH_GET_USER, UserRequestHeader(username=ROOT.name)),
        (RequestCode.AUTH_GET_USER, named),
        (RequestCode.AUTH_LIST_USER, ListUsersRequestHeader()),
        (RequestCode.GET_BROKER_RUNTIME_INFO, None),
        (RequestCode.GET_BROKER_CONFIG, None),
    ):
        await auditor.call(code, question)
    same = encode_access(user)
    await auditor.call(RequestCode.AUTH_CREATE_USER, named, same)  # it exists
    await auditor.call(RequestCode.AUTH_CREATE_USER, named, same[:-5])  # cut
    wrong_type = json.dumps({"username": "x", "password": AUDITOR.secret, "userType": 7}).encode()
    await auditor.call(RequestCode.AUTH_CREATE_USER, named, wrong_type)
    as_super = encode_access(UserInfo(username="x", password=f"{MARK}-x", user_type="Super"))
    await auditor.call(RequestCode.AUTH_CREATE_USER, UserRequestHeader(username="x"), as_super)
    long = encode_access(UserInfo(username="x", password=MARK * 50))
    await auditor.call(RequestCode.AUTH_CREATE_USER, UserRequestHeader(username="x"), long)

    for liar in (Account(ROOT.name, f"{MARK}-guessed"), Account("nobody", f"{MARK}-nobody")):
        refused = await _connect(rig, liar)
        answer = await refused.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert answer.code == ResponseCode.NO_PERMISSION
        told += refused.told

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(disk, "replace", full)
        other = encode_access(UserInfo(username="y", password=f"{MARK}-y"))
        answer = await root.call(
            RequestCode.AUTH_CREATE_USER, UserRequestHeader(username="y"), other
        )
        assert answer.code == ResponseCode.SYSTEM_ERROR
    told += auditor.told

    assert "event=access_not_saved" in caplog.text
    assert "event=access_denied" in caplog.text
    assert MARK not in caplog.text
    assert not [line for line in told if MARK in line]


@windowed()
async def test_nobody_is_shown_passwords(rig: Rig) -> None:
    """RocketMQ shows them to super users, whose requests can be read and sent again."""
    await _users(rig)
    root = await _connect(rig, ROOT)
    one = await root.call(RequestCode.AUTH_GET_USER, UserRequestHeader(username=ROOT.name))
    everyone = await root.call(RequestCode.AUTH_LIST_USER, ListUsersRequestHeader())

    assert json.loads(one.body)["username"] == ROOT.name
    assert ROOT.name.encode() in everyone.body
    assert MARK.encode() not in one.body + everyone.body


@windowed()
async def test_only_the_owner_can_read_the_files_with_secrets(rig: Rig) -> None:
    """The table of users, its previous version, and a new one while it is written."""
    modes: dict[str, int] = {}
    rename = disk.replace

    def look(source: Path, target: Path) -> None:
        modes[source.name] = stat.S_IMODE(source.stat().st_mode)
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "replace", look)
        await _users(rig)
        root = await _connect(rig, ROOT)
        for name in ("one", "two"):
            user = encode_access(UserInfo(username=name, password=f"{MARK}-{name}"))
            await root.call(RequestCode.AUTH_CREATE_USER, UserRequestHeader(username=name), user)

    for path in (rig.root / "config").glob("halfmqAccess.json*"):
        modes[path.name] = stat.S_IMODE(path.stat().st_mode)
    ours = {name: mode for name, mode in modes.items() if "Access" in name}
    assert ours.keys() >= {"halfmqAccess.json", "halfmqAccess.json.bak", "halfmqAccess.json.tmp"}
    assert set(ours.values()) == {0o600}


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_of_accounts_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    """A warning at the start names the file and the remedy."""
    file = tmp_path / "plain_acl.yml"
    file.write_text(f"accounts: [{{accessKey: someone, secretKey: {MARK}}}]")
    file.chmod(mode)
    config = AccessConfig(acl_enabled=True, plain_acl_file=file)

    with caplog.at_level(logging.WARNING):
        AccessSetup(
            config,
            users_file=tmp_path / "users",
            cluster_name="C",
            belongs_to_other=lambda _client_id, _principal, _connection: False,
        )

    assert ("event=secrets_readable" in caplog.text) == warned
    assert MARK not in caplog.text


SETTINGS: Final = {
    "authenticationEnabled": "true",
    "initAuthenticationUser": json.dumps({"username": ROOT.name, "password": ROOT.secret}),
    "innerClientAuthenticationCredentials": json.dumps(
        {"accessKey": "inner", "secretKey": f"{MARK}-inner"}
    ),
}


def test_printed_settings_and_reprs_hide_secrets(tmp_path: Path) -> None:
    """`--print-config`, and what a traceback or a debugger shows of objects that hold some."""
    given = [f"{key}={value}" for key, value in SETTINGS.items()]
    given += ["tlsServerCertPath=cert.pem", f"tlsServerKeyPassword={MARK}-key"]
    command = ["halfmq.broker", "--print-config"]
    printed = _run(*command, *[part for one in given for part in ("--set", one)])
    file = tmp_path / "plain_acl.yml"
    file.write_text(f"accounts: [{{accessKey: someone, secretKey: {MARK}}}]")
    accounts = PlainAcl(file)
    config = load_config(None, given).config
    held = [
        config,
        config.access,
        config.tls,
        TlsConfig(key_password=MARK),
        KeyPair("a", MARK),
        accounts,
        accounts.accounts,
        accounts.find("someone"),
        UserInfo(username="a", password=MARK),
    ]

    assert "initAuthenticationUser=" in printed
    assert MARK not in printed
    assert not [one for one in held if MARK in repr(one) or MARK in str(one)]


def test_metrics_and_the_log_of_a_broker_hide_secrets(tmp_path: Path) -> None:
    """What `halfmq broker metrics` prints, and all that the process wrote."""
    with broker_process(tmp_path, **SETTINGS) as broker:
        signing = {"HALFMQ_ACCESS_KEY": ROOT.name, "HALFMQ_SECRET_KEY": ROOT.secret}
        command = ["halfmq.command", "broker", "metrics", "--namesrv", broker.address]
        refused = _run(*command, **(signing | {"HALFMQ_SECRET_KEY": f"{MARK}-guessed"}))
        printed = _run(*command, **signing)
        assert "access.refused_authentication" in printed
        assert "check signature failed" in refused
        broker.stop()

    assert MARK not in printed + refused + broker.log
