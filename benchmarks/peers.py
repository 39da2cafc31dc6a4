"""The servers that are measured, each behind the same two steps.

A session is what one flush mode needs once (a JVM and its warm-up); a target is the server ready
for one run. The echo server and our broker start afresh for every run, with an empty store; a JVM
broker stays, with a new topic per run, and is halted (SIGSTOP) while another server is measured.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from .build import build
from .generator import Target
from .processes import ready_fields, running
from .scenarios import FlushDiskType

_START_TIMEOUT: Final = 30.0  # seconds to an empty store's ready line

ECHO: Final = "echo"
HALFMQ: Final = "halfmq"
ROCKETMQ: Final = "rocketmq"


class ServerRun(Protocol):
    """One server in one flush mode."""

    def target(self) -> AbstractContextManager[Target]:
        """The server, ready for one run and left alone by all others."""


class Peer(Protocol):
    """A kind of server."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict[str, str]:
        """What differs from its defaults, for the report."""

    def session(self, mode: FlushDiskType, directory: Path) -> AbstractContextManager[ServerRun]:
        """Keep files below ``directory`` and remove them afterwards."""


@contextmanager
def scratch(directory: Path, name: str) -> Iterator[Path]:
    """An empty directory that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPeer:
    """The limit F: the same frames, answered by a server that does nothing else."""

    cores: Sequence[int] | None
    name: str = ECHO

    @property
    def settings(self) -> dict[str, str]:
        return {"cores": _cores_text(self.cores)}

    @contextmanager
    def session(self, mode: FlushDiskType, directory: Path) -> Iterator[ServerRun]:
        yield _EchoSession(directory, self.cores)


@dataclass(frozen=True, slots=True)
class _EchoSession:
    directory: Path
    cores: Sequence[int] | None

    @contextmanager
    def target(self) -> Iterator[Target]:
        with scratch(self.directory, ECHO) as home:
            log = home / "log"
            with running([str(build("echo"))], log=log, cores=self.cores) as process:
                port = int(ready_fields(process, log, timeout=_START_TIMEOUT)["port"])
                yield Target(port=port, namesrv_port=None, pid=process.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfmqPeer:
    """Our broker, as this Python runs it."""

    cores: Sequence[int] | None
    overrides: Sequence[str] = ()  # KEY=VALUE, as for its --set
    async_overrides: Sequence[str] = ()  # more of them under ASYNC_FLUSH
    python: str = sys.executable
    name: str = HALFMQ

    @property
    def settings(self) -> dict[str, str]:
        overrides = (*self.overrides, *self.async_overrides)
        pairs = dict(override.split("=", 1) for override in overrides)
        return {"cores": _cores_text(self.cores), **pairs}

    @contextmanager
    def session(self, mode: FlushDiskType, directory: Path) -> Iterator[ServerRun]:
        yield _HalfmqSession(self, mode, directory)


@dataclass(frozen=True, slots=True)
class _HalfmqSession:
    peer: HalfmqPeer
    mode: FlushDiskType
    directory: Path
    _fixed: Sequence[str] = field(default=("listenPort=0", "namesrvListenPort=0"))

    @contextmanager
    def target(self) -> Iterator[Target]:
        with scratch(self.directory, HALFMQ) as home:
            log = home / "log"
            with running(self._command(home), log=log, cores=self.peer.cores) as process:
                fields = ready_fields(process, log, timeout=_START_TIMEOUT)
                port = int(fields["listen"].rpartition(":")[2])
                yield Target(port=port, namesrv_port=port, pid=process.pid)

    def _command(self, home: Path) -> list[str]:
        settings = [
            *self._fixed,
            f"storePathRootDir={home / 'store'}",
            f"flushDiskType={self.mode}",
            *self.peer.overrides,
            *(self.peer.async_overrides if self.mode is FlushDiskType.ASYNC else ()),
        ]
        command = [self.peer.python, "-m", "halfmq.broker"]
        return command + [part for setting in settings for part in ("--set", setting)]


def _cores_text(cores: Sequence[int] | None) -> str:
    return "all" if cores is None else ",".join(map(str, cores))
