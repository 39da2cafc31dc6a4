"""Registration at name servers: what they are sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.access.config import ClientAuth, KeyPair, TlsConfig
from halfmq.broker.access.tls import TlsContext, registration_context
from halfmq.broker.config import TopicDefaults
from halfmq.broker.net.registration import NameServerRegistration
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.registration_bodies import RegisteredTopic, decode_registration
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.serialization import ext_fields
from halfmq.remoting.signature import Signer, signed_text
from tests.support.access import certificate
from tests.support.broker_doubles import Clock


async def _registered(
    tmp_path: Path,
    credentials: KeyPair | None = None,
    advertised_host: str = "",
    *,
    over_tls: bool = False,
) -> list[RemotingCommand]:
    """Return what a name server is sent from a broker's start to its stop."""
    received: list[RemotingCommand] = []
    registered = asyncio.Event()

    async def name_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = FrameDecoder()
        while data := await reader.read(65_536):
            for command in decoder.receive_data(data):
                received.append(command)
                writer.write(encode_reply(command))
                registered.set()
        writer.close()

    served = asked = None
    if over_tls:  # the name server wants a certificate of its clients, too
        certificate(tmp_path)
        files: dict[str, Any] = {
            "cert_path": tmp_path / "cert.pem",
            "key_path": tmp_path / "key.pem",
            "trust_cert_path": tmp_path / "ca.pem",
            "registration_trust_path": tmp_path / "ca.pem",
        }
        served = TlsContext(TlsConfig(client_auth=ClientAuth.REQUIRE, **files)).current
        asked = registration_context(TlsConfig(registration_enabled=True, **files))
    server = await asyncio.start_server(name_server, "127.0.0.1", 0, ssl=served)
    async with server:
        registration = NameServerRegistration(
            [server.sockets[0].getsockname()[:2]],
            TopicTable(tmp_path / "topics.json", TopicDefaults(), now_ms=Clock()),
            TopicDefaults(broker_id=3),
            advertised_host=advertised_host,
            port=lambda: 10_911,
            ha_port=lambda: 10_912,
            now_ms=Clock(),
            credentials=credentials,
            tls=asked,
        )
        await registration.start()
        await registered.wait()
        await registration.stop()
    return received


async def test_registrations_and_nothing_else_are_signed_with_the_brokers_own_credentials(
    tmp_path: Path,
) -> None:
    """`innerClientAuthenticationCredentials`; to leave, it closes the connection."""
    (register,) = await _registered(tmp_path, KeyPair("broker", "secret-word"))

    assert register.code == RequestCode.REGISTER_BROKER
    fields = ext_fields(register)
    assert fields["AccessKey"] == "broker"
    text = signed_text(fields)
    assert Signer("secret-word").verify(fields["Signature"], text, register.body)


async def test_without_credentials_nothing_is_signed(tmp_path: Path) -> None:
    """As name servers without access control expect it."""
    received = await _registered(tmp_path)

    assert received
    assert not any("AccessKey" in ext_fields(command) for command in received)


async def test_registrations_go_over_tls_if_configured(tmp_path: Path) -> None:
    """With the broker's own certificate, which the name server may require."""
    received = await _registered(tmp_path, over_tls=True)

    assert [one.code for one in received] == [
        RequestCode.REGISTER_BROKER,
        RequestCode.UNREGISTER_BROKER,
    ]


@pytest.mark.parametrize("advertised_host", ["", "10.0.0.9"])
async def test_the_broker_is_registered_under_the_address_that_clients_reach(
    tmp_path: Path, advertised_host: str
) -> None:
    """`brokerIP1`, or the address of the connection; the replication address has another port."""
    host = advertised_host or "127.0.0.1"

    register, leave = await _registered(tmp_path, advertised_host=advertised_host)

    fields = ext_fields(register)
    assert fields["brokerAddr"] == f"{host}:10911"
    assert fields["haServerAddr"] == f"{host}:10912"
    for command in (register, leave):
        names = ("brokerName", "clusterName", "brokerId")
        found = [ext_fields(command)[name] for name in names]
        assert found == ["broker-a", "DefaultCluster", "3"]
    registration = decode_registration(register.body)
    assert registration.topics["broker-a"] == RegisteredTopic(
        perm=7, read_queue_nums=1, write_queue_nums=1
    )
