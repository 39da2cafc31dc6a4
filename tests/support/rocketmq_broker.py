"""The official broker 5.3.3 on a store directory, and plain requests to any broker.

Jars and processes are those of the benchmarks. All listeners are bound to 127.0.0.1 but the
replication port, for which RocketMQ has no such setting; nothing connects to it.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import pytest

from benchmarks.processes import free_ports, running, wait_for_port
from benchmarks.rocketmq_peer import PeerMissingError, fetch_jars
from halfmq.remoting import headers
from halfmq.remoting.codes import INT64_MAX, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.replies import encode_request
from halfmq.store.format.record import Record, decode_records
from tests.support.patience import PATIENCE_S

START_SECONDS: Final = 120.0  # a JVM on a busy machine
_POLL_SECONDS: Final = 0.1
_SUBSCRIPTION_FLAG: Final = 4  # the pull says itself what it wants

_JVM_OPTIONS: Final = (
    *("-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"),
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)

_LOGS: Final = """\
<configuration>
  <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
    <target>System.err</target>
    <encoder><pattern>%d %p %c - %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="console"/></root>
</configuration>
"""


class Wire:
    """One connection, for one request at a time."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._decoder = FrameDecoder()
        self._opaque = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(
        self, code: int, header: Header | Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Send a request and return its answer."""
        self._opaque += 1
        self.send(encode_request(code, opaque=self._opaque, header=header, body=body))
        while True:
            for command in self.receive():
                if command.is_response and command.opaque == self._opaque:
                    return command

    def send(self, frame: bytes) -> None:
        """Send a frame that has no answer, or that is one."""
        self._socket.sendall(frame)

    def receive(self) -> list[RemotingCommand]:
        """Wait for the next frames; pass requests of the broker to ``on_request``."""
        data = self._socket.recv(1 << 20)
        assert data, "the broker closed the connection"
        commands = list(self._decoder.receive_data(data))
        for command in commands:
            if not command.is_response:
                self.on_request(command)
        return commands

    def on_request(self, request: RemotingCommand) -> None:
        """Handle a request of the broker; here it is ignored."""

    def records(self, topic: str, queue_id: int, start: int = 0) -> list[Record]:
        """Everything that consumers are given of a queue, from an offset on."""
        records: list[Record] = []
        offset = start
        while True:
            answer = self.ask(
                RequestCode.PULL_MESSAGE,
                headers.PullMessageRequestHeader(
                    consumer_group="store-test",
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=offset,
                    max_msg_nums=32,
                    sys_flag=_SUBSCRIPTION_FLAG,
                    commit_offset=0,
                    suspend_timeout_millis=0,
                    subscription="*",
                    sub_version=0,
                ),
            )
            if answer.code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST):
                return records
            assert answer.code == ResponseCode.SUCCESS, answer
            records += decode_records(answer.body)
            offset = response_header(answer, headers.PullMessageResponseHeader).next_begin_offset

    def by_key(self, topic: str, key: str, *, unique: bool = False) -> list[Record]:
        """Every message with the key, in log order."""
        answer = self.ask(
            RequestCode.QUERY_MESSAGE,
            headers.QueryMessageRequestHeader(
                topic=topic,
                key=key,
                max_num=64,
                begin_timestamp=0,
                end_timestamp=INT64_MAX,
                unique_key_query=unique,
            ),
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        assert answer.code == ResponseCode.SUCCESS, answer
        return sorted(decode_records(answer.body), key=lambda record: record.physical_offset)

    def committed(self, group: str, topic: str, queue_id: int) -> int:
        """The offset from which the group goes on; -1: it has none."""
        answer = self.ask(
            RequestCode.QUERY_CONSUMER_OFFSET,
            headers.QueryConsumerOffsetRequestHeader(
                consumer_group=group, topic=topic, queue_id=queue_id, set_zero_if_not_found=False
            ),
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return -1
        assert answer.code == ResponseCode.SUCCESS, answer
        return response_header(answer, headers.OffsetResponseHeader).offset

    def end(self, topic: str, queue_id: int) -> int:
        """The offset of the queue's next message."""
        header = headers.GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id)
        answer = self.ask(RequestCode.GET_MAX_OFFSET, header)
        assert answer.code == ResponseCode.SUCCESS, answer
        return response_header(answer, headers.OffsetResponseHeader).offset

    def knows(self, topic: str) -> bool:
        """Whether the name server has a route of the topic."""
        header = headers.GetRouteInfoRequestHeader(topic=topic)
        return self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header).code == ResponseCode.SUCCESS


