"""A second copy of the log: what the master sends, what it believes, and what waits for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final, Self

import pytest

from halfmq.broker.replication.slave_link import BUFFERED_MAX
from halfmq.client import BrokerRefusedError, ClientConfig, ClientError, Message
from halfmq.client.blocking import Admin, Producer
from halfmq.client.testing import BrokerProcess, broker_process, free_port
from halfmq.command.main import main
from halfmq.remoting.codes import ResponseCode
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import Wire

REPORT: Final = Struct(">q")
HEAD: Final = Struct(">qi")


class ScriptedSlave:
    """One connection to the replication port of a master."""

    def __init__(self, port: int, *, received_max: int | None = None) -> None:
        """Connect; ``received_max`` limits what the system keeps until it is read."""
        self._socket = socket.socket()
        if received_max is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_max)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(("127.0.0.1", port))
        self.log = bytearray()
        """What it has copied, from the first byte that it was sent."""
        self.first = -1
        """The offset of that byte."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def report(self, offset: int) -> None:
        """Say where its log ends."""
        self._socket.sendall(REPORT.pack(offset))

    def receive(self) -> tuple[int, bytes]:
        """Return the offset and the bytes of the next piece; none if it is a sign of life."""
        offset, size = HEAD.unpack(self._exactly(HEAD.size))
        return offset, self._exactly(size)

    def copy(self, end: int, *, reports: bool = False) -> None:
        """Copy the log up to an offset, and confirm each piece or none.

        A master gives up a slave that says nothing for 20 seconds.
        """
        while self.first < 0 or self.first + len(self.log) < end:
            offset, piece = self.receive()
            if piece:
                self.first = offset if self.first < 0 else self.first
                assert offset == self.first + len(self.log), "a slave closes on a gap"
                self.log += piece
                if reports:
                    self.report(self.first + len(self.log))

    def is_closed(self) -> bool:
        """Return whether the master closes the connection; pieces that are on their way count."""
        try:
            while self._socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            if not part:
                raise ConnectionResetError("the master closed the connection")
            found += part
        return found


FILE_SIZE = 65_536
WAITS_MS = 86_400_000


@pytest.fixture
def master(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose messages wait for a slave as long as it takes."""
    with broker_process(
        tmp_path,
        slaveAddresses="127.0.0.1",
        haListenPort=free_port(),
        minInSyncReplicas=2,
        slaveTimeout=WAITS_MS,
        mappedFileSizeCommitLog=FILE_SIZE,
        autoCreateTopicEnable=True,
    ) as broker:
        yield broker


def slave_of(broker: BrokerProcess, **options: int) -> ScriptedSlave:
    """Connect to the replication port."""
    with Admin(namesrv=broker.address) as admin:
        (settings,) = admin.settings().values()
    return ScriptedSlave(int(settings["haListenPort"]), **options)


def numbers(broker: BrokerProcess) -> dict[str, int]:
    """Return the metrics of replication and of the store."""
    with Admin(namesrv=broker.address) as admin:
        (found,) = admin.metrics().values()
    wanted = ("halfmq.replication.", "halfmq.store.")
    return {
        key.rpartition(".")[2]: int(value)
        for key, value in found.items()
        if key.startswith(wanted) and value.isdigit()
    }


class Sending:
    """One message that is sent in a thread, since its answer waits."""

    def __init__(self, broker: BrokerProcess, body: bytes = b"x") -> None:
        self.error: ClientError | None = None
        self._thread = threading.Thread(target=self._run, args=(broker, body))
        self._thread.start()

    def _run(self, broker: BrokerProcess, body: bytes) -> None:
        config = ClientConfig(namesrv=broker.address, send_timeout=60.0, send_attempts_max=1)
        try:
            with Producer("writers", config=config) as producer:
                producer.send(Message("orders", body))
        except ClientError as error:
            self.error = error

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def stored(broker: BrokerProcess, count: int = 1) -> int:
    """Wait until the disk has more than before; return where it ends."""
    wait_until(lambda: numbers(broker)["unconfirmed_bytes"] > count - 1, "nothing was stored")
    return numbers(broker)["write_offset"]


def test_a_message_is_acknowledged_and_seen_when_the_slave_has_confirmed_it(
    master: BrokerProcess,
) -> None:
    """On the master's disk it is neither."""
    sending = Sending(master, b"hello")
    with slave_of(master) as slave, Wire(master.address) as wire:
        slave.report(0)
        end = stored(master)
        slave.copy(end)

        assert not sending.is_answered
        assert not any(wire.records("orders", queue) for queue in range(4))

        slave.report(end)
        sending.wait()

        assert [one.body for queue in range(4) for one in wire.records("orders", queue)] == [
            b"hello"
        ]
        log = master.directory / "store" / "commitlog"
        assert slave.log == b"".join(map(Path.read_bytes, sorted(log.iterdir())))[:end]


@pytest.mark.parametrize("first", [1 << 40, 1, -1])
def test_bytes_of_a_stranger_confirm_nothing(master: BrokerProcess, first: int) -> None:
    """RocketMQ counts them as an acknowledgement (apache/rocketmq#3015)."""
    sending = Sending(master)
    end = stored(master)
    with slave_of(master) as stranger:
        stranger.report(first if first != 1 else end + 1)

        assert stranger.is_closed()
    assert not sending.is_answered
    with slave_of(master) as slave:
        slave.report(0)
        slave.copy(end)
        slave.report(end + 1)  # more than it was sent

        assert slave.is_closed()
    assert numbers(master)["unconfirmed_bytes"] == end
    assert not sending.is_answered
    with slave_of(master) as slave:
        slave.report(end)
        sending.wait()


def test_only_named_addresses_copy_the_log(tmp_path: Path) -> None:
    """Nothing is sent to another one, and nothing that it says counts."""
    port = free_port()
    with (
        broker_process(tmp_path, slaveAddresses="10.1.2.3", haListenPort=port),
        ScriptedSlave(port) as slave,
    ):
        assert slave.is_closed()


def test_a_second_slave_does_not_count(master: BrokerProcess) -> None:
    """One connected twice would be two; with two, either might lack what the other confirmed."""
    with slave_of(master) as first, slave_of(master) as second:
        first.report(0)
        wait_until(lambda: numbers(master)["connected"] == 1, "the slave was not accepted")
        second.report(0)

        assert second.is_closed()
        sending = Sending(master)
        end = stored(master)
        first.copy(end)
        first.report(end)
        sending.wait()


def test_connections_without_a_word_are_few(master: BrokerProcess) -> None:
    """A fifth one is closed at once."""
    silent = [slave_of(master) for _ in range(4)]
    with slave_of(master) as fifth:
        assert fifth.is_closed()
    for one in silent:
        one.__exit__()


def test_a_slave_that_does_not_read_takes_little_memory(tmp_path: Path) -> None:
    """The master keeps one buffer for it; the log is read as the slave takes it."""
    port = free_port()
    with broker_process(
        tmp_path, slaveAddresses="127.0.0.1", haListenPort=port, mappedFileSizeCommitLog=8 << 20
    ) as broker:
        with Producer("writers", namesrv=broker.address) as producer:
            for _ in range(24):
                producer.send(Message("orders", os.urandom(1 << 20)))
        before = _resident(broker.pid)
        with ScriptedSlave(port, received_max=4096) as slave:
            slave.report(0)
            wait_until(lambda: numbers(broker)["connected"] == 1, "the slave was not accepted")
            end = numbers(broker)["write_offset"]

            assert _resident(broker.pid) - before < 8 * BUFFERED_MAX
            slave.copy(end, reports=True)  # it gets all of it when it reads


def _resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(one.split()[1]) << 10 for one in fields if one.startswith("RssAnon"))


