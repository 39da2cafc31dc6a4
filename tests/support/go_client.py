"""The Go client of Apache RocketMQ, unmodified, driven by the program in `tests/support/go`."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pytest

from benchmarks.build import being_made
from tests.support.cache import cache_directory, forget_others
from tests.support.patience import PATIENCE_S

SOURCES: Final = Path(__file__).parent / "go"
_BUILD_SECONDS: Final = 900.0  # with modules to fetch and everything to compile, on a busy machine
_RUN_SECONDS: Final = 120.0  # the program itself waits up to a minute for each thing

Line = dict[str, Any]
"""What a scenario said: an event and its fields."""


def go_client() -> Path:
    """Return the program, built when it is not there yet.

    The test is skipped if Go is not installed, or the modules cannot be fetched.
    """
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    home = cache_directory() / f"go-client-{digest[:16]}"
    if not home.is_dir():
        if shutil.which("go") is None:
            pytest.skip("not installed: go; the Go client is NOT tested")
        with being_made(home) as unfinished:
            for source in sources:
                shutil.copy(source, unfinished)
            _build(unfinished)
        forget_others(home, "go-client-*")
    return home / "goclient"


def _build(directory: Path) -> None:
    # It fetches what go.mod asks for, and checks it against the public checksums.
    command = ["go", "build", "-mod=mod", "-o", "goclient", "."]
    try:
        subprocess.run(
            command,
            cwd=directory,
            check=True,
            timeout=_BUILD_SECONDS,
            capture_output=True,
            text=True,
            env={**os.environ, "GOFLAGS": "-buildvcs=false"},
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"go could not build the client, which is NOT tested: {error.stderr}")


def run_go(
    namesrv: str, scenario: str, home: Path, *, status: int = 0, keys: tuple[str, str] = ("", "")
) -> list[Line]:
    """Run a scenario, which must end with this exit status; return what it said.

    Its requests are signed with an access key and a secret, if there are any.
    """
    done = subprocess.run(
        [go_client(), namesrv, scenario],
        env={
            **os.environ,
            "HOME": str(home),
            "HALFMQ_ACCESS_KEY": keys[0],
            "HALFMQ_SECRET_KEY": keys[1],
        },
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class GoProcess:
    """A scenario that goes on until it is killed; made by `going`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._waiting: queue.SimpleQueue[Line] = queue.SimpleQueue()
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def next(self) -> Line:
        """Wait for the next line."""
        return self._waiting.get(timeout=PATIENCE_S)

    def heard(self) -> list[Line]:
        """Return what it has said since it was last listened to."""
        return [self.next() for _ in range(self._waiting.qsize())]

    def until(self, event: str, **fields: object) -> list[Line]:
        """Wait until it says this; return that line after those before it."""
        lines = [self.next()]
        while lines[-1]["event"] != event or not fields.items() <= lines[-1].items():
            lines.append(self.next())
        return lines

    def kill(self) -> None:
        """End it without a farewell of its clients."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                if line.startswith("{"):
                    self._waiting.put(json.loads(line))


@contextmanager
def going(namesrv: str, home: Path, scenario: str, *arguments: str) -> Iterator[GoProcess]:
    """A scenario that goes on, for the length of the block."""
    process = subprocess.Popen(
        [go_client(), namesrv, scenario, *arguments],
        env={**os.environ, "HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    running = GoProcess(process)
    try:
        yield running
    finally:
        running.kill()
