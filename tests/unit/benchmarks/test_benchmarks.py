"""The benchmarks run, and count nothing that was not served."""

import os
import shutil
import subprocess
import threading
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks import cold, pauses, recovery, run
from benchmarks.generator import Generator, Target, Timing, build_generator
from benchmarks.pending import PendingMeasurement
from benchmarks.report import Report
from benchmarks.rocketmq_peer import fetch_jars
from benchmarks.scenarios import TOPICS, FlushDiskType, LoadKind, MessageShape, Scenario
from benchmarks.traced_broker import Tracer
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import OffsetResponseHeader, SendMessageRequestHeaderV2
from halfmq.remoting.replies import encode_reply, encode_send_reply
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.properties import decode_properties
from tests.support.benchmarks import compiling, recording_server
from tests.support.patience import PATIENCE_S

MSG_ID = "7F00000100002A9F0000000000001000"
SHORT = Timing(seconds=0.1, warmup=0.05)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    """The generator, compiled for the tests."""
    with compiling(tmp_path_factory):
        yield build_generator()


def load(kind: LoadKind, message: MessageShape = MessageShape.LEAN) -> Scenario:
    return Scenario(kind=kind, connections=2, window=3, mode=FlushDiskType.ASYNC, message=message)


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    ("of", "wanted", "rows"),
    [
        ("--message=usual", ("one-way c=4 w=64 usual ASYNC", "pull by tag c=4 w=1"), 4),
        ("--shapes", ("one-way c=4 w=64 usual rocketmq ASYNC",), 1),
    ],
)
def test_loads_are_measured(
    of: str, wanted: tuple[str, ...], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run against our broker and the echo server has every request of its loads served."""
    monkeypatch.setattr("benchmarks.generator.FILL_REQUESTS", 64)
    monkeypatch.setattr("benchmarks.scenarios.TOPICS", 4)
    # The limits' figures are not looked at.
    monkeypatch.setattr("benchmarks.run._LIMIT_SECONDS", 0.02)
    output = tmp_path / "result.json"
    arguments = ["--rounds=1", "--seconds=0.2", "--warmup=0.1", f"--output={output}", of]
    arguments += [f"--directory={tmp_path}", *(f"--scenario={name}" for name in wanted)]

    assert run.main(arguments) == 0

    report = msgspec.json.decode(output.read_bytes(), type=Report)
    assert len(report.rows) == rows
    for measurement in report.measurements:
        assert measurement.result is not None
        total = measurement.result.total
        assert total.messages > 0
        assert (total.failed, measurement.result.unmatched) == (0, 0)
        assert total.sent == total.ok + measurement.result.lost
        assert measurement.result.delivered in {None, 1.0}


@pytest.mark.parametrize("kind", [LoadKind.SEND, LoadKind.BATCH])
@pytest.mark.parametrize("message", MessageShape)
def test_messages_carry_what_their_name_says(
    generator: Generator, message: MessageShape, kind: LoadKind
) -> None:
    """Keys are every message's own, tags and properties vary, topics are used in turn."""
    with recording_server(lambda sent: encode_send_reply(sent, MSG_ID, 3, 41, None)) as server:
        target = Target(port=server.port, namesrv_port=None, pid=os.getpid())
        generator.run(load(kind, message), target, "t", SHORT, requests=256)

    assert server.failures == []
    headers = [sent.header for sent in server.requests]
    texts = [text for sent in server.requests for text in _properties(sent)]
    messages = [decode_properties(text) for text in texts]
    uniq_keys = {one["UNIQ_KEY"] for one in messages}
    keys = [key for one in messages for key in one.get("KEYS", "").split()]
    own = [{*one} - {"UNIQ_KEY", "WAIT", "TAGS", "KEYS"} for one in messages]
    assert {
        header.topic for header in headers if isinstance(header, SendMessageRequestHeaderV2)
    } == ({"t"} if message is MessageShape.LEAN else {f"t-{n:02}" for n in range(TOPICS)})
    assert len(uniq_keys) == len(messages)
    assert len({*keys}) == len(keys) == len(messages) * {"lean": 0, "usual": 1, "wide": 4}[message]
    assert {len(names) for names in own} == {{"lean": 0, "usual": 3, "wide": 10}[message]}
    assert len({one["TAGS"] for one in messages}) == (1 if message is MessageShape.LEAN else 8)
    assert all(text.isascii() != (message is MessageShape.WIDE) for text in texts)


def _properties(sent: RemotingCommand) -> list[str]:
    assert isinstance(sent.header, SendMessageRequestHeaderV2)
    if sent.header.batch:
        return [unit.properties.decode() for unit in decode_batch(sent.body)]
    assert sent.header.properties is not None
    return [sent.header.properties]


def test_a_refusal_is_never_counted_as_a_message(generator: Generator) -> None:
    """A broker that refuses everything has sent no message, however fast it refuses."""
    with recording_server(lambda request: encode_reply(request, ResponseCode.SYSTEM_BUSY)) as busy:
        target = Target(port=busy.port, namesrv_port=None, pid=os.getpid())
        result = generator.run(load(LoadKind.SEND), target, "t", SHORT)

    assert (result.total.ok, result.total.messages, result.measured.messages) == (0, 0, 0)
    assert result.total.failed_by_code == {"2": result.total.sent}
    assert '"code":2' in result.first_refusal
    assert result.flaws != []


def test_a_transaction_that_cannot_be_read_is_never_counted(generator: Generator) -> None:
    """A broker that drops every other one-way commit has delivered half, and nobody was told."""

    def answer(request: RemotingCommand) -> bytes:
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return encode_reply(request, body=b'{"queueDatas":[{"writeQueueNums":1}]}')
        if request.code == RequestCode.GET_MAX_OFFSET:
            commits = sum(1 for seen in server.requests if seen.is_one_way)
            return encode_reply(request, header=OffsetResponseHeader(offset=commits // 2))
        return encode_send_reply(request, MSG_ID, 3, 41, None)

    with recording_server(answer) as server:
        target = Target(port=server.port, namesrv_port=server.port, pid=os.getpid())
        one_way = replace(load(LoadKind.TRANSACTION), one_way=True)
        all_in_window = Timing(seconds=PATIENCE_S, warmup=0)
        result = generator.run(one_way, target, "t", all_in_window, requests=500)

    assert server.failures == []
    assert result.total.ended == result.measured.ended == 500
    assert result.total.messages == 250
    assert 0 < result.measured.messages <= 250  # the last ends may arrive after its end
    assert result.delivered == 0.5


def test_everything_that_is_to_be_timed_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the broker that got another name would silently be timed no more."""
    # Only the names are looked at; the broker of this process is not to be traced.
    monkeypatch.setattr(Tracer, "_timed", lambda _self, _name, function: function)
    tracer = Tracer()

    tracer.install()

    assert tracer.missing == []


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_what_is_watched_from_inside_is_measured(tmp_path: Path) -> None:
    """Pauses, cold reads, recovery and undecided transactions, from first process to last table."""
    generator = build_generator()
    small = Namespace(seconds=1.0, gib=0.02, offsets=1_000, rounds=1, set=[], kind=["mixed"])

    rows = pauses.measure(small, tmp_path, generator)
    rounds, loops = cold.measure(small, tmp_path, generator)
    limits, starts = recovery.measure(small, tmp_path)
    figures = {figure.what: figure for figure in PendingMeasurement(tmp_path, 2_000, 100).run()}

    assert max(row.background_ms for row in rows) > 0
    assert "background" in pauses.as_text(rows)
    assert len(loops) == 2 * len(rounds) == 4
    assert "p99" in cold.as_text(rounds, loops)
    assert limits["crc_gb_s"] > 0
    assert [start.cached for start in starts] == [True, False]
    assert all(start.records > 10_000 and start.parts["scan"] > 0 for start in starts)
    assert 50 < figures["heap each"].value < 1_000
    assert figures["start from log alone"].of == "2,100"


@pytest.mark.parametrize("runs", [1, 3])
def test_runs_that_fetch_the_jars_of_the_peer_at_once_all_have_them(
    runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new machine several test processes do; none of them sees half a directory."""
    all_are_fetching = threading.Barrier(runs)

    def fetch(command: list[str], **_: object) -> None:
        target = command[-1].removeprefix("-DoutputDirectory=")
        all_are_fetching.wait(PATIENCE_S)
        Path(target, "broker.jar").write_bytes(b"jar")

    monkeypatch.setenv("HALFMQ_BENCHMARKS_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(subprocess, "run", fetch)
    with ThreadPoolExecutor(runs) as pool:
        found = list(pool.map(lambda _: fetch_jars(), range(runs)))

    assert {*found} == {found[0]}
    assert [path.read_bytes() for path in found[0].glob("*.jar")] == [b"jar"]
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]