class OfficialBroker:
    """Where a running one is reached."""

    def __init__(self, address: str, namesrv: str) -> None:
        self.address = address
        self.namesrv = namesrv

    def wait_for_route(self, topic: str) -> None:
        """Return when the name server knows the topic: the broker tells it after ten seconds."""
        deadline = time.monotonic() + START_SECONDS
        with Wire(self.namesrv) as wire:
            while not wire.knows(topic):
                assert time.monotonic() < deadline, "the broker did not register"
                time.sleep(_POLL_SECONDS)


def official_jars() -> Path:
    """Return the folder with the broker's jars; skip the test if they cannot be run here."""
    if shutil.which("java") is None:
        pytest.skip("not installed: java; NOT tested with Apache RocketMQ")
    try:
        return fetch_jars()
    except PeerMissingError as missing:
        pytest.skip(f"{missing}; NOT tested with Apache RocketMQ")


@contextlib.contextmanager
def rocketmq_broker(store: Path, home: Path, **settings: object) -> Iterator[OfficialBroker]:
    """The official broker with its name server; ended in order."""
    jars = official_jars()
    home.mkdir(parents=True, exist_ok=True)
    first = free_ports(5)  # the broker takes the one two below its own by itself
    port, replication, namesrv = first + 2, first + 3, first + 4
    broker_settings = {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "broker-a",
        "brokerId": 0,
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1",
        "listenPort": port,
        "haListenPort": replication,
        "namesrvAddr": f"127.0.0.1:{namesrv}",
        "flushDiskType": "SYNC_FLUSH",
        "timerWheelEnable": "false",
        "diskMaxUsedSpaceRatio": 99,
        "storePathRootDir": store,
        "storePathCommitLog": store / "commitlog",
    }
    write_settings(home / "broker.conf", broker_settings | settings)
    write_settings(home / "namesrv.conf", {"bindAddress": "127.0.0.1", "listenPort": namesrv})
    with _java(jars, home, "namesrv", namesrv), _java(jars, home, "broker", port):
        yield OfficialBroker(f"127.0.0.1:{port}", f"127.0.0.1:{namesrv}")


def write_settings(file: Path, settings: Mapping[str, object]) -> None:
    """Write a file of settings as RocketMQ reads it."""
    text = "".join(f"{key}={value}\n" for key, value in settings.items())
    file.write_text(text, encoding="utf-8")


def java_command(jars: Path, home: Path, name: str, conf: Path) -> list[str]:
    """Return the command that runs an official broker or name server with warnings in its log."""
    main = {"broker": "broker.BrokerStartup", "namesrv": "namesrv.NamesrvStartup"}[name]
    (home / "logback.xml").write_text(_LOGS, encoding="utf-8")
    return [
        *("java", *_JVM_OPTIONS, f"-Duser.home={home}", f"-Drocketmq.home.dir={home}"),
        f"-Drmq.logback.configurationFile={home / 'logback.xml'}",
        *("-cp", f"{jars}/*", f"org.apache.rocketmq.{main}", "-c", str(conf)),
    ]


@contextlib.contextmanager
def rocketmq_name_server(home: Path) -> Iterator[str]:
    """The official name server alone; the value is its address."""
    jars = official_jars()
    home.mkdir(parents=True, exist_ok=True)
    port = free_ports(1)
    write_settings(home / "namesrv.conf", {"bindAddress": "127.0.0.1", "listenPort": port})
    with _java(jars, home, "namesrv", port):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def _java(jars: Path, home: Path, name: str, port: int) -> Iterator[None]:
    log = home / f"{name}.log"
    command = java_command(jars, home, name, home / f"{name}.conf")
    with running(command, log=log) as process:
        wait_for_port(process, port, log, timeout=START_SECONDS)
        yield
