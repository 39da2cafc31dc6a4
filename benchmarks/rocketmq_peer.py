"""Apache RocketMQ from its published jars, run beside our broker.

Maven fetches the jars once into the cache directory. Name server and broker run on this machine's
Java, on free ports, with a 1 GiB heap. RocketMQ's own settings hold but for the flush mode, the
timer wheel, which is off because it would only write two files of its own, and the check of
transactions, which is put off: those whose one-way end was refused would burden the loads that
follow. Only the broker's process is counted. All listeners are bound to 127.0.0.1 except the
replication port, for which RocketMQ has no such setting.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .build import being_made, cache_directory
from .generator import Target
from .peers import ROCKETMQ, ServerRun, scratch
from .processes import free_ports, running, wait_for_port
from .scenarios import FlushDiskType

VERSION: Final = "5.3.3"
_FETCH_TIMEOUT: Final = 900.0  # seconds; about 130 jars on a first run
_START_TIMEOUT: Final = 120.0  # seconds; a JVM on a busy machine
_SETTLE: Final = 0.5  # seconds after SIGCONT until its timers have caught up

_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>halfmq</groupId><artifactId>rocketmq-peer</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-broker</artifactId>
      <version>{version}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-namesrv</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""

_NO_LOGS: Final = """\
<configuration>
  <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
    <target>System.err</target>
    <encoder><pattern>%d %p %t %c - %m%n</pattern></encoder>
  </appender>
  <root level="ERROR"><appender-ref ref="console"/></root>
