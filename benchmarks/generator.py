"""Run the load generator against one server and read what it reports."""

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from .build import build
from .scenarios import BATCH_UNITS, BODY_SIZE, FILL_REQUESTS, LoadKind, Scenario

_SETUP_TIMEOUT: Final = 60.0  # seconds for creating the topic and draining, beside the run itself


class GeneratorError(Exception):
    """The generator gave up: what it said is the message."""


class LoadCounters(msgspec.Struct, frozen=True):
    """What one run counted; ``sent`` = ``ok`` + ``failed`` + what was lost.

    ``messages`` of transactions are those that can be read, if the server was asked.
    """

    sent: int
    ok: int
    failed: int
    ended: int  # END_TRANSACTIONs that were sent; one-way ones are not in ``sent``
    messages: int
    bytes: int
    failed_by_code: dict[str, int]


class Latency(msgspec.Struct, frozen=True):
    """Microseconds from the request to its reply; of a transaction, to the last reply it gets.

    With a rate it begins when the request was due.
    """

    p50: float
    p99: float
    max: float


class LoadResult(msgspec.Struct, frozen=True):
    """One run: the whole of it in ``total``, the measured window in everything else."""

    scenario: str
    message: str
    header: str
    connections: int
    window: int
    topics: int
    queues: int
    body_size: int
    units: int
    frame_size: int
    rate_due: float  # requests per second on schedule; 0: as fast as they were answered
    total: LoadCounters
    measured: LoadCounters
    lost: int
    unmatched: int
    server_requests: int
    one_way_answers: int
    first_refusal: str  # the header of the first answer that was not 0, or empty
    seconds: float
    own_cpu_seconds: float
    server_cpu_seconds: float
    machine_cpu_seconds: float
    latency_us: Latency

    @property
    def rate(self) -> float:
        """Messages per second; of transactions, those delivered."""
        return self.measured.messages / self.seconds

    @property
    def request_rate(self) -> float:
        """What ``--rate`` counts: pulls, batches, half messages per second."""
        if self.scenario == LoadKind.PULL:
            return self.measured.ok / self.seconds
        return self.rate / self.units

    @property
    def delivered(self) -> float | None:
        """Of transactions: which share of those that were committed can be read."""
        return self.total.messages / self.total.ended if self.total.ended else None

    @property
    def cpu_us(self) -> float:
        """The server's user and system microseconds per message."""
        return _per_message(self.server_cpu_seconds, self.measured.messages)

    @property
    def generator_cpu_us(self) -> float:
        return _per_message(self.own_cpu_seconds, self.measured.messages)

    @property
    def generator_busy(self) -> float:
        """Share of its core that the generator used; near 1 it may have been the bottleneck."""
        return self.own_cpu_seconds / self.seconds

    @property
    def others_busy(self) -> float:
        """Cores used by neither server nor generator: what disturbed the measurement."""
        spent = self.own_cpu_seconds + self.server_cpu_seconds
        return max(0.0, self.machine_cpu_seconds - spent) / self.seconds

    @property
    def flaws(self) -> list[str]:
        """Why this result is not to be taken at its word; empty when it is."""
        counts = {
            "failed": self.total.failed,
            "lost": self.lost,
            "unmatched": self.unmatched,
            "one-way refused": self.one_way_answers,
        }
        flaws = [f"{count} {what}" for what, count in counts.items() if count]
        if self.total.failed_by_code:
            flaws.append(f"by code {self.total.failed_by_code}, first: {self.first_refusal}")
        return flaws


def _per_message(seconds: float, messages: int) -> float:
    return seconds / messages * 1e6 if messages else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running server, as the generator needs it."""

    port: int
    namesrv_port: int | None  # None: it has no routes, take the queues as given
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one run takes."""

    seconds: float
    warmup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """The compiled generator and how it is to be used."""

    program: Path
    cpu: int | None
    header: str
    from_start: bool = False  # whether all pulls of a queue begin with its first message

    def run(
        self,
        scenario: Scenario,
        target: Target,
        topic: str,
        timing: Timing,
        *,
        requests: int | None = None,
        rate: float | None = None,
    ) -> LoadResult:
        """Measure ``scenario``; a topic to be pulled must have been filled.

        It ends after ``requests``, if they are given, should its time not be up by then. With a
        ``rate`` so many requests are due per second, else the next leaves when one is answered.

        Raises:
            GeneratorError: The server closed a connection, answered nonsense or does not answer.
        """
        arguments = scenario.arguments(header=self.header)
        arguments += ["--seconds", str(timing.seconds), "--warmup", str(timing.warmup)]
        if requests is not None:
            arguments += ["--requests", str(requests)]
        if rate is not None:
            arguments += ["--rate", str(rate)]
        return self._call(arguments, target, topic, timing.seconds + timing.warmup)

    def fill(self, scenario: Scenario, target: Target, topic: str) -> LoadResult:
        """Put the messages that ``scenario`` pulls into a topic, by batches."""
        batches = replace(scenario, kind=LoadKind.BATCH, connections=4, window=1, by_tag=False)
        arguments = batches.arguments(header="json")
        count = FILL_REQUESTS * BODY_SIZE // max(BODY_SIZE, scenario.body_size)
        arguments += ["--requests", str(count), "--warmup", "0", "--seconds", "60"]
        result = self._call(arguments, target, topic, 60.0)
        if result.total.ok != count or result.units != BATCH_UNITS:
            raise GeneratorError(f"the topic could not be filled: {', '.join(result.flaws)}")
        return result

    def _call(self, arguments: list[str], target: Target, topic: str, seconds: float) -> LoadResult:
        command = [str(self.program), "--port", str(target.port), "--topic", topic, *arguments]
        command += ["--server", str(target.pid)]
        if target.namesrv_port is None:
            command += ["--no-route"]
        else:
            command += ["--namesrv-port", str(target.namesrv_port)]
        if self.cpu is not None:
            command += ["--cpu", str(self.cpu)]
        if self.from_start:
            command += ["--from-start"]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=seconds + _SETUP_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise GeneratorError(f"no end after {error.timeout:.0f} s") from error
        if done.returncode != 0:
            raise GeneratorError(done.stderr.decode(errors="replace").strip())
        return msgspec.json.decode(done.stdout, type=LoadResult)


def build_generator(*, cpu: int | None = None, header: str = "json") -> Generator:
    """Compile the generator if needed."""
    return Generator(program=build("loadgen"), cpu=cpu, header=header)
