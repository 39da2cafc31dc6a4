"""The Go client of Apache RocketMQ, unmodified, driven by the program in `tests/support/go`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from benchmarks.build import being_made
from tests.support.cache import cache_directory, forget_others

SOURCES: Final = Path(__file__).parent / "go"
_BUILD_SECONDS: Final = 900.0  # with modules to fetch and everything to compile, on a busy machine
_RUN_SECONDS: Final = 120.0  # the program itself waits up to a minute for each thing

Line = dict[str, Any]
"""What a scenario said: an event and its fields."""


class GoMissingError(Exception):
    """The client cannot be run here; the message says what is missing."""


def go_client() -> Path:
    """Return the program, built when it is not there yet.

    Raises:
        GoMissingError: Go is not installed, or the modules cannot be fetched.
    """
    sources = [SOURCES / "go.mod", SOURCES / "main.go"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    home = cache_directory() / f"go-client-{digest[:16]}"
    if not home.is_dir():
        if shutil.which("go") is None:
            raise GoMissingError("not installed: go")
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
        raise GoMissingError(f"go could not build the client: {error.stderr}") from error


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
