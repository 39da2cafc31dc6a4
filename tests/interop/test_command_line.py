"""The command `broker` as an operator meets it: ready line, exit codes, signals, refusals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halfmq.client.testing import broker_process
from tests.support.patience import PATIENCE_S
from tests.support.python import python
from tests.support.small_disk import fill, small_disk

READY = re.compile(
    r"ready listen=127\.0\.0\.1:\d+ namesrv=127\.0\.0\.1:\d+ store=\S+"
    r" flush=(SYNC|ASYNC)_FLUSH recovery_ms=\d+ start_ms=\d+( http=127\.0\.0\.1:\d+)?\n"
)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "halfmq.broker", *map(str, arguments)]


def _settings(root: Path, **settings: object) -> list[str]:
    chosen = {
        "storePathRootDir": root,
        "listenPort": 0,
        "namesrvListenPort": 0,
        "mappedFileSizeCommitLog": 1 << 20,
        **settings,
    }
    return [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a broker that is expected to end by itself."""
    return subprocess.run(
        _command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@contextmanager
def _started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        _command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """It says when it is ready, ends with code 0, and leaves a store marked clean."""
    with _started(*_settings(tmp_path)) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert (tmp_path / "abort").exists()
        process.send_signal(number)

        assert process.wait(PATIENCE_S) == 0

    assert READY.fullmatch(ready)
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "listenPort=ten"], "listenPort=ten: expected a whole number"),
        (["--conf", "/nowhere/broker.conf"], "/nowhere/broker.conf"),
        (["--set", "listenPort"], "expected KEY=VALUE"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_wrong_settings_end_with_code_2(arguments: list[str], expected: str) -> None:
    """Nothing is started, and the message says what was expected."""
    done = _run(*arguments)

    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_broker_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    """Two brokers on one directory would destroy it; the message names the process that has it."""
    with broker_process(tmp_path) as first:
        done = _run(*_settings(tmp_path / "store"))

        assert done.returncode == 3
        assert f"pid {first.pid}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_store_of_other_file_sizes_is_refused(tmp_path: Path) -> None:
    """Opening it with another size would cut it up; the message names the file and both sizes."""
    with broker_process(tmp_path, mappedFileSizeCommitLog=1 << 20):
        pass

    done = _run(*_settings(tmp_path / "store", mappedFileSizeCommitLog=1 << 21))

    assert done.returncode == 4
    assert re.search(r"commitlog/0{20}\b.*1048576", done.stderr)
    assert "Traceback" not in done.stderr


AS_NOBODY = """
import encodings.idna, os, sys
import uvloop
from halfmq.broker.cli import main

os.setgid(65534)
os.setuid(65534)  # all is imported: nobody may not read what is in another user's home
sys.exit(main(sys.argv[1:]))
"""


def _refused_store(done: subprocess.CompletedProcess[str], path: Path, reason: str) -> None:
    assert done.returncode == 4, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert f"event=start_failed exit_code=4 error='{path}: {reason}" in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("closed", "mode"),
    [
        (".", 0o555),
        ("store", 0o555),
        ("store/lock", 0o444),
        ("store/commitlog", 0o000),
        ("store/config", 0o555),
        ("store/config/topics.json", 0o000),
    ],
)
def test_a_store_that_may_not_be_written_ends_with_code_4(
    tmp_path: Path, closed: str, mode: int
) -> None:
    """One line that names the path and the reason, and no traceback."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can start a broker as somebody else")
    with tempfile.TemporaryDirectory(prefix="halfmq-") as place:  # tmp_path is closed to others
        root = Path(place) / "store"
        if closed != ".":
            with broker_process(tmp_path, storePathRootDir=root):
                pass
        for path in (Path(place), *Path(place).rglob("*")):
            os.chown(path, 65534, 65534)
        target = Path(place) / closed
        target.chmod(mode)
        done = python("-c", AS_NOBODY, *_settings(root, mappedFileSizeCommitLog=64 << 20), cwd="/")

    named = root if closed in {".", "store"} else target
    if closed == "store":
        named = root / "abort"
    _refused_store(done, named, "Permission denied")


def test_a_file_in_place_of_the_store_ends_with_code_4(tmp_path: Path) -> None:
    """A path that is mistyped by a level, say."""
    (tmp_path / "file").touch()

    _refused_store(_run(*_settings(tmp_path / "file")), tmp_path / "file", "is not a directory")
    below = _run(*_settings(tmp_path / "file" / "store"))
    assert below.returncode == 4
    assert len(below.stderr.splitlines()) == 1


def test_a_read_only_file_system_ends_with_code_4(tmp_path: Path) -> None:
    """As a container has it whose volume was forgotten."""
    with small_disk(tmp_path, "tmpfs", 1 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        done = _run(*_settings(disk / "store"))

    _refused_store(done, disk / "store", "Read-only file system")


def test_a_disk_that_is_full_at_the_start_ends_with_code_4(tmp_path: Path) -> None:
    """One line says for what there is no space, and how much helps."""
    with small_disk(tmp_path, "tmpfs", 256 << 10) as disk:
        fill(disk / "ballast")
        done = _run(*_settings(disk / "store"))

    assert done.returncode == 4, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " ERROR " in line]
    assert "No space left on device; free 64 MiB on that disk, then start again" in line


def test_a_taken_address_ends_with_code_5(tmp_path: Path) -> None:
    """The message names the address and the setting that mends it; the directory is free again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _run(*_settings(tmp_path, namesrvListenPort=port))

    assert done.returncode == 5
    assert f"127.0.0.1:{port}" in done.stderr
    assert "namesrvListenPort" in done.stderr
    with _started(*_settings(tmp_path)) as process:
        assert process.stdout is not None
        assert READY.fullmatch(process.stdout.readline())


