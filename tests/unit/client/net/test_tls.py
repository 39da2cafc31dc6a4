"""The client over TLS: who is trusted, and what it says where TLS and plain meet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from halfmq.client import (
    Admin,
    ClientConfig,
    ConnectionLostError,
    Consumer,
    Message,
    Producer,
    TlsError,
    TransactionProducer,
    blocking,
)
from halfmq.client.message import Decision
from halfmq.remoting.framing import FrameDecoder
from tests.support.client_loops import on_both_loops
from tests.support.guarded_broker import ADMIN, Certificates, FrontEnd, GuardedBroker

MESSAGE = Message("orders", b"o-1", keys="o-1")
QUICK = ClientConfig(send_timeout=0.5, reconnect_delay_min=0.01, reconnect_delay_max=0.02)

Serve = Callable[..., GuardedBroker]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts brokers, each in a folder of its own."""
    with ExitStack() as stack:

        def start(front_end: FrontEnd | None = None, **settings: str) -> GuardedBroker:
            folder = tmp_path / "broker"
            folder.mkdir()
            broker = GuardedBroker(folder, front_end, **settings)
            stack.callback(broker.close)
            return broker

        yield start


async def _commits(_message: object) -> Decision:
    return Decision.COMMIT


@on_both_loops
async def test_everything_works_over_tls(serve: Serve, tmp_path: Path) -> None:
    """Sends, a transaction, a large message that is pulled, and an administrator work."""
    certificates = Certificates(tmp_path)
    broker = serve(tlsServerMode="enforcing", **certificates.settings)
    tls, address = certificates.context(), broker.address
    large = Message("orders", bytes(range(256)) * 4_096)
    config = ClientConfig(compress_over=None)
    async with Producer("p", namesrv=address, tls=tls, config=config) as producer:
        await producer.send(MESSAGE)
        await producer.send(large)
    async with TransactionProducer("tx", _commits, namesrv=address, tls=tls) as transactions:
        async with transactions.transaction(MESSAGE) as tx:
            pass
        assert tx.decided
    async with Consumer(
        "billing", {"orders": "*"}, start_from="first", namesrv=address, tls=tls
    ) as consumer:
        bodies = []
        for _ in range(3):
            message = await consumer.receive(10)
            assert message is not None
            bodies.append(message.body)
    assert sorted(bodies) == sorted([b"o-1", b"o-1", large.body])
    async with Admin(namesrv=address, config=ClientConfig(tls=tls)) as admin:
        assert await admin.metrics()


@on_both_loops
async def test_signatures_and_tls_go_together(serve: Serve, tmp_path: Path) -> None:
    """A client can sign requests and encrypt its connections at the same time."""
    certificates = Certificates(tmp_path)
    broker = serve("users", **certificates.settings)  # permissive: the set-up is plain
    tls = certificates.context()
    async with Admin(namesrv=broker.address, tls=tls, **ADMIN) as admin:
        assert [user.name for user in await admin.users()] == [
            "admin-key",
            "publisher",
            "subscriber",
        ]


def test_the_blocking_client_speaks_tls(serve: Serve, tmp_path: Path) -> None:
    """``tls=True`` trusts what the system trusts, which OpenSSL reads from SSL_CERT_FILE."""
    certificates = Certificates(tmp_path)
    broker = serve(tlsServerMode="enforcing", **certificates.settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(certificates.trust))
        with blocking.Producer("p", namesrv=broker.address, tls=True) as producer:
            producer.send(MESSAGE)
    with (
        pytest.raises(TlsError, match="certificate is not accepted"),
        blocking.Producer("p", namesrv=broker.address, tls=True),
    ):
        pass


@on_both_loops
async def test_a_certificate_is_checked_for_the_name_the_user_gave(
    serve: Serve, tmp_path: Path
) -> None:
    """Routes name the broker by an address, which its certificate need not have."""
    certificates = Certificates(tmp_path, "localhost")
    broker = serve(tlsServerMode="enforcing", **certificates.settings)
    port = broker.address.rpartition(":")[2]
    tls = certificates.context()
    async with Producer("p", namesrv=f"localhost:{port}", tls=tls) as producer:
        await producer.send(MESSAGE)

    stranger = Producer("p", namesrv=broker.address, tls=tls)
    with pytest.raises(TlsError, match=r"not valid for '127\.0\.0\.1'") as caught:
        await stranger.start()
    assert not caught.value.retriable


@on_both_loops
async def test_a_certificate_of_an_unknown_authority_is_not_accepted(
    serve: Serve, tmp_path: Path
) -> None:
    """The error says how to trust one."""
    broker = serve(tlsServerMode="enforcing", **Certificates(tmp_path).settings)
    context = ssl.create_default_context()
    trustme.CA().configure_trust(context)
    with pytest.raises(TlsError, match=r"create_default_context\(cafile="):
        await Producer("p", namesrv=broker.address, tls=context).start()


@on_both_loops
async def test_a_plain_client_of_an_enforcing_broker_is_told(serve: Serve, tmp_path: Path) -> None:
    """Every kind of client gets a TlsError at its start, without retries."""
    broker = serve(tlsServerMode="enforcing", **Certificates(tmp_path).settings)
    address = broker.address
    for client in (
        Producer("p", namesrv=address),
        TransactionProducer("tx", _commits, namesrv=address),
        Consumer("billing", {"orders": "*"}, namesrv=address),
        Admin(namesrv=address),
    ):
        with pytest.raises(TlsError, match="pass tls=True") as caught:
            await client.start()
        assert not caught.value.retriable
    with pytest.raises(TlsError, match="pass tls=True"):
        await asyncio.to_thread(blocking.Producer("p", namesrv=address).start)


@on_both_loops
async def test_a_tls_client_of_a_plain_broker_is_told(serve: Serve) -> None:
    """It is retried until the start times out: a restarting broker looks the same."""
    broker = serve()
    producer = Producer("p", namesrv=broker.address, tls=True, config=QUICK)
    with pytest.raises(TlsError, match="leave out tls"):
        await producer.start()


@on_both_loops
async def test_a_server_that_answers_a_handshake_in_plain_is_told_apart() -> None:
    """Any other server that answers in plain text gets an error that says so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TlsError, match="does not speak TLS"):
            await Producer("p", namesrv=f"127.0.0.1:{port}", tls=True).start()


@on_both_loops
async def test_a_peer_that_hangs_up_on_plain_clients_may_want_tls() -> None:
    """The error only hints at TLS: a restarting broker also closes connections at once."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _command in FrameDecoder().receive_data(await reader.read(65_536)):
            writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLostError, match="pass tls=True"):
            await Producer("p", namesrv=f"127.0.0.1:{port}", config=QUICK).start()


@on_both_loops
async def test_a_broker_that_wants_a_client_certificate_is_understood(
    serve: Serve, tmp_path: Path
) -> None:
    """With TLS 1.3 it refuses only after the handshake has ended for the client."""
    certificates = Certificates(tmp_path)
    broker = serve(
        tlsServerMode="enforcing",
        tlsServerNeedClientAuth="require",
        tlsServerTrustCertPath=str(certificates.trust),
        **certificates.settings,
    )
    known, unknown = certificates.context(), certificates.context()
    certificates.authority.issue_cert("client@example.org").configure_cert(known)
    async with Producer("p", namesrv=broker.address, tls=known) as producer:
        await producer.send(MESSAGE)
    for maximum in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        unknown.maximum_version = maximum
        with pytest.raises((TlsError, ConnectionLostError), match="client certificate"):
            await Producer("p", namesrv=broker.address, tls=unknown, config=QUICK).start()
