"""What a Python program gets from halfmq and from other brokers, each with its own client.

::

    pip install -e '.[benchmarks]'
    python -m benchmarks.python_peers             # those brokers that are installed, ten minutes

Redis (``redis-server``), RabbitMQ (``rabbitmq-server``) and NATS (``nats-server``) must be in the
path; Kafka is fetched by Maven. An acknowledged message is on disk: Redis with ``appendfsync
always``, NATS with ``sync_interval: always``, RabbitMQ with a quorum queue, Kafka with
``log.flush.interval.messages=1``; with ``--relaxed`` they have their defaults, and halfmq
``ASYNC_FLUSH``. Everything runs on one machine, without replication.

The brokers take turns in each round. The table has the median rate and its range, and the processor
time of client and broker per message; all figures go to ``--output``, a chart to ``--chart``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .build import being_made, cache_directory
from .machine import describe_machine
from .processes import free_ports, halfmq_broker, running, wait_for_port
from .python_peer_clients import TOPIC
from .report import table

KAFKA: Final = "4.1.0"
START_S: Final = 120.0
"""Seconds until a broker must listen; RabbitMQ and Kafka take tens on a busy machine."""

_POM: Final = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>halfmq</groupId><artifactId>kafka-peer</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA}</version>
  </dependency></dependencies>
</project>
"""


@dataclass(frozen=True)
class Load:
    """One way to use a broker."""

    name: str
    step: str
    outstanding: int


LOADS: Final = (
    Load("send, 1 outstanding", "send", 1),
    Load("send, 64 outstanding", "send", 64),
    Load("send, 256 outstanding", "send", 256),
    Load("batches of 64", "batch", 1),
    Load("transactions, 64 outstanding", "transaction", 64),
    Load("receive and acknowledge", "receive", 1),
)
OFFERED: Final = {
    "halfmq": {"send", "batch", "transaction", "receive"},
    "redis": {"send", "batch", "receive"},
    "nats": {"send", "receive"},
    "rabbitmq": {"send", "receive"},
    "kafka": {"send", "batch", "transaction", "receive"},
}
"""What each client offers. Kafka's client has one transaction at a time."""


@dataclass(frozen=True)
class Figure:
    """What one run measured."""

    broker: str
    load: str
    rate: float
    client_us: float
    broker_us: float


@contextmanager
def halfmq(home: Path, durable: bool) -> Iterator[tuple[str, int]]:
    """Our broker, in this environment."""
    flush = "SYNC_FLUSH" if durable else "ASYNC_FLUSH"
    settings = {
        "storePathRootDir": str(home / "store"),
        "listenPort": str(free_ports(3) + 2),
        "namesrvListenPort": "0",
        "flushDiskType": flush,
    }
    with halfmq_broker(settings, home / "log", timeout=START_S) as (process, fields):
        yield fields["namesrv"], process.pid


@contextmanager
def redis(home: Path, durable: bool) -> Iterator[tuple[str, int]]:
    """Redis with an append-only file."""
    port, sync = free_ports(1), "always" if durable else "everysec"
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", ""]
    command = ["redis-server", *options, "--appendonly", "yes", "--appendfsync", sync]
    with running(command, log=home / "log") as process:
        wait_for_port(process, port, home / "log", timeout=START_S)
        yield f"127.0.0.1:{port}", process.pid


@contextmanager
def nats(home: Path, durable: bool) -> Iterator[tuple[str, int]]:
    """NATS with JetStream on files."""
    port, sync = free_ports(1), "always" if durable else "2m"
    conf = home / "nats.conf"
    conf.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{home}", sync_interval: {sync} }}\n'
    )
    with running(["nats-server", "-c", str(conf)], log=home / "log") as process:
        wait_for_port(process, port, home / "log", timeout=START_S)
        yield f"127.0.0.1:{port}", process.pid


@contextmanager
def rabbitmq(home: Path, durable: bool) -> Iterator[tuple[str, int]]:
    """RabbitMQ; a quorum queue syncs each message whatever the setting."""
    del durable
    port = free_ports(2)
    environment = {
        **os.environ,
        "HOME": str(home),
        "RABBITMQ_NODENAME": f"benchmark{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(port + 1),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
    }
    (home / "plugins").write_text("[].\n")
    command = [next(Path("/usr/lib").glob("rabbitmq/bin/rabbitmq-server")).as_posix()]
    with running(command, log=home / "log", environment=environment) as process:
        wait_for_port(process, port, home / "log", timeout=START_S)
        yield f"127.0.0.1:{port}", process.pid


@contextmanager
def kafka(home: Path, durable: bool) -> Iterator[tuple[str, int]]:
    """Kafka from its published jars, one node that is controller and broker."""
    port = free_ports(2)
    conf = home / "server.properties"
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{port + 1}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": f"1@127.0.0.1:{port + 1}",
        "log.dirs": str(home / "data"),
        "num.partitions": "4",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        **({"log.flush.interval.messages": "1"} if durable else {}),
    }
    conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    java = ["java", "-Xmx1g", "-cp", f"{_kafka_jars()}/*"]
    cluster = "AAAAAAAAQAAAAAAAAAAAAA"
    storage = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(conf)]
    subprocess.run([*java, *storage], check=True, stdout=subprocess.DEVNULL)
    with running([*java, "kafka.Kafka", str(conf)], log=home / "log") as process:
        wait_for_port(process, port, home / "log", timeout=START_S)
        yield f"127.0.0.1:{port}", process.pid


