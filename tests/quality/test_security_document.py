"""The three setups of docs/security.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

# The document's ports are fixed; the test needs free ones, as TestBroker does.
from halfmq.client.testing import free_port
from tests.support.patience import PATIENCE_S

DOCUMENT: Final = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
START: Final = "broker --conf broker.conf\n"
TITLES: Final = (
    "Plain ACL in five minutes",
    "Users and policies in five minutes",
    "TLS in five minutes",
)


def _blocks(title: str) -> list[tuple[str, str]]:
    """Return language and text of each block under a title."""
    section = DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```(bash|python)\n(.*?)```", section, re.DOTALL)


def _install(folder: Path, port: int) -> Mapping[str, str]:
    """Return an environment with the two commands; only ports and the store are the test's."""
    places = {
        "broker": f'-m halfmq.broker "$@" --set listenPort={port} --set namesrvListenPort=0'
        f" --set storePathRootDir={folder / 'store'} --set mappedFileSizeCommitLog=1048576",
        "halfmq": '-m halfmq.command "$@"',
    }
    commands = folder / "bin"
    commands.mkdir()
    for name, arguments in places.items():
        (commands / name).write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "NAMESRV_ADDR": f"127.0.0.1:{port}",
    }


@contextmanager
def _broker(folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        START.split(),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), process.communicate()
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def _run(language: str, text: str, folder: Path, environment: Mapping[str, str]) -> str:
    shell = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        shell if language == "bash" else [sys.executable, "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("title", TITLES)
def test_a_setup_runs_as_it_stands(title: str, tmp_path: Path) -> None:
    """Pasted block by block: files, the broker, then a client and the command."""
    environment = _install(tmp_path, free_port())
    blocks = _blocks(title)
    at = blocks.index(("bash", START))
    for language, text in blocks[:at]:
        _run(language, text, tmp_path, environment)
    with _broker(tmp_path, environment):
        told = [_run(*block, tmp_path, environment) for block in blocks[at + 1 :]]

    printed = "".join(told)
    assert "halfmq.connections" in printed or "User:shop-service" in printed
    if title == TITLES[2]:
        assert "SEND_OK" in printed
    else:
        assert re.search(r"shop-service may not Pub Topic:payments\nb'o-1'\n", printed)


def test_the_readme_and_the_table_are_named() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")

    assert "(docs/security.md" in readme
    assert "(access-table.md)" in DOCUMENT
