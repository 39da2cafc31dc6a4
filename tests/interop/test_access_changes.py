"""Keys, users and certificates change while official Java clients run; and the modes of TLS."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.access import Account
from tests.support.access_files import (
    APPLICATION,
    NOBODY,
    OPERATOR,
    Certificates,
    Policy,
    user_settings,
    write_plain_acl,
    write_users,
)
from tests.support.java_clients import JavaClient, Kind, class_path, java_client
from tests.support.patience import wait_until

pytestmark = pytest.mark.campaign

RIGHTS: dict[str, Any] = {"topicPerms": ["java-shared=PUB"]}
NEW = Account(APPLICATION.name, "another-secret")


@pytest.fixture(autouse=True, params=["4.9.8", "5.3.3"])
def version(request: pytest.FixtureRequest) -> str:
    """The version of the client."""
    version: str = request.param
    class_path(version)
    return version


def _outcome(client: JavaClient, keys: Account) -> str:
    line = client.run("attempt", *keys, "send", "java-shared")[-1]
    return str(line["event"])


def _certificate(broker: BrokerProcess) -> str:
    host, _, port = broker.address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


def test_keys_and_certificates_are_replaced_while_a_client_runs(
    version: str, tmp_path: Path
) -> None:
    """New connections see the new certificate; the old key is refused, the new one accepted.

    The client that runs meanwhile keeps its connection: what ends it is the refusal of its key.
    """
    certificates = Certificates(tmp_path / "certificates")
    accounts = write_plain_acl(tmp_path / "plain_acl.yml", [(APPLICATION, RIGHTS)])
    settings = {"aclEnable": "true", "plainAclFile": accounts} | certificates.broker_settings()
    kind = Kind(version, certificates.java_options)
    with (
        broker_process(tmp_path / "broker", **settings) as broker,
        java_client(kind, broker.address, tmp_path / "client") as client,
    ):
        running = client.start("until_refused", *APPLICATION, "java-shared")
        client.said(running, "allowed")

        before = _certificate(broker)
        certificates.renew()
        wait_until(lambda: _certificate(broker) != before, "nothing happened")
        assert _outcome(client, APPLICATION) == "allowed"

        write_plain_acl(accounts, [(NEW, RIGHTS)])
        (refused,) = client.lines(running)
        assert (refused["event"], refused["code"]) == ("refused", ResponseCode.SYSTEM_ERROR)
        assert "check signature failed" in refused["text"]
        assert _outcome(client, NEW) == "allowed"
        assert _outcome(client, APPLICATION) == "refused"

        accounts.write_text("accounts: [")  # a mistake leaves what is in force
        wait_until(lambda: "plain_acl_not_reloaded" in broker.log, "nothing happened")
        assert _outcome(client, NEW) == "allowed"
        assert NEW.secret not in broker.log


def test_a_user_is_disabled_while_its_client_runs(version: str, tmp_path: Path) -> None:
    """The next request is refused; when the user is enabled again, they are served."""
    write_users(tmp_path / "broker" / "store", [(APPLICATION, [Policy("Topic:java-*", "Pub")])])
    with (
        broker_process(tmp_path / "broker", **user_settings()) as broker,
        java_client(Kind(version), broker.address, tmp_path / "client") as client,
    ):

        def set_status(status: str) -> None:
            fields, body = f"username={APPLICATION.name}", f'{{"userStatus":"{status}"}}'
            code = int(RequestCode.AUTH_UPDATE_USER)
            (answer,) = client.run("ask", *OPERATOR, code, fields, body)
            assert answer["code"] == ResponseCode.SUCCESS

        running = client.start("until_refused", *APPLICATION, "java-shared")
        client.said(running, "allowed")
        set_status("disable")

        (refused,) = client.lines(running)
        assert (refused["event"], refused["code"]) == ("refused", ResponseCode.NO_PERMISSION)
        assert refused["text"].startswith(f"User:{APPLICATION.name} is disabled.")
        set_status("enable")
        assert _outcome(client, APPLICATION) == "allowed"


@pytest.mark.parametrize("mode", ["permissive", "enforcing"])
def test_a_plain_connection_is_served_if_the_mode_permits_it(
    version: str, mode: str, tmp_path: Path
) -> None:
    """Beside TLS on the same port, or not at all."""
    certificates = Certificates(tmp_path / "certificates")
    settings = certificates.broker_settings() | {"tlsServerMode": mode}
    with (
        broker_process(tmp_path / "broker", **settings) as broker,
        java_client(Kind(version), broker.address, tmp_path / "plain") as plain,
        java_client(
            Kind(version, certificates.java_options), broker.address, tmp_path / "tls"
        ) as tls,
    ):
        assert _outcome(tls, NOBODY) == "allowed"
        expected = "allowed" if mode == "permissive" else "refused"
        assert _outcome(plain, NOBODY) == expected
        assert ("event=plain_refused" in broker.log) == (mode == "enforcing")


def test_a_client_without_a_certificate_is_refused_if_one_is_required(
    version: str, tmp_path: Path
) -> None:
    """And one that trusts another authority does not trust the broker."""
    certificates = Certificates(tmp_path / "certificates")
    others = Certificates(tmp_path / "others")
    settings = certificates.broker_settings(client_auth="require")
    without = [option for option in certificates.java_options if "client.cert" not in option]
    without = [option for option in without if "client.key" not in option]
    with broker_process(tmp_path / "broker", **settings) as broker:
        outcomes = []
        for number, options in enumerate((certificates.java_options, without, others.java_options)):
            home = tmp_path / f"client-{number}"
            with java_client(Kind(version, tuple(options)), broker.address, home) as client:
                outcomes.append(_outcome(client, NOBODY))
        assert outcomes == ["allowed", "refused", "refused"]