def _kafka_jars() -> Path:
    jars = cache_directory() / f"kafka-{KAFKA}"
    if not jars.is_dir():
        with being_made(jars) as unfinished:
            (unfinished / "pom.xml").write_text(_POM)
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies"]
            subprocess.run(
                [*command, f"-DoutputDirectory={unfinished}"], cwd=unfinished, check=True
            )
    return jars


Server = Callable[[Path, bool], AbstractContextManager[tuple[str, int]]]
"""Starts a broker in a directory, durable or not; gives its address and process id."""

SERVERS: Final[Mapping[str, Server]] = {
    one.__name__: one for one in (halfmq, redis, nats, rabbitmq, kafka)
}
PROGRAMS: Final = {
    "redis": "redis-server",
    "nats": "nats-server",
    "rabbitmq": "rabbitmq-server",
    "kafka": "mvn",
}


def installed() -> list[str]:
    """Return the brokers that can be run here."""
    path = f"{cache_directory() / 'bin'}:{os.environ['PATH']}"
    os.environ["PATH"] = path
    return [one for one in SERVERS if one not in PROGRAMS or shutil.which(PROGRAMS[one], path=path)]


def measure(broker: str, durable: bool, seconds: float, base: Path) -> Iterator[Figure]:
    """Run every load that a broker offers, on a new store."""
    with (
        tempfile.TemporaryDirectory(dir=base) as home,
        SERVERS[broker](Path(home), durable) as (address, pid),
    ):
        for load in LOADS:
            if load.step not in OFFERED[broker]:
                continue
            outstanding = 1 if (broker, load.step) == ("kafka", "transaction") else load.outstanding
            before = cpu_of(pid)
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "benchmarks.python_peer_clients", broker, address),
                    *(load.step, str(outstanding), str(seconds)),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            count, passed, cpu = int(done[0]), float(done[1]), float(done[2])
            used = cpu_of(pid) - before
            per = 1e6 / max(count, 1)
            yield Figure(broker, load.name, count / passed, cpu * per, used * per)


def cpu_of(pid: int) -> float:
    """Return the processor seconds of a process and its children, dead ones included."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_of(int(child)) for child in children)


def summary(figures: Sequence[Figure]) -> list[list[str]]:
    """Return the rows of the table."""
    runs: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for one in figures:
        runs[one.load, one.broker].append(one)
    rows = []
    for (load, broker), found in sorted(runs.items(), key=lambda item: _place(item[0])):
        rates = [one.rate for one in found]
        ours = [one.rate for one in runs.get((load, "halfmq"), [])] or [float("nan")]
        middle = statistics.median(rates)
        rows.append(
            [
                load,
                broker,
                f"{middle:,.0f}",
                f"{min(rates):,.0f}-{max(rates):,.0f}",
                f"{statistics.median(ours) / middle:.2f}",
                f"{statistics.median(one.client_us for one in found):.0f}",
                f"{statistics.median(one.broker_us for one in found):.0f}",
            ]
        )
    return rows


def _place(key: tuple[str, str]) -> tuple[int, int]:
    load, broker = key
    return [one.name for one in LOADS].index(load), list(SERVERS).index(broker)


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw the median rates of sends and receives as an SVG file."""
    import pygal  # noqa: PLC0415 -- for charts only

    chart = pygal.Bar(
        title="Durable messages a second of one Python program (logarithmic)",
        logarithmic=True,
        range=(300, 200_000),
        zero=300,
        y_labels=[300, 1_000, 3_000, 10_000, 30_000, 100_000],
        height=420,
        legend_at_bottom=True,
        legend_at_bottom_columns=len(SERVERS),
        truncate_label=-1,
        js=(),  # pages show the picture without scripts
        style=pygal.style.CleanStyle(),
    )
    shown = [one.name for one in LOADS if one.step in {"send", "receive"}]
    chart.x_labels = shown
    for broker in SERVERS:
        rates = [
            [one.rate for one in figures if (one.load, one.broker) == (load, broker)]
            for load in shown
        ]
        if any(rates):
            chart.add(broker, [statistics.median(one) if one else None for one in rates])
    chart.render_to_file(str(path))


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--broker", action="append", choices=list(SERVERS))
    parser.add_argument("--relaxed", action="store_true", help="flushing as the brokers' defaults")
    parser.add_argument("--output", type=Path, default=Path("python-peers.json"))
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    brokers = [one for one in installed() if not options.broker or one in options.broker]
    figures: list[Figure] = []
    base = cache_directory()
    for number in range(options.rounds):
        for broker in brokers:
            print(f"round {number + 1}: {broker}", file=sys.stderr)
            figures += measure(broker, not options.relaxed, options.seconds, base)
    head = ["load", "broker", "msgs/s", "lowest-highest", "halfmq x", "client us", "broker us"]
    print(table(head, summary(figures)))
    content = {
        "durable": not options.relaxed,
        "topic": TOPIC,
        "machine": {**_as_dict(base)},
        "figures": [asdict(one) for one in figures],
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    if options.chart:
        draw(figures, options.chart)


def _as_dict(base: Path) -> dict[str, object]:
    import msgspec  # noqa: PLC0415

    built: dict[str, object] = msgspec.to_builtins(describe_machine(base))
    return built


if __name__ == "__main__":
    main()
