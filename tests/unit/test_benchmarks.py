"""The load generator counts honestly and speaks the protocol; the report's ratios hold."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.generator import (
    Counters,
    Generator,
    GeneratorError,
    Latency,
    Result,
    Target,
    Timing,
    build_generator,
)
from benchmarks.limits import Limits, measure_limits
from benchmarks.machine import Machine
from benchmarks.peers import ECHO, HALFMQ, ROCKETMQ, EchoPeer
from benchmarks.pending import Figure, Pending
from benchmarks.report import Measurement, Report, as_text, make_rows
from benchmarks.rocketmq_peer import fetch_jars
from benchmarks.scenarios import FlushMode, Kind, Scenario, all_scenarios
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    EndTransactionRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
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
        yield build_generator(cpu=None, header="json", end="two-way")


def load(kind: Kind, *, connections: int = 2, window: int = 3) -> Scenario:
    return Scenario(kind=kind, connections=connections, window=window, mode=FlushMode.ASYNC)


@pytest.mark.parametrize("header", ["json", "msgpack"])
@pytest.mark.parametrize("kind", Kind)
def test_every_request_is_answered_failed_or_lost(
    generator: Generator, tmp_path: Path, kind: Kind, header: str
) -> None:
    """Against the echo server nothing fails, and the counts of the whole run add up."""
    with (
        EchoPeer(cores=None).session(FlushMode.ASYNC, tmp_path) as session,
        session.target() as target,
    ):
        result = replace(generator, header=header).run(load(kind), target, "echo", SHORT)

    assert (result.scenario, result.header) == (kind, header)
    assert result.total.sent == result.total.ok
    assert (result.total.failed, result.lost, result.unmatched) == (0, 0, 0)
    assert result.flaws == []
    assert 0 < result.measured.messages < result.total.messages
    per_message = {Kind.BATCH: 1 / 64, Kind.PULL: 1 / 32, Kind.TRANSACTION: 2}.get(kind, 1)
    assert result.total.ok == pytest.approx(result.total.messages * per_message, rel=0.01)
    assert 0 < result.latency_us.p50 <= result.latency_us.p99 <= result.latency_us.max
    assert result.watched_cpu_seconds > 0
    assert result.own_cpu_seconds > 0


def test_one_way_ends_are_counted_apart(generator: Generator, tmp_path: Path) -> None:
    """A one-way END_TRANSACTION expects no answer, so it is neither ok nor lost."""
    with (
        EchoPeer(cores=None).session(FlushMode.ASYNC, tmp_path) as session,
        session.target() as target,
    ):
        one_way = replace(generator, end="one-way")
        result = one_way.run(load(Kind.TRANSACTION), target, "echo", SHORT)

    assert result.total.one_way == result.total.messages == result.total.ok > 0
    assert (result.lost, result.one_way_answers) == (0, 0)


@pytest.mark.parametrize("header", ["json", "msgpack"])
@pytest.mark.parametrize("kind", Kind)
def test_requests_are_what_our_decoder_expects(
    generator: Generator, kind: Kind, header: str
) -> None:
    """Each frame has the typed header of its code, and the messages in it are well formed."""

    def answer(request: RemotingCommand) -> bytes:
        if request.code == RequestCode.PULL_MESSAGE:
            return encode_reply(request, ResponseCode.PULL_NOT_FOUND)
        return encode_send_reply(request, MSG_ID, 3, 41, None)

    with recording_server(answer) as server:
        target = Target(port=server.port, namesrv_port=None, pid=os.getpid())
        speaking = replace(generator, header=header)
        if kind is Kind.PULL:
            with pytest.raises(GeneratorError, match="fill the topic first"):
                speaking.run(load(kind), target, "t", SHORT)
        else:
            speaking.run(load(kind), target, "t", SHORT)

    assert server.failures == []
    assert len(server.requests) > 0
    for request in server.requests[:200]:
        assert request.header_error is None
        _check(request, kind)


def _check(request: RemotingCommand, kind: Kind) -> None:
    if isinstance(request.header, PullMessageRequestHeader):
        assert (request.header.topic, request.header.queue_offset) == ("t", 0)
        assert (request.header.subscription, request.header.sys_flag) == ("*", 4)
    elif isinstance(request.header, EndTransactionRequestHeader):
        assert (request.header.commit_log_offset, request.header.commit_or_rollback) == (0x1000, 8)
        assert request.header.tran_state_table_offset == 41
        assert len(request.header.msg_id) == 32
    else:
        assert isinstance(request.header, SendMessageRequestHeaderV2)
        assert request.header.sys_flag == (4 if kind is Kind.TRANSACTION else 0)
        assert request.header.batch == (kind is Kind.BATCH)
        assert request.header.born_timestamp > 1_700_000_000_000
        _check_messages(request.header, request.body)


def _check_messages(header: SendMessageRequestHeaderV2, body: bytes) -> None:
    assert header.properties is not None
    if not header.batch:
        assert len(body) == 1024
        assert len(decode_properties(header.properties)["UNIQ_KEY"]) == 32
        return
    units = decode_batch(body)
    keys = {decode_properties(unit.properties)["UNIQ_KEY"] for unit in units}
    assert len(keys) == 64
    assert {len(unit.body) for unit in units} == {1024}


def test_a_refusal_is_never_counted_as_a_message(generator: Generator) -> None:
    """A broker that refuses everything has sent no message, however fast it refuses."""
    with recording_server(lambda request: encode_reply(request, ResponseCode.SYSTEM_BUSY)) as busy:
        target = Target(port=busy.port, namesrv_port=None, pid=os.getpid())
        result = generator.run(load(Kind.SEND), target, "t", SHORT)

    assert (result.total.ok, result.total.messages, result.measured.messages) == (0, 0, 0)
    assert result.total.failed_by_code == {"2": result.total.sent}
    assert '"code":2' in result.first_refusal
    assert result.flaws != []


def test_a_closed_connection_ends_the_run(generator: Generator) -> None:
    """Figures of a broker that dropped a connection are worth nothing."""

    def answer(_request: RemotingCommand) -> bytes:
        raise ConnectionError

    with recording_server(answer) as closing:
        target = Target(port=closing.port, namesrv_port=None, pid=os.getpid())
        with pytest.raises(GeneratorError, match="closed a connection"):
            generator.run(load(Kind.SEND), target, "t", SHORT)


@pytest.mark.usefixtures("generator")
def test_limits_are_measured(tmp_path: Path) -> None:
    """The limits program measures memory and disk and leaves no file behind."""
    limits = measure_limits(tmp_path, seconds=0.05)

    assert limits.fdatasync_per_second > 0
    assert (limits.sequential_mb_per_second or 0) > 0
    assert (limits.memory_us or 0) > 0
    assert list(tmp_path.iterdir()) == []


# ---- report --------------------------------------------------------------------------------------

DURABLE = Scenario(kind=Kind.SEND, connections=64, window=1, mode=FlushMode.SYNC)


def measured(
    server: str, round_number: int, *, rate: int, cpu_us: float, scenario: Scenario = DURABLE
) -> Measurement:
    counters = Counters(rate, rate, 0, 0, rate, rate * 1024, {})
    result = Result(
        scenario="send",
        header="json",
        connections=64,
        window=1,
        queues=8,
        body_size=1024,
        units=1,
        frame_size=1400,
        total=counters,
        measured=counters,
        lost=0,
        unmatched=0,
        server_requests=0,
        one_way_answers=0,
        first_refusal="",
        seconds=1.0,
        own_cpu_seconds=0.5,
        watched_cpu_seconds=rate * cpu_us / 1e6,
        machine_cpu_seconds=1.5,
        latency_us=Latency(p50=1.0, p99=2.0, max=3.0),
    )
    return Measurement(
        scenario=scenario,
        server=server,
        round=round_number,
        disk=Limits(fdatasync_per_second=5000.0, sequential_mb_per_second=1000.0),
        result=result,
    )


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that runs at half speed in one round does not bend a ratio."""
    rows = make_rows(
        [
            measured(ECHO, 1, rate=100_000, cpu_us=4.0),
            measured(HALFMQ, 1, rate=40_000, cpu_us=12.0),
            measured(ROCKETMQ, 1, rate=20_000, cpu_us=60.0),
            measured(ECHO, 2, rate=50_000, cpu_us=8.0),
            measured(HALFMQ, 2, rate=20_000, cpu_us=24.0),
            measured(ROCKETMQ, 2, rate=10_000, cpu_us=120.0),
        ],
        Limits(fdatasync_per_second=5000.0, sequential_mb_per_second=1000.0),
    )
    echo, halfmq, rocketmq = rows

    assert (halfmq.rate, halfmq.rate_lowest, halfmq.rate_highest) == (30_000, 20_000, 40_000)
    assert halfmq.cpu_to_echo == pytest.approx(3.0)
    assert halfmq.rate_to_disk == pytest.approx(6.0)
    assert (echo.rate_to_disk, halfmq.rate_to_halfmq) == (None, None)
    assert rocketmq.rate_to_halfmq == pytest.approx(2.0)
    assert rocketmq.cpu_to_halfmq == pytest.approx(5.0)