def test_without_a_slave_messages_are_refused_with_code_14_after_slave_timeout(
    tmp_path: Path,
) -> None:
    """Clients try another broker on it; with a slave that has caught up they are taken again."""
    port = free_port()
    with broker_process(
        tmp_path,
        slaveAddresses="127.0.0.1",
        haListenPort=port,
        minInSyncReplicas=2,
        slaveTimeout=0,
        mappedFileSizeCommitLog=FILE_SIZE,
    ) as broker:
        wait_until(lambda: numbers(broker)["refusing"] == 1, "messages are accepted")
        assert main(["ha", "status", "--namesrv", broker.address]) == 1
        with pytest.raises(BrokerRefusedError, match="no slave is connected") as refused:
            Sending(broker).wait()
        assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
        with ScriptedSlave(port) as slave:
            slave.report(0)
            wait_until(lambda: numbers(broker)["refusing"] == 0, "messages are still refused")
            assert main(["ha", "status", "--namesrv", broker.address]) == 0
            sending = Sending(broker)
            end = stored(broker)
            wait_until(
                lambda: numbers(broker)["refusing"] == 1, "a slave that confirms nothing counts"
            )
            slave.copy(end)
            slave.report(end)
            sending.wait()
            wait_until(lambda: numbers(broker)["refusing"] == 0, "messages are still refused")


def test_an_empty_slave_begins_at_the_first_file_that_is_kept(tmp_path: Path) -> None:
    """One that ends in a file that was deleted must be emptied: it could not follow."""
    port = free_port()
    with broker_process(
        tmp_path, slaveAddresses="127.0.0.1", haListenPort=port, mappedFileSizeCommitLog=FILE_SIZE
    ) as broker:
        with Producer("writers", namesrv=broker.address) as producer:
            for _ in range(60):
                producer.send(Message("orders", os.urandom(4_000)))
        broker.stop()
        files = sorted((tmp_path / "store/commitlog").iterdir())
        files[0].unlink()
        broker.start()
        end = numbers(broker)["write_offset"]
        with ScriptedSlave(port) as stale:
            stale.report(FILE_SIZE - 1)
            assert stale.is_closed()
        with ScriptedSlave(port) as slave:
            slave.report(0)
            slave.copy(end, reports=True)

        assert slave.first == FILE_SIZE
        kept = b"".join(map(Path.read_bytes, files[1:]))
        assert slave.log == kept[: end - FILE_SIZE]


def test_a_file_that_is_gone_ends_the_slave_and_not_the_broker(tmp_path: Path) -> None:
    """Retention may delete what a slow slave has not copied yet."""
    port = free_port()
    with (
        broker_process(
            tmp_path, slaveAddresses="127.0.0.1", haListenPort=port, mappedFileSizeCommitLog=8 << 20
        ) as broker,
        Producer("writers", namesrv=broker.address) as producer,
    ):
        for _ in range(24):
            producer.send(Message("orders", os.urandom(1 << 20)))
        broker.restart()  # it has no file open for reading
        with ScriptedSlave(port, received_max=4096) as slave:
            slave.report(0)
            wait_until(lambda: numbers(broker)["connected"] == 1, "the slave was not accepted")
            sorted((tmp_path / "store/commitlog").iterdir())[1].unlink()
            with pytest.raises(ConnectionError):
                slave.copy(24 << 20, reports=True)
            wait_until(lambda: numbers(broker)["connected"] == 0, "the slave is still there")
        producer.send(Message("orders", b"x"))
        assert "cannot be read" in broker.log
