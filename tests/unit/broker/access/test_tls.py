"""TLS on the broker's ports: told by the first byte, with certificates that can be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from halfmq.broker.access import tls_listener
from halfmq.broker.access.config import ClientAuth, TlsConfig, TlsMode
from halfmq.broker.access.tls import TlsContext
from halfmq.broker.config_file import load_config
from halfmq.broker.errors import BrokerConfigError
from halfmq.broker.loop.fetches import Fetches
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.net.server import Server
from halfmq.broker.ports import Connection
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import OtherProtocolError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply, encode_request
from tests.support.broker_doubles import as_store
from tests.support.client_loops import on_both_loops

LARGE = bytes(range(256)) * 4_096  # a megabyte, far more than one TLS record


class Log:
    """A log that is always on disk."""

    durable_offset = 0
    readable_offset = 0
    write_offset = 0

    def request_flush(self) -> None:
        """Nothing."""


class Certificates:
    """An authority, the broker's certificate in files, and a client's."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.folder = folder
        self.trust = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.trust))
        self.issue(self.authority)

    def issue(self, authority: trustme.CA) -> None:
        """Put a new certificate into the broker's files."""
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(self.folder / "key.pem"))
        (self.folder / "cert.pem").write_bytes(
            b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        )

    def config(
        self, mode: TlsMode = TlsMode.PERMISSIVE, client_auth: ClientAuth = ClientAuth.NONE
    ) -> TlsConfig:
        return TlsConfig(
            configured_mode=mode,
            cert_path=self.folder / "cert.pem",
            key_path=self.folder / "key.pem",
            trust_cert_path=self.trust if client_auth is not ClientAuth.NONE else None,
            client_auth=client_auth,
        )

    def client(self, authority: trustme.CA | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        (authority or self.authority).configure_trust(context)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Files for a broker on 127.0.0.1."""
    return Certificates(tmp_path)


def _large(request: RemotingCommand, _connection: Connection) -> bytes:
    return encode_reply(request, body=LARGE)


@asynccontextmanager
async def _serving(tls: TlsContext, connections_per_address: int = 0) -> AsyncIterator[Server]:
    server = Server(
        Router({RequestCode.GET_ROUTEINFO_BY_TOPIC: _large}),
        ReplyRelease(as_store(Log())),
        Fetches().begin,
        lambda _connection: None,
        host="127.0.0.1",
        listen_port=0,
        namesrv_port=0,
        tls=tls,
        connections_per_address=connections_per_address,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _ask(server: Server, context: ssl.SSLContext | None) -> bytes:
    """Ask for a route and return the answer's body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    try:
        writer.write(
            encode_request(RequestCode.GET_ROUTEINFO_BY_TOPIC, opaque=1, header={"topic": "T"})
        )
        decoder = FrameDecoder(responses_first=True)
        while True:
            data = await reader.read(65_536)
            if not data:
                raise ConnectionResetError
            for answer in decoder.receive_data(data):
                return answer.body
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@on_both_loops
async def test_tls_and_plain_clients_are_served_on_one_port(certificates: Certificates) -> None:
    """In mode PERMISSIVE; large answers arrive complete either way."""
    async with _serving(TlsContext(certificates.config())) as server:
        assert await _ask(server, certificates.client()) == LARGE
        assert await _ask(server, None) == LARGE


@on_both_loops
async def test_an_enforcing_broker_closes_plain_connections(certificates: Certificates) -> None:
    """It sends an alert first, which no client takes for a frame."""
    async with _serving(TlsContext(certificates.config(TlsMode.ENFORCING))) as server:
        assert await _ask(server, certificates.client()) == LARGE
        with pytest.raises(OtherProtocolError):
            await _ask(server, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(bytes(4))
        assert await reader.read() == bytes.fromhex("15 0301 0002 02 46")
        writer.close()


@on_both_loops
async def test_clients_can_be_required_to_have_a_certificate(certificates: Certificates) -> None:
    """It must be signed by a trusted authority; without one the handshake fails."""
    config = certificates.config(TlsMode.ENFORCING, ClientAuth.REQUIRE)
    known, stranger, nobody = (certificates.client() for _ in range(3))
    certificates.authority.issue_cert("client@example.org").configure_cert(known)
    trustme.CA().issue_cert("client@example.org").configure_cert(stranger)
    async with _serving(TlsContext(config)) as server:
        assert await _ask(server, known) == LARGE
        for refused in (stranger, nobody):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await _ask(server, refused)


@on_both_loops
async def test_connections_count_for_their_address_from_the_first_byte_on(
    certificates: Certificates,
) -> None:
    """Silent ones, incomplete handshakes and served ones together; closed ones make room."""
    async with _serving(TlsContext(certificates.config()), 3) as server:
        ends = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        ends[1][1].write(b"\x16")
        ends.append(
            await asyncio.open_connection("127.0.0.1", server.port, ssl=certificates.client())
        )
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await reader.read() == b""
            writer.close()
        for _, writer in ends:
            writer.close()
        while True:  # until the broker knows
            with contextlib.suppress(OSError):
                assert await _ask(server, certificates.client()) == LARGE
                break


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01\x02\x00\x01"])
@on_both_loops
async def test_peers_that_do_not_go_on_keep_nobody_out(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """Of those that are silent, or in a handshake, the oldest make room."""
    monkeypatch.setattr(tls_listener, "UNDECIDED_MAX", 4)
    monkeypatch.setattr(tls_listener, "HANDSHAKES_MAX", 4)
    async with _serving(TlsContext(certificates.config())) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(8)]
        for _, writer in opened:
            writer.write(begin)
        for reader, _ in opened[:4]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert await _ask(server, certificates.client()) == LARGE
        for _, writer in opened:
            writer.close()


@on_both_loops
async def test_a_listener_without_descriptors_waits_for_some(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, and serves those that wait when there are some again."""
    accept, attempts = socket.socket.accept, []

    def accepted(listening: socket.socket) -> tuple[socket.socket, object]:
        attempts.append(listening)
        if len(attempts) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(tls_listener, "PAUSE_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accepted)
    async with _serving(TlsContext(certificates.config())) as server:
        assert await _ask(server, certificates.client()) == LARGE

    events = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert events == ["event=accept_paused", "event=accept_resumed"]


@on_both_loops
async def test_broken_handshakes_do_not_affect_other_clients(certificates: Certificates) -> None:
    """Invalid handshakes, incomplete ones and silence; the next client is served."""
    async with _serving(TlsContext(certificates.config())) as server:
        writers = []
        for first in (b"\x16", b"\x16garbage" * 10, b"\x16\x03\x01\x02\x00", b""):
            _reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(first)
            await writer.drain()
            writers.append(writer)
        assert await _ask(server, certificates.client()) == LARGE
        for writer in writers:
            writer.close()


@on_both_loops
async def test_a_new_certificate_is_used_after_a_reload(certificates: Certificates) -> None:
    """Without a restart; an invalid one leaves the previous one in force."""
    tls = TlsContext(certificates.config())
    async with _serving(tls) as server:
        assert not tls.reload()
        other = trustme.CA()
        certificates.issue(other)
        assert tls.reload()
        assert await _ask(server, certificates.client(other)) == LARGE
        with pytest.raises(ssl.SSLError):
            await _ask(server, certificates.client())
        (certificates.folder / "cert.pem").write_text("no certificate")
        assert not tls.reload()
        assert await _ask(server, certificates.client(other)) == LARGE


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("cert.pem", "tlsServerCertPath"),
        ("key.pem", "tlsServerCertPath"),
        ("other key", "tlsServerCertPath"),
        ("no cert", "No such file"),
        ("no key", "tlsServerKeyPath"),
        ("ca.pem", "tlsServerTrustCertPath"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_an_error_with_its_cause(
    certificates: Certificates, damage: str, complaint: str
) -> None:
    """A broker must not run without the TLS that is configured."""
    folder = certificates.folder
    match damage:
        case "other key":
            other = trustme.CA().issue_cert("localhost")
            other.private_key_pem.write_to_path(str(folder / "key.pem"))
        case "no cert":
            (folder / "cert.pem").unlink()
        case "no key":
            (folder / "key.pem").unlink()
        case _:
            (folder / damage).write_text("garbage")

    with pytest.raises(BrokerConfigError, match=complaint):
        TlsContext(certificates.config(client_auth=ClientAuth.REQUIRE))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["tlsServerMode=enforcing"], "there is no certificate"),
        (["tlsServerMode=permissive"], "there is no certificate"),
        (["tlsServerMode=on"], "expected DISABLED or PERMISSIVE or ENFORCING"),
        (["tlsServerNeedClientAuth=require"], "TLS is disabled"),
        (["tlsServerCertPath=c", "tlsServerNeedClientAuth=optional"], "nothing vouches"),
        (["tlsConfigFile=/nowhere/tls.properties"], "a readable file"),
    ],
)
def test_contradictory_tls_settings_are_errors(settings: list[str], complaint: str) -> None:
    with pytest.raises(BrokerConfigError, match=complaint):
        load_config(None, settings)


def test_a_certificate_alone_means_permissive() -> None:
    """As RocketMQ's default, which there needs no certificate."""
    assert load_config(None).config.tls.mode is TlsMode.DISABLED
    assert load_config(None, ["tlsServerCertPath=c.pem"]).config.tls.mode is TlsMode.PERMISSIVE


def test_tls_properties_of_rocketmq_are_read(tmp_path: Path) -> None:
    """Keys of the broker's own configuration win over the file."""
    file = tmp_path / "tls.properties"
    file.write_text(
        "tls.test.mode.enable=false\n"
        "tls.server.mode=enforcing\n"
        "tls.server.certPath=/etc/halfmq/cert.pem\n"
        "tls.server.keyPath=/etc/halfmq/key.pem\n"
        "tls.server.keyPassword=secret word\n"
        "tls.server.trustCertPath=/etc/halfmq/ca.pem\n"
        "tls.server.need.client.auth=require\n"
    )

    loaded = load_config(None, [f"tlsConfigFile={file}", "tlsServerKeyPath=/other/key.pem"])

    assert loaded.config.tls == TlsConfig(
        configured_mode=TlsMode.ENFORCING,
        cert_path=Path("/etc/halfmq/cert.pem"),
        key_path=Path("/other/key.pem"),
        key_password="secret word",
        trust_cert_path=Path("/etc/halfmq/ca.pem"),
        client_auth=ClientAuth.REQUIRE,
        config_file=file,
    )
    assert not loaded.warnings
    assert not any("secret word" in line for line in loaded.lines())
