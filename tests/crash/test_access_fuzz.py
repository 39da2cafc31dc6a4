"""Whoever cannot sign changes nothing: random bytes at a broker process with access control on.

Frames of recorded clients, changed; requests of every code and header type, made up; half frames,
huge lengths, wrong keys and signatures, and right ones of a user who may do nothing; broken TLS
handshakes. All of it on each of the broker's ports, over plain and TLS connections.

By default a few connections; as a campaign, ten times `HALFMQ_CAMPAIGN_SECONDS` (60). The seed of
each run is printed and can be set by `HALFMQ_SEED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
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
from halfmq.remoting.headers import REQUEST_HEADERS
from tests.support.access import ADMIN, Account, SignedPeer, certificate, signed_frame
from tests.support.fuzzing import Fuzzer
from tests.support.patience import PATIENCE_S

CAMPAIGN_FACTOR: Final = 10
"""So that the dose of six seconds is a minute."""

AT_ONCE: Final = 12
"""Connections open at the same time."""

WARM: Final = 2_000
"""Connections after which memory is measured first: by then caches have their size."""

GROWTH_MAX_KIB: Final = 48 << 10
"""What the process may have more at the end than when it was warm. The allocator keeps what the
largest frames needed; a leak of a hundred bytes a frame would be more within minutes."""

CROWD: Final = 400
"""Silent or unfinished connections whose memory is measured."""

PER_CONNECTION_MAX_KIB: Final = 200
"""Each of them, those with TLS too, beside the bytes it has sent."""

KNOWN: Final = Account("nobody-special", "its-own-secret")
"""A user without any right."""

SERVED: Final = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.HEART_BEAT,  # of nobody or of a producer
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
}
"""What that user may ask for."""


def _settings(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": ADMIN.name, "password": ADMIN.secret}),
        "transactionTimeOut": "3600000",  # a check would be a change of its own
        "mappedFileSizeCommitLog": str(8 << 20),
        **certificate(folder),
    }


class Run:
    """One broker, and what was done to it."""

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
        """Open one connection, send, and check what comes back."""
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
        """Every request gets one answer, and nothing but a refusal."""
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
            except ConnectionError:  # closed for what came after; the last answers may be lost
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
    """Return the requests in these bytes that want an answer, and whether nothing else follows."""
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
    """Have a topic, a message, a half message, a group with an offset, and a user."""
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
    """What a stopped broker has on disk, but times and what it notes about itself."""
    state: dict[str, Any] = {}
    for path in sorted((store / "config").glob("*.json")):
        content = json.loads(path.read_text())
        content.pop("dataVersion", None)
        state[path.name] = content
    for path in sorted((store / "commitlog").iterdir()):
        state[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return state


async def _still_serves(broker: BrokerProcess) -> None:
    """A client that signs is served, over plain connections and TLS."""
    metrics = await _metrics(broker)
    assert metrics["brokerActive"] == "true"


async def _fuzz(run: Run, *, connections: int = 0, seconds: float = 0) -> None:
    end = time.monotonic() + seconds
    measured = time.monotonic()

    def goes_on() -> bool:
        started = run.counts["connections"]
        return started < connections or time.monotonic() < end

    async def worker() -> None:
        nonlocal measured
        while goes_on():
            await run.one()
            if not run.warm_kib and run.counts["connections"] >= WARM:
                run.warm_kib = run.rss_kib()
            if time.monotonic() - measured > 30:  # for whoever watches a long run
                measured = time.monotonic()
                print(f"rss_kib={run.rss_kib()} {dict(run.counts)}", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


async def _crowd(run: Run, *, over_tls: bool) -> float:
    """Return KiB for each of many connections that send half a frame and wait."""
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
    seed = int(os.environ.get("HALFMQ_SEED") or random.randrange(1 << 32))
    print(f"HALFMQ_SEED={seed}")
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
        assert broker.stop() == 0  # it was alive, and came down in order
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


def test_nobody_without_a_signature_changes_anything(tmp_path: Path) -> None:
    """Each request is answered once, with a refusal; the log and all tables stay as they are."""
    _check(tmp_path, connections=300)


@pytest.mark.campaign
def test_nothing_random_harms_the_broker(tmp_path: Path) -> None:
    """The same for long: it does not grow, and serves whoever signs as it ever did."""
    campaign_s = float(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "60"))
    _check(tmp_path, seconds=CAMPAIGN_FACTOR * campaign_s)
