"""Start servers on chosen cores, wait until they are ready, and end them by their process id."""

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

_STOP_TIMEOUT: Final = 60.0  # seconds for an ordered stop: a store has to be flushed
_POLL: Final = 0.05  # seconds between two looks at a port
_LOG_TAIL: Final = 2000  # characters of a server's log that an error shows
# Not among those from which systems take ports for outgoing connections (Linux from 32,768 on): a
# connection of another program would take one before the server listens, seconds later for a JVM.
_PORTS: Final = range(12_000, 20_000)


class ServerError(Exception):
    """A server did not start, died, or did not end in order."""


@contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Processes started inside run on these cores only; ``None`` leaves them free.

    A child inherits the affinity of the thread that starts it, so no outside tool is needed.
    """
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A server process with its standard output in a pipe and its standard error in ``log``."""
    with log.open("w", encoding="utf-8") as errors, on_cores(cores):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def halfmq_broker(
    settings: Mapping[str, object],
    log: Path,
    *,
    timeout: float,
    cores: Sequence[int] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A broker with these settings, when it is ready, and the fields of its ready line.

    Raises:
        ServerError: It was not ready within ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "halfmq.broker"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with running(command, log=log, cores=cores) as process:
        yield process, ready_fields(process, log, timeout=timeout)


def stop(process: subprocess.Popen[str]) -> None:
    """End the process in order, and by force when that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)  # a stopped one would not see the next signal
        process.terminate()
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def ready_fields(process: subprocess.Popen[str], log: Path, *, timeout: float) -> dict[str, str]:
    """Read the server's ready line: ``ready name=value name=value``.

    Raises:
        ServerError: It ended, said something else, or said nothing within ``timeout`` seconds.
    """
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("ready "):
        raise ServerError(f"no ready line within {timeout:.0f} s but {line!r}\n{log_tail(log)}")
    return dict(field.split("=", 1) for field in line.split()[1:])


def wait_for_port(process: subprocess.Popen[str], port: int, log: Path, *, timeout: float) -> None:
    """Return when something accepts connections on the port.

    Raises:
        ServerError: The process ended, or ``timeout`` seconds went by.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"ended with status {process.returncode}\n{log_tail(log)}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(_POLL)
    raise ServerError(f"nobody listens on port {port} after {timeout:.0f} s\n{log_tail(log)}")


def end_in_order(number: int, _frame: FrameType | None) -> NoReturn:
    """A signal handler: leave every ``with`` block, so that servers and scratch files are gone."""
    sys.exit(128 + number)


def log_tail(log: Path) -> str:
    """The end of a log, for an error message."""
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody uses at this moment."""
    while True:
        first = random.choice(_PORTS)
        if all(_is_free(first + i) for i in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
