"""An unmodified Apache RocketMQ 5.3.3 broker as the slave of a halfmq broker, in a process."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

from benchmarks.processes import free_ports, stop, wait_for_port
from tests.support.rocketmq_broker import START_SECONDS, java_command, official_jars, write_settings


class OfficialSlave:
    """The slave, which keeps its directory and its port over its starts."""

    def __init__(self, home: Path, namesrv: str, **settings: object) -> None:
        """Nothing runs yet; ``settings`` are those of its ``broker.conf``."""
        self.store = home / "store"
        self._home, self._jars = home, official_jars()
        self.port = free_ports(4) + 2
        home.mkdir(parents=True, exist_ok=True)
        self._settings = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerId": 1,
            "brokerRole": "SLAVE",
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "namesrvAddr": namesrv,
            "registerNameServerPeriod": 10_000,  # the least; it learns the master's address by it
            "flushDiskType": "SYNC_FLUSH",
            "timerWheelEnable": "false",
            "diskMaxUsedSpaceRatio": 99,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
            **settings,
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def log_file(self) -> Path:
        """What it has logged since its last start."""
        return self._home / "slave.log"

    def start(self) -> None:
        """Start it; return when it answers requests."""
        write_settings(self._home / "slave.conf", self._settings)
        command = java_command(self._jars, self._home, "broker", self._home / "slave.conf")
        with self.log_file.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        wait_for_port(self._process, self.port, self.log_file, timeout=START_SECONDS)

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, for example to freeze it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order, if it runs."""
        if self._process is not None:
            stop(self._process)

    def wipe(self) -> None:
        """Remove all that it has stored; it must not run."""
        shutil.rmtree(self.store)

    def log_end(self) -> int:
        """Return the physical offset at which its last file with data ends, or begins."""
        files = sorted((self.store / "commitlog").iterdir())
        return int(files[-1].name) if files else 0