def test_an_unknown_key_is_a_warning_with_the_nearest_one(tmp_path: Path) -> None:
    """The broker starts, and the log says which key was probably meant."""
    with broker_process(tmp_path, transactionTimeout="7000") as broker:
        assert "did you mean transactionTimeOut?" in broker.log


def test_print_config_prints_and_ends(tmp_path: Path) -> None:
    """Every key with value, default and source; no store is touched."""
    done = _run("--print-config", *_settings(tmp_path / "never"))

    assert done.returncode == 0
    assert "listenPort=0 default=10911 source=--set" in done.stdout
    assert "brokerName=broker-a default=broker-a source=default" in done.stdout
    assert not (tmp_path / "never").exists()


def test_print_config_warns_about_unknown_keys() -> None:
    """A typo shows where people look first; standard output stays a list of keys."""
    done = _run("--print-config", "--set", "transactionTimeout=7000")

    assert done.returncode == 0
    assert "did you mean transactionTimeOut?" in done.stderr
    assert "transactionTimeout" not in done.stdout


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_without_arguments_it_runs_on_defaults(tmp_path: Path) -> None:
    """Data go to the home directory, and only this machine is served."""
    if not all(_is_free(port) for port in (9_876, 10_909, 10_911)):
        pytest.skip(
            "a default port (9876, 10909, 10911) is in use here; the defaults are NOT tested"
        )
    with _started(HOME=str(tmp_path)) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        for port in (9_876, 10_909, 10_911):
            socket.create_connection(("127.0.0.1", port)).close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0

    assert ready.startswith("ready listen=127.0.0.1:10911 namesrv=127.0.0.1:9876 store=")
    assert f"store={tmp_path}/.halfmq/store flush=SYNC_FLUSH" in ready


def test_async_flush_is_said_aloud(tmp_path: Path) -> None:
    """What a power cut may cost is told at every start."""
    with broker_process(tmp_path, flushDiskType="ASYNC_FLUSH") as broker:
        assert "event=async_flush" in broker.log
        assert "loses acknowledged" in broker.log


def test_every_line_of_the_log_is_one_event(tmp_path: Path) -> None:
    """Time, level, logger, then `event=…` and `key=value`: made for grep and for machines."""
    with broker_process(tmp_path) as broker:
        pass

    lines = broker.log.splitlines()
    assert lines
    for line in lines:
        assert re.match(r"\S+Z [A-Z]+ halfmq\.\S+ event=\w+", line), line
