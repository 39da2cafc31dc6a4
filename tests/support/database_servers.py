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
from typing import Any, Final

import pytest

START_SECONDS: Final = 60.0
"""How long a server may take to start on a busy machine."""


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


@contextlib.contextmanager
def _served(
    account: Account, command: list[str], directory: Path, ready: Callable[[], bool]
) -> Iterator[None]:
    process = account.start(command, directory)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.02)
        yield
    finally:
        process.kill()  # its data are thrown away
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def postgresql() -> Iterator[int]:
    """A PostgreSQL with the superuser ``postgres`` and the database ``postgres``; its port."""
    places = "usr/lib/postgresql/*/bin"
    programs = ("initdb", "postgres", "pg_isready")
    initdb, server, asks = (_program(name, places=places) for name in programs)
    account = Account("postgres")
    directory, port = account.directory(), _free_port()
    data = str(directory / "data")
    account.run([initdb, "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"], directory)
    settings = ["-c", "fsync=off", "-c", "max_connections=200"]
    command = [server, "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", str(directory)]

    def ready() -> bool:
        asked = [asks, "-q", "-h", "127.0.0.1", "-p", str(port)]
        return subprocess.run(asked, check=False).returncode == 0

    with _served(account, [*command, *settings], directory, ready):
        yield port


@contextlib.contextmanager
def mariadb() -> Iterator[int]:
    """A MariaDB with the user ``root``, no password, and the database ``test``; its port."""
    install = _program("mariadb-install-db", "mysql_install_db", places="usr/bin")
    server = _program("mariadbd", places="usr/sbin")
    account = Account("mysql")
    directory, port = account.directory(), _free_port()
    data = f"--datadir={directory / 'data'}"
    normal = "--auth-root-authentication-method=normal"
    account.run([install, "--no-defaults", data, normal], directory)
    command = [server, "--no-defaults", data, f"--port={port}", "--bind-address=127.0.0.1"]
    files = [f"--socket={directory / 'socket'}", f"--pid-file={directory / 'pid'}"]
    settings = ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=16M"]

    def ready() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    with _served(account, [*command, *files, *settings], directory, ready):
        yield port