def test_transactions_are_told_in_units_of_plain_sends() -> None:
    """Of the same load and round: other connections, modes and servers say nothing."""
    transactions = replace(DURABLE, kind=Kind.TRANSACTION)
    disk = Limits(1000.0, 1000.0, copy_us=0.5, crc_us=0.5)
    rows = make_rows(
        [
            measured(HALFMQ, 1, rate=40_000, cpu_us=10.0),
            measured(HALFMQ, 1, rate=90_000, cpu_us=1.0, scenario=replace(DURABLE, window=64)),
            measured(HALFMQ, 1, rate=16_000, cpu_us=25.0, scenario=transactions),
            measured(HALFMQ, 2, rate=20_000, cpu_us=20.0),
            measured(HALFMQ, 2, rate=8_000, cpu_us=50.0, scenario=transactions),
            measured(ECHO, 2, rate=90_000, cpu_us=1.0),
        ],
        disk,
    )
    told = {row.scenario: row for row in rows if row.server == HALFMQ}

    row = told[transactions.name]
    assert row.rate_to_send == pytest.approx(0.4)
    assert row.cpu_to_send == pytest.approx(2.5)
    assert row.cpu_to_memory == pytest.approx(37.5)
    assert (told[DURABLE.name].rate_to_send, told[DURABLE.name].cpu_to_memory) == (None, None)
    machine = Machine("p", 2, 8.0, "k", "py", "/", "ext4", (0.0, 0.0, 0.0))
    text = as_text(Report(machine, {}, disk, [measured(HALFMQ, 1, rate=1, cpu_us=1.0)], rows))
    assert "rate / sends' rate  CPU / a send's CPU" in text


