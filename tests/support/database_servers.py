"""A PostgreSQL and a MariaDB for tests: on 127.0.0.1, with temporary data, gone in the end.

A test that needs one is skipped where its program is not installed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

START_SECONDS: Final = 60.0
"""How long a server may take to start on a busy machine."""


Ready: TypeAlias = Callable[[int], bool]
"""Whether a server answers on this port."""


class Account:
    """Who runs a server: a server refuses to run as root, so root lends its own account to it."""

    def __init__(self, name: str) -> None:
        self._root = os.geteuid() == 0
        if not self._root:
            return
        try:
            self._entry = pwd.getpwnam(name)
        except KeyError:
            pytest.skip(f"root needs the account {name} to run the server")

    def directory(self) -> Path:
        """A new directory of the account's, with a path short enough for a socket."""
        path = Path(tempfile.mkdtemp(prefix="halfmq-"))
        if self._root:
            os.chown(path, self._entry.pw_uid, self._entry.pw_gid)
        return path

    def start(self, command: list[str], directory: Path) -> subprocess.Popen[bytes]:
        """Start a program in a directory, with its output in ``log`` there."""
        user: dict[str, Any] = (
            {"user": self._entry.pw_uid, "group": self._entry.pw_gid, "extra_groups": []}
            if self._root
            else {}
        )
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, **user)

    def run(self, command: list[str], directory: Path) -> None:
        """Run a program to its end."""
        assert self.start(command, directory).wait() == 0, (directory / "log").read_text()


def _program(*names: str, places: str) -> str:
    """The path of a program, looked for in ``places`` too; skips the test if there is none."""
    for name in names:
        found = shutil.which(name) or next(Path("/").glob(f"{places}/{name}"), None)
        if found is not None:
            return str(found)
    pytest.skip(f"{names[0]} is not installed")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A running server, which a test may kill and start again on the same data and port."""

    def __init__(
        self, account: Account, command: list[str], directory: Path, port: int, ready: Ready
    ) -> None:
        self.port = port
        self._account, self._command, self._directory = account, command, directory
        self._ready = ready

    def start(self) -> None:
        """Start it, and return when it answers.

        After a kill PostgreSQL refuses to start while processes of the killed server still end.
        """
        deadline = time.monotonic() + START_SECONDS
        self._process = self._account.start(self._command, self._directory)
        while not self._ready(self.port):
            assert time.monotonic() < deadline, (self._directory / "log").read_text()
            if self._process.poll() is not None:
                self._process = self._account.start(self._command, self._directory)
            time.sleep(0.02)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _served(server: Server, directory: Path) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()  # its data are thrown away
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def postgresql_server(*options: str) -> Iterator[Server]:
    """A PostgreSQL with the superuser ``postgres`` and the database ``postgres``."""
    places = "usr/lib/postgresql/*/bin"
    programs = ("initdb", "postgres", "pg_isready")
    initdb, program, asks = (_program(name, places=places) for name in programs)
    account = Account("postgres")
    directory, port = account.directory(), _free_port()
    data = str(directory / "data")
    account.run([initdb, "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"], directory)
    # What a process has written survives its kill, so nothing is flushed.
    settings = ["-c", "fsync=off", "-c", "max_connections=200"]
    settings += [part for option in options for part in ("-c", option)]
    command = [program, "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", str(directory)]

    def ready(port: int) -> bool:
        asked = [asks, "-q", "-h", "127.0.0.1", "-p", str(port)]
        return subprocess.run(asked, check=False).returncode == 0

    server = Server(account, [*command, *settings], directory, port, ready)
    with _served(server, directory):
        yield server


@contextlib.contextmanager
def mariadb_server(*options: str) -> Iterator[Server]:
    """A MariaDB with the user ``root``, no password, and the database ``test``."""
    install = _program("mariadb-install-db", "mysql_install_db", places="usr/bin")
    program = _program("mariadbd", places="usr/sbin")
    account = Account("mysql")
    directory, port = account.directory(), _free_port()
    data = f"--datadir={directory / 'data'}"
    normal = "--auth-root-authentication-method=normal"
    account.run([install, "--no-defaults", data, normal], directory)
    command = [program, "--no-defaults", data, f"--port={port}", "--bind-address=127.0.0.1"]
    files = [f"--socket={directory / 'socket'}", f"--pid-file={directory / 'pid'}"]
    # 2: a commit is written, and not flushed: it survives a kill of the server.
    settings = ["--innodb-flush-log-at-trx-commit=2", "--innodb-buffer-pool-size=16M"]
    settings += [f"--{option}" for option in options]

    def ready(port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    server = Server(account, [*command, *files, *settings], directory, port, ready)
    with _served(server, directory):
        yield server


@contextlib.contextmanager
def postgresql() -> Iterator[int]:
    """The port of a `postgresql_server`."""
    with postgresql_server() as server:
        yield server.port


@contextlib.contextmanager
def mariadb() -> Iterator[int]:
    """The port of a `mariadb_server`."""
    with mariadb_server() as server:
        yield server.port
