"""Random bytes without a valid signature change nothing at a broker with access control.

Frames of recorded clients with changes; generated requests of every code and header type;
incomplete frames, huge lengths, wrong keys and signatures, and valid ones of a user without rights;
broken TLS handshakes. All of them go to each of the broker's ports, over plain and TLS connections.

By default these are a few connections; a campaign runs for ten times `HALFMQ_CAMPAIGN_SECONDS`
(60). The seed of each run is printed and can be set by `HALFMQ_SEED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.access_bodies import UserInfo, UserRequestHeader, encode_access
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS
from tests.support.access import ADMIN, Account, SignedPeer, certificate, signed_frame
from tests.support.fuzzing import Fuzzer
from tests.support.patience import PATIENCE_S
from tests.support.seeds import campaign_seconds, printed_seed

CAMPAIGN_FACTOR: Final = 10
"""With the six seconds of a short run, this campaign lasts a minute."""

AT_ONCE: Final = 12
"""Connections open at the same time."""

WARM: Final = 2_000
"""Connections before memory is measured first: by then caches have reached their size."""

GROWTH_MAX_KIB: Final = 48 << 10
"""Growth of the process from then to the end. The allocator keeps what the largest frames needed; a
leak of a hundred bytes per frame would exceed this within minutes."""

CROWD: Final = 400
"""Silent or unfinished connections whose memory is measured."""

PER_CONNECTION_MAX_KIB: Final = 200
"""Memory of each, also with TLS, in addition to the bytes that it has sent."""

KNOWN: Final = Account("nobody-special", "its-own-secret")
"""A user without any right."""

SERVED: Final = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.HEART_BEAT,  # without groups, or with producer groups
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
}
"""Requests that this user may send."""


def _settings(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": ADMIN.name, "password": ADMIN.secret}),
        "transactionTimeOut": "3600000",  # a check would change the state
        "mappedFileSizeCommitLog": str(8 << 20),
        **certificate(folder),
    }


class Run:
    """One broker, and counts of what was sent to it."""

    def __init__(self, broker: BrokerProcess, folder: Path, seed: int) -> None:
        self.broker = broker
        self.fuzzer = Fuzzer(random.Random(seed), KNOWN)
        self.chance = random.Random(seed + 1)
        self.tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        self.counts: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.warm_kib = 0
        listen = int(broker.ready["listen"].rpartition(":")[2])
        self.ports = [listen, listen - 2, int(broker.address.rpartition(":")[2])]

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.broker.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    async def one(self) -> None:
        """Open one connection, send, and check the answers."""
        self.counts["connections"] += 1
        port = self.chance.choice(self.ports)
        kind = self.chance.randrange(8)
        if kind == 0:
            await self._broken_handshake(port)
            return
        over_tls = kind in {1, 2}
        data = self.fuzzer.stream()
        self.counts["frames over TLS" if over_tls else "plain"] += 1
        commands, whole = _understood(data)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=self.tls if over_tls else None
        )
        try:
            await self._send(writer, data)
            await self._check_answers(reader, commands, whole=whole)
        finally:
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the broker may have closed it
            for piece in self.fuzzer.pieces(data):
                writer.write(piece)
                await writer.drain()

    async def _broken_handshake(self, port: int) -> None:
        self.counts["handshakes"] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await self._send(writer, self.fuzzer.hello())
            if self.chance.randrange(2):
                with contextlib.suppress(OSError):
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), PATIENCE_S)
        finally:
            writer.transport.abort()

    async def _check_answers(
        self, reader: asyncio.StreamReader, commands: list[RemotingCommand], *, whole: bool
    ) -> None:
        """Check that every request gets one answer, a refusal."""
        asked = {
            opaque: Counter(one.code for one in commands if one.opaque == opaque)
            for opaque in {one.opaque for one in commands}
        }
        expected = Counter(one.opaque for one in commands)
        answers: list[RemotingCommand] = []
        decoder = FrameDecoder(responses_first=True)
        if not commands and not whole:
            return  # nothing to wait for: it may close the connection or wait for the rest
        while len(answers) < len(commands):
            try:
                received = await asyncio.wait_for(reader.read(65_536), PATIENCE_S)
            except ConnectionError:  # closed because of later bytes; the last answers may be lost
                break
            if not received:
                break
            answers += decoder.receive_data(received)
        given = Counter(one.opaque for one in answers)
        assert not given - expected, f"answers to nothing: {given - expected}"
        if whole:
            missing = expected - given
            assert not missing, f"no answer: {[asked[opaque] for opaque in missing]}"
        for answer in answers:
            self.counts["answers"] += 1
            self.codes[answer.code] += 1
            if answer.code == ResponseCode.SUCCESS:
                assert asked[answer.opaque].keys() & SERVED, f"served: {asked[answer.opaque]}"


def _understood(data: bytes) -> tuple[list[RemotingCommand], bool]:
    """Return the requests in these bytes that need an answer, and whether nothing else follows."""
    decoder = FrameDecoder()
    whole = True
    try:
        commands = decoder.receive_data(data)
    except ProtocolError as error:
        commands, whole = error.commands, False
    whole = whole and not decoder.buffered
    return [one for one in commands if not one.is_response and not one.is_one_way], whole


# -- the broker's state


async def _admin(broker: BrokerProcess) -> SignedPeer:
    host, port = broker.ready["listen"].rsplit(":", 1)
    peer = SignedPeer(ADMIN)
    await asyncio.get_running_loop().create_connection(lambda: peer, host, int(port))
    return peer


async def _set_up(broker: BrokerProcess) -> None:
    """Create a topic, a message, a half message, a group with an offset, and a user."""
    admin = await _admin(broker)
    sent = await admin.plain("K1")
    assert sent.code == 0, sent.remark
    await admin.prepare("T1")
    user = UserInfo(username=KNOWN.name, password=KNOWN.secret)
    created = await admin.call(
        RequestCode.AUTH_CREATE_USER, UserRequestHeader(username=KNOWN.name), encode_access(user)
    )
    assert created.code == 0, created.remark
    update = REQUEST_HEADERS[RequestCode.UPDATE_CONSUMER_OFFSET](
        consumer_group="consumers", topic="orders", queue_id=0, commit_offset=1
    )
    await admin.call(RequestCode.UPDATE_CONSUMER_OFFSET, update)
    admin.close()


async def _metrics(broker: BrokerProcess) -> dict[str, str]:
    admin = await _admin(broker)
    answer = await admin.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)
    admin.close()
    table: dict[str, str] = json.loads(answer.body)["table"]
    return table


def _state(store: Path) -> dict[str, Any]:
    """Return what a stopped broker has on disk, except for versions of tables."""
    state: dict[str, Any] = {}
    for path in sorted((store / "config").glob("*.json")):
        content = json.loads(path.read_text())
        content.pop("dataVersion", None)
        state[path.name] = content
    for path in sorted((store / "commitlog").iterdir()):
        state[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return state


async def _still_serves(broker: BrokerProcess) -> None:
    """Check that a signed request is served."""
    metrics = await _metrics(broker)
    assert metrics["brokerActive"] == "true"


async def _fuzz(run: Run, *, connections: int = 0, seconds: float = 0) -> None:
    end = time.monotonic() + seconds
    measured = time.monotonic()

    def is_done() -> bool:
        started = run.counts["connections"]
        return started >= connections and time.monotonic() >= end

    async def worker() -> None:
        nonlocal measured
        while not is_done():
            await run.one()
            if not run.warm_kib and run.counts["connections"] >= WARM:
                run.warm_kib = run.rss_kib()
            if time.monotonic() - measured > 30:  # progress of a long run
                measured = time.monotonic()
                print(f"rss_kib={run.rss_kib()} {dict(run.counts)}", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


async def _crowd(run: Run, *, over_tls: bool) -> float:
    """Return the KiB that each of many connections takes that sends half a frame and waits."""
    half_frame = signed_frame(ADMIN, RequestCode.GET_BROKER_RUNTIME_INFO)[:-1]
    before = run.rss_kib()
    writers = []
    for _ in range(CROWD):
        _reader, writer = await asyncio.open_connection(
            "127.0.0.1", run.ports[0], ssl=run.tls if over_tls else None
        )
        writer.write(half_frame)
        await writer.drain()
        writers.append(writer)
    await _still_serves(run.broker)
    per_connection = (run.rss_kib() - before) / CROWD
    for writer in writers:
        writer.transport.abort()
    return per_connection


def _check(folder: Path, *, connections: int = 0, seconds: float = 0) -> None:
    seed = printed_seed()
    with broker_process(folder, **_settings(folder)) as broker:
        asyncio.run(_set_up(broker))
        assert broker.stop() == 0
        before = _state(folder / "store")
        broker.start()
        run = Run(broker, folder, seed)
        first = asyncio.run(_metrics(broker))
        asyncio.run(_fuzz(run, connections=connections, seconds=seconds))
        grown_kib = run.rss_kib() - run.warm_kib if run.warm_kib else 0
        crowds = [asyncio.run(_crowd(run, over_tls=over_tls)) for over_tls in (False, True)]
        last = asyncio.run(_metrics(broker))
        assert broker.stop() == 0  # it was running, and stopped cleanly
        after = _state(folder / "store")
    print(f"{dict(run.counts)} codes={dict(run.codes.most_common())}")
    print(f"warm_kib={run.warm_kib} grown_kib={grown_kib} per_connection_kib={crowds}")
    refused = {name: last[name] for name in last if "refused" in name and last[name] != "0"}
    print(f"refused={refused}")

    assert before == after
    for name in ("commitLogMaxOffset", "commitLogMinOffset"):
        assert first[name] == last[name]
    assert grown_kib < GROWTH_MAX_KIB
    assert max(crowds) < PER_CONNECTION_MAX_KIB
    unexpected = [
        line
        for line in broker.log.splitlines()
        if "request_failed" in line or "Traceback" in line or "ERROR" in line
    ]
    assert not unexpected, unexpected[:5]
    assert ADMIN.secret not in broker.log
    assert KNOWN.secret not in broker.log


def test_unsigned_requests_change_nothing(tmp_path: Path) -> None:
    """Each request gets one answer, a refusal; the log and all tables stay unchanged."""
    _check(tmp_path, connections=300)


@pytest.mark.campaign
def test_hours_of_random_bytes_do_no_harm(tmp_path: Path) -> None:
    """The same for longer: the process does not grow, and still serves signed requests."""
    _check(tmp_path, seconds=CAMPAIGN_FACTOR * campaign_seconds())