def test_a_failed_run_is_a_flaw_and_not_a_zero() -> None:
    """What could not be measured is named, and does not pull the median down."""
    failed = Measurement(
        scenario=DURABLE,
        server=HALFMQ,
        round=2,
        disk=Limits(fdatasync_per_second=5000.0, sequential_mb_per_second=1000.0),
        result=None,
        error="no ready line",
    )
    good = measured(HALFMQ, 1, rate=40_000, cpu_us=12.0)
    (row,) = make_rows([good, failed], good.disk)

    assert (row.rounds, row.rate) == (1, 40_000)
    assert row.flaws == ["round 2: no ready line"]


def test_names_of_loads_are_unique() -> None:
    """``--scenario`` must be able to pick any one of them."""
    names = [scenario.name for scenario in all_scenarios()]

    assert len(set(names)) == len(names)


# ---- undecided transactions ----------------------------------------------------------------------


def test_a_figure_above_its_limit_is_missed() -> None:
    """The ratio is told beside the limit, and one above 1 makes the command fail."""
    missed = Figure("heap each", "100,000", 300.0, "B", 250)

    assert missed.cells == ("heap each", "100,000", "300.0 B", "250 B", "1.20")
    assert missed.missed
    assert not Figure("heap each", "100,000", 200.0, "B", 250).missed
    assert not Figure("its file", "100,000", 300.0, "MiB").missed


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_undecided_transactions_are_measured(tmp_path: Path) -> None:
    """Every step runs, and both starts find all that is undecided."""
    figures = Pending(tmp_path, 2_000, 100).run()

    by_name = {figure.what: figure for figure in figures}
    assert 50 < by_name["heap each"].value < 1_000
    assert by_name["start from log alone"].of == "2,100"
    assert all(figure.value >= 0 for figure in figures)


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