</configuration>
"""

# What RocketMQ's start script gives its broker, but for the sizes of heap and direct memory.
_JVM_OPTIONS: Final = (
    *("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25"),
    *("-XX:InitiatingHeapOccupancyPercent=30", "-XX:SoftRefLRUPolicyMSPerMB=0"),
    *("-XX:-OmitStackTraceInFastThrow", "-XX:+AlwaysPreTouch", "-XX:-UseLargePages"),
    *("--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"),
    *("--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",),
)


class PeerMissingError(Exception):
    """Apache RocketMQ cannot be run here; the message says what is missing."""


def fetch_jars() -> Path:
    """Return the directory of the jars, fetched by Maven when they are not there yet.

    Raises:
        PeerMissingError: There is no Java or Maven, or Maven fails.
    """
    home = cache_directory() / f"rocketmq-{VERSION}"
    jars = home / "lib"
    if jars.is_dir():
        return jars
    missing = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    if missing:
        raise PeerMissingError(f"not installed: {', '.join(missing)}")
    home.mkdir(exist_ok=True)
    with being_made(jars) as unfinished:
        (unfinished / "pom.xml").write_text(_POM.format(version=VERSION), encoding="utf-8")
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies"]
        try:
            subprocess.run(
                [*command, f"-DoutputDirectory={unfinished}"],
                cwd=unfinished,
                check=True,
                timeout=_FETCH_TIMEOUT,
                stdout=subprocess.DEVNULL,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise PeerMissingError(f"Maven could not fetch the jars: {error}") from error
    return jars


@dataclass(frozen=True, slots=True, kw_only=True)
class RocketMQPeer:
    """One broker with its name server, started once per flush mode."""

    cores: Sequence[int] | None
    warm_up: Callable[[Target], None]  # makes the JVM compile what the runs will need
    more: Mapping[str, str] = field(default_factory=dict)  # settings of the broker
    name: str = ROCKETMQ

    @property
    def settings(self) -> dict[str, str]:
        cores = "all" if self.cores is None else ",".join(map(str, self.cores))
        return {"version": VERSION, "cores": cores, "jvm": " ".join(_JVM_OPTIONS[:3])}

    @contextmanager
    def session(self, mode: FlushDiskType, directory: Path) -> Iterator[ServerRun]:
        jars = fetch_jars()
        with scratch(directory, ROCKETMQ) as home:
            ports = _Ports(free_ports(_Ports.COUNT))
            _write_files(home, mode, ports, self.more)
            with _java(home, jars, "namesrv", self.cores) as namesrv:
                wait_for_port(namesrv, ports.namesrv, home / "namesrv.log", timeout=_START_TIMEOUT)
                with _java(home, jars, "broker", self.cores) as broker:
                    log = home / "broker.log"
                    wait_for_port(broker, ports.broker, log, timeout=_START_TIMEOUT)
                    session = _RocketMQSession(ports, namesrv, broker)
                    with session.target() as target:
                        self.warm_up(target)
                    yield session


@contextmanager
def rocketmq_slave(
    directory: Path, namesrv_port: int, cores: Sequence[int] | None
) -> Iterator[subprocess.Popen[str]]:
    """A slave of the broker that has registered at a name server, under SYNC_FLUSH."""
    jars = fetch_jars()
    with scratch(directory, "slave") as home:
        ports = _Ports(free_ports(_Ports.COUNT))
        more = {
            "brokerRole": "SLAVE",
            "brokerId": "1",
            "namesrvAddr": f"127.0.0.1:{namesrv_port}",
            "registerNameServerPeriod": "10000",  # ms; it learns its master's address by it
        }
        _write_files(home, FlushDiskType.SYNC, ports, more)
        with _java(home, jars, "broker", cores) as process:
            wait_for_port(process, ports.broker, home / "broker.log", timeout=_START_TIMEOUT)
            yield process


@dataclass(frozen=True, slots=True)
class _Ports:
    """Neighbouring ports: the broker takes the one two below its own by itself."""

    COUNT = 5
    first: int

    @property
    def broker(self) -> int:
        return self.first + 2

    @property
    def replication(self) -> int:
        return self.first + 3

    @property
    def namesrv(self) -> int:
        return self.first + 4


@dataclass(frozen=True, slots=True)
class _RocketMQSession:
    ports: _Ports
    namesrv: subprocess.Popen[str]
    broker: subprocess.Popen[str]

    @contextmanager
    def target(self) -> Iterator[Target]:
        """Let the JVMs run and halt them afterwards: even idle they disturb the next server."""
        for process in (self.namesrv, self.broker):
            process.send_signal(signal.SIGCONT)
        time.sleep(_SETTLE)
        try:
            yield Target(
                port=self.ports.broker, namesrv_port=self.ports.namesrv, pid=self.broker.pid
            )
        finally:
            for process in (self.broker, self.namesrv):
                process.send_signal(signal.SIGSTOP)


def _write_files(home: Path, mode: FlushDiskType, ports: _Ports, more: Mapping[str, str]) -> None:
    broker = {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "broker-a",
        "brokerId": "0",
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1",
        "listenPort": str(ports.broker),
        "haListenPort": str(ports.replication),
        "namesrvAddr": f"127.0.0.1:{ports.namesrv}",
        "autoCreateTopicEnable": "true",
        "flushDiskType": mode.value,
        "timerWheelEnable": "false",
        "transactionCheckInterval": str(24 * 3_600_000),  # ms: longer than any run
        "storePathRootDir": str(home / "store"),
        "storePathCommitLog": str(home / "store" / "commitlog"),
        **more,
    }
    namesrv = {"bindAddress": "127.0.0.1", "listenPort": str(ports.namesrv)}
    for name, settings in (("broker", broker), ("namesrv", namesrv)):
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        (home / f"{name}.conf").write_text(text, encoding="utf-8")
    (home / "logback.xml").write_text(_NO_LOGS, encoding="utf-8")


@contextmanager
def _java(
    home: Path, jars: Path, name: str, cores: Sequence[int] | None
) -> Iterator[subprocess.Popen[str]]:
    mains = {"broker": "broker.BrokerStartup", "namesrv": "namesrv.NamesrvStartup"}
    options = _JVM_OPTIONS if name == "broker" else ("-Xms256m", "-Xmx256m")
    command = [
        *("java", *options, f"-Duser.home={home}", f"-Drocketmq.home.dir={home}"),
        f"-Drmq.logback.configurationFile={home / 'logback.xml'}",
        *("-cp", f"{jars}/*", f"org.apache.rocketmq.{mains[name]}", "-c", f"{home}/{name}.conf"),
    ]
    with running(command, log=home / f"{name}.log", cores=cores) as process:
        yield process
