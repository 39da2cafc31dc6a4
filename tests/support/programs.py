"""Programs that run while a test does: an application, its workers, a web server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.support.patience import PATIENCE_S, wait_until


class Program:
    """A running program, with its output in a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self) -> int:
        """End it by SIGTERM; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def running(
    command: Sequence[object], folder: Path, environment: Mapping[str, str], output: Path
) -> Iterator[Program]:
    """Run a program in a folder; what is left of it is killed, with its children."""
    with output.open("ab") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Program(process, output)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_web(url: str, program: Program) -> None:
    """Return when a web server answers."""

    def answers() -> bool:
        assert program.process.poll() is None, program.output
        try:
            httpx.get(url, timeout=PATIENCE_S)
        except httpx.TransportError:
            return False
        return True

    wait_until(answers, f"{url} answers: {program.output}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
