"""Start a real broker for tests, on a free port and in its own directory.

::

    with broker_process() as broker:
        with Producer("tests", namesrv=broker.address) as producer:
            producer.send(Message("orders", b"hello"))

The broker runs in a separate process, as in production, so a test can also kill and restart it.
It must be installed together with the client (``python -m halfmq.broker`` must work).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

READY_SECONDS: Final = 60.0
"""How long a start may take, recovery of a large store included."""
STOP_SECONDS: Final = 30.0
LOG_FILE_SIZE: Final = 64 << 20
"""Bytes of a log file, which are allocated at once: a test does not need a whole gibibyte."""
PORTS: Final = range(20_000, 32_000)
"""Below the ephemeral ports of outgoing connections (Linux: from 32 768). Any process could take
one of those between a stop and the next start, even a client that connects to the stopped
broker."""
_START_ATTEMPTS: Final = 10
_ADDRESS_TAKEN: Final = 5
"""The broker's exit code if the port is in use."""
_LOG_TAIL: Final = 4000
"""Characters of the broker's log shown if it does not start."""


class BrokerStartError(RuntimeError):
    """The broker did not start; the message ends with the end of its log."""

    def __init__(self, exit_code: int, log: str) -> None:
        super().__init__(exit_code, log)
        self.exit_code, self.log = exit_code, log

    def __str__(self) -> str:
        tail = self.log[-_LOG_TAIL:]
        return f"the broker did not start (exit code {self.exit_code}); its log ends with:\n{tail}"


class BrokerProcess:
    """A broker in a separate process, created by :func:`broker_process`."""

    def __init__(
        self, directory: Path, settings: Mapping[str, str], conf: Path | None = None
    ) -> None:
        self.directory = directory
        """The broker's directory, with ``store`` and ``broker.log``."""
        self.ready: dict[str, str] = {}
        """The fields of the ready line: listen, namesrv, store, flush, recovery_ms, start_ms."""
        self._settings = dict(settings)
        self._conf = conf
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``host:port`` for a client's ``namesrv``; the same after a restart."""
        return self.ready["namesrv"]

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The broker's log, of all starts."""
        path = self.directory / "broker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, **settings: object) -> None:
        """Start the broker and wait until it answers; ``settings`` also apply to later starts.

        Raises:
            BrokerStartError: It ended, or was not ready within a minute.
        """
        assert not self.running, "the broker runs already"
        self._settings.update(_texts(settings))
        for attempt in itertools.count(1):
            try:
                self._start_on(self._settings.get("listenPort") or self._port())
            except BrokerStartError as error:
                if error.exit_code != _ADDRESS_TAKEN or attempt == _START_ATTEMPTS:
                    raise
                time.sleep(0.1 * attempt)
            else:
                return

    def _port(self) -> str:
        """Return the port of the previous start, so that clients can reconnect; or a free one."""
        return self.ready["listen"].rpartition(":")[2] if self.ready else str(free_port())

    def _start_on(self, port: str) -> None:
        command = [sys.executable, "-m", "halfmq.broker"]
        if self._conf is not None:
            command += ["--conf", str(self._conf)]
        for key, value in (self._settings | {"listenPort": port}).items():
            command += ["--set", f"{key}={value}"]
        with (self.directory / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module, no shell
                command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
            )
        self.ready = self._wait_until_ready(self._process)

    def stop(self) -> int:
        """Shut the broker down (by SIGTERM, except on Windows) and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._ended()

    def kill(self) -> None:
        """Kill the broker, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._ended()

    def restart(self, **settings: object) -> None:
        """Stop the broker if it runs, and start it with the same directory and ports."""
        if self.running:
            self.stop()
        self.start(**settings)

    def _ended(self) -> int:
        assert self._process is not None
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._reader is not None:
            self._reader.join()
        return code

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> dict[str, str]:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        # A thread, because Windows cannot wait for a pipe with a time limit.
        self._reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        self._reader.start()
        with contextlib.suppress(queue.Empty):
            while (line := lines.get(timeout=READY_SECONDS)) is not None:
                word, *fields = line.split()
                if word == "ready":
                    return dict(field.partition("=")[::2] for field in fields)
        process.kill()
        code = self._ended()
        raise BrokerStartError(code, self.log)


@contextlib.contextmanager
def broker_process(
    directory: str | os.PathLike[str] | None = None,
    *,
    conf: object = None,
    **settings: object,
) -> Iterator[BrokerProcess]:
    """Run a broker for the duration of the block.

    Args:
        directory: For the broker's files, such as pytest's ``tmp_path``; None: a temporary
            directory that is removed at the end.
        conf: The path of a file of settings, which operators may change while the broker runs.
        settings: Keys of ``broker.conf``, such as ``transactionTimeOut=1000``; they win over it.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="halfmq-", ignore_cleanup_errors=True)
            )
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        defaults = {
            "namesrvListenPort": "0",
            "httpListenPort": "-1",
            "storePathRootDir": str(path / "store"),
            "mappedFileSizeCommitLog": str(LOG_FILE_SIZE),
        }
        file = None if conf is None else Path(str(conf))
        broker = BrokerProcess(path, defaults | _texts(settings), file)
        broker.start()
        try:
            yield broker
        finally:
            if broker.running:
                broker.stop()


def free_port() -> int:
    """Return a port that is free, together with the one two below it.

    A broker serves old clients two ports below its own.
    """
    ports = list(PORTS)
    random.SystemRandom().shuffle(ports)
    return next(port for port in ports if _is_free(port) and _is_free(port - 2))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _texts(settings: Mapping[str, object]) -> dict[str, str]:
    """Format values as in ``broker.conf``."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in settings.items()
    }


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Forward lines until the stream ends; keep reading, so that the broker's pipe never fills."""
    with stream:
        for line in stream:
            if line.strip():
                lines.put(line)
    lines.put(None)
